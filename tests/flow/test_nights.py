"""Which nights were missed, by literal times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from include.capacity.flow.nights import MOST, between, sentences, too_late, unpublished

NIGHTLY = "0 1 * * *"
ZONE = ZoneInfo("UTC")
BERLIN = ZoneInfo("Europe/Berlin")


def night(day: int, missed: str | None = None) -> dict[str, Any]:
    return {"scheduled_at": f"2026-11-{day:02d}T01:00:00+00:00", "missed": missed}


def due(day: int) -> datetime:
    return datetime(2026, 11, day, 1, 0, tzinfo=UTC)


MANUAL: dict[str, Any] = {"scheduled_at": None, "missed": None}


@pytest.mark.parametrize(
    ("history", "missed"),
    [
        ([], []),  # before the first night nothing is missed
        ([MANUAL], []),
        ([night(20)], []),
        ([night(19)], [due(20)]),
        ([night(19), MANUAL, night(17)], [due(20)]),
        ([night(17)], [due(18), due(19), due(20)]),
        ([night(20, "late")], []),  # it told so itself
        ([night(19), night(21)], [due(20)]),  # this run's own entry is no night before it
        ([{"published_at": "x"}], []),  # from before nights were kept
    ],
)
def test_nights_without_a_result(history: list[dict[str, Any]], missed: list[datetime]) -> None:
    assert unpublished(history, NIGHTLY, ZONE, due(21)) == missed


def test_only_nights_of_the_schedule_count() -> None:
    friday, tuesday = due(20), due(24)
    history = [{"scheduled_at": friday.isoformat()}]
    assert unpublished(history, "0 1 * * 1-5", ZONE, tuesday) == [due(23)]


@pytest.mark.parametrize("month_day", [(3, 28), (10, 24)])  # the clocks change on the 29th and the 25th
def test_a_change_of_the_clocks_is_no_missed_night(month_day: tuple[int, int]) -> None:
    month, day = month_day
    nights = [datetime(2026, month, day + at, 1, 0, tzinfo=BERLIN) for at in range(4)]
    for last, tonight in pairwise(nights):
        history = [{"scheduled_at": last.astimezone(UTC).isoformat()}]
        assert unpublished(history, NIGHTLY, BERLIN, tonight.astimezone(UTC)) == []
    history = [{"scheduled_at": nights[0].astimezone(UTC).isoformat()}]
    assert unpublished(history, NIGHTLY, BERLIN, nights[3].astimezone(UTC)) == nights[1:3]


def test_a_long_pause_of_a_busy_schedule_is_bounded() -> None:
    found = between("* * * * *", ZONE, due(1), due(1) + timedelta(days=90))
    assert len(found) == MOST
    assert found[0] == due(1) + timedelta(minutes=1)


def test_late_nights_count_until_one_was_measured() -> None:
    history = [night(17, "a"), night(18), night(19, "b"), night(20, "c"), MANUAL]
    assert too_late(history, due(21)) == [(due(19), "b"), (due(20), "c")]
    assert too_late([night(19, "b"), night(20)], due(21)) == []


def test_what_is_said() -> None:
    assert sentences([], [], ZONE) == []
    assert sentences([due(20)], [], BERLIN) == [
        "No result was published for the night due 2026-11-20 02:00: the DAG was paused, Airflow was down, "
        "or the run failed before it could publish."
    ]
    said = sentences([due(day) for day in range(1, 8)], [(due(20), "it started late")], ZONE)
    assert said[0] == "The night due 2026-11-20 01:00 was not measured: it started late."
    assert "nights due 2026-11-01 01:00, " in said[1]
    assert "2026-11-05 01:00 and 2 more: " in said[1]
