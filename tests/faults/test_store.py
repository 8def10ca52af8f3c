"""What results are kept in fails: the object store, and the disk."""

from __future__ import annotations

import secrets
import signal

import pytest

from tests.faults.kit import Faults, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_an_object_store_that_is_away_for_a_while_costs_nothing(faults: Faults) -> None:
    """A step ends while nobody answers; its task waits, and nothing measured is lost."""
    run = faults.sweep("calm")
    run.until_measuring("calm", 4)
    faults.stack.end_part("s3", signal.SIGKILL)
    until("a task that waits", lambda: "trying again for" in run.log("calm.ladder[1]"))
    faults.stack.start_part("s3")

    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]
    assert "calm.ladder[1]" not in run.failed()
    assert "grid-interactive-c00004-r2" not in run.published("calm").facts  # measured once
    faults.nothing_is_left()


def test_refused_credentials_show_before_a_server_starts(faults: Faults) -> None:
    faults.stack.end_part("s3")
    faults.stack.start_s3(secrets.token_hex(8))
    run = faults.sweep("calm")
    assert run.state() == "failed"
    assert run.failed() == ["calm.plan", "calm.validate", "check_run", "fleet_report"]
    assert "the object store refused the credentials" in run.log("calm.plan")
    assert run.tasks()["calm.start_server"] == "upstream_failed"
    assert faults.stack.servers() == []

    faults.stack.end_part("s3")
    faults.stack.start_part("s3")
    faults.stack.wait_for_all()
    faults.nothing_is_left()
    assert run.prefixes() == []
    run.clear()  # as the UI does with all failed tasks: the same run goes on
    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]


def test_credentials_refused_in_the_middle_lose_the_step_and_nothing_else(faults: Faults) -> None:
    before = faults.latest()
    run = faults.sweep("calm")
    run.until_measuring("calm", 4)
    faults.stack.end_part("s3", signal.SIGKILL)
    faults.stack.start_s3(secrets.token_hex(8))
    assert run.state() == "failed"
    assert "calm.ladder[1]" in run.failed()
    assert "the object store refused the credentials" in run.log("calm.ladder[1]")
    assert run.tasks()["calm.stop_server"] == "success"  # needs no store

    faults.stack.end_part("s3")
    faults.stack.start_part("s3")
    faults.stack.wait_for_all()
    faults.nothing_is_left()
    assert run.prefixes() == []
    assert faults.latest() == before
    run.clear()
    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]
    faults.nothing_is_left()


def test_a_missing_bucket_shows_before_a_server_starts(faults: Faults) -> None:
    run = faults.sweep("calm", publish_to="s3://nowhere/limits")
    assert run.state() == "failed"
    assert run.failed() == ["calm.plan", "check_run"]
    assert "the bucket does not exist; create it first" in run.log("calm.plan")
    assert run.tasks()["calm.start_server"] == "upstream_failed"
    faults.nothing_is_left()
    faults.clean_sweep("calm", concurrency="4")
