"""What is measured: the shapes of every bench in one place, and random states of a shape."""

from typing import NamedTuple

import torch

from turboquant_nb.quant.calibration import Calibration, LayerFrame
from turboquant_nb.quant.layers import read_facts
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.cache.store import KVStore
from turboquant_nb.kernels import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # of models


def wait():
    "Until the GPU has done what it was told, where there is one."
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Shape(NamedTuple):
    "Attention of one new token."

    batch: int
    heads: int  # KV heads
    group: int  # query heads for each
    d: int  # head size
    tokens: int


class Context(NamedTuple):
    "A whole model's cache."

    batch: int
    tokens: int


DECODE = [
    Shape(*s)
    for s in (
        (8, 8, 4, 128, 32768),
        (1, 8, 4, 128, 131072),
        (64, 8, 4, 128, 4096),
        (8, 8, 3, 64, 32768),
        (8, 8, 4, 256, 32768),
        (8, 8, 1, 128, 32768),
        (8, 8, 7, 128, 32768),
        (8, 8, 8, 128, 32768),
        (1, 8, 4, 128, 1024),
        (8, 8, 4, 80, 32768),
        (8, 8, 4, 112, 32768),
        (1, 8, 8, 128, 32768),
        (1, 8, 4, 128, 2048),
        (1, 8, 4, 128, 4096),
        (1, 8, 4, 128, 16384),
        (8, 8, 4, 128, 4096),
        (8, 8, 4, 128, 1024),
        (8, 8, 6, 128, 32768),
        (8, 4, 8, 64, 32768),
    )
]
CASES = {  # bench, or bench and those of its cases
    "decode_kernel": DECODE,
    "generate": [
        Context(*c)
        for c in (
            (8, 32768),
            (4, 131072),
            (1, 8192),
            (8, 8192),
            (1, 4096),
            (1, 32768),
            (8, 131072),
            (1, 131072),
        )
    ],
    "generate, transformers' caches": [Context(1, 8192), Context(8, 8192), Context(8, 32768)],
}


def frequencies(d):
    "Of RoPE, base 10,000."
    return 10000.0 ** (-torch.arange(0, d, 2) / d)


def frame(heads, d):
    "A layer's frame of random numbers, as a model's keys with RoPE have one."
    g = torch.Generator().manual_seed(d)
    mean, fixed, pair = torch.randn(3, heads, d, generator=g)
    pair[:, d // 2 :] = pair[:, : d // 2]
    return LayerFrame(mean, fixed, (pair / 2).exp2(), frequencies(d))


def frames(config):
    "Such frames for all layers of a Llama."
    layers = range(config.num_hidden_layers)
    each = [frame(config.num_key_value_heads, config.head_dim) for _ in layers]
    header = {"about": read_facts(config), "tokens": 0, "gain": []}
    return Calibration([], header, tuple(each))


def states(shape: Shape, dtype=torch.bfloat16, outlier=False, seed=0):
    """Random query [batch, heads * group, 1, d] and keys and values [batch, heads, tokens, d]
    on the GPU."""
    batch, heads, group, d, tokens = shape
    g = torch.Generator(DEVICE).manual_seed(seed)
    make = lambda *size: torch.randn(*size, generator=g, device=DEVICE, dtype=dtype)
    q, k, v = (
        make(batch, heads * group, 1, d),
        make(batch, heads, tokens, d),
        make(batch, heads, tokens, d),
    )
    if outlier:
        q[..., 0] *= 1000
        v[:, :, tokens // 2] *= 1000
    return q, k, v


def filled(k, v, k_bits, v_bits, center="fixed", room=None):
    """A store that holds the codes of k and v, as a cache with recipe k{bits}v{bits} does, with
    room for more tokens if `room` says so."""
    recipe = Recipe(key=Spec(bits=k_bits, center=center), value=Spec(bits=v_bits))
    return held(recipe, k, v, room or k.shape[2])


def held(recipe, k, v, room=None, **kind):
    "A store that holds the codes of k and v by any recipe; without `room` it grows."
    batch, heads, tokens, d = k.shape
    more = kind | dict(inv_freq=frequencies(d), frame=frame(heads, d))
    store = KVStore(recipe, batch, heads, d, d, k.dtype, k.device, max_length=room, **more)
    step = max(256, 2**21 // (batch * d))  # whatever the heads
    for i in range(0, tokens, step):
        ops.append(store, k[:, :, i : i + step], v[:, :, i : i + step])
    return store
