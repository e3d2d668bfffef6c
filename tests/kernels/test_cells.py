"""Kernels on an engine's blocks against the oracle: in the interpreter, or on a GPU with both
kernels; compiled ahead of time for Hopper."""

import pytest
import torch

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import (
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
from turboquant_nb.kernels import blocks as kernel_blocks, cells, encode as launcher
from turboquant_nb.kernels.cell_attention import (
    LaunchOptions,
    Workspace,
    count_splits,
    decode_cells,
    past_cells,
)
from turboquant_nb.kernels.cells import CellPlan, append_cells, append_recent, locate_sinks
from turboquant_nb.quant.codes import make_quantizer
from turboquant_nb.quant.quantizer import Quantizer, Spec
from turboquant_nb.theory.transforms import HeadTransform, register_transform

from tests.helpers import (
    CUDA,
    DEVICE,
    SLOW,
    FoundOnce,
    ahead_of_time,
    covering_pairs,
    interpreted,
    needs_triton,
    refuses,
    seeded,
)


def pool(plan, blocks, heads, gen):
    raw = torch.randint(
        0, 256, (blocks, heads * plan.cell.nbytes + 64), dtype=torch.uint8, generator=gen
    ).to(DEVICE)
    return raw, raw[:, : heads * plan.cell.nbytes].unflatten(
        1, (heads, plan.cell.tokens, plan.cell.bytes_per_token)
    )


def case(
    gen,
    kb=3,
    vb=3,
    d=32,
    n=16,
    m=1,
    lengths=(70, 16, 0, 33),
    heads=2,
    group=3,
    dtype=torch.float32,
    rot="hadamard",
):
    if rot == "transform":
        u, v = torch.linalg.qr(torch.randn(2, heads, d, d, generator=gen))[0]
        rot = register_transform(HeadTransform.of(u * torch.linspace(0.3, 2, d) @ v)).name
    plan = CellPlan(
        Quantizer(Spec(kb, rotation=rot), d, DEVICE), Quantizer(Spec(vb), d, DEVICE), n
    )
    need = [-(-x // n) for x in lengths]
    _, cache = pool(plan, sum(need) + 1, heads, gen)
    order, table = (
        torch.randperm(sum(need), generator=gen).split(need),
        torch.full((len(lengths), max(need) + 3), 10**6, dtype=torch.int32),
    )
    for row, blocks, length in zip(table, order, lengths):
        row[: len(blocks)] = blocks
        t = torch.arange(length)
        k, v = torch.randn(2, length, heads, d, generator=gen).to(DEVICE)
        append_slots(cache, plan, k, v, (row[t // n].long() * n + t % n).to(DEVICE))
    x = torch.randn(len(lengths) * m, (group + 2) * heads, d, generator=gen).to(DEVICE, dtype)
    return (
        plan,
        cache,
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        *x.split([group * heads, heads, heads], 1),
    )


CASES = [
    (dict(), {}),
    (dict(n=128, lengths=(300, 1)), {}),
    (dict(n=256, lengths=(300,)), dict(scaling=0.3)),
    (dict(kb=1, vb=2), {}),
    (dict(kb=4, vb=1), dict(splits=1)),
    (dict(kb=2, vb=4, d=48), {}),
    (dict(m=4, group=5), {}),
    (dict(m=16, lengths=(30, 20)), {}),
    (dict(group=16, heads=1), {}),
    (dict(rot="transform", d=80, heads=1), {}),
    (dict(), dict(sliding_window=20)),
    (dict(m=3), dict(sliding_window=2)),
    (dict(n=32), dict(softcap=3.0)),
    (dict(), dict(splits=9)),
    (dict(own=False), {}),
    (dict(own=False, m=4), dict(sliding_window=20)),
    (dict(lengths=(0, 0)), {}),
    (dict(dtype=torch.float16), dict(work={})),
    (dict(lengths=(600, 3, 0, 40), heads=1), dict(work={}, splits=5)),
    (dict(m=3, lengths=(300, 90, 8, 3)), dict(work={}, splits=7, sliding_window=50)),
    (dict(n=64, lengths=(300, 4)), dict(work={}, splits=3)),
    (dict(own=False, lengths=(40, 0, 500), heads=1), dict(work={}, splits=40)),
    (dict(lengths=(0, 0)), dict(work={})),
]


def check(plan, cache, requests, q, exact=None, rule=Rule(), limit=1e-5, **how):
    """Every kernel that runs here against the oracle, with a workspace full of NaN: nobody gets
    0 and -inf. Returns the oracle's output."""
    starts = torch.arange(len(requests.lengths) + 1) * (len(q) // len(requests.lengths))
    states = exact and exact._replace(k=exact.k.float(), v=exact.v.float())
    want, want_lse = attend_cells(q.float(), cache, plan, requests, starts, states, rule)
    limit, seen = 3e-3 if CUDA or q.dtype != torch.float32 else limit, want_lse > -torch.inf
    kernels = ("portable", "fragments")[: 1 + (CUDA and not plan.refuses("fragments"))]
    for kernel in kernels:
        space = Workspace(DEVICE, 10**6)
        space.memory.fill_(torch.nan)
        fresh = {"work": {}} if "work" in how else {}
        way = LaunchOptions(kernel=kernel, workspace=space, **how | fresh)
        out, lse = decode_cells(q, cache, plan, requests, exact, rule, way)
        assert torch.equal(lse > -torch.inf, seen) and (out[~seen] == 0).all()
        if seen.any():
            assert (out.float() - want)[seen].norm() <= limit * want[seen].norm()
            assert (lse - want_lse)[seen].abs().max() < max(1e-4, limit)
    return want


@needs_triton
@pytest.mark.parametrize("of,options", CASES)
def test_decode(of, options, gen):
    own = of.get("own", True)  # else the codes of the queries' own tokens are read
    plan, cache, table, lengths, q, k, v = case(
        gen, **{k: x for k, x in of.items() if k != "own"}
    )
    rule = Rule(**{name: x for name, x in options.items() if name in vars(Rule())})
    how = {name: x for name, x in options.items() if name not in vars(Rule())}
    check(plan, cache, Requests(table, lengths), q, Exact(k, v) if own else None, rule, **how)


@needs_triton
@pytest.mark.parametrize(
    "n,kb,vb,d", ((16, 3, 3, 32), (16, 1, 4, 48), (64, 4, 2, 64), (128, 3, 3, 16))
)
def test_append(n, kb, vb, d, gen):
    """Chunks of all lengths from all places, short calls too: codes as the oracle's, and no
    other byte."""
    plan = CellPlan(Quantizer(Spec(kb), d, DEVICE), Quantizer(Spec(vb), d, DEVICE), n)
    raw, _ = pool(plan, 24, 2, gen)
    for runs in (
        ((n // 2 + 3, 2 * n + 5), (0, n), (5, 1)),
        ((n - 1, 1), (3, 2)),
        ((n // 3, n // 4 + 1),),
    ):
        slots, free = [], torch.randperm(24, generator=gen).tolist()
        for first, count in runs:
            mine = [free.pop() for _ in range(-(-(first + count) // n))]
            slots += [mine[p // n] * n + p % n for p in range(first, first + count)] + [-1]
        slots = torch.tensor(slots).to(DEVICE)
        k, v = torch.randn(len(slots), 6, d, generator=gen).to(DEVICE)[:, 1:5].split(2, 1)
        mine, theirs = raw.clone(), raw.clone()
        view = lambda x: x[:, : 2 * plan.cell.nbytes].unflatten(
            1, (2, n, plan.cell.bytes_per_token)
        )
        append_cells(view(mine), plan, k, v, slots)
        append_slots(view(theirs), plan, k, v, slots)
        written = theirs != raw
        assert (mine != theirs).sum() <= 2e-3 * written.sum() and written.any()
        raw = theirs


def test_splits():
    assert (
        count_splits(256, 8, 100) == 1
        and count_splits(32768, 64, 1056) == 16
        and count_splits(32768, 2000, 1056) == 1
    )
    for tokens in (1, 300, 5000, 10**6):
        for programs in (1, 7, 300):
            assert 1 <= count_splits(tokens, programs, 1056) <= max(1, -(-tokens // 256))


@pytest.mark.skipif(not CUDA, reason="on a GPU alone: the interpreter always joins several")
def test_many_requests_of_three_heads(gen):
    """A batch whose rows are joined several at a time, where a KV head has three query heads:
    the kernel takes powers of two."""
    plan, cache, table, lengths, q, k, v = case(gen, lengths=(20, 5) * 4 + (0,) * 163)
    assert q.shape[0] * q.shape[1] > 1024
    check(plan, cache, Requests(table, lengths), q, Exact(k, v))


def exact_blocks(gen, plan, requests, m, tokens, sinks):
    """Exact states before the last m tokens of each request, in blocks of four that are
    shuffled; what is not to be read is NaN, the scales of first tokens' codes too."""
    heads, d, lengths = len(plan.center), plan.cell.d_key, requests.lengths.tolist()
    rows = torch.randperm(len(lengths) * 20, generator=gen).view(len(lengths), 20).int()
    empty = torch.full((rows.numel(), heads, 4 + sinks, 2 * d), torch.nan, device=DEVICE)
    near = Recent(empty, rows.to(DEVICE), tokens, sinks)
    for row, length in zip(rows, lengths):
        past = max(0, length - m)
        exact = torch.randn(2, past, heads, d, generator=gen).to(DEVICE)
        exact[0] += plan.center
        both = torch.cat([*exact], -1).transpose(0, 1)  # [H, past, 2 d]
        for t in range(max(0, past - tokens), past):
            near.cache[row[t // 4], :, t % 4] = both[:, t]
        if past:
            near.cache[row[(past - 1) // 4], :, 4 : 4 + min(sinks, past)] = both[:, :sinks]
    return near


@needs_triton
@pytest.mark.parametrize(
    "of,options",
    (
        (dict(rot="transform", lengths=(70, 0, 3)), {}),
        (
            dict(m=4, group=5, dtype=torch.float16, lengths=(33, 0, 9)),
            dict(softcap=3.0, sliding_window=20),
        ),
        (dict(lengths=(300, 3, 0)), dict(work={})),
    ),
)
def test_learnt_logits(of, options, gen):
    """A logit of each head joins its softmax: weights get smaller, of who has no token the
    output stays 0. Logits from far below to far above all scores."""
    plan, cache, table, lengths, q, k, v = case(gen, **of)
    heads, read = q.shape[1], Requests(table, lengths)
    logits = torch.linspace(-200, 200, 2 * heads, dtype=torch.bfloat16, device=DEVICE)[::2]
    logits[1] = 5.0
    how = {name: options.pop(name) for name in ("work",) if name in options}
    rule = Rule(**options, sinks=logits)
    want = check(plan, cache, read, q, Exact(k, v), rule, **how)
    without = check(plan, cache, read, q, Exact(k, v), Rule(**options), **how)
    ratio = (want.norm(dim=-1) / without.norm(dim=-1))[: of.get("m", 1)]
    assert (ratio[:, 0] == 1).all() and (ratio[:, -1] == 0).all()
    assert ((ratio[:, 1] > 0.01) & (ratio[:, 1] < 0.98)).all()
    with refuses("sinks must have shape"):
        decode_cells(q, cache, plan, read, Exact(k, v), Rule(sinks=logits[1:]))


EXACT = covering_pairs(
    ((1, 4), (7, 3), (9, 20), (7, 0), (1, 0), (100, 0)),  # recent tokens, first ones
    (
        (dict(), {}),
        (dict(m=4, group=5), dict(softcap=3.0)),
        (dict(m=2, d=48, n=32, rot="transform"), dict(sliding_window=40)),
    ),
) + [((tokens, 0), (dict(m=2, d=48), dict(sliding_window=5))) for tokens in (1, 7)]


@needs_triton
@pytest.mark.parametrize("held,asked", EXACT)
def test_recent_and_first_tokens(held, asked, gen):
    """Exact tokens before the queries' and first ones, with a centre; requests with more and
    with fewer of them than their past has. Mutants: a table that is shifted by a block reads
    others; of one first token less the codes are read, which are of no use."""
    (tokens, sinks), (of, options) = held, asked
    plain, cache, table, lengths, q, k, v = case(
        gen, **{"lengths": (45, 5, 0, 12), "heads": 1} | of
    )
    center = 3 * torch.randn(1, plain.cell.d_key, generator=gen).to(DEVICE)
    plan = CellPlan(plain.key, plain.value, plain.cell.tokens, center)
    m, read, rule = of.get("m", 1), Requests(table, lengths), Rule(**options)
    near = exact_blocks(gen, plan, read, m, tokens, sinks)
    exact = Exact(k + center, v, near)
    places = near.places([(i, max(0, x - m)) for i, x in enumerate(lengths.tolist())])
    counts = [len(keys) for (keys, _), _ in near.read(places, 1)]
    assert max(counts) == min(sinks, max(0, 45 - m - tokens)) and min(counts) == 0
    want = check(plan, cache, read, q, exact, rule)
    scale = plan.memories(cache)[0].tensors["scale"][0].transpose(0, 1)
    for row, count in zip(table, counts):
        for t in range(count):
            scale[row[t // plan.cell.tokens], :, t % plan.cell.tokens] = torch.nan
    if sinks:
        same = check(plan, cache, read, q, exact, rule)
        assert torch.equal(same, want)
        other = Recent(near.cache[:, :, :-1], near.table, tokens, sinks - 1)
    else:
        other = Recent(near.cache, near.table.roll(1, 1), tokens)
    moved = decode_cells(q, cache, plan, read, exact._replace(recent=other), rule)[0]
    assert not (moved - want).norm() < 1e-2 * want.norm()


@needs_triton
def test_recent_states_are_copied_to_their_slots(gen):
    "Into blocks whose distance is padded, beside memory that stays; some are not stored."
    n, heads, d = 4, 2, 32
    memory = torch.full((9, heads * n * 2 * d + 16), torch.nan, device=DEVICE)
    mine = memory[:, : heads * n * 2 * d].unflatten(1, (heads, n, 2 * d))
    theirs, slots = torch.full_like(mine, torch.nan), torch.randperm(36, generator=gen)[:20]
    slots = torch.cat([slots, torch.full((3,), -1)]).to(DEVICE)
    k, v = torch.randn(2, 23, heads, d, generator=gen).to(DEVICE)
    append_recent(mine, k, v, slots)
    store_recent(theirs, k, v, slots)
    assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))
    assert memory[:, heads * n * 2 * d :].isnan().all()


@needs_triton
def test_origins_end_whatever_tables_hold(gen):
    """Tables and slots that no engine makes: two requests that begin in one another's blocks,
    lengths below the step's tokens. The launch ends, and names what is there."""
    table = torch.tensor([[5, 6], [6, 5], [7, 7]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor(
        [24, 20, 28, 29, -1], device=DEVICE
    )  # each writes the block that the other begins after
    lengths, starts = (
        torch.tensor([5, 5, 1], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=DEVICE),
    )
    out = torch.full((5, 3), 99, dtype=torch.int32, device=DEVICE)
    locate_sinks(table, lengths, starts, slots, 4, out)
    assert (
        out.tolist()
        == sink_origins(table, lengths, starts, slots, 4, 3).tolist()
        == [[-7, -7, -7], [-8, -8, -8], [2, -1, -1], [-1] * 3, [-1] * 3]
    )
    for bad, why in (
        (dict(table=table.long()), "table must be int32"),
        (dict(slots=slots.float()), "slots must be a contiguous"),
        (dict(starts=starts[:3]), "one more start"),
        (dict(out=out[:4]), "origins must be"),
    ):
        with refuses(why, (TypeError, ValueError)):
            locate_sinks(
                **dict(
                    table=table, lengths=lengths, starts=starts, slots=slots, block=4, out=out
                )
                | bad
            )
    with refuses("room for 3 first tokens and a recent one, got 3 rows"):
        append_recent(
            torch.zeros(9, 1, 3, 8, device=DEVICE),
            *torch.zeros(2, 5, 1, 4, device=DEVICE),
            slots,
            out,
        )


# ---- codes by windows
CHAIN = "trellis"
WINDOWS = [  # keys and values: bits, codebook; head size, tokens of a block
    ((2, CHAIN), (3, CHAIN), 64, 128),
    ((3, CHAIN), (3, "uniform"), 128, 256),
    ((3, "uniform"), (2, CHAIN), 64, 64),
]


def search_by_pytorch(trellis, x, levels, by_window, to):
    """What `find_symbols` says, without the interpreter, which takes seconds for a vector;
    tests/kernels/test_viterbi.py holds the kernel to it."""
    symbols, dot, square = to
    symbols.copy_(trellis.encode(x))
    found = by_window[trellis.windows(symbols)]
    dot.copy_((found * x).sum(1))
    square.copy_(found.square().sum(1))
    return to


def windowed(key, value, d, n, gen):
    "Quantizers of these codes, and a plan of them with a centre of one head."
    sides = [make_quantizer(Spec(b, codebook=name), d, DEVICE) for b, name in (key, value)]
    center = 2 * torch.randn(1, d, generator=gen).to(DEVICE)
    return sides, CellPlan(*sides, n, center)


@needs_triton
@pytest.mark.parametrize("key,value,d,n", WINDOWS)
def test_windows_are_read(key, value, d, n, gen):
    """Decode by every kernel that runs here is the oracle's attention, with first and recent
    tokens. The mutant is a chain that lacks what stands before its first channel."""
    sides, plan = windowed(key, value, d, n, gen)
    length, window, sinks = 2 * n + 30, 8, 4
    k, v = torch.randn(2, length, 1, d, generator=gen).to(DEVICE)
    q = torch.randn(1, 3, d, generator=gen).to(DEVICE)
    _, cache = pool(plan, 4, 1, gen)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=DEVICE)
    t = torch.arange(length, device=DEVICE)
    append_slots(cache, plan, k + plan.center, v, table[0].long()[t // n] * n + t % n)
    rows = torch.randperm(length, generator=gen).int().to(DEVICE)[None]  # blocks of one token
    near = Recent(torch.empty(length, 1, 1 + sinks, 2 * d, device=DEVICE), rows, window, sinks)
    near.cache.fill_(torch.nan)
    both = torch.cat([k + plan.center, v], -1)
    near.cache[rows[0].long(), :, 0] = both
    near.cache[rows[0, length - 2].long(), :, 1:] = both[:sinks].transpose(0, 1)
    read = Requests(table, torch.tensor([length], dtype=torch.int32, device=DEVICE))
    exact = Exact(k[-1:] + plan.center, v[-1:], near)
    want = check(plan, cache, read, q, exact)
    if not CUDA and plan.key.code.windows:
        chains = [tuple(x) for x in plan.tables.chains]
        chains[0] = (chains[0][0], 1 - chains[0][1], *chains[0][2:])
        plan.tables = plan.tables._replace(chains=tuple(chains))
        wrong = decode_cells(q, cache, plan, read, exact)[0]
        assert (wrong - want).norm() > 1e-3 * want.norm()


@needs_triton
@pytest.mark.parametrize("key,value,d,n", WINDOWS)
def test_windows_are_appended(key, value, d, n, gen, monkeypatch):
    """Chunks from all places and single tokens: codes as the oracle's but for vectors whose
    rotation has another last bit, and no other byte. Calls are cut into pieces, too."""
    if not CUDA:
        monkeypatch.setattr(cells, "find_symbols", search_by_pytorch)
    sides, plan = windowed(key, value, d, n, gen)
    raw, _ = pool(plan, 12, 1, gen)
    view = lambda x: x[:, : plan.cell.nbytes].unflatten(1, (1, n, plan.cell.bytes_per_token))
    for piece, runs in ((16384, ((n // 2 + 3, n + 5), (0, 9), (5, 1))), (16, ((n - 1, 40),))):
        monkeypatch.setattr(CellPlan, "piece", lambda self, heads, piece=piece: piece)
        slots, free = [], torch.randperm(12, generator=gen).tolist()
        for first, count in runs:
            mine = [free.pop() for _ in range(-(-(first + count) // n))]
            slots += [mine[p // n] * n + p % n for p in range(first, first + count)] + [-1]
        slots = torch.tensor(slots).to(DEVICE)
        k, v = torch.randn(2, len(slots), 1, d, generator=gen).to(DEVICE)
        mine, theirs = raw.clone(), raw.clone()
        append_cells(view(mine), plan, k + plan.center, v, slots)
        append_slots(view(theirs), plan, k + plan.center, v, slots)
        written = theirs != raw
        share = 5e-2 if CUDA else 5e-3  # a value at an edge moves a string of symbols
        assert (mine != theirs).sum() <= share * written.sum() and written.any()
        assert torch.equal(mine[:, plan.cell.nbytes :], raw[:, plan.cell.nbytes :])
        raw = theirs


@needs_triton
def test_windows_are_searched_by_the_kernel(gen):
    "Three tokens of a decode step, searched by the kernel; a state that is not finite is NaN."
    sides, plan = windowed((2, CHAIN), (3, "uniform"), 64, 64, gen)
    _, cache = pool(plan, 2, 1, gen)
    slots = torch.tensor([70, -1, 3], device=DEVICE)
    k, v = torch.randn(2, 3, 1, 64, generator=gen).to(DEVICE)
    mine, theirs = cache.clone(), cache.clone()
    append_cells(mine, plan, k, v, slots)
    append_slots(theirs, plan, k, v, slots)
    assert (mine != theirs).sum() <= (20 if CUDA else 2) and (theirs != cache).any()
    k[2, 0, 5] = torch.inf
    append_cells(mine, plan, k, v, slots)
    assert plan.memories(mine)[0].tensors["scale"][0, 0, 0, 3].isnan()


@needs_triton
@pytest.mark.parametrize("key,value,d,n", WINDOWS)
def test_windows_of_a_past(key, value, d, n, gen):
    "Blocks to dense rows in the basis of the codes: levels times scales, bit for bit."
    sides, plan = windowed(key, value, d, n, gen)
    _, cache = pool(plan, 3, 1, gen)
    k, v = torch.randn(2, 2 * n, 1, d, generator=gen).to(DEVICE)
    append_slots(cache, plan, k, v, torch.arange(2 * n, device=DEVICE) + n)
    table = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    out = torch.full((2, 2 * n, 1, d), torch.nan, device=DEVICE)
    past_cells(cache, plan, table, 2 * n - 7, *out)
    for got, side, coded in zip(out, sides, read_cells(cache, plan, table, 2 * n - 7)):
        want = side.decode_rotated(coded).transpose(0, 1)
        torch.testing.assert_close(got[: 2 * n - 7], want, rtol=1e-6, atol=1e-7)
        assert got[2 * n - 7 :].isnan().all()


@interpreted
def test_kernels_are_searched_for_once(monkeypatch):
    """Appends, copies of recent tokens, their origins and a past, as the tests above check
    them, and once more: Triton searches for no kernel again, and what it found is right."""
    monkeypatch.setattr(launcher, "READY", {})
    kernels = []
    for of in (
        launcher._row_launcher,
        cells._recent_launcher,
        cells._sinks_launcher,
        kernel_blocks._look_up_launcher,
    ):
        kernels.append(FoundOnce(of.kernel))
        monkeypatch.setattr(of, "kernel", kernels[-1])
    for again in (False, True):
        before = [(kernel.searched, kernel.launched) for kernel in kernels]
        gen = seeded(0)
        test_append(16, 3, 3, 32, gen)
        test_recent_states_are_copied_to_their_slots(gen)
        test_origins_end_whatever_tables_hold(gen)
        test_windows_of_a_past(*WINDOWS[0], gen)
    assert again and all(
        kernel.searched == searched > 0 and kernel.launched > launched
        for kernel, (searched, launched) in zip(kernels, before)
    ), [(kernel.searched, kernel.launched) for kernel in kernels]


def test_windows_that_no_kernel_reads():
    for bits, d in ((1, 64), (2, 80), (3, 32)):
        side = make_quantizer(Spec(bits, codebook=CHAIN), d)
        why = f"keys: a cell holds .*: kernels read chains of 2 or 3 bits and 64 or 128 .* {d}$"
        with refuses(why):
            CellLayout.of(side, side, 64)


@needs_triton
def test_wide_heads(gen):
    "More than 256 channels: appended, attended to with exact tokens, and read as a past."
    d, heads = 272, 2
    plan, cache, table, lengths, q, k, v = case(gen, d=d, n=64, lengths=(105, 9), group=2)
    check(plan, cache, Requests(table, lengths), q, Exact(k, v))
    mine, theirs = cache.clone(), cache.clone()
    states = torch.randn(2, 20, heads, d, generator=gen).to(DEVICE)
    for append, to in ((append_cells, mine), (append_slots, theirs)):
        append(to, plan, *states, torch.arange(60, 80, device=DEVICE))
    assert (mine != theirs).sum() <= 2e-3 * (theirs != cache).sum() and (mine != cache).any()
    out = torch.full((2, 100, heads, d), torch.nan, device=DEVICE)
    past_cells(theirs, plan, table[0], 100, *out)
    coded = read_cells(theirs, plan, table[0], 100)
    for got, side, x in zip(out, (plan.key, plan.value), coded):
        want = side.decode_rotated(x).transpose(0, 1)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


TWO, THREE = dict(bits=[2, 2], codebook=CHAIN), dict(bits=[3, 3], codebook=CHAIN)
COMPILED = [
    dict(kernel="fragments", tokens=64, listed=False, centred=True),
    dict(kernel="fragments", d=512, tokens=128),
    dict(kernel="append", steps=4, step=2, centred=True),
    dict(kernel="fragments", tokens=64, regs=168, **TWO),
    dict(kernel="join", recent=True, learnt=True, together=16),
    dict(kernel="append", steps=1, step=1),
    dict(kernel="past", tokens=256, **THREE),
    dict(kernel="past", d=512, tokens=128, side="value"),
    dict(kernel="recent", sinks=4),
    dict(kernel="work", sliding=True),
    dict(kernel="sinks"),
    dict(kernel="portable", **TWO),
]


@needs_triton
def test_compiled_for_hopper():
    """Kernels of a step, with tables and with codes by windows, as they are launched: no spills
    where they would cost, copies of 16 bytes. (Others: tests/golden/kernels.json.)"""
    pytest.importorskip("triton.experimental.gluon")
    cases = COMPILED if SLOW else COMPILED[::2]
    for got in ahead_of_time(*cases, of="cells", by="kernels.aot"):
        assert got["spills"] == 0 and got["registers"] <= 255, got
        assert got["kernel"] != "fragments" or got["copies of 16 bytes"] > 0, got
