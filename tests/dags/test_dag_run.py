"""A whole run of the sweep DAG in one process, from its parameters to published files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from include.capacity.publish.publish import verify_manifest
from include.capacity.results.store import FolderStore
from tests.dags.runs import Airflow

pytestmark = pytest.mark.slow


def test_sweep_of_one_model_is_published_and_its_server_gone(
    airflow: Airflow, airflow_env: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    conf = {
        "models": ["sprinter"],
        "classes": ["interactive"],
        "mode": "exact",
        "concurrency": "2, 4",
        "requests_per_step": 40,
        "seconds_per_step": 5,
        "publish_to": out.as_uri(),
    }
    (result,) = airflow.run("capacity_sweep", conf)
    tasks = result["tasks"]
    assert tasks["sprinter.ladder[0]"] == "success"
    assert tasks["sprinter.ladder[1]"] == "success"
    assert tasks["sprinter.stop_server"] == "success"
    assert tasks["publish"] == "success"
    assert tasks["steady.plan"] == "skipped"
    assert tasks["steady.ladder"] == "skipped"

    store = FolderStore(out)
    prefix = next(key for key in store.keys("runs/") if key.endswith("manifest.json")).rpartition("/")[0]
    names = {file["name"] for file in verify_manifest(store, prefix)["files"]}
    assert {
        "report.html",
        "sprinter/report.html",
        "sprinter/requests.parquet",
        "sprinter/limits.json",
    } <= names
    limits = json.loads(store.read(f"{prefix}/sprinter/limits.json"))["limits"]
    # Steps grow until they are decided: 40 requests prove nothing at a floor of 99 %, 299 are the fewest.
    assert [(item["class"], item["limit"], item["status"]) for item in limits] == [
        ("interactive", 4, "lower_bound")
    ]
    assert limits[0]["evidence"]["n"] >= 299
    (told,) = result["told"]
    assert told["limits"] == [
        {
            "model": "sprinter",
            "class": "interactive",
            "measured": "alone",
            "limit": 4,
            "status": "lower_bound",
        }
    ]
    assert told["url"] == f"{out.as_uri()}/{prefix}"
    assert (told["run"], told["attempt"], told["promoted"]) == (prefix.split("/")[1], 1, False)
    assert tasks["check_run"] == "success"
    assert result["state"] == "success"
    assert not store.exists("latest/limits.json")
    assert list(Path(airflow_env["CAPACITY_STATE"]).rglob("*.server.json")) == []


def test_a_wrong_parameter_fails_in_plan(airflow: Airflow, tmp_path: Path) -> None:
    conf = {"models": ["sprinter"], "deadline_s": 0.5, "publish_to": (tmp_path / "out").as_uri()}
    (result,) = airflow.run("capacity_sweep", conf)
    assert result["state"] == "failed"
    assert result["tasks"]["sprinter.plan"] == "failed"
    assert result["tasks"]["sprinter.start_server"] == "upstream_failed"
    assert result["told"] == []
    assert not (tmp_path / "out").exists()
