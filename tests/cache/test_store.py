"""The store against a dense model of it: random sequences of every operation, byte counts,
files, and refusals that change nothing."""

import copy
import pickle
import random
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch

from tests.helpers import ONE_THREAD, SLOW, random_frame, recording, refuses, seeded
from turboquant_nb.cache.store import (
    KVStore,
    bytes_by_kind,
    expected_nbytes,
    row_tensors,
    tables_of,
)
from turboquant_nb.quant.quantizer import Spec, decode
from turboquant_nb.quant.recipe import Recipe, as_recipe, preset
from turboquant_nb.quant.codes import make_quantizer
from turboquant_nb.cache.exact import ExactTokens
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.testing import same

pytestmark = ONE_THREAD


def make(recipe="k3v3", batch=2, heads=2, d=8, dv=None, **kwargs):
    "A store whose layer has a frame, unless it is said that it has none."
    if "frame" not in kwargs:
        kwargs["frame"] = frame_for(heads, d, kwargs.get("inv_freq"))
    recipe = as_recipe(recipe)
    return KVStore(recipe, batch, heads, d, dv, **kwargs)


def frame_for(heads, d, inv_freq=None):
    return random_frame(heads, d, 0 if inv_freq is None else 2 * len(inv_freq))


def states(store, n, seed=0, scale=1.0):
    g = seeded(seed)
    shape = (store.batch, store.heads, n)
    return tuple(
        (torch.randn(*shape, side.q.d, generator=g) * scale + 0.5).to(store.dtype)
        for side in (store.key, store.value)
    )


def rotated(x, positions, inv_freq):
    "x [.., n, d] rotated pair by pair as complex numbers, cosines and sines in fp16."
    angle, half = positions.float()[..., None] * inv_freq, len(inv_freq)
    by = torch.complex(angle.cos().half().float(), angle.sin().half().float())
    z = torch.complex(x[..., :half].float(), x[..., half : 2 * half].float()) * by
    return torch.cat([z.real, z.imag, x[..., 2 * half :].float()], -1)


def snapshot(store):
    out = {
        f"{i}.{n}.{k}": t.clone()
        for i, run in enumerate(store.runs)
        for n in ("key", "value")
        for k, t in getattr(run, n).tensors.items()
    }
    return out | {
        "start": torch.tensor(store.start.tolist()),
        "numbers": (
            store.length,
            store.offset,
            store._recent_from,
            store.batch,
            *((run.offset, run.length) for run in store.runs),
        ),
    }


def assert_same_snapshot(a, b):
    assert a.keys() == b.keys()
    for n in a:
        if isinstance(a[n], torch.Tensor):
            same(a[n], b[n], allow_empty=True)
        else:
            assert a[n] == b[n], n


