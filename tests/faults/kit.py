"""What the fault tests do and look at, beside the local installation itself.

The fleet is tiny: servers of real-time speed (so that a busy machine does not make the client the
bottleneck), short answers, two steps of a few seconds, floors that thirty requests can prove. Every model
has an accelerator of its own, except the pair that must share one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from botocore.exceptions import BotoCoreError, ClientError

from include.capacity.config import slug
from include.capacity.publish.publish import verify_manifest
from include.capacity.results.store import Store
from include.capacity.servers.state import ServerState, read_states
from scripts.local_stack import LocalStack

SWEEP, NIGHTLY = "capacity_sweep", "capacity_nightly"
PATIENCE_S = 240.0
HERE = Path(__file__).parent
ENDED = ("success", "failed")
BUSY = ("running", "queued", "scheduled", "deferred", "up_for_reschedule", "up_for_retry", "restarting")

T = TypeVar("T")


def until(what: str, look: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """The first true answer of ``look``; AssertionError naming ``what`` when patience ends."""
    give_up = time.monotonic() + patience_s
    while not (seen := look()):
        assert time.monotonic() < give_up, f"{what}: not seen in {patience_s:.0f} s"
        time.sleep(0.1)
    return seen


def runs(process: psutil.Process) -> bool:
    """Whether a process runs; one that waits to be asked for its status does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- the fleet

ENGINE = {
    "max_num_seqs": 16,
    "kv_cache_tokens": 65536,
    "max_model_len": 4096,
    "iteration": {"base_s": 0.02, "per_sequence_s": 0.0005},
    "noise_sigma": 0.05,
}
CLASS = {
    "rule": "interactive",
    "workload": {
        "name": "chat",
        "endpoint": "chat",
        "stream": True,
        "prompt_tokens": {"median": 32, "sigma": 0.3, "at_least": 8, "at_most": 128},
        "output_tokens": {"median": 12, "sigma": 0.3, "at_least": 4, "at_most": 32},
        "ignore_eos": True,
    },
    "deadline_s": 5,
    "completion_floor": 0.9,
    "ttft": {"at_most_s": 2.0, "share": 0.9},
    "cap_at_latency_knee": False,
    "ladder": [2, 4],
}
MOODY = ("moody", "other")
"""Models whose servers start as a file says (see moody_server.py)."""


def write_fleet(home: Path, to: str, moody_port: int | None = None) -> Path:
    """The fleet file and all it names, below ``home``; publishes to ``to``.

    Few models: each costs every run some tasks, if only skipped ones. ``moody_port``: where the model
    ``moody`` is to be served; any free port by default. Tasks read the file when they run.
    """
    profiles = home / "profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    for name, more in {"well": {}, "crash": {"crash_at_running": 4}}.items():
        profile = {"model": f"sim/{name}", "engine": {**ENGINE, **more}}
        (profiles / f"{name}.yaml").write_text(json.dumps(profile))
    servers: dict[str, dict[str, Any]] = {
        "calm": {"kind": "simulator", "profile": str(profiles / "well.yaml")}
    }
    for name in MOODY:
        set_mood(home, name, "well")
        command = [sys.executable, str(HERE / "moody_server.py"), str(home / f"{name}.mood"), str(profiles)]
        servers[name] = {
            "kind": "process",
            "command": [
                *(*command, "--host", "{host}", "--port", "{port}"),
                "--served-model-name={served_name}",
            ],
            "start_timeout_s": 10,
            "stop_timeout_s": 5,
        }
    servers["moody"]["port"] = moody_port or 0
    fleet = {
        "fleet": "faults",
        "night": {"schedule": "0 0 29 2 *"},  # never while a test runs
        "publish": {"to": to, "connection": "aws_default"},
        "accelerators": {f"sim-{name}": {"kind": "simulated"} for name in servers},
        "steps": {"prove_requests": 40, "prove_requests_max": 200, "min_window_s": 3, "warmup_cap_s": 20},
        "classes": {"interactive": CLASS},
        "models": {
            name: {
                "served_name": f"sim/{name}",
                "source": "simulator",
                "server": server,
                "accelerator": f"sim-{name}",
                "mode": "exact",
            }
            for name, server in servers.items()
        },
    }
    file = home / "fleet.yaml"
    file.write_text(json.dumps(fleet, indent=1))  # JSON is YAML
    return file


