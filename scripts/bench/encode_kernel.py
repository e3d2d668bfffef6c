"""How fast the fused kernel codes keys and values: run.py encode_kernel --out FILE [--tune].

Gate: on this device the kernel writes the codes of the PyTorch path, except within rounding of
an edge, for the bits, dtypes, head sizes, rotations, centres and positions below. Then medians
(20 and 80 % quantiles too) on bf16 states:
- bulk: 8 sequences x 8 heads x 32,768 tokens (16,384 at d = 256) by do_bench; a vector is one
  key or one value of one head;
- append: new tokens of all heads with their exact copies, a layer's share of a decoding step:
  as a CUDA graph of 20 calls, the L2
  warm, and the host's time of an eager call;
- torch: the PyTorch path on the same states, and a copy of the input as the floor.
--tune also prints launch options beside the packaged ones."""

import multiprocessing
from functools import partial
from typing import NamedTuple

import torch
from bench.cases import CASES, DEVICE, Append, frame, frequencies
from plan import Plan
from bench.timing import append_times, event_time, host_times, kernel_times, quantiles

from turboquant_nb.cache.store import KVStore, make_room
from turboquant_nb.kernels import encode as append, encode as encode_launch
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

NEAR = 2e-5  # of a coordinate over its unit: both paths round, the GPU's fp32 products too


def states(b, h, n, d, dtype, seed, shift=0.0):
    gen = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(b, n, h, d, generator=gen, device=DEVICE) + shift * torch.randn(
        b, 1, h, d, generator=gen, device=DEVICE
    )
    return x.to(dtype).transpose(1, 2)  # as a model gives them: a transposed view


def compare(recipe, lengths, d, dtype):
    """(entries that differ, entries that differ away from an edge, largest relative difference
    of scales)."""
    more = dict(device=DEVICE, inv_freq=frequencies(d), frame=frame(3, d))
    fused, plain = (KVStore(recipe, 2, 3, d, dtype=dtype, **more) for _ in range(2))
    given = []
    for i, n in enumerate(lengths):
        k, v = states(2, 3, n, d, dtype, 2 * i, 0.5), states(2, 3, n, d, dtype, 2 * i + 1)
        append.append(fused, k, v)
        plain.append(k, v)
        given.append((k, v))
    ties = wrong = 0
    worst = 0.0
    for i, name in enumerate(("key", "value")):
        side = getattr(plain, name)
        a, b = fused.coded(name, 0, fused.length), plain.coded(name, 0, plain.length)
        x = torch.cat([g[i] for g in given], 2).double()
        center = plain.center(name, 0, plain.length)
        x = x if center is None else x - center.double()
        y = x @ side.q.rotation.matrix.double().T
        u = y / y.square().mean(-1, keepdim=True).sqrt()
        near = ((u.unsqueeze(-1) - side.q.codebook.edges.double()).abs() < NEAR).any(-1)
        differ = a.codes != b.codes
        ties, wrong = ties + int(differ.sum()), wrong + int((differ & ~near).sum())
        gap = (a.scale.double() / b.scale.double() - 1).abs()[~differ.any(-1)]
        worst = max(worst, float(gap.max()))
    return ties, wrong, worst


def gate_cases():
    "(bits of k and v, d, dtype, rotation, centre, lengths of the appends)."
    half, types = torch.bfloat16, (torch.float16, torch.float32)
    plan = [
        (bits, 128, half, "hadamard", "fixed", (700, 1, 5, 300))
        for bits in ((1, 2), (2, 3), (3, 4), (4, 1), (3, 3), (2, 2), (4, 4), (1, 1))
    ]
    plan += [
        ((3, 4), d, half, "hadamard", "fixed", (300, 1, 70)) for d in (64, 80, 96, 112, 256)
    ]
    plan += [
        ((3, 4), d, dtype, "hadamard", "fixed", (300, 1, 70))
        for d in (64, 128, 256)
        for dtype in types
    ]
    plan += [((3, 3), 128, half, "hadamard", "none", (300, 1))]
    plan += [
        ((3, 3), d, dtype, "hadamard", "pre_rope", (300, 1, 70))
        for d in (64, 128, 256)
        for dtype in (half, torch.float32)
    ]
    return (
        plan
        + [((4, 2), d, half, "haar", "fixed", (300, 1, 70)) for d in (64, 128, 256)]
        + [((4, 2), 128, t, "haar", "fixed", (300, 1)) for t in types]
    )


