"""``latest/limits.json``: per model, class and way of measuring the current limit.

An entry moves only if the run is promoted, the limit is ``proven`` or a ``lower_bound``, it was measured
(not imported), the sweep was not rejected, the class was the fleet's own (same workload, deadline, floor
and objectives; the ladder only says where to look), and no later measurement stands there already.
Otherwise the last good entry stays, with its age and, in ``last_attempt``, why this run did not move it. What
this run has disproved is valid no longer: its ``valid_until`` is when that was measured.

Runs that publish at the same moment change one object. It is therefore written *if it is still what was
read* (``Store.write_if``), and read, merged and written again if it is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from include.capacity.errors import PublishError, WriteConflict
from include.capacity.limits.claims import why_not
from include.capacity.publish.documents import SCHEMA, age_s, as_json, check, stamp
from include.capacity.results.plain import finite
from include.capacity.results.store import Store, safe_name
from include.capacity.words import TERMS, LimitStatus

log = logging.getLogger(__name__)

LATEST_LIMITS = "latest/limits.json"
TRIES = 20
"""As many runs would have to publish within one read and write of ours before we give up."""

LATEST_KEYS = (
    "limit",
    "status",
    "bound_by",
    "server_bound_by",
    "beside",
    "bracket",
    "operating_range",
    "confidence",
    "deadline_s",
    "completion_floor",
    "objectives",
    "claim",
    "comparison_id",
    "stack_id",
    "evidence",
    "change",
)

Moved = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]
"""(the new ``latest/limits.json``, entries moved, entries kept and why)."""


def move_latest(store: Store, change: Callable[[dict[str, Any] | None], Moved]) -> Moved:
    """Read ``latest/limits.json``, change it, and write it unless somebody else has changed it meanwhile.

    ``change`` may be called more than once, each time with what stands there (None: nothing yet).
    PublishError if others never let us.
    """
    for _ in range(TRIES):
        before, version = _read(store)
        moved = change(before)
        check(moved[0], "latest-limits", LATEST_LIMITS)
        try:
            store.write_if(LATEST_LIMITS, as_json(moved[0]), version)
        except WriteConflict:
            log.info("%s was changed by another run; merging again", LATEST_LIMITS)
            continue
        return moved
    raise PublishError(
        f"{store.url}/{LATEST_LIMITS}: changed by other runs {TRIES} times in a row; publish again"
    )


def read_latest(store: Store) -> dict[str, Any] | None:
    """``latest/limits.json``; None if there is none yet."""
    return _read(store)[0]


def _read(store: Store) -> tuple[dict[str, Any] | None, str | None]:
    try:
        raw, version = store.read_version(LATEST_LIMITS)
        data = json.loads(raw)
    except FileNotFoundError:
        return None, None
    except ValueError as error:
        raise PublishError(
            f"{store.url}/{LATEST_LIMITS}: not JSON ({error}); move it away and publish again"
        ) from error
    check(data, "latest-limits", f"{store.url}/{LATEST_LIMITS}")
    return data, version


def latest_limits(
    before: Mapping[str, Any] | None,
    limits: Mapping[str, dict[str, Any]],
    about: Mapping[str, Mapping[str, Any]],
    own_classes: Mapping[str, Mapping[str, Any]] | None,
    failed: Mapping[str, str],
    *,
    run_id: str,
    attempt: int,
    prefix: str,
    now: datetime,
) -> Moved:
    """``before`` with what this run may move."""
    entries = {_key(entry): dict(entry) for entry in (before or {}).get("limits", [])}
    moved, kept = [], []
    for model, found in limits.items():
        for limit in found["limits"]:
            key = (model, str(limit["class"]), str(limit.get("measured") or "alone"))
            at = {"model": key[0], "class": key[1], "measured": key[2]}
            measured_at = about[model].get("created_at") or stamp(now)
            why = _not_current(limit, about[model], own_classes, model) or _overtaken(
                entries.get(key), measured_at
            )
            if why is None:
                was = entries.get(key, {}).get("limit")
                entries[key] = {
                    **at,
                    **{name: limit.get(name) for name in LATEST_KEYS},
                    "served_name": about[model].get("served_name"),
                    "accelerator": about[model].get("accelerator"),
                    "simulated": bool(about[model].get("simulated")),
                    "run_id": run_id,
                    "attempt": attempt,
                    "measured_at": measured_at,
                    "valid_until": found["valid_until"],
                    "report": f"{prefix}/{safe_name(model)}/report.html",
                    "last_attempt": None,
                }
                moved.append({**at, "limit": limit["limit"], "was": was})
                continue
            kept.append({**at, "reason": why})
            if key in entries and not _overtaken(entries[key], measured_at):
                entries[key]["last_attempt"] = {
                    "run_id": run_id,
                    "at": stamp(now),
                    "status": str(limit.get("status")),
                    "reason": why,
                    "change": limit.get("change"),
                }
                if _disproves(limit, entries[key]):
                    entries[key]["valid_until"] = measured_at
    for model, reason in failed.items():
        for key in [key for key in entries if key[0] == model]:
            kept.append({"model": key[0], "class": key[1], "measured": key[2], "reason": reason})
            entries[key]["last_attempt"] = {
                "run_id": run_id,
                "at": stamp(now),
                "status": LimitStatus.NOT_MEASURED.value,
                "reason": reason,
                "change": None,
            }
    for entry in entries.values():
        entry["age_s"] = age_s(entry["measured_at"], now)
    latest = {
        "schema": SCHEMA,
        "updated_at": stamp(now),
        "updated_by_run": run_id,
        "limits": [entries[key] for key in sorted(entries)],
    }
    return finite(latest), moved, kept


def _not_current(
    limit: Mapping[str, Any],
    about: Mapping[str, Any],
    own_classes: Mapping[str, Mapping[str, Any]] | None,
    model: str,
) -> str | None:
    """Why a limit may not become the current one; None if it may."""
    if unusable := why_not(limit, about):
        return unusable
    if own_classes is not None:
        name = str(limit["class"])
        own = (own_classes.get(model) or {}).get(name)
        if own is None:
            return "the fleet file has no such class for this model"
        differing = _differs(own, (about.get("classes") or {}).get(name) or {})
        if differing:
            return f"measured with another {', '.join(differing)} than the fleet's class"
    return None


def _overtaken(entry: Mapping[str, Any] | None, measured_at: str) -> str | None:
    """Why the entry that stands there is newer; None if it is not.

    A run that is published again after later ones must not turn their limits back.
    """
    if entry is None or datetime.fromisoformat(entry["measured_at"]) <= datetime.fromisoformat(measured_at):
        return None
    return f"run {entry['run_id']} measured it later, at {entry['measured_at']}"


def _disproves(limit: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether a sweep that found no limit saw the entry's own concurrency, or a lower one, provably fail.

    On the entry's terms, that is; only then does it say anything about it.
    """
    failing = limit.get("first_failing")
    return (
        limit["status"] in (LimitStatus.NO_PASSING_STEP, LimitStatus.INSUFFICIENT_EVIDENCE)
        and failing is not None
        and failing <= entry["limit"]
        and all(limit.get(term) == entry.get(term) for term in TERMS)
    )


def _differs(own: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Settings in which two classes differ; the ladder only says where to look."""
    keys = (set(own) | set(measured)) - {"ladder"}
    plain_own, plain = json.loads(as_json(own)), json.loads(as_json(measured))
    return sorted(key for key in keys if plain_own.get(key) != plain.get(key))


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(entry["model"]), str(entry["class"]), str(entry["measured"])
