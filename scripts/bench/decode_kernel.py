"""Decode attention on codes against the best attention on bf16 and fp8, one NVIDIA GPU: run.py
decode_kernel [--quick] [--seconds S] [--after FILE [--again SHAPE …]] --out FILE.

--after takes the rows of an earlier file and measures what it lacks; of a shape that --again
names (8x8x4x128x32768: sequences, KV heads, group, head size, tokens) the rows with a pre-RoPE
mean are measured again, against the baselines of that file.

Gate: for every head size, group and bit count the kernel's output agrees with fp32 attention on
the same codes (`attention.attend`) to 1e-3 of its norm, on smaller batches; outliers of 1,000
in the query and in one value included. No row is written on a red gate.

Then, in one run, medians of triton's do_bench with 20th and 80th percentiles (the L2 cache is
emptied before each call), launched from Python ("eager") and replayed from a CUDA graph
("graph"). Ours is the whole of attention as a cache calls it: rotation of the query, mean of
the keys (or a mean before RoPE with RoPE), 4 exact sinks, 16 exact recent tokens, codes,
un-rotation, output in bf16. Baselines: torch's scaled_dot_product_attention (flash, enable_gqa)
and a split-KV Triton kernel on bf16 and on fp8 (e4m3, one scale for the tensor, which is what
fp8 caches store), each the fastest of several splits. `speedup` is the fastest bf16 of the same
row kind over ours.

`codes, drafts`: `drafted` tokens in one call, each with its own 16 exact tokens, as verifying
drafts does; `of_one` is its time over that of one token of the same store. `prompt in chunks`:
attention of a prompt of 32,768 tokens in chunks of `chunk`, all calls together, each to the
codes of its past and to itself exactly; `prompt at once`: torch's SDPA on the whole prompt.
Coding is in neither. `first` is the first pass over the chunks, in which cuDNN plans for each
new shape."""

import itertools
import math
import multiprocessing

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from cases import CASES, Shape, filled, states
from plan import Plan
from timing import event_time, kernel_times, quantiles, replayed

from turboquant_nb import results
from turboquant_nb.cache.attention import attend
from turboquant_nb.kernels import ops
from turboquant_nb.kernels.launch import decode_attention, refuses

BITS = [(4, 4), (3, 3), (2, 2)]
ALL_BITS = [(k, v) for k in (4, 3, 2) for v in (4, 3, 2)]
DRAFTED = (1, 2, 4, 8, 16)  # tokens in one call
RECENT = 16  # exact tokens of a query, itself included
DENSE = [(64, 4, 3), (128, 4, 3)]  # blocks, warps and stages of the dense kernel


@triton.jit
def _dense_kernel(
    Q,
    K,
    V,
    O,
    L,
    T,
    scale,
    SPLITS,
    G: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    M: tl.constexpr,
):
    """One split of the tokens for all query heads of one KV head, on dense keys and values of
    any float type."""
    pid = tl.program_id(0)
    bh = pid // SPLITS
    s = pid % SPLITS
    m_at = tl.arange(0, M)
    d = tl.arange(0, D)
    t = tl.arange(0, BN)
    q = tl.load(
        Q + (bh * G + m_at)[:, None] * D + d[None, :], mask=m_at[:, None] < G, other=0.0
    )
    chunk = tl.cdiv(T, SPLITS * BN) * BN
    begin = s * chunk
    end = tl.minimum(begin + chunk, T)
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    base = bh.to(tl.int64) * T * D
    for n in range(begin, end, BN):
        k = tl.load(K + base + (n + t)[None, :] * D + d[:, None]).to(tl.bfloat16)
        x = tl.dot(q, k) * scale
        new = tl.maximum(top, tl.max(x, 1))
        rescale = tl.exp2(top - new)
        p = tl.exp2(x - new[:, None])
        total = total * rescale + tl.sum(p, 1)
        v = tl.load(V + base + (n + t)[:, None] * D + d[None, :]).to(tl.bfloat16)
        acc = acc * rescale[:, None] + tl.dot(p.to(tl.bfloat16), v)
        top = new
    tl.store(O + ((bh * SPLITS + s) * M + m_at)[:, None] * D + d[None, :], acc / total[:, None])
    tl.store(L + (bh * SPLITS + s) * M + m_at, top + tl.log2(total))


