"""The token of a step, coded in few calls: the store's own bits, alone and for all layers."""

import copy
import random
from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache import token_coder
from turboquant_nb.cache import attention, gather
from turboquant_nb.cache.disk import state_of
from turboquant_nb.cache.store import KVStore
from turboquant_nb.quant.quantizer import Spec
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from tests.cache.test_gather import FREQ, close
from tests.helpers import Calls


def assert_same_store(one, other):
    assert one.length == other.length and one._recent_from == other._recent_from
    assert [s.memory.truncated_tiles for s in one.parts] == [
        s.memory.truncated_tiles for s in other.parts
    ]
    for a, b in zip(one.parts, other.parts):
        assert a.tensors.keys() == b.tensors.keys()
        for name, t in a.tensors.items():
            assert t.dtype == b.tensors[name].dtype and torch.equal(t, b.tensors[name]), name
    assert one.clock.position is None or torch.equal(one.clock.position, other.clock.position)


@pytest.mark.parametrize(
    "static, seed", [(static, seed) for seed in range(16) for static in (False, True)]
)
def test_one_token_has_the_bits_of_the_store(static, seed):
    """Random recipes, shapes, paddings, crops; sinks that come one by one; over borders of
    quarters and tiles, in both storages."""
    g, r = torch.Generator().manual_seed(seed), random.Random(seed)
    dk, heads, batch = r.choice((16, 17, 40, 64)), r.choice((1, 3)), r.choice((1, 2, 3))
    dv, dtype = r.choice((dk, 31)), r.choice((torch.float32, torch.float32, torch.bfloat16))
    kinds = dict(
        codebook=r.choice(("sphere", "uniform")),
        scale=r.choice(("mse", "norm", "unbiased")),
        scale_dtype=r.choice(("float16", "bfloat16", "float32")),
    )
    key = Spec(r.randint(1, 4), center=r.choice(("none", "prompt_mean", "pre_rope")), **kinds)
    if key.bits > 1 and r.random() < 0.3:
        key = replace(key, residual="sign")  # another codebook
    value = Spec(
        r.choice((key.bits if dk == dv else 3, r.randint(1, 4))),
        rotation=r.choice(("hadamard", "haar", "identity")),
        center=r.choice(("none", "prompt_mean")),
        **kinds,
    )
    recipe = Recipe(key, value, sinks=r.choice((0, 4)), recent=r.choice((0, 1, 16)))
    more = dict(
        dtype=dtype,
        tile=r.choice((16, 64, 256)),
        inv_freq=FREQ,
        static=static,
        max_length=600 if static else None,
    )
    mine, want = (KVStore(recipe, batch, heads, dk, dv, **more) for _ in range(2))
    start = torch.tensor([r.choice((0, 0, 5, 13)) for _ in range(batch)])
    for store in (mine, want):
        store.set_range(start=start)
    for n in (r.randint(1, 14), *[1] * 30, r.randint(2, 40), *[1] * 30):
        states = [
            (torch.randn(batch, heads, n, d, generator=g) + 1).to(dtype) for d in (dk, dv)
        ]
        first = not mine.length
        did = token_coder.append(mine, *states)
        assert did == (n == 1 and not first)
        if not did:
            mine.append(*states)
        want.append(*states)
        if r.random() < 0.1:
            for store in (mine, want):
                store.crop(min(3, store.length - 2))
        assert_same_store(mine, want)


def test_one_token_by_a_transform_for_each_head():
    g = torch.Generator().manual_seed(0)
    transform = register_transform(
        HeadTransform.of(torch.randn(3, 64, 64, generator=g) + 20 * torch.eye(64))
    )
    mine, want = (
        KVStore(Recipe(Spec(3, rotation=transform.name), Spec(3)), 2, 3, 64) for _ in range(2)
    )
    for n in (20, 1, 1, 1):
        states = torch.randn(2, 2, 3, n, 64, generator=g)
        did = token_coder.append(mine, *states)
        assert did == (n == 1)
        if not did:
            mine.append(*states)
        want.append(*states)
        assert_same_store(mine, want)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k: k.fill_(0),
        lambda k: k[0, 0, 0].fill_(torch.nan),
        lambda k: k[0, 1].fill_(torch.inf),
        lambda k: k.mul_(1e30),
        lambda k: k[0, 0].mul_(1e6),
    ],
)
@pytest.mark.parametrize("side", (0, 1))
def test_what_is_unusual_is_left_to_the_store(spoil, side):
    "Zero vectors, and what must be refused: nothing has changed."
    store = KVStore(Recipe(), 1, 2, 64)
    store.append(*torch.randn(2, 1, 2, 255, 64))
    states, before = torch.randn(2, 1, 2, 1, 64), state_of(store)[0]
    before = {name: t.clone() for name, t in before.items()}
    spoil(states[side])
    if side == 0 and not states[0].any():
        states[0] += store.key.mean.float()  # centred, they are zero
    assert not token_coder.append(store, *states) and store.length == 255
    assert all(torch.equal(t, before[name]) for name, t in state_of(store)[0].items())


