"""Perplexity of many data-free recipes at once: run.py search --model M --text FILE ... --part
I/N --out FILE [--match REGEX] [--seconds S].

A grid of bits for keys and values, sinks, windows and centres under both protocols of chapter
82. Bits per value are counted on a store of the same shape. Run it in N processes with --part
0/N … N-1/N, then join with --join FILE ... --out FILE. `--match` takes only what matches, as
`k3v3 s1 w32 c=pre_rope decode`."""

import json
import re
from dataclasses import replace

import torch
from eval.windows import Windows, add_match, add_options
from plan import Plan

from turboquant_nb.cache.store import KVStore, tables_of
from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.score import OnePass, one_pass_gate
from turboquant_nb.hf import layer_frequencies
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe

PAIRS = (
    "4 4,3 3,2 2,3 2,4 3,4 2,2 1,3.5 2.5,2.5 1.5,1.5 1,4 2.5,3.5 3,3 1.5,2 1.5,2.5 2,3 2.5,1 "
    "1,3.5 2,2.5 2.5,3 1,3.5 3.5,4 3.5,1.5 1.5,2.5 1"
)
PAIRS = [tuple(map(float, p.split())) for p in PAIRS.split(",")]


def recipe(k, v, sinks, window, center):
    whole = lambda b: int(b) if b.is_integer() else b
    return Recipe(Spec(bits=whole(k), center=center), Spec(bits=whole(v)), sinks, window)


def grid():
    """(label, recipe, protocol): centres first, then sinks and windows; no window helps with
    everything quantised."""
    both, decode = ("decode", "stress"), ("decode",)
    name = lambda k, v, s, w, c: f"k{k:g}v{v:g} s{s} w{w} c={c}"
    jobs = [
        (*p, s, 16, c, both) for p in PAIRS[:4] for c in ("none", "prompt_mean") for s in (0, 4)
    ]
    for p in PAIRS:
        jobs += [
            (*p, 1, 16, "pre_rope", both),
            *((*p, 1, w, "pre_rope", decode) for w in (4, 8, 32, 64)),
            (*p, 4, 16, "pre_rope", both),
        ]
    return [(name(*j[:5]), recipe(*j[:5]), protocol) for j in jobs for protocol in j[5]]


ONE_PASS = OnePass(count=False)  # the backend of `score`; `stored_bits` counts


def stored_bits(model, r, tokens, transformed=False):
    """Bits per value of a cache of one sequence, of one recipe or one for each layer: stores,
    tables once, and where keys are transformed the matrices of all layers."""
    config = model.config.get_text_config()
    h, layers = config.num_key_value_heads, config.num_hidden_layers
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    recipes = r if isinstance(r, list) else [r] * layers
    frequencies = (
        [torch.as_tensor(t) for t in layer_frequencies(config).by_layer if t is not None]
        if recipes[0].key.center == "pre_rope"
        else []
    )
    stores = {
        x: KVStore(
            x,
            1,
            h,
            d,
            dtype=torch.bfloat16,
            max_length=tokens,
            inv_freq=frequencies[0] if frequencies else None,
        )
        for x in set(recipes)
    }
    steps = [t.data_ptr() for x in stores.values() if x.cos_sin for t in x.cos_sin.kept]
    tables = {
        t.data_ptr(): t.nbytes
        for store in stores.values()
        for t in tables_of(store)
        if t.dtype != torch.float16
        and t.data_ptr() not in steps  # rows that a gate's steps met
    }
    angles = tokens * sum(
        4 * len(t) for t in {tuple(t.tolist()) for t in frequencies}
    )  # cosines and sines in float16, a row a position, for all layers of the same frequencies
    transforms = 6 * layers * h * d * d if transformed else 0  # bf16 and the inverse in float32
    return (
        8
        * (sum(stores[x].nbytes for x in recipes) + sum(tables.values()) + angles + transforms)
        / (layers * 2 * h * d * tokens)
    )


def options(p):
    add_options(p, batch=16)
    p.add_argument("--part", default="0/1", help="one of how many parts, from 0/N")
    add_match(p)


def rows(a, w):
    yield w.uncompressed()
    part, parts = map(int, a.part.split("/"))
    wanted = [x for x in grid() if re.search(a.match, f"{x[0]} {x[2]}")]
    for label, r, protocol in wanted[part::parts]:
        loss = w.score(as_candidate(w.model, r, label), protocol, ONE_PASS).loss
        held = r if protocol == "decode" else replace(r, recent=0)
        bits = stored_bits(w.model, held, a.length - 1)
        yield w.row(label, protocol, loss, bits=bits, recipe=json.loads(r.to_json()))


def plan(a):
    w = Windows(a)
    return Plan("search", one_pass_gate(w.model, w.ids), rows(a, w), w.data, w.origin)
