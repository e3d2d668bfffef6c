"""Mutants that no other test noticed: each test names the change that it must notice. More are
found by scripts/tools/mutants.py."""

import inspect
import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from turboquant_nb.theory import codebook, rates, rope, rotation as rotations, transforms
from turboquant_nb.esm import transform
from turboquant_nb.theory.codebook import uniform, lloyd_max
from turboquant_nb.cache.attention import attend, dense_attention
from turboquant_nb.cache.packing import Layout
from turboquant_nb.quant.calibration import allocate_layers
from turboquant_nb.quant.quantizer import (
    PRESETS,
    Quantizer,
    Recipe,
    Spec,
    decided,
    encode,
    preset,
    scalar_codebook,
)
from turboquant_nb.theory.rates import MixedCodebook
from turboquant_nb.cache.store import KVStore, Side, _encode_quietly, _masked_mean, prompt_mean
from turboquant_nb.testing import same

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- tables and bits


def test_the_window_is_long_where_either_side_is_coarse():
    "`min(k, v) > 2`, not `k > 2` or `v > 2`."
    windows = {name: preset(name).recent for name in PRESETS}
    assert windows == {
        "k4v4": 16,
        "k4v3": 16,
        "k3v3": 16,
        "k4v2": 64,
        "k3v2": 64,
        "k2v2": 64,
        "k1v1": 64,
    }


def test_the_uniform_table_is_that_of_the_head_size():
    "`uniform(bits, d)`, not `uniform(bits, None)`."
    for d in (3, 8, 64):
        assert torch.equal(
            scalar_codebook("uniform", 3, d).levels, uniform(3, d).levels
        ) and not torch.equal(uniform(3, d).levels, uniform(3).levels)
    assert torch.equal(scalar_codebook("uniform", 3, 1).levels, uniform(3).levels)


def test_samples_of_next_to_no_weight_are_left_out():
    "Less than 1e-12 of all weight is lost in the rounding of the sums, 1e-11 is not."
    x, w = codebook._distinct(
        torch.tensor([3.0, 1.0, 2.0]).double(), torch.tensor([1e-11, 1.0, 1e-13]).double()
    )
    assert x.tolist() == [1.0, 3.0] and w.sum() == 1 and w[1] == pytest.approx(1e-11)


def test_samples_must_not_be_empty():
    "Said by name, and not by what divides by the sum of no weights."
    for samples in (torch.zeros(0), torch.zeros(3, 0)):
        with pytest.raises(ValueError, match="samples must not be empty"):
            codebook.lloyd_max_samples(samples, 2)


def test_rows_are_decided_each_for_itself():
    """`decided`: most coordinates are, one on an edge is not, and a row of another size beside
    it changes nothing."""
    q = Quantizer(Spec(3, rotation="haar"), 16)
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([decided(q, row[None]) for row in x])
    assert alone.float().mean() > 0.9
    assert torch.equal(
        decided(q, x * 10.0 ** torch.arange(-5, 5).repeat(4)[:, None]),
        torch.cat([decided(q, row[None] * 10.0 ** (i % 10 - 5)) for i, row in enumerate(x)]),
    )
    plain = Quantizer(Spec(2, rotation="identity"), 16)  # whose middle edge is 0
    x[:, 3] = 0
    assert not decided(plain, x)[:, 3].any() and decided(plain, x)[:, 4:].float().mean() > 0.9


def test_an_edge_is_undecided_at_every_scale():
    """`y / unit`, not `y`: a coordinate on an edge of the table stays there when the vector is
    a hundred times longer."""
    q = Quantizer(Spec(2, rotation="identity"), 16)
    edge = float(q.codebook.edges[-1])
    x = torch.full((16,), math.sqrt((16 - edge**2) / 15), dtype=torch.float64)
    x[3] = edge
    for scale in (0.01, 1.0, 100.0):
        found = decided(q, (x * scale)[None])[0]
        assert not found[3] and found.sum() == 15


def test_rates_and_distortions_by_hand():
    """R(1/4) is 1 bit, R(1) is 0; Panter and Dite for the Gaussian, (∫ f^(1/3))^3 / 12 with ∫
    f^(1/3) = (2π)^(1/3) √3."""
    assert [codebook.shannon_rate(x) for x in (1.0, 0.25, 1 / 64)] == [0, 1, 3]
    for bits in (1, 4):
        assert codebook.high_rate_mse(bits) == pytest.approx(
            2 * math.pi * 3**1.5 / 12 / 4**bits, rel=1e-12
        )


@pytest.mark.parametrize("d", [None, 16])
def test_a_table_of_given_levels_is_that_table(d):
    """`from_levels` of Lloyd and Max's levels has their cells, means and distortion, and names
    the law."""
    want = lloyd_max(3, d)
    got = codebook.from_levels(want.levels, d)
    assert (
        torch.equal(got.levels, want.levels)
        and torch.equal(got.edges, want.edges)
        and got.mse == pytest.approx(want.mse, rel=1e-6)
    )
    assert (got.bits, got.law, got.dim) == (
        3,
        want.law,
        want.dim,
    ) and got.probs == pytest.approx(want.probs, rel=1e-5)


@pytest.mark.parametrize(
    "levels, why",
    [
        ([-1.0, 0.0, 1.0], "2..bits"),
        ([[-1.0, 1.0]], "2..bits"),
        ([-1.0, 1.0, -1.0, 1.0], "ascending"),
        ([-1.0, -1.0, 1.0, 1.0], "ascending"),
        ([-2.0, -1.0, 1.0, 3.0], "symmetric"),
    ],
)
def test_levels_that_are_no_table(levels, why):
    with pytest.raises(ValueError, match=why):
        codebook.from_levels(torch.tensor(levels))


def test_few_samples_get_the_best_partition():
    """Against every partition of 9 values into 2 and into 4 runs, with weights; Lloyd's
    iteration alone stops earlier in some."""
    g = torch.Generator().manual_seed(0)
    for seed in range(60):
        x, w = (
            torch.randn(9, generator=g, dtype=torch.float64).sort().values ** 3,
            torch.rand(9, generator=g, dtype=torch.float64) + 0.05,
        )
        x, w = x.sort().values, w / w.sum()
        for bits in (1, 2):
            costs = []
            for cuts in itertools.combinations(range(1, 9), 2**bits - 1):
                runs = [slice(i, j) for i, j in zip((0, *cuts), (*cuts, 9))]
                costs.append(
                    sum(
                        float((w[r] * (x[r] - (w[r] * x[r]).sum() / w[r].sum()) ** 2).sum())
                        for r in runs
                    )
                )
            assert codebook.lloyd_max_samples(x, bits, w).mse == pytest.approx(
                min(costs), rel=1e-9
            )


def test_a_tridiagonal_system_and_every_pivot():
    "Against NumPy; a negative pivot at any place is said."
    rng = np.random.default_rng(0)
    for n in (2, 3, 6):
        diag, off, b = 3 + rng.random(n), rng.random(n - 1), rng.random(n)
        dense = np.diag(diag) + np.diag(off, 1) + np.diag(off, -1)
        assert codebook._solve_tridiagonal(diag, off, b) == pytest.approx(
            np.linalg.solve(dense, b), rel=1e-12
        )
        for i in range(n):
            bad = diag.copy()
            bad[i] = -5
            assert codebook._solve_tridiagonal(bad, off * 0.1, b) is None
    assert codebook._solve_tridiagonal(np.array([0.0, 1.0]), np.zeros(1), np.ones(2)) is None


@pytest.mark.parametrize("d", [None, 5, 16])
def test_newton_starts_at_quantiles_of_the_cube_root(d):
    "The positive levels halve equal parts of f^(1/3), integrated numerically."
    from scipy.integrate import quad

    f = lambda t: float(codebook._density(np.array(t), d)) ** (1 / 3)
    end = 12.0 if d is None else math.sqrt(d)
    part = [quad(f, 0, y, limit=200)[0] for y in codebook._start(3, d)]
    assert part == pytest.approx(
        [(i + 0.5) / 4 * quad(f, 0, end, limit=400)[0] for i in range(4)], rel=1e-6
    )


def test_the_worst_cell_is_split_at_its_mean():
    """Not the farthest from 0, and not the widest: that of the largest squared error; an empty
    cell is dropped first."""
    z = np.array([-30.0, -29.9, -29.8, -29.7, 0, 1, 4, 9])
    w = np.full(8, 1 / 8)
    sums = [np.append(0.0, np.cumsum(a)) for a in (w, w * z, w * z * z)]
    assert codebook._refill(np.array([0, 4, 8]), z, sums, 3).tolist() == [0, 4, 6, 8]
    assert codebook._refill(np.array([0, 4, 4, 8]), z, sums, 4).tolist() == [0, 4, 6, 7, 8]


