"""The disk is full: the folder of state files, and a store that is a folder, each on a disk of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from include.capacity import servers
from include.capacity.results.store import FolderStore
from tests.faults.kit import Faults, set_mood, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BALLAST = "ballast"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size on ``folder``; skips the test where we may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with (folder / BALLAST).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


@pytest.fixture
def state(faults: Faults) -> Iterator[Path]:
    """The state folder on a disk of its own."""
    with small_disk(faults.stack.home / "state", "4m") as folder:
        yield folder


@pytest.fixture
def limits(faults: Faults) -> Iterator[Faults]:
    """The installation, with a folder on a disk of its own to publish to."""
    with small_disk(faults.stack.home / "limits", "8m") as folder:
        yield Faults(faults.stack, FolderStore(folder))


def test_a_full_state_folder_fails_the_start_and_leaves_no_server(faults: Faults, state: Path) -> None:
    set_mood(faults.stack.home, "moody", "slow 5")
    run = faults.sweep("moody", concurrency="4")
    until("the server's first words", lambda: any(servers.tail(item.handle) for item in faults.servers()))
    fill(state)
    assert run.state() == "failed"
    assert run.failed() == ["check_run", "moody.start_server"]
    assert "moody.server.json: cannot be written: No space left on device" in run.log("moody.start_server")
    assert run.tasks()["moody.stop_server"] == "success"
    faults.nothing_is_left()

    (state / BALLAST).unlink()
    run.clear()
    assert run.state() == "success", run.explain()
    assert run.published("moody").status == [("lower_bound", 4)]
    faults.nothing_is_left()


def test_a_full_store_fails_the_step_and_publishes_nothing(limits: Faults) -> None:
    folder = limits.stack.home / "limits"
    run = limits.sweep("calm", publish_to=folder.as_uri())
    run.until_measuring("calm", 4)
    fill(folder)
    assert run.state() == "failed"
    assert "calm.ladder[1]" in run.failed()
    assert "cannot be written: No space left on device" in run.log("calm.ladder[1]")
    assert run.tasks()["calm.stop_server"] == "success"
    assert run.prefixes() == []
    assert limits.latest() == []
    limits.nothing_is_left()

    (folder / BALLAST).unlink()
    run.clear()
    assert run.state() == "success", run.explain()
    assert run.published("calm").status == [("lower_bound", 4)]
    limits.nothing_is_left()
