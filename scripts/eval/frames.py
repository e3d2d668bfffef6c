"""Where may a frame come from? run.py frames --out FILE [--model M] [--text FILE ...] [--source
NAME=FILE ...] [--arms A ...] [--codes C ...].

A layer's frame is the mean of its keys and, for codes that ask for it, a scale for each pair of
channels. An arm is where both come from: `prompt` is the first chunk of each window, as a cache
without a frame finds it; `ids` draws ids by Zipf's law over the vocabulary's order, `uniform`
evenly; another name is a text, `NAME:TOKENS` so many of its tokens (1,024 if not said);
`prompt+NAME` has the prompt's mean and pair scales of a source. Each row has the losses of its
windows and their difference against the prompt's frame, window by window. Chapter 83 has the
protocols."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from eval.windows import Windows, add_options, add_protocols
from plan import Plan
from torch import Tensor

from turboquant_nb.cache.append import append_by_host, first_mean
from turboquant_nb.calibration.fit import observed
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.models import sample_text
from turboquant_nb.evaluation.pairs import PairLayer
from turboquant_nb.evaluation.score import OnePass, leading_tokens, one_pass_gate, paired
from turboquant_nb.hf import ModelInfo
from turboquant_nb.quant.recipe import preset
from turboquant_nb.theory.centre import apply_cos_sin, shared_cos_sin
from turboquant_nb.theory.transforms import pair_scales

SKIP = 4  # first tokens of a text that do not count: sinks


class Frame(NamedTuple):
    "Of one layer."

    mean: Tensor  # [H, d] fp32 of keys, before RoPE where the centre turns with it
    pair: Tensor  # [H, d] fp32


class Sums:
    "The mean of keys before RoPE, and mean squares of what is left of keys, and of queries."

    def __init__(self, inv_freqs: list):
        self.inv_freqs, self.found = inv_freqs, {}  # layer -> (mean, squares of q, of keys)

    def observe(self, call):
        layer, (_, h, n, d) = call.module.layer_idx, call.key.shape
        inv_freq, x = self.inv_freqs[layer], call.key.float()
        turn = lambda x, inverse=False: x
        if inv_freq is not None:
            rows = shared_cos_sin(inv_freq, d, x.device).reach(n)[:n]
            turn = lambda x, inverse=False: apply_cos_sin(x, rows, inverse=inverse)
        mean = turn(x, inverse=True)[:, :, SKIP:].mean((0, 2), keepdim=True)
        rest = (x - turn(mean.expand(1, h, n, d)))[:, :, SKIP:]
        q = call.query.float()[:, :, SKIP:].square().mean((0, 2)).view(h, -1, d).mean(1)
        self.found[layer] = mean[0, :, 0], q, rest.square().mean((0, 2))
        return call.key, call.value


@torch.no_grad()
def frames_of(model, ids: Tensor, turns: bool) -> dict:  # layer -> Frame
    "One pass over windows [n, T]; without `turns` as if no RoPE were known."
    layers = ModelInfo(model).layers
    known = [torch.tensor(x.inv_freq) if turns and x.inv_freq else None for x in layers]
    sums = Sums(known)
    with observed(model, ids, sums) as ids:
        model.get_decoder()(ids, use_cache=False)
    out = {}
    for layer, (mean, q, k) in sums.found.items():
        rotary = 0 if known[layer] is None else 2 * len(known[layer])
        out[layer] = Frame(mean, pair_scales(q, k, rotary))
    return out


def framed(frames: dict, own_mean: bool):  # a subclass of PairLayer
    "A pair layer whose frame is given; its mean may be the prompt's own."

    class Framed(PairLayer):
        def needs_queries(self):
            return False

        def append(self, k, v):
            if not self.layer.is_initialized:
                self.layer.lazy_initialization(k, v)
            store, frame = self.layer.store, frames[self.layer.index]
            pair = store.key.frame.pair
            if pair is not None:
                pair.copy_(frame.pair[None, :, None])
            scaled = frame.mean if pair is None else frame.mean * frame.pair

            def mean_of(store, part, x):
                if own_mean or part is not store.key:
                    return first_mean(store, part, x)
                return scaled[None, :, None].expand(len(x), -1, -1, -1).to(torch.bfloat16)

            append_by_host(store, store.key.into_frame(k), v, ("k", "v"), mean_of=mean_of)

    return Framed


def codes() -> dict:  # name -> recipe
    "What keys and values are coded by."
    k3, t2 = preset("k3v3").settled(rope=True), preset("k2v2-trellis").settled(rope=True)
    pairs = lambda r, on: replace(r, key=replace(r.key, pair_scale="prompt" if on else "none"))
    fixed = lambda r: replace(r, key=replace(r.key, center="prompt_mean"))
    return {
        "k3v3": k3,
        "k3v3 pairs": pairs(k3, True),
        "k2v2-trellis": t2,
        "k2v2-trellis no pairs": pairs(t2, False),
        "k3v3 fixed": fixed(k3),
        "k2v2-trellis fixed": fixed(t2),
    }


def options(p):
    add_options(p)
    add_protocols(p)
    p.add_argument("--source", nargs="*", default=[], metavar="NAME=FILE")
    p.add_argument("--arms", nargs="*", default=["prompt", "shipped", "ids", "uniform"])
    p.add_argument("--codes", nargs="*", choices=codes(), default=["k3v3", "k2v2-trellis"])


def source_ids(a, w, arm: str) -> Tensor:  # [1, T]
    "What a frame is found from."
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
    found, own = {}, {}
    for name in a.codes:
        recipe = codes()[name]
        candidate = as_candidate(w.model, recipe, name, max_length=a.length)
        turns = recipe.key.centre.rotates
        for arm in a.arms:
            source = arm.removeprefix("prompt+")
            if arm != "prompt" and (source, turns) not in found:
                found[source, turns] = frames_of(w.model, source_ids(a, w, source), turns)
            for protocol in a.protocols:
                layer = PairLayer
                if arm != "prompt":
                    layer = framed(found[source, turns], own_mean=source != arm)
                backend = OnePass(layer, count=False)
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
