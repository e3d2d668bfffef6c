"""What a decode step of ESM-2 costs on a CPU: run.py proteins_cpu [--model FOLDER] [--shapes
35M 150M] [--tokens N ...] [--before FILE] --out FILE.

One sequence of random residues is read, then one residue at a time is appended, on exact
states, on a calibrated code and on data-free codes in stores, in turns. `--model` is a real
one, its code `water3` fitted to random proteins; `--shapes` are ESM-2's with random weights and
a random code of 1 to 5 bits, 3 on average, because times depend on neither. `p20`, `p50` and
`p80` are quantiles of processor time, which other jobs of the machine leave nearly alone.
`--after` takes a file of this bench that another commit wrote and keeps its rows with that
commit.

Gate: a step on codes gives what attention on the states that the codes stand for gives, to 2e-5
of the largest output, in every layer of every model."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from plan import Plan, earlier
from bench.proteins import protein, random_code, random_esm
from bench.timing import quantiles

from turboquant_nb.esm import TurboEsm, calibrate_esm, load_esm, tokens
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

SHAPES = {
    "8M": (320, 6, 20),
    "35M": (480, 12, 20),
    "150M": (640, 30, 20),
}  # width, layers, heads
STORE = Recipe(Spec(bits=3), Spec(bits=3), sinks=0, recent=0)


def models(a):
    "Name -> (model, calibrated code)."
    if a.model:
        model = load_esm(a.model, device="cpu")
        yield (
            Path(a.model).name,
            model,
            calibrate_esm(model, [protein(60, seed) for seed in range(1, 33)], "water3"),
        )
    for name in a.shapes:
        width, layers, heads = SHAPES[name]
        model = random_esm(layers, width, heads, "cpu")
        yield f"{name} shapes", model, random_code(model, 3)


def apart(model, code):
    """Largest distance of a step's attention outputs from dense attention on what the codes
    stand for, relative to the largest output of the layer."""
    ids, _ = tokens([protein(90)])
    with TurboEsm(model, code) as turbo:
        turbo.prefill(ids)
        past, found = turbo.past, []
        attend = past.attend

        def checked(layer, q, k, v, causal=True):
            keys, values = past.states(layer)
            want = F.scaled_dot_product_attention(
                q, torch.cat([keys, k], 2), torch.cat([values, v], 2), scale=1.0
            )
            out = attend(layer, q, k, v, causal)
            found.append(float((out - want).abs().max() / want.abs().max()))
            return out

        past.attend = checked
        turbo.decode(ids[:, 1:2])
    return max(found)


def steps(model, codes, length, repeats):
    "Processor milliseconds of steps of each kind, in turns, and what each past holds."
    ids, _ = tokens([protein(length - 2)])
    times, held = {name: [] for name in codes}, {}
    pasts = {}
    for name, code in codes.items():
        with TurboEsm(model, code, max_length=length + repeats + 3) as turbo:
            turbo.prefill(ids)
            held[name] = turbo.report()
            pasts[name] = turbo.past, turbo.masked
    for i in range(repeats + 3):
        for name, code in codes.items():
            with TurboEsm(model, code) as turbo:
                turbo.past, turbo.masked = pasts[name]
                began = time.process_time()
                turbo.decode(ids[:, 1:2])
                if i > 2:
                    times[name].append(1e3 * (time.process_time() - began))
    return times, held


@torch.no_grad()
def rows(a):
    for which, model, code in models(a):
        codes = {"exact states": None, "water3": code, "store, 3 bits": STORE}
        for length in a.tokens:
            times, held = steps(model, codes, length, a.repeats)
            base = quantiles(times["exact states"])["p50"]
            for name, found in times.items():
                more = dict(
                    nbytes=held[name]["nbytes"], tables_nbytes=held[name]["tables_nbytes"]
                )
                yield (
                    dict(
                        what="decode step",
                        model=which,
                        name=name,
                        tokens=length,
                        exact=base,
                        n=len(found),
                        unit="ms of processor time",
                        threads=torch.get_num_threads(),
                    )
                    | more
                    | quantiles(found)
                )


def options(p):
    p.add_argument("--model", help="folder of a real ESM-2")
    p.add_argument("--shapes", nargs="*", default=["150M"], choices=[*SHAPES])
    p.add_argument("--tokens", type=int, nargs="+", default=[256, 1000])
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument(
        "--after", "--before", help="a file of this bench, written by another commit"
    )


def plan(a):
    far = {name: apart(model, code) for name, model, code in models(a)}
    gate = {
        "cmd": (
            "a step on a calibrated code against dense attention on what it stands for, every "
            "layer: <= 2e-5 of the largest output"
        ),
        "passed": max(far.values()) <= 2e-5,
        "worst": max(far.values()),
    }
    named = Path(a.model).name if a.model else "none"
    return Plan(
        "esm decode",
        gate,
        rows(a),
        {"id": "random proteins", "n": 1},
        {"id": named, "revision": "and random weights, seed 0, of ESM-2's shapes"},
        before=earlier(a),
    )
