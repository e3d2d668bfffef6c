"""Bits as a vector over many shapes, dtypes and bad inputs."""

import pytest
import torch

from turboquant_nb.quant.codes import by_layer, make_quantizer
from turboquant_nb.quant.quantizer import Spec, scalar_codebook
from turboquant_nb.quant.recipe import Recipe, preset
from turboquant_nb.testing import same
from turboquant_nb.theory import codebook, rates
from turboquant_nb.theory.codebook import Codebook, lloyd_max
from turboquant_nb.theory.rates import (
    MixedCodebook,
    allocate_channels,
    entropy_decode,
    entropy_encode,
    truncate,
    water_filling,
)
from tests.helpers import refuses, seeded

D = [1.0] + [lloyd_max(b).mse for b in range(1, 9)]


def gen(seed=0):
    return seeded(seed)


def mixed(bits, d=None, std=None):
    return MixedCodebook({b: lloyd_max(b, d) for b in set(bits) if b}, bits, std)


def test_std_stretches_the_table():
    std = torch.tensor([2.0, 0.5, 1.0])
    book, plain = mixed((3, 2, 0), std=std), mixed((3, 2, 0))
    x = torch.randn(50, 3, generator=gen())
    assert torch.equal(book.encode(x), plain.encode(x / std))
    assert torch.equal(book.decode(book.encode(x)), plain.decode(plain.encode(x / std)) * std)
    assert book.mse == pytest.approx((4 * D[3] + 0.25 * D[2] + 1) / 3)
    assert torch.equal(book.to("cpu").levels, book.levels)
    assert plain.to("meta").levels.device.type == "meta"


@pytest.mark.parametrize("d", [16, 80])
@pytest.mark.parametrize("table", ["sphere", "uniform"])
@pytest.mark.parametrize(
    "spec",
    [dict(bits=b) for b in (1, 2, 3, 4, 2.5, 3.75)]
    + [dict(bits=b, residual=r) for r in ("sign", "qjl") for b in (2, 3, 4)],
    ids=str,
)
def test_every_table_is_snapped(spec, table, d):
    """What a kernel relies on: levels are one fp32 step times int8, edges are those of the best
    table."""
    q = make_quantizer(Spec(codebook=table, **spec), d)
    books = (
        [b for *_, b in q.codebook.groups]
        if isinstance(q.codebook, MixedCodebook)
        else [q.codebook]
    )
    for book in books:
        grid = book.int8()
        assert isinstance(book, Codebook) and book.to_int8_grid() is book and book.grid is grid
        assert (
            int(grid.levels.int().abs().max()) <= 127 and (grid.levels.int().diff() > 0).all()
        )
        assert torch.equal(book.levels, torch.tensor(grid.step) * grid.levels)
        if "residual" not in spec:
            best = scalar_codebook(table, book.bits, d)
            assert torch.equal(book.edges, best.edges) and torch.equal(
                grid.levels, best.int8().levels
            )
    codes = q.codebook.encode(torch.randn(50, d, generator=gen()))
    assert q.codebook.decode(codes).shape == codes.shape


@pytest.mark.parametrize("bits", [3, 4])
def test_truncate_a_snapped_table(bits):
    "Its int8 grid is its own, not that of the table it was cut from."
    cut, plain = truncate(lloyd_max(bits).to_int8_grid()), truncate(lloyd_max(bits))
    assert (
        cut.grid is None
        and torch.equal(cut.levels, plain.levels)
        and torch.equal(cut.edges, plain.edges)
    )
    assert cut.mse == pytest.approx(plain.mse, rel=1e-12) and len(cut.int8().levels) == 2 ** (
        bits - 1
    ) == len(cut.to_int8_grid().levels)


def test_truncate_mixed():
    book = mixed((2, 4, 3, 0, 2, 4), d=64)
    cut = truncate(book, keep=2)
    assert cut.channel_bits == (2, 3, 2, 0, 2, 3)
    assert [g[1] for g in cut.groups] == [
        g[1] for g in book.groups
    ]  # planes stay where they are
    x = torch.randn(100, 6, generator=gen())
    drop = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.uint8)
    assert torch.equal(book.encode(x) >> drop, cut.encode(x))
    assert truncate(book).channel_bits == (1, 3, 2, 0, 1, 3)
    assert cut.books[0] is book.books[0]


@pytest.mark.parametrize("shape", [(7,), (5, 64), (0, 4), (4, 0)])
@pytest.mark.parametrize("rows", [False, True])
def test_entropy_round_trip(shape, rows):
    "A table for all channels, and one for each."
    codes = torch.randint(0, 16, shape, generator=gen()).to(torch.uint8)
    weights = torch.rand(*((shape[-1], 16) if rows and shape[-1] else (16,)), generator=gen(1))
    data = entropy_encode(codes, weights + 1e-3)
    assert torch.equal(entropy_decode(data, weights + 1e-3, shape), codes)


def test_bfloat16_variances():
    v = torch.tensor([4.0, 1.0, 0.5])
    assert water_filling(v.bfloat16(), 2.0)[1] == water_filling(v, 2.0)[1]
    assert torch.equal(allocate_channels(v.bfloat16(), 6), allocate_channels(v, 6))


def test_by_layer():
    special = Recipe(key=Spec(bits=2.5))
    got = by_layer("k3v3", 5, {0: "k4v4", -1: special, 2: "k4v3"})
    want = ["k4v4", "k3v3", "k4v3", "k3v3"]
    assert got == [preset(name) for name in want] + [special]
    assert by_layer(special, 2, {}) == [special, special]


