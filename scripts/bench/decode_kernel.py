"""Decode attention on codes against the best attention on bf16 and fp8, one NVIDIA GPU: run.py decode_kernel [--quick] [--seconds S] --out FILE.

Gate: for every head size, group and bit count the kernel's output agrees with fp32 attention on the same codes (`attention.attend`) to 1e-3
of its norm, on smaller batches; outliers of 1,000 in the query and in one value included. No row is written on a red gate.

Then, in one run, medians of triton's do_bench with 20th and 80th percentiles (the L2 cache is emptied before each call), launched from
Python ("eager") and replayed from a CUDA graph ("graph"). Ours is the whole of attention as a cache calls it: rotation of the query, mean of the keys (or a
mean before RoPE with RoPE), 4 exact sinks, 16 exact recent tokens, codes, un-rotation, output in bf16. Baselines: torch's scaled_dot_product_attention (flash,
enable_gqa) and a split-KV Triton kernel on bf16 and on fp8 (e4m3, one scale for the tensor, which is what fp8 caches store), each the
fastest of several splits. `speedup` is the fastest bf16 of the same row kind over ours."""
import itertools
import math
import multiprocessing

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from cases import CASES, Shape, filled, states
from plan import Plan
from timing import kernel_times, replayed

from turboquant_nb.cache.attention import attend
from turboquant_nb.kernels.launch import decode_attention, supports

BITS = [(4, 4), (3, 3), (2, 2)]
ALL_BITS = [(k, v) for k in (4, 3, 2) for v in (4, 3, 2)]


@triton.jit
def _dense_kernel(Q, K, V, O, L, T, scale, SPLITS, G: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, M: tl.constexpr):
    "One split of the tokens for all query heads of one KV head, on dense keys and values of any float type."
    pid = tl.program_id(0)
    bh = pid // SPLITS
    s = pid % SPLITS
    m_at = tl.arange(0, M)
    d = tl.arange(0, D)
    t = tl.arange(0, BN)
    q = tl.load(Q + (bh * G + m_at)[:, None] * D + d[None, :], mask=m_at[:, None] < G, other=0.0)
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
def _dense_combine(O, L, OUT, SPLITS, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, S2: tl.constexpr):
    bh = tl.program_id(0)
    g = tl.program_id(1)
    s = tl.arange(0, S2)
    d = tl.arange(0, D)
    lse = tl.load(L + (bh * SPLITS + s) * M + g, mask=s < SPLITS, other=-1e30)
    w = tl.exp2(lse - tl.max(lse, 0))
    o = tl.load(O + ((bh * SPLITS + s) * M + g)[:, None] * D + d[None, :], mask=s[:, None] < SPLITS, other=0.0)
    tl.store(OUT + (bh * G + g) * D + d, tl.sum(o * (w / tl.sum(w, 0))[:, None], 0).to(OUT.dtype.element_ty))


def dense(q, k, v, splits, block, warps, stages):
    "A callable that runs the dense split-KV kernel once."
    b, hq, _, d = q.shape
    h, tokens = k.shape[1], k.shape[2]
    group, rows = hq // h, 16
    o, lse = torch.empty(b * h, splits, rows, d, device=q.device), torch.empty(b * h, splits, rows, device=q.device)
    out = torch.empty_like(q)
    def run():
        _dense_kernel[(b * h * splits,)](q, k, v, o, lse, tokens, math.log2(math.e) / math.sqrt(d), splits, group, d, block, rows, num_warps=warps, num_stages=stages)
        _dense_combine[(b * h, group)](o, lse, out, splits, group, d, rows, triton.next_power_of_2(splits), num_warps=4)
        return out
    return run


def gate(cases):
    "The largest relative error over head sizes, groups and bits, in fp32 on batches of at most 2 and 8,192 tokens, and after outliers."
    worst, kinds = 0.0, {}
    for case in cases:
        kinds.setdefault((case.d, case.group > 4), case)  # what the kernel is compiled for
    for case in kinds.values():
        small = case._replace(batch=min(case.batch, 2), heads=2, tokens=min(case.tokens, 8192))
        for k_bits, v_bits in BITS:
            for outlier, center in ((False, "prompt_mean"), (True, "prompt_mean"), (False, "pre_rope")):
                q, k, v = states(small, torch.float32, outlier)
                store = filled(k, v, k_bits, v_bits, center)
                want, _ = attend(q, store)
                got, _ = decode_attention(q, store)
                worst = max(worst, float((got - want).norm() / want.norm()))
    return {"cmd": "decode kernel against attention.attend on the same codes in fp32: every head size and group, 4, 3 and 2 bits, outliers x1000 in the query and in one value, a pre-RoPE mean", "passed": worst <= 1e-3, "worst": worst}


