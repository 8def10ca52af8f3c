"""Nights that were missed: due by the schedule, and without a published result.

The history tells when the last night with a published run was due. Every time the schedule names between
that one and tonight's is a missed night: the DAG was paused, Airflow was down, the run failed before it
published. A night that started too late to be measured writes an entry of its own that says so. Before the
first published night nothing is missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from croniter import croniter

MOST = 1000
"""Missed times that are counted: a schedule by the minute and a long pause must not fill a report."""
SHOWN = 5


def between(schedule: str, zone: ZoneInfo, after: datetime, before: datetime) -> list[datetime]:
    """Times of a cron schedule strictly between two times, in the zone; at most ``MOST``."""
    ticks = croniter(schedule, after.astimezone(zone))
    found: list[datetime] = []
    while len(found) < MOST:
        at: datetime = ticks.get_next(datetime)
        if at >= before:
            break
        found.append(at)
    return found


def unpublished(
    history: Sequence[Mapping[str, Any]], schedule: str, zone: ZoneInfo, due: datetime
) -> list[datetime]:
    """Nights before the one due that left no trace in the history, oldest first."""
    known = [at for entry in history if (at := _scheduled(entry)) is not None and at < due]
    return between(schedule, zone, max(known), due) if known else []


def too_late(history: Sequence[Mapping[str, Any]], due: datetime) -> list[tuple[datetime, str]]:
    """(night, why) of nights since the last measured one that say themselves that they were missed."""
    found: list[tuple[datetime, str]] = []
    nights = [(at, entry) for entry in history if (at := _scheduled(entry)) is not None and at < due]
    for at, entry in sorted(nights, key=lambda night: night[0]):
        if entry.get("missed"):
            found.append((at, str(entry["missed"])))
        else:
            found = []
    return found


def sentences(missed: Sequence[datetime], late: Sequence[tuple[datetime, str]], zone: ZoneInfo) -> list[str]:
    """What the report and a notification say about missed nights."""
    found = [f"The night due {_clock(at, zone)} was not measured: {why}." for at, why in late]
    if missed:
        shown = ", ".join(_clock(at, zone) for at in missed[:SHOWN])
        more = f" and {len(missed) - SHOWN} more" if len(missed) > SHOWN else ""
        one = len(missed) == 1
        found.append(
            f"No result was published for the night{'' if one else 's'} due {shown}{more}: "
            "the DAG was paused, Airflow was down, or the run failed before it could publish."
        )
    return found


def _scheduled(entry: Mapping[str, Any]) -> datetime | None:
    at = entry.get("scheduled_at")
    return datetime.fromisoformat(at) if at else None


def _clock(at: datetime, zone: ZoneInfo) -> str:
    return f"{at.astimezone(zone):%Y-%m-%d %H:%M}"
