"""Cases of recipe × path through the public names alone: what each holds and what it gives.

A case makes a `Held`: the bytes of its planes, its other tensors, and outputs. States are drawn
by NumPy, which gives the same numbers everywhere; where a number lies so near an edge of its
code that another order of a sum would move it, its token is drawn again (`make.py` finds
these)."""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig

from turboquant_nb import Recipe, Spec, TurboQuantCache, attend, preset
from turboquant_nb.cache.store import KVStore
from turboquant_nb.cache.disk import state_of, store_of
from turboquant_nb.hf.graphs import counted_by_device
from turboquant_nb.quant.calibration import Calibration, LayerFrame
from turboquant_nb.quant.layers import read_facts

D, HEADS, GROUP = 32, 2, 2
ANGLES = 10000.0 ** (-torch.arange(0, D, 2) / D)
CONFIG = LlamaConfig(
    hidden_size=HEADS * GROUP * D,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=HEADS * GROUP,
    num_key_value_heads=HEADS,
    head_dim=D,
    vocab_size=8,
)
MEAN, BEFORE = dict(center="fixed"), dict(center="pre_rope")
PRESETS = {name: preset(name) for name in ("k4v4", "k4v3", "k3v3", "k2v2-scalar", "k1v1")}
RECIPES = PRESETS | {
    "nothing exact": Recipe(Spec(4), Spec(2), 0, 0),
    "fixed mean": Recipe(Spec(3, **MEAN), Spec(3)),
    "pre-RoPE mean": Recipe(Spec(3, **BEFORE), Spec(3)),
    "half bits": Recipe(Spec(3.5, **BEFORE), Spec(2.5)),
    "bits by channel": Recipe(Spec((4, 2) * (D // 2)), Spec((1, 3) * (D // 2))),
    "sign": Recipe(Spec(3, residual="sign"), Spec(3)),
    "qjl": Recipe(Spec(3, residual="qjl"), Spec(3)),
    "haar": Recipe(Spec(3, rotation="haar"), Spec(3, rotation="haar", seed=3)),
    "identity": Recipe(Spec(3, rotation="identity"), Spec(3, rotation="identity")),
    "unbiased": Recipe(Spec(3, scale="unbiased"), Spec(3, scale="norm")),
    "other levels": Recipe(Spec(3), Spec(3, codebook="uniform")),
    "scales in fp32": Recipe(Spec(2, scale_dtype="float32"), Spec(4, scale_dtype="float32")),
}


def frame():
    "Means near that of the keys, and a pair scale that bf16 holds."
    gen = np.random.default_rng(58)
    mean, fixed = np.linspace(-1, 1, D) + gen.standard_normal((2, HEADS, D)) / 4
    pair = np.tile(1 + gen.integers(-64, 65, (HEADS, D // 2)) / 128, 2)
    return LayerFrame(*(torch.from_numpy(x.astype(np.float32)) for x in (mean, fixed, pair)))


FRAME = frame()
FOUND = Calibration([], {"about": read_facts(CONFIG)}, (FRAME,))


class States:
    "Keys and values of a case, [B, H, n, D] each, and queries. The mean of keys is not 0."

    def __init__(self, seed, batch, tokens, again=()):
        self.shape, self.seed = (2, batch, HEADS, tokens, D), seed
        x = np.random.default_rng(seed).standard_normal(self.shape).astype(np.float32)
        for times, side, token in again:  # drawn again, for the so manyeth time
            gen = np.random.default_rng([seed, times, side, token])
            x[side, :, :, token] = gen.standard_normal((batch, HEADS, D))
        x[0] += np.linspace(-1, 1, D, dtype=np.float32)
        self.k, self.v = (torch.from_numpy(side) for side in x)

    def moved(self, amount, seed):
        "The same states, each number moved by `amount` up or down."
        gen = np.random.default_rng([self.seed, seed])
        signs = gen.choice(np.array([-amount, amount], np.float32), self.shape)
        out = object.__new__(States)
        out.shape, out.seed = self.shape, self.seed
        out.k, out.v = self.k + torch.from_numpy(signs[0]), self.v + torch.from_numpy(signs[1])
        return out

    def cut(self, *lengths):
        "Pairs of keys and values, one after the other."
        ends = np.cumsum(lengths)
        for first, last in zip([0, *ends], ends):
            yield self.k[:, :, first:last], self.v[:, :, first:last]

    def queries(self, n=1):
        x = np.random.default_rng([self.seed, 7]).standard_normal(
            (self.shape[1], HEADS * GROUP, n, D)
        )
        return torch.from_numpy(x.astype(np.float32))


# Paths of a store: (store, states) -> outputs by name
# ---------------------------------------------


def prefill(make, s):
    store = make()
    store.append(s.k, s.v)
    return store, {}


def chunks(make, s):
    store, n = make(), s.shape[3]
    for k, v in s.cut(n // 2, n // 3, n - n // 2 - n // 3):
        store.append(k, v)
    return store, {}


def steps(make, s):
    store, n = make(), s.shape[3]
    for k, v in s.cut(n - 12, *[1] * 12):
        store.append(k, v)
    return store, {}


def crop(make, s):
    store, n = make(), s.shape[3]
    parts = [*s.cut(n - 12, 12)]
    store.append(*parts[0])
    store.crop(8)
    before = store.read()
    store.append(*parts[1])
    return store, dict(zip(("cropped keys", "cropped values"), before))


def beams(make, s):
    store, n = make(), s.shape[3]
    parts = [*s.cut(n - 4, 4)]
    store.append(*parts[0])
    store.select(torch.tensor([1, 0]))
    store.append(*parts[1])
    return store, {}


def static(make, s):
    store, n = make(), s.shape[3]
    parts = [*s.cut(n - 2, 1, 1)]
    store.append(*parts[0])
    store = counted_by_device(store, 512)
    for k, v in parts[1:]:
        store.append(k, v)
    return store, {}


def saved(make, s):
    store, n = make(), s.shape[3]
    parts = [*s.cut(n - 4, 4)]
    store.append(*parts[0])
    store = store_of(*state_of(store))
    store.append(*parts[1])
    return store, {}


PATHS = dict(
    prefill=prefill,
    chunks=chunks,
    steps=steps,
    crop=crop,
    beams=beams,
    static=static,
    saved=saved,
)


def attended(store, s, backend):
    "Outputs and log-sum-exps of a token's and a chunk's queries, by one backend."
    out = {}
    calls = {"one": {}, "window": dict(sliding_window=40), "softcap": dict(softcap=5.0)}
    if backend == "torch":
        calls["four"] = {}
    for name, how in calls.items():
        q = s.queries(4 if name == "four" else 1)
        out[f"{name}, output"], out[f"{name}, lse"] = attend(q, store, backend=backend, **how)
    return out


# Paths of a cache: what `update` returns, one layer
# -----------------------------------------------


def cache_prefill(cache, s):
    return cache, dict(zip(("keys", "values"), cache.update(s.k, s.v, 0)))


def cache_steps(cache, s):
    for k, v in s.cut(s.shape[3] - 6, *[1] * 6):
        out = cache.update(k, v, 0)
    return cache, dict(zip(("keys", "values"), out))


def cache_drafts(cache, s):
    "A pass of four tokens of which one is kept, then another of four."
    parts = [*s.cut(s.shape[3] - 8, 4, 4)]
    for k, v in parts[:2]:
        cache.update(k, v, 0)
    cache.crop(-3)
    return cache, dict(zip(("keys", "values"), cache.update(*parts[2], 0)))


def cache_beams(cache, s):
    parts = [*s.cut(s.shape[3] - 1, 1)]
    cache.update(*parts[0], 0)
    cache.reorder_cache(torch.tensor([1, 1]))
    return cache, dict(zip(("keys", "values"), cache.update(*parts[1], 0)))


def cache_saved(cache, s):
    parts = [*s.cut(s.shape[3] - 1, 1)]
    cache.update(*parts[0], 0)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache.safetensors")
        cache = TurboQuantCache.load(Path(folder) / "cache.safetensors", CONFIG)
    return cache, dict(zip(("keys", "values"), cache.update(*parts[1], 0)))


CACHE_PATHS = dict(
    prefill=cache_prefill,
    steps=cache_steps,
    drafts=cache_drafts,
    beams=cache_beams,
    saved=cache_saved,
)


def of_store(recipe, path, backend="", tokens=80):
    def run(s):
        turns = recipe.settled(FRAME).key.centre.rotates
        more = dict(inv_freq=ANGLES if turns else None, frame=FRAME)
        make = lambda: KVStore(recipe, s.shape[1], HEADS, D, **more)
        store, out = PATHS[path](make, s)
        keys, values = store.read()
        out |= {"keys": keys, "values": values}
        if backend:
            out |= attended(store, s, backend)
        return state_of(store)[0], out, store.nbytes

    return run, tokens


def of_cache(recipe, path, tokens=80, **how):
    def run(s):
        cache = TurboQuantCache(CONFIG, recipe, frame=FOUND, **how)
        cache, out = CACHE_PATHS[path](cache, s)
        return [state_of(x.store) for x in cache.coded_layers], out, None

    return run, tokens


def all_cases():
    "name -> (function of states -> (tensors held, outputs, bytes), tokens)."
    for name, recipe in RECIPES.items():
        if name == "fixed mean":
            yield f"{name}, prefill, torch", of_store(recipe, "prefill", "torch")
        else:
            yield f"{name}, prefill", of_store(recipe, "prefill", "auto")
    for name in ("k3v3", "half bits"):
        for path in PATHS:
            if path != "prefill":
                yield f"{name}, {path}", of_store(RECIPES[name], path)
        yield f"{name}, prefill, torch", of_store(RECIPES[name], "prefill", "torch")
    yield "k3v3, two tiles", of_store(RECIPES["k3v3"], "chunks", "auto", tokens=300)
    for path in CACHE_PATHS:
        yield f"k3v3, cache, {path}", of_cache("k3v3", path)
    how = dict(static=True, max_length=256)
    yield "k3v3, cache, static", of_cache("k3v3", "steps", **how)
    yield "qjl, cache, steps", of_cache(RECIPES["qjl"], "steps")
    yield "k4v4, cache, steps", of_cache("k4v4", "steps")


CASES = dict(all_cases())
INTERPRETED = {  # in Triton's interpreter, on the states of another case
    f"{name}, interpreter, {path}": (run, twin)
    for name in ("k3v3", "k4v4")
    for path, run, twin in (
        ("prefill", of_store(RECIPES[name], "prefill", "triton")[0], f"{name}, prefill"),
        ("cache", of_cache(name, "steps", backend="triton")[0], f"{name}, cache, steps"),
    )
}


def states(name, seed, again=()):
    "The states of a case."
    name = INTERPRETED[name][1] if name in INTERPRETED else name
    return States(seed, 1 if "two tiles" in name else 2, CASES[name][1], again)


# What is compared
# ---------------------------------------------------------------------------------


def tensors_in(x):
    "All tensors of nested dictionaries, lists and tuples."
    if isinstance(x, torch.Tensor):
        return [x.detach().cpu().contiguous()]
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [t for y in inner for t in tensors_in(y)]


def planes(held):
    "One digest of all planes of bits: their bytes, whatever they are called, in any order."
    each = sorted(
        hashlib.sha256(t.numpy().tobytes()).hexdigest()
        for t in tensors_in(held)
        if t.dtype == torch.uint8
    )
    return hashlib.sha256("".join(each).encode()).hexdigest()[:16]


def norms(held):
    "[dtype, numbers, norm] of all other tensors: scales, means, exact tokens."
    return sorted(
        [str(t.dtype).removeprefix("torch."), t.numel(), float(t.double().norm())]
        for t in tensors_in(held)
        if t.is_floating_point() and t.numel()
    )


def sketch(x):
    "The norm of a tensor and its products with four random vectors over that norm."
    x = x.detach().double().flatten().numpy()
    norm = float(np.linalg.norm(x))
    lines = np.random.default_rng(x.size).standard_normal((4, x.size))
    return [norm, *(float(y) for y in lines @ x / norm)]


def result(run, s):
    "What a golden holds of a case."
    held, out, nbytes = run(s)
    return {
        "planes": planes(held),
        "held": norms(held),
        "bytes": nbytes,
        "outputs": {name: sketch(x) for name, x in out.items()},
    }
