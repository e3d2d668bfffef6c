"""Counts of right answers: tests, intervals, many tests, power."""

import math

import pytest
from scipy.stats import binomtest

from turboquant_nb.evaluation.significance import (
    difference,
    holm,
    mcnemar,
    needed,
    power,
    wilson,
)


@pytest.mark.parametrize("lost, gained", [(0, 0), (1, 0), (9, 1), (3, 3), (20, 41), (700, 640)])
def test_mcnemar_is_a_fair_coins_test(lost, gained):
    n = lost + gained
    want = binomtest(lost, n).pvalue if n else 1.0
    assert mcnemar(lost, gained) == mcnemar(gained, lost) == pytest.approx(want, rel=1e-9)


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


def test_power_grows_and_keeps_its_level():
    grown = [power(n, 0.1, 0.05) for n in (50, 100, 200, 400, 1300)]
    assert grown == sorted(grown) and grown[-1] > 0.999
    assert all(power(n, 0.2, 0.0) <= 0.05 for n in (10, 37, 120))
    assert power(200, 0.1, 0.05, 0.001) < power(200, 0.1, 0.05)
    n = needed(0.1, 0.05)
    assert power(n, 0.1, 0.05) >= 0.8 > power(n * 19 // 20 - 8, 0.1, 0.05)
    assert power(60, 0.05, 0.05) == pytest.approx(power(60, 0.05, 0.05 - 1e-12), abs=1e-6)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: wilson(-1, 4), "right -1 of n 4"),
        (lambda: mcnemar(-1, 2), "lost -1"),
        (lambda: difference(3, 3, 5), "of n 5"),
        (lambda: power(0, 0.1, 0.1), "n 0"),
        (lambda: power(9, 0.1, 0.2), "margin 0.2"),
        (lambda: holm([0.1, 1.1]), "1.1"),
    ],
)
def test_wrong_counts_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