@triton.jit
def _dense_combine(
    O, L, OUT, SPLITS, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, S2: tl.constexpr
):
    bh = tl.program_id(0)
    g = tl.program_id(1)
    s = tl.arange(0, S2)
    d = tl.arange(0, D)
    lse = tl.load(L + (bh * SPLITS + s) * M + g, mask=s < SPLITS, other=-1e30)
    w = tl.exp2(lse - tl.max(lse, 0))
    o = tl.load(
        O + ((bh * SPLITS + s) * M + g)[:, None] * D + d[None, :],
        mask=s[:, None] < SPLITS,
        other=0.0,
    )
    tl.store(
        OUT + (bh * G + g) * D + d,
        tl.sum(o * (w / tl.sum(w, 0))[:, None], 0).to(OUT.dtype.element_ty),
    )


def dense(q, k, v, splits, block, warps, stages):
    "A callable that runs the dense split-KV kernel once."
    b, hq, _, d = q.shape
    h, tokens = k.shape[1], k.shape[2]
    group, rows = hq // h, 16
    o, lse = (
        torch.empty(b * h, splits, rows, d, device=q.device),
        torch.empty(b * h, splits, rows, device=q.device),
    )
    out = torch.empty_like(q)

    def run():
        _dense_kernel[(b * h * splits,)](
            q,
            k,
            v,
            o,
            lse,
            tokens,
            math.log2(math.e) / math.sqrt(d),
            splits,
            group,
            d,
            block,
            rows,
            num_warps=warps,
            num_stages=stages,
        )
        _dense_combine[(b * h, group)](
            o, lse, out, splits, group, d, rows, triton.next_power_of_2(splits), num_warps=4
        )
        return out

    return run


def gate(cases):
    """The largest relative error over head sizes, groups and bits, in fp32 on batches of at
    most 2 and 16,384 tokens, and after outliers."""
    worst, kinds = 0.0, {}
    for case in cases:
        kinds.setdefault(
            (case.d, case.group > 4, case.tokens > 12 * 1024), case
        )  # what the kernel is compiled for, and where the mean's sums are computed
    for case in kinds.values():
        small = case._replace(batch=min(case.batch, 2), heads=2, tokens=min(case.tokens, 16384))
        for k_bits, v_bits in BITS:
            for outlier, center in (
                (False, "prompt_mean"),
                (True, "prompt_mean"),
                (False, "pre_rope"),
            ):
                q, k, v = states(small, torch.float32, outlier)
                store = filled(k, v, k_bits, v_bits, center)
                want, _ = attend(q, store)
                got, _ = decode_attention(q, store)
                worst = max(worst, float((got - want).norm() / want.norm()))
        for n in (4, 64) if case == cases[0] else ():  # drafts, and a chunk in blocks
            q, k, v = drafted(small, n, torch.float32)
            store, near = (
                filled(k, v, 3, 3, "pre_rope"),
                (k[:, :, -n - RECENT + 1 :], v[:, :, -n - RECENT + 1 :]),
            )
            call = dict(recent=RECENT) if n == 4 else {}
            near = near if n == 4 else (k[:, :, -n:], v[:, :, -n:])
            want, _ = attend(q, store, *near, **call)
            got, _ = ops.attend(
                q, store, *near, backend="triton" if n == 4 else "flash", **call
            )
            worst = max(worst, float((got - want).norm() / want.norm()))
    return {
        "cmd": (
            "decode kernel against attention.attend on the same codes in fp32: every head size "
            "and group, 4, 3 and 2 bits, outliers x1000 in the query and in one value, a "
            "pre-RoPE mean, drafts, a chunk in blocks"
        ),
        "passed": worst <= 1e-3,
        "worst": worst,
    }


def drafted(case, n, dtype=torch.bfloat16):
    "As `states`, with queries of the last n tokens."
    q, k, v = states(case, dtype)
    g = torch.Generator("cuda").manual_seed(1)
    return (
        torch.randn(
            case.batch,
            case.heads * case.group,
            n,
            case.d,
            generator=g,
            device="cuda",
            dtype=dtype,
        ),
        k,
        v,
    )


