"""A server that somebody else runs: neither started nor stopped, only checked and described.

It is not ours alone, so it is refused while it serves others (see :mod:`include.capacity.servers.quiet`), and
its fleet entry may set a ceiling on our requests in flight and a kill switch, which the sweep obeys.
"""

from __future__ import annotations

import logging
from pathlib import Path

import httpx

from include.capacity.config import EndpointServer
from include.capacity.errors import ServerError
from include.capacity.servers.base import Handle
from include.capacity.servers.command import endpoints_of
from include.capacity.servers.key import api_key
from include.capacity.servers.order import Order
from include.capacity.servers.quiet import wait_until_quiet
from include.capacity.servers.ready import wait_until_ready
from include.capacity.servers.stack import endpoint_stack
from include.capacity.servers.state import READY, ServerState, forget, started_here, write_state

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 10.0


def start(order: Order) -> Handle:
    """Wait until the endpoint answers a completion; see :class:`ServerKind`."""
    server = order.settings(EndpointServer)
    handle = order.handle(server.kind, api_key_env=server.api_key_env, log=None)
    model_key = order.model_key
    url = server.url.rstrip("/").removesuffix("/v1")
    key = api_key(server.api_key_env)

    def progress(stage: str, waited_s: float, seen: str) -> None:
        log.info("%s: %.0f s, waiting for %s (%s)", model_key, waited_s, stage, seen)

    try:
        wait_until_ready(
            url,
            handle.served_name,
            api_key=key,
            endpoints=endpoints_of(order.model),
            timeout_s=server.start_timeout_s,
            progress=progress,
        )
        handle.reached_at(url, server.metrics_url)
        handle.stack = endpoint_stack(url, key)
        handle.simulated = handle.stack["simulated"]
        handle.clock_scale = scale = handle.stack["time_scale"] or 1.0
        if server.quiet_s and not wait_until_quiet(
            handle.metrics_url, key, server.quiet_s / scale, server.quiet_patience_s / scale
        ):
            log.warning("%s: %s tells no metrics: whether others use it cannot be checked", model_key, url)
    except ServerError as error:
        raise ServerError(f"{model_key}: {url}: {error}") from error
    write_state(started_here(handle, order.owner, order.model.accelerator, READY))
    return handle


def stop(handle: Handle) -> None:
    """Forget it; the server itself is left alone."""
    forget(handle)


def alive(handle: Handle) -> bool:
    """Whether it answers ``/v1/models`` with anything but a server error."""
    key = api_key(handle.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(
            f"{handle.url}/v1/models", headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False
        )
    except httpx.HTTPError:
        return False
    return answer.status_code < 500


def kill_switch(server: EndpointServer) -> str | None:
    """Why it must not be loaded just now: its kill switch file exists; None if it does not."""
    path = server.kill_switch
    return f"the file {path} exists" if path is not None and Path(path).exists() else None


def tail(handle: Handle, lines: int = 40) -> str:  # noqa: ARG001 - asked of every kind alike
    """Nothing: its log is somebody else's."""
    return ""


def running(handle: Handle) -> None:  # noqa: ARG001 - asked of every kind alike
    """Unknown: it is somebody else's."""
    return


def owned(folder: Path) -> list[ServerState]:  # noqa: ARG001 - asked of every kind alike
    """None: we start none."""
    return []
