"""Judge a sweep: measures, then the suites, then one verdict per step and one for the sweep.

A step's verdict is the worst of its findings: ``reject`` keeps it out of every limit, ``flag`` prints the
reason. The sweep is rejected only by findings about the sweep itself (an anchor that differs, say); steps
that are rejected merely leave the evidence. What could not be checked is listed, never passed over.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from include.capacity.quality.checks import CHECKS, Check
from include.capacity.quality.measures import measure
from include.capacity.results.plain import finite
from include.capacity.results.steps import derive_steps
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import Phase, Severity

if TYPE_CHECKING:
    from include.capacity.quality.suites import Hit, Validated

SCHEMA = 1


def check_sweep(sweep: SweepDir) -> dict[str, Any]:
    """Judge a sweep directory; writes and returns ``quality.json``.

    Measured steps are derived anew from their rows, imported ones read from ``steps.csv``.
    """
    sweep_json = sweep.read_json("sweep.json")
    measured = sweep_json.get("source", "measured") == "measured"
    requests = sweep.requests() if measured else None
    steps = derive_steps(sweep) if measured else sweep.steps()
    result = check_tables(steps, requests, sweep_json)
    sweep.write_json("quality.json", result)
    return finite(result)


def check_tables(
    steps: pd.DataFrame, requests: pd.DataFrame | None, sweep_json: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of ``quality.json`` for tables in memory.

    ``steps``: STEP_COLUMNS, indexed by step key (imported: by row number); ``requests``:
    REQUEST_COLUMNS and ``step``, or None for imported steps.
    """
    if steps.empty:  # the server never stood: nothing to judge, and nothing wrong with it
        return {
            "schema": SCHEMA,
            "verdict": "ok",
            "findings": [],
            "steps": [],
            "not_checked": [{"check": check.id, "reason": "no step was measured"} for check in CHECKS],
            "gx": {},
        }
    judged, series = measure(steps, requests, sweep_json)
    return judge(judged, series, requests)


def rejections(steps: pd.DataFrame, requests: pd.DataFrame, sweep_json: Mapping[str, Any]) -> dict[str, str]:
    """Why steps just measured will be rejected: service class -> the first reason; judged alone.

    The same measures and lines as :func:`check_tables`, of checks that are one number each, without
    Great Expectations: cheap enough to ask after every step whether it has to be measured again.
    """
    judged, _ = measure(steps, requests, sweep_json)
    found: dict[str, str] = {}
    for check in CHECKS:
        one_number = (check.table, check.kind, check.severity) == ("steps", "between", Severity.REJECT)
        if not one_number or check.columns[0] not in judged:
            continue
        low, high = check.limits.get("min_value"), check.limits.get("max_value")
        for _, row in judged[judged[check.columns[0]].notna()].iterrows():
            value = float(row[check.columns[0]])
            if (low is not None and value < low) or (high is not None and value > high):
                found.setdefault(row["service_class"], _finding(check, row)["reason"])
    return found


def judge(judged: pd.DataFrame, series: pd.DataFrame, requests: pd.DataFrame | None) -> dict[str, Any]:
    """The content of ``quality.json`` from measured tables (see :func:`.measures.measure`)."""
    from include.capacity.quality import suites  # Great Expectations: seconds to import

    of = {
        table: [check for check in CHECKS if check.table == table]
        for table in ("requests", "steps", "series")
    }
    results: dict[str, Validated] = {}
    found: list[list[dict[str, str]]] = [[] for _ in range(len(judged))]
    about_sweep: list[dict[str, Any]] = []
    if len(judged):
        results["steps"] = suites.validate("steps", judged, of["steps"], ["row"])
        for hit in results["steps"].hits:
            found[int(hit.at[0])].append(_finding(hit.check, judged.iloc[int(hit.at[0])]))
        results["series"] = suites.validate("series", series, of["series"], ["row"])
        for hit in results["series"].hits:
            about_sweep.append(_about_series(hit.check, series.iloc[int(hit.at[0])]))
    if requests is not None and len(requests):
        needed = sorted(
            {name for check in of["requests"] for name in check.columns} | {"step", "service_class"}
        )
        rows = requests.loc[requests["phase"] != str(Phase.PRIME), [n for n in needed if n in requests]]
        if len(rows):
            results["requests"] = suites.validate("requests", rows, of["requests"], ["step", "service_class"])
            _add_request_findings(results["requests"].hits, rows, judged, found, about_sweep)
    steps = [_step(judged.iloc[row], findings) for row, findings in enumerate(found)]
    return {
        "schema": SCHEMA,
        "verdict": _sweep_verdict(about_sweep, steps),
        "findings": about_sweep,
        "steps": steps,
        "not_checked": _not_checked(results, requests is not None),
        "gx": {name: validated.result for name, validated in results.items()},
    }


