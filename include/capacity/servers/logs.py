"""Logs of servers: files beside their state files, of which the last few are kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from include.capacity.redact import redact_text
from include.capacity.results.store import replace_file, safe_name

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
    """Copy a log that somebody else holds (a container engine, a cluster), whole or not at all."""
    replace_file(path, pieces)


def remove_old_logs(folder: Path, model_key: str) -> None:
    """Keep the last few logs of a model."""
    logs = folder.glob(f"{safe_name(model_key)}.{'[0-9a-f]' * 32}.log")
    for old in sorted(logs, key=lambda path: path.stat().st_mtime)[: -KEEP_LOGS + 1]:
        old.unlink(missing_ok=True)


def _read(path: Path, offset: int, size: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size).decode("utf-8", "replace")
