"""Build the reports: one self-contained page per model and one for the fleet, each also as Markdown.

The order is the reader's: the limits and what may be claimed; how sure; what bound them; what changed;
whether the measurement can be trusted; what to do. Then the evidence. Templates only lay out: every
number and sentence is made here or in :mod:`conclusions`, every name passes autoescape (HTML) or the
``md`` filter (Markdown). A simulated server is marked at the top and the bottom of every page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from include.capacity.report.conclusions import (
    actions,
    changes,
    choice_sentences,
    fleet_sentences,
    model_sentences,
)
from include.capacity.report.data import (
    FAILURES,
    LEAST_REPEATS,
    ModelData,
    bracket_of,
    exportable,
    known,
    read_model,
    text,
)
from include.capacity.report.figures import Drawing, fleet_drawings, model_drawings
from include.capacity.report.words import (
    OUTCOME_WORDS,
    STATUS_MEANING,
    UNKNOWN,
    bound_words,
    join,
    number,
    percent,
    plateau_words,
    rate,
    seconds,
    server_bound_words,
    spaced,
    status_words,
)
from include.capacity.results.store import safe_name
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import Outcome, Phase

TEMPLATES = Path(__file__).parent / "templates"

SECTIONS = [
    ("limits", "Limits"),
    ("sure", "How sure"),
    ("bound", "What bound them"),
    ("changed", "What changed"),
    ("trust", "May I trust it?"),
    ("do", "What to do"),
    ("evidence", "Evidence"),
]

VERDICT_WORDS = {"ok": "yes", "flag": "yes, with findings", "reject": "no", "": "not checked"}

NO_FINDINGS = "No check of the data found anything."
NOT_CHECKED = "The data were not checked."

PHASE_ORDER = [phase.value for phase in Phase]


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


def build_model_report(sweep: SweepDir, previous: Mapping[str, Mapping[str, Any]] | None = None) -> ModelData:
    """Write ``report.html``, ``report.md`` and ``figures/`` of one model into its sweep directory.

    ``previous`` maps a class to its entry in the last comparable run (see :func:`conclusions.changes`);
    without it the section on changes is left out. DataError if the sweep cannot be read.
    """
    data = read_model(sweep)
    drawings = model_drawings(data)
    for drawing in drawings:
        sweep.write(f"figures/{drawing.name}.svg", svg_file(drawing))
        sweep.write(f"figures/{drawing.name}.png", drawing.png)
    values = model_values(data, drawings, previous)
    sweep.write("report.html", render("model.html.j2", values))
    sweep.write("report.md", render("model.md.j2", values))
    return data


def build_fleet_report(
    sweeps: Mapping[str, SweepDir],
    out: SweepDir,
    run: Mapping[str, Any],
    previous: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> None:
    """Write the fleet's ``report.html`` and ``report.md`` into ``out``.

    ``sweeps`` maps each model's key to its sweep. ``run`` holds ``run_id`` and may hold ``fleet``,
    ``attempt``, ``started_at``, ``ended_at`` and ``failed`` (model -> why it gave no result). ``previous``
    maps model and class to the last comparable entry. Links to the models' reports are relative to
    ``out`` and begin with ``./``.
    """
    models, failed = {}, {str(name): str(why) for name, why in (run.get("failed") or {}).items()}
    for key, sweep in sweeps.items():
        if sweep.exists("sweep.json"):
            models[key] = read_model(sweep)
        else:
            failed.setdefault(key, "Nothing was measured.")
    values = fleet_values(models, failed, run, previous)
    out.write("report.html", render("fleet.html.j2", values))
    out.write("report.md", render("fleet.md.j2", values))


def render(template: str, values: Mapping[str, Any]) -> str:
    """A template filled in; names in HTML are escaped, unknown variables are errors."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"], default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "css": lambda name: re.sub(r"[^a-z0-9_-]", "-", str(name).lower()),
        "safe_svg": Markup,  # made by matplotlib, which escapes all text
        "safe_css": Markup,  # our own file
        "md": markdown_text,
        "md_table": markdown_table,
    }
    written = environment.get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", written) if template.endswith(".md.j2") else written


def markdown_text(value: Any) -> str:
    """Text that Markdown takes as it is, on one line."""
    line = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(line, quote=False))


def markdown_table(table: Table) -> str:
    """A GitHub-flavoured table with its caption above; blank if it has no rows."""
    if not table.rows:
        return ""
    left = table.text | table.wrap
    lines = [
        f"*{markdown_text(table.caption)}*",
        "",
        "| " + " | ".join(markdown_text(column) for column in table.columns) + " |",
        "|" + "|".join(":--" if at in left else "--:" for at in range(len(table.columns))) + "|",
        *("| " + " | ".join(markdown_text(cell) for cell in row.cells) + " |" for row in table.rows),
        "",
    ]
    return "\n".join(lines)


