"""The model server fails: while it is loaded, and at its start."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.faults.kit import Faults, set_mood, write_fleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_server_lost_in_the_middle_of_a_step_is_brought_back_and_told_of(
    faults: Faults, how: signal.Signals
) -> None:
    run = faults.sweep("calm")
    run.until_measuring("calm", 4)
    faults.server("calm").send_signal(how)

    assert run.state() == "success", run.explain()
    found = run.published("calm")
    first, second = (found.facts[f"grid-interactive-c00004-r{repeat}"] for repeat in (1, 2))
    assert first["server_crashed"] is True
    assert ("hangs" in first["error"]) is (how is signal.SIGSTOP)
    assert second["server_crashed"] is False  # asked once more
    # Lost once and not again: no fault of the concurrency, so no limit comes from it.
    assert found.status == [("lower_bound", 4)]
    assert "grid interactive at 4: " in found.report
    faults.nothing_is_left()
    faults.clean_sweep("calm", concurrency="4")


def test_a_crash_at_a_certain_concurrency_is_a_finding(faults: Faults) -> None:
    set_mood(faults.stack.home, "moody", "crash")
    run = faults.sweep("moody", concurrency="2, 4, 8")
    assert run.state() == "success", run.explain()
    states = run.tasks()
    assert states["moody.ladder[0]"] == "success"
    assert states["moody.ladder[1]"] == "success"
    assert states["moody.ladder[2]"] == "skipped"
    assert "the server crashed at 4: not measured from there on" in run.log("moody.ladder[2]")
    found = run.published("moody")
    assert found.status == [("proven", 2)]
    assert found.limits[0]["bound_by"] == "server_crash"
    assert found.limits[0]["knees"]["server_crashed_at"] == 4
    assert "Bound by a crash of the server at the next step" in found.report
    assert not any("c00008" in key for key in found.facts)
    faults.nothing_is_left()


def test_servers_that_do_not_start_make_the_run_red_and_the_others_are_published(faults: Faults) -> None:
    """Out of memory at the start, and never ready, beside a good one."""
    home = faults.stack.home
    set_mood(home, "moody", "oom")
    set_mood(home, "other", "deaf")
    before = {entry["model"]: entry["limit"] for entry in faults.latest()}

    run = faults.sweep("moody", "other", "calm", concurrency="4")
    assert run.state() == "failed"
    assert run.failed() == ["check_run", "moody.start_server", "other.start_server"]
    said = {model: run.log(f"{model}.start_server") for model in ("moody", "other")}
    assert "the server ended with status 1" in said["moody"]
    assert "CUDA out of memory. Tried to allocate 896.00 MiB" in said["moody"]  # its log's tail
    assert "not ready after 10 s: waiting for /health" in said["other"]
    assert "mood: deaf" in said["other"]
    for model in ("moody", "other"):
        assert run.published(model).status == [("not_measured", None)]
    assert "CUDA out of memory" in run.published("moody").report
    assert run.published("calm").status == [("lower_bound", 4)]
    now = {entry["model"]: entry for entry in faults.latest()}
    assert now["calm"]["run_id"] == run.key
    for model in ("moody", "other"):  # a last good entry stays; none is made of a failure
        assert now.get(model, {}).get("limit") == before.get(model)
    faults.nothing_is_left()

    set_mood(home, "moody", "well")
    set_mood(home, "other", "well")
    faults.clean_sweep("moody", "other", concurrency="4")


def test_a_taken_port_is_named_with_its_holder(faults: Faults) -> None:
    stack = faults.stack
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        write_fleet(stack.home, faults.store.url, moody_port=port)
        run = faults.sweep("moody", concurrency="4")
        assert run.state() == "failed"
    assert run.failed() == ["check_run", "moody.start_server"]
    said = (
        f"port {port} on 127.0.0.1 cannot be used (Address already in use): it is held by pid {os.getpid()}"
    )
    assert said in run.log("moody.start_server")
    assert said in run.published("moody").report
    assert run.published("moody").status == [("not_measured", None)]
    faults.nothing_is_left()

    run.clear()  # the port is free now: what failed is done again, and what hangs on it
    assert run.state() == "success", run.explain()
    assert run.published("moody").status == [("lower_bound", 4)]
    faults.nothing_is_left()
