"""A gateway's cost from two sweeps whose difference is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from include.capacity.cli import main
from include.capacity.errors import DataError
from include.capacity.policy.compare import compare, compare_table, difference
from include.capacity.results.schema import Facts, LoadFacts, request_table
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from tests.policy.made import about

N, CONCURRENCY = 600, 8


def sweep(folder: Path, seed: int, later_s: float = 0.0, rejected: int = 0, **more: Any) -> SweepDir:
    """A step of 600 requests whose first token comes after 100 +- 10 ms, and ``later_s``."""
    out = SweepDir(FolderStore(folder))
    out.write_json("sweep.json", about(**more))
    rng = np.random.default_rng(seed)
    rows = []
    for at, ttft_s in enumerate(rng.normal(0.1, 0.01, N) + later_s):
        outcome = "rejected" if at < rejected else "completed"
        done = outcome == "completed"
        rows.append(
            {
                "model": "steady",
                "service_class": "interactive",
                "phase": "grid",
                "concurrency": CONCURRENCY,
                "request_id": str(at),
                "started_s": float(at),
                "outcome": outcome,
                "counted": True,
                "ttft_s": ttft_s if done else None,
                "e2e_s": ttft_s + 1.0 if done else None,
            }
        )
    rows.append({**rows[-1], "counted": False, "ttft_s": 99.0})
    load = LoadFacts(service_class="interactive", concurrency=CONCURRENCY, inflight_mean=7.9)
    spec = {
        "model": "steady",
        "phase": "grid",
        "loads": [
            {"service_class": "interactive", "concurrency": CONCURRENCY, "requests": N, "max_requests": N}
        ],
    }
    out.write_step("grid-interactive-c00008-r1", Facts(spec=spec, loads=[load]), request_table(rows))
    return out


def test_the_difference_and_its_interval(tmp_path: Path) -> None:
    found = compare(sweep(tmp_path / "a", 1), sweep(tmp_path / "b", 2, later_s=0.005, rejected=60))

    (step,) = found["steps"]
    assert (step["class"], step["concurrency"]) == ("interactive", 8)
    assert {key: step["direct"][key] for key in ("attempted", "completed", "rejected", "inflight_mean")} == {
        "attempted": 600,
        "completed": 600,
        "rejected": 0,
        "inflight_mean": 7.9,
    }
    assert (step["through"]["completed"], step["through"]["rejected"]) == (540, 60)
    for latency in ("ttft", "e2e"):
        mean = step["difference"][f"{latency}_mean"]
        assert mean["low"] < 0.005 < mean["high"]
        # Two means of 600 and 540 with a deviation of 10 ms: +- 1.96 x 0.59 ms.
        assert mean["high"] - mean["low"] == pytest.approx(2 * 1.96 * 0.00059, rel=0.25)
        assert step["difference"][f"{latency}_p95"]["low"] > 0
    assert "60 refused" in compare_table(found)


@pytest.mark.parametrize("statistic", ["mean", "p95"])
def test_no_difference_is_found_where_there_is_none(statistic: str) -> None:
    """Of 30 pairs of the same server the 95 % interval misses zero in one or two."""
    missed = 0
    for seed in range(30):
        direct, through = np.random.default_rng(seed).normal(0.1, 0.01, (2, 75, 8))
        found = difference(direct, through, statistic)
        assert found is not None
        missed += not found["low"] <= 0 <= found["high"]
    assert missed <= 5


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    direct = sweep(tmp_path / "a", 1)
    with pytest.raises(DataError, match="clocks of different speed"):
        compare(direct, sweep(tmp_path / "b", 2, clock_scale=20.0))
    empty = SweepDir(FolderStore(tmp_path / "c"))
    empty.write_json("sweep.json", about())
    with pytest.raises(DataError, match="no class and concurrency was measured in both"):
        compare(direct, empty)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path / "a", 1)
    sweep(tmp_path / "b", 2, later_s=0.005)

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["concurrency"] == 8
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "first token later by: p50 +" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2
