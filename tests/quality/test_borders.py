"""Each check of the step and series tables: an input at the border that passes, one beyond that does not."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from include.capacity.quality import check_tables

STEP: dict[str, Any] = {
    "run_id": "run-1",
    "source": "measured",
    "model": "m",
    "service_class": "interactive",
    "workload": "chat",
    "phase": "prove",
    "concurrency": 100,
    "repeat": 1,
    "started_at": "2026-01-02T01:01:00+00:00",
    "warmup_s": 10.0,
    "warmup_steady": True,
    "stop_reason": "enough_requests",
    "attempted": 1000,
    "completed": 1000,
    "deadline_s": 60.0,
    **dict.fromkeys(
        (
            "rejected",
            "server_error",
            "client_error",
            "connect_failed",
            "connection_lost",
            "first_token_timeout",
            "deadline_exceeded",
            "truncated",
            "stream_error",
            "malformed",
            "empty",
            "aborted",
        ),
        0,
    ),
    "window_s": 100.0,
    "inflight_mean": 100.0,
    "request_per_s": 10.0,
    "output_tok_per_s": 2000.0,
    "total_tok_per_s": 7000.0,
    "raw_output_tok_per_s": 2000.0,
    "tokens_per_answer_mean": 200.0,
    "prompt_tokens_mean": 500.0,
    "ttft_p50_s": 0.2,
    "ttft_p95_s": 0.4,
    "ttft_p99_s": 0.5,
    "ttft_mean_s": 0.25,
    "e2e_p50_s": 9.0,
    "e2e_p95_s": 15.0,
    "e2e_p99_s": 20.0,
    "e2e_mean_s": 10.0,
    "objective_met": 1000,
    "client_lag_p99_s": 0.001,
    "client_cpu_share": 0.2,
    "pause_share": 0.0,
    "server_running_mean": 60.0,
    "server_waiting_mean": 40.0,
    "server_kv_use_peak": 0.5,
    "server_prefix_hit_share": 0.0,
}

SWEEP = {
    "run_id": "run-1",
    "model": "m",
    "created_at": "2026-01-02T01:00:00+00:00",
    "bounds": {"min_window_s": 30.0},
    "classes": {"interactive": {"workload": {"name": "chat"}}},
}


def of_phase(concurrency: int, phase: str, **changes: Any) -> dict[str, Any]:
    """A step whose own numbers fit its concurrency."""
    number = {"inflight_mean": concurrency, "server_running_mean": concurrency, "server_waiting_mean": 0.0}
    return {**STEP, "concurrency": concurrency, "phase": phase, **number, **changes}


def ladder(*ttft_s: float) -> list[dict[str, Any]]:
    """Scouts at 8, 16, 32 ... with these mean times to first token."""
    blank = dict.fromkeys(("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "e2e_p50_s"))
    return [of_phase(8 << at, "scout", **blank, ttft_mean_s=s) for at, s in enumerate(ttft_s)]


def repeated(*request_per_s: float) -> list[dict[str, Any]]:
    """Repeats of one step with these rates."""
    return [of_phase(8, "grid", repeat=at + 1, request_per_s=rate) for at, rate in enumerate(request_per_s)]


def anchored(anchor_s: float) -> list[dict[str, Any]]:
    """A scout with a mean latency of 10 s, and its anchor."""
    return [of_phase(4, "scout", e2e_mean_s=10.0), of_phase(4, "anchor", e2e_mean_s=anchor_s)]


IDLE = {"server_running_mean": 20.0, "server_waiting_mean": 0.0}
FAILING = {"completed": 100, "objective_met": 100, "output_tok_per_s": 200.0, "raw_output_tok_per_s": 900.0}

SCENES: dict[str, list[dict[str, Any]]] = {
    "primed": [STEP, of_phase(8, "prime", inflight_mean=1.0, attempted=1, completed=0)],
    "baseline": [of_phase(1, "baseline", attempted=2, completed=2, objective_met=2, window_s=3.0)],
    "refuses": [{**STEP, **FAILING, "rejected": 900, "inflight_mean": 20.0, "pause_share": 0.79, **IDLE}],
    "times out": [{**STEP, **FAILING, "first_token_timeout": 900, "e2e_p99_s": 50.0}],
    "crashes": [
        {
            **STEP,
            "stop_reason": "server_gone",
            "error": "the server died",
            "attempted": 40,
            "completed": 10,
            "objective_met": 10,
            "connect_failed": 10,
            "connection_lost": 20,
            "inflight_mean": 30.0,
            "window_s": 4.0,
            **IDLE,
        }
    ],
    "falls": ladder(9.1, 4.0, 2.2),
    "falls by a fifth": ladder(2.0, 1.61, 4.0),
    "repeats": repeated(9.0, 10.0, 11.0),
    "unlike repeats": repeated(8.9, 10.0, 11.0),
    "repeat missing": [row for row in repeated(9.0, 10.0, 11.0) if row["repeat"] != 2],
    **{f"anchor {s}": anchored(s) for s in (11.0, 11.1, 12.0, 12.1, 7.9)},
    "copied": [of_phase(4, "grid", e2e_mean_s=3.25), of_phase(8, "grid", e2e_mean_s=3.25)],
    "alike": [of_phase(4, "grid", e2e_mean_s=3.26), of_phase(8, "grid", e2e_mean_s=3.27)],
    "same label": [of_phase(4, "grid"), of_phase(4, "grid")],
}

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # check, severity, at the border (passes), beyond it (does not)
    ("step_level", "reject", {"concurrency": 1, "inflight_mean": 1}, {"concurrency": 0}),
    ("step_level", "reject", {}, {"concurrency": None}),
    ("step_ranges", "reject", {"request_per_s": 0.0}, {"request_per_s": -0.1}),
    ("step_ranges", "reject", {"server_kv_use_peak": 1.0}, {"server_kv_use_peak": 1.2}),
    ("zero_is_no_data", "reject", {"ttft_p50_s": 0.001}, {"ttft_p50_s": 0.0}),
    ("zero_is_no_data", "reject", {"e2e_mean_s": 0.001, "ttft_mean_s": None}, {"e2e_mean_s": 0.0}),
    ("percentiles_ordered", "reject", {"e2e_p95_s": 20.0}, {"e2e_p95_s": 20.1}),
    ("percentiles_ordered", "reject", {"ttft_p95_s": None}, {"ttft_p95_s": None, "ttft_p50_s": 0.51}),
    ("ttft_within_e2e", "reject", {"e2e_p50_s": 0.2}, {"e2e_p50_s": 0.19}),
    (
        "counts_add_up",
        "reject",
        {"completed": 999, "empty": 1, "objective_met": 999},
        {"completed": 999, "objective_met": 999},
    ),
    ("counts_add_up", "reject", {"objective_met": 1000}, {"objective_met": 1001}),
    ("counts_add_up", "reject", {"total_tok_per_s": 2000.0}, {"total_tok_per_s": 1999.0}),
    (
        "enough_requests",
        "reject",
        {"attempted": 300, "completed": 300, "objective_met": 300},
        {"attempted": 299, "completed": 299, "objective_met": 299},
    ),
    ("window_length", "flag", {"window_s": 28.5}, {"window_s": 28.4}),
    ("concurrency_reached", "flag", {"inflight_mean": 95.0}, {"inflight_mean": 94.9}),
    ("concurrency_reached", "reject", {"inflight_mean": 90.0}, {"inflight_mean": 89.9}),
    (
        "concurrency_reached",
        "flag",
        {"inflight_mean": 55.0, "pause_share": 0.41},
        {"inflight_mean": 55.0, "pause_share": 0.39},
    ),
    ("concurrency_exceeded", "reject", {"inflight_mean": 102.0}, {"inflight_mean": 102.1}),
    ("client_bound", "reject", {"invalid": None}, {"invalid": "The client was the bottleneck."}),
    ("simulator_kept_up", "reject", {"invalid": None}, {"invalid": "simulator-bound: it fell behind"}),
    ("client_lag", "flag", {"client_lag_p99_s": 0.25}, {"client_lag_p99_s": 0.26}),
    ("client_lag", "flag", {"client_cpu_share": 0.9}, {"client_cpu_share": 0.91}),
    ("warm_up", "flag", {"warmup_steady": None}, {"warmup_steady": False}),
    (
        "empty_completions",
        "flag",
        {"completed": 990, "empty": 10, "objective_met": 990},
        {"completed": 989, "empty": 11, "objective_met": 989},
    ),
    ("client_errors", "reject", {"client_error": 0}, {"client_error": 1}),
    ("aborted_requests", "flag", {"aborted": 10}, {"aborted": 11}),
    ("prefix_cache", "flag", {"server_prefix_hit_share": 0.1}, {"server_prefix_hit_share": 0.11}),
    ("foreign_traffic", "flag", {"server_waiting_mean": 45.0}, {"server_waiting_mean": 45.1}),
    ("foreign_traffic", "reject", {"server_waiting_mean": 60.0}, {"server_waiting_mean": 60.1}),
    ("p99_at_deadline", "flag", {"e2e_p99_s": 57.0}, {"e2e_p99_s": 57.1}),
    ("stale_result", "reject", {"run_id": "run-1"}, {"run_id": "run-0"}),
    (
        "stale_result",
        "flag",
        {"started_at": "2026-01-02T00:59:00+00:00"},
        {"started_at": "2026-01-02T00:58:59+00:00"},
    ),
]


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    """Every case's two steps and every scene, each in a series of its own, judged in one go."""
    rows: list[dict[str, Any]] = []
    for at, (_, _, border, beyond) in enumerate(CASES):
        rows.append({**STEP, "series": f"{at} border", **border})
        rows.append({**STEP, "series": f"{at} beyond", **beyond})
    for scene, steps in SCENES.items():
        rows += [{**step, "series": scene} for step in steps]
    for at, row in enumerate(rows):
        if row["series"] != "copied":  # elsewhere no two steps have the very same numbers
            row["output_tok_per_s"] -= at / 1e4
    return check_tables(pd.DataFrame(rows), None, SWEEP)


