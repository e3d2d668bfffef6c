#!/usr/bin/env python3
"""The benches: run.py BENCH --out FILE [options of the bench]; run.py BENCH --help says what it
measures, run.py --list which there are.

A bench is a module beside this file. `options(p)` adds what it asks for; `plan(a)` runs its
correctness gate and says what comes; its rows are measured one after the other and saved as
they come. No row is measured after a red gate. Shapes are in cases.py, everything that takes
time in timing.py."""

import argparse
import importlib
import sys

import torch

from turboquant_nb import results

BENCHES = {  # module: (whether it needs an NVIDIA GPU, what it measures)
    "encode": (False, "vectors coded per second by PyTorch"),
    "vectors": (False, "nearest neighbours from codes of equal size"),
    "encode_kernel": (True, "the fused kernel that codes keys and values"),
    "decode_kernel": (True, "attention on codes against the best attention on bf16 and fp8"),
    "decode_recipes": (
        True,
        "attention by recipe, where the tensor-core kernel serves and where the portable one "
        "does",
    ),
    "maps": (True, "what a matrix for every head costs both kernels"),
    "generate": (True, "decode steps of a whole model, launched and replayed; memory"),
    "generate_cpu": (
        False,
        "tokens per second of generate() on a CPU, on codes and uncompressed",
    ),
    "decode_cpu": (False, "a decode step of one layer on a CPU, by recipe"),
    "serving": (True, "a vLLM engine with codes in its blocks against bf16 and fp8"),
    "serving_kernels": (True, "kernels on an engine's blocks, by block size"),
    "proteins": (True, "memory and time of ESM-2 650M"),
    "proteins_masked": (
        False,
        "all masked marginals of a protein: passes, frozen, one graph (GPU; --small without)",
    ),
    "proteins_cpu": (False, "a decode step of ESM-2 on a CPU, exact and on codes"),
}


def rounded(x):
    "A row for the eye."
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in x.items()}


def measure(a, plan):
    "Take the rows and save them as they come."
    print(plan.gate, flush=True)
    if not plan.gate["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")
    rows = [*plan.before]
    for row in plan.rows:
        rows.append(row)
        print(rounded(row), flush=True)
        results.write(
            a, plan.experiment, rows, plan.gate, plan.model, plan.data, plan.seeds, **plan.more
        )


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        wanted = "\n".join(
            f"  {name:14} {what}{' (GPU)' if gpu else ''}"
            for name, (gpu, what) in BENCHES.items()
        )
        print(f"{__doc__}\n\n{wanted}")
        return 0 if sys.argv[1:] in (["--list"], ["--help"], ["-h"]) else 2
    name = sys.argv[1]
    bench = importlib.import_module(name)
    p = argparse.ArgumentParser(
        prog=f"run.py {name}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--out", required=True, help="a JSON file")
    bench.options(p)
    a = results.parse(p, sys.argv[2:])
    if BENCHES[name][0] and not torch.cuda.is_available():
        raise SystemExit(f"{name} needs an NVIDIA GPU")
    measure(a, bench.plan(a))
    return 0


if __name__ == "__main__":
    sys.exit(main())
