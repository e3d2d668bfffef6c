"Stores, clocks and attention at their edges: each test names the change that it must see."

import math

import pytest
import torch

from turboquant_nb.cache.attention import attend
from turboquant_nb.cache.budget import TieredStore, coarser, ladder
from turboquant_nb.cache.disk import state_of
from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.cache.store import expected_nbytes, tail_with
from turboquant_nb.testing import same
from tests.helpers import ONE_THREAD, random_frame, recording, refuses, seeded

pytestmark = ONE_THREAD


# ---------------------------------------------------------------- the store


def states(n, seed=0):
    g = seeded(seed)
    return [torch.randn(2, 2, n, 8, generator=g) for _ in "kv"]


def small(recipe=None, fixed=None, **more):
    """A store of two rows, two heads and 8 channels, in tiles of 8 tokens; where the device
    counts, with room for so many."""
    size = {} if fixed is None else dict(max_length=fixed, static=True)
    return KVStore(recipe or Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, **size, **more)


def test_freed_tiles_of_a_bounded_store_stay_allocated():
    "With max_length its tensors have one size for ever: what is freed in front is room behind."
    store = small(max_length=64)
    store.append(*states(40))
    before, want = store.capacity, [x[:, :, 16:] for x in store.read()]
    store.evict(20)
    assert (
        store.offset == 16
        and store.capacity == before
        and store.nbytes == expected_nbytes(store)
    )
    for a, b in zip(store.read(), want):
        same(a, b.contiguous())


@pytest.mark.parametrize("start", ((0, 0), (0, 9)))
def test_any_part_of_a_store_is_read_as_the_whole_is(start):
    "Exact tokens at the ends of the part, inside it and beside it."
    recipe = Recipe(Spec(3, center="fixed", pair_scale="frame"), sinks=2, recent=5)
    store = small(recipe, frame=random_frame(2, 8))
    store.set_range(start=torch.tensor(start))
    store.append(*states(21))
    whole = store.read()
    for first in (0, 1, 3, 15, 17, 20):
        for last in (first + 1, 2, 3, 16, 18, 20, 21):
            if first < last:
                for x, y in zip(store.read(first, last), whole):
                    same(x, y[:, :, first:last].contiguous())


@pytest.mark.parametrize(
    "recent, crop, static",
    ((4, 1, True), (4, 2, False), (4, 3, True), (0, 1, False), (1, 1, False), (2, 2, False)),
)
def test_what_is_left_of_a_tail_ends_with_the_store(recent, crop, static):
    """A tail that begins late: after the crop its states are those of the positions that are
    left, and so is the ring."""
    recipe = Recipe(sinks=1, recent=recent)
    more = dict(max_length=64, static=True) if static else {}
    store, bare = (KVStore(recipe, 2, 2, 8, 12, tile=8, **more) for _ in range(2))
    g = seeded(1)
    k, v = torch.randn(2, 2, 33, 8, generator=g), torch.randn(2, 2, 33, 12, generator=g)
    for s in (store, bare):
        s.append(k[:, :, :30], v[:, :, :30])
    tail = tail_with(store, k[:, :, 30:], v[:, :, 30:])
    assert (tail.first, tail.past, tail.end) == (
        30 - recent,
        30,
        33,
    ) and tail.nbytes == 4 * 2 * 2 * (recent + 3) * (8 + 12)
    store.append(k[:, :, 30:], v[:, :, 30:])
    left = store.crop(crop, tail)
    assert (left.first, left.end, store.length) == (30 - recent, 33 - crop, 33 - crop)
    same(left.key, k[:, :, 30 - recent : 33 - crop].contiguous())
    if crop < 3:
        bare.append(k[:, :, 30 : 33 - crop], v[:, :, 30 : 33 - crop])
    for a, b in zip(store.read(), bare.read()):
        same(a, b)
    for name in ("key", "value"):
        for a, b in zip(store.exact(name), bare.exact(name)):
            same(a, b)


def test_codes_outside_an_embedded_table_are_refused():
    store = KVStore(coarser(Recipe(Spec(3), Spec(3))), 1, 1, 8)
    code, symbols = store.key.q.code, torch.tensor([[3] * 8], dtype=torch.uint8)
    assert code.levels(symbols, check_range=True).isfinite().all()
    with refuses(r"codes must lie in 0\.\.3, got 4"):
        code.levels(symbols + 1, check_range=True)


