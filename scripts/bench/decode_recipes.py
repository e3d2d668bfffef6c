"""What a decode step's attention costs on a GPU by recipe, where the kernel for tensor cores
serves, where the portable one does and where blocks are decoded: run.py decode_recipes
[--shapes BxHxGxDxT …] [--trellis] [--match RE] [--seconds S] --out FILE.

Random states in bf16, a recipe's own 4 exact sinks and 16 recent tokens, keys around the mean
before RoPE. `path`: `kernel`, what `ops.attend` takes by itself, launched from Python; `graph`,
the same replayed from a CUDA graph, as `generate()` replays it, of codes that can be recorded;
`PyTorch`, `attention.attend`; `exact states`, torch's SDPA on bf16. Medians of triton's
do_bench. `why` says why it is not the kernel for tensor cores.

--trellis: uniform bits and trellis codes instead, without the path `PyTorch`, with the prompt's
mean and the mean before RoPE. With the first of the shapes, one token of each sequence is
appended, too: `append, graph`, a share of 20 such steps in a CUDA graph, and `append, host`,
what Python takes to launch it.

Gate: each recipe by the kernel agrees with PyTorch's attention on the same codes to 1e-2 of the
largest output, on 4,096 tokens."""

import re
from functools import partial

import torch
from bench import decode_cpu
import torch.nn.functional as F
from bench.cases import add_shapes, frequencies, held, shapes_of, states
from plan import Plan
from bench.timing import append_times, host_times, kernel_times, quantiles, replayed

from turboquant_nb.cache import attention
from turboquant_nb.cache.attention import Call
from turboquant_nb.cache.store import KVStore
from turboquant_nb.kernels import ops
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe, preset

SHAPES = "8x8x4x128x32768", "1x8x4x128x8192", "8x3x3x64x8192"
RECIPES = decode_cpu.RECIPES | {name: preset(name) for name in ("k4v4", "k2v2")}
TRELLIS = {
    f"{bits} bits, {kind}, {center}": Recipe(
        Spec(bits, codebook=kind, center=center), Spec(bits, codebook=kind)
    )
    for center in ("prompt_mean", "pre_rope")
    for bits, kind in (
        *((b, "sphere") for b in (2, 3, 4)),
        *((b, kind) for b in (2, 3) for kind in ("trellis",)),
    )
}


def gate(shapes, recipes):
    "Whether kernels agree with PyTorch."
    worst = 0.0
    for shape in {x._replace(tokens=4096) for x in shapes}:
        q, k, v = states(shape)
        for name, recipe in recipes.items():
            store = held(recipe, k, v)
            got, want = (ops.attend(q, store)[0].float(), attention.attend(q, store)[0].float())
            apart = float((got - want).abs().max() / want.abs().max())
            print(
                "gate:",
                shape,
                name,
                ops.select_backend(Call.of(q, store)).why or "tensor cores",
                f"{apart:.1e}",
                flush=True,
            )
            worst = max(worst, apart)
    return {
        "cmd": (
            "attention by the kernel and by PyTorch on the same codes, relative to the largest "
            "output"
        ),
        "worst": worst,
        "passed": worst < 1e-2,
    }


@torch.no_grad()
def rows(shapes, recipes, seconds):
    "Exact states, then each recipe by both paths."
    for shape in shapes:
        q, k, v = states(shape)
        row = shape._asdict() | dict(unit="microseconds", n=1)
        exact = kernel_times(
            lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), seconds
        )
        yield (
            row
            | dict(
                recipe="exact states",
                path="exact states",
                bits=16.0,
                nbytes=k.nbytes + v.nbytes,
            )
            | exact
        )
        for name, recipe in recipes.items():
            store = held(recipe, k, v)
            about = row | dict(
                recipe=name,
                bits=store.bits_per_value(),
                nbytes=store.nbytes,
                why=ops.select_backend(Call.of(q, store)).why,
            )
            paths = {"kernel": lambda: ops.attend(q, store)}
            if not any(part.q.code.refuses("capture") for part in store.parts):
                paths["graph"] = replayed(paths["kernel"])
            if name not in TRELLIS:
                paths["PyTorch"] = lambda: attention.attend(q, store)
            for path, call in paths.items():
                found = kernel_times(call, seconds)
                yield about | dict(path=path, speedup=exact["p50"] / found["p50"]) | found


def append_rows(shape, recipes, first=70):
    "One token of each sequence, in a graph and launched."
    _, k, v = states(shape._replace(tokens=first + 2))
    for name, recipe in recipes.items():
        make = partial(KVStore, recipe, *k.shape[:2], shape.d, dtype=k.dtype, device=k.device)
        more = dict(max_length=2048, inv_freq=frequencies(shape.d))
        stores = [make(static=True, **more), make(**more)]
        for store in stores:
            for a, b in ((0, first), (first, first + 1), (first + 1, first + 2)):
                ops.append(store, k[:, :, a:b], v[:, :, a:b])
        one = [x[:, :, -1:].contiguous() for x in (k, v)]
        row = shape._asdict() | dict(unit="microseconds", recipe=name)
        row["why"] = ops.select_coder(stores[0]).why
        times = append_times(lambda: ops.append(stores[0], *one), stores[:1], first)
        yield row | dict(path="append, graph", n=len(times)) | quantiles(times)

        def back():
            stores[1].length = first

        times = host_times(lambda: ops.append(stores[1], *one), 50, 20, back)[5:]
        yield row | dict(path="append, host", n=len(times)) | quantiles(times)


def options(p):
    add_shapes(p, SHAPES)
    p.add_argument("--trellis", action="store_true", help="trellis codes beside uniform bits")
    p.add_argument(
        "--match", default="", help="only recipes whose name matches this regular expression"
    )
    p.add_argument("--seconds", type=float, default=0.05, help="measuring time of one row")


def plan(a):
    shapes = shapes_of(a)
    recipes = TRELLIS if a.trellis else RECIPES
    recipes = {name: r for name, r in recipes.items() if re.search(a.match, name)}
    passed = gate(shapes, recipes)

    def found():
        if a.trellis:
            yield from append_rows(shapes[0], recipes)
        yield from rows(shapes, recipes, a.seconds)

    return Plan("decode", passed, found())
