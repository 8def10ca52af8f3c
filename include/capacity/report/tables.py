"""The report's tables, for HTML and Markdown alike: every cell is text, made from the numbers here.

A table without rows is left out by the templates. Steps that are on no curve and in no limit stay in the
tables, struck out, with why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from include.capacity.limits.bounds import LEAST_REPEATS
from include.capacity.report.data import (
    FAILURES,
    ModelData,
    bracket_of,
    exportable,
    known,
    text,
    traffic_of,
)
from include.capacity.report.words import (
    OUTCOME_WORDS,
    UNKNOWN,
    bound_words,
    join,
    number,
    percent,
    plateau_words,
    rate,
    seconds,
    spaced,
    status_words,
    title_of,
)
from include.capacity.words import Outcome, Phase

PHASE_ORDER = [phase.value for phase in Phase]
OBJECTIVES = ("ttft", "tpot", "e2e")


@dataclass
class Row:
    """Cells as text; an unused row is greyed out."""

    cells: list[str]
    unused: bool = False


@dataclass
class Table:
    """A table for HTML and Markdown alike; the first column heads its row."""

    caption: str
    columns: list[str]
    rows: list[Row] = field(default_factory=list)
    text: set[int] = field(default_factory=lambda: {0})
    """Columns set left."""
    wrap: set[int] = field(default_factory=set)
    """Columns of sentences."""

    def add(self, *cells: str, unused: bool = False) -> None:
        """Append a row."""
        self.rows.append(Row(list(cells), unused))


def accelerator_words(accelerator: Mapping[str, Any]) -> str:
    """``8 x MI325X``."""
    kind = text(accelerator.get("kind"))
    return f"{number(accelerator.get('count') or 1)} x {kind}" if kind else ""


def measured_words(entry: Mapping[str, Any]) -> str:
    """``alone``, or with what else in flight."""
    beside = [f"{number(n)} {name}" for name, n in (entry.get("beside") or {}).items()]
    return text(entry.get("measured")) + (f", beside {join(beside)} in flight" if beside else "")


def range_words(entry: Any) -> str:
    """``8 to 64`` of an operating range."""
    low, high = bracket_of(entry)
    return f"{number(low)} to {number(high)}" if low is not None and high is not None else ""


def limits_table(models: Sequence[ModelData]) -> Table:
    """All limits, one a row."""
    table = Table(
        "The limits: at most this many requests in flight, with what was measured there.",
        [
            "model",
            "class",
            "limit",
            "status",
            "first not passing",
            "n",
            "completed requests/s",
            "TTFT p95",
            "E2E p95",
            "bound by",
            "deadline",
        ],
        text={0, 1, 3, 9},
    )
    for data in models:
        for entry in data.limits:
            row = at_limit(data, entry)
            _, high = bracket_of(entry.get("bracket"))
            table.add(
                data.name,
                title_of(*traffic_of(entry)),
                number(entry["limit"]) if exportable(entry) else UNKNOWN,
                status_words(entry.get("status")),
                number(high),
                number(row.get("attempted")),
                rate(row.get("request_per_s")),
                seconds(row.get("ttft_p95_s")),
                seconds(row.get("e2e_p95_s")),
                bound_words(entry, short=True) or UNKNOWN,
                seconds(entry.get("deadline_s")),
            )
    return table


def at_limit(data: ModelData, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The curve's row at a limit measured alone; empty if there is none."""
    if not exportable(entry) or entry.get("measured") == "shared":
        return {}
    curve = data.curve(*traffic_of(entry))
    limit = int(entry["limit"])
    return dict(curve.loc[limit]) if limit in curve.index else {}


def sure_table(models: Sequence[ModelData]) -> Table:
    """The evidence behind each limit."""
    table = Table(
        "The evidence at each limit. Bounds are one-sided 95 %, at the effective number of requests.",
        [
            "model",
            "class",
            "limit",
            "n",
            "effective n",
            "completed",
            "at least",
            "floor",
            "objectives met",
            "at least",
            "asked",
            "measured",
            "repeats",
        ],
        text={0, 1},
    )
    for data in models:
        for entry in data.limits:
            if not exportable(entry):
                continue
            proof = proof_of(data, entry)
            table.add(
                data.name,
                title_of(*traffic_of(entry)),
                number(entry["limit"]),
                number(proof["n"]),
                number(proof["n_effective"]),
                percent(proof["y"]),
                percent(proof["y_lower"]),
                percent(proof["floor"]),
                percent(proof["z"]),
                percent(proof["z_lower"]),
                percent(proof["share"]),
                seconds(proof["seconds"]),
                number(proof["repeats"]),
            )
    return table


