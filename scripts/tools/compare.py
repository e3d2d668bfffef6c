#!/usr/bin/env python3
"""Two checkouts timed in turns on one machine: compare.py --trees OLD NEW --out FILE [--rounds
N].

A redesign must not cost speed. Each tree runs in a process of its own, one after the other and
again, and does what a user does, by public names alone, so that both trees understand it: whole
calls of `generate()` on a model with 32 layers and random weights, attention on codes of one
layer in a replayed graph, and the time that Python takes for a layer of an eager step. A row
has the median of each tree and their quotient. Without a GPU the model is small and the
processor is timed.

Gate: both trees generate the same tokens from codes."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

GPU_CALLS = [(1, 2048), (1, 8192), (8, 8192), (8, 32768)]
CPU_CALLS = [(1, 512), (1, 2048)]


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


def clock(run, device, n):
    "Seconds of n runs."
    import torch

    out = []
    for _ in range(n):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        out.append(time.perf_counter() - began)
    return out


def whole_calls(model, device, calls, new):
    """Milliseconds a token of `generate()` with a new cache, the prompt left out; and its
    tokens."""
    import torch
    from turboquant_nb import TurboQuantCache

    model.set_attn_implementation("turboquant")
    for batch, length in calls:
        gen = torch.Generator(device).manual_seed(1)
        ids = torch.randint(0, 1000, (batch, length), generator=gen, device=device)
        seen = {}

        def run(tokens, ids=ids, seen=seen):
            cache = TurboQuantCache(model, "k3v3")
            seen[tokens] = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

        run(new)
        first = clock(lambda: run(1), device, 2)
        whole = clock(lambda: run(new), device, 2)
        tokens = seen[new][:, length : length + 8].flatten().tolist()
        what = f"generate {batch} x {length}"
        yield f"{what}, ms a token", 1e3 * (min(whole) - min(first)) / (new - 1), tokens
        yield f"{what}, first token, ms", 1e3 * min(first), tokens


def one_layer(device):
    "Microseconds of attention on codes at 8 x 32,768, in a replayed graph, by recipe."
    import torch
    from turboquant_nb import KVStore, Recipe, Spec
    from turboquant_nb.kernels import ops

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
            yield f"attention 8 x 32768, {bits} bits, {center}, us", median(times), None


def host(model, device):
    "Microseconds of a layer of an eager step beyond those of transformers' own cache."
    import torch
    import transformers
    from turboquant_nb import TurboQuantCache

    layers, context = model.config.num_hidden_layers, 2048 if device == "cuda" else 256
    ids = torch.arange(context, device=device)[None] % 1000

    def step(cache):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            run = lambda: model(ids[:, :1], past_key_values=cache)
            clock(run, device, 8)
            return median(clock(run, device, 40))

    model.set_attn_implementation("sdpa")
    exact = step(transformers.DynamicCache(config=model.config))
    model.set_attn_implementation("turboquant")
    coded = step(TurboQuantCache(model, "k3v3", graphs=False))
    yield "eager step 1 x 2048, us a layer", 1e6 * coded / layers, None
    yield (
        "eager step 1 x 2048, us a layer beyond transformers",
        1e6 * (coded - exact) / layers,
        None,
    )


def worker(quick):
    "Measure the tree that PYTHONPATH names; a line of JSON for each figure."
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = llama(device, 8 if quick or device == "cpu" else 32)
    calls = GPU_CALLS if device == "cuda" else CPU_CALLS
    new = 65 if device == "cuda" else 17
    parts = [
        host(model, device),
        whole_calls(model, device, calls[:2] if quick else calls, new),
    ]
    if device == "cuda":
        parts.append(one_layer(device))
    for part in parts:
        for what, value, tokens in part:
            print("ROW " + json.dumps([what, value, tokens]), flush=True)


def measured(tree, quick):
    "{what: (value, tokens)} of a tree, by a process of its own."
    more = os.environ.get("PYTHONPATH", "")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *more.split(os.pathsep)])}
    args = [sys.executable, __file__, "--worker", *(["--quick"] if quick else [])]
    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = [
            line for line in process.stdout if line.startswith("ROW ") or print(line, end="")
        ]
    if process.returncode:
        raise SystemExit(f"{tree}: the process ended with {process.returncode}")
    return {what: (value, tokens) for what, value, tokens in (json.loads(x[4:]) for x in lines)}


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--trees", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two checkouts")
    p.add_argument("--rounds", type=int, default=2, help="times that each is measured")
    p.add_argument("--quick", action="store_true", help="8 layers, short prompts")
    p.add_argument("--out", help="results/size/<gpu>.json")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if "--worker" in sys.argv:
        return worker("--quick" in sys.argv)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from turboquant_nb import results

    a = results.parse(p)
    if not a.trees:
        p.error("--trees: two checkouts are needed")
    runs = [[measured(tree.resolve(), a.quick) for tree in a.trees] for _ in range(a.rounds)]
    rows, equal = [], True
    for what in runs[0][0]:
        old, new = ([r[i][what][0] for r in runs] for i in range(2))
        equal &= len({json.dumps(side[what][1]) for r in runs for side in r}) == 1
        row = dict(what=what, old=median(old), new=median(new), runs=[old, new])
        rows.append(row | dict(quotient=row["new"] / row["old"], n=a.rounds, unit="see what"))
        print(f"{what:50} {row['old']:10.2f} {row['new']:10.2f} {rows[-1]['quotient']:6.3f}")
    print("same tokens" if equal else "OTHER TOKENS")
    if a.out:
        gate = dict(cmd="both trees generate the same tokens from codes", passed=equal)
        kind = {"id": "random weights of Llama 3.1 8B's shape"}
        results.write(
            a, "two trees", rows, gate, kind, {"id": "random ids", "n": len(rows)}, [0]
        )


if __name__ == "__main__":
    main()
