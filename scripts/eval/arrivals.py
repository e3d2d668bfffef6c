"""Whether a prompt gives the same tokens however it comes: run.py arrivals --out FILE [--tiny]
[--model M] [--recipes NAME …] [--windows N] [--tokens N] [--new N] [--chunks N …].

A model in fp32, SmolLM2-135M unless another is named, reads windows of text with a cache of
each recipe and with transformers' DynamicCache (`uncompressed`): whole; in chunks; with a
prefix that two rows share; as row 3 of a batch padded on the left; whole, saved to a file and
loaded; whole, in a cache that was reset after another text; and as a second turn, behind a
first one and an answer of 16 tokens that came one by one. Then all of them read the tokens that
the cache of the whole prompt chose, one by one. A row compares two ways on one window:
`same_bits` whether all logits from the prompt's last token on are equal, `largest` their
largest difference, `kl` the mean divergence in nats of the second from the first, `agreed` how
many tokens in a row both choose alike, `of` at most, `first_layer` and `all_layers` which share
of the numbers that coded keys and values stand for is equal. The first layer's keys and values
do not depend on what attention read.

Gate: uncompressed, the logits of every way are those of the whole prompt to 1e-3; on codes a
prompt that is read whole twice gives the same bits."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from bench import generate
from eval.inputs import opened, options as given
from plan import Plan
from torch import Tensor
from transformers import DynamicCache

from turboquant_nb.evaluation.models import sample_text
from turboquant_nb.hf import TurboQuantCache

RECIPES = ["uncompressed", "k4v4", "k3v3", "k2v2"]
ANSWER = 16  # tokens of the first turn's answer


@dataclass
class Read:
    "A cache that holds a prompt, in one of its rows."

    cache: object
    last: Tensor  # [B, V] logits of the prompt's last token
    row: int = 0
    mask: Tensor | None = None  # [B, tokens] where rows are padded


def read(model, cache, ids, *sizes):
    "A prompt that comes in chunks of these sizes, and the last size again until it ends."
    sizes = itertools.chain(sizes, itertools.repeat(sizes[-1] if sizes else ids.shape[1]))
    at = 0
    while at < ids.shape[1]:
        part = ids[:, at : (at := at + next(sizes))]
        last = model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return Read(cache, last)


def saved(model, make, ids):
    "From a file that another cache wrote."
    found = read(model, make(), ids)
    with tempfile.TemporaryDirectory() as folder:
        found.cache.save(Path(folder) / "prompt.tq")
        return Read(TurboQuantCache.load(Path(folder) / "prompt.tq", model), found.last)


def behind_prefix(model, make, ids, other, prefix):
    "In the second of two rows that share a prefix, which was read once."
    cache = read(model, make(), ids[:, :prefix]).cache
    cache.batch_repeat_interleave(2)
    n = ids.shape[1] - prefix
    both = torch.cat([other[:, :n], ids[:, prefix:]])
    return Read(cache, read(model, cache, both).last, 1)


def padded(model, make, ids, other):
    "Row 3 of four, behind padding that the longest of them asks for."
    n = ids.shape[1]
    total, rows = n + 40, [other[:, :17], other[:, : n + 40], other[:, : n // 2], ids]
    whole, mask = (ids.new_zeros(4, total) for _ in "im")
    for i, row in enumerate(rows):
        whole[i, total - row.shape[1] :], mask[i, total - row.shape[1] :] = row[0], 1
    places = (mask.cumsum(1) - 1).clamp(0)
    cache, more = make(), dict(attention_mask=mask, position_ids=places, logits_to_keep=1)
    last = model(whole, past_key_values=cache, **more).logits[:, -1]
    return Read(cache, last, 3, mask)


def after_reset(model, make, ids, other):
    "In a cache that has held another text, and tokens that came one by one."
    cache = read(model, make(), other[:, : ids.shape[1] + 7], ids.shape[1], 1).cache
    cache.reset()
    return read(model, cache, ids)


def ways(model, make, ids, other, chunks, coded):
    "{how a prompt comes: a function that reads it so}, the whole prompt first."
    n = ids.shape[1]
    turn = n // 2
    found = {
        "whole": lambda: read(model, make(), ids),
        "behind a shared prefix": lambda: behind_prefix(model, make, ids, other, turn),
        "in two chunks": lambda: read(model, make(), ids, turn),
        "in row 3 of a padded batch": lambda: padded(model, make, ids, other),
        "in the second turn": lambda: read(
            model, make(), ids, turn, *[1] * ANSWER, n - turn - ANSWER
        ),
    }
    for size in chunks:
        found[f"in chunks of {size}"] = lambda size=size: read(model, make(), ids, size)
    if coded:
        found["from a file"] = lambda: saved(model, make, ids)
        found["after a reset"] = lambda: after_reset(model, make, ids, other)
    return found


def step(model, found, token):
    "Logits [V] after one more token, which all rows get."
    ids, more = token.expand(len(found.last), 1), {}
    if found.mask is not None:
        found.mask = torch.cat([found.mask, torch.ones_like(ids)], 1)
        places = found.mask.sum(1, keepdim=True) - 1
        more = dict(attention_mask=found.mask, position_ids=places)
    return model(ids, past_key_values=found.cache, **more).logits[found.row, -1]


def go_on(model, found, new, tokens=None):
    "(logits [new + 1, V], the tokens read): those given, else the best ones."
    logits, taken = [found.last[found.row]], []
    for i in range(new):
        taken.append(logits[-1].argmax() if tokens is None else tokens[i])
        logits.append(step(model, found, taken[-1]))
    return torch.stack(logits), taken


def coded_states(found, n):
    "Of each layer the numbers that its coded keys and values of n tokens stand for."
    layers = []
    for x in getattr(found.cache, "coded_layers", ()):
        coded = slice(-n + x.recipe.sinks, -x.recipe.recent or None)
        layers.append(torch.stack([y[found.row, :, coded] for y in x.store.read()]))
    return layers


def compare(one, other):
    "What two ways differ in, the first being what the other is measured by."
    p, q = (x.double().log_softmax(-1) for x in (one["logits"], other["logits"]))
    alike = (p.argmax(-1) == q.argmax(-1)).int()
    equal = [(a == b).double().mean().item() for a, b in zip(one["states"], other["states"])]
    shares = dict(first_layer=equal[0], all_layers=sum(equal) / len(equal)) if equal else {}
    return dict(
        same_bits=torch.equal(one["logits"], other["logits"]),
        largest=(one["logits"] - other["logits"]).abs().max().item(),
        kl=(p.exp() * (p - q)).sum(-1).mean().item(),
        agreed=int(alike.cumprod(0).sum()),
        of=len(alike),
        **shares,
    )


def pairs(names, chunks):
    "(one way, another): all against the whole prompt, and those that should be alike."
    found = [("whole", x) for x in names if x != "whole"]
    found.append(("in two chunks", "behind a shared prefix"))
    small = [f"in chunks of {x}" for x in sorted(chunks) if x <= ANSWER]
    return found + list(zip(small, small[1:]))


@torch.no_grad()
def matrix(model, name, ids, other, chunks, new):
    "Rows of one cache on one window; each way once, the whole prompt twice."
    coded = name != "uncompressed"
    make = lambda: TurboQuantCache(model, name) if coded else DynamicCache(config=model.config)
    found, tokens = {}, None
    all_ways = ways(model, make, ids, other, chunks, coded)
    for way, arrive in [*all_ways.items(), ("whole again", all_ways["whole"])]:
        here = arrive()
        logits, tokens = go_on(model, here, new, tokens)
        found[way] = dict(logits=logits, states=coded_states(here, ids.shape[1] + new))
    for one, way in pairs(found, chunks):
        yield dict(cache=name, way=way, against=one, **compare(found[one], found[way]))


def is_sound(rows):
    "Whether rows keep what the gate asks for."
    largest = [r["largest"] for r in rows if r["cache"] == "uncompressed"]
    again = [r["same_bits"] for r in rows if r["way"] == "whole again"]
    return all(x < 1e-3 for x in largest) and all(again)


def windows(a, tokenizer, model):
    "(ids of a prompt, ids of another text), each [1, tokens]."
    if tokenizer is None:
        ids = generate.random_ids(model, 1, 2 * a.windows * (a.tokens + 64), 0)
    else:
        ids = tokenizer(sample_text(), return_tensors="pt")["input_ids"]
    parts = ids.split(a.tokens + 64, 1)
    for i in range(a.windows):
        yield parts[2 * i][:, : a.tokens].to(model.device), parts[2 * i + 1].to(model.device)


def options(p):
    p.add_argument("--tiny", action="store_true", help="a small random model: does it run?")
    given(p, texts=False, after=False)
    p.add_argument("--recipes", nargs="+", default=RECIPES, help="caches")
    p.add_argument("--windows", type=int, default=1, help="prompts of each cache")
    p.add_argument("--tokens", type=int, default=288, help="of a prompt")
    p.add_argument("--new", type=int, default=8, help="tokens that follow it")
    p.add_argument("--chunks", nargs="+", type=int, default=[1, 16, 256], help="their sizes")


def rows(a, model, tokenizer):
    for i, (ids, other) in enumerate(windows(a, tokenizer, model)):
        for name in a.recipes:
            for row in matrix(model, name, ids, other, a.chunks, a.new):
                yield {"window": i} | row


def plan(a):
    if a.tiny:
        model, tokenizer = generate.make_model(generate.TINY), None
        name = {"id": "tiny", "revision": "none"}
    else:
        model, tokenizer, name = opened(a)
    cmd = (
        "uncompressed, the logits of every way are those of the whole prompt to 1e-3; on codes "
        "a prompt that is read whole twice gives the same bits"
    )
    gate = lambda found: {"cmd": cmd, "passed": is_sound(found)}
    data = {"id": "Moby-Dick, chapters 1 to 3", "n": a.windows}
    if a.tiny:
        data = {"id": "random ids", "n": a.windows}
    more = dict(tokens=a.tokens, new=a.new)
    return Plan("arrivals", gate, rows(a, model, tokenizer), data, name, more=more)
