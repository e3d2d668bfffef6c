"""Perplexity of a model on coded caches: run.py recipes --set NAME --out FILE [--model M]
[--text FILE ...] [--windows N] [--protocols P ...].

`ablation` changes one thing at a time, `trellis` puts a trellis code into presets, `presets`
and `others` are what the leaderboard compares; `--match` takes only names that match a regular
expression."""

import re
from dataclasses import replace

from eval.windows import Windows, add_match, add_options, add_protocols
from plan import Plan

from turboquant_nb.evaluation.candidates import OTHERS, as_candidate
from turboquant_nb.evaluation.score import one_pass_gate, paired
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import PRESETS, Recipe, preset

BOTH, DECODE = ("decode", "stress"), ("decode",)


def recipe(k, v, sinks=4, recent=0, center="pre_rope", pair_scale="none", **both):
    "A recipe by bits, and what its keys take of the frame."
    key = Spec(bits=k, center=center, pair_scale=pair_scale, **both)
    return Recipe(key, Spec(bits=v, **both), sinks, recent)


def ablation():
    """One thing at a time: what each part of a recipe buys at 4, 3 and 2 bits. With everything
    quantised no window helps, so it is run once for all."""
    best = "4 sinks, turning centre"
    for b in (4, 3, 2):
        yield f"{b} bits, plain", recipe(b, b, 0, 0, "none"), BOTH
        yield f"{b} bits, window 16", recipe(b, b, 0, 16, "none"), DECODE
        yield f"{b} bits, 4 sinks, window 16", recipe(b, b, 4, 16, "none"), BOTH
        yield f"{b} bits, turning centre, window 16", recipe(b, b, 0, 16), BOTH
        for s in (1, 4, 8):
            yield f"{b} bits, {s} sinks, turning centre, window 16", recipe(b, b, s, 16), BOTH
        pairs = recipe(b, b, 4, 16, pair_scale="frame")
        yield f"{b} bits, {best}, pair scales, window 16", pairs, BOTH
        for w in (0, 4, 8, 32, 64, 128):
            yield f"{b} bits, {best}, window {w}", recipe(b, b, 4, w), DECODE
    for word, field, value in (
        ("rotation", "rotation", "identity"),
        ("rotation", "rotation", "haar"),
        ("scale", "scale", "norm"),
        ("scale", "scale", "unbiased"),
        ("table", "codebook", "uniform"),
    ):
        name = f"3 bits, {best}, window 16, {value} {word}"
        yield name, recipe(3, 3, 4, 16, **{field: value}), BOTH
    for k, v in ((4, 3), (3, 4), (4, 2), (2, 4), (3, 2), (2, 3), (2, 1), (1, 2)):
        yield f"k{k}v{v}, {best}, window 16", recipe(k, v, 4, 16), BOTH


def trellis():
    "Presets with tables, and with a trellis code in place of both."
    for name in ("k2v2", "k3v3"):
        table = preset(name)
        yield name, table, BOTH
        sides = {s: replace(getattr(table, s), codebook="trellis") for s in ("key", "value")}
        yield f"{name} trellis", replace(table, **sides), BOTH


def served():
    "Presets beside what an engine's cells hold of their frames: a mean after RoPE."
    for name in ("k3v3", "k2v2-trellis"):
        own = preset(name)
        yield name, own, BOTH
        yield (
            f"{name}, mean after RoPE",
            replace(own, key=replace(own.key, center="fixed")),
            BOTH,
        )


SETS = {  # of (name, recipe or other, protocols)
    "ablation": ablation,
    "trellis": trellis,
    "served": served,
    "presets": lambda: ((p, preset(p), BOTH) for p in PRESETS),
    "others": lambda: ((x, x, BOTH) for x in OTHERS),
}


def options(p):
    p.add_argument("--set", nargs="+", choices=SETS, default=["presets", "others"])
    add_options(p)
    add_match(p)
    add_protocols(p)
    p.add_argument("--experiment", default="recipes")


def rows(a, w):
    yield w.uncompressed()
    kept = {}
    jobs = [x for s in a.set for x in SETS[s]() if re.search(a.match, x[0])]
    for label, what, known in jobs:
        for protocol in [x for x in known if x in a.protocols]:
            try:
                candidate = as_candidate(w.model, what, label, max_length=a.length)
                got = w.score(candidate, protocol)
            except (ImportError, RuntimeError, ValueError, AssertionError) as error:
                failed = f"{type(error).__name__}: {error}"[:300]
                yield dict(cache=label, protocol=protocol, unit="perplexity", failed=failed)
                continue
            r = candidate.recipe
            said = r and r.to_json()
            row = w.row(label, protocol, got.loss, bits=got.bits, recipe=said)
            if protocol in kept:
                row["against_first"] = [kept[protocol][0], *paired(got.loss, kept[protocol][1])]
            kept.setdefault(protocol, (label, got.loss))
            yield row


def plan(a):
    w = Windows(a)
    return Plan(a.experiment, one_pass_gate(w.model, w.ids), rows(a, w), w.data, w.origin)