def gate_case(case):
    "The case and what `compare` says of it."
    (bk, bv), d, dtype, rotation, center, lengths = case
    recipe = Recipe(
        Spec(bits=bk, rotation=rotation, center=center), Spec(bits=bv, rotation=rotation)
    )
    try:
        return case, compare(recipe, lengths, d, dtype)
    except Exception as error:  # counts as wrong, and the other cases are still compared
        print("gate:", case, str(error)[:300], flush=True)
        return case, (0, 1, 0.0)


def job(task):
    """One piece of work for a process of the pool: it fills Triton's cache, and the gate's
    cases also answer."""
    f, args, options = task
    return f(*args, **options)


def gate(workers, more=()):
    """The kernel and the PyTorch path on this device; the cases, and `more` to compile, run in
    several processes."""
    ties = wrong = codes = 0
    worst, limit, cases = 0.0, 1.01 * 2**-10, gate_cases()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for answer in pool.imap_unordered(
            job, [*((gate_case, (c,), {}) for c in cases), *more]
        ):
            if not isinstance(answer, tuple):
                continue
            case, (a, b, c) = answer
            ties, wrong, worst, codes = (
                ties + a,
                wrong + b,
                max(worst, c),
                codes + 2 * 6 * case[1] * sum(case[-1]),
            )
            if b or not c <= limit:
                print("gate:", case, a, b, c, flush=True)
    said = (
        f"{len(cases)} cases: {ties} of {codes} codes differ from the PyTorch path's, {wrong} "
        f"of them further than {NEAR} from an edge; scales within {worst:.1e}"
    )
    print(said, flush=True)
    return {"cmd": said, "passed": wrong == 0 and worst <= limit}


class Bulk(NamedTuple):
    "Keys and values that are coded at once."

    d: int = 128
    k: int = 3  # bits
    v: int = 3
    batch: int = 8
    heads: int = 8
    tokens: int = 32768
    center: str = "fixed"
    dtype: torch.dtype = torch.bfloat16


BULK = [Bulk(k=k, v=v) for k, v in ((3, 3), (2, 2), (4, 4), (4, 2), (1, 1))] + [
    Bulk(center="none"),
    Bulk(center="pre_rope"),
    Bulk(dtype=torch.float16),
    Bulk(dtype=torch.float32, tokens=16384),
    Bulk(batch=1, tokens=4096),
    Bulk(64),
    Bulk(96),
    Bulk(256, tokens=16384),
]


def coded_at_once(case: Bulk, config=None):
    "(a store, keys, values, a call that codes them)."
    d, k_bits, v_bits, b, h, n, center, dtype = case
    recipe = Recipe(Spec(bits=k_bits, center=center), Spec(bits=v_bits), 0, 0)
    more = dict(device=DEVICE, max_length=n, inv_freq=frequencies(d), frame=frame(h, d))
    store = KVStore(recipe, b, h, d, dtype=dtype, **more)
    make_room(store, n)
    k, v = states(b, h, n, d, dtype, 0), states(b, h, n, d, dtype, 1)
    flags = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    return (store, k, v, partial(encode_launch.encode_append, store, k, v, 0, flags, config))


def small(case: Bulk, config=None):
    "Compile what a bulk case needs."
    try:
        coded_at_once(case._replace(batch=1, heads=2, tokens=512), config)[-1]().tolist()
    except Exception as error:
        print(case.d, config, str(error)[:200], flush=True)


def short(case: Append):
    "Compile what an append needs."
    append_store(case, True), append_store(case, False)


def bulk_case(case: Bulk, config=None):
    _, k, v, call = coded_at_once(case, config)
    took = kernel_times(call)
    vectors = 2 * case.batch * case.heads * case.tokens
    nbytes = vectors * (case.d * (k.itemsize + (case.k + case.v) / 16) + 2)
    what = case._asdict() | dict(case="bulk", dtype=str(case.dtype)[6:], unit="us", n=1)
    rate = dict(giga_vectors=vectors / took["p50"] / 1e3, terabytes=nbytes / took["p50"] / 1e6)
    return what | took | rate