class Dense:
    """What a store must hold, in the slowest way: the states of each row, keys times the pair
    scale of the frame, and what coding them gives with its mean. A position is exact if it is
    one of the first `sinks` of its row, or the last that was written to its slot of a ring of
    `recent` slots. Positions below `old` have lost the last bit of codes of 3 and 4 bits."""

    def __init__(self, store):
        self.recipe, self.dtype = store.recipe, store.dtype
        self.raw = [
            torch.zeros(store.batch, store.heads, 0, s.q.d, dtype=store.dtype)
            for s in (store.key, store.value)
        ]
        self.coded = [x.clone() for x in self.raw]
        self.start, self.slots, self.inv_freq = (
            store.start.clone(),
            {},
            store.cos_sin and store.cos_sin.inv_freq,
        )
        spec, frame = store.recipe.key, store.frame
        held = lambda x: x.bfloat16().float()[None, :, None]
        self.pair = held(frame.pair) if spec.pair_scale == "frame" else None
        self.mean = {"none": None, "fixed": frame.fixed, "pre_rope": frame.mean}[spec.center]
        if self.mean is not None:
            scale = 1 if self.pair is None else self.pair[0, :, 0]
            self.mean = held(self.mean * scale)

    @property
    def length(self):
        return self.raw[0].shape[2]

    def append(self, *new):
        if not new[0].shape[2]:
            return
        recent = self.recipe.recent
        self.slots |= {
            p % recent: p for p in range(self.length, self.length + new[0].shape[2]) if recent
        }
        first = self.length
        for i, x in enumerate(new):
            if i == 0 and self.pair is not None:
                x = (x.float() * self.pair).to(self.dtype)
            coded = self.as_coded(i, x, first)
            self.raw[i] = torch.cat([self.raw[i], x], 2)
            self.coded[i] = torch.cat([self.coded[i], coded], 2)

    def as_coded(self, i, x, first):
        "What states from position `first` on are read as."
        at = torch.arange(first, first + x.shape[2])
        at = (at - self.start[:, None]).clamp(min=0)[:, None]  # [B, 1, n], from the first token
        spec, mean = (self.recipe.key, self.recipe.value)[i], None
        if i == 0 and self.mean is not None:
            mean = self.mean.expand(len(self.start), -1, -1, -1)
        q = make_quantizer(spec, x.shape[3])
        if spec.center == "pre_rope":
            mean = rotated(mean.expand(-1, -1, x.shape[2], -1), at, self.inv_freq)
        return decode(q, q.encode(x, mean), mean, self.dtype)

    @property
    def exact_from(self):
        "First position from which on all tokens are in the ring."
        first, recent = self.length, self.recipe.recent
        while (
            first > max(0, self.length - recent)
            and self.slots.get((first - 1) % recent) == first - 1
        ):
            first -= 1
        return first

    def crop(self, n):
        if n:
            self.raw, self.coded = (
                [x[:, :, : self.length - n] for x in pair] for pair in (self.raw, self.coded)
            )

    def rows(self, f):
        self.raw, self.coded = ([f(x) for x in pair] for pair in (self.raw, self.coded))
        self.start = f(self.start)

    def read(self, first=0):
        return self.plain(x[:, :, first:] for x in self.framed())

    def plain(self, states):
        "Keys and values of the frame as they are outside of it."
        k, v = states
        return [k if self.pair is None else (k.float() / self.pair).to(self.dtype), v]

    def is_sink(self):
        "[B, T]: the first tokens of each row."
        p, start = torch.arange(self.length), self.start[:, None]
        return (p >= start) & (p < start + self.recipe.sinks)

    def is_exact(self):
        "[B, 1, T, 1]: sinks and window."
        recent = torch.zeros(self.length, dtype=torch.bool)
        recent[[p for p in self.slots.values() if p < self.length]] = True
        return (recent | self.is_sink())[:, None, :, None]

    def framed(self):
        exact = self.is_exact()
        return [torch.where(exact, raw, coded) for raw, coded in zip(self.raw, self.coded)]


def check(store, dense):
    assert store.length == dense.length and store.nbytes == expected_nbytes(store) == sum(
        bytes_by_kind(store).values()
    )
    got, want = store.read(), dense.read(store.freed)
    real = (torch.arange(store.freed, store.length) >= store.start[:, None])[
        :, None, :, None
    ]  # padding may be exact or coded
    for a, b in zip(got, want):
        assert a.dtype == store.dtype and a.shape == b.shape
        a, b = a.where(real, 0), b.where(real, 0)
        same(a, b, allow_empty=True)
    if store.length > store.freed:
        parts = [part for run in store.runs for part in run.parts]
        held = [t for part in parts for t in part.tensors.values()]
        held += [store.start, store.clock.position, store.flags]
        # the frame is one tensor, whoever holds it
        total = sum({id(t): t.nbytes for t in held if t is not None}.values())
        assert total == store.nbytes
        values = (
            store.batch
            * store.heads
            * (store.length - store.freed)
            * (store.key.q.d + store.value.q.d)
        )
        assert store.bits_per_value() == 8 * store.nbytes / values


def random_bits(rng, d):
    return rng.choice(
        (
            1,
            2,
            3,
            4,
            3,
            4,
            rng.randint(1, 3) + rng.randint(1, d - 1) / d,
            tuple(rng.randint(1, 4) for _ in range(d)),
        )
    )