def compile_one(task):
    "Compile what one row needs; the result lies in Triton's cache for the other processes."
    case, bits, dtype = task
    q, k, v = states(case._replace(batch=1, tokens=600), dtype)
    if bits is None:  # the dense kernel
        for config in DENSE:
            for kind in (torch.bfloat16, torch.float8_e4m3fn):
                try:
                    dense(q, k.to(kind), v.to(kind), 2, *config)()
                except triton.runtime.errors.OutOfResources:  # d = 256 in blocks of 128 tokens
                    pass
    elif isinstance(bits, int):  # so many drafts
        q, k, v = drafted(case._replace(batch=1, tokens=600), bits, dtype)
        for center in ("prompt_mean", "pre_rope"):
            decode_attention(
                q, filled(k, v, 3, 3, center), k[:, :, -bits:], v[:, :, -bits:], recent=RECENT
            )
            ops.attend(
                torch.cat([q] * 20, 2),
                filled(k, v, 3, 3, center),
                k[:, :, -20 * bits :],
                v[:, :, -20 * bits :],
                backend="flash",
            )
    else:
        for center, tokens in (
            ("prompt_mean", 600),
            ("pre_rope", 600),
            ("pre_rope", 13000),
        ):  # a long one computes the mean's sums itself
            q, k, v = states(case._replace(batch=1, tokens=tokens), dtype)
            decode_attention(q, filled(k, v, *bits, center))
    torch.cuda.synchronize()


def compile_all(cases, workers, known):
    "Compile in several processes before anything is timed."
    kinds = {}
    for i, c in enumerate(cases):
        for bits in BITS if i or known else ALL_BITS:
            for dtype in (torch.bfloat16, torch.float32)[: 1 + (bits in BITS)]:
                kinds.setdefault((c.d, c.group > 4, bits, dtype), (c, bits, dtype))
        for n, dtype in (
            ((4, torch.float32), *((n, torch.bfloat16) for n in DRAFTED)) if i == 0 else ()
        ):
            kinds["drafts", n, dtype] = (c, n, dtype)
        if c.d == triton.next_power_of_2(c.d):
            kinds.setdefault((c.d, c.group), (c, None, torch.bfloat16))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, kinds.values(), chunksize=1)


