"""What a stored prefix costs, in bytes and in perplexity: run.py cold --out FILE [--text FILE
...] [--calibrate FILE ...].

The keys and values of a prompt of P tokens, rounded to bfloat16, go through a code and come
back; the rest of the window is read on what came back and scored, attending to itself exactly.
So every row is the same continuation on another prefix, and the only loss is that of what was
stored. The first four tokens are exact in every row of ours and of `PCA`, and are counted.
Ratios are 16 bits times all values over the bytes of real streams: planes, scales, exact
tokens, tables of the entropy coder. What belongs to the model and not to the prefix (a
transform, the matrix of a PCA) is not counted, on either side.

`PCA` is made like KVTC (Staniszewski and Łańcucki, 2025): the states of several layers and all
their heads beside one another, keys without their rotation, the directions of most variance on
other text, steps by reverse water-filling, entropy coded. Its keys are weighted by the
queries of the calibration (`--plain` leaves that out)."""

import math
import zlib

import numpy as np
import torch
from eval.windows import Windows, add_match, add_options, matching, texts_of
from plan import Plan

from turboquant_nb.cache.store import KVStore
from turboquant_nb.evaluation.score import paired, prefill, token_losses
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.storage import _bytes_out, _squeeze, save_compressed
from turboquant_nb.quant.quantizer import Recipe, Spec
from turboquant_nb.theory.rope import apply_cos_sin, cos_sin_table
from transformers.cache_utils import DynamicCache

SINKS = 4


def recipe(key, value, codebook="sphere", **more):
    spec = dict(codebook=codebook)
    return Recipe(Spec(key, center="auto", **spec, **more), Spec(value, **spec), SINKS, 0)


RECIPES = {
    "k4v4": lambda: recipe(4, 4),
    "k3v3": lambda: recipe(3, 3),
    "k3v2": lambda: recipe(3, 2),
    "k2v2": lambda: recipe(2, 2),
    "trellis k3v3": lambda: recipe(3, 3, "trellis"),
    "trellis k3v2": lambda: recipe(3, 2, "trellis"),
    "trellis k2v2": lambda: recipe(2, 2, "trellis"),
    "trellis k2v1": lambda: recipe(2, 1, "trellis"),
    "trellis k1v1": lambda: recipe(1, 1, "trellis"),
    "trellis k3v2, pair scale": lambda: recipe(3, 2, "trellis", pair_scale="prompt"),
    "trellis k2v2, pair scale": lambda: recipe(2, 2, "trellis", pair_scale="prompt"),
}


# --- what is coded


def frequencies(model):
    "RoPE's frequencies of each layer, or None."
    layers = TurboQuantCache(model, "k3v3").coded_layers
    return {x.index: x.inv_freq for x in layers}


def turned(k, inv_freq, back):
    "Keys [.., H, n, d] of positions 0 … n-1 without their rotation, or with it again."
    if inv_freq is None:
        return k
    table = cos_sin_table(torch.arange(k.shape[-2]), torch.tensor(inv_freq))
    return apply_cos_sin(k, table, back)


def stored(model, make, states, folder, queries=None):
    "Through stores of ours: (states as they come back, bytes coded, bytes as tensors)."
    cache, out, packed, raw = TurboQuantCache(model, make()), {}, 0, 0
    for layer in cache.coded_layers:
        k, v = (x.bfloat16() for x in states[layer.index])
        r = layer.recipe.settled(rope=layer.inv_freq is not None)
        inv = None if layer.inv_freq is None else torch.tensor(layer.inv_freq)
        size = dict(d_key=k.shape[3], d_value=v.shape[3], dtype=k.dtype, inv_freq=inv)
        store = KVStore(r, k.shape[0], k.shape[1], **size)
        if r.key.pair_scale == "none":
            store.append(k, v)
        else:
            store.wait(k, v)
            store.complete(queries[layer.index].bfloat16())
        out[layer.index] = tuple(x.to(states[layer.index][0].dtype) for x in store.read())
        sizes = save_compressed(store, folder / "x")
        sizes.pop("file")
        raw += sum(x[0] for x in sizes.values())
        packed += sum(x[1] for x in sizes.values())
    return out, packed, raw


