"""The three users' paths on the real thing: enable the nightly, trigger by the form, fetch the report."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from scripts.local_stack import LocalStack
from tests.e2e.pages import finished, objects, open_page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_operator_enables_the_nightly_and_nothing_starts_by_day(
    stack: LocalStack, browser: Browser, screenshots: Path
) -> None:
    assert stack.api("GET", "/dags/capacity_nightly").json()["is_paused"] is True
    page = open_page(browser, f"{stack.airflow_url}/dags", stack)
    card = page.get_by_test_id("dag-card").filter(has_text="capacity_nightly")
    with page.expect_response(lambda answer: answer.request.method == "PATCH") as patched:
        card.get_by_test_id("toggle-pause").click()
    assert patched.value.ok
    assert stack.api("GET", "/dags/capacity_nightly").json()["is_paused"] is False
    page.screenshot(path=screenshots / "dags.png")
    page.close()
    assert stack.servers() == []


def test_engineer_triggers_a_sweep_by_the_form_and_fetches_the_report(
    stack: LocalStack, browser: Browser, screenshots: Path
) -> None:
    page = open_page(browser, f"{stack.airflow_url}/dags/capacity_sweep", stack)
    page.get_by_test_id("trigger-dag-button").first.click()
    form = page.get_by_role("dialog")
    form.locator("[name=element_concurrency]").fill("4, 8")
    form.get_by_text("Size of a step", exact=True).click()
    form.locator("[name=element_requests_per_step]").fill("400")
    form.locator("[name=element_seconds_per_step]").fill("30")
    form.get_by_text("Objectives", exact=True).click()
    form.locator("[name=element_completion_floor]").fill("0.95")
    page.screenshot(path=screenshots / "form.png")
    with page.expect_response(lambda answer: answer.url.endswith("/dagRuns") and answer.ok) as made:
        form.get_by_test_id("trigger-dag-submit").click()
    run = made.value.json()["dag_run_id"]
    conf = made.value.json()["conf"]
    assert (conf["concurrency"], conf["requests_per_step"], conf["models"]) == ("4, 8", 400, ["sprinter"])

    page.goto("about:blank")  # the grid, kept up to date, takes a third of a core
    assert finished(stack, "capacity_sweep", run) == "success", stack.tasks("capacity_sweep", run)
    page.goto(f"{stack.airflow_url}/dags/capacity_sweep/runs/{run}")
    expect(page.get_by_text("Success").first).to_be_visible()
    page.screenshot(path=screenshots / "run.png")
    page.close()

    states = {
        (task["task_id"], task["rendered_map_index"]): task["state"]
        for task in stack.tasks("capacity_sweep", run)
    }
    assert states["sprinter.ladder", "scout interactive c=4"] == "success"
    assert states["sprinter.ladder", "scout interactive c=8"] == "success"
    assert states["steady.plan", None] == "skipped"
    assert states["sprinter.stop_server", None] == "success"
    assert stack.servers() == []

    published = objects(stack, "demo/runs/")
    manifests = [key for key in published if key.endswith("manifest.json")]
    assert len(manifests) == 1
    base = manifests[0].removesuffix("manifest.json")
    manifest = json.loads(published[manifests[0]])
    files = {item["name"]: item for item in manifest["files"]}
    assert {"report.html", "report.md", "sprinter/report.html", "sprinter/limits.json"} <= set(files)
    assert {"sprinter/requests.parquet", "sprinter/steps.csv", "sprinter/quality.json"} <= set(files)
    for name, item in files.items():
        body = published[base + name]
        assert (len(body), hashlib.sha256(body).hexdigest()) == (item["bytes"], item["sha256"]), name
    assert set(published) == {base + name for name in files} | {manifests[0]}

    limits = json.loads(published[f"{base}sprinter/limits.json"])
    assert {item["class"] for item in limits["limits"]} == {"interactive", "batch"}
    for item in limits["limits"]:
        assert (item["status"], item["limit"]) == ("lower_bound", 8), item
        assert item["evidence"]["n"] >= 400
    report = published[f"{base}sprinter/report.html"].decode()
    assert "simulated" in report.lower()
    assert "latest/limits.json" not in objects(stack, "demo/")  # not promoted

    heard = told_of_limits(stack)
    assert [(event["url"], event["promoted"]) for event in heard] == [
        (f"s3://{stack.bucket}/demo/runs/{base.rstrip('/')}", False)
    ]
    assert heard[0]["limits"] == [
        {"model": "sprinter", **{name: item[name] for name in ("class", "measured", "limit", "status")}}
        for item in limits["limits"]
    ]

    report_file = screenshots / "report.html"
    report_file.write_text(report)
    page = open_page(browser, report_file.as_uri())
    page.screenshot(path=screenshots / "report.png", full_page=True)
    page.close()


def test_wrong_parameters_are_refused_before_a_server_starts(stack: LocalStack) -> None:
    answer = stack.api(
        "POST", "/dags/capacity_sweep/dagRuns", json={"logical_date": None, "conf": {"repeats": 0}}
    )
    assert answer.status_code == 400
    run = stack.trigger("capacity_sweep", {"modles": ["steady"]})
    assert finished(stack, "capacity_sweep", run) == "failed"
    tasks = {task["task_id"]: task["state"] for task in stack.tasks("capacity_sweep", run)}
    assert tasks["steady.plan"] == "failed"
    assert tasks["steady.start_server"] == "upstream_failed"
    assert tasks["check_run"] == "failed"
    assert stack.servers() == []


def test_a_server_killed_in_the_middle_is_brought_back_and_told_of(stack: LocalStack) -> None:
    conf = {
        "models": ["sprinter"],
        "classes": ["interactive"],
        "mode": "exact",
        "concurrency": "4, 8",
        "publish_to": f"s3://{stack.bucket}/killed",
    }
    run = stack.trigger("capacity_sweep", conf)
    progress = stack.home / "state" / "progress" / "sprinter.json"
    wait_for(lambda: progress.exists() and "grid interactive c=8: measuring" in progress.read_text())
    assert len(stack.servers()) == 1
    (state,) = (stack.home / "state" / "servers").rglob("*.server.json")
    os.kill(json.loads(state.read_text())["handle"]["pid"], signal.SIGKILL)

    assert finished(stack, "capacity_sweep", run) == "success", stack.tasks("capacity_sweep", run)
    published = objects(stack, "killed/runs/")
    facts = {
        key.rpartition("/")[2]: json.loads(body)
        for key, body in published.items()
        if "/sprinter/steps/grid" in key
    }
    assert facts["grid-interactive-c00008-r1.json"]["server_crashed"] is True
    assert facts["grid-interactive-c00008-r2.json"]["server_crashed"] is False  # asked once more
    limits = next(json.loads(body) for key, body in published.items() if key.endswith("sprinter/limits.json"))
    # Killed once and not again: no fault of the concurrency, so no limit comes from it.
    assert [(item["limit"], item["status"]) for item in limits["limits"]] == [(8, "lower_bound")]
    report = next(body.decode() for key, body in published.items() if key.endswith("sprinter/report.md"))
    assert "grid interactive at 8: " in report
    assert stack.servers() == []


def told_of_limits(stack: LocalStack) -> list[dict[str, Any]]:
    """What a DAG scheduled on the asset was told by its first run."""
    runs = "/dags/told_of_limits/dagRuns"
    wait_for(lambda: stack.api("GET", runs).json()["dag_runs"])
    run = stack.api("GET", runs).json()["dag_runs"][0]["dag_run_id"]
    assert finished(stack, "told_of_limits", run) == "success"
    entry = f"{runs}/{run}/taskInstances/hear/xcomEntries/return_value"
    return list(stack.api("GET", entry, params={"stringify": False}).json()["value"])


def wait_for(true: Callable[[], object]) -> None:
    """Until something is so; the test's own time limit is the end of patience."""
    while not true():
        time.sleep(0.1)