def measure(case: Shape, bits, seconds, known=()):
    """Rows of one case: baselines, then ours at every bit pair; with a pre-RoPE mean only where
    baselines are known."""
    batch, heads, group, d, tokens = case
    q, k, v = states(case)
    rows = [*known]
    add = lambda **row: rows.append(case._asdict() | dict(unit="microseconds", n=1) | row)
    sdpa = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)
    for launch, wrap in (("eager", lambda f: f), ("graph", replayed)) if not known else ():
        add(method="sdpa bf16", launch=launch, bits=16, **kernel_times(wrap(sdpa), seconds))
    dense_kernels = (
        ("triton bf16", k, v, 16),
        ("triton fp8", k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), 8),
    )
    for name, kk, vv, stored in (
        dense_kernels if d == triton.next_power_of_2(d) and not known else ()
    ):  # Triton's ranges are powers of two
        best = None
        for splits in sorted(
            {
                max(1, 256 // (batch * heads)),
                max(1, 528 // (batch * heads)),
                max(1, 1056 // (batch * heads)),
            }
        ):
            for block, warps, stages in DENSE:
                try:
                    f = dense(q, kk, vv, splits, block, warps, stages)
                    t = kernel_times(replayed(f), seconds / 4)["p50"]
                except triton.runtime.errors.OutOfResources:
                    continue
                if best is None or t < best[0]:
                    best = t, f, (splits, block, warps, stages)
        for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
            add(
                method=name,
                launch=launch,
                bits=stored,
                config=str(best[2]),
                **kernel_times(wrap(best[1]), seconds),
            )
        del kk, vv
    for (k_bits, v_bits), center in itertools.product(bits, ("prompt_mean", "pre_rope")):
        if (center == "pre_rope" and k_bits != v_bits) or (center == "prompt_mean" and known):
            continue
        store = filled(k, v, k_bits, v_bits, center)
        if why := refuses(ops.Call.of(q, store)):
            raise SystemExit(f"{case}: {why}")
        for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
            f = wrap(lambda store=store: decode_attention(q, store))
            row = kernel_times(f, seconds)
            best = min(r["p50"] for r in rows if r["launch"] == launch and r["bits"] == 16)
            add(
                method="codes" if center == "prompt_mean" else "codes, turning centre",
                launch=launch,
                k_bits=k_bits,
                v_bits=v_bits,
                bits=(k_bits + v_bits) / 2 + 16 / d,
                held=store.bits_per_value(),
                speedup=best / row["p50"],
                **row,
            )
    return rows[len(known) :]


def measure_drafts(case: Shape, seconds):
    "Rows of several tokens in one call, each as if it had come alone."
    rows, one = [], {}
    for center, n in itertools.product(("prompt_mean", "pre_rope"), DRAFTED):
        q, k, v = drafted(case, n)
        store, near = (
            filled(k, v, 3, 3, center),
            (k[:, :, -n - RECENT + 1 :], v[:, :, -n - RECENT + 1 :]),
        )
        for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
            row = kernel_times(
                wrap(
                    lambda q=q, store=store, near=near: decode_attention(
                        q, store, *near, recent=RECENT
                    )
                ),
                seconds,
            )
            one.setdefault((center, launch), row["p50"])
            rows.append(
                case._asdict()
                | dict(
                    unit="microseconds",
                    n=1,
                    method="codes, drafts",
                    center=center,
                    drafted=n,
                    launch=launch,
                    k_bits=3,
                    v_bits=3,
                    of_one=row["p50"] / one[center, launch],
                )
                | row
            )
    return rows


def measure_chunks(case: Shape, chunk=2048, repeats=3):
    """Rows of attention of a whole prompt: at once, and in chunks on the codes of what came
    before."""
    q, k, v = drafted(case, case.tokens)
    whole = quantiles(
        [
            1e3
            * event_time(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            )
            for _ in range(repeats + 1)
        ][1:]
    )
    rows = [
        case._asdict()
        | dict(unit="microseconds", n=repeats, method="prompt at once", launch="eager", bits=16)
        | whole
    ]
    for center in ("prompt_mean", "pre_rope"):
        sums, few = [], 40
        ops.attend(
            q[:, :, :few],
            filled(k[:, :, :600], v[:, :, :600], 3, 3, center),
            k[:, :, :few],
            v[:, :, :few],
            backend="flash",
        )  # kernels are compiled, nothing is planned
        for _ in range(repeats + 1):
            store, total = (
                filled(k[:, :, :chunk], v[:, :, :chunk], 3, 3, center, room=case.tokens),
                0.0,
            )
            for i in range(0, case.tokens, chunk):
                own = k[:, :, i : i + chunk], v[:, :, i : i + chunk]
                if i:
                    store.append(*own)
                    call = lambda i=i, store=store, own=own: ops.attend(
                        q[:, :, i : i + chunk], store, *own, backend="flash"
                    )
                else:
                    call = lambda own=own: F.scaled_dot_product_attention(
                        q[:, :, :chunk], *own, is_causal=True, enable_gqa=True
                    )
                total += 1e3 * event_time(call)
            sums.append(total)
        rows.append(
            case._asdict()
            | dict(
                unit="microseconds",
                n=repeats,
                method="prompt in chunks",
                chunk=chunk,
                center=center,
                launch="eager",
                k_bits=3,
                v_bits=3,
                first=sums[0],
            )
            | quantiles(sums[1:])
        )
    return rows


def options(p):
    p.add_argument("--quick", action="store_true", help="four cases only")
    p.add_argument("--seconds", type=float, default=0.1, help="measuring time of one row")
    p.add_argument("--after", help="rows of this earlier file are kept")
    p.add_argument(
        "--again",
        nargs="*",
        default=[],
        help="shapes in it whose rows with a pre-RoPE mean are measured again",
    )
    p.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")


def rows(cases, whole, seconds, known, again):
    "What is measured, case by case; `known`: rows of an earlier file."
    head, have = cases[0], {tuple(r[x] for x in Shape._fields) for r in known}
    if not any(r["method"] == "codes, drafts" for r in known):
        yield from measure_drafts(head, seconds)
        yield from measure_drafts(Shape(1, 8, 4, 128, 8192), seconds)
        yield from measure_chunks(Shape(1, 8, 4, 128, 32768))
    for i, case in enumerate(cases):
        if case not in have:
            yield from measure(case, ALL_BITS if i == 0 and whole else BITS, seconds)
    for case in again:
        yield from measure(
            case,
            BITS,
            seconds,
            [
                r
                for r in known
                if r["bits"] == 16 and tuple(r[x] for x in Shape._fields) == case
            ],
        )


def plan(a):
    cases, again = (
        CASES["decode_kernel, quick" if a.quick else "decode_kernel"],
        [Shape(*map(int, x.split("x"))) for x in a.again],
    )
    known = results.earlier(a.after) if a.after else []
    have = {tuple(r[x] for x in Shape._fields) for r in known}
    if missing := [x for x in again if x not in have]:
        raise SystemExit(f"--again: not in {a.after}: {missing}")
    known = [
        r
        for r in known
        if r["method"] != "codes, turning centre"
        or tuple(r[x] for x in Shape._fields) not in again
    ]
    new = [c for c in cases if c not in have or c in again or c == cases[0]]
    if a.workers:
        compile_all(new, a.workers, known)
    data = {"id": "normal states", "n": len(cases)}
    return Plan(
        "decode",
        gate(new),
        rows(cases, not a.quick, a.seconds, known, again),
        data,
        before=known,
    )