def test_stores_whose_token_takes_the_long_way():
    "A full store; a store without tokens; states of another kind."
    full = KVStore(Recipe(), 1, 2, 64, max_length=300)
    full.append(*torch.randn(2, 1, 2, 300, 64))
    assert not token_coder.append(full, *torch.randn(2, 1, 2, 1, 64))
    usual = KVStore(Recipe(), 1, 2, 64)
    one = torch.randn(2, 1, 2, 1, 64)
    assert not token_coder.append(usual, *one), "the first token has the mean to itself"
    usual.append(*one)
    assert (
        not token_coder.append(usual, *one.double())
        and not token_coder.append(usual, *one[..., :32])
        and token_coder.append(usual, *one)
    )


def test_calls_of_a_step():
    "What a step costs on a short past is PyTorch's calls: their numbers are held down."
    recipe = replace(Recipe(), key=Spec(3, center="pre_rope"))
    store = KVStore(recipe, 1, 3, 64, inv_freq=FREQ)
    store.append(*torch.randn(2, 1, 3, 600, 64))
    one, q = torch.randn(2, 1, 3, 1, 64), torch.randn(1, 9, 1, 64)
    with torch.no_grad():
        with Calls() as coding:
            assert token_coder.append(store, *one)
        with Calls() as long:
            store.append(*one)
        gather.attend(q, store, *one)
        with Calls() as attending:
            gather.attend(q, store, *one)
    assert coding.n < long.n / 2 and coding.n <= 55, (coding.n, long.n)
    assert attending.n <= 145, attending.n


def test_results_are_ordinary_tensors():
    "Inside, inference mode; what comes out may be written to and take part in autograd."
    store = KVStore(Recipe(), 1, 2, 64)
    with torch.inference_mode():
        store.append(*torch.randn(2, 1, 2, 300, 64))
        assert token_coder.append(store, *torch.randn(2, 1, 2, 1, 64))
    assert token_coder.append(store, *torch.randn(2, 1, 2, 1, 64))
    out, lse = gather.attend(torch.randn(1, 2, 1, 64), store)
    assert not out.is_inference() and not lse.is_inference()
    assert not any(t.is_inference() for side in store.parts for t in side.tensors.values())
    (out.mul_(2) * torch.ones(64, requires_grad=True)).sum().backward()


def some_layers(n=4, tokens=250, dtype=torch.float32):
    "Twice the same stores, of several recipes, with the same tokens."
    g = torch.Generator().manual_seed(0)
    recipes = [
        Recipe(Spec(r[0], center=r[1]), Spec(r[2]), recent=r[3])
        for r in (
            (3, "pre_rope", 3, 16),
            (4, "prompt_mean", 2, 5),
            (2, "none", 3, 16),
            (3, "pre_rope", 3, 1),
        )
    ]
    both = [
        [
            KVStore(recipe, 2, 3, 64, inv_freq=1e4 ** (-torch.arange(32) / 32), dtype=dtype)
            for recipe in recipes[:n]
        ]
        for _ in range(2)
    ]
    for mine, want in zip(*both):
        mine.set_range(start=torch.tensor([0, 7])), want.set_range(start=torch.tensor([0, 7]))
        states = (torch.randn(2, 2, 3, tokens, 64, generator=g) + 1).to(dtype)
        mine.append(*states), want.append(*states)
    return *both, lambda: (torch.randn(2, 2, 3, 1, 64, generator=g) + 1).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tokens_of_all_layers_together_have_the_bits_of_each(dtype):
    mine, want, new = some_layers(dtype=dtype)
    for _ in range(12):  # over the border of a tile
        for one, other in zip(mine, want):
            states = new()
            assert (
                token_coder.append_later(one, *states)
                and one.uncoded == 1
                and one.length == other.length + 1
            )
            assert token_coder.append(other, *states)
        token_coder.complete(mine)
        assert not any(store.uncoded for store in mine)
        for one, other in zip(mine, want):
            assert_same_store(one, other)


