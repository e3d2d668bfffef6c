#!/usr/bin/env python3
"""Every kernel once or twice on small, odd shapes, under NVIDIA's compute-sanitizer where
`--tool` names one of its tools:

    python scripts/tools/memcheck.py --tool memcheck
    python scripts/tools/memcheck.py --tool racecheck

memcheck finds reads and writes beside a tensor: PyTorch's memory cache is off, so each tensor
is an allocation of its own. racecheck finds threads of one block that read and write shared
memory without waiting for each other.

Without `--tool` the kernels run as they are; without a GPU those that Triton's interpreter can
run do (TRITON_INTERPRET=1). Prints what ran, and what `--seconds` left out. Long chunks are
left out: torch's own flash attention (2.11, 70 queries, head size 96) writes one log-sum-exp
beside its tensor, which the cache's rounding hides."""

import argparse
import os
import shutil
import sys
import time
from typing import NamedTuple

import torch

from turboquant_nb.kernels import blocks, encode as append, encode as encode_launch, launch, ops
from turboquant_nb.kernels.cell_attention import LaunchOptions, decode_cells
from turboquant_nb.kernels.cells import CellPlan, append_cells
from turboquant_nb.kernels.cell_attention import past_cells
from turboquant_nb.kernels.cells import append_recent, locate_positions, locate_sinks
from turboquant_nb.theory.centre import shared_cos_sin
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from turboquant_nb.quant.calibration import LayerFrame
from turboquant_nb.quant.quantizer import Quantizer, Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.cache.pages import Exact, Recent, Requests
from turboquant_nb.cache.budget import coarser
from turboquant_nb.cache.store import KVStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOOLS = {
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "racecheck": {},
}  # what each tool wants in the environment


class StoreCase(NamedTuple):
    "A store and the kernel that reads it."

    batch: int
    heads: int  # KV heads
    group: int
    d: int
    k_bits: int
    v_bits: int
    center: str  # of keys, and whether they have a transform
    static: bool
    kernel: str


CASES = [
    StoreCase(1, 3, 4, 128, 3, 3, "pre_rope", False, "fragments"),
    StoreCase(2, 1, 8, 128, 4, 2, "fixed", True, "fragments"),
    StoreCase(1, 5, 3, 64, 2, 3, "pre_rope", True, "fragments"),
    StoreCase(1, 3, 4, 96, 3, 4, "fixed", False, "fragments"),
    StoreCase(1, 1, 1, 256, 4, 4, "pre_rope", False, "fragments"),
    StoreCase(1, 3, 2, 48, 3, 1, "pre_rope", False, "portable"),
    StoreCase(2, 3, 4, 128, 3, 3, "pre_rope transform", False, "fragments"),
    StoreCase(1, 1, 3, 64, 4, 2, "fixed transform", True, "fragments"),
]


def kernel_here(name):
    "The kernel of a case; without a GPU the portable one."
    return name if DEVICE == "cuda" else "portable"


def done(*said):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("ran", *said, flush=True)


