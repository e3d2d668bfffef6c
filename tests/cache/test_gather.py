"""A decode step by look-up of four codes against attention on codes: random recipes, shapes,
ranges, crops, evictions."""

import random
from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache.clock import flags_of
from turboquant_nb.cache import attention, gather, token_coder
from turboquant_nb.cache.packing import Layout, pack, unpack
from turboquant_nb.cache.store import KVStore
from turboquant_nb.quant.mixed_precision import find_code
from turboquant_nb.quant.quantizer import Spec, scalar_codebook
from turboquant_nb.quant.recipe import Recipe
from turboquant_nb.quant.trellis import TrellisCode
from turboquant_nb.theory.transforms import HeadTransform, register_transform

CHAINED = [(bits, "trellis") for bits in (2, 3)]
FREQ = 100.0 ** (-torch.arange(8) / 8)


def close(got, want, limit=2e-5):
    """Outputs relative to the largest, log-sum-exps as they are; infinite ones in the same
    places."""
    hidden = want[1].isinf()
    assert torch.equal(got[1].isinf(), hidden) and not got[0][hidden].any()
    assert got[0].dtype == want[0].dtype and got[0].shape == want[0].shape
    assert (got[0] - want[0]).abs().max() <= limit * want[0].abs().max() and (
        (got[1] - want[1])[~hidden].abs() <= limit
    ).all()


def check_random_steps(seed, serve, biases, **ranges):
    """A random store grows, forgets and is attended to; each time `serve` must give what
    attention on codes gives. `biases(r, added)`: what is added to scores, each alone. `ranges`:
    what sizes, dtypes and lengths are drawn from."""
    g, r = torch.Generator().manual_seed(seed), random.Random(seed)
    dk, dv, heads, groups, batch = (
        r.choice(ranges["dk"]),
        r.choice((16, 31, 64)),
        r.choice((1, 3)),
        r.choice(ranges["groups"]),
        r.choice((1, 2, 3)),
    )
    key = Spec(
        r.randint(1, 4),
        center=r.choice(("none", "prompt_mean", "pre_rope")),
        codebook=r.choice(("sphere", "uniform")),
        scale_dtype=r.choice(ranges["scale_dtypes"]),
    )
    value = Spec(
        r.randint(1, 4),
        rotation=r.choice(("hadamard", "haar")),
        center=r.choice(("none", "prompt_mean")),
    )
    recipe = Recipe(key, value, sinks=r.choice((0, 4)), recent=r.choice((0, 1, 16)))
    store = KVStore(recipe, batch, heads, dk, dv, tile=r.choice(ranges["tiles"]), inv_freq=FREQ)
    store.set_range(start=torch.tensor([r.choice((0, 0, 5, 130)) for _ in range(batch)]))
    new = lambda n: (
        torch.randn(batch, heads, n, dk, generator=g) + 1,
        torch.randn(batch, heads, n, dv, generator=g) - 1,
    )
    numbers = torch.Generator().manual_seed(seed)

    def added():
        "What is added to scores: of all rows and heads, or of each."
        each = r.choice((1, batch)), r.choice((1, heads * groups))
        return torch.randn(*each, 1, store.length - store.offset, generator=numbers)

    window = r.choice(ranges["windows"])
    options = dict(
        sliding_window=window, softcap=r.choice((None, 5.0)), scaling=r.choice((None, 0.2))
    )
    for n in (r.choice(ranges["first"]), 1, 1, r.randint(2, 40), 1, 1):
        k, v = new(n)
        store.append(k, v)
        q = torch.randn(batch, heads * groups, 1, dk, generator=g)
        for chunk in ((), (k[:, :, -1:], v[:, :, -1:]), (k, v)):
            for bias in biases(r, added):
                close(
                    serve(q, store, *chunk, **options, bias=bias),
                    attention.attend(q, store, *chunk, **options, bias=bias),
                )
        if n > 1:
            store.crop(r.randint(1, n - 1))
            close(serve(q, store, **options), attention.attend(q, store, **options))
        if window:
            store.evict(store.length - window - 1)


