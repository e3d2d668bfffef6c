"""Graphs and stores that a cache leaves to the next one, without a GPU: a tape stands for the
graph. It refers to the tensors of its step, so who else holds them is asked of graphs that
refer to none. (test_cuda.py: the same on a GPU.)"""

import copy
import gc
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.helpers import HYBRID, covering_pairs, generate, prompt, tiny

from turboquant_nb.hf import TurboQuantCache, kept
from turboquant_nb.hf.graphs import Tape
from turboquant_nb.hf.kept import _KEPT, _is_alone, _move, release
from turboquant_nb.hf.runner import StepRunner
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Keeps(StepRunner):
    keeps = True  # as graphs=True on a GPU


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    gc.collect()
    _KEPT.clear()


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setattr(kept, "_is_alone", lambda stores: True)


def model_of(**sizes):
    "A model of its own, so that nothing of other tests is kept with it."
    return copy.deepcopy(tiny("llama", **sizes))


def new(model, recipe="k3v3", graphs=Tape, **options):
    cache = TurboQuantCache(model, recipe, graphs=graphs, **options)
    cache.runner.__class__ = Keeps
    return cache


def run(model, tokens=20, rows=2, padded=False, cache=None, **options):
    "The tokens, the report, and whether they are those of eager steps."
    cache = new(model) if cache is None else cache
    inputs = prompt(rows, tokens, padded=padded)
    options = dict(max_new_tokens=7) | options
    got, _ = generate(model, inputs, "turboquant", cache=cache, **options)
    like = dict(recipe=cache.recipe, max_length=cache.max_length)
    eager = TurboQuantCache(model, graphs=False, **like)
    assert torch.equal(got, generate(model, inputs, "turboquant", cache=eager, **options)[0])
    r = cache.report()["graphs"]
    assert not r["why_not"], r
    return r["captured"], r["taken"]


@pytest.mark.parametrize(
    "way, padded", covering_pairs(["greedy", "sampled", "beams", "drafts"], [True, False])
)
def test_the_next_cache_captures_nothing(way, padded, trusting):
    """Of a shorter and of a longer prompt, and after reset() in the same cache. Kills: a
    length, a start, a ring or a mean of the cache before."""
    options = {
        "greedy": {},
        "sampled": dict(do_sample=True),
        "beams": dict(num_beams=3),
        "drafts": dict(prompt_lookup_num_tokens=3),
    }[way]
    rows, model = (1 if way == "drafts" else 2), model_of()
    assert run(model, 25, rows, padded, **options)[1] == 0
    captured = []
    for tokens in (30, 20, 33):
        got = run(model, tokens, rows, padded, **options)
        captured.append(got[0])
        assert got[1] or way == "drafts"  # whose number of tokens changes
    assert way == "drafts" or captured == [0, 0, 0]
    if way == "greedy":
        cache = new(model)
        for again in (1, 2):
            assert run(model, 20 + again, rows, padded, cache) == (0, again)
            cache.reset()


@pytest.mark.parametrize("padded", [True, False])
def test_of_tiles_that_another_cache_filled(padded, trusting):
    """Steps enter a tile that holds codes of a longer cache before, and one that none has
    filled. Kills: what is read of them."""
    model = model_of(max_position_embeddings=1024)
    run(model, 420, padded=padded)
    for tokens in (250, 420):
        got = run(model, tokens, padded=padded, max_new_tokens=20)
        assert got == (0, 1), got


def test_what_an_earlier_cache_found_is_not_the_next_ones(trusting):
    "Its mask, which nobody looked at; what a cache itself has found stays its own."
    model = model_of()
    cache = new(model)
    run(model, cache=cache)
    cache.runner.odd.fill_(True)
    del cache
    gc.collect()
    cache = new(model)
    assert run(model, cache=cache) == (0, 1)
    cache.check()
    cache.runner.odd.fill_(True)
    cache.reset()
    generate(model, prompt(2, 22), "turboquant", cache=cache, max_new_tokens=1)
    assert model in _KEPT and _KEPT[model].odd is not cache.runner.odd
    other = new(model)
    assert run(model, cache=other) == (0, 1)
    other.check()
    with pytest.raises(ValueError, match="an attention mask unlike the prompt's"):
        cache.check()


def test_a_graph_of_a_cache_that_was_cropped_serves_longer_ones(trusting):
    """Kernels take positions before the crop for not exact: a number of their launches. Kills:
    a prompt below it, whose recent tokens would be read as codes."""
    model, recipe = model_of(), Recipe(Spec(3), Spec(3), recent=8)
    cache = new(model, recipe)
    ids = prompt(2, 60, padded=False)["input_ids"]
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        cache.crop(-4)
        for i in range(36, 56):
            model(ids[:, i : i + 1], past_key_values=cache)
    inexact = cache.layers[0].store._recent_from
    assert cache.report()["graphs"]["captured"] == 1 and inexact == 32
    del cache
    gc.collect()
    assert _KEPT[model].inexact == inexact
    ask = lambda tokens: _KEPT[model].waits(started(model, recipe, tokens).runner)
    assert not ask(inexact + 7) and ask(inexact + 8)


