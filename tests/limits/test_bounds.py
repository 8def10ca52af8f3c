from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from include.capacity.limits.bounds import (
    ALPHA,
    ALPHA_EARLY,
    batch_size,
    clopper_pearson_lower,
    clopper_pearson_upper,
    mean_half_width,
    pool,
    rate,
)


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
    found = rate(outcomes(20, [0, 1, 2, 3, 4]), 5)
    assert found.n_effective == pytest.approx(3.0)
    assert found.successes == 15
    assert found.lower == pytest.approx(float(clopper_pearson_lower(2.25, 3.0)))
    assert 0.99 < found.upper <= float(clopper_pearson_upper(2.25, 3.0))


def test_failures_spread_evenly_leave_every_request_its_weight():
    found = rate(outcomes(600, list(range(0, 600, 60))), 64)
    assert found.n_effective == 600
    assert found.lower == pytest.approx(float(clopper_pearson_lower(590, 600)))
    assert found.upper == pytest.approx(float(clopper_pearson_upper(590, 600)))
    assert found.upper_early == pytest.approx(float(clopper_pearson_upper(590, 600, ALPHA_EARLY)))


def test_without_failures_and_without_successes():
    all_good, none_good = rate(np.ones(600), 64), rate(np.zeros(600), 64)
    assert (all_good.n_effective, all_good.upper) == (600, 1)
    assert all_good.lower == pytest.approx(0.05 ** (1 / 600))
    assert (none_good.n_effective, none_good.lower) == (600, 0)
    assert none_good.upper == pytest.approx(1 - 0.05 ** (1 / 600))


def test_without_requests_nothing_is_known():
    found = rate([], 4)
    assert found.n == 0
    assert np.isnan([found.lower, found.upper, found.value]).all()


def test_one_request_does_not_divide_by_zero():
    assert rate([True], 1).lower == pytest.approx(0.05)
    assert rate([False], 1).upper == pytest.approx(0.95)


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
    found = rate(outcomes(23, failures), 5)
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


@given(two_runs())
@settings(max_examples=150, deadline=None)
def test_more_successes_never_lower_a_bound(runs):
    worse, better, concurrency = runs
    a, b = rate(worse, concurrency), rate(better, concurrency)
    assert b.lower >= a.lower - 1e-12
    assert b.upper >= a.upper - 1e-12
    assert b.upper_early >= a.upper_early - 1e-12


@given(two_runs())
@settings(max_examples=100, deadline=None)
def test_bounds_enclose_the_rate(runs):
    ok, _, concurrency = runs
    found = rate(ok, concurrency)
    assert found.lower <= found.value <= found.upper <= found.upper_early
    assert 1 <= found.n_effective <= found.n or found.n_effective == pytest.approx(found.n_effective)


def test_repeats_that_agree_add_up():
    together = pool([(600, 594, 600.0), (600, 594, 300.0)])
    assert (together.n, together.successes, together.n_effective) == (1200, 1188, 900.0)
    assert together.lower == pytest.approx(float(clopper_pearson_lower(891, 900)))


def test_repeats_that_disagree_weigh_less():
    # p = 0.5; dispersion = (100 (0.4)^2 + 100 (0.4)^2) / 0.25 / 1 = 128
    together = pool([(100, 90, 100.0), (100, 10, 100.0)])
    assert together.n_effective == pytest.approx(200 / 128)


def test_no_repeats():
    assert pool([(0, 0, 0.0)]).n == 0


def test_interval_of_a_mean():
    # s = 1, n = 3, t(0.975, 2) = 4.302653
    assert mean_half_width(np.array([9.0, 10.0, 11.0])) == pytest.approx(4.302653 / 3**0.5, abs=1e-6)
    assert np.isnan(mean_half_width(np.array([1.0])))
