"""The reaper: find the servers and leases that runs have left, and clear away those whose run is over.

Looked for in two places: the state files, and the marks that processes, containers and pods carry, for
what no state file tells of (any more). Left alone is whatever may still be somebody's: the server of a run
that goes on, or of which nobody here can tell; a process whose pid is another's by now (it began at another
time); what runs on another machine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from include.capacity.errors import CapacityError, ServerError
from include.capacity.servers import KINDS, server_kind, stop
from include.capacity.servers.base import RunIsOver, alive, run_name, state_folder
from include.capacity.servers.lease import Held, Lease, leases
from include.capacity.servers.stale import why_stale
from include.capacity.servers.state import ServerState, read_states, servers_folder, this_host

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Found:
    """One server of ours and what may be done about it."""

    state: ServerState
    processes: int | None
    """How many processes, containers or pods run; ``None`` where that cannot be told from here."""
    stale: str | None
    """Why it may be stopped; ``None``: it is left alone."""
    kept: str | None
    """Why it is left alone."""
    done: str | None = None
    """``stopped`` or ``failed: why``; ``None``: nothing was done."""

    def to_json(self) -> dict[str, Any]:
        """What a person or a script wants to know."""
        handle = self.state.handle
        return {
            "model": handle.model,
            "kind": handle.kind,
            "run": run_name(self.state.owner),
            "accelerator": self.state.accelerator,
            "url": handle.url or None,
            "host": handle.host or None,
            "pid": handle.pid,
            "processes": self.processes,
            "status": self.state.status,
            "since": self.state.created_at,
            "stale": self.stale,
            "kept": self.kept,
            "done": self.done,
        }


@dataclass(kw_only=True)
class FoundLease:
    """One lease and what may be done about it."""

    held: Held
    stale: str | None
    """Why it may be broken; ``None``: it is left alone."""
    kept: str | None
    """Why it is left alone."""
    done: str | None = None
    """``broken``; ``None``: nothing was done."""

    def to_json(self) -> dict[str, Any]:
        """What a person or a script wants to know."""
        return {
            "accelerator": self.held.accelerator,
            "model": self.held.model,
            "run": self.held.holder,
            "host": self.held.host,
            "stale": self.stale,
            "kept": self.kept,
            "done": self.done,
        }


@dataclass(kw_only=True)
class Reaped:
    """What was found, and what was done about it."""

    servers: list[Found] = field(default_factory=list)
    leases: list[FoundLease] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What could not be asked or stopped."""

    @property
    def stopped(self) -> list[Found]:
        """The servers that were stopped."""
        return [item for item in self.servers if item.done == "stopped"]

    def to_json(self) -> dict[str, Any]:
        """JSON-able, for scripts and for XCom."""
        return {
            "servers": [item.to_json() for item in self.servers],
            "leases": [item.to_json() for item in self.leases],
            "failed": self.failed,
        }


def reap(
    run_is_over: RunIsOver | None = None,
    folder: Path | None = None,
    lease_folder: Path | None = None,
    *,
    dry_run: bool = False,
    untold: str | None = None,
) -> Reaped:
    """Stop every stale server and break every stale lease; with ``dry_run`` only say which these are.

    ``run_is_over`` is asked about runs with a DAG; without it such a run counts as going on. ``untold``: what
    to say of runs that it does not call over, where it cannot call them going on either. What cannot be asked
    or stopped is logged as an error, kept in ``failed``, and keeps nothing else from it. An error of
    ``run_is_over`` itself goes on: where nobody can tell whether runs are over, nothing is stopped.
    """
    result = Reaped()
    if run_is_over is None:
        untold = untold or "nobody here can tell whether its run is over"
    for state in _servers(folder or servers_folder(), result.failed):
        handle = state.handle
        try:
            found = _judged(state, run_is_over, untold)
        except ServerError as error:
            _failed(result, f"{handle.describe()}: {error}")
            continue
        result.servers.append(found)
        if found.stale is None:
            continue
        verb = "would stop" if dry_run else "stopping"
        log.warning("%s the %s of run %s: %s", verb, handle.describe(), run_name(state.owner), found.stale)
        if dry_run:
            continue
        try:
            stop(handle)
            found.done = "stopped"
        except CapacityError as error:
            found.done = f"failed: {error}"
            _failed(result, str(error))
    for held in leases(lease_folder or state_folder() / "leases"):
        lease = Lease(held.accelerator, holder="", model="", run_is_over=run_is_over, folder=lease_folder)
        reason = lease.why_stale() if dry_run else lease.break_if_stale()
        done = "broken" if reason and not dry_run else None
        kept = None if reason else (None if held.of_process else untold) or "its run goes on"
        result.leases.append(FoundLease(held=held, stale=reason, kept=kept, done=done))
    return result


def _servers(folder: Path, failed: list[str]) -> list[ServerState]:
    """All servers of ours, from state files and from marks, each once."""
    states = read_states(folder, "**/")
    known = {state.handle.server_id for state in states}
    for kind in KINDS:
        try:
            states += [
                state for state in server_kind(kind).owned(folder) if state.handle.server_id not in known
            ]
        except ServerError as error:
            message = f"kind {kind}: its servers cannot be listed: {error}"
            log.error("%s", message)
            failed.append(message)
    return states


def _judged(state: ServerState, run_is_over: RunIsOver | None, untold: str | None) -> Found:
    handle = state.handle
    if handle.host and handle.host != this_host():
        kept = f"it runs on {handle.host}, which is not this machine"
        return Found(state=state, processes=None, stale=None, kept=kept)
    processes = server_kind(handle.kind).running(handle)
    stale = why_stale(state, None, None, run_is_over)
    if stale is None and processes == 0 and not alive(handle):
        stale = "none of its processes is left"
    goes_on = (untold if state.owner.get("dag_id") else None) or "its run goes on"
    return Found(state=state, processes=processes, stale=stale, kept=None if stale else goes_on)


def _failed(result: Reaped, message: str) -> None:
    log.error("%s", message)
    result.failed.append(message)


def lines(found: Mapping[str, Any], *, dry_run: bool) -> list[str]:
    """:meth:`Reaped.to_json` for people, one line each."""
    shown = []
    for item in found["servers"]:
        what = f"{item['kind']} server of {item['model']}, run {item['run']}"
        shown.append(f"{_what(item, 'stop', dry_run)} {what}: {item['stale'] or item['kept']}")
    for item in found["leases"]:
        what = f"lease of {item['accelerator']}, run {item['run']}, model {item['model']}"
        shown.append(f"{_what(item, 'break', dry_run)} {what}: {item['stale'] or item['kept']}")
    return shown or ["no servers and no leases"]


def _what(item: Mapping[str, Any], verb: str, dry_run: bool) -> str:
    if item["stale"] is None:
        return "left alone:"
    return f"would {verb}:" if dry_run else f"{(item['done'] or '').partition(':')[0]}:"