def random_recipe(rng, d, dv, limit=None, static=False):
    def spec(d, **frame):
        bits = random_bits(rng, d)
        residual = (
            rng.choice(("none", "sign", "sign" if static else "qjl"))
            if isinstance(bits, int) and bits > 1
            else "none"
        )
        return Spec(
            bits,
            rng.choice(("hadamard", "haar", "identity")),
            rng.randrange(3),
            rng.choice(("norm", "mse", "unbiased")),
            rng.choice(("sphere", "uniform")),
            scale_dtype=rng.choice(("float16", "bfloat16", "float32")),
            residual=residual,
            **{name: rng.choice(choices) for name, choices in frame.items()},
        )

    return Recipe(
        spec(d, center=("none", "fixed", "pre_rope"), pair_scale=("none", "frame")),
        spec(dv or d),
        rng.choice((0, 1, 2, 4, 7)),
        rng.choice((0, 0, 1, 3, 8, 20)),
    )


@pytest.mark.parametrize("block", range(20 if SLOW else 10))
def test_random_operation_sequences(block):
    """10 or 20 x 16 sequences of about 15 operations; after each one, every byte that can be
    read and every count."""
    for trial in range(16):
        rng = random.Random(1000 * block + trial)
        dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
        tile, limit = rng.choice((4, 8, 16)), rng.choice((None, None, 90))
        d, dv = rng.choice((4, 5, 8)), rng.choice((None, 4, 7))
        static, freq = (
            limit is not None and rng.random() < 0.6,
            0.7 ** torch.arange(1.0, rng.randint(1, d // 2) + 1),
        )
        more = dict(dtype=dtype, tile=tile, static=static, inv_freq=freq)
        more |= {} if limit is None else {"max_length": limit}
        store = make(
            random_recipe(rng, d, dv, limit, static),
            rng.randint(1, 3),
            rng.randint(1, 2),
            d,
            dv,
            **more,
        )
        if rng.random() < 0.4:
            store.set_range(start=torch.tensor([rng.randint(0, 6) for _ in range(store.batch)]))
        dense = Dense(store)
        for step in range(rng.randint(6, 18)):
            what = rng.choice(
                ("append",) * 5
                + ("crop", "crop", "select", "repeat", "to", "evict", "copy", "state")
            )
            if what == "append":
                n = rng.choice((0, 1, 1, 2, 3, 7, 17, 30))
                k, v = states(store, n, seed=rng.randrange(10**6))
                if limit is not None and store.length - store.freed + n > limit:
                    before = snapshot(store)
                    with refuses("max_length is 90"):
                        store.append(k, v)
                    assert_same_snapshot(snapshot(store), before)
                    continue
                dense.append(k, v)
                store.append(k, v)
            elif what == "crop":
                n = rng.randint(0, store.length - store.freed)
                if n == store.length > 0 and rng.random() < 0.7:
                    n //= 2
                if store.freed and store.length - n < store.freed + 1:
                    continue
                store.crop(rng.choice((n, -n)))
                dense.crop(n)
            elif what == "select" and store.batch:
                index = torch.tensor(
                    [
                        rng.randrange(-store.batch, store.batch)
                        for _ in range(store.batch if static else rng.randint(1, 3))
                    ]
                )
                store.select(index)
                dense.rows(lambda x: x[index])
            elif what == "repeat" and store.batch < 3 and not static:
                store.select(torch.arange(store.batch).repeat_interleave(2))
                dense.rows(lambda x: x.repeat_interleave(2, 0))
            elif what == "state":
                store = store_of(*state_of(store), max_length=store.max_length)
            elif what == "to":
                store.to("cpu")
            elif what == "copy":
                store = copy.deepcopy(store)
            elif what == "evict" and not static:
                before = rng.randint(0, store.length + 3)
                old = store.freed
                store.evict(before)
                assert (
                    old <= store.freed <= max(old, before)
                    and (store.freed - old) % tile == 0
                    and store.length - store.freed >= 0
                )
            check(store, dense)


def test_the_dense_model_can_fail():
    "Mutants: a forgotten sink, a window too long, another mean, another scale, none."
    key = Spec(center="fixed", pair_scale="frame")
    store = make(Recipe(key, Spec(), sinks=2, recent=3))
    dense = Dense(store)
    k, v = states(store, 20)
    store.append(k, v)
    dense.append(k, v)
    check(store, dense)
    for field, wrong in (("sinks", 3), ("recent", 4), ("sinks", 1), ("recent", 2)):
        other = Dense(
            make(
                Recipe(
                    store.recipe.key,
                    store.recipe.value,
                    **{"sinks": 2, "recent": 3, field: wrong},
                )
            )
        )
        other.raw, other.coded = dense.raw, dense.coded
        with pytest.raises(AssertionError):
            check(store, other)
    for name in ("mean", "pair"):
        for wrong in (None, 1.25 * getattr(dense, name)):
            other = Dense(store)
            setattr(other, name, wrong)
            other.append(k, v)
            with pytest.raises(AssertionError):
                check(store, other)


@pytest.mark.parametrize("room", [dict(), dict(max_length=700), dict(tokens=300)])
def test_memory_that_was_somebodys_holds_nothing(room, monkeypatch):
    """A store in memory that others have filled holds what one in fresh memory does, before an
    append, after it, when it has grown and when tiles went: whatever is made is cleared.
    Kills: a kind of tensor that `clear` is not given."""
    recipes = (
        Recipe(Spec(3, center="fixed"), Spec(4)),
        Recipe(Spec(3, pair_scale="frame"), Spec(2, residual="qjl"), sinks=3, recent=5),
    )

    def held(recipe):
        store = make(recipe, tile=64, **room)
        out = [snapshot(store)]
        for n in (5, 70, 200):
            store.append(*states(store, n))
            out.append(snapshot(store))
        store.evict(130)
        return [*out, snapshot(store)]

    def filled(make):
        return lambda *args, **how: (
            make(*args, **how)
            .view(torch.uint8)
            .fill_(90)
            .view(how.get("dtype") or args[0].dtype)
        )

    want = [held(recipe) for recipe in recipes]
    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    for recipe, old in zip(recipes, want):
        for a, b in zip(held(recipe), old):
            assert_same_snapshot(a, b)


@pytest.mark.parametrize("changes", range(4))
def test_a_copy_knows_where_its_rows_begin(changes):
    "The host's numbers are those of the tensor, whoever of a store and its copies moves them."
    store = make(Recipe(), 2)
    for i in range(changes):
        store.set_range(start=torch.tensor([i + 1, 0]))
        assert store.ranges.starts == (i + 1, 0)
    for again in (copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))):
        held = again(store.ranges)
        assert held.starts == store.ranges.starts
        for i in range(3):
            held.begin(torch.tensor([5 + i, 1]), True)
            assert held.starts == tuple(held.start.tolist()) == (5 + i, 1)
        store.ranges.begin(torch.tensor([changes, 0]), True)  # which `copy.copy` shares


