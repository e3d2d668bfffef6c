"""The speed table of two packages on one NVIDIA GPU: run.py beside --older FOLDER [--rounds N]
[--parts attention append generate] [--moved WHY] --out FILE.

FOLDER holds an older `turboquant_nb` and its `scripts`. Each package runs in a process of its
own, older, newer, older, newer, …, so that what a machine does in between meets both; bf16
alone varies by 5 % from machine to machine. A row has the least of the rounds' medians of both
and their ratio.

`attention`: one token's whole attention in a CUDA graph, µs, L2 emptied. `append`: a token to a
static store in a CUDA graph, µs, and the host's time to launch one. `generate`: whole calls on
a model of Llama-3.1-8B's shapes with default settings: ms to the first token and ms a token
after it; 8 x 32,768 go on from random states; `eager` replays no graph.

Gate: both packages give the same outputs and tokens, bit for bit. Where codes were moved on
purpose, the first token of each call, in which no code had a say."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from bench import cases, generate
from bench.cases import Shape
from bench.timing import append_times, host_times, kernel_times, quantiles, replayed
from plan import Plan
from tools import processes
from tools.goldens import recipes

from turboquant_nb.cache.store import KVStore
from turboquant_nb.kernels import encode, ops
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe


class Append(NamedTuple):
    "New tokens of one layer."

    batch: int
    heads: int
    d: int
    tokens: int  # that are new
    center: str


PARTS = "attention", "append", "generate"
SHAPES = [
    Shape(8, 8, 4, 128, 32768),
    Shape(8, 8, 8, 128, 32768),
    Shape(1, 8, 8, 128, 32768),
    Shape(8, 8, 4, 80, 32768),
    Shape(1, 8, 4, 128, 2048),
    Shape(4, 2, 7, 64, 32768),
]
RECIPES = "k3v3", "k4v4", "2 bits, trellis"
APPENDS = [Append(8, 8, 128, 1, "pre_rope"), Append(8, 8, 128, 5, "fixed")]
CALLS = [(1, 2048, {}), (1, 8192, {}), (8, 8192, {}), (8, 8192, {"graphs": False})]
FILLED = 8, 32768


def digest(x) -> str:
    return f"{x.double().sum().item()!r} {x.double().square().sum().item()!r}"


def attention():
    for shape in SHAPES:
        q, k, v = cases.states(shape)
        for name in RECIPES:
            store = cases.held(recipes()[name], k, v, k.shape[2])
            attend = lambda: ops.attend(q, store)
            row = {"what": "attention", "case": "x".join(map(str, shape)), "recipe": name}
            row |= {"us": kernel_times(replayed(attend), 0.05)["p50"]}
            yield row | {"same": digest(attend()[0])}


def new_states(case: Append, n, seed):
    "Keys and values of n tokens, transposed views as a model gives them."
    generator = torch.Generator(cases.DEVICE).manual_seed(seed)
    shape = 2, case.batch, n, case.heads, case.d
    x = torch.randn(shape, generator=generator, device=cases.DEVICE)
    return x.bfloat16().transpose(2, 3)


def used_store(case: Append, static):
    "A store in use, and more tokens, appended once."
    batch, heads, d, n, center = case
    more = dict(inv_freq=cases.frequencies(d), frame=cases.frame(heads, d))
    more |= dict(dtype=torch.bfloat16, device=cases.DEVICE, max_length=2048, static=static)
    store = KVStore(Recipe(Spec(bits=3, center=center), Spec(bits=3)), batch, heads, d, **more)
    encode.append(store, *new_states(case, 70, 0))
    new = new_states(case, n, 1)
    encode.append(store, *new)
    return store, new


def append():
    for case in APPENDS:
        store, new = used_store(case, True)
        took = append_times(lambda: encode.append(store, *new), [store], tokens=case.tokens)
        eager, new = used_store(case, False)

        def back():
            eager.length = 70  # what comes after is written again

        host = host_times(lambda: encode.append(eager, *new), 50, 20, back)[5:]
        row = {"what": "append", "case": f"{case.batch} x {case.tokens}, {case.center}"}
        yield row | {"us": quantiles(took)["p50"], "host_us": quantiles(host)["p50"]}


def generated(model, batch, prompt, new=65, **how):
    "The best of three calls, each with a new cache; one more before them compiles."
    took = []
    for seed in (0, 0, 1, 2):
        cache = generate.TurboQuantCache(model, "k3v3", **how)
        ids = generate.random_ids(model, batch, prompt if took else 600, seed)
        first, later, out = generate.call(model, ids, new, cache)
        took.append((first, later / (new - 1)))
        generate.clean()
    row = {"what": "generate", "case": f"{batch}x{prompt}" + ", eager" * (how != {})}
    row |= {"first_ms": min(x for x, _ in took[1:]), "step_ms": min(x for _, x in took[1:])}
    return row | {"same": str(out.tolist())[:400]}


def filled(model, batch, prompt, new=65):
    "Calls that go on from random states."
    cache = generate.new_cache(model, "turboquant k3v3", length=prompt + 4 * new)
    generate.fill(cache, "turboquant", model.config, batch, prompt)
    steps = []
    for i in range(3):
        ids = generate.random_ids(model, batch, int(cache.get_seq_length()) + 1, i)
        steps.append(generate.call(model, ids, new, cache)[1] / (new - 1))
    return {"what": "generate", "case": f"{batch}x{prompt}, filled", "step_ms": min(steps[1:])}


def whole_calls():
    model = generate.make_model(generate.LLAMA)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("sdpa")
    for batch, prompt, how in CALLS:
        yield generated(model, batch, prompt, **how)
    with torch.no_grad():
        yield filled(model, *FILLED)


def of_package(folder, parts) -> list:
    "Rows of the package in a folder, by its own scripts."
    folder = Path(folder).resolve()
    code = (
        "import sys; sys.path.insert(1, sys.argv[1]); from bench import beside; beside.child()"
    )
    words = "-c", code, str(folder / "scripts"), *parts
    found = processes.of_package(folder, *words, cwd=folder)  # which Python searches first
    return [json.loads(x) for x in found if x.startswith("{")]


def child():
    made = {"attention": attention, "append": append, "generate": whole_calls}
    for part in sys.argv[2:]:
        for row in made[part]():
            print(json.dumps(row), flush=True)


TIMES = "us", "host_us", "first_ms", "step_ms"


def joined(rounds: list) -> list:
    "A row for each time of a case: the least of both packages, and their ratio."
    out = []
    for older in rounds[0][0]:
        name = {k: older[k] for k in ("what", "case", "recipe") if k in older}
        found = [
            [next(r for r in rows if name.items() <= r.items()) for rows in pair]
            for pair in rounds
        ]
        for time in [x for x in TIMES if x in older]:
            before, after = (min(pair[i][time] for pair in found) for i in (0, 1))
            how = {"unit": time.partition("_")[2] or time, "n": len(rounds)}
            row = {"time": time, "older": before, "p50": after, "of_older": after / before}
            out.append(name | row | how)
    return out


def differing(rounds: list, moved: bool) -> list:
    "Cases whose outputs, or first tokens, the two packages do not share."
    seen = lambda x: x and x.partition(",")[0] if moved else x
    same = lambda rows: {
        str((r["what"], r["case"], r.get("recipe"))): seen(r.get("same"))
        for r in rows
        if not moved or r["what"] == "generate"
    }
    return sorted({k for a, b in rounds for k in same(a) if same(a)[k] != same(b).get(k)})


def options(p):
    p.add_argument("--older", required=True, help="the folder that holds the older package")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    p.add_argument("--moved", metavar="WHY", help="why codes are others on purpose")


def plan(a):
    newer = Path(__file__).resolve().parents[2]
    if not (Path(a.older) / "turboquant_nb").is_dir():
        raise SystemExit(f"--older: no folder turboquant_nb in {a.older}")
    rounds = [
        [of_package(folder, a.parts) for folder in (a.older, newer)] for _ in range(a.rounds)
    ]
    wrong = differing(rounds, a.moved is not None)
    what = "outputs and tokens of both packages, bit for bit"
    if a.moved:
        what = f"first tokens of calls; codes are others: {a.moved}"
    gate = {"cmd": what, "passed": not wrong}
    if wrong:
        print("outputs differ:", *wrong, sep="\n  ")
    model = {"id": "random weights, Llama-3.1-8B shapes", "revision": "none"}
    return Plan("beside", gate, iter(joined(rounds)), model=model)
