"A decode step by look-up of four codes against attention on codes: random recipes, shapes, ranges, crops, evictions."
import random
from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache import attention, gather
from turboquant_nb.cache.packing import Layout, pack, unpack
from turboquant_nb.cache.store import KVStore
from turboquant_nb.quant.quantizer import Recipe, Spec, scalar_codebook
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from tests.helpers import Calls

FREQ = 100.0 ** (-torch.arange(8) / 8)


def close(got, want, limit=2e-5):
    "Outputs relative to the largest, log-sum-exps as they are; infinite ones in the same places."
    hidden = want[1].isinf()
    assert torch.equal(got[1].isinf(), hidden) and not got[0][hidden].any()
    assert got[0].dtype == want[0].dtype and got[0].shape == want[0].shape
    assert (got[0] - want[0]).abs().max() <= limit * want[0].abs().max() and ((got[1] - want[1])[~hidden].abs() <= limit).all()


@pytest.mark.parametrize("seed", range(24))
def test_random_steps_are_attention_on_codes(seed):
    g, r = torch.Generator().manual_seed(seed), random.Random(seed)
    dk, dv, heads, groups, batch = r.choice((16, 17, 40, 64)), r.choice((16, 31, 64)), r.choice((1, 3)), r.choice((1, 2, 7)), r.choice((1, 2, 3))
    key = Spec(r.randint(1, 4), center=r.choice(("none", "prompt_mean", "pre_rope")), codebook=r.choice(("sphere", "uniform")), scale_dtype=r.choice(("float16", "float32")))
    value = Spec(r.randint(1, 4), rotation=r.choice(("hadamard", "haar")), center=r.choice(("none", "prompt_mean")))
    recipe = Recipe(key, value, sinks=r.choice((0, 4)), recent=r.choice((0, 1, 16)))
    store = KVStore(recipe, batch, heads, dk, dv, tile=r.choice((16, 64, 256)), inv_freq=FREQ)
    store.set_range(start=torch.tensor([r.choice((0, 0, 5, 130)) for _ in range(batch)]))
    new = lambda n: (torch.randn(batch, heads, n, dk, generator=g) + 1, torch.randn(batch, heads, n, dv, generator=g) - 1)  # noqa: E731
    window = r.choice((None, 3, 90))
    options = dict(sliding_window=window, softcap=r.choice((None, 5.0)), scaling=r.choice((None, 0.2)))
    for n in (r.randint(1, 400), 1, 1, r.randint(2, 40), 1, 1):
        k, v = new(n)
        store.append(k, v)
        q = torch.randn(batch, heads * groups, 1, dk, generator=g)
        for chunk in ((), (k[:, :, -1:], v[:, :, -1:]), (k, v)):
            close(gather.attend(q, store, *chunk, **options), attention.attend(q, store, *chunk, **options))
        if n > 1:
            store.crop(r.randint(1, n - 1))
            close(gather.attend(q, store, **options), attention.attend(q, store, **options))
        if window:
            store.evict(store.length - window - 1)


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype, limit):
    "Inputs are widened alike, so what differs is the rounding of the output."
    new = lambda h, n: torch.randn(2, h, n, 64, generator=torch.Generator().manual_seed(h + n)).to(dtype)  # noqa: E731
    store = KVStore(Recipe(), 2, 2, 64, dtype=dtype)
    store.append(new(2, 300), new(2, 300))
    got, want = gather.attend(new(8, 1), store), attention.attend(new(8, 1), store)
    assert got[0].dtype == dtype and (got[0] - want[0]).float().abs().max() <= limit * want[0].float().abs().max()


def test_a_transform_for_each_head():
    g = torch.Generator().manual_seed(0)
    transform = register_transform(HeadTransform.of(torch.randn(3, 64, 64, generator=g) + 20 * torch.eye(64)))
    store = KVStore(Recipe(Spec(3, rotation=transform.name), Spec(3)), 1, 3, 64)
    store.append(*torch.randn(2, 1, 3, 300, 64, generator=g))
    q = torch.randn(1, 6, 1, 64, generator=g)
    close(gather.attend(q, store), attention.attend(q, store))


