"""What a decode step of one layer costs on a CPU, by recipe: run.py decode_cpu [--tokens N]
[--repeats N] [--trellis] [--threads N ...] --out FILE.

A layer of SmolLM2's shapes (3 KV heads, 9 query heads, head size 64) in fp32 with the demo's
2,926 tokens, batch 1. A step codes one token and attends with one query. `path`: `kernel` as
`ops` serves it, compiled from C++; `step by step` by `KVStore.append` and `attention.attend`,
which serve where the kernel cannot; `exact states`, keys and values
extended as DynamicCache does and torch's SDPA. `--trellis`: trellis codes of two and three
bits, which the store codes on every path, beside tables. The paths take turns. `p20`, `p50` and
`p80` are quantiles of processor time, which other jobs of the machine leave nearly alone;
`coding` and `attention` the medians of both parts.

Gate: what serves codes the same bits, but for those that the order of a sum decides, and
attends to 2e-5 of the largest output as step by step, for each recipe. Codes without one table
have no path `kernel`."""

import copy
import time
from dataclasses import replace

import torch
from plan import Plan
from bench.cases import frame
from bench.timing import quantiles

from turboquant_nb.cache import attention
from turboquant_nb.kernels import ops
from turboquant_nb.cache.decay import store_class
from turboquant_nb.quant.quantizer import Spec, decided
from turboquant_nb.quant.recipe import Recipe, as_recipe, preset

RECIPES = {
    "k3v3": preset("k3v3"),
    "2.5 bits": as_recipe("k3v3", 2.5),
    "3.5 bits": as_recipe("k4v4", 3.5),
    "k4v4, decay after 1,024": replace(preset("k4v4"), decay=1024),
    "prod (QJL residual)": Recipe(Spec(3, residual="qjl"), Spec(3)),
}
TRELLIS = {"2 bits": Recipe(Spec(2), Spec(2)), "3 bits": Recipe(Spec(3), Spec(3))} | {
    f"{bits} bits, trellis": Recipe(*[Spec(bits, codebook="trellis")] * 2) for bits in (2, 3)
}
HEADS, GROUPS, D = 3, 3, 64


def states(n, seed):
    "Keys and values of n tokens, and a query."
    g = torch.Generator().manual_seed(seed)
    return *torch.randn(2, 1, HEADS, n, D, generator=g), torch.randn(
        1, HEADS * GROUPS, 1, D, generator=g
    )


def filled(recipe, tokens):
    "A store that holds so many tokens."
    freq = 1e5 ** (-torch.arange(D // 2) / (D // 2))
    more = dict(inv_freq=freq, frame=frame(HEADS, D))
    store = store_class(recipe)(recipe, 1, HEADS, D, **more)
    store.append(*states(tokens, 0)[:2])
    store.age()
    return store


def gate(recipes, tokens):
    "Whether both paths hold the same codes after some steps and give the same output."
    passed = True
    for name, recipe in recipes.items():
        mine = filled(recipe, tokens)
        other, same = copy.deepcopy(mine), True
        for seed in range(1, 4):
            k, v, q = states(1, seed)
            passed &= (ops.append(mine, k, v) == "cpu") == has_table(mine, "decode")
            other.append(k, v)
            last = other.length - 1
            for side, x in (("key", k), ("value", v)):
                a, b = (s.coded(side, last, last + 1).codes for s in (mine, other))
                if has_table(mine, "decode"):
                    part = getattr(other, side)
                    sure = decided(part.q, x, other.center(side, last, last + 1))
                    a, b = a[sure], b[sure]
                same &= torch.equal(a, b)
        got, want = ops.attend(q, mine, k, v)[0], attention.attend(q, mine, k, v)[0]
        apart = float((got - want).abs().max() / want.abs().max())
        print("gate:", name, "same codes:", same, "outputs differ by", apart, flush=True)
        passed &= same and apart < 2e-5
    return passed


def has_table(store, use="windows"):
    "Whether the kernel reads its tokens for good, or codes them, too; else PyTorch does."
    return not any(side.q.code.refuses(use) for side in store.parts)


def timed(code, attend):
    "Processor milliseconds of both parts of a step."
    began = time.process_time()
    code()
    coded = time.process_time()
    attend()
    return 1e3 * (coded - began), 1e3 * (time.process_time() - coded)


class Exact:
    "Keys and values as they are, longer by a copy with every token."

    def __init__(self, tokens):
        self.k, self.v, _ = states(tokens, 0)

    def append(self, k, v):
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)

    def attend(self, q):
        return torch.nn.functional.scaled_dot_product_attention(
            q, self.k, self.v, enable_gqa=True
        )


@torch.no_grad()
def rows(recipes, tokens, repeats, threads):
    "Each recipe by each path, their steps in turns."
    for n, (name, recipe) in ((n, x) for n in threads for x in recipes.items()):
        torch.set_num_threads(n)
        store, exact = filled(recipe, tokens), Exact(tokens)
        other = copy.deepcopy(store)
        names = ["kernel"] * has_table(store) + ["step by step", "exact states"]
        times = {path: [] for path in names}
        for i in range(repeats + 3):
            k, v, q = states(1, i + 1)
            paths = {
                "kernel": (lambda: ops.append(store, k, v), lambda: ops.attend(q, store, k, v)),
                "step by step": (
                    lambda: other.append(k, v),
                    lambda: attention.attend(q, other, k, v),
                ),
                "exact states": (lambda: exact.append(k, v), lambda: exact.attend(q)),
            }
            for path in times:
                step = timed(*paths[path])
                times[path] += [step] if i > 2 else []
        base = quantiles([sum(x) for x in times["exact states"]])["p50"]
        for path, found in times.items():
            coding, attending = (quantiles(x)["p50"] for x in zip(*found))
            row = quantiles([sum(x) for x in found])
            more = {} if path == "exact states" else {"bits_per_value": store.bits_per_value()}
            yield (
                dict(
                    recipe=name,
                    path=path,
                    tokens=tokens,
                    n=repeats,
                    unit="ms of processor time",
                    threads=torch.get_num_threads(),
                    coding=coding,
                    attention=attending,
                    exact=base,
                )
                | row
                | more
            )


def options(p):
    p.add_argument("--tokens", type=int, default=2926)
    p.add_argument("--repeats", type=int, default=25)
    p.add_argument("--trellis", action="store_true", help="trellis codes beside tables")
    p.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])


def plan(a):
    cmd = (
        "the kernel codes the same bits as step by step and attends to 2e-5 of the largest "
        "output"
    )
    recipes = TRELLIS if a.trellis else RECIPES
    passed = {"cmd": cmd, "passed": gate(recipes, a.tokens)}
    return Plan("decode", passed, rows(recipes, a.tokens, a.repeats, a.threads))
