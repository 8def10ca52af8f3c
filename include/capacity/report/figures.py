"""The figures: SVG for the page, PNG beside it, each with a computed caption that says what to see.

Drawn with matplotlib's object interface (no global state), deterministic: the same data give the same
bytes. On every curve filled markers are steps at proof size, hollow ones scouting; a dotted vertical line
is the published limit. Steps that are not used (rejected, invalid) are grey crosses.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from include.capacity.limits.changes import CHANGED, changes, comparable
from include.capacity.report.conclusions import (
    peak_sentences,
    server_sentences,
    throughput_column,
    waste_sentences,
)
from include.capacity.report.data import FAILURES, Frame, ModelData, bracket_of, exportable, known, text
from include.capacity.report.style import FAINT, GREEN, INK, LINES, OUTCOME_BARS, RC, VERMILION
from include.capacity.report.words import (
    OUTCOME_WORDS,
    count,
    join,
    number,
    percent,
    rate,
    seconds,
    title_of,
)
from include.capacity.results.store import safe_name
from include.capacity.words import LimitStatus, Outcome

WIDTH, HEIGHT = 6.6, 3.3
"""Inches."""
PNG_DPI = 144
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
"""Ground of words that stand on lines."""
LABELLED_BARS = 16
LEGEND_CHARACTERS = 40
SHOWN_RUNS = 60
"""Two months of nights."""


@dataclass(frozen=True)
class Drawing:
    """A finished figure."""

    name: str
    """File name without suffix: a safe name."""
    title: str
    caption: str
    traffic: tuple[str, str]
    """(service class, series) it shows."""
    svg: str
    """A whole ``<svg>`` element for a page, ids its own, labelled for screen readers."""
    png: bytes


def model_drawings(data: ModelData) -> list[Drawing]:
    """All figures of a model, in the order of the report; those without data are left out."""
    found = []
    for service_class, series in data.traffic:
        curve = data.curve(service_class, series)
        if curve.empty:
            continue
        stem = "-".join(safe_name(part) for part in (service_class or "all", series) if part)
        for name, draw in FIGURES.items():
            with mpl.rc_context(RC):
                drawn = draw(data, service_class, series, curve)
            if drawn is not None:
                figure, title, caption = drawn
                heading = f"{data.name}, {title_of(service_class, series)}: {title}"
                found.append(finished(figure, f"{stem}-{name}", heading, caption, (service_class, series)))
    return found


def fleet_drawings(models: Sequence[ModelData], history: Sequence[Mapping[str, Any]] = ()) -> list[Drawing]:
    """Per class completed requests per second against concurrency, and the limits over time."""
    found = []
    classes = dict.fromkeys(traffic for model in models for traffic in model.traffic)
    for service_class, series in classes:
        stem = "-".join(safe_name(part) for part in (service_class or "all", series) if part)
        with mpl.rc_context(RC):
            figures = {
                f"fleet-{stem}": _fleet(models, service_class, series),
                f"history-{stem}": _over_time(models, history, service_class, series),
            }
        for name, drawn in figures.items():
            if drawn is not None:
                figure, title, caption = drawn
                heading = f"{title_of(service_class, series)}: {title}"
                found.append(finished(figure, name, heading, caption, (service_class, series)))
    return found


def finished(figure: Figure, name: str, title: str, caption: str, traffic: tuple[str, str]) -> Drawing:
    """Render to SVG and PNG."""
    with mpl.rc_context({**RC, "svg.hashsalt": name}):
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return Drawing(name, title, caption, traffic, for_page(svg.getvalue(), name, title), png.getvalue())


def for_page(svg: str, name: str, title: str) -> str:
    """The ``<svg>`` element of a file, fit to stand inside a page beside others.

    Ids get the figure's name in front (they would clash), the style rule is kept inside the element, the
    title is announced by screen readers; prolog and metadata go.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = svg.replace("*{stroke-linejoin", f"#{prefix} *{{stroke-linejoin")
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return (
        f'{head} id="{prefix}" role="img" aria-labelledby="{prefix}-title">'
        f'<title id="{prefix}-title">{escape(title)}</title>{rest.strip()}'
    )


# -- one function a figure: (figure, title, caption), or None where there are no data

Drawn = tuple[Figure, str, str] | None