def test_codes_of_an_empty_cell_read_as_the_middle_of_its_levels():
    "Merged cells without mass have no mean: 0 / 0 must not become a level."
    book = rates.truncate(
        codebook.from_levels(torch.tensor([-120.0, -100.0, -2.0, -1.0, 1.0, 2.0, 100.0, 120.0]))
    )
    assert book.levels.isfinite().all() and book.levels[[0, 3]].tolist() == [-110, 110]


def test_a_scale_among_others_that_no_dtype_holds():
    "The largest of the scales decides, and says its size."
    x = torch.ones(3, 16)
    x[1] *= 1e6
    with pytest.raises(
        ValueError, match=r"needs a scale of 1e\+06, above the largest torch.float16"
    ):
        encode(Quantizer(Spec(4, scale="norm", rotation="identity"), 16), x)


def test_a_scale_may_be_as_large_as_its_dtype():
    "`largest > top`: 65,504 is a float16, and the largest."
    from turboquant_nb.quant.quantizer import _store_scale

    assert _store_scale(torch.tensor([1.0, 65504.0]), torch.float16, "x")[1] == 65504
    with pytest.raises(ValueError, match="needs a scale of 6.55e"):
        _store_scale(torch.tensor([1.0, 65505.0]), torch.float16, "x")


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
    """`1e-12 * w.sum()`: the same weights in another unit give the same levels; no weight at
    all is said."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(50, generator=g).double(), torch.rand(50, generator=g).double() ** 20
    want = codebook.lloyd_max_samples(x, 2, w)
    for unit in (2.0**-60, 2.0**60):
        got = codebook.lloyd_max_samples(x, 2, w * unit)
        assert np.array_equal(got.levels64, want.levels64) and got.mse == want.mse
    with pytest.raises(ValueError, match="weights must not all be zero"):
        codebook.lloyd_max_samples(x, 2, w * 0)


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


def test_groups_of_many_samples_halve_the_cube_root_of_their_density():
    """With as many runs as groups the groups are seen; each holds an equal part of the sum of
    f^(1/3) dz, in plain loops."""
    g = np.random.default_rng(0)
    z, w = np.sort(g.standard_normal(900)), g.random(900) + 0.1
    z, w = (z - z.mean()) / np.ptp(z), w / w.sum()
    sums = [np.append(0.0, np.cumsum(a)) for a in (w, w * z, w * z * z)]
    got = codebook._first_cut(z, w, sums, 8, groups=8)
    at = [0.0]
    for i in range(899):
        dz = z[i + 1] - z[i]
        at.append(at[-1] + ((w[i] + w[i + 1]) / 2 / dz) ** (1 / 3) * dz)
    want = [
        0,
        *(next(i for i, a in enumerate(at) if a >= j / 8 * at[-1]) for j in range(1, 8)),
        900,
    ]
    assert got.tolist() == want


def test_samples_far_from_zero_are_coded_as_those_about_it():
    "`x - mean`, not `x + mean`: squares of 2^22 times the spread would hold no digit of it."
    g = torch.Generator().manual_seed(0)
    for _ in range(40):
        x = (torch.randn(9, generator=g, dtype=torch.float64) * 2**20).round() / 2**20
        near, far = codebook.lloyd_max_samples(x, 1), codebook.lloyd_max_samples(x + 2.0**21, 1)
        assert far.levels64 - 2.0**21 == pytest.approx(
            near.levels64, abs=1e-8
        ) and far.mse == pytest.approx(near.mse, rel=1e-6)


def test_the_sums_of_samples_are_of_their_powers(monkeypatch):
    """`w z z`, not `w z`: the best partition does not depend on the third sum, which cell is
    split next does."""
    seen = []
    first = codebook._first_cut
    monkeypatch.setattr(
        codebook,
        "_first_cut",
        lambda z, w, sums, *more: seen.append((z, w, sums)) or first(z, w, sums, *more),
    )
    codebook.lloyd_max_samples(torch.randn(99, generator=torch.Generator().manual_seed(0)), 2)
    ((z, w, sums),) = seen
    assert abs((w * z).sum()) < 1e-12 and np.ptp(z) == pytest.approx(1)
    for power, s in enumerate(sums):
        assert s == pytest.approx(
            [math.fsum(w[:i] * z[:i] ** power) for i in range(100)], abs=1e-13
        )


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


def test_a_mixed_code_of_channels_without_bits():
    "A channel of 0 bits loses all it has: 1, and not 0."
    assert rates.mixture_mse([0]) == 1 and rates.mixture_mse([0, 2], 16) == pytest.approx(
        (1 + lloyd_max(2, 16).mse) / 2
    )


@pytest.mark.parametrize("d", (3, 5, 6, 7, 9, 13))
def test_no_row_of_a_hadamard_sketch_is_a_channel(d):
    "Where d has no Hadamard matrix two blocks overlap, which together mix all channels."
    from turboquant_nb.theory.qjl import sketch_matrix

    for seed in range(4):
        rows = sketch_matrix(d, d, "hadamard", seed).double()
        assert ((rows.abs() > 1e-6).sum(1) >= 2).all()
        assert rows @ rows.mT == pytest.approx(
            torch.eye(d).numpy() * float((rows[0] ** 2).sum()), abs=1e-5
        )


def test_decided_is_about_what_is_left_of_the_mean():
    """`x - mean`: a coordinate on an edge lies there when a mean was added and is taken off,
    and only then."""
    q = Quantizer(Spec(2, rotation="identity"), 16)
    edge = float(q.codebook.edges[-1])
    x = torch.full((1, 16), math.sqrt((16 - edge**2) / 15), dtype=torch.float64)
    x[0, 3] = edge
    mean = torch.linspace(0.1, 0.9, 16).double()
    assert (
        decided(q, x + mean, mean)[0].tolist()
        == decided(q, x)[0].tolist()
        == [i != 3 for i in range(16)]
    )
    assert decided(q, x + mean).all()


def test_a_vector_of_zeros_is_decided_where_no_edge_is_zero():
    "Its coordinates are exact zeros for every program; 0 / 0 would be no number."
    book = codebook.lloyd_max_samples(torch.tensor([-1.0, 3.0, 4.0, 9.0]), 2)
    q = Quantizer(Spec(2, rotation="identity"), 8, codebook=book)
    assert (
        decided(q, torch.zeros(3, 8)).all()
        and not decided(Quantizer(Spec(2, rotation="identity"), 8), torch.zeros(3, 8)).any()
    )


def test_every_transform_serves_values_unless_it_says_otherwise():
    for kind in ("identity", "haar", "hadamard"):
        assert (
            rotations.make_rotation(kind, 8).supports("values")
            == rotations.Transform.supports("qjl")
            == (True, "")
        )


def test_the_density_at_the_ends_of_its_support():
    """f(±1) is 1/2 at d = 3, infinite at 2 and 0 above; outside it is 0, and of no number no
    number."""
    t = np.array([-1.0, 1.0, 1.5, np.nan])
    for d, end in ((2, math.inf), (3, 0.5), (5, 0.0)):
        got = codebook.coordinate_pdf(t, d)
        assert got[:2] == pytest.approx([end, end]) and got[2] == 0 and np.isnan(got[3])


def test_levels_are_symmetric_to_a_millionth_of_the_largest():
    for size in (1e-3, 1.0, 1e3):
        y = torch.tensor([-1.0, 1.0], dtype=torch.float64) * size
        codebook.from_levels(y + 4e-7 * size)
        with pytest.raises(ValueError, match="symmetric"):
            codebook.from_levels(y + 6e-7 * size)


def test_the_law_of_the_smallest_head():
    "Two channels have a law of their own; one channel is taken for a Gaussian."
    for kind, f in (("sphere", lloyd_max), ("uniform", uniform)):
        assert torch.equal(scalar_codebook(kind, 2, 2).levels, f(2, 2).levels) and torch.equal(
            scalar_codebook(kind, 2, 1).levels, f(2).levels
        )
        assert not torch.equal(f(2, 2).levels, f(2).levels)


@pytest.mark.parametrize("scale", ("norm", "mse", "unbiased"))
def test_a_vector_of_zeros_has_the_codes_of_zero(scale):
    "Not those of 0 / 0, which lies below every edge."
    q = Quantizer(Spec(3, scale=scale), 16)
    coded = encode(q, torch.zeros(2, 16))
    assert (
        (coded.codes == q.codebook.encode(torch.zeros(1))).all()
        and coded.codes[0, 0] == 3
        and not coded.scale.any()
    )


def test_which_recipes_can_lose_a_plane():
    "A fraction above 2 has channels of 3 bits; 2 bits have nothing to lose."
    for key, value, can in (
        (2.5, 1, True),
        (1, 2.25, True),
        (3, 2, True),
        ((2, 3), 2, True),
        (2, 1.5, False),
        ((1, 2), 2, False),
    ):
        if can:
            assert Recipe(Spec(key), Spec(value), decay=8).decay == 8
        else:
            with pytest.raises(ValueError, match="3 or 4 bits, got at most 2"):
                Recipe(Spec(key), Spec(value), decay=8)


def test_how_far_a_matrix_is_from_commuting_has_no_unit():
    "`commutes` of c R is that of R, however small c; of the matrix 0 it is 0."
    r = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = rope.commutes(r)
    assert 0.5 < want < math.sqrt(2)
    for c in (2.0**-500, 2.0**-20, 2.0**20):
        assert rope.commutes(r * c) == pytest.approx(want, rel=1e-12)
    assert rope.commutes(torch.zeros(8, 8)) == 0


def test_levels_out_of_order_have_no_distortion():
    "Newton's step is halved until they are in order, and on the support."
    for y in ([1.0, 0.9], [0.5, 0.5], [-0.1, 1.0], [0.0, 1.0]):
        assert (
            codebook._mse_at(np.array(y), 16) == codebook._mse_at(np.array(y), None) == math.inf
        )
    assert (
        codebook._mse_at(np.array([1.0, 4.0]), 16) == math.inf
        and 0 < codebook._mse_at(np.array([0.5, 1.5]), 16) < 1
    )


def test_an_edge_of_a_table_that_is_not_symmetric_is_undecided():
    "`- edges`, not `+ edges`, which symmetric tables cannot tell."
    book = codebook.lloyd_max_samples(torch.tensor([-1.0, 0.5, 1.0, 3.0]), 2)
    q = Quantizer(Spec(2, rotation="identity"), 16, codebook=book)
    for edge in book.edges.tolist():
        for sign, want in ((1, False), (-1, True)):
            x = torch.full((1, 16), math.sqrt((16 - edge**2) / 15), dtype=torch.float64)
            x[0, 3] = sign * edge
            assert bool(decided(q, x)[0, 3]) == want


def test_a_sign_on_levels_that_nothing_reaches():
    "A cell without mass has no mean: its level stands for it."
    from turboquant_nb.quant.residual import sign_codebook

    book = sign_codebook(3, base=codebook.from_levels(torch.tensor([-120.0, -1.0, 1.0, 120.0])))
    assert (
        np.isfinite(book.means).all()
        and book.means[0] == book.levels64[0] < -119
        and math.isfinite(book.mse)
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


def test_a_sign_without_a_dimension_is_refused():
    from turboquant_nb.theory.qjl import qjl_decode, sketch_matrix

    with pytest.raises(ValueError, match=r"signs must have shape .*, got \[\]"):
        qjl_decode(torch.tensor(1, dtype=torch.uint8), torch.tensor(1.0), sketch_matrix(8, 4))


@pytest.mark.parametrize("along", ("channel", "token"))
def test_what_does_not_fit_is_said_with_its_place(along):
    from turboquant_nb.cache.packing import pack, write

    layout = Layout(3, 6, along, tile=8)
    planes = [p.clone() for p in pack(torch.zeros(2, 3, 16, 6, dtype=torch.uint8), layout)]
    with pytest.raises(ValueError, match="planes hold 16 tokens, cannot write tokens 12 to 17"):
        write(planes, layout, torch.zeros(2, 3, 5, 6, dtype=torch.uint8), 12)


# ---------------------------------------------------------------- defaults, and what is shared

DEFAULTS = """
codebook.partial_moments d=None | codebook._count_edges chunk=131072 | codebook.Codebook.encode check_finite=True | codebook.Codebook.decode dtype=torch.float32 check_range=True
codebook.lloyd_max d=None | codebook.high_rate_mse d=None | codebook.uniform d=None | codebook.from_levels d=None | codebook._first_cut groups=512 | codebook.lloyd_max_samples weights=None
rotation.haar seed=0 | rotation.hadamard seed=0 | rotation.make_rotation seed=0 matrix=None
rope.rope_frequencies theta=10000.0 | rope.rope_angles theta=10000.0 inv_freq=None | rope.plane_channels pairing='half' | rope.plane_matrix pairing='half'
rope.apply_rope theta=10000.0 pairing='half' rotary_dim=None inv_freq=None scale=1.0 | rope.apply_cos_sin inverse=False
rope.commutant_part pairing='half' theta=10000.0 rotary_dim=None inv_freq=None | rope.commutes pairing='half' theta=10000.0 rotary_dim=None inv_freq=None
quantizer.as_recipe recipe=None bits=None | quantizer.Quantizer.__init__ device='cpu' rotation=None codebook=None | quantizer.Quantizer.encode mean=None name='x'
quantizer.encode mean=None name='x' block=4096 | quantizer.decode mean=None dtype=torch.float32 | quantizer.decided mean=None
quantizer.Recipe.__init__ sinks=4 recent=16 decay=None residual=None
quantizer.Spec.__init__ bits=3 rotation='hadamard' seed=0 scale='mse' codebook='sphere' center='none' scale_dtype='float16' residual='none'
qjl.sketch_matrix kind='gaussian' seed=0 | qjl.qjl_variance kind='gaussian'
residual.sign_codebook d=None base=None | residual.ProdQuantizer.__init__ device='cpu' rotation=None codebook=None kind='gaussian' | residual.ProdQuantizer.encode mean=None name='x'
residual.prod_encode mean=None name='x' block=4096
rates._per_channel low=0 high=8 | rates.MixedCodebook.encode check_finite=True | rates.MixedCodebook.decode dtype=torch.float32 check_range=True | rates.MixedCodebook.__init__ std=None
rates.mixture_mse d=None | rates.allocate_bits bits=None sizes=None exact=False | rates.allocate_channels lo=0 hi=6 | rates.truncate planes=1 keep=1
packing.Layout.__init__ along='channel' tile=256 | packing.unpack tokens=None
store.Side.__init__ tile=256 device='cpu' | store.Side.allocate sinks=0 recent=0 dtype=torch.float32 | store.Ranges.__init__ device='cpu'
store.KVStore.__init__ d_value=None dtype=torch.float32 device='cpu' max_length=None tile=256 static=False inv_freq=None | store.KVStore.append names=('k',·'v')
store.KVStore.read first=None last=None | store.KVStore.set_range start=None end=None k=None v=None | store.KVStore.tail_with names=('k',·'v') | store.KVStore.crop tail=None
store.prompt_mean skip=0 | store._EmbeddedCodebook.encode check_finite=True | store._EmbeddedCodebook.decode dtype=torch.float32 check_range=True | store._encode_quietly block=4096
attention._Softmax.__init__ sketch=0 | attention._check_attend recent=None
attention.attend k=None v=None scaling=None mask=None first=None causal=True sliding_window=None softcap=None block=1024 recent=None
attention.dense_attention scaling=None mask=None causal=True sliding_window=None softcap=None rows=256
"""


def core_modules():
    from turboquant_nb.cache import attention, packing, store
    from turboquant_nb.quant import quantizer, residual
    from turboquant_nb.theory import qjl

    return dict(
        codebook=codebook,
        rotation=rotations,
        rope=rope,
        quantizer=quantizer,
        qjl=qjl,
        residual=residual,
        rates=rates,
        packing=packing,
        store=store,
        attention=attention,
    )


def test_defaults_are_part_of_what_is_promised():
    """A default that changes changes what everybody's code does who left it out; this is the
    list."""
    for line in DEFAULTS.strip().replace("\n", " | ").split(" | "):
        name, *fields = line.split()
        where, *path = name.split(".")
        f = core_modules()[where]
        for part in path:
            f = inspect.getattr_static(f, part) if inspect.isclass(f) else getattr(f, part)
        f = getattr(f, "__wrapped__", f)
        found = {
            p.name: p.default
            for p in inspect.signature(f).parameters.values()
            if p.default is not p.empty
        }
        assert [f"{k}={v!r}" for k, v in found.items() if not isinstance(v, Spec)] == [
            x.replace("·", " ") for x in fields
        ], name


def test_what_is_compared_by_value_and_what_cannot_be_changed():
    """Dataclasses are frozen; those that hold tensors are equal to themselves only, the others
    by value."""
    by_value = {"Spec", "Recipe", "Layout", "_Group", "_Query"}
    for module in core_modules().values():
        for name, cls in vars(module).items():
            if (
                inspect.isclass(cls)
                and cls.__module__ == module.__name__
                and (params := getattr(cls, "__dataclass_params__", None))
            ):
                assert params.frozen and params.eq == (name in by_value), name


def test_shared_tables_can_be_used_in_any_mode():
    """What is made once and kept must not be an inference tensor, whoever asks first: autograd
    and in-place writes would fail for all others."""
    from turboquant_nb.cache.store import CosSinCache, _embedded, _shared, _slots
    from turboquant_nb.theory.qjl import sketch_matrix

    slots = _slots.__wrapped__
    with torch.inference_mode():
        cos_sin = CosSinCache(torch.ones(2).clone())
        cos_sin.reach(3), cos_sin.row(2)
        book = lloyd_max(3, 77)
        made = [
            cos_sin.table,
            *cos_sin.kept,
            slots(torch.device("cpu")),
            sketch_matrix(3, 7, "gaussian", 77),
        ]
        for b in (book, book.to_int8_grid(), codebook.lloyd_max_samples(torch.arange(9.0), 2)):
            made += [b.levels, b.edges, b.int8().levels]
        made += [
            rotations.make_rotation(kind, 44, 77).matrix for kind in ("haar", "hadamard")
        ] + [rotations.hadamard_matrix.__wrapped__(44)]
        q = _shared(Spec(3, seed=77), 44, torch.device("cpu"))
        made += [
            q.rotation.matrix,
            q.codebook.levels,
            _embedded(q.codebook).levels,
            _embedded(q.codebook).row,
        ]
    assert not any(t.is_inference() for t in made)


def test_a_mean_is_taken_off_before_a_transform_per_head():
    "With a matrix for each head, coding x with a mean is coding x - mean without."
    g = torch.Generator().manual_seed(0)
    name = transforms.register_transform(
        transforms.HeadTransform.of(torch.randn(2, 8, 8, generator=g) + 3 * torch.eye(8))
    ).name
    q, x, mean = (
        Quantizer(Spec(3, rotation=name), 8),
        torch.randn(1, 2, 20, 8, generator=g),
        torch.randn(1, 2, 1, 8, generator=g),
    )
    with_mean, without = encode(q, x, mean), encode(q, x - mean)
    assert torch.equal(with_mean.codes, without.codes) and torch.equal(
        with_mean.scale, without.scale
    )
    assert not torch.equal(encode(q, x).codes, without.codes)


def test_signs_need_levels_twice_their_step_apart():
    "At 1.5 E|e| the two halves of neighbouring cells would cross."
    from turboquant_nb.quant import residual

    book = lloyd_max(2)
    step = math.sqrt(residual.sign_gain(book))
    gap = float(np.diff(book.levels64).min())
    assert gap > 2 * step and residual._split(book).bits == 3
    for near in np.linspace(
        0.02, 0.6, 59
    ):  # levels that come nearer to one another until they are too near
        y = torch.tensor([-2.0, -near, near, 2.0], dtype=torch.float64)
        close = codebook.from_levels(y)
        apart = np.diff(close.levels64).min() / math.sqrt(residual.sign_gain(close))
        if apart > 2:
            assert residual._split(close).bits == 3
        else:
            with pytest.raises(ValueError, match="more than 2 E|e| apart"):
                residual._split(close)


def test_a_seed_is_a_state():
    """Files hold seeds, so a seed must give the same state for ever: the golden ratio's
    multiple and the kind's letters, modulo 2^63."""
    for kind in ("haar", "hadamard"):
        for seed in (0, 1, 2, 12345, 2**40):
            want = (seed * 11400714819323198485 + int(kind[:7].encode().hex(), 16)) % 2**63
            assert rotations._generator(kind, seed).initial_seed() == want


