"""What a stored prefix costs, in bytes and in perplexity: run.py cold --out FILE [--text FILE
...] [--calibrate FILE ...].

The keys and values of a prompt of P tokens, rounded to bfloat16, go through a code and come
back; the rest of the window is read on what came back and scored, attending to itself exactly.
So every row is the same continuation on another prefix, and the only loss is that of what was
stored. The first four tokens are exact in every row of ours and are counted. Ratios are 16 bits
times all values over the bytes of real streams: planes, scales, exact tokens, tables of the
entropy coder. What belongs to the model and not to the prefix (the matrices of small files) is
not counted.

Rows of the unit "GB/s" say how fast streams are written and read, in memory, a second of the
processor's time: bytes of the stream, and what they stand for in bf16.

"chunks" are those of an engine's tier (chapter 78), 256 tokens of all layers that know nothing
of one another.

"small" is chapter 63, made like KVTC (Staniszewski and Łańcucki, 2025): the directions of most
variance over the heads of some layers, on other text, entropy coded. "k3v3, then small" is the
prefix of a cache that was coded before. "KVTC's way" is the paper's: all layers and heads of a
side at once, unweighted, whole bits for each direction by the variance of other text, DEFLATE;
steps are those of the best uniform quantiser of a normal value. Its 128 exact recent tokens, an
eighth of such a prompt, are left out. "CacheGen" has the steps of LMCache: by token, 32 in the
keys of the first 10 layers and the values of 2, 16 behind; each channel is entropy coded by our
coder."""

import io
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from bench.timing import Clock, quantiles
from eval.windows import Windows, add_match, add_options, matching, texts_of
from plan import Plan

from turboquant_nb.cache.codec import KVStore, Reader, Writer
from turboquant_nb.cache.rows import squeeze
from turboquant_nb.calibration.small import _flat, _heads, fit_small, read_small, save_small
from turboquant_nb.evaluation.score import paired, prefill, token_losses
from turboquant_nb.hf import ModelInfo, TurboQuantCache
from turboquant_nb.hf.storage import save_compressed
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.serving.lmcache import ChunkCodec
from transformers.cache_utils import DynamicCache

SINKS = 4
LONG = 16  # times a prompt, where streams are timed


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


CHUNKS = {
    "no mean": lambda r: dict(recipe=r("none"), first=SINKS),
    "own mean": lambda r: dict(recipe=r("prompt_mean"), first=SINKS),
    "before RoPE": lambda r: dict(recipe=r("pre_rope"), first=SINKS),
    "before RoPE, no exact tokens": lambda r: dict(recipe=r("pre_rope"), first=0),
}


# --- what is coded


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


def chunked(model, bits, how, states, tokens=256):
    "Through an engine's chunks, layers of one RoPE together: (states, bytes)."
    make = lambda centre: Recipe(Spec(bits, center=centre), Spec(bits))
    layers, groups, parts, size = ModelInfo(model).layers, {}, {i: [] for i in states}, 0
    for i, (k, _) in states.items():
        groups.setdefault((layers[i].inv_freq, k.shape), []).append(i)
    for (inv, (_, _, n, d)), group in groups.items():
        codec = ChunkCodec(head_size=d, inv_freq=inv, **CHUNKS[how](make))
        for a in range(0, n, tokens):
            x = [[s[:, :, a : a + tokens] for s in states[i]] for i in group]
            x = torch.stack([torch.cat(side) for side in zip(*x)]).transpose(2, 3)
            x = x.flatten(3).bfloat16().contiguous()
            data, back = codec.encode([x]), torch.empty_like(x)
            codec.decode(data, [back])
            size += len(data)
            back = back.unflatten(3, (-1, d)).transpose(2, 3)
            for i, pair in zip(group, back.unbind(1)):
                parts[i].append(pair)
    out = {i: torch.cat(x, 2)[:, None] for i, x in parts.items()}
    return {i: tuple(x.to(states[i][0].dtype)) for i, x in out.items()}, size


def small(model, code, states, step, folder, dtype=torch.bfloat16):
    "Through a small file: (states as they come back, bytes)."
    cache = DynamicCache(config=model.config)
    for layer, (k, v) in zip(cache.layers, states.values()):
        layer.keys, layer.values = k.to(dtype), v.to(dtype)
    size = save_small(cache, folder / "x", code, step, SINKS)["nbytes"]
    back = {i: (k, v) for i, k, v in read_small(folder / "x", code)}
    return {i: tuple(x.to(states[i][0].dtype) for x in back[i]) for i in states}, size


