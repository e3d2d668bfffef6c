"What scripts/eval/context.py searches and reserves."

import pytest
import torch

pytest.importorskip("transformers")
context = pytest.importorskip("eval.context")
TINY = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)


@pytest.mark.parametrize("limit", [1, 4095, 4096, 4097, 40_000, 99_999, 500_000])
@pytest.mark.parametrize("guess", [0, 4096, 50_000, 1 << 20])
@pytest.mark.parametrize("step", [1024, 8192])
def test_search_finds_the_border(limit, guess, step):
    asked = []

    def fits(n):
        asked.append(n)
        return n <= limit

    low, high = context.most(fits, 0, guess, step)
    assert low <= limit < high and high - low == step and low % step == 0
    assert len(asked) == len(set(asked)) < 30


def test_search_asks_near_the_guess():
    asked = []
    low, high = context.most(lambda n: asked.append(n) or n <= 100_500, 12_288, 100_400, 1024)
    assert (low, high) == (100_352, 101_376) and asked == [100_352, 101_376]
    asked.clear()
    assert context.most(lambda n: asked.append(n) or n <= 98_400, 12_288, 100_400, 1024) == (
        98_304,
        99_328,
    )
    assert len(asked) <= 4


def test_layers_share_weights_and_the_rest_is_reserved():
    model, one = context.shared_model("Qwen2", TINY, "cpu")
    layers, inner = model.model.layers, model.model
    assert all(
        a is b for layer in layers for a, b in zip(layer.parameters(), layers[0].parameters())
    )
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    whole, block = context.placed(model, one, "4.25 bits", "cpu")
    other = sum(
        p.nbytes
        for x in (inner.embed_tokens, inner.norm, model.lm_head)
        for p in x.parameters()
    )
    assert whole == other + int(8 * one * 4.25 / 16) and block.nbytes == whole - other - one
    assert context.placed(model, one, "offloaded", "cpu")[0] == other + one


def test_states_are_held_by_every_layer():
    "Layers share weights, not caches: on both caches a token changes the answer."
    model, _ = context.shared_model("Llama", TINY, "cpu")
    cache = context.new_cache(model, "bf16", 64)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        model(ids, past_key_values=cache)
    keys = [x.keys for x in cache.layers]
    assert len(keys) == 8 and not any(torch.equal(a, b) for a, b in zip(keys, keys[1:]))
