"""A decode step by look-up of four codes against attention on codes: random recipes, shapes,
ranges, crops, evictions."""

import copy
import random
from dataclasses import replace

import pytest
import torch

from turboquant_nb.cache.clock import flags_of
from turboquant_nb.cache import attention, gather
from turboquant_nb.cache.disk import state_of
from turboquant_nb.cache.packing import Layout, pack, unpack
from turboquant_nb.cache.store import KVStore
from turboquant_nb.quant.mixed_precision import find_code
from turboquant_nb.quant.quantizer import Recipe, Spec, scalar_codebook
from turboquant_nb.quant.trellis import TrellisCode
from turboquant_nb.theory.transforms import HeadTransform, register_transform
from tests.helpers import Calls

CHAINED = [(bits, name) for bits in (2, 3) for name in ("trellis", "trellis_fast")]
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
    assert not gather.append(store, *torch.randn(2, 1, 2, 1, 64)) and store.length == 60


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
        scalar_codebook("gaussian", bits, 2).to_int8_grid(),
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
        assert not gather.append(store, k[:, :, :1], v[:, :, :1])  # the store codes windows


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
    "A static store, sequences with ends, several queries: each with its reason."
    q, static, ends = (
        torch.randn(1, 2, 1, 64),
        KVStore(Recipe(), 1, 2, 64, static=True, max_length=512),
        KVStore(Recipe(), 1, 2, 64),
    )
    for store in (static, ends):
        store.append(*torch.randn(2, 1, 2, 300, 64))
    assert not gather.Gather().refuses(attention.Call.of(q, ends))
    ends.set_range(end=200)
    for query, store, why in (
        (q, static, "the store is static"),
        (q, ends, "sequences have ends"),
        (q.expand(-1, -1, 2, -1), ends, "one query a sequence"),
    ):
        with pytest.raises(ValueError, match=f"cannot serve this call: {why}"):
            gather.attend(query, store)


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


def test_no_gradient_is_lost_in_silence():
    store = KVStore(Recipe(), 1, 2, 64)
    store.append(*torch.randn(2, 1, 2, 300, 64))
    with pytest.raises(ValueError, match="there is no gradient"):
        gather.attend(torch.randn(1, 2, 1, 64, requires_grad=True), store)


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
        did = gather.append(mine, *states)
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
        did = gather.append(mine, *states)
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
    assert not gather.append(store, *states) and store.length == 255
    assert all(torch.equal(t, before[name]) for name, t in state_of(store)[0].items())


def test_stores_whose_token_takes_the_long_way():
    "A full store; a store without tokens; states of another kind."
    full = KVStore(Recipe(), 1, 2, 64, max_length=300)
    full.append(*torch.randn(2, 1, 2, 300, 64))
    assert not gather.append(full, *torch.randn(2, 1, 2, 1, 64))
    usual = KVStore(Recipe(), 1, 2, 64)
    one = torch.randn(2, 1, 2, 1, 64)
    assert not gather.append(usual, *one), "the first token has the mean to itself"
    usual.append(*one)
    assert (
        not gather.append(usual, *one.double())
        and not gather.append(usual, *one[..., :32])
        and gather.append(usual, *one)
    )


def test_calls_of_a_step():
    "What a step costs on a short past is PyTorch's calls: their numbers are held down."
    recipe = replace(Recipe(), key=Spec(3, center="pre_rope"))
    store = KVStore(recipe, 1, 3, 64, inv_freq=FREQ)
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
    assert coding.n < long.n / 2 and coding.n <= 55, (coding.n, long.n)
    assert attending.n <= 145, attending.n


def test_results_are_ordinary_tensors():
    "Inside, inference mode; what comes out may be written to and take part in autograd."
    store = KVStore(Recipe(), 1, 2, 64)
    with torch.inference_mode():
        store.append(*torch.randn(2, 1, 2, 300, 64))
        assert gather.append(store, *torch.randn(2, 1, 2, 1, 64))
    assert gather.append(store, *torch.randn(2, 1, 2, 1, 64))
    out, lse = gather.attend(torch.randn(1, 2, 1, 64), store)
    assert not out.is_inference() and not lse.is_inference()
    assert not any(t.is_inference() for side in store.parts for t in side.tensors.values())
    (out.mul_(2) * torch.ones(64, requires_grad=True)).sum().backward()


def some_layers(n=4, tokens=250, **options):
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
            KVStore(recipe, 2, 3, 64, inv_freq=1e4 ** (-torch.arange(32) / 32), **options)
            for recipe in recipes[:n]
        ]
        for _ in range(2)
    ]
    for mine, want in zip(*both):
        mine.set_range(start=torch.tensor([0, 7])), want.set_range(start=torch.tensor([0, 7]))
        states = torch.randn(2, 2, 3, tokens, 64, generator=g) + 1
        mine.append(*states), want.append(*states)
    return *both, lambda: torch.randn(2, 2, 3, 1, 64, generator=g) + 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tokens_of_all_layers_together_have_the_bits_of_each(dtype):
    mine, want, new = some_layers(tokens=250)
    for _ in range(12):  # over the border of a tile
        for one, other in zip(mine, want):
            states = new()
            assert (
                gather.append_later(one, *states)
                and one.uncoded == 1
                and one.length == other.length + 1
            )
            assert gather.append(other, *states)
        gather.complete(mine)
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
        lambda s, new: gather.append(s, *new()),
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
        assert gather.append_later(one, *states)
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
        assert gather.append_later(one, *states)
        other.append(*states)
        for store in (one, other):
            store.crop(n)
        assert (
            not one.uncoded
            and one.length == other.length == 251 - n
            and one.past_exact_from == other.past_exact_from
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
        assert gather.append_later(one, *states)
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
    assert not gather.append_later(store, *states) and store.length == 250 and not store.uncoded
    assert all(torch.equal(t, before[name]) for name, t in state_of(store)[0].items())
    assert not gather.append_later(KVStore(Recipe(recent=0), 2, 3, 64), *new()), (
        "no ring would hold it"
    )


def test_a_vector_of_zeros_among_the_layers():
    mine, want, _ = some_layers(3)
    for i, (one, other) in enumerate(zip(mine, want)):
        states = torch.zeros(2, 2, 3, 1, 64) if i == 2 else torch.ones(2, 2, 3, 1, 64)
        assert gather.append_later(one, *states)
        other.append(*states)
    gather.complete(mine)
    for one, other in zip(mine, want):
        assert_same_store(one, other)


def test_a_token_that_cannot_be_coded_after_all_is_forgotten():
    (store, *_), (want, *_), new = some_layers()
    states = new()
    assert gather.append_later(store, *states)
    store.key.exact.recent[:, :, 250 % 16] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        store.complete()
    assert store.length == 250 and not store.uncoded
    want.append(*states)
    want.crop(1)
    assert store.past_exact_from == want.past_exact_from
    for one in (store, want):
        one.append(*states)
    assert torch.equal(store.read(0, 240)[0], want.read(0, 240)[0]) and torch.equal(
        store.coded("key", 0, 251).codes, want.coded("key", 0, 251).codes
    )
