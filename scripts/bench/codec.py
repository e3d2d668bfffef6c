"""How fast codes leave a GPU's memory and come back: run.py codec [--layers N] [--heads H]
[--head-size D] [--tokens T] [--recipe NAME] [--repeat N] --out FILE.

A cache of random codes of one sequence, by default of an 8B model's shape; on a machine without
a GPU all of it is in the CPU's memory. Rows say GB of the stream's codes a second, `of_bf16`
what keys and values in bf16 would have to move at to take as long. All layers are moved by each
call, and the clock stops when the last byte is there.

"gathered": each layer into its buffer on the device, or out of it into tensors. "link": buffers
alone, by copies from or to pinned memory, which is what bounds the next. "gathered, link": from
tensors to buffers in pinned memory and back; "staged": the same by `Writer.stage`, with all
that it looks at before.
"blocks": the records' parts copied one by one, unpinned, as before. "checksums": CRC-32 of all
records on one core. "stream": to a file in memory and back, checksums included; "stores": and
stores made of it. "bf16, link": as many tokens in bf16 by plain pinned copies; GB of bf16.

Gate: streams of stores of five recipes, cut and whole, are byte for byte those of the same
stores on the CPU, and what comes back to the device is equal bit for bit, the measured cache
too."""

import io
import time
import zlib
from copy import deepcopy
from functools import partial

import torch
from bench.cases import DEVICE
from bench.timing import quantiles
from plan import Plan

from turboquant_nb.cache.codec import KVStore, Reader, Writer
from turboquant_nb.cache.flat import Flat, to_host
from turboquant_nb.cache.rows import _Block
from turboquant_nb.cache.disk import described, state_of, store_of
from turboquant_nb.files import Saved
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe, preset

STEP = 2**20  # codes of a block, as `Writer` takes them


def recipes(d):
    return {
        "k3v3": preset("k3v3"),
        "mean": Recipe(Spec(4, center="prompt_mean"), Spec(2, center="prompt_mean"), 2, 5),
        "trellis": Recipe(Spec(2, codebook="trellis"), Spec(3, codebook="trellis")),
        "fraction": Recipe(Spec(2.5), Spec(3.5, scale="norm"), 1, 3),
        "decay": Recipe(Spec(4), Spec(3), 2, 4, decay=150),
    }


def filled(recipe, heads, d, tokens, device, seed=0):
    "A store of normal states."
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    store = KVStore(recipe, 1, heads, d, dtype=dtype, device=device)
    g = torch.Generator(device).manual_seed(seed)
    make = lambda: torch.randn(1, heads, tokens, d, generator=g, device=device).to(dtype)
    store.append(make(), make())
    return store


def layers_of(a):
    "[(tensors, state) of each layer]: scales of normal states, random codes."
    store, out = filled(a.recipe, a.heads, a.head_size, a.tokens, DEVICE), []
    for _ in range(a.layers):
        tensors, state = state_of(deepcopy(store))
        for name, t in tensors.items():
            if name.rpartition(".")[2].startswith("plane"):
                t.random_(256)
        out.append((tensors, state))
    return out


def stream_of(states):
    file = io.BytesIO()
    writer = Writer(file, {}, entropy=False)
    for state in states:
        writer.layer(*state)
    writer.close()
    return file.getvalue()


def read(data):
    return Reader(io.BytesIO(data), size=len(data)).layers(device=DEVICE)


def equal(found, want):
    "Whether tensors are the same bits, and on the device."
    return found.keys() == want.keys() and all(
        torch.equal(found[n].to(DEVICE), t.to(DEVICE)) for n, t in want.items()
    )


def gate(a, states):
    ok = True
    for recipe in recipes(a.head_size).values():
        for n in (0, 1, 300):
            store = filled(recipe, 2, 32, 301 + n, DEVICE)
            store.crop(n % 7)
            there = state_of(store)
            here = {n: t.cpu() for n, t in there[0].items()}, there[1]
            data = stream_of([there])
            ok &= data == stream_of([here])
            (found,) = read(data)
            ok &= found[1] == there[1] and equal(found[0], there[0])
            ok &= equal(state_of(store_of(*found, DEVICE))[0], there[0])
    whole = read(stream_of(states))
    ok &= all(h == g and equal(t, u) for (t, h), (u, g) in zip(whole, states, strict=True))
    cmd = "streams of a device's stores are those of the CPU's; what comes back is bit for bit"
    return {"cmd": cmd, "passed": bool(ok)}


