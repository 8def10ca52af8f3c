"""A real Airflow and a real S3 server, shared by the end-to-end tests, and a browser to look at them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from scripts.local_stack import ROOT, LocalStack

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
"""A browser that asks nobody outside and runs as root in a container."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the cores for itself comes before a whole Airflow is up."""
    items.sort(key=lambda item: "stack" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Everything running, behind a login; stopped at the end, with the logs left in the temporary folder.

    Beside the project's DAGs there are those of ``tests/e2e/dags``.
    """
    bundles = [
        {
            "name": name,
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(path)},
        }
        for name, path in (("dags-folder", ROOT / "dags"), ("tests", Path(__file__).parent / "dags"))
    ]
    env = {"AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles)}
    with LocalStack(tmp_path_factory.mktemp("stack"), login=True, env=env).running() as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"none of {BROWSERS} is installed; `make test` installs it"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=QUIET.split())
        yield chromium
        chromium.close()


@pytest.fixture
def screenshots(request: pytest.FixtureRequest) -> Path:
    """Where a test keeps what it saw: var/screenshots."""
    folder = Path(request.config.rootpath) / "var" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
