#!/usr/bin/env python3
"""How fast the fused kernel codes keys and values: bench_encode_kernel.py --out FILE [--tune].

Gate: on this device the kernel writes the codes of the PyTorch path, except within rounding of an edge, for the bits, dtypes, head
sizes, rotations, centres and positions below. Then medians (20 and 80 % quantiles too) on bf16 states:
- bulk: 8 sequences x 8 heads x 32,768 tokens (16,384 at d = 256) by do_bench; a vector is one key or one value of one head;
- append: new tokens of all heads with their exact copies, a layer's share of a decoding step: as a CUDA graph of 20 calls, the L2
  warm, and the host's time of an eager call;
- torch: the PyTorch path on the same states, and a copy of the input as the floor.
--tune also prints launch options beside the packaged ones."""
import argparse
import multiprocessing
import time

import torch
import triton
from triton.testing import do_bench

from turboquant_nb import results
from turboquant_nb.kernels import encode as kernel
from turboquant_nb.quantizer import Recipe, Spec
from turboquant_nb.store import KVStore

NEAR = 2e-5  # of a coordinate over its unit: both paths round, the GPU's fp32 products too


def states(b, h, n, d, dtype, seed, shift=0.0):
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(b, n, h, d, generator=gen, device="cuda") + shift * torch.randn(b, 1, h, d, generator=gen, device="cuda")
    return x.to(dtype).transpose(1, 2)  # as a model gives them: a transposed view


