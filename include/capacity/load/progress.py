"""How far a step is: a line every few seconds in a log, or a bar on a terminal.

The step hands a :class:`Snapshot` to its :class:`Progress` several times a second; what to do with it,
and how often, is the progress' own affair. Times in a snapshot are the wall's: people wait in those.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from tqdm import tqdm

from include.capacity.results.spec import StepSpec

LINE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Where a step stands."""

    label: str
    """The step, for people."""
    stage: str
    """What it does just now: ``setting up``, ``warm-up``, ``measuring``, ``finishing``, ..."""
    in_flight: int
    concurrency: int
    counted: int
    """Counted requests that have ended."""
    wanted: int
    """... of this many (more, if a proof is extended)."""
    elapsed_s: float
    eta_s: float | None = None
    """Seconds to go; None while there is nothing to tell it by."""
    failures: dict[str, int] = field(default_factory=dict)
    """Outcome -> requests, of all that failed since the step began."""

    def line(self) -> str:
        """One line for a log."""
        eta = "?" if self.eta_s is None else f"{self.eta_s:.0f} s"
        failed = ", ".join(f"{kind} {count}" for kind, count in sorted(self.failures.items())) or "none"
        return (
            f"{self.label}: {self.stage}, {self.in_flight} of {self.concurrency} in flight, "
            f"{self.counted} of {self.wanted} requests, {self.elapsed_s:.0f} s, ETA {eta}, failures: {failed}"
        )


class Progress(Protocol):
    """Is told how far a step is."""

    def update(self, snapshot: Snapshot) -> None:
        """Take note; called several times a second, must be quick."""

    def close(self) -> None:
        """The step is over, however it ended."""


class LogProgress:
    """A line every few seconds in a logger, and one at the end."""

    def __init__(self, logger: logging.Logger | None = None, every_s: float = LINE_EVERY_S) -> None:
        self._logger = logger or logging.getLogger(__name__)
        self._every_s = every_s
        self._next = 0.0
        self._last: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._logger.info("%s", snapshot.line())

    def close(self) -> None:
        if self._last is not None:
            self._logger.info("%s: ended after %.0f s", self._last.label, self._last.elapsed_s)


class BarProgress:
    """A bar on a terminal."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file or sys.stderr
        self._bar: tqdm[Any] | None = None

    def update(self, snapshot: Snapshot) -> None:
        if self._bar is None:
            self._bar = tqdm(total=snapshot.wanted, desc=snapshot.label, unit="req", file=self._file)
        bar = self._bar
        bar.total = max(snapshot.wanted, snapshot.counted)
        shown: dict[str, object] = {"in flight": f"{snapshot.in_flight}/{snapshot.concurrency}"}
        if snapshot.stage != "measuring":
            shown = {"": snapshot.stage, **shown}
        if snapshot.eta_s is not None:
            shown["ETA"] = f"{snapshot.eta_s:.0f}s"
        bar.set_postfix({**shown, **snapshot.failures}, refresh=False)
        bar.n = snapshot.counted
        bar.update(0)
        bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def step_progress(_: StepSpec | None = None) -> Progress:
    """A bar where standard error is a terminal, else lines in the log."""
    return BarProgress() if sys.stderr.isatty() else LogProgress()
