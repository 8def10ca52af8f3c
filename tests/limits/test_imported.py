import numpy as np
import pandas as pd
import pytest

from include.capacity.limits.compute import compute_limits
from include.capacity.limits.imported import imported_evidence
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.words import State
from tests.limits.virtual import batch_class, service_class


def steps(*rows: dict[str, object]) -> pd.DataFrame:
    usual = {"model": "m", "source": "bench.json", "repeat": 1, "workload": "in512", "concurrency": 8}
    return pd.DataFrame([{**usual, **row} for row in rows], columns=list(STEP_COLUMNS))


def judge(service=None, **row: object):
    (found,) = imported_evidence(steps(row), "c", service or service_class(completion_floor=0.95))
    return found


GOOD = {"attempted": 100, "completed": 100, "deadline_s": 60.0, "ttft_p50_s": 0.2, "ttft_p95_s": 0.5}


def test_p95_in_time_never_proves_95_percent_and_p99_does_from_100_requests():
    for n in (100, 1000, 100_000):
        e = judge(**{**GOOD, "attempted": n, "completed": n})
        assert (e.met, e.state) == (round(0.95 * n), State.INCONCLUSIVE)
    assert judge(**GOOD, ttft_p99_s=0.9).state == State.PASS
    assert judge(**{**GOOD, "attempted": 99, "completed": 99}, ttft_p99_s=0.9).met == 99
    assert judge(**{**GOOD, "attempted": 60, "completed": 60}, ttft_p99_s=0.9).state == State.PASS
    assert judge(**{**GOOD, "attempted": 50, "completed": 50}, ttft_p99_s=0.9).state == State.INCONCLUSIVE


def test_a_percentile_beyond_the_objective_proves_the_failure():
    e = judge(**{**GOOD, "ttft_p50_s": 1.1, "ttft_p95_s": 3.0})
    assert (e.met, e.state) == (0, State.FAIL)
    # p95 late: at most 95 of 100 in time, which proves nothing
    assert judge(**{**GOOD, "ttft_p95_s": 1.1}).state == State.INCONCLUSIVE


def test_failed_requests_count_against_both():
    e = judge(**{**GOOD, "completed": 80}, ttft_p99_s=0.9)
    assert (e.completed, e.met, e.state) == (80, 80, State.FAIL)


def test_without_a_deadline_completion_is_bounded_by_the_percentiles_of_e2e():
    batch = batch_class()
    timed = {"attempted": 1000, "completed": 1000, "e2e_p95_s": 30.0, "e2e_p99_s": 90.0}
    e = judge(batch, **timed)
    assert (e.completed, e.state) == (990, State.PASS)
    late = judge(batch, **{**timed, "e2e_p50_s": 130.0, "e2e_p95_s": 200.0, "e2e_p99_s": 300.0})
    assert (late.completed, late.state) == (0, State.FAIL)
    assert judge(batch, attempted=1000, completed=1000).state == State.INCONCLUSIVE


def test_repeats_fail_only_on_the_most_that_can_have_been_in_time():
    known = {**GOOD, "attempted": 600, "completed": 600, "ttft_p95_s": None}  # p50 alone: 300 to 600 in time
    asked = {"c": service_class(completion_floor=0.95)}

    def entry(*rows: dict[str, object]) -> dict[str, object]:
        table = steps(*({**row, "repeat": at} for at, row in enumerate(rows, 1)))
        sweep = {"model": "m", "source": "imported"}
        return compute_limits(sweep, [], table, None, classes=asked)["limits"][0]

    assert entry(known, known)["status"] == "insufficient_evidence"
    assert entry({**known, "ttft_p50_s": 1.2}, {**known, "ttft_p50_s": 1.2})["status"] == "no_passing_step"
    proven = {**known, "ttft_p99_s": 0.9}
    assert entry(proven, proven)["limit"] == 8
    assert entry(proven, {**known, "ttft_p50_s": 1.2})["limit"] is None


def test_what_cannot_be_known():
    assert (
        judge(completed=100, ttft_p99_s=0.5).why
        == "how many requests were attempted and completed is unknown"
    )
    short = judge(**{**GOOD, "deadline_s": 30.0})
    assert (short.usable, short.state) == (False, None)
    assert "a deadline of 30 s" in str(short.why)
    nothing = judge(**{**GOOD, "attempted": 0, "completed": 0})
    assert (nothing.state, nothing.usable) == (None, False)


def imported(table: pd.DataFrame, quality=None, classes=None):
    about = {"model": "m", "source": "bench.json", "classes": {}, "run_id": "r"}
    asked = classes or {"interactive": service_class(completion_floor=0.95)}
    return compute_limits(about, [], table, quality, classes=asked)