# ----------------------------------------------------------------------------

FREQ = 0.5 ** torch.arange(1.0, 4)  # 6 of 8 channels rotate
PRE_ROPE = Recipe(Spec(2, center="pre_rope"), Spec(), sinks=0, recent=0)


def test_one_table_for_all_stores():
    "It grows with the longest, is counted once, and another model has another."
    a, b = (make(PRE_ROPE, 1, inv_freq=FREQ) for _ in range(2))
    c, fixed = (
        make(PRE_ROPE, 1, inv_freq=FREQ * 2),
        make(PRE_ROPE, 1, inv_freq=FREQ, max_length=50, static=True),
    )
    held = fixed.rope_table
    a.append(*states(a, 700))
    a.read()
    assert len(a.rope_table) == 768  # whole tiles; reading takes no room for more
    # each counts what it needs
    assert [tables_of(s)[1].shape[0] for s in (a, b)] == [768, 0]
    assert a.rope_table is b.rope_table and a.rope_table.dtype == torch.float16
    assert c.rope_table is not a.rope_table and len(c.rope_table) == 0
    assert fixed.rope_table is held and len(held) == 50
    pointers = [t.data_ptr() for t in tables_of(a)]
    assert a.rope_table.data_ptr() in pointers and a.cos_sin.inv_freq.data_ptr() in pointers


@pytest.mark.parametrize(
    "lacks, center, scale",
    (
        ((), "pre_rope", "frame"),
        (("mean",), "fixed", "frame"),
        (("mean", "pair"), "fixed", "none"),
        (("mean", "fixed", "pair"), "none", "none"),
    ),
)
def test_a_preset_takes_what_the_frame_has(lacks, center, scale):
    "Without any frame it takes nothing, as with one that has nothing."
    frame = replace(random_frame(2, 8, 6), **dict.fromkeys(lacks))
    frames = (frame, None) if center == "none" else (frame,)
    named = replace(preset("k3v3"), key=Spec(3, center=center, pair_scale=scale))
    for given in frames:
        stores = [make(r, inv_freq=FREQ, frame=given) for r in ("k3v3", Recipe(), named)]
        for s in stores:
            assert s.recipe.key == s.key.q.spec == named.key
            assert (s.cos_sin is None) == (center != "pre_rope")
            assert s.key.frame_names == tuple(
                n for n, x in (("mean", center), ("pair", scale)) if x != "none"
            )


