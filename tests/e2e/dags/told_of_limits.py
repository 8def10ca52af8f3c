"""A DAG of the tests: runs when limits were published, and returns what it was told."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Asset, dag, task


@dag(schedule=[Asset("capacity_limits")], is_paused_upon_creation=False)
def told_of_limits() -> None:
    @task
    def hear(triggering_asset_events: Any = None) -> list[Any]:
        return [event.extra for events in triggering_asset_events.values() for event in events]

    hear()


told_of_limits()
