#!/usr/bin/env python3
"""Every kernel once or twice on small, odd shapes, for `PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python scripts/tools/memcheck.py`: without PyTorch's cache each
tensor is an allocation of its own, and reading one element beside it is reported. Prints what ran.
Long chunks are left out: torch's own flash attention (2.11, 70 queries, head size 96) writes one log-sum-exp beside its tensor, which the cache's rounding hides."""
import torch

from turboquant_nb.kernels import encode, launch
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from turboquant_nb.quant.quantizer import Recipe, Spec
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
        torch.cuda.synchronize()
        print(f"ran batch {batch}, {heads} KV heads, group {group}, d={d}, {k_bits}/{v_bits} bits, centre {center}, {'static' if static else 'growing'}, {name}", flush=True)


if __name__ == "__main__":
    main()
