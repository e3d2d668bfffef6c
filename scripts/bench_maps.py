#!/usr/bin/env python3
"""What maps cost on one NVIDIA GPU: decode attention and coding with a matrix for every head (notebook 21) against the rotation, same bits: bench_maps.py --out FILE.

Gate: the decode kernel agrees with attention.attend on the same codes to 1e-3, and the encode kernel gives the codes of PyTorch but for ties, both with maps. Then medians with
20th and 80th percentiles: whole attention as a cache calls it, launched from Python and replayed from a CUDA graph; long appends; short appends in a graph."""
import argparse

import torch
from bench_encode_kernel import frequencies, graph_times, quantiles
from bench_kernels import fill, graphed, states, timed

from turboquant_nb import results
from turboquant_nb.attention import attend
from turboquant_nb.kernels import encode
from turboquant_nb.kernels.launch import decode_attention
from turboquant_nb.maps import register_maps
from turboquant_nb.quantizer import Recipe, Spec
from turboquant_nb.store import KVStore

CASES = [(8, 8, 4, 128, 32768), (1, 8, 4, 128, 131072), (64, 8, 4, 128, 4096), (8, 8, 3, 64, 32768), (8, 8, 4, 256, 16384), (1, 8, 4, 128, 4096)]  # batch, KV heads, group, head size, tokens


def random_maps(heads, d):
    "Matrices that are no rotations."
    u, v = torch.linalg.qr(torch.randn(2, heads, d, d, generator=torch.Generator().manual_seed(d)))[0]
    return register_maps(u * torch.linspace(0.3, 2, d) @ v).name


def gate():
    worst, differing = 0.0, 0.0
    for batch, d, group, center in ((2, 128, 4, "rope"), (2, 64, 3, "rope"), (2, 256, 4, "rope"), (2, 128, 8, "prompt"), (2, 96, 4, "rope"), (8, 128, 4, "rope"), (64, 128, 4, "prompt")):
        q, k, v = states(batch, 2, group, d, 3000, torch.float32)
        store = fill(batch, 2, d, 3000, 3, 3, k, v, center, random_maps(2, d))
        for _ in range(2):  # launched, and launched again without Triton's look-up
            got = decode_attention(q, store, kernel="fragments")[0]
            want = attend(q, store)[0]
            worst = max(worst, float((got - want).norm() / want.norm()))
        k, v = k.bfloat16(), v.bfloat16()
        pair = [KVStore(Recipe(Spec(center=center, rotation=random_maps(2, d)), Spec()), batch, 2, d, dtype=torch.bfloat16, device="cuda", inv_freq=frequencies(d)) for _ in range(2)]
        for a, b in ((0, 300), (300, 301), (301, 340)):
            encode.append(pair[0], k[:, :, a:b], v[:, :, a:b])
            pair[1].append(k[:, :, a:b], v[:, :, a:b])
        one, two = (s.coded("key", 0, 340).codes for s in pair)
        differing = max(differing, float((one != two).float().mean()))
    return {"cmd": "with maps: decode kernel against attention.attend, relative; codes that the encode kernel gives unlike PyTorch, share", "worst": worst, "differing": differing, "passed": worst <= 1e-3 and differing <= 2e-4}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=0.05)
    p.add_argument("--out", required=True)
    a = results.parse(p)
    verdict, rows = gate(), []
    print(verdict, flush=True)
    if not verdict["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")

    def add(**row):
        rows.append(dict(unit="us") | row)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        results.write(a, "maps", rows, verdict, {"id": "none"}, {"id": "normal states", "n": len(CASES)}, [0])

    for case in CASES:
        batch, heads, group, d, tokens = case
        q, k, v = states(*case)
        sizes = dict(batch=batch, heads=heads, group=group, d=d, tokens=tokens)
        for bits in (3, 2, 4) if case == CASES[0] else (3,):
            for center in ("rope", "prompt"):
                for rotation in ("hadamard", random_maps(heads, d)):
                    store = fill(batch, heads, d, tokens, bits, bits, k, v, center, rotation)
                    how = dict(what="attention", codes="maps" if rotation[:3] == "map" else "rotation", center=center, bits=bits, **sizes)
                    for launch, wrap in (("graph", graphed), ("eager", lambda f: f)):
                        f = wrap(lambda store=store, q=q: decode_attention(q, store))
                        add(**how, launch=launch, n=1, **timed(f, a.seconds))
        del k, v, store
    for d in (64, 128, 256):
        _, k, v = states(8, 8, 1, d, 16384)
        for rotation in ("hadamard", random_maps(8, d)):
            store = KVStore(Recipe(Spec(center="rope", rotation=rotation), Spec()), 8, 8, d, dtype=torch.bfloat16, device="cuda", max_length=16384, inv_freq=frequencies(d))
            encode.append(store, k[:, :, :256], v[:, :, :256])
            store.cos_sin.reach(16384)
            means = [s.mean for s in (store.key, store.value)]
            store.length = 16384  # as after a long append: the table of turns is as long
            to = [encode.target(s, m, store) for s, m in zip((store.key, store.value), means)]
            flags = torch.zeros(4, dtype=torch.int32, device="cuda")
            codes = "maps" if rotation[:3] == "map" else "rotation"
            add(what="coding", codes=codes, d=d, batch=8, heads=8, tokens=16384, n=1, **timed(lambda to=to, k=k, v=v, flags=flags: encode.encode_append(k, v, *to, 0, flags), a.seconds))
            times = dict(zip(("p20", "p50", "p80"), quantiles(graph_times(8, 8, d, 1, "rope", rotation))))
            add(what="append", codes=codes, d=d, batch=8, heads=8, tokens=1, n=30, **times)


if __name__ == "__main__":
    main()
