"""What bits by head cost a decode step's attention: run.py decode_heads [--shapes BxHxGxDxT …]
[--codebooks NAME …] [--seconds S] --out FILE.

Half of the KV heads at 2 bits and half at 3, keys around the mean before RoPE, 4 exact sinks
and 16 recent tokens: as two runs of neighbours, every other one, and in three groups (a quarter
at 2 bits, a quarter at 3, half with keys at 3 and values at 2); beside them all heads at 2 and
all at 3 bits, whose mean is the uniform cache of the same average. A group attends to a store
of its own: its query heads are taken, and outputs joined, as `hf.heads.GroupedLayer` does.
`order`: groups one after the other, or side by side on streams of their own. On a GPU all is
replayed from a CUDA graph, the L2 cache emptied before; `append` is one token of each sequence.
On a CPU only attention is timed, by the clock. `over_mean`: time over the mean of 2 and 3 bits;
at most 1.1 is the goal.

Gate: what each query head gets is what it gets from a store of its KV head alone, to 1e-2 of
the largest output."""

import torch
from bench.cases import DEVICE, add_shapes, frequencies, held, shapes_of, states
from bench.timing import append_times, clock_times, kernel_times, quantiles, replayed
from plan import Plan

from turboquant_nb.cache.store import KVStore
from turboquant_nb.hf.heads import join_heads, take_heads
from turboquant_nb.kernels import ops
from turboquant_nb.quant.mixed_precision import HeadRecipe
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

SHAPES = "8x8x4x128x32768", "1x8x4x128x131072"
ORDERS = "one after the other", "side by side"


def layers(heads, codebook):
    "Recipes of a layer by name: one for all heads, or a `HeadRecipe`."
    spec = lambda bits, **more: Spec(bits, codebook=codebook, **more)
    make = lambda k, v: Recipe(spec(k, center="pre_rope"), spec(v))
    two, three, both = make(2, 2), make(3, 3), make(3, 2)
    half, quarter = heads // 2, heads // 4
    return {
        "2 bits": two,
        "3 bits": three,
        "halves": HeadRecipe([two] * half + [three] * half),
        "every other": HeadRecipe([two, three] * half),
        "three groups": HeadRecipe(
            [two] * (half - quarter) + [both] * 2 * quarter + [three] * (half - quarter)
        ),
    }


def groups_of(recipe, heads):
    "[(recipe, its heads)]."
    whole = [(recipe, tuple(range(heads)))]
    return [*recipe.groups.items()] if isinstance(recipe, HeadRecipe) else whole


def side_by_side(jobs):
    "What jobs give, the first on this stream, each other one on a stream that joins it."
    here, out = torch.cuda.current_stream(), []
    streams = [here, *(torch.cuda.Stream() for _ in jobs[1:])]
    for stream in streams[1:]:
        stream.wait_stream(here)
    for job, stream in zip(jobs, streams):
        with torch.cuda.stream(stream):
            out.append(job())
    for stream in streams[1:]:
        here.wait_stream(stream)
    return out


def attention(q, stores, heads, order=ORDERS[0]):
    "A step of all groups: stores {heads of a group: its store}."
    if len(stores) == 1:
        return ops.attend(q, *stores.values()).out
    jobs = [
        lambda at=at, s=s: ops.attend(take_heads(q, at, heads), s).out
        for at, s in stores.items()
    ]
    out = [job() for job in jobs] if order == ORDERS[0] else side_by_side(jobs)
    return join_heads(out, [*stores])


def filled(recipe, k, v):
    "The stores of a recipe's groups."
    groups = groups_of(recipe, k.shape[1])
    return {at: held(r, *(x[:, list(at)] for x in (k, v))) for r, at in groups}


