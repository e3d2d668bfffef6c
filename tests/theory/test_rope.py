"""Wide dtype, shape and layout matrices for turboquant_nb.theory.rope."""

import inspect
import math

import pytest
import torch

from turboquant_nb.theory import rope
from turboquant_nb.theory.rope import (
    apply_cos_sin,
    apply_rope,
    commutant_part,
    commutes,
    cos_sin_table,
    pairing_permutation,
    plane_channels,
    plane_matrix,
    rope_angles,
    rope_frequencies,
)
from turboquant_nb.theory.rotation import haar

PAIRINGS = ("half", "interleaved")
ULP = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 2e-3}


pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def reference(x, positions, d, pairing, rotary_dim=None, theta=1e4):
    "One matrix per position, in float64."
    r = rotary_dim or d
    out = torch.empty(*positions.shape, d, dtype=torch.float64)
    for i, m in enumerate(positions.flatten().tolist()):
        angle = rope_angles(m, r, theta)
        M = torch.eye(d, dtype=torch.float64)
        M[:r, :r] = plane_matrix(angle.cos(), angle.sin(), pairing)
        out.view(-1, d)[i] = M @ x.reshape(-1, d)[i].double()
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", list(ULP))
@pytest.mark.parametrize(
    "d,rotary_dim",
    [(2, None), (6, None), (64, None), (96, None), (128, None), (80, 32), (7, 4), (64, 64)],
)
def test_equals_matrices(pairing, dtype, d, rotary_dim):
    x, m = (
        seeded(2, 9, d, dtype=dtype),
        torch.randint(0, 100_000, (2, 9), generator=torch.Generator().manual_seed(1)),
    )
    y = apply_rope(x, m, pairing=pairing, rotary_dim=rotary_dim)
    assert y.dtype == dtype and y.shape == x.shape
    want = reference(x, m, d, pairing, rotary_dim)
    assert (y.double() - want).abs().max() <= ULP[dtype] * max(1.0, want.abs().max())
    if rotary_dim:
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("theta", (1.0, 500.0, 1e4, 1e6))
def test_pairings_are_one_permutation_apart(pairing, theta):
    for d in (2, 4, 64, 80):
        x, perm = seeded(5, d), pairing_permutation(d)
        a = apply_rope(x, torch.arange(5), theta, "interleaved")[:, perm]
        assert torch.equal(a, apply_rope(x[:, perm], torch.arange(5), theta, "half"))
        assert torch.equal(x[:, perm][:, perm.argsort()], x)
        first, second = plane_channels(d, pairing)
        assert sorted([*first.tolist(), *second.tolist()]) == list(range(d))


@pytest.mark.parametrize("kind", (torch.uint8, torch.int16, torch.int32, torch.int64))
def test_position_dtypes_and_broadcast(kind):
    x = seeded(2, 4, 6, 8)
    want = apply_rope(x, torch.arange(6))
    assert torch.equal(apply_rope(x, torch.arange(6).to(kind)), want)
    assert torch.equal(apply_rope(x, torch.arange(6).to(kind).expand(2, 1, 6)), want)
    assert torch.equal(
        apply_rope(x[0, 0, :1].expand(6, 8), torch.arange(6).to(kind)),
        apply_rope(x[0, 0, 0], torch.arange(6)),
    )
    assert apply_rope(x[:, :, :0], torch.arange(0).to(kind)).shape == (2, 4, 0, 8)
    assert torch.equal(apply_rope(x, 3), apply_rope(x, torch.tensor(3, dtype=kind)))


def test_strides_and_aliasing():
    x = seeded(5, 8, 3)
    assert torch.equal(
        apply_rope(x.mT, torch.arange(3)), apply_rope(x.mT.contiguous(), torch.arange(3))
    )
    kept, y = x.clone(), apply_rope(x.mT, 0)
    y.add_(1)
    assert torch.equal(x, kept)


