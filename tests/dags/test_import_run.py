"""Runs of the import DAG in one process: the colour of a judgement, and of a file that no format knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from include.capacity.publish.publish import verify_manifest
from include.capacity.results.store import FolderStore
from tests.dags.runs import Airflow

pytestmark = pytest.mark.slow

ONE_WAVE = "model,concurrency,requests,completed,req_per_s,e2e_mean_ms\nm,8,8,8,4,1900\nm,16,16,16,8,1950\n"


def test_a_rejected_sweep_is_green_and_published(airflow: Airflow, tmp_path: Path) -> None:
    (tmp_path / "waves.csv").write_text(ONE_WAVE)
    conf = {"path": (tmp_path / "waves.csv").as_uri(), "publish_to": (tmp_path / "out").as_uri()}
    (result,) = airflow.run("capacity_import", conf)
    assert set(result["tasks"].values()) == {"success"}
    assert result["state"] == "success"
    store = FolderStore(tmp_path / "out")
    prefix = next(key for key in store.keys("runs/") if key.endswith("manifest.json")).rpartition("/")[0]
    names = {file["name"] for file in verify_manifest(store, prefix)["files"]}
    assert {"report.html", "m/report.html", "m/quality.json"} <= names
    assert store.keys("latest/") == []


def test_an_unknown_file_is_red_and_nothing_is_published(airflow: Airflow, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"a": 1}')
    conf = {"path": (tmp_path / "notes.json").as_uri(), "publish_to": (tmp_path / "out").as_uri()}
    (result,) = airflow.run("capacity_import", conf)
    assert result["state"] == "failed"
    assert result["tasks"]["read"] == "failed"
    assert result["tasks"]["publish"] == "upstream_failed"
    assert not (tmp_path / "out").exists()
