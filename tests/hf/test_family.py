"""A family of models that nobody prepared for: one function reads its configuration, and a
whole model of it decodes on codes."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from turboquant_nb.hf import TurboQuantCache, turboquant_attention
from turboquant_nb.quant.layers import LayerInfo, register_family
from turboquant_nb.theory.rope import apply_rope
from tests.helpers import exact_recipe, given_frame, refuses


class Toy(torch.nn.Module):
    "Attention alone; every other layer slides, with heads of half the size."

    def __init__(self, config):
        super().__init__()
        self.config, self.layers, self.is_causal = config, read(config), True
        linear = lambda *sizes: torch.nn.ModuleList(torch.nn.Linear(*x) for x in zip(*sizes))
        inner, size = [8 * x.key_size for x in self.layers], [24] * len(self.layers)
        self.qkv, self.out = linear(size, inner), linear([n // 2 for n in inner], size)
        self.embed, self.head = torch.nn.Embedding(32, 24), torch.nn.Linear(24, 32)

    def forward(self, ids, cache):
        x, first = self.embed(ids), cache.get_seq_length()
        for info, qkv, out in zip(self.layers, self.qkv, self.out):
            heads = (
                qkv(x).unflatten(-1, (-1, info.key_size)).transpose(1, 2).split([4, 2, 2], 1)
            )
            rope = dict(inv_freq=torch.tensor(info.inv_freq))
            at = torch.arange(first, first + ids.shape[1])
            q, k = (3 * apply_rope(y, at, **rope) for y in heads[:2])
            states = cache.update(k, heads[2], info.index)
            x = x + out(turboquant_attention(self, q, *states, None)[0].flatten(2))
        return self.head(x)


def read(config) -> list:
    "All that the package has to learn of the family."
    size = [32 if i % 2 == 0 else 16 for i in range(config.depth)]
    rope = [tuple(100.0 ** (-2 * j / d) for j in range(d // 2)) for d in size]
    window = [None if i % 2 == 0 else config.look_back for i in range(config.depth)]
    heads = config.n_q, config.n_kv
    return [
        LayerInfo(i, "toy", True, *heads, d, d, sliding_window=window[i], inv_freq=rope[i])
        for i, d in enumerate(size)
    ]


@torch.no_grad()
def test_a_family_of_ones_own():
    register_family("toy", read)
    torch.manual_seed(0)
    config = transformers.PreTrainedConfig(depth=3, n_q=4, n_kv=2, look_back=8)
    config.model_type, config._attn_implementation = "toy", "turboquant"
    model, ids = Toy(config).eval(), torch.randint(32, (1, 44))
    with refuses("toy could not read token ids .* frame= must give"):
        TurboQuantCache(model, "k3v3")  # it is none of transformers
    new = lambda recipe: TurboQuantCache(model, recipe, frame=given_frame(model))
    exact, coded = new(exact_recipe()), new("k3v3")
    whole = model(ids, new(exact_recipe()))  # a prompt is exact
    steps = [model(x, exact) for x in (ids[:, :20], *ids[:, 20:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=0)
    token = model(ids, coded)[:, -1:].argmax(-1)
    for _ in range(20):
        token = model(token, coded).argmax(-1)
    held = [(x.store.key.q.d, x.sliding_window, x.held) for x in coded.coded_layers]
    assert held == [(32, None, 64), (16, 8, 64), (32, None, 64)]
    assert {x.recipe.key.center for x in coded.coded_layers} == {"pre_rope"}
    other = copy.deepcopy(config)
    other.look_back = 9
    with refuses(r"sliding windows \[None, 8, None\], not \[None, 9, "):
        coded.check_model(other)
