"""What people get wrong most: each gives a clear error, a red run, and leaves no process behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import yaml

from include.capacity.config import DEFAULT_FLEET
from scripts.local_stack import model_servers
from tests.dags.runs import Airflow
from tests.simulated import simulated

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path):
    """Writes a fleet file: the shipped one with a change, publishing into the test's folder."""

    def write(change) -> str:
        data = yaml.safe_load(DEFAULT_FLEET.read_text())
        data["publish"]["to"] = (tmp_path / "out").as_uri()
        del data["models"]["sprinter"]
        change(data)
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump(data, sort_keys=False))
        return str(file)

    return write


def reported(tmp_path: Path) -> tuple[dict, str]:
    """The published limits and report of the one model."""
    folder = next((tmp_path / "out" / "runs").rglob("manifest.json")).parent
    limits = json.loads((folder / "steady" / "limits.json").read_text())
    return limits, (folder / "steady" / "report.md").read_text()


@pytest.fixture
def endpoint():
    """URL of a simulated server that is somebody else's."""
    with simulated("steady") as (url, _):
        yield url


def test_a_wrong_model_name(airflow: Airflow, fleet, endpoint: str, tmp_path: Path) -> None:
    def misnamed(data) -> None:
        data["models"]["steady"].update(
            served_name="no/such-model", server={"kind": "endpoint", "url": endpoint}
        )
        data["notify"] = [
            {"notifier": "tests.dags.notifiers.Broken", "on": ["run_failed"]},
            {
                "notifier": "tests.dags.notifiers.ToFile",
                "on": ["limit_fell", "run_failed"],
                "arguments": {
                    "path": str(tmp_path / "told.txt"),
                    "text": "{{ capacity.event }} {{ capacity.text }}",
                },
            },
        ]

    (result,) = airflow.run("capacity_sweep", {}, CAPACITY_FLEET=fleet(misnamed))
    told = (tmp_path / "told.txt").read_text()
    assert told.startswith("run_failed demo: run manual__")
    assert "- tasks failed: steady.start_server\n" in told
    assert "- steady: start_server: steady: " in told
    assert "no/such-model" in told
    assert "- steady interactive: no limit (not_measured): No limit: not measured: " in told
    assert result["state"] == "failed"
    assert result["tasks"]["steady.start_server"] == "failed"
    assert result["tasks"]["steady.ladder"] == "upstream_failed"
    assert result["tasks"]["steady.stop_server"] == "success"  # gives the accelerator back
    assert result["tasks"]["publish"] == "success"
    assert result["tasks"]["check_run"] == "failed"
    limits, report = reported(tmp_path)
    assert [(item["limit"], item["status"]) for item in limits["limits"]] == [(None, "not_measured")] * 2
    assert "no/such-model" in report
    assert "sim/steady-8b" in report  # what is served there instead


def test_a_notifier_that_is_not_there_shows_before_a_server_starts(
    airflow: Airflow, fleet, tmp_path: Path
) -> None:
    file = fleet(lambda data: data.update(notify=[{"notifier": "no.such.Notifier", "on": ["run_failed"]}]))
    (result,) = airflow.run("capacity_sweep", {}, CAPACITY_FLEET=file)
    assert result["state"] == "failed"
    assert result["tasks"]["steady.plan"] == "failed"
    assert result["tasks"]["steady.start_server"] == "upstream_failed"


def test_what_is_wrong_with_a_notifier_is_told(airflow: Airflow) -> None:
    cases = [
        ("tests.dags.notifiers.ToFile", {"path": "x", "text": "y"}),
        ("tests.dags.notifiers.ToFile", {"path": "x"}),
        ("tests.dags.notifiers.Nobody", {}),
        ("no.such.Notifier", {}),
        ("pathlib.Path", {}),
        (
            "airflow.providers.smtp.notifications.smtp.SmtpNotifier",
            {"to": "a@example.org", "from_email": "b"},
        ),
    ]
    said = airflow.notifier_errors(cases)
    assert said[0] is None
    assert "ToFile: its arguments are refused: " in said[1]
    assert "missing 1 required" in said[1]
    assert said[2] == "notify: tests.dags.notifiers.Nobody: the module tests.dags.notifiers has no Nobody"
    assert "notify: no.such.Notifier: cannot be imported (No module named 'no')" in said[3]
    assert "expected a class derived from airflow.sdk.BaseNotifier" in said[4]
    assert said[5] is None


def test_a_taken_port(airflow: Airflow, fleet, airflow_env, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        file = fleet(lambda data: data["models"]["steady"]["server"].update(port=port))
        (result,) = airflow.run("capacity_sweep", {}, CAPACITY_FLEET=file)
    assert result["state"] == "failed"
    assert result["tasks"]["steady.start_server"] == "failed"
    assert result["tasks"]["check_run"] == "failed"
    assert model_servers(Path(airflow_env["CAPACITY_STATE"])) == []
    limits, report = reported(tmp_path)
    assert {item["status"] for item in limits["limits"]} == {"not_measured"}
    assert f"port {port}" in report


def test_a_missing_bucket_shows_before_a_server_starts(airflow: Airflow, fleet, tmp_path: Path) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        connection = {
            "conn_type": "aws",
            "login": "x",
            "password": "y",
            "extra": {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"},
        }
        file = fleet(lambda data: data["publish"].update(to="s3://nowhere/limits"))
        (result,) = airflow.run(
            "capacity_sweep", {}, CAPACITY_FLEET=file, AIRFLOW_CONN_AWS_DEFAULT=json.dumps(connection)
        )
    finally:
        server.stop()
    assert result["state"] == "failed"
    assert result["tasks"]["steady.plan"] == "failed"
    assert result["tasks"]["steady.start_server"] == "upstream_failed"


def test_a_bad_key_in_the_fleet_file_is_an_import_error_that_names_it(airflow: Airflow, fleet) -> None:
    file = fleet(lambda data: data["models"]["steady"].update(acelerator="sim-0"))
    errors = airflow.import_errors(CAPACITY_FLEET=file)
    assert len(errors) == 4  # one a DAG file
    for error in errors:
        assert f"{file}: models.steady.acelerator: Extra inputs are not permitted, found 'sim-0'" in error
