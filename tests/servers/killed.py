"""A task that is killed while it waits for the server it has started."""

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
"""


def half_started(
    model: Model, owner: servers.Owner, folder: Path, notes: Path, runs: Callable[[], bool]
) -> servers.Handle:
    """The server of such a task: ``runs`` tells when it does, then its task is gone. ``notes``: a folder."""
    (notes / "model.json").write_text(model.model_dump_json())
    task = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(notes / "model.json"), str(folder), json.dumps(owner)],
        cwd=Path(__file__).parents[2],
    )
    while not runs():
        assert task.poll() is None
    task.kill()
    task.wait()
    half = servers.load(folder)
    assert half is not None
    return half
