"""Where may a frame come from? run.py frames --out FILE [--model M] [--text FILE ...] [--source
NAME=FILE ...] [--arms A ...] [--codes C ...].

A layer's frame is the mean of its keys and, for codes that ask for it, a scale for each pair of
channels. An arm is where both come from: `prompt` is the first chunk of each window, as a cache
without a frame finds it; `ids` draws ids by Zipf's law over the vocabulary's order, `uniform`
evenly; another name is a text, `NAME:TOKENS` so many of its tokens (1,024 if not said), and
`A+B:TOKENS` a window of each. Each row has the losses of its windows and their difference
against the prompt's frame, window by window. Chapter 83 has the protocols.

The script of commit ea32671f also has arms `prompt+NAME`, the prompt's mean with a model's pair
scales, and codes with a mean after RoPE."""

from dataclasses import replace
from pathlib import Path

import torch
from eval.windows import Windows, add_options, add_protocols
from plan import Plan
from torch import Tensor

from turboquant_nb.calibration.fit import find_frame
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.models import sample_text
from turboquant_nb.evaluation.score import OnePass, leading_tokens, one_pass_gate, paired
from turboquant_nb.quant.recipe import preset


def codes() -> dict:  # name -> recipe
    "What keys and values are coded by."
    k3, t2 = preset("k3v3").settled(rope=True), preset("k2v2-trellis").settled(rope=True)
    pairs = lambda r, on: replace(r, key=replace(r.key, pair_scale="prompt" if on else "none"))
    return {
        "k3v3": k3,
        "k3v3 pairs": pairs(k3, True),
        "k2v2-trellis": t2,
        "k2v2-trellis no pairs": pairs(t2, False),
    }


def options(p):
    add_options(p)
    add_protocols(p)
    p.add_argument("--source", nargs="*", default=[], metavar="NAME=FILE")
    p.add_argument("--arms", nargs="*", default=["prompt", "shipped", "ids", "uniform"])
    p.add_argument("--codes", nargs="*", choices=codes(), default=["k3v3", "k2v2-trellis"])


def source_ids(a, w, arm: str) -> Tensor:  # [windows, T]
    "What a frame is found from."
    if "+" in arm:
        names, _, tokens = arm.partition(":")
        each = (f"{name}:{tokens or 1024}" for name in names.split("+"))
        return torch.cat([source_ids(a, w, x) for x in each])
    name, _, tokens = arm.partition(":")
    n, vocabulary = int(tokens or 1024), w.model.config.get_text_config().vocab_size
    head = leading_tokens(w.tokenizer)
    if name in ("ids", "uniform"):
        generator = torch.Generator().manual_seed(0)
        rank = torch.arange(1, vocabulary + 1, dtype=torch.float64)
        weight = 1 / rank if name == "ids" else torch.ones_like(rank)
        ids = torch.multinomial(weight, n, replacement=True, generator=generator)
    else:
        files = dict(x.split("=", 1) for x in a.source)
        text = sample_text() if name == "shipped" else Path(files[name]).read_text("utf-8")
        ids = w.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    ids = torch.cat([torch.tensor(head, dtype=torch.long), ids[: n - len(head)]])
    if len(ids) < n:
        raise ValueError(f"{arm} must give {n} tokens, got {len(ids)}")
    return ids[None].to(w.model.device)


def rows(a, w):
    yield w.uncompressed()
    found, own = {"prompt": None}, {}
    for name in a.codes:
        recipe = codes()[name]
        candidate = as_candidate(w.model, recipe, name, max_length=a.length)
        for arm in a.arms:
            if arm not in found:
                found[arm] = find_frame(w.model, source_ids(a, w, arm))
            for protocol in a.protocols:
                backend = OnePass(count=False, frame=found[arm])
                loss = w.score(candidate, protocol, backend).loss
                own.setdefault((name, protocol), loss)
                row = w.row(name, protocol, loss, arm=arm, length=a.length)
                gap = own[name, protocol]
                yield row | dict(zip(("against", "against_stderr"), paired(loss, gap)))


def plan(a):
    if a.arms[0] != "prompt":
        raise SystemExit("the first arm must be prompt, against which others are compared")
    w = Windows(a)
    return Plan("frames", one_pass_gate(w.model, w.ids[:, :1024]), rows(a, w), w.data, w.origin)
