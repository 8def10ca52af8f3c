"""Airflow's own parts fail, and people intervene: tasks, scheduler, metadata database, runs."""

from __future__ import annotations

import signal

import psutil
import psycopg2
import pytest

from tests.faults.kit import NIGHTLY, Faults, Run, runs, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def step_process(faults: Faults) -> psutil.Process:
    """The process that measures: the one with connections to a model server that is no server itself."""
    (state,) = faults.servers()
    port = int(state.handle.url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    raise AssertionError(f"nobody is connected to {state.handle.url}")


def test_a_killed_step_task_is_red_and_what_it_was_to_measure_is_measured_all_the_same(
    faults: Faults,
) -> None:
    run = faults.sweep("calm")
    run.until_measuring("calm", 4)
    step_process(faults).send_signal(signal.SIGKILL)

    assert run.state() == "failed"
    assert run.failed() == ["calm.ladder[1]", "check_run"]
    assert run.published("calm").status == [("lower_bound", 4)]  # the planner asked again
    faults.nothing_is_left()

    run.clear(("calm.ladder", 1))
    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]
    assert len(run.prefixes()) == 2
    faults.nothing_is_left()


def test_a_killed_scheduler_started_again_ends_the_run(faults: Faults) -> None:
    """Its workers live on without it; the new one runs the step again, and only one of the two measures."""
    run = faults.sweep("calm", seconds_per_step=15)
    run.until_measuring("calm", 2)
    scheduler = faults.stack.processes.pop("scheduler")
    workers = psutil.Process(scheduler.pid).children(recursive=True)
    scheduler.kill()  # it alone: not its process group
    scheduler.wait()
    faults.stack.start_part("scheduler")

    try:
        state = run.state()
        assert state == "success", run.explain()
        found = run.published("calm")
        assert found.status == [("lower_bound", 4)]
        faults.nothing_is_left()
    finally:
        for worker in workers:  # LocalExecutor's workers wait for ever for a scheduler that is gone
            if runs(worker):
                worker.kill()


def test_a_restarted_metadata_database_does_not_end_the_run(faults: Faults) -> None:
    run = faults.sweep("calm")
    run.until_measuring("calm", 2)
    faults.stack.end_part("postgres", signal.SIGINT)
    faults.stack.start_part("postgres")

    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]
    faults.nothing_is_left()


def test_two_runs_that_want_one_accelerator_follow_each_other(faults: Faults) -> None:
    nightly = faults.sweep(dag=NIGHTLY)  # all models
    nightly.until_measuring("calm", 2)
    server = faults.server("calm")
    manual = faults.sweep("calm", concurrency="4")
    waiting = until("the manual run to wait", lambda: manual.tasks()["calm.lease"] == "up_for_reschedule")
    assert waiting
    assert "sim-calm: held by run capacity_nightly/" in manual.log("calm.lease")
    assert manual.tasks()["calm.start_server"] == "None"
    assert runs(server)

    assert nightly.state() == "success", nightly.explain()
    assert not runs(server)
    assert manual.state() == "success", manual.explain()
    assert nightly.published("calm").status == manual.published("calm").status == [("lower_bound", 4)]
    starts = [
        min(facts["started_at"] for facts in run.published("calm").facts.values())
        for run in (nightly, manual)
    ]
    assert starts == sorted(starts)
    faults.nothing_is_left()


def test_a_cleared_step_is_measured_again_and_nothing_else(faults: Faults) -> None:
    run = faults.clean_sweep("calm")
    before = run.published("calm").facts
    run.clear(("calm.ladder", 0))
    until("the run to go on", lambda: run.tasks()["calm.ladder[0]"] != "success")
    assert run.state() == "success", run.explain()
    found = run.published("calm")
    one, other = "grid-interactive-c00002-r1", "grid-interactive-c00004-r1"
    assert found.facts.keys() == before.keys() == {one, other}
    assert found.facts[one]["started_at"] > before[one]["started_at"]
    assert found.facts[other] == before[other]
    assert len(run.prefixes()) == 2  # published again, whole
    faults.nothing_is_left()


def test_a_run_marked_failed_stops_its_server(faults: Faults) -> None:
    before = faults.latest()
    run = faults.sweep("calm", seconds_per_step=10)
    run.until_measuring("calm", 2)
    server = faults.server("calm")
    run.set_state("failed")

    assert run.state() == "failed"
    assert not runs(server)
    assert run.tasks()["calm.stop_server"] == "success"
    assert {"calm.ladder[0]", "check_run"} <= set(run.failed())
    assert "tasks failed: calm.ladder_0" in run.log("check_run")
    assert run.prefixes() == []
    assert faults.latest() == before
    faults.nothing_is_left()

    run.clear()
    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]
    faults.nothing_is_left()


def test_a_deleted_run_is_cleared_away_by_the_reaper(faults: Faults) -> None:
    """Airflow refuses to delete a run that goes on; whoever deletes its rows leaves a server behind."""
    before = faults.latest()
    run = faults.sweep("calm", seconds_per_step=60)
    run.until_measuring("calm", 2)
    server, step = faults.server("calm"), step_process(faults)
    answer = faults.stack.api("DELETE", f"/dags/{run.dag}/dagRuns/{run.run_id}")
    assert answer.status_code == 409
    delete_rows(faults, run)
    until("the end of the step's process", lambda: not runs(step))
    assert runs(server)  # nobody has told it
    assert faults.leases() == ["sim-calm"]

    reaper = Run(faults, "capacity_reaper", faults.stack.trigger("capacity_reaper"))
    assert reaper.state() == "success", reaper.explain()
    assert not runs(server)
    assert run.prefixes() == []
    assert faults.latest() == before
    faults.nothing_is_left()
    faults.clean_sweep("calm", concurrency="4")


def delete_rows(faults: Faults, run: Run) -> None:
    """Delete a run from the metadata database, as a script or ``airflow db clean`` would."""
    database = faults.stack.postgres
    assert database is not None
    with psycopg2.connect(database.url.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM task_instance WHERE run_id = %s", (run.run_id,))
        cursor.execute("DELETE FROM dag_run WHERE run_id = %s", (run.run_id,))
        assert cursor.rowcount == 1
