"""The reaper as Airflow runs it: it asks Airflow whose run is over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from include.capacity.config import DEFAULT_FLEET, ProcessServer, load_fleet
from include.capacity.servers import Owner, start, stop
from include.capacity.servers.lease import Lease, leases
from tests.dags.runs import Airflow
from tests.servers.conftest import FAKE, MARK, processes_of

pytestmark = pytest.mark.slow


def test_what_a_deleted_run_left_is_cleared_away_and_a_living_run_left_alone(
    airflow: Airflow, airflow_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Path(airflow_env["CAPACITY_STATE"])
    monkeypatch.setenv("CAPACITY_STATE", str(state))
    made = ProcessServer(
        kind="process",
        command=[sys.executable, str(FAKE), "--port", "{port}"],
        env={MARK: str(tmp_path)},
        stop_timeout_s=10,
    )
    model = load_fleet(DEFAULT_FLEET).models["steady"]
    model = model.model_copy(update={"server": made, "served_name": "fake/model", "accelerator": "gpu-0"})
    # No run of this name is known to Airflow: it was deleted. The other is this process's own.
    gone: Owner = {"run_id": "gone", "dag_id": "capacity_sweep", "model": "deleted"}
    left = start("deleted", model, gone, state / "servers/gpu_0/deleted")
    beside = model.model_copy(update={"accelerator": "gpu-1"})
    lives = start("cli", beside, {"run_id": "cli", "model": "cli"}, state / "servers/gpu_1/cli")
    try:
        assert Lease("gpu-0", holder="capacity_sweep/gone", model="deleted").acquire()
        (dry,) = airflow.run("capacity_reaper", {"dry_run": True})
        assert dry["state"] == "success"
        assert {process.pid for process in processes_of(tmp_path)} == {left.pid, lives.pid}
        runs = airflow.run("capacity_reaper", {}, {"dryrun": True})
        assert [run["state"] for run in runs] == ["success", "failed"]
        assert {process.pid for process in processes_of(tmp_path)} == {lives.pid}
        assert leases() == []
    finally:
        stop(left)
        stop(lives)
