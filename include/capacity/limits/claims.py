"""What may be claimed of a limit, in one sentence, with everything it depends on.

Not claimed: events rarer than about 3 / measured time, other lengths, other starts, two classes at
once (unless measured so), waiting inside the gateway, the user's network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AwareDatetime, BaseModel, Field

from include.capacity.config import MAX_CONCURRENCY, validate
from include.capacity.errors import ConfigError, DataError
from include.capacity.words import EXPORTABLE, LimitStatus, StopReason

OBJECTIVES = {
    "ttft": "had the first token within {}",
    "tpot": "had {} or less between tokens",
    "e2e": "had the whole answer within {}",
}

NO_LIMIT = {
    LimitStatus.NO_PASSING_STEP: "No limit: no step passed",
    LimitStatus.INSUFFICIENT_EVIDENCE: "No limit: the evidence is insufficient",
    LimitStatus.NOT_MEASURED: "No limit: not measured",
    LimitStatus.REJECTED: "No limit: the measurement was rejected",
}


def without_limit(status: LimitStatus, reason: str) -> str:
    """The sentence for a class without a limit."""
    return f"{NO_LIMIT[status]}: {reason.removesuffix('.')}."


def why_not(entry: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """Why no gateway and no plan may use a limit; None if they may. ``about``: the sweep's ``sweep.json``."""
    if entry.get("limit") is None or entry.get("status") not in EXPORTABLE:
        return str(entry.get("reason") or entry.get("claim") or f"status {entry.get('status')}")
    if (entry.get("source") or about.get("source") or "measured") != "measured":
        return "imported, not measured by us"
    return None


class _Evidence(BaseModel):
    """The part of an entry's evidence that others calculate with."""

    concurrency: float | None = Field(None, ge=0, allow_inf_nan=False)
    request_per_s: float | None = Field(None, ge=0, allow_inf_nan=False)


class _Entry(BaseModel):
    """The part of a limit's entry that others act on."""

    service_class: str = Field(alias="class", min_length=1)
    limit: int | None = Field(None, ge=1, le=MAX_CONCURRENCY, strict=True)
    deadline_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    evidence: _Evidence | None = None
    valid_until: AwareDatetime | None = None
    report: str = ""


def entries_of(limits: Any, where: str) -> list[dict[str, Any]]:
    """The entries of a ``limits.json``; DataError if a gateway or a plan could not trust what they hold.

    The file may have been edited, or cut short: a limit of -3 or ``"25"`` must not become a gateway's.
    """
    found = limits.get("limits") if isinstance(limits, dict) else None
    if not isinstance(found, list):
        raise DataError(f"{where}: expected a list of limits, found none")
    for at, entry in enumerate(found):
        try:
            validate(_Entry, entry, f"{where}: limits.{at}")
        except ConfigError as error:
            raise DataError(str(error)) from error
    return found


def claim(entry: Mapping[str, Any], *, simulated: bool) -> str:
    """The sentence for a limit entry of ``limits.json`` (its numbers filled in)."""
    evidence = entry["evidence"]
    beside = " and ".join(f"{n} {name}" for name, n in entry["beside"].items())
    where = f"together with {beside} in flight" if beside else "alone on the server"
    met = [
        OBJECTIVES[name].format(seconds(objective["at_most_s"]))
        for name, objective in entry["objectives"].items()
    ]
    parts = []
    if met:
        parts.append(f"at least {percent(evidence['objective_share'])} {' and '.join(met)}")
    parts.append(f"at least {percent(entry['completion_floor'])} completed within {entry['deadline_s']:g} s")
    above = entry["bracket"][1]
    return (
        f"{'Simulated server: with' if simulated else 'With'} at most {entry['limit']:,} in flight, "
        f"this stack and workload, {where}: {' and '.join(parts)} ({_grounds(entry)}). {_end(entry, above)}"
    )


def _grounds(entry: Mapping[str, Any]) -> str:
    evidence = entry["evidence"]
    effective = evidence["n_effective"]
    grounds = [f"n {evidence['n']:,}"]
    grounds.append("correlation unknown" if effective is None else f"effective {round(effective):,}")
    grounds.append("one-sided 95 %")
    if evidence["seconds"] is not None:
        grounds.append(f"{evidence['seconds']:,.0f} s measured")
    if evidence["stop_reason"] == StopReason.CAP:
        grounds.append("stopped by the time cap")
    if evidence["repeats"] > 1:
        grounds.append(f"{evidence['repeats']} runs")
    if entry["source"] == "measured":
        starts = entry["server_starts"]
        grounds.append("one server start" if starts == 1 else f"{starts} server starts")
    else:
        grounds.append("imported")
    if evidence["concurrency"] != entry["limit"]:
        grounds.append(f"measured at {evidence['concurrency']:,}")
    return ", ".join(grounds)


def _end(entry: Mapping[str, Any], above: int | None) -> str:
    knee = (entry.get("knees") or {}).get("latency")
    if entry["bound_by"] == "latency_knee" and knee:
        return (
            f"Capped at the latency knee ({knee['low']:,} to {knee['high']:,}): beyond it the first token "
            "comes later faster than the load grows."
        )
    if entry["status"] == LimitStatus.LOWER_BOUND:
        return "Nothing above was shown to fail: a lower bound" + (
            f" ({entry['reason']})." if entry["reason"] else "."
        )
    failing = entry["first_failing"]
    if above is None or above == failing:
        return f"First failing: {failing:,}." if failing else "Larger pairs did not hold."
    return f"Above it {above:,} did not pass" + (f"; first failing: {failing:,}." if failing else ".")


def percent(share: float) -> str:
    """``95 %``; ``99.9 %``."""
    return f"{100 * share:.6g} %"


def seconds(value: float) -> str:
    """``1.0 s``; ``50 ms``."""
    return f"{1000 * value:g} ms" if value < 0.1 else f"{value:.1f} s"
