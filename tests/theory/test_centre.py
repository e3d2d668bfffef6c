"Means of keys and the angles of RoPE, at their edges."

import copy

import pytest
import torch

from turboquant_nb.testing import same
from turboquant_nb.theory.centre import (
    CENTRES,
    GROWTH,
    Centre,
    CosSinCache,
    register_centre,
    rows_at,
    shared_cos_sin,
)
from tests.helpers import refuses, seeded


def test_a_table_grows_by_whole_steps_and_keeps_its_rows():
    frequencies = torch.tensor([1.0, 0.1])
    table = CosSinCache(frequencies)
    assert table.table.shape == (0, 4) and table.reach(0) is table.table
    first = table.reach(1)
    assert first.shape == (GROWTH, 4) and first.dtype == torch.float16
    assert table.reach(GROWTH) is first and table.reach(3) is first
    more = table.reach(GROWTH + 1)
    assert more.shape == (2 * GROWTH, 4)
    same(more[:GROWTH], first)
    angles = torch.arange(2 * GROWTH)[:, None] * frequencies
    torch.testing.assert_close(
        more.float(), torch.cat([angles.cos(), angles.sin()], 1), rtol=0, atol=6e-4
    )
    assert copy.deepcopy(table) is table


def test_one_table_serves_all_layers_of_the_same_frequencies():
    frequencies = torch.tensor([0.75, 0.0625], dtype=torch.float64)
    one = shared_cos_sin(frequencies, 4, "cpu")
    assert shared_cos_sin(frequencies.float(), 64, "cpu") is one
    assert one.inv_freq.dtype == torch.float32 and one.inv_freq is not frequencies
    other = shared_cos_sin(frequencies * 2, 4, "cpu")
    assert other is not one and shared_cos_sin(frequencies[:1], 4, "cpu") is not one
    assert shared_cos_sin(frequencies, 4, torch.device("cpu")) is one


@pytest.mark.parametrize(
    "frequencies, d, kind, said",
    (
        (None, 8, TypeError, "float vector of at most 4 frequencies.*got NoneType"),
        (torch.ones(2, dtype=torch.int64), 8, TypeError, "got torch.int64"),
        (torch.ones(5), 8, ValueError, r"at most 4 frequencies.*got shape \[5\]"),
        (torch.ones(0), 8, ValueError, r"got shape \[0\]"),
        (torch.ones(1, 2), 8, ValueError, r"got shape \[1, 2\]"),
        (torch.tensor([1.0, torch.nan]), 8, ValueError, "not finite"),
    ),
)
def test_what_are_no_frequencies(frequencies, d, kind, said):
    with refuses(said, kind):
        shared_cos_sin(frequencies, d, "cpu")
    assert shared_cos_sin(torch.ones(4), 8, "cpu").inv_freq.shape == (4,)


def test_rows_of_padding_are_those_of_the_first_token():
    table = torch.arange(12.0).reshape(6, 2)
    rows = rows_at(table, torch.tensor([0, 2]), torch.arange(1, 4))
    assert rows.shape == (2, 1, 3, 2)
    same(rows[0, 0], table[1:4])
    same(rows[1, 0], table[[0, 0, 1]])


@pytest.mark.parametrize("rotary", (4, 6, 2))
@pytest.mark.parametrize("name", ("none", "fixed", "pre_rope"))
def test_a_query_gets_back_what_the_codes_lost(name, rotary):
    """q · k = q · (k - at) + terms, at each position, whatever the mean; the output of values
    likewise. Mutants: a sign of the sines, the channels that RoPE leaves alone left out."""
    g = seeded(rotary)
    centre, start = CENTRES[name], [0, 1]
    noise = torch.randn(2, 3, 7, 6, generator=g)
    mean = 2 * torch.randn(2, 3, 1, 6, generator=g) if centre.holds_mean else None
    q = torch.randn(2, 3, 5, 6, generator=g)
    table = CosSinCache(0.7 ** torch.arange(1.0, rotary // 2 + 1)).reach(8)
    rows = rows_at(table, torch.tensor(start), torch.arange(7)) if centre.rotates else None
    at = centre.at(mean, rows)
    assert (mean is None) == (at is None) == (name == "none")
    assert at is None or at.shape[-2] == (7 if centre.rotates else 1)
    x = noise if at is None else noise + at
    back = centre.query(q, mean, rotary).scores(rows)
    torch.testing.assert_close(q @ noise.mT + back, q @ x.mT, rtol=1e-4, atol=1e-4)
    if name != "pre_rope":
        weights = torch.rand(2, 3, 5, 7, generator=g)
        out = centre.output(weights @ noise, weights.sum(-1, keepdim=True), mean)
        torch.testing.assert_close(out, weights @ x, rtol=1e-4, atol=1e-4)
    assert (centre.name, centre.kind) == {
        "none": ("none", "none"),
        "fixed": ("fixed", "fixed"),
        "pre_rope": ("pre_rope", "rotating"),
    }[name]


def test_what_a_centre_refuses():
    for name in ("none", "fixed", "pre_rope"):  # other tests register more
        assert CENTRES[name].refuses("kernels") == ""
    own = Centre()
    own.name = "of the page"
    assert "taken out by PyTorch" in own.refuses("kernels")
    assert register_centre(CENTRES["none"]) is CENTRES["none"]