def test_a_range_is_checked_entry_by_entry_and_is_the_stores_own():
    """The largest entry decides at the top, the smallest at the bottom; whoever changes his
    tensor later changes nothing here."""
    store = KVStore(Recipe(), 3, 1, 8)
    assert store.ranges.starts == (0, 0, 0) and KVStore(Recipe(), 1, 1, 8).ranges.starts == (0,)
    store.append(*(torch.randn(3, 1, 9, 8) for _ in "kv"))
    for bad in ([0, 3, 10], [10, 0, 3], [-1, 3, 9]):
        with refuses("start must be from 0 to 9"):
            store.set_range(torch.tensor(bad), *store.read())
    for mine, want in ((torch.tensor([9, 3, 0]), [9, 3, 0]), (torch.tensor([4]), [4, 4, 4])):
        store.set_range(mine, *store.read())
        mine.zero_()
        assert store.start.tolist() == want == [*store.ranges.starts]


def test_an_empty_store_has_no_tile():
    "What grows begins with nothing, what has a length with all of it."
    for limit, tiles in ((None, 0), (1, 1), (8, 1), (9, 2)):
        store = small(Recipe(), max_length=limit)
        assert (
            store.key.memory.tiles == store.value.memory.tiles == tiles
            and store.capacity == 8 * tiles
        )


def test_only_the_tiles_that_tokens_lie_in_are_unpacked(monkeypatch):
    from turboquant_nb.cache import memory as module

    store, seen, unpack = small(Recipe()), [], module.unpack
    store.append(*states(80))
    monkeypatch.setattr(
        module,
        "unpack",
        lambda planes, layout: seen.append(planes[0].shape[2]) or unpack(planes, layout),
    )
    for first, last, tiles in ((0, 80, 10), (8, 16, 1), (7, 17, 3), (30, 31, 1), (72, 80, 1)):
        seen.clear()
        store.coded("key", first, last)
        assert seen == [tiles]


def test_the_counter_among_the_flags_is_no_flag():
    """Five are raised, the sixth number counts for kernels: `sync` says nothing of it, and
    nothing of ours raises it."""
    store = small(fixed=16)
    store.append(*states(10))
    store.flags[5] = 4
    assert store.sync() == 10 and store.flags.tolist() == [0, 0, 0, 0, 0, 4]
    unsynced(store, states(9))
    assert store.flags.tolist() == [0, 0, 0, 0, 1, 4]


def test_a_store_that_lost_all_has_no_old_tokens():
    store = TieredStore(ladder("k3v3"), 2, 2, 8, tile=8)
    store.append(*states(40))
    store.settle((0, 16, 32, 40))
    # to 33, 17, 1 and 0 tokens
    for crop, ends in ((7, (16, 32, 33)), (16, (16, 17, 17)), (16, (1, 1, 1)), (1, (0, 0, 0))):
        store.crop(crop)
        assert store.ends == (0, *ends)
    assert not store.tiers and store.nbytes == store.start.nbytes


@pytest.mark.parametrize("parts", ((16,), (10, 6), (15, 1)))
def test_a_static_store_takes_what_fits_to_the_last_token(parts):
    "By number and by position, at once and in parts; one token more is refused or noted."
    recipe = Recipe(sinks=1, recent=4)
    one, two = (small(recipe, 16, frame=random_frame(2, 8)) for _ in range(2))
    k, v = states(16)
    for a, b in zip(k.split(parts, 2), v.split(parts, 2)):
        one.append(a, b)
        unsynced(two, (a, b))
    assert one.length == two.sync() == 16
    for name in ("key", "value"):
        a, b = (x.coded(name, 0, 16) for x in (one, two))
        same(a.codes, b.codes)
        same(a.scale, b.scale)
        assert b.scale.isfinite().all()
    with refuses("cannot append 1 tokens to 16"):
        one.append(k[:, :, :1], v[:, :, :1])
    unsynced(two, (k[:, :, :1], v[:, :, :1]))
    assert two.key.exact.recent.isnan().all((0, 1, 3)).tolist() == [False] * 3 + [True]
    with refuses("more tokens than max_length"):
        two.sync()


