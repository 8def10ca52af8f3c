"""From judged steps to ``limits.json``: the number, what bound it, how sure, and what may be claimed.

Alone on the server, a class's limit is the highest concurrency that passed in steps of proof size with no
failed step below it; for an interactive class capped by the upper edge of the latency knee. Steps that data
quality rejected are not there. Status:

- ``proven``: something above stopped it (a step that did not pass, the knee);
- ``lower_bound``: nothing did: the ladder, or the budget, ended first;
- ``no_passing_step``: even the lowest step measured provably failed;
- ``insufficient_evidence``: steps were measured, and prove neither;
- ``not_measured``: no step of the class could be used; ``rejected``: data quality rejected the sweep, or all
  steps that could have proven something.

Judging the same rows by other floors, shares or objectives is allowed, and so is a shorter deadline
(flagged: the server was loaded by requests that would have been cut). A longer deadline, another workload
or another rule is not: the rows cannot know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from include.capacity.config import ServiceClass
from include.capacity.errors import ConfigError
from include.capacity.limits.bounds import ALPHA, mean_half_width
from include.capacity.limits.claims import claim, without_limit
from include.capacity.limits.evidence import Evidence, objectives, share, together, verdict
from include.capacity.limits.imported import imported_evidence
from include.capacity.limits.knees import (
    Counts,
    LatencyKnee,
    Throughput,
    completion_knee,
    isotonic_crossing,
    kneedle,
    latency_knee,
    server_bound,
    throughput_knee,
)
from include.capacity.limits.planner import (
    Problem,
    Search,
    SharedSearch,
    problem_of,
    without_stray_crashes,
)
from include.capacity.limits.plateaus import causes_of
from include.capacity.limits.saturation import saturation
from include.capacity.limits.table import limits_table
from include.capacity.words import LimitStatus, Phase, Severity, State, StopReason

__all__ = ["compute_limits", "judged_classes", "limits_table"]

SCHEMA = 1
ALONE = frozenset({Phase.SCOUT, Phase.PROVE, Phase.GRID})
"""Phases that say something about a class alone on the server."""


def compute_limits(
    sweep_json: Mapping[str, Any],
    evidence: Sequence[Evidence],
    steps: pd.DataFrame,
    quality: Mapping[str, Any] | None,
    *,
    classes: Mapping[str, ServiceClass] | None = None,
) -> dict[str, Any]:
    """``limits.json`` of one model.

    ``evidence`` was judged by ``classes`` (default: the sweep's own); for imported sweeps it is empty and
    made from ``steps``. ``quality``: quality.json, or None if nothing was checked. ConfigError if
    ``classes`` asks for what the rows cannot know.
    """
    asked, flags = judged_classes(sweep_json, classes)
    rejected = _rejected_rows(steps, quality)
    whole = bool(quality) and quality is not None and quality.get("verdict") == Severity.REJECT
    limits: list[dict[str, Any]] = []
    if sweep_json.get("source", "measured") == "measured":
        judged = without_stray_crashes(_without_rejected(evidence, quality))
        problem = replace(problem_of({**sweep_json, "budget_s": None}), classes=asked)
        sweep = _Sweep(sweep_json, flags, whole)
        limits += [_alone(sweep, problem, name, judged) for name in asked]
        if problem.shared and len(asked) > 1:
            limits += _shared(sweep, problem, judged)
    else:
        for series, names, mine, bad in _series(steps, rejected, asked):
            sweep = _Sweep({**sweep_json, "series": series}, flags, whole)
            for name in names:
                found = imported_evidence(mine, name, asked[name])
                found = [_reject(one, why) if why else one for one, why in zip(found, bad, strict=True)]
                problem = Problem(model=sweep_json["model"], classes=asked, mode="exact")
                limits.append(_alone(sweep, problem, name, found))
    return {
        "schema": SCHEMA,
        "model": sweep_json["model"],
        "run_id": sweep_json.get("run_id"),
        "attempt": sweep_json.get("attempt", 1),
        "series": sweep_json.get("series", ""),
        "source": sweep_json.get("source", "measured"),
        "stack_id": sweep_json.get("stack_id"),
        "comparison_ids": dict(sweep_json.get("comparison_ids") or {}),
        "simulated": bool(sweep_json.get("simulated")),
        "clock_scale": sweep_json.get("clock_scale", 1.0),
        "created_at": sweep_json.get("created_at"),
        "valid_until": None,
        "flags": flags,
        "limits": limits,
        "saturation": saturation(
            steps, rejected != "", sweep_json["model"], whole, _causes_of_rows(steps, quality)
        ),
    }


def judged_classes(
    sweep_json: Mapping[str, Any], classes: Mapping[str, ServiceClass] | None
) -> tuple[dict[str, ServiceClass], list[str]]:
    """(classes to judge by, remarks): the sweep's own, with those of ``classes`` put in their place.

    Classes of an imported sweep, which was not measured for any, are taken as given. ConfigError if a
    class asks for what the rows cannot know.
    """
    own = {
        name: ServiceClass.model_validate(data) for name, data in (sweep_json.get("classes") or {}).items()
    }
    if classes is None or sweep_json.get("source", "measured") != "measured":
        return dict(classes if classes is not None else own), []
    flags = []
    for name, asked in classes.items():
        if name not in own:
            continue
        measured = own[name]
        for field in ("workload", "rule"):
            if getattr(asked, field) != getattr(measured, field):
                raise ConfigError(
                    f"class {name}: {field} differs from the one measured; limits can be computed again "
                    "with other floors, shares and objectives only"
                )
        if asked.deadline_s > measured.deadline_s:
            raise ConfigError(
                f"class {name}: deadline_s {asked.deadline_s:g} is longer than the {measured.deadline_s:g} s "
                "it was measured with: what had not completed by then was cut off and cannot be judged; "
                "measure again"
            )
        if asked.deadline_s < measured.deadline_s:
            flags.append(
                f"{name}: judged by a deadline of {asked.deadline_s:g} s, measured with "
                f"{measured.deadline_s:g} s: the server also worked on requests that would have been cut, so "
                "the limit may be lower than one measured with it"
            )
        if asked != measured.model_copy(update={"deadline_s": asked.deadline_s}):
            flags.append(f"{name}: judged by another floor or objective than it was searched with")
    return {name: classes.get(name, one) for name, one in own.items()}, flags


# -- what may be used


def _identity(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What names a step row in steps.csv and quality.json alike."""
    names = ("series", "service_class", "workload", "phase")
    texts = [str(row.get(name)) if _known(row.get(name)) else "" for name in names]
    numbers = [int(row[name]) if _known(row.get(name)) else None for name in ("concurrency", "repeat")]
    return (*texts, *numbers)


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _reasons(entry: Mapping[str, Any]) -> str:
    reasons = [f["reason"] for f in entry.get("findings") or [] if f.get("severity") == Severity.REJECT]
    return "; ".join(reasons) or "rejected by data quality"


def _rejected_steps(quality: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return [one for one in (quality or {}).get("steps") or [] if one.get("verdict") == Severity.REJECT]


def _rejected_rows(steps: pd.DataFrame, quality: Mapping[str, Any] | None) -> pd.Series:
    """Why each row of the step table is rejected; blank if it is not."""
    why = {_identity(one): _reasons(one) for one in _rejected_steps(quality)}
    return pd.Series(
        [why.get(_identity(row), "") for row in steps.to_dict("records")], index=steps.index, dtype=object
    )


def _causes_of_rows(steps: pd.DataFrame, quality: Mapping[str, Any] | None) -> pd.Series:
    """What set the throughput of each row of the step table, if not the server."""
    found = {
        _identity(one): causes_of(one.get("findings") or []) for one in (quality or {}).get("steps") or []
    }
    return pd.Series(
        [found.get(_identity(row), frozenset()) for row in steps.to_dict("records")],
        index=steps.index,
        dtype=object,
    )


def _without_rejected(evidence: Sequence[Evidence], quality: Mapping[str, Any] | None) -> list[Evidence]:
    why = {(one.get("key"), one.get("service_class")): _reasons(one) for one in _rejected_steps(quality)}
    return [
        _reject(e, why[e.key, e.service_class]) if (e.key, e.service_class) in why else e for e in evidence
    ]


def _reject(e: Evidence, why: str) -> Evidence:
    return replace(e, valid=False, why=f"rejected: {why}", state=None)


def _series(
    steps: pd.DataFrame, rejected: pd.Series, classes: Mapping[str, ServiceClass]
) -> list[tuple[str, list[str], pd.DataFrame, list[str]]]:
    """(series, classes to judge it by, its rows, why each is rejected) of an imported step table."""
    if steps.empty or not classes:
        return []
    table = steps.assign(
        **{
            name: steps[name].map(lambda v: str(v) if _known(v) else "") if name in steps else ""
            for name in ("series", "service_class", "workload")
        }
    )
    result = []
    for (series, name, _), rows in table.groupby(["series", "service_class", "workload"], sort=False):
        names = [str(name)] if name in classes else [] if name else list(classes)
        result.append((str(series), names, rows, [str(why) for why in rejected.loc[rows.index]]))
    return result


# -- one concurrency, its repeats pooled


@dataclass(frozen=True, kw_only=True)
class Level:
    """All usable steps of one class at one concurrency that are of proof size."""

    concurrency: int
    steps: list[Evidence]
    state: State
    attempted: int
    completed: int
    met: int
    n_effective: float | None
    lower_y: float | None
    lower_z: float | None
    seconds: float | None


def levels(evidence: Sequence[Evidence], service: ServiceClass) -> list[Level]:
    """Levels in ascending order.

    Repeats are judged together, and pass only if each of them holds by point estimate: how much one moment
    differs from another cannot be told from two or three of them.
    """
    by_n: dict[int, list[Evidence]] = {}
    for e in evidence:
        if e.proof and e.usable and not e.beside:
            by_n.setdefault(e.concurrency, []).append(e)
    return [_level(n, by_n[n], service) for n in sorted(by_n)]


def _level(n: int, steps: list[Evidence], service: ServiceClass) -> Level:
    seconds = [e.window_s for e in steps]
    state = State(steps[0].state or State.INCONCLUSIVE)
    effective, lower_y, lower_z = steps[0].n_effective, steps[0].lower_y, steps[0].lower_z
    if len(steps) > 1:
        y, z = together(steps)
        lower_y, lower_z = y.lower, z.lower
        if effective is not None:
            effective = min(y.n_effective, z.n_effective)
        state = verdict(service, y, z)
        if state is State.PASS and any(e.failed or e.holds is False for e in steps):
            state = State.INCONCLUSIVE
    if any(e.crashed for e in steps):
        state = State.FAIL
    return Level(
        concurrency=n,
        steps=steps,
        state=state,
        attempted=sum(e.attempted for e in steps),
        completed=sum(e.completed for e in steps),
        met=sum(e.met for e in steps),
        n_effective=effective,
        lower_y=lower_y,
        lower_z=lower_z,
        seconds=sum(s for s in seconds if s is not None) if None not in seconds else None,
    )


# -- one limit


@dataclass(frozen=True)
class _Sweep:
    about: Mapping[str, Any]
    flags: Sequence[str]
    rejected: bool


def _alone(sweep: _Sweep, problem: Problem, name: str, evidence: Sequence[Evidence]) -> dict[str, Any]:
    """The limit of one class alone on the server."""
    service = problem.classes[name]
    mine = [e for e in evidence if e.service_class == name and not e.beside]
    used = [e for e in mine if e.usable and (e.phase in ALONE or e.crashed)]
    proofs = levels([e for e in used if e.phase in ALONE], service)
    knee = _latency_knee(problem, name, used)
    fails = _fails(used, proofs)
    lowest_fail = min(fails, default=None)
    passed = [
        level for level in proofs
        if level.state is State.PASS and (lowest_fail is None or level.concurrency < lowest_fail)
    ]  # fmt: skip
    cap = knee.high if knee and service.rule == "interactive" and service.cap_at_latency_knee else None

    entry = _entry(sweep, problem.model, name, service, "alone")
    entry["knees"] = _knees(used, service, knee)
    entry["best_estimate"] = _best_estimate(used, service)
    if sweep.rejected or not passed:
        status, reason = _why_none(sweep, mine, used, proofs, lowest_fail)
        entry |= {"status": status, "reason": reason, "claim": without_limit(status, reason)}
        entry["bracket"] = [None, lowest_fail]
        entry["first_failing"] = lowest_fail
        entry["failing"] = _failing(used, proofs, lowest_fail, service)
        entry["server_bound_by"] = _server_bound(used, lowest_fail)
        return entry

    top = passed[-1]
    limit = top.concurrency if cap is None else min(top.concurrency, cap)
    at = next((level for level in passed if level.concurrency == limit), top)
    above = _above(used, proofs, limit, cap)
    at_knee = cap is not None and limit >= cap
    cut = problem.mode == "find" and Search(problem, name, mine, tries=1).unfinished()
    stopped = (at_knee or above is not None) and not cut
    entry |= {
        "limit": limit,
        "status": LimitStatus.PROVEN if stopped else LimitStatus.LOWER_BOUND,
        "bound_by": _bound_by(used, above, service, at_knee, cut, problem.ceiling == limit),
        "bracket": [limit, above],
        "first_failing": min((n for n in fails if n > limit), default=None),
        "operating_range": _operating_range(entry["knees"]["throughput"], limit),
        "server_bound_by": _server_bound(used, above),
        "evidence": _evidence(at, service),
    }
    entry["failing"] = _failing(used, proofs, entry["first_failing"], service)
    if not stopped:
        entry["reason"] = (
            "the search was cut short (budget or interruption)" if cut else f"the steps ended at {limit}"
        )
    entry["claim"] = claim(entry, simulated=bool(sweep.about.get("simulated")))
    return entry


def _fails(used: Sequence[Evidence], proofs: Sequence[Level]) -> list[int]:
    """Concurrencies that provably failed.

    Where there is a proof, its repeats pooled say so; a failed scout beside a proof that decided
    nothing still counts.
    """
    at = {level.concurrency: level.state for level in proofs}
    fails = [n for n, state in at.items() if state is State.FAIL]
    for e in used:
        silent = e.concurrency in at if e.proof else at.get(e.concurrency) is State.PASS
        if e.failed and not silent:
            fails.append(e.concurrency)
    return fails


def _entry(sweep: _Sweep, model: str, name: str, service: ServiceClass, measured: str) -> dict[str, Any]:
    """A limit entry with everything that does not depend on the verdict."""
    return {
        "model": model,
        "series": sweep.about.get("series", ""),
        "class": name,
        "limit": None,
        "status": LimitStatus.NOT_MEASURED,
        "measured": measured,
        "beside": {},
        "bound_by": None,
        "server_bound_by": "unknown",
        "bracket": [None, None],
        "first_failing": None,
        "failing": None,
        "operating_range": None,
        "confidence": 1 - ALPHA,
        "deadline_s": service.deadline_s,
        "completion_floor": service.completion_floor,
        "objectives": {
            latency: {"at_most_s": objective.at_most_s, "share": objective.share}
            for latency, objective in objectives(service)
        },
        "cap_at_latency_knee": service.cap_at_latency_knee,
        "rule": service.rule,
        "workload": service.workload.name,
        "comparison_id": (sweep.about.get("comparison_ids") or {}).get(name),
        "stack_id": sweep.about.get("stack_id"),
        "server_starts": sweep.about.get("server_starts", 1),
        "source": sweep.about.get("source", "measured"),
        "reason": None,
        "claim": "",
        "flags": [flag for flag in sweep.flags if flag.startswith(f"{name}: ")],
        "best_estimate": None,
        "change": None,
        "evidence": None,
        "knees": None,
    }


def _why_none(
    sweep: _Sweep,
    mine: Sequence[Evidence],
    used: Sequence[Evidence],
    proofs: Sequence[Level],
    lowest_fail: int | None,
) -> tuple[LimitStatus, str]:
    """(status, reason) of a class without a limit."""
    if sweep.rejected:
        return LimitStatus.REJECTED, "data quality rejected the sweep"
    if not used:
        unusable = [e for e in mine if not e.usable]
        turned_down = [e for e in unusable if e.why and e.why.startswith("rejected: ")]
        if turned_down:
            return LimitStatus.REJECTED, f"all steps were {turned_down[0].why}"
        why = next((e.why or e.error for e in unusable if e.why or e.error), "no step was measured")
        imported = sweep.about.get("source", "measured") != "measured"
        status = LimitStatus.INSUFFICIENT_EVIDENCE if imported else LimitStatus.NOT_MEASURED
        return status, str(why)
    lost = [e for e in mine if e.proof and not e.usable and e.why and e.why.startswith("rejected: ")]
    if lost and not proofs:
        return LimitStatus.REJECTED, f"the proof was {lost[0].why}"
    lowest = min(e.concurrency for e in used)
    if lowest_fail == lowest:
        crash = next((e for e in used if e.concurrency == lowest and e.crashed), None)
        how = "crashed the server" if crash else "provably failed"
        return LimitStatus.NO_PASSING_STEP, f"the lowest step measured, {lowest}, {how}"
    if proofs:
        tried = ", ".join(f"{level.concurrency} {level.state.value}" for level in proofs)
        capped = (e for level in proofs for e in level.steps if e.stop_reason == StopReason.CAP)
        return LimitStatus.INSUFFICIENT_EVIDENCE, (
            f"no step of proof size passed ({tried}){_too_slow(next(capped, None))}"
        )
    return LimitStatus.INSUFFICIENT_EVIDENCE, "the search ended before anything was proven"


def _too_slow(e: Evidence | None) -> str:
    """What to say of a proof that ended at its time cap."""
    if e is None or e.window_s is None:
        return ""
    return (
        f"; the server is too slow for the time a proof may take: {e.attempted:,} requests in "
        f"{e.window_s:,.0f} s at {e.concurrency}, {e.planned:,} or more wanted: raise prove_cap_slow_s"
    )


def _latency_knee(problem: Problem, name: str, used: Sequence[Evidence]) -> LatencyKnee | None:
    """The knee as the search saw it; of given steps, among all of them."""
    if problem.mode == "find":
        scouts = [e for e in used if e.phase == Phase.SCOUT]
        ladder = set(problem.classes[name].ladder)
        return latency_knee(
            [e for e in scouts if e.concurrency in ladder],
            [e for e in scouts if e.concurrency not in ladder],
        )
    return latency_knee([e for e in used if e.phase == Phase.GRID])


def _above(used: Sequence[Evidence], proofs: Sequence[Level], limit: int, cap: int | None) -> int | None:
    """The lowest concurrency above the limit that did not pass; None if all there is did."""
    settled = {level.concurrency for level in proofs}
    found = [level.concurrency for level in proofs if level.state is not State.PASS]
    found += [e.concurrency for e in used if e.concurrency not in settled and (e.failed or e.holds is False)]
    if cap is not None:
        found += [e.concurrency for e in used if e.concurrency >= cap]
    return min((n for n in found if n > limit), default=None)


def _bound_by(
    used: Sequence[Evidence],
    above: int | None,
    service: ServiceClass,
    at_knee: bool,
    cut: bool,
    at_ceiling: bool,
) -> str:
    """latency_knee, server_crash, completion, ttft, tpot, e2e, budget, ceiling or ladder."""
    if at_knee:
        return "latency_knee"
    if above is None:
        return "budget" if cut else "ceiling" if at_ceiling else "ladder"
    there = [e for e in used if e.concurrency == above]
    if any(e.crashed for e in there):
        return "server_crash"
    e = max(there, key=lambda e: e.attempted)
    enough = e.lower_y if e.proof and e.state == State.INCONCLUSIVE else e.completed / max(1, e.attempted)
    if not e.missed or enough is None or enough < service.completion_floor:
        return "completion"
    return max(e.missed, key=lambda latency: e.missed[latency])


def _server_bound(used: Sequence[Evidence], n: int | None) -> str:
    there = [e for e in used if e.concurrency == n]
    return server_bound(there[-1].server, there[-1].outcomes) if there else "unknown"


def _evidence(level: Level, service: ServiceClass) -> dict[str, Any]:
    last = level.steps[-1]
    return {
        "concurrency": level.concurrency,
        "n": level.attempted,
        "completed": level.completed,
        "objective_met": level.met if share(service) is not None else None,
        "n_effective": level.n_effective,
        "seconds": level.seconds,
        "repeats": len(level.steps),
        "completion_rate": level.completed / level.attempted,
        "completion_lower": level.lower_y,
        "completion_floor": service.completion_floor,
        "objective_lower": level.lower_z if share(service) is not None else None,
        "objective_share": share(service),
        "request_per_s": last.request_per_s,
        "ttft_p95_s": last.ttft_p95_s,
        "stop_reason": last.stop_reason,
        "steps": [e.key for e in level.steps],
    }


def _failing(
    used: Sequence[Evidence], proofs: Sequence[Level], n: int | None, service: ServiceClass
) -> dict[str, Any] | None:
    """The counts behind the first provable failure; None without one, or if all there is is a crash."""
    asked = share(service) is not None
    for level in proofs:
        if level.concurrency == n and level.state is State.FAIL and level.attempted:
            return _counted(
                n, level.attempted, level.completed, level.met if asked else None, level.n_effective
            )
    there = [e for e in used if e.concurrency == n and e.state == State.FAIL and e.attempted]
    if n is None or not there:
        return None
    e = max(there, key=lambda e: e.attempted)
    return _counted(n, e.attempted, e.completed, e.met if asked else None, e.n_effective)


def _counted(
    concurrency: int, n: int, completed: int, met: int | None, effective: float | None
) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "n": n,
        "completed": completed,
        "objective_met": met,
        "n_effective": effective,
    }


# -- knees and annotations


def _knees(used: Sequence[Evidence], service: ServiceClass, knee: LatencyKnee | None) -> dict[str, Any]:
    counts = _counts(used, "completed")
    curve = _curve(used)
    drop = completion_knee(counts)
    errors = [e for e in used if e.completed < e.attempted]
    first = min(errors, key=lambda e: (e.concurrency, e.started_at), default=None)
    crashes = [e.concurrency for e in used if e.crashed]
    return {
        "completion": {"low": drop[0], "high": drop[1]} if drop else None,
        "latency": {"low": knee.low, "high": knee.high} if knee else None,
        "throughput": throughput_knee(curve),
        "kneedle": kneedle(curve),
        "first_error_concurrency": first.concurrency if first else None,
        "first_error_s": first.first_error_s if first else None,
        "server_crashed_at": min(crashes, default=None),
        "deadline_s": service.deadline_s,
    }


def _counts(used: Sequence[Evidence], what: str) -> list[Counts]:
    """Successes by concurrency over all steps, scouts included: for knees and estimates, not for limits."""
    total: dict[int, tuple[int, int]] = {}
    for e in used:
        if e.crashed:
            continue
        n, x = total.get(e.concurrency, (0, 0))
        total[e.concurrency] = (n + e.attempted, x + int(getattr(e, what)))
    return [Counts(n, *total[n]) for n in sorted(total)]


def _curve(used: Sequence[Evidence]) -> list[Throughput]:
    """Completed requests per second by concurrency: of proof-sized steps where there are, else of scouts."""
    by_n: dict[int, list[Evidence]] = {}
    for e in used:
        if e.request_per_s is not None and not e.crashed:
            by_n.setdefault(e.concurrency, []).append(e)
    result = []
    for n, steps in sorted(by_n.items()):
        best = [e for e in steps if e.proof] or steps
        x = np.array([e.request_per_s for e in best], dtype=float)
        if x.size > 1:
            half = mean_half_width(x)
            low, high = float(x.mean()) - half, float(x.mean()) + half
        else:
            low, high = (
                math.nan if end is None else end
                for end in (best[0].request_per_s_low, best[0].request_per_s_high)
            )
        result.append(Throughput(n, float(x.mean()), low, high))
    return result


def _best_estimate(used: Sequence[Evidence], service: ServiceClass) -> float | None:
    """Where the rates cross their floors by isotonic fit; shown, never exported."""
    crossings = [isotonic_crossing(_counts(used, "completed"), service.completion_floor)]
    q = share(service)
    if q is not None:
        crossings.append(isotonic_crossing(_counts(used, "met"), q))
    known = [x for x in crossings if x is not None]
    return round(min(known), 1) if known else None


def _operating_range(knee: Mapping[str, int] | None, limit: int) -> list[int] | None:
    """[throughput knee, limit]; None if the limit lies below the knee."""
    if knee is None or knee["concurrency"] > limit:
        return None
    return [knee["concurrency"], limit]


# -- classes together


def _shared(sweep: _Sweep, problem: Problem, evidence: Sequence[Evidence]) -> list[dict[str, Any]]:
    """One entry a class for the pair proven together; none if there was no search for one."""
    search = SharedSearch(problem, evidence)
    together = [e for e in evidence if e.phase == Phase.SHARED]
    if not together:
        return []
    loads = {e.service_class: e for e in search.proven()}
    size = sum(e.concurrency for e in loads.values())
    larger = [
        e for e in together
        if e.usable and e.concurrency + sum(e.beside.values()) > size and (e.failed or e.holds is False)
    ]  # fmt: skip
    result = []
    for name, service in problem.classes.items():
        entry = _entry(sweep, problem.model, name, service, "shared")
        e = loads.get(name)
        if e is None or sweep.rejected:
            status = LimitStatus.REJECTED if sweep.rejected else LimitStatus.INSUFFICIENT_EVIDENCE
            reason = "data quality rejected the sweep" if sweep.rejected else "no pair was proven together"
            entry |= {"status": status, "reason": reason, "claim": without_limit(status, reason)}
            result.append(entry)
            continue
        missed = min(
            (x for x in larger if x.service_class == name and x.concurrency > e.concurrency),
            key=lambda x: x.concurrency,
            default=None,
        )
        entry |= {
            "limit": e.concurrency,
            "status": LimitStatus.PROVEN if larger else LimitStatus.LOWER_BOUND,
            "beside": dict(e.beside),
            "bound_by": "shared",
            "bracket": [e.concurrency, missed.concurrency if missed else None],
            "server_bound_by": server_bound(missed.server, missed.outcomes) if missed else "unknown",
            "evidence": _evidence(_level(e.concurrency, [e], service), service),
        }
        entry["claim"] = claim(entry, simulated=bool(sweep.about.get("simulated")))
        result.append(entry)
    return result
