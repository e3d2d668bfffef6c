"""A prefix that sequences share, against the same sequences with copies of it: codes to the
bit, attention to what sums in another order may differ."""

import pytest
import torch

from turboquant_nb.cache.attention import Call, attend
from turboquant_nb.cache.clock import DeviceClock
from turboquant_nb.cache.store import KVStore
from turboquant_nb.hf.graphs import counted_by_device
from turboquant_nb.kernels import ops, prefix
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe, preset

pytestmark = pytest.mark.usefixtures("one_thread")
D, H, G = 32, 2, 2
RECIPES = {
    "k3v3": preset("k3v3"),
    "k4v3": preset("k4v3"),
    "fast": Recipe(Spec(3, center="prompt_mean"), Spec(3)),
    "qjl": Recipe(residual="prod"),
    "trellis": preset("k3v3-trellis"),
    "ring of 20": Recipe(recent=20, sinks=5),
    "nothing exact": Recipe(recent=0, sinks=0),
}


class Both:
    "Sequences with copies of what they begin with, and the same that share it."

    def __init__(self, recipe, batch=1, times=3, tokens=600, start=None, **more):
        self.gen, self.times, self.rows = torch.Generator().manual_seed(0), times, batch * times
        inv = 10000.0 ** (-torch.arange(0, D, 2) / D)
        size = recipe, batch, H, D, D, torch.float32
        self.copies, whole = (KVStore(*size, inv_freq=inv, **more) for _ in range(2))
        k, v = self.states(tokens, batch)
        for store in (self.copies, whole):
            if start:
                store.set_range(start=torch.tensor(start))
            store.append(k + 1, v)
        self.copies.repeat(times)
        self.prefix, self.own = prefix.share(whole, times)

    def states(self, n, rows=None):
        size = rows or self.rows, H, n, D
        return [torch.randn(size, generator=self.gen) for _ in range(2)]

    def append(self, n):
        k, v = self.states(n)
        self.copies.append(k, v)
        self.own.append(k, v)
        return k, v

    def attend(self, n=1, k=None, v=None, first=None, **more):
        "(shared, copies) of queries of the last n tokens."
        q = torch.randn(self.rows, H * G, n, D, generator=self.gen)
        own, past = self.prefix.apart(Call.of(q, self.own, k, v, first=first, **more))
        got = self.prefix.join(ops.serve(own), prefix.attend(past))
        return got, attend(q, self.copies, k, v, first=first, **more)

    def check(self, **how):
        got, want = self.attend(**how)
        assert float((got.out - want.out).norm()) <= 3e-6 * float(want.out.norm())
        assert torch.allclose(got.lse, want.lse, atol=2e-6, rtol=1e-6)


