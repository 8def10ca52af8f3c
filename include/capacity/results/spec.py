"""What one step is to do: the planner writes it, a task or the command line carries it out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from include.capacity.words import Phase


@dataclass(frozen=True, kw_only=True)
class Load:
    """One closed loop: a service class held at a concurrency until it has counted enough."""

    service_class: str
    concurrency: int
    requests: int
    """Counted requests to reach before the loop may stop."""
    max_requests: int
    """Counted requests to extend to while undecided; equal to ``requests`` where not extended."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step of one model's sweep.

    ``loads`` holds one loop, or one per class when classes share the server. Times are in the
    server's seconds (a simulated server may run faster than life).
    """

    model: str
    phase: Phase
    loads: tuple[Load, ...]
    repeat: int = 1
    min_window_s: float = 30.0
    cap_s: float = 600.0
    """Longest the window may stay open, after warm-up."""
    early_stop: bool = True
    seed: int = 0

    @property
    def key(self) -> str:
        """Name of the step's files: unique in a sweep, the same when a task is run again."""
        loads = "+".join(f"{_slug(load.service_class)}-c{load.concurrency:05d}" for load in self.loads)
        return f"{self.phase}-{loads}-r{self.repeat}"

    @property
    def label(self) -> str:
        """Short name for people: ``prove interactive c=64``."""
        loads = " + ".join(f"{load.service_class} c={load.concurrency}" for load in self.loads)
        return f"{self.phase} {loads}" + (f" #{self.repeat}" if self.repeat > 1 else "")

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping, small enough for XCom."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepSpec:
        """The inverse of :meth:`to_json`."""
        return cls(
            **{
                **data,
                "phase": Phase(data["phase"]),
                "loads": tuple(Load(**load) for load in data["loads"]),
            }
        )


def step_seed(*parts: object) -> int:
    """A seed that depends only on ``parts``: other steps get other prompts, a rerun the same."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "_", text.lower())