def test_a_size_of_zero_has_no_order():
    for f in (
        rotations.block_order,
        rotations.hadamard_form,
        rotations.hadamard,
        rotations.haar,
    ):
        with pytest.raises(ValueError, match="d must be"):
            f(0)


def test_rotations_are_compared_by_identity():
    "Their fields are tensors: equality by fields would raise, and a hash would be lost."
    a, b = (rotations.Rotation("matrix", 8, None, torch.eye(8)) for _ in "ab")
    assert a == a and a != b and len({a, a, b}) == 2


def test_negative_weights_are_refused():
    for weights in ([-1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]):
        with pytest.raises(ValueError, match="weights must not be negative"):
            codebook.lloyd_max_samples(torch.tensor([1.0, 2.0, 3.0]), 1, torch.tensor(weights))


def test_the_base_of_the_frequencies_is_the_papers():
    "10,000 wherever it is a default."
    found = {
        n: inspect.signature(f).parameters["theta"].default
        for n, f in vars(rope).items()
        if inspect.isfunction(f) and "theta" in inspect.signature(f).parameters
    }
    assert len(found) > 3 and {
        x for x in found.values() if x is not inspect.Parameter.empty
    } == {10000.0}


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
    for lo, hi in ((3, 2), (-1, 2), (0, 9)):
        with pytest.raises(ValueError):
            rates.allocate_channels(v, 6, lo, hi)