@pytest.mark.parametrize(
    "key, frame, error, why",
    (
        (dict(center="fixed"), None, ValueError, "center='fixed' needs a frame with 'fixed'"),
        (dict(center="pre_rope"), None, ValueError, "'pre_rope' needs a frame with 'mean'"),
        (dict(pair_scale="frame"), None, ValueError, "'frame' needs a frame with 'pair'"),
        (dict(center="pre_rope"), (2, 8), ValueError, "'pre_rope' needs a frame with 'mean'"),
        (dict(center="fixed"), (3, 8), ValueError, "the frame's fixed must have shape"),
        (dict(pair_scale="frame"), (2, 6), ValueError, "the frame's pair must have shape"),
        (dict(center="fixed"), "of the model", TypeError, "frame must be a LayerFrame"),
        (dict(center="auto"), 2, TypeError, "frame must be a LayerFrame"),
    ),
)
def test_a_frame_that_does_not_serve_is_refused(key, frame, error, why):
    frame = random_frame(*frame) if isinstance(frame, tuple) else frame
    with refuses(why, error):
        make(Recipe(Spec(3, **key), Spec(3)), inv_freq=FREQ, frame=frame)


def test_a_store_holds_the_frame_it_was_given():
    "Once for all rows and all stores of the layer: the mean times the scale, as bf16."
    frame = random_frame(2, 8, 6)
    for center, mean in (("fixed", frame.fixed), ("pre_rope", frame.mean)):
        key = Spec(3, center=center, pair_scale="frame")
        store = make(Recipe(key, Spec(3)), batch=3, inv_freq=FREQ, frame=frame)
        pair = frame.pair.bfloat16()
        same(store.key.frame.pair[0, :, 0], pair)
        same(store.key.mean[0, :, 0], (mean * pair.float()).bfloat16())
        other = make(store.recipe, batch=2, inv_freq=FREQ, frame=frame)
        assert other.key.mean is store.key.mean and len(store.key.mean) == 1
        assert store.value.mean is None and store.value.frame_names == ()
        store.append(*states(store, 9))
        store.crop(9)
        same(store.key.frame.pair[0, :, 0], pair)  # an empty store has it, too


# ---------------------------------------------------------------------------------------


def captured(store, k, v):
    "What a captured append runs."
    with recording():
        store.append(k, v)


@pytest.mark.parametrize(
    "recipe, padding",
    (
        ("k3v3", (0, 5)),
        (Recipe(Spec(2.5, center="fixed"), Spec((1, 2, 3, 4) * 2), 2, 3), (0, 5)),
        (PRE_ROPE, (0, 5)),
        (Recipe(Spec(3, residual="sign"), Spec(1), 0, 5), (0, 5)),
    ),
)
def test_where_the_device_counts(recipe, padding):
    """Eager and captured appends to a static store leave what a plain store holds, and no
    tensor moves."""
    plain = make(recipe, tile=16, max_length=90, inv_freq=FREQ)
    lengths = (20, 1, 1, 30)
    torch._dynamo.reset()
    for add in (
        KVStore.append,
        captured,
        torch.compile(KVStore.append, backend="eager", fullgraph=True),
    ):
        store = make(recipe, tile=16, max_length=90, static=True, inv_freq=FREQ)
        held = [
            t.data_ptr()
            for t in (*row_tensors(store), store.clock.position, store.flags, *tables_of(store))
        ]
        for s in (store, plain):
            s.crop(s.length)
            s.set_range(start=torch.tensor(padding))
        for i, n in enumerate(lengths):
            k, v = states(store, n, seed=i)
            add(store, k, v)
            plain.append(k, v)
            assert int(store.clock.position) == plain.length
        assert (
            store.sync() == store.length == plain.length
            and store.nbytes == expected_nbytes(store) == plain.nbytes + 4 + 24
        )
        real = (torch.arange(plain.length) >= plain.start[:, None])[:, None, :, None]
        for a, b in zip(store.read(), plain.read()):
            same(a.where(real, 0), b.where(real, 0))
        assert held == [
            t.data_ptr()
            for t in (*row_tensors(store), store.clock.position, store.flags, *tables_of(store))
        ]


