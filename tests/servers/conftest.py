"""Real server processes for the tests, and proof that none outlives its test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from include.capacity.config import DEFAULT_FLEET, Model, ProcessServer, Server, load_fleet, validate

FAKE = Path(__file__).with_name("fake_server.py")
MARK = "SERVER_TEST_FOLDER"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Running processes that a test with this folder has started."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == str(folder)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def server_folder(state: Path) -> Path:
    """The folder of a model's server, laid out as in a state folder."""
    folder = state / "servers" / "gpu-0" / "fake"
    folder.mkdir(parents=True)
    return folder


def served_by(server: Server, **more: Any) -> Model:
    """A model with that server; ``more``: other fields."""
    fields = {"served_name": "fake/model", "source": "fake/weights", "accelerator": "gpu-0"}
    steady = load_fleet(DEFAULT_FLEET).models["steady"]
    return steady.model_copy(update={**fields, "server": server, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A server folder; nothing may be left of its server."""
    yield server_folder(tmp_path)
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert left == []


@pytest.fixture
def fake_model(tmp_path: Path) -> Callable[..., Model]:
    """Makes a model served by the fake server: ``fake_model("--habit", "dies", start_timeout_s=5)``."""

    def make(*args: str, model: dict[str, Any] | None = None, **server: Any) -> Model:
        settings = {
            "kind": "process",
            "command": [sys.executable, str(FAKE), "--port", "{port}", *args],
            "start_timeout_s": 30,
            "stop_timeout_s": 10,
            **server,
        }
        settings["env"] = {MARK: str(tmp_path), **settings.get("env", {})}
        return served_by(validate(ProcessServer, settings, "test"), **(model or {}))

    return make
