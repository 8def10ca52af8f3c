"""Progress of the step a task measures: lines in its log, and one small file that others can watch.

The file is ``<state>/progress/<model>.json`` and is gone when no step runs; the demo reads it.
"""

from __future__ import annotations

import time
from pathlib import Path

from include.capacity.config import slug
from include.capacity.load.progress import LogProgress, Snapshot
from include.capacity.servers.base import state_folder
from include.capacity.servers.state import write_json

FILE_EVERY_S = 1.0


def progress_folder() -> Path:
    """Where running steps are described while they run."""
    return state_folder() / "progress"


class TaskProgress:
    """The log's lines, and the file, of one step; ``load.step`` closes it however the step ends."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._log = LogProgress()
        self._file = progress_folder() / f"{slug(model)}.json"
        self._next = 0.0

    def update(self, snapshot: Snapshot) -> None:
        self._log.update(snapshot)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + FILE_EVERY_S
            write_json(self._file, {"model": self._model, "line": snapshot.line()})

    def close(self) -> None:
        self._log.close()
        self._file.unlink(missing_ok=True)


def forget_progress(model: str) -> None:
    """Remove what a step that was killed has left."""
    (progress_folder() / f"{slug(model)}.json").unlink(missing_ok=True)
