"""unisono.records.stats against the published table, brute force and properties."""

from __future__ import annotations

import math
from itertools import pairwise
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.records import stats
from unisono.records.stats import Interval, Verdict, verdict

times = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    low, median, high = sorted(draw(st.tuples(times, times, times)))
    return Interval(median, low, high)


def coverage(count: int, low: int, high: int, quantile: float) -> float:
    """Returns P(low <= B < high) for B binomial(count, quantile), summed term by term."""
    return math.fsum(comb(count, k) * quantile**k * (1 - quantile) ** (count - k) for k in range(low, high))


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (7, (1, 7)), (20, (6, 15)), (100, (40, 61))])
def test_the_ranks_are_those_of_le_boudec(count: int, ranks: tuple[int, int]) -> None:
    assert stats.ranks_of(count) == ranks


def test_a_launchs_ratio_is_that_of_its_rounds() -> None:
    """Rounds differ by more than the two do."""
    rounds = np.random.default_rng(3).lognormal(0, 0.5, 6 * 4)
    visits, numbers = [3] * len(rounds), np.repeat(range(6), 4).tolist()

    def of(times: np.ndarray) -> dict[int, list[float]]:
        return stats.visit_medians(np.repeat(times, 3), visits, numbers)

    found = stats.ratios(of(1.03 * rounds), of(rounds))
    assert found is not None
    assert found.sure
    assert (found.low, found.high) == pytest.approx((1.03, 1.03))
    assert stats.ratios({1: [1.0]}, {2: [1.0]}) is None


@pytest.mark.parametrize(("quantile", "first"), [(0.5, 6), (0.95, 72), (0.99, 368)])
def test_the_first_count_that_carries_a_quantile(quantile: float, first: int) -> None:
    assert stats.ranks_of(first - 1, quantile) is None
    assert stats.ranks_of(first, quantile) is not None