def compile_one(task):
    "Compile what one row needs; the result lies in Triton's cache for the other processes."
    case, bits, dtype = task
    q, k, v = states(case._replace(batch=1, tokens=600), dtype)
    for center in ("prompt_mean", "pre_rope"):
        decode_attention(q, filled(k, v, *bits, center))
    torch.cuda.synchronize()


def compile_all(cases, workers):
    "Compile in several processes before anything is timed."
    kinds = {}
    for i, c in enumerate(cases):
        for bits in ALL_BITS if i == 0 else BITS:
            for dtype in (torch.bfloat16, torch.float32)[: 1 + (bits in BITS)]:
                kinds.setdefault((c.d, c.group > 4, bits, dtype), (c, bits, dtype))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, kinds.values(), chunksize=1)


def measure(case: Shape, bits, seconds):
    "Rows of one case: baselines, then ours at every bit pair."
    batch, heads, group, d, tokens = case
    q, k, v = states(case)
    rows = []
    add = lambda **row: rows.append(case._asdict() | dict(unit="microseconds", n=1) | row)
    sdpa = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)
    for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
        add(method="sdpa bf16", launch=launch, bits=16, **kernel_times(wrap(sdpa), seconds))
    dense_kernels = (("triton bf16", k, v, 16), ("triton fp8", k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), 8))
    for name, kk, vv, stored in dense_kernels if d == triton.next_power_of_2(d) else ():  # Triton's ranges are powers of two
        best = None
        for splits in sorted({max(1, 256 // (batch * heads)), max(1, 528 // (batch * heads)), max(1, 1056 // (batch * heads))}):
            for block, warps, stages in ((64, 4, 3), (128, 4, 3)):
                try:
                    f = dense(q, kk, vv, splits, block, warps, stages)
                    t = kernel_times(replayed(f), seconds / 4)["p50"]
                except triton.runtime.errors.OutOfResources:
                    continue
                if best is None or t < best[0]:
                    best = t, f, (splits, block, warps, stages)
        for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
            add(method=name, launch=launch, bits=stored, config=str(best[2]), **kernel_times(wrap(best[1]), seconds))
        del kk, vv
    for (k_bits, v_bits), center in itertools.product(bits, ("prompt_mean", "pre_rope")):
        if center == "pre_rope" and k_bits != v_bits:
            continue
        store = filled(k, v, k_bits, v_bits, center)
        served, why = supports(q, store)
        if not served:
            raise SystemExit(f"{case}: {why}")
        for launch, wrap in (("eager", lambda f: f), ("graph", replayed)):
            f = wrap(lambda store=store: decode_attention(q, store))
            row = kernel_times(f, seconds)
            best = min(r["p50"] for r in rows if r["launch"] == launch and r["bits"] == 16)
            add(method="codes" if center == "prompt_mean" else "codes, turning centre", launch=launch, k_bits=k_bits, v_bits=v_bits, bits=(k_bits + v_bits) / 2 + 16 / d, held=store.bits_per_value(), speedup=best / row["p50"], **row)
    return rows


def options(p):
    p.add_argument("--quick", action="store_true", help="four cases only")
    p.add_argument("--seconds", type=float, default=0.1, help="measuring time of one row")
    p.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")


def rows(cases, whole, seconds):
    for i, case in enumerate(cases):
        yield from measure(case, ALL_BITS if i == 0 and whole else BITS, seconds)


def plan(a):
    cases = CASES["decode_kernel, quick" if a.quick else "decode_kernel"]
    if a.workers:
        compile_all(cases, a.workers)
    return Plan("decode", gate(cases), rows(cases, not a.quick, a.seconds), {"id": "normal states", "n": len(cases)})
