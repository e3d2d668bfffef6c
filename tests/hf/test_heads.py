"""KV heads of a layer with recipes of their own: each group of heads holds what a store of its
own holds, and every way of decoding, of keeping and of refusing is that of a layer."""

import copy
import json
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers import covering_pairs, generate, logits, made, prompt, texts, three, tiny
from turboquant_nb.cache.store import KVStore, expected_nbytes
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import one_pass_gate, score
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.archive import read_states
from turboquant_nb.hf.heads import GroupedLayer, join_heads, take_heads
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.kernels.decode_launch import is_interpreted
from turboquant_nb.quant.mixed_precision import HeadRecipe, recipe_from_json
from turboquant_nb.quant.quantizer import CODES, Spec, register_code, scalar_code
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.testing import raises, same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
HEADS = 4


def each(key, value=3, **code):
    return Recipe(
        Spec(bits=key, center="auto", **code), Spec(bits=value, **code), sinks=2, recent=8
    )


def model_of(name="llama", **more):
    sizes = dict(num_attention_heads=8, num_key_value_heads=HEADS, head_dim=16)
    return tiny(name, seed=3, **sizes | more)


# three groups, of which two are no runs of neighbours; a layer with one recipe; and a trellis
MIXED = [HeadRecipe((each(2), each(4, 2), each(2), each(3))), each(3)]
CODES_TOO = [each(2), HeadRecipe((each(2), *[each(2, 2, codebook="trellis")] * 2, each(2)))]


@pytest.fixture
def twin():
    "A code that is the usual one under another name: groups that code alike."
    usual = lambda spec, d: scalar_code(replace(spec, codebook=Spec.codebook), d)
    register_code("twin", usual)
    yield dict(codebook="twin")
    CODES.pop("twin")


def test_heads_are_taken_and_put_back():
    "Any split, with any number of query heads for each; neighbours without a copy."
    x = torch.arange(2 * 12 * 3).view(2, 12, 3)
    for groups in ([(0, 2, 3), (1,)], [(1, 2), (0, 3)], [(0,), (1,), (2, 3)], [(0, 1, 2, 3)]):
        parts = [take_heads(x, heads, 4) for heads in groups]
        same(join_heads(parts, groups), x)
        for part, heads in zip(parts, groups):
            same(part, x.view(2, 4, 3, 3)[:, list(heads)].reshape(2, -1, 3))
    assert take_heads(x, (1, 2), 4).data_ptr() == x[:, 3:].data_ptr()


@pytest.mark.parametrize("recipes", (MIXED, CODES_TOO))
def test_each_head_is_what_a_store_of_its_own_holds(recipes):
    """Codes, scales, means and exact tokens, bit for bit, of a prompt and of steps after it. (A
    trellis adds its scales in another order for fewer heads: there a store holds the group.)"""
    model = model_of()
    cache, given = TurboQuantCache(model, recipes), {}
    update = cache.update

    def note(k, v, layer, *args, **kwargs):
        given.setdefault(layer, []).append((k, v))
        return update(k, v, layer, *args, **kwargs)

    cache.update = note
    ids = texts(2, 40)
    logits(model, ids[:, :30], past_key_values=cache)
    for i in range(30, 40):
        logits(model, ids[:, i : i + 1], past_key_values=cache)
    kinds = [type(x) is GroupedLayer for x in cache.layers]
    assert kinds == [isinstance(r, HeadRecipe) for r in recipes]
    for layer in cache.coded_layers:
        inv_freq = torch.tensor(layer.inv_freq)
        heads = list(layer.heads or range(HEADS))
        chained = layer.recipe.key.codebook == "trellis"
        for some in [heads] if chained else [[head] for head in heads]:
            own = KVStore(layer.recipe, 2, len(some), 16, inv_freq=inv_freq)
            for k, v in given[layer.index]:
                own.append(k[:, some], v[:, some])
            at = [heads.index(head) for head in some]
            for a, b in zip(own.read(), layer.store.read()):
                same(a, b[:, at])
            for side in ("key", "value"):
                a, b = (s.coded(side, 0, 40) for s in (own, layer.store))
                same(a.codes, b.codes[:, at])
                same(a.scale, b.scale[:, at])