@pytest.mark.parametrize("seed", range(24))
def test_random_steps_are_attention_on_codes(seed):
    check_random_steps(
        seed,
        gather.attend,
        lambda r, added: (None, added()),
        dk=(16, 17, 40, 64),
        groups=(1, 2, 7),
        scale_dtypes=("float16", "float32"),
        tiles=(16, 64, 256),
        windows=(None, 3, 90),
        first=range(1, 401),
    )


@pytest.mark.parametrize(
    "recipe, why",
    [
        (Recipe(Spec(2.5), Spec(3)), "equally many bits"),
        (Recipe(Spec(3), Spec((4, 2) * 32)), "equally many bits"),
        (Recipe(residual="prod").settled(rope=False), "QJL"),
        (Recipe(Spec(3), Spec(4), decay=20), "lost a plane"),
        (Recipe(Spec(1, codebook="trellis"), Spec(3)), "chains of 2 or 3 bits and 64 or 128"),
    ],
)
def test_codes_without_one_table_are_left_to_others(recipe, why):
    "Attention says why, coding leaves the token to the store."
    store = KVStore(recipe, 1, 2, 64, tile=16)
    store.append(*torch.randn(2, 1, 2, 60, 64))
    with pytest.raises(ValueError, match=why):
        gather.attend(torch.randn(1, 2, 1, 64), store)
    assert not token_coder.append(store, *torch.randn(2, 1, 2, 1, 64)) and store.length == 60


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype, limit):
    "Inputs are widened alike, so what differs is the rounding of the output."
    new = lambda h, n: torch.randn(
        2, h, n, 64, generator=torch.Generator().manual_seed(h + n)
    ).to(dtype)
    store = KVStore(Recipe(), 2, 2, 64, dtype=dtype)
    store.append(new(2, 300), new(2, 300))
    got, want = gather.attend(new(8, 1), store), attention.attend(new(8, 1), store)
    assert (
        got[0].dtype == dtype
        and (got[0] - want[0]).float().abs().max() <= limit * want[0].float().abs().max()
    )


def test_a_transform_for_each_head():
    g = torch.Generator().manual_seed(0)
    transform = register_transform(
        HeadTransform.of(torch.randn(3, 64, 64, generator=g) + 20 * torch.eye(64))
    )
    store = KVStore(Recipe(Spec(3, rotation=transform.name), Spec(3)), 1, 3, 64)
    store.append(*torch.randn(2, 1, 3, 300, 64, generator=g))
    q = torch.randn(1, 6, 1, 64, generator=g)
    close(gather.attend(q, store), attention.attend(q, store))


@pytest.mark.parametrize("bits", (1, 2, 3, 4))
@pytest.mark.parametrize("along", ("channel", "token"))
def test_every_byte_decodes_to_the_reference(bits, along):
    "All combinations of four codes, in channels of both halves of a bit plane's byte."
    book, layout = (
        scalar_codebook("sphere", bits, 1).to_int8_grid(),
        Layout(bits, 2, along, tile=4 * 2 ** (2 * bits)),
    )
    every = torch.cartesian_prod(*[torch.arange(2**bits, dtype=torch.uint8)] * 4)  # [n, 4]
    every = (
        every.reshape(-1, 2 ** (2 * bits), 4).transpose(-1, -2).reshape(-1, 1)
    )  # tiles, quarters, rows
    codes = torch.cat([every, every.flip(0)], 1)
    planes = pack(codes, layout)
    got = gather.by_token(gather.decode_quads(planes, layout, gather.quad_table(book)))
    got = got.flatten(-2).transpose(-1, -2).reshape(-1, 2) * book.grid.step
    assert len(codes) == 4 * 2 ** (4 * bits) and torch.equal(
        got, book.decode(unpack(planes, layout))
    )


