"""Kernels on an engine's blocks by block size, against the store's kernel on the same codes and
flash attention on bf16: run.py serving_kernels --out FILE.

Gate: decode in cells (fragments and portable kernel) agrees with the oracle of chapter 34 to
3e-3 of its norm for head sizes, groups, bits, windows, a soft cap, drafts and ragged lengths;
codes that `append_cells` writes agree with the oracle's but for a share of 2e-3; the past of a
chunk is the oracle's to bf16's rounding.

Then medians of CUDA graphs' replays: decode of one token for each request with its own exact
token, bytes moved per second, and the append."""

import torch
import torch.nn.functional as F
from plan import Plan
from bench.timing import kernel_times, replayed

from turboquant_nb.cache.pages import append_slots, attend_cells, read_cells
from turboquant_nb.kernels.cells import (
    CellPlan,
    Workspace,
    append_cells,
    decode_cells,
    list_work,
    past_cells,
)
from turboquant_nb.quant.quantizer import Quantizer, Spec

DEVICE = "cuda"
SHAPES = [(8, 32768), (8, 8192), (64, 2048), (1, 32768), (1, 1024)]
GATE = [
    dict(),
    dict(n=128),
    dict(n=256),
    dict(n=16),
    dict(n=32),
    dict(group=8),
    dict(group=1),
    dict(group=5, m=3),
    dict(d=64),
    dict(d=64, group=8, n=128),
    dict(d=256, heads=1),
    dict(d=96),
    dict(d=80, n=128),
    dict(kb=4, vb=4),
    dict(kb=4, vb=2, n=256),
    dict(kb=2, vb=2),
    dict(m=4, group=4),
    dict(dtype=torch.float16),
    dict(own=False),
    dict(options=dict(sliding_window=100)),
    dict(options=dict(softcap=8.0)),
    dict(options=dict(sliding_window=700, softcap=8.0), n=128),
    dict(splits=7),
]
LISTED = [  # the same with a list of work
    dict(),
    dict(n=128, splits=9),
    dict(d=64, n=128, splits=3),
    dict(group=5, m=3, splits=20),
    dict(own=False, splits=5),
    dict(options=dict(sliding_window=700), n=128, splits=11),
    dict(d=96, splits=6),
    dict(lengths=(0, 0)),
    dict(lengths=(9000,) + (40, 0, 300) * 30, heads=1, n=128),
]
RAGGED = [  # (requests, tokens) of a batch, and tokens that the table has room for
    ([(8, 32000)], 33500),
    ([(1, 32000), (7, 1000)], 33500),
    ([(64, 2048)], 33500),
    ([(1, 32000), (63, 1000)], 33500),
    ([(1, 131072), (63, 1000)], 131072),
    ([(8, 1024)], 33500),
]


