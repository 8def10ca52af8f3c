"""The factory both sweep DAGs come from; tasks call ``flow.tasks`` and do nothing themselves.

One TaskGroup per model of the fleet file, built when the file is parsed::

    plan ─▶ lease ─▶ start_server ─▶ ladder[..] ─▶ refine[..] ─▶ prove[..] ─▶ anchor[..] ─▶ stop_server
                                                                             └▶ validate ─▶ limits ─▶ report

and for the run ``fleet_report ─▶ publish ─▶ check_run``. ``lease`` and ``start_server`` are setups and
``stop_server`` their teardown: the server is stopped whatever happens, and clearing one step brings
it back. Mapped instances run one at a time in order; each asks the planner what to measure next and
skips when there is nothing left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import (
    DAG,
    Asset,
    CronTriggerTimetable,
    Param,
    PokeReturnValue,
    TaskGroup,
    TriggerRule,
    Variable,
    get_current_context,
    task,
)
from airflow.sdk.exceptions import AirflowRuntimeError, AirflowSkipException, DownstreamTasksSkipped

from include.capacity.config import Fleet, Model, slug
from include.capacity.flow.links import OpenPublished, OpenReport
from include.capacity.flow.params import MOST_SECONDS_PER_STEP
from include.capacity.words import Phase

log = logging.getLogger(__name__)

LIMITS = Asset("capacity_limits")
"""Published limits; its event carries them (``tasks.event``).

No URI, for an ``s3://`` one would import the AWS provider with every DAG file."""
START = datetime(2025, 1, 1)
LEASE_TIMEOUT = timedelta(hours=12)
LEASE_POLL_S = float(os.environ.get("CAPACITY_LEASE_POLL_S", "30"))

PHASES = {"refine": Phase.SCOUT, "prove": Phase.PROVE, "shared": Phase.SHARED, "anchor": Phase.ANCHOR}
"""Mapped tasks that ask the planner, and the phase that each of them measures."""


def capacity_dag(
    dag_id: str,
    fleet: Fleet,
    *,
    scheduled: bool,
    params: dict[str, Param],
    description: str,
    doc_md: str | None,
) -> DAG:
    """A DAG that sweeps the fleet: every night if ``scheduled``, else when triggered."""
    schedule = (
        CronTriggerTimetable(fleet.night.schedule, timezone=fleet.night.timezone) if scheduled else None
    )
    with DAG(
        dag_id,
        schedule=schedule,
        start_date=START,
        catchup=False,
        is_paused_upon_creation=scheduled,
        max_active_runs=1,
        params=params,
        description=description,
        doc_md=doc_md,
        tags=["capacity"],
        default_args={"owner": "capacity", "retries": 0},
        render_template_as_native_obj=True,
    ) as dag:
        longest = step_timeout(fleet)
        ends = [
            _model_group(name, configured, longest, fleet.accelerators[configured.accelerator].queue)
            for name, configured in fleet.models.items()
        ]
        _fleet_tasks(ends)
    return dag


def step_timeout(fleet: Fleet) -> timedelta:
    """Longer than any step may take, a server that has to be brought back before it included."""
    steps = fleet.steps
    window_s = max(steps.scout_cap_s, steps.prove_cap_s, steps.prove_cap_slow_s, MOST_SECONDS_PER_STEP)
    start_s = max(model.server.start_timeout_s for model in fleet.models.values())
    deadline_s = max(item.deadline_s for model in fleet.models.values() for item in model.classes.values())
    return timedelta(hours=1, seconds=start_s + steps.warmup_cap_s + window_s + 2 * deadline_s)