def _throughput(data: ModelData, service_class: str, series: str, curve: Frame) -> Drawn:
    column = throughput_column(curve)
    if column is None:
        return None
    figure, (axes,) = _figure(1)
    lines = [(column, "completed requests" if column.startswith("output") else "prompt + output, completed")]
    if column == "output_tok_per_s" and curve["raw_output_tok_per_s"].notna().any():
        lines.append(("raw_output_tok_per_s", "raw (failed requests' tokens too)"))
    for style, (name, label) in reversed(list(zip(LINES, lines, strict=False))):
        _line(axes, curve, name, label, style)  # completed last, on top
    _unused(axes, data, service_class, series, column)
    _concurrency_axis(axes, curve.index)
    axes.set_ylabel("output tokens/s" if column.startswith("output") else "tokens/s")
    axes.set_ylim(bottom=0, top=1.15 * float(curve[[name for name, _ in lines]].max().max()))
    knee = _knee(data, service_class, series, "throughput")
    if knee is None:
        reached = curve[curve[column] >= 0.95 * curve[column].max()]
        knee = float(reached.index.min()) if len(reached) else None
    if knee is not None:
        axes.axvline(knee, color=GREEN, linestyle="-.", linewidth=1.2, zorder=1)
        _label(axes, knee, f"knee {number(knee)}", 0.05, color=GREEN)
    _finish(axes, data, service_class, series, curve)
    _legend(figure)
    sentences = peak_sentences(curve)
    if len(lines) == 2:
        sentences += waste_sentences(curve) or [
            "Raw and completed throughput lie together: next to nothing is generated for requests that fail."
        ]
    if knee is not None:
        sentences.append(
            f"The throughput knee, where 95 % of the highest rate is first reached, is at {number(knee)}."
        )
    return figure, "throughput against requests in flight", " ".join(sentences)


def _latency(data: ModelData, service_class: str, series: str, curve: Frame) -> Drawn:
    panels = [
        (name, title)
        for name, title in (("ttft", "Time to first token"), ("e2e", "Whole answer (E2E)"))
        if curve[[f"{name}_{p}_s" for p in ("p50", "p95", "p99")]].notna().any(axis=None)
    ]
    if not panels:
        return None
    rule = data.rule(service_class)
    deadline = known(rule.get("deadline_s")) or known(curve["deadline_s"].max())
    figure, all_axes = _figure(len(panels))
    bracket = _knee_bracket(data, service_class, series, "latency")
    for axes, (name, title) in zip(all_axes, panels, strict=True):
        columns = [f"{name}_{p}_s" for p in ("p50", "p95", "p99")]
        for style, column, p in zip(LINES, columns, ("p50", "p95", "p99"), strict=False):
            if curve[column].notna().any():
                _line(axes, curve, column, p, style)
        lines = [(known((rule.get(name) or {}).get("at_most_s")), "objective", VERMILION)]
        if name == "e2e":
            lines.append((deadline, "deadline", INK))
        for at, label, color in lines:
            if at is not None:
                axes.axhline(at, color=color, linewidth=1.2, linestyle=(0, (6, 2)), zorder=1)
                axes.annotate(
                    f"{label} {seconds(at)}",
                    (0.01, at),
                    xycoords=("axes fraction", "data"),
                    xytext=(0, 2),
                    textcoords="offset points",
                    fontsize=8,
                    color=color,
                )
        _concurrency_axis(axes, curve.index)
        if bracket and name == "ttft":
            axes.axvspan(*bracket, color=VERMILION, alpha=0.12, linewidth=0)
            _label(
                axes,
                float(np.sqrt(bracket[0] * bracket[1])),
                "latency knee",
                0.04,
                color=VERMILION,
                middle=True,
            )
        axes.set_yscale("log")
        _seconds_axis(axes, [curve[c] for c in columns], [at for at, *_ in lines if at])
        axes.set_title(title)
        _finish(axes, data, service_class, series, curve)
    _legend(figure)
    return figure, "latency of completed requests", _latency_caption(data, service_class, curve, bracket)