def proof_of(data: ModelData, entry: Mapping[str, Any]) -> dict[str, float | None]:
    """n, rates, lower bounds and seconds behind a limit."""
    evidence = entry.get("evidence") or {}
    row = at_limit(data, entry)
    n, met = known(evidence.get("n")), known(evidence.get("objective_met"))
    return {
        "n": n if n is not None else known(row.get("attempted")),
        "n_effective": known(evidence.get("n_effective")),
        "y": known(evidence.get("completion_rate")),
        "y_lower": known(evidence.get("completion_lower")),
        "floor": known(evidence.get("completion_floor")),
        "z": met / n if n and met is not None else None,
        "z_lower": known(evidence.get("objective_lower")),
        "share": known(evidence.get("objective_share")),
        "seconds": known(evidence.get("seconds")),
        "repeats": known(evidence.get("repeats")),
    }


def step_tables(data: ModelData, service_class: str, series: str) -> list[Table]:
    """One class's steps: completion, throughput, latency, and means over repeats."""
    mine = data.steps_of(service_class, series)
    order = mine["phase"].map(lambda p: PHASE_ORDER.index(p) if p in PHASE_ORDER else -1)
    mine = mine.assign(order=order).sort_values(["concurrency", "order", "repeat"], kind="stable")
    title = title_of(service_class, series)
    completion = Table(
        f"{title}: how the requests of each step ended, with one-sided 95 % bounds at the effective n.",
        [
            "in flight",
            "phase",
            "state",
            "n",
            "effective n",
            "completed",
            "bounds",
            "objectives met",
            "ended otherwise",
            "check",
        ],
        text={0, 1, 2, 8, 9},
    )
    rates = Table(
        f"{title}: throughput of each step's completed requests; raw counts the tokens of failed requests "
        "too. The interval is 95 % by batch means of the one run.",
        [
            "in flight",
            "phase",
            "n completed",
            "window",
            "requests/s",
            "interval",
            "output tok/s",
            "raw output tok/s",
            "total tok/s",
            "stopped by",
        ],
        text={0, 1, 9},
    )
    latency = Table(
        f"{title}: latency of the completed requests of each step, with their n.",
        [
            "in flight",
            "phase",
            *(
                f"{name.upper()} {column}"
                for name in ("ttft", "tpot", "e2e")
                for column in ("p50", "p95", "p99", "n")
            ),
        ],
        text={0, 1},
    )
    for row in mine.to_dict("records"):
        repeat = known(row["repeat"]) or 1
        head = number(row["concurrency"]) + (f" #{number(repeat)}" if repeat > 1 else "")
        phase = text(row["phase"]) or text(row["source"])
        unused = bool(row["why_unused"])
        completion.add(
            head,
            phase,
            text(row["state"]) or UNKNOWN,
            number(row["attempted"]),
            number(row["n_effective"]),
            percent(row["completion"]),
            interval(row["y_lower"], row["y_upper"], percent),
            percent(_share(row["objective_met"], row["attempted"])),
            outcome_words(row),
            row["verdict"] or ("not used" if unused else UNKNOWN),
            unused=unused,
        )
        rates.add(
            head,
            phase,
            number(row["completed"]),
            seconds(row["window_s"]),
            rate(row["request_per_s"]),
            interval(row["request_per_s_low"], row["request_per_s_high"], rate),
            rate(row["output_tok_per_s"]),
            rate(row["raw_output_tok_per_s"]),
            rate(row["total_tok_per_s"]),
            spaced(row["stop_reason"]) or UNKNOWN,
            unused=unused,
        )
        latency.add(
            head,
            phase,
            *(
                cell
                for name in ("ttft", "tpot", "e2e")
                for cell in (
                    *(seconds(row[f"{name}_{p}_s"]) for p in ("p50", "p95", "p99")),
                    number(row[f"{name}_n"]),
                )
            ),
            unused=unused,
        )
    return [completion, rates, latency, *repeat_table(data, service_class, series)]


