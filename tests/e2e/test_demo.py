"""``make demo``: the nightly job on the two simulated models, against their true limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from include.capacity.config import load_fleet
from include.capacity.publish.publish import verify_manifest
from include.capacity.results.store import FolderStore
from include.capacity.simulator.profile import load_profile
from include.capacity.simulator.truth import read_truth

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderStore, str]:
    """The demo's bucket and what it printed."""
    home = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", "--once", "--home", str(home)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return FolderStore(home / "s3" / "capacity" / "demo"), done.stdout


def test_every_limit_is_proven_with_the_methods_n_and_agrees_with_the_truth(demo) -> None:
    store, _ = demo
    limits = json.loads(store.read("latest/limits.json"))["limits"]
    assert [(item["model"], item["class"]) for item in limits] == [
        ("sprinter", "batch"),
        ("sprinter", "interactive"),
        ("steady", "batch"),
        ("steady", "interactive"),
    ]
    for item in limits:
        assert item["status"] == "proven", item
        assert item["evidence"]["n"] >= max(600, 10 * item["limit"])
        truth = read_truth(load_profile(item["model"]))["classes"][item["class"]]
        service_class = load_fleet().models[item["model"]].classes[item["class"]]
        assert truth["class"]["deadline_s"] == service_class.deadline_s == item["deadline_s"]
        share = service_class.ttft.share if service_class.ttft else 0.0
        failing = min(
            point["concurrency"]
            for point in truth["points"]
            if point["completed"] < service_class.completion_floor or point["met"] < share
        )
        assert 0.7 * truth["limit"] <= item["limit"] < failing, (item["claim"], truth["limit"])


def test_it_prints_the_limits_and_where_to_look(demo) -> None:
    _, printed = demo
    for said in ("steady.ladder scout interactive c=8", "requests", "ETA", "sprinter", "proven"):
        assert said in printed
    for said in ("The run in Airflow", "The report", "On S3"):
        assert said in printed


def test_the_report_says_that_the_higher_peak_has_the_lower_limit(demo) -> None:
    store, _ = demo
    report = store.read("latest/report.md").decode()
    assert "sprinter has more raw throughput than steady (" in report
    assert "yet its safe interactive limit is lower (" in report
    assert "yet its safe batch limit is lower (" in report
    assert "SIMULATED" in report


def test_the_published_run_matches_its_manifest(demo) -> None:
    store, _ = demo
    (manifest,) = [key for key in store.keys("runs/") if key.endswith("manifest.json")]
    files = {file["name"] for file in verify_manifest(store, manifest.rpartition("/")[0])["files"]}
    assert {"steady/report.html", "sprinter/report.html", "report.html"} <= files