def _latency_caption(
    data: ModelData,
    service_class: str,
    curve: Frame,
    bracket: tuple[float, float] | None,
) -> str:
    sentences = []
    objective = data.rule(service_class).get("ttft") or {}
    at_most = known(objective.get("at_most_s"))
    p95, n = curve["ttft_p95_s"].dropna(), curve["ttft_n"]
    if at_most is not None and len(p95):
        late = p95[p95 > at_most]
        before = p95[p95.index < (late.index.min() if len(late) else np.inf)]
        if len(before):
            at = int(before.index.max())
            sentences.append(
                f"Up to {number(at)} in flight the p95 first token of completed requests stays within "
                f"{seconds(at_most)} ({seconds(p95[at])} at {number(at)}, {count(n[at])})."
            )
        if len(late):
            at = int(late.index.min())
            sentences.append(f"It takes {seconds(p95[at])} at {number(at)} ({count(n[at])}).")
    if bracket:
        sentences.append(
            f"Between {number(bracket[0])} and {number(bracket[1])} the first-token delay begins to climb "
            "faster than the number of requests in flight (latency knee)."
        )
    p99, n = curve["e2e_p99_s"].dropna(), curve["e2e_n"]
    if len(p99):
        low, high = int(p99.index.min()), int(p99.index.max())
        if low != high:
            sentences.append(
                f"The p99 of the whole answer goes from {seconds(p99[low])} at {number(low)} "
                f"({count(n[low])}) to {seconds(p99[high])} at {number(high)} ({count(n[high])})."
            )
    if (curve["completion"] < 0.99).any():
        sentences.append("Only completed requests are shown; read it beside the completion rate.")
    return " ".join(sentences)


def _completion(data: ModelData, service_class: str, series: str, curve: Frame) -> Drawn:
    shown = curve[curve["completion"].notna()]
    if shown.empty:
        return None
    rule = data.rule(service_class)
    floor = known(rule.get("completion_floor"))
    cliff = _cliff(data, service_class, series)
    percents = shown.assign(
        y=100 * shown["completion"],
        z=100 * shown["objective_met"] / shown["attempted"],
        y_low=100 * shown["y_lower"],
        y_high=100 * shown["y_upper"],
    )
    lines = [("y", "completed within the deadline")]
    if (rule.get("ttft") or rule.get("tpot") or rule.get("e2e")) and percents["z"].notna().any():
        lines.append(("z", "completed with every objective met"))
    shares = [(rule.get(name) or {}).get("share") for name in ("ttft", "tpot", "e2e")]
    share = max((s for s in map(known, shares) if s is not None), default=None) if len(lines) > 1 else None
    floors = [(f"floor {percent(floor)}", floor, INK), (f"asked {percent(share)}", share, VERMILION)]
    asked = [100 * at for _, at, _ in floors if at is not None]
    lowest = float(min([percents[column].min() for column, _ in lines] + asked))
    close = 100 - 2.5 * (100 - min(asked)) if asked else None
    bottoms = {"Whole range": max(0.0, lowest - 0.1 * (100 - lowest) - 0.5)}
    if close is not None and lowest < close - 5:
        bottoms["Close to the floor"] = close
    figure, all_axes = _figure(len(bottoms))
    for axes, (title, bottom) in zip(all_axes, bottoms.items(), strict=True):
        for style, (column, label) in reversed(list(zip(LINES, lines, strict=False))):
            _line(axes, percents, column, label, style)
        for words, at, color in floors:
            if at is None:
                continue
            axes.axhline(100 * at, color=color, linewidth=1.2, linestyle=(0, (6, 2)), zorder=1)
            if title == "Whole range" and len(bottoms) > 1:
                continue  # the lines lie on each other; the other panel names them
            axes.annotate(
                words,
                (0.01, 100 * at),
                xycoords=("axes fraction", "data"),
                xytext=(0, -3),
                textcoords="offset points",
                ha="left",
                va="top",
                fontsize=8,
                color=color,
                bbox=ON_WHITE,
                zorder=5,
            )
        if cliff:
            axes.axvspan(*cliff, color=VERMILION, alpha=0.12, linewidth=0)
        axes.set_ylim(bottom, 100 + 0.14 * (100 - bottom))
        if len(bottoms) > 1:
            axes.set_title(title)
        _finish(axes, data, service_class, series, curve)
    all_axes[0].set_ylabel("% of attempted requests")
    _legend(figure)
    sentences = []
    below = shown[shown["completion"] < (floor if floor is not None else 0)]
    if floor is not None and len(below):
        at = int(below.index.min())
        row = below.loc[at]
        bounds = (
            f", one-sided 95 % bounds {percent(row['y_lower'])} and {percent(row['y_upper'])}"
            if known(row["y_lower"]) is not None
            else ""
        )
        sentences.append(
            f"The completion rate first falls below its floor of {percent(floor)} at {number(at)}: "
            f"{percent(row['completion'])} ({count(row['attempted'])}{bounds})."
        )
    elif floor is not None:
        sentences.append(
            f"The completion rate is at or above its floor of {percent(floor)} at every concurrency measured "
            f"({number(shown['completed'].sum())} of {number(shown['attempted'].sum())} requests completed)."
        )
    if cliff:
        sentences.append(f"Shaded: the cliff, between {number(cliff[0])} and {number(cliff[1])}.")
    first = known(
        ((data.limit(service_class, series) or {}).get("knees") or {}).get("first_error_concurrency")
    )
    if first is not None:
        sentences.append(f"The first failed request was seen at {number(first)}.")
    if shown["y_lower"].notna().any():
        sentences.append("Bars are one-sided 95 % bounds.")
    return figure, "completion rate", " ".join(sentences)


