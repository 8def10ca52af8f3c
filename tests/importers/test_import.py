"""Result files of other tools: units, ages, traps, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from include.capacity.errors import DataError
from include.capacity.importers import import_files
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from tests.importers.made import (
    AIPERF,
    AIPERF_CSV,
    GUIDELLM_NEW,
    GUIDELLM_OLD,
    INFERENCEMAX,
    TIDY,
    VLLM,
)


def imported(tmp_path: Path, content: Any, name: str = "result.json") -> pd.DataFrame:
    """The step table of one file, read back from the sweep directory."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    out = SweepDir(FolderStore(tmp_path / "out"))
    import_files([file], out)
    return out.steps()


def one(tmp_path: Path, content: Any, name: str = "result.json") -> pd.Series:
    steps = imported(tmp_path, content, name)
    assert len(steps) == 1
    return steps.iloc[0]


def test_vllm_latencies_are_milliseconds_and_all_step_columns_are_there(tmp_path):
    step = one(tmp_path, VLLM)
    assert set(STEP_COLUMNS) <= set(step.index)
    assert (step["source"], step["model"], step["concurrency"]) == ("result.json", "acme/tiny", 32)
    assert (step["ttft_mean_s"], step["ttft_p50_s"], step["tpot_p99_s"]) == pytest.approx((0.02, 0.018, 0.03))
    assert (step["window_s"], step["request_per_s"], step["tokens_per_answer_mean"]) == (20.0, 16.0, 100.0)
    assert pd.isna(step["e2e_mean_s"])
    assert step["e2e_estimate_s"] == pytest.approx(2.0)
    assert pd.isna(step["inflight_peak"])
    assert step["started_at"] == "2026-01-02T03:04:05"


def test_vllm_failures_of_older_files_are_prompts_without_a_completion(tmp_path):
    old = {key: value for key, value in VLLM.items() if key != "failed"}
    step = one(tmp_path, {**old, "num_prompts": 500, "completed": 1})
    assert (step["attempted"], step["completed"]) == (500, 1)


def test_vllm_stray_colons_infinities_and_nan_are_read(tmp_path):
    text = json.dumps(
        {**VLLM, "request_goodput:": None, "p99_tpot_ms": float("nan"), "request_rate": float("inf")}
    )
    assert "Infinity" in text
    step = one(tmp_path, text)
    assert pd.isna(step["tpot_p99_s"])
    assert step["completed"] == 320


