"""Each check of the request table: a row at the border that passes, one beyond that does not."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from include.capacity.quality.checks import CHECKS
from include.capacity.quality.suites import validate

ROW: dict[str, Any] = {
    "service_class": "interactive",
    "request_id": "r",
    "outcome": "completed",
    "started_s": 0.0,
    "send_lag_s": 0.0,
    "ttft_s": 0.2,
    "last_token_s": 2.0,
    "e2e_s": 2.0,
    "prompt_tokens": 500,
    "output_tokens": 1,
    "concurrency": 4,
    "deadline_s": 60.0,
}
REFUSED = {"outcome": "rejected", "ttft_s": None, "last_token_s": None, "output_tokens": None}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # check, at the border (passes), beyond it (does not)
    ("request_nulls", {"request_id": ""}, {"request_id": None}),
    ("request_nulls", {"deadline_s": 0.1}, {"deadline_s": None}),
    ("request_nulls", {**REFUSED, "e2e_s": None}, {"e2e_s": None}),
    ("request_nulls", REFUSED, {"output_tokens": None}),
    ("request_outcomes", {"outcome": "empty"}, {"outcome": "fine"}),
    ("request_ranges", {"send_lag_s": 0.0}, {"send_lag_s": -0.001}),
    ("request_ranges", {"prompt_tokens": 0}, {"prompt_tokens": -1}),
    ("request_ranges", {"outcome": "empty", "output_tokens": 0}, {"output_tokens": 0}),
    ("request_order", {"ttft_s": 2.0}, {"ttft_s": 2.001}),
    ("request_order", {"ttft_s": None}, {"e2e_s": 1.999}),
]


@pytest.fixture(scope="module")
def hits() -> set[tuple[str, str]]:
    """(step, check) of everything found; each case's rows are two steps."""
    rows = []
    for at, (_, border, beyond) in enumerate(CASES):
        rows += [{**ROW, **border, "step": f"{at} border"}, {**ROW, **beyond, "step": f"{at} beyond"}]
    rows += [{**ROW, "step": "two", "request_id": name} for name in ("a", "b")]
    rows += [{**ROW, "step": "twice", "request_id": "a"}] * 2
    checks = [check for check in CHECKS if check.table == "requests"]
    found = validate("requests", pd.DataFrame(rows), checks, ["step", "service_class"])
    return {(hit.at[0], hit.check.id) for hit in found.hits}


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_the_border_passes_and_what_is_beyond_is_found(at: int, hits: set[tuple[str, str]]) -> None:
    assert {check for step, check in hits if step == f"{at} border"} == set()
    assert (f"{at} beyond", CASES[at][0]) in hits


def test_an_id_is_unique_within_its_step(hits: set[tuple[str, str]]) -> None:
    assert {check for step, check in hits if step == "two"} == set()
    assert {check for step, check in hits if step == "twice"} == {"duplicate_requests"}
