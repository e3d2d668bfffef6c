"""Attention of a step to latents: run.py latents [--tokens 4096 16384] [--batch 1] --out FILE.

One layer of DeepSeek-V2-Lite's shape with random weights and latents: what transformers does
(keys and values of all tokens are made of the latents, then attended to), absorbed attention to
exact latents in PyTorch, and absorbed attention to codes through the package's `attend`.
Milliseconds of a call, the ways one after another; on a CPU of processor time on one thread, so
that other work on the machine is not counted.

Gate: absorbed attention to the decoded latents is that to the codes."""

import time

import torch
from bench.timing import Clock, quantiles, step_times
from plan import Plan

from turboquant_nb.cache.store import KVStore
from turboquant_nb.hf.latents import Expansion
from turboquant_nb.kernels import ops
from turboquant_nb.quant.quantizer import Recipe, Spec

HEADS, RANK, ROTARY, STILL, VALUES = 16, 512, 64, 128, 128
SCALING = (STILL + ROTARY) ** -0.5
BITS = {"4 + 4 bits": (4, 4), "3 + 4 bits": (3, 4), "2 + 3 bits": (2, 3)}  # latent, rotary


def expanded(q, c, rotary, made):
    "As transformers: keys and values of every token."
    still, values = c @ made.key.mT, c @ made.value.mT
    keys = torch.cat([still, rotary.expand(-1, HEADS, -1, -1)], -1)
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=SCALING)


def absorbed(q, c, rotary, made):
    "The best that PyTorch does with exact latents."
    keys = torch.cat([c, rotary], -1)[:, 0]  # held so by who attends so; not timed
    return keys, lambda: made.output(
        (((made.query(q)[:, :, 0] @ keys.mT) * SCALING).softmax(-1) @ keys[..., :RANK])[
            :, :, None
        ]
    )


def times(f, device, seconds: float) -> dict:
    "Quantiles of single calls in ms; of processor time on a CPU."
    if device.type == "cuda":
        return step_times(f, least=3, seconds=seconds)
    out, until = [], time.perf_counter() + seconds
    while len(out) < 3 or time.perf_counter() < until:
        with Clock() as spent:
            f()
        out.append(1e3 * spent.cpu)
    return quantiles(out) | {"n": len(out), "unit": "ms"}


def made_of(a, tokens):
    "Queries, latents, rotary parts and what expands them."
    torch.manual_seed(0)
    dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    draw = lambda *s: torch.randn(*s, device=a.device, dtype=dtype)
    made = Expansion(
        draw(HEADS, STILL, RANK) / RANK**0.5, draw(HEADS, VALUES, RANK) / RANK**0.5
    )
    states = (draw(a.batch, 1, tokens, d) for d in (RANK, ROTARY))
    return draw(a.batch, HEADS, 1, STILL + ROTARY), *states, made


def held(c, rotary, bits) -> KVStore:
    recipe = Recipe(Spec(bits[0]), Spec(bits[1]), sinks=0, recent=0)
    store = KVStore(recipe, len(c), 1, RANK, ROTARY, c.dtype, c.device, max_length=c.shape[2])
    store.append(c, rotary)
    return store


def rows(a):
    for tokens in a.tokens:
        yield from measured(a, tokens)


@torch.no_grad()
def measured(a, tokens: int):
    q, c, rotary, made = made_of(a, tokens)
    exact = absorbed(q, c, rotary, made)[1]
    ways = {"transformers, expanded": lambda: expanded(q, c, rotary, made), "absorbed": exact}
    plain = 2 * (RANK + ROTARY)
    bytes_of = {"transformers, expanded": plain, "absorbed": plain}
    for name, bits in BITS.items():
        store = held(c, rotary, bits)
        bytes_of[name] = store.nbytes / a.batch / tokens
        ways[name] = lambda store=store: made.output(
            ops.attend(made.query(q), store, scaling=SCALING, latent=True).out
        )
    want = exact().float()
    for name, f in ways.items():
        error = float((f().float() - want).norm() / want.norm())
        yield dict(
            what=name,
            tokens=tokens,
            batch=a.batch,
            bytes_per_token=bytes_of[name],
            output_error=error,
            **times(f, q.device, a.seconds),
        )


@torch.no_grad()
def gate(a):
    q, c, rotary, made = made_of(a, a.tokens[0])
    store = held(c, rotary, (3, 4))
    got = made.output(
        ops.attend(made.query(q), store, scaling=SCALING, latent=True).out
    ).float()
    want = absorbed(q, *store.read(), made)[1]().float()
    found = float((got - want).norm() / want.norm())
    limit = 2e-2 if q.dtype == torch.bfloat16 else 1e-4
    text = f"attention to codes against that to what they stand for, below {limit}"
    return {"cmd": text, "value": found, "passed": found < limit}


def options(p):
    p.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--seconds", type=float, default=5.0, help="of each way")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def plan(a):
    if a.device == "cpu":
        torch.set_num_threads(1)
    shape = f"{HEADS} heads, latents of {RANK} + {ROTARY}: a layer of DeepSeek-V2-Lite's shape"
    return Plan(
        "latents",
        gate(a),
        rows(a),
        {"id": "random", "n": len(a.tokens)},
        {"id": "none", "revision": f"random weights, {shape}"},
    )