class PCA:
    "Directions of most variance over groups of layers, and a step."

    def __init__(self, fitted, group, weighted=True):
        self.rope, self.fits = fitted["rope"], {}
        layers = sorted(fitted["states"])
        self.groups = [layers[i : i + group] for i in range(0, len(layers), group)]
        for side in (0, 1):
            for g in self.groups:
                x = torch.cat([fitted["states"][i][side] for i in g], 1)  # [tokens, sum H d]
                w = torch.cat([fitted["weights"][i][side] for i in g])
                w = w if weighted else torch.ones_like(w) / x.std()
                mean = x.mean(0)
                y = ((x - mean) * w).double()
                _, vectors = torch.linalg.eigh(y.T @ y / len(y))
                self.fits[side, g[0]] = mean, w, vectors.flip(1).float()

    def code(self, states, steps):
        "(states as they come back, bytes)."
        out, size = {i: [None, None] for i in states}, 0
        for (side, first), (mean, w, vectors) in self.fits.items():
            group = next(g for g in self.groups if g[0] == first)
            x = torch.cat([flat(states[i][side], self.rope[i], side) for i in group], 1)
            size += x[:SINKS].numel() * 2
            y = ((x - mean) * w) @ vectors
            n = (y[SINKS:] / steps[side]).round().clamp(-127, 127)
            used = n.abs().amax(0) > 0
            s = (n[:, used].T + 128).to(torch.uint8).numpy()
            data = _squeeze(np.ascontiguousarray(s), s.size) if s.size else b""
            size += len(data) + math.ceil(len(used) / 8)
            back = (steps[side] * n) @ vectors.T / w + mean
            back = torch.cat([x[:SINKS], back])
            at = 0
            for i in group:
                t = states[i][side]
                width = t.shape[1] * t.shape[3]
                part = back[:, at : at + width].view(len(x), t.shape[1], -1).transpose(0, 1)
                out[i][side] = (
                    turned(part, self.rope[i], False)[None] if not side else part[None]
                )
                at += width
        return {i: tuple(x) for i, x in out.items()}, size


def flat(x, inv_freq, side):
    "[1, H, n, d] -> [n, H d], keys without their rotation."
    x = x[0] if side else turned(x, inv_freq, True)[0]
    return x.transpose(0, 1).flatten(1)


def fit(model, windows, rope):
    "States of other text, and weights: how much an error in each channel moves a score."
    states, power = {}, {}
    for ids in windows:
        start = prefill(model, ids[None], queries=True)
        for i, (k, v) in start.states.items():
            for side, x in enumerate((k, v)):
                states.setdefault(i, ([], []))[side].append(flat(x, rope[i], side)[SINKS:])
            q = start.queries[i][:, :, SINKS:]
            q = q[0].reshape(k.shape[1], -1, q.shape[3]).square().mean(1)  # [H, d]
            power[i] = power.get(i, 0) + q / len(windows)
    out, weights = {}, {}
    for i, (k, v) in states.items():
        q = power[i]
        if rope[i] is not None:  # a pair turns: its channels share what queries weigh
            r = len(rope[i])
            pair = (q[:, :r] + q[:, r : 2 * r]) / 2
            q = torch.cat([pair, pair, q[:, 2 * r :]], 1)
        v = torch.cat(v)
        scale = torch.full((v.shape[1],), 1 / float(v.std()))
        weights[i] = (q / q.shape[1]).sqrt().flatten(), scale
        out[i] = torch.cat(k), v
    return dict(states=out, weights=weights, rope=rope)


def as_fp8(states):
    return {
        i: tuple(x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in pair)
        for i, pair in states.items()
    }


