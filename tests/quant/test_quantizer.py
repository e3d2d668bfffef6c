"""Coding single vectors: every field of a Spec, every bad input, and the distortion of the
theory."""

import math

import pytest
import torch

from tests.helpers import ONE_THREAD, Calls, refuses, seeded
from turboquant_nb.theory.codebook import lloyd_max
from turboquant_nb.quant.quantizer import (
    HeadCodes,
    ScalarCode,
    Coded,
    Quantizer,
    Spec,
    decode,
    decode_rotated,
    encode,
    scalar_codebook,
)
from turboquant_nb.theory.rotation import make_rotation
from turboquant_nb.testing import same
from turboquant_nb.theory import codebook
from turboquant_nb.quant.codes import find_code, make_quantizer
from turboquant_nb.quant.quantizer import decided, least_numbers
import itertools
from turboquant_nb.theory import transforms
from turboquant_nb.theory.codebook import uniform

pytestmark = ONE_THREAD

# Mean squared error of the optimal b-bit scalar code at unit variance: Gaussian (classical
# tables), and the exact law of a coordinate of a unit vector times d.


def relative(q, x, mean=None):
    return float((decode(q, encode(q, x, mean), mean) - x.float()).norm() / x.float().norm())


# --- Spec
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, bad",
    [
        ("bits", 5),
        ("bits", True),
        ("bits", float("nan")),
        ("bits", ()),
        ("bits", (3, 0)),
        ("bits", (3, 2.5)),
        ("residual", "prod"),
        ("seed", -1),
        ("rotation", "svd"),
        ("rotation", ["haar"]),
        ("scale", "l2"),
        ("codebook", "affine"),
        ("center", "mean"),
        ("scale_dtype", "float64"),
        ("scale_dtype", torch.float16),
    ],
)
def test_spec_refuses(field, bad):
    with refuses(field) as info:
        Spec(**{field: bad})
    assert repr(bad) in str(info.value)


# --- encode and decode
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rotation, scale, table, dtype",
    [
        ("hadamard", "norm", "sphere", torch.float16),
        ("hadamard", "unbiased", "uniform", torch.bfloat16),
        ("haar", "mse", "uniform", torch.float16),
        ("haar", "unbiased", "sphere", torch.float32),
        ("identity", "norm", "uniform", torch.float32),
        ("identity", "mse", "sphere", torch.bfloat16),
    ],
)
def test_all_specs(rotation, scale, table, dtype, gen):
    for bits, d, scale_dtype in (
        (1, 17, "float16"),
        (2, 64, "bfloat16"),
        (3, 33, "float32"),
        (4, 7, "float16"),
    ):
        q = Quantizer(Spec(bits, rotation, 3, scale, table, "none", scale_dtype), d)
        x = torch.randn(2, 3, 40, d, generator=gen).to(dtype)
        c = encode(q, x)
        assert (
            c.codes.shape == x.shape
            and c.codes.dtype == torch.uint8
            and int(c.codes.max()) < 2**bits
        )
        assert c.scale.shape == x.shape[:-1] and c.scale.dtype == getattr(torch, scale_dtype)
        y = decode(q, c, dtype=dtype)
        assert y.dtype == dtype and y.shape == x.shape
        bound = {1: 0.75, 2: 0.45, 3: 0.27, 4: 0.16}[bits] * (
            1.15 if scale == "unbiased" else 1
        )  # sqrt(D), 20 % and more above theory
        assert relative(q, x) < bound, (bits, relative(q, x))
        same(q.rotation.inverse(decode_rotated(q, c)), decode(q, c))


def test_forms_of_a_mean(gen):
    q = Quantizer(Spec(bits=3, center="fixed"), 24)
    x = torch.randn(2, 4, 30, 24, generator=gen)
    mean = torch.randn(2, 4, 1, 24, generator=gen).bfloat16()
    for m in (mean, mean.expand_as(x), mean.float()):
        got = encode(q, x, m)
        same(got.codes, encode(q, x - mean.float()).codes)
    same(decode(q, got, mean), decode(q, got) + mean.float())
    row = mean[:1, :1]
    same(encode(q, x, row[..., 0, :]).codes, encode(q, x, row.expand(2, 4, 1, 24)).codes)
    one = encode(q, torch.zeros(24))
    assert one.codes.shape == (24,) and one.scale.shape == ()