def test_angles_stay_exact_far_out():
    m = 10**6 + 7
    angle = rope_angles(torch.tensor(m), 128)
    want = torch.tensor([m * 10000.0 ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    assert (angle - want).abs().max() < 1e-8
    single = m * rope_frequencies(128).float()
    assert (single.double() - angle).abs().max() > 1e-3  # what float32 angles would do
    x = seeded(64, 128, dtype=torch.float32)
    assert (apply_rope(x, m).double() - apply_rope(x.double(), m)).abs().max() < 2e-6


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_after_rope_keeps_scores_and_mixed_order_does_not(pairing):
    q, k, Pi = seeded(32, seed=1), seeded(32, seed=2), haar(32, 1).double()
    rope = lambda v, m: apply_rope(v, m, pairing=pairing)
    plain = rope(q, 9) @ rope(k, 2)
    for m in (0, 1, 77, 50_000):
        assert torch.isclose(rope(q, m + 7) @ rope(k, m), plain, atol=1e-9)
        assert torch.isclose((Pi @ rope(q, m + 7)) @ (Pi @ rope(k, m)), plain, atol=1e-5)
    before = [rope(Pi @ q, m + 7) @ rope(Pi @ k, m) for m in (0, 77, 500)]
    assert (
        max(before) - min(before) < 1e-9 and abs(before[0] - plain) > 0.1
    )  # relative, but another score
    mixed = [(Pi @ rope(q, m + 7)) @ rope(Pi @ k, m) for m in (0, 77, 500)]
    assert max(mixed) - min(mixed) > 0.1  # not even relative


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("d", (2, 4, 16, 64, 128))
def test_theorem_both_directions(pairing, d):
    a, b = seeded(d // 2, seed=1), seeded(d // 2, seed=2)
    member = plane_matrix(a, b, pairing)
    assert commutes(member, pairing) < 1e-12
    for m in (1, 13, 4096):
        angle = rope_angles(m, d)
        Rm = plane_matrix(angle.cos(), angle.sin(), pairing)
        assert (member @ Rm - Rm @ member).abs().max() < 1e-12
    for seed in range(3):
        M = haar(d, seed)
        P = commutant_part(M, pairing)
        assert (
            torch.allclose(commutant_part(P, pairing), P, atol=1e-14)
            and commutes(P, pairing) < 1e-7
        )  # a projection
        assert abs(((M.double() - P) * P).sum()) < 1e-10  # orthogonal to what it drops
        assert commutes(M, pairing) == pytest.approx(commutes(5 * M, pairing))
        assert 0 <= commutes(M, pairing) <= math.sqrt(2) + 1e-9
    if d > 4:
        assert commutes(member, {"half": "interleaved", "interleaved": "half"}[pairing]) > 0.1


def test_reflections_do_not_commute():
    assert commutes(torch.diag(torch.tensor([1.0, -1.0]))) == pytest.approx(math.sqrt(2))
    sign = torch.ones(16)
    sign[3] = -1
    assert commutes(sign.diag()) > 0.1
    sign[11] = -1  # its partner, half-split
    assert commutes(sign.diag()) == 0


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


def test_callers_defaults_do_not_matter():
    want = rope_angles(5, 8), plane_matrix(torch.ones(2), torch.zeros(2))
    with torch.device("meta"):
        assert torch.equal(rope_frequencies(8), rope_frequencies(8).cpu())
        assert torch.equal(plane_channels(8)[0], torch.arange(4, device="cpu"))
    torch.set_default_dtype(torch.float64)
    try:
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                want, (rope_angles(5, 8), plane_matrix(torch.ones(2), torch.zeros(2)))
            )
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_bad_input_is_named():
    x = torch.zeros(2, 3, 8)
    for call, text in (
        (
            lambda: apply_rope(torch.zeros(3, 7), 0),
            "last dimension of x must be a positive even integer, got 7",
        ),
        (lambda: apply_rope(torch.tensor(1.0), 0), "even"),
        (lambda: apply_rope(x, torch.arange(4)), "positions must broadcast"),
        (lambda: apply_rope(x, 0, pairing="adjacent"), "'half', 'interleaved', got 'adjacent'"),
        (lambda: apply_rope(x, 0, rotary_dim=10), "at most"),
        (lambda: apply_rope(x, 0, rotary_dim=3), "rotary_dim"),
        (lambda: apply_rope(x, 0, theta=-1.0), "theta"),
        (lambda: apply_rope(x, 0, theta=math.nan), "theta"),
        (lambda: apply_rope(x, 0, inv_freq=torch.ones(5)), r"\[4\], got \[5\]"),
        (lambda: rope_frequencies(0), "d must be"),
        (lambda: pairing_permutation(5), "got 5"),
        (lambda: plane_matrix(torch.ones(3), torch.ones(2)), "one length"),
        (lambda: commutes(torch.zeros(4, 6)), "square"),
        (lambda: commutes(torch.zeros(5, 5)), "even"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for call, text in (
        (lambda: apply_rope(x.long(), 0), "int64"),
        (lambda: apply_rope(x, torch.zeros(3)), "float32"),
        (lambda: apply_rope(x, torch.zeros(3, dtype=torch.bool)), "bool"),
        (lambda: apply_rope([0.0] * 8, 0), "list"),
        (lambda: rope_frequencies(8.0), "float"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_transformers_layouts():
    pytest.importorskip("transformers")
    from transformers.models.esm import modeling_esm
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.llama import modeling_llama

    q, k = (
        seeded(1, 2, 40, 64, dtype=torch.float32),
        seeded(1, 2, 40, 64, seed=1, dtype=torch.float32),
    )
    angle = rope_angles(torch.arange(40), 64)
    cos, sin = (
        torch.cat((f(angle), f(angle)), -1).float()[None] for f in (torch.cos, torch.sin)
    )
    ours = apply_rope(q, torch.arange(40))
    assert torch.allclose(
        modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[0], ours, atol=1e-6
    )
    assert torch.allclose(q * cos + modeling_esm.rotate_half(q) * sin, ours, atol=1e-6)
    angle = rope_angles(torch.arange(40), 16)
    cos, sin = (
        torch.cat((f(angle), f(angle)), -1).float()[None] for f in (torch.cos, torch.sin)
    )
    assert torch.allclose(
        modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)[0],
        apply_rope(q, torch.arange(40), rotary_dim=16),
        atol=1e-6,
    )


@pytest.mark.parametrize("d", [2, 4, 16])
def test_a_table_there_and_back(d):
    """By the negative position and by `inverse`, to the same bits; kills a sine that keeps its
    sign."""
    g = torch.Generator().manual_seed(d)
    x, at = torch.randn(2, 3, 5, d, generator=g), torch.randint(0, 900, (2, 5), generator=g)
    inv_freq = 10000 ** -torch.arange(0, 1, 2 / d)
    table = cos_sin_table(at, inv_freq)[:, None]
    y = apply_cos_sin(x, table)
    back = apply_cos_sin(y, table, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(back, apply_cos_sin(y, cos_sin_table(-at, inv_freq)[:, None]))


def test_how_far_a_matrix_is_from_commuting_has_no_unit():
    "`commutes` of c R is that of R, however small c; of the matrix 0 it is 0."
    r = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = rope.commutes(r)
    assert 0.5 < want < math.sqrt(2)
    for c in (2.0**-500, 2.0**-20, 2.0**20):
        assert rope.commutes(r * c) == pytest.approx(want, rel=1e-12)
    assert rope.commutes(torch.zeros(8, 8)) == 0


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