def _add_request_findings(
    hits: list[Hit],
    rows: pd.DataFrame,
    judged: pd.DataFrame,
    found: list[list[dict[str, str]]],
    about_sweep: list[dict[str, Any]],
) -> None:
    row_of = {
        (step, name): row
        for step, name, row in zip(judged["step"], judged["service_class"], judged["row"], strict=True)
    }
    sizes = rows.groupby(["step", "service_class"], dropna=False).size()
    for hit in hits:
        finding = _finding(hit.check, {"n": hit.n, "of": int(sizes.get(hit.at, 0))})
        if hit.at in row_of:
            found[row_of[hit.at]].append(finding)
        else:
            about_sweep.append({**finding, "reason": f"{hit.at[0]}: {finding['reason']}"})


def _finding(check: Check, row: Mapping[str, Any] | pd.Series) -> dict[str, str]:
    return {
        "check": check.id,
        "severity": str(check.severity),
        "reason": _Sentence().vformat(check.reason, (), dict(row)),
    }


def _about_series(check: Check, row: pd.Series) -> dict[str, Any]:
    names = ("model", "series", "service_class", "workload")
    return {**_finding(check, row), **{name: _plain(row[name]) for name in names}}


def _step(row: pd.Series, findings: list[dict[str, str]]) -> dict[str, Any]:
    """One step of ``quality.json``; of a check that both flags and rejects, the rejection stands."""
    worst = [
        finding
        for finding in findings
        if finding["severity"] == Severity.REJECT
        or not any(f["check"] == finding["check"] and f["severity"] == Severity.REJECT for f in findings)
    ]
    unique = list({(f["check"], f["reason"]): f for f in worst}.values())
    return {
        "key": row["step"],
        "source": _plain(row["source"]),
        "model": _plain(row["model"]),
        "series": _plain(row["series"]),
        "service_class": _plain(row["service_class"]),
        "workload": _plain(row["workload"]),
        "concurrency": _plain(row["concurrency"]),
        "repeat": _plain(row["repeat"]),
        "phase": _plain(row["phase"]),
        "verdict": _verdict(unique),
        "findings": unique,
    }


def _verdict(findings: list[dict[str, Any]]) -> str:
    severities = {finding["severity"] for finding in findings}
    return "reject" if Severity.REJECT in severities else "flag" if severities else "ok"


def _sweep_verdict(about_sweep: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    verdict = _verdict(about_sweep)
    return "flag" if verdict == "ok" and any(step["verdict"] != "ok" for step in steps) else verdict


def _not_checked(results: Mapping[str, Validated], measured: bool) -> list[dict[str, str]]:
    """Checks no part of which could be done, with the columns that would allow them."""
    done = {
        outcome["expectation_config"]["meta"]["check"]
        for validated in results.values()
        for outcome in validated.result["results"]
    }
    missing: dict[str, list[str]] = {}
    for check in CHECKS:
        applies = not check.imported if measured else check.table != "requests"
        if check.id not in done and applies:
            missing.setdefault(check.id, []).extend(
                c for c in check.columns if c not in missing.get(check.id, [])
            )
    return [
        {"check": name, "reason": f"not checked: nothing is known of {', '.join(columns)}."}
        for name, columns in missing.items()
    ]


def _plain(value: Any) -> Any:
    """A cell as JSON: integers as such, blank as None."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Sentence(string.Formatter):
    """Fills a reason; what is unknown is printed as ``?``."""

    def get_value(self, key: int | str, _: Any, row: Mapping[str, Any]) -> Any:
        return row.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "?"
        return super().format_field(value, format_spec)