def _model_group(model: str, configured: Model, longest: timedelta, queue: str | None) -> tuple[Any, Any]:
    """One model's tasks; returns its last report task and its teardown.

    ``longest``: a step's timeout. ``queue``: of the tasks that use the accelerator or its state.
    """
    there = on(queue)
    with TaskGroup(slug(model), tooltip=f"Sweep of {model}"):
        planned = plan(model)
        held: Any = lease.override(**there)(model).as_setup()
        server: Any = start_server.override(**there)(model).as_setup()
        ladder = step.override(task_id="ladder", execution_timeout=longest, **there)
        measured = ladder.partial(model=model).expand(spec=planned)
        planned >> held >> server >> measured
        for name in PHASES:
            if name == "shared" and not configured.shared:
                continue
            room: Any = slots.override(task_id=f"{name}_slots")(model, name)
            planner = next_step.override(task_id=name, execution_timeout=longest, **there)
            following = planner.partial(model=model, phase=name).expand(slot=room)
            planned >> room
            measured >> following
            measured = following
        stopping: Any = stop_server.override(**there)(model)
        stopped = stopping.as_teardown(setups=[held, server], on_failure_fail_dagrun=True)
        measured >> stopped
        validated = validate(model)
        measured >> validated
        reported: Any = report(model)
        reported.operator.operator_extra_links = (OpenPublished(),)
        validated >> limits(model) >> reported
    return reported, stopped


def on(queue: str | None) -> dict[str, Any]:
    """Arguments that put a task on a queue; none for the default one."""
    return {} if queue is None else {"queue": queue}


def _fleet_tasks(ends: list[tuple[Any, Any]]) -> None:
    """Tasks of the whole run; ``check_run`` is the only leaf and makes the run's colour true.

    It is a teardown, of nothing: Airflow skips all others of a run that is marked failed, and would call
    the run a success when its only leaf has been skipped.
    """
    published: Any = publish.override(outlets=[LIMITS])()
    published.operator.operator_extra_links = (OpenReport(),)
    reported: Any = fleet_report()
    reported.operator.operator_extra_links = (OpenPublished(),)
    [report for report, _ in ends] >> reported >> published
    checked: Any = check_run()
    [published, *(stop for _, stop in ends)] >> checked.as_teardown(on_failure_fail_dagrun=True)


def _run() -> Any:
    """This task's run, from Airflow's context."""
    from include.capacity.flow import tasks

    context = get_current_context()
    run = context["dag_run"]
    scheduled_at = run.run_after if run.run_type == "scheduled" else None
    return tasks.Run.of(
        run_id=run.run_id,
        dag_id=run.dag_id,
        params=asked_of(context),
        scheduled_at=scheduled_at,
        is_over=lambda holder: is_over(holder, run.dag_id),
        kill_switch=_kill_switch,
    )


def asked_of(context: Mapping[str, Any]) -> dict[str, Any]:
    """A run's parameters, and what else it was triggered with: Airflow takes any key, our tasks do not."""
    return {**context["params"], **(context["dag_run"].conf or {})}


def _kill_switch() -> str:
    """What Airflow's variable says; nothing, with a line in the log, while Airflow cannot be asked."""
    from include.capacity.flow.tasks import KILL_SWITCH

    try:
        return str(Variable.get(KILL_SWITCH, default="") or "")
    except AirflowRuntimeError as error:
        log.warning("the variable %s cannot be read: %s", KILL_SWITCH, error)
        return ""


def is_over(holder: str, dag_id: str) -> bool:
    """Whether the run (``dag_id/run_id``, or a run of this DAG) has ended, or was deleted."""
    other, _, run_id = holder.partition("/")
    dag_id, run_id = (other, run_id) if run_id else (dag_id, holder)
    ti: Any = get_current_context()["ti"]
    return ti.get_dr_count(dag_id=dag_id, run_ids=[run_id], states=["queued", "running"]) == 0


def _doing(work: Callable[[], Any]) -> Any:
    """Call a stage; what it has nothing to do for shows as skipped."""
    from include.capacity.flow.tasks import NothingToDo

    try:
        return work()
    except NothingToDo as reason:
        raise AirflowSkipException(str(reason)) from None


@task(execution_timeout=timedelta(minutes=10))
def plan(model: str) -> list[dict[str, Any]]:
    """Validate the run's parameters and list the steps; skipped if the model is not selected."""
    from include.capacity.flow import tasks

    return _doing(lambda: tasks.plan(_run(), model))


@task.sensor(
    mode="reschedule",
    poke_interval=LEASE_POLL_S,
    timeout=LEASE_TIMEOUT.total_seconds(),
    retries=10,  # a busy scheduler calls a rescheduled sensor failed when it sees its last end too late
    retry_delay=timedelta(seconds=LEASE_POLL_S),
)
def lease(model: str) -> PokeReturnValue:
    """Hold the accelerator for this run and model; waits while another has it."""
    from include.capacity.flow import tasks

    return PokeReturnValue(is_done=tasks.lease(_run(), model))