def states(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def frame_of(heads, d):
    "Means of keys."
    return LayerFrame(*torch.randn(2, heads, d))


def store_case(case):
    "A store that grows by a prompt, single tokens and drafts."
    batch, heads, group, d, k_bits, v_bits, center, static, name = case
    center, *transform = center.split()
    rotation = (
        register_transform(
            HeadTransform.of(
                torch.eye(d).repeat(heads, 1, 1) + 0.1 * torch.randn(heads, d, d) / d**0.5
            )
        ).name
        if transform
        else "hadamard"
    )
    recipe = Recipe(Spec(k_bits, center=center, rotation=rotation), Spec(v_bits))
    inv_freq = 10000.0 ** (-torch.arange(0, d, 2) / d) if center == "pre_rope" else None
    length = 300 if static else None
    store = KVStore(
        recipe,
        batch,
        heads,
        d,
        dtype=torch.bfloat16,
        device=DEVICE,
        inv_freq=inv_freq,
        max_length=length,
        static=static,
        frame=frame_of(heads, d),
    )
    for n in (255, 1, 1, 3, 33):
        x = states(2, batch, heads, n, d)
        append.append(store, *x)
        if n > 3:
            continue
        for repeat in range(2):
            q = states(batch, heads * group, n, d)
            out, lse = launch.decode_attention(
                q, store, *(x if repeat else ()), kernel=kernel_here(name)
            )
            assert out.isfinite().all() and lse.isfinite().all()
        out, lse = launch.decode_attention(
            q, store, *x, kernel=kernel_here(name), recent=2
        )  # drafts, each with two exact tokens of its own
        assert out.isfinite().all()
    tables = launch.store_plan(store).tables
    if not blocks.refuses(store, tables):
        assert all(
            x.isfinite().all() for x in blocks.read_block(store, tables, 3, store.length - 7)
        )
    pieces = [
        torch.randn(7, 1, d, device=DEVICE),
        torch.randn(7, 1, device=DEVICE),
        states(7, 1, d),
        torch.randn(7, 1, device=DEVICE),
    ]
    blocks.join_piece(*pieces)
    assert pieces[0].isfinite().all()
    done(
        f"batch {batch}, {heads} KV heads, group {group}, d={d}, {k_bits}/{v_bits} bits, "
        f"centre {center}{' transform' if transform else ''}, "
        f"{'static' if static else 'growing'}, {kernel_here(name)}"
    )


# batch, KV heads, group, head size, key bits, value bits, residual of keys, whether both sides
# have lost a plane
PARTS = [
    (1, 3, 4, 128, 2.5, 3.5, "none", False),
    (2, 1, 3, 64, 4, 2.25, "qjl", False),
    (1, 2, 5, 48, 3, 4, "none", True),
    (1, 3, 2, 96, 3.5, 2.5, "none", True),
]


def part_case(case):
    """Codes without one table: channels of two bit widths, a QJL residual; codes that have lost
    a plane; with exact first and recent tokens."""
    batch, heads, group, d, k_bits, v_bits, residual, lost = case
    recipe = Recipe(
        Spec(k_bits, center="fixed", residual=residual), Spec(v_bits), sinks=3, recent=5
    )
    more = dict(device=DEVICE, tile=64, frame=frame_of(heads, d))
    recipe = coarser(recipe) if lost else recipe
    store = KVStore(recipe, batch, heads, d, dtype=torch.bfloat16, **more)
    for n in (255, 1, 3):
        x = states(2, batch, heads, n, d)
        (KVStore.append if encode_launch.refuses(recipe, d, device=DEVICE) else append.append)(
            store, *x
        )
        q = states(batch, heads * group, min(n, 3), d)
        for chunk in ((), x) if n < 255 else ((),):
            with torch.no_grad():
                out, lse = ops.attend(q, store, *chunk, backend="blocks")
            assert out.isfinite().all() and lse.isfinite().all()
    done(
        f"codes without a table: batch {batch}, {heads} KV heads, group {group}, d={d}, "
        f"{k_bits}/{v_bits} bits, residual {residual}, "
        f"{'a plane lost' if lost else 'all planes'}"
    )


# tokens of a block, KV heads, group, head size, key bits, value bits, query tokens, whether
# keys have a centre
CELLS = [
    (64, 3, 4, 128, 3, 3, 1, True),
    (128, 2, 3, 64, 3, 4, 4, False),
    (16, 1, 5, 96, 4, 2, 2, True),
    (256, 1, 8, 256, 2, 3, 1, False),
]


def random_cells(plan, heads, n):
    """A pool of five blocks for `heads` heads whose bytes are all random, and a table of two
    requests."""
    cache = plan.cell.empty(5, heads, DEVICE).random_(0, 256)
    for side in plan.memories(cache):
        side.tensors["scale"].fill_(0.5)
    table = torch.tensor([[2, 0, 3], [1, 4, 0]], dtype=torch.int32, device=DEVICE)
    return cache, table, torch.tensor([3 * n, n + 7], dtype=torch.int32, device=DEVICE)


def plan_of(n, heads, d, k_bits, v_bits, centred):
    "A centre of small blocks is one that RoPE turns."
    turn = shared_cos_sin(0.8 ** torch.arange(d / 2), d, DEVICE) if centred and n < 64 else None
    if turn:
        turn.reach(3 * n)
    return CellPlan(
        Quantizer(Spec(k_bits), d, DEVICE),
        Quantizer(Spec(v_bits), d, DEVICE),
        n,
        torch.randn(heads, d) if centred else None,
        turn,
    )


def cell_case(case):
    """Blocks that fill their memory to the last byte: a prompt, a short call, drafts, the past
    of a chunk."""
    n, heads, group, d, k_bits, v_bits, m, centred = case
    plan = plan_of(n, heads, d, k_bits, v_bits, centred)
    cache, table, lengths = random_cells(plan, heads, n)
    for row, first, count in ((0, 0, 3 * n), (1, 0, n + 3), (1, n + 3, 4)):
        t = torch.arange(first, first + count, device=DEVICE)
        slots = table[row][t // n].long() * n + t % n
        append_cells(cache, plan, *states(2, count, heads, d), slots, t)
    q, k, v = (states(2 * m, h, d) for h in (group * heads, heads, heads))
    for kernel in dict.fromkeys((kernel_here("fragments"), "portable")):
        out, lse = decode_cells(
            q,
            cache,
            plan,
            Requests(table, lengths),
            Exact(k, v),
            how=LaunchOptions(kernel=kernel),
        )
        assert out.isfinite().all() and lse.isfinite().all()
    k, v = (
        torch.empty(2 * n + 5, heads, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    past_cells(cache, plan, table[0], 2 * n + 5, k, v)
    blocks.join_piece(out, lse, out.clone(), lse.clone())
    done(
        f"blocks of {n}, {heads} KV heads, group {group}, d={d}, {k_bits}/{v_bits} bits, {m} "
        f"query tokens, {'a' if centred else 'no'} centre"
    )


class SinkCase(NamedTuple):
    "Blocks of an engine with exact recent and first tokens."

    n: int  # tokens of a block
    heads: int  # KV heads
    group: int
    d: int
    k_bits: int
    v_bits: int
    m: int  # query tokens
    centred: bool  # keys
    tokens: int  # recent ones
    sinks: int


SINKS = [
    SinkCase(16, 2, 3, 64, 3, 3, 1, True, 7, 4),
    SinkCase(64, 1, 4, 128, 4, 3, 4, False, 9, 20),
    SinkCase(32, 1, 5, 48, 3, 2, 2, True, 1, 1),
]


def sink_case(case):
    """Exact recent and first tokens beside codes: prompts, steps that carry the first tokens
    into new blocks, attention to all of it."""
    n, heads, group, d, k_bits, v_bits, m, centred, tokens, sinks = case
    plan, size = plan_of(n, heads, d, k_bits, v_bits, centred), 4  # recent tokens of a block
    cache, table, lengths = random_cells(plan, heads, n)
    width = -(-int(lengths.max()) // size)
    rows = torch.arange(2 * width, dtype=torch.int32, device=DEVICE).view(2, width)
    near = Recent(
        torch.zeros(2 * width, heads, size + sinks, 2 * d, device=DEVICE, dtype=torch.bfloat16),
        rows,
        tokens,
        sinks,
    )
    begin = torch.zeros(2, dtype=torch.long)
    for end in (lengths.cpu() - m - 1, lengths.cpu() - m):  # prompts, then a step
        slots = torch.cat(
            [
                rows[i, (t := torch.arange(a, b, device=DEVICE)) // size] * size + t % size
                for i, (a, b) in enumerate(zip(begin.tolist(), end.tolist()))
            ]
        )
        starts = torch.tensor(
            [0, *(end - begin).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE
        )
        origins = torch.empty(len(slots), sinks, dtype=torch.int32, device=DEVICE)
        ends = end.to(DEVICE, torch.int32)
        locate_sinks(rows, ends, starts, slots, size, origins)
        locate_positions(ends, starts, torch.empty_like(slots, dtype=torch.int32))
        append_recent(near.cache, *states(2, len(slots), heads, d), slots, origins)
        begin = end
    found = near.read(near.places([*enumerate(begin.tolist())]), d)
    assert all(first.ne(0).any() for (first, _), _ in found)
    q, k, v = (states(2 * m, h, d) for h in (group * heads, heads, heads))
    for kernel in dict.fromkeys((kernel_here("fragments"), "portable")):
        kernel = "portable" if plan.refuses(kernel) else kernel
        out, lse = decode_cells(
            q,
            cache,
            plan,
            Requests(table, lengths),
            Exact(k, v, near),
            how=LaunchOptions(kernel=kernel),
        )
        assert out.isfinite().all() and lse.isfinite().all()
    done(
        f"{sinks} first and {tokens} recent tokens beside blocks of {n}, {heads} KV heads, "
        f"group {group}, d={d}, {k_bits}/{v_bits} bits, {m} query tokens, "
        f"{'a' if centred else 'no'} centre"
    )


GROUPS = {
    "sinks": (sink_case, SINKS),
    "parts": (part_case, PARTS),
    "cells": (cell_case, CELLS),
    "stores": (store_case, CASES),
}


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--tool",
        choices=TOOLS,
        help=(
            "run under this tool of compute-sanitizer; it exits with 9 where the tool found "
            "something"
        ),
    )
    p.add_argument(
        "--only",
        nargs="+",
        choices=GROUPS,
        default=[*GROUPS],
        help="which cases: of exact first tokens, codes in parts, an engine's blocks, stores",
    )
    p.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no case after so many seconds",
    )
    a = p.parse_args()
    if a.tool:
        if not shutil.which("compute-sanitizer"):
            sys.exit(
                "compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit"
            )
        rest = ["--only", *a.only, "--seconds", str(a.seconds)]
        sys.stdout.flush()
        os.execvpe(
            "compute-sanitizer",
            [
                "compute-sanitizer",
                "--tool",
                a.tool,
                "--error-exitcode",
                "9",
                sys.executable,
                __file__,
                *rest,
            ],
            os.environ | TOOLS[a.tool],
        )
    began, cases = (
        time.perf_counter(),
        [(run, case) for name in a.only for run, those in [GROUPS[name]] for case in those],
    )
    for i, (run, case) in enumerate(cases):
        if time.perf_counter() - began > a.seconds:
            print(
                f"{len(cases) - i} of {len(cases)} cases were left out after {a.seconds:g} "
                f"seconds, from {case} on",
                flush=True,
            )
            sys.exit(3)
        run(case)
    print(f"all {len(cases)} cases ran in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