def repeat_table(data: ModelData, service_class: str, series: str) -> list[Table]:
    """Means over repeats with their t-interval, where steps were repeated often enough."""
    curve = data.curve(service_class, series)
    if curve.empty or curve["repeats"].max() < LEAST_REPEATS:
        return []
    table = Table(
        f"{title_of(service_class, series)}: mean over repeats with its 95 % t-interval.",
        [
            "in flight",
            "repeats",
            "total tok/s",
            "interval",
            "output tok/s",
            "interval",
            "E2E p99",
            "E2E p50",
            "n",
        ],
    )
    for at, row in curve.iterrows():
        table.add(
            number(at),
            number(row["repeats"]),
            rate(row["total_tok_per_s"]),
            interval(row["total_tok_per_s_low"], row["total_tok_per_s_high"], rate),
            rate(row["output_tok_per_s"]),
            interval(row["output_tok_per_s_low"], row["output_tok_per_s_high"], rate),
            seconds(row["e2e_p99_s"]),
            seconds(row["e2e_p50_s"]),
            number(row["e2e_n"]),
        )
    return [table]


def interval(low: Any, high: Any, write: Any) -> str:
    """``low to high``; an en dash if unknown."""
    return f"{write(low)} to {write(high)}" if known(low) is not None and known(high) is not None else UNKNOWN


def outcome_words(row: Mapping[str, Any]) -> str:
    """Failures by kind, aborted and refused requests included: ``rejected (429, 503) 485``."""
    kinds = [*FAILURES, Outcome.CLIENT_ERROR.value, Outcome.ABORTED.value]
    counts = {kind: known(row.get(kind)) for kind in kinds}
    if all(count is None for count in counts.values()):
        return UNKNOWN
    found = [f"{OUTCOME_WORDS[Outcome(kind)]} {number(n)}" for kind, n in counts.items() if n]
    return ", ".join(found) or "none"


def saturation_table(data: ModelData) -> Table:
    """Peaks of total throughput, as the limits stage computed them."""
    table = Table(
        "Saturation: total tokens (prompt and output) of completed requests per second.",
        [
            "class",
            "peak at",
            "peak tok/s",
            "E2E p99 at the peak",
            "lowest tok/s",
            "highest tok/s",
            "knee at",
            "plateau set by",
            "status",
        ],
        text={0, 7, 8},
    )
    for entry in data.saturation:
        table.add(
            title_of(*traffic_of(entry)),
            number(entry.get("concurrency_at_peak")),
            rate(entry.get("peak_total_tok_per_s")),
            seconds(entry.get("e2e_p99_at_peak_s")),
            rate(entry.get("total_tok_per_s_min")),
            rate(entry.get("total_tok_per_s_max")),
            number((entry.get("throughput_knee") or {}).get("concurrency")),
            plateau_words((entry.get("plateau") or {}).get("set_by"), short=True) or UNKNOWN,
            spaced(entry.get("status")) or UNKNOWN,
        )
    return table


def findings_table(data: ModelData) -> Table:
    """What the quality checks found, and what the instrument itself calls invalid."""
    table = Table(
        "What the checks found. A rejected step enters no limit; a flag is printed and changes nothing.",
        ["step", "check", "severity", "reason"],
        text={0, 1, 2},
        wrap={3},
    )
    for finding in (data.quality or {}).get("findings") or []:
        table.add(
            "whole sweep",
            spaced(finding.get("check")),
            text(finding.get("severity")),
            text(finding.get("reason")),
        )
    for row in data.steps.to_dict("records"):
        step = " ".join(
            part
            for part in (text(row["series"]), text(row["service_class"]), text(row["phase"]), _level(row))
            if part
        )
        for finding in row["reasons"]:
            table.add(
                step, spaced(finding.get("check")), text(finding.get("severity")), text(finding.get("reason"))
            )
        if text(row["invalid"]):
            table.add(step, "the instrument itself", "reject", text(row["invalid"]))
        if text(row["error"]):
            table.add(step, "the step's end", "error", text(row["error"]))
    return table


def _level(row: Mapping[str, Any]) -> str:
    """A step's concurrency; of an open loop what it is called."""
    return number(row["concurrency"]) if known(row["concurrency"]) is not None else text(row["workload"])


def not_checked_table(data: ModelData) -> Table:
    """Checks that could not run."""
    table = Table("Not checked, and why.", ["check", "reason"], wrap={1})
    for entry in (data.quality or {}).get("not_checked") or []:
        table.add(spaced(entry.get("check")), text(entry.get("reason")))
    return table


GX_TABLES = {"requests": "request rows", "steps": "steps", "series": "series and sweep"}


def gx_table(data: ModelData) -> Table:
    """Great Expectations' own results, one suite a row."""
    table = Table(
        "Great Expectations' own results; the whole of them is in quality.json.",
        ["suite", "rows", "expectations", "met", "not met", "checks not met"],
        text={0},
        wrap={5},
    )
    for name, result in ((data.quality or {}).get("gx") or {}).items():
        outcomes = result["results"]
        failed = [one["expectation_config"]["meta"]["check"] for one in outcomes if not one["success"]]
        rows = [n for one in outcomes if (n := known(one["result"].get("element_count"))) is not None]
        table.add(
            GX_TABLES.get(name, name),
            number(max(rows, default=None)),
            number(len(outcomes)),
            number(len(outcomes) - len(failed)),
            number(len(failed)),
            ", ".join(spaced(check) for check in dict.fromkeys(failed)) or "none",
        )
    return table