def steps_of(judged: dict[str, Any], series: str) -> list[dict[str, Any]]:
    return [step for step in judged["steps"] if step["series"] == series]


def found_in(judged: dict[str, Any], series: str) -> list[set[tuple[str, str]]]:
    """(check, severity) of each step's findings."""
    return [{(f["check"], f["severity"]) for f in step["findings"]} for step in steps_of(judged, series)]


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)])
def test_the_border_passes_and_what_is_beyond_does_not(at, judged):
    assert CASES[at][:2] not in found_in(judged, f"{at} border")[0]
    assert CASES[at][:2] in found_in(judged, f"{at} beyond")[0]


def test_every_reason_is_a_full_sentence(judged):
    for step in judged["steps"]:
        for finding in step["findings"]:
            assert finding["reason"].endswith(".")
            assert "{" not in finding["reason"]


def test_the_prime_step_is_never_judged(judged):
    assert [step["phase"] for step in steps_of(judged, "primed")] == ["prove"]


@pytest.mark.parametrize("scene", ["primed", "baseline", "refuses", "times out", "crashes", "alike"])
def test_nothing_is_found_where_nothing_is_wrong_with_the_measurement(scene, judged):
    """The baseline needs no size; a server that refuses, times out or crashes is its own fault."""
    assert found_in(judged, scene) == [set()] * len(steps_of(judged, scene))


