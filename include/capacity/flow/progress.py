"""Progress of the step a task is measuring: lines in its log, and one small file others can watch.

The file is ``<state>/progress/<model>.json``; the demo and the status command read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from include.capacity.config import slug
from include.capacity.results.spec import StepSpec
from include.capacity.servers.base import state_folder


def progress_file(model: str) -> Path:
    """Where the running step of a model is described while it runs."""
    return state_folder() / "progress" / f"{slug(model)}.json"
