#!/usr/bin/env python3
"""Everything that is measured: run.py NAME --out FILE [options of the experiment]. run.py NAME
--help says what it measures, run.py --list which experiments there are.

Older results name `scripts/bench/run.py NAME` or `scripts/eval/NAME.py`: the same options of
the same name here (of `proteins.py` PART: esm PART; of `serving.py`: served), unless --list
calls NAME closed: the commit named there is the last that has its script."""

import argparse
import importlib
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import torch

if (HERE := str(Path(__file__).resolve().parent)) not in sys.path:
    sys.path.insert(0, HERE)

from plan import carry_out, join

from turboquant_nb import results


class Entry(NamedTuple):
    "An experiment."

    module: str
    what: str  # it measures
    smallest: str = ""  # options with which a CPU needs seconds; none where it needs a GPU
    needs: str = ""  # "GPU", and packages that no extra of the checks installs


EXPERIMENTS = {
    # --- what takes time
    "decode_kernel": Entry(
        "bench.decode_kernel",
        "attention on codes against the best attention on bf16 and fp8",
        needs="GPU",
    ),
    "generate": Entry(
        "bench.generate",
        "decode steps of a whole model, launched and replayed; memory; whole calls",
        needs="GPU",
    ),
    "serving": Entry(
        "bench.serving",
        "a vLLM engine with codes in its blocks, bf16 and fp8",
        needs="GPU vllm",
    ),
    # --- quality
    "engines": Entry(
        "eval.engines", "perplexity in a vLLM engine beside TurboQuantCache", needs="vllm"
    ),
    "columns": Entry(
        "eval.columns",
        "bits, perplexity, divergence and times of presets and of others, a row for each",
        "--windows 2 --length 64 --only fp8-head KIVI --protocols stress --times 1 16 1",
    ),
    "agents": Entry(
        "eval.agents",
        "tool calls, schemas, digits, needles, sums: right answers on codes and uncompressed",
        "--tasks digits-500 --limit 1 --caches k3v3 --dtype float32",
    ),
    "budget": Entry(
        "eval.budget",
        "a budget: perplexity beside fixed recipes; its time and bytes on a GPU",
        "--windows 1 --length 256 --prompt 128",
    ),
    "mutants": Entry(
        "eval.mutation",
        "how many small changes of the code the tests notice",
        needs="cosmic_ray",
    ),
    "architectures": Entry(
        "eval.architectures",
        "how each causal language model of transformers reads a coded cache",
        "--classes LlamaForCausalLM BloomForCausalLM RwkvForCausalLM",
    ),
    "arrivals": Entry(
        "eval.arrivals",
        "whether a prompt gives the same tokens whole, in chunks, from a file, behind others",
        "--tiny --tokens 96 --new 2 --windows 1 --chunks 1 16 64",
    ),
    "chapters": Entry(
        "eval.chapters",
        "each chapter alone in an empty folder, as on Colab: does it run, and how long",
        "--installed --chapters checks",
    ),
}
# What is found and asked no more, by the last commit that holds the script; the commit that
# measured is in the file of results.
LAST = {
    "c6141f47": {
        "codes": "trellis codes with levels, scales and tiles after prior art, all else equal"
    },
    "df85fdd5": {"beside": "the speed table of an older package and of this one, in turns"},
    "93f1dbb1": {
        "generate_cpu": "tokens per second of generate() on a CPU, on codes and uncompressed"
    },
    "2fb53209": {
        "maps": "what a matrix for every head costs both kernels",
        "choices": "perplexity for single choices of a code, all else equal",
        "notice": "whether a cache's own error, met early, tells of the damage that comes",
        "sparse_weights": "how many weights of the MLPs a token needs, beside fewer bits",
        "sparse_values": "how many values a decode step could leave unread",
        "esm findings": "what TurboESM reports of calibration, layers, outliers and tables",
        "design": "proteins that a model draws on exact and on coded states",
        "states": "how near to the bound more states of a trellis come",
    },
    "e460cd4e": {
        "encode": "vectors coded per second by PyTorch",
        "proteins": "memory and time of ESM-2 650M",
        "proteins_cpu": "a decode step of ESM-2 on a CPU, exact and on codes",
        "folding": "folding with ESMFold's shapes on exact and on coded states",
        "codec": "codes out of a GPU's memory and back: gathered, by the link, as a stream",
        "vectors": "nearest neighbours from codes of equal size",
        "search": "perplexity of many data-free recipes at once",
        "calibrated": "perplexity of calibrated codes, and of bits by layer and head",
        "answers": "how many answers stay right on a coded cache",
        "retrieval": "whether the token that attention looks for is still found",
        "latent_loss": "what codes of latents cost a model that is made into latents",
        "storage": "caches on disk, raw and entropy coded",
        "cold": "a stored prefix: bytes and perplexity of every code, and of small files",
        "served": "what a served cache gives up, and what a calibration takes back",
        "context": "how long a context fits a GPU of 24 GB",
        "offload": "what a model costs whose layers wait elsewhere",
        "esm": "ESM-2 on compressed keys and values: recipes, contacts, variants, scores",
        "masks": "which trellis codes are good",
    },
    "0d1ffa97": {"transfer": "a prompt read in one process, its cache ready in another"},
    "9f905037": {
        "latents": "attention of a step to latents: expanded, absorbed, on codes",
        "decode_heads": "attention where heads of a layer have bits of their own",
    },
    "1a2ed976": {
        "decode_recipes": "attention by recipe: tensor cores, portable kernel, PyTorch",
        "serving_kernels": "kernels on an engine's blocks, by block size",
        "proteins_masked": "all masked marginals of a protein: passes, frozen, one graph",
        "shapes": "a decode step of models of 2026 by shape: learnt sinks, wide heads, hybrids",
        "archives": "what loaders make of files that were changed on purpose",
    },
    "c045c7d7": {"protein_store": "ESM-2's states in the store of language models"},
    "c3184f0d": {"frames": "where a frame may come from: a prompt, a text, drawn ids"},
    "bb56ccce": {
        "encode_kernel": "the fused kernel that codes keys and values, and its launch options",
        "decode_cpu": "a decode step of one layer on a CPU, by recipe",
        "recipes": "perplexity by sets of recipes; `turboquant eval ppl` measures any recipe",
        "peers": "the caches of other packages on the same windows",
        "engine": "a model in a real vLLM engine against TurboQuantCache",
    },
}
CLOSED = {name: (commit, what) for commit, x in LAST.items() for name, what in x.items()}