@pytest.mark.parametrize(
    ("anchor_s", "severity"),
    [(11.0, None), (11.1, "flag"), (12.0, "flag"), (12.1, "reject"), (7.9, "reject")],
)
def test_the_anchor_flags_at_10_and_rejects_the_sweep_at_20_percent(anchor_s, severity, judged):
    found = [f["severity"] for f in judged["findings"] if f["series"] == f"anchor {anchor_s}"]
    assert ("reject" in found, "flag" in found) == (severity == "reject", severity is not None)
    assert judged["verdict"] == "reject"


def test_latency_that_falls_as_concurrency_rises(judged):
    falls = {("latency_falls", "flag")}
    assert found_in(judged, "falls") == [falls, falls, set()]
    assert found_in(judged, "falls by a fifth") == [set(), set(), set()]


def test_repeats_that_disagree(judged):
    assert found_in(judged, "repeats") == [set()] * 3
    assert found_in(judged, "unlike repeats") == [{("repeats_agree", "flag")}] * 3


def test_a_missing_repeat_is_flagged_and_none_missing_is_not(judged):
    found = {f["series"] for f in judged["findings"] if f["check"] == "repeats_missing"}
    assert found == {"repeat missing"}


def test_two_steps_with_the_very_same_numbers_are_one_copied(judged):
    assert found_in(judged, "copied") == [{("duplicate_step", "reject")}] * 2
    assert "grid interactive c=8" in steps_of(judged, "copied")[0]["findings"][0]["reason"]


def test_two_steps_with_the_same_label_are_rejected(judged):
    assert found_in(judged, "same label") == [{("duplicate_step", "reject")}] * 2


def test_what_has_no_columns_is_not_checked():
    steps = pd.DataFrame([{"model": "m", "source": "a.csv", "concurrency": 4, "request_per_s": 2.0}])
    result = check_tables(steps, None, {"model": "m", "source": "imported"})
    not_checked = {entry["check"] for entry in result["not_checked"]}
    assert result["verdict"] == "ok"
    assert {"foreign_traffic", "percentiles_ordered", "steady_state", "anchor_agrees"} <= not_checked
    assert not {"step_level", "step_ranges"} & not_checked
