"""Architectures that nobody listed. What a layer does with what a cache returns decides whether
it reads codes, gets them decoded, or is refused; its name decides nothing."""

import warnings

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.helpers import exact_recipe, refuses
from turboquant_nb.hf import TurboQuantCache

pytestmark = [pytest.mark.usefixtures("one_thread")]

INNER = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)


class Config(PreTrainedConfig):
    model_type = "invented"
    vocab_size: int = 40
    num_hidden_layers: int = 2
    layer_types: list | None = None


def eager(module, query, key, value, attention_mask, scaling, **kwargs):
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class Hands(nn.Module):
    "Hands on what the cache returns."

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.num_key_value_groups = 2
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x, attention_mask=None, past_key_values=None):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split([4, 2, 2], 1)
        k, v = past_key_values.update(k, v, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager
        )
        out, _ = attention_interface(self, q, k, v, attention_mask, scaling=0.5)
        return self.out(out.flatten(2))


class LlamaAttention(Hands):
    "The name of one that is served, but keys are scaled after they were held."

    def forward(self, x, attention_mask=None, past_key_values=None):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split([4, 2, 2], 1)
        k, v = past_key_values.update(k, v, self.layer_idx)
        k = k * 1.5
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager
        )
        out, _ = attention_interface(self, q, k, v, attention_mask, scaling=0.5)
        return self.out(out.flatten(2))


class Weighs(Hands):
    "Gives attention something that no other model gives."

    def forward(self, x, attention_mask=None, past_key_values=None):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split([4, 2, 2], 1)
        k, v = past_key_values.update(k, v, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager
        )
        out, _ = attention_interface(
            self, q, k, v, attention_mask, scaling=0.5, temperature=2.0
        )
        return self.out(out.flatten(2))


class Forgets(Hands):
    "Attends to the tokens of a pass alone."

    def forward(self, x, attention_mask=None, past_key_values=None):
        return self.out(self.qkv(x)[..., :32].cumsum(1))


class Pretrained(PreTrainedModel):
    config_class, base_model_prefix = Config, "model"
    _supports_sdpa = _supports_attention_backend = True


class Decoder(Pretrained, GenerationMixin):
    attention = Hands

    def __init__(self, config):
        super().__init__(config)
        layers = [self.attention(config, i) for i in range(config.num_hidden_layers)]
        self.embed, self.layers = nn.Embedding(config.vocab_size, 32), nn.ModuleList(layers)
        self.head = nn.Linear(32, config.vocab_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        x = self.embed(input_ids)
        held = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        mask = create_causal_mask(self.config, x, attention_mask, held)
        for layer in self.layers:
            x = x + layer(x, mask, held)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=held)


def made(attention, **changes):
    "A random model of layers of this class."
    kind = type("Invented", (Decoder,), dict(attention=attention, __module__=__name__))
    torch.manual_seed(0)
    config = Config(**INNER, **changes)
    config._attn_implementation = "sdpa"
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(
    "attention, why",
    [
        (Hands, ""),
        (LlamaAttention, "LlamaAttention changes what a cache returns before it attends"),
        (Weighs, "Weighs gives attention temperature besides"),
    ],
)
def test_served_or_decoded(attention, why):
    "It is said before the first token, is what happens, and with all exact tokens are equal."
    model, ids = made(attention), torch.randint(2, 40, (2, 20))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache = TurboQuantCache(model, exact_recipe())
    told = [str(x.message) for x in said if "decoded" in str(x.message)]
    assert len(told) == bool(why) and all(why in x for x in told), told
    how = dict(GREEDY, attention_mask=torch.ones_like(ids))
    own = model.generate(ids, past_key_values=DynamicCache(config=model.config), **how)
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), own)
    report = cache.report()
    assert set(report["served"]) == {"prefill", "dense" if why else "codes"}
    assert report["reading"] == (f"decoded each step: {why}" if why else "on codes")
    assert len(set(own[:, 20:].flatten().tolist())) > 2, "tokens depend on the context"


def test_refused():
    "Nothing is computed; the reason names what the layers do."
    with refuses("no layer that attends to a cache"):
        TurboQuantCache(made(Forgets))
    with refuses("layers of kind 'folded_attention', which cannot be"):
        model = made(Hands)
        model.config.layer_types = ["full_attention", "folded_attention"]
        TurboQuantCache(model)
    own = type(
        "Own", (Decoder,), dict(_supports_default_dynamic_cache=classmethod(lambda c: 0))
    )
    with refuses("invented takes only a cache of its own kind"):
        TurboQuantCache(own(Config(**INNER)))
