"""A refused call changes nothing: every way in which a store refuses, each held to what the
store was before, by its tensors, its numbers and what it reads."""

import hashlib

import pytest
import torch

from turboquant_nb import KVStore, Recipe, Spec
from turboquant_nb.cache.store import tail_with
from turboquant_nb.cache.disk import state_of, store_of
from tests.helpers import random_frame, refuses, seeded

B, H, D, TILE = 2, 2, 8, 8
CENTRED = Recipe(Spec(3, center="fixed", pair_scale="frame"), Spec(3), sinks=2, recent=4)
STORES = {  # what is made, and after so many tokens
    "grows": (dict(recipe=CENTRED), 21),
    "empty": (dict(recipe=CENTRED), 0),
    "pre-RoPE": (dict(recipe=Recipe(Spec(3, center="pre_rope"), Spec(3), 0, 4)), 21),
    "full": (dict(recipe=CENTRED, max_length=21), 21),
    "static": (dict(recipe=CENTRED, max_length=21, static=True), 21),
}


def states(n, seed=0, d=D, heads=H, dtype=torch.float32):
    generator = seeded(seed)
    return [torch.randn(B, heads, n, d, generator=generator).to(dtype) for _ in "kv"]


def filled(name):
    more, n = STORES[name]
    more = more | dict(inv_freq=0.1 ** torch.arange(4.0), frame=random_frame(H, D, D))
    store = KVStore(batch=B, heads=H, d_key=D, tile=TILE, **more)
    store.append(*(x + 1 for x in states(n)))
    return store


def digest(store) -> dict:
    "All that a store is: its numbers, and a hash of each tensor."
    sha = lambda t: hashlib.sha256(t.contiguous().view(torch.uint8).numpy()).hexdigest()
    tensors = {
        f"{i}.{name}": t
        for i, part in enumerate(part for run in store.runs for part in run.parts)
        for name, t in part.tensors.items()
    }
    numbers = dict(start=store.start, position=store.clock.position)
    tensors |= {name: t for name, t in numbers.items() if t is not None}
    tensors |= dict(zip(("read k", "read v"), store.read()))
    plain = ("length", "offset", "batch", "capacity", "nbytes")
    return (
        {name: sha(t) for name, t in tensors.items()}
        | {name: getattr(store, name) for name in plain}
        | {
            "exact from": store.clock.exact_from(store),
            "device": store.device,
            "runs": [(run.offset, run.length) for run in store.runs],
            "quantizers": [id(part.q) for part in store.parts],
        }
    )


def spoiled(n, value, side=0):
    "States with one bad number, in keys (0) or values (1)."
    out = states(n)
    out[side][1, 1, n - 1, 3] = value
    return out


def unequal(store):
    k, v = states(3)
    store.append(k, v[:, :, :2])


