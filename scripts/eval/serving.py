#!/usr/bin/env python3
"""What a served cache gives up, and what a calibration takes back: serving.py --out FILE --text FILE ... [options of recipes.py].

Two protocols. `steps`: every token of a window reads itself exactly and all before it as codes, as an engine's decode steps do. `decode`: the first --prompt tokens
come in one chunk, which attends to itself exactly, and the others are steps; the loss is theirs. By turns: transforms and means of a calibration (found on other
windows), exact recent tokens, exact first tokens. Beside them stands what `TurboQuantCache` does with the recipe of the same bits, recent and first tokens: under `decode` the
cache itself, by chapter 83's scorer; under `steps` the same attention with the mean of the window's own tokens before RoPE. States are fp32, so nothing but codes differs.

Gate: without codes the same attention gives the model's own losses; and with a recipe that both have, without a mean, it gives `TurboQuantCache`'s."""
import argparse
import math
import time
from functools import lru_cache

import torch
from recipes import add_options, opened

from turboquant_nb import results
from turboquant_nb.calibration.fit import calibrate, window_center
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import OnePass, score, token_losses
from turboquant_nb.hf import AttentionInterface, AttentionMaskInterface, _text_config, layer_frequencies, turboquant_mask
from turboquant_nb.quant.mixed_precision import make_quantizer
from turboquant_nb.quant.quantizer import PRESETS, Recipe, Spec, decode

CASES = [  # transforms, mean, exact recent tokens, exact first tokens
    (False, "none", 0, 0), (True, "none", 0, 0), (False, "calibration", 0, 0), (True, "calibration", 0, 0),
    (False, "none", 16, 0), (False, "none", 0, 4), (False, "none", 16, 4), (True, "none", 16, 0), (False, "calibration", 16, 0),
    (True, "calibration", 16, 0), (True, "none", 16, 4), (False, "calibration", 16, 4), (True, "calibration", 16, 4),
]  # fmt: skip
CACHES = [("pre_rope", 16, 4), ("pre_rope", 16, 0), ("pre_rope", 0, 0)]  # mean, recent tokens before a step's own, first tokens of `TurboQuantCache`
how = {}  # what the attention below does


@lru_cache(maxsize=256)
def quantizer(bits, rotation, d, device):
    return make_quantizer(Spec(bits, rotation=rotation), d, device)


def mean_of(layer, key):
    if how["mean"] == "calibration":
        return how["calibration"].centers[layer][:, None].to(key.device)
    return window_center(key, how["frequencies"][layer], how["first"]) if how["mean"] == "pre_rope" else 0.0


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, sliding_window=None, **_):
    "Exact scores and values for a token itself, recent and first ones and a prompt's own; codes for all others it sees."
    layer, (b, heads, n, d) = module.layer_idx, key.shape
    q = query.view(b, heads, -1, n, d) * scaling
    scores, t = q @ key[:, :, None].mT, torch.arange(n, device=key.device)
    exact = torch.ones(n, n, dtype=torch.bool, device=key.device)
    values = value
    if how["bits"]:
        transform = how["calibration"].transforms[layer].name if how["transforms"] else "hadamard"
        k_side, v_side = (quantizer(bits, r, d, key.device) for bits, r in zip(how["bits"], (transform, "hadamard")))
        mean = mean_of(layer, key)
        coded = decode(k_side, k_side.encode(key - mean)) + mean
        values = decode(v_side, v_side.encode(value))
        exact = (t[:, None] - t <= how["recent"]) | (t < how["first"]) | (t[:, None] < how["prompt"])
        scores = torch.where(exact, scores, q @ coded[:, :, None].mT)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    hidden = (t > t[:, None]) | (t <= t[:, None] - (sliding_window or n + 1))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = (weights * exact) @ value[:, :, None] + (weights * ~exact) @ values[:, :, None]
    return out.reshape(b, -1, n, d).transpose(1, 2).contiguous(), None


@torch.no_grad()
def losses(model, ids, prompt):
    "Mean loss of each window, of the tokens after the prompt."
    begin, out = max(1, prompt), []
    for x in ids:
        logits = model(x[None, :-1], use_cache=False, logits_to_keep=len(x) - begin).logits[0]
        out.append(token_losses(logits, x[begin:]).mean())
    return torch.stack(out).cpu()


