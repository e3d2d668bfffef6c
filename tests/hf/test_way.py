"""A cache brings its attention: whatever a model is set to, codes are read, and the model is
left as it was."""

import concurrent.futures
import copy
import threading
import warnings

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import turboquant_nb
from tests.helpers import (
    QUIETLY,
    exact_recipe,
    given_frame,
    prompt,
    refuses,
    seeded,
    texts,
    tiny,
)
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf import layer as hf_layer
from turboquant_nb.hf import hooks
from turboquant_nb.hf.frame import frame_of

pytestmark = QUIETLY
READS = ("codes", "dense")
GREEDY = dict(max_new_tokens=8, do_sample=False)
WAYS = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "sampling": dict(do_sample=True, top_k=20, num_return_sequences=2),
    "chunks": dict(prefill_chunk_size=11),
}


def tokens(model, inputs, cache, **how):
    torch.manual_seed(7)
    return model.generate(**inputs, past_key_values=cache, **GREEDY | how)


def own(model, inputs, **how):
    return tokens(model, inputs, DynamicCache(config=model.config), **how)


def on_report(report):
    served = report["served"]
    return "dense" not in served and bool(served.get("codes") or served.get("chunk"))


def on_codes(cache):
    return on_report(cache.report())


def words():
    "A tokenizer of fifty words."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"w{i}": i for i in range(50)}
    each = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    each.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=each, unk_token="w1", pad_token="w0")


MODELS = [
    ("llama", "eager", "greedy"),
    ("llama", "sdpa", "beams"),
    ("llama", "flex_attention", "sampling"),
    ("gemma3_text", "sdpa", "chunks"),
    ("gemma3_text", "flex_attention", "greedy"),
    ("gemma2", "eager", "beams"),
    ("gemma2", "flex_attention", "chunks"),
    ("gpt_oss", "eager", "sampling"),
]


@pytest.mark.parametrize("name, attention, way", MODELS)
def test_equal_tokens_on_codes_under_any_attention(name, attention, way):
    """With all tokens held exactly they are transformers' own; the model's setting stays."""
    model, inputs = tiny(name), prompt(3, 30)
    want = own(model, inputs, **WAYS[way])
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache, **WAYS[way]), want)
    assert on_codes(cache) and not cache.report()["dense"]
    assert model.config._attn_implementation == attention
    assert len(cache.coded_layers) == 2 and all(x.calls["prefill"] for x in cache.coded_layers)


@pytest.mark.parametrize(
    "flash, way, name",
    [
        ("flash_attention_2", "beams", "llama"),
        ("flash_attention_2", "greedy", "gemma3_text"),
        ("flash_attention_3", "chunks", "llama"),
    ],
)
def test_flash_is_not_called(flash, way, name, monkeypatch):
    """Flash attention needs a GPU. A cache is read on codes before it is called, which it is
    with any other cache."""
    model, inputs = copy.deepcopy(tiny(name)), prompt(3, 30)
    want, called = own(model, inputs, **WAYS[way]), RuntimeError("flash was called")

    def attend(*args, **kwargs):
        raise called

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, flash, attend)
    model.config._attn_implementation = flash
    cache = TurboQuantCache(model, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache, **WAYS[way]), want)
    assert on_codes(cache) and not cache.report()["dense"]
    with refuses("flash was called", RuntimeError):
        own(model, inputs, **WAYS[way])


def test_the_model_is_as_it_was():
    "Outputs without the cache, another cache in between, and after an error in the middle."
    model, inputs = tiny(), prompt(2, 24)
    before, keys = model(**inputs).logits, set(vars(model))
    want, first = own(model, inputs), TurboQuantCache(model, exact_recipe())
    second = TurboQuantCache(model, "k4v4")
    with torch.no_grad():
        model(**inputs, past_key_values=first)
        assert torch.equal(own(model, inputs), want)
        model(**inputs, past_key_values=second)
        broken = RuntimeError("stop")

        def stop(module, args):
            raise broken

        hook = model.model.layers[0].mlp.register_forward_pre_hook(stop)
        step = inputs["input_ids"][:, :1]
        with refuses("stop", RuntimeError):
            model(step, past_key_values=first)
        hook.remove()
        with refuses(r"cache.recover\(\)"):
            model(step, past_key_values=first)
        assert torch.equal(own(model, inputs), want)
        assert first.recover() == 24
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # it is any thread's again
            pool.submit(torch.no_grad()(model), step, past_key_values=first).result()
        assert first.get_seq_length() == 25
    after = model(**inputs).logits
    assert torch.equal(after, before) and set(vars(model)) == keys
    assert torch.equal(tokens(model, inputs, TurboQuantCache(model, exact_recipe())), want)
    assert model.config._attn_implementation == "sdpa"
    text = copy.deepcopy(model)
    assert torch.equal(text(**inputs).logits, before)


