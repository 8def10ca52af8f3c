"""A file to import, read once; and what importers share in turning it into step rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from include.capacity.errors import DataError

IMPORTED_COLUMNS = (
    "hardware",
    "engine",
    "request_rate",  # requests a second that were to be sent; inf: all at once; blank: closed loop
    "itl_mean_s",
    "e2e_estimate_s",  # mean TTFT + mean TPOT (or gap) x (tokens - 1): for the number in flight only
    "e2e_estimate_low_s",  # the lower of the two
    "asked_output_tokens",
    "cold",  # 1: the tool's own first run, on a cold server
    "runs_made",  # runs of which `runs_kept` entered the row's mean
    "runs_kept",
    "tokens_per_s_ci95",
    "note",
)
"""What imported step rows know beyond STEP_COLUMNS."""

MAX_BYTES = 512 * 2**20
"""Larger files are refused: a step's summary is kilobytes, with every request's times megabytes."""

Row = dict[str, Any]


@dataclass
class Document:
    """One file. ``name`` is what findings call it."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        """The file's text; DataError if it cannot be read as such."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise DataError(f"{self.name}: larger than {MAX_BYTES >> 20} MiB; import its summary instead")
            return self.path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name}: not UTF-8 text: {error}") from error

    @cached_property
    def json(self) -> Any:
        """Its JSON: one value, or a list of the values of JSON lines; None if it is neither.

        NaN and Infinity, which some tools write, are read.
        """
        try:
            return json.loads(self.text)
        except ValueError:
            pass
        lines = [line for line in self.text.splitlines() if line.strip()]
        try:
            return [json.loads(line) for line in lines] or None
        except ValueError:
            return None

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its JSON objects: one, a list of them, or lines of them; empty if there are none."""
        data = [self.json] if isinstance(self.json, dict) else self.json
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            return []
        return data


def number(value: Any, scale: float = 1.0) -> float | None:
    """A finite number times ``scale``, or None; ``"inf"`` and texts of numbers are read."""
    if value is None or isinstance(value, bool | list | dict):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(found) else found * scale


def statistics(
    data: Mapping[str, Any], latency: str, names: Mapping[str, str], scale: float
) -> dict[str, float | None]:
    """``{latency}_{statistic}_s`` of each statistic, from ``data[names[statistic]]``."""
    return {f"{latency}_{s}_s": number(data.get(name), scale) for s, name in names.items()}


def finished(row: Row) -> Row:
    """A row with what follows from the rest filled in, and statistics of nothing blanked.

    Where no request completed, a latency of 0 is no latency. Of what kind failures were stays unknown.
    """
    completed, attempted = row.get("completed"), row.get("attempted")
    if completed is not None and attempted is None and row.get("failed") is not None:
        row["attempted"] = attempted = completed + row["failed"]
    row.pop("failed", None)
    window_s, rate = row.get("window_s"), row.get("request_per_s")
    if rate is None and completed is not None and window_s:
        row["request_per_s"] = completed / window_s
    if window_s is None and completed and rate:
        row["window_s"] = completed / rate
    if completed == 0:
        for name in row:
            if name.startswith(("ttft_", "tpot_", "e2e_", "itl_")) or name.endswith(("_tok_per_s", "_mean")):
                row[name] = None
    tokens, first_s = row.get("tokens_per_answer_mean"), row.get("ttft_mean_s")
    gaps_s = [gap for name in ("tpot_mean_s", "itl_mean_s") if (gap := row.get(name)) is not None]
    if tokens and gaps_s and first_s is not None:
        row["e2e_estimate_s"] = first_s + max(gaps_s) * max(tokens - 1, 0)
        row["e2e_estimate_low_s"] = first_s + min(gaps_s) * max(tokens - 1, 0)
    return row


def number_repeats(rows: Iterable[Row]) -> list[Row]:
    """Rows with ``repeat`` counted up within the same curve and level, so that each is named."""
    seen: dict[tuple[Any, ...], int] = {}
    numbered = []
    for row in rows:
        at = tuple(row.get(name) for name in ("series", "workload", "concurrency"))
        seen[at] = seen.get(at, 0) + 1
        numbered.append({**row, "repeat": seen[at]})
    return numbered


def level_workload(row: Mapping[str, Any], lengths: str | None = None) -> str | None:
    """A name for what was sent: lengths, and the arrival rate where the loop was open."""
    parts = [lengths] if lengths else []
    if row.get("concurrency") is None and row.get("request_rate") is not None:
        parts.append(f"{row['request_rate']:g} requests/s")
    return " ".join(parts) or None


def lengths_name(prompt: float | None, output: float | None) -> str | None:
    """``in1000 out170``: mean lengths to two digits, the same for runs of one shape."""
    parts = [
        f"{label}{float(f'{value:.2g}'):g}" for label, value in (("in", prompt), ("out", output)) if value
    ]
    return " ".join(parts) or None
