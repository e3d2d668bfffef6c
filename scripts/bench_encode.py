#!/usr/bin/env python3
"""How many vectors per second are coded on this machine: bench_encode.py [--vectors N] [--repeat R] --out FILE.

Gate: block by block coding gives the codes of coding everything at once, and 20 million coordinates cost no more operator calls per
block than one. Then, for each head size and bit count, the median of R runs of `encode` (center none, Hadamard, least-squares scale)
on normal fp32 vectors, and the floor: one copy of the input."""
import argparse
import statistics
import time

import torch

from turboquant_nb import results
from turboquant_nb.quantizer import Quantizer, Spec, encode


def gate():
    "Codes and scales do not depend on the block size."
    x = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(1))
    q = Quantizer(Spec(bits=3), 128)
    whole, parts = encode(q, x, block=len(x)), encode(q, x)
    same = torch.equal(whole.codes, parts.codes) and torch.equal(whole.scale, parts.scale)
    return {"cmd": "codes of 20,000 vectors in one block equal those in blocks", "passed": same}


def seconds(f, repeat):
    "Run times, the first (warm-up) left out."
    times = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--vectors", type=int, default=1_000_000)
    p.add_argument("--repeat", type=int, default=7)
    p.add_argument("--out", required=True)
    a = results.parse(p)
    verdict = gate()
    if not verdict["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")
    rows = []
    for d in (64, 128):
        x = torch.randn(a.vectors, d, generator=torch.Generator().manual_seed(0))
        copy = statistics.median(seconds(x.clone, a.repeat))
        for bits in (2, 3, 4):
            q = Quantizer(Spec(bits=bits), d)
            t = seconds(lambda q=q, x=x: encode(q, x), a.repeat)
            rate = [a.vectors / s / 1e6 for s in (t[int(0.8 * len(t))], statistics.median(t), t[int(0.2 * len(t))])]
            rows.append(dict(d=d, bits=bits, p20=rate[0], p50=rate[1], p80=rate[2], n=a.repeat, unit="million vectors per second", copy=a.vectors / copy / 1e6))
            print(rows[-1], flush=True)
    results.write(a, "encode", rows, verdict, {"id": "none"}, {"id": "normal vectors", "n": a.vectors}, [0, 1])


if __name__ == "__main__":
    main()
