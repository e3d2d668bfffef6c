"""Perplexity for single choices of a code, all else equal: run.py choices --model M --text FILE
... --out FILE [--windows N] [--match REGEX].

What a bit of keys is spent on (levels, a QJL sketch of what the levels leave, in place of a bit
or on top of it), group-wise uniform levels as mx.quantize and others have them, with and
without a rotation, fractions of bits, tokens that lose a bit with age, and codes with no exact
token beside them. Every other row has 4 sinks and 16 recent tokens."""

import re
from dataclasses import replace

import torch
from eval.windows import Windows, add_match, add_options, add_protocols
from plan import Plan

from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.pairs import PairLayer
from turboquant_nb.evaluation.score import OnePass, one_pass_gate
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.theory.transforms import find_transform

SINKS, RECENT = 4, 16


def grouped(x, bits, size):
    """Uniform levels between the smallest and the largest of each group of `size` neighbouring
    channels, step and offset in float16: what the codes stand for. The offset is rounded down
    and the step up, so that no value lies outside of its levels."""
    groups = x.float().unflatten(-1, (-1, size))
    low = _towards(groups.amin(-1, keepdim=True), -torch.inf)
    step = _towards((groups.amax(-1, keepdim=True) - low) / (2**bits - 1), torch.inf)
    codes = (
        ((groups - low) / step.clamp(min=torch.finfo(torch.float16).tiny))
        .round()
        .clamp(0, 2**bits - 1)
    )
    return (low + codes * step).flatten(-2)


def _towards(x, end):
    "The float16 at or next to x in the direction of `end`, as float32."
    half = x.half()
    wrong = half.float() > x if end < 0 else half.float() < x
    return torch.where(wrong, half.nextafter(torch.full_like(half, end)), half).float()


def grouped_layer(bits, size, rotation):
    "A pair layer that codes by `grouped`, each token by itself."

    class GroupedLayer(PairLayer):
        hats = None

        def append(self, k, v):
            self.hats = self.hats or ([], [])
            for x, out in zip((k, v), self.hats):
                turn = find_transform(rotation, x.shape[-1])
                out.append(turn.inverse(grouped(turn.apply(x.float()), bits, size)))

        def decoded(self):
            return [torch.cat(x, 2) for x in self.hats]

    return GroupedLayer


def grouped_bits(bits, size, tokens):
    "Bits per value of `grouped` codes beside exact tokens in bfloat16, without room to spare."
    exact = min(tokens, SINKS + RECENT)
    return (exact * 16 + (tokens - exact) * (bits + 32 / size)) / tokens


def ours(k, v, center="pre_rope", decay=None, **key):
    "A recipe by bits; `key` says more of the keys' code."
    return Recipe(Spec(bits=k, center=center, **key), Spec(bits=v), SINKS, RECENT, decay)


def choices():
    "(label, recipe or (bits, group, rotation), protocols)."
    both = ("decode", "stress")
    for k, v in ((3, 3), (4, 3), (4, 4), (2, 2)):
        yield f"k{k}v{v}", ours(k, v), both
    for k, v in ((3, 3), (4, 3), (4, 4)):
        yield f"k{k}v{v}, last bit of keys QJL", ours(k, v, residual="qjl"), both
    for b in (3.5, 2.5):
        yield f"k{b}v{b}", ours(b, b), both
    for b in (3, 4, 2):
        yield f"k{b}v{b}, no centre", ours(b, b, "none"), both
        for size, rotation in ((64, "identity"), (64, "hadamard"), (32, "identity")):
            yield f"uniform, {b} bits, groups of {size}, {rotation}", (b, size, rotation), both
    for b in (3, 4):
        yield f"k{b}v{b}, a bit less after 256 tokens", ours(b, b, decay=256), ("decode",)
    for b in (3, 4, 2):
        yield f"k{b}v{b}, no exact tokens", replace(ours(b, b), sinks=0, recent=0), both


def options(p):
    add_options(p, windows=8)
    add_match(p)
    add_protocols(p)


def rows(a, w):
    yield w.uncompressed()
    for protocol in a.protocols:
        for label, what, known in choices():
            if protocol not in known or not re.search(a.match, label):
                continue
            room = None if "less after" in label else a.length
            if isinstance(what, tuple):
                backend = OnePass(grouped_layer(*what), count=False)
                candidate = as_candidate(w.model, ours(4, 4), label, max_length=room)
                loss = w.score(candidate, protocol, backend).loss
                bits, said = grouped_bits(what[0], what[1], a.length - 1), None
            else:
                got = w.score(as_candidate(w.model, what, label, max_length=room), protocol)
                loss, bits, said = got.loss, got.bits, what.to_json()
            yield w.row(label, protocol, loss, bits=bits, recipe=said)


def plan(a):
    w = Windows(a)
    return Plan("choices", one_pass_gate(w.model, w.ids), rows(a, w), w.data, w.origin)