def svg_file(drawing: Drawing) -> str:
    """The figure as a file of its own."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawing.svg}'


def simulated_words(models: Sequence[ModelData]) -> str:
    """The mark of a simulated server; blank if none is."""
    found = [model for model in models if model.simulated]
    if not found:
        return ""
    scales = sorted({known(model.sweep.get("clock_scale")) or 1.0 for model in found})
    which = "" if len(found) == len(models) else f" ({join([model.name for model in found])})"
    scale = join([f"{scale:g}x" for scale in scales])
    return f"time scale {scale}{which}. The server is a simulation: no number here describes real hardware."


# -- one model


def model_values(
    data: ModelData, drawings: Sequence[Drawing], previous: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, Any]:
    """What the model's templates show."""
    cards = [limit_card(entry) for entry in data.limits]
    several = [(name, series) for name, series in data.traffic if not data.curve(name, series).empty]
    return {
        "title": f"Serving capacity: {data.name}",
        "model": data.name,
        "simulated": simulated_words([data]),
        "css": css(),
        "meta": model_meta(data),
        "toc": [entry for entry in SECTIONS if previous is not None or entry[0] != "changed"],
        "cards": cards,
        "cards_table": limits_table([data]),
        "sure": sure_table([data]),
        "sure_notes": sure_notes([data]),
        "bound": bound_groups(data),
        "changes": None if previous is None else changes(data, previous),
        "trust": trust(data),
        "actions": actions(data),
        "figure_groups": [
            {"title": title_of(name, series), "drawings": mine}
            for name, series in several
            if (mine := [d for d in drawings if d.traffic == (name, series)])
        ],
        "step_tables": [table for name, series in data.traffic for table in step_tables(data, name, series)],
        "saturation": saturation_table(data),
        "findings": findings_table(data),
        "no_findings": NO_FINDINGS if data.quality else NOT_CHECKED,
        "not_checked": not_checked_table(data),
        "gx": gx_table(data),
        "server": server_table(data),
        "stack": stack_table(data),
        "method": method(data.sweep.get("bounds") or {}),
        "footer": footer(data.sweep.get("run_id")),
    }


def model_meta(data: ModelData) -> list[str]:
    """The line below the heading."""
    sweep, accelerator = data.sweep, data.sweep.get("accelerator") or {}
    found = [
        ("served as", sweep.get("served_name")),
        ("run", sweep.get("run_id")),
        ("attempt", sweep.get("attempt")),
        ("begun", str(sweep.get("created_at") or "")[:16].replace("T", " ")),
        ("accelerator", accelerator_words(accelerator)),
        ("stack", sweep.get("stack_id")),
    ]
    return [f"{name} {value}" for name, value in found if text(value)]


def accelerator_words(accelerator: Mapping[str, Any]) -> str:
    """``8 x MI325X``."""
    kind = text(accelerator.get("kind"))
    return f"{number(accelerator.get('count') or 1)} x {kind}" if kind else ""


def title_of(service_class: str, series: str = "") -> str:
    """A class, with its series where there are several."""
    return " · ".join(part for part in (service_class or "all traffic", series) if part)


