"""The sign sketch: matrices, bits byte for byte, scores from bytes
equal to the dense formula. Means and variances are measured in chapter 7."""

import math

import pytest
import torch

from turboquant_nb.testing import bounded, same
from turboquant_nb.theory.qjl import (
    pack_signs,
    qjl_decode,
    qjl_encode,
    qjl_scores,
    qjl_variance,
    sign_bits,
    sketch_matrix,
    unpack_signs,
)
from turboquant_nb.theory.rotation import haar, hadamard
from tests.helpers import ONE_THREAD, Largest, refuses

pytestmark = ONE_THREAD
KINDS = ("gaussian", "orthogonal", "hadamard")


def mean_length(d):
    """E‖g‖ by another way than the package: the product Π over the recursion L_{d+2} = L_d
    (d+1)/d."""
    length, at = (math.sqrt(2 / math.pi), 1) if d % 2 else (math.sqrt(math.pi / 2), 2)
    while at < d:
        length, at = length * (at + 1) / at, at + 2
    return length


# ---- the matrix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "m,d", [(1, 1), (3, 1), (1, 8), (7, 8), (9, 8), (130, 64), (100, 80), (31, 23)]
)
def test_matrix(kind, m, d):
    S = sketch_matrix(m, d, kind, seed=3)
    assert (
        S.shape == (m, d)
        and S.dtype == torch.float32
        and S.device.type == "cpu"
        and S.is_contiguous()
    )
    assert not S.is_inference() and S.isfinite().all()
    same(sketch_matrix(m, d, kind, seed=3), S)
    same(sketch_matrix(m + d + 1, d, kind, seed=3)[:m], S)  # more rows are appended
    if m * d >= 8:
        assert not torch.equal(sketch_matrix(m, d, kind, seed=4), S)
    if kind != "gaussian":
        for block in S.split(d):
            gram = block.double() @ block.double().T / mean_length(d) ** 2
            torch.testing.assert_close(
                gram, torch.eye(len(block), dtype=torch.float64), atol=2e-6, rtol=0
            )


def test_global_state_is_untouched():
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    for kind in KINDS:
        assert sketch_matrix(9, 8, kind).dtype == torch.float32
    torch.set_default_dtype(torch.float32)
    same(torch.get_rng_state(), before)


@pytest.mark.parametrize("d", [16, 64])
def test_sketch_shares_no_draws_with_the_rotation_of_its_seed(d):
    Q = sketch_matrix(d, d, "orthogonal", 0) / mean_length(d)
    assert float((Q.abs() - haar(d, 0).abs()).abs().max()) > 0.1
    H, R = sketch_matrix(d, d, "hadamard", 0).sign(), hadamard(d, 0).sign()
    signs = lambda M: set(
        map(tuple, (M * M[:1]).int().tolist())
    )  # rows relative to one row: the Hadamard group
    assert signs(H) == signs(R)  # the same matrix up to signs and order: only the draws differ
    assert not set(map(tuple, H.int().tolist())) & set(
        map(tuple, R.int().tolist())
    )  # other signs of the columns


# ---- mean and variance


@pytest.mark.parametrize("d", [2, 8, 129])
def test_variance_of_blocks(d):
    "More rows than channels are blocks of their own; in one dimension the sign is everything."
    r, across = torch.eye(d, dtype=torch.float64)[:2]
    blocks = [qjl_variance(across, r, k, "orthogonal") * k * k for k in (d, d, 1)]
    want = float(sum(blocks)) / (2 * d + 1) ** 2
    got = qjl_variance(across, r, 2 * d + 1, "orthogonal")
    assert float(got) == pytest.approx(want, rel=1e-12)
    one = torch.ones(1)
    assert 0 <= float(qjl_variance(one, one, 3, "orthogonal")) < 1e-12


# ---- signs and bytes


def test_zero_tie_and_negation(gen):
    S = sketch_matrix(16, 8)
    packed, norm = qjl_encode(torch.zeros(3, 8), S)
    same(packed, torch.zeros(3, 2, dtype=torch.uint8))
    assert (qjl_decode(packed, norm, S) == 0).all()
    r = torch.randn(5, 8, generator=gen)
    same(sign_bits(-r, S), 1 - sign_bits(r, S))
    tie = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    same(sign_bits(torch.tensor([1.0, -1.0]), tie), torch.tensor([0, 1], dtype=torch.uint8))


# ---- scores


@pytest.mark.parametrize(
    "lead_q,lead_r",
    [((), ()), ((3,), ()), ((), (3,)), ((2, 1), (1, 3)), ((2, 3), (2, 3)), ((4, 1, 2), (2,))],
)
def test_scores_broadcast_as_matmul(lead_q, lead_r, gen):
    S = sketch_matrix(21, 16)
    q, r = (
        torch.randn(*lead_q, 5, 16, generator=gen),
        torch.randn(*lead_r, 7, 16, generator=gen),
    )
    packed, norm = qjl_encode(r, S)
    got, want = qjl_scores(q, packed, norm, S), q @ qjl_decode(packed, norm, S).mT
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert qjl_scores(q[..., :0, :], packed, norm, S).shape == (*want.shape[:-2], 0, 7)
    assert qjl_scores(q, packed[..., :0, :], norm[..., :0], S).shape == (*want.shape[:-2], 5, 0)


