"""Perplexity of data-free, folded and transformed codes, and of bits by layer (chapters 60, 61,
62 and 91): run.py calibrated --calibrate FILE ... --out FILE [options of recipes].

The windows, recipes and protocols of search.py. `--parts`
names what is measured: `main` (the texts of --text, all bits and both protocols), `domains`
(--domain NAME=FILE: other kinds of text, calibrated as before), `tokens` (less text to
calibrate on) `length` (windows longer than those of the calibration), `gains` (the same by
formula), `layers` (bits spent layer by layer, chapter 61, for each of --budgets) and `heads`
(the same head by head, in tables and in trellis codes, beside bits by layer; its bits are those
of a real cache that holds a window). Head transforms are fitted to one window of
--calibrate-length tokens of each file of --calibrate, which are none of those measured. Rows
say how keys were coded (plain, folded, mapped, or by a pair_scale of the same windows), the
change of perplexity against the uncompressed model and against plain codes, paired, and true
bits per value: with tables and transforms held for this one window, for one sequence of 4,096
and of 102,400 tokens."""

import time
from dataclasses import replace
from pathlib import Path

from eval.search import ONE_PASS, recipe, stored_bits
from eval.windows import Windows, add_options, add_protocols, texts_of
from plan import Plan

from turboquant_nb.calibration.fit import calibrate, collect
from turboquant_nb.calibration.fold import fit_fold, fold, unfold
from turboquant_nb.calibration.sensitivity import measure_sensitivity
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import one_pass_gate, paired
from turboquant_nb.hf import TurboQuantCache, layer_frequencies
from turboquant_nb.quant.calibration import apply_bit_budget
from turboquant_nb.quant.mixed_precision import head_recipes
from turboquant_nb.theory.transforms import coding_gain

PLAIN = dict(k4v4=(4, 4), k4v3=(4, 3), k3v3=(3, 3), k3v2=(3, 2), k2v2=(2, 2))
PARTS = "main", "layers", "heads", "tokens", "domains", "length", "gains"


def center_of(model):
    "The centre of keys that a model's RoPE allows."
    inv_freqs = layer_frequencies(model.config.get_text_config()).by_layer
    return "pre_rope" if all(t is not None for t in inv_freqs) else "prompt_mean"


def recipes_of(model, bits, sinks, window, calibration=None):
    """Recipes of all layers: around a mean before RoPE where RoPE does, with or without head
    transforms."""
    r = recipe(*map(float, bits), sinks, window, center_of(model))
    return TurboQuantCache(model, r, calibration=calibration).recipe if calibration else r


def counted(model, r, transformed, tokens):
    "Bits per value: of one sequence of so many tokens, of 4,096 and of 102,400."
    return {
        f"bits{label}": stored_bits(model, r, n, transformed)
        for label, n in (("", tokens), ("_4k", 4096), ("_100k", 102400))
    }


def gains_of(found, m):
    """What a calibration gains on other moments by the formula of chapter transforms: bits a
    channel of keys, of each layer."""
    pairs = ((i, x.matrix.double()) for i, x in zip(m.layers("key"), found.transforms))
    gains = [
        float(coding_gain(m.mean_square("query", i), m.mean_square("key", i), w.mT @ w).mean())
        for i, w in pairs
    ]
    return dict(gain=gains, mean=sum(gains) / len(gains), unit="bits")


def measured(w, part, ways, bits, protocols, **more):
    """Rows of some windows: each way of coding keys, of bits and of protocol. Folded weights
    are another model, so its prompts are read again."""
    yield w.uncompressed(part=part, **more)
    folded, length = w.over(w.ids), w.ids.shape[1]
    folded.plain = w.plain
    for name in bits:
        for protocol in protocols:
            plain = None
            for how, found in ways.items():
                transform = None if how in ("plain", "folded") else found
                r = recipes_of(w.model, PLAIN[name], 4, 16, transform)
                if how == "folded":
                    fold(w.model, found)
                here = folded if how == "folded" else w
                loss = here.score(as_candidate(w.model, r, "x"), protocol, ONE_PASS).loss
                if how == "folded":
                    unfold(w.model)
                held = recipes_of(w.model, PLAIN[name], 4, 0 if protocol == "stress" else 16)
                row = w.row(f"{name} s4 w16", protocol, loss, part=part, how=how, **more)
                row |= counted(w.model, held, isinstance(r, list), length)
                if plain is not None:
                    row["against_plain"] = paired(loss, plain)
                plain = loss if how == "plain" else plain
                yield row


