"""The DAG ``capacity_reaper``: a task that asks Airflow whose run is over and clears away the rest.

State files and leases lie where the servers are started, so there is a task for each queue of the fleet file.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, CronTriggerTimetable, Param, get_current_context, task

from include.capacity.config import Fleet, slug
from include.capacity.flow.dags import START, asked_of, is_over, on
from include.capacity.flow.runbook import REAPER

EVERY = "*/15 * * * *"


def reaper_dag(fleet: Fleet) -> DAG:
    """The DAG. It is on from the start: it touches nothing but what our own runs have left."""
    with DAG(
        "capacity_reaper",
        schedule=CronTriggerTimetable(EVERY, timezone="UTC"),
        start_date=START,
        catchup=False,
        is_paused_upon_creation=False,
        max_active_runs=1,
        params={
            "dry_run": Param(
                False,
                type="boolean",
                title="Dry run",
                description_md="Only say in the log what would be stopped.",
            )
        },
        description="Stops servers and breaks leases whose run is over",
        doc_md=REAPER,
        tags=["capacity"],
        default_args={"owner": "capacity", "retries": 0},
    ) as dag:
        for queue in sorted({item.queue or "" for item in fleet.accelerators.values()}):
            named = {"task_id": f"reap_{slug(queue)}"} if queue else {}
            reap.override(**named, **on(queue or None))()
    return dag


@task(execution_timeout=timedelta(minutes=30))
def reap() -> dict[str, int]:
    """Stop every server, and break every lease, whose run has ended or was deleted."""
    from include.capacity.flow import reaping

    context = get_current_context()
    dag_id = context["dag_run"].dag_id
    return reaping.reap(asked_of(context), lambda holder: is_over(holder, dag_id))
