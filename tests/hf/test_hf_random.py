"""Random sequences of operations on a cache against a dense model of it, and what is broken off
in a layer of several.

TURBOQUANT_SEQUENCES sets how many sequences of up to 40 operations are run (12 if unset, 60
with TURBOQUANT_SLOW=1; 10,000 before a release)."""

import copy
import os
import tempfile
from dataclasses import replace

import pytest
import torch

from tests.cache.test_broken_off import ERRORS, Lines
from tests.helpers import QUIETLY, SLOW, given_frame, refuses, seeded

transformers = pytest.importorskip("transformers")
pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turboquant_nb.cache.attention import dense_attention
from turboquant_nb.hf import MARGIN, TurboQuantCache, layer_frequencies, turboquant_attention
from turboquant_nb.hf.layer import STEPS
from turboquant_nb.quant.codes import make_quantizer
from turboquant_nb.quant.quantizer import Coded, Spec, decode
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.cache.decay import coarser
from turboquant_nb.cache.store import expected_nbytes

SEQUENCES = int(os.environ.get("TURBOQUANT_SEQUENCES", 60 if SLOW else 12))
pytestmark = QUIETLY
HEADS, GROUP, D, WINDOW = (
    1,
    2,
    16,
    20,
)  # WINDOW: of the sliding layer 0; layer 1 sees everything
RECIPES = {
    "k3v3": Recipe(Spec(center="fixed"), sinks=2, recent=5),
    "no recent tokens": Recipe(Spec(4, center="fixed"), Spec(2), sinks=0, recent=0),
    "signs": Recipe(Spec(3, residual="sign"), Spec(3), sinks=1, recent=3),
    "qjl": Recipe(Spec(3, residual="qjl", center="fixed"), Spec(4), sinks=1, recent=7),
    "fractions": Recipe(Spec(2.5), Spec(3.25), sinks=3, recent=16),
    "decay": Recipe(Spec(4, center="fixed"), Spec(3), sinks=2, recent=4, decay=30),
    "pre_rope": Recipe(Spec(3, center="pre_rope"), Spec(3), sinks=2, recent=5),
    "pair scale": Recipe(Spec(3, pair_scale="frame"), Spec(3), sinks=2, recent=5),
    "all of a frame": Recipe(sinks=1, recent=4),
}


def config():
    c = transformers.Gemma3TextConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        head_dim=D,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    c._attn_implementation = "sdpa"
    return c


def frames():
    "A random frame of both layers, whose pair scales are powers of two: no key is rounded."
    held = given_frame(config())
    plain = lambda x: replace(x, pair=x.pair.log2().round().exp2())
    return replace(held, frames=tuple(map(plain, held.frames)))


