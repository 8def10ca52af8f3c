"""Build the reports: one self-contained page per model and one for the fleet, each also as Markdown.

The order is the reader's: the limits and what may be claimed; how sure; what bound them; what changed;
whether the measurement can be trusted; what to do. Then the evidence. Templates only lay out: every
number and sentence is made here or in :mod:`conclusions`, every name passes autoescape (HTML) or the
``md`` filter (Markdown). A simulated server is marked at the top and the bottom of every page.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from include.capacity.policy import INDEX, policy_files
from include.capacity.report.conclusions import (
    actions,
    changes,
    choice_sentences,
    fleet_sentences,
    imported_sentences,
    model_sentences,
    origin,
    silence,
)
from include.capacity.report.data import (
    ModelData,
    bracket_of,
    exportable,
    known,
    read_model,
    text,
    traffic_of,
)
from include.capacity.report.figures import Drawing, fleet_drawings, model_drawings
from include.capacity.report.tables import (
    Table,
    accelerator_words,
    findings_table,
    gx_table,
    limits_table,
    measured_words,
    not_checked_table,
    proof_of,
    range_words,
    saturation_table,
    server_table,
    stack_table,
    step_tables,
    sure_table,
)
from include.capacity.report.words import (
    STATUS_MEANING,
    UNKNOWN,
    bound_words,
    join,
    number,
    percent,
    rate,
    seconds,
    server_bound_words,
    status_words,
    title_of,
)
from include.capacity.results.store import safe_name
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import LimitStatus

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

WITHOUT_LIMITS = [
    (name, {"bound": "What may be concluded"}.get(name, words))
    for name, words in SECTIONS
    if name not in ("limits", "sure")
]
"""Of an import that nobody asked limits of."""

NO_FINDINGS = "No check of the data found anything."
NOT_CHECKED = "The data were not checked."


def build_model_report(sweep: SweepDir) -> ModelData:
    """Write ``report.html``, ``report.md`` and ``figures/`` of one model into its sweep directory.

    The section on changes is left out if the limits were not compared with earlier runs. DataError if the
    sweep cannot be read.
    """
    data = read_model(sweep)
    drawings = model_drawings(data)
    write_figures(sweep, drawings)
    values = model_values(data, drawings)
    sweep.write("report.html", render("model.html.j2", values))
    sweep.write("report.md", render("model.md.j2", values))
    return data


def write_figures(out: SweepDir, drawings: Sequence[Drawing]) -> None:
    """Each figure as SVG and as PNG in ``figures/``."""
    for drawing in drawings:
        out.write(f"figures/{drawing.name}.svg", svg_file(drawing))
        out.write(f"figures/{drawing.name}.png", drawing.png)


def gateway_files(data: ModelData) -> list[dict[str, Any]]:
    """Of each policy: what it is for, links to its files, and why there are not more."""
    known_limits = [entry for entry in data.limits if text(entry.get("class"))]
    index = json.loads(policy_files(data.sweep, {"limits": known_limits})[INDEX])
    return [
        {
            "title": join([f"{name} {limit or '–'}" for name, limit in policy["classes"].items()])
            + (" on one server" if policy["measured"] == "shared" else ", alone on a server"),
            "files": list(policy["files"].items()),
            "reasons": list(dict.fromkeys(policy["why_not"].values())),
        }
        for policy in index["policies"]
    ]


def build_fleet_report(
    sweeps: Mapping[str, SweepDir],
    out: SweepDir,
    run: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the fleet's ``report.html``, ``report.md`` and ``figures/`` into ``out``.

    ``sweeps`` maps each model's key to its sweep. ``run`` holds ``run_id`` and may hold ``fleet``,
    ``attempt``, ``started_at``, ``ended_at``, ``failed`` (model -> why it gave no result) and ``missed``
    (sentences about nights before it that were not measured). ``history``: earlier runs, for the limits over
    time. Links to the models' reports and to figures are relative to ``out`` and begin with ``./``.
    """
    models, failed = {}, {str(name): str(why) for name, why in (run.get("failed") or {}).items()}
    for key, sweep in sweeps.items():
        if sweep.exists("sweep.json"):
            models[key] = read_model(sweep)
        else:
            failed.setdefault(key, "Nothing was measured.")
    values = fleet_values(models, failed, run, history)
    write_figures(out, values["drawings"])
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
        "md_list": markdown_list,
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


