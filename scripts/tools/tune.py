#!/usr/bin/env python3
"""Find how the decode kernel is best compiled and split on this GPU: tune.py --out FILE
[--write] [--workers N].

For each form of the kernel (head size, 4 or 8 query rows, bits; no pre-RoPE mean, its sums
read, "biased", or computed, "fused") every candidate, programs for each multiprocessor and
limit of registers, is timed on the same stores as a replayed CUDA graph: one long batch and one
long sequence. The candidate with the smallest geometric mean wins if it beats the safe default
(8 programs, no limit) by 1 %. A form whose output differs from the default's by more than
rounding stops the run. --write puts the winners of this compute capability into the package's
configs/decode.json; without it only FILE is written."""

import argparse
import itertools
import json
import math
import multiprocessing
import sys
from functools import partial
from pathlib import Path

import torch

from turboquant_nb import results
from turboquant_nb.kernels import decode_mma, encode as launcher, launch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from cases import Shape, filled, states
from timing import kernel_times, replayed

FORMS = [
    (d, rows, bits, mean)
    for d in (64, 128, 256)
    for rows in (4, 8)
    for bits in (2, 3, 4)
    for mean in ("", "biased", "fused")
    if d < 256 or mean != "fused" or rows == 4
]
PROGRAMS, LIMITS = (4, 6, 7, 8, 10, 12), (None, 200, 168, 128)
CASES = [(8, 8, 32768), (1, 8, 65536)]  # batch, KV heads, tokens; tokens are halved at d = 256
CONFIGS = Path(__file__).resolve().parents[2] / "turboquant_nb" / "configs" / "decode.json"


def name_of(form) -> str:
    d, rows, bits, mean = form
    return f"d{d} rows{rows} bits{bits} {mean}".strip()


def use(programs, limit, mean):
    "From now on calls are compiled and split like this."
    decode_mma.sums_inside = lambda *_: mean == "fused"
    launcher.READY.clear()
    decode_mma.packaged_config = lambda *_: (programs, {"maxnreg": limit} if limit else {})


def setting(form, case):
    "Queries and a store of one form."
    (d, rows, bits, mean), (batch, heads, tokens) = form, case
    q, k, v = states(Shape(batch, heads, rows, d, tokens))
    return q, filled(k, v, bits, bits, "pre_rope" if mean else "fixed")


def compile_one(task):
    "Compile a candidate; the result lies in Triton's cache for the timing process."
    form, limit = task
    use(8, limit, form[3])
    launch.decode_attention(*setting(form, (1, 8, 600)))
    torch.cuda.synchronize()


def tune(form, seconds):
    "Rows of every candidate of a form, and the winner (None: the default)."
    rows, want, total = [], {}, {}
    for case in CASES:
        case = (*case[:2], case[2] // 2) if form[0] == 256 else case
        query_and_store = setting(form, case)
        for programs, limit in sorted(
            itertools.product(PROGRAMS, LIMITS), key=lambda c: c != (8, None)
        ):
            use(programs, limit, form[3])
            query_and_store[1].changed()  # what it remembers was compiled for another
            out = launch.decode_attention(*query_and_store)[0]
            first = want.setdefault(case, out)
            assert (out.float() - first.float()).norm() <= 1e-2 * first.float().norm(), (
                form,
                programs,
                limit,
            )
            t = kernel_times(
                replayed(partial(launch.decode_attention, *query_and_store)), seconds
            )
            rows.append(
                dict(
                    form=name_of(form),
                    batch=case[0],
                    heads=case[1],
                    tokens=case[2],
                    programs=programs,
                    maxnreg=limit or 0,
                    unit="microseconds",
                    n=1,
                )
                | t
            )
            total[programs, limit] = total.get((programs, limit), 0) + math.log(t["p50"])
        del query_and_store
    best = min(total, key=total.get)
    gain = math.exp((total[8, None] - total[best]) / len(CASES))
    print(
        f"{name_of(form):28} {best[0]:3} programs, {best[1] or 'no limit':>8} of registers: "
        f"{gain:.3f} times the default",
        flush=True,
    )
    return rows, dict(programs=best[0], maxnreg=best[1]) if gain > 1.01 else None


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--seconds", type=float, default=0.02, help="measuring time of one candidate"
    )
    p.add_argument("--workers", type=int, default=8, help="processes that compile beforehand")
    p.add_argument("--only", default="", help="forms whose name contains this")
    p.add_argument("--write", action="store_true", help="write the winners into the package")
    p.add_argument("--out", required=True)
    a = results.parse(p)
    if not torch.cuda.is_available():
        raise SystemExit("tune.py needs an NVIDIA GPU")
    forms = [form for form in FORMS if a.only in name_of(form)]
    with multiprocessing.get_context("spawn").Pool(a.workers) as pool:
        pool.map(compile_one, itertools.product(forms, LIMITS), chunksize=1)
    rows, found = [], {}
    for form in forms:
        new, winner = tune(form, a.seconds)
        rows += new
        if winner:
            found[name_of(form)] = {k: v for k, v in winner.items() if v}
    gate = {
        "cmd": "every candidate's output within 1e-2 of the default's, bf16",
        "passed": True,
    }
    results.write(
        a,
        "tune decode",
        rows,
        gate,
        {"id": "none"},
        {"id": "normal states", "n": len(CASES)},
        [0],
    )
    if a.write:
        known = json.loads(CONFIGS.read_text()) if CONFIGS.exists() else {}
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        measured = {name_of(form) for form in forms}
        kept = {k: x for k, x in known.get(capability, {}).items() if k not in measured}
        known[capability] = (kept if a.only else {}) | found
        CONFIGS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
