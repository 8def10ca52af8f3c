"""Sentences computed from the data, each only when the data carry it.

Every function returns a list of sentences, empty when there is nothing to say. Numbers stand with their
n. The rules, by sentence:

peak            Of the concurrencies measured, the one with the highest throughput of completed requests.
                "is no faster than at b": b is the lowest concurrency whose throughput is at least 99 % of
                the peak, or at least 95 % with overlapping 95 % t-intervals (three repeats or more).
                "still rises": the peak is the highest concurrency measured, by more than 5 %.
waste           At some step at least 2 % of the tokens generated belong to requests that failed.
first failures  The lowest measured concurrency above the limit at which an objective is missed by point
                estimate, and how: which failures, or how late the first token came.
more raw throughput, lower limit
                Same class and workload, same accelerator, both limits usable and measured alone; the raw
                peak at least 5 % higher, and the brackets of the two limits apart.
which model     Completed requests per second measured at the limit, among proven limits on one kind and
                count of accelerator, of one workload and with the same objectives. Two whose 95 %
                intervals overlap are called equal; who is left out is named, with why.
imported        Whose numbers these are, how many of the steps may be used, which kinds of conclusion their
                columns carry, and why no limit of theirs is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from include.capacity.limits.plateaus import CAUSES, CHANGES, causes_of
from include.capacity.report.data import (
    FAILURES,
    Frame,
    ModelData,
    bracket_of,
    exportable,
    known,
    text,
    traffic_of,
)
from include.capacity.report.words import count, join, number, percent, plateau_words, rate, seconds
from include.capacity.words import LimitStatus, Outcome

SAME_SHARE = 0.99
KNEE_SHARE = 0.95
RISING = 1.05
HIGHER_PEAK = 1.05
WASTE = 0.02

FAILURE_CLAUSES = {
    Outcome.REJECTED: "it sheds {share}",
    Outcome.SERVER_ERROR: "{share} end in a server error",
    Outcome.CONNECT_FAILED: "{share} get no connection",
    Outcome.CONNECTION_LOST: "{share} lose their connection",
    Outcome.FIRST_TOKEN_TIMEOUT: "{share} get no first token within {deadline}",
    Outcome.DEADLINE_EXCEEDED: "{share} are not done within {deadline}",
    Outcome.TRUNCATED: "{share} of the answers break off",
    Outcome.STREAM_ERROR: "{share} end with an error in the stream",
    Outcome.MALFORMED: "{share} of the answers are malformed",
    Outcome.EMPTY: "{share} of the answers are empty",
}


def throughput_column(curve: Frame) -> str | None:
    """Output tokens where they are known, else all tokens (imported data), else None."""
    for column in ("output_tok_per_s", "total_tok_per_s"):
        if curve[column].notna().any():
            return column
    return None


def peak_sentences(curve: Frame) -> list[str]:
    """Where throughput of completed requests peaks, and since when it is no faster."""
    column = throughput_column(curve)
    if column is None:
        return []
    found = curve[column].dropna()
    if len(found) < 2:
        return []
    peak, top = int(found.idxmax()), float(found.max())
    if not top > 0:
        return ["No request completed at any concurrency measured."]
    subject = "Throughput of completed requests"
    before = found[found.index < peak]
    if peak == found.index.max() and top > RISING * float(before.max()):
        return [
            f"{subject} still rises at {number(peak)}, the highest concurrency measured: {rate(top)} tok/s, "
            f"after at most {rate(before.max())} at {number(before.idxmax())}. Where it peaks was not seen."
        ]
    sentence = f"{subject} peaks at {rate(top)} tok/s at {number(peak)}"
    for at, value in before.items():
        overlap = known(curve.at[at, f"{column}_high"]) is not None and (
            curve.at[at, f"{column}_high"] >= curve.at[peak, f"{column}_low"]
        )
        if value >= SAME_SHARE * top or (value >= KNEE_SHARE * top and overlap):
            return [f"{sentence}, but is no faster than at {number(at)} ({rate(value)} tok/s)."]
        if value >= KNEE_SHARE * top:
            return [f"{sentence}; {percent(value / top)} of that is reached at {number(at)} already."]
    return [f"{sentence}."]


def limit_and_peak_sentences(data: ModelData, service_class: str, series: str = "") -> list[str]:
    """That the peak is no place to work at: the objectives fail there."""
    limit = data.limit(service_class, series)
    curve = data.curve(service_class, series)
    column = throughput_column(curve)
    if not exportable(limit) or column is None or curve[column].dropna().empty:
        return []
    peak = int(curve[column].idxmax())
    if peak <= limit["limit"]:
        return []
    clause = failure_clause(data, service_class, series, peak)
    if not clause:
        return []
    return [
        f"The peak is not a safe place to work: the safe limit is {number(limit['limit'])}, and {clause}."
    ]


def waste_sentences(curve: Frame) -> list[str]:
    """How much of what the server generates belongs to requests that fail in the end."""
    made, useful = curve["raw_output_tok_per_s"], curve["output_tok_per_s"]
    lost = (1 - useful / made.where(made > 0)).dropna()
    if lost.empty or lost.max() < WASTE:
        return []
    at = int(lost.idxmax())
    return [
        f"At {number(at)} the server generates {rate(made[at])} tok/s, of which {rate(useful[at])} reach a "
        f"completed request: {percent(lost[at])} is work for requests that fail "
        f"({count(curve.at[at, 'attempted'])})."
    ]


def failure_clause(data: ModelData, service_class: str, series: str, at: int) -> str:
    """How a concurrency misses the class's objectives, by point estimate; blank if it does not."""
    curve = data.curve(service_class, series)
    rule = data.rule(service_class)
    if at not in curve.index:
        return ""
    row = curve.loc[at]
    floor, completion = known(rule.get("completion_floor")), known(row["completion"])
    if floor is not None and completion is not None and completion < floor:
        clauses = _failure_kinds(row, known(rule.get("deadline_s")) or known(row["deadline_s"]))
        if clauses:
            return f"{join(clauses)} at {number(at)} ({count(row['attempted'])})"
    for latency, name in (("ttft", "first token"), ("tpot", "time per token"), ("e2e", "whole answer")):
        objective = rule.get(latency) or {}
        at_most, share = known(objective.get("at_most_s")), known(objective.get("share"))
        if at_most is None or share is None:
            continue
        statistic = {0.5: "p50", 0.95: "p95", 0.99: "p99"}.get(share)
        value = known(row[f"{latency}_{statistic}_s"]) if statistic else None
        if value is not None and value > at_most:
            return (
                f"the {statistic} {name} takes {seconds(value)} at {number(at)}, objective "
                f"{seconds(at_most)} ({count(row[f'{latency}_n'])} completed)"
            )
    return ""