def _outcomes(data: ModelData, service_class: str, series: str, curve: Frame) -> Drawn:
    del data, service_class, series  # the signature of all figures
    shown = curve[curve["attempted"] > 0]
    if shown.empty or shown["completed"].isna().all():
        return None
    figure, (axes,) = _figure(1)
    at = np.arange(len(shown))
    base = np.zeros(len(shown))
    kinds = ["completed", *(kind for kind in FAILURES if (shown[kind].fillna(0) > 0).any())]
    for kind in kinds:
        share = (100 * shown[kind].fillna(0) / shown["attempted"]).to_numpy()
        axes.bar(
            at,
            share,
            bottom=base,
            width=0.72,
            edgecolor=INK,
            linewidth=0.5,
            label=OUTCOME_WORDS[Outcome(kind)],
            **OUTCOME_BARS[kind],
        )
        base += share
    every = -(-len(at) // LABELLED_BARS)  # more labels would run into each other
    steps = list(zip(shown.index, shown["attempted"], strict=True))[::every]
    axes.xaxis.set_major_locator(FixedLocator(list(at[::every])))
    axes.set_xticklabels([f"{c:,}\nn {n:,.0f}" for c, n in steps], fontsize=8 if len(at) <= 10 else 6.5)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of attempted requests")
    axes.set_xlabel("requests in flight, and how many were attempted")
    figure.legend(loc="outside upper left", ncols=3)
    failed = shown["attempted"] - shown["completed"]
    if failed.sum() == 0:
        caption = f"Every one of {number(shown['attempted'].sum())} attempted requests completed."
    else:
        totals = {kind: float(shown[kind].fillna(0).sum()) for kind in kinds[1:]}
        parts = [
            f"{OUTCOME_WORDS[Outcome(kind)]} {number(n)}"
            for kind, n in sorted(totals.items(), key=lambda item: -item[1])
        ]
        first = int(failed[failed > 0].index.min())
        caption = (
            f"Of {number(shown['attempted'].sum())} attempted requests {number(failed.sum())} failed: "
            f"{join(parts)}. The first failure is at {number(first)}."
        )
    return figure, "how requests ended", caption


def _server(data: ModelData, service_class: str, series: str, curve: Frame) -> Drawn:
    counts = [
        (column, label)
        for column, label in (
            ("server_running_mean", "running (mean)"),
            ("server_waiting_mean", "waiting (mean)"),
        )
        if curve[column].notna().any()
    ]
    kv = curve["server_kv_use_peak"].notna().any()
    if not counts and not kv:
        return None
    figure, all_axes = _figure(bool(counts) + bool(kv))
    if counts:
        axes = all_axes[0]
        for style, (column, label) in zip(LINES, counts, strict=False):
            _line(axes, curve, column, label, style)
        axes.set_ylim(0, 1.18 * max(1.0, float(curve[[column for column, _ in counts]].max().max())))
        axes.set_title("Requests inside the server")
        _finish(axes, data, service_class, series, curve)
    if kv:
        axes = all_axes[-1]
        _line(axes, curve.assign(kv=100 * curve["server_kv_use_peak"]), "kv", "peak use", LINES[2])
        axes.set_ylim(0, 118)
        axes.set_title("KV cache use, %")
        _finish(axes, data, service_class, series, curve)
    _legend(figure)
    return figure, "the server's own metrics", " ".join(server_sentences(curve))


FIGURES: dict[str, Callable[[ModelData, str, str, Frame], Drawn]] = {
    "throughput": _throughput,
    "latency": _latency,
    "completion": _completion,
    "outcomes": _outcomes,
    "server": _server,
}


def _fleet(models: Sequence[ModelData], service_class: str, series: str) -> Drawn:
    curves = {model.name: model.curve(service_class, series) for model in models}
    curves = {name: c for name, c in curves.items() if len(c) and c["request_per_s"].notna().any()}
    if not curves:
        return None
    figure, (axes,) = _figure(1, height=3.7)
    sentences, tops = [], []
    for at, model in enumerate(model for model in models if model.name in curves):
        style, curve = LINES[at % len(LINES)], curves[model.name]
        proof = curve["proof"]  # what a few requests of a scout leave open would hide the rest
        shown = curve.assign(
            request_per_s_low=curve["request_per_s_low"].where(proof),
            request_per_s_high=curve["request_per_s_high"].where(proof),
        )
        _line(axes, shown, "request_per_s", model.name, style)
        tops.append(float(curve["request_per_s"].max()))
        tops.append(min(2 * tops[-1], float(shown["request_per_s_high"].max())))
        limit = model.limit(service_class, series)
        x = known(limit["limit"]) if exportable(limit) else None
        best = int(curve["request_per_s"].idxmax())
        most = curve.at[best, "request_per_s"]
        sentence = f"{model.name}: at most {rate(most)} completed requests/s, at {number(best)}"
        if x is not None:
            y = float(np.interp(np.log(x), np.log(curve.index), curve["request_per_s"]))
            axes.plot([x], [y], "o", ms=14, mfc="none", mec=str(style["color"]), mew=1.6, zorder=4)
            axes.annotate(
                f"limit {number(x)}",
                (x, y),
                xytext=(0, 11),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                bbox=ON_WHITE,
                zorder=5,
            )
            if int(x) in curve.index:
                sentence += (
                    f"; {rate(curve.at[int(x), 'request_per_s'])} at its limit of {number(x)} "
                    f"({count(curve.at[int(x), 'attempted'])})"
                )
        sentences.append(sentence + ".")
    axes.set_ylabel("completed requests/s")
    axes.set_ylim(bottom=0, top=1.15 * float(np.nanmax(tops)))
    everywhere = pd.concat(curves.values())
    _concurrency_axis(axes, everywhere.index)
    _legend(figure)
    if any(exportable(model.limit(service_class, series)) for model in models):
        sentences.append("Rings mark the limits; beyond a ring nothing was proven.")
    if any(curve["proof"].any() for curve in curves.values()):
        sentences.append("Bars are 95 % intervals of steps at proof size.")
    return figure, "completed requests per second against requests in flight", " ".join(sentences)


def _over_time(
    models: Sequence[ModelData], history: Sequence[Mapping[str, Any]], service_class: str, series: str
) -> Drawn:
    """The limits of this run after those of the runs it may be compared with."""
    lines = {}
    for model in models:
        limit = model.limit(service_class, series)
        if limit is None or limit.get("measured") != "alone":
            continue
        now = {
            **limit,
            "run_id": text(model.sweep.get("run_id")),
            "measured_at": text(model.sweep.get("created_at")),
            "stack_id": model.sweep.get("stack_id"),
            "stack": model.sweep.get("stack"),
        }
        if before := comparable(history, now, model.name):
            runs = [*before, now]
            lines[model.name] = list(zip(runs, changes(runs), strict=True))
    if not lines:
        return None
    figure, (axes,) = _figure(1)
    sentences = []
    for at, (name, line) in enumerate(lines.items()):
        sentences.append(_one_over_time(axes, name, line, LINES[at % len(LINES)]))
    axes.set_ylabel("limit, requests in flight")
    shown = [run for line in lines.values() for run, _ in line[-SHOWN_RUNS:]]
    most = max(float(run["limit"] or 0) for run in shown)
    axes.set_ylim(bottom=0, top=1.2 * max(most, 1.0))
    times = sorted(_when(run) for run in shown)
    short = times[-1] - times[0] < timedelta(days=3)
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=2, maxticks=5 if short else 8))
    axes.xaxis.set_major_formatter(DateFormatter("%d %b %H:%M" if short else "%d %b"))
    axes.set_xlabel(f"measured in {' and '.join(dict.fromkeys(str(at.year) for at in times))} (UTC)")
    axes.margins(x=0.04)
    _legend(figure)
    sentences.append("Hollow markers are lower bounds; a cross at 0 is a run in which no step passed.")
    return figure, "limits over time", " ".join(sentences)


