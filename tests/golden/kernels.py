#!/usr/bin/env python3
"""Registers, stack, spills and shared memory of kernels compiled ahead of time for sm_90:
python -m tests.golden.kernels [NAME ...] prints today's numbers as JSON lines, of all cases of
kernels.json or of those named; with --write it puts them there. A process of its own, without
TRITON_INTERPRET, because the interpreter and the compiler exclude each other."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch

FILE = Path(__file__).parent / "kernels.json"
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


def compiled(name):
    "The kernel of a case: a part of the package and how its kernel is asked for."
    part, _, text = name.partition(" ")
    how = json.loads(text)
    if "dtype" in how:
        how["dtype"] = getattr(torch, how["dtype"])
    module = importlib.import_module(f"aot_{part}")
    if part == "cells":
        from turboquant_nb.cache.pages import CellLayout

        d = how.pop("d", 128)
        layout = CellLayout(*how.pop("bits", (3, 3)), d, d, how.pop("tokens", 64))
        return getattr(module, how.pop("kernel"))(layout, **how)
    return getattr(module, how.pop("kernel", "build"))(**how)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*")
    p.add_argument("--write", action="store_true")
    a = p.parse_args()
    usage = importlib.import_module("aot_decode").usage
    known = json.loads(FILE.read_text())
    for name in a.names or known:
        known[name] = usage(compiled(name), 90)
        print(json.dumps({"case": name} | known[name]), flush=True)
    if a.write:
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(known.items()))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
