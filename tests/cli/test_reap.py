"""``reap`` without Airflow: what it can judge, what it says of the rest, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from include.capacity.cli import main
from include.capacity.servers.base import Handle, Owner
from include.capacity.servers.lease import Lease, leases
from include.capacity.servers.state import (
    READY,
    servers_folder,
    started_here,
    state_file,
    this_host,
    write_state,
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own: a server of a run of Airflow's, without processes, and its lease."""
    monkeypatch.setenv("CAPACITY_STATE", str(tmp_path / "state"))
    folder = servers_folder() / "gpu_0" / "llama"
    handle = Handle(
        kind="process",
        model="llama",
        url="http://127.0.0.1:1",
        metrics_url="http://127.0.0.1:1/metrics",
        served_name="llama",
        server_id="1" * 32,
        host="another-machine",
        state=str(state_file(folder, "llama")),
    )
    file = Path(str(handle.state))
    owner: Owner = {"run_id": "manual__1", "dag_id": "capacity_sweep", "model": "llama"}
    write_state(started_here(handle, owner, "gpu-0", READY))
    assert Lease("gpu-0", holder="capacity_sweep/manual__1", model="llama").acquire()
    return file


def test_runs_of_airflow_are_left_alone_unless_named(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untold = "only Airflow can tell whether its run is over; if you know that it is, name it with --run"
    assert main(["reap"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "left alone: process server of llama, run capacity_sweep/manual__1: "
        "it runs on another-machine, which is not this machine",
        f"left alone: lease of gpu-0, run capacity_sweep/manual__1, model llama: {untold}",
    ]
    state.write_text(state.read_text().replace("another-machine", this_host()))
    named = ["reap", "--run", "capacity_sweep/manual__1"]
    assert main([*named, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "would stop: process server of llama, run capacity_sweep/manual__1: its run is over",
        "would break: lease of gpu-0, run capacity_sweep/manual__1, model llama: its run is over",
    ]
    assert state.exists()
    assert main([*named, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dry_run"] is False
    assert said["failed"] == []
    assert [(item["model"], item["run"], item["done"]) for item in said["servers"]] == [
        ("llama", "capacity_sweep/manual__1", "stopped")
    ]
    assert [(item["accelerator"], item["done"]) for item in said["leases"]] == [("gpu-0", "broken")]
    assert not state.exists()
    assert leases() == []
    assert main(["reap"]) == 0
    assert capsys.readouterr().out == "no servers and no leases\n"


def test_what_cannot_be_stopped_is_status_3(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from include.capacity.errors import ServerError
    from include.capacity.servers import process

    def will_not(handle: Handle) -> None:
        raise ServerError(f"{handle.model}: could not be stopped: pid 7 (vllm) live on")

    monkeypatch.setattr(process, "stop", will_not)
    state.write_text(state.read_text().replace("another-machine", this_host()))
    assert main(["reap", "--run", "capacity_sweep/manual__1"]) == 3
    assert "failed: process server of llama" in capsys.readouterr().out
    assert leases() == []  # one failure keeps nothing else from being cleared away


@pytest.mark.parametrize("run", ["", "manual__1", "a b/c", "/x", "dag/"])
def test_a_run_is_named_with_its_dag(run: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reap", "--run", run])
    assert caught.value.code == 2
