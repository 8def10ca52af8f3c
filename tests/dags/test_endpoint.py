"""A sweep of somebody else's server with a key, in Airflow: the key goes nowhere; the kill switch ends it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from include.capacity.config import DEFAULT_FLEET

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = "correct-horse-battery"
RUN = """
import json, os
from airflow.dag_processing.dagbag import DagBag
dag = DagBag("dags").dags["capacity_sweep"]
conf = dict(mode="exact", classes=["interactive"], concurrency="1, 4")
conf |= dict(requests_per_step=20, seconds_per_step=1)
found = []
for switch in ("other", "steady"):
    os.environ["AIRFLOW_VAR_CAPACITY_KILL_SWITCH"] = switch
    run = dag.test(run_conf=conf)
    found.append({f"{ti.task_id}[{ti.map_index}]": str(ti.state) for ti in run.get_task_instances()})
print(json.dumps(found))
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """URL of a simulated server that is somebody else's."""
    command = [sys.executable, "-m", "include.capacity", "simulate", "--profile", "steady", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        yield found.group()
        server.terminate()


def test_the_key_is_nowhere_and_the_kill_switch_keeps_the_load_away(
    airflow_env: dict[str, str], endpoint: str, tmp_path: Path
) -> None:
    data = yaml.safe_load(DEFAULT_FLEET.read_text())
    data["publish"]["to"] = (tmp_path / "out").as_uri()
    del data["models"]["sprinter"]
    data["models"]["steady"]["server"] = {
        "kind": "endpoint",
        "url": endpoint,
        "api_key_env": "TEST_KEY",
        "max_concurrency": 2,
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    env = {**airflow_env, "CAPACITY_FLEET": str(tmp_path / "fleet.yaml"), "TEST_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    measured, stopped = json.loads(done.stdout.strip().splitlines()[-1])

    assert (measured["steady.ladder[0]"], measured["steady.ladder[1]"]) == ("success", "skipped")
    assert "not measured: above the ceiling of 2 (server.max_concurrency)" in said
    assert stopped["steady.start_server[-1]"] == "failed"
    assert stopped["check_run[-1]"] == "failed"
    assert "kill switch: the Airflow variable capacity_kill_switch names 'steady'" in said

    assert KEY not in said
    home = Path(airflow_env["AIRFLOW_HOME"])  # its database with XCom, logs, and the state folder
    files = [path for folder in (home, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