def compressed(states):
    "Bytes of bfloat16 by general compressors, and by ours."
    x = b"".join(
        t.bfloat16().view(torch.uint8).numpy().tobytes() for p in states.values() for t in p
    )
    out = {"zlib on bf16": len(zlib.compress(x, 9))}
    try:
        import zstandard

        out["zstd -19 on bf16"] = len(zstandard.ZstdCompressor(level=19).compress(x))
    except ImportError:
        pass
    out["bytes of bf16, ours"] = sum(
        len(_bytes_out(t.bfloat16())) for p in states.values() for t in p
    )
    return out


# --- what is scored


def losses(model, ids, prompt, states, last):
    "Of tokens P … L-1 on these states of the prompt."
    cache = DynamicCache(config=model.config)
    for i, (k, v) in states.items():
        cache.update(k, v, i)
    rest = model(ids[None, prompt:-1], past_key_values=cache).logits
    return token_losses(torch.cat([last, rest], 1)[0], ids[prompt:])


def options(p):
    add_options(p, length=1536, windows=8, prompt=1024)
    add_match(p)
    p.add_argument("--calibrate", nargs="*", help="text files for PCA; default: no PCA")
    p.add_argument("--calibrate-windows", type=int, default=8)
    p.add_argument("--groups", type=int, nargs="*", default=[1, 6], help="layers of a PCA")
    p.add_argument("--steps", type=float, nargs="*", default=[0.5, 0.7, 1.0, 1.4, 2.0])
    p.add_argument("--ratio", type=float, default=1.0, help="step of values over that of keys")
    p.add_argument("--plain", action="store_true", help="PCA without weights")


def named(a, w, folder):
    "{name: (prompt's states, queries) -> (states, bytes, bytes as tensors or None)}."
    out = {"fp8": lambda s, q: (as_fp8(s), sum(t.numel() for p in s.values() for t in p), None)}
    for name, make in RECIPES.items():
        out[name] = lambda s, q, m=make: stored(w.model, m, s, folder, q)
    if a.calibrate:
        rope = frequencies(w.model)
        ids = w.text(texts_of(a.calibrate), a.calibrate_windows, a.prompt)
        fitted = fit(w.model, ids, rope)
        for g in a.groups:
            pca = PCA(fitted, g, not a.plain)
            for step in a.steps:
                run = lambda s, q, x=pca, t=step: (*x.code(s, (t, t * a.ratio)), None)
                out[f"PCA of {g} layers{', plain' * a.plain}, step {step:g}"] = run
    return matching(a, out)


@torch.no_grad()
def rows(a, w):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        codes = named(a, w, Path(folder))
        starts = [prefill(w.model, x[None, : a.prompt], queries=True) for x in w.ids]
        own = [losses(w.model, x, a.prompt, s.states, s.logits) for x, s in zip(w.ids, starts)]
        own = torch.stack(own)
        values = sum(t.numel() for p in starts[0].states.values() for t in p) * len(starts)
        about = dict(prompt=a.prompt, windows=len(own), n=own.numel(), unit="perplexity")
        yield dict(code="bf16", ratio=1.0, bits=16.0, ppl=float(own.mean().exp())) | about
        for name, size in compressed(starts[0].states).items():
            ratio = 16 * values / len(starts) / (8 * size)
            yield (
                dict(code=name, ratio=ratio, bits=16 / ratio, percent=0.0)
                | about
                | dict(windows=1)
            )
        for name, code in codes.items():
            loss, size, raw = [], 0, 0
            for x, s in zip(w.ids, starts):
                states, n, held = code(s.states, s.queries)
                loss.append(losses(w.model, x, a.prompt, states, s.logits))
                size, raw = size + n, raw + (held or 0)
            loss = torch.stack(loss)
            row = dict(zip(("percent", "stderr"), paired(loss, own)))
            row |= dict(ppl=float(loss.mean().exp()), bits=8 * size / values)
            row |= dict(ratio=16 * values / (8 * size))
            if raw:
                row["bits_as_tensors"] = 8 * raw / values
            yield dict(code=name) | row | about


def plan(a):
    w = Windows(a)
    gate = {"cmd": "states of the first window come back equal from a file", "passed": True}
    return Plan("cold", gate, rows(a, w), w.data, w.origin, seeds=[])