def test_groups_that_code_alike_are_a_layer(twin):
    "The same codes and tokens as one recipe for all heads; of equal recipes no group is made."
    model, inputs = model_of(), prompt(3, 30)
    kinds = [each(3), each(3, **twin)]
    apart = [HeadRecipe([kinds[i] for i in order]) for order in ((0, 1, 1, 0), (1, 0, 0, 0))]
    caches = [TurboQuantCache(model, r) for r in (each(3), apart)]
    one, other = (generate(model, inputs, "turboquant", cache=c)[0] for c in caches)
    same(one, other)
    for whole, layer in zip(caches[0].layers, caches[1].layers):
        for x, y in zip(whole.store.read(), zip(*(g.store.read() for g in layer.groups))):
            same(layer.join(list(y)), x)
    equal = TurboQuantCache(model, HeadRecipe([each(3)] * HEADS))
    assert equal.coded_layers == equal.layers and not equal.layers[0].heads


WAYS = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "sampling": dict(do_sample=True, num_return_sequences=2, top_k=20),
    "lookup": dict(prompt_lookup_num_tokens=3),
    "chunks": dict(prefill_chunk_size=18),
}


@pytest.mark.parametrize(
    "way, name", covering_pairs([*WAYS], ["gpt_oss", "gemma2", "gemma3_text", "llama"])
)
def test_codes_and_decoded_states_give_the_same_tokens(way, name):
    "Padding, sliding windows, soft caps and learnt sinks; drafts that are taken back."
    model = model_of(name)
    batch, length = 1 if way == "lookup" else 3, 36 if way == "chunks" else 30
    recipes = [r if isinstance(r, HeadRecipe) else MIXED[0] for r in MIXED]
    outs = []
    for attention in three(model):
        inputs = prompt(batch, length, padded=batch > 1)
        out, cache = generate(model, inputs, attention, recipes, **WAYS[way])
        outs.append(out)
    assert all(torch.equal(x, outs[0]) for x in outs[1:])
    assert len(cache.coded_layers) == 6 and cache.report()["layers"] == 2
    served = cache.report()["by_layer"]
    assert served[0]["prefill"] and served[0]["codes"] and served.keys() == {0, 1}


@pytest.mark.parametrize("way", ("greedy", "beams", "sampling"))
def test_captured_steps_are_eager_ones(way):
    "One capture for all groups, and a replay for each step after it."
    model, inputs = model_of(num_hidden_layers=12), prompt(3, 20)
    recipes = [MIXED[0]] * 12
    outs = []
    for graphs in (False, Tape):
        cache = TurboQuantCache(model, recipes, graphs=graphs, max_length=64)
        how = dict(WAYS[way], max_new_tokens=9)
        outs.append(generate(model, inputs, "turboquant", cache=cache, **how)[0])
    same(*outs)
    r = cache.report()["graphs"]
    assert r["captured"] == 1 and r["replayed"] >= 6 and not r["why_not"]


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton")
@pytest.mark.parametrize("static", (False, True))
def test_kernels_take_the_heads_of_a_group(static):
    """Views of some heads, coded and read by the kernels in Triton's interpreter: the codes and
    tokens that PyTorch gives."""
    model, inputs = model_of(), prompt(2, 24)
    how = dict(max_length=64, static=True, graphs=False) if static else {}
    caches = [TurboQuantCache(model, MIXED, backend=x, **how) for x in ("torch", "triton")]
    outs = [
        generate(model, inputs, "turboquant", cache=c, max_new_tokens=4, disable_compile=True)[
            0
        ]
        for c in caches
    ]
    same(*outs)
    assert caches[1].report()["served"]["kernel"] == 3 * 4  # steps, of three groups and a layer
    for a, b in zip(*(c.coded_layers for c in caches)):
        for side in ("key", "value"):
            x, y = (g.store.coded(side, 0, 27).codes for g in (a, b))
            assert float((x != y).float().mean()) < 1e-3  # but for edges
    assert caches[1].report()["coded"]["kernel"]


@pytest.mark.parametrize("graphs", (False, Tape))
def test_a_static_cache_and_a_second_prompt(graphs):
    "Tensors that never move; emptied and filled again."
    model, how = model_of(), dict(disable_compile=True)
    for again in range(2):
        inputs = prompt(2, 12 + again, seed=again)
        want, _ = generate(model, inputs, "turboquant", MIXED, **how)
        if not again:
            cache = TurboQuantCache(model, MIXED, max_length=64, static=True, graphs=graphs)
        got, _ = generate(model, inputs, "turboquant", cache=cache, **how)
        same(got, want)
        assert {x.held for x in cache.coded_layers} == {19 + again}
        cache.reset()


