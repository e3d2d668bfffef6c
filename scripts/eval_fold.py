#!/usr/bin/env python3
"""Perplexity of coded caches before and after a model's keys are folded (notebook 20): eval_fold.py --calibrate FILE ... --out FILE [options of eval_recipes.py].

The same windows, recipes and protocols as eval_search.py, whose codes without packing it takes; pairs of rows, "plain" and "folded". --calibrate
names texts that are not among the windows."""
import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from eval_recipes import add_options, opened
from eval_search import Codes, gate, recipe, stored_bits

from turboquant_nb import evaluate, results
from turboquant_nb.evaluate import contender, paired, prefill, score, text_windows
from turboquant_nb.fold import calibrate, fold, unfold


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p)
    p.set_defaults(batch=8)
    p.add_argument("--calibrate", nargs="+", required=True, help="texts")
    p.add_argument("--bits", nargs="*", type=int, default=[3, 2, 4])
    p.add_argument("--protocols", nargs="*", default=["stress", "decode"])
    p.add_argument("--out", required=True)
    a = p.parse_args()
    if a.text and {Path(f).resolve() for f in a.text} & {Path(f).resolve() for f in a.calibrate}:
        raise SystemExit("texts to calibrate on must not be among those that are measured")
    began = time.time()
    model, tokenizer, ids, batch, origin = opened(a)
    texts = [Path(f).read_text(encoding="utf-8") for f in a.calibrate]
    found = calibrate(model, text_windows(tokenizer, texts, len(texts), a.length))
    passed = gate(model, ids)
    starts = {}  # prompts as the plain and the folded model read them
    plain = score(model, ids, None, "decode", a.prompt, batch).loss
    rows = [dict(cache="uncompressed", protocol="all", ppl=float(plain.mean().exp()), n=plain.numel(), unit="perplexity")]
    evaluate._TwinLayer, evaluate._count = Codes, lambda *x: 0.0
    with torch.no_grad():
        before = model(ids[:1, :64]).logits
        fold(model, found)
        passed |= {"folded": "logits equal to the bit", "passed": passed["passed"] and torch.equal(model(ids[:1, :64]).logits, before)}
        unfold(model)
    print(passed, found.header, flush=True)
    if not passed["passed"]:
        raise SystemExit("the gate did not pass; nothing is measured")
    for b in a.bits:
        for protocol in a.protocols:
            losses = {}
            for how in ("plain", "folded"):
                if time.time() - began > a.seconds:
                    raise SystemExit("out of time; what is measured is saved")
                if how == "folded":
                    fold(model, found)
                if protocol == "decode" and how not in starts:
                    starts[how] = [prefill(model, x[:, : a.prompt]) for x in ids.split(batch)]
                r = recipe(float(b), float(b), 4, 16, "rope")
                loss = losses[how] = score(model, ids, contender(model, r, how), protocol, a.prompt, batch, starts=starts.get(how)).loss
                if how == "folded":
                    unfold(model)
                percent, stderr = paired(loss, plain)
                row = dict(cache=f"k{b}v{b} s4 w16 c=rope", how=how, protocol=protocol, ppl=float(loss.mean().exp()), percent=percent, stderr=stderr, windows=len(ids), n=loss.numel(), unit="perplexity")
                row["bits"] = stored_bits(model, r if protocol == "decode" else replace(r, window=0), a.length - 1)
                if how == "folded":
                    row["against_plain"] = paired(loss, losses["plain"])
                rows.append(row)
                results.save(results.record("fold", rows, passed, origin, {"id": a.data_id, "n": len(ids), "calibration": f"{found.header['tokens']} tokens of {len(texts)} other texts of the same source"}, [0]), a.out)
                print(row, f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
