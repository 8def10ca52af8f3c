"""Requests that come in stretches are not taken for independent, even where nothing failed."""

import numpy as np
import pandas as pd
import pytest

from include.capacity.limits.bounds import clustering, rate, tally
from include.capacity.limits.evidence import decider, evidence_of
from include.capacity.words import State
from tests.benchmarks.servers import Traffic
from tests.limits_truth.test_steps import by_hand, run, step


def lengths(regime_requests: float, n: int = 3000, seed: int = 1) -> tuple[list[int], list[int]]:
    traffic = Traffic(
        prompt=(500, 0.6, 1, 10**6),
        output=(200, 0.6, 1, 10**6),
        regime_requests=regime_requests,
        regime_sigma=0.35 if regime_requests else 0.0,
    )
    return traffic.draw(np.random.default_rng(seed), n)


def test_blocks_by_hand():
    # 600 requests in 20 batches of 30, the longest fifth in 4 whole batches: all variance is between batches.
    ordered = np.repeat([1.0, 2.0], [480, 120])
    assert clustering(ordered, concurrency=30) == pytest.approx(30 * (20 / 19))
    assert clustering(np.tile([1.0, 1.0, 1.0, 1.0, 2.0], 120), concurrency=30) == 1.0
    assert clustering(np.full(600, 7.0), concurrency=30) == 1.0


def test_unknown_lengths_say_nothing():
    ordered = np.arange(600.0)
    unknown = np.where(ordered == 5, np.nan, ordered)
    assert (
        clustering(concurrency=30)
        == clustering([], concurrency=30)
        == clustering(unknown, concurrency=30)
        == 1.0
    )
    assert clustering(unknown, ordered, concurrency=30) == clustering(ordered, concurrency=30) > 20


def test_independent_lengths_cost_nothing_and_stretches_are_seen():
    independent = [clustering(*lengths(0, seed=seed), concurrency=32) for seed in range(20)]
    stretches = [clustering(*lengths(30, seed=seed), concurrency=32) for seed in range(20)]
    assert np.mean(independent) < 1.15
    assert np.mean(stretches) > 2


def test_it_lowers_the_lower_bound_and_nothing_else():
    ok = np.ones(600, bool)
    ok[[40, 400]] = False
    plain, known = rate(tally(ok, 30)), rate(tally(ok, 30), least_deff=5.0)
    assert known.lower < plain.lower
    assert known.n_effective == 120
    assert (known.upper, known.upper_early) == (plain.upper, plain.upper_early)
    # Without a failure: alpha^(1 / n_e).
    good = tally(np.ones(600), 30)
    assert rate(good, least_deff=5.0).lower == pytest.approx(0.05 ** (1 / 120))
    assert rate(good, least_deff=0.2).lower == rate(good).lower


def test_a_step_without_failures_passes_or_not_by_what_was_asked():
    server = by_hand(slots=20)
    result = run(server, step(server, 20, 600))
    (evidence,) = evidence_of(result.facts, result.rows, server.classes)
    assert evidence.state == State.PASS
    asked = np.array([lengths(30, 600)[0], lengths(30, 600)[1]])
    rows = result.rows.assign(asked_prompt_tokens=asked[0], asked_max_tokens=asked[1])
    (evidence,) = evidence_of(result.facts, rows, server.classes)
    assert evidence.completed == evidence.attempted == 600
    assert evidence.state == State.INCONCLUSIVE
    assert evidence.n_effective_y < 299
    decide = decider(server.classes)
    records = rows.astype(object).where(pd.notna(rows), None).to_dict("records")
    assert decide(server.class_name, records, True) is State.INCONCLUSIVE
    blank = rows.assign(asked_prompt_tokens=np.nan, asked_max_tokens=np.nan)
    (evidence,) = evidence_of(result.facts, blank, server.classes)
    assert evidence.state == State.PASS