def set_mood(home: Path, model: str, mood: str) -> None:
    """How the next server of a moody model starts."""
    (home / f"{model}.mood").write_text(mood)


# -- a run


@dataclass
class Published:
    """One model as a run has published it."""

    limits: list[dict[str, Any]]
    report: str
    facts: dict[str, dict[str, Any]]
    """By step key."""

    @property
    def status(self) -> list[tuple[str, int | None]]:
        """(status, limit) of each class."""
        return [(item["status"], item["limit"]) for item in self.limits]


class Faults:
    """The installation, as the fault tests see it."""

    def __init__(self, stack: LocalStack, store: Store) -> None:
        self.stack = stack
        self.store = store

    # -- doing

    def sweep(self, *models: str, dag: str = SWEEP, **conf: Any) -> Run:
        """Start a run over these models."""
        asked = {} if dag == NIGHTLY else {"models": models, "mode": "exact"}
        return Run(self, dag, self.stack.trigger(dag, {"promote": True, **asked, **conf}))

    def clean_sweep(self, *models: str, **conf: Any) -> Run:
        """A run in which nothing goes wrong, looked at as a whole: what every fault must leave possible."""
        run = self.sweep(*models, **conf)
        assert run.state() == "success", run.explain()
        for model in models:
            assert run.published(model).status == [("lower_bound", 4)], run.published(model).report
        for entry in self.latest():
            if entry["model"] in models:
                assert entry["run_id"] == run.key
        self.nothing_is_left()
        return run

    # -- looking

    def refused(self) -> bool:
        """Whether the S3 server refuses our credentials."""
        try:
            self.stack.s3().list_buckets()
        except ClientError:
            return True
        except BotoCoreError:  # nobody is there
            pass
        return False

    def latest(self) -> list[dict[str, Any]]:
        """The entries of ``latest/limits.json``; empty without one."""
        try:
            return list(json.loads(self.store.read("latest/limits.json"))["limits"])
        except FileNotFoundError:
            return []

    def servers(self) -> list[ServerState]:
        """What the state files tell of."""
        return read_states(self.stack.home / "state" / "servers", "**/")

    def server(self, model: str) -> psutil.Process:
        """The model's server process, as its state file names it."""
        (state,) = (state for state in self.servers() if state.handle.model == model)
        assert state.handle.pid is not None
        return psutil.Process(state.handle.pid)

    def leases(self) -> list[str]:
        """Accelerators that are held."""
        return sorted(path.stem for path in (self.stack.home / "state" / "leases").glob("*.json"))

    def nothing_is_left(self) -> None:
        """No server, no state file, no lease; every published run is whole or has no manifest."""
        assert self.stack.servers() == []
        assert self.servers() == []
        assert self.leases() == []
        self.published_is_whole()

    def published_is_whole(self) -> None:
        """Everything that has a manifest matches it, and ``latest/`` leads only to such runs."""
        whole = set()
        for key in self.store.keys("runs/"):
            if key.endswith("/manifest.json"):
                whole.add(key.rpartition("/")[0])
                verify_manifest(self.store, key.rpartition("/")[0])
        for entry in self.latest():
            assert "/".join(entry["report"].split("/")[:3]) in whole, entry["report"]