def test_fp64_beyond_fp32_is_refused():
    with refuses("x", (ValueError, TypeError)):
        encode(Quantizer(Spec(), 8), torch.full((2, 8), 1e300, dtype=torch.float64))


def test_quantizer_arguments():
    with refuses("d must"):
        Quantizer(Spec(), 0)
    with refuses("spec", TypeError):
        Quantizer("k3v3", 8)
    with refuses("d = 8, got d = 16"):
        Quantizer(Spec(), 8, rotation=make_rotation("haar", 16))
    own = make_rotation("matrix", 8, matrix=torch.eye(8)[torch.randperm(8)])
    assert Quantizer(Spec(rotation="identity"), 8, rotation=own).rotation.kind == "matrix"
    assert "bits=3" in repr(Quantizer(Spec(), 8))


def test_decode_refuses():
    q = Quantizer(Spec(), 8)
    c = encode(q, torch.ones(3, 8))
    for codes, scale in (
        (c.codes[:, :7], c.scale),
        (c.codes, c.scale[:2]),
        (c.codes, c.scale[:, None]),
        (c.codes[:2], c.scale),
    ):
        with refuses("codes"):
            decode(q, Coded(codes, scale))
    with refuses("codes"):
        decode(q, Coded(torch.full((3, 8), 9, dtype=torch.uint8), c.scale))


# --- theory
# ---------------------------------------------------------------------------------------


def test_work_is_vectorised(gen):
    """2 M look-ups: the number of operators depends on blocks of 8,192 vectors, never on
    vectors or channels."""
    book = lloyd_max(3, 128)
    with Calls() as count:
        codes = book.encode(torch.empty(2_000_000).uniform_(-3, 3, generator=gen))
        book.decode(codes)
    assert count.n < 2_000, count.n  # one operator per 1,000 look-ups at most
    q, x = Quantizer(Spec(bits=3), 128), torch.randn(3 * 8192, 128, generator=gen)
    calls = []
    for n in (8192, 3 * 8192):
        with Calls() as count:
            encode(q, x[:n])
        calls.append(count.n)
    assert calls[0] < 600 and calls[1] < 3 * calls[0]


def test_a_scale_may_be_as_large_as_its_dtype():
    "`largest > top`: 65,504 is a float16, and the largest."
    from turboquant_nb.quant.quantizer import _store_scale

    assert _store_scale(torch.tensor([1.0, 65504.0]), torch.float16, "x")[1] == 65504
    with refuses("needs a scale of 6.55e"):
        _store_scale(torch.tensor([1.0, 65505.0]), torch.float16, "x")


LEAST = {"float16": 1e-3, "bfloat16": 1e-21, "float32": 1e-21}  # sizes that are still held
MOST = {"float16": 5.2e5, "bfloat16": 1.8e19, "float32": 1.8e19}  # 65504 √64; √ of 2^128


@pytest.mark.parametrize("scale", ("norm", "mse", "unbiased"))
@pytest.mark.parametrize("kept", LEAST)
@pytest.mark.parametrize("own", ("none", "qjl"))
def test_vectors_of_every_size_are_coded_refused_or_zero(scale, kept, own):
    """What is held reads back with the error of the code; what is larger is refused, whatever
    overflows on the way, and what is smaller reads as 0."""
    q = make_quantizer(Spec(4, scale=scale, scale_dtype=kept, residual=own), 64)
    g = seeded()
    x = torch.nn.functional.normalize(torch.randn(50, 64, generator=g), dim=-1)
    back = lambda size: decode(q, encode(q, x * size))
    for size in (LEAST[kept], 1.0, 1e3, MOST[kept] / 2):
        assert float((back(size) / size - x).norm(dim=-1).max()) < 0.4, size
    for size in (2 * MOST[kept], 1e20, 1e30, 3e38):
        why = "needs a scale" if kept == "float16" and size < 1e19 else "overflows float32"
        with refuses(why):
            back(size)
    for size in (1e-30, 1e-38):
        assert not back(size).any()