def by_layer(w, source, calibration, budgets, protocols):
    """Rows of bits spent layer by layer, with transforms and without, measured on windows of
    the calibration."""
    yield w.uncompressed(part="layers")
    for how, found in (("plain", None), ("mapped", calibration)):
        began = time.time()
        found = measure_sensitivity(w.model, source[:4], found)
        took = dict(seconds=time.time() - began, unit="nats", **found.header["losses"])
        yield dict(part="losses", how=how) | took
        base = recipes_of(w.model, (2, 2), 4, 16)
        for budget in budgets:
            r = TurboQuantCache(w.model, base, calibration=found, budget=budget).recipes
            spent = [[x.key.bits, x.value.bits] for x in r]
            for protocol in protocols:
                loss = w.score(as_candidate(w.model, r, "x"), protocol, ONE_PASS).loss
                plain = [replace(x, key=replace(x.key, rotation="hadamard")) for x in r]
                held = plain if protocol == "decode" else [replace(x, recent=0) for x in plain]
                what = dict(part="layers", how=how, budget=budget, spent=spent)
                row = w.row(f"{budget:g} bits s4 w16", protocol, loss, **what)
                yield row | counted(w.model, held, how == "mapped", w.ids.shape[1])


def by_head(w, source, calibration, budgets, protocols):
    """Rows of bits spent by layer and by head, without transforms and with them: by what passes
    of layers lose, by what gradients say of layers, and of heads."""
    yield w.uncompressed(part="heads")
    for how, given in (("plain", None), ("mapped", calibration)):
        found = {}
        for per in ("layer", "head"):
            began = time.time()
            found[per] = measure_sensitivity(w.model, source[:4], given, per=per)
            took = dict(seconds=time.time() - began, unit="nats")
            yield dict(part="losses", how=how, per=per) | took | found[per].header["losses"]
        ways = {
            "layer, passes": (found["layer"], "layer"),
            "layer, gradients": (found["head"], "layer"),
            "head, gradients": (found["head"], "head"),
        }
        codes = [("sphere", "none"), ("trellis", "none")]
        codes += [("trellis", "prompt")] if how == "plain" else []
        for (codebook, pair), budget in ((c, b) for c in codes for b in budgets):
            base = recipe(2.0, 2.0, 4, 16, center_of(w.model))
            key = replace(base.key, codebook=codebook, pair_scale=pair)
            name = codebook if pair == "none" else f"{codebook}, pair scale"
            base = replace(base, key=key, value=replace(base.value, codebook=codebook))
            layers = len(found["layer"].header["losses"]["key"])
            for way, (losses, per) in ways.items():
                spent = apply_bit_budget([base] * layers, losses, budget, per)
                r = TurboQuantCache(w.model, spent, calibration=given).recipes
                groups = [len(x.groups) if per == "head" else 1 for x in r]
                each = [[[y.key.bits, y.value.bits] for y in head_recipes(x)] for x in r]
                about = dict(how=how, codebook=codebook, pair_scale=pair, budget=budget)
                about |= dict(way=way, spent=each)
                for protocol in protocols:
                    got = w.score(as_candidate(w.model, r, "x"), protocol)
                    about |= dict(part="heads", groups=sum(groups) / layers, bits=got.bits)
                    yield w.row(f"{name}, {way}", protocol, got.loss, **about)


