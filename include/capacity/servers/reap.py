"""Find the servers and leases that runs have left, and clear away those whose run is over."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from include.capacity.errors import CapacityError
from include.capacity.servers import stop
from include.capacity.servers.base import RunIsOver, alive, run_name, state_folder
from include.capacity.servers.lease import Lease, leases
from include.capacity.servers.process import members, why_stale
from include.capacity.servers.state import ServerState, read_states, servers_folder, this_host

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Found:
    """One server of ours and what may be done about it."""

    state: ServerState
    processes: int | None
    """How many run; ``None`` on another machine and for endpoints."""
    stale: str | None
    """Why it may be stopped; ``None``: its run goes on as far as anybody can tell, or it is another
    machine's to stop."""

    def to_json(self) -> dict[str, Any]:
        """What a person or a script wants to know."""
        handle = self.state.handle
        return {
            "model": handle.model,
            "kind": handle.kind,
            "run": run_name(self.state.owner),
            "accelerator": self.state.accelerator,
            "url": handle.url,
            "host": handle.host,
            "pid": handle.pid,
            "processes": self.processes,
            "status": self.state.status,
            "since": self.state.created_at,
            "stale": self.stale,
        }


def find(run_is_over: RunIsOver | None = None, folder: Path | None = None) -> list[Found]:
    """All servers of ours on this machine that state files tell of.

    ``run_is_over`` is asked about runs with a DAG; without it such a run counts as going on.
    """
    found = []
    for state in read_states(folder or servers_folder(), "**/"):
        handle = state.handle
        elsewhere = bool(handle.host) and handle.host != this_host()
        processes = len(members(handle)) if handle.host and not elsewhere else None
        stale = None if elsewhere else why_stale(state, None, None, run_is_over)
        if processes == 0 and stale is None and not alive(handle):
            stale = "none of its processes is left"
        found.append(Found(state=state, processes=processes, stale=stale))
    return found


def reap(
    run_is_over: RunIsOver | None = None, folder: Path | None = None, lease_folder: Path | None = None
) -> list[Found]:
    """Stop every stale server and break every stale lease; returns the servers stopped.

    One that cannot be stopped is logged as an error and does not keep others from it; CapacityError
    at the end if there was any.
    """
    stopped, failed = [], []
    for item in find(run_is_over, folder):
        handle = item.state.handle
        if item.stale is None:
            continue
        log.warning(
            "stopping the %s of run %s: %s", handle.describe(), run_name(item.state.owner), item.stale
        )
        try:
            stop(handle)
            stopped.append(item)
        except CapacityError as error:
            log.error("%s", error)
            failed.append(str(error))
    for held in leases(lease_folder or state_folder() / "leases"):
        lease = Lease(held.accelerator, holder="", model="", run_is_over=run_is_over, folder=lease_folder)
        lease.break_if_stale()
    if failed:
        raise CapacityError("; ".join(failed))
    return stopped