@pytest.mark.parametrize("bits", (1, 2, 3, 4))
@pytest.mark.parametrize("along", ("channel", "token"))
def test_every_byte_decodes_to_the_reference(bits, along):
    "All combinations of four codes, in channels of both halves of a bit plane's byte."
    book, layout = scalar_codebook("gaussian", bits, 2).to_int8_grid(), Layout(bits, 2, along, tile=4 * 2 ** (2 * bits))
    every = torch.cartesian_prod(*[torch.arange(2**bits, dtype=torch.uint8)] * 4)  # [n, 4]
    every = every.reshape(-1, 2 ** (2 * bits), 4).transpose(-1, -2).reshape(-1, 1)  # tiles, quarters, rows
    codes = torch.cat([every, every.flip(0)], 1)
    planes = pack(codes, layout)
    got = gather.by_token(gather.decode_quads(planes, layout, gather.quad_table(book)))
    got = got.flatten(-2).transpose(-1, -2).reshape(-1, 2) * book.grid.step
    assert len(codes) == 4 * 2 ** (4 * bits) and torch.equal(got, book.decode(unpack(planes, layout)))


def test_blocks_change_nothing_but_the_order_of_sums(monkeypatch):
    g = torch.Generator().manual_seed(0)
    store = KVStore(replace(Recipe(), sinks=3), 2, 2, 64, tile=32)
    store.append(*torch.randn(2, 2, 2, 700, 64, generator=g))
    q = torch.randn(2, 4, 1, 64, generator=g)
    whole = gather.attend(q, store)
    monkeypatch.setattr(gather, "BLOCK", 1)
    assert gather._Tiles(store, store.key, slice(0, 22)).at_once == 1
    close(gather.attend(q, store), whole)


@pytest.mark.parametrize("recipe, more, why", [
    (Recipe(key=Spec(2.5)), {}, "keys have channels of different bits"), (Recipe(value=Spec(3.5)), {}, "values have channels of different bits"),
    (Recipe(residual="prod"), {}, "keys have a QJL residual"), (Recipe(), dict(static=True, max_length=512), "the store is static"),
])
def test_what_is_not_served(recipe, more, why):
    store = KVStore(recipe, 1, 2, 64, **more)
    store.append(*torch.randn(2, 1, 2, 300, 64))
    with pytest.raises(ValueError, match=f"cannot serve this call: {why}"):
        gather.attend(torch.randn(1, 2, 1, 64), store)


def test_no_gradient_is_lost_in_silence():
    store = KVStore(Recipe(), 1, 2, 64)
    store.append(*torch.randn(2, 1, 2, 300, 64))
    with pytest.raises(ValueError, match="there is no gradient"):
        gather.attend(torch.randn(1, 2, 1, 64, requires_grad=True), store)


def assert_same_store(one, other):
    assert one.length == other.length and one._recent_from == other._recent_from
    for a, b in zip(one.sides, other.sides):
        assert a.tensors.keys() == b.tensors.keys()
        for name, t in a.tensors.items():
            assert t.dtype == b.tensors[name].dtype and torch.equal(t, b.tensors[name]), name
    assert one.position is None or torch.equal(one.position, other.position)


@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("seed", range(16))
def test_one_token_has_the_bits_of_the_store(seed, static):
    "Random recipes, shapes, paddings, crops; sinks that come one by one; over borders of quarters and tiles, in both storages."
    g, r = torch.Generator().manual_seed(seed), random.Random(seed)
    dk, heads, batch = r.choice((16, 17, 40, 64)), r.choice((1, 3)), r.choice((1, 2, 3))
    dv, dtype = r.choice((dk, 31)), r.choice((torch.float32, torch.float32, torch.bfloat16))
    kinds = dict(codebook=r.choice(("sphere", "uniform")), scale=r.choice(("mse", "norm", "unbiased")), scale_dtype=r.choice(("float16", "bfloat16", "float32")))
    key = Spec(r.randint(1, 4), center=r.choice(("none", "prompt_mean", "pre_rope")), **kinds)
    if key.bits > 1 and r.random() < 0.3:
        key = replace(key, residual="sign")  # another codebook
    value = Spec(r.choice((key.bits, r.randint(1, 4))), rotation=r.choice(("hadamard", "haar", "identity")), center=r.choice(("none", "prompt_mean")), **kinds)
    recipe = Recipe(key, value, sinks=r.choice((0, 4)), recent=r.choice((0, 1, 16)))
    more = dict(dtype=dtype, tile=r.choice((16, 64, 256)), inv_freq=FREQ, static=static, max_length=600 if static else None)
    mine, want = (KVStore(recipe, batch, heads, dk, dv, **more) for _ in range(2))
    start = torch.tensor([r.choice((0, 0, 5, 13)) for _ in range(batch)])
    for store in (mine, want):
        store.set_range(start=start)
    for n in (r.randint(1, 14), *[1] * 30, r.randint(2, 40), *[1] * 30):
        states = [(torch.randn(batch, heads, n, d, generator=g) + 1).to(dtype) for d in (dk, dv)]
        did, first = gather.append(mine, *states), not mine.length
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
    transform = register_transform(HeadTransform.of(torch.randn(3, 64, 64, generator=g) + 20 * torch.eye(64)))
    mine, want = (KVStore(Recipe(Spec(3, rotation=transform.name), Spec(3)), 2, 3, 64) for _ in range(2))
    for n in (20, 1, 1, 1):
        states = torch.randn(2, 2, 3, n, 64, generator=g)
        did = gather.append(mine, *states)
        assert did == (n == 1)
        if not did:
            mine.append(*states)
        want.append(*states)
        assert_same_store(mine, want)


