"""Cells of a block: many layouts, slots in every order, histories of blocks; the chapter
explains what is checked here widely."""

import pytest
import torch

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import (
    CellCodes,
    CellLayout,
    Exact,
    Recent,
    Requests,
    append_slots,
    attend_cells,
    read_cells,
    sink_origins,
    store_recent,
)
from turboquant_nb.quant.quantizer import Quantizer, Spec

from tests.helpers import SLOW, RecentBlocks, random_history, refuses


def pool(c, blocks, heads, gen, pad=48):
    raw = torch.randint(
        0, 256, (blocks, heads * c.nbytes + pad), dtype=torch.uint8, generator=gen
    )
    return raw, raw[:, : heads * c.nbytes].unflatten(1, (heads, c.tokens, c.bytes_per_token))


@pytest.mark.parametrize("name", ("k", "v"))
def test_states_of_another_shape_write_nothing(name, gen):
    "Of one head for two, of other channels, or of fewer tokens than slots."
    key, value = Quantizer(Spec(3), 32), Quantizer(Spec(3), 48)
    c = CellLayout.of(key, value, 16)
    raw, cache = pool(c, 2, 2, gen)
    before, sizes = raw.clone(), dict(k=(5, 2, 32), v=(5, 2, 48))
    tokens, heads, d = sizes[name]
    for shape in ((tokens, 1, d), (tokens, heads, d + 16), (tokens - 1, heads, d)):
        given = {n: torch.randn(s, generator=gen) for n, s in (sizes | {name: shape}).items()}
        with refuses(f"^{name} must have shape"):
            append_slots(
                cache, CellCodes(key, value, c, None), *given.values(), torch.arange(5)
            )
    assert torch.equal(raw, before)


@pytest.mark.parametrize("n,kb,vb", ((16, 1, 2), (32, 2, 4), (64, 4, 1), (256, 3, 3)))
def test_any_order(n, kb, vb, gen):
    """Tokens in a random order and in calls of random sizes are read back as they were coded;
    no other bit of the memory changes."""
    sides = key, value = Quantizer(Spec(kb), 32), Quantizer(Spec(vb), 48)
    c = CellLayout.of(key, value, n)
    raw, cache = pool(c, 6, 2, gen)
    slots, rest = torch.randperm(6 * n, generator=gen).split(3 * n)
    states = [torch.randn(3 * n, 2, q.d, generator=gen) for q in sides]
    both = CellCodes(key, value, c)
    held = lambda: read_cells(cache, both, torch.arange(6), 6 * n)
    before, beside, done = held(), raw[:, 2 * c.nbytes :].clone(), 0
    while done < len(slots):
        now = slice(done, done + int(torch.randint(1, n + 2, (), generator=gen)))
        append_slots(cache, both, *(x[now] for x in states), slots[now])
        done = now.stop
    for was, now, q, x in zip(before, held(), sides, states):
        want = q.encode(x.transpose(0, 1))
        assert torch.equal(now.codes[:, slots], want.codes)
        assert torch.equal(now.scale[:, slots], want.scale)
        bits = lambda coded: (coded.codes[:, rest], coded.scale[:, rest].view(torch.int16))
        assert all(map(torch.equal, bits(now), bits(was)))
    assert torch.equal(raw[:, 2 * c.nbytes :], beside)


def test_refused():
    c = CellLayout(3, 3, 64, 64, 64)
    good = c.empty(2, 2)
    for bad, why in (
        (good[:, :, :32], "must have shape"),
        (good.float(), "must be a uint8 tensor"),
        (good.transpose(0, 1)[:, :, :, :], None),
        (torch.empty(2, 2, 64, 64, dtype=torch.uint8), "must have shape"),
        (
            torch.empty(4 * 6464 + 8, dtype=torch.uint8)[8:].as_strided(
                (2, 2, 64, 52), (6656, 3328, 52, 1)
            ),
            "16-byte|multiple of 16",
        ),
    ):
        if why is None:
            c.check(bad)  # heads and blocks may lie in any order
            continue
        with refuses(why, (TypeError, ValueError)):
            c.check(bad)
    with refuses("slots must be below 64, got 64"):
        k, v = torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)
        store_recent(torch.zeros(16, 1, 4, 5), k, v, torch.tensor([64]))
    with refuses("k and v must be given together"):
        q = Quantizer(Spec(3), 64)
        attend_cells(
            torch.zeros(1, 2, 64),
            good,
            CellCodes(q, q, c),
            Requests(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])),
            torch.tensor([0, 1]),
            Exact(torch.zeros(1, 2, 64)),
        )


