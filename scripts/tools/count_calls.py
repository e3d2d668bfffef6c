#!/usr/bin/env python3
"""How far a query walks through the package: functions entered from `attend` to its score on
the reference path, and from an append of keys to their planes; and the host's time for both.

`sys.setprofile` sees every function of the package that is entered. Those that are handed the
query (itself, what is computed from it, or an object that holds either) are its path; where a
function that handed it on before hands it on again, the path came back to a function that it
had left. Comprehensions and lambdas belong to the function that they stand in; validators of
`checks` look and hand nothing on, and are not counted.

    count_calls.py                       print
    count_calls.py --names               and what is entered, in order
    count_calls.py --out results/size/calls.json"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import torch

import turboquant_nb
from turboquant_nb import KVStore, checks, results
from turboquant_nb.cache.attention import dense_attention
from turboquant_nb.kernels import ops
from turboquant_nb.quant.calibration import LayerFrame

PACKAGE = str(Path(turboquant_nb.__file__).parent)
TOKENS, D = 300, 64  # a length that no other size here is equal to


class Followed(torch.Tensor):
    "A tensor whose descendants are known by their type."


def tensors(x, depth=3):
    "The tensors in x."
    if isinstance(x, torch.Tensor):
        yield x
    elif depth and isinstance(x, (tuple, list)):
        for y in x:
            yield from tensors(y, depth - 1)
    elif depth and dataclasses.is_dataclass(x):
        for y in vars(x).values():
            yield from tensors(y, depth - 1)


def outer(frame):
    "The frame of the function that a comprehension or a lambda stands in."
    while frame is not None and frame.f_code.co_name.startswith("<"):
        frame = frame.f_back
    return frame


class Walk:
    "What is entered while a call runs, until `arrived` says that a frame is where it leads."

    def __init__(self, arrived):
        self.arrived, self.done = arrived, False
        self.entered, self.path, self.back = [], [], 0
        self.handed, self.gave = (
            {},
            {},
        )  # frames that were handed it; that handed it on; all kept
        self.made = []  # tensors that functions of the path returned

    def holds(self, x) -> bool:
        "Whether what is followed is x or in it."
        return any(
            isinstance(t, Followed) or any(t is m for m in self.made) for t in tensors(x)
        )

    def __call__(self, frame, event, value):
        code = frame.f_code
        if self.done or not code.co_filename.startswith(PACKAGE) or outer(frame) is not frame:
            return
        if code.co_filename == checks.__file__:
            return
        if event == "return" and id(frame) in self.handed:
            self.made += [t for t in tensors(value) if not isinstance(t, Followed)]
        if event != "call":
            return
        if self.arrived(frame):
            self.done = True
            return
        self.entered.append(code.co_qualname)
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args and **kwargs
        if any(self.holds(frame.f_locals.get(x)) for x in code.co_varnames[:count]):
            self.path.append(code.co_qualname)
            self.handed[id(frame)] = frame
            caller = outer(frame.f_back)
            self.back += id(caller) in self.gave
            self.gave[id(caller)] = caller

    def of(self, call):
        "This, after `call` ran."
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
        assert self.done, "the call never came where it should"
        return self


def is_score(frame) -> bool:
    "Whether a function takes the scores of coded tokens: rows of as many numbers."
    found = [x for x in frame.f_locals.values() if isinstance(x, Followed)]
    return any(x.ndim == 4 and x.shape[-1] in (TOKENS, TOKENS + 1) for x in found)


def is_packing(frame) -> bool:
    "Whether this is where bits are put together."
    return frame.f_code.co_filename.endswith("packing.py")


def example(recipe, n=TOKENS, dtype=torch.float32):
    "A store with past tokens, a query, and the key and value of its token, which is appended."
    generator = torch.Generator().manual_seed(0)
    rand = lambda heads, n: torch.randn(1, heads, n, D, generator=generator, dtype=dtype)
    frame = LayerFrame(fixed=rand(2, 1)[0, :, 0].float())
    store = KVStore(recipe, 1, 2, D, dtype=dtype, frame=frame)
    store.append(rand(2, n), rand(2, n))
    q, k, v = rand(4, 1), rand(2, 1), rand(2, 1)
    store.append(k, v)
    return store, q, k, v


def counted(recipe) -> list:
    "The path of a query and of keys, each the first time and again."
    store, q, k, v = example(recipe)
    q = q.as_subclass(Followed)
    attend = lambda: ops.attend(q, store, k, v, backend="torch")
    out = []
    for what in ("a query, first call", "a query, again"):
        out.append((what, Walk(is_score).of(attend)))
    keys = torch.randn(1, 2, 40, D).as_subclass(Followed)
    append = lambda: ops.append(store, keys, torch.randn(1, 2, 40, D))
    for what in ("keys, first call", "keys, again"):
        out.append((what, Walk(is_packing).of(append)))
    return out


def host_times(recipe, seconds: float) -> list:
    "Microseconds of an append and an attention of one token, on a tiny store."
    store, q, k, v = example(recipe, 8)
    found = {"append": [], "attend": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = time.perf_counter()
        ops.append(store, k, v)
        b = time.perf_counter()
        ops.attend(q, store, k, v)
        c = time.perf_counter()
        found["append"].append(1e6 * (b - a))
        found["attend"].append(1e6 * (c - b))
        if store.length > 60:  # the same sizes for ever
            store.crop(50)
    rows = []
    for what, times in found.items():
        p20, _, _, p80 = statistics.quantiles(times, n=5)
        spread = dict(least=min(times), p20=p20, p50=statistics.median(times), p80=p80)
        rows.append(dict(what=f"host, {what}", n=len(times), unit="us", recipe=recipe) | spread)
    return rows


def gate(recipe) -> dict:
    "The path that is counted gives attention to what the store reads back."
    store, q, k, v = example(recipe)
    dense = [x.clone() for x in store.read()]
    for x, new in zip(dense, (k, v)):
        x[:, :, -1:] = new
    out = ops.attend(q, store, k, v, backend="torch")[0]
    error = float((out - dense_attention(q, *dense)[0]).norm() / out.norm())
    return {"cmd": "attend against attention to `read`", "value": error, "passed": error < 1e-5}


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--recipe", default="k3v3")
    p.add_argument("--names", action="store_true", help="print what is entered")
    p.add_argument("--seconds", type=float, default=4, help="of timing the host")
    p.add_argument("--out", help="results/size/calls.json")
    a = results.parse(p)
    rows = []
    for what, x in counted(a.recipe):
        row = dict(what=what, recipe=a.recipe, unit="functions", passes=len(x.path))
        rows.append(row | dict(comes_back=x.back, entered=len(x.entered)))
        if a.names:
            print(f"{what}:\n  " + "\n  ".join(x.path))
    rows += host_times(a.recipe, a.seconds)
    for r in rows:
        print(
            " ".join(
                f"{name} {x if not isinstance(x, float) else round(x, 1)},"
                for name, x in r.items()
            )
        )
    if a.out:
        model, data = {"id": "none", "revision": "none"}, {"id": "random", "n": TOKENS}
        results.write(a, "calls", rows, gate(a.recipe), model, data, [0])


if __name__ == "__main__":
    main()