def lacks(needs):
    "Why an experiment cannot run here; an empty text if it can."
    for need in needs.split():
        if need == "GPU" and not torch.cuda.is_available():
            return "an NVIDIA GPU"
        if need != "GPU" and not importlib.util.find_spec(need):
            return f"{need}, which is not installed here"
    return ""


def parser(name):
    "(the module of an experiment, its parser of options)."
    module = importlib.import_module(EXPERIMENTS[name].module)
    p = argparse.ArgumentParser(
        prog=f"run.py {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--out", required=True, help="a JSON file")
    p.add_argument("--join", nargs="+", metavar="FILE", help="results of parts: join them")
    module.options(p)
    return module, p


def main(argv=None):
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    part = " ".join([name, *rest[:1]])  # of an experiment that had several
    if asked := part if part in CLOSED else name if name in CLOSED else "":
        raise SystemExit(
            f"{asked} is closed; its script runs with the package of its time: "
            f"git worktree add ../closed {CLOSED[asked][0]} && cd ../closed && "
            f"PYTHONPATH=. python scripts/run.py {shlex.join([*name.split(), *rest])}"
        )
    if name not in EXPERIMENTS:
        print(__doc__, *(f"  {k:16} {x.what}" for k, x in EXPERIMENTS.items()), sep="\n")
        print(
            "closed:", *(f"  {k:16} {x} ({last})" for k, (last, x) in CLOSED.items()), sep="\n"
        )
        return 0 if name in ("--list", "--help", "-h") else 2
    module, p = parser(name)
    a = results.parse(p, rest)
    if a.join:
        join(a)
    elif missing := lacks(EXPERIMENTS[name].needs):
        raise SystemExit(f"{name} needs {missing}")
    else:
        carry_out(a, module.plan(a))
    return 0


if __name__ == "__main__":
    sys.exit(main())
