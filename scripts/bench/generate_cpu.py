"""Tokens per second of generate() on a CPU, on codes and uncompressed: run.py generate_cpu
[--tiny] [--model FILE] [--recipes NAME …] [--prompts N …] [--filled] [--new N] [--repeats N]
--out FILE.

SmolLM2-135M (or another model) in fp32, batch 1, the chapter of the demo and its question
(2,926 tokens), and longer prompts of text repeated; positions beyond the model's 8,192 go on
with the RoPE of the model, unscaled: the tokens mean nothing there, the work is the same. A
prompt is read once for each cache, all but its last token; with --filled the caches get random
states instead, which cost no pass. Then come calls of generate() that continue it, in turns, so
that what else the machine does meets both; every call makes `new` tokens, so the caches grow by
as many. `p20`, `p50` and `p80` are quantiles of tokens per second
over the calls, the first of each cache left out; `speedup` is the median over that of the
uncompressed cache. `cpu_ms` is the median processor time for a token, which with
OMP_NUM_THREADS=1 says how the caches compare on a machine that does other things too;
`cpu_speedup` the uncompressed cache's over it.

Caches: `dynamic` transformers' DynamicCache with torch's SDPA; `turboquant NAME` the preset
with attention on codes, `backends` who served. Set OMP_NUM_THREADS to the cores; `load` is the
machine's average load over the last minute, when the calls of a prompt are over.

Gate: the logits of a step by the compiled kernel are those of attention on codes in PyTorch, to
1e-3, and no timed step was served by anything else."""

import copy
import hashlib
import os
import time
from pathlib import Path

import torch
from bench import generate
from bench.timing import quantiles
from plan import Plan

from turboquant_nb.evaluation.models import SMOLLM2, demo_message, load_model, sample_text


def prompt_ids(model, tokenizer, length):
    "[1, length] ids: the demo's message where `length` is 0, else text repeated."
    if tokenizer is None:
        return generate.random_ids(model, 1, length or 600, 0)
    if not length:
        found = tokenizer.apply_chat_template(
            [{"role": "user", "content": demo_message()}],
            add_generation_prompt=True,
            return_tensors="pt",
        )
        return found if isinstance(found, torch.Tensor) else found["input_ids"]
    ids = tokenizer(sample_text(), return_tensors="pt")["input_ids"]
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def read(model, cache, name, ids, filled=False):
    "The cache after all tokens but the last, in chunks; or filled with as many random states."
    generate.use(model, name)
    if filled:
        return generate.fill(cache, name.split()[0], model.config, 1, ids.shape[1] - 1)
    for part in ids[:, :-1].split(4096, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def call(model, cache, name, ids, new):
    """(tokens per second of one call that makes `new` tokens, processor milliseconds for each,
    the ids with them)."""
    generate.use(model, name)
    began, used = time.perf_counter(), time.process_time()
    out = generate.generated(model, ids, new, cache)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    return new / seconds, 1e3 * processor / new, torch.cat([ids, out], 1)


def measured(model, recipes, ids, new, repeats, filled):
    "Rows of all caches on one prompt, their calls in turns."
    names = "dynamic", *(f"turboquant {x}" for x in recipes)
    new_cache = generate.new_cache
    caches = {name: read(model, new_cache(model, name), name, ids, filled) for name in names}
    at, speeds, used = (
        dict.fromkeys(caches, ids),
        {name: [] for name in caches},
        {name: [] for name in caches},
    )
    for i in range(repeats + 1):
        for name, cache in caches.items():
            speed, cpu, at[name] = call(model, cache, name, at[name], new)
            if i:
                speeds[name].append(speed)
                used[name].append(cpu)
    base, cpu_base = quantiles(speeds["dynamic"])["p50"], quantiles(used["dynamic"])["p50"]
    for name, found in speeds.items():
        row = {
            "cache": name,
            "prompt": ids.shape[1],
            "filled": filled,
            "new": new,
            "n": repeats,
            "unit": "tokens/s",
            "threads": torch.get_num_threads(),
            "load": round(os.getloadavg()[0], 1),
        }
        cpu = quantiles(used[name])["p50"]
        row |= quantiles(found) | {
            "speedup": quantiles(found)["p50"] / base,
            "cpu_ms": cpu,
            "cpu_speedup": cpu_base / cpu,
        }
        if name != "dynamic":
            report = caches[name].report()
            # chunks of a long prompt, then steps
            if set(report["backends"]) - {"flash"} != {"cpu"}:
                why = f"{report['backends']}: {report['reasons']}"
                raise RuntimeError(f"steps were not served by the compiled kernel but by {why}")
            row |= {"backends": report["backends"], "bits_per_value": report["bits_per_value"]}
        yield row


def gate(model, ids):
    "Whether one step's logits do not depend on who serves it."
    logits = []
    cache = read(model, generate.new_cache(model, generate.OURS), generate.OURS, ids[:, :400])
    for backend in ("auto", "torch"):
        mine = copy.deepcopy(cache)
        for layer in mine.layers:
            layer.backend = backend
        logits.append(model(ids[:, 399:400], past_key_values=mine).logits)
        print("gate:", backend, mine.report()["backends"], flush=True)
    apart = float((logits[0] - logits[1]).norm() / logits[1].norm())
    print("gate: logits differ by", apart, flush=True)
    return apart < 1e-3


def options(p):
    p.add_argument(
        "--tiny", action="store_true", help="a small random model: does the bench run?"
    )
    p.add_argument("--model", default="embedded", help="a .gguf file or a folder")
    p.add_argument("--recipes", nargs="+", default=["k3v3"], help="presets")
    p.add_argument(
        "--prompts",
        nargs="+",
        type=int,
        default=[0, 16384],
        help="tokens of the prompts; 0 is the demo's",
    )
    p.add_argument(
        "--filled", action="store_true", help="caches of random states in place of a prompt"
    )
    p.add_argument("--new", type=int, default=24, help="tokens that a call makes")
    p.add_argument("--repeats", type=int, default=7, help="timed calls of each cache")


@torch.no_grad()
def rows(a, model, tokenizer):
    for length in a.prompts:
        ids = prompt_ids(model, tokenizer, length)
        yield from measured(model, a.recipes, ids, a.new, a.repeats, a.filled)


@torch.no_grad()
def plan(a):
    model, tokenizer = (
        (generate.make_model(generate.TINY), None) if a.tiny else load_model(a.model)[:2]
    )
    model.config.max_position_embeddings = 1 << 17
    model.generation_config.eos_token_id = None
    passed = gate(model, prompt_ids(model, tokenizer, 600))
    name = {"id": "tiny", "revision": "none"}
    if not a.tiny:
        name = {"id": SMOLLM2.member, "revision": SMOLLM2.model_sha256}
        if a.model != "embedded":
            digest = hashlib.sha256(Path(a.model).read_bytes()).hexdigest()
            name = {"id": Path(a.model).name, "revision": digest}
    what = "random states, normal" if a.filled else "Moby-Dick, chapters 1 to 3"
    data = {"id": what, "n": len(a.prompts)}
    cmd = (
        "one step's logits by the compiled kernel and by attention on codes agree to 1e-3; "
        "steps were served by the kernel"
    )
    return Plan(
        "generate", {"cmd": cmd, "passed": passed}, rows(a, model, tokenizer), data, name
    )
