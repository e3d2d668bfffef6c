"""Kernels on an engine's blocks by block size, against the store's kernel on the same codes and
flash attention on bf16: run.py serving_kernels --out FILE.

Gate: decode in cells (fragments and portable kernel) agrees with the oracle of chapter 34 to
3e-3 of its norm for head sizes, groups, bits, windows, a soft cap, drafts and ragged lengths;
codes that `append_cells` writes agree with the oracle's but for a share of 2e-3 (of trellis
codes 5e-2, since one rounded value moves a string of symbols); the past of a chunk is the
oracle's to bf16's rounding.

--trellis: trellis codes beside tables of their bits at 8 x 32K, instead of all shapes.

Then medians of CUDA graphs' replays: decode of one token for each request with its own exact
token, bytes moved per second, and the append."""

from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from plan import Plan
from bench.cases import DEVICE
from bench.timing import kernel_times, replayed

from turboquant_nb.cache.attention import Rule
from turboquant_nb.cache.pages import Exact, Requests, append_slots, attend_cells, read_cells
from turboquant_nb.kernels.cell_attention import Launching, Room, decode_cells
from turboquant_nb.kernels.cells import CellPlan, append_cells
from turboquant_nb.kernels.cell_attention import past_cells
from turboquant_nb.kernels.work import Reads, Workspace, list_work
from turboquant_nb.quant.mixed_precision import make_quantizer
from turboquant_nb.quant.quantizer import Spec

SHAPES = [(8, 32768), (8, 8192), (64, 2048), (1, 32768), (1, 1024)]


class Case(NamedTuple):
    "A pool of requests, and what attends to it."

    kb: int = 3
    vb: int = 3
    d: int = 128
    n: int = 64  # tokens of a block
    m: int = 1  # query tokens of a request
    lengths: tuple = (1500, 64, 0, 33, 257, 1024)
    heads: int = 2
    group: int = 4
    dtype: torch.dtype = torch.bfloat16
    own: bool = True  # else the codes of the queries' own tokens are read
    splits: int | None = None
    options: dict = {}  # a sliding window, a soft cap
    codebook: str | None = None  # of keys and of values; None: a table

    def __str__(self):
        given = zip(self._fields, self, Case())
        return ", ".join(f"{k}={x}" for k, x, plain in given if x != plain) or "d=128"


GATE = [
    Case(),
    Case(n=128),
    Case(n=256),
    Case(n=16),
    Case(n=32),
    Case(group=8),
    Case(group=1),
    Case(group=5, m=3),
    Case(d=64),
    Case(d=64, group=8, n=128),
    Case(d=256, heads=1),
    Case(d=96),
    Case(d=80, n=128),
    Case(kb=4, vb=4),
    Case(kb=4, vb=2, n=256),
    Case(kb=2, vb=2),
    Case(m=4, group=4),
    Case(dtype=torch.float16),
    Case(own=False),
    Case(options=dict(sliding_window=100)),
    Case(options=dict(softcap=8.0)),
    Case(options=dict(sliding_window=700, softcap=8.0), n=128),
    Case(splits=7),
]
CHAINED = [
    Case(kb=bits, vb=bits, d=d, n=n, codebook=kind)
    for bits, d, n, kind in product((2, 3), (64, 128), (64, 128, 256), ("trellis",))
] + [
    Case(kb=2, vb=2, n=16, codebook="trellis"),
    Case(kb=2, vb=2, m=4, group=5, codebook="trellis"),
    Case(kb=3, vb=3, n=128, codebook="trellis", options=dict(sliding_window=700, softcap=8.0)),
    Case(kb=2, vb=3, own=False, codebook="trellis"),
]
LISTED = [  # the same with a list of work
    Case(),
    Case(n=128, splits=9),
    Case(d=64, n=128, splits=3),
    Case(group=5, m=3, splits=20),
    Case(own=False, splits=5),
    Case(options=dict(sliding_window=700), n=128, splits=11),
    Case(d=96, splits=6),
    Case(lengths=(0, 0)),
    Case(lengths=(9000,) + (40, 0, 300) * 30, heads=1, n=128),
]
RAGGED = [  # (requests, tokens) of a batch, and tokens that the table has room for
    ([(8, 32000)], 33500),
    ([(1, 32000), (7, 1000)], 33500),
    ([(64, 2048)], 33500),
    ([(1, 32000), (63, 1000)], 33500),
    ([(1, 131072), (63, 1000)], 131072),
    ([(8, 1024)], 33500),
]


def cell_plan(kb, vb, d, n, codebook=None):
    named = {} if codebook is None else dict(codebook=codebook)
    return CellPlan(*(make_quantizer(Spec(b, **named), d, DEVICE) for b in (kb, vb)), tokens=n)


