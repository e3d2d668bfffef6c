"""What head transforms cost on one NVIDIA GPU: decode attention and coding with a matrix for
every head (chapter transforms) against the rotation, same bits: run.py maps --out FILE.

Gate: the decode kernel agrees with attention.attend on the same codes to 1e-3, and the encode
kernel gives the codes of PyTorch but for ties, both with head transforms. Then medians with
20th and 80th percentiles: whole attention as a cache calls it, launched from Python and
replayed from a CUDA graph; long appends; short appends in a graph."""

from functools import partial

import torch
from bench.cases import CASES, Append, Shape, filled, frequencies, states
from bench.encode_kernel import graph_times
from plan import Plan
from bench.timing import both_launches, kernel_times, quantiles

from turboquant_nb.cache.attention import attend
from turboquant_nb.kernels import append, encode_launch
from turboquant_nb.kernels.launch import decode_attention
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.cache.store import KVStore


def random_transform(heads, d):
    "Matrices that are no rotations."
    u, v = torch.linalg.qr(
        torch.randn(2, heads, d, d, generator=torch.Generator().manual_seed(d))
    )[0]
    return register_transform(HeadTransform.of(u * torch.linspace(0.3, 2, d) @ v)).name


def gate():
    worst, differing = 0.0, 0.0
    for batch, d, group, center in (
        (2, 128, 4, "pre_rope"),
        (2, 64, 3, "pre_rope"),
        (2, 256, 4, "pre_rope"),
        (2, 128, 8, "prompt_mean"),
        (2, 96, 4, "pre_rope"),
        (8, 128, 4, "pre_rope"),
        (64, 128, 4, "prompt_mean"),
    ):
        q, k, v = states(Shape(batch, 2, group, d, 3000), torch.float32)
        store = filled(k, v, 3, 3, center, random_transform(2, d))
        for _ in range(2):  # launched, and launched again without Triton's look-up
            got = decode_attention(q, store, kernel="fragments")[0]
            want = attend(q, store)[0]
            worst = max(worst, float((got - want).norm() / want.norm()))
        k, v = k.bfloat16(), v.bfloat16()
        pair = [
            KVStore(
                Recipe(Spec(center=center, rotation=random_transform(2, d)), Spec()),
                batch,
                2,
                d,
                dtype=torch.bfloat16,
                device="cuda",
                inv_freq=frequencies(d),
            )
            for _ in range(2)
        ]
        for a, b in ((0, 300), (300, 301), (301, 340)):
            append.append(pair[0], k[:, :, a:b], v[:, :, a:b])
            pair[1].append(k[:, :, a:b], v[:, :, a:b])
        one, two = (s.coded("key", 0, 340).codes for s in pair)
        differing = max(differing, float((one != two).float().mean()))
    return {
        "cmd": (
            "with maps: decode kernel against attention.attend, relative; codes that the "
            "encode kernel gives unlike PyTorch, share"
        ),
        "worst": worst,
        "differing": differing,
        "passed": worst <= 1e-3 and differing <= 2e-4,
    }


def options(p):
    p.add_argument("--seconds", type=float, default=0.05)


def codes_of(rotation):
    return "maps" if rotation.startswith("map") else "rotation"


def attention_rows(case: Shape, bits, seconds):
    "Whole attention as a cache calls it."
    q, k, v = states(case)
    for b in bits:
        for center in ("pre_rope", "prompt_mean"):
            for rotation in ("hadamard", random_transform(case.heads, case.d)):
                store = filled(k, v, b, b, center, rotation)
                how = (
                    dict(what="attention", codes=codes_of(rotation), center=center, bits=b)
                    | case._asdict()
                )
                for row in both_launches(partial(decode_attention, q, store), seconds):
                    yield dict(unit="us", n=1) | how | row


def coding_rows(d, seconds, tokens=16384):
    "Long appends, and short ones in a graph."
    _, k, v = states(Shape(8, 8, 1, d, tokens))
    for rotation in ("hadamard", random_transform(8, d)):
        store = KVStore(
            Recipe(Spec(center="pre_rope", rotation=rotation), Spec()),
            8,
            8,
            d,
            dtype=torch.bfloat16,
            device="cuda",
            max_length=tokens,
            inv_freq=frequencies(d),
        )
        append.append(store, k[:, :, :256], v[:, :, :256])
        store.cos_sin.reach(tokens)
        store.length = (
            tokens  # as after a long append: the table of cosines and sines is as long
        )
        flags = torch.zeros(4, dtype=torch.int32, device="cuda")
        what = dict(unit="us", codes=codes_of(rotation), d=d, batch=8, heads=8)
        long = kernel_times(
            lambda store=store, flags=flags: encode_launch.encode_append(
                store, k, v, 0, None, flags
            ),
            seconds,
        )
        yield what | dict(what="coding", tokens=tokens, n=1) | long
        yield (
            what
            | dict(what="append", tokens=1, n=30)
            | quantiles(graph_times(Append(8, 8, d, 1, "pre_rope"), rotation))
        )


def rows(cases, seconds):
    for i, case in enumerate(cases):
        yield from attention_rows(case, (3,) if i else (3, 2, 4), seconds)
    for d in (64, 128, 256):
        yield from coding_rows(d, seconds)


def plan(a):
    cases = CASES["maps"]
    return Plan(
        "maps", gate(), rows(cases, a.seconds), {"id": "normal states", "n": len(cases)}
    )
