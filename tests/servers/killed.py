"""A task that starts a server, to be killed while it waits for it, or later."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from include.capacity import servers
from include.capacity.config import Model

STARTER = """
import json, sys
from pathlib import Path
from include.capacity import servers
from include.capacity.config import Model
model = Model.model_validate_json(Path(sys.argv[1]).read_text())
servers.start("fake", model, json.loads(sys.argv[3]), Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
"""


def starting(model: Model, owner: servers.Owner, folder: Path, notes: Path) -> subprocess.Popen[str]:
    """A process that starts the server and says ``ready`` once it is. ``notes``: a folder."""
    (notes / "model.json").write_text(model.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(notes / "model.json"), str(folder), json.dumps(owner)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def half_started(
    model: Model, owner: servers.Owner, folder: Path, notes: Path, runs: Callable[[], bool]
) -> servers.Handle:
    """The server of such a task: ``runs`` tells when it does, then its task is gone. ``notes``: a folder."""
    task = starting(model, owner, folder, notes)
    while not runs():
        assert task.poll() is None
    task.kill()
    task.communicate()
    half = servers.load(folder)
    assert half is not None
    return half
