"""The DAG ``capacity_import``: one chain of tasks; each calls ``flow.imports`` and does nothing itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, get_current_context, task

from include.capacity.config import Fleet
from include.capacity.flow.dags import START, asked_of
from include.capacity.flow.form import import_form
from include.capacity.flow.links import OpenPublished, OpenReport
from include.capacity.flow.runbook import IMPORT


def import_dag(fleet: Fleet) -> DAG:
    """The DAG; it runs only when triggered. The chain's last task makes the run's colour."""
    form: dict[str, Param] = import_form(fleet)
    with DAG(
        "capacity_import",
        schedule=None,
        start_date=START,
        catchup=False,
        is_paused_upon_creation=False,
        max_active_runs=4,
        params=form,
        description="Judges result files of other tools and publishes the report",
        doc_md=IMPORT,
        tags=["capacity"],
        default_args={"owner": "capacity", "retries": 0},
    ) as dag:
        reported: Any = report()
        published: Any = publish()
        reported.operator.operator_extra_links = (OpenPublished(),)
        published.operator.operator_extra_links = (OpenReport(),)
        read() >> validate() >> limits() >> reported >> published
    return dag


def _run() -> Any:
    """This task's run, from Airflow's context."""
    from include.capacity.flow import imports

    context = get_current_context()
    run = context["dag_run"]
    return imports.ImportRun.of(run_id=run.run_id, dag_id=run.dag_id, params=asked_of(context))


@task(execution_timeout=timedelta(minutes=30))
def read() -> dict[str, Any]:
    """Read the files; fails with the file's name and what was expected if one is unknown."""
    from include.capacity.flow import imports

    return imports.read(_run())


@task(execution_timeout=timedelta(minutes=30))
def validate() -> dict[str, Any]:
    """Judge the steps with Great Expectations; a rejected sweep is a result."""
    from include.capacity.flow import imports

    return imports.judge(_run())


@task(execution_timeout=timedelta(minutes=30))
def limits() -> list[dict[str, Any]]:
    """Compute peaks, ranges and knees from what may be used."""
    from include.capacity.flow import imports

    return imports.limits(_run())


@task(execution_timeout=timedelta(minutes=30))
def report() -> str:
    """Write the report and its figures."""
    from include.capacity.flow import imports

    return imports.report(_run())


@task(execution_timeout=timedelta(hours=1), retries=2, retry_delay=timedelta(seconds=30))
def publish() -> dict[str, Any]:
    """Publish the report with its evidence; never moves ``latest/``."""
    from include.capacity.flow import imports

    return imports.publish(_run())
