"""Starting, watching and stopping model servers; one module a kind, all following one protocol.

``start`` gives a :class:`~include.capacity.servers.base.Handle`
of a server that is ready; ``stop``, ``alive``, ``tail`` and ``running`` take it; ``owned(folder)`` lists
what runs. A new kind is a module with these six functions, a line in ``KINDS``, and its settings in
``config.py``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from include.capacity.config import Model
from include.capacity.errors import ConfigError
from include.capacity.servers.base import Handle, Owner, RunIsOver, ServerKind, alive, load, state_folder
from include.capacity.servers.key import api_key
from include.capacity.servers.state import servers_folder

if TYPE_CHECKING:
    from include.capacity.load.request import Target

KINDS = {
    "simulator": "include.capacity.servers.simulator",
    "process": "include.capacity.servers.process",
    "docker": "include.capacity.servers.docker",
    "kubernetes": "include.capacity.servers.kubernetes",
    "endpoint": "include.capacity.servers.endpoint",
}

__all__ = [
    "KINDS",
    "Handle",
    "Owner",
    "RunIsOver",
    "ServerKind",
    "alive",
    "load",
    "server_kind",
    "start",
    "state_folder",
    "stop",
    "tail",
    "target_of",
]


def server_kind(kind: str) -> ServerKind:
    """The module of a kind, imported when first asked for; ConfigError if there is none."""
    if kind not in KINDS:
        raise ConfigError(f"server kind {kind!r} is none of {sorted(KINDS)}")
    return cast(ServerKind, import_module(KINDS[kind]))


def start(
    model_key: str,
    model: Model,
    owner: Owner,
    folder: Path | None = None,
    *,
    run_is_over: RunIsOver | None = None,
) -> Handle:
    """Start the model's server and wait until it is ready; see :class:`ServerKind`.

    ``folder`` is the state folder's ``servers`` unless given.
    """
    from include.capacity.servers.order import Order  # what starting takes, nobody else needs

    order = Order(
        model_key=model_key,
        model=model,
        owner=owner,
        folder=folder or servers_folder(),
        run_is_over=run_is_over,
    )
    return server_kind(model.server.kind).start(order)


def stop(handle: Handle) -> None:
    """Stop a server with all its processes; see :class:`ServerKind`."""
    server_kind(handle.kind).stop(handle)


def tail(handle: Handle, lines: int = 40) -> str:
    """The last lines of a server's log."""
    return server_kind(handle.kind).tail(handle, lines)


def target_of(handle: Handle) -> Target:
    """Where to send requests to a server; its key is read from the environment now.

    ConfigError if the variable is not set. The instrument comes after the servers in the flow, so it is
    imported only here, where the two meet.
    """
    from include.capacity.load.request import Target

    return Target(
        base_url=handle.url,
        served_name=handle.served_name,
        api_key=api_key(handle.api_key_env),
        metrics_url=handle.metrics_url,
    )