def markdown_list(sentences: Sequence[str], otherwise: str = "") -> str:
    """A list, or what to say where there is none."""
    return "".join(f"- {markdown_text(sentence)}\n" for sentence in sentences) or f"{otherwise}\n"


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


def model_values(data: ModelData, drawings: Sequence[Drawing]) -> dict[str, Any]:
    """What the model's templates show."""
    cards = [limit_card(entry) for entry in data.limits]
    several = [(name, series) for name, series in data.traffic if not data.curve(name, series).empty]
    changed = changes(data)
    eyebrow = "Imported results" if data.imported else "Serving capacity"
    return {
        "title": f"{eyebrow}: {data.name}",
        "eyebrow": eyebrow,
        "model": data.name,
        "simulated": simulated_words([data]),
        "imported": imported_sentences([data]),
        "css": css(),
        "meta": model_meta(data),
        "sections": sections([data], changed),
        "cards": cards,
        "cards_table": limits_table([data]),
        "sure": sure_table([data]),
        "sure_notes": sure_notes([data]),
        "bound": bound_groups(data),
        "changes": changed,
        "trust": trust(data),
        "actions": actions(data),
        "gateways": gateway_files(data),
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
        "method": method([data]),
        "footer": footer(data.sweep.get("run_id")),
    }


def moment(stamp: Any) -> str:
    """``2026-11-30 01:00 UTC`` of a time stamp in UTC; blank if there is none."""
    return f"{str(stamp)[:16].replace('T', ' ')} UTC" if stamp else ""


def sections(models: Sequence[ModelData], changed: Sequence[str] | None) -> dict[str, str]:
    """Id and name of the sections; those on limits not where nobody could ask for any, that on changes only
    where something was compared."""
    without = bool(models) and all(data.imported and not data.limits for data in models)
    found = dict(WITHOUT_LIMITS if without else SECTIONS)
    if changed is None:
        del found["changed"]
    return found


def model_meta(data: ModelData) -> list[str]:
    """The line below the heading."""
    sweep, accelerator = data.sweep, data.sweep.get("accelerator") or {}
    found = [
        ("served as", "" if data.imported else sweep.get("served_name")),
        ("run", sweep.get("run_id")),
        ("attempt", sweep.get("attempt")),
        ("imported" if data.imported else "begun", moment(sweep.get("created_at"))),
        ("accelerator", accelerator_words(accelerator)),
        ("stack", sweep.get("stack_id")),
    ]
    return [f"{name} {value}" for name, value in found if text(value)]


