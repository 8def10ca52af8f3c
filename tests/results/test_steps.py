"""The step table: what enters each number, with right values worked out by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from include.capacity.errors import DataError
from include.capacity.results.schema import STEP_COLUMNS, Facts, LoadFacts, request_table
from include.capacity.results.spec import Load, StepSpec
from include.capacity.results.steps import derive_steps
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import Outcome, Phase

CLASSES = {
    "interactive": {
        "workload": {"name": "chat"},
        "deadline_s": 60.0,
        "ttft": {"at_most_s": 1.0, "share": 0.95},
        "tpot": {"at_most_s": 0.05, "share": 0.95},
    },
    "batch": {"workload": {"name": "classification"}, "deadline_s": 120.0, "ttft": None},
}


def row(number: int = 0, **changes: object) -> dict[str, object]:
    """One counted completed request of 11 tokens: TTFT 0.5 s, then 10 tokens in 0.2 s."""
    return {
        "model": "m",
        "service_class": "interactive",
        "request_id": f"r{number}",
        "started_s": float(number),
        "ttft_s": 0.5,
        "last_token_s": 0.7,
        "e2e_s": 0.8,
        "deadline_s": 60.0,
        "prompt_tokens": 100,
        "output_tokens": 11,
        "first_chunk_tokens": 1,
        "outcome": "completed",
        "counted": True,
        **changes,
    }


def derived(tmp_path, rows, loads=(("interactive", 4),), window_s=10.0, states=None, **facts) -> pd.DataFrame:
    """The step table of one step with these rows."""
    sweep = SweepDir(FolderStore(tmp_path))
    spec = StepSpec(
        model="m",
        phase=Phase.PROVE,
        loads=tuple(Load(service_class=name, concurrency=n, requests=1, max_requests=1) for name, n in loads),
    )
    step = Facts(
        spec=spec.to_json(),
        run_id="run-1",
        started_at="2026-01-02T03:04:05Z",
        loads=[
            LoadFacts(service_class=name, concurrency=n, window_s=window_s, inflight_mean=3.9)
            for name, n in loads
        ],
        **facts,
    )
    sweep.write_json("sweep.json", {"model": "m", "run_id": "run-1", "series": "", "classes": CLASSES})
    sweep.write_step(spec.key, step, request_table(rows))
    return derive_steps(sweep, states)


def test_columns_are_exactly_the_tables_and_the_index_is_the_step_key(tmp_path):
    table = derived(tmp_path, [row()])
    assert tuple(table.columns) == STEP_COLUMNS
    assert list(table.index) == ["prove-interactive-c00004-r1"]


def test_throughput_is_of_completed_requests_and_the_raw_rate_of_all(tmp_path):
    rows = [row(1), row(2), row(3, outcome="deadline_exceeded", output_tokens=8), row(4, counted=False)]
    step = derived(tmp_path, rows).iloc[0]
    assert step["attempted"] == 3
    assert step["completed"] == 2
    assert step["deadline_exceeded"] == 1
    assert step["request_per_s"] == pytest.approx(0.2)
    assert step["output_tok_per_s"] == pytest.approx(2.2)
    assert step["total_tok_per_s"] == pytest.approx(22.2)
    assert step["raw_output_tok_per_s"] == pytest.approx(3.0)


def test_aborted_and_client_errors_are_counted_but_in_no_rate(tmp_path):
    step = derived(tmp_path, [row(1), row(2, outcome="aborted"), row(3, outcome="client_error")]).iloc[0]
    assert (step["attempted"], step["aborted"], step["client_error"]) == (1, 1, 1)


def test_every_outcome_has_its_column(tmp_path):
    rows = [row(at, outcome=str(outcome)) for at, outcome in enumerate(Outcome)]
    step = derived(tmp_path, rows).iloc[0]
    assert {str(outcome): step[str(outcome)] for outcome in Outcome} == {str(o): 1 for o in Outcome}


def test_unknown_outcome_is_refused(tmp_path):
    with pytest.raises(DataError, match="exploded"):
        derived(tmp_path, [row(outcome="exploded")])


def test_latencies_are_over_completed_requests_only(tmp_path):
    rows = [row(at, e2e_s=0.772, ttft_s=0.1) for at in range(66)]
    rows += [row(at, outcome="connection_lost", e2e_s=0.0003, ttft_s=None) for at in range(66, 100)]
    step = derived(tmp_path, rows).iloc[0]
    assert step["e2e_mean_s"] == pytest.approx(0.772)
    assert step["e2e_n"] == 66
    assert step["completed"] / step["attempted"] == pytest.approx(0.66)


def test_percentiles_are_blank_where_n_is_too_small(tmp_path):
    step = derived(tmp_path, [row(at, e2e_s=float(at)) for at in range(19)]).iloc[0]
    assert step["e2e_p50_s"] == 9.0
    assert np.isnan(step["e2e_p95_s"])
    step = derived(tmp_path, [row(at, e2e_s=float(at)) for at in range(99)]).iloc[0]
    assert step["e2e_p95_s"] == pytest.approx(93.1)
    assert np.isnan(step["e2e_p99_s"])
    step = derived(tmp_path, [row(at, e2e_s=float(at)) for at in range(101)]).iloc[0]
    assert step["e2e_p99_s"] == pytest.approx(99.0)


def test_tpot_mean_is_decode_time_over_tokens_beside_the_median(tmp_path):
    long = [row(at, output_tokens=201, ttft_s=1.0, last_token_s=1.0 + 200 * 0.024) for at in range(90)]
    short = [row(at, output_tokens=2, ttft_s=1.0, last_token_s=5.7) for at in range(90, 100)]
    step = derived(tmp_path, long + short).iloc[0]
    assert step["tpot_p50_s"] == pytest.approx(0.024)
    assert step["tpot_mean_s"] == pytest.approx((90 * 4.8 + 10 * 4.7) / (90 * 200 + 10))
    assert step["tpot_n"] == 100


def test_tpot_leaves_out_the_tokens_of_the_first_chunk(tmp_path):
    step = derived(tmp_path, [row(first_chunk_tokens=6)]).iloc[0]
    assert step["tpot_p50_s"] == pytest.approx(0.2 / 5)


def test_tpot_is_undefined_below_two_tokens(tmp_path):
    step = derived(tmp_path, [row(output_tokens=1, last_token_s=0.5)]).iloc[0]
    assert np.isnan(step["tpot_p50_s"])
    assert np.isnan(step["tpot_mean_s"])
    assert step["tpot_n"] == 0
    assert step["objective_met"] == 1


def test_objective_needs_completion_and_first_token_and_pace_in_time(tmp_path):
    rows = [
        row(1),
        row(2, ttft_s=1.0, last_token_s=1.2),
        row(3, ttft_s=1.001, last_token_s=1.2),
        row(4, outcome="truncated"),
        row(5, ttft_s=None),
        row(6, last_token_s=0.5 + 10 * 0.051),
    ]
    assert derived(tmp_path, rows).iloc[0]["objective_met"] == 2


def test_unknown_prompt_tokens_leave_the_total_blank_and_the_output_known(tmp_path):
    step = derived(tmp_path, [row(1), row(2, prompt_tokens=None)]).iloc[0]
    assert np.isnan(step["total_tok_per_s"])
    assert step["output_tok_per_s"] == pytest.approx(2.2)


def test_no_window_no_rate(tmp_path):
    step = derived(tmp_path, [row(1)], window_s=None).iloc[0]
    assert np.isnan(step["request_per_s"])
    assert np.isnan(step["raw_output_tok_per_s"])


def test_all_failed_is_no_data_and_never_latency_zero(tmp_path):
    step = derived(tmp_path, [row(at, outcome="connect_failed", ttft_s=None) for at in range(30)]).iloc[0]
    assert step["completed"] == 0
    assert step["output_tok_per_s"] == 0.0
    assert np.isnan(step["e2e_p50_s"])
    assert np.isnan(step["tokens_per_answer_mean"])


def test_a_step_that_died_before_its_first_request_keeps_its_row(tmp_path):
    step = derived(tmp_path, [], error="server died", window_s=None).iloc[0]
    assert step["attempted"] == 0
    assert step["error"] == "server died"
    assert step["deadline_s"] == 60.0


def test_a_shared_step_has_a_row_per_class(tmp_path):
    rows = [row(1), row(2, service_class="batch", ttft_s=None, last_token_s=None, deadline_s=120.0)]
    states = {("prove-interactive-c00004+batch-c00008-r1", "batch"): ("pass", 1.0)}
    table = derived(tmp_path, rows, loads=(("interactive", 4), ("batch", 8)), states=states)
    assert list(table["service_class"]) == ["interactive", "batch"]
    assert list(table["concurrency"]) == [4, 8]
    assert list(table["completed"]) == [1, 1]
    assert list(table["deadline_s"]) == [60.0, 120.0]
    assert list(table["ttft_n"]) == [1, 0]
    assert table["state"].iloc[1] == "pass"
    assert table["n_effective"].iloc[1] == 1.0


def test_client_and_server_columns_come_from_the_facts(tmp_path):
    client, server = {"client_cpu_share": 0.4, "clock_scale": 1.0}, {"server_kv_use_peak": 0.7}
    step = derived(tmp_path, [row()], client=client, server=server, invalid="client-bound").iloc[0]
    assert step["client_cpu_share"] == 0.4
    assert step["server_kv_use_peak"] == 0.7
    assert pd.isna(step["server_waiting_peak"])
    assert step["invalid"] == "client-bound"
