"""The caches of other packages on the windows of the leaderboard: run.py peers --out FILE
[--text FILE ...] [--only NAME ...] [--packages DIR].

Each package is installed from PyPI without its dependencies into a virtual environment of its
own, which sees this one's torch and transformers, and is measured in a process of its own.
`--packages DIR` takes unpacked wheels, DIR/NAME, instead (for a machine without network). What
a package lacks to run here is supplied and named in `shim`; what cannot run is a row with
`failed` and the reason. Bits are bytes of all tensors that its cache holds after the last
token; `bits_coded` leaves out dense copies of the whole past that are kept from one step to the
next. Each package is fed token by token."""

import argparse
import importlib.util
import os
import subprocess
import sys
import venv
from dataclasses import replace
from functools import partial
from pathlib import Path

from eval.windows import Windows, add_options, add_protocols
from plan import Plan

import turboquant_nb
from turboquant_nb.evaluation.candidates import as_candidate, held_bytes
from turboquant_nb.evaluation.score import one_pass_gate

PEERS = {  # package: (import name, [(name, flush, settings)])
    "turboquant==0.2.0": (
        "turboquant",
        [(f"turboquant, {b} bits", 129, {"bits": b}) for b in (4, 3, 2)],
    ),
    "tiny-turboquant==0.18.0": (
        "tiny_turboquant",
        [
            (f"tiny-turboquant, {c}", 256, {"compression": c})
            for c in ("safe", "balanced", "compact", "aggressive")
        ],
    ),
    "turboquantdc==0.2.0": (
        "turboquantdc",
        [
            *((f"turboquantdc, TurboQuantCache {b} bits", 1, {"bits": b}) for b in (4, 3)),
            ("turboquantdc, GenerationCache", 129, {}),
        ],
    ),
    "turboquant-pro==1.9.1": (
        "turboquant_pro",
        [("turboquant-pro, window 128", 129, {"hot_window": 128})],
    ),
}


def make(module, settings, model):
    "(a new cache of the package, what had to be supplied for it to run)."
    import numpy

    shim = []
    if module.__name__ == "turboquant":
        if not hasattr(numpy, "trapz"):
            numpy.trapz = numpy.trapezoid
            shim.append("numpy.trapz, gone from numpy 2")
        return module.TurboQuantCache(**settings), shim
    if module.__name__ == "tiny_turboquant":
        return module.TinyKVCache.for_model(model, **settings), shim
    if module.__name__ == "turboquantdc":
        shim.append("transformers' mask methods, which its caches lack")
        return (module.TurboQuantCache if settings else module.GenerationCache)(
            **settings
        ), shim
    from turboquant_pro import hf_cache

    if "get_max_length" in hf_cache.TurboQuantLayer.__abstractmethods__:
        hf_cache.TurboQuantLayer.__abstractmethods__ = frozenset()
        shim.append("get_max_length, which transformers asks of a layer")
    return module.TurboQuantCache(**settings), shim


def adapted(cache, model):
    "A transformers cache that only passes states on; `held` is the package's own."
    from transformers import DynamicCache

    class Passing(DynamicCache):
        length = 0

        def __init__(self):
            super().__init__()
            self.held = cache

        def update(self, k, v, layer, *args, **kwargs):
            out = self.held.update(k, v, layer)
            self.length += k.shape[2] if layer == 0 else 0
            return out

        def get_seq_length(self, *args):
            return self.length

        def get_mask_sizes(self, query_length, *args):
            return self.length + int(
                query_length if isinstance(query_length, int) else len(query_length)
            ), 0

        def get_query_offset(self, *args):
            return self.length

    return Passing()


def fresh(module, settings, model, made):
    "What `Candidate.make` is: a new cache, noted in `made`."
    made[:] = [make(module, settings, model)]
    return adapted(made[0][0], model)


def coded_bytes(cache):
    "Bytes without dense copies: `keys` and `values` of a layer that also holds codes."
    layers = getattr(cache, "layers", ())
    copies = [
        t
        for x in layers
        if getattr(x, "_key_indices", None) is not None
        for t in (x.keys, x.values)
    ]
    return held_bytes(cache) - held_bytes(copies)


def rows(a, w, requirement):
    "Rows of one package, in its own environment."
    module, variants = PEERS[requirement]
    module = importlib.import_module(module)
    config = w.model.config.get_text_config()
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * d  # of a token
    windows = len(w.ids) - (len(w.ids) - 1) // w.batch * w.batch  # of the last batch
    for label, flush, settings in variants:
        for protocol in a.protocols:
            about, made = dict(package=requirement, settings=settings), []
            try:
                build = partial(fresh, module, settings, w.model, made)
                candidate = replace(as_candidate(w.model, build, label), flush=flush)
                got = w.score(candidate, protocol)
                tokens = w.ids.shape[1] - 1 + (flush if protocol == "stress" else 0)
                coded = 8 * coded_bytes(made[-1][0]) / (numbers * tokens * windows)
                about |= dict(bits=got.bits, bits_coded=coded, shim=made[-1][1])
                yield w.row(label, protocol, got.loss, **about)
            except Exception as error:  # what a package raises is what a reader wants to know
                failed = f"{type(error).__name__}: {error}"[:300]
                what = dict(cache=label, protocol=protocol, unit="perplexity")
                yield what | dict(windows=len(w.ids), failed=failed) | about


def environment(requirement):
    "Path of a python that has the package and this environment's packages."
    folder = (
        Path(os.environ.get("TURBOQUANT_PEERS", "peers")).resolve() / requirement.split("==")[0]
    )
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "parent.pth").write_text(
            "\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n"
        )
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                str(site),
                requirement,
            ],
            check=True,
        )
    return str(python)


def options(p):
    p.add_argument("--only", nargs="*", choices=[*PEERS], default=[*PEERS])
    p.add_argument("--packages", help="folder of unpacked wheels, instead of an installation")
    p.add_argument("--inside", choices=[*PEERS], help=argparse.SUPPRESS)
    add_options(p)
    add_protocols(p)


def elsewhere(a):
    """Each package in a process of its own, which writes its own file, named as --out with the
    package's name added; those from a folder at once, the others as they are installed."""
    jobs, here = [], Path(turboquant_nb.__file__).parents[1]
    for requirement in a.only:
        stem = requirement.split("==")[0]
        path, python = [str(here), os.environ.get("PYTHONPATH", "")], sys.executable
        if a.packages:
            path.insert(0, str(Path(a.packages).resolve() / PEERS[requirement][0]))
        else:
            python = environment(requirement)
        out = Path(a.out).with_name(f"{Path(a.out).stem}-{stem}.json")
        argv = [python, *sys.argv, "--inside", requirement, "--out", str(out)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        jobs.append(subprocess.Popen(argv, env=env))
        if not a.packages:
            jobs[-1].wait()
    return max(job.wait() for job in jobs)


def plan(a):
    if not a.inside:
        raise SystemExit(elsewhere(a))
    w = Windows(a)
    gate = one_pass_gate(w.model, w.ids)
    return Plan("peers", gate, rows(a, w, a.inside), w.data, w.origin)