FAST = {**GOOD, "ttft_p99_s": 0.9}


def test_limits_of_an_imported_series():
    table = steps(
        {**FAST, "concurrency": 8},
        {**FAST, "concurrency": 16},
        {**FAST, "concurrency": 32, "ttft_p50_s": 5.0, "ttft_p95_s": 9.0, "ttft_p99_s": 9.0},
    )
    (entry,) = imported(table)["limits"]
    assert (entry["limit"], entry["status"], entry["bracket"]) == (16, "proven", [16, 32])
    assert "(n 100, correlation unknown, one-sided 95 %, imported). First failing: 32." in entry["claim"]


def test_each_series_has_its_limits():
    table = steps({**FAST, "series": "a"}, {**FAST, "series": "b", "concurrency": 4})
    assert [(e["series"], e["limit"], e["status"]) for e in imported(table)["limits"]] == [
        ("a", 8, "lower_bound"),
        ("b", 4, "lower_bound"),
    ]


def test_without_attempted_counts_there_is_saturation_only():
    table = steps({"concurrency": 8, "total_tok_per_s": 100.0}, {"concurrency": 16, "total_tok_per_s": 150.0})
    result = imported(table)
    assert [(e["limit"], e["status"]) for e in result["limits"]] == [(None, "insufficient_evidence")]
    assert result["saturation"][0]["concurrency_at_peak"] == 16
    assert compute_limits({"model": "m", "source": "x.csv"}, [], table, None)["limits"] == []


def test_rejected_imported_steps_leave_the_evidence():
    table = steps({**FAST, "concurrency": 8}, {**FAST, "concurrency": 16})
    finding = {"check": "c", "severity": "reject", "reason": "Never in flight."}
    quality = {
        "verdict": "flag",
        "steps": [
            {
                "key": "1",
                "series": None,
                "service_class": None,
                "workload": "in512",
                "phase": None,
                "concurrency": 16,
                "repeat": 1,
                "verdict": "reject",
                "findings": [finding],
            }
        ],
    }
    result = imported(table, quality)
    assert result["limits"][0]["limit"] == 8


class TestSaturation:
    def entry(self, quality=None, **column: object):
        rows = [
            {"concurrency": n, "total_tok_per_s": x, "e2e_p99_s": p99, **column}
            for n, x, p99 in ((100, 900.0, 1.0), (200, 1000.0, 2.0), (400, 990.0, 4.0))
        ]
        (found,) = imported(steps(*rows), quality)["saturation"]
        return found

    def test_peak_range_and_knee(self):
        found = self.entry()
        assert (found["concurrency_at_peak"], found["peak_total_tok_per_s"], found["e2e_p99_at_peak_s"]) == (
            200,
            1000.0,
            2.0,
        )
        assert (found["total_tok_per_s_min"], found["total_tok_per_s_max"]) == (900.0, 1000.0)
        assert found["throughput_knee"] == {"concurrency": 200, "low": 200, "high": 200}
        assert (found["status"], found["peak_at_top"], found["workload"]) == ("measured", False, "in512")

    def test_with_repeats_mean_and_interval(self):
        rows = [
            {"concurrency": 8, "repeat": r, "total_tok_per_s": x, "e2e_p99_s": 1.0}
            for r, x in ((1, 9.0), (2, 10.0), (3, 11.0))
        ]
        (found,) = imported(steps(*rows))["saturation"]
        assert found["peak_total_tok_per_s"] == 10.0
        assert found["peak_total_tok_per_s_low"] == pytest.approx(10 - 4.302653 / 3**0.5, abs=1e-6)
        assert found["repeats"] == 3

    def test_of_a_search_the_proof_describes_a_concurrency(self):
        rows = [
            {"concurrency": 8, "phase": "scout", "total_tok_per_s": 99.0},
            {"concurrency": 8, "phase": "prove", "total_tok_per_s": 90.0},
            {"concurrency": 4, "phase": "scout", "total_tok_per_s": 50.0},
            {"concurrency": 64, "phase": "prime", "total_tok_per_s": 500.0},
        ]
        (found,) = imported(steps(*rows))["saturation"]
        assert (found["concurrency_at_peak"], found["peak_total_tok_per_s"]) == (8, 90.0)

    def test_a_rejected_sweep_is_described_and_marked(self):
        found = self.entry({"verdict": "reject", "steps": []})
        assert (found["status"], found["peak_total_tok_per_s"]) == ("rejected", 1000.0)

    def test_without_throughput(self):
        (found,) = imported(steps({"concurrency": 8, "total_tok_per_s": np.nan}))["saturation"]
        assert (found["status"], found["concurrency_at_peak"]) == ("insufficient_evidence", None)
