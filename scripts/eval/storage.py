"""Caches on disk, raw and entropy coded (chapter 57): run.py storage --out FILE [--text FILE
...] [options of recipes].

Exact keys and values of each window, rounded to bfloat16, fill a cache of each preset at each
length; it is saved both ways, read back and compared bit for bit. General compressors take the
raw file: zlib and lzma of Python's library, zstd where zstandard is installed."""

import lzma
import tempfile
import time
import zlib
from pathlib import Path

import torch
from bench.timing import quantiles
from eval.windows import Windows, add_options
from plan import Plan

from turboquant_nb.hf import TurboQuantCache
from turboquant_nb.hf.storage import load_compressed, save_compressed
from turboquant_nb.quant.recipe import PRESETS


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


def speeds(x):
    found = {k: round(v, 2) for k, v in quantiles(x).items()}
    return found | dict(n=len(x), unit="MB/s of tensors held")


def measure(model, states, name, tokens, folder, repeat):
    "One row: a preset at one length, over the windows."
    config = model.config.get_text_config()
    values, save, load, same = 0, [], [], True
    raw, packed, files = folder / "raw", folder / "packed", [0, 0]
    parts, others = {}, {}
    bits = lambda n: round(8 * n / values, 4)
    for window in states:
        cache = TurboQuantCache(config, name)
        for i, pair in enumerate(window):
            cache.update(*(x[:, :, :tokens] for x in pair), i)
            values += sum(x[:, :, :tokens].numel() for x in pair)
        cache.save(raw)
        for _ in range(repeat):
            sizes, saving = timed(save_compressed, cache, packed)
            again, loading = timed(load_compressed, packed, config)
            held = sizes["file"][0] / 1e6
            save.append(held / saving)
            load.append(held / loading)
        same &= equal(cache, again)
        files = [n + x.stat().st_size for n, x in zip(files, (raw, packed))]
        for k, pair in sizes.items():
            parts[k] = [x + y for x, y in zip(parts.get(k, (0, 0)), pair)]
        if window is states[0]:  # of one window, as they are slow
            others = {k: bits(len(f(raw.read_bytes()))) for k, f in compressors().items()}
    about = dict(preset=name, tokens=tokens, windows=len(states), unit="bits per value")
    sizes = dict(bits_raw_file=bits(files[0]), bits_on_disk=bits(files[1]))
    parts = {k: [*map(bits, pair)] for k, pair in parts.items() if k != "file"}
    speed = dict(save=speeds(save), load=speeds(load), same=same)
    return about | sizes | dict(parts=parts, others=others) | speed


def options(p):
    add_options(p, length=4096, windows=4)
    p.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[1024, 4096],
        help="tokens held, at most --length",
    )
    p.add_argument("--repeat", type=int, default=3, help="how often each file is timed")


@torch.no_grad()
def rows(a, w):
    states = []
    for x in w.ids:
        layers = w.model.get_decoder()(x[None], use_cache=True).past_key_values.layers
        states.append([(s.keys.bfloat16().cpu(), s.values.bfloat16().cpu()) for s in layers])
    with tempfile.TemporaryDirectory() as folder:
        for tokens in a.lengths:
            for name in PRESETS:
                yield measure(w.model, states, name, tokens, Path(folder), a.repeat)


def gate(rows):
    cmd = "every tensor of every loaded layer equal to what was saved, all rows"
    return {"cmd": cmd, "passed": all(r["same"] for r in rows)}


def plan(a):
    if max(a.lengths) > a.length:
        raise SystemExit(f"--lengths must be at most --length, {a.length}")
    w = Windows(a)
    return Plan("storage", gate, rows(a, w), w.data, w.origin, seeds=[])
