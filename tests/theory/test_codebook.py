"""Wide checks of turboquant_nb.theory.codebook: every bit width and many dimensions against
quadrature, exact encoding, errors."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from turboquant_nb.testing import same
from turboquant_nb.theory import codebook
from turboquant_nb.theory.codebook import (
    coordinate_cdf,
    coordinate_pdf,
    lloyd_max,
    lloyd_max_samples,
    partial_moments,
    shannon_rate,
    uniform,
)
from tests.helpers import refuses, seeded


@pytest.mark.parametrize("d", (2, 3, 7, 1000))
def test_law(d):
    t = np.linspace(-1.2, 1.2, 241)
    cdf = coordinate_cdf(t, d)
    assert cdf[0] == 0 and cdf[-1] == 1 and (np.diff(cdf) >= 0).all()
    assert np.abs(cdf + cdf[::-1] - 1).max() < 1e-14
    low, high = np.array([-0.3, 0.8]) / math.sqrt(d)
    mass = quad(lambda v: coordinate_pdf(v, d), low, high, epsabs=1e-13)[0]
    assert abs(mass - (coordinate_cdf(high, d) - coordinate_cdf(low, d))) < 1e-12
    lo, hi = np.array([-np.inf, -0.5, 0.4]), np.array([-0.5, 0.4, np.inf])
    assert np.abs(np.sum(partial_moments(lo, hi, d), 1) - [1, 0, 1]).max() < 1e-13


def best_partition(x, w, k):
    """Least weighted squared error over all partitions of the sorted values into k runs, the
    slow way."""
    n, best = len(x), {0: 0.0}
    cost = np.full((n + 1, n + 1), np.inf)
    for i in range(n):
        for j in range(i + 1, n + 1):
            m = np.average(x[i:j], weights=w[i:j])
            cost[i, j] = (w[i:j] * (x[i:j] - m) ** 2).sum()
    best = cost[0]
    for _ in range(k - 1):
        best = (best[:, None] + cost).min(0)
    return best[n]


@pytest.mark.parametrize("seed", range(40))
def test_samples_reach_the_best_partition(seed):
    "In some of the few samples Lloyd's iteration alone stops earlier."
    r, few = np.random.default_rng(seed), seed >= 12
    x = r.standard_t(2, 40) if seed % 2 else np.round(r.normal(size=40) * 5)
    w, bits = r.random(40), int(r.integers(1, 4))
    if few:
        x, w, bits = r.normal(size=9) ** 3, r.random(9) + 0.05, 1 + seed % 2
    values, inv = np.unique(x, return_inverse=True)
    weight = np.bincount(inv, w) / w.sum()
    cb = lloyd_max_samples(torch.tensor(x), bits, torch.tensor(w))
    assert abs(cb.mse - best_partition(values, weight, 2**bits)) < 1e-10 * np.ptp(x) ** 2
    assert abs(cb.probs.sum() - 1) < 1e-12 and (cb.probs > 0).all()


def test_samples_edge_cases():
    exact = lloyd_max_samples(torch.tensor([3.0, 1.0, 1.0, 7.0, 4.0]), 2)
    assert exact.levels.tolist() == [1, 3, 4, 7] and exact.mse < 1e-25
    outlier = lloyd_max_samples(
        torch.cat([torch.randn(1000, generator=seeded()), torch.tensor([1e6])]), 2
    )
    assert outlier.levels[-1] == 1e6 and outlier.mse < 0.25
    with refuses("weights must be finite"):
        lloyd_max_samples(torch.tensor([1.0, 2.0]), 1, torch.tensor([1.0, math.inf]))
    with refuses("samples must be a floating-point tensor", TypeError):
        lloyd_max_samples(torch.arange(9), 1)


@pytest.mark.parametrize("bits", range(5, 9))
def test_snap_of_many_levels(bits):
    cb = lloyd_max(bits, 128)
    if bits < 7:
        assert cb.to_int8_grid().mse > cb.mse and (cb.to_int8_grid().levels.diff() > 0).all()
    else:
        with refuses(f"different ones of {2**bits} for {bits} bits"):
            cb.to_int8_grid()


def test_snap_of_samples_keeps_their_unit_and_device():
    x = 3 + 100 * torch.randn(500, generator=seeded())
    cb = lloyd_max_samples(x, 2)
    table = cb.to_int8_grid()
    error = (x.double() - torch.tensor(table.levels64)[table.encode(x).long()]).square().mean()
    assert float(error) == pytest.approx(table.mse, rel=1e-12) and table.mse > cb.mse
    away = table.to("meta")
    assert (
        away.levels.device.type == away.int8().levels.device.type == "meta"
        and away.to_int8_grid() is away
    )


def test_bad_tensors():
    cb = lloyd_max(3)
    same(cb.encode(torch.tensor(0.1)), torch.tensor(4, dtype=torch.uint8))
    same(
        cb.encode(torch.tensor([3e38, 3e38])), torch.tensor([7, 7], dtype=torch.uint8)
    )  # the sum overflows, the values do not
    assert cb.encode(torch.tensor([math.inf, -math.inf]), check_finite=False).tolist() == [7, 0]
    with refuses(r"codes must lie in 0\.\.7"):
        cb.decode(torch.tensor([-1]))
    with refuses("on meta like the codebook, got cpu"):
        cb.to("meta").decode(torch.zeros(2, dtype=torch.uint8))
    for mse in (0, 1.5):
        with refuses("mse must be a finite number above 0 and at most 1"):
            shannon_rate(mse)


def test_samples_of_next_to_no_weight_are_left_out():
    "Less than 1e-12 of all weight is lost in the rounding of the sums, 1e-11 is not."
    x, w = codebook._distinct(
        torch.tensor([3.0, 1.0, 2.0]).double(), torch.tensor([1e-11, 1.0, 1e-13]).double()
    )
    assert x.tolist() == [1.0, 3.0] and w.sum() == 1 and w[1] == pytest.approx(1e-11)


def test_rates_and_distortions_by_hand():
    """R(1/4) is 1 bit, R(1) is 0; Panter and Dite for the Gaussian, (∫ f^(1/3))^3 / 12 with ∫
    f^(1/3) = (2π)^(1/3) √3."""
    assert [codebook.shannon_rate(x) for x in (1.0, 0.25, 1 / 64)] == [0, 1, 3]
    for bits in (1, 4):
        assert codebook.high_rate_mse(bits) == pytest.approx(
            2 * math.pi * 3**1.5 / 12 / 4**bits, rel=1e-12
        )
    for d in (3, 16, 128):  # d = 3: a coordinate is uniform on ±√3, where the formula is exact
        for bits in (6, 8):
            near = 1e-9 if d == 3 else 0.05
            want = 4.0**-bits if d == 3 else lloyd_max(bits, d).mse
            assert codebook.high_rate_mse(bits, d) == pytest.approx(want, rel=near)


def test_the_worst_cell_is_split_at_its_mean():
    """Not the farthest from 0, and not the widest: that of the largest squared error; an empty
    cell is dropped first."""
    z = np.array([-30.0, -29.9, -29.8, -29.7, 0, 1, 4, 9])
    w = np.full(8, 1 / 8)
    sums = [np.append(0.0, np.cumsum(a)) for a in (w, w * z, w * z * z)]
    assert codebook._refill(np.array([0, 4, 8]), z, sums, 3).tolist() == [0, 4, 6, 8]
    assert codebook._refill(np.array([0, 4, 4, 8]), z, sums, 4).tolist() == [0, 4, 6, 7, 8]


def test_moments_of_both_tails_keep_their_digits():
    """A cell far out has a mass of 1e-16 and less: the difference of two numbers near 1 would
    lose it, on the left as on the right."""
    from scipy.integrate import quad

    for d, lo, hi in ((None, 8.0, 9.0), (None, 8.0, math.inf), (64, 6.0, 7.0), (64, 6.0, 8.0)):
        end = min(hi, 12.0 if d is None else math.sqrt(d))
        want = [
            quad(
                lambda t, i=i: t**i * float(codebook._density(np.array(t), d)),
                lo,
                end,
                epsabs=0,
                epsrel=1e-11,
            )[0]
            for i in range(3)
        ]
        right, left = codebook.partial_moments(lo, hi, d), codebook.partial_moments(-hi, -lo, d)
        assert [float(x) for x in right] == pytest.approx(want, rel=1e-9, abs=0)
        assert [float(x) for x in left] == pytest.approx(
            [want[0], -want[1], want[2]], rel=1e-9, abs=0
        )


def test_weights_count_relative_to_their_sum():
    "`1e-12 * w.sum()`: the same weights in another unit give the same levels."
    g = seeded()
    x, w = torch.randn(50, generator=g).double(), torch.rand(50, generator=g).double() ** 20
    want = codebook.lloyd_max_samples(x, 2, w)
    for unit in (2.0**-60, 2.0**60):
        got = codebook.lloyd_max_samples(x, 2, w * unit)
        assert np.array_equal(got.levels64, want.levels64) and got.mse == want.mse


def test_a_cell_whose_mean_is_its_last_value_is_split_before_it():
    """1 and the next number of fp64, the second of more weight: their mean rounds to the
    second, after which nothing is left."""
    z, w = (
        np.array([0.0, 1.0, np.nextafter(1.0, 2.0)]),
        np.array([0.25, 2.0**-20, 0.75 - 2.0**-20]),
    )
    sums = [np.append(0.0, np.cumsum(a)) for a in (w, w * z, w * z * z)]
    assert (sums[1][3] - sums[1][1]) / (sums[0][3] - sums[0][1]) == z[2]
    assert codebook._refill(np.array([0, 1, 3]), z, sums, 3).tolist() == [0, 1, 2, 3]


def test_samples_far_from_zero_are_coded_as_those_about_it():
    "`x - mean`, not `x + mean`: squares of 2^22 times the spread would hold no digit of it."
    g = seeded()
    for _ in range(40):
        x = (torch.randn(9, generator=g, dtype=torch.float64) * 2**20).round() / 2**20
        near, far = codebook.lloyd_max_samples(x, 1), codebook.lloyd_max_samples(x + 2.0**21, 1)
        assert far.levels64 - 2.0**21 == pytest.approx(
            near.levels64, abs=1e-8
        ) and far.mse == pytest.approx(near.mse, rel=1e-6)


def test_tables_cannot_be_written():
    "fp64 tables are shared by all quantizers of their kind."
    books = [
        lloyd_max(3),
        lloyd_max(3, 16),
        uniform(3, 16),
        codebook.from_levels(torch.tensor([-1.0, 1.0])),
        codebook.lloyd_max_samples(torch.randn(99), 2),
    ]
    for book in [*books, *(b.to_int8_grid() for b in books)]:
        assert not any(a.flags.writeable for a in (book.levels64, book.means, book.probs))


def test_newton_needs_few_steps(monkeypatch):
    """It ends when steps stop shrinking at rounding level: the search for when costs more than
    the table."""
    steps, one = [], codebook._step
    monkeypatch.setattr(codebook, "_step", lambda y, d: steps.append(1) or one(y, d))
    for bits in (1, 2, 4, 8):
        for d in (None, 2, 3, 8, 64, 1024):
            steps.clear()
            codebook._solve.__wrapped__(bits, d)
            assert len(steps) <= 12, (bits, d, len(steps))


def test_the_density_at_the_ends_of_its_support():
    """f(±1) is 1/2 at d = 3, infinite at 2 and 0 above; outside it is 0, and of no number no
    number."""
    t = np.array([-1.0, 1.0, 1.5, np.nan])
    for d, end in ((2, math.inf), (3, 0.5), (5, 0.0)):
        got = codebook.coordinate_pdf(t, d)
        assert got[:2] == pytest.approx([end, end]) and got[2] == 0 and np.isnan(got[3])


def test_levels_ascend_and_are_symmetric_to_a_millionth_of_the_largest():
    with refuses("ascending"):
        codebook.from_levels(torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    for size in (1e-3, 1.0, 1e3):
        y = torch.tensor([-1.0, 1.0], dtype=torch.float64) * size
        codebook.from_levels(y + 4e-7 * size)
        with refuses("symmetric"):
            codebook.from_levels(y + 6e-7 * size)


def test_an_import_solves_nothing_and_needs_no_scipy():
    "It takes as long as all other imports of a recipe together."
    code = (
        "import sys, turboquant_nb.kernels.ops\nfrom turboquant_nb.theory import codebook\n"
        "print('scipy' in sys.modules, codebook._solve.cache_info().currsize)\n"
        "print(codebook._uniform.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "0", "0"], done.stderr