def test_small_numbers_of_a_recipe_are_allowed():
    "No sinks, no recent tokens, a decay after one token; less is refused."
    r = Recipe(sinks=0, recent=0, decay=1)
    assert (r.sinks, r.recent, r.decay) == (0, 0, 1)
    for name, low in (("sinks", 0), ("recent", 0), ("decay", 1)):
        with pytest.raises(ValueError, match=name):
            Recipe(**{name: low - 1})


def test_the_json_of_a_recipe_is_sorted_and_says_what_is_missing():
    "Sorted: two equal recipes have one text, whatever the order of fields in a later version."
    fields = json.loads(
        Recipe().to_json(), object_pairs_hook=lambda pairs: [k for k, _ in pairs]
    )
    assert fields == sorted(fields)
    with pytest.raises(ValueError, match="^not a recipe: 'key' is missing$"):
        Recipe.from_json("{}")
    with pytest.raises(ValueError, match="^not a recipe: .*unexpected keyword"):
        Recipe.from_json('{"key": {}, "value": {}, "other": 1}')


def reach(matrix, x, d):
    """Higham's bound on the error of a coordinate over the scale, to first order, in plain
    loops of fp64."""
    gamma = lambda n: n * 2.0**-24
    y = [math.fsum(a * b for a, b in zip(row, x)) for row in matrix]
    e = [gamma(d + 2) * math.fsum(abs(a * b) for a, b in zip(row, x)) for row in matrix]
    power = math.fsum(a * a for a in y)
    eta = math.fsum(abs(a) * b for a, b in zip(y, e)) / power
    return [(b + abs(a) * (eta + gamma(d + 8))) / math.sqrt(power / d) for a, b in zip(y, e)]


