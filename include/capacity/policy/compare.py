"""What a gateway costs: the same server measured directly and through it, side by side.

Two sweep directories of the kind ``endpoint``. Of each concurrency measured in both: attempts, completion,
refusals, failed connections, in flight reached, and the difference of the first token's delay (and of the
whole answer's), through the gateway minus direct, with its 95 % interval.

Requests of a step are correlated, so the interval comes from resampling whole batches in order of start (the
same batches as everywhere), 1,000 times, each side by itself. It covers what varies within the runs, not what
changed between them: on a machine that others use, measure again in the other order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from include.capacity.errors import DataError
from include.capacity.limits.bounds import batch_size
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import EVIDENCE_PHASES, UNRATED, Outcome

RESAMPLES = 1000
STATISTICS = ("p50", "p95", "mean")
NO_CONNECTION = (Outcome.CONNECT_FAILED, Outcome.CONNECTION_LOST)
COLUMNS = ["service_class", "phase", "concurrency", "counted", "outcome", "started_s", "ttft_s", "e2e_s"]

Floats = NDArray[np.float64]


def compare(direct: SweepDir, through: SweepDir) -> dict[str, Any]:
    """``{"clock_scale", "steps": [{"class", "concurrency", "direct", "through", "difference"}]}``.

    ``direct`` and ``through``: ``attempted``, ``completed``, ``rejected``, ``no_connection``,
    ``inflight_mean`` and, of completed requests, ``ttft_p50_s`` ...; ``difference``: per latency and
    statistic ``{"value", "low", "high"}`` in seconds, None where it cannot be known. DataError if the two
    have no concurrency in common.
    """
    about = [side.read_json("sweep.json") for side in (direct, through)]
    scales = [one.get("clock_scale", 1.0) for one in about]
    if scales[0] != scales[1]:
        raise DataError(
            f"{direct.url} and {through.url}: clocks of different speed ({scales[0]:g}, {scales[1]:g})"
        )
    sides = [_steps(side) for side in (direct, through)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        raise DataError(f"{direct.url} and {through.url}: no class and concurrency was measured in both")
    return {
        "clock_scale": scales[0],
        "steps": [
            {
                "class": name,
                "concurrency": concurrency,
                "direct": _summary(direct, sides[0][name, concurrency], name, concurrency),
                "through": _summary(through, sides[1][name, concurrency], name, concurrency),
                "difference": {
                    f"{latency}_{statistic}": difference(
                        _batches(sides[0][name, concurrency], latency, concurrency),
                        _batches(sides[1][name, concurrency], latency, concurrency),
                        statistic,
                    )
                    for latency in ("ttft", "e2e")
                    for statistic in STATISTICS
                },
            }
            for name, concurrency in sorted(common)
        ],
    }


def _steps(sweep: SweepDir) -> dict[tuple[str, int], pd.DataFrame]:
    """(class, concurrency) -> counted rows of proof size, in order of start (repeats one after the other)."""
    rows = sweep.requests(columns=COLUMNS)
    phases = [phase.value for phase in EVIDENCE_PHASES]
    unrated = [outcome.value for outcome in UNRATED]
    rows = rows[rows["counted"].eq(True) & rows["phase"].isin(phases) & ~rows["outcome"].isin(unrated)]
    rows = rows.sort_values(["step", "started_s"])
    found: dict[tuple[str, int], pd.DataFrame] = {}
    for name, mine in rows.groupby("service_class", sort=False):
        for concurrency in mine["concurrency"].unique():
            found[str(name), int(concurrency)] = mine[mine["concurrency"] == concurrency]
    return found


def _summary(sweep: SweepDir, rows: pd.DataFrame, name: str, concurrency: int) -> dict[str, Any]:
    done = rows[rows["outcome"] == Outcome.COMPLETED]
    facts = [
        load.inflight_mean
        for key in rows["step"].unique()
        for load in sweep.facts(key).loads
        if load.service_class == name and load.concurrency == concurrency and load.inflight_mean is not None
    ]
    latencies = {
        f"{latency}_{statistic}_s": _statistic(_known(done[f"{latency}_s"]), statistic)
        for latency in ("ttft", "e2e")
        for statistic in STATISTICS
    }
    return {
        "attempted": len(rows),
        "completed": len(done),
        "rejected": int((rows["outcome"] == Outcome.REJECTED).sum()),
        "no_connection": int(rows["outcome"].isin([one.value for one in NO_CONNECTION]).sum()),
        "inflight_mean": float(np.mean(facts)) if facts else None,
        **latencies,
    }


def _known(values: pd.Series) -> Floats:
    numbers = values.to_numpy(dtype=float, na_value=np.nan)
    return numbers[~np.isnan(numbers)]


def _statistic(values: Floats, statistic: str) -> float | None:
    if not values.size:
        return None
    return float(values.mean() if statistic == "mean" else np.quantile(values, int(statistic[1:]) / 100))


def _batches(rows: pd.DataFrame, latency: str, concurrency: int) -> Floats:
    """Latencies of completed requests as batches (rows of a table); the last, incomplete one is left out."""
    values = _known(rows.loc[rows["outcome"] == Outcome.COMPLETED, f"{latency}_s"])
    size = batch_size(values.size, concurrency) if values.size else 1
    return values[: values.size // size * size].reshape(-1, size)


def difference(direct: Floats, through: Floats, statistic: str) -> dict[str, float] | None:
    """Through minus direct; None with fewer than three batches on a side."""
    if min(len(direct), len(through)) < 3:
        return None
    rng = np.random.default_rng(1)
    resampled = []
    for side in (direct, through):
        picks = rng.integers(0, len(side), (RESAMPLES, len(side)))
        whole = side[picks].reshape(RESAMPLES, -1)
        resampled.append(
            whole.mean(axis=1)
            if statistic == "mean"
            else np.quantile(whole, int(statistic[1:]) / 100, axis=1)
        )
    low, high = np.quantile(resampled[1] - resampled[0], [0.025, 0.975])
    value = (_statistic(through.ravel(), statistic) or 0.0) - (_statistic(direct.ravel(), statistic) or 0.0)
    return {"value": value, "low": float(low), "high": float(high)}


def compare_table(found: Mapping[str, Any]) -> str:
    """The comparison for people, in milliseconds."""
    lines = []
    for step in found["steps"]:
        lines.append(f"{step['class']}, {step['concurrency']} in flight")
        for side in ("direct", "through"):
            one = step[side]
            lines.append(
                f"  {side:8}{one['attempted']:6,} attempted, "
                f"{one['completed'] / one['attempted']:.2%} completed, "
                f"{one['rejected']:,} refused, {one['no_connection']:,} without connection, "
                f"{_or_unknown(one['inflight_mean'], '.1f')} in flight"
            )
        for latency, words in (("ttft", "first token"), ("e2e", "whole answer")):
            cells = []
            for statistic in STATISTICS:
                difference = step["difference"][f"{latency}_{statistic}"]
                if difference is not None:
                    value, low, high = (1000 * difference[key] for key in ("value", "low", "high"))
                    cells.append(f"{statistic} {value:+.1f} ms ({low:+.1f} to {high:+.1f})")
            if cells:
                lines.append(f"  through the gateway, {words} later by: {', '.join(cells)}")
    lines.append(
        "95 % intervals of what varies within the runs; what changed between them is not in there: measure "
        "again in the other order."
    )
    if found["clock_scale"] != 1.0:
        lines.append(
            f"Times are the simulated server's, {found['clock_scale']:g} times faster than life: a gateway's "
            f"own millisecond shows as {found['clock_scale']:g}. Measure this with a server at life's speed."
        )
    return "\n".join(lines)


def _or_unknown(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
