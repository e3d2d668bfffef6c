"""Pair scales in transformers: the first chunk waits for its queries, and every way of
generating goes on with what they gave."""

import copy
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import exact_recipe, generate, logits, made, prompt, three, tiny
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.pairs import pair_layers
from turboquant_nb.evaluation.score import one_pass_gap, predict, prefill, score
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.kernels import launch
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.testing import same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
NO = "no pair scale, which needs the first chunk's queries: "


def scaled(recipe=None, **more):
    recipe = Recipe(Spec(3, center="auto"), Spec(3), **more) if recipe is None else recipe
    return replace(recipe, key=replace(recipe.key, pair_scale="prompt"))


def frames(cache):
    return [x.store.key.frame.pair.float() for x in cache.coded_layers]


@pytest.mark.parametrize(
    "name, family",
    [("llama", "Llama"), ("qwen2", 0), ("gemma3_text", 0), ("gemma2", 0), ("gpt_neox", 0)]
    + [("gpt2", 0), ("mistral", 0), ("gpt_oss", 0), ("qwen3_next", 0), ("falcon_h1", 0)],
)
def test_tokens_of_exact_caches(name, family):
    """Left-padded, every token exact: the tokens of transformers' own cache, by attention on
    codes; scales are fitted in every layer, and are 1 where the past is decoded."""
    model, inputs = tiny(name), prompt()
    own = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    for attention in three(model):
        got, cache = generate(model, inputs, attention, scaled(exact_recipe()))
        assert torch.equal(got, own), attention
        fits, reasons = [float(x.std()) for x in frames(cache)], cache.report()["reasons"]
        if attention == "turboquant":
            assert min(fits) > 0.01 and not any(x.startswith(NO) for x in reasons)
        else:
            why = NO + "the model's own attention reads decoded keys"
            assert max(fits) == 0 and reasons[why] == len(fits)