def test_a_mask_that_adds_a_bias_is_served_on_codes():
    "Of a prompt, a chunk and a step."
    model, ids, out = tiny(), texts(2, 20), {}
    g = seeded()
    passes = [
        (n, torch.randn(2, 1, n, m, generator=g)) for n, m in ((20, 20), (3, 23), (1, 24))
    ]
    for attention in ("eager", "sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = DynamicCache(config=model.config)
        if attention != "eager":
            cache = TurboQuantCache(model, exact_recipe())
        with torch.no_grad():
            for n, bias in passes:
                logits = model(ids[:, :n], attention_mask=bias, past_key_values=cache).logits
                out.setdefault(attention, []).append(logits)
        if attention != "eager":
            torch.testing.assert_close(out[attention], out["eager"], rtol=1e-4, atol=1e-4)
            assert on_codes(cache)


def test_an_attention_of_somebodys_own_gets_tensors_and_one_warning():
    "What it computes nobody knows, so its keys are decoded; the reason and the cure are said."
    seen, model, inputs = [], tiny(), prompt(1, 24, padded=False)

    def mine(call):
        seen.append(type(call.key))
        return torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, call.mask, scale=call.scaling, enable_gqa=True
        )

    hf_layer._say_slow.cache_clear()
    with hooks.hooked(hooks.Attend(model, "mine", mine)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                cache = TurboQuantCache(model, "k4v4")
                tokens(model, inputs, cache)
        assert set(seen) == {torch.Tensor} and cache.report()["served"]["dense"]
        told = [str(x.message) for x in said if "decoded" in str(x.message)]
        assert len(told) == 1 and "'mine'" in told[0]
        assert "model.set_attn_implementation('sdpa')" in told[0]
        assert "'mine'" in cache.report()["dense"]["why"]
        with refuses("attention='codes' cannot be.*'mine'"):
            TurboQuantCache(model, attention="codes")
    with refuses("attention must be 'auto', 'codes' or 'dense'"):
        TurboQuantCache(model, attention="exact")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_module_is_asked_before_it_attends(attention):
    """What the module would have called, its own tensors and mask; the last who was put is
    asked alone; other models are as they were. (Page hf_hooks: after it, after an error.)"""
    model, other, inputs = tiny(), tiny(seed=1), prompt(2, 9)
    model.set_attn_implementation(attention)
    first, second = (x.self_attn for x in model.model.layers[:2])
    before, apart, seen = model(**inputs).logits, other(**inputs).logits, []

    def note(own, module, query, key, value, mask, **kwargs):
        seen.append((module, query.shape[2] == key.shape[2] == 9, mask is None))
        return own(module, query, key, value, mask, **kwargs)

    zero = lambda own, module, query, *rest, **kwargs: (0 * query.transpose(1, 2), None)
    with hooks.hooked(hooks.Ask(first, note), hooks.Ask(second, zero)):
        assert not torch.equal(model(**inputs).logits, before)
        with hooks.hooked(hooks.Ask(second, note)):
            assert torch.equal(model(**inputs).logits, before)
        assert torch.equal(other(**inputs).logits, apart)
    assert seen == [(x, True, False) for x in (first, first, second)]


def test_guidance_runs_a_second_pass_on_a_cache_of_its_own():
    """Under the model's own attention both caches are served. Under 'turboquant' the second
    pass has none that it could read, and the advice helps: "pass a TurboQuantCache" did not."""
    model, inputs = tiny("llama"), prompt(1, 20)
    want = own(model, inputs, guidance_scale=1.5)
    cache = TurboQuantCache(model, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache, guidance_scale=1.5), want)
    assert on_codes(cache)
    model.set_attn_implementation("turboquant")
    with refuses("such as sdpa.*the second pass of guidance_scale", TypeError):
        tokens(model, inputs, TurboQuantCache(model), guidance_scale=1.5)


# --- one pass at a time


def test_a_second_thread_is_refused_and_nothing_is_mixed():
    model, inputs = tiny(), prompt(2, 24)
    want = own(model, inputs)
    for source in (model, model.config):
        cache, said = TurboQuantCache(source, exact_recipe(), frame=given_frame(model)), []

        def meanwhile(module, args):
            def other():
                try:
                    with torch.no_grad():
                        model.model(**inputs, past_key_values=cache)
                except ValueError as error:
                    said.append(str(error))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        with torch.no_grad():
            hook = model.model.layers[0].mlp.register_forward_pre_hook(meanwhile)
            model(**inputs, past_key_values=cache)
            hook.remove()
        assert len(said) == 1 and "in a forward pass of another thread" in said[0]
        assert cache.get_seq_length() == 24
        cache.reset()
        done = []
        work = threading.Thread(target=lambda: done.append(tokens(model, inputs, cache)))
        work.start()
        work.join()
        assert torch.equal(done[0], want)


# --- without an argument