def started(model, recipe, tokens, held=[]):
    "A cache that has read a prompt."
    held[:] = [new(model, recipe)]  # which a runner does not keep
    with torch.no_grad():
        model(prompt(2, tokens, padded=False)["input_ids"], past_key_values=held[0])
    return held[0]


def test_a_pass_with_drafts_is_taken_however_many_came_before(trusting):
    """Where a graph of so many tokens was left, no second such pass need come. Kills: a graph
    without drafts, which gives no exact states for a crop."""
    model, ids = model_of(), prompt(1, 60, padded=False)["input_ids"]
    counts = []
    for passes in ((40, 4, 4, 4), (40, 4, 1), (40, 4, 1, 1, 1), (40, 1, 4)):
        cache, at = new(model), 0
        cache.activate_past_recording()
        with torch.no_grad():
            for n in passes:
                step = dict(past_key_values=cache, logits_to_keep=min(n, 2))
                model(ids[:, at : at + n], **step)
                at += n
        r = cache.runner
        counts.append((r.captured, r.taken, r.replayed))
        del cache
        gc.collect()
    # one token twice in a row is another graph; the store that is left serves both
    assert counts == [(1, 0, 1), (0, 1, 1), (1, 1, 2), (0, 1, 2)], counts


def test_streams_wait(trusting, monkeypatch):
    "Where another stream takes them, for that on which they were replayed last."
    notes = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            notes.append((self.name, other.name))

    streams, model = [Stream(x) for x in "abb"], model_of()
    for stream in streams[:1] + streams[1:2] * 2:
        monkeypatch.setattr(kept, "_stream", lambda device, stream=stream: stream)
        run(model)
    assert notes == [("b", "a")]


def test_what_a_graph_reads_stays_with_it(trusting):
    "Tables that a store remembers, which it forgets when it is left."
    model = model_of()
    for layer in (cache := new(model)).layers:
        layer.captured.hold_still = holding(layer.captured.hold_still)
    run(model, cache=cache)
    table = weakref.ref(cache.layers[0].store.plans["read"])
    del cache, layer
    gc.collect()
    assert table() is not None and "read" not in _KEPT[model].stores[0].plans
    release(model)
    gc.collect()
    assert table() is None


def holding(own):
    "`hold_still` of a store whose kernels have a plan."

    def hold(layer):
        own(layer)
        layer.store.plans["read"] = Plan()

    return hold


class Plan:
    "Stands for tables."


def test_a_second_turn_goes_on_where_codes_were_moved(trusting):
    model = model_of()
    run(model, 30)
    outs = []
    for cache in (new(model), new(model, graphs=False)):
        ids = prompt(2, 20, padded=False)["input_ids"]
        for _ in range(2):
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
            out, _ = generate(model, inputs, "turboquant", cache=cache, max_new_tokens=6)
            ids = torch.cat([out, out[:, :5]], 1)
        outs.append(out)
        cache.check()
    assert torch.equal(*outs)


def test_what_is_said(trusting):
    model = model_of()
    run(model)
    cache = new(model)
    run(model, 20, cache=cache)
    r = cache.report()["graphs"]
    assert (r["captured"], r["taken"], r["replayed"]) == (0, 1, 6), r
    assert r["left"] == sum(x.store.nbytes for x in cache.layers)
    assert "1 taken from earlier caches, 0 MB stay for the next" in r["line"]


@pytest.mark.parametrize(
    "what", ["rows", "recipe", "longer", "shorter", "weights", "rounding", "limit"]
)
def test_another_kind_is_captured_anew(what, trusting, monkeypatch):
    """Other rows, another recipe, a prompt without room, one so short that programs would find
    nothing, other weights, products that round otherwise, and a cache that may grow less."""
    model = model_of()
    run(model, 1030 if what == "shorter" else 150)
    more, tokens, rows = {}, 150, 2
    if what == "rows":
        rows = 3
    if what == "recipe":
        more["recipe"] = "k4v4"
    if what == "longer":
        tokens = 230  # of 256, where 64 are to be left
    if what == "shorter":
        tokens = 20
    if what == "weights":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    if what == "rounding":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    if what == "limit":
        more["max_length"] = 230
    assert run(model, tokens, rows, cache=new(model, **more)) == (1, 0)
    assert run(model, tokens, rows, cache=new(model, **more)) == (0, 1)


