"""Wide dtype, shape and layout matrices for turboquant_nb.theory.rope."""

import math

import pytest
import torch

from turboquant_nb.theory import rope
from turboquant_nb.theory.rope import (
    apply_rope,
    commutant_part,
    commutes,
    pairing_permutation,
    plane_matrix,
    rope_angles,
    rope_frequencies,
)
from turboquant_nb.theory.rotation import haar
from tests.helpers import ONE_THREAD, refuses


pytestmark = ONE_THREAD


def seeded(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


@pytest.mark.parametrize("kind", (torch.uint8, torch.int16, torch.int32, torch.int64))
def test_position_dtypes_and_broadcast(kind):
    x, at = seeded(2, 4, 6, 8), torch.arange(6).to(kind)
    want = apply_rope(x, torch.arange(6))
    assert torch.equal(apply_rope(x, at.expand(2, 1, 6)), want)
    assert apply_rope(x[:, :, :0], at[:0]).shape == (2, 4, 0, 8)
    assert torch.equal(apply_rope(x, 3), apply_rope(x, torch.tensor(3, dtype=kind)))


def test_angles_stay_exact_far_out():
    m = 10**6 + 7
    angle = rope_angles(torch.tensor(m), 128)
    want = torch.tensor([m * 10000.0 ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    assert (angle - want).abs().max() < 1e-8
    single = m * rope_frequencies(128).float()
    assert (single.double() - angle).abs().max() > 1e-3  # what float32 angles would do
    x = seeded(64, 128, dtype=torch.float32)
    assert (apply_rope(x, m).double() - apply_rope(x.double(), m)).abs().max() < 2e-6


def test_equal_zero_and_untouched_frequencies():
    mix = torch.kron(torch.eye(2), haar(8))  # real orthogonal on the complex planes, half-split
    assert commutes(mix, theta=1.0) < 1e-7 < 0.1 < commutes(mix)
    some = torch.tensor([1.0, 1.0, 0.1, 0.0])
    M = torch.eye(8, dtype=torch.float64)
    M[[3, 3, 7, 7], [3, 7, 3, 7]] = torch.tensor(
        [1.0, 0.0, 0.0, -1.0]
    ).double()  # reflects the plane of frequency 0
    assert commutes(M, inv_freq=some) == 0 and commutes(M) > 0.1
    assert commutes(torch.block_diag(torch.eye(8), haar(8)), rotary_dim=8) < 1e-7
    assert commutes(torch.block_diag(haar(8), torch.eye(8)), rotary_dim=8) > 0.1
    for m in (
        1,
        50,
    ):  # the projection agrees with RoPE itself, partial and with custom frequencies
        P = commutant_part(haar(12, 1), rotary_dim=8, inv_freq=some)
        Rm = apply_rope(torch.eye(12, dtype=torch.float64), m, rotary_dim=8, inv_freq=some).T
        assert (P @ Rm - Rm @ P).abs().max() < 1e-12


def test_scale_and_gradient():
    x = seeded(3, 8).requires_grad_()
    y = apply_rope(x, torch.arange(3), rotary_dim=4, scale=2.0)
    assert torch.allclose(
        y[:, :4], 2 * apply_rope(x, torch.arange(3), rotary_dim=4)[:, :4]
    ) and torch.equal(y[:, 4:], x[:, 4:])
    apply_rope(x, torch.arange(3)).square().sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach())  # an isometry


def test_bad_input_is_named():
    x = torch.zeros(2, 3, 8)
    for call, text in (
        (lambda: apply_rope(torch.tensor(1.0), 0), "even"),
        (lambda: apply_rope(x, 0, rotary_dim=3), "rotary_dim"),
        (lambda: apply_rope(x, 0, theta=math.nan), "theta"),
        (lambda: pairing_permutation(5), "got 5"),
        (lambda: plane_matrix(torch.ones(3), torch.ones(2)), "one length"),
    ):
        with refuses(text):
            call()
    for call, text in (
        (lambda: apply_rope(x, torch.zeros(3, dtype=torch.bool)), "bool"),
        (lambda: rope_frequencies(8.0), "float"),
    ):
        with refuses(text, TypeError):
            call()


def test_how_far_a_matrix_is_from_commuting_has_no_unit():
    "`commutes` of c R is that of R, however small c; of the matrix 0 it is 0."
    r = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = rope.commutes(r)
    assert 0.5 < want < math.sqrt(2)
    for c in (2.0**-500, 2.0**-20, 2.0**20):
        assert rope.commutes(r * c) == pytest.approx(want, rel=1e-12)
    assert rope.commutes(torch.zeros(8, 8)) == 0