def options(p):
    add_options(p, batch=8)
    p.add_argument(
        "--calibrate", nargs="+", required=True, help="texts, of which one window each is read"
    )
    p.add_argument("--calibrate-length", type=int, default=1024)
    p.add_argument("--parts", nargs="+", default=["main"], choices=PARTS)
    p.add_argument("--budgets", nargs="+", type=float, default=[2, 2.125, 2.25, 2.5, 3, 3.5, 4])
    p.add_argument("--domain", nargs="*", default=[], metavar="NAME=FILE")
    p.add_argument(
        "--ways",
        nargs="+",
        default=["plain", "folded", "mapped"],
        choices=["plain", "folded", "mapped", "pair_scale"],
    )
    p.add_argument("--bits", nargs="+", default=["k3v3", "k2v2", "k4v4"], choices=[*PLAIN])
    add_protocols(p, "stress", "decode")


def rows(a, w, source):
    began = time.time()
    found = calibrate(w.model, source)
    about = dict(seconds=time.time() - began, tokens=found.header["tokens"], unit="seconds")
    yield dict(part="calibration", gain=found.header["gain"], bytes=found.nbytes) | about
    ways = {how: found for how in a.ways}
    if "pair_scale" in ways:
        ways["pair_scale"] = calibrate(w.model, source, fit="pair_scale")
    if "folded" in ways:
        try:
            ways["folded"] = fit_fold(w.model, source)
        except ValueError as error:
            del ways["folded"]
            yield dict(part="fold", refused=str(error), unit="perplexity")
    if "main" in a.parts:
        yield from measured(w, "main", ways, a.bits, a.protocols)
    if "layers" in a.parts:
        yield from by_layer(w, source, found, a.budgets, a.protocols)
    if "heads" in a.parts:
        yield from by_head(w, source, found, a.budgets, a.protocols)
    for n, length in ((1, 64), (1, 256), (1, 1024), (2, 1024), (4, 1024)):
        if "tokens" in a.parts:
            few = calibrate(w.model, source[:n, :length])
            both = {"plain": None, "mapped": few}
            tokens = few.header["tokens"]
            yield from measured(w, "tokens", both, ["k2v2"], ["stress"], tokens=tokens)
    for name, _, file in (x.partition("=") for x in a.domain if "domains" in a.parts):
        ids = w.text(texts_of([file])[0], 16, a.length).to(w.ids.device)
        gains = gains_of(found, collect(w.model, ids[:4]))
        yield dict(part="domain gain", domain=name) | gains
        there = w.over(ids)
        yield from measured(there, "domains", ways, ["k3v3", "k2v2"], ["stress"], domain=name)
    if not {"length", "gains"} & {*a.parts}:
        return
    mapped = {
        f"mapped at {n}": calibrate(
            w.model, w.text(texts_of(a.calibrate), len(a.calibrate), n), batch=1
        )
        for n in (512, 1024, 4096)
    }
    for n in (1024, 4096) if "gains" in a.parts else ():
        m = collect(w.model, w.text(texts_of(a.text), 4, n), batch=1)
        for how, x in mapped.items():
            yield dict(part="length gain", length=n, how=how) | gains_of(x, m)
    if "length" in a.parts:
        long = w.over(w.text(texts_of(a.text), 8, 4096), 2048, 1)
        ways = {"plain": None} | mapped
        yield from measured(long, "length", ways, ["k3v3", "k2v2"], ["stress"], length=4096)


def plan(a):
    same = lambda files: {Path(f).resolve() for f in files or ()}
    if same(a.text) & same(a.calibrate):
        raise SystemExit("texts to calibrate on must not be among those that are measured")
    w = Windows(a)
    source = w.text(texts_of(a.calibrate), len(a.calibrate), a.calibrate_length)
    said = f"{source.numel()} tokens, one window of each of {len(source)} other texts"
    data = w.data | {"calibration": f"{said} of the same source"}
    return Plan("calibrated", one_pass_gate(w.model, w.ids), rows(a, w, source), data, w.origin)
