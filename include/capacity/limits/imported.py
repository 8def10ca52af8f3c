"""What a step table without request rows can prove.

A percentile p_j <= objective over n completed requests proves that ceil(p_j n) of them met it, and no
more; p_j > objective proves that at most floor(p_j n) did. So p95 <= 1 s never proves 95 %, and p99 does
from n = 100. Completion within the class's deadline is known if the step had that deadline, else it is
bounded by the percentiles of E2E in the same way. A step passes on the fewest that must have met and
fails on the most that can have. How far the requests depended on each other is unknown: bounds are those of
independent ones, and the claim says so. Without attempted counts nothing is proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from include.capacity.config import ServiceClass
from include.capacity.limits.bounds import ALPHA_EARLY, clopper_pearson_lower, clopper_pearson_upper
from include.capacity.limits.evidence import Evidence, objectives, share
from include.capacity.results.schema import SERVER_COLUMNS
from include.capacity.words import Outcome, Phase, State

PERCENTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def imported_evidence(steps: pd.DataFrame, name: str, service: ServiceClass) -> list[Evidence]:
    """Judge step rows (STEP_COLUMNS) by a class; a step's key is its index label."""
    records = steps.to_dict("records")
    return [_judge(str(key), row, name, service) for key, row in zip(steps.index, records, strict=True)]


def _judge(key: str, row: Mapping[Any, Any], name: str, service: ServiceClass) -> Evidence:
    attempted, completed = _number(row, "attempted"), _number(row, "completed")
    evidence = Evidence(
        key=key,
        service_class=name,
        phase=Phase.GRID.value,
        concurrency=int(row["concurrency"]),
        repeat=int(_number(row, "repeat") or 1),
        proof=True,
        floor=service.completion_floor,
        share=share(service),
        deadline_s=service.deadline_s,
        window_s=_number(row, "window_s"),
        request_per_s=_number(row, "request_per_s"),
        ttft_p95_s=_number(row, "ttft_p95_s"),
        outcomes={o.value: int(n) for o in Outcome if (n := _number(row, o.value)) is not None},
        server={column: _number(row, column) for column in SERVER_COLUMNS},
    )
    if attempted is None or completed is None:
        evidence.valid = False
        evidence.why = "how many requests were attempted and completed is unknown"
        return evidence
    n, done = int(attempted), int(completed)
    evidence.attempted, evidence.planned = n, n
    deadline_s = _number(row, "deadline_s")
    if deadline_s is not None and deadline_s < service.deadline_s * (1 - 1e-9):
        evidence.valid = False
        evidence.why = (
            f"measured with a deadline of {deadline_s:g} s: what a longer one of {service.deadline_s:g} s "
            "would have let complete is unknown"
        )
        return evidence
    if deadline_s is not None and deadline_s <= service.deadline_s * (1 + 1e-9):
        least, most = done, done
    else:
        least, most = _within(row, "e2e", service.deadline_s, done)
    least_z, most_z = least, most
    for latency, objective in objectives(service):
        fewest, greatest = _within(row, latency, objective.at_most_s, done)
        least_z, most_z = max(0, least_z - (done - fewest)), min(most_z, greatest)
    evidence.completed, evidence.met = least, least_z
    evidence.completed_most, evidence.met_most = most, most_z
    evidence.lower_y = float(clopper_pearson_lower(least, n))
    evidence.upper_y = float(clopper_pearson_upper(most, n))
    evidence.upper_early_y = float(clopper_pearson_upper(most, n, ALPHA_EARLY))
    evidence.lower_z = float(clopper_pearson_lower(least_z, n))
    evidence.upper_z = float(clopper_pearson_upper(most_z, n))
    evidence.upper_early_z = float(clopper_pearson_upper(most_z, n, ALPHA_EARLY))
    if n == 0:
        return evidence
    q = evidence.share
    if evidence.upper_y < service.completion_floor or (q is not None and evidence.upper_z < q):
        state = State.FAIL
    elif evidence.lower_y >= service.completion_floor and (q is None or evidence.lower_z >= q):
        state = State.PASS
    else:
        state = State.INCONCLUSIVE
    evidence.state = state.value
    return evidence


def _within(row: Mapping[Any, Any], latency: str, at_most_s: float, n: int) -> tuple[int, int]:
    """(fewest that must, most that can) have had a latency of at most so much, of n completed."""
    least, most = 0, n
    for name, p in PERCENTILES:
        value = _number(row, f"{latency}_{name}_s")
        if value is not None and value <= at_most_s:
            least = max(least, math.ceil(p * n - 1e-9))
        elif value is not None:
            most = min(most, math.floor(p * n + 1e-9))
    return least, max(least, most)


def _number(row: Mapping[Any, Any], name: str) -> float | None:
    """A cell as a number; None if blank or missing."""
    value = row.get(name)
    if value is None or isinstance(value, str) or pd.isna(value):
        return None
    return float(value)
