"""Which servers may be stopped by others than their run, and making an accelerator free for the next one.

A server is stale when its run is over: a run with a ``dag_id`` is asked about with ``run_is_over`` and
counts as going on where nobody can tell; one without lasts as long as the process that started it. A
server that was never ready is stale, too, once the task that was starting it is gone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from include.capacity.errors import ServerError
from include.capacity.servers.base import Owner, RunIsOver, run_name
from include.capacity.servers.state import STARTING, ServerState, read_states, same_process, this_host

log = logging.getLogger(__name__)


def why_stale(
    state: ServerState, model_key: str | None, owner: Owner | None, run_is_over: RunIsOver | None
) -> str | None:
    """Why a server may be stopped by others than its run; ``None`` if it may not.

    ``model_key`` and ``owner`` are of the server to be started, if one is.
    """
    if owner and run_name(state.owner) == run_name(owner) and state.handle.model == model_key:
        return "left by an earlier try of this run"
    starter_gone = (
        state.starter_host == this_host()
        and same_process(state.starter_pid, state.starter_started_at) is None
    )
    if state.owner.get("dag_id"):
        if run_is_over is not None and run_is_over(run_name(state.owner)):
            return "its run is over"
    elif starter_gone:
        return f"its run was the process {state.starter_pid}, which is gone"
    if state.status == STARTING and starter_gone:
        return "half-started by a task that is gone"
    return None


def clear_accelerator(
    model_key: str, accelerator: str, owner: Owner, folder: Path, run_is_over: RunIsOver | None
) -> None:
    """Stop what is left of an earlier server on this accelerator; ServerError if it is in use."""
    from include.capacity.servers import server_kind  # the registry's modules need this one

    for state in read_states(folder.resolve().parent, "*/"):
        handle = state.handle
        if state.accelerator != accelerator:
            continue
        kind = server_kind(handle.kind)
        left = kind.running(handle)
        if left is None:
            continue
        reason = why_stale(state, model_key, owner, run_is_over)
        if left and reason is None:
            raise ServerError(
                f"{model_key}: accelerator {accelerator!r} is occupied by the {handle.describe()},"
                f" of run {run_name(state.owner)!r} since {state.created_at}"
            )
        if left:
            log.warning(
                "%s: stopping the %s of run %s: %s",
                *(model_key, handle.describe(), run_name(state.owner), reason),
            )
        kind.stop(handle)