def test_scores_never_hold_one_float_per_sign(gen):
    "Peak of a single allocation: the output and the tables, not T × m floats."
    S, T = sketch_matrix(128, 64), 4096
    packed, norm = qjl_encode(torch.randn(T, 64, generator=gen), S)
    with Largest() as scores:
        qjl_scores(torch.randn(1, 64, generator=gen), packed, norm, S)
    bounded(scores.bytes, T * 128, name="largest tensor in bytes")  # a quarter of ±1 floats
    with Largest() as whole:
        qjl_decode(packed, norm, S)
    bounded(T * 128 * 4, whole.bytes, name="decode does hold them")


# ---- errors

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("f", [sign_bits, qjl_encode])
def test_bad_vectors(f):
    S, r = sketch_matrix(11, 8), torch.ones(3, 8)
    for error, text, args in [
        (ValueError, "r must be finite", (torch.full((8,), 1e39, dtype=torch.float64), S)),
        (ValueError, "S must be finite", (r, S.clone().index_fill(0, torch.tensor([2]), NAN))),
        (TypeError, "S must be a floating-point tensor", (r, S.int())),
        (ValueError, r"S must have shape \[m, d\]", (r, S[0])),
        (ValueError, r"S must have shape \[m, d\]", (r, S[:0])),
        (ValueError, "r must be on cpu like the sketch, got meta", (r.to("meta"), S)),
    ]:
        with refuses(text, error):
            f(*args)


def test_bad_bits_and_bytes():
    with refuses("packed must be a uint8 tensor", TypeError):
        unpack_signs(torch.ones(8, dtype=torch.long), 8)
    for wrong in (torch.tensor(1, dtype=torch.uint8), torch.ones(3, 0, dtype=torch.uint8)):
        with refuses("bits must have shape"):
            pack_signs(wrong)


def test_bad_scores_and_decode(gen):
    S, q = sketch_matrix(20, 8), torch.randn(4, 8, generator=gen)
    packed, norm = qjl_encode(torch.randn(5, 8, generator=gen), S)
    cases = [
        (ValueError, "q must have shape", (q[0], packed, norm, S)),
        (TypeError, "q must be a floating-point", (q.int(), packed, norm, S)),
        (ValueError, "q must be finite", (q * INF, packed, norm, S)),
        (
            TypeError,
            "packed must be a uint8 tensor, got torch.int64",
            (q, packed.long(), norm, S),
        ),
        (TypeError, "norm must be a floating-point", (q, packed, norm.int(), S)),
        (ValueError, "norm must be finite", (q, packed, norm / 0, S)),
        (ValueError, "S must be finite", (q, packed, norm, S / 0)),
        (ValueError, "packed must be on cpu", (q, packed.to("meta"), norm, S)),
        (ValueError, "norm must be on cpu", (q, packed, norm.to("meta"), S)),
    ]
    for error, text, args in cases:
        with refuses(text, error):
            qjl_scores(*args)
    bits = sign_bits(torch.ones(5, 8), S)
    for error, text, args in [
        (ValueError, r"signs must have shape .*, got \[\]", (bits[0, 0], norm[0], S)),
        (ValueError, r"signs must lie in 0\.\.1, got ", (bits + 1, norm, S)),
        (TypeError, "signs must be a uint8", (bits.bool(), norm, S)),
        (ValueError, "norm must have shape", (bits, norm[:2], S)),
        (ValueError, "signs must be on cpu", (bits.to("meta"), norm, S)),
    ]:
        with refuses(text, error):
            qjl_decode(*args)


def test_bad_variance():
    x = torch.ones(3, 8)
    for error, text, args in [
        (ValueError, "m must", (x, x, 0)),
        (TypeError, "q must be a floating-point", (x.int(), x, 4)),
        (TypeError, "r must be a floating-point", (x, x.int(), 4)),
        (ValueError, "r must be finite", (x, x * NAN, 4)),
        (ValueError, r"q and r must have shape \[..., d\]", (x, x[:, :7], 4)),
        (ValueError, "q and r must be on one device", (x, x.to("meta"), 4)),
        (ValueError, "q and r must have shape", (x[:, :0], x[:, :0], 4)),
        (ValueError, "leading dimensions of q and r must broadcast", (x, x[:2], 4)),
    ]:
        with refuses(text, error):
            qjl_variance(*args)


@pytest.mark.parametrize("d", (3, 5, 6, 7, 9, 13))
def test_no_row_of_a_hadamard_sketch_is_a_channel(d):
    "Where d has no Hadamard matrix two blocks overlap, which together mix all channels."
    for seed in range(4):
        rows = sketch_matrix(d, d, "hadamard", seed).double()
        assert ((rows.abs() > 1e-6).sum(1) >= 2).all()
        assert rows @ rows.mT == pytest.approx(
            torch.eye(d).numpy() * float((rows[0] ** 2).sum()), abs=1e-5
        )
