#!/usr/bin/env python3
"""Two checkouts timed in turns on one machine: compare.py --trees OLD NEW --out FILE [--rounds
N] [--only PART].

A redesign must not cost speed. Each tree runs in a process of its own, one after the other and
again, and does what a user does, by public names alone, so that both trees understand it:

- host: the time that Python takes for a layer of an eager step;
- calls: whole calls of `generate()` on a model with 32 layers and random weights;
- layer: attention on codes of one layer in a replayed graph, by recipe.

A figure is printed as soon as it is measured, with its median and its least; a row has both of
each tree and their quotients. Other work on a machine only ever adds time, so the least is what
the code costs, and the median what a user waits. Without a GPU the model is small and the
processor is timed.

Gate: both trees generate the same tokens from codes."""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

GPU_CALLS = [(1, 2048), (1, 8192), (8, 8192), (8, 32768)]
CPU_CALLS = [(1, 512), (1, 2048)]
WARM = 20  # eager steps before they are timed


def llama(device, layers):
    "A model of Llama 3.1 8B's shape on a GPU, a small one elsewhere; random weights."
    import torch
    import transformers

    big = device == "cuda"
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32)
    small = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4)
    config = transformers.LlamaConfig(
        **(sizes if big else small),
        num_hidden_layers=layers,
        num_key_value_heads=8 if big else 2,
        vocab_size=32000 if big else 1000,
        max_position_embeddings=65536,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if big else torch.float32)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


class Figure(NamedTuple):
    "What was measured: of many runs the median and the least."

    what: str
    median: float
    least: float
    n: int
    tokens: list | None = None  # that both trees must agree on

    @classmethod
    def of(cls, what, times, tokens=None):
        return cls(what, median(times), min(times), len(times), tokens)


class Stamps:
    "A streamer, as `generate()` takes it, that notes when the prompt and each token came."

    def __init__(self):
        self.at = []

    def put(self, _):  # the tokens are on the CPU by now: the GPU has finished
        self.at.append(time.perf_counter())

    def end(self):
        pass


def whole_calls(model, device, quick):
    """Milliseconds of `generate()` with a new cache, in every call: the first token, the mean
    of the others (graphs are recorded among them), and one step once they replay."""
    import torch
    from turboquant_nb import TurboQuantCache

    model.set_attn_implementation("turboquant")
    new = 65 if device == "cuda" else 17
    calls = GPU_CALLS if device == "cuda" else CPU_CALLS
    for batch, length in calls[:2] if quick else calls:
        gen = torch.Generator(device).manual_seed(1)
        ids = torch.randint(0, 1000, (batch, length), generator=gen, device=device)
        first, mean, steps = [], [], []
        for i in range(4 if batch * length > 100_000 else 8):
            stamps = Stamps()
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=TurboQuantCache(model, "k3v3"),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                streamer=stamps,
            )
            ms = [1e3 * (b - a) for a, b in pairwise(stamps.at)]
            if i:  # the first call compiles kernels
                first.append(ms[0])
                mean.append(sum(ms[1:]) / (new - 1))
                steps += ms[-(new // 2) :]
        what, tokens = f"generate {batch} x {length}", tokens[:, length:][:, :8].flatten()
        yield Figure.of(f"{what}, ms a token", mean, tokens.tolist())
        yield Figure.of(f"{what}, one step, ms", steps)
        yield Figure.of(f"{what}, first token, ms", first)


def one_layer(model, device, quick):
    "Microseconds of attention on codes at 8 x 32,768, in a replayed graph, by recipe."
    import torch
    from turboquant_nb import KVStore, Recipe, Spec
    from turboquant_nb.kernels import ops

    if device != "cuda":
        return
    for bits in (2, 3, 4):
        for center in ("prompt_mean", "pre_rope"):
            side = Spec(bits, center=center)
            recipe = Recipe(side, Spec(bits), recent=16, sinks=4)
            frequencies = 1 / 500000 ** (torch.arange(64, device=device) / 64)
            more = dict(inv_freq=frequencies) if center == "pre_rope" else {}
            kind = dict(dtype=torch.bfloat16, device=device)
            store = KVStore(recipe, 8, 8, 128, 128, **kind, **more)
            gen = torch.Generator(device).manual_seed(0)
            draw = lambda *shape: torch.randn(*shape, generator=gen, **kind)  # noqa: B023
            for _ in range(8):
                ops.append(store, draw(8, 8, 4096, 128), draw(8, 8, 4096, 128))
            q = draw(8, 32, 1, 128)
            call = lambda: ops.attend(q, store)  # noqa: B023
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            times = []
            for _ in range(12):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                for _ in range(20):
                    graph.replay()
                b.record()
                torch.cuda.synchronize()
                times.append(a.elapsed_time(b) * 50)
            yield Figure.of(f"attention 8 x 32768, {bits} bits, {center}, us", times)


def host(model, device, quick):
    "Microseconds of a layer of an eager step, and those beyond transformers' own cache."
    import torch
    import transformers
    from turboquant_nb import TurboQuantCache

    layers, context = model.config.num_hidden_layers, 2048 if device == "cuda" else 256
    ids = torch.arange(context, device=device)[None] % 1000
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def steps(cache):
        out = []
        with torch.no_grad():
            model(ids, past_key_values=cache)
            for _ in range(WARM + 60):
                wait()
                began = time.perf_counter()
                model(ids[:, :1], past_key_values=cache)
                wait()
                out.append(1e6 * (time.perf_counter() - began) / layers)
        return out[WARM:]

    model.set_attn_implementation("sdpa")
    exact = steps(transformers.DynamicCache(config=model.config))
    model.set_attn_implementation("turboquant")
    coded = steps(TurboQuantCache(model, "k3v3", graphs=False))
    what = f"eager step 1 x {context}, us a layer"
    yield (whole := Figure.of(what, coded))
    exact = Figure.of(what, exact)
    beyond = whole.median - exact.median, whole.least - exact.least
    yield Figure(f"{what} beyond transformers", *beyond, whole.n)


PARTS = {"host": host, "calls": whole_calls, "layer": one_layer}


def worker(parts, quick):
    "Measure the tree that PYTHONPATH names; a line of JSON for each figure."
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = None
    if {*parts} & {"host", "calls"}:
        model = llama(device, 8 if quick or device == "cpu" else 32)
    for part in parts:
        for figure in PARTS[part](model, device, quick):
            print("ROW " + json.dumps(figure), flush=True)


def measured(tree, name, parts, quick):
    "{what: Figure} of a tree, by a process of its own; printed as they come."
    more = os.environ.get("PYTHONPATH", "")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *more.split(os.pathsep)])}
    args = [sys.executable, __file__, "--worker", *(["--quick"] if quick else [])]
    args += [x for part in parts for x in ("--only", part)]
    found = {}
    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("ROW "):
                print(line, end="", flush=True)
                continue
            x = Figure(*json.loads(line[4:]))
            found[x.what] = x
            print(f"{name} {x.what:52} {x.median:10.2f} {x.least:10.2f} n={x.n}", flush=True)
    if process.returncode:
        raise SystemExit(f"{tree}: the process ended with {process.returncode}")
    return found