@given(st.integers(6, 400), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_ranks_cover_and_are_as_tight_as_equal_tails_allow(count: int, quantile: float) -> None:
    ranks = stats.ranks_of(count, quantile)
    if ranks is None:
        return
    low, high = ranks
    assert 1 <= low < high <= count
    assert coverage(count, low, high, quantile) >= 0.95 - 1e-12
    assert coverage(count, 0, low + 1, quantile) > 0.025 - 1e-12  # one rank higher would cover too little
    assert coverage(count, high - 1, count + 1, quantile) > 0.025 - 1e-12


@given(st.lists(times, min_size=1, max_size=200))
def test_the_interval_holds_the_median_and_is_made_of_samples(samples: list[float]) -> None:
    found = stats.median_interval(samples)
    assert found.low <= found.median <= found.high
    assert found.low in samples
    assert found.high in samples
    assert found.median == pytest.approx(float(np.median(samples)))
    if len(samples) < stats.MIN_SAMPLES:
        assert (found.low, found.high) == (min(samples), max(samples))


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    true = 1.0  # the median of this skewed distribution
    samples = np.exp(rng.standard_normal((2000, 25)))
    found = [stats.median_interval(row) for row in samples]
    assert sum(i.low <= true <= i.high for i in found) / len(found) >= 0.95


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stats.median_interval([])


def test_an_interval_over_visits_covers_their_medians() -> None:
    steady, slow = [10.0, 10.1, 9.9] * 20, [20.0, 20.1, 19.9] * 20
    found = stats.visited_interval(steady * 3 + slow, [60] * 4)
    assert found.low <= found.median <= 10.1 < found.high == 20.0
    assert stats.median_interval(steady * 3 + slow).high < 11.0
    many = stats.visited_interval(steady * 19 + slow, [60] * 20)  # one visit of twenty does not matter
    assert many.high < 11.0


@pytest.mark.parametrize("visits", range(1, 8))
def test_an_interval_is_sure_from_six_visits_on(visits: int) -> None:
    steady = [10.0, 10.1, 9.9] * 20
    assert stats.visited_interval(steady * visits, [60] * visits).sure is (visits >= 6)
    assert stats.median_interval(steady[:visits]).sure is (visits >= 6)


def test_few_visits_to_one_and_the_same_never_tell_it_from_itself() -> None:
    """Phases of the machine that are longer than a visit shift all samples of the visit."""
    rng = np.random.default_rng(1)

    def measured(visits: int) -> Interval:
        phases = rng.normal(0, 0.05, visits)
        samples = [np.exp(rng.normal(phase, 0.05, 75)) for phase in phases]
        return stats.visited_interval(np.concatenate(samples), [75] * visits)

    for visits, most in ((2, 0), (3, 0), (6, 4)):
        found = [verdict(measured(visits), measured(visits)) for _ in range(400)]
        assert sum(one in (Verdict.FASTER, Verdict.SLOWER) for one in found) <= most


def test_quantiles_are_stated_only_where_the_count_carries_them() -> None:
    few, some, many = (list(np.linspace(1, 2, n)) for n in (5, 100, 400))
    assert stats.quantiles(few) == {0.5: None, 0.95: None, 0.99: None}
    assert [v is not None for v in stats.quantiles(some).values()] == [True, True, False]
    assert stats.quantiles(many)[0.99] == pytest.approx(1.99, abs=0.005)


@given(intervals(), intervals())
def test_a_verdict_mirrors(a: Interval, b: Interval) -> None:
    mirror = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    assert verdict(b, a) == mirror.get(verdict(a, b), verdict(a, b))


@given(intervals(), intervals())
def test_a_verdict_is_never_forced(a: Interval, b: Interval) -> None:
    overlap = a.low <= b.high and b.low <= a.high
    if overlap:
        assert verdict(a, b) in (Verdict.SAME, Verdict.UNCLEAR)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Interval(10, 9, 11), Interval(20, 19, 21), Verdict.FASTER),
        (Interval(20, 19, 21), Interval(10, 9, 11), Verdict.SLOWER),
        (Interval(10, 9.95, 10.05), Interval(10.1, 10.05, 10.14), Verdict.SAME),
        (
            Interval(10, 9.99, 10.01),
            Interval(10.1, 10.09, 10.11),
            Verdict.SAME,
        ),  # apart, by too little to matter
        (Interval(10, 8, 12), Interval(11, 9, 13), Verdict.UNCLEAR),
        (Interval(10, 5, 10.01), Interval(10.1, 10.09, 20), Verdict.UNCLEAR),
        (Interval(10, 9, 11, sure=False), Interval(20, 19, 21), Verdict.UNCLEAR),
        (Interval(10, 10, 10), Interval(10, 10, 10, sure=False), Verdict.UNCLEAR),
    ],
)
def test_verdicts(a: Interval, b: Interval, expected: Verdict) -> None:
    assert verdict(a, b) is expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Interval(1.03, 1.011, 1.05), Verdict.FASTER),
        (Interval(0.97, 0.95, 0.989), Verdict.SLOWER),
        (Interval(1.03, 1.009, 1.05), Verdict.UNCLEAR),  # the median alone lies beyond the tolerance
        (Interval(0.97, 0.95, 0.991), Verdict.UNCLEAR),
        (Interval(1.0, 0.991, 1.009), Verdict.SAME),
        (Interval(1.0, 0.989, 1.0), Verdict.UNCLEAR),
        (Interval(1.0, 1.0, 1.011), Verdict.UNCLEAR),
        (Interval(1.5, 1.4, 1.6, sure=False), Verdict.UNCLEAR),
    ],
)
def test_verdicts_on_ratios(found: Interval, expected: Verdict) -> None:
    assert stats.verdict_on_ratios(found, 0.01) is expected


@given(st.lists(times, min_size=2, max_size=50), st.floats(0.5, 2.0))
def test_variation_does_not_depend_on_the_unit(samples: list[float], scale: float) -> None:
    one, other = stats.variation(samples), stats.variation([s * scale for s in samples])
    assert one is not None
    assert other == pytest.approx(one, rel=1e-6, abs=1e-9)


def test_variation_needs_two_samples() -> None:
    assert stats.variation([1.0]) is None
    assert stats.variation([1.0, 1.0]) == 0.0


@given(st.lists(times, min_size=1, max_size=20))
def test_the_geometric_mean_lies_within_and_inverts(ratios: list[float]) -> None:
    mean = stats.geometric_mean(ratios)
    assert min(ratios) * (1 - 1e-9) <= mean <= max(ratios) * (1 + 1e-9)
    assert stats.geometric_mean([1 / r for r in ratios]) == pytest.approx(1 / mean)


def test_more_samples_narrow_the_interval() -> None:
    shares = [(high - low) / n for n in (20, 80, 320) for low, high in [stats.ranks_of(n) or (0, 0)]]
    assert all(later < earlier for earlier, later in pairwise(shares))
