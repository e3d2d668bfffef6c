"""Random sequences of operations on a cache against a dense model of it, and what is broken off
in a layer of several.

TURBOQUANT_SEQUENCES sets how many sequences of up to 40 operations are run (12 if unset, 60
with TURBOQUANT_SLOW=1; 10,000 before a release)."""

import copy
import os
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.cache.test_broken_off import ERRORS, Lines
from tests.cache.test_store import Dense as Held
from tests.helpers import (
    GROUP,
    HEADS,
    QUIETLY,
    SLOW,
    given_frame,
    refuses,
    seeded,
    sliding_config,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turboquant_nb.cache.attention import dense_attention
from turboquant_nb.hf import MARGIN, TurboQuantCache, layer_frequencies, turboquant_attention
from turboquant_nb.hf.layer import STEPS
from turboquant_nb.quant.quantizer import Spec, decode
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.cache.store import KVStore, expected_nbytes

SEQUENCES = int(os.environ.get("TURBOQUANT_SEQUENCES", 60 if SLOW else 12))
pytestmark = QUIETLY
D, WINDOW = 16, 20  # WINDOW: of the sliding layer 0; layer 1 sees everything
config = partial(sliding_config, WINDOW, "sliding_attention", "full_attention")
RECIPES = {
    "k3v3": Recipe(Spec(center="fixed"), sinks=2, recent=5),
    "no recent tokens": Recipe(Spec(4, center="fixed"), Spec(2), sinks=0, recent=0),
    "signs": Recipe(Spec(3, residual="sign"), Spec(3), sinks=1, recent=3),
    "qjl": Recipe(Spec(3, residual="qjl", center="fixed"), Spec(4), sinks=1, recent=7),
    "fractions": Recipe(Spec(2.5), Spec(3.25), sinks=3, recent=16),
    "pre_rope": Recipe(Spec(3, center="pre_rope"), Spec(3), sinks=2, recent=5),
    "pair scale": Recipe(Spec(3, pair_scale="frame"), Spec(3), sinks=2, recent=5),
    "all of a frame": Recipe(sinks=1, recent=4),
}


def frames():
    "A random frame of both layers, whose pair scales are powers of two: no key is rounded."
    held = given_frame(config())
    plain = lambda x: replace(x, pair=x.pair.log2().round().exp2())
    return replace(held, frames=tuple(map(plain, held.frames)))


class Dense(Held):
    """What a store holds in the slowest way, and what a layer adds: where the last chunk was
    one of a few tokens, its tail makes the window whole again."""

    tail = None  # (first exact position, first of the chunk)

    def append(self, k, v):
        old, n = self.length, k.shape[2]
        few = 1 < n <= STEPS and old and self.recipe.recent
        self.tail = (self.exact_from, old) if few else None
        super().append(k, v)

    def crop(self, n):
        super().crop(n)
        keep, recent = self.length, self.recipe.recent
        self.tail = self.tail if self.tail and self.tail[1] <= keep else None
        if self.tail:  # the window as the tokens that are left would have made it
            fresh = range(max(self.tail[0], keep - recent), keep)
            self.slots |= {p % recent: p for p in fresh}

    def rows(self, index):
        super().rows(lambda x: x[index])
        self.tail = None

    def check(self, got, first, whole=0):
        """What the cache reads from position `first` on is what it must be, the last `whole`
        tokens exactly."""
        exact = self.is_exact()[:, :, first:] | (
            torch.arange(first, self.length)[:, None] >= self.length - whole
        )
        for x, *held in zip(got, *map(self.plain, (self.raw, self.coded))):
            raw, coded = (y[:, :, first:] for y in held)
            assert x.shape == raw.shape
            kept = exact.expand_as(x)
            assert torch.equal(x[kept], raw[kept])
            near = lambda y, x=x: ((x - y).abs() <= 1e-5 * (1 + y.abs())).all(-1, True)
            assert bool((near(coded) | kept).all()), (x - coded).abs().max()

    def steps(self, coded, first, n):
        """What each of the last n queries sees from position `first` on: sinks and its own
        recent tokens exactly, the rest as it is coded."""
        p, recent = torch.arange(first, self.length), max(self.recipe.recent, 1)
        sink, raw = self.is_sink()[:, None, first:, None], self.plain(self.raw)
        for at in range(self.length - n, self.length):
            near = (p > at - recent) & (p >= (self.tail[0] if self.tail else self.length - n))
            exact = sink | near[:, None]
            yield [torch.where(exact, x[:, :, first:], y) for x, y in zip(raw, coded)]

    def seen(self, got, chunk):
        "What attention sees: the cache's own tokens (just checked), the chunk exactly."
        past = lambda x: x[:, :, : x.shape[2] - chunk]
        return [
            torch.cat([past(x), y[:, :, -chunk:]], 2) for x, y in zip(got, self.plain(self.raw))
        ]


class Machine(RuleBasedStateMachine):
    @initialize(
        recipe=st.sampled_from(sorted(RECIPES)),
        batch=st.integers(1, 3),
        seed=st.integers(0, 999),
        data=st.data(),
    )
    def start(self, recipe, batch, seed, data):
        self.config, self.g, held = config(), seeded(seed), frames()
        starts = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
        self.cache = TurboQuantCache(self.config, RECIPES[recipe], frame=held)
        self.cache.set_padding((torch.arange(10) >= torch.tensor(starts)[:, None]).long())
        self.dense = []
        freqs = layer_frequencies(self.config).by_layer
        for freq, frame, layer in zip(freqs, held.frames, self.cache.layers):
            store = KVStore(layer.recipe, batch, HEADS, D, frame=frame, inv_freq=freq)
            store.set_range(start=torch.tensor(starts))
            self.dense.append(Dense(store))
        self.length = self.longest = 0
        self.take(data.draw(st.sampled_from([10, 11, 35, 300])), True)

    @property
    def batch(self):
        return len(self.dense[0].start)

    def take(self, n, on_codes):
        """A chunk through both layers: what attention gives, or what `update` returns, is
        checked against dense attention over what the cache must hold."""
        self.cache.reader.asked = "codes" if on_codes else "dense"
        past = self.length
        self.length += n
        self.longest = max(self.longest, self.length)  # what was freed, was freed then
        draw = lambda heads: torch.randn(self.batch, heads, n, D, generator=self.g)
        for i, (layer, dense) in enumerate(zip(self.cache.layers, self.dense)):
            k, v = draw(HEADS), draw(HEADS)
            visible = max(0, past - WINDOW + 1) if i == 0 else 0
            dense.append(k, v)
            q, handles = draw(HEADS * GROUP), self.cache.update(k, v, i)
            if not on_codes:
                for h, x in zip(handles, (k, v)):
                    assert torch.equal(h[:, :, past - visible :], x)
                if past:  # dense layers get their own chunk exactly
                    dense.check(handles, visible, n)
                continue
            store = layer.store  # before the sliding layer frees
            got = [x[:, :, visible - store.offset :] for x in store.read()]
            out = turboquant_attention(None, q, *handles, None, 0.25)[0].transpose(1, 2)
            seen = (
                dense.seen(got, n)
                if past
                else [x[:, :, visible:] for x in dense.plain(dense.raw)]
            )
            at, p = torch.arange(past, self.length)[:, None], torch.arange(visible, self.length)
            mask = (p <= at) & (p >= dense.start[:, None, None, None])
            mask = mask & (p > at - WINDOW) if i == 0 else mask
            attend = lambda q, states, mask: dense_attention(q, *states, 0.25, mask=mask)[0]
            if past and 1 < n <= STEPS:
                steps = enumerate(dense.steps(self.coded(store, visible), visible, n))
                one = lambda x, j: x[:, :, j : j + 1]
                want = torch.cat([attend(one(q, j), x, one(mask, j)) for j, x in steps], 2)
            else:
                want = attend(q, seen, mask)
            real = mask.any(-1)[..., None].expand_as(out)
            assert torch.allclose(out[real], want[real], atol=2e-5)

    def coded(self, store, first):
        "What is read of codes alone, keys and values."
        out = []
        for side, name in zip(store.parts, ("key", "value")):
            span = name, first, self.length
            x = decode(side.q, store.coded(*span), store.center(*span), torch.float32)
            out.append(side.out_of_frame(x))
        return out

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 9, 16, 17, 40, 260]), on_codes=st.booleans())
    def append(self, n, on_codes):
        if self.length < 1500:
            self.take(n, on_codes)

    @rule(n=st.integers(1, 40))
    def crop(self, n):
        n = min(n, self.length - 10)
        if n > 0:
            self.cache.crop(-n)
            self.length -= n
            for dense in self.dense:
                dense.crop(n)

    @rule(n=st.integers(100, 900))
    def crop_too_much(self, n):
        "A sliding layer that freed what would be needed refuses, and stays as it was."
        layer = self.cache.layers[0]
        needed = self.length - n - WINDOW + 1
        if n < self.length and layer.store.offset and needed < layer.store.offset:
            with refuses("cannot crop"):
                layer.crop(-n)
            assert self.longest - self.length + n > MARGIN

    def rows(self, index):
        for dense in self.dense:
            dense.rows(index)

    @rule(data=st.data(), all_of=st.booleans())
    def select(self, data, all_of):
        "Other rows in the place of these, as many or fewer."
        least = self.batch if all_of else 1
        rows = st.lists(st.integers(0, self.batch - 1), min_size=least, max_size=self.batch)
        index = data.draw(rows)
        move = self.cache.reorder_cache if all_of else self.cache.batch_select_indices
        move(torch.tensor(index))
        self.rows(index)

    @precondition(lambda self: self.batch < 3)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.rows([i for i in range(self.batch) for _ in range(2)])

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(f"{folder}/c")
            self.cache = TurboQuantCache.load(f"{folder}/c", self.config)
        for dense in self.dense:
            dense.tail = None

    @rule()
    def offload(self):
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    @rule()
    def deepcopy(self):
        self.cache = copy.deepcopy(self.cache)

    @rule(what=st.sampled_from(["nan", "heads", "dtype", "batch", "layer"]))
    def refuse(self, what):
        "States that do not fit change nothing; the invariant looks."
        shape = self.batch + (what == "batch"), HEADS + (what == "heads"), 2, D
        x = torch.randn(shape, dtype=torch.float64 if what == "dtype" else torch.float32)
        if what == "nan":
            x[0, 0, 1, 3] = torch.nan
        with refuses("must be|must have|no layer 2"):
            self.cache.update(x, x, 2 if what == "layer" else 1)

    @invariant()
    def equals_the_dense_model(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.get_seq_length() == self.length
        for layer, dense in zip(self.cache.layers, self.dense):
            store = layer.store
            assert store.length == self.length and store.nbytes == expected_nbytes(store)
            assert list(layer.starts) == store.start.tolist() == dense.start.tolist()
            first = max(layer.first, store.offset)
            assert first == layer.first
            dense.check(store.read(first), first)


Machine.TestCase.settings = settings(
    max_examples=SEQUENCES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=SEQUENCES <= 60,
)
test_random_sequences = pytest.mark.usefixtures("one_thread")(Machine.TestCase)


# --- memory that runs out
# --------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 30])
def test_out_of_memory_in_a_cache(held):
    """A layer that failed is as before; the layers before it have taken the chunk, and
    `recover` gives it back. (test_broken_off.py: each line of an append.)"""
    cache = TurboQuantCache(config(), RECIPES["k3v3"], frame=frames())
    g = seeded()
    states = lambda n: [torch.randn(2, HEADS, n, D, generator=g) for _ in range(2)]
    for i in range(2 if held else 0):
        cache.update(*states(held), i)
    k, v = states(4)
    cache.update(k, v, 0)
    with pytest.raises(MemoryError), Lines(80, MemoryError):
        cache.update(k, v, 1)
    assert cache.layers[0].store.length == held + 4 and cache.layers[1].get_seq_length() == held
    assert cache.recover() == held
    assert [x.get_seq_length() for x in cache.layers] == [held, held]
    for i in range(2):
        cache.update(k, v, i)
    assert cache.get_seq_length() == held + 4


@pytest.mark.parametrize("change", ("reorder", "select", "repeat"))
def test_rows_of_several_layers_that_are_broken_off(change):
    """A layer has its old rows or its new ones, with their starts; after a reorder all layers
    have the same, whichever of them was broken off."""
    cache = TurboQuantCache(config(), RECIPES["k3v3"], frame=frames())
    cache.set_padding(torch.tensor([[0] * 3 + [1] * 17, [1] * 20]))
    g = seeded()
    for i in range(2):
        cache.update(*(torch.randn(2, HEADS, 20, D, generator=g) for _ in "kv"), i)
    of = torch.tensor([1, 0])
    update = {
        "reorder": lambda c: c.reorder_cache(of),
        "select": lambda c: c.batch_select_indices(of),
        "repeat": lambda c: c.batch_repeat_interleave(2),
    }[change]
    look = lambda c: [(x.starts, *x.store.read()) for x in c.layers]
    done = copy.deepcopy(cache)
    with Lines() as lines:
        update(done)
    old, new = look(cache), look(done)
    same = lambda a, b: a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
    assert not same(old[0], new[0])
    some = {line: i for i, line in enumerate(lines.seen)}.values()  # once at each line
    more = range(0, len(lines.seen), 1 if SLOW else 29)
    for at in sorted({*some, *more}):
        broken, error = copy.deepcopy(cache), ERRORS[at % 2]
        with pytest.raises(error), Lines(at, error) as lines:
            update(broken)
        now = look(broken)
        ends = [x for x in (old, new) if all(map(same, now, x))]
        assert ends, (error, lines.seen[-1])