ASKING = dict(
    read=lambda s: s.read()[0].shape[2],
    append=lambda s: s.append(*states(1)) or s.length - 1,
    crop=lambda s: s.crop(1) or s.length + 1,
    state=lambda s: state_of(s)[1]["length"],
    set_range=lambda s: s.set_range(start=0) or s.length,
    attend=lambda s: attend(torch.ones(2, 2, 23, 8), s)[0].shape[2],
)


@pytest.mark.parametrize("what", ASKING)
def test_a_static_store_is_asked_after_the_device(what):
    "Whatever is done with it, tokens that a recorded step appended count."
    store = small(fixed=64)
    store.append(*states(20))
    unsynced(store, states(3, 1))
    assert store.length == 20 and ASKING[what](store) == 23


def test_a_store_grows_by_an_eighth():
    "Nine tiles and one token more: eleven; one and one: two; many at once: what they need."
    for have, more, want in ((9, 1, 11), (1, 1, 2), (16, 1, 18), (2, 80, 12)):
        store = small(Recipe())
        store.append(*states(8 * have))
        assert store.key.memory.tiles == have
        store.append(*states(more))
        assert store.key.memory.tiles == store.value.memory.tiles == want


@pytest.mark.parametrize("d", (8, 12))
def test_a_static_store_that_went_back_is_as_one_that_never_was_ahead(d):
    "Codes are written over others, whose bits must go; back at 0 the frame stays."
    recipe = Recipe(Spec(3, center="fixed", pair_scale="frame"), Spec(2), sinks=1, recent=4)
    frame = random_frame(2, d)
    g = seeded(2)
    draw = lambda n: [torch.randn(2, 2, n, d, generator=g) + 3 for _ in "kv"]
    first, other, then = draw(11), draw(9), draw(2)
    store, bare = (
        KVStore(recipe, 2, 2, d, tile=8, max_length=64, static=True, frame=frame)
        for _ in range(2)
    )
    mean = (frame.fixed * frame.pair.bfloat16().float()).bfloat16()
    for crop in (5, 11):
        store.crop(store.length)
        for row in store.key.mean[:, :, 0]:
            same(row, mean)
        store.append(*first)
        for _ in range(2):
            by_position(store, then)
        store.crop(crop)
        bare.crop(bare.length)
        bare.append(*first)
        bare.crop(max(0, crop - 4))
        assert store.length == bare.length == 15 - crop
        for part in zip(*(x.split(2, 2) for x in other)):
            by_position(store, part), by_position(bare, part)
        for name in ("key", "value"):
            a, b = (s.coded(name, 0, s.sync()) for s in (store, bare))
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


def by_position(store, states):
    "Append as a recorded step does: where the device's position says."
    unsynced(store, states)
    store.sync()


# ---------------------------------------------------------------- attention and planes


def test_what_is_freed_in_front_is_not_asked_for_behind():
    """After an eviction a store holds the tiles that its tokens need, and grows by an eighth at
    most."""
    store = small()
    store.append(*states(160))
    store.evict(152)
    assert store.offset == 152 and store.key.memory.tiles == 1
    store.append(*states(1))
    assert store.key.memory.tiles == 2
    store.append(*states(7))
    assert store.key.memory.tiles == 2


def test_a_static_store_shows_what_it_holds_and_no_more():
    "Outside a recording the host knows the length: `coded` ends there, not at max_length."
    store = small(fixed=64)
    store.append(*states(20))
    store.coded("key", 0, 20)
    with refuses(r"positions must lie in \[0, 20\], got \[0, 21\)"):
        store.coded("key", 0, 21)
    assert store.length == 20 and store.clock.exact_from(store) == 16


def test_a_start_may_lie_as_far_as_positions_go():
    "Before any token 2^31, a position being an int32; afterwards the length."
    store = KVStore(Recipe(), 2, 2, 8)
    store.set_range(start=2**31)
    with refuses(f"start must be from 0 to {2**31}, got"):
        store.set_range(start=2**31 + 1)


def test_a_tail_where_the_device_counts():
    """Recorded as eager: positions and states are those of the last `recent` tokens and the
    chunk."""

    store = small(fixed=64)
    store.append(*states(21))
    want = tail_with(store, *states(3, 1))
    with recording():
        got = tail_with(store, *states(3, 1))
        assert (
            (int(got.first), int(got.past), int(got.end))
            == (want.first, want.past, want.end)
            == (17, 21, 24)
        )
    same(got.key, want.key), same(got.value, want.value)


