"""Throughput against concurrency: peak, range and knee per model, series and workload.

A description, not a limit: where the server made the most tokens, whether or not anybody was well
served there. With repeats X(N) is their mean with Student's 95 % interval. Of a search's steps the
largest at each concurrency counts (a proof before a scout). Steps that data quality rejects still
describe what was measured, and the entry then says ``rejected``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from include.capacity.limits.bounds import mean_half_width
from include.capacity.limits.knees import Throughput, kneedle, throughput_knee
from include.capacity.limits.plateaus import plateau
from include.capacity.words import Phase

RANK = {Phase.SCOUT: 1, Phase.PROVE: 2, Phase.GRID: 2}
"""Which phases describe a concurrency, the higher the better; others (baseline, shared, ...) do not."""


def throughput(steps: pd.DataFrame, column: str) -> list[Throughput]:
    """X(N) of each concurrency with its interval, from step rows of one class (or imported series)."""
    known = _described(steps)
    known = known.assign(x=pd.to_numeric(known[column], errors="coerce")).dropna(subset="x")
    result = []
    for n in sorted({int(n) for n in known["concurrency"]}):
        rows = known[known["concurrency"] == n]
        x = rows["x"].to_numpy(dtype=float)
        half = mean_half_width(x)
        result.append(Throughput(n, float(x.mean()), float(x.mean()) - half, float(x.mean()) + half))
    return result


def saturation(
    steps: pd.DataFrame, rejected: pd.Series, model: str, all_rejected: bool, causes: pd.Series
) -> list[dict[str, Any]]:
    """The saturation entries of ``limits.json``. ``rejected``: whether each row of ``steps`` is; ``causes``:
    what set its throughput if not the server (:func:`.plateaus.causes_of`).

    ``status``: ``measured``; ``rejected`` if the sweep, the step at the peak, or half the steps are;
    ``insufficient_evidence`` without any throughput.
    """
    names = {name: steps[name].map(_text) if name in steps else "" for name in GROUP}
    table = steps.assign(**names, unfit=rejected, causes=causes)  # ``rejected`` counts refused requests
    table["model"] = table["model"].replace("", model)
    entries = []
    for group, rows in table.groupby(list(GROUP), sort=False):
        described = _described(rows)
        if len(described):
            about = dict(zip(("model", "series", "class", "workload"), group, strict=True))
            entries.append(about | _entry(described, all_rejected))
    return entries


GROUP = ("model", "series", "service_class", "workload")


def _entry(rows: pd.DataFrame, all_rejected: bool) -> dict[str, Any]:
    curve = throughput(rows, "total_tok_per_s")
    bad = sorted({int(n) for n in rows.loc[rows["unfit"], "concurrency"]})
    blank = dict.fromkeys(PEAK)
    common = {
        "throughput_knee": throughput_knee(curve),
        "kneedle": kneedle(curve),
        "plateau": plateau(rows, curve),
        "repeats": int(rows.groupby("concurrency").size().max()),
        "rejected_concurrencies": bad,
    }
    if not curve:
        return blank | common | {"status": "rejected" if all_rejected else "insufficient_evidence"}
    peak = max(curve, key=lambda s: s.x)
    at_peak = pd.to_numeric(rows.loc[rows["concurrency"] == peak.n, "e2e_p99_s"], errors="coerce")
    values = (
        peak.n,
        peak.x,
        _blank(peak.low),
        _blank(peak.high),
        _blank(float(at_peak.mean())),
        min(s.x for s in curve),
        peak.x,
        peak.n == curve[-1].n,
    )
    suspect = all_rejected or peak.n in bad or 2 * len(bad) >= rows["concurrency"].nunique()
    return (
        blank
        | dict(zip(PEAK, values, strict=True))
        | common
        | {"status": "rejected" if suspect else "measured"}
    )


PEAK = (
    "concurrency_at_peak",
    "peak_total_tok_per_s",
    "peak_total_tok_per_s_low",
    "peak_total_tok_per_s_high",
    "e2e_p99_at_peak_s",
    "total_tok_per_s_min",
    "total_tok_per_s_max",
    "peak_at_top",
)


def _described(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows that describe each concurrency: of the best phase there is; imported rows all."""
    if steps.empty:
        return steps
    phase = steps["phase"].map(_text) if "phase" in steps else pd.Series("", index=steps.index)
    rank = phase.map(lambda name: 2 if name == "" else RANK.get(name, 0)).to_numpy(dtype=int)
    best = pd.Series(rank).groupby(steps["concurrency"].to_numpy()).transform("max").to_numpy()
    return steps[(rank > 0) & (rank == best)]


def _text(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and np.isnan(value)) else str(value)


def _blank(value: float) -> float | None:
    return None if math.isnan(value) else value
