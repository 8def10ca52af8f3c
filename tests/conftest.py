"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM ends a run as Ctrl-C does: fixtures stop the servers that they have started."""
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist ends with its channel
        signal.signal(signal.SIGTERM, signal.default_int_handler)