@pytest.mark.parametrize("rotation", ("identity", "haar"))
def test_undecided_reaches_as_far_as_the_bound(rotation):
    """A coordinate at 0.98 times the bound from an edge is undecided, at 1.02 times it is
    decided; rows, batches and one vector alike."""
    d, q = 16, Quantizer(Spec(2, rotation=rotation), 16)
    matrix = q.rotation.matrix.double()
    rest = torch.randn(d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for edge, (factor, want) in itertools.product(
        q.codebook.edges[[0, -1]].tolist(),
        ((0.98, False), (1.02, True), (-0.98, False), (-1.02, True)),
    ):
        y, at = rest.clone(), edge
        for _ in range(3):  # the bound depends on the coordinate a little
            y[3], others = 0, float((rest.square().sum() - rest[3] ** 2))
            y[3] = at * math.sqrt(others / (d - at * at))
            at = edge + factor * reach(matrix.tolist(), (matrix.mT @ y).tolist(), d)[3]
        x = matrix.mT @ y
        found = [
            decided(q, z).reshape(-1, d)[-1]
            for z in (x, x[None], x.expand(3, d), x.expand(2, 3, d))
        ]
        assert (
            all(torch.equal(f, found[0]) for f in found)
            and bool(found[0][3]) == want
            and found[0].sum() >= d - 1
        )


@pytest.mark.parametrize("d", [5, 16, 64])
def test_panter_and_dite_on_the_sphere(d):
    """(∫ f^(1/3))^3 / 12 · 4^-bits by numerical integration of the law that `coordinate_pdf`
    gives."""
    from scipy.integrate import quad

    whole = quad(lambda t: float(codebook.coordinate_pdf(t, d)) ** (1 / 3), -1, 1, limit=200)[0]
    assert codebook.high_rate_mse(4, d) == pytest.approx(
        d * whole**3 / 12 * 4.0**-4, rel=1e-5
    )  # a unit vector's coordinate has variance 1 / d


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


def test_a_budget_is_rounded_down():
    "2.45 bits of 6 numbers buy 2.7 bits more than two each: not the 3 of one step."
    losses = dict(bits=[2, 3, 4], key=[[1.0, 0.5, 0.1]], value=[[0.9, 0.4, 0.1]], size=[[3, 3]])
    assert allocate_layers(losses, 2.45) == [(2, 2)] and allocate_layers(losses, 2.5) == [
        (3, 2)
    ]


# ---------------------------------------------------------------- transforms


def of_moments(mean, second, query):
    "Moments of one layer and head, of one token each."
    one = lambda x: x[None].double()
    kinds = ("key", "value", "rope")
    sums = transforms.Moments(
        1,
        {(k, 0): one(mean) for k in kinds},
        {(k, 0): one(second) for k in kinds} | {("query", 0): one(query)},
    )
    eye = torch.eye(len(mean)).double()
    return transform.CodeStatistics(
        torch.zeros_like(mean)[None, None],
        torch.ones(len(mean) // 2),
        eye[None, None],
        torch.ones(1).double(),
        sums,
    )


@pytest.mark.parametrize("rotation", ("svd", "none"))
def test_a_centred_transform_is_of_the_covariance(rotation):
    """`second - outer`, twice: the axes are those of what is left when the mean is gone, and so
    are the variances."""
    covariance, mean = (
        torch.diag(torch.tensor([4.0, 1.0, 2.0, 0.5])),
        torch.tensor([0.0, 30.0, 0.0, 0.0]),
    )
    m = of_moments(mean, covariance + mean[:, None] * mean, torch.eye(4))
    fit = transform.fit_transform(
        m, "key", transform.SideSpec(center="mean", rotation=rotation, aware=False)
    )
    want = [4.0, 2.0, 1.0, 0.5] if rotation == "svd" else [4.0, 1.0, 2.0, 0.5]
    assert (
        fit["var"][0, 0].tolist() == pytest.approx(want)
        and fit["mean"][0, 0].tolist() == mean.tolist()
    )


def test_the_best_metric_keeps_the_energy_of_keys():
    "tr(CP) = tr(C): the scale of P, which a common factor of all scales would hide."
    g = torch.Generator().manual_seed(0)
    queries, keys = (x @ x.mT for x in torch.randn(2, 3, 6, 6, generator=g).double())
    p, trace = (
        transforms.best_metric(queries, keys, shrink=0.0),
        lambda x: x.diagonal(dim1=1, dim2=2).sum(1),
    )
    assert torch.allclose(trace(keys @ p), trace(keys), rtol=1e-9) and not torch.allclose(
        trace(p), trace(keys), rtol=0.1
    )


def test_a_map_whose_inverse_fp32_cannot_serve_is_refused():
    "The limit of the condition is 1e4, with powers of two on both sides of it."
    matrix = lambda power: torch.diag(torch.tensor([2.0**power, 1.0]))[None]
    assert torch.equal(
        transforms.HeadTransform.of(matrix(13)).inverse_matrix[0], matrix(-13)[0]
    )
    with pytest.raises(ValueError, match="below 1e4.*got 1.64e"):
        transforms.HeadTransform.of(matrix(14))


# ---------------------------------------------------------------- the store


def states(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, n, 8, generator=g) for _ in "kv"]


def test_freed_tiles_of_a_bounded_store_stay_allocated():
    "With max_length its tensors have one size for ever: what is freed in front is room behind."
    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=64)
    store.append(*states(40))
    before, want = store.capacity, [x[:, :, 16:] for x in store.read()]
    store.evict(20)
    assert (
        store.offset == 16
        and store.capacity == before
        and store.nbytes == store.expected_nbytes()
    )
    for a, b in zip(store.read(), want):
        same(a, b.contiguous())


def test_a_crop_takes_the_ends_of_rows_along():
    "An end beyond what is left would hide nothing now and show too much later."
    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8)
    store.append(*states(40))
    store.set_range(end=torch.tensor([38, 20]))
    store.crop(10)
    assert store.length == 30 and store.end.tolist() == [30, 20]


def test_a_row_of_padding_has_the_mean_zero():
    "No token is left to take a mean of; 0 / 0 would make every code of the row meaningless."
    mean = _masked_mean(torch.full((2, 1, 4, 8), 3.0), torch.tensor([4, 0]), None)
    assert mean.shape[0] == 2 and (mean[0] == 0).all() and (mean[1] == 3).all()


def test_a_new_side_has_no_tiles():
    "What it allocates is for exact tokens and the mean; tiles come with tokens."
    side = Side(Spec(3, center="prompt_mean"), 16, "channel", 8).allocate(
        2, 3, sinks=1, recent=4
    )
    assert {n: t.shape[2] for n, t in side.tensors.items()} == dict.fromkeys(
        [n for n in side.tensors if n.startswith("plane")], 0
    ) | {"scale": 0, "sinks": 1, "recent": 4, "mean": 1}


def test_any_part_of_a_store_is_read_as_the_whole_is():
    "Exact tokens at the ends of the part, inside it and beside it."
    store = KVStore(Recipe(sinks=2, recent=5), 2, 2, 8, tile=8)
    store.append(*states(21))
    whole = store.read()
    for first in (0, 1, 3, 15, 17, 20):
        for last in (first + 1, 2, 3, 16, 18, 20, 21):
            if first < last:
                for x, y in zip(store.read(first, last), whole):
                    same(x, y[:, :, first:last].contiguous())


def test_a_store_of_one_token():
    store = KVStore(Recipe(), 2, 2, 8, max_length=1)
    store.append(*states(1))
    with pytest.raises(ValueError, match="max_length is 1"):
        store.append(*states(1))


def test_states_with_different_numbers_of_tokens_are_counted():
    store = KVStore(Recipe(), 2, 2, 8)
    with pytest.raises(ValueError, match="equally many tokens, got 3 and 5"):
        store.append(states(3)[0], states(5)[1])


@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("crop", (1, 2, 3))
def test_what_is_left_of_a_tail_ends_with_the_store(static, crop):
    """A tail that begins late: after the crop its states are those of the positions that are
    left, and so is the ring."""
    recipe = Recipe(sinks=1, recent=4)
    more = dict(max_length=64, static=True) if static else {}
    store, bare = (KVStore(recipe, 2, 2, 8, 12, tile=8, **more) for _ in range(2))
    g = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2, 33, 8, generator=g), torch.randn(2, 2, 33, 12, generator=g)
    for s in (store, bare):
        s.append(k[:, :, :30], v[:, :, :30])
    tail = store.tail_with(k[:, :, 30:], v[:, :, 30:])
    assert (tail.first, tail.past, tail.end) == (
        26,
        30,
        33,
    ) and tail.nbytes == 4 * 2 * 2 * 7 * (8 + 12)
    store.append(k[:, :, 30:], v[:, :, 30:])
    left = store.crop(crop, tail)
    assert (left.first, left.end, store.length) == (26, 33 - crop, 33 - crop)
    same(left.key, k[:, :, 26 : 33 - crop].contiguous())
    if crop < 3:
        bare.append(k[:, :, 30 : 33 - crop], v[:, :, 30 : 33 - crop])
    for a, b in zip(store.read(), bare.read()):
        same(a, b)
    for name in ("key", "value"):
        for a, b in zip(store.exact(name), bare.exact(name)):
            same(a, b)


def test_a_crop_without_a_tail_gives_up_exact_tokens():
    """The ring was overwritten by what is cropped: only slots of tokens before it are still
    exact."""
    store = KVStore(Recipe(sinks=0, recent=4), 2, 2, 8, tile=8)
    k, v = states(20)
    store.append(k, v)
    store.crop(2)
    assert store.past_exact_from == 16 and store.exact("key")[1].max() == 17
    for x, y in zip(store.read(16), (k, v)):
        same(x, y[:, :, 16:18].contiguous())


def test_codes_outside_an_embedded_table_are_refused():
    store = KVStore(Recipe(Spec(3), Spec(3), sinks=0, recent=0, decay=8), 1, 1, 8, tile=8)
    store.append(*(x[:1, :1] for x in states(32)))
    book = store.key.q.codebook
    width = book.levels.shape[-1]
    assert book.decode(torch.tensor([[width - 1] * 8], dtype=torch.uint8)).isfinite().all()
    with pytest.raises(ValueError, match=f"0..{width - 1}, got {width}"):
        book.decode(torch.tensor([[width] * 8], dtype=torch.uint8))


def test_a_range_is_checked_entry_by_entry_and_is_the_stores_own():
    """The largest entry decides at the top, the smallest at the bottom; whoever changes his
    tensor later changes nothing here."""
    store = KVStore(Recipe(), 3, 1, 8)
    assert store.ranges.starts == (0, 0, 0) and KVStore(Recipe(), 1, 1, 8).ranges.starts == (0,)
    store.append(*(torch.randn(3, 1, 9, 8) for _ in "kv"))
    for bad in ([0, 3, 10], [10, 0, 3], [-1, 3, 9]):
        with pytest.raises(ValueError, match="end must be from 0 to 9"):
            store.set_range(end=torch.tensor(bad))
    for mine, want in ((torch.tensor([9, 3, 0]), [9, 3, 0]), (torch.tensor([4]), [4, 4, 4])):
        store.set_range(end=mine)
        mine.zero_()
        assert store.end.tolist() == want
        store.end[0] -= 1
        assert store.end.tolist() == [want[0] - 1, *want[1:]]