def test_what_a_recording_cannot_refuse():
    "Bad states and too many tokens become NaN, and `sync` says so, once."
    store = make("k3v3", max_length=30, static=True)
    good = states(store, 10)
    store.append(*good)
    bad = good[1].clone()
    bad[0, 1, 2, 3] = torch.nan
    captured(store, good[0], bad)
    assert store.value.memory.numbers("scale", 0, 20).isnan().nonzero().tolist() == [[0, 1, 12]]
    with refuses("values that were not finite"):
        store.sync()
    assert store.sync() == 20
    for n in (5, 7):
        captured(store, good[0][:, :, :n], good[1][:, :, :n])
    assert int(store.clock.position) == 25
    with refuses("more tokens than max_length"):
        store.sync()
    assert store.sync() == 25 and store.key.memory.numbers("scale", 24, 25).isnan().all()
    store.crop(15)
    store.append(*good)
    assert store.length == int(store.clock.position) == 20 and not any(
        x.isnan().any() for x in store.read()
    )


# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("center", ("fixed", "pre_rope"))
def test_a_padded_row_is_coded_as_one_alone(center, gen):
    """A row that starts at 5 is coded as if the padding were not there, also where it is found
    out after the first chunk."""
    recipe = Recipe(Spec(center=center, pair_scale="frame"), Spec(), sinks=2)
    k, v = torch.randn(2, 1, 2, 30, 8, generator=gen) + 3
    alone = make(recipe, 1, inv_freq=FREQ)
    alone.append(k, v)
    for padding in (1, 5, 40):
        pad = torch.randn(1, 2, padding, 8, generator=gen) * 10
        early, late = (make(recipe, 1, inv_freq=FREQ) for _ in range(2))
        padded = [torch.cat([pad, x], 2) for x in (k, v)]
        early.set_range(start=padding)
        early.append(*padded)
        late.append(*padded)
        late.set_range(padding, *padded)
        for store in (early, late):
            for a, b in zip(store.read(padding), alone.read()):
                same(a, b)


# ---------------------------------------------------------------------------------


def test_evict_frees_bytes():
    store = make(Recipe(sinks=1, recent=4), tile=8)
    store.append(*states(store, 200))
    before = store.nbytes
    store.evict(100)
    assert store.offset == 96 and store.nbytes < before * 0.6
    for first in (95, 201, -1):
        with refuses("positions"):
            store.read(first)
    with refuses("cannot crop 105"):
        store.crop(105)
    for before, offset in ((10, 96), (103, 96), (104, 104)):  # whole tiles, one too
        store.evict(before)
        assert store.offset == offset
    for _ in range(50):  # a sliding window for ever: bounded memory
        store.append(*states(store, 9))
        store.evict(store.length - 40)
    assert store.capacity <= 80 and store.nbytes == expected_nbytes(store)


# -----------------------------------------------------------


def test_a_moved_start_fills_the_window_again():
    "After a crop part of the window is stale; coding all tokens again makes it whole."
    store = make(Recipe(sinks=2, recent=8), tile=8)
    k, v = states(store, 50)
    store.append(k, v)
    store.crop(6)
    assert store.clock.exact_from(store) == 42
    store.set_range(start=1, k=k[:, :, :44], v=v[:, :, :44])
    assert store.clock.exact_from(store) == 36
    pair = store.key.frame.pair  # by which exact keys are multiplied, and divided again
    same(store.read()[0][:, :, 36:], (k[:, :, 36:44] * pair) / pair)


@pytest.mark.parametrize(
    "spec, device", ((Spec(3), "cpu"), (Spec(2.5), "cpu"), (Spec(3, residual="qjl"), "meta"))
)
def test_layers_share_their_tables(spec, device):
    "Stores hold the tensors of one, on any device."
    stores = [KVStore(Recipe(spec, Spec(4)), 1, 2, 8, device=device) for _ in range(3)]
    ids = {tuple(map(id, tables_of(s))) for s in stores}
    assert len(ids) == 1
    if device == "cpu":
        second = stores[1]
        second.append(*states(second, 600))
        second.to("cpu")
        assert tuple(map(id, tables_of(second))) in ids
        other = copy.deepcopy(second)
        assert tuple(map(id, tables_of(other))) in ids and not {
            t.data_ptr() for t in row_tensors(other)
        } & {t.data_ptr() for t in row_tensors(second)}