def compared(runs):
    "(a row for every figure, whether all runs of both trees gave the same tokens)."
    rows, equal = [], True
    for what, x in runs[0][0].items():
        sides = [[run[i][what] for run in runs] for i in range(2)]
        equal &= len({json.dumps(figure.tokens) for side in sides for figure in side}) == 1
        old, new = (median(x.median for x in side) for side in sides)
        least = [min(x.least for x in side) for side in sides]
        rows.append(
            dict(
                what=what,
                old=old,
                new=new,
                quotient=new / old,
                old_least=least[0],
                new_least=least[1],
                quotient_least=least[1] / least[0],
                runs=[[x.median for x in side] for side in sides],
                n=x.n * len(runs),
                unit="see what",
            )
        )
    return rows, equal


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--trees", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two checkouts")
    p.add_argument("--rounds", type=int, default=2, help="times that each is measured")
    p.add_argument("--quick", action="store_true", help="8 layers, short prompts")
    p.add_argument("--out", help="results/size/<gpu>.json")
    p.add_argument("--only", action="append", choices=PARTS, help="a part, or several")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if "--worker" in sys.argv:
        a, _ = p.parse_known_args()
        return worker(a.only, a.quick)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from turboquant_nb import results

    a = results.parse(p)
    if not a.trees:
        p.error("--trees: two checkouts are needed")
    trees, parts = dict(zip(("old", "new"), a.trees)), a.only or list(PARTS)
    runs = []
    for _ in range(a.rounds):
        each = [measured(t.resolve(), name, parts, a.quick) for name, t in trees.items()]
        runs.append(each)
    rows, equal = compared(runs)
    print(f"{'median of each, quotient; least of each, quotient':50}")
    for x in rows:
        print(
            f"{x['what']:52} {x['old']:10.2f} {x['new']:10.2f} {x['quotient']:6.3f} "
            f"{x['old_least']:10.2f} {x['new_least']:10.2f} {x['quotient_least']:6.3f}"
        )
    print("same tokens" if equal else "OTHER TOKENS")
    if a.out:
        gate = dict(cmd="both trees generate the same tokens from codes", passed=equal)
        kind = {"id": "random weights of Llama 3.1 8B's shape"}
        data = {"id": "random ids", "n": len(rows)}
        results.write(a, "two trees", rows, gate, kind, data, [0])


if __name__ == "__main__":
    main()