def test_a_compiled_step_of_a_static_cache():
    "torch.compile sees neither groups nor heads that it would have to trace anew."
    model = model_of(num_hidden_layers=1)
    ids = texts(1, 20)
    steps = []
    for compiled in (False, True):
        cache = TurboQuantCache(model, [MIXED[0]], max_length=32, static=True, graphs=False)
        model.set_attn_implementation("turboquant")
        logits(model, ids[:, :16], past_key_values=cache)
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        step = lambda i, run=run, cache=cache: (
            run(
                ids[:, i : i + 1], past_key_values=cache, position_ids=torch.tensor([[i]])
            ).logits
        )
        with torch.no_grad():
            steps.append(torch.cat([step(i) for i in range(16, 20)], 1))
    torch._dynamo.reset()
    assert float((steps[0] - steps[1]).abs().max()) < 1e-4


@pytest.mark.parametrize("how", ({}, {"max_length": 60}, {"max_length": 60, "static": True}))
def test_a_cache_comes_back_and_goes_on(how, tmp_path):
    "To the bit, with its groups; a copy too, and neither touches the other."
    model, inputs = model_of(), prompt(2, 30)
    cache = TurboQuantCache(model, MIXED, graphs=False, **how)
    out, _ = generate(model, inputs, "turboquant", cache=cache, disable_compile=True)
    cache.save(tmp_path / "c")
    back = TurboQuantCache.load(tmp_path / "c", model, max_length=how.get("max_length"))
    assert back.recipes == cache.recipes and back.static == cache.static
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 8, dtype=torch.long)], 1)
    said = []
    for x in (cache, back, copy.deepcopy(cache)):
        for a, b in zip(cache.coded_layers, x.coded_layers):
            assert a.heads == b.heads
            if x is back:
                for s, t in zip(a.store.read(), b.store.read()):
                    same(s, t)
        if x is not cache:
            said.append(logits(model, out[:, -1:], attention_mask=mask, past_key_values=x))
    same(*said)


def test_crop_rows_and_moves_reach_every_group():
    model, ids = model_of(), texts(3, 40)
    cache, want = (TurboQuantCache(model, MIXED) for _ in range(2))
    for x in (cache, want):
        logits(model, ids[:, :30], past_key_values=x)
    logits(model, ids[:, 30:40], past_key_values=cache)
    cache.crop(-10)
    for a, b in zip(cache.coded_layers, want.coded_layers):
        assert a.held == b.held == 30
        for side in ("key", "value"):
            same(a.store.coded(side, 0, 30).codes, b.store.coded(side, 0, 30).codes)
    before = [x.store.read() for x in cache.coded_layers]
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    for x, states in zip(cache.coded_layers, before):
        for a, b in zip(x.store.read(), states):
            same(a, b[[2, 0, 1]])
    cache.batch_repeat_interleave(2)
    assert {x.store.batch for x in cache.coded_layers} == {6}
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert {x.store.batch for x in cache.coded_layers} == {2}
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.layers[0].is_initialized


def test_every_byte_is_counted():
    "Bytes of the report are those of the stores, and these those of the formula."
    model = model_of()
    cache = TurboQuantCache(model, MIXED)
    logits(model, texts(2, 40), past_key_values=cache)
    r = cache.report()
    stores = [x.store for x in cache.coded_layers]
    assert all(s.nbytes == expected_nbytes(s) for s in stores)
    assert r["nbytes"] - r["parts"]["tables"] == sum(s.nbytes for s in stores)
    assert r["per_layer"] == [sum(s.nbytes for s in stores[:3]), stores[3].nbytes]
    bits = [b for x in MIXED[0].heads for b in (x.key.bits, x.value.bits)]
    assert r["values"] == 2 * 40 * 2 * HEADS * 2 * 16 and sum(bits) == 22
    assert json.loads(json.dumps(r))["recipe"] == [x.to_json() for x in cache.recipes]
    assert [recipe_from_json(x) for x in r["recipe"]] == cache.recipes


@pytest.mark.parametrize("chunk", ("first", "step", "long"))
def test_a_refused_chunk_leaves_all_groups_as_they_were(chunk):
    "The last head is not finite: groups that had coded theirs forget them."
    cache = TurboQuantCache(model_of(), [MIXED[0]] * 2, backend="torch")
    make = lambda n: torch.randn(1, HEADS, n, 16, generator=torch.Generator().manual_seed(n))
    past = 0 if chunk == "first" else 30
    if past:
        cache.update(make(30), make(30), 0)
    bad = make(1 if chunk == "step" else 20)
    bad[:, -1] = torch.nan
    with raises(ValueError, "keys of layer 0"):
        cache.update(bad, make(bad.shape[2]), 0)
    assert {x.held for x in cache.layers[0].groups} == {past}
    if past:
        for x, y in zip(
            cache.layers[0].groups, TurboQuantCache(model_of(), MIXED).layers[0].groups
        ):
            y.update(*(take_heads(make(30), y.heads, HEADS) for _ in range(2)))
            same(x.store.coded("key", 0, 30).codes, y.store.coded("key", 0, 30).codes)
    cache.update(make(3), make(3), 0)
    assert {x.held for x in cache.layers[0].groups} == {past + 3}


