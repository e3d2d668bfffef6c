"""How many vectors per second PyTorch codes on this machine: run.py encode [--vectors N]
[--repeat R] --out FILE.

Gate: block by block coding gives the codes of coding everything at once, and 20 million
coordinates cost no more operator calls per block than one. Then, for each head size and bit
count, the median of R runs of `encode` (center none, Hadamard, least-squares scale) on normal
fp32 vectors, and the floor: one copy of the input."""

import torch
from bench.cases import CASES
from plan import Plan
from bench.timing import clock_times, quantiles

from turboquant_nb.quant.quantizer import Quantizer, Spec, encode


def gate():
    "Codes and scales do not depend on the block size."
    x = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(1))
    q = Quantizer(Spec(bits=3), 128)
    whole, parts = encode(q, x, block=len(x)), encode(q, x)
    same = torch.equal(whole.codes, parts.codes) and torch.equal(whole.scale, parts.scale)
    return {"cmd": "codes of 20,000 vectors in one block equal those in blocks", "passed": same}


def options(p):
    p.add_argument("--vectors", type=int, default=1_000_000)
    p.add_argument("--repeat", type=int, default=7)


def rows(vectors, repeat):
    "Millions of vectors per second, of each head size and bits."
    for d in CASES["encode"]:
        x = torch.randn(vectors, d, generator=torch.Generator().manual_seed(0))
        copy = quantiles(clock_times(x.clone, repeat))["p50"]
        for bits in (2, 3, 4):
            q = Quantizer(Spec(bits=bits), d)
            t = quantiles(clock_times(lambda q=q, x=x: encode(q, x), repeat))
            rate = {
                name: vectors / t[other] / 1e6
                for name, other in (("p20", "p80"), ("p50", "p50"), ("p80", "p20"))
            }
            yield (
                dict(
                    d=d,
                    bits=bits,
                    n=repeat,
                    unit="million vectors per second",
                    copy=vectors / copy / 1e6,
                )
                | rate
            )


def plan(a):
    return Plan(
        "encode",
        gate(),
        rows(a.vectors, a.repeat),
        {"id": "normal vectors", "n": a.vectors},
        seeds=[0, 1],
    )
