"""Servers listen on this machine alone unless asked for more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from include.capacity import servers
from include.capacity.cli import _parser
from include.capacity.config import DEFAULT_FLEET, ProcessServer, load_fleet
from tests.simulated import simulated


def listening(pid: int) -> set[str]:
    """Addresses that a process accepts connections at."""
    return {
        item.laddr.ip
        for item in psutil.Process(pid).net_connections("inet")
        if item.status == psutil.CONN_LISTEN
    }


def test_a_simulated_server_started_by_a_run(tmp_path: Path) -> None:
    model = load_fleet(DEFAULT_FLEET).models["steady"]
    handle = servers.start("steady", model, {"run_id": "r", "model": "steady"}, tmp_path / "a" / "b")
    try:
        assert listening(handle.pid or 0) == {"127.0.0.1"}
    finally:
        servers.stop(handle)


def test_a_simulated_server_of_the_command_line() -> None:
    with simulated("steady") as (url, server):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert listening(server.pid) == {"127.0.0.1"}


@pytest.mark.parametrize("read", [lambda: ProcessServer(kind="process").host, lambda: _parser().parse_args(
    ["simulate", "--profile", "x", "--port", "0"]).host])  # fmt: skip
def test_the_default_of_what_can_be_asked(read: Callable[[], str]) -> None:
    assert read() == "127.0.0.1"
