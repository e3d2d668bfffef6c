"""Models that compute their scores themselves read codes: with all tokens held exactly they
write what transformers' own cache lets them write, however they are called."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from eval import architectures
from tests.helpers import VOCAB, covering_pairs, exact_recipe, prompt
from turboquant_nb.hf import TurboQuantCache, deferred
from turboquant_nb.hf.model_info import _BY_HAND, ModelInfo

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
GREEDY = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
GREEDY |= dict(use_cache=True)  # which MPT's configuration denies
WAYS = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "sampling": dict(do_sample=True, top_k=20, num_return_sequences=2),
    "chunks": dict(prefill_chunk_size=11),
    "lookup": dict(prompt_lookup_num_tokens=3),
}
FAMILIES = {
    "BigBird": {},
    "Bloom": {},
    "CodeGen": {},
    "Falcon": {},
    "Falcon, ALiBi": dict(alibi=True),
    "Falcon, new": dict(new_decoder_architecture=True),
    "Falcon, all heads": dict(multi_query=False, num_kv_heads=4),
    "GPT2, reordered": dict(reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True),
    "GPTJ": {},
    "GPTNeo": {},
    "GPTNeoXJapanese": {},
    "MegatronBert": {},
    "Mpt": {},
    "Mvp": {},
    "RemBert": {},
    "RoFormer": {},
    "TrOCR": {},
    "XGLM": {},
}
HEADS = {"GPT2": "GPT2LMHeadModel"}
_made = {}


def made(family):
    if family not in _made:
        name, besides = family.split(",")[0], FAMILIES[family]
        before = architectures.BESIDES.get(name, {})
        architectures.BESIDES[name] = before | besides
        kind = HEADS.get(name, f"{name}ForCausalLM")
        if kind not in architectures.CLASSES:
            raise KeyError(kind)
        key = kind.removesuffix("ForCausalLM")
        architectures.BESIDES[key] = before | besides
        try:
            model = architectures.small(kind)
        finally:
            architectures.BESIDES[name] = architectures.BESIDES[key] = before
        if "GPT2" in family:
            model.set_attn_implementation("eager")
        _made[family] = model
    return _made[family]


def tokens(model, inputs, cache, **how):
    torch.manual_seed(7)
    return model.generate(**inputs, past_key_values=cache, **GREEDY | how)


def served(cache):
    return {x for x, n in cache.report()["served"].items() if n and x != "prefill"}


def own(model, inputs, **how):
    return tokens(model, inputs, DynamicCache(config=model.config), **how)


def test_every_class_that_is_served_has_a_case():
    classes = {type(x).__name__ for f in FAMILIES for x in made(f).modules()}
    assert _BY_HAND <= classes


# gives BERT's kin a mask in every pass
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
CASES = [(x, y) for x in FAMILIES for y in ("greedy", "lookup", "chunks")]
CASES += covering_pairs([*FAMILIES], ["beams", "sampling"])


@pytest.mark.parametrize("family, way", CASES)
def test_equal_tokens_on_codes(family, way):
    how, model = WAYS[way], made(family)
    inputs = prompt(3, 30)
    if way == "lookup":
        ids = prompt(1, 10, padded=False)["input_ids"].repeat(1, 3)
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    cache = TurboQuantCache(model, exact_recipe())
    assert cache.report()["reading"] == "on codes"
    assert torch.equal(tokens(model, inputs, cache, **how), own(model, inputs, **how))
    assert served(cache) <= {"codes", "chunk"} and served(cache)
    reasons = cache.report()["reasons"]
    assert not any("own scores" in x for x in reasons), reasons
    masked = "GPTNeo" in family and "Japanese" not in family  # which has a local window
    masked = masked or OLD and family in ("BigBird", "MegatronBert", "RemBert", "RoFormer")
    assert masked or not any("a mask was given" in x for x in reasons), reasons


def a_step_each(model, recipe, inputs):
    """Logits of a step on codes and of one that gets the same codes decoded: two caches that
    were filled apart could differ in a code."""
    caches = [TurboQuantCache(model, recipe)]
    with torch.no_grad():
        model(**inputs, past_key_values=caches[0])
        caches.append(copy.deepcopy(caches[0]))
        caches[1].reader.asked = "dense"
        steps = [model(inputs["input_ids"][:, :1], past_key_values=x).logits for x in caches]
    assert [served(x) for x in caches] == [{"codes"}, {"dense"}]
    return [x.float() for x in steps]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_codes_decoded(family):
    "In three bits a step computes what the model's own attention computes of decoded states."
    codes, dense = a_step_each(made(family), "k3v3", prompt(2, 90, padded=False))
    assert float((codes - dense).abs().max()) < 1e-5 * float(dense.abs().max())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [x for x in FAMILIES if "Falcon" in x])
def test_both_ways_of_falcon(family, attention):
    "It asks PyTorch's fused attention, or multiplies by hand."
    model, inputs = copy.deepcopy(made(family)), prompt(3, 30)
    model.config._attn_implementation = attention
    cache = TurboQuantCache(model, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache), own(model, inputs))
    assert served(cache) == {"codes"}


@pytest.mark.parametrize("family", ["GPTJ", "GPTNeo", "Bloom", "XGLM", "Falcon"])
def test_a_pass_asked_for_weights_has_them(family):
    "Of a model's own attention; passes before and after it read codes."
    model, inputs = made(family), prompt(2, 24, padded=False)
    step, out = inputs["input_ids"][:, :1], []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model, exact_recipe())):
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            out.append(model(step, past_key_values=cache, output_attentions=True).attentions)
            model(step, past_key_values=cache)
    torch.testing.assert_close(*out)
    layers = len(cache.coded_layers)
    assert cache.report()["served"] == {"prefill": layers, "dense": layers, "codes": layers}


def test_a_cache_of_a_config_serves_too_and_has_weights_from_its_first_pass_on():
    model, inputs = architectures.small("GPTJForCausalLM"), prompt(2, 24, padded=False)
    cache = TurboQuantCache(model.config, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache), own(model, inputs))
    assert served(cache) == {"codes"}
    step, out = inputs["input_ids"], []
    for first in (DynamicCache(config=model.config), TurboQuantCache(model.config)):
        how = dict(past_key_values=first, output_attentions=True)
        with torch.no_grad():
            out.append(model(step, **how).attentions)
            model(step[:, :1], past_key_values=first)
    torch.testing.assert_close(*out)


def test_scores_that_are_not_known_are_decoded():
    "A class of a listed name that does something else is right all the same, and told."
    model, inputs = copy.deepcopy(made("GPTJ")), prompt(2, 24)
    for block in model.transformer.h:
        inner = block.attn._attn
        block.attn._attn = lambda q, k, v, mask=None, f=inner: f(q, k.clamp(-0.5, 0.5), v, mask)
    cache = TurboQuantCache(model, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache), own(model, inputs))
    assert cache.report()["served"]["dense"]
    assert any("own scores" in x for x in cache.report()["reasons"])


def test_compiled_and_static_get_tensors():
    torch._dynamo.reset()
    model, inputs = copy.deepcopy(made("Bloom")), prompt(2, 20)
    want = own(model, inputs)
    static = TurboQuantCache(model, exact_recipe(), max_length=64, static=True, graphs=False)
    assert "another shape in each step" in static.reader.why
    model.forward = torch.compile(model.forward, backend="eager")
    cache = TurboQuantCache(model, exact_recipe())
    assert torch.equal(tokens(model, inputs, cache), want)
    assert "dense" in served(cache)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["GPTJ", "GPTNeo", "CodeGen", "Falcon, ALiBi", "Bloom"])
@pytest.mark.parametrize("half, off", [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_half_types(family, half, off):
    model = copy.deepcopy(made(family)).to(half)
    codes, dense = a_step_each(model, "k4v4", prompt(2, 60, padded=False))
    assert float((codes - dense).abs().max()) < off * float(dense.abs().max())


def test_the_attention_of_another_name_is_refused():
    model = copy.deepcopy(made("GPTJ"))
    model.config._attn_implementation = "turboquant"
    with pytest.raises(ValueError, match="computes its scores itself and reads codes as it is"):
        TurboQuantCache(model, exact_recipe())


def test_readings():
    "Flash variants are other classes: they hand over what no codes can be."
    config = made("GPTJ").config
    assert ModelInfo(config).reading.deferred and ModelInfo(made("GPTJ")).reading.deferred
    config = copy.deepcopy(config)
    config._attn_implementation = "flash_attention_2"
    assert ModelInfo(config).reading.how == "decoded each step"
    assert max(made("GPTJ").config.vocab_size, VOCAB) < 100


@pytest.mark.parametrize("dim", (-1, 3))
def test_a_softmax_along_the_keys_waits_and_another_is_made(dim):
    "Also where the axis is counted from the front, and never twice."
    held = Tokens()
    scores = deferred.Scores(held, torch.randn(2, 4, 3, 8), False)
    assert scores.shape == (2, 4, 3, 5)
    weights = scores.on_softmax(scores, dim=dim)
    assert weights.weights and weights.shape == scores.shape and weights.held is held
    assert weights.on_softmax(weights, dim=dim) is None
    for other in (0, 1, 2, 4, -2):
        assert scores.on_softmax(scores, dim=other) is None
    assert scores.on_softmax(scores, dim=dim, dtype=torch.float64).dtype == torch.float64


class Tokens:
    "Keys and values of two rows, four heads and five tokens, which nobody reads."

    shapes = (2, 4, 5, 8), (2, 4, 5, 6)
    device = torch.device("cpu")