def case(
    kb=3,
    vb=3,
    d=128,
    n=64,
    m=1,
    lengths=(1500, 64, 0, 33, 257, 1024),
    heads=2,
    group=4,
    dtype=torch.bfloat16,
    seed=0,
    **_,
):
    """A pool with these requests in shuffled blocks, coded by the oracle; queries, keys and
    values of the last m tokens, as slices of one tensor."""
    gen = torch.Generator().manual_seed(seed)
    plan = CellPlan(*(Quantizer(Spec(b), d, DEVICE) for b in (kb, vb)), tokens=n)
    need = [-(-x // n) for x in lengths]
    raw = torch.randint(
        0, 256, (sum(need) + 1, heads * plan.cell.nbytes + 64), dtype=torch.uint8, generator=gen
    ).to(DEVICE)
    cache = raw[:, : heads * plan.cell.nbytes].unflatten(
        1, (heads, n, plan.cell.bytes_per_token)
    )
    order, table = (
        torch.randperm(sum(need), generator=gen).split(need),
        torch.zeros(len(lengths), max(need) + 1, dtype=torch.int32),
    )
    for row, blocks, length in zip(table, order, lengths):
        row[: len(blocks)] = blocks
        t = torch.arange(length)
        k, v = torch.randn(2, length, heads, d, generator=gen).to(DEVICE)
        append_slots(
            cache,
            plan.cell,
            plan.key,
            plan.value,
            k,
            v,
            (row[t // n].long() * n + t % n).to(DEVICE),
        )
    x = torch.randn(len(lengths) * m, (group + 2) * heads, d, generator=gen).to(DEVICE, dtype)
    return (
        plan,
        cache,
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        *x.split([group * heads, heads, heads], 1),
    )


def decode_error(kernel, options=None, own=True, splits=None, listed=False, **of):
    plan, cache, table, lengths, q, k, v = case(**of)
    own, options = (k, v) if own else (None, None), options or {}
    starts = torch.arange(len(lengths) + 1) * (len(q) // len(lengths))
    exact = [x if x is None else x.float() for x in own]
    want, want_lse = attend_cells(
        q.float(),
        cache,
        plan.cell,
        plan.key,
        plan.value,
        table,
        lengths,
        starts,
        *exact,
        **options,
    )
    space = Workspace(DEVICE)
    space.memory = torch.full((10**7,), torch.nan, device=DEVICE)
    out, lse = decode_cells(
        q,
        cache,
        plan,
        table,
        lengths,
        *own,
        kernel=kernel,
        splits=splits,
        workspace=space,
        work={} if listed else None,
        **options,
    )
    seen = want_lse > -torch.inf
    if not torch.equal(lse > -torch.inf, seen) or out[~seen].any():
        return float("inf")
    if not seen.any():
        return 0.0
    return max(
        float((out.float() - want)[seen].norm() / want[seen].norm()),
        float((lse - want_lse)[seen].abs().max()) / 5,
    )


def append_share(n, d, kb, vb, dtype):
    """Share of the bytes written by the oracle that a kernel writes otherwise; infinite if it
    writes beside them."""
    gen = torch.Generator().manual_seed(n + d)
    plan = CellPlan(*(Quantizer(Spec(b), d, DEVICE) for b in (kb, vb)), tokens=n)
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
    append_slots(view(theirs), plan.cell, plan.key, plan.value, k.float(), v.float(), slots)
    beside = (mine != raw) & (theirs == raw)
    if beside.sum() > 0.002 * (theirs != raw).sum():
        return float("inf")
    return float((mine != theirs).sum() / (theirs != raw).sum())


def past_error():
    plan, cache, table, lengths, *_ = case(lengths=(1500,), n=128)
    k, v = torch.full((2, 1500, 2, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    past_cells(cache, plan, table[0, 1:], 1500 - 128, k, v)
    worst = 0.0
    for got, q, coded in zip(
        (k, v), (plan.key, plan.value), read_cells(cache, plan.cell, table[0], 1500)
    ):
        want = q.decode_rotated(coded)[:, 128:].transpose(0, 1)
        worst = max(worst, float((got[: 1500 - 128].float() - want).norm() / want.norm()))
    return worst


def replay_error():
    "A graph that makes its list itself, replayed with other lengths."
    plan, cache, table, lengths, q, k, v = case(lengths=(3000, 40, 700, 0), n=128)
    space, out, worst = (
        Workspace(DEVICE, 10**7),
        torch.empty(4, 8, 128, dtype=torch.bfloat16, device=DEVICE),
        0.0,
    )
    replay = replayed(
        lambda: decode_cells(
            q, cache, plan, table, lengths, k, v, out=out, workspace=space, work={}
        )
    )
    for others in ((3000, 40, 700, 0), (100, 40, 600, 0), (2900, 0, 1, 0), (1, 1, 1, 0)):
        lengths.copy_(torch.tensor(others, dtype=torch.int32))
        out.fill_(torch.nan)
        replay()
        want = attend_cells(
            q.float(),
            cache,
            plan.cell,
            plan.key,
            plan.value,
            table,
            lengths,
            torch.arange(5),
            k.float(),
            v.float(),
        )[0]
        worst = max(worst, float((out.float() - want).norm() / want.norm()))
    return worst


def gate_of_lists():
    "Both kernels with a list of work, and a graph."
    said = {
        f"{kernel} {of}": decode_error(kernel, listed=True, **of)
        for of in LISTED
        for kernel in ("fragments", "portable")[: 1 + (of in LISTED[1:3])]
    }
    said["replayed with other lengths"] = replay_error()
    for name, x in said.items():
        print("RED" if not x < 3e-3 else "ok", name, f"{x:.1e}", flush=True)
    return dict(
        cmd=(
            f"{len(said)} cases of attention by a list of work against the oracle, worst "
            f"{max(said.values()):.1e}"
        ),
        passed=max(said.values()) < 3e-3,
    )


def gate(cases):
    said = {}
    for of in cases:
        name = ", ".join(f"{k}={v}" for k, v in of.items()) or "d=128"
        said[f"fragments {name}"] = decode_error("fragments", **of)
    for of in GATE[:1] + GATE[9:12]:
        said[f"portable {of}"] = decode_error("portable", **of)
    append = {
        f"append n={n} d={d} k{kb}v{vb} {dtype}": append_share(n, d, kb, vb, dtype)
        for n in (64, 128, 256)
        for d, kb, vb, dtype in (
            (128, 3, 3, torch.bfloat16),
            (64, 4, 2, torch.float16),
            (256, 2, 4, torch.bfloat16),
        )
    }
    said["past of a chunk"] = past_error()
    worst, share = max(said.values()), max(append.values())
    red = [f"{k}: {v:.2e}" for k, v in said.items() if not v < 3e-3] + [
        f"{k}: {v:.2e}" for k, v in append.items() if not v < 2e-3
    ]
    for line in red:
        print("RED", line, flush=True)
    cmd = (
        f"{len(said)} cases of attention and past against the oracle, worst {worst:.1e}; "
        f"{len(append)} of the append, worst share of bytes {share:.1e}"
    )
    return dict(cmd=cmd, passed=not red)


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


def rows(a):
    heads, group, d = 8, 4, 128
    for bits in ((3, 3), (4, 4)) if not a.quick else ((3, 3),):
        for batch, tokens in SHAPES[::4] if a.quick else SHAPES:
            q = torch.randn(batch, (group + 2) * heads, d, device=DEVICE, dtype=torch.bfloat16)
            q, k, v = q.split([group * heads, heads, heads], 1)
            for n in (64, 128, 256):
                plan = CellPlan(*(Quantizer(Spec(b), d, DEVICE) for b in bits), tokens=n)
                cache, table = pool(plan, batch, tokens, heads)
                lengths, space, out = (
                    torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE),
                    Workspace(DEVICE, 4 * 10**6),
                    torch.empty_like(q, memory_format=torch.contiguous_format),
                )
                t = kernel_times(
                    replayed(
                        lambda: decode_cells(
                            q, cache, plan, table, lengths, k, v, out=out, workspace=space
                        )
                    )
                )
                common = dict(
                    batch=batch, tokens=tokens, heads=heads, group=group, d=d, unit="us", n=100
                )
                yield (
                    common
                    | dict(
                        what="decode",
                        key_bits=bits[0],
                        value_bits=bits[1],
                        block=n,
                        gbs=cache.numel() / t["p50"] / 1e3,
                    )
                    | t
                )
                slots = table[:, -1].long() * n + (tokens - 1) % n
                t = kernel_times(replayed(lambda: append_cells(cache, plan, k, v, slots)))
                yield (
                    common
                    | dict(what="append", key_bits=bits[0], value_bits=bits[1], block=n)
                    | t
                )
                cache = None
            if bits == (3, 3):
                kd, vd = (
                    torch.randn(batch, heads, tokens, d, device=DEVICE, dtype=torch.bfloat16)
                    for _ in range(2)
                )
                qd = q.contiguous()[:, :, None]
                t = kernel_times(
                    replayed(
                        lambda: F.scaled_dot_product_attention(qd, kd, vd, enable_gqa=True)
                    )
                )
                yield (
                    common
                    | dict(what="torch flash bf16", gbs=kd.nbytes * 2 / t["p50"] / 1e3)
                    | t
                )
                kd = vd = None


def ragged():
    """Batches of unequal requests, with equally many splits for each and with a list of work,
    which the layers of a step share; and its making."""
    heads, group, d, n = 8, 4, 128, 128
    plan, space = (
        CellPlan(*(Quantizer(Spec(3), d, DEVICE) for _ in range(2)), tokens=n),
        Workspace(DEVICE, 2 * 10**7),
    )
    for batch, width in RAGGED:
        each = [tokens for count, tokens in batch for _ in range(count)]
        lengths, need = (
            torch.tensor(each, dtype=torch.int32, device=DEVICE),
            [-(-x // n) for x in each],
        )
        cache, blocks = pool(plan, 1, sum(need) * n, heads)
        table = torch.zeros(len(each), -(-width // n), dtype=torch.int32, device=DEVICE)
        for row, mine in zip(table, blocks[0].split(need)):
            row[: len(mine)] = mine
        q, k, v = torch.randn(
            len(each), (group + 2) * heads, d, device=DEVICE, dtype=torch.bfloat16
        ).split([group * heads, heads, heads], 1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        common = dict(
            batch=len(each),
            lengths=" + ".join(f"{count} x {tokens}" for count, tokens in batch),
            width=width,
            heads=heads,
            group=group,
            d=d,
            block=n,
            unit="us",
            n=100,
        )
        for work in (None, {}):
            call = lambda: decode_cells(
                q, cache, plan, table, lengths, k, v, out=out, workspace=space, work=work
            )
            call()
            t = kernel_times(replayed(call))
            yield (
                common
                | dict(
                    what="decode",
                    listed=work is not None,
                    gbs=sum(each) * heads * plan.cell.bytes_per_token / t["p50"] / 1e3,
                )
                | t
            )
        yield (
            common
            | dict(what="list")
            | kernel_times(replayed(lambda: list_work(lengths, 264, -(-width // 256), own=1)))
        )
        cache = None


def options(p):
    p.add_argument(
        "--ragged",
        action="store_true",
        help="only batches of unequal requests, with and without a list of work",
    )
    p.add_argument(
        "--quick", action="store_true", help="a third of the gate, two shapes, 3 bits"
    )


def plan(a):
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
