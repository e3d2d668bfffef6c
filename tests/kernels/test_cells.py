"Kernels on an engine's blocks against the oracle: in the interpreter, or on a GPU with both kernels; compiled ahead of time for Hopper."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turboquant_nb.cache.pages import append_slots, attend_cells
from turboquant_nb.kernels.cells import CellPlan, Workspace, append_cells, count_splits, decode_cells
from turboquant_nb.kernels.decode import triton
from turboquant_nb.quant.quantizer import Quantizer, Spec
from turboquant_nb.theory.transforms import HeadTransform, register_transform

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_triton = pytest.mark.skipif(triton.language is None, reason="needs a GPU or Triton")
AOT = Path(__file__).parent / "aot_cells.py"


def pool(plan, blocks, heads, gen):
    raw = torch.randint(0, 256, (blocks, heads * plan.cell.nbytes + 64), dtype=torch.uint8, generator=gen).to(DEVICE)
    return raw, raw[:, : heads * plan.cell.nbytes].unflatten(1, (heads, plan.cell.tokens, plan.cell.bytes_per_token))


def case(gen, kb=3, vb=3, d=32, n=16, m=1, lengths=(70, 16, 0, 33), heads=2, group=3, dtype=torch.float32, rot="hadamard"):
    if rot == "transform":
        u, v = torch.linalg.qr(torch.randn(2, heads, d, d, generator=gen))[0]
        rot = register_transform(HeadTransform.of(u * torch.linspace(0.3, 2, d) @ v)).name
    plan = CellPlan(Quantizer(Spec(kb, rotation=rot), d, DEVICE), Quantizer(Spec(vb), d, DEVICE), n)
    need = [-(-x // n) for x in lengths]
    _, cache = pool(plan, sum(need) + 1, heads, gen)
    order, table = torch.randperm(sum(need), generator=gen).split(need), torch.full((len(lengths), max(need) + 3), 10**6, dtype=torch.int32)
    for row, blocks, length in zip(table, order, lengths):
        row[: len(blocks)] = blocks
        t = torch.arange(length)
        k, v = torch.randn(2, length, heads, d, generator=gen).to(DEVICE)
        append_slots(cache, plan.cell, plan.key, plan.value, k, v, (row[t // n].long() * n + t % n).to(DEVICE))
    x = torch.randn(len(lengths) * m, (group + 2) * heads, d, generator=gen).to(DEVICE, dtype)
    return plan, cache, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), *x.split([group * heads, heads, heads], 1)


CASES = [
    (dict(), {}), (dict(n=32), {}), (dict(n=64), {}), (dict(n=128, lengths=(300, 1)), {}), (dict(n=256, lengths=(300,)), {}), (dict(kb=1, vb=2), {}), (dict(kb=4, vb=1), {}),
    (dict(kb=2, vb=4, d=48), {}), (dict(m=4, group=5), {}), (dict(m=16, lengths=(40, 70)), {}), (dict(group=16, heads=1), {}), (dict(rot="transform"), {}), (dict(d=80, heads=1), {}),
    (dict(), dict(sliding_window=20)), (dict(m=3), dict(sliding_window=2)), (dict(n=32), dict(softcap=3.0)), (dict(), dict(splits=1)), (dict(), dict(splits=9)), (dict(), dict(scaling=0.3)),
    (dict(own=False), {}), (dict(own=False, m=4), dict(sliding_window=20)), (dict(lengths=(0, 0)), {}), (dict(dtype=torch.float16), {}),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize("of,options", CASES)
def test_decode(of, options, gen):
    "Every kernel that runs here, with a workspace full of NaN."
    own = of.get("own", True)  # else the codes of the queries' own tokens are read
    plan, cache, table, lengths, q, k, v = case(gen, **{k: x for k, x in of.items() if k != "own"})
    states = (k, v) if own else (None, None)
    oracle = {name: x for name, x in options.items() if name != "splits"}
    starts = torch.arange(len(lengths) + 1) * (len(q) // len(lengths))
    exact = [x if x is None else x.float() for x in states]
    want, want_lse = attend_cells(q.float(), cache, plan.cell, plan.key, plan.value, table, lengths, starts, *exact, **oracle)
    for kernel in ("portable", "fragments") if CUDA and plan.supports("fragments")[0] else ("portable",):
        space = Workspace(DEVICE, 10**6)
        space.memory.fill_(torch.nan)
        out, lse = decode_cells(q, cache, plan, table, lengths, *states, kernel=kernel, workspace=space, **options)
        seen = want_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen) and (out[~seen] == 0).all()
        if seen.any():
            limit = 3e-3 if CUDA or q.dtype != torch.float32 else 1e-5
            assert (out.float() - want)[seen].norm() <= limit * want[seen].norm() and (lse - want_lse)[seen].abs().max() < max(1e-4, limit)


@needs_triton
@pytest.mark.parametrize("n,kb,vb,d", ((16, 3, 3, 32), (16, 1, 4, 48), (64, 4, 2, 64), (256, 3, 3, 16)))
def test_append(n, kb, vb, d, gen):
    "Chunks of all lengths from all places, short calls too: codes as the oracle's, and no other byte."
    plan = CellPlan(Quantizer(Spec(kb), d, DEVICE), Quantizer(Spec(vb), d, DEVICE), n)
    raw, _ = pool(plan, 24, 2, gen)
    for runs in (((n // 2 + 3, 2 * n + 5), (0, n), (5, 1)), ((n - 1, 1), (3, 2)), ((n // 3, n // 4 + 1),)):
        slots, free = [], torch.randperm(24, generator=gen).tolist()
        for first, count in runs:
            mine = [free.pop() for _ in range(-(-(first + count) // n))]
            slots += [mine[p // n] * n + p % n for p in range(first, first + count)] + [-1]
        slots = torch.tensor(slots).to(DEVICE)
        k, v = torch.randn(len(slots), 6, d, generator=gen).to(DEVICE)[:, 1:5].split(2, 1)
        mine, theirs = raw.clone(), raw.clone()
        view = lambda x: x[:, : 2 * plan.cell.nbytes].unflatten(1, (2, n, plan.cell.bytes_per_token))
        append_cells(view(mine), plan, k, v, slots)
        append_slots(view(theirs), plan.cell, plan.key, plan.value, k, v, slots)
        written = theirs != raw
        assert (mine != theirs).sum() <= 2e-3 * written.sum() and written.any()
        raw = theirs


@needs_triton
def test_the_order_that_is_asked_for(gen):
    "Tokens of a block in one run, in order, are coded as by the oracle; the mutant brings them in the wrong order, and bits are lost."
    plan = CellPlan(Quantizer(Spec(3), 32, DEVICE), Quantizer(Spec(3), 32, DEVICE), 16)
    raw, _ = pool(plan, 1, 1, gen)
    k, v = torch.randn(2, 16, 1, 32, generator=gen).to(DEVICE)
    view = lambda x: x[:, : plan.cell.nbytes].unflatten(1, (1, 16, plan.cell.bytes_per_token))
    want, slots = raw.clone(), torch.arange(16, device=DEVICE)
    append_slots(view(want), plan.cell, plan.key, plan.value, k, v, slots)
    good = raw.clone()
    append_cells(view(good), plan, k, v, slots)
    assert (good != want).sum() <= 2
    bad = raw.clone()
    append_cells(view(bad), plan, k, v, slots.flip(0))
    append_slots(view(raw), plan.cell, plan.key, plan.value, k, v, slots.flip(0))
    assert (bad != raw).sum() > 20


def test_splits():
    assert count_splits(256, 8, 100) == 1 and count_splits(32768, 64, 1056) == 16 and count_splits(32768, 2000, 1056) == 1
    for tokens in (1, 300, 5000, 10**6):
        for programs in (1, 7, 300):
            assert 1 <= count_splits(tokens, programs, 1056) <= max(1, -(-tokens // 256))


def aot(*cases):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(AOT), *map(json.dumps, cases)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
def test_compiled_for_hopper():
    "The kernels of a step, with the settings that are launched: no spills where they would cost, copies of 16 bytes."
    pytest.importorskip("triton.experimental.gluon")
    fragments = [dict(kernel="fragments", tokens=64), dict(kernel="fragments", tokens=128, d=64)]
    for got in aot(*fragments):
        assert got["spills"] == 0 and got["copies of 16 bytes"] > 0 and got["registers"] <= 255, got
    for got in aot(dict(kernel="append", steps=1), dict(kernel="join"), dict(kernel="past")):
        assert got["spills"] == 0, got
