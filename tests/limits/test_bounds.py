from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from scipy.stats import binom

from include.capacity.limits.bounds import (
    ALPHA,
    ALPHA_EARLY,
    Rate,
    batch_size,
    clopper_pearson_lower,
    clopper_pearson_upper,
    mean_half_width,
    rate,
    tally,
)


def rate_of(success: ArrayLike, concurrency: int) -> Rate:
    return rate(tally(success, concurrency))


def rate_of_runs(*runs: ArrayLike, concurrency: int) -> Rate:
    return rate(*(tally(run, concurrency) for run in runs))


def outcomes(n: int, failures: list[int]) -> np.ndarray:
    ok = np.ones(n, dtype=bool)
    ok[failures] = False
    return ok


@pytest.mark.parametrize(("n", "failures"), [(299, 0), (473, 1), (628, 2), (773, 3)])
def test_fewest_requests_that_prove_99_percent(n, failures):
    assert clopper_pearson_lower(n - failures, n) >= 0.99
    assert clopper_pearson_lower(n - 1 - failures, n - 1) < 0.99


@pytest.mark.parametrize(
    ("n", "failures", "bound"), [(597, 1, 0.9920787), (597, 2, 0.9894922), (600, 0, 0.9950195)]
)
def test_lower_bound_values(n, failures, bound):
    assert float(clopper_pearson_lower(n - failures, n)) == pytest.approx(bound, abs=1e-7)


@pytest.mark.parametrize("alpha", [ALPHA, ALPHA_EARLY])
def test_bounds_are_the_binomial_tails_they_promise(alpha):
    assert binom.sf(94, 100, clopper_pearson_lower(95, 100, alpha)) == pytest.approx(alpha)
    assert binom.cdf(95, 100, clopper_pearson_upper(95, 100, alpha)) == pytest.approx(alpha)


def test_bounds_at_the_ends():
    assert clopper_pearson_lower(0, 10) == 0
    assert clopper_pearson_upper(10, 10) == 1
    assert float(clopper_pearson_lower(10, 10)) == pytest.approx(0.05**0.1)
    assert float(clopper_pearson_upper(0, 10)) == pytest.approx(1 - 0.05**0.1)
    assert clopper_pearson_lower(0, 0) == 0
    assert clopper_pearson_upper(0, 0) == 1


@pytest.mark.parametrize(
    ("n", "concurrency", "size"),
    [(600, 1, 5), (600, 8, 8), (600, 64, 60), (640, 64, 64), (30, 64, 5), (10_240, 1024, 1024)],
)
def test_batch_size(n, concurrency, size):
    assert batch_size(n, concurrency) == size


def test_a_burst_of_failures_counts_as_little_as_it_says():
    # 4 batches of 5, means 0 1 1 1: p = 3/4, s_b^2 = 1/4, deff = 5 (1/4) / (3/16) = 20/3, n_e = 3
    found = rate_of(outcomes(20, [0, 1, 2, 3, 4]), 5)
    assert found.n_effective == pytest.approx(3.0)
    assert found.successes == 15
    assert found.lower == pytest.approx(float(clopper_pearson_lower(2.25, 3.0)))
    assert 0.99 < found.upper <= float(clopper_pearson_upper(2.25, 3.0))


def test_failures_spread_evenly_leave_every_request_its_weight():
    found = rate_of(outcomes(600, list(range(0, 600, 60))), 64)
    assert found.n_effective == 600
    assert found.lower == pytest.approx(float(clopper_pearson_lower(590, 600)))
    assert found.upper == pytest.approx(float(clopper_pearson_upper(590, 600)))
    assert found.upper_early == pytest.approx(float(clopper_pearson_upper(590, 600, ALPHA_EARLY)))


def test_without_failures_and_without_successes():
    all_good, none_good = rate_of(np.ones(600), 64), rate_of(np.zeros(600), 64)
    assert (all_good.n_effective, all_good.upper) == (600, 1)
    assert all_good.lower == pytest.approx(0.05 ** (1 / 600))
    assert (none_good.n_effective, none_good.lower) == (600, 0)
    assert none_good.upper == pytest.approx(1 - 0.05 ** (1 / 600))


def test_without_requests_nothing_is_known():
    found = rate_of([], 4)
    assert found.n == 0
    assert np.isnan([found.lower, found.upper, found.value]).all()