def test_what_leaves_nothing(monkeypatch):
    "Large stores, static caches, steps that were not compared, hybrids, no graphs."
    model = model_of()
    for cache in (new(model, max_length=64, static=True), new(model, graphs=False)):
        generate(model, prompt(2, 20), "turboquant", cache=cache, disable_compile=True)
        del cache
        gc.collect()
        assert model not in _KEPT
    run(model, max_new_tokens=2)  # captured, not yet replayed
    assert model not in _KEPT
    monkeypatch.setattr(kept, "MOST", 100)
    run(model)
    assert model not in _KEPT
    monkeypatch.setattr(kept, "MOST", 256 * 2**20)
    other = copy.deepcopy(tiny(HYBRID[0]))
    run(other, cache=new(other, max_length=64))
    assert other not in _KEPT
    plain = TurboQuantCache(model, graphs=Tape)  # a class of the caller's
    generate(model, prompt(2, 20), "turboquant", cache=plain)
    del plain
    gc.collect()
    assert model not in _KEPT
    run(model)
    assert model in _KEPT
    release(model)
    assert model not in _KEPT
    release(model)


def left(model, holding=lambda cache: None):
    "The stores that a cache leaves, and what `holding` took of it."
    cache = new(model)
    generate(model, prompt(2, 20), "turboquant", cache=cache)
    held = holding(cache)
    for captured in cache.runner.held.values():
        captured.graph.calls.clear()  # as a graph of a GPU, which refers to no tensor
        captured.graph.out.clear()
    del cache, captured
    gc.collect()
    return _KEPT[model], held


HELD = {
    "a layer": lambda cache: cache.layers[1],
    "a store": lambda cache: cache.layers[0].store,
    "a part": lambda cache: cache.layers[0].store.value,
    "a memory": lambda cache: cache.layers[1].store.key.memory,
    "a tensor": lambda cache: cache.layers[1].store.key.memory.tensors["scale"],
    "exact tensors": lambda cache: cache.layers[0].store.value.exact.recent,
    "a mean": lambda cache: cache.layers[0].store.key.mean,
    "starts": lambda cache: cache.layers[0].store.start,
    "flags": lambda cache: cache.layers[0].store.flags,
    "a clock": lambda cache: cache.layers[0].store.clock,
    "a view": lambda cache: cache.layers[0].store.key.memory.tensors["plane0"][:1],
}


@pytest.mark.parametrize("what", HELD)
def test_what_somebody_holds_is_not_written_to(what):
    """The store is not taken while it is held; the mutant, one that nobody holds, is. Kills:
    codes of a conversation that another one's overwrite."""
    model = model_of()
    spare, held = left(model, HELD[what])
    assert held is not None and not _is_alone(spare.stores)
    del held
    gc.collect()
    assert _is_alone(spare.stores)
    spare, held = left(model, HELD[what])
    cache = new(model)
    assert run(model, cache=cache) == (1, 0)
    assert not any(x.store is y for x, y in zip(cache.layers, spare.stores))


def test_a_model_takes_what_is_kept_along():
    model = model_of()
    spare, _ = left(model)
    tensor = weakref.ref(spare.stores[0].key.memory.tensors["scale"])
    del spare
    assert tensor() is not None
    del model
    gc.collect()
    assert tensor() is None


def test_moved_stores_hold_the_same(trusting):
    """Codes, exact tokens, means, starts, lengths, and what kernels found: a flag that nobody
    has looked at is raised by the store that the codes are in now."""
    model = model_of()
    spare, _ = left(model)
    cache = new(model, graphs=False)
    inputs = prompt(2, 26, padded=True)
    generate(model, inputs, "turboquant", cache=cache, max_new_tokens=2)
    stores = [x.store for x in cache.layers]
    stores[0].flags = torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.int32)
    spare.stores[1].flags[2] = 1  # an earlier cache's
    addresses = [t.data_ptr() for s in spare.stores for t in s.key.tensors.values()]
    _move(stores, spare.stores)
    for a, b in zip(stores, spare.stores):
        assert a.length == b.length == int(b.clock.position) == 27
        assert torch.equal(a.start, b.start) and a.ranges.starts == b.ranges.starts
        for x, y in zip(a.read(last=27), b.read(last=27)):
            assert torch.equal(x, y)
        for side in ("key", "value"):
            for x, y in zip(a.exact(side), b.exact(side)):
                assert torch.equal(x, y)
    assert addresses == [t.data_ptr() for s in spare.stores for t in s.key.tensors.values()]
    with pytest.raises(ValueError, match="keys that were too large"):
        spare.stores[0].sync()
    assert spare.stores[1].sync() == 27


def test_nothing_is_kept_where_it_is_off(monkeypatch):
    "A runner that replays leaves and takes by itself, unless nothing may be kept."
    runner = TurboQuantCache(model_of()).runner
    assert runner.graphs is True and runner.keeps
    monkeypatch.setattr(kept, "MOST", 0)
    assert not runner.keeps
