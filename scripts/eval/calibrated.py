#!/usr/bin/env python3
"""Perplexity of data-free, folded and transformed codes, and of bits by layer (chapters 60, 61,
62 and 91): calibrated.py --calibrate FILE ... --out FILE [options of recipes.py].

The windows, recipes and protocols of search.py, whose codes without packing it takes. `--parts`
names what is measured: `main` (the texts of --text, all bits and both protocols), `domains`
(--domain NAME=FILE: other kinds of text, calibrated as before), `tokens` (less text to
calibrate on) `length` (windows longer than those of the calibration), `gains` (the same by
formula) and `layers` (bits spent layer by layer, chapter 61, for each of --budgets). Head
transforms are fitted to one window of --calibrate-length tokens of each file of --calibrate,
which are none of those measured. Rows say how keys were coded (plain, folded, mapped), the
change of perplexity against the uncompressed model and against plain codes, paired, and true
bits per value: with tables and transforms held for this one window, for one sequence of 4,096
and of 102,400 tokens."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from recipes import add_options, must_pass, opened
from search import UNPACKED, gate, recipe, stored_bits

from turboquant_nb import results
from turboquant_nb.calibration.sensitivity import measure_sensitivity
from turboquant_nb.calibration.fit import calibrate, collect
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import paired, prefill, score, text_windows
from turboquant_nb.calibration.fold import fit_fold, fold, unfold
from turboquant_nb.hf import TurboQuantCache, layer_frequencies
from turboquant_nb.theory.transforms import coding_gain
from turboquant_nb.evaluation.models import load_model

PLAIN = dict(k4v4=(4, 4), k4v3=(4, 3), k3v3=(3, 3), k3v2=(3, 2), k2v2=(2, 2))


def recipes_of(model, bits, sinks, window, calibration=None):
    """Recipes of all layers: around a mean before RoPE where RoPE does, with or without head
    transforms."""
    inv_freqs = layer_frequencies(model.config.get_text_config()).by_layer
    plain_rope = all(t is not None for t in inv_freqs)
    r = recipe(*map(float, bits), sinks, window, "pre_rope" if plain_rope else "prompt_mean")
    cache = TurboQuantCache(model, r, calibration=calibration)
    return cache.recipe if calibration else r


def counted(model, r, transformed, tokens):
    "Bits per value: of one sequence of so many tokens, of 4,096 and of 102,400."
    return {
        f"bits{label}": stored_bits(model, r, n, transformed)
        for label, n in (("", tokens), ("_4k", 4096), ("_100k", 102400))
    }


def bits_of(model, codes, protocol, transformed, tokens):
    "The same of codes by name."
    return counted(
        model,
        recipes_of(model, PLAIN[codes], 4, 0 if protocol == "stress" else 16),
        transformed,
        tokens,
    )


def without_transform(r):
    "A recipe without its map, which `stored_bits` counts by itself."
    return replace(r, key=replace(r.key, rotation="hadamard"))


def gains_of(found, m):
    """What a calibration gains on other moments by the formula of chapter transforms: bits a
    channel of keys, of each layer."""
    pairs = ((i, x.matrix.double()) for i, x in zip(m.layers("key"), found.transforms))
    return [
        float(coding_gain(m.mean_square("query", i), m.mean_square("key", i), w.mT @ w).mean())
        for i, w in pairs
    ]


class Run:
    "A model, what is measured of it, and the rows so far."

    def __init__(self, a):
        self.a, self.began = a, time.time()
        self.model, self.tokenizer, self.ids, self.batch, self.origin = opened(a)
        self.rows, self.passed = [], gate(self.model, self.ids)
        must_pass(self.passed, self.began)
        texts = [Path(f).read_text(encoding="utf-8") for f in a.calibrate]
        self.source = text_windows(self.tokenizer, texts, len(texts), a.calibrate_length)
        began = time.time()
        self.found = calibrate(self.model, self.source)
        seconds = time.time() - began
        self.note(
            dict(
                part="calibration",
                seconds=seconds,
                tokens=self.found.header["tokens"],
                gain=self.found.header["gain"],
                bytes=self.found.nbytes,
                unit="seconds",
            )
        )

    def note(self, row):
        self.rows.append(row)
        data = {
            "id": self.a.data_id,
            "n": len(self.ids),
            "calibration": (
                f"{self.source.numel()} tokens, one window of each of {len(self.source)} other "
                "texts of the same source"
            ),
        }
        results.write(self.a, "calibrated", self.rows, self.passed, self.origin, data, [0])
        print(
            {
                k: round(v, 3) if isinstance(v, float) else v
                for k, v in row.items()
                if k != "gain"
            },
            f"{time.time() - self.began:.0f} s",
            flush=True,
        )

    def losses(self, ids, r, protocol, prompt, starts):
        return score(
            self.model,
            ids,
            as_candidate(self.model, r, "x"),
            protocol,
            prompt,
            self.batch,
            starts=starts,
            backend=UNPACKED,
        ).loss

    def measure(self, part, ids, ways, bits, protocols, prompt, **more):
        "Rows of some windows: each way of coding keys, of bits and of protocol."
        starts, plain = {}, score(self.model, ids, None, "decode", prompt, self.batch).loss
        self.note(
            dict(
                part=part,
                cache="uncompressed",
                protocol="all",
                ppl=float(plain.mean().exp()),
                n=plain.numel(),
                unit="perplexity",
                **more,
            )
        )
        for name in bits:
            for protocol in protocols:
                losses = {}
                for how, found in ways.items():
                    if time.time() - self.began > self.a.seconds:
                        raise SystemExit("out of time; what is measured is saved")
                    r = recipes_of(
                        self.model,
                        PLAIN[name],
                        4,
                        16,
                        None if how in ("plain", "folded") else found,
                    )
                    if how == "folded":
                        fold(self.model, found)
                    if protocol == "decode" and (how == "folded") not in starts:
                        starts[how == "folded"] = [
                            prefill(self.model, x[:, :prompt]) for x in ids.split(self.batch)
                        ]
                    loss = losses[how] = self.losses(
                        ids, r, protocol, prompt, starts.get(how == "folded")
                    )
                    if how == "folded":
                        unfold(self.model)
                    percent, stderr = paired(loss, plain)
                    row = dict(
                        part=part,
                        cache=f"{name} s4 w16",
                        how=how,
                        protocol=protocol,
                        ppl=float(loss.mean().exp()),
                        percent=percent,
                        stderr=stderr,
                        windows=len(ids),
                        n=loss.numel(),
                        unit="perplexity",
                        **more,
                    )
                    row |= bits_of(
                        self.model, name, protocol, isinstance(r, list), ids.shape[1]
                    )
                    if how != "plain" and "plain" in losses:
                        row["against_plain"] = paired(loss, losses["plain"])
                    self.note(row)

    def measure_budgets(self, budgets, protocols, prompt):
        """Rows of bits spent layer by layer, with transforms and without, measured on windows
        of the calibration."""
        ids = self.ids
        starts, plain = (
            [prefill(self.model, x[:, :prompt]) for x in ids.split(self.batch)],
            score(self.model, ids, None, "decode", prompt, self.batch).loss,
        )
        self.note(
            dict(
                part="layers",
                cache="uncompressed",
                protocol="all",
                ppl=float(plain.mean().exp()),
                n=plain.numel(),
                unit="perplexity",
            )
        )
        for how, found in (("plain", None), ("mapped", self.found)):
            began = time.time()
            found = measure_sensitivity(self.model, self.source[:4], found)
            self.note(
                dict(
                    part="losses",
                    how=how,
                    seconds=time.time() - began,
                    unit="nats",
                    **found.header["losses"],
                )
            )
            base = recipes_of(self.model, (2, 2), 4, 16)
            for budget in budgets:
                r = TurboQuantCache(self.model, base, calibration=found, budget=budget).recipes
                spent = [[x.key.bits, x.value.bits] for x in r]
                for protocol in protocols:
                    if time.time() - self.began > self.a.seconds:
                        raise SystemExit("out of time; what is measured is saved")
                    loss = self.losses(ids, r, protocol, prompt, starts)
                    percent, stderr = paired(loss, plain)
                    row = dict(
                        part="layers",
                        cache=f"{budget:g} bits s4 w16",
                        how=how,
                        budget=budget,
                        spent=spent,
                        protocol=protocol,
                        ppl=float(loss.mean().exp()),
                        percent=percent,
                        stderr=stderr,
                        windows=len(ids),
                        n=loss.numel(),
                        unit="perplexity",
                    )
                    held = [
                        without_transform(x)
                        if protocol == "decode"
                        else replace(without_transform(x), recent=0)
                        for x in r
                    ]
                    row |= counted(self.model, held, how == "mapped", ids.shape[1])
                    self.note(row)


def recount(a):
    """Bits of the rows of files again, from the shape of their model; nothing else in them
    changes."""
    model, _ = load_model(a.model)
    code = results.tree()
    for path in map(Path, a.recount):
        record = results.load(path, a.draft)
        for r in record["rows"]:
            if "bits" in r:
                r |= bits_of(
                    model,
                    r["cache"].split()[0],
                    r["protocol"],
                    r["how"] not in ("plain", "folded"),
                    r.get("length", a.length),
                )
        said = {"recounted": f"bits, by calibrated.py --recount of commit {code.commit}"}
        results.save(
            record | said | ({"dirty": True, "changes": code.changes} if code.changes else {}),
            path,
            a.draft,
        )


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(p)
    p.set_defaults(batch=8)
    p.add_argument("--calibrate", nargs="+", help="texts, of which one window each is read")
    p.add_argument(
        "--recount",
        nargs="+",
        metavar="FILE",
        help="count the bits of these results of --model again, and measure nothing",
    )
    p.add_argument("--calibrate-length", type=int, default=1024)
    p.add_argument(
        "--parts",
        nargs="+",
        default=["main"],
        choices=("main", "domains", "tokens", "length", "gains", "layers"),
    )
    p.add_argument("--budgets", nargs="+", type=float, default=[2, 2.125, 2.25, 2.5, 3, 3.5, 4])
    p.add_argument("--domain", nargs="*", default=[], metavar="NAME=FILE")
    p.add_argument("--ways", nargs="+", default=["plain", "folded", "mapped"])
    p.add_argument("--bits", nargs="+", default=["k3v3", "k2v2", "k4v4"], choices=[*PLAIN])
    p.add_argument("--protocols", nargs="+", default=["stress", "decode"])
    p.add_argument("--out")
    a = results.parse(p)
    if a.recount:
        return recount(a)
    if not (a.calibrate and a.out):
        p.error("--calibrate and --out are needed")
    if a.text and {Path(f).resolve() for f in a.text} & {
        Path(f).resolve() for f in a.calibrate
    }:
        raise SystemExit("texts to calibrate on must not be among those that are measured")
    run = Run(a)
    ways = {how: run.found for how in a.ways}
    if "folded" in ways:
        try:
            ways["folded"] = fit_fold(run.model, run.source)
        except ValueError as error:
            del ways["folded"]
            run.note(dict(part="fold", refused=str(error), unit="perplexity"))
    if "main" in a.parts:
        run.measure("main", run.ids, ways, a.bits, a.protocols, a.prompt)
    if "layers" in a.parts:
        run.measure_budgets(a.budgets, a.protocols, a.prompt)
    if "tokens" in a.parts:
        for windows, length in ((1, 64), (1, 256), (1, 1024), (2, 1024), (4, 1024)):
            found = calibrate(run.model, run.source[:windows, :length])
            run.measure(
                "tokens",
                run.ids,
                {"plain": None, "mapped": found},
                ["k2v2"],
                ["stress"],
                a.prompt,
                tokens=found.header["tokens"],
            )
    for said in a.domain if "domains" in a.parts else ():
        name, file = said.split("=", 1)
        ids = text_windows(
            run.tokenizer, Path(file).read_text(encoding="utf-8"), 16, a.length
        ).to(run.ids.device)
        gains = gains_of(run.found, collect(run.model, ids[:4]))
        run.note(
            dict(
                part="domain gain",
                domain=name,
                gain=gains,
                mean=sum(gains) / len(gains),
                unit="bits",
            )
        )
        run.measure("domains", ids, ways, ["k3v3", "k2v2"], ["stress"], a.prompt, domain=name)
    if {"length", "gains"} & {*a.parts}:
        run.batch = 1
        texts = [Path(f).read_text(encoding="utf-8") for f in a.calibrate]
        ways = {
            f"mapped at {n}": calibrate(
                run.model, text_windows(run.tokenizer, texts, len(texts), n), batch=1
            )
            for n in (512, 1024, 4096)
        }
        texts = [Path(f).read_text(encoding="utf-8") for f in a.text]
    if "gains" in a.parts:
        for n in (1024, 4096):
            m = collect(run.model, text_windows(run.tokenizer, texts, 4, n), batch=1)
            for how, found in ways.items():
                gains = gains_of(found, m)
                run.note(
                    dict(
                        part="length gain",
                        length=n,
                        how=how,
                        gain=gains,
                        mean=sum(gains) / len(gains),
                        unit="bits",
                    )
                )
    if "length" in a.parts:
        ids = text_windows(run.tokenizer, texts, 8, 4096).to(run.ids.device)
        run.measure(
            "length",
            ids,
            {"plain": None} | ways,
            ["k3v3", "k2v2"],
            ["stress"],
            2048,
            length=4096,
        )


if __name__ == "__main__":
    main()
