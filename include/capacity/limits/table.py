"""Limits as a plain text table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "model",
    "class",
    "measured",
    "limit",
    "status",
    "n",
    "effective",
    "seconds",
    "bound by",
    "next above",
)
LEFT = frozenset({"model", "class", "measured", "status", "bound by"})


def limits_table(limits: Mapping[str, Any]) -> str:
    """``limits.json`` (or anything with its ``limits``) as an aligned table, one line a limit."""
    entries = limits["limits"]
    if not entries:
        return "no limits"
    rows = [list(COLUMNS), *(_row(entry) for entry in entries)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    if limits.get("simulated"):
        lines.append("simulated: these servers are simulations, and so are their limits")
    return "\n".join(lines)


def _row(entry: Mapping[str, Any]) -> list[str]:
    evidence = entry["evidence"] or {}
    series = entry.get("series")  # absent where only measured limits can be: latest/limits.json
    name = entry["model"] + (f" [{series}]" if series else "")
    return [
        name,
        entry["class"],
        entry["measured"],
        _whole(entry["limit"]),
        str(entry["status"]),
        _whole(evidence.get("n")),
        _whole(evidence.get("n_effective")),
        _whole(evidence.get("seconds")),
        entry["bound_by"] or "-",
        _whole(entry["bracket"][1]),
    ]


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
