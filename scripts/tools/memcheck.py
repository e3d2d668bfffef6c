#!/usr/bin/env python3
"""Every kernel once or twice on small, odd shapes, for `PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python scripts/tools/memcheck.py`: without PyTorch's cache each
tensor is an allocation of its own, and reading one element beside it is reported. Prints what ran.
`memcheck.py cells` runs the kernels on an engine's blocks alone.
Long chunks are left out: torch's own flash attention (2.11, 70 queries, head size 96) writes one log-sum-exp beside its tensor, which the cache's rounding hides."""
import sys

import torch

from turboquant_nb.kernels import blocks, encode, launch
from turboquant_nb.kernels.cells import CellPlan, append_cells, decode_cells, join_past, past_cells
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from turboquant_nb.quant.quantizer import Quantizer, Recipe, Spec
from turboquant_nb.cache.store import KVStore

CASES = [  # batch, KV heads, group, head size, key bits, value bits, centre of keys, static, kernel
    (1, 3, 4, 128, 3, 3, "pre_rope", False, "fragments"),
    (2, 1, 8, 128, 4, 2, "prompt_mean", True, "fragments"),
    (1, 5, 3, 64, 2, 3, "pre_rope", True, "fragments"),
    (1, 3, 4, 96, 3, 4, "prompt_mean", False, "fragments"),
    (1, 1, 1, 256, 4, 4, "pre_rope", False, "fragments"),
    (1, 3, 2, 48, 3, 1, "pre_rope", False, "portable"),
    (2, 3, 4, 128, 3, 3, "pre_rope transform", False, "fragments"),
    (1, 1, 3, 64, 4, 2, "prompt_mean transform", True, "fragments"),
]


def main():
    device = "cuda"
    for batch, heads, group, d, k_bits, v_bits, center, static, name in CASES:
        center, *transform = center.split()
        rotation = register_transform(HeadTransform.of(torch.eye(d).repeat(heads, 1, 1) + 0.1 * torch.randn(heads, d, d) / d**0.5)).name if transform else "hadamard"
        recipe = Recipe(Spec(k_bits, center=center, rotation=rotation), Spec(v_bits))
        inv_freq = 10000.0 ** (-torch.arange(0, d, 2) / d) if center == "pre_rope" else None
        length = 300 if static else None
        store = KVStore(recipe, batch, heads, d, dtype=torch.bfloat16, device=device, inv_freq=inv_freq, max_length=length, static=static)
        for n in (255, 1, 1, 3, 33):
            x = torch.randn(2, batch, heads, n, d, device=device, dtype=torch.bfloat16)
            assert encode.append(store, *x) is None
            if n > 3:
                continue
            for repeat in range(2):
                q = torch.randn(batch, heads * group, n, d, device=device, dtype=torch.bfloat16)
                out, lse = launch.decode_attention(q, store, *(x if repeat else ()), kernel=name)
                assert out.isfinite().all() and lse.isfinite().all()
            out, lse = launch.decode_attention(q, store, *x, kernel=name, recent=2)  # drafts, each with two exact tokens of its own
            assert out.isfinite().all()
        tables = launch._plan_of(store).tables
        if blocks.supports(store, tables)[0]:
            assert all(x.isfinite().all() for x in blocks.read_block(store, tables, 3, store.length - 7))
        pieces = [torch.randn(7, d, device=device), torch.randn(7, device=device), torch.randn(7, d, device=device, dtype=torch.bfloat16), torch.randn(7, device=device)]
        blocks.join_piece(*pieces)
        assert pieces[0].isfinite().all()
        torch.cuda.synchronize()
        print(f"ran batch {batch}, {heads} KV heads, group {group}, d={d}, {k_bits}/{v_bits} bits, centre {center}, {'static' if static else 'growing'}, {name}", flush=True)


CELLS = [  # tokens of a block, KV heads, group, head size, key bits, value bits, query tokens, whether keys have a centre
    (64, 3, 4, 128, 3, 3, 1, True),
    (128, 2, 3, 64, 3, 4, 4, False),
    (16, 1, 5, 96, 4, 2, 2, True),
    (256, 1, 8, 256, 2, 3, 1, False),
]


def cells():
    "Blocks that fill their memory to the last byte: a prompt, a short call, drafts, the past of a chunk."
    for n, heads, group, d, k_bits, v_bits, m, centred in CELLS:
        center = torch.randn(heads, d) if centred else None
        plan = CellPlan(Quantizer(Spec(k_bits), d, "cuda"), Quantizer(Spec(v_bits), d, "cuda"), n, center)
        table = torch.tensor([[2, 0, 3], [1, 4, 0]], dtype=torch.int32, device="cuda")
        cache = plan.cell.empty(5, heads, "cuda").random_(0, 256)
        for name, part in plan.cell.views(cache).items():
            part.fill_(0.5) if "scale" in name else None
        lengths = torch.tensor([3 * n, n + 7], dtype=torch.int32, device="cuda")
        for row, first, count in ((0, 0, 3 * n), (1, 0, n + 3), (1, n + 3, 4)):
            t = torch.arange(first, first + count, device="cuda")
            k, v = torch.randn(2, count, heads, d, device="cuda", dtype=torch.bfloat16)
            append_cells(cache, plan, k, v, table[row][t // n].long() * n + t % n)
        q, k, v = (torch.randn(2 * m, h, d, device="cuda", dtype=torch.bfloat16) for h in (group * heads, heads, heads))
        for kernel in ("fragments", "portable"):
            out, lse = decode_cells(q, cache, plan, table, lengths, k, v, kernel=kernel)
            assert out.isfinite().all() and lse.isfinite().all()
        k, v = (torch.empty(2 * n + 5, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        past_cells(cache, plan, table[0], 2 * n + 5, k, v)
        join_past(out, lse, out.clone(), lse.clone())
        torch.cuda.synchronize()
        print(f"ran blocks of {n}, {heads} KV heads, group {group}, d={d}, {k_bits}/{v_bits} bits, {m} query tokens, {'a' if centred else 'no'} centre", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["cells"]:
        main()
    cells()
