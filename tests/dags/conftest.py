"""An Airflow of the tests' own: a temporary home with a fresh metadata database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def airflow_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that uses Airflow; the database is migrated."""
    home = tmp_path_factory.mktemp("airflow")
    env = {
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
    subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], env=env, cwd=ROOT, check=True, capture_output=True
    )
    return env


@pytest.fixture(scope="session")
def in_airflow(airflow_env: dict[str, str]):
    """Runs a snippet in a Python with Airflow set up; what it prints last as JSON is returned."""

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
