"""Sweeps that other people published, judged as what is known about them says.

The files are no part of this project: the checks run where the folder is (``CAPACITY_PUBLISHED_SWEEPS``, or
``shared/data`` beside the project). ``pytest -s`` prints the confusion table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from include.capacity.importers import import_files
from include.capacity.quality import check_sweep
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir

DATA = Path(os.environ.get("CAPACITY_PUBLISHED_SWEEPS") or Path(__file__).parents[3] / "shared" / "data")

pytestmark = pytest.mark.skipif(not (DATA / "sweeps").is_dir(), reason="the published sweeps are not here")

Row = dict[str, Any]
REJECT, FLAG, USABLE, CLEAN = "reject", "flag", "usable", "clean"
"""Expected: rejected; flagged or rejected; not rejected; nothing found."""

KNOWN: list[tuple[str, Callable[[Row], bool], str, str | None]] = [
    # file, which rows, expected, the check meant for it
    ("saturation_steps.csv", lambda r: True, REJECT, "concurrency_reached"),
    ("saturation_steps.csv", lambda r: r["model"] == "DeepSeek-V3.2", FLAG, "bimodal_latency"),
    ("sweeps/S01*", lambda r: r["concurrency"] >= 128, REJECT, "enough_requests"),
    ("sweeps/S01*", lambda r: "8B" in r["series"] and "in512_out85" in r["series"] and r["concurrency"] >= 32,
     FLAG, "arrival_capped"),
    ("sweeps/S01*", lambda r: "8xH100" in r["series"] and "70B" in r["series"] and r["concurrency"] <= 32,
     USABLE, None),
    ("sweeps/S02*", lambda r: r["request_rate"] == 1 and r["series"].endswith("long"),
     FLAG, "saturated_at_once"),
    ("sweeps/S02*", lambda r: r["series"].endswith("short"), CLEAN, None),
    ("sweeps/S03*", lambda r: True, USABLE, None),
    ("sweeps/S04*", lambda r: r["in_flight"] > 380, FLAG, "client_capped"),
    ("sweeps/S04*", lambda r: r["in_flight"] < 200, CLEAN, None),
    ("sweeps/S05*", lambda r: r["completed"] == 380, REJECT, "output_length"),
    ("sweeps/S05*", lambda r: r["completed"] == 500, USABLE, None),
    ("sweeps/S06*", lambda r: r["ttft_mean_s"] == 0, REJECT, "zero_is_no_data"),
    ("sweeps/S07*", lambda r: r["completed"] == 1015, REJECT, "client_bound"),
    ("sweeps/S07*", lambda r: r["completed"] != 1015, USABLE, None),
    ("sweeps/S09*", lambda r: r["attempted"] == r["concurrency"], REJECT, "enough_requests"),
    ("sweeps/S11*", lambda r: r["series"].startswith("migration"), REJECT, "rate_without_effect"),
    ("sweeps/S12*", lambda r: r["completed"] > 100, REJECT, "counts_add_up"),
    ("sweeps/S12*", lambda r: r["concurrency"] == 128, REJECT, "enough_requests"),
    ("sweeps/S14*", lambda r: True, CLEAN, None),
    ("sweeps/S15*", lambda r: True, USABLE, None),
    ("sweeps/S16*", lambda r: r["attempted"] == r["concurrency"], REJECT, "enough_requests"),
    ("sweeps/S17*", lambda r: r["series"] == "4A10.md|SGLang Stress|max256" and r["concurrency"] == 30,
     FLAG, "repeats_agree"),
    ("sweeps/S18*", lambda r: r["concurrency"] >= 64, REJECT, "concurrency_reached"),
    ("sweeps/S18*", lambda r: r["concurrency"] in (32, 64, 128), REJECT, "client_bound"),
    ("sweeps/S18*", lambda r: r["e2e_p99_s"] > 29, FLAG, "p99_at_deadline"),
    ("sweeps/S18*", lambda r: r["concurrency"] <= 16, USABLE, None),
    ("sweeps/V01*", lambda r: r["concurrency"] >= 50, REJECT, "enough_requests"),
    ("sweeps/V02*", lambda r: True, REJECT, "concurrency_reached"),
    ("sweeps/V04*", lambda r: r["concurrency"] >= 64, REJECT, "enough_requests"),
    ("sweeps/P01*", lambda r: True, FLAG, "output_length"),
    ("sweeps/P01*", lambda r: r["concurrency"] == 48, FLAG, "bimodal_latency"),
    ("sweeps/P03*", lambda r: True, USABLE, None),
    ("sweeps/P05*", lambda r: True, REJECT, "enough_requests"),
    ("sweeps/P07*", lambda r: True, USABLE, None),
    ("sweeps/P11*", lambda r: r["runs_kept"] < r["runs_made"], REJECT, "survivors_only"),
    ("sweeps/P12*", lambda r: True, REJECT, "no_data"),
    ("peer_files/vllm_bench_serve/*all_requests_failed*", lambda r: True, REJECT, "no_data"),
    ("peer_files/vllm_bench_serve/*append*", lambda r: r["completed"] == 1015, REJECT, "client_bound"),
    ("peer_files/vllm_bench_serve/*one_failed*", lambda r: True, USABLE, None),
    ("peer_files/inferencemax/*", lambda r: True, CLEAN, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[Path, list[tuple[Row, dict[str, Any]]]]:
    """Every file's step rows with their judgement, each file imported alone."""
    found = {}
    for file in sorted({path for pattern, *_ in KNOWN for path in DATA.glob(pattern)}):
        out = SweepDir(FolderStore(tmp_path_factory.mktemp("imported")))
        import_files([file], out)
        steps = out.steps()
        latency_s = steps["e2e_mean_s"].fillna(steps["e2e_estimate_s"])
        steps["series"] = steps["series"].astype(object).where(steps["series"].notna(), "")
        steps["in_flight"] = steps["request_per_s"] * latency_s
        found[file] = list(zip(steps.to_dict("records"), check_sweep(out)["steps"], strict=True))
    return found


