"""Servers that tests start, in processes of their own on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from scripts.local_stack import free_port

READY_WITHIN_S = 180.0
BUCKET, ACCESS_KEY, SECRET_KEY = "capacity", "access", "secret-key-1"


@contextlib.contextmanager
def running(command: list[str], url: str, log: Path, **env: str) -> Iterator[None]:
    """A process that answers at ``url``; its output is shown if it does not."""
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}) as process,
    ):
        try:
            until = time.monotonic() + READY_WITHIN_S
            while True:
                assert process.poll() is None, f"{command[0]} ended:\n{log.read_text()}"
                assert time.monotonic() < until, f"{command[0]} does not answer:\n{log.read_text()}"
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(url, timeout=5, trust_env=False)
                    break
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def nanio(folder: Path) -> Iterator[str]:
    """The URL of an S3 server that keeps its data as folders and checks signatures; it has one bucket."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "nanio", "serve", "--host", "127.0.0.1", "--port", str(port)]
    keys = {"NANIO_ACCESS_KEY": ACCESS_KEY, "NANIO_SECRET_KEY": SECRET_KEY}
    with running([*command, "--data-dir", str(folder / "data")], url, folder / "nanio.log", **keys):
        yield url