def test_an_empty_store_has_no_tile():
    "What grows begins with nothing, what has a length with all of it."
    for limit, tiles in ((None, 0), (1, 1), (8, 1), (9, 2)):
        store = KVStore(Recipe(), 2, 2, 8, tile=8, max_length=limit)
        assert store.key.tiles == store.value.tiles == tiles and store.capacity == 8 * tiles


def test_only_the_tiles_that_tokens_lie_in_are_unpacked(monkeypatch):
    from turboquant_nb.cache import store as module

    store, seen, unpack = KVStore(Recipe(), 2, 2, 8, tile=8), [], module.unpack
    store.append(*states(80))
    monkeypatch.setattr(
        module,
        "unpack",
        lambda planes, layout: seen.append(planes[0].shape[2]) or unpack(planes, layout),
    )
    for first, last, tiles in ((0, 80, 10), (8, 16, 1), (7, 17, 3), (30, 31, 1), (72, 80, 1)):
        seen.clear()
        store.coded("key", first, last)
        assert seen == [tiles]


def test_the_counter_among_the_flags_is_no_flag():
    """Five are raised, the sixth number counts for kernels: `sync` says nothing of it, and
    nothing of ours raises it."""
    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=16, static=True)
    store.append(*states(10))
    store.flags[5] = 4
    assert store.sync() == 10 and store.flags.tolist() == [0, 0, 0, 0, 0, 4]
    unsynced(store, states(9))
    assert store.flags.tolist() == [0, 0, 0, 0, 1, 4]


def test_tensors_without_their_start_or_header_are_no_store():
    store = KVStore(Recipe(), 1, 1, 8)
    store.append(*(x[:1, :1] for x in states(9)))
    tensors, header = store.state()
    for t, h in (
        ({n: x for n, x in tensors.items() if n != "start"}, header),
        (tensors, {n: x for n, x in header.items() if n != "d"}),
    ):
        with pytest.raises(ValueError, match="not the state of a single store"):
            KVStore.from_state(t, h)


def test_a_mean_has_the_unit_of_the_states():
    """Scaled by a power of two, states have the mean so scaled: nothing in it is an absolute
    number."""
    x = torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(0)) + 1
    mean, masked = prompt_mean(x, 2), _masked_mean(x, torch.tensor([2, 2]), None)
    assert mean.any()
    for unit in (2.0**-40, 2.0**-9, 2.0**30):
        same(prompt_mean(x * unit, 2), mean * unit)
        same(_masked_mean(x * unit, torch.tensor([2, 2]), None), masked * unit)
    torch.testing.assert_close(mean, masked, rtol=2**-7, atol=0)


def test_a_store_that_lost_all_has_whole_tiles_again():
    store = KVStore(Recipe(Spec(3), Spec(3), sinks=0, recent=0, decay=4), 2, 2, 8, tile=8)
    store.append(*states(40))
    assert store.key.truncated_tiles == 4
    for crop, left in ((7, 4), (16, 3), (16, 1), (1, 0)):  # 33, 17, 1 and 0 tokens
        store.crop(crop)
        assert (
            store.key.truncated_tiles == store.value.truncated_tiles == left
            and store.nbytes == store.expected_nbytes()
        )


@pytest.mark.parametrize("recent", (0, 1, 2))
def test_a_tail_of_few_recent_tokens(recent):
    store = KVStore(Recipe(sinks=0, recent=recent), 2, 2, 8, tile=8)
    k, v = states(12)
    store.append(k[:, :, :10], v[:, :, :10])
    tail = store.tail_with(k[:, :, 10:], v[:, :, 10:])
    assert (tail.first, tail.past, tail.end) == (10 - recent, 10, 12)
    same(tail.key, k[:, :, 10 - recent :].contiguous())
    same(tail.value, v[:, :, 10 - recent :].contiguous())
    store.append(k[:, :, 10:], v[:, :, 10:])
    left = store.crop(1, tail)
    assert left.end == 11 and store.exact("key")[1][0].tolist() == list(range(11 - recent, 11))
    same(store.exact("key")[0], k[:, :, 11 - recent : 11].contiguous(), allow_empty=True)


@pytest.mark.parametrize("parts", ((16,), (10, 6), (15, 1)))
def test_a_static_store_takes_what_fits_to_the_last_token(parts):
    "By number and by position, at once and in parts; one token more is refused or noted."
    one, two = (
        KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=16, static=True)
        for _ in range(2)
    )
    k, v = states(16)
    for a, b in zip(k.split(parts, 2), v.split(parts, 2)):
        one.append(a, b)
        unsynced(two, (a, b))
    assert one.length == two.sync() == 16
    for name in ("key", "value"):
        assert (
            one.coded(name, 0, 16).codes != two.coded(name, 0, 16).codes
        ).float().mean() < 0.01  # the mean is summed in another order
        assert two.coded(name, 0, 16).scale.isfinite().all()
    with pytest.raises(ValueError, match="cannot append 1 tokens to 16"):
        one.append(k[:, :, :1], v[:, :, :1])
    unsynced(two, (k[:, :, :1], v[:, :, :1]))
    with pytest.raises(ValueError, match="more tokens than max_length"):
        two.sync()


ASKING = dict(
    read=lambda s: s.read()[0].shape[2],
    append=lambda s: s.append(*states(1)) or s.length - 1,
    crop=lambda s: s.crop(1) or s.length + 1,
    state=lambda s: s.state()[1]["length"],
    set_range=lambda s: s.set_range(start=0) or s.length,
    attend=lambda s: attend(torch.ones(2, 2, 23, 8), s)[0].shape[2],
)


@pytest.mark.parametrize("what", ASKING)
def test_a_static_store_is_asked_after_the_device(what):
    "Whatever is done with it, tokens that a recorded step appended count."
    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=64, static=True)
    store.append(*states(20))
    unsynced(store, states(3, 1))
    assert store.length == 20 and ASKING[what](store) == 23


def test_a_mean_that_is_noise_is_zero():
    "Positive-part James-Stein: what is shrunk below zero is zero, not turned round."
    x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(2, keepdim=True) + 0.01
    assert (_masked_mean(x, torch.zeros(1), None) == 0).all()


def test_the_mean_of_a_prompt_that_is_noise_is_zero():
    "As of `_masked_mean`, for the path that does not wait for a device."
    x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(2, keepdim=True) + 0.01
    assert (
        (prompt_mean(x) == 0).all()
        and (prompt_mean(x[:, :, :1]) == 0).all()
        and (prompt_mean(x + 9) != 0).all()
    )


def test_a_store_grows_by_an_eighth():
    "Nine tiles and one token more: eleven; one and one: two; many at once: what they need."
    for have, more, want in ((9, 1, 11), (1, 1, 2), (16, 1, 18), (2, 80, 12)):
        store = KVStore(Recipe(), 2, 2, 8, tile=8)
        store.append(*states(8 * have))
        assert store.key.tiles == have
        store.append(*states(more))
        assert store.key.tiles == store.value.tiles == want


@pytest.mark.parametrize("d", (8, 12))
def test_a_static_store_that_went_back_is_as_one_that_never_was_ahead(d):
    "Codes are written over others, whose bits must go; back at 0 the mean is taken anew."
    recipe = Recipe(
        Spec(3, center="prompt_mean"), Spec(2, center="prompt_mean"), sinks=1, recent=4
    )
    g = torch.Generator().manual_seed(2)
    draw = lambda n: [torch.randn(2, 2, n, d, generator=g) + 3 for _ in "kv"]
    first, other, then = draw(11), draw(9), draw(2)
    store, bare = (
        KVStore(recipe, 2, 2, d, tile=8, max_length=64, static=True) for _ in range(2)
    )
    for crop in (5, 11):
        store.crop(store.length)
        assert not store.key.mean.any() and not store.value.mean.any()
        store.append(*first)
        for _ in range(2):
            by_position(store, then)
        store.crop(crop)
        bare.crop(bare.length)
        bare.append(*first)
        bare.crop(max(0, crop - 4))
        assert store.length == bare.length == 15 - crop
        for part in zip(*(x.split(2, 2) for x in other)):
            by_position(store, part), by_position(bare, part)
        for name in ("key", "value"):
            a, b = (s.coded(name, 0, s.sync()) for s in (store, bare))
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


def by_position(store, states):
    "Append as a recorded step does: where the device's position says."
    from turboquant_nb.cache.store import _append_by_position

    _append_by_position(*store._by_position(*states))
    store.sync()


# ---------------------------------------------------------------- attention and planes


