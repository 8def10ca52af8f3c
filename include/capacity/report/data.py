"""What a report reads of one sweep: the judged step table and one curve per kind of traffic.

The step table says what happened at every step, repeats and rejected steps included. A *curve* is what
figures and sentences use: one row per concurrency of one service class, made of the most trustworthy
steps there. Of all steps that quality did not reject and that the instrument does not call invalid,
those that were measured at proof size (``prove``, ``grid``) go before scouting, and scouting before the
baseline; ``prime`` warms the server and ``anchor`` and ``shared`` answer other questions, so they are on
no curve. Repeats are pooled: counts are summed, everything else is their mean.

Two intervals are computed here, both one-sided or two-sided as said, and blank where unknown:

- completion and objective: one-sided 95 % Clopper-Pearson bounds at the effective number of requests
  ``n_e`` (``x_e = p n_e``; C. Clopper and E. Pearson, Biometrika 26, 1934);
- throughput over at least three repeats: a two-sided 95 % t-interval of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import pandas as pd

from include.capacity.config import ServiceClass
from include.capacity.errors import DataError
from include.capacity.limits.bounds import clopper_pearson_lower, clopper_pearson_upper, mean_half_width
from include.capacity.limits.evidence import Evidence, evidence_of
from include.capacity.report.words import known, text
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import EXPORTABLE, UNRATED, Outcome, Phase

Frame: TypeAlias = Any
"""A pandas table or column. Its type stubs give every cell the union of all that a cell can be."""

ALPHA = 0.05

FAILURES = tuple(
    outcome.value for outcome in Outcome if outcome is not Outcome.COMPLETED and outcome not in UNRATED
)
"""Outcomes of attempted requests that did not complete, in the order of the vocabulary."""

PHASE_RANK: dict[str, int] = {Phase.GRID: 0, Phase.PROVE: 0, Phase.SCOUT: 1, Phase.BASELINE: 2}
"""Which phases are on a curve, the most trustworthy first; an imported step has no phase and counts as 1."""

COUNTS = ("attempted", "completed", "objective_met", "n_effective", *FAILURES, "ttft_n", "tpot_n", "e2e_n")


@dataclass
class ModelData:
    """One sweep, read and joined for the report."""

    name: str
    sweep: dict[str, Any]
    steps: Frame
    """``steps.csv`` with columns of :func:`judged_steps` added."""
    limits: list[dict[str, Any]] = field(default_factory=list)
    saturation: list[dict[str, Any]] = field(default_factory=list)
    quality: dict[str, Any] | None = None
    compared: bool = False
    """Whether the limits were compared with the runs before."""

    @property
    def simulated(self) -> bool:
        """Whether the server was a simulation."""
        return bool(self.sweep.get("simulated"))

    @property
    def imported(self) -> bool:
        """Whether these are somebody else's numbers."""
        return text(self.sweep.get("source")) == "imported"

    @property
    def traffic(self) -> list[tuple[str, str]]:
        """(service class, series) of all curves, in the order of the limits, then of the steps."""
        found = [traffic_of(entry) for entry in self.limits]
        found += list(zip(self.steps["service_class"].map(text), self.steps["series"].map(text), strict=True))
        return list(dict.fromkeys(found))

    def rule(self, service_class: str) -> dict[str, Any]:
        """The ServiceClass as JSON; empty for imported data."""
        return (self.sweep.get("classes") or {}).get(service_class) or {}

    def limit(self, service_class: str, series: str = "") -> dict[str, Any] | None:
        """The entry of ``limits.json``, if there is one; that measured alone goes before a shared one."""
        found = [entry for entry in self.limits if traffic_of(entry) == (service_class, series)]
        return min(found, key=lambda entry: entry.get("measured") == "shared", default=None)

    def curve(self, service_class: str, series: str = "") -> Frame:
        """One row per concurrency (the index, ascending); see the module's docstring."""
        mine = self.steps_of(service_class, series)
        return curve_of(mine[mine["why_unused"] == ""])

    def steps_of(self, service_class: str, series: str = "") -> Frame:
        """The steps of one kind of traffic, those that are not used, too."""
        steps = self.steps
        return steps[
            (steps["service_class"].map(text) == service_class) & (steps["series"].map(text) == series)
        ]


def traffic_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """(service class, series) of an entry of ``limits.json``."""
    return text(entry.get("class")), text(entry.get("series"))


