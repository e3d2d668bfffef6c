"""A budget beside fixed recipes: run.py budget --out FILE [--seconds 120]
[--parts perplexity curve peaks] [--model FILE] [--text FOLDER] …

perplexity: windows are the first tokens of a folder's texts, in alphabetical order, of those
that are long enough. A window comes in chunks, each of which reads the tokens before it from
the cache and its own exactly; states are bfloat16. A budget is what the fixed recipe held at
the end of a window, or the least that holds one at all, so the row of a budget stands for that
of its recipe. Losses are of the tokens behind the prompt, and of the last quarter of a window
alone, where the budget is shortest.
curve: Llama-3.1-8B shapes, random weights; one sequence of random states that come in chunks,
and at some lengths steps of the whole model, each timed to its end; `slowest` captures a graph.
`filling_ms` is the time of all tokens since the row before, moves included; `share` the context
over that which bf16 holds in --memory; `peak_bytes` the allocator's peak since the sequence
began, above the weights; other caches beside it.
peaks: random fills, passes, crops, beams, rows and resets; `worst` the allocator's peak in an
operation over the budget, without its own activations and states (scripts/bench/budget.py).

Gate: before the first move logits are those of transformers' own cache, bit for bit, and no
chunk leaves more bytes than the budget allows; of curve and peaks what `gate` there says, and
2 % above the budget at most. --seconds bounds each part; what is measured then is saved."""

import math

import torch
import torch.nn.functional as F
from bench import budget as on_gpu
from bench.cases import DEVICE
from eval.inputs import windows
from plan import Plan
from transformers import DynamicCache

from turboquant_nb import TurboQuantCache
from turboquant_nb.evaluation.candidates import Candidate
from turboquant_nb.evaluation.models import load_model

RECIPES = "k4v4", "k3v3", "k2v2"
PARTS = "perplexity", "curve", "peaks"
MOST = 10**9  # bytes that hold a window as it came


def options(p):
    p.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:1])
    p.add_argument("--seconds", type=float, default=1e9, help="for each part")
    p.add_argument("--model", default="embedded")
    p.add_argument("--text", help="a folder of texts; default: the package's own text")
    p.add_argument("--data-id", default="the package's own text")
    p.add_argument("--windows", type=int, default=6)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--chunk", type=int, default=128)
    p.add_argument("--prompt", type=int, default=512, help="tokens before the first loss")
    p.add_argument("--tiny", action="store_true", help="curve: a small model")
    p.add_argument("--memory", default="8GB", help="curve: the budget")
    p.add_argument("--beside", nargs="*", default=[], help="curve: recipes")
    p.add_argument("--runs", type=int, default=50, help="peaks: random runs")


def rounded(make):
    "An empty cache whose states are bfloat16."
    return Candidate("", make, None, torch.bfloat16).new()


@torch.no_grad()
def read(a, model, row, make):
    "(logits [L, V], the cache) of a window through a cache, chunk by chunk."
    cache, out = rounded(make), []
    for ids in row[None].to(model.device).split(a.chunk, 1):
        out.append(model(ids, past_key_values=cache, use_cache=True).logits[0].cpu())
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


def least(cache, tokens):
    "The fewest bytes, to a kilobyte, that hold so many tokens at the floor."
    stands = cache.stands(1, torch.bfloat16)
    low, high = 0, MOST
    while high - low > 1000:
        cache.budget.memory = (low + high) // 2
        enough = cache.budget.reach(stands) >= tokens
        low, high = (low, cache.budget.memory) if enough else (cache.budget.memory, high)
    return high


def losses(a, logits, row):
    "Losses of the tokens behind the prompt."
    return F.cross_entropy(logits[a.prompt - 1 : -1], row[a.prompt :], reduction="none")


def perplexity(a, model, ids):
    "Rows of losses."
    ours = lambda **how: lambda: cache_of(model, **how)

    def row_of(name, make, **more):
        found, held = [], None
        for row in ids:
            logits, cache = read(a, model, row, make)
            found.append(losses(a, logits, row))
            held = cache.report()
        loss, last = torch.stack(found), a.length // 4
        if "tokens" in held["budget"]:
            more["tokens_by_bits"] = on_gpu.stands_of(held)
        return {
            "part": "perplexity",
            "cache": name,
            "bits": held["bits_per_value"],
            "nbytes": held["nbytes"],
            "ppl": math.exp(loss.mean()),
            "ppl_last": math.exp(loss[:, -last:].mean()),
            "n": loss.numel(),
            "unit": "perplexity",
            "window_losses": [round(float(x), 6) for x in loss.mean(1)],
            "window_losses_last": [round(float(x), 6) for x in loss[:, -last:].mean(1)],
            **more,
        }

    yield row_of("exact", ours(memory=MOST))
    for name in RECIPES:
        yield (fixed := row_of(name, ours(recipe=name)))
        memory = max(fixed["nbytes"], least(ours(memory=MOST)(), a.length))
        yield row_of(f"budget of {name}", ours(memory=memory), memory=memory)


def plan(a):
    rows, gates, about, data = [], [], {"id": "random"}, {"id": "normal states", "n": 1}
    if "perplexity" in a.parts:
        model, tokenizer = load_model(a.model, device=DEVICE)
        model.requires_grad_(False)
        ids = windows(a.text, tokenizer, a.windows, a.length)
        exact, _ = read(a, model, ids[0], lambda: DynamicCache(config=model.config))
        plain, _ = read(a, model, ids[0], lambda: cache_of(model, memory=MOST))
        gate = {"cmd": "logits before the first move are transformers' own, bit for bit"}
        gate |= {"value": float((exact - plain).abs().max())}
        gates.append(gate | {"passed": torch.equal(exact, plain)})
        rows.append(lambda: perplexity(a, model, ids))
        about = {"id": a.model if a.model != "embedded" else "smollm2-135m-instruct-q4_1.gguf"}
        data = {"id": a.data_id, "n": len(ids)}
    if timed := [x for x in (on_gpu.curve, on_gpu.peaks) if x.__name__ in a.parts]:
        gates.append(on_gpu.gate())
        rows += [lambda f=f: f(a) for f in timed]
    gate = {
        "cmd": "; ".join(x["cmd"] for x in gates),
        "passed": all(x["passed"] for x in gates),
    }
    gate["values"] = [x["value"] for x in gates]
    found = (row for f in rows for row in f())
    more = {"chunk": a.chunk, "length": a.length}
    return Plan("budget", gate, found, data, about, more=more)