def limit_card(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One limit as a card."""
    low, high = bracket_of(entry.get("bracket"))
    facts = [
        ("bound by", bound_words(entry)),
        ("in the server", server_bound_words(entry)),
        ("last pass", number(low) if low is not None else ""),
        ("first not passing", number(high) if high is not None else ""),
        ("deadline", seconds(entry.get("deadline_s")) if known(entry.get("deadline_s")) else ""),
        ("operating range", range_words(entry.get("operating_range"))),
        ("measured", measured_words(entry)),
        ("why no more", text(entry.get("reason")) if exportable(entry) else ""),
        ("remarks", " ".join(map(str, entry.get("flags") or []))),
    ]
    status = text(entry.get("status"))
    return {
        "title": title_of(text(entry.get("class")), text(entry.get("series"))),
        "status": status,
        "status_words": status_words(status),
        "limit": number(entry["limit"]) if exportable(entry) else None,
        "claim": text(entry.get("claim")) or STATUS_MEANING.get(status, ""),
        "facts": [(name, value) for name, value in facts if value],
    }


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
                title_of(text(entry.get("class")), text(entry.get("series"))),
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
    curve = data.curve(text(entry.get("class")), text(entry.get("series")))
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
                title_of(text(entry.get("class")), text(entry.get("series"))),
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


OBJECTIVES = ("ttft", "tpot", "e2e")


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


def sure_notes(models: Sequence[ModelData]) -> list[str]:
    """What no limit claims."""
    found = []
    windows = [
        window
        for data in models
        for entry in data.limits
        if exportable(entry) and (window := proof_of(data, entry)["seconds"])
    ]
    if windows:
        found.append(
            f"Nothing is claimed about events rarer than about one in {seconds(min(windows) / 3)} "
            f"(3 / measured time), other prompt or answer lengths, or other starts of the server."
        )
    if any(entry.get("measured") == "alone" for data in models for entry in data.limits):
        found.append("Limits measured alone hold with the class alone on the server.")
    for data in models:
        for entry in data.limits:
            if not exportable(entry):
                status = text(entry.get("status"))
                meaning = STATUS_MEANING.get(status, "")
                found.append(
                    f"{data.name}, {title_of(text(entry.get('class')), text(entry.get('series')))}: "
                    f"{status_words(status)}. {meaning}"
                )
    return found


def bound_groups(data: ModelData) -> list[dict[str, Any]]:
    """Per class what bound its limit, and what the data say around it."""
    groups = []
    for name, series in data.traffic:
        entry = data.limit(name, series)
        sentences = []
        if entry and bound_words(entry):
            sentences.append(f"Bound by {bound_words(entry)}.")
        if entry and server_bound_words(entry):
            sentences.append(f"In the server's own terms: {server_bound_words(entry)}.")
        estimate = known(entry.get("best_estimate")) if entry else None
        if estimate is not None:
            sentences.append(
                f"Best estimate of where it fails: {rate(estimate)}. It is above the truth half the time, "
                "so nothing exports it."
            )
        sentences += model_sentences(data, name, series)
        groups.append({"title": title_of(name, series), "sentences": sentences})
    return groups


def trust(data: ModelData) -> dict[str, Any]:
    """Whether the measurement can be trusted: quality's verdict and the instrument's own health."""
    steps, quality = data.steps, data.quality
    verdict = text((quality or {}).get("verdict"))
    flagged, rejected = (int((steps["verdict"] == kind).sum()) for kind in ("flag", "reject"))
    if verdict == "ok" and (flagged or rejected):
        verdict = "flag"
    unused = int((steps["why_unused"] != "").sum())
    if quality is None:
        sentence = NOT_CHECKED
    else:
        sentence = (
            f"Of {number(len(steps))} steps: {number((steps['verdict'] == 'ok').sum())} passed every check, "
            f"{number(flagged)} with a finding, {number(rejected)} rejected."
        )
    notes = [f"{problem['stage']} failed: {problem['error']}" for problem in data.sweep.get("problems") or []]
    broken = steps[steps["error"].map(text) != ""]
    notes += [
        f"{text(step['phase'])} {text(step['service_class'])} at {number(step['concurrency'])}: "
        f"{text(step['error'])}"
        for _, step in broken.iterrows()
    ]
    notes += [text(finding.get("reason")) for finding in (quality or {}).get("findings") or []]
    if unused:
        notes.append(
            f"On no curve and in no limit: {number(unused)} of the steps; they are struck out below."
        )
    short = sum(text(steady).lower() == "false" for steady in steps["warmup_steady"])
    if short:
        notes.append(f"Not steady when the warm-up reached its cap: {number(short)} of the steps.")
    reached = (steps["inflight_mean"] / steps["concurrency"]).dropna()
    if len(reached):
        low = reached.idxmin()
        notes.append(
            f"Requests really in flight: at least {percent(reached[low])} of what was asked for "
            f"(lowest at {number(steps.at[low, 'concurrency'])})."
        )
    cpu, lag = steps["client_cpu_share"].dropna(), steps["client_lag_p99_s"].dropna()
    if len(cpu):
        notes.append(f"The load client's busiest process used at most {percent(cpu.max())} of a core.")
    if len(lag):
        notes.append(f"Its event loop was at most {seconds(lag.max())} late (p99).")
    return {
        "verdict": verdict or "none",
        "words": VERDICT_WORDS[verdict],
        "sentence": sentence,
        "notes": notes,
    }


def step_tables(data: ModelData, service_class: str, series: str) -> list[Table]:
    """One class's steps: completion, throughput, latency, and means over repeats."""
    steps = data.steps
    mine = steps[(steps["service_class"].map(text) == service_class) & (steps["series"].map(text) == series)]
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
            title_of(text(entry.get("class")), text(entry.get("series"))),
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


def method(bounds: Mapping[str, Any]) -> str:
    """The method in one paragraph."""
    prove = number(bounds.get("prove_requests") or 600)
    window = seconds(bounds.get("min_window_s") or 30)
    return (
        "A closed loop keeps exactly N requests in flight: ramp, warm-up until steady, then a window, with "
        "load kept up until the last counted request has ended. A request counts if it started in the "
        "window; each ends in exactly one outcome, and the unit is the request completed within its "
        "deadline. Scouting finds a candidate; it is then proven on fresh requests, at least "
        f"{prove} or 10 N and {window}. A step passes if the one-sided 95 % Clopper-Pearson lower bounds, "
        "at the effective number of requests (batch means), reach the completion floor and the "
        "objective's share; it fails if an upper bound does not. Interactive limits are also capped at the "
        "latency knee, where the first-token delay begins to climb faster than the number of requests. "
        "Latencies shown are of completed requests; those that decide count a request that did not "
        "complete as infinitely late. Hollow markers in figures are scouting, filled ones proof."
    )


def footer(run_id: Any) -> str:
    """The last line."""
    return f"Run {text(run_id) or UNKNOWN}. Everything on this page is computed from the run's tables."


def css() -> str:
    """The style sheet."""
    return (TEMPLATES / "style.css").read_text(encoding="utf-8")


# -- the fleet


def fleet_values(
    models: Mapping[str, ModelData],
    failed: Mapping[str, str],
    run: Mapping[str, Any],
    previous: Mapping[str, Mapping[str, Mapping[str, Any]]] | None,
) -> dict[str, Any]:
    """What the fleet's templates show."""
    found = list(models.values())
    fleet = text(run.get("fleet"))
    meta = [
        ("run", run.get("run_id")),
        ("attempt", run.get("attempt")),
        ("begun", str(run.get("started_at") or "")[:16].replace("T", " ")),
        ("ended", str(run.get("ended_at") or "")[:16].replace("T", " ")),
        ("models", f"{len(models)} measured" + (f", {len(failed)} failed" if failed else "")),
    ]
    failures = Table("Models without a result in this run.", ["model", "why"], wrap={1})
    for name, why in failed.items():
        failures.add(name, why)
    checked = Table(
        "Quality of each model's measurement.",
        ["model", "trust", "steps", "passed", "flagged", "rejected", "what was found"],
        text={0, 1},
        wrap={6},
    )
    stacks = Table(
        "What each model ran on.", ["model", "served as", "accelerator", "stack"], text={0, 1, 2, 3}
    )
    for data in found:
        judged, counts = trust(data), data.steps["verdict"].value_counts()
        reasons = list(dict.fromkeys(row.cells[3] for row in findings_table(data).rows))
        checked.add(
            data.name,
            judged["words"],
            number(len(data.steps)),
            *(number(counts.get(kind, 0)) for kind in ("ok", "flag", "reject")),
            " ".join(reasons) or UNKNOWN,
        )
        stacks.add(
            data.name,
            text(data.sweep.get("served_name")),
            accelerator_words(data.sweep.get("accelerator") or {}) or UNKNOWN,
            text(data.sweep.get("stack_id")) or UNKNOWN,
        )
    claims = [
        {
            "title": data.name,
            "sentences": [
                f"{card['title']} ({card['status_words']}): {card['claim']}"
                for card in (limit_card(entry) for entry in data.limits)
            ],
        }
        for data in found
        if data.limits
    ]
    bound = [
        {"title": f"{data.name}, {group['title']}", "sentences": group["sentences"]}
        for data in found
        for group in bound_groups(data)
    ]
    bounds = found[0].sweep.get("bounds") if found else None
    return {
        "title": f"Serving capacity{': ' + fleet if fleet else ''}",
        "heading": f"Serving capacity of {fleet}" if fleet else "Serving capacity of the fleet",
        "simulated": simulated_words(found),
        "css": css(),
        "meta": [f"{name} {value}" for name, value in meta if text(value)],
        "toc": [entry for entry in SECTIONS if previous is not None or entry[0] != "changed"],
        "overview": limits_table(found),
        "headlines": fleet_sentences(found),
        "claims": claims,
        "failed": failures,
        "sure": sure_table(found),
        "sure_notes": sure_notes(found),
        "bound": bound,
        "changes": None
        if previous is None
        else [
            f"{data.name}, {sentence}"
            for key, data in models.items()
            for sentence in changes(data, previous.get(key) or {})
        ],
        "trust": checked,
        "choice": choice_sentences(found),
        "actions": [sentence for data in found for sentence in actions(data)],
        "drawings": fleet_drawings(found),
        "stacks": stacks,
        "links": [(data.name, f"{safe_name(key)}/report.html") for key, data in models.items()],
        "method": method(bounds or {}),
        "footer": footer(run.get("run_id")),
    }


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
