"""What set a plateau, by name: the test's own causes before the server's, and none without a plateau."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from include.capacity.limits.knees import Throughput
from include.capacity.limits.plateaus import CHANGES, causes_of, plateau
from include.capacity.limits.saturation import saturation
from include.capacity.results.schema import STEP_COLUMNS


def found(*levels: dict[str, Any], flat_from: int = 16) -> dict[str, Any] | None:
    """The plateau of steps whose throughput grows up to ``flat_from`` and is then the same."""
    rows = pd.DataFrame(levels).reindex(columns=[*STEP_COLUMNS, "causes"])
    rows["causes"] = [level.get("causes", frozenset()) for level in levels]
    curve = [
        Throughput(n, float(100 * min(n, flat_from)), float("nan"), float("nan")) for n in rows["concurrency"]
    ]
    return plateau(rows, curve)


def steps(*levels: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"concurrency": n, **columns} for n in levels]


ROOM: dict[str, Any] = {"server_kv_use_peak": 0.5, "server_preemptions": 0.0}


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({**ROOM, "server_waiting_mean": 9.0}, "slots"),
        ({**ROOM, "server_waiting_mean": 0.2}, "compute"),
        ({**ROOM, "server_waiting_mean": 9.0, "server_kv_use_peak": 0.99}, "kv"),
        ({**ROOM, "server_waiting_mean": 9.0, "completed": 90, "rejected": 10}, "admission"),
        ({"causes": frozenset({"arrival_cap"})}, "arrival_cap"),
        ({"causes": frozenset({"client_cap"})}, "client_cap"),
        ({**ROOM, "server_waiting_mean": 9.0, "causes": frozenset({"request_count"})}, "request_count"),
        ({}, "unknown"),
    ],
)
def test_each_cause_has_its_name_and_a_remedy(columns: dict[str, Any], cause: str) -> None:
    assert found(*steps(4, 8, 16, 32, 64, **columns)) == {
        "from": 16,
        "to": 64,
        "set_by": cause,
        "change": CHANGES[cause],
    }


def test_valid_steps_that_are_flat_speak_for_the_server_whatever_follows() -> None:
    waiting = {**ROOM, "server_waiting_mean": 9.0}
    levels = steps(4, 16, 20, **waiting) + steps(32, 64, causes=frozenset({"request_count"}))
    assert (found(*levels) or {})["set_by"] == "slots"
    levels = steps(4, 16, 19, **waiting) + steps(32, 64, causes=frozenset({"request_count"}))
    assert (found(*levels) or {})["set_by"] == "request_count"  # 19 is less than 1.25 times 16


def test_of_two_causes_in_the_test_the_one_in_most_steps() -> None:
    capped, few = frozenset({"arrival_cap"}), frozenset({"arrival_cap", "request_count"})
    levels = [*steps(4, 16), *steps(32, causes=capped), *steps(64, 128, causes=few)]
    assert (found(*levels) or {})["set_by"] == "arrival_cap"


def generating(*numbers: float) -> list[dict[str, Any]]:
    """Steps at 16, 32, 64 with this many being generated at once; no server metrics."""
    return [
        {"concurrency": n, "request_per_s": 4.0, "ttft_mean_s": 1.0, "e2e_mean_s": 1.0 + number / 4}
        for n, number in zip((16, 32, 64), numbers, strict=True)
    ]


def test_without_metrics_a_constant_number_being_generated_shows_slots_or_cache() -> None:
    assert (found(*generating(16.0, 16.8, 17.6)) or {})["set_by"] == "slots_or_kv"
    assert (found(*generating(16.0, 16.8, 18.4)) or {})["set_by"] == "unknown"


def test_no_plateau() -> None:
    assert found(*steps(4, 8, 16)) is None  # still rising
    assert found(*steps(4, 16, 19)) is None  # too short
    assert plateau(pd.DataFrame(columns=["concurrency"]), []) is None


def test_only_a_rejection_of_the_concurrency_names_the_client() -> None:
    finding = {"check": "concurrency_reached", "severity": "flag"}
    assert causes_of([finding]) == frozenset()
    assert causes_of([{**finding, "severity": "reject"}]) == {"client_cap"}
    assert causes_of([{"check": "arrival_capped", "severity": "flag"}, {"check": "steady_state"}]) == {
        "arrival_cap"
    }
    few = {"check": "enough_requests", "severity": "reject"}
    assert causes_of([{**finding, "severity": "reject"}, few]) == {"request_count"}


def test_refused_requests_are_seen_beside_rejected_steps() -> None:
    """The step table's ``rejected`` counts 429 and 503; whether a step is rejected is another thing."""
    levels = [
        {
            "concurrency": n,
            "phase": "scout",
            "completed": 100,
            "rejected": 30 if n > 16 else 0,
            "total_tok_per_s": 100.0 * min(n, 16),
            "server_waiting_mean": 0.0,
            **ROOM,
        }
        for n in (4, 8, 16, 19, 24, 32)
    ]
    rows = pd.DataFrame(levels).reindex(columns=STEP_COLUMNS)
    unfit = pd.Series([n == 19 for n in rows["concurrency"]])
    causes = pd.Series([frozenset()] * len(rows))
    (entry,) = saturation(rows, unfit, "m", False, causes)
    assert entry["plateau"]["set_by"] == "admission"
    assert entry["rejected_concurrencies"] == [19]