def _one_over_time(
    axes: Axes, name: str, runs: list[tuple[Mapping[str, Any], dict[str, Any] | None]], style: dict[str, Any]
) -> str:
    """Draw one model's newest limits; returns what to see in them."""
    last_of = "last " if len(runs) > SHOWN_RUNS else ""
    runs = runs[-SHOWN_RUNS:]
    when = [date2num(_when(run)) for run, _ in runs]
    values = np.array([np.nan if run["limit"] is None else float(run["limit"]) for run, _ in runs])
    axes.plot(when, values, label=_legend_text(name), **style)
    told = []
    for at, value, (run, change) in zip(when, values, runs, strict=True):
        if np.isnan(value):
            if run["status"] == LimitStatus.NO_PASSING_STEP:
                axes.plot([at], [0], "x", color=style["color"], ms=7, mew=1.6, clip_on=False, zorder=4)
            continue
        if run["status"] == LimitStatus.LOWER_BOUND:
            axes.plot([at], [value], marker=style["marker"], color=style["color"], mfc="white", zorder=3)
        if change and change["verdict"] in CHANGED and change["was"]:
            share = (value - change["was"]) / change["was"]
            told.append(f" It {change['verdict']} by {percent(abs(share))} on {_when(run):%Y-%m-%d}.")
            axes.annotate(
                f"{'+' if share > 0 else '−'}{abs(share):.0%}".replace("%", " %"),
                (at, value),
                xytext=(0, 8 if share > 0 else -8),
                textcoords="offset points",
                ha="center",
                va="bottom" if share > 0 else "top",
                fontsize=8,
                color=INK,
                bbox=ON_WHITE,
                zorder=5,
            )
    earlier = values[:-1][~np.isnan(values[:-1])]
    last = "no limit" if np.isnan(values[-1]) else number(values[-1])
    if not len(earlier):
        return f"{name}: {last} in this run, and no limit in {number(len(runs) - 1)} before.{''.join(told)}"
    span = number(earlier.min())
    if earlier.min() < earlier.max():
        span = f"{number(earlier.min())} to {number(earlier.max())}"
    before = f"{span} in the {last_of}{number(len(earlier))} comparable before it"
    nothing = sum(run["status"] == LimitStatus.NO_PASSING_STEP for run, _ in runs[:-1])
    if nothing:
        before += f" that found one; in {number(nothing)} no step passed"
    return f"{name}: {last} in this run, {before}.{''.join(told)}"