one, two = torch.tensor([1]), torch.ones(2)
BAD = {
    ValueError: {
        "length d = 1, got 2": lambda: MixedCodebook([lloyd_max(2)], (2, 2)),
        "at least one channel": lambda: MixedCodebook({2: lloyd_max(2)}, ()),
        "got 2.5 for channel 1": lambda: MixedCodebook({2: lloyd_max(2)}, (2, 2.5)),
        "std must be 2": lambda: mixed((2, 2), std=torch.tensor([1.0, 0.0])),
        r"\[\.\.\., 2\]": lambda: mixed((2, 2)).encode(torch.tensor(1.0)),
        r"0\.\.1": lambda: mixed((2, 1)).decode(torch.tensor([3, 3])),
        "at least 2 of 3": lambda: truncate(lloyd_max(3), 2, keep=2),
        "keep must be": lambda: truncate(lloyd_max(3), keep=0),
        "vector": lambda: water_filling([[1.0]], 2),
        "from 2 to 12": lambda: allocate_channels([1.0, 1.0], 1, lo=1),
        "lo must not exceed hi": lambda: allocate_channels([1.0], 2, lo=3, hi=2),
        "hi must be": lambda: allocate_channels([1.0], 2, hi=9),
        "lo must be": lambda: allocate_channels([1.0], 2, lo=-1),
        "n_layers": lambda: by_layer("k3v3", 0, {}),
        r"\[\.\.\., d\]": lambda: entropy_encode(torch.tensor(1), two),
        "got -1": lambda: entropy_encode(-one, two),
        "probs must have shape": lambda: entropy_encode(one, two[:1]),
        "a row for each": lambda: entropy_encode(one, torch.ones(2, 2)),
        "shape must be": lambda: entropy_decode(b"1234", two, (-1,)),
        # also where nothing is stored
        "finite": lambda: mixed((2, 0)).encode(torch.tensor([1.0, torch.nan])),
        "without bits must be 0": lambda: mixed((2, 0)).decode(torch.tensor([1, 3])),
    },
    TypeError: {
        "floating-point tensor": lambda: mixed((2, 2)).encode([1.0, 2.0]),
        "spec must be a Spec": lambda: make_quantizer(3, 64),
        "must be a Codebook": lambda: truncate(3),
        "rate": lambda: water_filling([1.0], "2"),
        "recipe must be": lambda: by_layer("k3v3", 2, {1: 4}),
        "dict": lambda: by_layer("k3v3", 2, ["k4v4"]),
        "integers": lambda: entropy_encode(two, two),
        "data must be bytes": lambda: entropy_decode(None, two, (2,)),
        "one Codebook per channel": lambda: MixedCodebook(None, (2, 2)),
        "channel 0 must be a Codebook, got int": lambda: MixedCodebook((2, 2), (2, 2)),
        "std must be a floating-point tensor": lambda: mixed((2, 2), std=[1.0, 2.0]),
        "tensor of integers": lambda: mixed((0, 0)).decode(two),
    },
}


@pytest.mark.parametrize("kind, text", [(kind, x) for kind in BAD for x in BAD[kind]])
def test_bad_input(kind, text):
    with refuses(text, kind):
        BAD[kind][text]()


def test_codes_of_an_empty_cell_read_as_the_middle_of_its_levels():
    "Merged cells without mass have no mean: 0 / 0 must not become a level."
    book = rates.truncate(
        codebook.from_levels(torch.tensor([-120.0, -100.0, -2.0, -1.0, 1.0, 2.0, 100.0, 120.0]))
    )
    assert book.levels.isfinite().all() and book.levels[[0, 3]].tolist() == [-110, 110]


def test_a_mixed_code_of_channels_without_bits():
    "A channel of 0 bits loses all it has: 1, and not 0."
    assert rates.mixture_mse([0]) == 1 and rates.mixture_mse([0, 2], 16) == pytest.approx(
        (1 + lloyd_max(2, 16).mse) / 2
    )


def test_bytes_of_entropy_coded_files_do_not_change():
    """What lies under the first code is the same for ever: these bytes were written when this
    test was."""
    pytest.importorskip("constriction")
    codes, probs = (
        torch.tensor([0, 1, 2, 3, 1, 1, 0, 2], dtype=torch.uint8),
        torch.tensor([0.4, 0.3, 0.2, 0.1]),
    )
    data = bytes.fromhex("487b4ce47a4a0000")
    assert rates.entropy_encode(codes, probs) == data
    same(rates.entropy_decode(data, probs, (8,)), codes)


def test_channels_of_one_table_are_a_slice_where_they_can_be():
    "A slice is a view; a list copies. What lies apart is a list."
    groups = MixedCodebook({2: lloyd_max(2), 3: lloyd_max(3)}, (3, 2, 2, 3, 0)).groups
    assert [(bits, at) for bits, at, _ in groups] == [
        (3, [0, 3]),
        (2, slice(1, 3)),
        (0, slice(4, 5)),
    ]


def test_bits_between_equal_bounds():
    "lo = hi says everything; 0 and 8 are bounds like any other."
    v = torch.tensor([1.0, 2.0, 4.0])
    for b in (0, 2, 8):
        assert rates.allocate_channels(v, 3 * b, b, b).tolist() == [b] * 3


def test_a_shorter_row_of_levels_repeats_its_last_one():
    "A table of mixed bits is rectangular; nothing that pads it may look like a level."
    book = MixedCodebook({b: lloyd_max(b) for b in (1, 3)}, (3, 1, 0))
    three, one = lloyd_max(3).levels, lloyd_max(1).levels
    assert torch.equal(
        book.levels, torch.stack([three, torch.cat([one, one[-1:].expand(6)]), torch.zeros(8)])
    )
    assert torch.equal(
        book.edges[1], torch.cat([lloyd_max(1).edges, torch.full((6,), torch.inf)])
    )
