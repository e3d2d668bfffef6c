"""Wide dtype, shape and size matrices for turboquant_nb.theory.rotation."""

import copy
import math

import pytest
import torch

from turboquant_nb.theory import rotation as rot
from turboquant_nb.theory import rotation as rotations
from turboquant_nb.theory.rotation import (
    Rotation,
    block_order,
    haar,
    hadamard,
    hadamard_factors,
    hadamard_matrix,
    make_rotation,
    paley,
)
from tests.helpers import ONE_THREAD, refuses

KINDS = ("identity", "haar", "hadamard")


pytestmark = ONE_THREAD


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def test_pinned_entries():
    """The random stream behind a seed has not changed: files that store only kind and seed stay
    readable."""
    assert haar(8, 0)[0, :4].tolist() == pytest.approx(
        [-0.00178745, -0.25258961, 0.04785056, -0.11055900], abs=1e-6
    )
    assert haar(64, 3)[10, :4].tolist() == pytest.approx(
        [-0.06260165, -0.23492193, 0.04454442, -0.16212392], abs=1e-6
    )
    assert (hadamard(12, 0)[0] * math.sqrt(12)).round().tolist() == [
        -1,
        -1,
        1,
        1,
        -1,
        -1,
        1,
        1,
        -1,
        -1,
        -1,
        -1,
    ]
    assert (hadamard(7, 1)[3] * 4).tolist() == pytest.approx([-1, 1, 1, 1, 2, -2, 2], abs=1e-6)


def test_cached_tables_survive_callers_contexts():
    rot._seeded.cache_clear(), hadamard_matrix.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.inference_mode(),
            torch.device("meta"),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            made = {k: make_rotation(k, 28, 2) for k in KINDS}
    finally:
        torch.set_default_dtype(torch.float32)
    x = seeded(3, 28).requires_grad_()
    for kind, r in made.items():
        assert (
            r.matrix.device.type == "cpu"
            and r.matrix.dtype == torch.float32
            and not r.matrix.is_inference()
        )
        if kind != "identity":
            assert torch.equal(r.matrix, {"haar": haar, "hadamard": hadamard}[kind](28, 2))
        r.apply(x).square().sum().backward()


def test_given_matrix():
    "(Chapter 5: one that is no rotation.)"
    M = haar(20, 4)
    source = M.double()
    r = make_rotation("matrix", 20, matrix=source)
    source.zero_()
    assert r.kind == r.form == "matrix" and r.seed is None and torch.equal(r.matrix, M)
    make_rotation("matrix", 20, matrix=M + 2e-5 * torch.eye(20))
    for bad, text in (
        (M[:, :19], r"\[20, 19\]"),
        (M[0], r"\[20\]"),
        (torch.zeros(20, 20), "got 1"),
    ):
        with refuses(text):
            make_rotation("matrix", 20, matrix=bad)
    with refuses("matrix", TypeError):
        make_rotation("matrix", 20, matrix=M.long())
    for kind, more in (("matrix", {}), ("haar", dict(matrix=M))):
        with refuses("only then"):
            make_rotation(kind, 20, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_named(kind):
    r = make_rotation(kind, 16)
    with refuses(r"y must have shape \[..., 16\], got \[2, 15\]"):
        r.inverse(torch.zeros(2, 15))
    with refuses(r"\[..., 16\]"):
        r.apply(torch.tensor(1.0))
    with refuses("y must be a floating-point tensor", TypeError):
        r.inverse(torch.zeros(2, 16, dtype=torch.int32))


def test_to_and_copies():
    r = make_rotation("haar", 8)
    assert r.to("cpu") is r
    meta = r.to("meta")
    assert meta.matrix.device.type == "meta" and (meta.kind, meta.d, meta.seed) == (
        r.kind,
        r.d,
        r.seed,
    )
    assert meta.apply(torch.zeros(2, 8, device="meta")).shape == (2, 8)
    twin = copy.deepcopy(r)
    assert torch.equal(twin.matrix, r.matrix) and hash(r) != hash(twin)
    with pytest.raises(AttributeError):
        r.d = 9
    assert isinstance(r, Rotation)


def test_orders_that_cannot_be_built():
    for n in (1, 2, 10, 16, 52):
        with refuses(f"got {n}"):
            paley(n)
    for d in (3, 6, 10, 92):
        with refuses(f"got {d}"):
            hadamard_matrix(d)
    assert paley(4).shape == (4, 4) and paley(8).shape == (8, 8)


@pytest.mark.parametrize("d", [d for d in range(3, 200) if hadamard_factors(d) is None])
def test_block_form_reaches_every_channel(d):
    p, R = block_order(d), hadamard(d, 0).double()
    assert p < d <= 2 * p
    assert (R @ R.T - torch.eye(d)).abs().max() <= 2**-23
    assert (R.abs().amax(0) < 0.999).all() and (
        R.abs().amax(1) < 0.999
    ).all()  # no channel passes unmixed


def test_a_seed_is_a_state():
    """Files hold seeds, so a seed must give the same state for ever: the golden ratio's
    multiple and the kind's letters, modulo 2^63."""
    for kind in ("haar", "hadamard"):
        for seed in (0, 1, 2, 12345, 2**40):
            want = (seed * 11400714819323198485 + int(kind[:7].encode().hex(), 16)) % 2**63
            assert rotations.seeded_generator(kind, seed).initial_seed() == want


@pytest.mark.parametrize("make", [haar, hadamard, lambda d, s: make_rotation("haar", d, s)])
def test_the_smallest_size_and_seed(make):
    make(1, 0)
    for d, seed, why in ((1, -1, "seed must be"), (0, 0, "d must be")):
        with refuses(why):
            make(d, seed)


def test_every_transform_serves_values_unless_it_says_otherwise():
    for kind in ("identity", "haar", "hadamard"):
        assert (
            rotations.make_rotation(kind, 8).refuses("values")
            == rotations.Transform.refuses("sketch")
            == ""
        )