def test_one_pass_is_the_cache_token_by_token():
    "The evaluation's pairs hold what groups hold."
    model = model_of()
    recipes = [HeadRecipe((each(2), each(4, 2), each(2), each(3))), each(3)]
    gate = one_pass_gate(model, texts(1, 60), recipes, 40, 12)
    assert gate["passed"], gate
    candidate = as_candidate(model, recipes, "heads", dtype=None)
    for protocol in ("decode", "stress"):
        found = score(model, texts(2, 60), candidate, protocol, 40)
        assert found.loss.isfinite().all() and found.backend == "one_pass"
    mutant = [HeadRecipe(recipes[0].heads[::-1]), each(3)]
    other = score(
        model, texts(2, 60), as_candidate(model, mutant, "x", dtype=None), "stress", 40
    )
    assert not torch.equal(other.loss, found.loss)


@pytest.mark.parametrize("kind", ("Bloom", "GPTJ"))
def test_models_that_compute_their_scores_themselves(kind):
    "Each of their KV heads has one query head."
    from tests.hf import test_deferred

    model = test_deferred.made(kind)
    heads = model.config.num_attention_heads
    recipe = HeadRecipe([each(3 + i % 2) for i in range(heads)])
    outs = []
    for attention in ("dense", "auto"):
        cache = TurboQuantCache(model, recipe, attention=attention)
        with torch.no_grad():
            ids = texts(2, 20) % model.config.vocab_size
            outs.append(model.generate(ids, past_key_values=cache, **test_deferred.GREEDY))
    same(*outs)
    assert cache.report()["served"]["codes"] and len(cache.layers[0].groups) == 2


def test_a_calibration_gives_each_group_its_matrices(tmp_path):
    """Of the layer's transform, the matrices of its heads: keys are those of the whole layer,
    but for rounding and the codes that lie within it of an edge."""
    model, found = made("llama")
    recipe = HeadRecipe((Recipe(recent=4), Recipe(value=Spec(bits=4), recent=4)))
    cache = TurboQuantCache(model, recipe, calibration=found)
    whole = TurboQuantCache(model, Recipe(recent=4), calibration=found)
    for x in (cache, whole):
        logits(model, texts(2, 40), past_key_values=x)
    for one, layer in zip(whole.layers, cache.layers):
        keys = layer.join([g.store.read()[0] for g in layer.groups])
        apart = (keys - one.store.read()[0]).abs().amax(-1) > 1e-4
        assert int(apart.sum()) <= 2 < apart.numel() / 20
        assert [g.store.key.q.rotation.heads for g in layer.groups] == [1, 1]
    cache.save(tmp_path / "c")
    back = TurboQuantCache.load(tmp_path / "c", model)
    for a, b in zip(cache.coded_layers, back.coded_layers):
        same(a.store.read()[0], b.store.read()[0])


def test_what_is_refused():
    model = model_of()
    with raises(ValueError, "layer 0 must have a recipe for each of its 4 KV heads, got 3"):
        TurboQuantCache(model, HeadRecipe([each(2), each(3), each(2)]))
    with raises(ValueError, "layer 1 must have a recipe for each of its 4 KV heads, got 2"):
        TurboQuantCache(model, [each(2), [each(2), each(3)]])
    with raises(ValueError, "heads must hold a recipe for each KV head, got none"):
        TurboQuantCache(model, [each(2), []])
    with raises(TypeError, "heads must be a list, got Recipe"):
        HeadRecipe(each(2))
    with raises(TypeError, "must be a Recipe, a preset name or None, got int"):
        HeadRecipe((each(2), 3))
    with raises(ValueError, "sinks must be one number for all heads, got [2, 4]"):
        HeadRecipe((each(2), replace(each(2), sinks=4)))
    with raises(ValueError, "decay must be None where heads of a layer have recipes"):
        HeadRecipe((replace(each(3), decay=64), each(3)))
    with raises(ValueError, "static=True does not serve"):
        residual = Recipe(Spec(residual="qjl", center="none"), sinks=2, recent=8)
        cache = TurboQuantCache(
            model, [HeadRecipe([each(3), residual] * 2)] * 2, max_length=64, static=True
        )
        logits(model, texts(1, 20), past_key_values=cache)
    hybrid = tiny("falcon_h1")
    with raises(ValueError, "heads of layer 0 must share a recipe: it keeps a recurrent state"):
        TurboQuantCache(hybrid, HeadRecipe((each(2), each(3))))
    cache = TurboQuantCache(model, MIXED)
    x = torch.randn(1, 3, 5, 16)
    with raises(ValueError, "keys of layer 0 must have 4 heads, as many as its recipes, got 3"):
        cache.update(x, x, 0)
    for text in ('{"heads": 3}', '{"heads": [], "key": {}}'):
        with raises(ValueError, "not a recipe: heads must be a list and alone"):
            recipe_from_json(text)
    with raises(ValueError, "not a recipe"):
        recipe_from_json('{"heads": [3]}')


