"""Which format reads which file, and the sweep directory that comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from include.capacity.config import StepBounds
from include.capacity.errors import DataError
from include.capacity.importers.document import IMPORTED_COLUMNS, Document, Row, number_repeats
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.results.sweepdir import SweepDir

FORMATS = ("vllm_bench", "guidellm", "aiperf", "inferencemax", "tidy_csv")
"""Modules of this package, each with ``NAME``, ``EXPECTS``, ``recognises(document)`` and "
"``read(document)``."""

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv")
SUMMARY = "summary.json"
"""End of the name of a file that repeats what the files ``...run=N.json`` beside it say."""


@dataclass(frozen=True)
class Format:
    """One kind of result file."""

    name: str
    expects: str
    """What such a file contains, for the message that refuses an unknown one."""
    recognises: Callable[[Document], bool]
    read: Callable[[Document], list[Row]]


def formats() -> list[Format]:
    """All known formats, in the order in which they are asked."""
    modules = [import_module(f"include.capacity.importers.{name}") for name in FORMATS]
    return [Format(m.NAME, m.EXPECTS, m.recognises, m.read) for m in modules]


def import_files(
    paths: Sequence[str | Path], out: SweepDir, *, named: Sequence[str] | None = None
) -> pd.DataFrame:
    """Read result files and folders of them into ``out``; returns the step table.

    ``named``: what people call the paths, where these are copies (of objects).

    DataError names a file that cannot be read, that no format knows, or that holds no step.
    """
    known = formats()
    documents = [document for path in paths for document in _documents(Path(path))]
    if not documents:
        raise DataError(f"{', '.join(map(str, paths))}: no file that ends in {', '.join(SUFFIXES)}")
    rows: list[Row] = []
    read_as: dict[str, str] = {}
    for document in documents:
        kind = next((kind for kind in known if kind.recognises(document)), None)
        if kind is None:
            expected = "; ".join(f"{kind.name} ({kind.expects})" for kind in known)
            raise DataError(
                f"{document.name}: not a result file that can be read. Expected one of: {expected}"
            )
        found = kind.read(document)
        if not found:
            raise DataError(f"{document.name}: read as {kind.name}, holds no result")
        rows += [{"source": document.name, **row} for row in found]
        read_as[document.name] = kind.name
    columns = [*STEP_COLUMNS, *IMPORTED_COLUMNS]
    steps = pd.DataFrame(number_repeats(_told_apart(rows))).reindex(columns=columns)
    origin = list(named) if named is not None else [str(path) for path in paths]
    out.write_json("sweep.json", _about(steps, documents, read_as, origin))
    out.write_steps(steps)
    return steps


def _told_apart(rows: list[Row]) -> list[Row]:
    """Rows whose series names tell unlike servers apart: where one name covers several models, cards or
    engines, these are added to it. Later stages know a curve by its series and workload alone."""
    for name in ("model", "hardware", "engine"):
        covered: dict[str, set[Any]] = {}
        for row in rows:
            covered.setdefault(row.get("series") or "", set()).add(row.get(name))
        rows = [
            {**row, "series": " ".join(filter(None, (row.get("series"), row.get(name))))}
            if len(covered[row.get("series") or ""]) > 1
            else row
            for row in rows
        ]
    return rows


def _documents(path: Path) -> list[Document]:
    """The file, or the files below a folder, named by their place below it."""
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_file():
        return [Document(path, path.name)]
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in SUFFIXES)
    return [Document(file, file.relative_to(path).as_posix()) for file in found if not _repeats(file)]


def _repeats(file: Path) -> bool:
    """Whether a summary only repeats the runs that lie beside it."""
    head = file.name.removesuffix(SUMMARY)
    runs = (other.name.removeprefix(head) for other in file.parent.iterdir() if other.name.startswith(head))
    return file.name.endswith(SUMMARY) and any(name.startswith("run=") for name in runs)


def _about(
    steps: pd.DataFrame, documents: Sequence[Document], read_as: dict[str, str], origin: list[str]
) -> dict[str, object]:
    """``sweep.json`` of imported steps: everything that measuring would know is unknown."""
    models = sorted(str(model) for model in steps["model"].dropna().unique())
    hardware = sorted(str(name) for name in steps["hardware"].dropna().unique())
    model = models[0] if len(models) == 1 else "imported"
    digest = hashlib.sha256("\0".join(document.text for document in documents).encode())
    return {
        "schema": 1,
        "run_id": f"import-{digest.hexdigest()[:12]}",
        "attempt": 1,
        "model": model,
        "served_name": model,
        "series": "",
        "source": "imported",
        "simulated": False,
        "clock_scale": 1.0,
        "accelerator": {"name": None, "kind": hardware[0] if len(hardware) == 1 else None, "count": None},
        "stack": None,
        "stack_id": None,
        "comparison_ids": {},
        "classes": {},
        "bounds": StepBounds().model_dump(mode="json"),
        "mode": "exact",
        "repeats": 1,
        "shared": False,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {},
        "seed": 0,
        "problems": [],
        "imported_from": origin,
        "files": read_as,
    }