def _when(run: Mapping[str, Any]) -> datetime:
    """When a run of the history was measured, in UTC."""
    at = datetime.fromisoformat(run["measured_at"])
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


# -- parts of figures


def _figure(panels: int, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, [figure.add_subplot(1, panels, at + 1) for at in range(panels)]


def _line(axes: Axes, curve: Frame, column: str, label: str, style: dict[str, Any]) -> None:
    """One line; hollow markers where the step was only a scout; error bars where an interval is known."""
    shown = curve[curve[column].notna()]
    axes.plot(shown.index, shown[column], label=_legend_text(label), **style)
    for proof in (False, True):
        part = shown[shown["proof"] == proof]
        axes.plot(
            part.index,
            part[column],
            linestyle="none",
            marker=style["marker"],
            color=style["color"],
            markerfacecolor=style["color"] if proof else "white",
            markeredgewidth=1.3,
            zorder=3,
        )
    if f"{column}_low" in shown and shown[f"{column}_low"].notna().any():
        below = (shown[column] - shown[f"{column}_low"]).clip(lower=0)
        above = (shown[f"{column}_high"] - shown[column]).clip(lower=0)
        axes.errorbar(
            shown.index,
            shown[column],
            yerr=np.vstack([below, above]),
            fmt="none",
            ecolor=style["color"],
            elinewidth=1.2,
            capsize=3,
        )


def _legend_text(label: str) -> str:
    """A name on one line that fits into the legend. Matplotlib hides those that begin with an underscore."""
    label = " ".join(label.split())
    if len(label) > LEGEND_CHARACTERS:
        label = f"{label[: LEGEND_CHARACTERS - 1]}…"
    return f"\u200b{label}" if label.startswith("_") else label


def _unused(axes: Axes, data: ModelData, service_class: str, series: str, column: str) -> None:
    steps = data.steps_of(service_class, series)
    mine = steps[(steps["why_unused"] != "") & steps[column].notna()]
    if len(mine):
        axes.plot(
            mine["concurrency"], mine[column], "x", color=FAINT, ms=7, mew=1.5, label="not used (rejected)"
        )


def _finish(axes: Axes, data: ModelData, service_class: str, series: str, curve: Frame) -> None:
    limit = data.limit(service_class, series)
    _concurrency_axis(axes, curve.index)
    if exportable(limit):
        at = float(limit["limit"])
        axes.axvline(at, color=INK, linestyle=":", linewidth=1.4, zorder=1)
        _label(axes, at, f"limit {number(at)}", 0.98, top=True)


def _label(
    axes: Axes,
    at: float,
    words: str,
    height: float,
    *,
    color: str = INK,
    top: bool = False,
    middle: bool = False,
) -> None:
    """A word beside a vertical line, on a white ground so that lines do not cross it."""
    low, high = np.log(axes.get_xlim())
    right = not middle and np.log(at) - low > 0.6 * (high - low)
    axes.annotate(
        words,
        (at, height),
        xycoords=("data", "axes fraction"),
        xytext=(0 if middle else -4 if right else 4, 0),
        textcoords="offset points",
        ha="center" if middle else "right" if right else "left",
        va="top" if top else "bottom",
        fontsize=8,
        color=color,
        bbox=ON_WHITE,
        zorder=5,
    )


def _concurrency_axis(axes: Axes, found: Frame) -> None:
    """Doubling per unit of length; plain numbers at powers of two."""
    low, high = float(found.min()), float(found.max())
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.25, high * 1.25)
    ticks = [2.0**power for power in range(21) if low <= 2.0**power <= high] or [low]
    if len(ticks) > 8:
        ticks = ticks[::2]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("requests in flight (concurrency)")


