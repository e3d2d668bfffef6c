"""What folding costs on exact and on coded states: run.py folding [--shape 3B] [--lengths 300
1022] [--states S ...] --out FILE.

A folding model of ESMFold's shapes with random weights (none can be had: the structures mean
nothing) folds random proteins with exact states, and with its language model's keys and values
in 4, 3 and 2 bits: seconds and the peak of memory above what was held before, of the language
model's pass and of the whole; the bytes of keys and values that a past would hold; and the
distance of both structures. On a CPU seconds are the processor's, which others that run there
do not lengthen much, and the peak is that of the process's resident memory, where Linux tells
it. `--shape small` runs anywhere; of the trunk there is ESMFold's for every other shape.

Gate: on exact states the structure is transformers' own, bit for bit. A row is refused whose
bytes by `TurboEsm.nbytes_of` are not those of the tensors."""

import platform
import re
import time
from pathlib import Path

import torch
from plan import Plan
from bench.proteins import PLAIN, protein

from turboquant_nb.esm import TurboEsm, fold, lddt, random_folding, rmsd, tokens

SHAPES = {  # layers, width, heads
    "small": (4, 64, 4),
    "8M": (6, 320, 20),
    "150M": (30, 640, 20),
    "650M": (33, 1280, 20),
    "3B": (36, 2560, 40),
}
STATES = {"exact": None} | PLAIN


def processor():
    "Its name."
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.machine()


def resident(which):
    "Bytes of this process: VmRSS now, VmHWM at most since `forget`; None where nobody says."
    try:
        found = re.search(rf"{which}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(found[1])
    except (OSError, TypeError):
        return None


def forget():
    "The most that was resident is what is resident now."
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def measured(model, f):
    "What f() gives, its seconds, and its peak of memory above what was held."
    if not next(model.parameters()).is_cuda:
        forget()
        held, began = resident("VmRSS"), time.process_time()
        out = f()
        seconds = time.process_time() - began
        return out, seconds, None if held is None else resident("VmHWM") - held
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, began = torch.cuda.memory_allocated(), time.perf_counter()
    out = f()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return out, seconds, torch.cuda.max_memory_allocated() - held


@torch.no_grad()
def rows(a, model):
    device = next(model.parameters()).device
    for length in a.lengths:
        letters, exact = protein(length), None
        ids, _ = tokens([letters], device)
        for name in a.states:
            code = STATES[name]
            with TurboEsm(model.esm, code) as turbo:
                turbo.reread(ids)  # tables are made and libraries loaded before
                _, read, read_peak = measured(model, lambda: turbo.reread(ids))
                turbo.prefill(ids)
                held, said = turbo.report(), turbo.nbytes_of(ids.shape[1])
            if held["nbytes"] != said:
                raise SystemExit(f"bytes by shape {said:,}, of tensors {held['nbytes']:,}")
            row = dict(what="language model", shape=a.shape)
            if length <= a.fold_up_to:
                found, whole, peak = measured(
                    model, lambda: fold(TurboEsm(model, code), letters)
                )
                exact = exact or found
                row |= dict(what="fold", seconds=whole, peak_bytes=peak)
                row |= dict(rmsd=rmsd(exact.trace, found.trace))
                row |= dict(lddt=lddt(exact.trace, found.trace))
            yield row | dict(
                recycles=a.recycles,
                processor=processor() if device.type == "cpu" else None,
                states=name,
                length=length,
                language_model_seconds=read,
                language_model_peak_bytes=read_peak,
                held_nbytes=held["nbytes"],
                bits_per_value=held["bits_per_value"],
            )


def options(p):
    p.add_argument("--shape", default="3B", choices=[*SHAPES])
    p.add_argument("--lengths", type=int, nargs="+", default=[300, 1022])
    p.add_argument("--states", nargs="+", default=[*STATES], choices=[*STATES])
    p.add_argument(
        "--fold-up-to",
        type=int,
        default=1022,
        help="of longer proteins the language model's pass alone is measured",
    )
    p.add_argument("--recycles", type=int, default=0, help="times the trunk runs again")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def plan(a):
    # transformers counts passes, the first among them; the trunk is of ESMFold's size
    trunk = None if a.shape == "small" else dict(max_recycles=a.recycles + 1)
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
