#!/usr/bin/env python3
"""What a served cache gives up, and what a calibration takes back: serving.py --out FILE --text FILE ... [options of recipes.py].

Every token of a window reads itself exactly, and all before it as codes, as an engine's decode steps do; perplexity against the same model on
exact states. By turns: transforms and means of a calibration (found on other windows), exact recent tokens, exact first tokens, and the mean
of the window's own tokens before RoPE with both, which is what TurboQuantCache does. States are fp32, so nothing but codes differs.

Gate: without codes the same attention gives the model's own losses."""
import argparse
import math

import torch
import torch.nn.functional as F
from recipes import add_options, opened

from turboquant_nb import results
from turboquant_nb.calibration.fit import calibrate, window_center
from turboquant_nb.hf import AttentionInterface, AttentionMaskInterface, _text_config, layer_frequencies, turboquant_mask
from turboquant_nb.quant.mixed_precision import make_quantizer
from turboquant_nb.quant.quantizer import PRESETS, Spec, decode

CASES = [  # transforms, mean, exact recent tokens, exact first tokens
    (False, "none", 0, 0), (True, "none", 0, 0), (False, "calibration", 0, 0), (True, "calibration", 0, 0),
    (False, "none", 16, 0), (False, "none", 0, 4), (False, "none", 16, 4), (True, "none", 16, 0), (False, "calibration", 16, 0),
    (True, "calibration", 16, 0), (True, "none", 16, 4), (False, "calibration", 16, 4), (True, "calibration", 16, 4),
    (False, "window", 16, 0), (False, "window", 16, 4),
]  # fmt: skip
how = {}  # what the attention below does


def mean_of(layer, key):
    if how["mean"] == "calibration":
        return how["calibration"].centers[layer][:, None]
    return window_center(key, how["frequencies"][layer], how["first"]) if how["mean"] == "window" else 0.0


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, sliding_window=None, **_):
    "Exact scores and values for a token itself, recent and first ones; codes for all others it sees."
    layer, (b, heads, n, d) = module.layer_idx, key.shape
    q = query.view(b, heads, -1, n, d) * scaling
    scores, t = q @ key[:, :, None].mT, torch.arange(n)
    exact = torch.ones(n, n, dtype=torch.bool)
    values = value
    if how["bits"]:
        transform = how["calibration"].transforms[layer].name if how["transforms"] else "hadamard"
        k_side, v_side = (make_quantizer(Spec(bits, rotation=r), d) for bits, r in zip(how["bits"], (transform, "hadamard")))
        mean = mean_of(layer, key)
        coded = decode(k_side, k_side.encode(key - mean)) + mean
        values = decode(v_side, v_side.encode(value))
        exact = (t[:, None] - t <= how["recent"]) | (t < how["first"])
        scores = torch.where(exact, scores, q @ coded[:, :, None].mT)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    hidden = (t > t[:, None]) | (t <= t[:, None] - (sliding_window or n + 1))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = (weights * exact) @ value[:, :, None] + (weights * ~exact) @ values[:, :, None]
    return out.reshape(b, -1, n, d).transpose(1, 2).contiguous(), None


def losses(model, ids):
    "Mean loss of each window."
    with torch.no_grad():
        return torch.stack([F.cross_entropy(model(x[None], use_cache=False).logits[0, :-1].float(), x[1:]) for x in ids])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p)
    p.add_argument("--recipe", default="k3v3", choices=list(PRESETS))
    p.add_argument("--calibrate-windows", type=int, default=4, help="windows that the calibration reads, after those that are scored")
    p.add_argument("--out", required=True)
    p.set_defaults(windows=4)
    a = results.parse(p)
    scored, a.windows = a.windows, a.windows + a.calibrate_windows
    model, _, ids, _, origin = opened(a)
    ids, rest = ids[:scored], ids[scored:]
    plain = losses(model, ids)
    how.update(calibration=calibrate(model, rest), frequencies=[None if f is None else torch.as_tensor(f) for f in layer_frequencies(_text_config(model)).by_layer], bits=None)
    AttentionInterface.register("served", attention)
    AttentionMaskInterface.register("served", turboquant_mask)
    model.set_attn_implementation("served")
    exact = losses(model, ids)
    off = float((exact - plain).abs().max())
    gate, rows = {"cmd": f"losses on exact states are the model's own to {off:.1e} nats", "passed": off < 1e-3}, []
    for transforms, mean, recent, first in CASES if gate["passed"] else ():
        how.update(bits=PRESETS[a.recipe], transforms=transforms, mean=mean, recent=recent, first=first)
        more = losses(model, ids) - exact
        rows.append(dict(recipe=a.recipe, transforms=transforms, mean=mean, recent=recent, first=first, percent=100 * (float(more.mean().exp()) - 1),
                         stderr=100 * float(more.std()) / len(more) ** 0.5, ppl=float(exact.mean().exp()), n=len(more), tokens=a.length, unit="% of perplexity"))  # fmt: skip
        print(rows[-1], flush=True)
        results.write(a, "served", rows, gate, origin, {"id": a.data_id, "n": len(ids)}, [])


if __name__ == "__main__":
    main()
