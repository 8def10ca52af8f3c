"""A simulated server in a process of its own, run as the README says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).parents[1]


@contextmanager
def simulated(profile: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(URL, process) of a server of a shipped profile, or a file; ended as by Ctrl-C."""
    command = [sys.executable, "-m", "include.capacity", "simulate", "--profile", profile, "--port", "0"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())  # it says when it listens
            assert found
            yield found.group(), server
        finally:
            server.send_signal(signal.SIGINT)