def first_failure_sentences(data: ModelData, service_class: str, series: str = "") -> list[str]:
    """What goes wrong first above the limit."""
    limit = data.limit(service_class, series)
    if not exportable(limit):
        return []
    for at in data.curve(service_class, series).index:
        if at > limit["limit"] and (clause := failure_clause(data, service_class, series, int(at))):
            return [f"Above the limit, {clause}."]
    return []


def server_sentences(curve: Frame) -> list[str]:
    """What the server's own metrics say about what fills up."""
    found = []
    running, waiting = curve["server_running_peak"], curve["server_waiting_mean"]
    if running.notna().any():
        most = running.max()
        queued = curve[(waiting >= 1) & (running >= 0.98 * most)]
        if len(queued) and queued.index.min() > most:
            at = int(queued.index.min())
            found.append(
                f"The server never ran more than {number(most)} requests at once; at {number(at)} "
                f"on average {rate(waiting[at])} more were waiting."
            )
    kv = curve["server_kv_use_peak"].dropna()
    if len(kv):
        at = int(kv.idxmax())
        if kv[at] >= 0.95:
            found.append(f"The KV cache was full: its use peaked at {percent(kv[at])}, at {number(at)}.")
        else:
            found.append(
                f"The KV cache was not seen full: its use peaked at {percent(kv[at])}, at {number(at)}."
            )
    preempted = curve["server_preemptions"].dropna()
    if len(preempted) and preempted.max() > 0:
        at = int(preempted.idxmax())
        found.append(f"Requests were preempted: {number(preempted[at])} times at {number(at)}.")
    return found


def plateau_sentences(data: ModelData, service_class: str, series: str = "") -> list[str]:
    """Where throughput no longer grows, and what set that: the server, the client or the test."""
    found = []
    for entry in data.saturation:
        flat = entry.get("plateau")
        if flat and traffic_of(entry) == (service_class, series):
            found.append(
                f"Throughput is flat from {number(flat['from'])} to {number(flat['to'])}; what set it: "
                f"{plateau_words(flat['set_by'])}. To move it: {flat['change']}."
            )
    return found


def model_sentences(data: ModelData, service_class: str, series: str = "") -> list[str]:
    """All conclusions about one class of one model."""
    curve = data.curve(service_class, series)
    if curve.empty:
        return []
    return [
        *first_failure_sentences(data, service_class, series),
        *peak_sentences(curve),
        *plateau_sentences(data, service_class, series),
        *limit_and_peak_sentences(data, service_class, series),
        *waste_sentences(curve),
        *server_sentences(curve),
    ]


