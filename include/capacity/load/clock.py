"""Two clocks: the wall's, which we read, and the server's, which every number is in.

A simulated server may run faster than life (``scale`` server seconds pass in one of ours). Deadlines,
windows and pauses are given in the server's seconds and waited for in the wall's; stamps are read in
the wall's and kept in the server's. For anything real the scale is 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clock:
    """Stamps of one step; ``now`` may be replaced in tests."""

    scale: float = 1.0
    """Server seconds per wall second."""
    now: Callable[[], float] = time.perf_counter
    started: float = field(default=-1.0)
    """Wall stamp of the step's beginning; now, if not given."""

    def __post_init__(self) -> None:
        if self.started < 0:
            object.__setattr__(self, "started", self.now())

    def since_start_s(self, stamp: float) -> float:
        """A wall stamp as server seconds since the step began."""
        return (stamp - self.started) * self.scale

    def between_s(self, earlier: float | None, later: float | None) -> float | None:
        """Server seconds between two wall stamps; None if either is unknown."""
        if earlier is None or later is None:
            return None
        return (later - earlier) * self.scale

    def wall(self, server_s: float) -> float:
        """Wall seconds that ``server_s`` server seconds take."""
        return server_s / self.scale
