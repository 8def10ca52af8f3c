"""What set a plateau of throughput, by name, and what to change.

A plateau runs from the throughput knee to the highest concurrency within 5 % of the peak, and is one if the
steps above the knee reach at least 1.25 times its concurrency. Of those steps at least half must agree on the
cause. What the test itself did is asked before what the server did:

1. too few **requests** for a steady state, an **arrival cap**, a **client cap**: data quality's findings;
2. **admission**, **KV cache**, **slots**, **compute**: the server's metrics (:func:`.knees.server_bound`);
3. without metrics, by Little's law: if the number being generated at once, X (E2E - TTFT), stays the same
   while concurrency grows, then slots or the KV cache bound it; which of the two, only metrics can tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from include.capacity.limits.knees import (
    NEAR_PEAK,
    PAIR_RATIO,
    Throughput,
    server_bound,
    throughput_knee,
)
from include.capacity.results.schema import SERVER_COLUMNS
from include.capacity.words import Outcome, Severity

CAUSES = {
    "enough_requests": "request_count",
    "arrival_capped": "arrival_cap",
    "rate_without_effect": "arrival_cap",
    "client_capped": "client_cap",
    "client_bound": "client_cap",
    "concurrency_reached": "client_cap",
}
"""Checks whose finding names what set a step's throughput instead of the server."""
MERE_FLAGS = ("client_bound", "concurrency_reached")
"""Of these, a flag is a matter of a few percent; only a rejection says what set the throughput."""

CHANGES = {
    "request_count": "send at least 3, better 10, requests per request in flight at every step",
    "arrival_cap": "send without an arrival rate, or at one well above what is served",
    "client_cap": "give the load client more connections, file descriptors and processes, until the "
    "requests in flight reach what the step is called",
    "admission": "raise the server's queue limit only if what then waits still keeps its deadline; else let "
    "the gateway hold fewer in flight",
    "kv": "give the KV cache more memory (utilisation, an FP8 cache, a shorter maximum length), or use more "
    "accelerators",
    "slots": "raise --max-num-seqs while the KV cache has room",
    "compute": "no setting holds it back: use a faster or another accelerator, or shorter answers",
    "slots_or_kv": "read the server's metrics beside the load: if its KV cache has room raise "
    "--max-num-seqs, else give the cache more memory",
    "unknown": "read the server's metrics beside the load; without them nothing tells slots, KV cache and "
    "compute apart",
}
"""What to change, by cause."""

SAME = 0.1
"""Relative spread within which the number being generated at once is the same: twice a limit's resolution."""


def causes_of(findings: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """What the findings of one step say its throughput was set by, if not by the server."""
    return frozenset(
        CAUSES[one["check"]]
        for one in findings
        if one.get("check") in CAUSES
        and (one.get("severity") == Severity.REJECT or one["check"] not in MERE_FLAGS)
    )


def plateau(rows: pd.DataFrame, curve: Sequence[Throughput]) -> dict[str, Any] | None:
    """``{"from", "to", "set_by", "change"}`` of one curve, or None if its throughput has no plateau.

    ``rows``: its step rows, with a column ``causes`` (see :func:`causes_of`).
    """
    knee = throughput_knee(curve)
    if knee is None:
        return None
    peak = max(step.x for step in curve)
    start, end = knee["concurrency"], max(step.n for step in curve if step.x >= NEAR_PEAK * peak)
    if end < PAIR_RATIO * start:
        return None
    flat = rows[(rows["concurrency"] > start) & (rows["concurrency"] <= end)]
    cause = _of_the_test(flat) or _of_the_server(flat) or "unknown"
    if cause == "unknown" and _same_number_generated(rows, start, end):
        cause = "slots_or_kv"
    return {"from": start, "to": end, "set_by": cause, "change": CHANGES[cause]}


def _of_the_test(flat: pd.DataFrame) -> str | None:
    """The first cause that data quality found in at least half the steps."""
    for cause in dict.fromkeys(CAUSES.values()):
        if 2 * sum(cause in causes for causes in flat["causes"]) >= len(flat):
            return cause
    return None


def _of_the_server(flat: pd.DataFrame) -> str | None:
    """What the server's metrics say in at least half the steps."""
    outcomes = [outcome.value for outcome in Outcome if outcome.value in flat]
    metrics = [column for column in SERVER_COLUMNS if column in flat]
    found = Counter(
        server_bound(
            {name: float(row[name]) for name in metrics},
            {name: int(row[name]) for name in outcomes if row[name] > 0},
        )
        for row in flat[[*outcomes, *metrics]].apply(pd.to_numeric, errors="coerce").to_dict("records")
    )
    cause, count = found.most_common(1)[0]
    return cause if cause != "unknown" and 2 * count >= len(flat) else None


def _same_number_generated(rows: pd.DataFrame, start: int, end: int) -> bool:
    """Whether X (E2E - TTFT) stays the same from the plateau's start to its end."""
    at = rows[(rows["concurrency"] >= start) & (rows["concurrency"] <= end)]
    number = at["request_per_s"] * (at["e2e_mean_s"].fillna(_estimate(at)) - at["ttft_mean_s"])
    number = pd.to_numeric(number, errors="coerce").dropna()
    known = at.loc[number.index, "concurrency"]
    if len(number) < 2 or known.max() < PAIR_RATIO * known.min() or number.median() <= 0:
        return False
    return bool((number.max() - number.min()) / number.median() <= SAME)


def _estimate(rows: pd.DataFrame) -> pd.Series:
    return rows.get("e2e_estimate_s", pd.Series(float("nan"), index=rows.index))
