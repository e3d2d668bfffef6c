"""Counts of right answers: tests, intervals, many tests, power."""

import math

import pytest
from scipy.stats import binomtest

from turboquant_nb.evaluation.significance import difference, holm, mcnemar, power, wilson


@pytest.mark.parametrize(
    "lost, gained, n", [(9, 1, 100), (0, 0, 40), (5, 5, 10), (61, 57, 1319)]
)
def test_difference_ends_where_the_score_is_z(lost, gained, n):
    "The ends by a grid of deltas, with the likelihood's share found by search."
    low, high = difference(lost, gained, n)

    def score(delta):
        def likelihood(q):
            rest = 1 - 2 * q - delta
            terms = ((lost, q + delta), (gained, q), (n - lost - gained, rest))
            return sum(k * math.log(max(x, 1e-300)) for k, x in terms if k)

        least, most = max(0.0, -delta), (1 - delta) / 2
        for _ in range(200):
            a, b = least + (most - least) / 3, most - (most - least) / 3
            least, most = (a, most) if likelihood(a) < likelihood(b) else (least, b)
        return (lost - gained - n * delta) / math.sqrt(n * (2 * least + delta * (1 - delta)))

    assert score(low) == pytest.approx(1.96, abs=2e-3)
    assert score(high) == pytest.approx(-1.96, abs=2e-3)
    back = difference(gained, lost, n)
    assert (low, high) == pytest.approx((-back[1], -back[0]), abs=1e-9)


def test_holm_is_never_below_its_value_and_in_order():
    values = [0.04, 0.001, 0.03, 0.7]
    assert holm(values) == pytest.approx([0.09, 0.004, 0.09, 0.7])
    assert holm([]) == [] and holm([0.6, 0.6]) == [1.0, 1.0]


@pytest.mark.parametrize("right, n", [(8, 10), (0, 7), (655, 1319)])
def test_one_share_has_the_interval_of_wilson(right, n):
    want = binomtest(right, n).proportion_ci(0.95, "wilson")
    assert wilson(right, n) == pytest.approx(want, abs=1e-9)


def test_the_level_is_five_percent():
    assert power(60, 0.1, 0.05) == power(60, 0.1, 0.05, alpha=0.05) < power(60, 0.1, 0.05, 0.1)


def test_counts_below_zero_and_no_questions_are_refused():
    with pytest.raises(ValueError, match="got lost -1, gained 2 of n 1"):
        mcnemar(-1, 2)
    with pytest.raises(ValueError, match="n >= 1; got .* and n 0"):
        power(0, 0.1, 0.1)
