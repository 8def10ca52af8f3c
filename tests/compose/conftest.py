"""A real container engine for the tests: podman, with images made on this machine.

Where the machine cannot run containers (a right that is missing, found by running one), the tests are skipped
and say so; any other failure of the set-up fails them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CANNOT = 75
"""Exit status of scripts/setup_containers.sh where containers cannot run."""


@pytest.fixture(scope="session")
def containers() -> Path:
    """The folder with the engine's configuration, set in this process's environment; images are made."""
    out = ROOT / "var" / "containers"
    ready = subprocess.run([ROOT / "scripts" / "setup_containers.sh", out], stdout=subprocess.PIPE, text=True)
    if ready.returncode == CANNOT:
        pytest.skip("THE CONTAINER TESTS DID NOT RUN: this machine cannot run containers (see above)")
    assert ready.returncode == 0
    subprocess.run([ROOT / "scripts" / "container_images.sh", out], check=True)
    os.environ["CONTAINERS_CONF"] = str(out / "containers.conf")
    os.environ["CONTAINERS_STORAGE_CONF"] = str(out / "storage.conf")
    return out


@pytest.fixture(scope="session")
def engine(containers: Path) -> Iterator[str]:
    """The engine's service, as ``DOCKER_HOST`` names it."""
    import docker

    socket = f"unix://{containers}/podman.sock"
    with (containers / "service.log").open("ab") as log:
        service = subprocess.Popen(
            ["podman", "system", "service", "--time", "0", socket],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.environ["DOCKER_HOST"] = socket
    try:
        while True:
            assert service.poll() is None, (containers / "service.log").read_text()[-2000:]
            try:
                client = docker.from_env()
                client.ping()
                client.close()
                break
            except docker.errors.DockerException:
                continue
        yield socket
    finally:
        del os.environ["DOCKER_HOST"]
        service.terminate()
        service.wait()