def test_tables_hold_every_tensor_of_a_quantizer():
    for spec in (
        Spec(3),
        Spec(2.5),
        Spec((3, 1) * 4),
        Spec(4, residual="sign"),
        Spec(3, residual="qjl"),
    ):
        store = make(Recipe(spec, Spec(4)), tile=8)
        store.append(*states(store, 40))
        tables = {t.data_ptr() for t in tables_of(store)}
        q = store.key.q
        inside = [
            q.rotation.matrix,
            *(x for x in vars(q.code).values() if isinstance(x, torch.Tensor)),
            *(x for x in vars(q.codebook).values() if isinstance(x, torch.Tensor)),
        ]
        assert {t.data_ptr() for t in inside} <= tables and len(inside) >= (
            1 if hasattr(q.codebook, "groups") else 3
        )


# -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, error, name",
    [
        (dict(batch=0), ValueError, "batch"),
        (dict(tokens=-1), ValueError, "tokens must be an integer of at least 0, got -1"),
        (dict(heads=0), ValueError, "heads"),
        (dict(max_length=0), ValueError, "max_length"),
        (dict(dtype=torch.int8), TypeError, "dtype"),
        (dict(tile=6), ValueError, "tile"),
        (dict(dv=0), ValueError, "d"),
        (dict(recipe="k9v9"), ValueError, "k9v9"),
        (dict(static=True), ValueError, "needs max_length"),
        (dict(static=True, max_length=9, recipe=Recipe(residual="prod")), ValueError, "QJL"),
    ],
)
def test_constructor_refuses(kwargs, error, name):
    with refuses(name, error):
        make(**kwargs)


def test_bool_select_and_one_row():
    store = make(batch=3)
    store.append(*states(store, 10))
    k, v = store.read()
    store.select(torch.tensor([True, False, True]))
    same(store.read()[0], k[[0, 2]])
    store.select([-1])
    same(store.read()[1], v[[2]])


def test_autograd_does_not_enter():
    "A forward without no_grad must not chain the whole dense graph to the cache."
    store = make(Recipe(Spec(center="fixed"), Spec(), sinks=2, recent=3))
    k, v = (x.requires_grad_() for x in states(store, 9))
    store.append(k * 2, v * 2)
    assert not any(
        t.requires_grad for s in (store.key, store.value) for t in s.tensors.values()
    )
    copy.deepcopy(store)
    store.set_range(start=1, k=k * 2, v=v * 2)
    assert not any(
        t.requires_grad for s in (store.key, store.value) for t in s.tensors.values()
    )


def test_inference_mode_then_no_grad():
    with torch.inference_mode():
        store = make(Recipe(Spec(center="fixed"), Spec(), sinks=2, recent=3))
        k, v = states(store, 9)
        store.append(k, v)
    with torch.no_grad():
        store.append(k.clone(), v.clone())
        store.crop(4)
        store.select([1, 0])
    with torch.inference_mode():
        store.append(k[:, :, :1], v[:, :, :1])
    store.append(k[:, :, :1].clone(), v[:, :, :1].clone())
    assert store.length == 16 and store.nbytes == expected_nbytes(store)


# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", (False, True))
def test_copies_share_tables_and_nothing_else(static):
    "A deep copy and a pickled one read and go on as the store, which they do not change."
    store = make(
        Recipe(Spec(3, center="pre_rope"), Spec(2.5), 2, 5),
        inv_freq=FREQ,
        tile=8,
        **(dict(max_length=60, static=True) if static else {}),
    )
    store.append(*states(store, 30))
    before = snapshot(store)
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert_same_snapshot(snapshot(other), before)
        for s in (other, copy.deepcopy(store)):
            s.append(*states(s, 9, seed=1))
            s.crop(20)
            assert s.sync() == 19 and s.clock.fixed == static
        assert_same_snapshot(snapshot(store), before)
    assert copy.deepcopy(store).cos_sin is store.cos_sin


