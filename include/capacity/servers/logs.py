"""Logs of servers: files beside their state files, of which the last few are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from include.capacity.errors import ServerError
from include.capacity.redact import redact_text
from include.capacity.results.store import replace_file, safe_name

log = logging.getLogger(__name__)

KEEP_LOGS = 10
"""Logs kept of each model; older ones are removed at the next start."""
TAIL_BYTES = 64 * 1024
HEAD_BYTES = 4 * 1024 * 1024


def log_tail(path: Path, lines: int, *secrets: str | None) -> str:
    """The last lines of a log, secrets masked; empty if there is none."""
    try:
        size = path.stat().st_size
    except OSError:
        return ""
    return last_lines(_read(path, max(0, size - TAIL_BYTES), TAIL_BYTES), lines, *secrets)


def last_lines(text: str, lines: int, *secrets: str | None) -> str:
    """The last lines of a text, secrets masked."""
    return redact_text("\n".join(text.splitlines()[-lines:]), secrets)


def log_head(path: Path) -> str:
    """The beginning of a log, where a server tells what it found at its start."""
    return _read(path, 0, HEAD_BYTES)


def keep_log(path: Path, pieces: Iterable[bytes]) -> None:
    """Copy a log that somebody else holds (a container engine, a cluster), whole or not at all.

    ServerError naming the file if it cannot be written (a full disk).
    """
    try:
        replace_file(path, pieces)
    except OSError as error:
        raise ServerError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def may_be_lost(model_key: str, *errors: type[Exception]) -> Iterator[None]:
    """Keeping the log of a server that is being removed; what goes wrong is logged, the removal goes on."""
    expected: tuple[type[Exception], ...] = (ServerError, *errors)
    try:
        yield
    except expected as error:
        log.error("%s: its log is not kept: %s", model_key, error)


def remove_old_logs(folder: Path, model_key: str) -> None:
    """Keep the last few logs of a model."""
    logs = folder.glob(f"{safe_name(model_key)}.{'[0-9a-f]' * 32}.log")
    for old in sorted(logs, key=lambda path: path.stat().st_mtime)[: -KEEP_LOGS + 1]:
        old.unlink(missing_ok=True)


def _read(path: Path, offset: int, size: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size).decode("utf-8", "replace")