def torch_path(case: Bulk):
    "What PyTorch takes for the same, and a copy of the input."
    store, k, v, call = coded_at_once(case)
    out = torch.empty_like(k)
    copies = [kernel_times(partial(out.copy_, x))["p50"] for x in (k, v)]
    mean = torch.randn(case.batch, case.heads, 1, case.d, device=DEVICE).bfloat16()

    def coded():
        store.key.memory.write(store.key.q.encode(k, mean), 0)
        store.value.memory.write(store.value.q.encode(v), 0)

    event_time(coded)
    return dict(copy_us=sum(copies), torch_us=event_time(coded) * 1e3)


def append_store(case: Append, static, rotation="hadamard"):
    "A store in use, and more tokens, appended once."
    b, h, d, n, center = case
    recipe = Recipe(Spec(bits=3, center=center, rotation=rotation), Spec(bits=3))
    store = KVStore(
        recipe,
        b,
        h,
        d,
        dtype=torch.bfloat16,
        device=DEVICE,
        max_length=2048,
        static=static,
        inv_freq=frequencies(d),
        frame=frame(h, d),
    )
    append.append(
        store,
        states(b, h, 70, d, torch.bfloat16, 0, 0.5),
        states(b, h, 70, d, torch.bfloat16, 1),
    )
    k, v = states(b, h, n, d, torch.bfloat16, 2, 0.5), states(b, h, n, d, torch.bfloat16, 3)
    append.append(store, k, v)
    return store, k, v


def graph_times(case: Append, rotation="hadamard"):
    "µs of an append in a CUDA graph."
    store, k, v = append_store(case, True, rotation)
    return append_times(lambda: append.append(store, k, v), [store], tokens=case.tokens)


def host_times_of(case: Append):
    "µs that Python takes to launch an append."
    store, k, v = append_store(case, False)

    def back():
        store.length = 70  # what comes after is written again

    return host_times(lambda: append.append(store, k, v), 50, 20, back)[5:]


def append_case(case: Append):
    row = dict(
        case="append", k=3, v=3, unit="us", n=30, host_us=quantiles(host_times_of(case))["p50"]
    )
    return row | case._asdict() | quantiles(graph_times(case))


def tune_cases():
    "(d, (byte rows, launch options)) beside the packaged ones, k3v3."
    regs = lambda r: {"maxnreg": r} if r else {}
    plan = {
        128: (
            (64, 4, 1, 168),
            (64, 4, 2, 0),
            (64, 4, 3, 168),
            (64, 4, 3, 0),
            (64, 8, 2, 128),
            (64, 8, 2, 96),
            (64, 8, 3, 128),
            (32, 4, 2, 128),
        )
    }
    plan |= {
        64: ((64, 4, 2, 0), (64, 4, 2, 128), (64, 4, 3, 128)),
        256: ((64, 8, 2, 0), (64, 8, 2, 168)),
    }
    return [
        (d, (m, dict(num_warps=w, num_stages=s) | regs(r)))
        for d, cases in plan.items()
        for m, w, s, r in cases
    ]


def tune():
    "Time the options."
    for d, config in tune_cases():
        try:
            row = bulk_case(Bulk(d, batch=4, tokens=32768 if d < 256 else 16384), config)
            print(
                d,
                config,
                {
                    k: round(v, 2)
                    for k, v in row.items()
                    if k in ("p50", "giga_vectors", "terabytes")
                },
                flush=True,
            )
        except Exception as error:
            print(d, config, str(error)[:80], flush=True)


def to_compile(tuning):
    "Everything that will be timed."
    jobs = [(small, (case._replace(batch=1),), {}) for case in BULK]
    jobs += [(small, (Bulk(d), c), {}) for d, c in tune_cases()] if tuning else []
    return jobs + [(short, (case,), {}) for case in CASES["encode_kernel"]]


def options(p):
    p.add_argument(
        "--tune", action="store_true", help="print launch options beside the packaged ones"
    )
    p.add_argument("--workers", type=int, default=12, help="processes that compile")


def rows(tuning):
    for case in CASES["encode_kernel"]:
        yield append_case(case)
    for i, case in enumerate(BULK):
        yield bulk_case(case) | ({} if i else torch_path(case))
    if tuning:
        tune()


def plan(a):
    found = gate(a.workers, to_compile(a.tune))
    short_rows = (
        {k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()}
        for r in rows(a.tune)
    )
    return Plan(
        "encode_kernel",
        found,
        short_rows,
        {"id": "normal states", "n": 8 * 8 * 32768},
        seeds=[0, 1],
    )
