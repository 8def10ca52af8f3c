"""Progress: a line in a log every few seconds, a bar on a terminal; ETA and failures in both."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from include.capacity.load import progress
from include.capacity.load.progress import BarProgress, LogProgress, Snapshot, step_progress


def snapshot(**changes: Any) -> Snapshot:
    usual: dict[str, Any] = {
        "label": "prove interactive c=16",
        "stage": "measuring",
        "in_flight": 15,
        "concurrency": 16,
        "counted": 120,
        "wanted": 600,
        "elapsed_s": 31.4,
        "eta_s": 88.0,
        "failures": {"rejected": 3, "deadline_exceeded": 1},
    }
    return Snapshot(**{**usual, **changes})


def test_a_line_says_where_the_step_stands() -> None:
    assert snapshot().line() == (
        "prove interactive c=16: measuring, 15 of 16 in flight, 120 of 600 requests, 31 s, ETA 88 s, "
        "failures: deadline_exceeded 1, rejected 3"
    )
    assert snapshot(eta_s=None, failures={}).line().endswith("ETA ?, failures: none")


def test_lines_come_every_few_seconds_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock["now"])
    log = LogProgress(every_s=5.0)
    with caplog.at_level(logging.INFO):
        for tick in range(41):
            clock["now"] = 100.0 + tick * 0.25
            log.update(snapshot(counted=tick))
        assert [record.getMessage().split(", ")[2] for record in caplog.records] == [
            "0 of 600 requests",
            "20 of 600 requests",
            "40 of 600 requests",
        ]
        log.close()
    assert caplog.records[-1].getMessage() == "prove interactive c=16: ended after 31 s"


def test_closing_before_anything_happened_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LogProgress().close()
    assert not caplog.records
    BarProgress(io.StringIO()).close()


def test_the_bar_shows_count_eta_in_flight_and_failures() -> None:
    file = io.StringIO()
    bar = BarProgress(file)
    bar.update(snapshot(counted=0, stage="warm-up"))
    bar.update(snapshot())
    bar.close()
    shown = file.getvalue()
    assert "prove interactive c=16" in shown
    assert "warm-up" in shown
    assert "120/600" in shown
    assert "in flight=15/16" in shown
    assert "ETA=88s" in shown
    assert "rejected=3" in shown


@pytest.mark.parametrize(("terminal", "kind"), [(True, BarProgress), (False, LogProgress)])
def test_a_terminal_gets_a_bar_and_a_log_gets_lines(
    terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: terminal)
    monkeypatch.setattr(progress.sys, "stderr", file)
    assert type(step_progress()) is kind


def test_a_proof_that_is_extended_grows_its_bar() -> None:
    file = io.StringIO()
    bar = BarProgress(file)
    bar.update(snapshot(counted=700))
    bar.close()
    assert "700/700" in file.getvalue()
