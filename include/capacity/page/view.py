"""What the page says, computed from ``latest/limits.json``, the history and the runs' manifests.

Templates only lay out. A class that has runs but no current limit gets a row of its own, from its newest
run: "no limit" is news too. The trend of a limit is drawn from the runs with the same ``comparison_id``, on a
scale that begins at 0, so that noise does not look like a fall.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from include.capacity.errors import PublishError
from include.capacity.limits.changes import CHANGED
from include.capacity.page.files import NotPublished, read_manifest
from include.capacity.publish.documents import moment
from include.capacity.publish.history import read_history
from include.capacity.publish.latest import read_latest
from include.capacity.report.words import (
    UNKNOWN,
    bound_words,
    join,
    number,
    server_bound_words,
    status_words,
)
from include.capacity.results.store import Store, safe_name
from include.capacity.words import EXPORTABLE, TERMS, LimitStatus

Entry = Mapping[str, Any]

HISTORY_RUNS = 90
TREND_RUNS = 30
RECENT_RUNS = 12
NEWS_RUNS = 7
WIDTH, HEIGHT, MARGIN = 132, 34, 4

VERDICTS = {
    "fell": ("fell", "bad"),
    "rose": ("rose", "good"),
    "may_have_fallen": ("may have fallen", "warn"),
    "may_have_risen": ("may have risen", "good"),
}
"""A change's word and tone; other verdicts are no news."""

FILE_WORDS = {
    "report.html": "Report",
    "report.md": "Report as Markdown",
    "limits.json": "Limits with their evidence",
    "steps.csv": "One row per step and repeat",
    "quality.json": "What the checks of the data found",
    "requests.parquet": "One row per request",
    "server_metrics.parquet": "The server's own metrics, once a second",
    "sweep.json": "What was measured: stack, classes, workload",
}


PART_WORDS = {
    "policy": "The limits as a gateway's configuration",
    "steps": "Facts of one step",
    "figures": "A figure of the report",
}


@dataclass(frozen=True)
class Snapshot:
    """What was read of the store at one moment."""

    url: str
    latest: Entry | None
    history: list[Entry]
    manifests: Mapping[tuple[str, int], Entry]
    problems: list[str] = field(default_factory=list)
    """What could not be read, though the limits could."""


@dataclass(frozen=True)
class Trend:
    """The limits of the last comparable runs as a line of points, oldest first."""

    points: list[tuple[float, float]]
    marked: list[bool]
    """Which runs said that the limit fell."""
    words: str


@dataclass(frozen=True)
class Row:
    """One model and class."""

    model: str
    served_name: str
    service_class: str
    measured: str
    beside: str
    simulated: bool
    limit: str
    status: str
    status_words: str
    stale: bool
    mark: tuple[str, str] | None
    """A change's word and tone."""
    bound: str
    server_bound: str
    bracket: str
    measured_at: str
    age: str
    valid: str
    notes: list[str]
    trend: Trend | None
    run_id: str
    report: str | None
    """Path of the report below the page."""
    files: str | None

    @property
    def states(self) -> str:
        """Words that the status filter looks for, separated by blanks."""
        marks = [self.mark[0].replace(" ", "_")] if self.mark else []
        return " ".join([self.status, *(["stale"] if self.stale else ["fresh"]), *marks])


@dataclass(frozen=True)
class Figure:
    """A figure of one model's run."""

    path: str
    title: str


@dataclass(frozen=True)
class RecentRun:
    """One line about a run."""

    run_id: str
    at: str
    age: str
    promoted: bool
    said: str
    page: str | None


def read_snapshot(store: Store) -> Snapshot:
    """Read what the page shows. PublishError if the limits cannot be read; what else is missing is said."""
    latest = read_latest(store)
    problems: list[str] = []
    history: list[Entry] = []
    try:
        history = list(read_history(store, newest=HISTORY_RUNS))
    except PublishError as error:
        problems.append(f"The history cannot be read, so trends and runs are missing: {error}")
    manifests: dict[tuple[str, int], Entry] = {}
    for entry in (latest or {}).get("limits", []):
        run = (str(entry["run_id"]), int(entry["attempt"]))
        if run in manifests:
            continue
        try:
            manifests[run] = read_manifest(store, safe_name(run[0]), str(run[1]))
        except (NotPublished, PublishError) as error:
            manifests[run] = {"names": []}
            problems.append(f"The files of a run are missing: {error}")
    return Snapshot(store.url, latest, history, manifests, problems)