def gate(shapes, codebooks):
    "Groups against a store for each head alone."
    worst = 0.0
    for shape in {x._replace(tokens=min(x.tokens, 4096)) for x in shapes}:
        q, k, v = states(shape)
        for recipe in (x for c in codebooks for x in layers(shape.heads, c).values()):
            got, want = attention(q, filled(recipe, k, v), shape.heads), []
            alone = {i: r for r, at in groups_of(recipe, shape.heads) for i in at}
            for i in range(shape.heads):
                store = held(alone[i], *(x[:, i : i + 1] for x in (k, v)))
                want.append(ops.attend(take_heads(q, (i,), shape.heads), store).out)
            want = torch.cat(want, 1).float()
            apart = float((got.float() - want).abs().max() / want.abs().max())
            worst = max(worst, apart)
    return {
        "cmd": "attention by groups and head by head, relative to the largest output",
        "worst": worst,
        "passed": worst < 1e-2,
    }


def appended(recipe, shape, first=70):
    "µs of one token of each sequence, a share of some steps in a CUDA graph."
    _, k, v = states(shape._replace(tokens=first + 2))
    more = dict(dtype=k.dtype, device=k.device, static=True, max_length=2048)
    more["inv_freq"] = frequencies(shape.d)
    stores = {
        at: KVStore(r, shape.batch, len(at), shape.d, **more)
        for r, at in groups_of(recipe, shape.heads)
    }
    one = lambda x, a, b: x[:, :, a:b].contiguous()

    def step(a, b):
        for at, store in stores.items():
            states = (take_heads(one(x, a, b), at, shape.heads) for x in (k, v))
            ops.append(store, *states)

    for a, b in ((0, first), (first, first + 1), (first + 1, first + 2)):
        step(a, b)
    return quantiles(append_times(lambda: step(first, first + 1), stores.values(), first))


@torch.no_grad()
def rows(shapes, codebooks, seconds):
    "Recipes that all heads share first: what the others are compared with."
    cuda = DEVICE == "cuda"
    for shape, codebook in ((s, c) for s in shapes for c in codebooks):
        q, k, v = states(shape)
        row, means = shape._asdict() | dict(unit="microseconds", codebook=codebook), {}
        for name, recipe in layers(shape.heads, codebook).items():
            stores = filled(recipe, k, v)
            about = row | dict(recipe=name, groups=len(stores))
            about["nbytes"] = sum(x.nbytes for x in stores.values())
            for order in ORDERS if cuda and len(stores) > 1 else ORDERS[:1]:
                step = lambda s=stores, o=order: attention(q, s, shape.heads, o)
                if cuda:
                    found = kernel_times(replayed(step), seconds) | {"n": 1}
                else:
                    times = [1e6 * t for t in clock_times(step, 5)]
                    found = quantiles(times) | {"n": len(times)}
                yield (
                    about
                    | dict(path="attention", order=order)
                    | compared(means, "attention", name, found)
                )
            if cuda:
                found = appended(recipe, shape) | {"n": 30}
                more = compared(means, "append", name, found)
                yield about | dict(path="append", order=ORDERS[0]) | more


def compared(means, path, name, found):
    "With the time over the mean of the two that all heads share."
    means.setdefault(path, {})[name] = found["p50"]
    if {"2 bits", "3 bits"} <= means[path].keys():
        mean = (means[path]["2 bits"] + means[path]["3 bits"]) / 2
        found = found | {"over_mean": found["p50"] / mean}
    return found


def options(p):
    add_shapes(p, SHAPES)
    p.add_argument(
        "--codebooks", nargs="+", default=["sphere", "trellis_fast", "trellis"], help="codes"
    )
    p.add_argument("--seconds", type=float, default=0.05, help="measuring time of one row")


def plan(a):
    shapes = shapes_of(a)
    if any(x.heads % 4 for x in shapes):
        raise SystemExit("--shapes: KV heads must be a multiple of 4")
    passed = gate(shapes, a.codebooks)
    return Plan("decode_heads", passed, rows(shapes, a.codebooks, a.seconds))
