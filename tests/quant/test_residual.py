"""The sign stage as a table, the prod code, and unbiasedness by scale: wide matrices of shapes,
dtypes and bad inputs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from turboquant_nb.theory.codebook import uniform, lloyd_max
from turboquant_nb.theory.qjl import qjl_decode, sign_bits
from turboquant_nb.quant.quantizer import Coded, Quantizer, Spec, decode, encode
from turboquant_nb.theory.rates import truncate
from turboquant_nb.quant.codes import sign_codebook, sign_gain, sketched_code
from turboquant_nb.testing import same
from turboquant_nb.theory import codebook
from tests.helpers import ONE_THREAD, refuses

pytestmark = ONE_THREAD


def prod(bits=3, d=64, kind="gaussian", **kw):
    spec = Spec(bits=bits, residual="qjl", **kw)
    return Quantizer(spec, d, codebook=sketched_code(spec, d, kind=kind))


# --- the sign stage
# ------------------------------------------------------------------------------------------


def test_sign_table_is_cached_and_other_bases():
    assert (
        sign_codebook(3, 64) is sign_codebook(3, 64) is sign_codebook(3, base=lloyd_max(2, 64))
    )
    assert sign_codebook(np.int64(3), 64) is sign_codebook(3, 64)
    even = sign_codebook(4, base=uniform(3, 128))
    assert even.law == "sign" and even.dim == 128 and even.mse < uniform(3, 128).mse
    twice = sign_codebook(4, base=sign_codebook(3))  # two signs
    assert lloyd_max(4).mse < twice.mse < sign_codebook(3).mse
    assert sign_codebook(2, 64, base=lloyd_max(1, 64)).dim == 64
    with torch.inference_mode():
        fresh = sign_codebook(5, 77)
    assert not fresh.levels.is_inference()


def test_gain_uses_the_cells_of_the_table():
    """Levels that are not in the middle between edges: a truncated and a put on the int8 grid
    table, by quadrature."""
    x = (np.arange(400_000) + 0.5) / 400_000 * 16 - 8
    w = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    for book in (
        truncate(lloyd_max(4)),
        lloyd_max(3).to_int8_grid(),
        truncate(lloyd_max(4), 2),
        lloyd_max(2),
    ):
        e = x - book.levels64[np.searchsorted(book.edges.double().numpy(), x)]
        assert sign_gain(book) == pytest.approx(float(w @ np.abs(e)) ** 2, rel=1e-5)
        t = sign_codebook(book.bits + 1, base=book)
        error = x - t.levels64[np.searchsorted(t.edges.double().numpy(), x)]
        assert t.mse == pytest.approx(
            float(w @ error**2), rel=1e-5
        )  # of the nearest-level code that it is


def test_sign_table_refuses_bases():
    with refuses("d = 64, got 2 bits and d = 128"):
        sign_codebook(3, 64, base=lloyd_max(2, 128))
    with refuses("base must be a Codebook, got int", TypeError):
        sign_codebook(3, base=2)
    uneven = replace(lloyd_max(2, 68), levels64=np.array([-3.0, -1e-3, 1e-3, 3.0]))
    with refuses("more than 2 E"):
        sign_codebook(3, base=uneven)
    with refuses("codebook must be a Codebook", TypeError):
        sign_gain(None)


# --- unbiased by scale
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean_shape", ((64,), (3, 1, 64), (3, 10, 64)))
def test_a_sketch_is_of_what_a_mean_leaves(mean_shape, gen):
    "Kills: a sketch of the error before the mean is taken off, whose norm is the mean's."
    q, x = prod(), torch.randn(3, 10, 64, generator=gen)
    mean = 5 * torch.randn(mean_shape, generator=gen)
    read = decode(q, q.encode(x + mean, mean), mean)
    assert float((read - x - mean).square().mean()) < 0.4 * float(x.square().mean())


# --- prod
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, scale_dtype, scale",
    (
        (torch.float32, "float16", "norm"),
        (torch.float16, "bfloat16", "mse"),
        (torch.bfloat16, "float32", "unbiased"),
    ),
)
def test_residual_is_against_the_stored_scale(dtype, scale_dtype, scale, gen):
    q = prod(3, 48, scale_dtype=scale_dtype, scale=scale, rotation="haar")
    x = torch.randn(4, 11, 48, generator=gen).to(dtype)
    coded = encode(q, x)
    plain = encode(Quantizer(q.spec, q.d, codebook=q.code.base), x)
    same(coded.codes, plain.codes)
    same(coded.scale, plain.scale)
    r = q.rotation.apply(x) - q.codebook.decode(coded.codes) * coded.scale.float().unsqueeze(-1)
    assert (
        coded.residual["signs"] != sign_bits(r, q.code.sketch)
    ).float().mean() < 1e-3  # a tie may round the other way
    torch.testing.assert_close(
        coded.residual["residual_norm"], r.norm(dim=-1).to(coded.scale.dtype), rtol=1e-2, atol=0
    )
    assert coded.residual["residual_norm"].dtype == getattr(torch, scale_dtype)
    out = q.decode_rotated(coded)
    torch.testing.assert_close(
        out,
        q.code.base.decode(coded)
        + qjl_decode(
            coded.residual["signs"], coded.residual["residual_norm"].float(), q.code.sketch
        ),
    )
    assert out.dtype == torch.float32
    assert decode(q, coded, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_refusals(gen):
    q, x = prod(), torch.randn(3, 64, generator=gen)
    for spec in (Spec(bits=3), Spec(bits=3, residual="sign")):
        with refuses("spec must have residual='qjl'"):
            sketched_code(spec, 64)
    with refuses("spec must be a Spec, got int", TypeError):
        sketched_code(3, 64)
    for bits in (1, 3):  # one bit of the three is the sign
        with refuses("codebook must have 2 bits, one less than the spec"):
            sketched_code(Spec(bits=3, residual="qjl"), 64, codebook=lloyd_max(bits, 64))
    for bits in (1, 2.5, (2,) * 64):
        with refuses("bits must be an integer of at least 2"):
            Spec(bits=bits, residual="qjl")
    coded = q.encode(x)
    for kept in (None, {}, coded.residual | {"residual_norm": None}):
        with refuses("signs and residual_norm"):
            q.decode_rotated(coded._replace(residual=kept))
    with pytest.raises(ValueError):
        short = coded.residual | {"signs": coded.residual["signs"][..., :-9]}
        q.decode_rotated(coded._replace(residual=short))
    with refuses("the residual of keys needs a scale"):
        q.encode(4e4 * x, name="keys")
    wide = prod(scale_dtype="bfloat16")
    assert decode(wide, wide.encode(4e4 * x)).isfinite().all()
    assert isinstance(coded, Coded)


def test_a_sign_on_levels_that_nothing_reaches():
    "A cell without mass has no mean: its level stands for it."
    book = sign_codebook(3, base=codebook.from_levels(torch.tensor([-120.0, -1.0, 1.0, 120.0])))
    assert (
        np.isfinite(book.means).all()
        and book.means[0] == book.levels64[0] < -119
        and math.isfinite(book.mse)
    )


def test_signs_need_levels_twice_their_step_apart():
    "At 1.5 E|e| the two halves of neighbouring cells would cross."
    from turboquant_nb.quant import codes as residual

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
            with refuses("more than 2 E|e| apart"):
                residual._split(close)