class Run:
    """One DAG run."""

    def __init__(self, faults: Faults, dag: str, run_id: str) -> None:
        from include.capacity.flow.tasks import run_key

        self.faults, self.stack = faults, faults.stack
        self.dag, self.run_id = dag, run_id
        self.key = run_key(dag, run_id)

    def state(self, patience_s: float = PATIENCE_S) -> str:
        """The state the run ends in."""

        def ended() -> str | None:
            try:
                state = self.stack.run_state(self.dag, self.run_id)
            except httpx.HTTPStatusError as error:
                if error.response.is_server_error:  # its database is away
                    return None
                raise
            return state if state in ENDED else None

        return str(until(f"the end of {self.run_id}", ended, patience_s))

    def tasks(self) -> dict[str, str]:
        """Task id (with the map index of a mapped one) -> state."""
        return {
            f"{task['task_id']}[{task['map_index']}]" if task["map_index"] >= 0 else task["task_id"]: str(
                task["state"]
            )
            for task in self.stack.tasks(self.dag, self.run_id)
        }

    def failed(self) -> list[str]:
        """Tasks that failed by themselves."""
        return sorted(task for task, state in self.tasks().items() if state == "failed")

    def until_measuring(self, model: str, concurrency: int) -> None:
        """Wait until the window of a step is open."""
        file = self.stack.home / "state" / "progress" / f"{slug(model)}.json"

        def measuring() -> bool:
            try:
                line = json.loads(file.read_text())["line"]
            except (FileNotFoundError, ValueError):
                assert self.stack.run_state(self.dag, self.run_id) not in ENDED, self.explain()
                return False
            return f"c={concurrency}: measuring" in line

        until(f"{model} measuring at {concurrency}", measuring)

    def log(self, task: str) -> str:
        """The log of a task's newest try."""
        task_id, index = instance if isinstance(instance := _instance(task), tuple) else (instance, -1)
        found = next(
            item
            for item in self.stack.tasks(self.dag, self.run_id)
            if item["task_id"] == task_id and item["map_index"] == index
        )
        answer = self.stack.api(
            "GET",
            f"/dags/{self.dag}/dagRuns/{self.run_id}/taskInstances/{task_id}/logs/{found['try_number']}",
            params={"map_index": found["map_index"], "full_content": True},
            headers={"accept": "application/json"},
        )
        answer.raise_for_status()
        return json.dumps(answer.json(), ensure_ascii=False).replace("\\n", "\n")

    def clear(self, *tasks: str | tuple[str, int]) -> None:
        """Clear tasks and what comes after them, as the UI proposes; the failed ones if none is named."""
        body: dict[str, Any] = {
            "dag_run_id": self.run_id,
            "dry_run": False,
            "only_failed": False,
            "include_downstream": True,
            "task_ids": list(tasks) or [_instance(task) for task in self.failed()],
        }
        self.stack.api("POST", f"/dags/{self.dag}/clearTaskInstances", json=body).raise_for_status()

    def set_state(self, state: str) -> None:
        """Mark the run, as the UI's button does."""
        answer = self.stack.api(
            "PATCH", f"/dags/{self.dag}/dagRuns/{self.run_id}", json={"state": state}, timeout=120
        )
        answer.raise_for_status()

    def prefixes(self) -> list[str]:
        """Where this run was published: one prefix an attempt, complete ones only."""
        keys = self.faults.store.keys(f"runs/{self.key}/")
        return sorted(key.rpartition("/")[0] for key in keys if key.endswith("/manifest.json"))

    def published(self, model: str) -> Published:
        """The newest complete attempt's files of a model."""
        base = f"{self.prefixes()[-1]}/{model}"
        read = self.faults.store.read
        return Published(
            limits=json.loads(read(f"{base}/limits.json"))["limits"],
            report=read(f"{base}/report.md").decode(),
            facts={
                key.rpartition("/")[2].removesuffix(".json"): json.loads(read(key))
                for key in self.faults.store.keys(f"{base}/steps/")
            },
        )

    def explain(self) -> str:
        """What went wrong, for an assertion's message."""
        lines = [f"{task}: {state}" for task, state in sorted(self.tasks().items()) if state != "skipped"]
        logs = [f"--- {task}\n{self.log(task)[-3000:]}" for task in self.failed() if task != "check_run"]
        return "\n".join([*lines, *logs])


def _instance(task: str) -> str | tuple[str, int]:
    """A task of :meth:`Run.tasks` as Airflow's API names it: an id, or (id, map index)."""
    task_id, _, index = task.removesuffix("]").partition("[")
    return (task_id, int(index)) if index else task_id