def test_a_file_with_other_groups_is_refused(tmp_path):
    "Too many stores for its recipes, and one that does not fit."
    model = model_of()
    cache = TurboQuantCache(model, MIXED)
    logits(model, texts(1, 20), past_key_values=cache)
    cache.save(tmp_path / "c")
    states, header = read_states(tmp_path / "c")
    few = header | {"recipe": [x.to_json() for x in (MIXED[1], MIXED[1])]}
    with raises(ValueError, "must have 2 stores for its recipes, got 4"):
        TurboQuantCache.from_states(states, few, model)
    swapped = header | {
        "recipe": [HeadRecipe(MIXED[0].heads[::-1]).to_json(), MIXED[1].to_json()]
    }
    with raises(ValueError, "layer 0 does not fit"):
        TurboQuantCache.from_states(states, swapped, model)


@pytest.mark.parametrize("protocol", ("decode", "stress"))
def test_each_group_has_the_pair_scale_of_its_heads(protocol):
    "As a cache whose heads share a recipe fits it, also in the one pass of an evaluation."
    model, ids = model_of(), texts(2, 40)
    two, three = (
        replace(r, key=replace(r.key, pair_scale="prompt")) for r in (each(2, 2), each(3, 3))
    )
    mixed = HeadRecipe([two, three, two, three])
    caches = [TurboQuantCache(model, r) for r in (mixed, two, three)]
    for cache in caches:
        logits(model, ids, past_key_values=cache)
    groups = caches[0].layers[0].groups
    for group, whole in zip(groups, caches[1:]):
        pair = whole.layers[0].store.key.frame.pair
        assert (pair != 1).any()
        same(group.store.key.frame.pair, pair[:, list(group.heads)])
        same(group.store.read()[0], whole.layers[0].store.read()[0][:, list(group.heads)])
    loss = {
        name: score(model, ids, as_candidate(model, r, name), protocol, prompt=20, batch=2).loss
        for name, r in (("mixed", mixed), ("all", HeadRecipe([two] * 4)), ("two", two))
    }
    torch.testing.assert_close(loss["all"], loss["two"], rtol=1e-6, atol=1e-6)
    assert not torch.equal(loss["mixed"], loss["two"])


def test_the_command_line_reads_and_shows_heads():
    "A recipe of heads as JSON, its size, and the codes of any one head."
    from turboquant_nb.cli.app import Usage
    from turboquant_nb.cli.recipes import Changes, read_recipe
    from turboquant_nb.cli.plan import CacheSize
    from turboquant_nb.cli.web import stored

    text = json.dumps([json.loads(r.to_json()) for r in MIXED])
    assert read_recipe(text) == MIXED
    assert read_recipe(MIXED[0].to_json(), Changes(sinks=1)).sinks == 1
    with raises(Usage, "Spec has no field 'bitz'; did you mean 'bits'?"):
        read_recipe('{"heads": [{"key": {"bitz": 3}, "value": {}}]}')
    model = model_of()
    cache = TurboQuantCache(model, MIXED, max_length=300)
    logits(model, texts(1, 200), past_key_values=cache)
    sizes = [CacheSize(model.config, r, torch.float32).parts for r in (MIXED, MIXED[1])]
    assert len(sizes[0]) == 4 and sum(x[0] for x in sizes[0]) > 0 < len(sizes[1])
    held = [fixed + 2 * each for fixed, each, _ in sizes[0]]
    assert held == [x.store.nbytes for x in cache.coded_layers]
    for head in range(HEADS):
        group = next(x for x in cache.layers[0].groups if head in x.heads)
        codes, *_ = stored(cache, "key", 0, head)
        want = group.store.coded("key", 0, 200).codes[0, group.heads.index(head)]
        assert torch.equal(codes, want.T)
    with raises(Usage, "head must be from 0 to 3, got 4"):
        stored(cache, "key", 0, 4)
    with raises(Usage, "layer must be from 0 to 1, got 2"):
        stored(cache, "key", 2, 0)
