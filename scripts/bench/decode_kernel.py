"""Decode attention on codes against the best attention on bf16 and fp8, one NVIDIA GPU: run.py
decode_kernel [--shapes SHAPE …] [--recipes NAME …] [--seconds S] [--after FILE]
--out FILE.

--shapes measures attention of one token on these shapes alone (8x8x4x128x32768: sequences, KV
heads, group, head size, tokens).
--recipes measures presets besides, as caches with a random frame hold them, where a kernel for
tensor cores reads them, and `append`: a token of 8 sequences of 8 heads of 128 channels, coded
in a CUDA graph, a layer of 20.
--after takes the rows of an earlier file and measures what it lacks.

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
row kind over ours."""

import itertools
import math
import multiprocessing
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from bench.cases import CASES, Shape, filled, frame, held, states
from plan import Plan, earlier
from bench.timing import append_times, both_launches, kernel_times, quantiles, replayed

from turboquant_nb.cache.attention import attend
from turboquant_nb.kernels import ops
from turboquant_nb.kernels.launch import decode_attention, refuses, store_plan
from turboquant_nb.quant.recipe import preset

CENTERS = "fixed", "pre_rope"
BITS = [(4, 4), (3, 3), (2, 2)]
ALL_BITS = [(k, v) for k in (4, 3, 2) for v in (4, 3, 2)]
FP8 = torch.float8_e4m3fn
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


def apart(got, want):
    "Relative to the norm."
    return float((got - want).norm() / want.norm())


def by_tensor_cores(store):
    plan = store_plan(store)
    return not (plan.why or plan.why_mma)


def off(q, store):
    return apart(decode_attention(q, store)[0], attend(q, store)[0])


def gate(cases, recipes):
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
            for outlier, center in ((False, "fixed"), (True, "fixed"), (False, "pre_rope")):
                q, k, v = states(small, torch.float32, outlier)
                worst = max(worst, off(q, filled(k, v, k_bits, v_bits, center)))
        for name in recipes:
            q, k, v = states(small, torch.float32)
            if by_tensor_cores(store := of_preset(name, k, v)):
                worst = max(worst, off(q, store))
    return {
        "cmd": (
            "decode kernel against attention.attend on the same codes in fp32: every head size "
            "and group, 4, 3 and 2 bits, outliers x1000 in the query and in one value, a "
            "pre-RoPE mean, presets"
        ),
        "passed": worst <= 1e-3,
        "worst": worst,
    }


def compile_one(task):
    "Compile what one row needs; the result lies in Triton's cache for the other processes."
    case, bits, dtype = task
    of = lambda tokens: case._replace(batch=1, tokens=tokens)
    if bits is None:  # the dense kernel
        q, k, v = states(of(600), dtype)
        for config, kind in itertools.product(DENSE, (torch.bfloat16, FP8)):
            try:
                dense(q, k.to(kind), v.to(kind), 2, *config)()
            except triton.runtime.errors.OutOfResources:  # d = 256 in blocks of 128 tokens
                pass
    else:
        if isinstance(bits, str):
            stores = [lambda k, v: of_preset(bits, k, v)]
        else:
            stores = [
                partial(filled, k_bits=bits[0], v_bits=bits[1], center=c) for c in CENTERS
            ]
        for make, tokens in itertools.product(stores, (600, 13000)):
            q, k, v = states(of(tokens), dtype)  # a long one computes the mean's sums itself
            if by_tensor_cores(store := make(k, v)):
                decode_attention(q, store)
    torch.cuda.synchronize()


def compile_all(cases, workers, known, recipes):
    "Compile in several processes before anything is timed."
    kinds = {}
    for i, c in enumerate(cases):
        for bits in BITS if i or known else ALL_BITS:
            for dtype in (torch.bfloat16, torch.float32)[: 1 + (bits in BITS)]:
                kinds.setdefault((c.d, c.group > 4, bits, dtype), (c, bits, dtype))
        for name, dtype in itertools.product(recipes, (torch.bfloat16, torch.float32)):
            kinds.setdefault((c.d, c.group > 4, name, dtype), (c, name, dtype))
        if c.d == triton.next_power_of_2(c.d):
            kinds.setdefault((c.d, c.group), (c, None, torch.bfloat16))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, kinds.values(), chunksize=1)


def about(case, method, **more):
    return case._asdict() | dict(method=method, unit="microseconds", n=1) | more