@pytest.mark.parametrize("r", (4, 8))
def test_a_row_of_cosines_and_sines(r):
    """x * cos + x.roll(r / 2) * sin is `apply_cos_sin`, bit for bit; the last answer is kept,
    another position is another."""
    from turboquant_nb.cache.store import CosSinCache

    table = CosSinCache(0.5 ** torch.arange(1.0, r // 2 + 1))
    assert table.kept == ()
    table.reach(300)
    x = torch.randn(3, r, generator=torch.Generator().manual_seed(0))
    for position in (0, 7, 299):
        cos, sin = table.row(position)
        same(
            x * cos + x.roll(r // 2, -1) * sin,
            rope.apply_cos_sin(x, table.table[position].expand(3, -1)),
        )
        assert table.row(position)[0] is cos and len(table.kept) == 2 and table.kept[1] is sin


def test_what_is_freed_in_front_is_not_asked_for_behind():
    """After an eviction a store holds the tiles that its tokens need, and grows by an eighth at
    most."""
    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8)
    store.append(*states(160))
    store.evict(152)
    assert store.offset == 152 and store.key.tiles == 1
    store.append(*states(1))
    assert store.key.tiles == 2
    store.append(*states(7))
    assert store.key.tiles == 2


def test_a_static_store_shows_what_it_holds_and_no_more():
    "Outside a recording the host knows the length: `coded` ends there, not at max_length."
    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=64, static=True)
    store.append(*states(20))
    store.coded("key", 0, 20)
    with pytest.raises(ValueError, match=r"positions must lie in \[0, 20\], got \[0, 21\)"):
        store.coded("key", 0, 21)
    assert store._now == 20 and store.past_exact_from == 16


def test_a_start_may_lie_as_far_as_positions_go():
    "Before any token 2^31, a position being an int32; afterwards the length."
    store = KVStore(Recipe(), 2, 2, 8)
    store.set_range(start=2**31)
    with pytest.raises(ValueError, match=f"start must be from 0 to {2**31}, got"):
        store.set_range(start=2**31 + 1)


def test_a_tail_where_the_device_counts():
    """Recorded as eager: positions and states are those of the last `recent` tokens and the
    chunk."""
    from turboquant_nb.cache.store import CAPTURE

    store = KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=64, static=True)
    store.append(*states(21))
    want = store.tail_with(*states(3, 1))
    CAPTURE.tape = True
    try:
        got = store.tail_with(*states(3, 1))
        assert (
            (int(got.first), int(got.past), int(got.end))
            == (want.first, want.past, want.end)
            == (17, 21, 24)
        )
    finally:
        CAPTURE.tape = False
    same(got.key, want.key), same(got.value, want.value)


@pytest.mark.parametrize("n", (1, 2, 3))
def test_a_ring_with_a_gap_is_filled_from_the_tail(n):
    """After a deep crop the ring holds less than it could; a tail then begins late, and gives
    back what it has."""
    store, recipe = (
        KVStore(Recipe(sinks=0, recent=4), 2, 2, 8, tile=8),
        Recipe(sinks=0, recent=4),
    )
    k, v = states(23)
    store.append(k[:, :, :20], v[:, :, :20])
    store.crop(2)
    tail = store.tail_with(k[:, :, 20:], v[:, :, 20:])
    assert (tail.first, tail.past, tail.end) == (16, 18, 21)
    store.append(k[:, :, 20:], v[:, :, 20:])
    assert store.crop(n, tail).end == store.length == 21 - n
    order = [*range(18), 20, 21, 22]
    at = torch.tensor(order[max(16, 21 - n - 4) : 21 - n])
    states_, positions = store.exact("key")
    held = [(p, i) for i, p in enumerate(positions[0].tolist()) if p >= 0]
    assert (
        sorted(p for p, _ in held) == list(range(max(16, 21 - n - 4), 21 - n))
        and recipe.recent == 4
    )
    same(torch.stack([states_[:, :, i] for _, i in sorted(held)], 2), k[:, :, at])


def test_a_crop_of_a_static_store_asks_the_device_first():
    "Tokens that a recorded step appended count, though the host has not been told."
    store, bare = (
        KVStore(Recipe(sinks=1, recent=4), 2, 2, 8, tile=8, max_length=64, static=True)
        for _ in range(2)
    )
    for s in (store, bare):
        s.append(*states(20))
    unsynced(store, states(3, 1))
    assert store.length == 20
    store.crop(2)
    bare.append(*(x[:, :, :1] for x in states(3, 1)))
    assert store.length == int(store.position) == 21
    for name in ("key", "value"):
        same(store.coded(name, 0, 21).codes, bare.coded(name, 0, 21).codes)


def unsynced(store, states):
    "Append as a recorded step does, and tell the host nothing."
    from turboquant_nb.cache.store import _append_by_position

    _append_by_position(*store._by_position(*states))


@pytest.mark.parametrize("center", ("prompt_mean", "pre_rope"))
@pytest.mark.parametrize("tokens", range(7))
def test_the_first_chunk_of_any_length_has_its_mean(center, tokens):
    """By position as by number: 0 up to one token after the sinks, the shrunk mean from two on,
    every last bit but rounding to bfloat16."""
    recipe, freq = (
        Recipe(Spec(3, center=center), Spec(3, center="prompt_mean"), sinks=2, recent=3),
        0.5 ** torch.arange(1.0, 5.0),
    )
    one, two = (
        KVStore(recipe, 2, 2, 8, tile=16, max_length=32, static=True, inv_freq=freq)
        for _ in range(2)
    )
    k, v = (x + 2 for x in states(tokens + 1))
    one.append(k, v)
    unsynced(two, (k, v))
    for a, b in zip(one.sides, two.sides):
        assert bool(a.mean.any()) == (tokens + 1 - 2 >= 2)
        torch.testing.assert_close(a.mean, b.mean, rtol=2**-7, atol=2**-7)


def test_a_file_says_what_it_lacks_or_has_instead():
    store = KVStore(Recipe(), 1, 1, 8)
    store.append(*(x[:1, :1] for x in states(9)))
    tensors, header = store.state()
    with pytest.raises(
        ValueError, match="value.scale must be torch.float16 of shape .*, got nothing"
    ):
        KVStore.from_state({n: t for n, t in tensors.items() if n != "value.scale"}, header)
    with pytest.raises(
        ValueError,
        match=r"value.scale must be torch.float16 of shape .*, got torch.float32 of shape "
        r"\(1, 1, 1, 256\)",
    ):
        KVStore.from_state(tensors | {"value.scale": tensors["value.scale"].float()}, header)


def test_each_query_reads_its_own_recent_tokens_exactly():
    """Several queries at once, from the definition: exact are sinks, the last `recent` up to
    the query, and nothing older."""
    recent, n, g = 4, 3, torch.Generator().manual_seed(0)
    store = KVStore(Recipe(Spec(2), Spec(2), sinks=2, recent=recent), 1, 2, 8, tile=8)
    k, v = (torch.randn(1, 2, 30, 8, generator=g) for _ in "kv")
    store.append(k[:, :, :27], v[:, :, :27])
    tail = store.tail_with(k[:, :, 27:], v[:, :, 27:])
    store.append(k[:, :, 27:], v[:, :, 27:])
    coded = [decode_all(store, name) for name in ("key", "value")]
    q = torch.randn(1, 2, n, 8, generator=g)
    out, lse = attend(q, store, tail.key, tail.value, recent=recent)
    for i in range(n):
        at = 30 - n + i
        exact = torch.zeros(30, dtype=torch.bool)
        exact[:2], exact[max(0, at - recent + 1) :] = True, True
        mixed = [
            torch.where(exact[:, None], x, c)[:, :, : at + 1] for x, c in zip((k, v), coded)
        ]
        want = dense_attention(q[:, :, i : i + 1], *mixed)
        assert (out[:, :, i : i + 1] - want[0]).abs().max() < 1e-5 and (
            lse[:, :, i : i + 1] - want[1]
        ).abs().max() < 1e-5


def decode_all(store, name):
    "Every token from its code, sinks and recent ones too."
    from turboquant_nb.quant.quantizer import decode

    return decode(
        getattr(store, name).q,
        store.coded(name, 0, store.length),
        store.center(name, 0, store.length),
    )


@pytest.mark.parametrize("center", ("prompt_mean", "pre_rope"))
@pytest.mark.parametrize("recent", (None, 4))
def test_attention_where_the_device_counts_the_tokens(center, recent):
    """Recorded, the length is a tensor and masks reach to max_length: the same output as where
    the host knows it, with a chunk and without."""
    from turboquant_nb.cache.store import CAPTURE

    recipe, freq = (
        Recipe(Spec(3, center=center), Spec(2), sinks=2, recent=4),
        0.5 ** torch.arange(1.0, 5.0),
    )
    store = KVStore(recipe, 2, 2, 8, tile=8, max_length=64, static=True, inv_freq=freq)
    k, v = states(40)
    store.set_range(start=torch.tensor([0, 5]))
    store.append(k[:, :, :37], v[:, :, :37])
    tail = store.tail_with(k[:, :, 37:], v[:, :, 37:])
    store.append(k[:, :, 37:], v[:, :, 37:])
    for side in store.sides:  # what lies beyond the length may be anything
        side.tensors["scale"].flatten(2)[:, :, 40:] = math.nan
    q = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(1))
    chunk = (tail.key, tail.value) if recent else (k[:, :, 37:], v[:, :, 37:])
    for given in (chunk,) if recent else (chunk, (None, None)):
        for more in (dict(), dict(sliding_window=9), dict(block=16), dict(softcap=2.0)):
            want = attend(q, store, *given, recent=recent, **more)
            CAPTURE.tape = True
            try:
                got = attend(q, store, *given, recent=recent, **more)
            finally:
                CAPTURE.tape = False
            for a, b in zip(got, want):
                assert (a - b).abs().max() < 1e-5


