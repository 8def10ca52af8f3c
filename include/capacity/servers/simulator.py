"""A simulated vLLM server: this project's own program, run like any other server process."""

from __future__ import annotations

import sys
from pathlib import Path

from include.capacity.config import SimulatorServer
from include.capacity.errors import ConfigError
from include.capacity.servers import process
from include.capacity.servers.base import Handle
from include.capacity.servers.order import Order
from include.capacity.servers.stack import digest
from include.capacity.servers.state import ServerState

STOP_TIMEOUT_S = 10.0


def start(order: Order) -> Handle:
    """Serve the profile and wait until it is ready; see :class:`ServerKind`.

    The handle's ``clock_scale`` is the profile's time scale, as the server itself tells it.
    """
    from include.capacity.simulator.profile import load_profile  # only where something is simulated

    server = order.settings(SimulatorServer)
    profile = load_profile(server.profile)
    is_file = Path(server.profile).is_file()
    named = str(Path(server.profile).absolute()) if is_file else server.profile
    launched = process.Launch(
        kind=server.kind,
        command=[
            *(sys.executable, "-m", "include.capacity.simulator", "--profile", named),
            *("--host", "{host}", "--port", "{port}", "--served-model-name={served_name}"),
        ],
        host="127.0.0.1",
        port=server.port,
        start_timeout_s=server.start_timeout_s,
        stop_timeout_s=STOP_TIMEOUT_S,
        shown=["--profile", server.profile],
        uses_accelerator=False,
        known={"profile_digest": digest(profile.model_dump_json())},
    )
    handle = process.launch(order, launched)
    if not handle.simulated:
        stop(handle)
        raise ConfigError(
            f"models.{order.model_key}: the simulator at {handle.url} does not say that it is one"
        )
    return handle


def owned(folder: Path) -> list[ServerState]:
    """Simulators whose processes carry our mark; see :class:`ServerKind`."""
    return process.marked("simulator", folder)


stop = process.stop
alive = process.alive
tail = process.tail
running = process.running
