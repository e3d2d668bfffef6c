"""Wide checks of turboquant_nb.theory.codebook: every bit width and many dimensions against
quadrature, exact encoding, errors."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from turboquant_nb.theory.codebook import (
    uniform,
    coordinate_cdf,
    coordinate_pdf,
    high_rate_mse,
    lloyd_max,
    lloyd_max_samples,
    partial_moments,
    shannon_rate,
)
from turboquant_nb.testing import same, within_z

DIMS = (None, 2, 3, 4, 5, 16, 64, 80, 128, 256, 1000, 10_000)


def over_cells(cb, *functions):
    """Integrals of h(x, level) over the cells; for the sphere in the angle and normalised by
    the sum, so no closed form is shared."""
    r = None if cb.dim is None else math.sqrt(cb.dim)
    end = 14.0 if r is None else min(r, 14.0)
    e = np.concatenate([[-end], (cb.levels64[1:] + cb.levels64[:-1]) / 2, [end]])
    if r is None:
        var, x, weight = e, lambda v: v, lambda v: math.exp(-v * v / 2)
    else:
        var, x, weight = (
            np.arccos(e / r),
            lambda v: r * math.cos(v),
            lambda v: math.sin(v) ** (cb.dim - 2),
        )

    def one(h, i):
        return abs(
            quad(
                lambda v: h(x(v), cb.levels64[i]) * weight(v),
                var[i],
                var[i + 1],
                epsabs=0,
                epsrel=1e-11,
            )[0]
        )

    mass = np.array([one(lambda x, y: 1.0, i) for i in range(len(e) - 1)])
    return [mass / mass.sum()] + [
        np.array([one(h, i) for i in range(len(e) - 1)]) / mass.sum() for h in functions
    ]


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_stationary_and_mse(bits, d):
    cb = lloyd_max(bits, d)
    mass, first, square = over_cells(cb, lambda x, y: abs(x), lambda x, y: (x - y) ** 2)
    assert np.abs(first / mass - np.abs(cb.levels64)).max() < 1e-9
    assert abs(square.sum() - cb.mse) < 1e-9 * cb.mse
    assert np.abs(mass - cb.probs).max() < 1e-10
    same(cb.levels, -cb.levels.flip(0))
    assert (cb.levels.diff() > 0).all() and len(cb.edges) == 2**bits - 1
    if d is None or d >= 64:
        assert 4.0**-bits < cb.mse < high_rate_mse(bits)


@pytest.mark.parametrize("bits", range(1, 9))
def test_very_large_d_tends_to_gaussian(bits):
    big, gauss = lloyd_max(bits, 10**6), lloyd_max(bits)
    assert np.abs(big.levels64 - big.means).max() < 1e-8
    assert abs(big.mse / gauss.mse - 1) < 1e-4


def test_wrong_levels_are_seen():
    cb = lloyd_max(4, 128)
    object.__setattr__(cb := type(cb)(**vars_of(cb)), "levels64", cb.levels64 * (1 + 1e-6))
    mass, first = over_cells(cb, lambda x, y: abs(x))
    assert np.abs(first / mass - np.abs(cb.levels64)).max() > 1e-7


def vars_of(cb):
    return {k: getattr(cb, k) for k in cb.__dataclass_fields__}


@pytest.mark.parametrize("d", (None, 2, 3, 4, 64))
@pytest.mark.parametrize("bits", range(1, 9))
def test_affine_is_the_best_step(bits, d):
    cb = uniform(bits, d)
    _, square = over_cells(cb, lambda x, y: (x - y) ** 2)
    assert abs(square.sum() - cb.mse) < 1e-9
    assert cb.mse >= lloyd_max(bits, d).mse - 1e-15
    k = np.arange(2**bits) - (2**bits - 1) / 2
    step = cb.levels64[-1] / k[-1]
    assert np.abs(cb.levels64 - k * step).max() < 1e-12
    for s in step * np.linspace(0.3, 2.5, 201):
        e = np.concatenate([[-np.inf], (k[1:] + k[:-1]) / 2 * s, [np.inf]])
        m0, m1, m2 = partial_moments(e[:-1], e[1:], d)
        assert (m2 - 2 * k * s * m1 + (k * s) ** 2 * m0).sum() >= cb.mse - 1e-12


@pytest.mark.parametrize("d", (2, 3, 4, 7, 64, 1000))
def test_law(d):
    t = np.linspace(-1.2, 1.2, 241)
    cdf = coordinate_cdf(t, d)
    assert cdf[0] == 0 and cdf[-1] == 1 and (np.diff(cdf) >= 0).all()
    assert np.abs(cdf + cdf[::-1] - 1).max() < 1e-14
    assert (coordinate_pdf(np.array([-1.01, 1.01]), d) == 0).all()
    got = quad(
        lambda v: coordinate_pdf(v, d), -0.3 / math.sqrt(d), 0.8 / math.sqrt(d), epsabs=1e-13
    )[0]
    assert (
        abs(
            got
            - (coordinate_cdf(0.8 / math.sqrt(d), d) - coordinate_cdf(-0.3 / math.sqrt(d), d))
        )
        < 1e-12
    )
    lo, hi = np.array([-np.inf, -0.5, 0.4]), np.array([-0.5, 0.4, np.inf])
    assert np.abs(np.sum(partial_moments(lo, hi, d), 1) - [1, 0, 1]).max() < 1e-13


def reference(cb, x):
    return (x.double()[..., None] - cb.levels.double()).abs().argmin(-1).to(torch.uint8)


@pytest.mark.parametrize("make", (lloyd_max, uniform))
@pytest.mark.parametrize("d", (None, 2, 64))
@pytest.mark.parametrize("bits", range(1, 9))
def test_encode_is_nearest_level(make, bits, d):
    cb = make(bits, d)
    e = cb.edges[cb.edges != 0]
    x = torch.cat(
        [
            cb.edges,
            torch.nextafter(e, e + 1),
            torch.nextafter(e, e - 1),
            cb.levels,
            torch.tensor([1e4, -1e4]),
            torch.randn(3000, generator=torch.Generator().manual_seed(bits)),
        ]
    )
    same(cb.encode(x), reference(cb, x))
    same(cb.encode(cb.levels), torch.arange(2**bits).to(torch.uint8))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        same(cb.encode(x.to(dtype)), cb.encode(x.to(dtype).float()))
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        same(
            cb.decode(cb.encode(x).to(dtype if bits < 8 else torch.int64)),
            cb.levels[cb.encode(x).long()],
        )


def test_twenty_million_without_a_python_loop():
    cb, calls = lloyd_max(3, 128), 0
    x = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))

    def count(frame, event, arg):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        codes = cb.encode(x)
        y = cb.decode(codes)
    finally:
        sys.setprofile(None)
    assert calls < len(x) / 1000
    same(codes[::9973], reference(cb, x[::9973]))
    same(y[::9973], cb.levels[codes[::9973].long()])


def test_distortion_mean():
    for bits, d in ((1, 3), (3, 16), (4, 128), (8, 64)):
        v = torch.randn(100_000, d, generator=torch.Generator().manual_seed(bits))
        x = math.sqrt(d) * v[:, 0] / v.norm(dim=1)
        cb = lloyd_max(bits, d)
        _, fourth = over_cells(cb, lambda x, y: (x - y) ** 4)
        error, sd = (x - cb.decode(cb.encode(x))).square(), math.sqrt(fourth.sum() - cb.mse**2)
        within_z(error, cb.mse, sd)
        with pytest.raises(AssertionError):
            within_z(error, cb.mse * 1.2, sd)


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


@pytest.mark.parametrize("seed", range(12))
def test_samples_reach_the_best_partition(seed):
    r = np.random.default_rng(seed)
    x = r.standard_t(2, 40) if seed % 2 else np.round(r.normal(size=40) * 5)
    w, bits = r.random(40), int(r.integers(1, 4))
    values, inv = np.unique(x, return_inverse=True)
    weight = np.bincount(inv, w) / w.sum()
    cb = lloyd_max_samples(torch.tensor(x), bits, torch.tensor(w))
    assert abs(cb.mse - best_partition(values, weight, 2**bits)) < 1e-10 * np.ptp(x) ** 2
    assert abs(cb.probs.sum() - 1) < 1e-12 and (cb.probs > 0).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_samples_large(bits):
    s = torch.randn(100_000, generator=torch.Generator().manual_seed(bits))
    cb = lloyd_max_samples(s, bits)
    error = (s.double() - torch.tensor(cb.levels64)[cb.encode(s).long()]).square().mean().item()
    assert abs(cb.mse / error - 1) < 1e-6
    gauss = lloyd_max(bits)
    assert (
        cb.mse
        <= (s.double() - torch.tensor(gauss.levels64)[gauss.encode(s).long()])
        .square()
        .mean()
        .item()
    )
    shifted = lloyd_max_samples(s.double() * 3 + 50, bits)
    assert abs(shifted.mse / cb.mse / 9 - 1) < 1e-6


def test_samples_edge_cases():
    exact = lloyd_max_samples(torch.tensor([3.0, 1.0, 1.0, 7.0, 4.0]), 2)
    assert exact.levels.tolist() == [1, 3, 4, 7] and exact.mse < 1e-25
    with pytest.raises(ValueError, match="at least 8 distinct"):
        lloyd_max_samples(torch.tensor([3.0, 1.0, 1.0, 7.0, 4.0]), 3)
    outlier = lloyd_max_samples(
        torch.cat(
            [torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.tensor([1e6])]
        ),
        2,
    )
    assert outlier.levels[-1] == 1e6 and outlier.mse < 0.25
    for bad in ("nan", "inf"):
        with pytest.raises(ValueError, match="samples must be finite"):
            lloyd_max_samples(torch.tensor([1.0, 2.0, float(bad)]), 1)
        with pytest.raises(ValueError, match="weights must be finite"):
            lloyd_max_samples(torch.tensor([1.0, 2.0]), 1, torch.tensor([1.0, float(bad)]))
    with pytest.raises(TypeError, match="samples must be a floating-point tensor"):
        lloyd_max_samples(torch.arange(9), 1)
    with pytest.raises(TypeError, match="samples must be a floating-point tensor"):
        lloyd_max_samples([1.0, 2.0], 1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_int8(bits):
    for cb in (lloyd_max(bits), lloyd_max(bits, 64), uniform(bits)):
        grid = cb.int8()
        assert (
            grid is cb.int8()
            and grid.levels.dtype == torch.int8
            and len(grid.levels) == 2**bits
        )
        assert (grid.levels.int().diff() >= 0).all() and grid.levels.int().abs().max() <= 127
        on_grid = dict(zip(cb.levels64.tolist(), (grid.step * grid.levels.double()).tolist()))
        _, square = over_cells(cb, lambda x, y: (x - on_grid[float(y)]) ** 2)
        assert abs(square.sum() - grid.mse) < 1e-9
        for step in (
            np.linspace(0.5, 1.5, 400 if cb.law != "uniform" or bits == 8 else 0)
            * cb.levels64[-1]
            / 127
        ):  # the uniform quantiser stays evenly spaced
            n = np.clip(np.rint(cb.levels64 / step), -127, 127)
            extra = (
                cb.probs * ((n * step - cb.means) ** 2 - (cb.levels64 - cb.means) ** 2)
            ).sum()
            assert grid.mse <= cb.mse + extra + 1e-14
        if bits <= 4:
            assert grid.mse < cb.mse * 1.002


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("make", (lloyd_max, uniform))
def test_snap(make, bits, d):
    cb = make(bits, d)
    table = cb.to_int8_grid()
    grid = table.int8()
    assert (
        table is cb.to_int8_grid() is table.to_int8_grid()
        and grid is table.grid is table.int8()
        and cb.grid is None
    )
    assert (table.bits, table.law, table.dim) == (cb.bits, cb.law, cb.dim)
    step = np.float32(grid.step)
    assert float(step) == grid.step and int(grid.levels.int().abs().max()) <= 127
    np.testing.assert_array_equal(
        table.levels.numpy(), step * grid.levels.numpy().astype(np.float32)
    )
    np.testing.assert_array_equal(table.levels64, grid.step * grid.levels.double().numpy())
    same(grid.levels, cb.int8().levels)
    same(table.edges, cb.edges)
    same(table.levels, -table.levels.flip(0))
    x = torch.randn(1000, generator=torch.Generator().manual_seed(bits))
    same(table.encode(x), cb.encode(x))
    same(table.encode(table.levels), torch.arange(2**bits, dtype=torch.uint8))
    on_grid = dict(zip(cb.levels64.tolist(), table.levels64.tolist()))
    _, square = over_cells(
        cb, lambda x, y: (x - on_grid[float(y)]) ** 2
    )  # the cells are those of the old levels
    assert abs(square.sum() - table.mse) < 1e-10 and grid.mse == table.mse
    assert -1e-12 < table.mse - cb.mse < (2.5e-3 if make is lloyd_max else 1e-6) * cb.mse
    if make is uniform:
        same(grid.levels, torch.arange(1 - 2**bits, 2**bits, 2, dtype=torch.int8))
    assert (
        abs(
            1
            - 2 * (table.probs * table.levels64 * table.means).sum()
            + (table.probs * table.levels64**2).sum()
            - table.mse
        )
        < 1e-12
    )


@pytest.mark.parametrize("bits", range(5, 9))
def test_snap_of_many_levels(bits):
    cb = lloyd_max(bits, 128)
    if bits < 7:
        assert cb.to_int8_grid().mse > cb.mse and (cb.to_int8_grid().levels.diff() > 0).all()
    else:
        with pytest.raises(ValueError, match=f"different ones of {2**bits} for {bits} bits"):
            cb.to_int8_grid()


def test_snap_of_samples_keeps_their_unit_and_device():
    x = 3 + 100 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    cb = lloyd_max_samples(x, 2)
    table = cb.to_int8_grid()
    error = (x.double() - torch.tensor(table.levels64)[table.encode(x).long()]).square().mean()
    assert float(error) == pytest.approx(table.mse, rel=1e-12) and table.mse > cb.mse
    away = table.to("meta")
    assert (
        away.levels.device.type == away.int8().levels.device.type == "meta"
        and away.to_int8_grid() is away
    )
    with torch.inference_mode():
        inside = lloyd_max(3, 77).to_int8_grid()
    assert not inside.levels.is_inference() and not inside.int8().levels.is_inference()


@pytest.mark.parametrize("function", (lloyd_max, uniform, high_rate_mse))
@pytest.mark.parametrize(
    "bits, error",
    (
        (0, ValueError),
        (9, ValueError),
        (-1, ValueError),
        (1.5, TypeError),
        ("3", TypeError),
        (True, TypeError),
        (None, TypeError),
        ([3], TypeError),
    ),
)
def test_bad_bits(function, bits, error):
    with pytest.raises(error, match="bits must be an integer from 1 to 8, got"):
        function(bits)


@pytest.mark.parametrize(
    "d, error",
    (
        (1, ValueError),
        (0, ValueError),
        (-4, ValueError),
        (64.0, TypeError),
        ("64", TypeError),
        (True, TypeError),
    ),
)
def test_bad_d(d, error):
    for call in (
        lambda: lloyd_max(3, d),
        lambda: uniform(3, d),
        lambda: coordinate_pdf(0.1, d),
        lambda: coordinate_cdf(0.1, d),
        lambda: partial_moments(0.0, 1.0, d),
    ):
        with pytest.raises(error, match="d must be"):
            call()


def test_bad_tensors():
    cb = lloyd_max(3)
    for shape in ((0,), (0, 5), (3, 0)):
        same(
            cb.encode(torch.empty(shape)),
            torch.empty(shape, dtype=torch.uint8),
            allow_empty=True,
        )
        same(
            cb.decode(torch.empty(shape, dtype=torch.uint8)),
            torch.empty(shape),
            allow_empty=True,
        )
    same(cb.encode(torch.tensor(0.1)), torch.tensor(4, dtype=torch.uint8))
    same(
        cb.encode(torch.tensor([3e38, 3e38])), torch.tensor([7, 7], dtype=torch.uint8)
    )  # the sum overflows, the values do not
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="x must be finite"):
            cb.encode(torch.tensor([0.0, bad]))
    assert cb.encode(torch.tensor([math.inf, -math.inf]), check_finite=False).tolist() == [7, 0]
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        cb.encode(torch.arange(3))
    with pytest.raises(TypeError, match="x must be a floating-point tensor"):
        cb.encode(np.ones(3))
    for codes in ([8], [-1], [0, 255]):
        with pytest.raises(ValueError, match=r"codes must lie in 0\.\.7"):
            cb.decode(torch.tensor(codes))
    for codes in (torch.ones(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(TypeError, match="codes must be a tensor of integers"):
            cb.decode(codes)
    with pytest.raises(ValueError, match="on cpu like the codebook, got meta"):
        cb.encode(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="on meta like the codebook, got cpu"):
        cb.to("meta").decode(torch.zeros(2, dtype=torch.uint8))
    for mse in (0, -1, 1.5, math.nan):
        with pytest.raises(
            ValueError, match="mse must be a finite number above 0 and at most 1"
        ):
            shannon_rate(mse)


def test_cached_and_usable_under_torch_modes():
    assert lloyd_max(3, 96) is lloyd_max(3, 96) and uniform(3, 96) is uniform(3, 96)
    with torch.inference_mode(), torch.device("meta"):
        cb = lloyd_max(3, 97)
    assert cb.levels.device.type == "cpu" and not cb.levels.is_inference()
    w = torch.ones(3, requires_grad=True)
    (cb.decode(cb.encode(w)) * w).sum().backward()
    assert w.grad is not None


def test_import_solves_nothing():
    code = (
        "import turboquant_nb.theory.codebook as c; print(c._solve.cache_info().currsize, "
        "c._uniform.cache_info().currsize)"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split() == ["0", "0"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda():
    cb = lloyd_max(3, 128)
    x = torch.randn(1000, 128)
    same(cb.to("cuda").encode(x.cuda()).cpu(), cb.encode(x))
    same(cb.to("cuda").decode(cb.encode(x).cuda()).cpu(), cb.decode(cb.encode(x)))
    with pytest.raises(ValueError, match="on cpu like the codebook, got cuda"):
        cb.encode(x.cuda())