def rows_of(tokens, heads, group, d, dtype=torch.bfloat16, gen=None):
    "Queries, keys and values of so many tokens, as slices of one tensor."
    x = torch.randn(tokens, (group + 2) * heads, d, generator=gen).to(DEVICE, dtype)
    return x.split([group * heads, heads, heads], 1)


def pool_of(case):
    """A pool with these requests in shuffled blocks, coded by the oracle; queries, keys and
    values of the last m tokens."""
    gen, n = torch.Generator().manual_seed(0), case.n
    plan = cell_plan(case.kb, case.vb, case.d, n, case.codebook)
    need = [-(-x // n) for x in case.lengths]
    size = sum(need) + 1, case.heads * plan.cell.nbytes + 64
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=gen).to(DEVICE)
    cache = raw[:, : case.heads * plan.cell.nbytes].unflatten(
        1, (case.heads, n, plan.cell.bytes_per_token)
    )
    order = torch.randperm(sum(need), generator=gen).split(need)
    table = torch.zeros(len(need), max(need) + 1, dtype=torch.int32)
    for row, blocks, length in zip(table, order, case.lengths):
        row[: len(blocks)] = blocks
        t = torch.arange(length)
        k, v = torch.randn(2, length, case.heads, case.d, generator=gen).to(DEVICE)
        slots = (row[t // n].long() * n + t % n).to(DEVICE)
        append_slots(cache, plan, k, v, slots)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    near = rows_of(len(need) * case.m, case.heads, case.group, case.d, case.dtype, gen)
    return plan, cache, table.to(DEVICE), lengths, *near


def oracle(plan, cache, table, lengths, q, k, v, **options):
    "(output, log-sum-exp) in fp32 on the same codes."
    starts = torch.arange(len(lengths) + 1) * (len(q) // len(lengths))
    exact = [x if x is None else x.float() for x in (k, v)]
    where = cache, plan, Requests(table, lengths), starts, Exact(*exact)
    return attend_cells(q.float(), *where, rule=Rule(**options))


def apart(got, want):
    return float((got.float() - want).norm() / want.norm())


def decode_error(kernel, case, listed=False):
    plan, cache, table, lengths, q, *own = pool_of(case)
    own = own if case.own else (None, None)
    want, want_lse = oracle(plan, cache, table, lengths, q, *own, **case.options)
    space = Workspace(DEVICE)
    space.memory = torch.full((10**7,), torch.nan, device=DEVICE)
    how = Launching(splits=case.splits, work={} if listed else None, kernel=kernel)
    where = cache, plan, Requests(table, lengths), Exact(*own)
    rule, room = Rule(**case.options), Room(workspace=space)
    out, lse = decode_cells(q, *where, rule=rule, to=room, how=how)
    seen = want_lse > -torch.inf
    if not torch.equal(lse > -torch.inf, seen) or out[~seen].any():
        return float("inf")
    if not seen.any():
        return 0.0
    return max(apart(out[seen], want[seen]), float((lse - want_lse)[seen].abs().max()) / 5)


def append_share(n, d, kb, vb, dtype, codebook=None):
    """Share of the bytes written by the oracle that a kernel writes otherwise; infinite if it
    writes beside them."""
    gen = torch.Generator().manual_seed(n + d)
    plan = cell_plan(kb, vb, d, n, codebook)
    raw = torch.randint(
        0, 256, (64, 2 * plan.cell.nbytes + 64), dtype=torch.uint8, generator=gen
    ).to(DEVICE)
    slots, free = [], torch.randperm(64, generator=gen).tolist()
    for first, count in (
        (n // 2 + 3, 3 * n + 5),
        (0, 2 * n),
        (5, 1),
        (n - 1, 1),
        (0, n // 4 + 1),
        (n // 3, n // 2),
    ):
        mine = [free.pop() for _ in range(-(-(first + count) // n))]
        slots += [mine[p // n] * n + p % n for p in range(first, first + count)] + [-1]
    slots = torch.tensor(slots).to(DEVICE)
    k, v = torch.randn(len(slots), 6, d, generator=gen).to(DEVICE, dtype)[:, 1:5].split(2, 1)
    mine, theirs = raw.clone(), raw.clone()
    view = lambda x: x[:, : 2 * plan.cell.nbytes].unflatten(
        1, (2, n, plan.cell.bytes_per_token)
    )
    append_cells(view(mine), plan, k, v, slots)
    append_slots(view(theirs), plan, k.float(), v.float(), slots)
    beside = (mine != raw) & (theirs == raw)
    if beside.sum() > 0.002 * (theirs != raw).sum():
        return float("inf")
    return float((mine != theirs).sum() / (theirs != raw).sum())


def past_error(**of):
    plan, cache, table, *_ = pool_of(Case(lengths=(1500,), n=128, **of))
    rest = 1500 - 128
    k, v = torch.full((2, 1500, 2, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    past_cells(cache, plan, table[0, 1:], rest, k, v)
    coded = read_cells(cache, plan, table[0], 1500)
    want = [q.decode_rotated(x)[:, 128:] for q, x in zip((plan.key, plan.value), coded)]
    return max(apart(x[:rest], y.transpose(0, 1)) for x, y in zip((k, v), want))


def replay_error():
    "A graph that makes its list itself, replayed with other lengths."
    plan, cache, table, lengths, q, k, v = pool_of(Case(lengths=(3000, 40, 700, 0), n=128))
    out, worst = torch.empty(4, 8, 128, dtype=torch.bfloat16, device=DEVICE), 0.0
    room = Room(out=out, workspace=Workspace(DEVICE, 10**7))
    where = cache, plan, Requests(table, lengths), Exact(k, v)
    replay = replayed(lambda: decode_cells(q, *where, to=room, how=Launching(work={})))
    for others in ((3000, 40, 700, 0), (100, 40, 600, 0), (2900, 0, 1, 0), (1, 1, 1, 0)):
        lengths.copy_(torch.tensor(others, dtype=torch.int32))
        out.fill_(torch.nan)
        replay()
        worst = max(worst, apart(out, oracle(plan, cache, table, lengths, q, k, v)[0]))
    return worst


def checked(said, limit):
    "Whether all of {case: error} are below a limit; those that are not are printed."
    for name, x in said.items():
        if not x < limit:
            print("RED", name, f"{x:.1e}", flush=True)
    return all(x < limit for x in said.values())


def gate_of_lists():
    "Both kernels with a list of work, and a graph."
    both = [("fragments", c) for c in LISTED] + [("portable", c) for c in LISTED[1:3]]
    said = {f"{kernel} {c}": decode_error(kernel, c, listed=True) for kernel, c in both}
    said["replayed with other lengths"] = replay_error()
    worst = max(said.values())
    cmd = f"{len(said)} cases of attention by a list of work against the oracle, "
    cmd += f"worst {worst:.1e}"
    return dict(cmd=cmd, passed=checked(said, 3e-3))


def gate_of_chains():
    "Trellis codes: both kernels, the append and the past of a chunk."
    said = {f"fragments {c}": decode_error("fragments", c) for c in CHAINED}
    said |= {f"portable {c}": decode_error("portable", c) for c in CHAINED[::5]}
    said |= {f"past, {kind}": past_error(kb=2, codebook=kind) for kind in ("trellis",)}
    append = {
        f"append of blocks of {n}, {bits} bits, {kind}": append_share(
            n, d, bits, bits, torch.bfloat16, kind
        )
        for n, (bits, d, kind) in product(
            (64, 128, 256), ((2, 128, "trellis"), (3, 64, "trellis"), (2, 64, "trellis"))
        )
    }
    cmd = f"{len(said)} cases of trellis codes against the oracle, worst "
    cmd += f"{max(said.values()):.1e}; {len(append)} of the append, worst share of bytes "
    cmd += f"{max(append.values()):.1e}"
    return dict(cmd=cmd, passed=checked(said, 3e-3) and checked(append, 5e-2))


def gate(cases):
    both = [("fragments", c) for c in cases]
    both += [("portable", c) for c in (GATE[0], *GATE[9:12])]
    said = {f"{kernel} {c}": decode_error(kernel, c) for kernel, c in both}
    said["past of a chunk"] = past_error()
    codes = (
        (128, 3, 3, torch.bfloat16),
        (64, 4, 2, torch.float16),
        (256, 2, 4, torch.bfloat16),
    )
    append = {
        f"append of blocks of {n}, {x}": append_share(n, *x)
        for n, x in product((64, 128, 256), codes)
    }
    cmd = (
        f"{len(said)} cases of attention and past against the oracle, worst "
        f"{max(said.values()):.1e}; {len(append)} of the append, worst share of bytes "
        f"{max(append.values()):.1e}"
    )
    return dict(cmd=cmd, passed=checked(said, 3e-3) and checked(append, 2e-3))


def pool(plan, batch, tokens, heads=8):
    blocks = batch * -(-tokens // plan.cell.tokens)
    cache = torch.zeros(
        blocks,
        heads,
        plan.cell.tokens,
        plan.cell.bytes_per_token,
        dtype=torch.uint8,
        device=DEVICE,
    )
    for name, part in plan.cell.views(cache).items():
        part.fill_(0.5) if "scale" in name else part.random_(0, 256)
    return cache, torch.randperm(blocks, device=DEVICE).int().view(batch, -1)


HEADS, GROUP, D = 8, 4, 128


def timed(what, of, call, nbytes=0, **more):
    "A row of a replayed call; `nbytes` are those it moves."
    call()
    t = kernel_times(replayed(call))
    rate = {"gbs": nbytes / t["p50"] / 1e3} if nbytes else {}
    shape = dict(heads=HEADS, group=GROUP, d=D, unit="us", n=100)
    return of | shape | dict(what=what) | more | rate | t


def coded(a):
    "((bits of keys and of values, codebook), shapes) of what is measured."
    if a.trellis:
        return [((b, b, kind), SHAPES[:1]) for b in (2, 3) for kind in (None, "trellis")]
    bits = ((3, 3),) if a.quick else ((3, 3), (4, 4))
    return [((*b, None), SHAPES[::4] if a.quick else SHAPES) for b in bits]


def rows(a):
    for (*bits, codebook), shapes in coded(a):
        for batch, tokens in shapes:
            q, k, v = rows_of(batch, HEADS, GROUP, D)
            of = dict(batch=batch, tokens=tokens)
            for n in (64, 128, 256):
                plan = cell_plan(*bits, D, n, codebook)
                cache, table = pool(plan, batch, tokens, HEADS)
                lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
                room = Room(out=out, workspace=Workspace(DEVICE, 4 * 10**6))
                where = cache, plan, Requests(table, lengths), Exact(k, v)
                call = partial(decode_cells, q, *where, to=room)
                block = dict(key_bits=bits[0], value_bits=bits[1], block=n)
                block |= {"codebook": codebook} if codebook else {}
                yield timed("decode", of, call, cache.numel(), **block)
                slots = table[:, -1].long() * n + (tokens - 1) % n
                call = partial(append_cells, cache, plan, k, v, slots)
                yield timed("append", of, call, **block)
                cache = call = where = None
            if bits == [3, 3] and not codebook:
                size = 2, batch, HEADS, tokens, D
                kd, vd = torch.randn(size, device=DEVICE, dtype=torch.bfloat16)
                flash = partial(F.scaled_dot_product_attention, enable_gqa=True)
                call = partial(flash, q.contiguous()[:, :, None], kd, vd)
                yield timed("torch flash bf16", of, call, 2 * kd.nbytes)
                kd = vd = call = None


def ragged():
    """Batches of unequal requests, with equally many splits for each and with a list of work,
    which the layers of a step share; and its making."""
    n = 128
    plan, space = cell_plan(3, 3, D, n), Workspace(DEVICE, 2 * 10**7)
    for batch, width in RAGGED:
        each = [tokens for count, tokens in batch for _ in range(count)]
        need = [-(-x // n) for x in each]
        lengths = torch.tensor(each, dtype=torch.int32, device=DEVICE)
        cache, blocks = pool(plan, 1, sum(need) * n, HEADS)
        table = torch.zeros(len(each), -(-width // n), dtype=torch.int32, device=DEVICE)
        for row, mine in zip(table, blocks[0].split(need)):
            row[: len(mine)] = mine
        q, k, v = rows_of(len(each), HEADS, GROUP, D)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        where, room = (Requests(table, lengths), Exact(k, v)), Room(out=out, workspace=space)
        named = " + ".join(f"{count} x {tokens}" for count, tokens in batch)
        of = dict(batch=len(each), lengths=named, width=width, block=n)
        nbytes = sum(each) * HEADS * plan.cell.bytes_per_token
        for work in (None, {}):
            how = Launching(work=work)
            call = partial(decode_cells, q, cache, plan, *where, to=room, how=how)
            yield timed("decode", of, call, nbytes, listed=work is not None)
        call = partial(list_work, lengths, 264, -(-width // 256), Reads(own=1))
        yield timed("list", of, call)
        cache = call = None


def options(p):
    p.add_argument(
        "--ragged",
        action="store_true",
        help="only batches of unequal requests, with and without a list of work",
    )
    p.add_argument(
        "--trellis", action="store_true", help="only trellis codes beside tables, at 8 x 32K"
    )
    p.add_argument(
        "--quick", action="store_true", help="a third of the gate, two shapes, 3 bits"
    )


def plan(a):
    if a.trellis:
        data = {"id": "random codes", "n": 1}
        return Plan("serving_kernels", gate=gate_of_chains(), rows=rows(a), data=data)
    if a.ragged:
        return Plan(
            "serving_ragged",
            gate=gate_of_lists(),
            rows=ragged(),
            data={"id": "random codes", "n": 1},
        )
    return Plan(
        "serving_kernels",
        gate=gate(GATE[::3] if a.quick else GATE),
        rows=rows(a),
        data={"id": "random codes", "n": 1},
    )