class Dense:
    "One side of one layer: what every token was, and what is left of it once it is coded."

    def __init__(self, spec, recipe, starts, freq, frame):
        self.q, self.recipe, self.starts = make_quantizer(spec, D), recipe, starts
        self.pair = frame.pair[:, None] if spec.pair_scale == "frame" else torch.ones(())
        mean = dict(none=None, fixed=frame.fixed, pre_rope=frame.mean)[spec.center]
        self.mean = None if mean is None else (mean[:, None] * self.pair).bfloat16().float()
        self.freq = freq if spec.center == "pre_rope" else None
        self.exact = self.coded = self.truncated = torch.zeros(len(starts), HEADS, 0, D)
        self.fresh = torch.zeros(
            0, dtype=torch.bool
        )  # tokens that have not left the window yet
        # (first exact position, first of the chunk) while the last chunk was one of a few
        # tokens
        self.tail = None

    def rotate(self, x, n):
        "As RoPE rotates the next n tokens of each row."
        if self.freq is None:
            return x
        at = torch.arange(n) + self.exact.shape[2] - torch.tensor(self.starts)[:, None]
        angle = at.clamp(min=0)[:, None, :, None].float() * self.freq
        c, s = (f(angle).half().float() for f in (torch.cos, torch.sin))
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    def append(self, x):
        center = None if self.mean is None else self.rotate(self.mean, x.shape[2])
        mean = 0 if center is None else center.float()
        coded = self.q.encode(x * self.pair, center, "x")
        back = lambda q, c: (q.rotation.inverse(q.decode_rotated(c)) + mean) / self.pair
        truncated = coded = back(self.q, coded), coded
        if self.recipe.decay is not None:
            old = make_quantizer(coarser(self.q.spec, D), D)
            truncated = back(old, Coded(coded[1].codes >> 1, coded[1].scale)), None
        old, recent = self.exact.shape[2], self.fresh.nonzero()
        self.tail = (
            (int(recent[0]) if len(recent) else old, old)
            if 1 < x.shape[2] <= STEPS and old and self.recipe.recent
            else None
        )
        self.exact, self.coded, self.truncated = (
            torch.cat([a, b], 2)
            for a, b in (
                (self.exact, x),
                (self.coded, coded[0]),
                (self.truncated, truncated[0]),
            )
        )
        n = self.exact.shape[2]
        self.fresh = torch.cat([self.fresh, torch.ones(x.shape[2], dtype=torch.bool)]) & (
            torch.arange(n) >= n - self.recipe.recent
        )

    def crop(self, n):
        keep = self.exact.shape[2] - n
        self.exact, self.coded, self.truncated = (
            x[:, :, :keep] for x in (self.exact, self.coded, self.truncated)
        )
        self.fresh = self.fresh[:keep]
        self.tail = self.tail if self.tail and self.tail[1] <= keep else None
        if self.tail:  # the window as the tokens that are left would have made it
            self.fresh = torch.arange(keep) >= max(self.tail[0], keep - self.recipe.recent)

    def rows(self, index):
        self.exact, self.coded, self.truncated = (
            x[index] for x in (self.exact, self.coded, self.truncated)
        )
        self.starts, self.tail = [self.starts[i] for i in index], None

    def is_exact(self):
        "[B, 1, T, 1]: sinks and window."
        p, start = torch.arange(self.exact.shape[2]), torch.tensor(self.starts)[:, None]
        return (((p >= start) & (p < start + self.recipe.sinks)) | self.fresh)[:, None, :, None]

    def check(self, got, first):
        "What the cache reads from position `first` on is what it must be."
        exact, coded, truncated = (
            x[:, :, first:] for x in (self.exact, self.coded, self.truncated)
        )
        assert got.shape == exact.shape
        kept = self.is_exact()[:, :, first:].expand_as(got)
        assert torch.equal(got[kept], exact[kept])
        near = lambda x: (got - x).abs() <= 1e-5 * (1 + x.abs())
        ok = (near(coded).all(-1) | near(truncated).all(-1))[..., None].expand_as(got)
        assert bool((ok | kept).all()), (got - coded).abs().amax(-1)

    def steps(self, coded, first, n):
        """What each of the last n queries sees from position `first` on: sinks and its own
        recent tokens exactly, the rest as it is coded."""
        length = self.exact.shape[2]
        p, start = torch.arange(first, length), torch.tensor(self.starts)[:, None]
        sink = ((p >= start) & (p < start + self.recipe.sinks))[:, None, :, None]
        for at in range(length - n, length):
            near = (p > at - max(self.recipe.recent, 1)) & (
                p >= (self.tail[0] if self.tail else length - n)
            )
            yield torch.where(sink | near[:, None], self.exact[:, :, first:], coded)

    def seen(self, got, chunk):
        "What attention sees: the cache's own tokens (just checked), the chunk exactly."
        return torch.cat(
            [
                got[:, :, : got.shape[2] - chunk],
                self.exact[:, :, self.exact.shape[2] - chunk :],
            ],
            2,
        )


