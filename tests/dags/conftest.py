"""An Airflow of the tests' own, in a temporary home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.dags.runs import ROOT, Airflow


@pytest.fixture(scope="session")
def airflow_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that uses Airflow."""
    home = tmp_path_factory.mktemp("airflow")
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")},
        "PYTHONPATH": str(ROOT),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "CAPACITY_STATE": str(home / "state"),
        "CAPACITY_LEASE_POLL_S": "1",
    }


@pytest.fixture(scope="session")
def airflow(airflow_env: dict[str, str]) -> Iterator[Airflow]:
    """Runs DAGs, in a process that ends with the tests."""
    with closing(Airflow(airflow_env)) as running:
        yield running


@pytest.fixture(scope="session")
def in_airflow(airflow_env: dict[str, str]):
    """Runs a snippet in a fresh Python that may import Airflow, without a metadata database.

    What it prints last as JSON is returned.
    """

    def run(code: str, timeout: float = 240, **env: str):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**airflow_env, **env},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
