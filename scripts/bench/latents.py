"""Attention of a step to latents: run.py latents [--shapes 8x32768 ...] --out FILE.

One layer of DeepSeek-V2-Lite's shape with random weights and latents: what transformers does
(keys and values of all tokens are made of the latents, then attended to), absorbed attention to
exact latents in PyTorch, and absorbed attention to codes through the package's `attend`.
Milliseconds of a call, the ways one after another; on a GPU of a replayed CUDA graph with an
empty L2 cache, on a CPU of processor time on one thread, so that other work on the machine is
not counted.

Gate: absorbed attention to the decoded latents is that to the codes."""

import time

import torch
from bench.timing import QUANTILES, Clock, kernel_times, quantiles, replayed
from plan import Plan

from turboquant_nb.cache.attention import Call
from turboquant_nb.cache.store import KVStore
from turboquant_nb.hf.latents import Expansion
from turboquant_nb.kernels import ops
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

RANK, ROTARY, STILL, VALUES = 512, 64, 128, 128
SCALING = (STILL + ROTARY) ** -0.5
BITS = {"4 + 4 bits": (4, 4), "3 + 4 bits": (3, 4), "2 + 3 bits": (2, 3)}  # latent, rotary


def expanded(q, c, rotary, made):
    "As transformers: keys and values of every token."
    still, values = c @ made.key.mT, c @ made.value.mT
    keys = torch.cat([still, rotary.expand(-1, q.shape[1], -1, -1)], -1)
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=SCALING)


def absorbed(q, c, rotary, made) -> dict:
    "What PyTorch does with exact latents, by name."
    keys = torch.cat([c, rotary], -1)  # held so by who attends so; not timed
    values = keys[..., :RANK]

    def products():
        scores = made.query(q)[:, :, 0] @ keys[:, 0].mT * SCALING
        return made.output((scores.softmax(-1) @ values[:, 0])[:, :, None])

    def fused():  # heads as rows of one head's queries: every key is read once
        x = made.query(q).transpose(1, 2)
        x = torch.nn.functional.scaled_dot_product_attention(x, keys, values, scale=SCALING)
        return made.output(x.transpose(1, 2))

    if q.device.type != "cuda":
        return {"absorbed": products}
    compiled = torch.compile(products)
    return {"absorbed": products, "absorbed, compiled": compiled, "absorbed, fused": fused}


def times(f, device, seconds: float) -> dict:
    "Quantiles of single calls in ms; of processor time on a CPU."
    if device.type == "cuda":
        found = kernel_times(replayed(f), seconds)
        return {name: found[name] / 1e3 for name in QUANTILES} | {"n": 1, "unit": "ms"}
    out, until = [], time.perf_counter() + seconds
    while len(out) < 3 or time.perf_counter() < until:
        with Clock() as spent:
            f()
        out.append(1e3 * spent.cpu)
    return quantiles(out) | {"n": len(out), "unit": "ms"}


def made_of(a, batch, tokens, heads):
    "Queries, latents, rotary parts and what expands them."
    torch.manual_seed(0)
    dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    draw = lambda *s: torch.randn(*s, device=a.device, dtype=dtype)
    made = Expansion(
        draw(heads, STILL, RANK) / RANK**0.5, draw(heads, VALUES, RANK) / RANK**0.5
    )
    states = (draw(batch, 1, tokens, d) for d in (RANK, ROTARY))
    return draw(batch, heads, 1, STILL + ROTARY), *states, made


def held(c, rotary, bits) -> KVStore:
    recipe = Recipe(Spec(bits[0]), Spec(bits[1]), sinks=0, recent=0)
    store = KVStore(recipe, len(c), 1, RANK, ROTARY, c.dtype, c.device, max_length=c.shape[2])
    store.append(c, rotary)
    return store


def shapes_of(a):
    "(batch, tokens) of each shape."
    return [tuple(map(int, text.split("x"))) for text in a.shapes]


def rows(a):
    for batch, tokens in shapes_of(a):
        for heads in a.heads:
            yield from measured(a, batch, tokens, heads)


@torch.no_grad()
def measured(a, batch, tokens, heads):
    q, c, rotary, made = made_of(a, batch, tokens, heads)
    ways = {"transformers, expanded": lambda: expanded(q, c, rotary, made)}
    ways |= absorbed(q, c, rotary, made)
    bytes_of = dict.fromkeys(ways, 2 * (RANK + ROTARY))
    want, served = ways["absorbed"]().float(), {}
    for name, bits in BITS.items():
        store, ask = held(c, rotary, bits), dict(scaling=SCALING, latent=True)
        bytes_of[name] = store.nbytes / batch / tokens
        ways[name] = lambda store=store, ask=ask: made.output(
            ops.attend(made.query(q), store, **ask).out
        )
        served[name] = ops.select_backend(Call.of(made.query(q), store, **ask)).backend
    for name, f in ways.items():
        error = float((f().float() - want).norm() / want.norm())
        yield dict(
            what=name,
            tokens=tokens,
            batch=batch,
            heads=heads,
            backend=served.get(name, "torch"),
            bytes_per_token=bytes_of[name],
            output_error=error,
            **times(f, q.device, a.seconds),
        )


@torch.no_grad()
def gate(a):
    q, c, rotary, made = made_of(a, *shapes_of(a)[0], a.heads[0])
    store = held(c, rotary, (3, 4))
    got = made.output(
        ops.attend(made.query(q), store, scaling=SCALING, latent=True).out
    ).float()
    want = absorbed(q, *store.read(), made)["absorbed"]().float()
    found = float((got - want).norm() / want.norm())
    limit = 2e-2 if q.dtype == torch.bfloat16 else 1e-4
    text = f"attention to codes against that to what they stand for, below {limit}"
    return {"cmd": text, "value": found, "passed": found < limit}


def options(p):
    p.add_argument("--shapes", nargs="+", default=["1x4096", "1x16384"], help="batch x tokens")
    p.add_argument("--heads", type=int, nargs="+", default=[16])
    p.add_argument("--seconds", type=float, default=5.0, help="of each way")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def plan(a):
    if a.device == "cpu":
        torch.set_num_threads(1)
    heads = ", ".join(map(str, a.heads))
    shape = f"{heads} heads, latents of {RANK} + {ROTARY}: a layer of DeepSeek-V2-Lite's shape"
    return Plan(
        "latents",
        gate(a),
        rows(a),
        {"id": "random", "n": len(a.shapes)},
        {"id": "none", "revision": f"random weights, {shape}"},
    )