def fleet_sentences(models: Sequence[ModelData]) -> list[str]:
    """Conclusions across models: where more raw throughput goes with a lower safe limit."""
    found = []
    for service_class in classes_of(models):
        for fast in models:
            found += [
                s
                for slow in models
                if slow is not fast and (s := _faster_yet_lower(fast, slow, service_class))
            ]
    return found


def choice_sentences(models: Sequence[ModelData]) -> list[str]:
    """Per class, which model completes the most requests at its limit, and the order of fallback."""
    return [
        _choice(service_class, ranked, models)
        for service_class in classes_of(models)
        for ranked in choices(models, service_class)
    ]


@dataclass(frozen=True)
class Choice:
    """A model at its limit."""

    model: ModelData
    limit: int
    request_per_s: float
    low: float | None
    """Ends of the 95 % interval of ``request_per_s``."""
    high: float | None
    n: float


def choices(models: Sequence[ModelData], service_class: str) -> list[list[Choice]]:
    """The models of a class that may be compared at their limits, best first; one list for each kind of
    accelerator, workload and objectives that two or more of them share.

    Only proven limits measured alone, with a step measured at the limit.
    """
    alike: dict[tuple[str, ...], list[Choice]] = {}
    for model in models:
        if not _proven(model, service_class):
            continue
        limit, curve = int(_limit(model, service_class)["limit"]), model.curve(service_class)
        if limit in curve.index and (x := known(curve.at[limit, "request_per_s"])) is not None:
            low, high = (known(curve.at[limit, f"request_per_s_{end}"]) for end in ("low", "high"))
            found = Choice(model, limit, x, low, high, float(curve.at[limit, "attempted"]))
            alike.setdefault(_comparable(model, service_class), []).append(found)
    return [
        sorted(found, key=lambda one: (-one.request_per_s, one.model.name))
        for found in alike.values()
        if len(found) > 1
    ]


def _choice(service_class: str, ranked: Sequence[Choice], models: Sequence[ModelData]) -> str:
    """One ranking in words."""
    first, *others = ranked
    order = join(
        [
            f"{one.model.name} ({rate(one.request_per_s)} at {number(one.limit)}"
            f"{', which is too close to it to be told apart' if _overlap(first, one) else ''})"
            for one in others
        ]
    )
    said = (
        f"{service_class}: {first.model.name} completes the most at its limit, {rate(first.request_per_s)} "
        f"requests/s at {number(first.limit)} in flight ({count(first.n)}); then {order}."
    )
    names = {one.model.name for one in ranked}
    left_out = [
        f"{model.name} ({_why_unranked(first.model, model, service_class)})"
        for model in models
        if model.name not in names
    ]
    return f"{said} Not compared with these: {join(left_out)}." if left_out else said


def _overlap(first: Choice, other: Choice) -> bool:
    """Whether the intervals of the two rates overlap; False where one is unknown."""
    return first.low is not None and other.high is not None and other.high >= first.low


def _why_unranked(ranked: ModelData, model: ModelData, service_class: str) -> str:
    if not _proven(model, service_class):
        return "no proven limit"
    here, there = _comparable(ranked, service_class), _comparable(model, service_class)
    if here[:2] != there[:2]:
        return "another accelerator"
    return "other objectives or workload" if here != there else "no step measured at its limit"


IMPORTED_COLUMNS = {
    "throughput": ("output_tok_per_s", "total_tok_per_s", "request_per_s"),
    "latency": tuple(
        f"{name}_{p}_s" for name in ("ttft", "tpot", "e2e") for p in ("p50", "p95", "p99", "mean")
    ),
    "completion": ("completion",),
}
"""What may be concluded, and columns of the step table of which one must be known for it."""


def origin(data: ModelData) -> str:
    """What imported numbers were read from, in short: the name of a file or folder, or how many files."""
    places = _places(data)
    return str(places[0]).rstrip("/").rpartition("/")[2] if len(places) == 1 else f"{len(places)} files"


def imported_sentences(models: Sequence[ModelData]) -> list[str]:
    """Paragraphs on imported numbers, for the top of a report; empty if all were measured."""
    return [sentence for data in models if data.imported for sentence in _imported(data)]