def cachegen(states):
    "(states, bytes) of CacheGen's steps."
    out, size = {}, 0
    for n, (i, pair) in enumerate(states.items()):
        sides = []
        for x, fine in zip(pair, (10, 2)):
            most = (32 if n < fine else 16) // 2 - 1
            rows = x.transpose(1, 2).flatten(2)[0]  # [tokens, channels]
            top = rows.abs().amax(1, keepdim=True).half().to(x.dtype).clamp(min=1e-6)
            steps = (rows * (most / top)).round().clamp(-most, most)
            symbols = (steps + most).to(torch.uint8).T.contiguous().numpy()
            size += len(squeeze(symbols, 2**62)) + 2 * len(rows)
            back = (steps / most * top).unflatten(1, (x.shape[1], -1))
            sides.append(back.transpose(0, 1)[None])
        out[i] = tuple(sides)
    return out, size


# of the best uniform quantiser of a standard normal value (J. Max, 1960), by bits from 1 on
UNIFORM = torch.tensor([1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308])


class KVTC:
    "Directions of most variance over all heads and layers of a side; bits for each."

    def __init__(self, model, ids):
        layers = ModelInfo(model).layers
        inv = {x.index: x.inv_freq for x in layers}
        self.inv = {i: None if f is None else torch.tensor(f) for i, f in inv.items()}
        states = [prefill(model, x[None]).states for x in ids]
        self.bases = [self._basis(states, side) for side in range(2)]

    def _rows(self, states, side):  # [tokens, channels] of all layers
        inv = (lambda i: None) if side else self.inv.get
        return torch.cat([_flat(pair[side], inv(i)) for i, pair in states.items()], 1)

    def _basis(self, states, side):
        x = torch.cat([self._rows(s, side)[SINKS:] for s in states])
        mean = x.mean(0)
        var, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
        return mean, var.flip(0).clamp(min=1e-12), vectors.flip(1)

    def coded(self, states, bits):
        "(states, bytes) at so many bits of a value before DEFLATE."
        values = sum(x.shape[1] * x.shape[3] for p in states.values() for x in p)
        size, sides = 2 * SINKS * values, []
        for side, (mean, var, vectors) in enumerate(self.bases):
            x, low, high = self._rows(states, side), -60.0, 60.0
            for _ in range(60):  # the water's level, by halves
                level = (low + high) / 2
                each = (var.log2() / 2 - level).round().clamp(0, 8).long()
                low, high = (level, high) if each.float().mean() > bits else (low, level)
            used = each > 0
            step = UNIFORM[each[used] - 1] * var[used].sqrt()
            most = 2 ** (each[used] - 1)
            y = ((x[SINKS:] - mean) @ vectors)[:, used] / step
            whole = y.floor().clamp(-most, most - 1) + most
            planes = [
                np.unpackbits(c[:, None], axis=1)[:, 8 - int(b) :].reshape(-1)
                for c, b in zip(whole.to(torch.uint8).T.numpy(), each[used])
            ]
            size += len(zlib.compress(np.packbits(np.concatenate(planes)).tobytes(), 9))
            back = ((whole - most + 0.5) * step) @ vectors[:, used].T + mean
            sides.append(torch.cat([x[:SINKS], back]))
        out, at = {i: [] for i in states}, [0, 0]
        for i, pair in states.items():
            for side, t in enumerate(pair):
                c = t.shape[1] * t.shape[3]
                part = sides[side][:, at[side] : at[side] + c]
                at[side] += c
                inv = None if side else self.inv[i]
                out[i].append(_heads(part, t.shape[1], inv).to(t.dtype))
        return {i: tuple(x) for i, x in out.items()}, size


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
    tensors = [t.bfloat16().contiguous() for p in states.values() for t in p]
    out["bytes of bf16, by our coder"] = sum(map(squeezed_size, tensors))
    return out


def squeezed_size(t):
    "Bytes of a bf16 tensor [B, H, n, d]: low and high bytes apart, tables shared by heads."
    x = t.view(torch.uint8).numpy().reshape(t.shape[0] * t.shape[1], -1, 2)
    columns = [np.ascontiguousarray(x[..., i]) for i in range(2)]
    return sum(len(squeeze(c, c.size) or c.tobytes()) for c in columns)


# --- how fast


def in_memory(states, header, entropy):
    "The stream of a cache's layers."
    file = io.BytesIO()
    writer = Writer(file, header, entropy=entropy)
    for state in states:
        writer.layer(*state)
    writer.close()
    return file.getvalue()


def processor_times(f, repeats):
    "Seconds of the processor, whatever else it does; the first call warms up."
    out = []
    for _ in range(repeats + 1):
        with Clock() as clock:
            f()
        out.append(clock.cpu)
    return out[1:]


