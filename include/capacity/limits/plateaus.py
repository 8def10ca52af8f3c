"""What set a plateau of throughput, by name, and what to change.

A plateau runs from the throughput knee to the highest concurrency within 5 % of the peak, and is one if the
steps above the knee reach at least 1.25 times its concurrency. Steps whose throughput the test itself set say
nothing of the server: only if none of the others reaches that far did the test set the plateau.

1. the test: an **arrival cap**, a **client cap**, or too few **requests** for a steady state, whichever data
   quality found in most steps;
2. the server: **admission**, **KV cache**, **slots**, **compute**, by its metrics
   (:func:`.knees.server_bound`);
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
    "arrival_capped": "arrival_cap",
    "rate_without_effect": "arrival_cap",
    "client_capped": "client_cap",
    "client_bound": "client_cap",
    "concurrency_reached": "client_cap",
    "enough_requests": "request_count",
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
    """What the findings of one step say its throughput was set by, if not by the server.

    Too few requests cannot fill a concurrency, so they explain one that was not reached.
    """
    checks = {
        one["check"]
        for one in findings
        if one.get("check") in CAUSES
        and (one.get("severity") == Severity.REJECT or one["check"] not in MERE_FLAGS)
    }
    if "enough_requests" in checks:
        checks.discard("concurrency_reached")
    return frozenset(CAUSES[check] for check in checks)


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
    above = rows[(rows["concurrency"] > start) & (rows["concurrency"] <= end)]
    servers = above[above["causes"].map(len) == 0]
    if servers.empty or servers["concurrency"].max() < PAIR_RATIO * start:
        found = [cause for causes in above["causes"] for cause in causes]
        cause = max(dict.fromkeys(CAUSES.values()), key=found.count)
    elif known := _of_the_server(servers):
        cause = known
    else:
        at_start = rows[rows["concurrency"] == start]
        same = _same_number_generated(pd.concat([at_start, servers]))
        cause = "slots_or_kv" if same else "unknown"
    return {"from": start, "to": end, "set_by": cause, "change": CHANGES[cause]}


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


def _same_number_generated(at: pd.DataFrame) -> bool:
    """Whether X (E2E - TTFT) stays the same over these steps."""
    number = at["request_per_s"] * (at["e2e_mean_s"].fillna(_estimate(at)) - at["ttft_mean_s"])
    number = pd.to_numeric(number, errors="coerce").dropna()
    known = at.loc[number.index, "concurrency"]
    if len(number) < 2 or known.max() < PAIR_RATIO * known.min() or number.median() <= 0:
        return False
    return bool((number.max() - number.min()) / number.median() <= SAME)


def _estimate(rows: pd.DataFrame) -> pd.Series:
    return rows.get("e2e_estimate_s", pd.Series(float("nan"), index=rows.index))