def same_stores(a, b):
    "Whether two stores hold the same, tensor by tensor, as far as tokens go."
    tiles = -(-a.length // a.tile)
    assert (a.length, a.batch, a.recipe, a.start.tolist()) == (
        b.length,
        b.batch,
        b.recipe,
        b.start.tolist(),
    )
    assert a._recent_from == b._recent_from and a.max_length == b.max_length
    for p, q in zip(a.parts, b.parts):
        coded = {*p.memory.names}
        for name, t in p.tensors.items():
            cut = lambda x, name=name: x[:, :, :tiles] if name in coded else x
            assert torch.equal(cut(t), cut(q.tensors[name])), name
    assert all(map(torch.equal, a.read(), b.read()))


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_what_is_shared_is_what_copies_hold(name):
    """Through single tokens, chunks and back to copies. Kills: a ring that begins elsewhere, a
    mean of the rest, angles of other positions, sinks that are read twice."""
    both = Both(RECIPES[name])
    both.check()
    for n in (1, 1, 7, 40):
        k, v = both.append(n)
        both.check(n=n, k=k, v=v)
    both.append(300)
    both.check()
    same_stores(both.prefix.joined(both.own), both.copies)
    shared = both.prefix.store.nbytes + both.own.nbytes
    assert shared < both.copies.nbytes and both.prefix.tokens % 256 == 0


@torch.no_grad()
def test_masks_biases_and_caps():
    """A mask that says the padding alone leaves the shared part to what serves it without one;
    another is obeyed there too."""
    both = Both(RECIPES["fast"], batch=2, start=[0, 37])
    both.append(5)
    n, length = both.prefix.tokens, both.copies.length
    both.check(softcap=3.0)
    both.check(scaling=0.5)
    both.check(first=0, bias=torch.randn(1, H * G, 1, length, generator=both.gen))
    starts = both.copies.start[:, None, None, None]
    seen = (torch.arange(length) >= starts).clone()
    seen[2:4, ..., n + 3 : n + 9] = False  # padding behind the prefix
    both.check(first=0, mask=seen)
    call = Call.of(torch.randn(6, H * G, 1, D), both.own, first=0, mask=seen)
    assert both.prefix.apart(call)[1].mask is None
    seen[1, ..., 100:200] = False
    both.check(first=0, mask=seen)
    assert both.prefix.apart(call._replace(mask=seen))[1].mask is not None


@torch.no_grad()
def test_many_queries_come_in_pieces(monkeypatch):
    both = Both(RECIPES["k3v3"])
    monkeypatch.setattr(prefix, "_ROWS", 5)
    both.check()
    k, v = both.append(20)
    both.check(n=20, k=k, v=v)


@torch.no_grad()
def test_rows_are_chosen_with_what_they_share():
    """Of one prefix in any order and number, of several while those of each lie together and
    are equally many; else there is none. Kills: rows that go on with another's prefix."""
    both = Both(RECIPES["fast"], batch=2, start=[0, 9])
    both.append(5)
    for order in ([1, 0, 2, 5, 5, 3], [3, 4, 0, 1], [4], [5, 1]):
        chosen = both.prefix.choose(len(order), order)
        own, copies = (
            prefix._with(both.own, 6, **tensors(both.own)),
            both.prefix.joined(both.own),
        )
        own.select(torch.tensor(order))
        copies.select(torch.tensor(order))
        same_stores(chosen.joined(own), copies)
    for order in ([0, 3, 1], [0, 1, 3], [0, 3, 0, 3]):
        assert both.prefix.choose(len(order), order) is None
    one = Both(RECIPES["fast"])
    assert one.prefix.choose(5, None).times == 5
    again = one.prefix.repeated(2)
    one.own.repeat(2)
    one.copies.repeat(2)
    same_stores(again.joined(one.own), one.copies)


def tensors(store):
    return prefix._each(store, lambda part: {n: t.clone() for n, t in part.tensors.items()})


@torch.no_grad()
def test_it_never_changes_and_the_rest_may_be_counted_by_the_device():
    "A static store of the rest, of which a graph may know: the same codes, to the bit."
    both = Both(RECIPES["k3v3"], max_length=900)
    before = tensors(both.prefix.store)
    both.own = counted_by_device(both.own, both.own.max_length)
    assert isinstance(both.own.clock, DeviceClock) and both.own.max_length == 900 - 512
    both.append(1)
    both.check()
    for side, held in before.items():
        for name, t in held.items():
            assert torch.equal(t, getattr(both.prefix.store, side).tensors[name])


REFUSED = {
    "the store is static": dict(static=True, max_length=900),
    "RoPE rotates to positions of their own": dict(start=[3]),
    "would decay": dict(recipe=Recipe(decay=100)),
    "nothing is held twice": dict(tokens=200),
    "too much padding": dict(recipe=RECIPES["fast"], start=[550]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_shared_says_why(why):
    how = dict(recipe=RECIPES["k3v3"], tokens=600, start=None) | REFUSED[why]
    recipe, tokens, start = (how.pop(x) for x in ("recipe", "tokens", "start"))
    inv = 10000.0 ** (-torch.arange(0, D, 2) / D)
    store = KVStore(recipe, 1, H, D, D, torch.float32, inv_freq=inv, **how)
    if start:
        store.set_range(start=torch.tensor(start))
    store.append(*torch.randn(2, 1, H, tokens, D))
    with pytest.raises(ValueError, match=why):
        prefix.share(store, 3)
    with pytest.raises(ValueError, match="times must be"):
        prefix.share(store, 0)


def test_sharing_pays_where_many_tokens_are_spared():
    store = KVStore(RECIPES["fast"], 2, H, D)
    store.append(*torch.randn(2, 2, H, 600, D))
    assert prefix.costs(store, 3, 12) == "copies of 2048 tokens are spared, 32768 would pay"
    assert prefix.costs(store, 33, 132) == "" and prefix.refuses(store, 3) == ""
