"""Perplexity under a budget and of fixed recipes that hold as many bytes at the end: run.py
budget --out FILE [--text FOLDER] [--windows 6] [--length 2048] [--chunk 128] [--prompt 512].

Windows are the first tokens of a folder's texts, in alphabetical order, of those that are long
enough. A window comes in chunks, each of which reads the tokens before it from the cache and
its own exactly; states are bfloat16. A budget is what the fixed recipe held at the end of a
window, or the least that holds one at all, so the row of a budget stands for that of its
recipe. Losses are of the tokens behind the prompt, and of the last quarter of a window alone,
where the budget is shortest. Gate: before the first move logits are those of transformers'
own cache, bit for bit, and no chunk leaves more bytes than the budget allows."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from plan import Plan
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache
from turboquant_nb.evaluation.candidates import Candidate
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.evaluation.score import text_windows

RECIPES = "k4v4", "k3v3", "k2v2"
MOST = 10**9  # bytes that hold a window as it came


def options(p):
    p.add_argument("--model", default="embedded")
    p.add_argument("--text", help="a folder of texts; default: the package's own text")
    p.add_argument("--data-id", default="the package's own text")
    p.add_argument("--windows", type=int, default=6)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--chunk", type=int, default=128)
    p.add_argument("--prompt", type=int, default=512, help="tokens before the first loss")


def windows(a, tokenizer):
    "[n, L] tokens, each row of another text, where there are several."
    if a.text is None:
        return text_windows(tokenizer, None, a.windows, a.length)
    rows = []
    for path in sorted(Path(a.text).glob("*.txt")):
        try:
            rows.append(text_windows(tokenizer, path.read_text("utf-8"), 1, a.length))
        except ValueError:  # too short
            continue
        if len(rows) == a.windows:
            return torch.cat(rows)
    raise SystemExit(f"{a.text} has {len(rows)} texts of {a.length} tokens, not {a.windows}")


@torch.no_grad()
def read(a, model, row, make):
    "(logits [L, V], the cache) of a window through a cache, chunk by chunk."
    cache, out = Candidate("", make, None, torch.bfloat16).new(), []
    for ids in row[None].split(a.chunk, 1):
        out.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
        budget = getattr(cache, "budget", None)
        if budget and cache.report()["nbytes"] > budget.memory:
            raise SystemExit(
                "the gate did not pass: more bytes are held than the budget allows"
            )
    return torch.cat(out), cache


def cache_of(model, memory=None, **how):
    "A cache that the model's own attention reads; its states have 16 bits, not the model's."
    cache = TurboQuantCache(model, attention="dense", memory=memory and MOST, **how)
    if memory:
        cache.budget.memory = memory
    return cache


def least(a, cache):
    "The fewest bytes, to a kilobyte, that hold a window at the floor."
    stands, tables = cache.stands(1, torch.bfloat16)
    low, high = 0, MOST
    while high - low > 1000:
        cache.budget.memory = (low + high) // 2
        enough = cache.budget.reach(stands, tables) >= a.length
        low, high = (low, cache.budget.memory) if enough else (cache.budget.memory, high)
    return high


def losses(a, logits, row):
    "Losses of the tokens behind the prompt."
    return F.cross_entropy(logits[a.prompt - 1 : -1], row[a.prompt :], reduction="none")


def plan(a):
    model, tokenizer = load_model(a.model)
    model.requires_grad_(False)
    ids = windows(a, tokenizer)
    ours = lambda **how: lambda: cache_of(model, **how)
    exact, _ = read(a, model, ids[0], lambda: DynamicCache(config=model.config))
    plain, _ = read(a, model, ids[0], ours(memory=MOST))
    gate = {"cmd": "logits before the first move are transformers' own, bit for bit"}
    gate |= {"value": float((exact - plain).abs().max()), "passed": torch.equal(exact, plain)}

    def row_of(name, make, **more):
        found, held = [], None
        for row in ids:
            logits, cache = read(a, model, row, make)
            found.append(losses(a, logits, row))
            held = cache.report()
        loss, last = torch.stack(found), a.length // 4
        tokens = held["budget"].get("tokens", ())
        stands = {b: sum(x.get(b, 0) for x in tokens) for b in (16, 4, 3, 2)} if tokens else {}
        return {
            "cache": name,
            "bits": held["bits_per_value"],
            "nbytes": held["nbytes"],
            "ppl": math.exp(loss.mean()),
            "ppl_last": math.exp(loss[:, -last:].mean()),
            "n": loss.numel(),
            "unit": "perplexity",
            "window_losses": [round(float(x), 6) for x in loss.mean(1)],
            "window_losses_last": [round(float(x), 6) for x in loss[:, -last:].mean(1)],
            **({"tokens_by_bits": stands} if stands else {}),
            **more,
        }

    def rows():
        yield row_of("exact", ours(memory=MOST))
        for name in RECIPES:
            fixed = row_of(name, ours(recipe=name))
            yield fixed
            memory = max(fixed["nbytes"], least(a, ours(memory=MOST)()))
            yield row_of(f"budget of {name}", ours(memory=memory), memory=memory)

    about = {"id": a.model if a.model != "embedded" else "smollm2-135m-instruct-q4_1.gguf"}
    data = {"id": a.data_id, "n": len(ids)}
    return Plan(
        "budget", gate, rows(), data, about, more={"chunk": a.chunk, "length": a.length}
    )
