"""Progress of a task's step: a line every few seconds in its log, and a file while it runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from include.capacity.flow.progress import TaskProgress, progress_folder
from include.capacity.load.progress import Snapshot

SNAPSHOT = Snapshot(
    label="scout batch c=8",
    stage="measuring",
    in_flight=8,
    concurrency=8,
    counted=40,
    wanted=100,
    elapsed_s=12.0,
    eta_s=18.0,
    failures={"rejected": 2},
)
LINE = (
    "scout batch c=8: measuring, 8 of 8 in flight, 40 of 100 requests, 12 s, ETA 18 s, failures: rejected 2"
)


def test_a_task_logs_lines_and_keeps_a_file_while_its_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CAPACITY_STATE", str(tmp_path))

    progress = TaskProgress("org/model")
    with caplog.at_level(logging.INFO):
        progress.update(SNAPSHOT)
        (file,) = progress_folder().iterdir()
        assert json.loads(file.read_text()) == {"model": "org/model", "line": LINE}
        progress.close()
    assert not list(progress_folder().iterdir())
    assert [record.getMessage() for record in caplog.records] == [LINE, "scout batch c=8: ended after 12 s"]