def speeds(a, model, states, folder, code=None, step=0.7):
    """Rows: a prompt's cache of k3v3 by both exact grades, and the prompt by a small file; the
    faster grade with the prompt many times over, too."""
    exact, ways = DynamicCache(config=model.config), {}
    for entropy, often, name in (
        (False, 1, "k3v3, fixed size"),
        (False, LONG, "k3v3, fixed size"),
        (True, 1, "k3v3, entropy coded"),
    ):
        cache = TurboQuantCache(model, RECIPES["k3v3"]())
        for i, pair in states.items():
            cache.update(*(x.bfloat16().repeat(1, 1, often, 1) for x in pair), i)
            exact.layers[i].keys, exact.layers[i].values = (x.bfloat16() for x in pair)
        about = cache.states()
        data = in_memory(*about, entropy)
        write = lambda x=about, e=entropy: in_memory(*x, e)
        read = lambda x=data: [*Reader(io.BytesIO(x), size=len(x)).layers()]
        ways[name, often * a.prompt] = len(data), write, read
    if code:
        path = folder / "x"
        write = lambda: save_small(exact, path, code, step, SINKS)
        size, read = write()["nbytes"], lambda: [*read_small(path, code)]
        ways[f"small, step {step:g}", a.prompt] = size, write, read
    values = sum(x.numel() for pair in states.values() for x in pair) / a.prompt
    for (name, tokens), (size, write, read) in ways.items():
        for way, run in (("written", write), ("read", read)):
            gbs = [size / 1e9 / t for t in processor_times(run, a.repeat)]
            row = dict(code=name, way=way, tokens=tokens, n=a.repeat, unit="GB/s")
            row |= quantiles(gbs)
            yield row | dict(of_bf16=row["p50"] * 2 * values * tokens / size)


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
    p.add_argument("--calibrate", nargs="*", help="other text, for small files; default: none")
    p.add_argument("--calibrate-windows", type=int, default=8)
    p.add_argument("--groups", type=int, nargs="*", default=[1, 6], help="layers of a group")
    p.add_argument("--repeat", type=int, default=5, help="how often a stream is timed")
    p.add_argument("--steps", type=float, nargs="*", default=[0.35, 0.5, 0.7, 1.0, 1.4])
    p.add_argument("--bits", type=float, nargs="*", default=[], help="of rows of KVTC's way")


def named(a, w, folder):
    """({name: (prompt's states, queries) -> (states, bytes, bytes as tensors or None)}, a code
    of small files or None)."""
    code = None
    out = {"fp8": lambda s, q: (as_fp8(s), sum(t.numel() for p in s.values() for t in p), None)}
    out["CacheGen"] = lambda s, q: (*cachegen(s), None)
    if a.bits:
        ids = w.text(texts_of(a.calibrate), a.calibrate_windows, a.prompt)
        kvtc = KVTC(w.model, ids)
        for bits in a.bits:
            out[f"KVTC's way, {bits:g} bits"] = lambda s, q, b=bits: (*kvtc.coded(s, b), None)
    for name, make in RECIPES.items():
        out[name] = lambda s, q, m=make: stored(w.model, m, s, folder, q)
    for how in CHUNKS:
        for bits in (3, 2):
            run = lambda s, q, b=bits, h=how: (*chunked(w.model, b, h, s), None)
            out[f"chunks k{bits}v{bits}, {how}"] = run
    for g in a.groups if a.calibrate else ():
        ids = w.text(texts_of(a.calibrate), a.calibrate_windows, a.prompt)
        code = fit_small(w.model, ids, g, SINKS, w.batch)
        for step in a.steps:
            run = lambda s, q, c=code, t=step: (*small(w.model, c, s, t, folder), None)
            out[f"small, {g} layers, step {step:g}"] = run
        twice = lambda s, q, c=code: (
            *small(w.model, c, stored(w.model, RECIPES["k3v3"], s, folder)[0], 0.7, folder),
            None,
        )
        out[f"k3v3, then small, {g} layers, step 0.7"] = twice
    return matching(a, out), code


@torch.no_grad()
def rows(a, w):
    with tempfile.TemporaryDirectory() as folder:
        codes, fitted = named(a, w, Path(folder))
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
        yield from speeds(a, w.model, starts[0].states, Path(folder), fitted)


@torch.no_grad()
def gate(w):
    "A prefix that was not coded gives the losses of the model without a cache."
    ids, n = w.ids[0, : 96 + 32], 96
    start = prefill(w.model, ids[None, :n])
    logits = w.model(ids[None, :-1], use_cache=False).logits[0, n - 1 :]
    own = token_losses(logits, ids[n:])
    gap = float((losses(w.model, ids, n, start.states, start.logits) - own).abs().max())
    cmd = "losses on exact states of a prefix against those of one pass"
    return {"cmd": cmd, "value": gap, "limit": 1e-3, "passed": gap < 1e-3}


def plan(a):
    w = Windows(a)
    return Plan("cold", gate(w), rows(a, w), w.data, w.origin, seeds=[])
