"""A whole run of the sweep DAG in one process, from its parameters to published files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from include.capacity.publish.publish import verify_manifest
from include.capacity.results.store import FolderStore

pytestmark = pytest.mark.slow

RUN = """
import json
from airflow.dag_processing.dagbag import DagBag
conf = {conf}
dag = DagBag("dags").dags["capacity_sweep"]
run = dag.test(run_conf=conf)
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
with create_session() as session:
    events = session.query(AssetEvent).filter_by(source_run_id=run.run_id).all()
    told = [event.extra for event in events]
print(json.dumps({{"state": str(run.state), "run_id": run.run_id, "told": told,
    "tasks": {{f"{{ti.task_id}}[{{ti.map_index}}]": str(ti.state) for ti in run.get_task_instances()}}}}))
"""


def dag_test(in_airflow, **conf):
    return in_airflow(RUN.format(conf=repr(conf)))


def test_sweep_of_one_model_is_published_and_its_server_gone(in_airflow, airflow_env, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = dag_test(
        in_airflow,
        models=["sprinter"],
        classes=["interactive"],
        mode="exact",
        concurrency="2, 4",
        requests_per_step=40,
        seconds_per_step=5,
        publish_to=out.as_uri(),
    )
    tasks = result["tasks"]
    assert tasks["sprinter.ladder[0]"] == "success"
    assert tasks["sprinter.ladder[1]"] == "success"
    assert tasks["sprinter.stop_server[-1]"] == "success"
    assert tasks["publish[-1]"] == "success"
    assert tasks["steady.plan[-1]"] == "skipped"
    assert tasks["steady.ladder[-1]"] == "skipped"

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
    assert tasks["check_run[-1]"] == "success"
    assert result["state"] == "success"
    assert not store.exists("latest/limits.json")
    assert list(Path(airflow_env["CAPACITY_STATE"]).rglob("*.server.json")) == []


def test_a_wrong_parameter_fails_in_plan(in_airflow, tmp_path: Path) -> None:
    result = dag_test(in_airflow, models=["sprinter"], deadline_s=0.5, publish_to=(tmp_path / "out").as_uri())
    assert result["state"] == "failed"
    assert result["tasks"]["sprinter.plan[-1]"] == "failed"
    assert result["tasks"]["sprinter.start_server[-1]"] == "upstream_failed"
    assert result["told"] == []
    assert not (tmp_path / "out").exists()