@pytest.mark.parametrize(
    "use",
    [
        lambda s, new: state_of(s),
        lambda s, new: s.read(),
        lambda s, new: s.coded("key", s.length - 1, s.length),
        lambda s, new: s.select(torch.tensor([1, 0])),
        lambda s, new: s.repeat(2),
        lambda s, new: s.append(*new()),
        lambda s, new: token_coder.append(s, *new()),
        lambda s, new: s.evict(s.tile),
        lambda s, new: s.decay(s.tile) if s.key.memory.truncated_planes else None,
        lambda s, new: s.to("cpu"),
        lambda s, new: copy.deepcopy(s).complete(),
        lambda s, new: s.set_range(end=torch.tensor([s.length, 100])),
    ],
)
def test_a_token_without_codes_is_coded_before_anyone_looks(use):
    mine, want, new = some_layers(tokens=600)
    for one, other in zip(mine, want):
        states, more = new(), new()
        assert token_coder.append_later(one, *states)
        other.append(*states)
        use(one, lambda: more), use(other, lambda: more)
        assert one.nbytes == other.nbytes
        one.complete()
        assert_same_store(one, other)


@pytest.mark.parametrize("n", (1, 3))
def test_a_token_without_codes_is_the_first_to_be_forgotten(n):
    mine, want, new = some_layers()
    for one, other in zip(mine, want):
        states = new()
        assert token_coder.append_later(one, *states)
        other.append(*states)
        for store in (one, other):
            store.crop(n)
        assert (
            not one.uncoded
            and one.length == other.length == 251 - n
            and one.clock.exact_from(one) == other.clock.exact_from(other)
        )
        for side in ("key", "value"):
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    one.coded(side, 0, one.length)[:2], other.coded(side, 0, other.length)[:2]
                )
            )
            assert all(torch.equal(a, b) for a, b in zip(one.exact(side), other.exact(side)))


def test_a_step_does_not_read_codes_that_are_not_there():
    mine, want, new = some_layers()
    for one, other in zip(mine, want):
        states = new()
        assert token_coder.append_later(one, *states)
        other.append(*states)
        for side in one.parts:
            side.tensors["scale"][:, :, 0, 250] = (
                1e4  # what a slot that is not written may hold
            )
        q = torch.randn(2, 6, 1, 64)
        for chunk in ((), states):
            close(gather.attend(q, one, *chunk), attention.attend(q, other, *chunk))
        assert one.uncoded


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k: k[0, 0, 0].fill_(torch.nan),
        lambda k: k[0, 1].fill_(torch.inf),
        lambda k: k.mul_(1e30),
        lambda k: k.mul_(2.0**12),
    ],
)
@pytest.mark.parametrize("side", (0, 1))
def test_what_may_be_refused_is_not_taken_before_it_is_coded(spoil, side):
    (store, *_), _, new = some_layers()
    states, before = new(), {name: t.clone() for name, t in state_of(store)[0].items()}
    spoil(states[side])
    assert (
        not token_coder.append_later(store, *states)
        and store.length == 250
        and not store.uncoded
    )
    assert all(torch.equal(t, before[name]) for name, t in state_of(store)[0].items())
    assert not token_coder.append_later(KVStore(Recipe(recent=0), 2, 3, 64), *new()), (
        "no ring would hold it"
    )


def test_a_vector_of_zeros_among_the_layers():
    mine, want, _ = some_layers(3)
    for i, (one, other) in enumerate(zip(mine, want)):
        states = torch.zeros(2, 2, 3, 1, 64) if i == 2 else torch.ones(2, 2, 3, 1, 64)
        assert token_coder.append_later(one, *states)
        other.append(*states)
    token_coder.complete(mine)
    for one, other in zip(mine, want):
        assert_same_store(one, other)


def test_a_token_that_cannot_be_coded_after_all_is_forgotten():
    (store, *_), (want, *_), new = some_layers()
    states = new()
    assert token_coder.append_later(store, *states)
    store.key.exact.recent[:, :, 250 % 16] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        store.complete()
    assert store.length == 250 and not store.uncoded
    want.append(*states)
    want.crop(1)
    assert store.clock.exact_from(store) == want.clock.exact_from(want)
    for one in (store, want):
        one.append(*states)
    assert torch.equal(store.read(0, 240)[0], want.read(0, 240)[0]) and torch.equal(
        store.coded("key", 0, 251).codes, want.coded("key", 0, 251).codes
    )