@pytest.mark.parametrize("bits, codebook", CHAINED)
@pytest.mark.parametrize("along", ("channel", "token"))
@pytest.mark.parametrize("d", (64, 128))
def test_windows_decode_to_the_reference(bits, codebook, along, d):
    """Of all tokens of a byte, at both ends of a chain. The mutant: a chain that begins with
    zeros where it is closed, or the other way round."""
    code, layout = find_code(Spec(bits, codebook=codebook), d), Layout(bits, d, along, 64)
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 640, d), generator=g, dtype=torch.uint8)
    table = gather._quad_words(code.lut.levels, code.lut.planes)

    def decoded(code):
        found = gather.decode_quads(pack(codes, layout), layout, table, code=code)
        return gather.by_token(found).flatten(-2).mT.flatten(-3, -2) * code.lut.step

    assert torch.equal(decoded(code), code.levels(codes))
    start = "zero" if code.trellis.start == "tail" else "tail"
    other = TrellisCode(replace(code.trellis, start=start), d)
    assert torch.equal(decoded(other), other.levels(codes))
    assert not torch.equal(decoded(other), code.levels(codes))


@pytest.mark.parametrize("bits, codebook", CHAINED)
@pytest.mark.parametrize("center", ("none", "pre_rope"))
def test_windows_give_the_attention_of_the_reference(bits, codebook, center):
    "Padding, sinks and recent tokens, keys by windows beside values by a table, a chunk."
    g = torch.Generator().manual_seed(bits)
    key = Spec(bits, codebook=codebook, center=center)
    for value in (Spec(5 - bits, codebook=codebook), Spec(4)):
        freq = {} if center == "none" else {"inv_freq": 0.1 ** torch.arange(32.0)}
        store = KVStore(Recipe(key, value, 3, 5), 2, 2, 64, tile=64, **freq)
        store.set_range(start=torch.tensor([0, 9]))
        k, v = torch.randn(2, 2, 2, 300, 64, generator=g) + 1
        store.append(k, v)
        q = torch.randn(2, 6, 1, 64, generator=g)
        for near in ((), (k[:, :, -1:], v[:, :, -1:])):
            for window in (None, 100):
                want = attention.attend(q, store, *near, sliding_window=window)
                close(gather.attend(q, store, *near, sliding_window=window), want)
        call = attention.Call.of(q, store)
        assert not gather.Gather().refuses(call)
        assert not token_coder.append(
            store, k[:, :, :1], v[:, :, :1]
        )  # the store codes windows


def test_blocks_change_nothing_but_the_order_of_sums(monkeypatch):
    g = torch.Generator().manual_seed(0)
    store = KVStore(replace(Recipe(), sinks=3), 2, 2, 64, tile=32)
    store.append(*torch.randn(2, 2, 2, 700, 64, generator=g))
    q = torch.randn(2, 4, 1, 64, generator=g)
    whole = gather.attend(q, store)
    monkeypatch.setattr(gather, "BLOCK", 1)
    assert gather._Tiles(store.key, slice(0, 22)).at_once == 1
    close(gather.attend(q, store), whole)


def test_what_is_not_served():
    "Sequences with ends; a gradient, which would be lost in silence."
    q, store = torch.randn(1, 2, 1, 64), KVStore(Recipe(), 1, 2, 64)
    store.append(*torch.randn(2, 1, 2, 300, 64))
    assert not gather.Gather().refuses(attention.Call.of(q, store))
    with pytest.raises(ValueError, match="there is no gradient"):
        gather.attend(q.clone().requires_grad_(), store)
    store.set_range(end=200)
    with pytest.raises(ValueError, match="cannot serve this call: sequences have ends"):
        gather.attend(q, store)


def test_scales_of_hidden_tokens_stay_as_they_are():
    """Kernels leave NaN where a token was refused; a step that hides it counts it for nothing
    and writes nothing, in tiles of one row too."""
    store = KVStore(
        Recipe(
            Spec(3, scale_dtype="float32"), Spec(3, scale_dtype="float32"), sinks=0, recent=0
        ),
        1,
        1,
        16,
        tile=4,
    )
    store.append(*torch.randn(2, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0)))
    q, options = torch.randn(1, 1, 1, 16), dict(sliding_window=9)
    want = gather.attend(q, store, **options)
    flags_of(store)
    for side in store.parts:
        side.tensors["scale"].flatten(2)[:, :, 30] = (
            torch.nan
        )  # in the first tile that is read, before the window
    close(gather.attend(q, store, **options), want, 0)
    assert all(side.tensors["scale"].flatten(2)[0, 0, 30].isnan() for side in store.parts)
