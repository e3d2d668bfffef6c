#!/usr/bin/env python3
"""Caches on disk, raw and entropy coded (chapter 57): storage.py --out FILE [--text FILE ...]
[options of recipes.py].

Exact keys and values of each window, rounded to bfloat16, fill a cache of each preset at each
length; it is saved both ways, read back and compared bit for bit. General compressors take the
raw file: zlib and lzma of Python's library, zstd where zstandard is installed."""

import argparse
import lzma
import statistics
import tempfile
import time
import zlib
from pathlib import Path

import torch
from recipes import add_options, opened

from turboquant_nb import results
from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.quant.quantizer import PRESETS
from turboquant_nb.hf.storage import load_compressed, save_compressed


def compressors():
    out = {"zlib -9": lambda x: zlib.compress(x, 9), "lzma": lzma.compress}
    try:
        import zstandard

        out[f"zstd -19 ({zstandard.__version__})"] = zstandard.ZstdCompressor(level=19).compress
    except ImportError:
        pass
    return out


def timed(f, *args):
    began = time.perf_counter()
    return f(*args), time.perf_counter() - began


def equal(a, b):
    "Every tensor and every number of every layer."
    for (t, h), (u, g) in zip(a.states()[0], b.states()[0], strict=True):
        if (
            h != g
            or t.keys() != u.keys()
            or not all(t[k].dtype == u[k].dtype and torch.equal(t[k], u[k]) for k in t)
        ):
            return False
    return True


def quantiles(x):
    "20th, 50th and 80th percentile."
    cut = statistics.quantiles(x, n=10, method="inclusive")
    return dict(
        p20=round(cut[1], 2),
        p50=round(cut[4], 2),
        p80=round(cut[7], 2),
        n=len(x),
        unit="MB/s of tensors held",
    )


def measure(model, states, name, tokens, folder, repeat):
    "One row: a preset at one length, over the windows."
    config = model.config.get_text_config()
    values, speed, ok = 0, {"save": [], "load": []}, True
    files = {"raw": 0, "compressed": 0}
    parts, others = {}, {}
    for window in states:
        cache = TurboQuantCache(config, name)
        for i, (k, v) in enumerate(window):
            cache.update(k[:, :, :tokens], v[:, :, :tokens], i)
            values += 2 * k[:, :, :tokens].numel()
        raw, packed = folder / "raw", folder / "packed"
        cache.save(raw)
        for _ in range(repeat):
            sizes, save = timed(save_compressed, cache, packed)
            again, load = timed(load_compressed, packed, config)
            held = sizes["file"][0] / 1e6
            speed["save"].append(held / save)
            speed["load"].append(held / load)
        ok = ok and equal(cache, again)
        files["raw"] += raw.stat().st_size
        files["compressed"] += packed.stat().st_size
        for k, (a, b) in sizes.items():
            parts[k] = [x + y for x, y in zip(parts.get(k, (0, 0)), (a, b))]
        if window is states[0]:  # of one window, as they are slow
            data = raw.read_bytes()
            others = {k: round(8 * len(f(data)) / values, 4) for k, f in compressors().items()}
    bits = lambda n: round(8 * n / values, 4)
    row = dict(
        preset=name,
        tokens=tokens,
        windows=len(states),
        bits_raw_file=bits(files["raw"]),
        bits_on_disk=bits(files["compressed"]),
        unit="bits per value",
    )
    row["parts"] = {k: [bits(a), bits(b)] for k, (a, b) in parts.items() if k != "file"}
    return row | dict(
        others=others, save=quantiles(speed["save"]), load=quantiles(speed["load"])
    ), ok


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(p)
    p.set_defaults(length=4096, windows=4)
    p.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[1024, 4096],
        help="tokens held, at most --length",
    )
    p.add_argument("--repeat", type=int, default=3, help="how often each file is timed")
    p.add_argument("--out", required=True)
    a = results.parse(p)
    if max(a.lengths) > a.length:
        p.error(f"--lengths must be at most --length, {a.length}")
    model, _, ids, _, origin = opened(a)
    states = []
    with torch.no_grad():
        for x in ids:
            layers = model.get_decoder()(x[None], use_cache=True).past_key_values.layers
            states.append(
                [
                    (layer.keys.bfloat16().cpu(), layer.values.bfloat16().cpu())
                    for layer in layers
                ]
            )
            print(f"window {len(states)} of {len(ids)}", flush=True)
    rows, passed = [], True
    with tempfile.TemporaryDirectory() as folder:
        for tokens in a.lengths:
            for name in PRESETS:
                row, ok = measure(model, states, name, tokens, Path(folder), a.repeat)
                passed = passed and ok
                rows.append(row)
                print(row, flush=True)
    gate = {
        "cmd": "every tensor of every loaded layer equal to what was saved, all rows",
        "passed": passed,
    }
    results.write(a, "storage", rows, gate, origin, {"id": a.data_id, "n": len(ids)}, [])


if __name__ == "__main__":
    main()
