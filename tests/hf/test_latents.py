"""Latents: keys and values that a model makes of one vector a token. Attention on codes in
absorbed form against the model's own on the same codes decoded, and against transformers."""

import pytest
import torch

from eval import architectures
from tests.helpers import QUIETLY, exact_recipe, prompt, random_frame, refuses, seeded
from turboquant_nb.cache.attention import attend, dense_attention, visible
from turboquant_nb import KVStore, Recipe, Spec, TurboQuantCache
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.kernels import ops

pytestmark = QUIETLY

GREEDY = dict(max_new_tokens=8, do_sample=False)
NAMES = ["DeepseekV2", "DeepseekV3", "MiniCPM3", "Glm4MoeLite", "KimiLinear", "LongcatFlash"]


def small(name):
    model = architectures.small(f"{name}ForCausalLM")
    if not TurboQuantCache(model).info.reading.expands:
        pytest.skip(
            f"this transformers caches expanded keys: not in this transformers ({name})"
        )
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_codes_are_those_of_the_models_own_attention(name):
    "To fp32 rounding, with padding: a prompt, steps, a chunk longer than any draft."
    model, inputs, recipe = small(name), prompt(2, 60), Recipe(Spec(3), Spec(4), 2, 5)
    out = {}
    for way in ("codes", "dense"):
        cache, logits, at = TurboQuantCache(model, recipe, attention=way), [], 0
        for n in (21, 1, 1, 20, 1):
            mask = inputs["attention_mask"][:, : at + n]
            ids = inputs["input_ids"][:, at : at + n]
            with torch.no_grad():
                logits.append(
                    model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
                )
            at += n
        out[way] = torch.stack(logits)
        served = cache.report()["served"]
        assert set(served) == {"prefill", way}, served
    gap = (out["codes"] - out["dense"]).abs().max() / out["dense"].abs().max()
    assert gap < 1e-4, gap


def test_no_step_expands_the_past():
    "The weight that makes keys and values is asked for a prompt and for unit vectors, once."
    model, rows = small("DeepseekV3"), []
    linear = model.model.layers[1].self_attn.kv_b_proj
    linear.register_forward_hook(lambda m, args, out: rows.append(args[0].shape[-2]))
    cache = TurboQuantCache(model, "k4v4")
    model.generate(**prompt(1, 40), past_key_values=cache, **GREEDY)
    attention = model.model.layers[1].self_attn
    units = attention.kv_lora_rank + attention.qk_rope_head_dim + 1
    assert sorted(rows) == sorted([40, units])


@pytest.mark.parametrize("name", NAMES[1:3])
def test_captured_steps_give_the_tokens_of_eager_ones(name):
    "By the stand-in for graphs of `test_hf_graphs.py`."
    model, inputs = small(name), prompt(2, 30)
    caches = [TurboQuantCache(model, "k4v4", graphs=x, max_length=64) for x in (False, Tape)]
    eager, replayed = (model.generate(**inputs, past_key_values=x, **GREEDY) for x in caches)
    assert torch.equal(eager, replayed)
    report = caches[1].report()["graphs"]
    assert report["captured"] == 1 and report["replayed"] == 6 and not report["why_not"], report


def test_other_weights_for_another_prompt():
    "Matrices are looked at once a prompt: a model that learnt meanwhile is served as it is."
    model, inputs = small("DeepseekV2"), prompt(1, 30)
    cache = TurboQuantCache(model, exact_recipe())
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    for layer in model.model.layers:
        weight = layer.self_attn.kv_b_proj.weight
        layer.self_attn.kv_b_proj.weight = torch.nn.Parameter(weight.detach().flip(0))
    own = model.generate(**inputs, **GREEDY)
    cache.reset()
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), own)


def test_what_is_not_linear_is_refused_and_decoded_where_that_is_asked_for():
    model, inputs = small("DeepseekV2"), prompt(1, 20)
    cache = TurboQuantCache(model, "k4v4")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_pre_hook(lambda m, x: (x[0] ** 3,))
    with torch.no_grad(), refuses("linear in a latent.*attention='de"):
        model(**inputs, past_key_values=cache)
    dense = TurboQuantCache(model, exact_recipe(), attention="dense")
    own = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, past_key_values=dense, **GREEDY), own)


@pytest.mark.parametrize("exact", [(0, 0), (2, 9)])
def test_a_latent_rule_against_dense_attention(exact):
    "Both sides as keys, keys as values; padding, exact tokens, a window and a cap."
    g = seeded()
    store = KVStore(Recipe(Spec(3), Spec(4), *exact), 2, 1, 32, 16)
    store.set_range(start=torch.tensor([0, 3]))
    for n in (300, 1, 7):
        store.append(*(torch.randn(2, 1, n, d, generator=g) + 1 for d in (32, 16)))
    q, (c, rotary) = torch.randn(2, 8, 3, 48, generator=g), store.read()
    for window, cap in ((None, None), (50, None), (None, 2.0)):
        mask = visible(store, 3, torch.arange(308)[None], True, window)
        want, lse = dense_attention(
            q, torch.cat([c, rotary], -1), c, scaling=0.2, mask=mask, softcap=cap
        )
        how = dict(scaling=0.2, sliding_window=window, softcap=cap, latent=True)
        got = attend(q, store, **how)
        torch.testing.assert_close(got.out, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.lse, lse, rtol=1e-5, atol=1e-5)
    why = ops.explain(q, store, latent=True)
    assert not why["torch"] and all("latents" in why[x] for x in ("triton", "cpu"))
    with refuses("latents have two"):
        ops.attend(q, store, latent=True, backend="cpu")
    with refuses(r"q must have shape \[2, a multiple of 1, n, 48\]"):
        attend(q[..., :32], store, latent=True)


def test_latents_in_a_frame_are_refused():
    for what, why in ((dict(pair_scale="frame"), "pair scale"), (dict(center="fixed"), "mean")):
        recipe = Recipe(Spec(3, **what), Spec(3))
        store = KVStore(recipe, 1, 1, 32, 16, frame=random_frame(1, 32))
        store.append(torch.randn(1, 1, 40, 32), torch.randn(1, 1, 40, 16))
        with refuses(f"can have no {why}"):
            attend(torch.randn(1, 4, 1, 48), store, latent=True)
    model = small("DeepseekV2")
    with refuses("center='fixed' is for keys, and layer 0 holds"):
        TurboQuantCache(model, recipe)
    cache = TurboQuantCache(model, "k3v3")
    assert {(x.key.center, x.key.pair_scale) for x in cache.recipes} == {("none", "none")}
    assert cache.report()["frame"] == "none"  # nor was one looked for
