"""What the tasks of an import do: files and objects by path, verdicts as results, ``latest/`` left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

from include.capacity.config import DEFAULT_FLEET
from include.capacity.errors import ConfigError, DataError
from include.capacity.flow import imports
from include.capacity.flow.imports import ImportRun
from include.capacity.publish.publish import verify_manifest
from include.capacity.results.store import FolderStore
from tests.importers.made import TIDY, VLLM

ONE_WAVE = "model,concurrency,requests,completed,req_per_s,e2e_mean_ms\nm,8,8,8,4,1900\nm,16,16,16,8,1950\n"
"""As many requests as in flight: never a steady state."""


@pytest.fixture(autouse=True)
def fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = yaml.safe_load(DEFAULT_FLEET.read_text())
    data["publish"]["to"] = (tmp_path / "out").as_uri()
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    monkeypatch.setenv("CAPACITY_FLEET", str(file))


def a_run(path: str | Path, **more: Any) -> ImportRun:
    s3 = more.pop("s3", None)
    url = path if isinstance(path, str) else path.as_uri()
    return ImportRun.of(run_id="run-1", dag_id="capacity_import", params={"path": url, **more}, s3=s3)


def whole(run: ImportRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tasks of a run; returns what ``judge`` and ``publish`` said."""
    imports.read(run)
    verdict = imports.judge(run)
    imports.limits(run)
    imports.report(run)
    return verdict, imports.publish(run)


def test_a_file_is_judged_and_its_report_published(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(VLLM))
    verdict, done = whole(a_run(file))
    store = FolderStore(tmp_path / "out")
    names = {entry["name"] for entry in verify_manifest(store, done["prefix"])["files"]}
    model = "acme~2f~tiny"
    assert {"report.html", f"{model}/report.html", f"{model}/quality.json", f"{model}/steps.csv"} <= names
    assert done["prefix"] == "runs/import-run-1/1"
    assert verdict["verdict"] == "ok"
    assert store.read(f"{done['prefix']}/report.md").decode().startswith("# Imported results: result.json\n")
    assert f"imported from {file.as_uri()} (vllm bench serve / sweep)" in " ".join(
        store.read(f"{done['prefix']}/report.html").decode().split()
    )


def test_a_rejection_is_a_result_and_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "waves.csv").write_text(ONE_WAVE)
    store = FolderStore(tmp_path / "out")
    store.write("latest/limits.json", b"as it was")
    verdict, done = whole(a_run(tmp_path / "waves.csv"))
    assert verdict["findings"] >= 2
    quality = json.loads(store.read(f"{done['prefix']}/m/quality.json"))
    assert [step["verdict"] for step in quality["steps"]] == ["reject", "reject"]
    assert store.read("latest/limits.json") == b"as it was"
    assert not store.exists("latest/report.html")


def test_a_folder_is_read_whole_and_an_unknown_file_named(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.csv").write_text(TIDY)
    (folder / "b.json").write_text(json.dumps(VLLM))
    assert imports.read(a_run(folder)) == {"steps": 4, "files": 2}
    (folder / "c.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"c\.json: not a result file.*Expected one of.*guidellm"):
        imports.read(a_run(folder))


def test_objects_are_read_by_key_and_by_prefix(tmp_path: Path) -> None:
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="theirs")
        for key, text in {"x/a.csv": TIDY, "x/deep/b.json": json.dumps(VLLM), "x/notes.txt": "-"}.items():
            client.put_object(Bucket="theirs", Key=key, Body=text.encode())

        def read(path: str) -> tuple[int, set[str]]:
            run = a_run(path, s3=lambda: client)
            steps = imports.read(run)["steps"]
            return steps, set(run.sweep.read_json("sweep.json")["files"])

        assert read("s3://theirs/x/a.csv") == (3, {"a.csv"})
        assert read("s3://theirs/x") == (4, {"a.csv", "deep/b.json"})
        assert read("s3://theirs") == (4, {"x/a.csv", "x/deep/b.json"})
        with pytest.raises(DataError, match=r"s3://theirs/y: no such object, and none below it"):
            read("s3://theirs/y")


def test_wrong_parameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json: no such file"):
        imports.read(a_run(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"params: path: String should match.*found 'results/a\.json'"):
        a_run("results/a.json")
    with pytest.raises(ConfigError, match=r"unknown \['promote'\]"):
        a_run(tmp_path, promote=True)
    with pytest.raises(ConfigError, match="params: path: Field required"):
        ImportRun.of(run_id="run-1", dag_id="capacity_import", params={"path": ""})
