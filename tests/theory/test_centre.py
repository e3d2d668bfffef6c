"Means of keys and the angles of RoPE, at their edges."

import copy

import pytest
import torch

from turboquant_nb.testing import same
from turboquant_nb.theory.centre import (
    CENTRES,
    GROWTH,
    Centre,
    BLOCK,
    CosSinCache,
    block_sums,
    channel_sum,
    masked_mean,
    ordered_sum,
    prompt_mean,
    register_centre,
    rows_at,
    shared_cos_sin,
    sum_blocks,
)


def test_a_mean_has_the_unit_of_the_states():
    """Scaled by a power of two, states have the mean so scaled: nothing in it is an absolute
    number."""
    x = torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(0)) + 1
    mean, masked = prompt_mean(x, 2), masked_mean(x, torch.tensor([2, 2]))
    assert mean.any()
    for unit in (2.0**-40, 2.0**-9, 2.0**30):
        same(prompt_mean(x * unit, 2), mean * unit)
        same(masked_mean(x * unit, torch.tensor([2, 2])), masked * unit)
    same(mean, masked)


def test_a_mean_that_is_noise_is_zero():
    "Positive-part James-Stein: what is shrunk below zero is zero, not turned round."
    x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(2, keepdim=True) + 0.01
    assert not masked_mean(x, torch.zeros(1)).any() and not prompt_mean(x).any()
    assert (prompt_mean(x + 9) != 0).all()


def by_hand(x):
    """The order of a sum, one addition at a time: tokens 32 apart in each block of 128, then
    neighbours; blocks likewise."""

    def lanes(rows, size):
        sums = [torch.zeros(x.shape[-1]) for _ in range(32)]
        for i in range(size):
            sums[i % 32] = sums[i % 32] + (
                rows[i] if i < len(rows) else torch.zeros(x.shape[-1])
            )
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        return sums[0]

    blocks = [lanes(x[i : i + 128], 128) for i in range(0, len(x), 128)]
    return lanes(blocks, -(-len(blocks) // 32) * 32)


@pytest.mark.parametrize("n", (1, 31, 128, 129, 1000, 33 * 128 + 5))
def test_sums_have_one_order(n):
    "Whatever the batch, its strides and its padding; in pieces of whole blocks too."
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).exp2()
    want = by_hand(x)
    same(ordered_sum(x), want)
    many = torch.stack([x.flip(0), x, 7 * x])[:, None].expand(-1, 2, -1, -1)
    same(ordered_sum(many)[1, 1], want)
    same(ordered_sum(many.mT.contiguous().mT)[1, 0], want)
    same(ordered_sum(torch.cat([x, torch.zeros(5000, 4)])), want)
    cut = 2 * BLOCK
    same(sum_blocks(torch.cat([block_sums(x[:cut]), block_sums(x[cut:])])), want)
    if n > 100:  # the mutants: another order, another start of the blocks
        assert not torch.equal(sum(x), want)
        assert not torch.equal(ordered_sum(torch.cat([torch.zeros(1, 4), x])), want)
    assert (want.double() / x.double().sum(0) - 1).abs().max() < 2**-20
    same(ordered_sum(x[:0]), torch.zeros(4))


def test_channels_are_added_by_neighbours():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).exp2()
    a, b, c, d, e, f = x.unbind(-1)
    same(channel_sum(x)[:, 0], ((a + b) + (c + d)) + (e + f))
    same(channel_sum(x[:, :1]), x[:, :1])


def test_the_mean_of_a_prompt_is_the_mean_less_its_noise():
    """Positive-part James-Stein by a loop: 1 - (noise of the mean) / |mean|², for each row and
    head; what comes first is left out."""
    x = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(3)) + 0.7
    want = torch.zeros(2, 3, 1, 4)
    for b in range(2):
        for h in range(3):
            own = x[b, h, 2:].double()
            mean = own.mean(0)
            noise = sum(float((t - mean).square().sum()) for t in own) / 6 / 7
            want[b, h, 0] = mean * max(0.0, 1 - noise / float(mean.square().sum()))
    assert (want.norm(dim=-1) > 0.5).any()
    for got in (prompt_mean(x, 2), masked_mean(x, torch.tensor([2, 2]))):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=2**-12)


