"""docker-compose.yaml brought up for real: a sweep over its REST API, limits in its bucket, and nothing left.

Two things that Docker's own compose does are done here, because Debian's podman (4.3) with podman-compose
cannot: services are started in the order of their conditions, and their health checks are run (podman leaves
that to systemd timers).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config

from scripts.local_stack import free_port
from tests.compose.conftest import ROOT

pytestmark = pytest.mark.timeout(1500)

PATIENCE_S = 420
DATA = ("postgres", "redis", "s3", "sim-steady", "sim-sprinter")
AIRFLOW = ("api-server", "scheduler", "dag-processor", "worker-default", "worker-gpu")


@dataclass
class Project:
    """One installation: its name, its secrets, its ports."""

    name: str
    env_file: Path
    airflow_port: int = field(default_factory=free_port)
    s3_port: int = field(default_factory=free_port)

    @property
    def secrets(self) -> dict[str, str]:
        lines = self.env_file.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = compose("--env-file", str(self.env_file), "-p", self.name, *arguments, env=self.ports())
        assert done.returncode == 0, done.stdout[-4000:]
        return done

    def ports(self) -> dict[str, str]:
        return {"AIRFLOW_PORT": str(self.airflow_port), "S3_PORT": str(self.s3_port)}

    def up(self, *services: str) -> None:
        self.compose("up", "--detach", "--no-build", "--no-deps", *services)

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"

    def healthy(self, service: str) -> bool:
        return podman("healthcheck", "run", self.container(service)).returncode == 0

    def logs(self, service: str) -> str:
        return podman("logs", "--tail", "60", self.container(service)).stdout

    def s3(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.s3_port}",
            region_name="us-east-1",
            aws_access_key_id="capacity",
            aws_secret_access_key=self.secrets["S3_SECRET_KEY"],
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )


def compose(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run([str(Path(sys.executable).with_name("podman-compose")), *arguments], env)


def podman(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["podman", *arguments])


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "DISABLE_HC_SYSTEMD": "true", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )


def wait_for(what: str, true: Callable[[], bool], explain: Callable[[], str]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up, f"{what}: not so after {PATIENCE_S} s\n{explain()}"
        time.sleep(1)  # each look is a process


def left_of(name: str) -> list[str]:
    """Containers, volumes and networks of a project."""
    found = []
    for kind in (
        "ps --all --format {{.Names}}",
        "volume ls --format {{.Name}}",
        "network ls --format {{.Name}}",
    ):
        found += [line for line in podman(*kind.split()).stdout.split() if line.startswith(name)]
    return found


@pytest.fixture
def project(containers: Path, tmp_path: Path) -> Iterator[Project]:
    env_file = tmp_path / "env"
    subprocess.run([sys.executable, ROOT / "scripts" / "make_env.py", env_file], check=True)
    made = Project(name=f"capacity{os.getpid()}", env_file=env_file)
    try:
        yield made
    finally:
        compose("--env-file", str(env_file), "-p", made.name, "down", "--volumes", env=made.ports())


def test_there_are_no_default_passwords(tmp_path: Path) -> None:
    empty = tmp_path / "env"
    empty.write_text("")
    done = compose("--env-file", str(empty), "config")
    assert done.returncode != 0
    assert "run scripts/make_env.py" in done.stdout


def test_the_secrets_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "env"
    command = [sys.executable, str(ROOT / "scripts" / "make_env.py"), str(file)]
    assert run(command).returncode == 0
    written = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert all(len(line.split("=", 1)[1]) >= 24 for line in written.splitlines())
    assert run(command).returncode == 2
    assert file.read_text() == written


def test_a_sweep_runs_through_the_whole_installation(project: Project) -> None:
    project.up(*DATA)
    for service in DATA:
        wait_for(
            f"{service} is healthy", lambda s=service: project.healthy(s), lambda s=service: project.logs(s)
        )
    project.up("init")
    ended = podman("wait", project.container("init"))
    assert ended.stdout.split()[-1] == "0", project.logs("init")
    project.up(*AIRFLOW)
    for service in AIRFLOW:
        wait_for(
            f"{service} is healthy", lambda s=service: project.healthy(s), lambda s=service: project.logs(s)
        )

    api = httpx.Client(base_url=f"http://127.0.0.1:{project.airflow_port}", timeout=60, trust_env=False)
    wrong = api.post("/auth/token", json={"username": "admin", "password": "admin"})
    assert wrong.status_code == 401
    signed_in = api.post(
        "/auth/token", json={"username": "admin", "password": project.secrets["AIRFLOW_ADMIN_PASSWORD"]}
    )
    api.headers["authorization"] = f"Bearer {signed_in.json()['access_token']}"
    dag = "/api/v2/dags/capacity_sweep"
    wait_for(
        "the DAG is there", lambda: api.get(dag).status_code == 200, lambda: project.logs("dag-processor")
    )
    api.patch(dag, json={"is_paused": False}).raise_for_status()
    conf = {"models": ["sprinter"], "classes": ["interactive"], "mode": "exact", "concurrency": "4"}
    made = api.post(f"{dag}/dagRuns", json={"logical_date": None, "conf": conf})
    assert made.status_code == 200, made.text
    run_id = made.json()["dag_run_id"]

    def tasks() -> list[dict[str, Any]]:
        answer = api.get(f"{dag}/dagRuns/{run_id}/taskInstances", params={"limit": 1000})
        return list(answer.raise_for_status().json()["task_instances"])

    def told() -> str:
        shown = [(task["task_id"], task["state"]) for task in tasks()]
        return f"{shown}\n{project.logs('worker-gpu')}\n{project.logs('worker-default')}"

    def state() -> str:
        return str(api.get(f"{dag}/dagRuns/{run_id}").raise_for_status().json()["state"])

    wait_for("the run has ended", lambda: state() in ("success", "failed"), told)
    assert state() == "success", told()
    where = {
        task["task_id"]: (task["queue"], task["hostname"]) for task in tasks() if task["state"] == "success"
    }
    assert where["sprinter.ladder"] == ("gpu", "worker-gpu")
    assert where["sprinter.stop_server"] == ("gpu", "worker-gpu")
    assert where["sprinter.validate"] == ("default", "worker-default")
    assert where["publish"] == ("default", "worker-default")

    def limits() -> list[tuple[str, int, str]]:
        listed = project.s3().list_objects_v2(Bucket="capacity", Prefix="compose/runs/")["Contents"]
        (key,) = [item["Key"] for item in listed if item["Key"].endswith("sprinter/limits.json")]
        body = json.loads(project.s3().get_object(Bucket="capacity", Key=key)["Body"].read())
        return [(item["class"], item["limit"], item["status"]) for item in body["limits"]]

    assert limits() == [("interactive", 4, "lower_bound")]

    project.compose("down")  # the data stay
    assert podman("ps", "--all", "--quiet", "--filter", f"name={project.name}_").stdout.split() == []
    project.up("s3")
    wait_for("s3 is healthy", lambda: project.healthy("s3"), lambda: project.logs("s3"))
    assert limits() == [("interactive", 4, "lower_bound")]
    project.compose("down", "--volumes")
    assert left_of(project.name) == []