def synchronized():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(run, repeats):
    "Of each call, until nothing is left to do on the device; the first warms up."
    out = []
    for _ in range(repeats + 1):
        synchronized()
        began = time.perf_counter()
        kept = run()
        synchronized()
        out.append(time.perf_counter() - began)
        del kept
    return out[1:]


def staged(states):
    writer = Writer(io.BytesIO(), {}, entropy=False)
    return [writer.stage(*state) for state in states]


def by_blocks(states, h, step):
    "Every part of every record on the CPU, as it was done one by one."
    for tensors, _ in states:
        for a in range(0, h.tiles, step):
            block = _Block(tensors, h, a, min(a + step, h.tiles))
            parts = [p for planes, *_ in block.planes(False) for p in planes]
            yield [p.cpu().contiguous() for p in (*parts, *(t for _, t in block.numbers()))]


def ways(a, states):
    "{(what, way): what moves all layers once}."
    tensors, state = states[0]
    h = described(Saved(state))
    step = max(1, STEP // (a.heads * a.head_size * h.tile))
    flat = Flat(h, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, step)
    pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    buffers = [flat.gather(t) for t, _ in states]
    hosts = [pinned(flat.nbytes).copy_(x) for x in buffers]
    copy = partial(torch.Tensor.copy_, non_blocking=True)
    spans = [(at, n) for *_, x in flat.records() for _, _, at, n in x]
    data = stream_of(states)
    half = 2 * a.heads * a.head_size * a.tokens * 2  # bytes of a layer in bf16
    bf16 = torch.zeros(half, dtype=torch.uint8, device=DEVICE), pinned(half)

    def crc():
        for x in hosts:
            view = memoryview(x.numpy())
            for at, n in spans:
                zlib.crc32(view[at : at + n])

    def discarded(made):
        for _ in made:
            pass

    stores = lambda: discarded(store_of(*x, DEVICE) for x in read(data))
    runs = {
        ("gathered", "out"): lambda: discarded(flat.gather(t) for t, _ in states),
        ("gathered", "in"): lambda: discarded(flat.scatter(x) for x in buffers),
        ("link", "out"): lambda: [copy(x, y) for x, y in zip(hosts, buffers)],
        ("link", "in"): lambda: [copy(y, x) for x, y in zip(hosts, buffers)],
        ("gathered, link", "out"): lambda: [to_host(flat.gather(t)) for t, _ in states],
        ("gathered, link", "in"): lambda: discarded(
            flat.scatter(x.to(DEVICE, non_blocking=True)) for x in hosts
        ),
        ("staged", "out"): lambda: staged(states),
        ("blocks", "out"): lambda: discarded(by_blocks(states, h, step)),
        ("checksums", "out"): crc,
        ("stream", "out"): lambda: stream_of(states),
        ("stream", "in"): lambda: discarded(read(data)),
        ("stores", "in"): stores,
        ("bf16, link", "out"): lambda: [copy(bf16[1], bf16[0]) for _ in states],
        ("bf16, link", "in"): lambda: [copy(bf16[0], bf16[1]) for _ in states],
    }
    return flat.nbytes, half, runs


def rows(a, states):
    size, half, runs = ways(a, states)
    for (what, way), run in runs.items():
        moved = len(states) * (half if what.startswith("bf16") else size)
        times = seconds(run, a.repeat)
        row = dict(what=what, way=way, device=DEVICE, nbytes=moved, n=a.repeat, unit="GB/s")
        row |= quantiles([moved / 1e9 / t for t in times])
        yield row | dict(of_bf16=row["p50"] * len(states) * half / moved)


def options(p):
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument("--tokens", type=int, default=32768)
    p.add_argument("--recipe", default="k3v3")
    p.add_argument("--repeat", type=int, default=10)


def plan(a):
    states = layers_of(a)
    shape = f"{a.layers} layers, {a.heads} heads of {a.head_size}, {a.tokens} tokens"
    model = {"id": f"none: {shape}, {a.recipe}"}
    return Plan("cold", gate(a, states), rows(a, states), model=model)
