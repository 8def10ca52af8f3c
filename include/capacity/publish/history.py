"""The history: one small object a run, read together, compacted by month.

::

    history/<run_id>.json            a run's first attempt; <run_id>~2.json its second, ...
    history/compacted~2026-10.json   all runs published in a month that is over

An object of a run is written once and never again, so that it can be removed once its entry stands in the
month's object: first the month is written (on condition that it still is what was read), then the runs'
objects in it are removed. Whatever happens in between, an entry stands in at least one object. Readers take
each run once, its highest attempt, whatever it stands in twice; and if an object is gone that was there
when they listed the history, they begin anew, for then its entry is in a month now. Compaction that was
refused or died half way is done by the next run. A store without conditional writes is not compacted."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from include.capacity.errors import PublishError, WriteConflict
from include.capacity.publish.documents import SCHEMA, as_json, check, stamp
from include.capacity.results.store import Store, safe_name

log = logging.getLogger(__name__)

FOLDER = "history/"
COMPACTED = f"{FOLDER}compacted~"
"""No run's object begins so: in :func:`safe_name` a ``~`` never stands alone."""
READ_TRIES = 10
"""As many compactions would have to fall into one reading before it is given up."""

HISTORY_KEYS = (
    "class",
    "measured",
    "limit",
    "status",
    "bound_by",
    "server_bound_by",
    "bracket",
    "deadline_s",
    "completion_floor",
    "objectives",
    "cap_at_latency_knee",
    "comparison_id",
    "stack_id",
    "failing",
    "change",
)
EVIDENCE_KEYS = ("concurrency", "n", "completed", "objective_met", "n_effective")


def history_entry(
    run_id: str,
    attempt: int,
    now: datetime,
    about: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, dict[str, Any]],
    failed: Mapping[str, str],
    *,
    promoted: bool,
    scheduled_at: datetime | None = None,
) -> dict[str, Any]:
    """What a run adds to the history: its limits and stacks, small."""
    models = {}
    for model, found in limits.items():
        models[model] = {
            "stack_id": about[model].get("stack_id"),
            "stack": about[model].get("stack"),
            "accelerator": about[model].get("accelerator"),
            "simulated": bool(about[model].get("simulated")),
            "measured_at": about[model].get("created_at") or stamp(now),
            "limits": [_small(entry) for entry in found["limits"]],
        }
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "attempt": attempt,
        "published_at": stamp(now),
        "scheduled_at": None if scheduled_at is None else stamp(scheduled_at),
        "promoted": promoted,
        "models": models,
        "failed": dict(failed),
        "missed": None,
    }


def _small(entry: Mapping[str, Any]) -> dict[str, Any]:
    evidence = entry.get("evidence") or {}
    return {
        **{key: entry.get(key) for key in HISTORY_KEYS},
        "evidence": {key: evidence.get(key) for key in EVIDENCE_KEYS} if evidence else None,
        "n": evidence.get("n"),
        "request_per_s": evidence.get("request_per_s"),
    }


def missed_entry(run_id: str, now: datetime, scheduled_at: datetime, why: str) -> dict[str, Any]:
    """What a night adds to the history that was not measured, and why."""
    empty = history_entry(run_id, 1, now, {}, {}, {}, promoted=False, scheduled_at=scheduled_at)
    return {**empty, "missed": why}


def entry_key(run_id: str, attempt: int) -> str:
    """Where a run's entry is written."""
    again = f"~{attempt}" if attempt > 1 else ""
    return f"{FOLDER}{safe_name(run_id)}{again}.json"


def write_entry(store: Store, entry: Mapping[str, Any]) -> None:
    """Add a run to the history."""
    store.write(entry_key(entry["run_id"], entry["attempt"]), as_json(entry))


def read_history(store: Store, newest: int | None = None) -> list[dict[str, Any]]:
    """History entries of all runs (or the ``newest`` so many), oldest first, each run once.

    PublishError names an object that is not JSON or no entry of a history.
    """
    for _ in range(READ_TRIES):
        try:
            found = [entry for key in _keys(store) for entry in _entries(store, key)]
        except FileNotFoundError:
            continue  # compacted while we read
        entries = _once(found)
        return entries if newest is None else entries[-newest:] if newest else []
    raise PublishError(f"{store.url}/{FOLDER}: changes faster than it can be read")


def compact(store: Store, now: datetime) -> list[str]:
    """Put the runs of every month that is over into one object each; returns the months that changed.

    Months are those in which the runs were published, in UTC. Safe against other runs that publish, read and
    compact at the same time; see the module's docstring.
    """
    this_month = now.astimezone(UTC).strftime("%Y-%m")
    months: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for key in _keys(store):
        if key.startswith(COMPACTED):
            continue
        try:
            (entry,) = _entries(store, key)
        except FileNotFoundError:
            continue  # another compaction took it
        month = str(entry["published_at"])[:7]
        if month < this_month:
            months.setdefault(month, []).append((key, entry))
    changed = []
    for month, singles in sorted(months.items()):
        if _compact_month(store, month, singles):
            changed.append(month)
    return changed


def _compact_month(store: Store, month: str, singles: list[tuple[str, dict[str, Any]]]) -> bool:
    key = f"{COMPACTED}{month}.json"
    try:
        data, version = store.read_version(key)
        before = _parsed(store, key, data)
    except FileNotFoundError:
        before, version = [], None
    merged = _once([*before, *(entry for _, entry in singles)])
    document = {"schema": SCHEMA, "month": month, "entries": merged}
    check(document, "history-month", f"{store.url}/{key}")
    try:
        store.write_if(key, as_json(document), version)
    except WriteConflict:
        log.info("%s is being compacted by another run", key)
        return False
    for single, _ in singles:
        store.delete(single)
    return True


def _keys(store: Store) -> list[str]:
    return [key for key in store.keys(FOLDER) if key.endswith(".json")]


def _entries(store: Store, key: str) -> list[dict[str, Any]]:
    return _parsed(store, key, store.read(key))


def _parsed(store: Store, key: str, data: bytes) -> list[dict[str, Any]]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise PublishError(f"{store.url}/{key}: not an object of the history: {error}") from error
    month = key.startswith(COMPACTED)
    if month:
        check(document, "history-month", f"{store.url}/{key}")
    entries = document["entries"] if month else [document]
    for entry in entries:
        check(entry, "history", f"{store.url}/{key}")
    return list(entries)


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run once: its highest attempt; in the order of publication."""
    best: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = best.get(entry["run_id"])
        if known is None or entry["attempt"] > known["attempt"]:
            best[entry["run_id"]] = entry
    return sorted(best.values(), key=lambda entry: (entry["published_at"], entry["run_id"]))
