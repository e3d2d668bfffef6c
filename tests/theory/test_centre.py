"Means of keys and the angles of RoPE, at their edges."

import pytest
import torch

from turboquant_nb.testing import same
from turboquant_nb.theory import rope
from turboquant_nb.theory.centre import CosSinCache, masked_mean, prompt_mean


def test_a_row_of_padding_has_the_mean_zero():
    "No token is left to take a mean of; 0 / 0 would make every code of the row meaningless."
    mean = masked_mean(torch.full((2, 1, 4, 8), 3.0), torch.tensor([4, 0]))
    assert mean.shape[0] == 2 and (mean[0] == 0).all() and (mean[1] == 3).all()


def test_a_mean_has_the_unit_of_the_states():
    """Scaled by a power of two, states have the mean so scaled: nothing in it is an absolute
    number."""
    x = torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(0)) + 1
    mean, masked = prompt_mean(x, 2), masked_mean(x, torch.tensor([2, 2]))
    assert mean.any()
    for unit in (2.0**-40, 2.0**-9, 2.0**30):
        same(prompt_mean(x * unit, 2), mean * unit)
        same(masked_mean(x * unit, torch.tensor([2, 2])), masked * unit)
    torch.testing.assert_close(mean, masked, rtol=2**-7, atol=0)


def test_a_mean_that_is_noise_is_zero():
    "Positive-part James-Stein: what is shrunk below zero is zero, not turned round."
    x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(2, keepdim=True) + 0.01
    assert (masked_mean(x, torch.zeros(1)) == 0).all()


def test_the_mean_of_a_prompt_that_is_noise_is_zero():
    "As of `masked_mean`, for the path that does not wait for a device."
    x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(2, keepdim=True) + 0.01
    assert (
        (prompt_mean(x) == 0).all()
        and (prompt_mean(x[:, :, :1]) == 0).all()
        and (prompt_mean(x + 9) != 0).all()
    )


@pytest.mark.parametrize("r", (4, 8))
def test_a_row_of_cosines_and_sines(r):
    """x * cos + x.roll(r / 2) * sin is `apply_cos_sin`, bit for bit; the last answer is kept,
    another position is another."""

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