def read_model(sweep: SweepDir) -> ModelData:
    """Read a sweep directory; what is missing (limits, quality) stays empty.

    DataError if ``sweep.json`` names no model or ``steps.csv`` lacks the key columns.
    """
    about = sweep.read_json("sweep.json")
    if not isinstance(about, dict) or not about.get("model"):
        raise DataError(f"{sweep.url}/sweep.json: key 'model' is missing")
    limits = _json(sweep, "limits.json") or {}
    quality = _json(sweep, "quality.json")
    steps = sweep.steps() if sweep.exists("steps.csv") else pd.DataFrame(columns=list(STEP_COLUMNS))
    if missing := [name for name in ("model", "concurrency") if name not in steps]:
        raise DataError(f"{sweep.url}/steps.csv: columns {missing} are missing")
    data = ModelData(
        name=str(about["model"]),
        sweep=about,
        steps=judged_steps(steps, quality, step_evidence(sweep, about)),
        limits=[entry for entry in limits.get("limits") or [] if isinstance(entry, dict)],
        saturation=[entry for entry in limits.get("saturation") or [] if isinstance(entry, dict)],
        quality=quality,
        compared=bool(limits.get("compared")),
    )
    if data.imported:
        _name_workloads(data)
        if steps["model"].nunique() > 1:
            data.name = "several models"
    return data


def _name_workloads(data: ModelData) -> None:
    """Add the workload to the series of imported closed loops where a series has several: one curve each."""
    steps = data.steps
    series, workload = steps["series"].map(text), steps["workload"].map(text)
    closed = steps["concurrency"].notna()
    several = workload[closed].groupby(series[closed]).nunique() > 1
    unlike = closed & series.map(several).eq(True)
    steps["series"] = series.mask(unlike, (series + " " + workload).str.strip())
    for entry in data.saturation:
        name = text(entry.get("series"))
        if several.get(name, False):
            entry["series"] = f"{name} {text(entry.get('workload'))}".strip()


def step_evidence(sweep: SweepDir, about: Mapping[str, Any]) -> list[Evidence]:
    """What the limits stage makes of each measured step; empty for imported data."""
    classes = {name: ServiceClass.model_validate(rule) for name, rule in (about.get("classes") or {}).items()}
    facts = sweep.all_facts()
    if not facts or not classes:
        return []
    rows = sweep.requests()
    by_step = dict(list(rows.groupby("step"))) if "step" in rows else {}
    return [
        e for key, one in facts.items() if key in by_step for e in evidence_of(one, by_step[key], classes)
    ]


EVIDENCE_COLUMNS = {
    "n_effective": "n_effective_y",
    "y_lower": "lower_y",
    "y_upper": "upper_y",
    "z_lower": "lower_z",
    "z_upper": "upper_z",
    "request_per_s_low": "request_per_s_low",
    "request_per_s_high": "request_per_s_high",
    "state": "state",
}
"""Columns of a step that come from its :class:`Evidence`, which decides."""


def judged_steps(steps: Frame, quality: Mapping[str, Any] | None, evidence: Sequence[Evidence] = ()) -> Frame:
    """The step table with verdicts, completion rates, their bounds and request-rate intervals joined on.

    Where there is no evidence (imported steps), bounds follow from the table's own ``n_effective``.
    """
    steps = steps.reindex(columns=[*STEP_COLUMNS, *(c for c in steps if c not in STEP_COLUMNS)])
    steps = steps.reset_index(drop=True)
    numbers = ["concurrency", "repeat", "request_per_s", *COUNTS]
    numbers += [c for c in steps if c.endswith(("_s", "_mean", "_peak", "_share")) or c.startswith("server_")]
    for column in dict.fromkeys(numbers):
        steps[column] = pd.to_numeric(steps[column], errors="coerce").astype(float)
    verdicts = {_identity(step): step for step in (quality or {}).get("steps") or []}
    found = [verdicts.get(_identity(row), {}) for row in steps.to_dict("records")]
    steps["verdict"] = [step.get("verdict") or "" for step in found]
    steps["reasons"] = [list(step.get("findings") or []) for step in found]
    steps["why_unused"] = [_why_unused(row) for row in steps.to_dict("records")]
    steps["completion"] = steps["completed"] / steps["attempted"].where(steps["attempted"] > 0)
    bounds = [_bounds(row["completion"], row["n_effective"]) for row in steps.to_dict("records")]
    steps["y_lower"], steps["y_upper"] = [low for low, _ in bounds], [high for _, high in bounds]
    judged = {_identity(asdict(one)): one for one in evidence}
    found_evidence = [
        judged.get(_identity({**row, "series": "", "workload": ""})) for row in steps.to_dict("records")
    ]
    for column, name in EVIDENCE_COLUMNS.items():
        values = pd.Series(
            [getattr(one, name, None) for one in found_evidence], index=steps.index, dtype=object
        )
        before = steps[column] if column in steps else pd.Series(np.nan, index=steps.index)
        joined = values.where(values.notna(), before)
        steps[column] = joined if column == "state" else pd.to_numeric(joined).astype(float)
    return steps


