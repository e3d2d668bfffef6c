"""Static caches: the same tokens from tensors that never move, in eager mode, compiled without
graph breaks, and (test_cuda.py) in CUDA graphs."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import QUIETLY, fused, generate, interpreted, prompt, refuses, texts, tiny
from turboquant_nb.cache.clock import CAPTURE
from turboquant_nb.cache.store import row_tensors
from turboquant_nb.hf import TurboQuantCache

pytestmark = QUIETLY
LENGTH = 64


def static(model, recipe="k4v4", length=LENGTH, **kwargs):
    return TurboQuantCache(model, recipe, max_length=length, static=True, **kwargs)


def addresses(cache):
    return [
        t.data_ptr()
        for x in cache.coded_layers
        for t in (*row_tensors(x.store), x.store.clock.position)
    ]


@pytest.mark.parametrize(
    "name, attention",
    [
        ("llama", "sdpa"),
        ("mistral", "turboquant"),
        ("gemma2", "sdpa"),
        ("gemma3_text", "turboquant"),
        ("gpt_oss", "turboquant"),
    ],
)
def test_static_is_dynamic(name, attention):
    """Greedy, left-padded, prompt lookup, a second turn, in eager mode: the tokens of a cache
    that grows; no tensor moved."""
    model, inputs = tiny(name), prompt(2, 20)
    if attention == "sdpa" and not fused(model):
        attention = "eager"
    want, _ = generate(model, inputs, attention)
    cache = static(model)
    cache.set_padding(inputs["attention_mask"])
    got, cache = generate(model, inputs, attention, cache=cache, disable_compile=True)
    assert torch.equal(got, want)
    assert cache.is_compileable and int(cache.get_seq_length()) == 27 == cache.layers[0].held
    before = addresses(cache)
    cache.reset()
    assert addresses(cache) == before and cache.report()["tokens"] == 0
    cache.set_padding(inputs["attention_mask"])
    again, _ = generate(model, inputs, attention, cache=cache, disable_compile=True)
    assert torch.equal(again, want) and addresses(cache) == before


@interpreted
def test_static_on_kernels():
    """Filled, reset, filled again with other padding: kernels read the padding of today, not of
    the day when they were chosen."""
    model = tiny(
        "llama", head_dim=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    cache = static(model, backend="triton")
    for padded in (True, False):
        inputs = prompt(2, 14, padded=padded)
        want, _ = generate(model, inputs, "turboquant", max_new_tokens=3)
        cache.reset()
        got, _ = generate(
            model, inputs, "turboquant", cache=cache, max_new_tokens=3, disable_compile=True
        )
        assert torch.equal(got, want), padded
    assert set(cache.report()["served"]) == {"prefill", "kernel"}
    why = "by the portable kernel: an NVIDIA GPU is needed, the store is on cpu"
    assert cache.report()["captured_by"] == {
        "coding": [("triton", "")],
        "attention": [("triton", why)],
    }


@pytest.mark.parametrize("name, padded", [("llama", True), ("gemma3_text", False)])
def test_compiled_steps(name, padded):
    """fullgraph: one graph serves every step, also of another prompt; logits as in eager mode,
    and no recompilation."""
    torch._dynamo.reset()
    model = tiny(name, num_hidden_layers=1) if name == "llama" else tiny(name)
    model.set_attn_implementation("turboquant")
    frames = []
    step = torch.compile(
        lambda *a, **k: model(*a, **k).logits,
        backend=lambda g, x: frames.append(1) or g.forward,
        fullgraph=True,
        dynamic=False,
    )
    cache, eager = static(model), TurboQuantCache(model, "k4v4")
    for seed in (0, 1):
        inputs = prompt(2, 20 + seed, seed=seed, padded=padded)
        cache.reset()
        eager.reset()
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            model(**inputs, past_key_values=eager)
            place = inputs["attention_mask"].sum(1, keepdim=True)
            for i in range(3):
                ids = texts(2, 1, seed=10 + i)
                position = place + i
                want = model(
                    ids, past_key_values=eager, position_ids=position, attention_mask=None
                ).logits
                got = step(ids, past_key_values=cache, position_ids=position)
                assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()
    assert len(frames) == 1 and cache.layers[0].held == 21 + 3
    for a, b in zip(cache.coded_layers, eager.coded_layers):
        first = max(b.store.offset, b.first)
        for x, y in zip(a.store.read(first), b.store.read(first)):
            assert torch.allclose(x, y, atol=1e-4)


def test_generate_compiles():
    """transformers decides by itself where it compiles; forced on a processor here, with the
    tokens of a cache that grows, which runs eagerly. The second call finds what the first
    compiled."""
    torch._dynamo.reset()
    model, inputs = tiny(num_hidden_layers=1), prompt(2, 20)
    want, _ = generate(model, inputs, "turboquant")
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    how = dict(compile_config=config, return_dict_in_generate=True, output_hidden_states=True)
    for cache in (TurboQuantCache(model, "k4v4"), static(model)):
        for _ in range(2):
            got, _ = generate(model, inputs, "turboquant", cache=cache, **how)
            assert torch.equal(got.sequences, want) and len(got.hidden_states) == 8
            report, calls = cache.report(), dict(cache.layers[0].calls)
            cache.reset()
    assert calls == {"prefill": 2} and report["tokens"] == 27  # the steps ran without Python
    by = {kind: x[0][0] for kind, x in report["captured_by"].items()}
    assert by == {"coding": "torch", "attention": "torch"}


def test_compiled_dense_steps_are_refused():
    torch._dynamo.reset()
    model, inputs = tiny("llama"), prompt(1, 9, padded=False)
    model.set_attn_implementation("sdpa")
    cache = static(model, attention="dense")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        with refuses("captured steps need attention on codes", Exception):
            torch.compile(model, backend="eager", fullgraph=True)(
                inputs["input_ids"][:, :1], past_key_values=cache
            )


def test_a_cache_that_grows_is_not_captured(monkeypatch):
    "A replayed graph would write each token over the one before."
    model, inputs = tiny("llama"), prompt(1, 9, padded=False)
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        monkeypatch.setattr(CAPTURE, "tape", True)
        with refuses("only steps of a static cache can be captured"):
            model(inputs["input_ids"][:, :1], past_key_values=cache)


def test_a_pass_asks_the_device_once_for_all_layers(monkeypatch):
    """A prompt waits for counts of tokens as often with seven layers as with two; and what the
    device has counted meanwhile is seen."""
    from turboquant_nb.cache.clock import DeviceClock

    found = []
    for layers in (2, 7):
        model, asked = tiny("llama", num_hidden_layers=layers), []
        model.set_attn_implementation("turboquant")
        cache, ids = static(model), texts(2, 20)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.reset()
            with monkeypatch.context() as m:
                sync = DeviceClock.sync
                m.setattr(
                    DeviceClock,
                    "sync",
                    lambda self, store: asked.append(self.known) or sync(self, store),
                )
                model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
            found.append(asked.count(False))
            want = model(ids[:, 1:2], past_key_values=cache).logits
            cache.crop(-1)
            for x in cache.coded_layers:  # as after a replay that the host does not know of
                x.store.length -= 1
            assert torch.equal(model(ids[:, 1:2], past_key_values=cache).logits, want)
            assert (
                {x.store.length for x in cache.coded_layers}
                == {22}
                == {int(x.store.clock.position) for x in cache.coded_layers}
            )
            assert not any(x.store.clock.known for x in cache.coded_layers)
    assert found == [2, 2], found  # both for the mask