def limits_page(found: Snapshot, now: datetime | None = None) -> dict[str, Any]:
    """The values of the template ``limits.html.j2``."""
    now = now or datetime.now(UTC)
    rows = [_row(entry, found, now) for entry in (found.latest or {}).get("limits", [])]
    have = {(row.model, row.service_class, row.measured) for row in rows}
    rows += [_without_limit(key, limit, run, now) for key, limit, run in _newest(found.history, have)]
    rows.sort(key=lambda row: (row.model, row.service_class, row.measured))
    return {
        "url": found.url,
        "rows": rows,
        "problems": found.problems,
        "summary": _summary(rows, found, now),
        "classes": sorted({row.service_class for row in rows}),
        "statuses": _statuses(rows),
        "figures": _figures(found),
        "runs": [_recent(entry, now) for entry in reversed(found.history[-RECENT_RUNS:])],
        "has_latest": found.latest is not None,
        "simulated": sum(row.simulated for row in rows),
    }


def _row(entry: Entry, found: Snapshot, now: datetime) -> Row:
    """The current limit of one class."""
    run = safe_name(str(entry["run_id"])), entry["attempt"]
    until = moment(entry["valid_until"])
    stale = until is not None and until < now
    attempt = entry.get("last_attempt") or {}
    runs = list(_comparable(entry, found.history))
    news, told_at = _news(entry, runs)
    notes = [str(entry["claim"])]
    if news:
        notes.append(f"{ago(told_at, now)}: {news['sentence']}" if told_at else str(news["sentence"]))
    if attempt:
        notes.append(
            f"A later run, {ago(moment(attempt['at']), now)}, moved nothing "
            f"({status_words(attempt['status'])}): {attempt['reason']}"
        )
    return Row(
        model=str(entry["model"]),
        served_name=str(entry.get("served_name") or ""),
        service_class=str(entry["class"]),
        measured=str(entry["measured"]),
        beside=_beside(entry),
        simulated=bool(entry.get("simulated")),
        limit=number(entry["limit"]),
        status=str(entry["status"]),
        status_words=status_words(entry["status"]),
        stale=stale,
        mark=VERDICTS.get(str(news.get("verdict"))),
        bound=bound_words(entry, short=True),
        server_bound=server_bound_words(entry).partition(" (")[0],
        bracket=_bracket(entry),
        measured_at=when(moment(entry["measured_at"])),
        age=ago(moment(entry["measured_at"]), now),
        valid=f"{'stale since' if stale else 'valid until'} {near(until, now)}",
        notes=notes,
        trend=_trend(runs),
        run_id=str(entry["run_id"]),
        report=f"view/{quote(str(entry['report']))}",
        files=f"runs/{quote(run[0])}/{run[1]}/",
    )


def _without_limit(key: tuple[str, str, str], limit: Entry, run: Entry, now: datetime) -> Row:
    """A class that has been swept and has no current limit."""
    change = limit.get("change") or {}
    promoted = "" if run["promoted"] else " That run was not promoted."
    said = {
        True: f"Run {run['run_id']} found {number(limit.get('limit'))}, but no promoted run has.",
        False: f"Run {run['run_id']} found no limit: {status_words(limit['status'])}.{promoted}",
    }
    notes = [said[limit.get("limit") is not None]]
    if change.get("verdict") in VERDICTS and change.get("sentence"):
        notes.append(str(change["sentence"]))
    prefix = f"runs/{safe_name(run['run_id'])}/{run['attempt']}"
    return Row(
        model=key[0],
        served_name="",
        service_class=key[1],
        measured=key[2],
        beside="",
        simulated=bool(run["models"][key[0]].get("simulated")),
        limit=UNKNOWN,
        status="no_current_limit" if limit.get("limit") is not None else str(limit["status"]),
        status_words="no current limit" if limit.get("limit") is not None else status_words(limit["status"]),
        stale=False,
        mark=VERDICTS.get(str(change.get("verdict"))),
        bound="",
        server_bound="",
        bracket=_bracket(limit),
        measured_at=when(moment(run["published_at"])),
        age=ago(moment(run["published_at"]), now),
        valid="",
        notes=notes,
        trend=None,
        run_id=str(run["run_id"]),
        report=f"view/{quote(f'{prefix}/{safe_name(key[0])}/report.html')}",
        files=f"{quote(prefix)}/",
    )


def _newest(
    history: list[Entry], have: set[tuple[str, str, str]]
) -> Iterator[tuple[tuple[str, str, str], Entry, Entry]]:
    """For each class that has no row yet: its newest limit entry and run."""
    newest: dict[tuple[str, str, str], tuple[Entry, Entry]] = {}
    for run in history:
        for model, found in run["models"].items():
            for limit in found["limits"]:
                newest[model, str(limit["class"]), str(limit["measured"])] = (limit, run)
    for key, (limit, run) in newest.items():
        if key not in have:
            yield key, limit, run