MODES = {
    "beams": dict(num_beams=3),
    "returned": dict(do_sample=True, num_return_sequences=2),
    "chunks": dict(prefill_chunk_size=18),
    "lookup": dict(prompt_lookup_num_tokens=3),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_ways_of_generating(mode, name):
    "All exact: the tokens of transformers' own cache."
    model, inputs = tiny(name), prompt(3 if mode in ("beams", "returned") else 1)
    torch.manual_seed(7)
    own = model.generate(**inputs, max_new_tokens=8, **{"do_sample": False} | MODES[mode])
    got, cache = generate(model, inputs, "turboquant", scaled(exact_recipe()), **MODES[mode])
    assert torch.equal(got, own)
    assert min(float(x.std()) for x in frames(cache)) > 0.01
    assert not any(x.startswith(NO) for x in cache.report()["reasons"])


def test_drafts_with_codes():
    "A prompt whose end is drafts: the scales are those of the prompt, as if none had come."
    model, inputs = made("llama")[0], prompt(1, 60, padded=False)
    recipe = scaled(recent=8)
    _, plain = generate(model, inputs, "turboquant", recipe, max_new_tokens=2)
    _, drafted = generate(
        model, inputs, "turboquant", recipe, max_new_tokens=12, prompt_lookup_num_tokens=4
    )
    for a, b in zip(frames(plain), frames(drafted)):
        same(a, b)


def test_coding_gets_better():
    "A random model with channels of unequal energies: logits lie nearer to the exact ones."
    model, ids = made("llama")[0], prompt(4, 160, padded=False)["input_ids"]
    model.set_attn_implementation("sdpa")
    exact, error = logits(model, ids)[:, 129:], {}
    for name in ("none", "prompt"):
        spec = Spec(2, center="auto", pair_scale=name)
        cache = TurboQuantCache(model, Recipe(spec, Spec(4), recent=0))
        logits(model, ids[:, :128], past_key_values=cache)
        got = [logits(model, ids[:, i : i + 1], past_key_values=cache) for i in range(128, 160)]
        error[name] = float((torch.cat(got, 1)[:, 1:] - exact).square().mean())
    assert error["prompt"] < 0.85 * error["none"]


def test_rows_of_a_padded_batch():
    "Each row has the scales that it has alone."
    model, inputs = made("llama")[0], prompt(3, 60)
    _, cache = generate(model, inputs, "turboquant", scaled(), max_new_tokens=2)
    for row, n in enumerate((0, 7, 13)):
        one = dict(input_ids=inputs["input_ids"][row : row + 1, n:])
        _, alone = generate(model, one, "turboquant", scaled(), max_new_tokens=2)
        for a, b in zip(frames(cache), frames(alone)):
            assert (a[row] / b[0] - 1).abs().max() < 0.02


def test_a_mask_of_scores_tells_of_padding():
    "Padding that only the mask of the first attention knows: it is learnt before the fit."
    model, inputs = made("llama")[0], prompt(3, 60)
    model.set_attn_implementation("turboquant")
    want = TurboQuantCache(model, scaled())
    seen = dict(attention_mask=inputs["attention_mask"])
    logits(model, inputs["input_ids"], past_key_values=want, **seen)
    got = TurboQuantCache(model, scaled())
    n, real = 60, inputs["attention_mask"].bool()
    mask = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    seen = dict(attention_mask=mask, position_ids=places)
    logits(model, inputs["input_ids"], past_key_values=got, **seen)
    for a, b in zip(want.coded_layers, got.coded_layers):
        assert a.store.start.tolist() == b.store.start.tolist() == [0, 7, 13]
    assert (frames(want)[0] / frames(got)[0] - 1).abs().max() < 0.02


@pytest.mark.parametrize("static", [False, True])
def test_captured_steps_are_eager_ones(static):
    model, inputs = made("llama")[0], prompt(2, 20)
    outs = []
    for graphs in (False, Tape):
        cache = TurboQuantCache(model, scaled(), graphs=graphs, max_length=64, static=static)
        for again in range(2):
            cache.set_padding(inputs["attention_mask"])
            out, _ = generate(
                model, inputs, "turboquant", cache=cache, max_new_tokens=9, disable_compile=True
            )
            outs.append(out)
            pair = frames(cache)
            cache.reset()
        assert min(float(x.std()) for x in pair) > 0.01
    assert all(torch.equal(x, outs[0]) for x in outs)
    assert cache.report()["graphs"]["replayed"] >= 6


def test_compiled_steps():
    "fullgraph: the logits of eager steps, whose keys and queries are scaled in the graph."
    torch._dynamo.reset()
    model, inputs = made("llama")[0], prompt(2, 20)
    model.set_attn_implementation("turboquant")
    outs, ids = [], prompt(2, 4, seed=9, padded=False)["input_ids"]
    for step in (model, torch.compile(model, backend="eager", fullgraph=True)):
        cache = TurboQuantCache(model, scaled(), max_length=64, static=True)
        seen = dict(past_key_values=cache)
        with torch.no_grad():
            model(**inputs, **seen)
            places = torch.tensor([[20], [13]])
            steps = [step(ids[:, i : i + 1], position_ids=places + i, **seen) for i in range(4)]
        assert min(float(x.std()) for x in frames(cache)) > 0.01
        outs.append(torch.cat([x.logits for x in steps], 1))
    assert (outs[0] - outs[1]).abs().max() < 1e-4


@pytest.mark.skipif(
    not launch.is_interpreted() or torch.cuda.is_available(),
    reason="needs Triton's interpreter; scripts/tools/memcheck for a GPU",
)
def test_kernels():
    "Coded and read by kernels: the tokens that PyTorch gives."
    model = tiny(
        "llama", head_dim=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    outs = []
    for backend in ("torch", "triton"):
        cache = TurboQuantCache(model, scaled(), backend=backend)
        out, _ = generate(model, prompt(2, 24), "turboquant", cache=cache, max_new_tokens=4)
        outs.append((out, frames(cache)[0], cache.report()))
    assert torch.equal(outs[0][0], outs[1][0])
    assert (outs[0][1] / outs[1][1] - 1).abs().max() < 0.02 and outs[0][1].std() > 0.01
    assert set(outs[1][2]["coded"]) == {"kernel"} and "kernel" in outs[1][2]["served"]


def test_files_copies_and_crops(tmp_path):
    model, inputs = made("llama")[0], prompt(2, 40, padded=False)
    _, cache = generate(model, inputs, "turboquant", scaled(), max_new_tokens=6)
    cache.save(tmp_path / "c")
    loaded, copied = TurboQuantCache.load(tmp_path / "c", model), copy.deepcopy(cache)
    ids = inputs["input_ids"][:, :3]
    want = logits(model, ids, past_key_values=cache)
    for other in (loaded, copied):
        for a, b in zip(frames(other), frames(cache)):
            same(a, b)
        assert (logits(model, ids, past_key_values=other) - want).abs().max() < 1e-4
    cache.crop(-(45 + 3))
    assert all(bool((x == 1).all()) for x in frames(cache))
    logits(model, prompt(2, 33, seed=3, padded=False)["input_ids"], past_key_values=cache)
    assert all(x.std() > 0.01 for x in frames(cache))
    report = cache.report()
    assert report["parts"]["pair"] == sum(2 * x.numel() for x in frames(cache))


def test_a_chunk_that_cannot_be_coded_changes_nothing():
    model, ids = tiny("llama"), prompt(1, 12, padded=False)["input_ids"]
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model, scaled())
    bad = torch.full((1, 2, 12, 8), torch.nan)
    with pytest.raises(ValueError, match="keys of layer 0 must be finite"):
        cache.update(bad, bad, 0)
    assert cache.get_seq_length() == 0 and not cache.layers[0].is_initialized
    cache.recover()
    want = logits(model, ids, past_key_values=TurboQuantCache(model, scaled()))
    same(logits(model, ids, past_key_values=cache), want)


def test_keys_that_are_read_before_their_queries_come():
    model = tiny("llama")
    model.set_attn_implementation("turboquant")
    cache, x = TurboQuantCache(model, scaled()), torch.randn(1, 2, 30, 8)
    cache.update(x, x, 0)
    assert cache.layers[0].store.waiting
    cache.layers[0].store.read()
    assert not cache.layers[0].store.waiting
    assert cache.report()["reasons"][NO + "they were read before the layer attended"] == 1


# --- how it is measured


def test_one_pass_fits_it_to_the_prompt():
    """The scales of all steps at once are those of the cache that generates; a cache whose past
    is decoded cannot be measured."""
    model, ids = made("llama")[0], prompt(2, 80, padded=False)["input_ids"]
    candidate = as_candidate(model, scaled(), dtype=None)
    for protocol in ("decode", "stress"):
        got = predict(model, ids, candidate, protocol, 50)
        model.set_attn_implementation("turboquant")
        real = TurboQuantCache(model, scaled())
        logits(model, ids[:, :50], past_key_values=real)
        model.set_attn_implementation("sdpa")
        layers = [x.layer.store.key.frame.pair.float() for x in pair_layers(got.cache).values()]
        first = slice(None) if protocol == "decode" else slice(1)  # later ones read codes
        for a, b in zip(layers[first], frames(real)[first]):
            assert (a / b - 1).abs().max() < 0.02 and a.std() > 0.01
        want, error, plain = (
            logits(model, ids)[:, 49:-1],
            [],
            Recipe(Spec(2, center="auto"), Spec(4)),
        )
        for recipe in (plain, scaled(plain)):
            coded = as_candidate(model, recipe, dtype=None)
            found = predict(model, ids, coded, protocol, 50).logits
            error.append(float((found - want).square().mean()))
        assert error[1] < 0.9 * error[0], protocol
    assert score(model, ids, candidate, "decode", 50).bits > 0
    assert prefill(model, ids).queries is None
    for backend, protocol in (("steps", "decode"), ("auto", "chunk")):
        with pytest.raises(ValueError, match="no query reaches the pair scale"):
            predict(model, ids, candidate, protocol, 50, backend=backend)
    with pytest.raises(ValueError, match="pair_scale='none'"):
        one_pass_gap(model, ids, scaled(), 50)
