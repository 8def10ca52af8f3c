"""What the tasks of ``capacity_import`` do, without Airflow: other people's results, judged and published.

    read ──▶ validate ──▶ limits ──▶ report ──▶ publish

``read`` brings the files in as a sweep directory; what follows is what measured sweeps go through. The
purpose of an import is a judgement, so "rejected" and "carries no limit" are results, not failures: only what
cannot be read, judged or published is an error. An import never moves ``latest/``.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from include.capacity.config import STORE_URL, load_fleet
from include.capacity.errors import DataError
from include.capacity.flow import sweep as stages
from include.capacity.flow.connection import publish_store, s3_client
from include.capacity.flow.params import Params, parse_params
from include.capacity.flow.tasks import log_findings, run_key
from include.capacity.results.store import FolderStore, Store, open_object
from include.capacity.results.sweepdir import SweepDir

log = logging.getLogger(__name__)

MAX_OBJECTS = 10_000
"""More objects below a prefix than anybody's sweep has: a wrong path, refused before it is downloaded."""


class ImportParams(Params):
    """What a person may ask of one import."""

    path: str = Field(pattern=STORE_URL)
    """A result file, or a folder (prefix) of them."""
    publish_to: str | None = Field(None, pattern=STORE_URL)
    """Where the report goes; None: as the fleet file says."""


@dataclass(frozen=True, kw_only=True)
class ImportRun:
    """One run of the DAG: what to read, and where its files are."""

    key: str
    """The run's name in keys and reports."""
    path: str
    store: Store
    s3: Callable[[], Any]
    valid_for_s: float

    @classmethod
    def of(
        cls,
        *,
        run_id: str,
        dag_id: str,
        params: Mapping[str, Any],
        s3: Callable[[], Any] | None = None,
    ) -> ImportRun:
        """The run of these parameters; ConfigError names every wrong or unknown one."""
        publish = load_fleet().publish
        asked = parse_params(ImportParams, params)
        if asked.publish_to is not None:
            publish = publish.model_copy(update={"to": asked.publish_to})
        client = s3 or (lambda: s3_client(publish.connection))
        return cls(
            key=run_key(dag_id, run_id),
            path=asked.path,
            store=publish_store(publish, client),
            s3=client,
            valid_for_s=publish.valid_for_s,
        )

    @property
    def sweep(self) -> SweepDir:
        """The sweep directory that the files become."""
        return SweepDir(self.store, f"work/{self.key}/imported")

    @property
    def overview(self) -> SweepDir:
        """Where the run's own report is."""
        return SweepDir(self.store, f"work/{self.key}")


def read(run: ImportRun) -> dict[str, Any]:
    """Read the files at the run's path into its sweep directory; returns how many steps, and what was read.

    DataError names a path that holds nothing and a file that no format knows.
    """
    from include.capacity.importers import import_files

    with tempfile.TemporaryDirectory(prefix="capacity-import-") as folder:
        steps = import_files([_local(run, Path(folder))], run.sweep, named=[run.path])
    files = run.sweep.read_json("sweep.json")["files"]
    for name, kind in files.items():
        log.info("%s: %s", name, kind)
    return {"steps": len(steps), "files": len(files)}


def _local(run: ImportRun, folder: Path) -> Path:
    """The path on this machine; objects are downloaded into ``folder`` under their names below the prefix."""
    source, name = open_object(run.path, run.s3)
    if isinstance(source, FolderStore):
        return source.root / name
    if name:
        return _downloaded(source, [name], folder) / name
    keys = source.keys()
    if not keys:
        raise DataError(f"{run.path}: no such object, and none below it")
    if len(keys) > MAX_OBJECTS:
        raise DataError(f"{run.path}: more than {MAX_OBJECTS} objects below it; name a narrower prefix")
    return _downloaded(source, keys, folder)


def _downloaded(source: Store, keys: list[str], folder: Path) -> Path:
    """``folder``, with the objects that may be results in it."""
    from include.capacity.importers.reader import SUFFIXES

    target = FolderStore(folder)
    for key in keys:
        if len(keys) == 1 or key.endswith(SUFFIXES):
            target.write(key, source.read(key))
    return folder


def judge(run: ImportRun) -> dict[str, Any]:
    """Judge the steps; returns the verdict and counts. A rejection is a result."""
    quality = stages.check(run.sweep)
    findings = log_findings(quality)
    log.info("the sweep: %s", quality["verdict"])
    return {"verdict": quality["verdict"], "findings": findings}


def limits(run: ImportRun) -> list[dict[str, Any]]:
    """Compute what may be concluded: peaks, ranges and knees; returns one small entry per curve."""
    found = stages.limits(run.sweep)["saturation"]
    small = ("model", "series", "workload", "concurrency_at_peak", "status")
    return [{key: entry.get(key) for key in small} for entry in found]


def report(run: ImportRun) -> str:
    """Write the report of the steps and the run's own; returns where they are."""
    from include.capacity.report.build import build_fleet_report

    stages.report(run.sweep)
    build_fleet_report({_model(run): run.sweep}, run.overview, run={"run_id": run.key})
    return run.overview.url


def publish(run: ImportRun) -> dict[str, Any]:
    """Publish the judgement with its report; ``latest/`` stays as it is."""
    from include.capacity.publish.publish import publish_run

    return publish_run(
        run.store,
        run_id=run.key,
        sweeps={_model(run): run.sweep},
        fleet_report=run.overview,
        promote=False,
        valid_for_s=run.valid_for_s,
    )


def _model(run: ImportRun) -> str:
    return str(run.sweep.read_json("sweep.json")["model"])
