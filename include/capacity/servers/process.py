"""A server process of our own: any command line, ``vllm serve`` by default.

Start: stop a stale server of the same accelerator; check the port; write the state file; start the
command without a shell, in a session of its own with its output in a log file, so that it outlives
the task that started it; wait until it is ready or dead. Whatever goes wrong, it is stopped again.

Which processes are the server's is proven, never guessed from a number, for pids are recycled: the
leader by pid *and* start time; any process that carries the server's id in its environment or writes
to its log (vLLM's engine renames itself, which wipes the environment others can see); all of the
session those are in; and the children of all these.

Stop: SIGTERM to each of them, ``stop_timeout_s`` of patience, SIGKILL, and a last look.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from include.capacity.config import ProcessServer
from include.capacity.errors import ConfigError, ServerDied, ServerError
from include.capacity.servers import stack as stacks
from include.capacity.servers.base import PROJECT, Handle
from include.capacity.servers.devices import refuse_in_use
from include.capacity.servers.key import api_key, key_if_set
from include.capacity.servers.logs import log_tail
from include.capacity.servers.order import Order
from include.capacity.servers.state import (
    MARK,
    WHOLE,
    ServerState,
    forget,
    from_mark,
    marks,
    named,
    same_process,
    this_host,
    write_state,
)

log = logging.getLogger(__name__)

KILL_PATIENCE_S = 20.0
_OURS_ALONE = re.compile(r"_?AIRFLOW|PYTHONPATH$|PYTHONHOME$|VLLM_API_KEY$|CAPACITY_")
"""Variables that servers do not inherit: Airflow's (they hold secrets) and those of our own Python."""

_popen: dict[str, subprocess.Popen[bytes]] = {}
"""Servers that are children of this process, by server id: they must be waited for when they end."""


@dataclass(kw_only=True)
class Launch:
    """How to start one server process; ``command`` may hold the placeholders."""

    kind: str
    command: list[str]
    host: str
    port: int
    """0: a free one."""
    start_timeout_s: float
    stop_timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    api_key_env: str | None = None
    shown: Sequence[str] | None = None
    """What the stack shows as arguments; ``command`` unless given."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """What the stack shows besides."""
    uses_accelerator: bool = True
    """Ask first whether others are using it."""


# -- the protocol


def start(order: Order) -> Handle:
    """Start the configured command and wait until it is ready; see :class:`ServerKind`."""
    server = order.settings(ProcessServer)
    launched = Launch(
        kind=server.kind,
        command=order.command(server.command),
        host=server.host,
        port=server.port,
        start_timeout_s=server.start_timeout_s,
        stop_timeout_s=server.stop_timeout_s,
        env=server.env,
        api_key_env=server.api_key_env,
    )
    return launch(order, launched)


def stop(handle: Handle) -> None:
    """End all processes of the server, and remove its state file; see :class:`ServerKind`."""
    if handle.host != this_host():
        raise ServerError(
            f"{handle.model}: its server runs on {handle.host!r} and cannot be stopped from {this_host()!r}"
        )
    began = time.monotonic()
    found = _signal_until_gone(handle, signal.SIGTERM, handle.stop_timeout_s)
    if found and members(handle):
        log.warning("%s: still there %g s after SIGTERM: SIGKILL", handle.model, handle.stop_timeout_s)
        _signal_until_gone(handle, signal.SIGKILL, KILL_PATIENCE_S)
    if left := members(handle):
        names = ", ".join(named(process.pid) for process in left)
        raise ServerError(f"{handle.model}: could not be stopped: {names} live on")
    _wait_for(handle.server_id)
    forget(handle)
    took = time.monotonic() - began
    log.info("%s: %s", handle.model, f"stopped in {took:.1f} s" if found else "was gone already")


def alive(handle: Handle) -> bool:
    """Whether the server's first process runs."""
    if child := _popen.get(handle.server_id):
        child.poll()  # a dead child is a zombie until asked for
    return handle.host == this_host() and same_process(handle.pid, handle.pid_started_at) is not None