class Machine(RuleBasedStateMachine):
    @initialize(
        recipe=st.sampled_from(sorted(RECIPES)),
        batch=st.integers(1, 3),
        seed=st.integers(0, 999),
        data=st.data(),
    )
    def start(self, recipe, batch, seed, data):
        self.config, self.recipe, self.g = (config(), RECIPES[recipe], seeded(seed))
        starts = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
        self.cache, held = TurboQuantCache(self.config, self.recipe, frame=frames()), frames()
        self.cache.set_padding((torch.arange(10) >= torch.tensor(starts)[:, None]).long())
        freqs = layer_frequencies(self.config).by_layer
        self.dense = [
            [
                Dense(spec, self.recipe, starts, freq, frame)
                for spec in (layer.recipe.key, layer.recipe.value)
            ]
            for freq, frame, layer in zip(freqs, held.frames, self.cache.layers)
        ]
        self.length = self.longest = 0
        self.take(data.draw(st.sampled_from([10, 11, 35, 300])), True)

    @property
    def batch(self):
        return len(self.dense[0][0].starts)

    def take(self, n, on_codes):
        """A chunk through both layers: what attention gives, or what `update` returns, is
        checked against dense attention over what the cache must hold."""
        self.cache.reader.asked = "codes" if on_codes else "dense"
        past = self.length
        self.length += n
        self.longest = max(self.longest, self.length)  # what was freed, was freed then
        for i, (layer, sides) in enumerate(zip(self.cache.layers, self.dense)):
            k, v = (torch.randn(self.batch, HEADS, n, D, generator=self.g) for _ in range(2))
            visible = max(0, past - WINDOW + 1) if i == 0 else 0
            for side, x in zip(sides, (k, v)):
                side.append(x)
            q = torch.randn(self.batch, HEADS * GROUP, n, D, generator=self.g)
            handles = self.cache.update(k, v, i)
            if not on_codes:
                assert all(
                    torch.equal(h[:, :, past - visible :], x) for h, x in zip(handles, (k, v))
                )
                if past:
                    for side, h in zip(sides, handles):
                        rest = side.fresh.clone()
                        side.fresh[past:] = True  # dense layers get their own chunk exactly
                        side.check(h, visible)
                        side.fresh = rest
                continue
            got = [
                x[:, :, visible - layer.store.offset :] for x in layer.store.read()
            ]  # before the sliding layer frees
            names = ("key", "value")
            center = lambda name: layer.store.center(name, visible, self.length)
            coded = [
                s.out_of_frame(
                    decode(
                        s.q,
                        layer.store.coded(name, visible, self.length),
                        center(name),
                        torch.float32,
                    )
                )
                for s, name in zip(layer.store.parts, names)
            ]
            out = turboquant_attention(None, q, *handles, None, 0.25)[0].transpose(1, 2)
            seen = [
                side.seen(x, n) if past else side.exact[:, :, visible:]
                for side, x in zip(sides, got)
            ]
            at, p = torch.arange(past, self.length)[:, None], torch.arange(visible, self.length)
            mask = (p <= at) & (p >= torch.tensor(sides[0].starts)[:, None, None, None])
            mask = mask & (p > at - WINDOW) if i == 0 else mask
            want = dense_attention(q, *seen, 0.25, mask=mask)[0]
            if past and 1 < n <= STEPS:
                pairs = zip(*(side.steps(x, visible, n) for side, x in zip(sides, coded)))
                want = torch.cat(
                    [
                        dense_attention(
                            q[:, :, j : j + 1], *pair, 0.25, mask=mask[:, :, j : j + 1]
                        )[0]
                        for j, pair in enumerate(pairs)
                    ],
                    2,
                )
            real = mask.any(-1)[..., None].expand_as(out)
            assert torch.allclose(out[real], want[real], atol=2e-5)

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
            for sides in self.dense:
                for side in sides:
                    side.crop(n)

    @rule(n=st.integers(100, 900))
    def crop_too_much(self, n):
        "A sliding layer that freed what would be needed refuses, and stays as it was."
        layer = self.cache.layers[0]
        if (
            n < self.length
            and layer.store.offset
            and self.length - n - WINDOW + 1 < layer.store.offset
        ):
            with refuses("cannot crop"):
                layer.crop(-n)
            assert self.longest - self.length + n > MARGIN

    def rows(self, index):
        for sides in self.dense:
            for side in sides:
                side.rows(index)

    @rule(data=st.data())
    def reorder(self, data):
        index = data.draw(
            st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch)
        )
        self.cache.reorder_cache(torch.tensor(index))
        self.rows(index)

    @rule(data=st.data())
    def select(self, data):
        index = data.draw(
            st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=self.batch)
        )
        self.cache.batch_select_indices(torch.tensor(index))
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
        for sides in self.dense:
            for side in sides:
                side.tail = None

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
        x = torch.randn(
            self.batch + (what == "batch"),
            HEADS + (what == "heads"),
            2,
            D,
            dtype=torch.float64 if what == "dtype" else torch.float32,
        )
        if what == "nan":
            x[0, 0, 1, 3] = torch.nan
        with refuses("must be|must have|no layer 2"):
            self.cache.update(x, x, 2 if what == "layer" else 1)

    @invariant()
    def equals_the_dense_model(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.get_seq_length() == self.length
        for layer, sides in zip(self.cache.layers, self.dense):
            store = layer.store
            assert store.length == self.length and store.nbytes == expected_nbytes(store)
            assert list(layer.starts) == store.start.tolist() == sides[0].starts
            first = max(layer.first, store.offset)
            assert first == layer.first
            for side, got in zip(sides, store.read(first)):
                side.check(got, first)


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
        "select": lambda c: c.layers[0].batch_select_indices(of),
        "repeat": lambda c: c.layers[0].batch_repeat_interleave(2),
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
