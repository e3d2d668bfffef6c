"""What folding costs on exact and on coded states: run.py folding [--shape 3B] [--lengths 300
1022] --out FILE.

A folding model of ESMFold's shapes with random weights (none can be had: the structures mean
nothing) folds random proteins with exact states, and with its language model's keys and values
in 4, 3 and 2 bits: seconds and, on a GPU, the peak of memory above the weights, of the language
model's pass and of the whole; the bytes of keys and values that a past would hold; and the
distance of both structures. `--shape small` runs anywhere.

Gate: on exact states the structure is transformers' own, bit for bit."""

import time

import torch
from plan import Plan
from bench.proteins import PLAIN, protein

from turboquant_nb.esm import TurboEsm, fold, lddt, random_folding, rmsd, tokens

SHAPES = {"small": (4, 64, 4), "8M": (6, 320, 20), "3B": (36, 2560, 40)}  # layers, width, heads
STATES = {"exact": None} | PLAIN


def measured(model, f):
    "What f() gives, its seconds, and its peak of memory above what was held; no peak on a CPU."
    on_gpu = next(model.parameters()).is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    began = time.perf_counter()
    out = f()
    if not on_gpu:
        return out, time.perf_counter() - began, None
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return out, seconds, torch.cuda.max_memory_allocated() - held


@torch.no_grad()
def rows(a, model):
    device = next(model.parameters()).device
    for length in a.lengths:
        letters, exact = protein(length), None
        ids, _ = tokens([letters], device)
        for name, code in STATES.items():
            with TurboEsm(model.esm, code) as turbo:
                turbo.reread(ids)  # tables are made and libraries loaded before
                _, read, read_peak = measured(model, lambda: turbo.reread(ids))
                turbo.prefill(ids)
                held = turbo.report()
            found, whole, peak = measured(model, lambda: fold(TurboEsm(model, code), letters))
            exact = exact or found
            yield dict(
                what="fold",
                shape=a.shape,
                recycles=a.recycles,
                states=name,
                length=length,
                seconds=whole,
                language_model_seconds=read,
                peak_bytes=peak,
                language_model_peak_bytes=read_peak,
                held_nbytes=held["nbytes"],
                bits_per_value=held["bits_per_value"],
                rmsd=rmsd(exact.trace, found.trace),
                lddt=lddt(exact.trace, found.trace),
            )


def options(p):
    p.add_argument("--shape", default="3B", choices=[*SHAPES])
    p.add_argument("--lengths", type=int, nargs="+", default=[300, 1022])
    p.add_argument("--recycles", type=int, default=0, help="times the trunk runs again")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def plan(a):
    trunk = None if a.shape == "small" else dict(max_recycles=a.recycles)  # of ESMFold's size
    with torch.device(a.device):
        model = random_folding(0, *SHAPES[a.shape], trunk).to(a.device)
    model.trunk.set_chunk_size(64)
    letters = protein(40)
    own, found = model.infer(letters), fold(TurboEsm(model), letters)
    gate = {
        "cmd": "a structure on exact states against EsmForProteinFolding's own: bit for bit",
        "passed": model.output_to_pdb(own)[0] == found.pdb,
    }
    return Plan(
        "folding",
        gate,
        rows(a, model),
        {"id": "random proteins", "n": len(a.lengths)},
        {"id": "none", "revision": f"random weights, seed 0, of ESMFold's shapes ({a.shape})"},
    )