def limit_card(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One limit as a card."""
    low, high = bracket_of(entry.get("bracket"))
    if is_rejected(entry):
        low = high = None  # nothing is concluded from what cannot be trusted
    facts = [
        ("bound by", bound_words(entry)),
        ("in the server", server_words(entry)),
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
        "title": title_of(*traffic_of(entry)),
        "status": status,
        "status_words": status_words(status),
        "limit": number(entry["limit"]) if exportable(entry) else None,
        "claim": text(entry.get("claim")) or STATUS_MEANING.get(status, ""),
        "facts": [(name, value) for name, value in facts if value],
    }


def is_rejected(entry: Mapping[str, Any] | None) -> bool:
    """Whether a limit's measurement cannot be trusted, so that nothing is concluded from it."""
    return entry is not None and entry.get("status") == LimitStatus.REJECTED


def server_words(entry: Mapping[str, Any]) -> str:
    """What bound a limit in the server's own terms; blank where nothing is concluded."""
    return "" if is_rejected(entry) else server_bound_words(entry)


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
                    f"{data.name}, {title_of(*traffic_of(entry))}: {status_words(status)}. {meaning}"
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
        if entry and server_words(entry):
            sentences.append(f"In the server's own terms: {server_words(entry)}.")
        estimate = known(entry.get("best_estimate")) if entry else None
        if estimate is not None and not is_rejected(entry):
            sentences.append(
                f"Best estimate of where it fails: {rate(estimate)}. It is above the truth half the time, "
                "so nothing exports it."
            )
        if is_rejected(entry):
            sentences.append("The measurement was rejected: what follows is of the steps that were not.")
        sentences += model_sentences(data, name, series)
        sentences = sentences or [silence(data, name, series)]
        groups.append({"title": title_of(name, series), "sentences": sentences})
    return groups


def trust(data: ModelData) -> dict[str, Any]:
    """Whether the measurement can be trusted: quality's verdict and the instrument's own health."""
    steps, quality = data.steps, data.quality
    verdict = text((quality or {}).get("verdict"))
    flagged, rejected = (int((steps["verdict"] == kind).sum()) for kind in ("flag", "reject"))
    if verdict == "ok" and (flagged or rejected):
        verdict = "flag"
    if verdict and data.limits and all(is_rejected(entry) for entry in data.limits):
        verdict = "reject"  # the steps in the way are among the rejected ones
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
    processes = steps["client_workers"].dropna()
    if len(processes):
        split = int((processes > 1).sum())
        notes.append(
            "One load process drove every step."
            if not split
            else f"Load processes that drove a step: up to {number(processes.max())}; more than one in "
            f"{number(split)} of the steps."
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


def method(models: Sequence[ModelData]) -> str:
    """The method in one paragraph."""
    if any(data.imported for data in models):
        return (
            "Result files become one table, a row a step, in seconds and tokens a second; what a file does "
            "not say stays unknown. The checks look for steps that never reached the concurrency they print, "
            "had too few requests, or were bound by the load client; a rejected step is struck out and on no "
            "curve. Repeats are pooled. Latencies are of completed requests, as the files have them."
        )
    bounds = (models[0].sweep.get("bounds") or {}) if models else {}
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
    history: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the fleet's templates show."""
    found = list(models.values())
    fleet = text(run.get("fleet"))
    imported = any(data.imported for data in found)
    meta = [
        ("run", run.get("run_id")),
        ("attempt", run.get("attempt")),
        ("begun", moment(run.get("started_at"))),
        ("ended", moment(run.get("ended_at"))),
    ]
    if not imported:
        meta.append(("models", f"{len(models)} measured" + (f", {len(failed)} failed" if failed else "")))
    failures = Table("Models without a result in this run.", ["model", "why"], wrap={1})
    for name, why in failed.items():
        failures.add(name, why)
    checked = Table(
        "Quality of each model's measurement; what was found is told in the model's own report.",
        ["model", "trust", "steps", "passed", "flagged", "rejected", "what was found (how often)"],
        text={0, 1},
        wrap={6},
    )
    stacks = Table(
        "What each model ran on.", ["model", "served as", "accelerator", "stack"], text={0, 1, 2, 3}
    )
    for data in found:
        judged, counts = trust(data), data.steps["verdict"].value_counts()
        checks = Counter(row.cells[1] for row in findings_table(data).rows)
        checked.add(
            data.name,
            judged["words"],
            number(len(data.steps)),
            *(number(counts.get(kind, 0)) for kind in ("ok", "flag", "reject")),
            ", ".join(f"{check} ({n})" for check, n in checks.most_common()) or UNKNOWN,
        )
        stacks.add(
            data.name,
            UNKNOWN if data.imported else text(data.sweep.get("served_name")),
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
        {
            "title": group["title"] if imported else f"{data.name}, {group['title']}",
            "sentences": group["sentences"],
        }
        for data in found
        for group in bound_groups(data)
    ]
    missed = [text(sentence) for sentence in run.get("missed") or []]
    compared = [f"{data.name}, {sentence}" for data in found for sentence in changes(data) or []]
    changed = missed + compared if missed or any(data.compared for data in found) else None
    return {
        "title": f"Imported results: {join([origin(data) for data in found])}"
        if imported
        else f"Serving capacity of {fleet or 'the fleet'}",
        "eyebrow": "Other people's numbers" if imported else "Serving capacity of the fleet",
        "simulated": simulated_words(found),
        "imported": imported_sentences(found),
        "css": css(),
        "meta": [f"{name} {value}" for name, value in meta if text(value)],
        "sections": sections(found, changed),
        "overview": limits_table(found),
        "headlines": fleet_sentences(found),
        "claims": claims,
        "failed": failures,
        "sure": sure_table(found),
        "sure_notes": sure_notes(found),
        "bound": bound,
        "changes": changed,
        "trust": checked,
        "actions": [*choice_sentences(found), *(sentence for data in found for sentence in actions(data))],
        "drawings": fleet_drawings(found, history),
        "stacks": stacks,
        "links": [(data.name, f"{safe_name(key)}/report.html") for key, data in models.items()],
        "method": method(found),
        "footer": footer(run.get("run_id")),
    }
