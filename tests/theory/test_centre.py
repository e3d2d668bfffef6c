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
from tests.helpers import refuses


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


def test_what_a_centre_says_of_itself():
    kinds = dict(none="none", fixed="fixed", pre_rope="rotating")
    for name, kind in kinds.items():  # other tests register more
        centre = CENTRES[name]
        assert (centre.name, centre.kind, centre.refuses("kernels")) == (name, kind, "")
        assert centre.holds_mean == (name != "none") and centre.rotates == (name == "pre_rope")
    own = Centre()
    own.name = "of the page"
    assert "taken out by PyTorch" in own.refuses("kernels")
    assert register_centre(CENTRES["none"]) is CENTRES["none"]
