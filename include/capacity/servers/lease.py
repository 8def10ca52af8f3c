"""One lease an accelerator: who may use it now.

A small file ``<state>/leases/<accelerator>.json``. All reading and changing happens under a lock on a
file beside it, which the kernel drops with the process that holds it, so two that ask at once cannot
both get it and none can leave it locked. The lease itself outlives processes, for a run is many tasks;
so it goes stale, and is broken by the next who asks, with a line in the log, when

- the holder's run is over (asked of the caller's ``run_is_over``),
- it was bound to a process that is gone (``of_this_process``: the command line), or
- it has expired: nobody has acquired it, its holder included, for ``expires_s``.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from include.capacity.errors import DataError
from include.capacity.results.store import safe_name
from include.capacity.servers.base import RunIsOver, state_folder
from include.capacity.servers.state import process_identity, same_process, this_host, write_json

log = logging.getLogger(__name__)

EXPIRES_S = 24 * 3600.0
LAST_S = 253_402_300_799.0
"""The end of the year 9999: a time after it is none."""


@dataclass(kw_only=True)
class Held:
    """A lease as its file tells it."""

    accelerator: str
    holder: str
    """The run: ``dag_id/run_id``, or a ``run_id`` alone."""
    model: str
    since_s: float
    """Unix seconds."""
    expires_at_s: float
    host: str
    pid: int
    pid_started_at: float
    of_process: bool
    """Ends with that process."""


class Lease:
    """The lease on one accelerator, as one run and model sees it."""

    def __init__(
        self,
        accelerator: str,
        *,
        holder: str,
        model: str,
        run_is_over: RunIsOver | None = None,
        of_this_process: bool = False,
        expires_s: float = EXPIRES_S,
        folder: Path | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.holder = holder
        self.model = model
        self.run_is_over = run_is_over
        self.of_this_process = of_this_process
        self.expires_s = expires_s
        self.path = (folder or state_folder() / "leases") / f"{safe_name(accelerator)}.json"

    def acquire(self) -> bool:
        """Take the lease; False while another run or model holds it. The holder renews it thereby."""
        with self._locked():
            held = self._read()
            if held is not None and not self._mine(held):
                reason = self._stale(held)
                if reason is None:
                    log.info(
                        "%s: held by run %s for model %s since %s",
                        *(self.accelerator, held.holder, held.model, _clock(held.since_s)),
                    )
                    return False
                log.warning(
                    "%s: breaking the lease of run %s for model %s: %s",
                    *(self.accelerator, held.holder, held.model, reason),
                )
                held = None
            now = time.time()
            pid, started_at = process_identity()
            taken = Held(
                accelerator=self.accelerator,
                holder=self.holder,
                model=self.model,
                since_s=held.since_s if held else now,
                expires_at_s=now + self.expires_s,
                host=this_host(),
                pid=pid,
                pid_started_at=started_at,
                of_process=self.of_this_process,
            )
            write_json(self.path, asdict(taken))
            return True

    def release(self) -> bool:
        """Give it back; False, and nothing done, if this run and model do not hold it."""
        with self._locked():
            held = self._read()
            if held is None or not self._mine(held):
                return False
            self.path.unlink()
            return True

    def current(self) -> Held | None:
        """Who holds it now."""
        with self._locked():
            return self._read()

    def break_if_stale(self) -> str | None:
        """Remove it if it is stale; returns why, or ``None`` if it is not (or there is none)."""
        with self._locked():
            held = self._read()
            reason = self._stale(held) if held else None
            if held and reason:
                log.warning(
                    "%s: breaking the lease of run %s for model %s: %s",
                    *(self.accelerator, held.holder, held.model, reason),
                )
                self.path.unlink()
            return reason

    def why_stale(self) -> str | None:
        """Why it may be broken; ``None`` if it may not (or there is none)."""
        with self._locked():
            held = self._read()
            return self._stale(held) if held else None

    def _mine(self, held: Held) -> bool:
        return (held.holder, held.model) == (self.holder, self.model)

    def _stale(self, held: Held) -> str | None:
        if held.of_process:
            gone = held.host == this_host() and same_process(held.pid, held.pid_started_at) is None
            if gone:
                return f"its process (pid {held.pid}) is gone"
        elif self.run_is_over is not None and self.run_is_over(held.holder):
            return "its run is over"
        return f"it expired at {_clock(held.expires_at_s)}" if time.time() >= held.expires_at_s else None

    def _read(self) -> Held | None:
        return _read(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def leases(folder: Path | None = None) -> list[Held]:
    """All leases held now."""
    found = []
    for path in sorted((folder or state_folder() / "leases").glob("*.json")):
        try:
            held = _read(path)
        except DataError as error:
            log.error("%s", error)
            continue
        if held is not None:  # else released meanwhile
            found.append(held)
    return found


@cache
def _form() -> TypeAdapter[Held]:
    return TypeAdapter(Held)


def _read(path: Path) -> Held | None:
    """A lease's file; None if there is none, DataError if it is not one."""
    try:
        held = _form().validate_json(path.read_text(encoding="utf-8"), strict=True)
        for name in ("since_s", "expires_at_s"):
            if not 0 <= getattr(held, name) <= LAST_S:
                raise ValueError(f"{name} is no time: {getattr(held, name)}")
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not a lease: {error}; remove it if no sweep is running") from error
    return held


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
