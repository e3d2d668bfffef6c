"The group-wise uniform quantiser that scripts/eval/choices.py compares with."

import pytest
import torch

choices = pytest.importorskip("eval.choices")


@pytest.mark.parametrize("bits, size", [(4, 64), (3, 32), (2, 16), (1, 64)])
def test_every_value_is_within_half_a_step(bits, size):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    groups = x.unflatten(-1, (-1, size))
    wide = groups.amax(-1) - groups.amin(-1)
    got = (choices.grouped(x, bits, size) - x).abs().unflatten(-1, (-1, size)).amax(-1)
    # offset and step are each off by at most one float16 spacing, 2**-10 of themselves
    slack = 2.0**-10 * (groups.abs().amax(-1) + wide)
    half = wide / (2**bits - 1) / 2
    assert (got <= half + slack).all()
    assert (
        got > 0.5 * half
    ).float().mean() > 0.9  # a quantiser with a bit more would stay below


def test_levels_are_as_many_as_the_bits_say_and_constants_are_kept():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    for row in choices.grouped(x, 2, 64):
        assert 2 <= len(row.unique()) <= 4
    same = torch.full((1, 64), 0.3)
    assert (choices.grouped(same, 2, 64) - same).abs().max() <= 0.3 * 2.0**-10
    assert (choices.grouped(torch.zeros(1, 64), 2, 64) == 0).all()


def test_bits_count_step_offset_and_exact_tokens():
    assert choices.grouped_bits(3, 32, 1020) == (20 * 16 + 1000 * 4) / 1020
    assert choices.grouped_bits(3, 64, 10) == 16