def test_one_request_does_not_divide_by_zero():
    assert rate_of([True], 1).lower == pytest.approx(0.05)
    assert rate_of([False], 1).upper == pytest.approx(0.95)


def test_the_bound_is_the_lowest_that_any_part_of_the_failures_gives():
    """Exactly, by trying all 2^9 parts; the raw formula is taken from the method, not from the code."""

    def raw(ok: np.ndarray, upper: bool) -> float:
        n, size = ok.size, 5
        batches = n // size
        p = ok.mean()
        deff = 1.0
        if 0 < p < 1:
            variance = ok[: batches * size].reshape(batches, size).mean(axis=1).var(ddof=1)
            deff = max(1.0, size * variance / (p * (1 - p)))
        bound = clopper_pearson_upper if upper else clopper_pearson_lower
        return float(bound(ok.sum() / deff, n / deff))

    failures = [0, 1, 2, 3, 7, 12, 13, 21, 22]  # 22 lies after the last whole batch
    parts = chain.from_iterable(combinations(failures, k) for k in range(len(failures) + 1))
    tried = [outcomes(23, list(part)) for part in parts]
    found = rate_of(outcomes(23, failures), 5)
    assert found.lower == pytest.approx(min(raw(ok, False) for ok in tried), abs=1e-12)
    assert found.upper == pytest.approx(min(raw(ok, True) for ok in tried), abs=1e-12)


@st.composite
def two_runs(draw):
    """A run and one in which some of its failures completed."""
    n = draw(st.integers(1, 150))
    burst = st.tuples(st.integers(0, n - 1), st.integers(0, 25))
    failures = {
        at
        for start, length in draw(st.lists(burst, max_size=4))
        for at in range(start, min(n, start + length))
    }
    failures |= draw(st.sets(st.integers(0, n - 1), max_size=10))
    fewer = draw(st.sets(st.sampled_from(sorted(failures)))) if failures else set()
    return outcomes(n, sorted(failures)), outcomes(n, sorted(fewer)), draw(st.integers(1, 40))


@given(st.lists(two_runs(), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_more_successes_never_lower_a_bound(runs):
    concurrency = runs[0][2]
    a = rate_of_runs(*(worse for worse, _, _ in runs), concurrency=concurrency)
    b = rate_of_runs(*(better for _, better, _ in runs), concurrency=concurrency)
    assert b.lower >= a.lower - 1e-12
    assert b.upper >= a.upper - 1e-12
    assert b.upper_early >= a.upper_early - 1e-12


@given(two_runs())
@settings(max_examples=100, deadline=None)
def test_bounds_enclose_the_rate(runs):
    ok, _, concurrency = runs
    found = rate_of(ok, concurrency)
    assert found.lower <= found.value <= found.upper <= found.upper_early
    assert 1 <= found.n_effective <= found.n or found.n_effective == pytest.approx(found.n_effective)


def test_repeats_are_taken_together_batch_by_batch():
    a, b = outcomes(600, list(range(0, 600, 100))), outcomes(600, list(range(50, 600, 100)))
    both = rate_of_runs(a, b, concurrency=8)
    assert (both.n, both.successes, both.n_effective) == (1200, 1188, 1200)
    assert both.lower == pytest.approx(float(clopper_pearson_lower(1188, 1200)))
    # 12 failures in one of 150 batches of 8 and a rest: as one run of 1200 whose last batch they are
    burst = outcomes(600, list(range(592, 600)))
    assert rate_of_runs(outcomes(600, []), burst, concurrency=8) == rate_of(
        np.concatenate([outcomes(600, []), burst]), 8
    )


def test_a_run_cut_short_counts_by_its_own_requests():
    both = rate_of_runs(outcomes(600, []), outcomes(90, [1]), concurrency=8)
    assert (both.n, both.successes) == (690, 689)
    assert both.lower == pytest.approx(float(clopper_pearson_lower(689, 690)), abs=1e-4)


def test_interval_of_a_mean():
    # s = 1, n = 3, t(0.975, 2) = 4.302653
    assert mean_half_width(np.array([9.0, 10.0, 11.0])) == pytest.approx(4.302653 / 3**0.5, abs=1e-6)
    assert np.isnan(mean_half_width(np.array([1.0, 2.0])))  # two values tell next to nothing