NAN, INF = float("nan"), float("inf")
EVERY = {  # refused by every store
    "append: not a tensor": (TypeError, lambda s: s.append("k", "v")),
    "append: integers": (TypeError, lambda s: s.append(*states(1, dtype=torch.int32))),
    "append: another dtype": (ValueError, lambda s: s.append(*states(1, dtype=torch.float16))),
    "append: another device": (
        ValueError,
        lambda s: s.append(*[x.to("meta") for x in states(1)]),
    ),
    "append: dimensions": (ValueError, lambda s: s.append(*[x[0] for x in states(1)])),
    "append: rows": (ValueError, lambda s: s.append(*[x[:1] for x in states(1)])),
    "append: heads": (ValueError, lambda s: s.append(*states(1, heads=3))),
    "append: head size": (ValueError, lambda s: s.append(*states(1, d=6))),
    "append: unequal lengths": (ValueError, unequal),
    "crop: a fraction": (TypeError, lambda s: s.crop(1.5)),
    "crop: more than is held": (ValueError, lambda s: s.crop(1000)),
    "select: fractions": (TypeError, lambda s: s.select(torch.tensor([0.0]))),
    "select: a table": (ValueError, lambda s: s.select(torch.tensor([[0, 1]]))),
    "select: nobody": (ValueError, lambda s: s.select(torch.tensor([], dtype=torch.long))),
    "select: beyond the last": (ValueError, lambda s: s.select(torch.tensor([0, B]))),
    "select: before the first": (ValueError, lambda s: s.select(torch.tensor([-B - 1, 0]))),
    "evict: a fraction": ((TypeError, ValueError), lambda s: s.evict(0.5)),
    "read: beyond the length": (ValueError, lambda s: s.read(0, 1000)),
    "coded: backwards": (ValueError, lambda s: s.coded("key", 5, 3)),
    "set_range: below 0": (ValueError, lambda s: s.set_range(start=-1)),
    "set_range: of more rows": (ValueError, lambda s: s.set_range(start=torch.zeros(B + 1))),
    "to: no device": ((RuntimeError, ValueError), lambda s: s.to("nowhere")),
    "tail_with: another dtype": (
        ValueError,
        lambda s: tail_with(s, *states(1, dtype=torch.float16)),
    ),
}
VALUES = {  # refused where there is room
    f"append: {what} among {name}": (
        ValueError,
        lambda s, x=x, i=i, n=n: s.append(*spoiled(n, x, i)),
    )
    for what, x in dict(NaN=NAN, Inf=INF).items()
    for i, name in enumerate(("keys", "values"))
    for n in (1, 9)  # within a tile, and beyond what there is room for
} | {"append: too large a scale": (ValueError, lambda s: s.append(*spoiled(1, 1e38)))}
FULL = {"append: full": (ValueError, lambda s: s.append(*states(1)))}
HELD = {  # refused where tokens are held
    "set_range: without states": (ValueError, lambda s: s.set_range(start=1)),
    "set_range: too few states": (ValueError, lambda s: s.set_range(1, *states(3))),
    "set_range: NaN in what is coded again": (
        ValueError,
        lambda s: s.set_range(1, *spoiled(s.length, NAN)),
    ),
    "set_range: Inf in values that are coded again": (
        ValueError,
        lambda s: s.set_range(1, *spoiled(s.length, INF, 1)),
    ),
}
FIXED = {
    "evict: static": (ValueError, lambda s: s.evict(16)),
    "select: other rows": (ValueError, lambda s: s.select(torch.tensor([0]))),
    "to: another device": (ValueError, lambda s: s.to("meta")),
}
REFUSED = [
    (name, what, *how)
    for name in STORES
    for what, how in (
        EVERY
        | (FULL if name in ("full", "static") else VALUES)
        | (HELD if STORES[name][1] else {})
        | (FIXED if name == "static" else {})
    ).items()
]


@pytest.mark.parametrize(
    "name, what, error, call", REFUSED, ids=[f"{name}-{what}" for name, what, *_ in REFUSED]
)
def test_a_refused_call_changes_nothing(name, what, error, call):
    store = filled(name)
    before, epoch = digest(store), store.epoch
    with pytest.raises(error):
        call(store)
    assert digest(store) == before and store.epoch >= epoch
    twin = filled(name)  # and it goes on as one to which nobody was refused anything
    for s in (store, twin):
        if name not in ("full", "static"):
            s.append(*states(5, seed=3))
        s.crop(min(2, s.length))
    assert without_ids(digest(store)) == without_ids(digest(twin))


def without_ids(found: dict) -> dict:
    return {name: x for name, x in found.items() if name != "quantizers"}


def test_a_range_that_was_freed_is_refused():
    store = filled("grows")
    store.evict(16)
    before = digest(store)
    with refuses("were freed"):
        store.set_range(1, *states(21))
    with refuses("positions must lie in"):
        store.read(0)
    assert digest(store) == before


def test_the_digest_sees_one_bit():
    "The mutant: every tensor that a store has, with one number changed."
    for i, name in enumerate(("key", "value")):
        part = getattr(filled("grows"), name)
        for n in [*part.memory.fields, *part.exact.tensors, *part.frame_names]:
            store = filled("grows")
            before = digest(store)
            t = (store.parts[i].memory.tensors | store.parts[i].tensors)[n]
            t[(-1,) * t.ndim] += 1
            assert digest(store) != before, n


BROKEN = {
    "no recipe": lambda data, header: header.pop("recipe"),
    "no start": lambda data, header: data.pop("start"),
    "a plane less": lambda data, header: data.pop("key.plane0"),
    "another shape": lambda data, header: data.update(start=data["start"][:1]),
    "another dtype": lambda data, header: data.update(
        {"value.scale": data["value.scale"].float()}
    ),
    "more tokens than tiles": lambda data, header: header.update(length=1000),
    "freed beyond the end": lambda data, header: header.update(offset=64),
    "freed within a tile": lambda data, header: header.update(offset=header["offset"] + 1),
    "no whole number": lambda data, header: header.update(heads=1.5),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("name", ["grows", "pre-RoPE"])
def test_a_refused_state_leaves_the_store(name, what):
    store = filled(name)
    before, (tensors, header) = digest(store), state_of(store)
    BROKEN[what](tensors, header)
    with pytest.raises((ValueError, TypeError)):
        store_of(tensors, header)
    assert digest(store) == before
    with refuses("tokens are held"):
        store_of(*state_of(store), max_length=3)
    assert digest(store) == before