def tail(handle: Handle, lines: int = 40) -> str:
    """The last lines of the server's log, secrets masked."""
    if not handle.log:
        return ""
    return log_tail(Path(handle.log), lines, key_if_set(handle.api_key_env))


def running(handle: Handle) -> int | None:
    """How many of its processes run; ``None`` on another machine."""
    return len(members(handle)) if handle.host == this_host() else None


def owned(folder: Path) -> list[ServerState]:
    """Servers of this kind whose processes carry our mark; see :class:`ServerKind`."""
    return marked("process", folder)


# -- starting


def launch(order: Order, launched: Launch) -> Handle:
    """Start a server process and wait until it is ready (the part that simulators share)."""
    key = api_key(launched.api_key_env)
    order.clear_accelerator()
    if launched.uses_accelerator:
        refuse_in_use(order.model_key, {**os.environ, **launched.env})
    port = check_port(launched.host, launched.port, order.model_key)
    handle = order.handle(
        launched.kind,
        api_key_env=launched.api_key_env,
        host=this_host(),
        stop_timeout_s=launched.stop_timeout_s,
    )
    handle.reached_at(_url(launched.host, port))
    with order.bring_up(handle, stop) as state:
        env = server_env(os.environ, launched.env, key) | {env_mark(k): v for k, v in marks(state).items()}
        child = _spawn(order.filled(launched.command, launched.host, port), env, handle)
        write_state(state)
        _wait(child, order, handle, launched, key)
        order.record(
            handle,
            args=launched.command if launched.shown is None else launched.shown,
            env=launched.env,
            packages=stacks.package_versions(stacks.interpreter_of(child.pid)),
            accelerators=stacks.accelerators(stacks.visible(env)),
        )
        handle.stack |= launched.known
    log.info("%s: ready at %s, pid %s, log %s", order.model_key, handle.url, handle.pid, handle.log)
    return handle