def curve_of(steps: Frame) -> Frame:
    """The most trustworthy steps of each concurrency, pooled; indexed by concurrency."""
    # Not by ``map``: of no steps that is an empty column of text, not of numbers.
    phases = [text(phase) for phase in steps["phase"]]
    rank = pd.Series([PHASE_RANK.get(phase, 1) for phase in phases], steps.index, dtype=int)
    on_curve = pd.Series([not phase or phase in PHASE_RANK for phase in phases], steps.index, dtype=bool)
    steps = steps.assign(rank=rank)[on_curve & steps["concurrency"].notna()]
    best = steps[steps["rank"] == steps.groupby("concurrency")["rank"].transform("min")]
    numeric = [c for c in best.select_dtypes("number") if c not in ("concurrency", "repeat", "attempt")]
    pooled = best.groupby("concurrency")[numeric].mean()
    for column in COUNTS:
        pooled[column] = best.groupby("concurrency")[column].sum(min_count=1)
    pooled["repeats"] = best.groupby("concurrency").size()
    pooled["proof"] = best.groupby("concurrency")["rank"].max() == 0
    pooled["flagged"] = best.groupby("concurrency")["verdict"].agg(lambda found: (found == "flag").any())
    pooled["state"] = best.groupby("concurrency")["state"].agg(lambda s: _one(s.dropna().unique()))
    pooled["completion"] = pooled["completed"] / pooled["attempted"].where(pooled["attempted"] > 0)
    bounds = [_bounds(row["completion"], row["n_effective"]) for row in pooled.to_dict("records")]
    several = pooled["repeats"] > 1  # one step keeps its own bounds
    for at, column in enumerate(("y_lower", "y_upper")):
        pooled[column] = pooled[column].mask(several, pd.Series([b[at] for b in bounds], index=pooled.index))
    for column in ("z_lower", "z_upper"):
        pooled[column] = pooled[column].mask(several)
    for column in ("output_tok_per_s", "raw_output_tok_per_s", "total_tok_per_s", "request_per_s"):
        half = best.groupby("concurrency")[column].agg(t_half_width)
        low, high = pooled[column] - half, pooled[column] + half
        if f"{column}_low" in pooled:  # one run has its interval by batch means
            low = low.fillna(pooled[f"{column}_low"].mask(several))
            high = high.fillna(pooled[f"{column}_high"].mask(several))
        pooled[f"{column}_low"], pooled[f"{column}_high"] = low, high
    pooled.index = pooled.index.astype(int)
    return pooled.sort_index()


def binomial_bounds(x: float, n: float, alpha: float = ALPHA) -> tuple[float, float]:
    """One-sided Clopper-Pearson lower and upper bound of x successes in n (both may be fractional)."""
    if not n > 0:
        return math.nan, math.nan
    return float(clopper_pearson_lower(x, n, alpha)), float(clopper_pearson_upper(x, n, alpha))


def t_half_width(values: Frame) -> float:
    """Half of the two-sided 95 % t-interval of the mean; NaN below three values."""
    return mean_half_width(values.dropna().to_numpy(float))


def exportable(limit: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a limit's number may be used: proven, or proven up to here."""
    return limit is not None and known(limit.get("limit")) is not None and limit.get("status") in EXPORTABLE


def bracket_of(entry: Any) -> tuple[float | None, float | None]:
    """(lower, upper) end of a bracket in ``limits.json``: a pair, or a mapping with ``low`` and ``high``."""
    if isinstance(entry, Mapping):
        entry = [entry.get("low"), entry.get("high")]
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return None, None
    return known(entry[0]), known(entry[1])


def _bounds(rate: float, n_effective: float) -> tuple[float, float]:
    """Bounds at the effective number of requests. Where that is unknown there are none: the plain count
    would claim too much wherever requests are correlated."""
    if not np.isfinite(rate) or not np.isfinite(n_effective):
        return math.nan, math.nan
    return binomial_bounds(rate * n_effective, n_effective)


def _identity(step: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a step from all others, in the step table and in ``quality.json`` alike."""
    return (
        text(step.get("series")),
        text(step.get("workload")),
        text(step.get("service_class")),
        text(step.get("phase")),
        known(step.get("concurrency")),
        known(step.get("repeat")) or 1.0,
    )


def _why_unused(row: Mapping[str, Any]) -> str:
    if row["verdict"] == "reject":
        reasons = [text(f.get("reason")) for f in row["reasons"] if f.get("severity") == "reject"]
        return " ".join(reasons) or "Rejected by the quality checks."
    if text(row.get("invalid")):
        return text(row["invalid"])
    if not known(row.get("attempted")) and not known(row.get("total_tok_per_s")):
        return text(row.get("error")) or "No request was counted."
    return ""


def _one(values: Any) -> str:
    return str(values[0]) if len(values) == 1 else ("mixed" if len(values) else "")


def _json(sweep: SweepDir, name: str) -> Any:
    return sweep.read_json(name) if sweep.exists(name) else None
