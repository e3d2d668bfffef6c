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
    assert gather._Tiles(store, store.key, 3, 684).at_once == 1
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