def frequencies(d):
    return 10_000.0 ** (-torch.arange(d // 2) / (d // 2))


def compare(recipe, lengths, d, dtype):
    "(entries that differ, entries that differ away from an edge, largest relative difference of scales)."
    fused, plain = (KVStore(recipe, 2, 3, d, dtype=dtype, device="cuda", inv_freq=frequencies(d)) for _ in range(2))
    given = []
    for i, n in enumerate(lengths):
        k, v = states(2, 3, n, d, dtype, 2 * i, 0.5), states(2, 3, n, d, dtype, 2 * i + 1)
        kernel.append(fused, k, v)
        plain.append(k, v)
        given.append((k, v))
    ties = wrong = 0
    worst = 0.0
    for i, name in enumerate(("key", "value")):
        side = getattr(plain, name)
        a, b = fused.coded(name, 0, fused.length), plain.coded(name, 0, plain.length)
        x = torch.cat([g[i] for g in given], 2).double() 
        center = plain.center(name, 0, plain.length)
        x = x if center is None else x - center.double()
        y = x @ side.q.rotation.matrix.double().T
        u = y / y.square().mean(-1, keepdim=True).sqrt()
        near = ((u.unsqueeze(-1) - side.q.codebook.edges.double()).abs() < NEAR).any(-1)
        differ = a.codes != b.codes
        ties, wrong = ties + int(differ.sum()), wrong + int((differ & ~near).sum())
        gap = (a.scale.double() / b.scale.double() - 1).abs()[~differ.any(-1)]
        worst = max(worst, float(gap.max()))
    return ties, wrong, worst


def gate_cases():
    "(bits of k and v, d, dtype, rotation, centre, lengths of the appends)."
    half, types = torch.bfloat16, (torch.float16, torch.float32)
    plan = [(bits, 128, half, "hadamard", "prompt", (700, 1, 5, 300)) for bits in ((1, 2), (2, 3), (3, 4), (4, 1), (3, 3), (2, 2), (4, 4), (1, 1))]
    plan += [((3, 4), d, half, "hadamard", "prompt", (300, 1, 70)) for d in (64, 80, 96, 112, 256)]
    plan += [((3, 4), d, dtype, "hadamard", "prompt", (300, 1, 70)) for d in (64, 128, 256) for dtype in types]
    plan += [((3, 3), 128, half, "hadamard", "none", (300, 1))]
    plan += [((3, 3), d, dtype, "hadamard", "rope", (300, 1, 70)) for d in (64, 128, 256) for dtype in (half, torch.float32)]
    return plan + [((4, 2), d, half, "haar", "prompt", (300, 1, 70)) for d in (64, 128, 256)] + [((4, 2), 128, t, "haar", "prompt", (300, 1)) for t in types]


def gate_case(case):
    "The case and what `compare` says of it."
    (bk, bv), d, dtype, rotation, center, lengths = case
    recipe = Recipe(Spec(bits=bk, rotation=rotation, center=center), Spec(bits=bv, rotation=rotation))
    try:
        return case, compare(recipe, lengths, d, dtype)
    except Exception as error:  # counts as wrong, and the other cases are still compared
        print("gate:", case, str(error)[:300], flush=True)
        return case, (0, 1, 0.0)


def job(task):
    "One piece of work for a process of the pool: it fills Triton's cache, and the gate's cases also answer."
    f, args, options = task
    return f(*args, **options)


def gate(workers, more=()):
    "The kernel and the PyTorch path on this device; the cases, and `more` to compile, run in several processes."
    ties = wrong = codes = 0
    worst, limit, cases = 0.0, 1.01 * 2**-10, gate_cases()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for answer in pool.imap_unordered(job, [*((gate_case, (c,), {}) for c in cases), *more]):
            if not isinstance(answer, tuple):
                continue
            case, (a, b, c) = answer
            ties, wrong, worst, codes = ties + a, wrong + b, max(worst, c), codes + 2 * 6 * case[1] * sum(case[-1])
            if b or not c <= limit:
                print("gate:", case, a, b, c, flush=True)
    said = f"{len(cases)} cases: {ties} of {codes} codes differ from the PyTorch path's, {wrong} of them further than {NEAR} from an edge; scales within {worst:.1e}"
    print(said, flush=True)
    return {"cmd": said, "passed": wrong == 0 and worst <= limit}


def targets(b, h, n, d, bk, bv, center="prompt", dtype=torch.bfloat16):
    recipe = Recipe(Spec(bits=bk, center=center), Spec(bits=bv), 0, 0)
    store = KVStore(recipe, b, h, d, dtype=dtype, device="cuda", max_length=n, inv_freq=frequencies(d))
    store._make_room(n)
    mean = None if center == "none" else torch.randn(b, h, 1, d, device="cuda").bfloat16()
    return store, kernel.target(store.key, mean, store), kernel.target(store.value)


def timed(f):
    "p20, p50, p80 in µs."
    return [t * 1e3 for t in do_bench(f, warmup=10, rep=60, quantiles=[0.2, 0.5, 0.8])]


def quantiles(times):
    return torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()


def small(d, bk, bv, center="prompt", dtype=torch.bfloat16, config=None):
    "Compile what a bulk case needs."
    packaged = kernel._config
    if config:
        kernel._config = lambda *_: config
    store, key, value = targets(1, 2, 1024, d, bk, bv, center, dtype)
    k, v = states(1, 2, 512, d, dtype, 0), states(1, 2, 512, d, dtype, 1)
    try:
        kernel.encode_append(k, v, key, value, 0).tolist()
    except Exception as error:
        print(d, config, str(error)[:200], flush=True)
    finally:
        kernel._config = packaged


def short(b, h, d, n, center):
    "Compile what an append needs."
    append_store(b, h, d, n, True, center), append_store(b, h, d, n, False, center)


def bulk_case(d, bk, bv, b=8, h=8, n=32768, center="prompt", dtype=torch.bfloat16, torch_path=False):
    store, key, value = targets(b, h, n, d, bk, bv, center, dtype)
    k, v = states(b, h, n, d, dtype, 0), states(b, h, n, d, dtype, 1)
    flags = torch.zeros(4, dtype=torch.int32, device="cuda")
    p20, p50, p80 = timed(lambda: kernel.encode_append(k, v, key, value, 0, flags))
    vectors = 2 * b * h * n
    nbytes = vectors * d * (dtype.itemsize + (bk + bv) / 16) + 2 * vectors
    row = dict(case="bulk", d=d, k=bk, v=bv, center=center, dtype=str(dtype)[6:], batch=b, heads=h, tokens=n, p20=p20, p50=p50, p80=p80, unit="us", n=1)
    row |= dict(giga_vectors=vectors / p50 / 1e3, terabytes=nbytes / p50 / 1e6)
    if torch_path:
        out = torch.empty_like(k)
        row["copy_us"] = timed(lambda: out.copy_(k))[1] + timed(lambda: out.copy_(v))[1]
        del out
        f = lambda: (store.key.write(store.key.q.encode(k, key.mean), 0), store.value.write(store.value.q.encode(v), 0))  # noqa: E731
        f()
        torch.cuda.synchronize()
        began = time.perf_counter()
        f()
        torch.cuda.synchronize()
        row["torch_us"] = (time.perf_counter() - began) * 1e6
    return row


def append_store(b, h, d, n, static, center="prompt", rotation="hadamard"):
    "A store in use, and n more tokens, appended once."
    recipe = Recipe(Spec(bits=3, center=center, rotation=rotation), Spec(bits=3))
    store = KVStore(recipe, b, h, d, dtype=torch.bfloat16, device="cuda", max_length=2048, static=static, inv_freq=frequencies(d))
    kernel.append(store, states(b, h, 70, d, torch.bfloat16, 0, 0.5), states(b, h, 70, d, torch.bfloat16, 1))
    k, v = states(b, h, n, d, torch.bfloat16, 2, 0.5), states(b, h, n, d, torch.bfloat16, 3)
    kernel.append(store, k, v)
    return store, k, v


def graph_times(b, h, d, n, center, rotation="hadamard", calls=20):
    "µs of an append in a CUDA graph."
    store, k, v = append_store(b, h, d, n, True, center, rotation)
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in "ab")
    with torch.cuda.graph(graph):
        for _ in range(calls):
            kernel.append(store, k, v)
    out = []
    for _ in range(40):
        store.position.fill_(70)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        out.append(start.elapsed_time(end) * 1e3 / calls)
    store.sync()
    if store.length != 70 + calls * n:
        raise SystemExit(f"{store.length} tokens after the replay, expected {70 + calls * n}")
    return out[10:]


def host_times(b, h, d, n, center, calls=50):
    "µs that Python takes to launch an append."
    out, (store, k, v) = [], append_store(b, h, d, n, False, center)
    for _ in range(20):
        store.length = 70  # what comes after is written again
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            kernel.append(store, k, v)
        out.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return out[5:]


def append_case(b, h, d, n, center):
    p20, p50, p80 = quantiles(graph_times(b, h, d, n, center))
    host = quantiles(host_times(b, h, d, n, center))[1]
    return dict(case="append", center=center, d=d, k=3, v=3, batch=b, heads=h, tokens=n, p20=p20, p50=p50, p80=p80, unit="us", n=30, host_us=host)


def tune_cases():
    "(d, (byte rows, launch options)) beside the packaged ones, k3v3."
    regs = lambda r: {"maxnreg": r} if r else {}  # noqa: E731
    plan = {128: ((64, 4, 1, 168), (64, 4, 2, 0), (64, 4, 3, 168), (64, 4, 3, 0), (64, 8, 2, 128), (64, 8, 2, 96), (64, 8, 3, 128), (32, 4, 2, 128))}
    plan |= {64: ((64, 4, 2, 0), (64, 4, 2, 128), (64, 4, 3, 128)), 256: ((64, 8, 2, 0), (64, 8, 2, 168))}
    return [(d, (m, dict(num_warps=w, num_stages=s) | regs(r))) for d, cases in plan.items() for m, w, s, r in cases]


def tune():
    "Time the options."
    packaged = kernel._config
    for d, config in tune_cases():
        kernel._config = lambda *_, c=config: c
        try:
            row = bulk_case(d, 3, 3, b=4, n=32768 if d < 256 else 16384)
            print(d, config, {k: round(v, 2) for k, v in row.items() if k in ("p50", "giga_vectors", "terabytes")}, flush=True)
        except Exception as error:
            print(d, config, str(error)[:80], flush=True)
        finally:
            kernel._config = packaged


BITS = ((3, 3), (2, 2), (4, 4), (4, 2), (1, 1))
INPUTS = (dict(center="none"), dict(center="rope"), dict(dtype=torch.float16), dict(dtype=torch.float32, n=16384), dict(b=1, n=4096))
SIZES = ((64, 32768), (96, 32768), (256, 16384))
APPENDS = [(b, h, d, n, "prompt") for b, h, d, n in ((1, 8, 128, 1), (8, 8, 128, 1), (64, 8, 128, 1), (8, 8, 64, 1), (8, 8, 256, 1), (8, 8, 128, 5))] + [(8, 8, 128, 1, "rope")]


def to_compile(tuning):
    "Everything that will be timed."
    jobs = [dict(d=128, bk=bk, bv=bv) for bk, bv in BITS] + [dict(d=d, bk=3, bv=3) for d, _ in SIZES]
    jobs += [dict(d=128, bk=3, bv=3, **{k: v for k, v in x.items() if k in ("center", "dtype")}) for x in INPUTS]
    jobs += [dict(d=d, bk=3, bv=3, config=c) for d, c in tune_cases()] if tuning else []
    return [(small, (), x) for x in jobs] + [(short, x, {}) for x in APPENDS]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out")
    p.add_argument("--tune", action="store_true")
    p.add_argument("--workers", type=int, default=12, help="processes that compile")
    a = results.parse(p)
    verdict = gate(a.workers, to_compile(a.tune))
    if not verdict["passed"]:
        raise SystemExit("the gate did not pass; nothing is timed")
    rows = []

    def add(row):
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    for case in APPENDS:
        add(append_case(*case))
    for bk, bv in BITS:
        add(bulk_case(128, bk, bv, torch_path=(bk, bv) == (3, 3)))
    for case in INPUTS:
        add(bulk_case(128, 3, 3, **case))
    for d, n in SIZES:
        add(bulk_case(d, 3, 3, n=n))
    if a.out:
        rows = [{k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in rows]
        results.write(a, "encode_kernel", rows, verdict, {"id": "none"}, {"id": "normal states", "n": 8 * 8 * 32768}, [0, 1])
    if a.tune:
        tune()


if __name__ == "__main__":
    print("triton", triton.__version__, torch.cuda.get_device_name())
    main()