@pytest.mark.parametrize("n", (1, 2, 3))
def test_a_ring_with_a_gap_is_filled_from_the_tail(n):
    """After a deep crop the ring holds less than it could; a tail then begins late, and gives
    back what it has."""
    store, recipe = (small(Recipe(sinks=0, recent=4)), Recipe(sinks=0, recent=4))
    k, v = states(23)
    store.append(k[:, :, :20], v[:, :, :20])
    store.crop(2)
    tail = tail_with(store, k[:, :, 20:], v[:, :, 20:])
    assert (tail.first, tail.past, tail.end) == (16, 18, 21)
    store.append(k[:, :, 20:], v[:, :, 20:])
    assert store.crop(n, tail).end == store.length == 21 - n
    order = [*range(18), 20, 21, 22]
    at = torch.tensor(order[max(16, 21 - n - 4) : 21 - n])
    states_, positions = store.exact("key")
    held = [(p, i) for i, p in enumerate(positions[0].tolist()) if p >= 0]
    assert (
        sorted(p for p, _ in held) == list(range(max(16, 21 - n - 4), 21 - n))
        and recipe.recent == 4
    )
    same(torch.stack([states_[:, :, i] for _, i in sorted(held)], 2), k[:, :, at])


def unsynced(store, states):
    "Append as a recorded step does, and tell the host nothing."
    with recording():
        store.append(*states)


@pytest.mark.parametrize("center", ("fixed", "pre_rope"))
@pytest.mark.parametrize("recent", (None, 4))
def test_attention_where_the_device_counts_the_tokens(center, recent):
    """Recorded, the length is a tensor and masks reach to max_length: the same output as where
    the host knows it, with a chunk and without."""

    recipe, freq = (
        Recipe(Spec(3, center=center, pair_scale="frame"), Spec(2), sinks=2, recent=4),
        0.5 ** torch.arange(1.0, 5.0),
    )
    more = dict(inv_freq=freq, frame=random_frame(2, 8, 8))
    store = small(recipe, 64, **more)
    k, v = states(40)
    store.set_range(start=torch.tensor([0, 5]))
    store.append(k[:, :, :37], v[:, :, :37])
    tail = tail_with(store, k[:, :, 37:], v[:, :, 37:])
    store.append(k[:, :, 37:], v[:, :, 37:])
    for side in store.parts:  # what lies beyond the length may be anything
        side.memory.tensors["scale"][:, :, 40 // 8 :] = math.nan
    q = torch.randn(2, 4, 3, 8, generator=seeded(1))
    chunk = (tail.key, tail.value) if recent else (k[:, :, 37:], v[:, :, 37:])
    for given in (chunk,) if recent else (chunk, (None, None)):
        for more in (dict(), dict(sliding_window=9), dict(block=16), dict(softcap=2.0)):
            want = attend(q, store, *given, recent=recent, **more)
            with recording():
                got = attend(q, store, *given, recent=recent, **more)
            for a, b in zip(got, want):
                assert (a - b).abs().max() < 1e-5


def test_a_first_position_at_the_end_sees_nothing():
    "The range of `first` includes the length: no column is left, the answer is 0 and -inf."
    store = KVStore(Recipe(), 2, 2, 8)
    store.append(*states(9))
    out, lse = attend(torch.ones(2, 2, 1, 8), store, first=9)
    assert (out == 0).all() and (lse == -math.inf).all()
    with refuses("first must be from 0 to 9, got 10"):
        attend(torch.ones(2, 2, 1, 8), store, first=10)


# (`fits` of the kernel: test_states_taken_without_waiting in test_encode_kernel.py)


def test_a_scale_that_does_not_fit_is_nan_until_it_is_said():
    """Not infinite and not the largest: who waits for nobody must give an attention that shows
    the loss."""
    store = KVStore(Recipe(sinks=0, recent=0), 1, 1, 32, max_length=8, static=True)
    x = torch.randn(1, 1, 5, 32, generator=seeded())
    large = x.clone()
    large[:, :, 2] = 3e6
    unsynced(store, (large, x))
    scale = store.key.memory.numbers("scale", 0, 5).flatten()
    assert scale[2].isnan() and scale[[0, 1, 3, 4]].isfinite().all()
    with refuses("keys that were too large; attention to such tokens"):
        store.sync()