def _comparable(entry: Entry, history: list[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """(limit, run) of the runs that this limit may be compared with, oldest first."""
    for run in history:
        for limit in (run["models"].get(entry["model"]) or {}).get("limits", []):
            if all(limit.get(key) == entry.get(key) for key in ("class", "measured", *TERMS)):
                yield limit, run


def _news(entry: Entry, runs: list[tuple[Entry, Entry]]) -> tuple[Entry, datetime | None]:
    """The newest change worth a mark, and when it was told; kept a while, for runs after it say "same".

    What may have changed was left for the next run to decide: any verdict after it takes its place.
    """
    decided = False
    for limit, run in reversed(runs[-NEWS_RUNS:]):
        change = limit.get("change") or {}
        verdict = change.get("verdict")
        if verdict in CHANGED or (verdict in VERDICTS and not decided):
            return change, moment(run["published_at"])
        decided = decided or verdict is not None
    change = entry.get("change") or {}
    return (change, None) if change.get("verdict") in VERDICTS and not decided else ({}, None)


def _trend(runs: list[tuple[Entry, Entry]]) -> Trend | None:
    """The limits of the last comparable runs, 0 where no step passed; None where there are fewer than two.

    A run that says nothing about the server is left out.
    """
    telling = [
        limit
        for limit, _ in runs
        if (limit["status"] in EXPORTABLE and limit.get("limit"))
        or limit["status"] == LimitStatus.NO_PASSING_STEP
    ]
    limits = [int(limit.get("limit") or 0) for limit in telling]
    fell = [(limit.get("change") or {}).get("verdict") == "fell" for limit in telling]
    limits, fell = limits[-TREND_RUNS:], fell[-TREND_RUNS:]
    if len(limits) < 2 or not any(limits):
        return None
    across = (WIDTH - 2 * MARGIN) / (len(limits) - 1)
    up = (HEIGHT - 2 * MARGIN) / max(limits)
    points = [
        (round(MARGIN + at * across, 1), round(HEIGHT - MARGIN - limit * up, 1))
        for at, limit in enumerate(limits)
    ]
    said = [number(limit) if limit else "no passing step" for limit in limits]
    shown, lowest = ", ".join(said[-8:]), said[limits.index(min(limits))]
    words = (
        f"Last {len(limits)} comparable runs: lowest {lowest}, highest {number(max(limits))}; "
        f"newest last: {'… ' if len(limits) > 8 else ''}{shown}"
    )
    return Trend(points, fell, words)


def _beside(entry: Entry) -> str:
    """``alone``, or what it was measured together with."""
    beside = entry.get("beside") or {}
    if not beside:
        return "" if entry["measured"] == "alone" else str(entry["measured"])
    return "beside " + join([f"{number(limit)} {name}" for name, limit in sorted(beside.items())])


def _bracket(entry: Entry) -> str:
    """Highest that passed, lowest above it that did not."""
    passed, failed = entry["bracket"]
    said = [f"{number(passed)} held"] if passed else []
    said += [f"{number(failed)} did not"] if failed else ["nothing failed"] if passed else []
    return ", ".join(said) or UNKNOWN


def _summary(rows: list[Row], found: Snapshot, now: datetime) -> list[str]:
    """The page's first line, in pieces."""
    current = [row for row in rows if row.limit != UNKNOWN]
    models = len({row.model for row in current})
    pieces = [f"{_count(len(current), 'current limit')} of {_count(models, 'model')}"] if current else []
    for chosen, words in (
        ([row for row in rows if row.mark and row.mark[0] == "fell"], "fell"),
        ([row for row in current if row.stale], "stale"),
        ([row for row in rows if row.limit == UNKNOWN], "without a current limit"),
    ):
        if chosen:
            pieces.append(f"{len(chosen)} {words}")
    if found.history and found.history[-1].get("missed"):
        pieces.append("the last night was not measured")
    if found.latest:
        updated = moment(found.latest["updated_at"])
        pieces.append(f"updated {ago(updated, now)} by run {found.latest['updated_by_run']}")
    return pieces


def _count(many: int, what: str) -> str:
    return f"{many} {what}{'' if many == 1 else 's'}"


def _statuses(rows: list[Row]) -> list[tuple[str, str]]:
    """What can be filtered for: (value, words), only what some row has."""
    words = {row.status: row.status_words for row in rows}
    words |= {"stale": "stale"} if any(row.stale for row in rows) else {}
    words |= {row.mark[0].replace(" ", "_"): row.mark[0] for row in rows if row.mark}
    return sorted(words.items(), key=lambda item: item[1])


def _figures(found: Snapshot) -> list[tuple[str, list[Figure]]]:
    """Per model the figures of the run that its current limits come from."""
    figures: dict[str, list[Figure]] = {}
    for entry in (found.latest or {}).get("limits", []):
        model, run = str(entry["model"]), (str(entry["run_id"]), int(entry["attempt"]))
        for figure in figures_of(found.manifests[run], model):
            if figure not in figures.setdefault(model, []):
                figures[model].append(figure)
    return sorted((model, drawn) for model, drawn in figures.items() if drawn)


def figures_of(manifest: Entry, model: str | None) -> list[Figure]:
    """The figures that a run's manifest lists for a model, or (None) for the fleet."""
    prefix = "figures/" if model is None else f"{safe_name(model)}/figures/"
    return [
        Figure(
            f"runs/{safe_name(str(manifest['run_id']))}/{manifest['attempt']}/{quote(name)}",
            spaced_title(name.removeprefix(prefix).removesuffix(".svg")),
        )
        for name in manifest["names"]
        if re.fullmatch(rf"{re.escape(prefix)}[^/]+\.svg", name)
    ]


def spaced_title(name: str) -> str:
    """A figure's file name for people: ``interactive-latency`` as ``interactive: latency``."""
    return re.sub(r"[-_]+", " ", name.replace("-", ": ", 1))


def _recent(entry: Entry, now: datetime) -> RecentRun:
    """One line about a run of the history."""
    said = []
    for model, found in sorted(entry["models"].items()):
        limits = [
            f"{limit['class']} "
            + (number(limit["limit"]) if limit.get("limit") else status_words(limit["status"]))
            for limit in found["limits"]
            if limit["measured"] == "alone"
        ]
        said.append(f"{model}: {', '.join(limits) or 'no limits'}")
    said += [f"{model}: {why}" for model, why in sorted(entry["failed"].items())]
    if entry.get("missed"):
        said.append(f"not measured: {entry['missed']}")
    published = moment(entry["published_at"])
    page = f"runs/{quote(safe_name(entry['run_id']))}/{entry['attempt']}/" if entry["models"] else None
    return RecentRun(
        str(entry["run_id"]),
        when(published),
        ago(published, now),
        bool(entry["promoted"]),
        "; ".join(said) or "nothing was measured",
        page,
    )


def run_page(manifest: Entry, url: str, now: datetime | None = None) -> dict[str, Any]:
    """The values of the template ``run.html.j2``: all files of one run."""
    published = moment(manifest["published_at"])
    names = {safe_name(model): model for model in manifest["models"]}
    folders: dict[str, list[dict[str, str]]] = {}
    for file in manifest["files"]:
        top, _, rest = file["name"].rpartition("/")
        folder = top.partition("/")[0]
        folder = folder if folder in names else ""
        folders.setdefault(folder, []).append(
            {
                "path": quote(file["name"]),
                "name": file["name"].removeprefix(f"{folder}/") if folder else file["name"],
                "words": FILE_WORDS.get(rest)
                or next(
                    (words for part, words in PART_WORDS.items() if f"/{part}/" in f"/{file['name']}"), ""
                ),
                "size": size(file["bytes"]),
                "page": "view" if rest == "report.html" else "",
            }
        )
    return {
        "run_id": manifest["run_id"],
        "attempt": manifest["attempt"],
        "url": url,
        "at": when(published),
        "age": ago(published, now or datetime.now(UTC)),
        "total": size(sum(file["bytes"] for file in manifest["files"])),
        "folders": [
            {
                "title": names.get(folder, "The run"),
                "files": sorted(files, key=lambda file: (file["name"].count("/"), file["name"])),
                "figures": figures_of(manifest, names.get(folder)),
            }
            for folder, files in sorted(folders.items())
        ],
    }


# -- words


def when(at: datetime | None) -> str:
    """``30 Nov 2026, 01:00 UTC``."""
    return UNKNOWN if at is None else f"{at.astimezone(UTC):%-d %b %Y, %H:%M} UTC"


def near(at: datetime | None, now: datetime) -> str:
    """``30 Nov, 01:00 UTC``; with its year only where that is another."""
    if at is None or at.astimezone(UTC).year != now.astimezone(UTC).year:
        return when(at)
    return f"{at.astimezone(UTC):%-d %b, %H:%M} UTC"


def ago(at: datetime | None, now: datetime) -> str:
    """``5 h ago``, ``3 days ago``."""
    if at is None:
        return UNKNOWN
    seconds = (now - at).total_seconds()
    for limit, unit, words in ((90, 1, ""), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < limit:
            return f"{round(seconds / unit)} {words} ago" if words else "just now"
    return f"{round(seconds / 86400)} days ago"


def size(count: float) -> str:
    """Bytes for people: ``512 B``, ``1.2 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