def _seconds_axis(axes: Axes, columns: list[Frame], lines: list[float]) -> None:
    values = pd.concat([*columns, pd.Series(lines, dtype=float)]).dropna()
    values = values[values > 0]
    if len(values):
        axes.set_ylim(float(values.min()) / 1.6, float(values.max()) * 2.2)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0), numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value).replace(".0 s", " s")))


def _legend(figure: Figure) -> None:
    """One legend above all panels of a figure."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(handles) > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=4)


def _knee(data: ModelData, service_class: str, series: str, name: str) -> float | None:
    """The concurrency of a knee in ``limits.json``."""
    knee = ((data.limit(service_class, series) or {}).get("knees") or {}).get(name)
    return known(knee.get("concurrency") if isinstance(knee, dict) else knee)


def _knee_bracket(data: ModelData, service_class: str, series: str, name: str) -> tuple[float, float] | None:
    low, high = bracket_of(((data.limit(service_class, series) or {}).get("knees") or {}).get(name))
    return (low, high) if low is not None and high is not None else None


def _cliff(data: ModelData, service_class: str, series: str) -> tuple[float, float] | None:
    """Where completion breaks: the completion knee's bracket, else the limit's if completion fails there."""
    found = _knee_bracket(data, service_class, series, "completion")
    if found:
        return found
    low, high = bracket_of((data.limit(service_class, series) or {}).get("bracket"))
    if low is None or high is None:
        return None
    curve, floor = data.curve(service_class, series), known(data.rule(service_class).get("completion_floor"))
    if floor is None or int(high) not in curve.index or not curve.at[int(high), "completion"] < floor:
        return None
    return low, high