SERVER_COLUMNS = {
    "server_running_mean": ("running, mean", rate),
    "server_running_peak": ("running, peak", number),
    "server_waiting_mean": ("waiting, mean", rate),
    "server_waiting_peak": ("waiting, peak", number),
    "server_kv_use_peak": ("KV use, peak", percent),
    "server_preemptions": ("preemptions", number),
    "server_prefix_hit_share": ("prefix hits", percent),
    "server_rejections": ("refused by its queue", number),
    "server_ttft_mean_s": ("its TTFT, mean", seconds),
    "server_e2e_mean_s": ("its E2E, mean", seconds),
    "foreign_running_peak": ("foreign, peak", number),
}


def server_table(data: ModelData) -> Table:
    """The server's own metrics, one row a step."""
    columns = [c for c in SERVER_COLUMNS if c in data.steps and data.steps[c].notna().any()]
    table = Table(
        "The server's own metrics over each step's window; unknown is an en dash, never 0.",
        ["class", "in flight", "phase", *(SERVER_COLUMNS[column][0] for column in columns)],
        text={0, 2},
    )
    if not columns:
        return table
    for row in data.steps.sort_values(["service_class", "concurrency"], kind="stable").to_dict("records"):
        table.add(
            text(row["service_class"]),
            number(row["concurrency"]),
            text(row["phase"]),
            *(SERVER_COLUMNS[column][1](row[column]) for column in columns),
        )
    return table


def stack_table(data: ModelData) -> Table:
    """What the limits were measured on, and with what."""
    sweep = data.sweep
    table = Table("The stack the limits belong to, and the instrument.", ["what", "value"], wrap={1})
    table.add("accelerator", accelerator_words(sweep.get("accelerator") or {}) or UNKNOWN)
    for name, value in _flat("", sweep.get("stack") or {}):
        table.add(spaced(name), value)
    table.add("stack id", text(sweep.get("stack_id")) or UNKNOWN)
    for name, value in (sweep.get("comparison_ids") or {}).items():
        table.add(f"comparison id, {name}", text(value))
    for name, rule in (sweep.get("classes") or {}).items():
        table.add(f"class {name}", class_words(rule))
    for name, value in _flat("", sweep.get("versions") or {}):
        table.add(f"version of {spaced(name)}", value)
    table.add("clock scale", f"{known(sweep.get('clock_scale')) or 1:g} server seconds per second")
    table.add("seed", text(sweep.get("seed")) or UNKNOWN)
    return table


def class_words(rule: Mapping[str, Any]) -> str:
    """A service class in one line: what is sent and what is asked."""
    workload = rule.get("workload") or {}
    parts = [
        f"{text(workload.get('name'))} ({text(workload.get('endpoint'))}, "
        f"{'streamed' if workload.get('stream') else 'not streamed'})"
    ]
    for name, words in (("prompt_tokens", "prompt"), ("output_tokens", "output")):
        lengths = workload.get(name) or {}
        if lengths:
            parts.append(
                f"{words} log-normal, median {number(lengths.get('median'))} tokens, "
                f"sigma {lengths.get('sigma')}"
            )
    parts.append(f"deadline {seconds(rule.get('deadline_s'))}")
    parts.append(f"completion floor {percent(rule.get('completion_floor'))}")
    for name in OBJECTIVES:
        if objective := rule.get(name):
            parts.append(
                f"{name.upper()} at most {seconds(objective.get('at_most_s'))} "
                f"for {percent(objective.get('share'))}"
            )
    return "; ".join(parts)


def _share(part: Any, whole: Any) -> float | None:
    top, bottom = known(part), known(whole)
    return top / bottom if top is not None and bottom else None


def _flat(prefix: str, data: Any) -> list[tuple[str, str]]:
    """Nested settings as (name, value) lines."""
    if isinstance(data, Mapping):
        return [
            line
            for key, value in data.items()
            for line in _flat(f"{prefix}.{key}" if prefix else str(key), value)
        ]
    if isinstance(data, list | tuple):
        return [(prefix, " ".join(map(str, data)) or UNKNOWN)]
    return [(prefix, text(data) or UNKNOWN)]