def test_vllm_run_in_which_everything_failed_has_no_latency(tmp_path):
    zeros = {key: 0.0 for key in VLLM if key.endswith(("_ms", "throughput"))}
    step = one(
        tmp_path, {**VLLM, **zeros, "completed": 0, "failed": 8, "num_prompts": 8, "total_output_tokens": 0}
    )
    assert (step["attempted"], step["completed"], step["request_per_s"]) == (8, 0, 0.0)
    assert step[["ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "output_tok_per_s"]].isna().all()


def test_vllm_lines_appended_to_a_file_are_steps_and_repeats_are_numbered(tmp_path):
    lines = [VLLM, VLLM, {**VLLM, "max_concurrency": 64}]
    steps = imported(tmp_path, "\n".join(json.dumps(line) for line in lines))
    assert list(steps["concurrency"]) == [32, 32, 64]
    assert list(steps["repeat"]) == [1, 2, 1]


def test_vllm_open_loop_has_a_rate_and_no_concurrency(tmp_path):
    step = one(tmp_path, {**VLLM, "max_concurrency": None, "request_rate": 4.0})
    assert pd.isna(step["concurrency"])
    assert step["request_rate"] == 4.0
    assert step["workload"] == "in500 out100 4 requests/s"


def test_vllm_sweep_folder_keeps_parameters_marks_the_cold_run_and_skips_the_summary(tmp_path):
    folder = tmp_path / "results" / "SERVE--max_num_seqs=4"
    folder.mkdir(parents=True)
    runs = [{**VLLM, "run_number": number, "max_num_seqs": 4} for number in (0, 1)]
    for run in runs:
        (folder / f"run={run['run_number']}.json").write_text(json.dumps(run))
    (folder / "summary.json").write_text(json.dumps(runs))
    steps = import_files([tmp_path / "results"], SweepDir(FolderStore(tmp_path / "out")))
    assert list(steps["source"]) == [f"SERVE--max_num_seqs=4/run={n}.json" for n in (0, 1)]
    assert list(steps["series"]) == ["max_num_seqs=4"] * 2
    assert list(steps["cold"].notna()) == [True, False]


def test_guidellm_latency_is_seconds_and_the_rest_milliseconds(tmp_path):
    step = one(tmp_path, GUIDELLM_OLD)
    assert (step["model"], step["concurrency"]) == ("acme/tiny", 8)
    assert (step["e2e_mean_s"], step["e2e_p99_s"]) == (0.79, 1.0)
    assert (step["ttft_mean_s"], step["tpot_p95_s"]) == pytest.approx((0.03, 0.013))
    assert (step["attempted"], step["completed"], step["aborted"]) == (304, 300, 8)
    assert (step["inflight_mean"], step["request_per_s"], step["window_s"]) == (7.9, 10.0, 30.0)


def test_guidellm_new_layout_and_a_rate(tmp_path):
    step = one(tmp_path, GUIDELLM_NEW)
    assert (step["model"], step["request_rate"]) == ("acme/tiny", 10.0)
    assert pd.isna(step["concurrency"])
    assert (step["completed"], step["e2e_mean_s"], step["inflight_mean"]) == (300, 0.79, 7.9)


def test_aiperf_units_are_those_the_file_states(tmp_path):
    step = one(tmp_path, AIPERF)
    assert (step["model"], step["concurrency"]) == ("acme/tiny", 16)
    assert (step["e2e_mean_s"], step["ttft_p99_s"], step["tpot_mean_s"]) == pytest.approx((7.9, 0.7, 0.012))
    assert (step["attempted"], step["completed"], step["window_s"]) == (100, 96, 48.0)


def test_aiperf_unknown_unit_is_refused(tmp_path):
    with pytest.raises(DataError, match="fortnights"):
        imported(tmp_path, {**AIPERF, "benchmark_duration": {"unit": "fortnights", "avg": 1.0}})


def test_aiperf_csv_agrees_with_its_json_where_both_speak(tmp_path):
    step = one(tmp_path, AIPERF_CSV, "run_c16_profile.csv")
    assert step["concurrency"] == 16
    assert (step["ttft_p50_s"], step["tpot_mean_s"], step["e2e_p99_s"]) == pytest.approx((0.18, 0.012, 9.9))
    assert (step["request_per_s"], step["window_s"], step["completed"]) == (2.0, 48.0, 96)


def test_inferencemax_is_in_seconds_and_per_accelerator(tmp_path):
    step = one(tmp_path, [INFERENCEMAX])
    assert (step["concurrency"], step["total_tok_per_s"], step["output_tok_per_s"]) == (32, 3200.0, 1600.0)
    assert (step["e2e_mean_s"], step["ttft_p50_s"]) == (20.5, 0.09)
    assert step["hardware"] == "4x h100"


def test_inferencemax_empty_run_holds_no_result(tmp_path):
    with pytest.raises(DataError, match=r"result\.json: read as InferenceMAX, holds no result"):
        imported(tmp_path, [])


def test_tidy_csv_by_the_units_in_its_column_names(tmp_path):
    steps = imported(tmp_path, TIDY, "tidy.csv")
    assert list(steps["concurrency"].fillna(0)) == [8, 16, 0]
    assert list(steps["e2e_mean_s"]) == pytest.approx([1.0, 1.05, 0.9])
    assert list(steps["ttft_p50_s"]) == pytest.approx([0.03, 0.04, 0.03])
    assert list(steps["attempted"]) == [80, 160, 100]
    assert (steps["deadline_s"][1], steps["runs_kept"][1], steps["runs_made"][1]) == (30.0, 1, 3)
    assert (steps["request_rate"][2], steps["workload"][2]) == (4.0, "4 requests/s")


def test_tidy_csv_of_means_over_repeats(tmp_path):
    text = (
        "model,concurrency,total_tok_per_s_mean,total_tok_per_s_ci95,output_tok_per_s,e2e_p99_s,e2e_p50_s\n"
    )
    step = one(tmp_path, text + "m,500,37413,82,745,6.4915,0.3935\n", "steps.csv")
    assert (step["total_tok_per_s"], step["tokens_per_s_ci95"]) == (37413, 82)
    assert (step["e2e_p99_s"], step["e2e_p50_s"]) == (6.4915, 0.3935)


def test_models_under_one_series_name_are_told_apart_and_files_of_one_level_are_repeats(tmp_path):
    text = "model,concurrency,total_tok_per_s,e2e_p99_s\nm,4,10,1\nn,4,20,2\n"
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(text)
    steps = import_files([tmp_path / "a.csv", tmp_path / "b.csv"], SweepDir(FolderStore(tmp_path / "out")))
    assert list(steps["series"]) == ["m", "n", "m", "n"]
    assert list(steps["repeat"]) == [1, 1, 2, 2]


def test_sweep_json_says_what_was_read_and_claims_nothing_else(tmp_path):
    imported(tmp_path, VLLM)
    about = SweepDir(FolderStore(tmp_path / "out")).read_json("sweep.json")
    assert (about["source"], about["model"], about["classes"]) == ("imported", "acme/tiny", {})
    assert about["files"] == {"result.json": "vllm bench serve / sweep"}
    assert about["imported_from"] == [str(tmp_path / "result.json")]


@pytest.mark.parametrize(
    "content",
    ["", "hello\n", "{", '{"a": 1}', "[1, 2]", "a,b\n1,2\n", "model,concurrency\nm,4\n", "\x00\x01"],
    ids=["empty", "text", "broken", "object", "numbers", "csv", "nothing measured", "binary"],
)
def test_unknown_files_are_refused_by_name_with_what_was_expected(tmp_path, content):
    with pytest.raises(DataError, match=r"odd\.txt: not a result file.*guidellm.*tidy CSV"):
        imported(tmp_path, content, "odd.txt")


def test_not_text_and_not_there(tmp_path):
    file = tmp_path / "binary.json"
    file.write_bytes(b"\xff\xfe\x00")
    out = SweepDir(FolderStore(tmp_path / "out"))
    with pytest.raises(DataError, match=r"binary\.json: not UTF-8"):
        import_files([file], out)
    with pytest.raises(DataError, match="no such file"):
        import_files([tmp_path / "absent.json"], out)
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="no file that ends in"):
        import_files([tmp_path / "bare"], out)