@pytest.mark.parametrize("block,sinks,window", ((4, 3, 3), (2, 5, 1), (8, 4, 16), (1, 2, 7)))
def test_first_tokens_travel(block, sinks, window, gen):
    """Before each step of a random history, a request's first tokens are in the block of the
    token before: with shared beginnings, also of blocks that are written in the same step,
    rejected drafts, preemption and blocks that go to others. Two mutants: nothing is copied;
    what is copied is not followed through the step."""

    def not_followed(table, lengths, starts, slots, block, sinks):
        found, before = (
            sink_origins(table, lengths, starts, slots, block, sinks),
            (lengths - starts.diff()).tolist(),
        )
        for r, (a, b, p) in enumerate(zip(starts.tolist(), starts.tolist()[1:], before)):
            own = found[a:b]
            own[(own >= 0) & ((own < a) | (own >= b))] = -2 - int(
                table[r, max(0, p - 1) // block]
            )
        return found

    def at_once(cache, k, v, slots, origins):
        "As a launch may do it: all rows are read before any is written."
        old = cache.clone()
        store_recent(cache, k, v, slots, origins)
        for i, s in (origins < -1).nonzero().tolist():
            cache[int(slots[i]) // block, :, block + s] = old[
                -2 - int(origins[i, s]), :, block + s
            ]

    how = dict(steps=SLOW * 300 + 100, gen=gen)
    make = lambda store, locate: RecentBlocks(block, sinks, window, 8, gen, store, locate)
    wrong, seen = random_history(make(at_once, sink_origins), **how)
    assert (
        not wrong
        and seen["read"] > 500
        and seen["hits"] > 10
        and seen["followed"] > 10
        and seen["freed"] > 50
    ), (wrong[:3], seen)
    assert random_history(make(at_once, not_followed), **how)[0]
    assert random_history(
        make(at_once, lambda *args: torch.full_like(sink_origins(*args), -1)), **how
    )[0]


def test_what_no_window_reaches_is_not_read(gen):
    "Its blocks are gone, and another layer's bytes may be NaN."
    key, value = Quantizer(Spec(3), 32), Quantizer(Spec(3), 32)
    codes = CellCodes(key, value, CellLayout.of(key, value, 16), None)
    cache, table = codes.cell.empty(4, 1), torch.tensor([[0, 1, 2, 3]])
    append_slots(cache, codes, *torch.randn(2, 60, 1, 32, generator=gen), torch.arange(60))
    q, starts = torch.randn(2, 1, 32, generator=gen), torch.tensor([0, 2])
    read = lambda: attend_cells(
        q,
        cache,
        codes,
        Requests(table, torch.tensor([60])),
        starts,
        rule=Rule(sliding_window=43),
    )[0]
    want = read()
    scales = codes.memories(cache)[1].tensors["scale"][0]  # [H, blocks, tokens]
    scales[:, 0] = torch.nan
    assert torch.equal(read(), want)
    scales[0, 1, 0] = torch.nan  # 16, the first that is seen
    assert read().isnan().any()


def test_first_tokens_of_short_requests(gen):
    """Of a request of 0 to 9 tokens before a step: those that are not read as recent ones;
    padding is not stored, and NaN stays NaN."""
    for past in range(10):
        cache, table = (
            torch.full((8, 1, 2 + 4, 2), torch.nan),
            torch.randperm(8, generator=gen)[:6].int()[None],
        )
        x = torch.arange(10.0)[:, None, None].clone()
        x[1] = torch.nan
        for p in range(past):  # one token a step, and one of padding
            slots = torch.tensor([int(table[0, p // 2]) * 2 + p % 2, -1])
            origins = sink_origins(
                table, torch.tensor([p + 1]), torch.tensor([0, 1]), slots, 2, 4
            )
            store_recent(cache, x[[p, 9]], x[[p, 9]], slots, origins)
        recent = Recent(cache, table, 3, 4)
        (((k, v), _),) = recent.read(recent.places([(0, past)]), 1)
        want = [0.0, torch.nan, 2.0, 3.0][: max(0, past - 3)]
        assert torch.equal(
            k.flatten().nan_to_num(-1), torch.tensor(want).nan_to_num(-1)
        ) and len(v) == len(k)
        assert not (cache == 9).any()
