"""State files: which servers of ours there are, and whose they are.

One JSON file a model, written *before* the process is started and again when its pid is known, so that
whatever is killed in between, the next start or the reaper finds what it left. Written whole by rename;
holds no secret. All lie below one folder a machine.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from include.capacity.config import SERVER_KINDS
from include.capacity.errors import DataError, ServerError
from include.capacity.results.store import replace_file, safe_name
from include.capacity.servers.base import Handle, Owner, run_name, state_folder

log = logging.getLogger(__name__)

SUFFIX = ".server.json"
STARTING, READY = "starting", "ready"
MARK = "CAPACITY_SERVER_ID"
"""The environment variable that every process of a server carries."""
WHOLE = "server-state"
"""The mark that holds the whole state, JSON."""
CLOCK_TOLERANCE_S = 1.0
"""Start times of one process read twice differ by less, also when the clock is slewed."""


def servers_folder() -> Path:
    """Where state files and logs of servers lie."""
    return state_folder() / "servers"


def this_host() -> str:
    """Name of this machine (or container): pids mean nothing on another."""
    return socket.gethostname()


@dataclass(kw_only=True)
class ServerState:
    """One server as its state file tells it."""

    status: str
    """``starting`` until it has been ready once."""
    owner: Owner
    accelerator: str
    starter_pid: int
    """The process that started it: a task, or the command line."""
    starter_started_at: float
    created_at: str
    """UTC, ISO 8601."""
    handle: Handle
    starter_host: str = ""
    """The machine of that process; empty: unknown."""


def started_here(handle: Handle, owner: Owner, accelerator: str, status: str = STARTING) -> ServerState:
    """The state of a server that this process starts now."""
    pid, started_at = process_identity()
    return ServerState(
        status=status,
        owner=owner,
        accelerator=accelerator,
        starter_pid=pid,
        starter_started_at=started_at,
        starter_host=this_host(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        handle=handle,
    )


def write_state(state: ServerState) -> None:
    """Write a server's state file whole."""
    write_json(Path(str(state.handle.state)), asdict(state))


def marks(state: ServerState) -> dict[str, str]:
    """What a server carries with it (in its environment, labels, annotations) about whose it is.

    The names are for people; ``WHOLE`` is for :func:`from_mark`. No secret is in them.
    """
    return {
        "server-id": state.handle.server_id,
        "owner": run_name(state.owner),
        "run-id": state.owner["run_id"],
        "dag-id": state.owner.get("dag_id") or "",
        "model": state.handle.model,
        "accelerator": state.accelerator,
        "state-file": str(state.handle.state),
        WHOLE: json.dumps(asdict(state)),
    }


def from_mark(text: str, where: str, folder: Path, kind: str) -> ServerState | None:
    """The server of that kind that a mark tells of; None if it is another's, or no mark of ours (logged).

    A mark is made before the server is up and does not tell how far it has come since: it counts as ready,
    so that nobody takes it for half-started. Others may write marks, too (whoever may create a Deployment in
    the namespace): what it says can name no file outside ``folder``, and no process.
    """
    try:
        state = _parsed(text)
    except ValueError as error:
        log.error("%s: not marked as ours are: %s", where, error)
        return None
    handle, ours = state.handle, folder.resolve()
    files = (str(handle.state), handle.log or str(handle.state))
    if handle.kind != kind or not all(Path(os.path.normpath(name)).is_relative_to(ours) for name in files):
        return None
    handle.pid = handle.pid_started_at = None
    state.status = READY
    return state


@cache
def _form() -> TypeAdapter[ServerState]:
    return TypeAdapter(ServerState)


def _parsed(text: str) -> ServerState:
    state = _form().validate_json(text, strict=True)
    if state.handle.kind not in SERVER_KINDS:
        raise ValueError(f"kind {state.handle.kind!r} is none of {SERVER_KINDS}")
    return state


def state_file(folder: Path, model_key: str) -> Path:
    """Where the state of a model's server is kept."""
    return folder.resolve() / f"{safe_name(model_key)}{SUFFIX}"


def forget(handle: Handle) -> None:
    """Remove the state file of a server that is gone; one that tells of a later server stays."""
    if not handle.state:
        return
    path = Path(handle.state)
    try:
        if read_state(path).handle.server_id != handle.server_id:
            return
    except FileNotFoundError:
        return
    except DataError as error:
        log.error("%s", error)
    path.unlink(missing_ok=True)


def read_states(folder: Path, pattern: str = "") -> list[ServerState]:
    """All servers whose state files lie in ``folder`` (``*/``: one folder deeper, ``**/``: anywhere below).

    A file that is none is logged as an error and left out: it must not keep others from being stopped.
    """
    states = []
    for path in sorted(folder.glob(f"{pattern}*{SUFFIX}")):
        try:
            states.append(read_state(path))
        except FileNotFoundError:  # its server was stopped meanwhile
            continue
        except DataError as error:
            log.error("%s", error)
    return states


def read_state(path: Path) -> ServerState:
    """One state file; DataError if it is not one."""
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: not a server's state file: {error}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a small JSON file whole, by rename; ServerError naming it if it cannot be (a full disk)."""
    try:
        replace_file(path, [json.dumps(data, indent=1).encode()])
    except OSError as error:
        raise ServerError(f"{path}: cannot be written: {error.strerror or error}") from error


def process_identity() -> tuple[int, float]:
    """This process's pid and start time."""
    return os.getpid(), psutil.Process().create_time()


def same_process(pid: int | None, started_at: float | None) -> psutil.Process | None:
    """The process, if it runs and began when it should have; a zombie does not run."""
    if pid is None or pid <= 0 or started_at is None:
        return None
    try:
        process = psutil.Process(pid)
        if not abs(process.create_time() - started_at) <= CLOCK_TOLERANCE_S:  # NaN is no time, either
            return None
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def named(pid: int) -> str:
    """A process for people, by its number and, as far as it can be told, its name."""
    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"pid {pid}"