@pytest.mark.parametrize("n", [3, 5, 40])
def test_a_prompt_without_padding_is_held_like_any(n):
    "Its sinks in one copy, where all are there: the same tensors as by positions."
    x, held = torch.randn(2, 3, n, 8), []
    for unpadded in (False, True):
        exact = ExactTokens({"sinks": torch.ones(2, 3, 4, 8), "recent": torch.ones(2, 3, 6, 8)})
        exact.put(exact.prepare(x, 0, torch.zeros(2, dtype=torch.long), True, unpadded))
        held.append(exact.tensors)
    assert all(torch.equal(held[0][name], held[1][name]) for name in held[0])
    assert torch.equal(held[1]["sinks"][:, :, : min(n, 4)], x[:, :, :4])


AGAIN = """
import importlib.util, sys, torch
from turboquant_nb.cache import clock, store
from turboquant_nb.kernels import encode, launch
from turboquant_nb.quant.recipe import Recipe
from torch.utils._python_dispatch import TorchDispatchMode

for module in (clock, store, launch, encode):  # as a notebook that exports the module does, in a process that has imported it
    spec = importlib.util.spec_from_file_location(module.__name__ + "_again", module.__file__)
    again = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
del spec, again
class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "turboquant_nb" in str(func):
            assert func is torch.ops.turboquant_nb.append.default, "an operator that was freed"
        return func(*args, **(kwargs or {}))

x = torch.randn(2, 1, 2, 5, 16)
a, b = (store.KVStore(Recipe(sinks=1, recent=2), 1, 2, 16, max_length=8, static=True) for _ in range(2))
a.append(*x)
clock.CAPTURE.tape = True
with Operators():
    b.append(*x)
clock.CAPTURE.tape = False
assert b.sync() == a.length == 5
assert all(torch.equal(i, j) for i, j in zip(a.read(), b.read()))
print("served")
"""


def test_operators_that_are_registered_again_still_serve():
    """PyTorch frees the operator of before; a module that held it read freed memory (a
    segmentation fault, sooner or later)."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", AGAIN], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "served\n", done.stderr[-2000:]


EPOCHS = {  # what begins a new one, and what does not
    "append": (lambda s, x: s.append(x, x), False),
    "grow": (lambda s, x: s.append(*[x.repeat(1, 1, 40, 1)] * 2), True),
    "crop": (lambda s, x: s.crop(3), False),
    "evict": (lambda s, x: s.evict(64), True),
    "select": (lambda s, x: s.select(torch.tensor([1, 0])), True),
    "to": (lambda s, x: s.to("cpu"), True),
    "no other start": (lambda s, x: s.set_range([0, 0]), False),
    "start": (lambda s, x: s.set_range([0, 2], *s.read()), True),
    "another layer's longer table": (lambda s, x: s.cos_sin.reach(9000), True),
}


@pytest.mark.parametrize("name", EPOCHS)
def test_what_calls_remember_ends_with_its_epoch(name):
    "Addresses of tensors, here, which are right as long as the memo holds them."
    change, ends = EPOCHS[name]
    inv_freq = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    recipe = Recipe(Spec(3, center="pre_rope"), Spec(3), sinks=2, recent=4)
    store = make(recipe, 2, 1, 16, tile=16, inv_freq=inv_freq)
    x = torch.randn(2, 1, 70, 16)
    store.append(x, x)
    where = lambda: [t.data_ptr() for t in (*row_tensors(store), store.rope_table)]
    store.memo["where"] = where()
    epoch = store.epoch
    change(store, x[:, :, :2])
    assert ("where" not in store.memo) == (store.epoch > epoch) == ends
    assert store.memo.get("where", where()) == where()
    other = copy.deepcopy(store)
    store.memo["a launch"] = 1
    assert not other.memo and not copy.copy(store).memo and store.memo


def test_a_table_that_was_replaced_is_let_go():
    "A store held the last table of angles that it had seen, and a deep copy a copy of it."
    store = make(PRE_ROPE, 1, inv_freq=FREQ)
    store.append(*states(store, 10))
    store.memo["where"] = 1
    held, other = weakref.ref(store.rope_table), copy.deepcopy(store)
    assert other.rope_table is store.rope_table
    store.cos_sin.reach(len(store.rope_table) + 1)
    assert held() is None and not store.memo