def server_env(base: Mapping[str, str], extra: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """The server's environment: ours without what is ours alone, then the configured one.

    The API key goes in as ``VLLM_API_KEY``, which unlike an argument is in no process list.
    """
    env = {name: value for name, value in base.items() if not _OURS_ALONE.match(name)}
    env |= {"PYTHONUNBUFFERED": "1", **extra}
    if api_key is not None:
        env["VLLM_API_KEY"] = api_key
    return env


def check_port(host: str, port: int, model_key: str) -> int:
    """The port to serve on (a free one for 0); ServerError naming the holder if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            holder = _holder(port)
            raise ServerError(
                f"{model_key}: port {port} on {host} cannot be used ({error.strerror or error})"
                + (f": it is held by {holder}" if holder else "")
            ) from error
        return int(probe.getsockname()[1])


def _holder(port: int) -> str | None:
    """Who listens on a port, as far as this user may know."""
    try:
        listening = [
            item
            for item in psutil.net_connections("tcp")
            if item.status == psutil.CONN_LISTEN and item.laddr and item.laddr.port == port
        ]
    except psutil.Error:
        return None
    return next((named(item.pid) for item in listening if item.pid), None)


def _spawn(command: list[str], env: dict[str, str], handle: Handle) -> subprocess.Popen[bytes]:
    if shutil.which(command[0], path=env.get("PATH")) is None and not (PROJECT / command[0]).is_file():
        raise ConfigError(
            f"models.{handle.model}.server.command: there is no program {command[0]!r}"
            " (looked for on PATH and from the project's folder)"
        )
    with Path(str(handle.log)).open("ab") as output:
        try:
            child = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a zero byte
            raise ServerError(f"{handle.model}: {command[0]!r} cannot be started: {error}") from error
    _popen[handle.server_id] = child
    handle.pid = child.pid
    try:
        handle.pid_started_at = psutil.Process(child.pid).create_time()
    except psutil.NoSuchProcess:  # ended and waited for already: the waiting will tell
        handle.pid_started_at = None
    return child


def _wait(
    child: subprocess.Popen[bytes], order: Order, handle: Handle, launched: Launch, key: str | None
) -> None:
    """Wait until ready; errors carry the tail of the log."""
    began = time.monotonic()
    path = Path(str(handle.log))

    def check() -> None:
        status = child.poll()
        if status is not None:
            how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                how += " (out of memory?)"
            raise ServerDied(f"{handle.model}: the server ended {how} after {time.monotonic() - began:.1f} s")

    order.wait(
        handle,
        timeout_s=launched.start_timeout_s,
        check=check,
        last_lines=lambda lines: log_tail(path, lines, key),
        where=str(path),
    )


# -- stopping


def members(handle: Handle) -> list[psutil.Process]:
    """The running processes that are proven to be this server's."""
    if child := _popen.get(handle.server_id):
        child.poll()
    found: dict[int, psutil.Process] = {}
    session: list[psutil.Process] = []
    leader = same_process(handle.pid, handle.pid_started_at)
    if leader:
        found[leader.pid] = leader
    for process in psutil.process_iter():
        if _marked(process, handle):
            found[process.pid] = process
        elif handle.pid is not None and _session(process.pid) == handle.pid:
            session.append(process)
    # The session is the server's if the leader or a marked process is in it. (Nobody else can get
    # its number while one of them lives.)
    if any(pid == handle.pid or _session(pid) == handle.pid for pid in found):
        found |= {process.pid: process for process in session}
    for process in list(found.values()):
        try:
            found |= {below.pid: below for below in process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _runs(process)]


def env_mark(name: str) -> str:
    """The environment variable in which a server's processes carry a mark (:func:`.state.marks`)."""
    return f"CAPACITY_{name.upper().replace('-', '_')}"


def marked(kind: str, folder: Path) -> list[ServerState]:
    """Servers of a kind as the environments of running processes tell of them, one each."""
    found: dict[str, ServerState] = {}
    for process in psutil.process_iter():
        try:
            told = process.environ().get(env_mark(WHOLE))
            if told is None or not _runs(process):
                continue
            started_at = process.create_time()
        except (psutil.Error, OSError):  # ended, not ours to look at, or a kernel thread
            continue
        state = from_mark(told, f"pid {process.pid}", folder, kind)
        if state is None:
            continue
        known = found.setdefault(state.handle.server_id, state)
        if known.handle.pid_started_at is None or started_at < known.handle.pid_started_at:
            known.handle.pid, known.handle.pid_started_at = process.pid, started_at
    return list(found.values())


def _marked(process: psutil.Process, handle: Handle) -> bool:
    """Whether a process carries the server's id, or writes to its log."""
    if not handle.server_id:
        return False
    try:
        if process.environ().get(MARK) == handle.server_id:
            return True
    except (psutil.Error, OSError):  # ended, not ours to look at, or a kernel thread
        pass
    return bool(handle.log) and any(_output(process.pid, number) == handle.log for number in (1, 2))


def _output(pid: int, number: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/fd/{number}").readlink())
    except OSError:  # no such process, not ours, or no /proc
        return None


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_until_gone(handle: Handle, number: signal.Signals, patience_s: float) -> bool:
    """Send a signal to every member, once each, until none is left or patience is; any found?"""
    until = time.monotonic() + patience_s
    told: set[psutil.Process] = set()
    while left := members(handle):
        for process in set(left) - told:
            told.add(process)
            try:
                process.send_signal(number)  # psutil looks at the start time before it sends
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied as error:
                raise ServerError(f"{handle.model}: not allowed to end {named(process.pid)}") from error
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        psutil.wait_procs(left, timeout=min(0.5, left_s))
    return bool(told)


def _wait_for(server_id: str) -> None:
    child = _popen.pop(server_id, None)
    if child is not None:
        child.wait()


def _url(host: str, port: int) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}"