@pytest.mark.parametrize("n, skip", ((1, 0), (4, 3), (4, 4), (4, 9), (0, 0)))
def test_fewer_than_two_tokens_have_no_mean(n, skip):
    x = torch.full((2, 1, n, 8), 5.0)
    for got in (prompt_mean(x, skip), masked_mean(x, torch.tensor([skip, skip]))):
        assert got.shape == (2, 1, 1, 8) and got.dtype == torch.bfloat16 and not got.any()
    assert (prompt_mean(torch.full((1, 1, 2, 8), 5.0)) == 5).all()
    assert not masked_mean(torch.zeros(1, 1, 4, 8), torch.tensor([0])).any()
    assert (masked_mean(torch.full((1, 1, 3, 8), 5.0), torch.tensor([1])) == 5).all()


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
    with pytest.raises(kind, match=said):
        shared_cos_sin(frequencies, d, "cpu")
    assert shared_cos_sin(torch.ones(4), 8, "cpu").inv_freq.shape == (4,)


def test_rows_of_padding_are_those_of_the_first_token():
    table = torch.arange(12.0).reshape(6, 2)
    rows = rows_at(table, torch.tensor([0, 2]), torch.arange(1, 4))
    assert rows.shape == (2, 1, 3, 2)
    same(rows[0, 0], table[1:4])
    same(rows[1, 0], table[[0, 0, 1]])


@pytest.mark.parametrize("rotary", (4, 6, 2))
@pytest.mark.parametrize("name", ("none", "prompt_mean", "pre_rope"))
def test_a_query_gets_back_what_the_codes_lost(name, rotary):
    """q · k = q · (k - at) + terms, at each position; the output of values likewise. Mutants: a
    sign of the sines, the channels that RoPE leaves alone left out."""
    g = torch.Generator().manual_seed(rotary)
    centre, start = CENTRES[name], [0, 1]
    x = torch.randn(2, 3, 7, 6, generator=g) + 2 * torch.randn(2, 3, 1, 6, generator=g)
    q = torch.randn(2, 3, 5, 6, generator=g)
    table = CosSinCache(0.7 ** torch.arange(1.0, rotary // 2 + 1)).reach(8)
    rows = rows_at(table, torch.tensor(start), torch.arange(7)) if centre.rotates else None
    mean = centre.fit(x, start, 1, rows)
    same(mean, centre.fit(x, torch.tensor(start), 1, rows)) if name != "none" else None
    at = centre.at(mean, rows)
    assert (mean is None) == (name == "none") == (not centre.holds_mean)
    assert at is None or at.shape[-2] == (7 if centre.rotates else 1)
    coded = x if at is None else x - at
    back = centre.query(q, mean, rotary).scores(rows)
    torch.testing.assert_close(q @ coded.mT + back, q @ x.mT, rtol=1e-4, atol=1e-4)
    if name != "pre_rope":
        weights = torch.rand(2, 3, 5, 7, generator=g)
        out = centre.output(weights @ coded, weights.sum(-1, keepdim=True), mean)
        torch.testing.assert_close(out, weights @ x, rtol=1e-4, atol=1e-4)
    if mean is not None:
        assert coded.square().sum() < 0.9 * x.square().sum()
    assert (centre.name, centre.kind, centre.by_kernel) == {
        "none": ("none", "none", False),
        "prompt_mean": ("prompt_mean", "fixed", True),
        "pre_rope": ("pre_rope", "rotating", True),
    }[name]


def test_rows_may_begin_at_different_tokens():
    "Each row's own mean, as if it were alone."
    x = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(9)) + 1
    got = CENTRES["prompt_mean"].fit(x, [0, 3, 0], 2)
    for row, start in enumerate((0, 3, 0)):
        same(got[row : row + 1], prompt_mean(x[row : row + 1], start + 2))


def test_what_a_centre_refuses():
    assert "is for keys" in CENTRES["pre_rope"].refuses("values")
    for name in ("none", "prompt_mean", "pre_rope"):  # other tests register more
        assert CENTRES[name].refuses("kernels") == ""
    assert CENTRES["prompt_mean"].refuses("values") == "" == CENTRES["none"].refuses("values")
    own = Centre()
    own.name = "of the page"
    assert "taken out by PyTorch" in own.refuses("kernels") and own.refuses("values") == ""
    with pytest.raises(NotImplementedError):
        own.fit(torch.ones(1, 1, 2, 4), [0], 0)
    assert register_centre(CENTRES["none"]) is CENTRES["none"]