@task(execution_timeout=timedelta(hours=2))
def start_server(model: str) -> dict[str, Any]:
    """Start the server and wait until it answers a real completion."""
    from include.capacity.flow import tasks

    return tasks.start_server(_run(), model)


@task(
    map_index_template="{{ label }}",
    max_active_tis_per_dagrun=1,
)
def step(model: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one asked-for step; skipped past the cliff."""
    from include.capacity.flow import tasks

    label(tasks.label(spec))
    return _doing(lambda: tasks.ladder_step(_run(), model, spec))


@task(execution_timeout=timedelta(minutes=10))
def slots(model: str, phase: str) -> list[int]:
    """As many instances of the following task as the planner can need at most."""
    from include.capacity.flow import tasks

    return _doing(lambda: tasks.slots(_run(), model, phase))


@task(
    trigger_rule=TriggerRule.ALL_DONE,
    map_index_template="{{ label }}",
    max_active_tis_per_dagrun=1,
)
def next_step(model: str, phase: str, slot: int) -> None:
    """Measure what the planner asks for next in this phase; the last one skips the slots behind it."""
    from include.capacity.flow import tasks

    run = _run()
    label(f"nothing to {phase}")
    if not tasks.planned_step(run, model, PHASES[phase], slot, label):
        task_id = get_current_context()["ti"].task_id
        behind = tasks.slots(run, model, phase)[slot + 1 :]
        raise DownstreamTasksSkipped(tasks=[(task_id, at) for at in behind])


@task(trigger_rule=TriggerRule.ALL_DONE, execution_timeout=timedelta(minutes=15))
def stop_server(model: str) -> None:
    """Stop the server, whatever happened, and give the accelerator back."""
    from include.capacity.flow import tasks

    tasks.stop_server(_run(), model)


@task(trigger_rule=TriggerRule.ALL_DONE, execution_timeout=timedelta(minutes=30))
def validate(model: str) -> dict[str, Any]:
    """Judge the measurements with Great Expectations."""
    from include.capacity.flow import tasks

    return _doing(lambda: tasks.validate(_run(), model))


@task(execution_timeout=timedelta(minutes=30))
def limits(model: str) -> list[dict[str, Any]]:
    """Compute the limits from what may be used."""
    from include.capacity.flow import tasks

    return tasks.limits(_run(), model)


@task(execution_timeout=timedelta(minutes=30))
def report(model: str) -> str:
    """Write the model's report and figures."""
    from include.capacity.flow import tasks

    return tasks.report(_run(), model)


@task(trigger_rule=TriggerRule.ALL_DONE, execution_timeout=timedelta(minutes=30))
def fleet_report() -> str:
    """Write the report over all models of this run."""
    from include.capacity.flow import tasks

    return _doing(lambda: tasks.fleet_report(_run()))


@task(execution_timeout=timedelta(hours=1), retries=2, retry_delay=timedelta(seconds=30))
def publish() -> dict[str, Any]:
    """Publish everything of this run; moves ``latest/`` where it may. The asset's event tells the limits."""
    from include.capacity.flow import tasks

    run = _run()
    published = tasks.publish(run)
    get_current_context()["outlet_events"][LIMITS].extra = tasks.event(run, published)
    return published


@task(trigger_rule=TriggerRule.ALL_DONE, execution_timeout=timedelta(minutes=10))
def check_run() -> None:
    """Notify; fail if any task failed, or if a class has no limit for a fault of ours."""
    from include.capacity.flow import tasks

    context = get_current_context()
    ti, run = context["ti"], context["dag_run"]
    states = ti.get_task_states(dag_id=run.dag_id, run_ids=[run.run_id])[run.run_id]
    sweep_run = _run()
    tasks.announce(sweep_run, states, context)
    tasks.check_run(sweep_run, states)


def label(text: str) -> None:
    """Name this mapped instance in the grid."""
    context: Any = get_current_context()
    context["label"] = text