def _imported(data: ModelData) -> list[str]:
    places, kinds = _places(data), sorted(set((data.sweep.get("files") or {}).values()))
    where = join(places) if len(places) <= 3 else f"{len(places)} files, {places[0]} to {places[-1]}"
    curves = [data.curve(*traffic) for traffic in data.traffic]
    telling = [curve for curve in curves if len(curve) > 1]
    seen = {
        what: any(curve[list(columns)].notna().any(axis=None) for curve in telling)
        for what, columns in IMPORTED_COLUMNS.items()
    }
    carried, missing = ([what for what in seen if bool(seen[what]) is yes] for yes in (True, False))
    used = int((data.steps["why_unused"] == "").sum())
    all_steps = f"{number(len(data.steps))} steps of {data.name}"
    if carried:
        said = f"They say how {join(carried)} changed with the number of requests in flight"
        said += f", for {len(telling)} of {len(curves)} kinds of traffic." if len(curves) > 1 else "."
        said += f" Of {join(missing)} they say nothing." if missing else ""
    else:
        said = "No traffic was measured at two concurrencies, so nothing tells how it changes with them."
    return [
        f"These are somebody else's numbers, imported from {where}{f' ({join(kinds)})' if kinds else ''}. "
        "They were not measured here, only put through the checks that our own measurements go through.",
        f"What may be concluded: of {all_steps}, {number(used)} may be used. {said}"
        if used
        else f"Nothing may be concluded: of {all_steps}, none may be used.",
        "No limit is published for gateways: that takes fresh requests of a known workload, each with its "
        "deadline and outcome, from a load client that was watched, and result files do not carry this.",
    ]


def silence(data: ModelData, service_class: str, series: str) -> str:
    """Why there is no conclusion about one kind of traffic."""
    if not data.imported:
        return "Nothing that was measured says what bound it."
    mine = data.steps_of(service_class, series)
    used = mine[mine["why_unused"] == ""]
    if used.empty:
        return "No step may be used."
    if used["concurrency"].isna().all():
        return "Requests were sent at a rate; how many were in flight is not known."
    if used["concurrency"].nunique() == 1:
        return "One concurrency alone says nothing about others."
    return "The files give no throughput."


def _places(data: ModelData) -> list[str]:
    """The paths that imported numbers were read from; where they are not known, the files' names."""
    return list(data.sweep.get("imported_from") or data.sweep.get("files") or [])


def classes_of(models: Sequence[ModelData]) -> list[str]:
    """Service classes of all models, in order of appearance."""
    return list(dict.fromkeys(name for model in models for name, _ in model.traffic if name))


def changes(data: ModelData) -> list[str] | None:
    """What changed since the comparable runs before, and to what it is attributed; None if nobody compared.

    The sentences are those of :mod:`limits.changes`, which decides what a change is.
    """
    if not data.compared:
        return None
    found = []
    for entry in data.limits:
        if entry.get("measured") == "shared":
            continue
        change = entry.get("change")
        found.append(
            text(change["sentence"])
            if change
            else f"{text(entry.get('class'))}: this run gives no limit that could be compared."
        )
    return found


def actions(data: ModelData) -> list[str]:
    """What to do with what was found, one instruction each."""
    found, alone = [], []
    for entry in data.limits:
        name, status = text(entry.get("class")), entry.get("status")
        who = f"{data.name}, {name}" + (f" ({entry['series']})" if text(entry.get("series")) else "")
        if exportable(entry):
            deadline = known(entry.get("deadline_s"))
            found.append(
                f"{who}: let at most {number(entry['limit'])} requests be in flight at the gateway"
                + (f", with its timeout at {seconds(deadline)}" if deadline else "")
                + ", and refuse or queue the rest there."
            )
            if entry.get("measured") != "shared":
                alone.append(name)
        if status == LimitStatus.LOWER_BOUND:
            _, above = bracket_of(entry.get("bracket"))
            found.append(
                f"{who}: this is a lower bound; give the search more time to settle what lies between "
                f"{number(entry['limit'])} and {number(above)}."
                if above is not None
                else f"{who}: nothing failed up to {number(entry['limit'])}, the ceiling set for this "
                "endpoint; raise server.max_concurrency to look further."
                if entry.get("bound_by") == "ceiling"
                else f"{who}: nothing failed up to {number(entry['limit'])}; extend the ladder (or the "
                "budget) to find where it does."
            )
        elif status == LimitStatus.NO_PASSING_STEP:
            found.append(
                f"{who}: do not serve this class from this stack with these objectives; "
                "relax an objective, or give it another model or accelerator."
            )
        elif status == LimitStatus.INSUFFICIENT_EVIDENCE:
            found.append(f"{who}: measure with more requests per step before setting a limit.")
        elif status == LimitStatus.REJECTED:
            found.append(f"{who}: mend what the quality findings below name, and measure again.")
        elif status == LimitStatus.NOT_MEASURED:
            found.append(f"{who}: not measured in this run; keep the last good limit while it is valid.")
    found += [f"{data.name}: {sentence}" for sentence in remedies(data)]
    if len(set(alone)) > 1:
        found.append(
            f"Do not add up the limits of {join(list(dict.fromkeys(alone)))}: each was measured alone on the "
            "server. If both share it, measure them together (shared: true)."
        )
    return found


