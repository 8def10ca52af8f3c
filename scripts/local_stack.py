"""A whole local installation in one folder: Airflow, an S3 server that keeps its data, and their logs.

Used by ``make demo`` and by the end-to-end tests. Everything binds to 127.0.0.1, in processes of our
own that :meth:`LocalStack.stop` ends. Each part can be ended and started alone, which the fault tests
do. Metadata are in SQLite, or with ``postgres=True`` in a PostgreSQL of its own. Not a way to run
production: see docker-compose.yaml for that.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import httpx
import psutil
import yaml
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from include.capacity.config import DEFAULT_FLEET, FLEET_ENV
from scripts.local_postgres import LocalPostgres

ROOT = Path(__file__).parents[1]
READY_TIMEOUT_S = 300
AIRFLOW_PARTS = {
    "api-server": [],
    "scheduler": ["--skip-serve-logs"],  # its log server listens on every interface; logs are files here
    "dag-processor": [],
}
"""What runs of Airflow, with its arguments."""


def free_port(wanted: int = 0) -> int:
    """``wanted`` if nobody has it, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise RuntimeError("no free port on 127.0.0.1")


class LocalStack:
    """Airflow and S3 below ``home``; ``bucket`` exists when :meth:`start` returns.

    Everybody is an admin, unless ``login``: then Airflow asks for ``user`` and ``password``.
    """

    def __init__(
        self,
        home: Path,
        *,
        airflow_port: int = 0,
        s3_port: int = 0,
        bucket: str = "capacity",
        login: bool = False,
        env: dict[str, str] | None = None,
        postgres: bool = False,
    ) -> None:
        self.home = home
        self.bucket = bucket
        self.airflow_url = f"http://127.0.0.1:{free_port(airflow_port)}"
        self.s3_url = f"http://127.0.0.1:{free_port(s3_port)}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.postgres = LocalPostgres(free_port()) if postgres else None
        self.access_key, self.secret_key = "local", _kept_secret(home / "s3-secret")
        self.user, self.password = "admin", _kept_secret(home / "password") if login else None
        self.env = {**os.environ, **self._environment(), **(env or {})}
        self.http = httpx.Client(base_url=self.airflow_url, timeout=60, trust_env=False)

    def _environment(self) -> dict[str, str]:
        port = self.airflow_url.rpartition(":")[2]
        connection = {
            "conn_type": "aws",
            "login": self.access_key,
            "password": self.secret_key,
            "extra": {
                "endpoint_url": self.s3_url,
                "region_name": "us-east-1",
                "config_kwargs": {
                    "signature_version": "s3v4",
                    "s3": {"addressing_style": "path"},
                    "retries": {"max_attempts": 5, "mode": "standard"},
                },
            },
        }
        database = (
            {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self.postgres.url}
            if self.postgres
            else {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "scripts.airflow_sqlite.ARGUMENTS"}
        )
        return {
            **database,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "AIRFLOW_HOME": str(self.home / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": str(self.password is None),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{self.user}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.airflow_url}/execution/",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": port,
            "AIRFLOW__API__BASE_URL": self.airflow_url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(48),
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.25",
            "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "60",
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
            "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(connection),
            "CAPACITY_FLEET": str(self.home / "fleet-by-day.yaml"),
            "CAPACITY_STATE": str(self.home / "state"),
            "CAPACITY_LEASE_POLL_S": "5",
            "CAPACITY_PRELOAD": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    # -- life

    def start(self) -> None:
        """Start everything and wait until it is healthy; RuntimeError with a log's tail if it is not."""
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        (self.home / "passwords.json").write_text(json.dumps({self.user: self.password or ""}))
        fleet = Path(os.environ.get(FLEET_ENV) or DEFAULT_FLEET)
        (self.home / "fleet-by-day.yaml").write_text(_by_day(fleet.read_text()))
        self.start_part("s3")
        if self.postgres:
            self.postgres.create()
            self.start_part("postgres")
            self.wait("PostgreSQL", self.postgres.ready)
        self.run("airflow", "db", "migrate")
        for part in AIRFLOW_PARTS:
            self.start_part(part)
        self.wait_for_all()

    def start_part(self, name: str) -> None:
        """Start one part (again): ``s3``, ``postgres`` or a part of Airflow; does not wait for it."""
        if name == "s3":
            self.start_s3(self.secret_key)
        elif name == "postgres" and self.postgres:
            self.spawn(name, self.postgres.command, **self.postgres.options)
        elif name in AIRFLOW_PARTS:
            self.spawn(name, [sys.executable, "-m", "airflow", name, *AIRFLOW_PARTS[name]])
        else:
            raise ValueError(f"{name!r} is no part of this installation")

    def start_s3(self, secret_key: str) -> None:
        """Start the S3 server; another ``secret_key`` than :attr:`secret_key` makes it refuse everybody."""
        data = self.home / "s3"
        data.mkdir(exist_ok=True)
        self.spawn(
            "s3",
            [sys.executable, "-m", "nanio", "serve"],
            env={
                "NANIO_HOST": "127.0.0.1",
                "NANIO_PORT": self.s3_url.rpartition(":")[2],
                "NANIO_DATA_DIR": str(data),
                "NANIO_ACCESS_KEY": self.access_key,
                "NANIO_SECRET_KEY": secret_key,
            },
        )

    def end_part(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one part with all its processes, and wait until its first one is gone."""
        process = self.processes.pop(name)
        if process.poll() is None:
            os.killpg(process.pid, number)
        process.wait(60)

    def wait_for_all(self) -> None:
        """Wait until every part is healthy."""
        self.wait("S3 server", self._s3_ready)
        if self.postgres:
            self.wait("PostgreSQL", self.postgres.ready)
        self.wait("Airflow", self._airflow_ready)

    def stop(self) -> None:
        """End every process of ours, last started first."""
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in reversed(self.processes.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.processes.clear()
        if self.postgres:
            self.postgres.remove()

    @contextmanager
    def running(self) -> Iterator[LocalStack]:
        """Started on entry, stopped on exit."""
        try:
            self.start()
            yield self
        finally:
            self.stop()

    def spawn(self, name: str, command: list[str], env: dict[str, str] | None = None, **options: Any) -> None:
        """Start a process in a group of its own, its output in ``logs/<name>.log``."""
        with (self.home / "logs" / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **{"cwd": ROOT, **options},
            )

    def run(self, *command: str) -> None:
        """Run a command to its end; RuntimeError with its output if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")

    def check(self) -> None:
        """RuntimeError with the end of its log if a process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.log_tail(name)}")

    def log_tail(self, name: str, lines: int = 30) -> str:
        """The end of a process's log."""
        text = (self.home / "logs" / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``; RuntimeError with the logs' tails if a part ends or it takes too long."""
        give_up = time.monotonic() + READY_TIMEOUT_S
        while not ready():
            self.check()
            if time.monotonic() > give_up:
                logs = "\n".join(f"--- {name}\n{self.log_tail(name)}" for name in self.processes)
                raise RuntimeError(f"{what} is not ready after {READY_TIMEOUT_S} s:\n{logs}")
            time.sleep(0.5)

    def _s3_ready(self) -> bool:
        try:
            known = [item["Name"] for item in self.s3().list_buckets()["Buckets"]]
            if self.bucket not in known:
                self.s3().create_bucket(Bucket=self.bucket)
        except BotoCoreError:  # nobody listens yet; a refusal (ClientError) is no matter of waiting
            return False
        return True

    def _airflow_ready(self) -> bool:
        try:
            health = self.http.get("/api/v2/monitor/health").json()
            parts = ("metadatabase", "scheduler", "dag_processor")
            if any(health[part]["status"] != "healthy" for part in parts):
                return False
            return all(self.api("GET", f"/dags/{dag}").status_code == 200 for dag in self.dags())
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    def dags(self) -> list[str]:
        """Ids of the project's DAGs: one a file."""
        return sorted(path.stem for path in (ROOT / "dags").glob("capacity_*.py"))

    # -- clients

    def token(self) -> str:
        """A token for Airflow's API and UI."""
        who = {"username": self.user, "password": self.password}
        answer = self.http.post("/auth/token", json=who) if self.password else self.http.get("/auth/token")
        return str(answer.json()["access_token"])

    def s3(self) -> Any:
        """A boto3 client for the local S3 server."""
        return boto3.client(
            "s3",
            endpoint_url=self.s3_url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 1}
            ),
        )

    def api(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """One call of Airflow's REST API (v2), with a token."""
        if "authorization" not in self.http.headers:
            self.http.headers["authorization"] = f"Bearer {self.token()}"
        return self.http.request(method, f"/api/v2{path}", **arguments)

    def trigger(self, dag: str, conf: dict[str, Any] | None = None) -> str:
        """Start a run now; returns its id."""
        self.api("PATCH", f"/dags/{dag}", json={"is_paused": False}).raise_for_status()
        answer = self.api("POST", f"/dags/{dag}/dagRuns", json={"logical_date": None, "conf": conf or {}})
        if answer.status_code >= 400:
            raise RuntimeError(f"{dag}: trigger refused: {answer.text}")
        return str(answer.json()["dag_run_id"])

    def run_state(self, dag: str, run: str) -> str:
        """``queued``, ``running``, ``success`` or ``failed``; RuntimeError if a part of the stack died."""
        self.check()
        answer = self.api("GET", f"/dags/{dag}/dagRuns/{run}")
        answer.raise_for_status()
        return str(answer.json()["state"])

    def servers(self) -> list[str]:
        """Command lines of the model servers that this installation runs."""
        return model_servers(self.home / "state")

    def tasks(self, dag: str, run: str) -> list[dict[str, Any]]:
        """All task instances of a run."""
        answer = self.api("GET", f"/dags/{dag}/dagRuns/{run}/taskInstances", params={"limit": 1000})
        answer.raise_for_status()
        return list(answer.json()["task_instances"])


def model_servers(state: Path) -> list[str]:
    """Command lines of the model servers of a state folder, told by the log they write to."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(state / "servers"):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):  # it ended meanwhile, or is not ours
            continue
    return found


def _by_day(fleet: str) -> str:
    """A fleet file whose night is twelve hours away: switching the nightly on starts nothing by itself."""
    data = yaml.safe_load(fleet)
    hour = (datetime.now(UTC) + timedelta(hours=12)).hour
    data["night"].update(schedule=f"0 {hour} * * *", timezone="UTC")
    return yaml.safe_dump(data, sort_keys=False)


def _kept_secret(path: Path) -> str:
    """A random secret that stays the same as long as the folder does."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(20))
        path.chmod(0o600)
    return path.read_text()
