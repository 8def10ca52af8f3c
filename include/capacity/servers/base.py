"""What every kind of server can do, and what is known of one that runs.

A kind is a module with six functions (:class:`ServerKind`). A started server is described by a
:class:`Handle`: plain data, so that it passes from the task that starts a server to those that load
and stop it, and lies in a state file for whoever must clean up. It never holds a secret, only the
name of the environment variable that does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    NotRequired,  # pydantic needs these before Python 3.12
    Protocol,
)

from typing_extensions import TypedDict

if TYPE_CHECKING:
    from include.capacity.servers.order import Order
    from include.capacity.servers.state import ServerState

PROJECT = Path(__file__).parents[3]
STATE_ENV = "CAPACITY_STATE"
"""Environment variable that names the folder for state files, logs of servers, and leases."""

RunIsOver = Callable[[str], bool]
"""Whether the run of that name (``dag_id/run_id``) has ended, or does not exist any more."""


class Owner(TypedDict):
    """The run a server belongs to.

    Without a ``dag_id`` the run is one process's own and lasts as long as that process.
    """

    run_id: str
    model: str
    dag_id: NotRequired[str | None]


def run_name(owner: Owner) -> str:
    """``dag_id/run_id``, by which leases and ``RunIsOver`` know a run; without a DAG the ``run_id``."""
    dag_id = owner.get("dag_id")
    return f"{dag_id}/{owner['run_id']}" if dag_id else owner["run_id"]


@dataclass(kw_only=True)
class Handle:
    """A server that was started, JSON-able."""

    kind: str
    model: str
    """The model's key in the fleet file."""
    served_name: str
    url: str = ""
    """Base URL, without ``/v1``; empty until it is known."""
    metrics_url: str = ""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; never the key."""
    clock_scale: float = 1.0
    """Server seconds per wall second: above 1 only for simulated servers."""
    simulated: bool = False
    stack: dict[str, Any] = field(default_factory=dict)
    """What limits are measured on; see :mod:`include.capacity.servers.stack`."""
    server_id: str = ""
    """Marks all processes of this server (environment and log file)."""
    host: str = ""
    """The machine its processes run on; empty if we run none."""
    pid: int | None = None
    """Leader of the server's own session."""
    pid_started_at: float | None = None
    """When that process began (Unix seconds): a recycled pid is another process."""
    log: str | None = None
    state: str | None = None
    """Its state file, gone once the server is."""
    stop_timeout_s: float = 60.0
    namespace: str | None = None
    """Of a cluster, if the server runs in one."""
    context: str | None = None
    """The kubeconfig's context for that cluster."""

    def reached_at(self, url: str, metrics_url: str | None = None) -> None:
        """Note where it answers; its metrics are at ``/metrics`` there unless told otherwise."""
        self.url = url
        self.metrics_url = metrics_url or f"{url}/metrics"

    def describe(self) -> str:
        """One line for people."""
        process = f", pid {self.pid}, log {self.log}" if self.pid is not None else ""
        return f"{self.kind} server of {self.model} at {self.url}{process}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Handle:
        """The inverse of :meth:`to_json`."""
        return cls(**data)


class ServerKind(Protocol):
    """One way of having a model served."""

    def start(self, order: Order) -> Handle:
        """Start the server that is wanted and wait until it has answered a real completion.

        A stale server of the same accelerator found in the order's folder, or in one beside it, is stopped
        first. Errors: ConfigError for what the fleet file says wrong; ServerError if the server is not ready
        in time, ServerDied at once if it ended, both with the tail of its log. Nothing is left running
        after an error.
        """

    def stop(self, handle: Handle) -> None:
        """Stop the server with all its processes; fine if it is gone already.

        Errors: ServerError if something of it could not be ended.
        """

    def alive(self, handle: Handle) -> bool:
        """Whether it still runs (an endpoint: whether it answers)."""

    def tail(self, handle: Handle, lines: int = 40) -> str:
        """The last lines of its log, without the API key; empty if there is none."""

    def running(self, handle: Handle) -> int | None:
        """How many processes (containers, pods) of this server run.

        ``None`` where that cannot be told: on another machine than its own, and for endpoints. The
        reaper and the next start on its accelerator ask. Errors: ServerError if those who know it (a
        container engine, a cluster) do not answer.
        """

    def owned(self, folder: Path) -> list[ServerState]:
        """Running servers of this kind as the marks they carry tell of them, whatever the state files say.

        So that the reaper also finds what no state file names (any more). Only servers started with their
        state file somewhere below ``folder``: others are another installation's. Each has the ``owner`` and
        accelerator it was started for, and a handle with ``server_id`` that ``stop`` takes. Empty where
        this kind is not used. Errors: as :meth:`running`.
        """


def state_folder() -> Path:
    """``$CAPACITY_STATE``, else ``var/state`` in the project."""
    return Path(os.environ.get(STATE_ENV) or PROJECT / "var" / "state").absolute()


def load(folder: Path, owner: Owner | None = None) -> Handle | None:
    """The server whose state file lies in ``folder`` (of that run, if given), ready or half-started."""
    from include.capacity.servers.state import read_states  # it needs this module

    states = [
        item for item in read_states(folder) if owner is None or run_name(item.owner) == run_name(owner)
    ]
    return max(states, key=lambda item: item.created_at).handle if states else None


def alive(handle: Handle) -> bool:
    """Whether a server of any kind still runs."""
    from include.capacity.servers import server_kind  # it needs this module

    return server_kind(handle.kind).alive(handle)