def fastest_dense(q, k, v, seconds):
    "(a callable, its splits, block, warps and stages) of the dense kernel at its best."
    programs, best = q.shape[0] * k.shape[1], None
    for splits in sorted({max(1, n // programs) for n in (256, 528, 1056)}):
        for config in ((splits, *x) for x in DENSE):
            try:
                f = dense(q, k, v, *config)
                t = kernel_times(replayed(f), seconds / 4)["p50"]
            except triton.runtime.errors.OutOfResources:
                continue
            if best is None or t < best[0]:
                best = t, f, config
    return best[1:]


def baselines(case: Shape, q, k, v, seconds):
    "Rows of the best attention on bf16 and fp8."
    sdpa = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=case.group > 1)
    for row in both_launches(sdpa, seconds):
        yield about(case, "sdpa bf16", bits=16) | row
    if case.d != triton.next_power_of_2(case.d):
        return  # Triton's ranges are powers of two
    for kind, name, bits in ((torch.bfloat16, "triton bf16", 16), (FP8, "triton fp8", 8)):
        f, config = fastest_dense(q, k.to(kind), v.to(kind), seconds)
        for row in both_launches(f, seconds):
            yield about(case, name, bits=bits, config=str(config)) | row


def of_preset(name, k, v, **more):
    "A store of a preset's recipe, with a frame."
    recipe = preset(name).settled(frame(k.shape[1], k.shape[3]))
    return held(recipe, k, v, **more)


def measure(case: Shape, bits, seconds, recipes=()):
    "Rows of one case: baselines, then ours at every bit pair and by every preset."
    q, k, v = states(case)
    dense = [*baselines(case, q, k, v, seconds)]
    yield from dense
    best = {
        launch: min(r["p50"] for r in dense if (r["launch"], r["bits"]) == (launch, 16))
        for launch in ("eager", "graph")
    }
    for (k_bits, v_bits), center in itertools.product(bits, CENTERS):
        if center == "pre_rope" and k_bits != v_bits:
            continue
        store = filled(k, v, k_bits, v_bits, center)
        if why := refuses(ops.Call.of(q, store)):
            raise SystemExit(f"{case}: {why}")
        method = "codes" if center == "fixed" else "codes, turning centre"
        what = about(case, method, k_bits=k_bits, v_bits=v_bits, held=store.bits_per_value())
        what["bits"] = (k_bits + v_bits) / 2 + 16 / case.d
        for row in both_launches(partial(decode_attention, q, store), seconds):
            yield what | dict(speedup=best[row["launch"]] / row["p50"]) | row
    for name in recipes:
        if not by_tensor_cores(of_preset(name, k[:1, :, :600], v[:1, :, :600])):
            continue
        store = of_preset(name, k, v)
        what = about(case, "codes, preset", recipe=name, held=store.bits_per_value())
        for row in both_launches(partial(decode_attention, q, store), seconds):
            yield what | dict(speedup=best[row["launch"]] / row["p50"]) | row


def measure_appends(recipes, case=Shape(8, 8, 1, 128, 70)):
    "Rows of a token appended to codes."
    _, k, v = states(case)
    for name in recipes:
        store = of_preset(name, k, v, room=2048, static=True)
        token = [x[:, :, -1:] for x in (k, v)]
        took = append_times(lambda: ops.append(store, *token), [store], case.tokens)
        yield about(case, "append", recipe=name, launch="graph") | quantiles(took)


def options(p):
    p.add_argument("--shapes", nargs="+", default=[], help="these alone")
    p.add_argument("--recipes", nargs="+", default=[], help="presets, besides bits")
    p.add_argument("--seconds", type=float, default=0.1, help="measuring time of one row")
    p.add_argument("--after", help="rows of this earlier file are kept")
    p.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")


def shape_of(row):
    return Shape(*(row[x] for x in Shape._fields))


def rows(cases, a, known):
    "What is measured, case by case; `known`: rows of an earlier file."
    whole, have = not a.shapes, {shape_of(r) for r in known}
    yield from measure_appends(a.recipes)
    for i, case in enumerate(cases):
        if case not in have:
            bits = ALL_BITS if i == 0 and whole else BITS
            yield from measure(case, bits, a.seconds, a.recipes)


def plan(a):
    shapes = [Shape(*map(int, x.split("x"))) for x in a.shapes]
    cases = shapes or CASES["decode_kernel"]
    known = earlier(a)
    have = {shape_of(r) for r in known}
    new = [c for c in cases if c not in have or c == cases[0]]
    if a.workers:
        compile_all(new, a.workers, known, a.recipes)
    data = {"id": "normal states", "n": len(cases)}
    return Plan("decode", gate(new, a.recipes), rows(cases, a, known), data, before=known)
