"""Trellis codes of unit-variance values: the search against all paths, windows against their
definition, training against its two steps, and the shipped codes against both."""

import itertools
import re

import pytest
import torch

from turboquant_nb.testing import same
from turboquant_nb.theory.trellis import TRELLISES, Trellis, parity_index, train_levels, viterbi
from tests.helpers import refuses, seeded


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


@pytest.mark.parametrize("length, masks", ((1, (1,)), (6, (8, 18, 41)), (18, (131072, 262143))))
def test_an_index_holds_the_parities_of_its_window(length, masks):
    "Bit j is the number of ones of window & masks[j], modulo 2; also above the 16th bit."
    index = parity_index(torch.tensor(masks), length)
    assert index.shape == (1 << length,)
    for window in (*range(min(64, 1 << length)), (1 << length) - 1, (1 << length) * 3 // 4):
        want = sum((window & m).bit_count() % 2 << j for j, m in enumerate(masks))
        assert int(index[window]) == want
    many = parity_index(torch.tensor([masks, masks[::-1]]), length)
    same(many[0], index)


def paths(n, trellis, begin, end):
    "The windows of every path of n channels."
    ones = (1 << trellis.length) - 1
    for state in range(trellis.states) if begin is None else (begin,):
        for symbols in itertools.product(range(1 << trellis.bits), repeat=n):
            window, out = state, []
            for symbol in symbols:
                window = (window << trellis.bits | symbol) & ones
                out.append(window)
            if end is None or window & (trellis.states - 1) == end:
                yield out


@pytest.mark.parametrize("bits, length, masks", ((1, 3, (5, 2)), (2, 4, (9, 6)), (1, 4, (9,))))
@pytest.mark.parametrize("start", ("zero", "free", "state"))
def test_no_path_is_nearer(bits, length, masks, start):
    "All paths of five channels, to the distance that whole costs allow."
    trellis = Trellis(bits, length, masks, tuple(range(1 << len(masks))))
    levels = gaussian(1 << len(masks), seed=1).sort().values
    x = gaussian(6, 5, seed=2)
    begin = end = None
    if start == "zero":
        begin, given = 0, "zero"
    elif start == "free":
        given = "free"
    else:
        begin = end = trellis.states - 1
        given = torch.full((6,), begin)
    windows, error = viterbi(x, levels, trellis.index, bits, given)
    every = torch.tensor([*paths(5, trellis, begin, end)])
    costs = (x[:, None] - levels[trellis.index[every]]).square().sum(2)
    torch.testing.assert_close(error, costs.amin(1), rtol=1e-3, atol=1e-3)
    got = (x - levels[trellis.index[windows]]).square().sum(1)
    same(error, got)
    assert all(row in every.tolist() for row in windows.tolist())


@pytest.mark.parametrize("start", ("zero", "tail"))
@pytest.mark.parametrize("segment", (None, 8))
@pytest.mark.parametrize(
    "bits, length, masks", ((1, 4, (9, 6)), (2, 5, (17, 10)), (3, 4, (8, 3)))
)
def test_windows_are_the_bits_of_a_channel_and_of_those_before(
    bits, length, masks, segment, start
):
    levels = tuple(float(x) for x in gaussian(4, seed=3).sort().values)
    trellis = Trellis(bits, length, masks, levels, segment, start)
    x = gaussian(2, 3, 16, seed=4)
    symbols = trellis.encode(x)
    assert symbols.shape == x.shape and symbols.dtype == torch.uint8
    assert symbols.max() < 1 << bits and symbols.unique().numel() > 1
    windows, width = trellis.windows(symbols), segment or 16
    for at in ((0, 0, 0), (1, 2, 1), (0, 1, 8), (1, 1, 15)):
        row = symbols[at[:2]].tolist()
        first = at[2] // width * width
        window = 0
        for back in range(at[2] - length, at[2] + 1):
            outside = back < first
            if outside and start == "zero":
                continue
            window = window << bits | row[back + width if outside else back]
        assert int(windows[at]) == window & ((1 << length) - 1)
    same(trellis.decode(symbols), trellis.table[trellis.index[windows]])


def test_training_takes_means_of_what_a_level_was_given():
    """One turn by hand: half the distance of the means of two opposite levels, where the source
    is as likely to give x as -x."""
    masks, length, bits = (4, 18, 9), 5, 2
    x = gaussian(300, 12, seed=6)
    levels = torch.tensor([-2.0, -1.2, -0.7, -0.2, 0.2, 0.7, 1.2, 2.0])
    index = parity_index(torch.tensor(masks), length)
    windows, error = viterbi(x, levels, index, bits)
    at = index[windows]
    mean = torch.stack([x[at == i].mean() for i in range(8)])
    want = torch.stack([(mean[i] - mean[7 - i]) / 2 for i in range(8)])
    got, errors = train_levels(x, masks, length, bits, turns=1, levels=levels)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert errors == [pytest.approx(float(error.sum()) / x.numel(), rel=1e-6)]
    trained, errors = train_levels(x, masks, length, bits, turns=4)
    assert len(errors) == 4 and errors[-1] < errors[0]
    same(trained, -trained.flip(0))


GOOD = dict(bits=2, length=4, masks=(9, 6), levels=(-1.0, -0.5, 0.5, 1.0))


@pytest.mark.parametrize(
    "change, said",
    (
        (dict(bits=0), "bits must be"),
        (dict(bits=5, length=6), "bits must be"),
        (dict(length=2), "length must be"),
        (dict(length=14), "length must be"),
        (dict(masks=(0, 6)), "masks[0] must be"),
        (dict(segment=0), "segment must be"),
        (dict(start="free"), "start must be"),
    ),
)
def test_what_is_no_trellis(change, said):
    with refuses(re.escape(said)):
        Trellis(**GOOD | change)
    Trellis(**GOOD | dict(length=13, segment=1)), Trellis(**GOOD | dict(masks=(15, 1)))
    (
        Trellis(**GOOD | dict(bits=1, length=2, masks=(3, 1))),
        Trellis(**GOOD | dict(length=3, masks=(7, 1))),
    )


@pytest.mark.parametrize(
    "change, n, said",
    (
        (dict(segment=8), 12, "whole segments of 8 channels, got 12"),
        (dict(), 0, "whole segments of 1 channels, got 0"),
        (dict(start="tail", length=6, masks=(9, 32)), 1, "of at least 2, got 1"),
    ),
)
def test_vectors_that_a_trellis_cannot_cut(change, n, said):
    with refuses(re.escape(said)):
        Trellis(**GOOD | change).encode(torch.zeros(3, n))
    t = Trellis(**GOOD | dict(start="tail", length=6, masks=(9, 32)))
    assert t.encode(torch.zeros(3, 2)).shape == (3, 2)


def test_values_beyond_the_last_level_read_as_it():
    t = TRELLISES[2]
    out = t.decode(t.encode(torch.tensor([[3e4, -3e4] * 8])))
    assert out.abs().max() == t.table.max()
    same(t.encode(torch.full((1, 16), 1e9)), t.encode(torch.full((1, 16), 8.5)))