def cache_losses(model, ids, a, mean, recent, first):
    "The same of `TurboQuantCache`, which counts a step's own token among its recent ones."
    k, v = PRESETS[a.recipe]
    recipe = Recipe(Spec(bits=k, center=mean), Spec(bits=v), sinks=first, recent=recent + 1)
    with_attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        return score(model, ids, as_candidate(model, recipe, dtype=None), "decode", a.prompt, batch=1, backend=OnePass(count=False)).loss.mean(1)
    finally:
        model.set_attn_implementation(with_attention)


def gate(model, ids, a, plain):
    "(losses of each window on exact states by protocol, what was compared). A code at an edge may flip: a twentieth of what codes change is allowed for that."
    prompts = dict(decode=a.prompt, steps=0)
    how.update(bits=None)
    exact = {p: losses(model, ids, n) for p, n in prompts.items()}
    off = max(float((exact[p] - plain[p]).abs().max()) for p in prompts)
    how.update(bits=PRESETS[a.recipe], transforms=False, mean="none", recent=16, first=4, prompt=a.prompt)
    ours = losses(model, ids[:1], a.prompt)
    apart, lost = (float((ours - x).abs().max()) for x in (cache_losses(model, ids[:1], a, "none", 16, 4), exact["decode"][:1]))
    cmd = f"losses on exact states are the model's own to {off:.1e} nats; with codes those of TurboQuantCache to {apart:.1e} (codes change {lost:.1e})"
    return exact, {"cmd": cmd, "passed": off < 1e-3 and apart < 2e-3 + lost / 20}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p)
    p.add_argument("--recipe", default="k3v3", choices=list(PRESETS))
    p.add_argument("--calibrate-windows", type=int, default=4, help="windows that the calibration reads, after those that are scored")
    p.add_argument("--out", required=True)
    p.set_defaults(windows=4)
    a = results.parse(p)
    began = time.time()
    scored, a.windows = a.windows, a.windows + a.calibrate_windows
    model, _, ids, _, origin = opened(a)
    print(f"{time.time() - began:.0f} s to load", flush=True)
    ids, rest = ids[:scored], ids[scored:]
    plain = {"decode": losses(model, ids, a.prompt), "steps": losses(model, ids, 0)}
    how.update(calibration=calibrate(model, rest), frequencies=[None if f is None else torch.as_tensor(f, device=ids.device) for f in layer_frequencies(_text_config(model)).by_layer])
    AttentionInterface.register("served", attention)
    AttentionMaskInterface.register("served", turboquant_mask)
    model.set_attn_implementation("served")
    exact, found = gate(model, ids, a, plain)
    print(found, f"{time.time() - began:.0f} s", flush=True)
    if not found["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")
    todo = [(protocol, "TurboQuantCache", False, *x) for protocol in plain for x in CACHES] + [(protocol, "engine", *x) for x in CASES for protocol in plain]
    rows = []
    for protocol, by, transforms, mean, recent, first in todo:
        if time.time() - began > a.seconds:
            raise SystemExit("out of time; what is measured is saved")
        prompt = a.prompt if protocol == "decode" else 0
        how.update(bits=PRESETS[a.recipe], transforms=transforms, mean=mean, recent=recent, first=first, prompt=prompt)
        cached = by == "TurboQuantCache" and protocol == "decode"
        loss = cache_losses(model, ids, a, mean, recent, first) if cached else losses(model, ids, prompt)
        more = loss - exact[protocol]
        rows.append(dict(protocol=protocol, by=by, recipe=a.recipe, transforms=transforms, mean=mean, recent=recent, first=first, percent=100 * (float(more.mean().exp()) - 1),
                         stderr=100 * float(more.std()) / len(more) ** 0.5, ppl=float(exact[protocol].mean().exp()), more=[round(x, 6) for x in more.tolist()], n=len(more), tokens=a.length,
                         prompt=prompt, unit="% of perplexity"))  # fmt: skip
        print(rows[-1], flush=True)
        results.write(a, "served", rows, found, origin, {"id": a.data_id, "n": len(ids)}, [])
    print(f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