def test_dense_attention_takes_its_mask_row_by_row():
    """Rows of a mask go with their queries, whatever the number at a time; it replaces the
    sliding window; the scale is the one given."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, 7, 8, generator=g),
        torch.randn(1, 2, 9, 8, generator=g),
        torch.randn(1, 2, 9, 8, generator=g),
    )
    mask = torch.rand(1, 2, 7, 9, generator=g) < 0.5
    mask[..., 0] = True
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.3)
    for rows in (1, 3, 256):
        out, lse = dense_attention(q, k, v, scaling=0.3, mask=mask, sliding_window=2, rows=rows)
        scores = (q.double() @ k.double().mT * 0.3).masked_fill(~mask, -math.inf)
        assert (out - want).abs().max() < 1e-5 and (
            lse - scores.logsumexp(-1)
        ).abs().max() < 1e-5


def test_recent_needs_as_many_exact_states_as_queries():
    store = KVStore(Recipe(), 2, 2, 8)
    k, v = states(9)
    store.append(k, v)
    with pytest.raises(ValueError, match="exact k and v of the last 3 tokens"):
        attend(torch.zeros(2, 2, 3, 8), store, k[:, :, -2:], v[:, :, -2:], recent=4)
    attend(torch.zeros(2, 2, 3, 8), store, k[:, :, -3:], v[:, :, -3:], recent=4)


def test_a_first_position_at_the_end_sees_nothing():
    "The range of `first` includes the length: no column is left, the answer is 0 and -inf."
    store = KVStore(Recipe(), 2, 2, 8)
    store.append(*states(9))
    out, lse = attend(torch.ones(2, 2, 1, 8), store, first=9)
    assert (out == 0).all() and (lse == -math.inf).all()
    with pytest.raises(ValueError, match="first must be from 0 to 9, got 10"):
        attend(torch.ones(2, 2, 1, 8), store, first=10)


def test_the_smallest_tile():
    "Four tokens, a quarter of a byte each; three are too few, five are no multiple."
    assert Layout(2, 8, tile=4).rows == 1
    with pytest.raises(ValueError, match="at least 4"):
        Layout(2, 8, tile=3)
    with pytest.raises(ValueError, match="multiple of 4"):
        Layout(2, 8, tile=5)


# ---------------------------------------------------------------- transformers' side


def sliding_cache(window):
    """A cache of a random model with sliding windows, and the function that feeds its first
    layer n tokens."""
    transformers = pytest.importorskip("transformers")
    from turboquant_nb.hf import TurboQuantCache

    sizes = dict(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    config = transformers.MistralConfig(
        **sizes, sliding_window=window, max_position_embeddings=4096
    )
    cache = TurboQuantCache(transformers.MistralForCausalLM(config).eval(), "k3v3")
    return cache.layers[0], lambda n, batch=1: cache.update(
        torch.randn(batch, 1, n, 16), torch.randn(batch, 1, n, 16), 0
    )


def test_a_crop_needs_the_whole_window_before_the_new_end():
    "`length - n - window + 1`, not `length - n`: the token at the new end still looks back."
    layer, feed = sliding_cache(100)
    for _ in range(30):
        feed(100)
    store = layer.store
    assert store.offset > 0
    lost = store.length - store.offset - 5  # five tokens are left: their windows are freed
    with pytest.raises(ValueError, match="a sliding layer keeps its window of 100"):
        layer.crop(-lost)
    n = store.length - store.offset - 99  # the new end sees exactly what is there
    layer.crop(-n)
    assert store.length - store.offset == 99


@pytest.mark.parametrize(
    "n, window, rows", [(50, 5, 8), (50, 1, 16), (50, 16, 16), (50, 49, 7), (1030, 20, 1024)]
)
def test_sliding_attention_by_blocks(n, window, rows):
    """Blocks of queries see the keys that one mask shows them; only prompts beyond 1,024 tokens
    have a second block."""
    pytest.importorskip("transformers")
    from turboquant_nb.hf.attention import _sliding

    g = torch.Generator().manual_seed(n)
    q, k, v = torch.randn(3, 1, 2, n, 8, generator=g)
    at = torch.arange(n)
    mask = (at <= at[:, None]) & (at > at[:, None] - window)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.3)
    assert (_sliding(q, k, v, 0.3, window, rows) - want).abs().max() < 1e-5


def test_repeated_rows_keep_their_padding():
    "Neighbours together: row 0 twice, then row 1 twice."
    layer, feed = sliding_cache(None)
    layer.starts = (0, 3)
    feed(9, batch=2)
    layer.batch_repeat_interleave(2)
    assert layer.starts == (0, 0, 3, 3) and layer.store.start.tolist() == [0, 0, 3, 3]


# ---------------------------------------------------------------- the encode kernel

try:
    import triton
    import triton.language as tl

    from turboquant_nb.kernels.encode import _add_product
except ImportError:
    triton = None
else:

    @triton.jit
    def _product_kernel(
        X, W0, W1, W2, OUT, XP: tl.constexpr, WP: tl.constexpr, WIDE: tl.constexpr
    ):
        i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        acc = tl.zeros((16, 16), tl.float32)
        tl.store(
            OUT + i,
            _add_product(
                acc,
                tl.load(X + i),
                tl.load(W0 + i),
                tl.load(W1 + i),
                tl.load(W2 + i),
                XP,
                WP,
                WIDE,
            ),
        )


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_a_product_in_parts_has_all_its_terms():
    """x (w0 + w1 + w2) with x in three parts: dropping a product of the first two parts of x is
    seen, since the parts of w are alike in size."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    w = [y.bfloat16() for y in torch.randn(3, 16, 16, generator=g).to(device)]
    whole = torch.randint(32, 64, (3, 16, 16), generator=g).double().to(device)
    a = [
        part * 2.0**-power for part, power in zip(whole, (5, 14, 22))
    ]  # rounding and cutting x to 16 bits give the first, of the rest the second
    x, (w0, w1, w2) = sum(a).float(), [y.double() for y in w]
    for XP, WP, want in (
        (1, 1, a[0] @ w0),
        (3, 1, (a[0] + a[1] + a[2]) @ w0),
        (3, 3, a[0] @ (w0 + w1 + w2) + a[1] @ (w0 + w1) + a[2] @ w0),
    ):
        out = torch.full((16, 16), torch.nan, device=device)
        _product_kernel[(1,)](x, *w, out, XP, WP, device == "cpu")
        assert (out - want).abs().max() < 1e-3


@pytest.mark.parametrize("scale", ("norm", "mse", "unbiased"))
def test_a_vector_of_zeros_has_scale_zero_in_the_kernel(scale):
    "`power / dot` is 0 / 0 there; the PyTorch path gives 0."
    pytest.importorskip("triton")
    from turboquant_nb.kernels import encode

    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = Recipe(Spec(3, scale=scale), Spec(2, scale=scale), sinks=0, recent=0)
    store = KVStore(recipe, 1, 1, 32, dtype=torch.bfloat16, device=device)
    x = (
        torch.randn(1, 1, 5, 32, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .to(device)
    )
    x[:, :, 2] = 0
    encode.append(store, x, x)
    store.sync()
    for name in ("key", "value"):
        scales = store.coded(name, 0, 5).scale.flatten()
        assert scales[2] == 0 and scales.isfinite().all() and (scales[[0, 1, 3, 4]] > 0).all()


# (`fits` of the kernel: test_states_taken_without_waiting in test_encode_kernel.py)


def test_a_scale_that_does_not_fit_is_nan_until_it_is_said():
    """Not infinite and not the largest: who waits for nobody must give an attention that shows
    the loss."""
    x, flags = (
        torch.randn(1, 1, 5, 32, generator=torch.Generator().manual_seed(0)),
        torch.zeros(2, dtype=torch.int32),
    )
    x[:, :, 2] = 3e6
    scale = _encode_quietly(Quantizer(Spec(3), 32), x, None, flags).scale.flatten()
    assert (
        scale[2].isnan() and scale[[0, 1, 3, 4]].isfinite().all() and flags.tolist() == [0, 1]
    )