def test_an_entry_that_a_dtype_cannot_hold_is_infinite():
    q = Quantizer(Spec(4, rotation="identity", scale_dtype="float32"), 16)
    coded = encode(q, torch.full((1, 16), 1e6))
    assert (
        decode(q, coded).isfinite().all()
        and decode(q, coded, dtype=torch.float16).isinf().all()
    )


def test_decided_is_about_what_is_left_of_the_mean():
    """`x - mean`: a coordinate on an edge lies there when a mean was added and is taken off,
    and only then, however long the vector is."""
    q = Quantizer(Spec(2, rotation="identity"), 16)
    edge = float(q.codebook.edges[-1])
    x = torch.full((1, 16), math.sqrt((16 - edge**2) / 15), dtype=torch.float64)
    x[0, 3] = edge
    mean = torch.linspace(0.1, 0.9, 16).double()
    for size in (0.01, 1, 100):
        assert (
            decided(q, size * x + mean, mean)[0].tolist()
            == decided(q, size * x)[0].tolist()
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


def test_an_edge_of_a_table_that_is_not_symmetric_is_undecided():
    "`- edges`, not `+ edges`, which symmetric tables cannot tell."
    book = codebook.lloyd_max_samples(torch.tensor([-1.0, 0.5, 1.0, 3.0]), 2)
    q = Quantizer(Spec(2, rotation="identity"), 16, codebook=book)
    for edge in book.edges.tolist():
        for sign, want in ((1, False), (-1, True)):
            x = torch.full((1, 16), math.sqrt((16 - edge**2) / 15), dtype=torch.float64)
            x[0, 3] = sign * edge
            assert bool(decided(q, x)[0, 3]) == want


def test_a_mean_is_taken_off_before_a_transform_per_head():
    "With a matrix for each head, coding x with a mean is coding x - mean without."
    g = seeded()
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
    rest = torch.randn(d, generator=seeded(3), dtype=torch.float64)
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


def test_codes_by_head_take_as_many_heads():
    """Each head gets what its own table gives, in blocks of any size; axis -3 is that of heads,
    however many tokens there are. Mutant: the axis of tokens."""
    books = lloyd_max(2), uniform(2)
    code = HeadCodes(tuple(ScalarCode(book, (2,) * 8) for book in books))
    q, g = Quantizer(Spec(2), 8, codebook=code), seeded()
    x, mean = torch.randn(3, 2, 5, 8, generator=g), torch.randn(3, 2, 1, 8, generator=g)
    for block in (None, 7):
        got = encode(q, x, mean, block=block)
        for head, book in enumerate(books):
            own = Quantizer(Spec(2), 8, codebook=book)
            want = encode(own, x[:, head], mean[:, head])
            same(got.codes[:, head], want.codes)
            same(got.scale[:, head], want.scale)
            same(q.decode_rotated(got)[:, head], own.decode_rotated(want))
    for wrong in (x[:, :1], x[:, [0, 0, 0], :2], x[0, 0], x[0, :, 0]):
        with refuses(r"codes of 2 heads take \[..., 2, n, 8\], got"):
            encode(q, wrong)


@pytest.mark.parametrize(
    "spec, want",
    [
        (Spec(3, scale="norm"), {"scale": 0}),  # a norm is not negative
        (Spec(3, scale="mse"), {"scale": None}),  # a least-squares factor may be
        (Spec(3, scale="norm", residual="qjl"), {"scale": 0, "residual_norm": 0}),
    ],
)
def test_the_least_that_a_stored_number_can_be(spec, want):
    found = least_numbers(spec, find_code(spec, 16))
    assert {name: found[name] for name in want} == want


def test_a_mean_that_cannot_be_taken_off_is_refused():
    with refuses("the mean of x must"):
        encode(Quantizer(Spec(), 8), torch.ones(4, 8), torch.full((8,), math.nan))