@pytest.mark.parametrize("spoil", [
    lambda k: k.fill_(0), lambda k: k[0, 0, 0].fill_(torch.nan), lambda k: k[0, 1].fill_(torch.inf), lambda k: k.mul_(1e30), lambda k: k[0, 0].mul_(1e6),
])
@pytest.mark.parametrize("side", (0, 1))
def test_what_is_unusual_is_left_to_the_store(spoil, side):
    "Zero vectors, and what must be refused: nothing has changed."
    store = KVStore(Recipe(), 1, 2, 64)
    store.append(*torch.randn(2, 1, 2, 255, 64))
    states, before = torch.randn(2, 1, 2, 1, 64), store.state()[0]
    before = {name: t.clone() for name, t in before.items()}
    spoil(states[side])
    if side == 0 and not states[0].any():
        states[0] += store.key.mean.float()  # centred, they are zero
    assert not gather.append(store, *states) and store.length == 255
    assert all(torch.equal(t, before[name]) for name, t in store.state()[0].items())


@pytest.mark.parametrize("recipe, more", [
    (Recipe(Spec(2.5)), {}), (Recipe(residual="prod"), {}), (Recipe(decay=256), {}), (Recipe(), dict(max_length=300)),
])
def test_stores_whose_token_takes_the_long_way(recipe, more):
    store = KVStore(recipe, 1, 2, 64, **more)
    store.append(*torch.randn(2, 1, 2, 300, 64))
    assert not gather.append(store, *torch.randn(2, 1, 2, 1, 64))
    usual = KVStore(Recipe(), 1, 2, 64)
    one = torch.randn(2, 1, 2, 1, 64)
    assert not gather.append(usual, *one), "the first token has the mean to itself"
    usual.append(*one)
    assert not gather.append(usual, *one.double()) and not gather.append(usual, *one[..., :32]) and gather.append(usual, *one)


def test_calls_of_a_step():
    "What a step costs on a short past is PyTorch's calls: their numbers are held down."
    store = KVStore(replace(Recipe(), key=Spec(3, center="pre_rope")), 1, 3, 64, inv_freq=FREQ)
    store.append(*torch.randn(2, 1, 3, 600, 64))
    one, q = torch.randn(2, 1, 3, 1, 64), torch.randn(1, 9, 1, 64)
    with torch.no_grad():
        with Calls() as coding:
            assert gather.append(store, *one)
        with Calls() as long:
            store.append(*one)
        gather.attend(q, store, *one)
        with Calls() as attending:
            gather.attend(q, store, *one)
    assert coding.n < long.n / 2 and coding.n <= 110, (coding.n, long.n)
    assert attending.n <= 150, attending.n


def test_results_are_ordinary_tensors():
    "Inside, inference mode; what comes out may be written to and take part in autograd."
    store = KVStore(Recipe(), 1, 2, 64)
    with torch.inference_mode():
        store.append(*torch.randn(2, 1, 2, 300, 64))
        assert gather.append(store, *torch.randn(2, 1, 2, 1, 64))
    assert gather.append(store, *torch.randn(2, 1, 2, 1, 64))
    out, lse = gather.attend(torch.randn(1, 2, 1, 64), store)
    assert not out.is_inference() and not lse.is_inference()
    assert not any(t.is_inference() for side in store.sides for t in side.tensors.values())
    (out.mul_(2) * torch.ones(64, requires_grad=True)).sum().backward()