def test_a_default_in_pipelines_and_assisted_generation():
    from transformers import pipeline

    model, inputs = copy.deepcopy(tiny()), prompt(1, 24, padded=False)
    want = tokens(model, inputs, TurboQuantCache(model, exact_recipe()))
    default = turboquant_nb.enable(model, exact_recipe())
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert default.report["served"]["codes"] and default.report["tokens"] == 31
    kinds = {*map(type, vars(default).values())}
    assert TurboQuantCache not in kinds, "nothing is held between two calls"
    got = model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3)
    assert torch.equal(got, want) and on_report(default.report)
    model.generate(**inputs, **GREEDY, assistant_early_exit=1)  # whose drafts are calls, too
    assert default.report["layers"] == model.config.num_hidden_layers
    pipe = pipeline("text-generation", model=model, tokenizer=words(), device="cpu")
    default.report = None
    text = pipe("w3 w5 w7 w3 w5 w9", **GREEDY, return_tensors=True)[0]["generated_token_ids"]
    assert default.report["tokens"] == len(text) - 1 and on_report(default.report)
    turboquant_nb.disable(model)
    turboquant_nb.disable(model)
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)


def test_a_default_is_made_anew_and_its_errors_pass():
    model, inputs = copy.deepcopy(tiny()), prompt(1, 24, padded=False)
    first = turboquant_nb.enable(model, "k3v3", max_length=26)
    with refuses("max_length is 26"):
        model.generate(**inputs, **GREEDY)
    second = turboquant_nb.enable(model, "k4v4")
    model.generate(**inputs, **GREEDY)
    assert second.report["tokens"] == 31 and first.report["tokens"] <= 26
    assert second.report["recipe"] == TurboQuantCache(model, "k4v4").report()["recipe"]


# --- compilers, half types, gradients


@pytest.mark.parametrize("way", ["module in place", "forward", "wrapped"])
def test_compiled_models(way):
    "The cache runs between graphs: equal tokens, padding and all."
    torch._dynamo.reset()
    model, inputs = copy.deepcopy(tiny(num_hidden_layers=1)), prompt(2, 20)
    want = own(model, inputs, max_new_tokens=3)
    run = model
    if way == "module in place":
        model.compile(backend="eager")
    elif way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        run = torch.compile(model, backend="eager")
    cache = TurboQuantCache(run, exact_recipe())
    assert torch.equal(tokens(run, inputs, cache, max_new_tokens=3), want) and on_codes(cache)
    assert cache.coded_layers[0].starts == (0, 7) and cache.frame is frame_of(model)
    torch._dynamo.reset()


def test_one_graph_needs_a_static_cache():
    "A cache that grows is refused, transformers' own is not. (test_hf_static.py: static ones.)"
    torch._dynamo.reset()
    model, ids = copy.deepcopy(tiny(num_hidden_layers=1)), prompt(1, 20)["input_ids"]
    whole = torch.compile(model, backend="eager", fullgraph=True)
    cache = TurboQuantCache(model, "k4v4")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with refuses("static=True ", Exception):
            whole(ids[:, :1], past_key_values=cache)
        whole(ids[:, :1], past_key_values=DynamicCache(config=model.config))
    torch._dynamo.reset()


@pytest.mark.parametrize("name, half", [("llama", torch.bfloat16), ("gpt2", torch.float16)])
def test_autocast(name, half):
    "Weights in fp32, states in a half type: the cache holds that type, and codes in their own."
    model, inputs, out = tiny(name), prompt(2, 24, padded=False), {}
    step = inputs["input_ids"][:, :1]
    with torch.no_grad(), torch.autocast("cpu", half):
        caches = dict(own=DynamicCache(config=model.config))
        caches |= {x: TurboQuantCache(model, exact_recipe(), attention=x) for x in READS}
        for which, cache in caches.items():
            model(**inputs, past_key_values=cache)
            out[which] = model(step, past_key_values=cache).logits.float()
    size = 2e-2 * float(out["own"].abs().max())
    for which in READS:
        assert caches[which].layers[0].store.dtype == half
        assert float((out[which] - out["own"]).abs().max()) < size, which
    coded = [TurboQuantCache(model, "k4v4") for _ in range(2)]
    heads, g = caches["codes"].layers[0].store.heads, seeded()
    keys, values = torch.randn(2, 1, heads, 30, 8, generator=g)
    coded[0].update(keys.to(half), values.to(half), 0)
    with torch.autocast("cpu", half):
        coded[1].update(keys, values, 0)
    for a, b in zip(*(x.layers[0].store.read() for x in coded)):
        assert torch.equal(a, b), "autocast has no hand in what is coded"


def test_grad_modes():
    model, inputs = copy.deepcopy(tiny()), prompt(2, 24)
    want = own(model, inputs)
    with torch.inference_mode():
        assert torch.equal(tokens(model, inputs, TurboQuantCache(model, exact_recipe())), want)
    model.gradient_checkpointing_enable()  # it takes caches away in training alone
    assert torch.equal(tokens(model, inputs, TurboQuantCache(model, exact_recipe())), want)