def remedies(data: ModelData) -> list[str]:
    """What to change in a test that measured itself: one sentence a cause, with how many steps show it."""
    steps = (data.quality or {}).get("steps") or []
    causes = [causes_of(step.get("findings") or []) for step in steps]
    return [
        f"{plateau_words(cause, short=True)} set the throughput of {number(n)} of {number(len(steps))} "
        f"steps, not the server: {CHANGES[cause]}."
        for cause in dict.fromkeys(CAUSES.values())
        if (n := sum(cause in found for found in causes))
    ]


# -- parts


def _failure_kinds(row: Frame, deadline_s: float | None) -> list[str]:
    """The kinds that make up at least a tenth of the failures, most frequent first."""
    attempted = known(row["attempted"]) or 0
    kinds = {kind: known(row[kind]) or 0 for kind in FAILURES}
    failed = sum(kinds.values())
    if not attempted or not failed:
        return []
    ranked = sorted((k for k in kinds if kinds[k] >= 0.1 * failed), key=lambda k: -kinds[k])
    return [
        FAILURE_CLAUSES[Outcome(kind)].format(
            share=percent(kinds[kind] / attempted),
            deadline=seconds(deadline_s) if deadline_s else "the deadline",
        )
        for kind in ranked
    ]


def _faster_yet_lower(fast: ModelData, slow: ModelData, service_class: str) -> str:
    if not (_usable(fast, service_class) and _usable(slow, service_class)):
        return ""
    if _comparable(fast, service_class) != _comparable(slow, service_class):
        return ""
    low, high = _limit(fast, service_class), _limit(slow, service_class)
    if not low["limit"] < high["limit"] or not _apart(low, high):
        return ""
    curve_fast, curve_slow = fast.curve(service_class), slow.curve(service_class)
    raw_fast, raw_slow = curve_fast["raw_output_tok_per_s"].max(), curve_slow["raw_output_tok_per_s"].max()
    if not raw_fast >= HIGHER_PEAK * raw_slow:
        return ""
    sentence = (
        f"{fast.name} has more raw throughput than {slow.name} ({rate(raw_fast)} vs {rate(raw_slow)} tok/s "
        f"at their peaks), yet its safe {service_class} limit is lower ({limit_words(low)} vs "
        f"{limit_words(high)})"
    )
    above = [int(at) for at in curve_fast.index if at > low["limit"]]
    where = next((at for at in above if at >= high["limit"]), above[-1] if above else None)
    clause = failure_clause(fast, service_class, "", where) if where is not None else ""
    return f"{sentence}: {clause}." if clause else f"{sentence}."


def limit_words(limit: Mapping[str, Any]) -> str:
    """``22``, or ``at least 22`` of a lower bound."""
    at_least = "at least " if limit.get("status") == LimitStatus.LOWER_BOUND else ""
    return f"{at_least}{number(limit['limit'])}"


def _usable(data: ModelData, service_class: str) -> bool:
    """Whether there is a limit whose number may be used, of the class alone on the server."""
    limit = data.limit(service_class)
    return exportable(limit) and limit.get("measured") != "shared"


def _proven(data: ModelData, service_class: str) -> bool:
    return _usable(data, service_class) and _limit(data, service_class)["status"] == LimitStatus.PROVEN


def _limit(data: ModelData, service_class: str) -> dict[str, Any]:
    return data.limit(service_class) or {}


def _comparable(data: ModelData, service_class: str) -> tuple[str, ...]:
    """Kind and count of accelerator, class settings and workload: equal where numbers may be compared."""
    accelerator = data.sweep.get("accelerator") or {}
    rule = data.rule(service_class)
    same = ("workload", "deadline_s", "completion_floor", "ttft", "tpot", "e2e")
    return (
        text(accelerator.get("kind")),
        text(accelerator.get("count")),
        *(repr(rule.get(key)) for key in same),
    )


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two limits' brackets (last pass to first fail) do not overlap."""
    (low, high) = sorted((one, other), key=lambda entry: float(entry["limit"]))
    _, first_fail = bracket_of(low.get("bracket"))
    last_pass, _ = bracket_of(high.get("bracket"))
    if first_fail is None:
        return False
    return first_fail <= (last_pass if last_pass is not None else float(high["limit"]))