def right(step: dict[str, Any], expected: str, check: str | None) -> bool:
    """Whether a step's judgement is the expected one, for the stated reason."""
    if expected in (CLEAN, USABLE):
        return step["verdict"] == "ok" if expected == CLEAN else step["verdict"] != "reject"
    severities = {f["severity"] for f in step["findings"] if f["check"] == check}
    return "reject" in severities if expected == REJECT else bool(severities)


def test_published_sweeps_are_judged_as_what_is_known_about_them_says(judged):
    table, wrong = [], []
    for pattern, selects, expected, check in KNOWN:
        rows = [(file, r, s) for file, pairs in judged.items() if file.match(str(DATA / pattern))
                for r, s in pairs if selects(r)]  # fmt: skip
        assert rows, f"{pattern}: no such row"
        bad = [(file.name, r["series"], r["concurrency"], s["verdict"]) for file, r, s in rows
               if not right(s, expected, check)]  # fmt: skip
        accused = expected in (REJECT, FLAG)
        table.append(
            {
                "file": pattern, "expected": expected, "check": check or "", "rows": len(rows),
                "right": len(rows) - len(bad), "missed": len(bad) * accused,
                "false_alarms": len(bad) * (not accused),
            }
        )  # fmt: skip
        wrong += bad
    frame = pd.DataFrame(table)
    totals = frame[["rows", "right", "missed", "false_alarms"]].sum()
    sys.stdout.write(f"\n{frame.to_string(index=False)}\n{totals.to_string()}\n")
    assert wrong == []


def test_the_saturation_summary_follows_from_its_steps(judged):
    steps = pd.DataFrame([row for row, _ in judged[DATA / "saturation_steps.csv"]])
    summary = pd.read_csv(DATA / "saturation_summary.csv").set_index("model")
    for model, mine in steps.groupby("model"):
        peak = mine.loc[mine["total_tok_per_s"].idxmax()]
        known = summary.loc[model]
        assert peak["concurrency"] == known["concurrency_at_peak"]
        assert peak["total_tok_per_s"] == known["peak_total_tok_per_s"]
        assert round(peak["e2e_p99_s"], 2) == known["e2e_p99_at_peak_s"]
        assert mine["total_tok_per_s"].min() == known["total_tok_per_s_min"]
        assert mine["total_tok_per_s"].max() == known["total_tok_per_s_max"]
