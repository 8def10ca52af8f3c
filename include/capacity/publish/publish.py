"""Publish a run: immutable evidence, then the few objects that others read, each replaced whole.

::

    runs/<run_id>/<attempt>/            report.html report.md figures/ (fleet), manifest.json, last
        <model>/                        report.html report.md limits.json steps.csv quality.json
                                        requests.parquet server_metrics.parquet sweep.json steps/
                                        figures/ policy/
    history/<run_id>.json               one small object per run (:mod:`history`)
    latest/limits.json                  per model, class and way of measuring: the current limit
    latest/report.html, report.md       the last promoted run's fleet report

S3 cannot swap several objects at once, so the order is what keeps readers safe: all files of the run,
then its manifest, then its history entry, then ``latest/limits.json``, then the reports in ``latest/``.
Whatever is written last before a failure, every object of ``latest/`` is whole, names its run, and that
run's manifest is complete. A run that is published again (a retry) gets the next attempt number; nothing
below ``runs/`` is ever written twice.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from include.capacity.errors import PublishError
from include.capacity.policy import policy_files
from include.capacity.publish.documents import SCHEMA, as_json, check, schema, stamp
from include.capacity.publish.history import compact, history_entry, read_history, write_entry
from include.capacity.publish.latest import LATEST_LIMITS, latest_limits, move_latest, read_latest
from include.capacity.results.schema import REQUEST_SCHEMA
from include.capacity.results.store import Store, safe_name
from include.capacity.results.sweepdir import SweepDir

__all__ = ["check", "publish_run", "read_history", "read_latest", "schema", "verify_manifest"]

log = logging.getLogger(__name__)

DEFAULT_VALID_FOR_S = 3 * 86400.0

MODEL_FILES = ("sweep.json", "steps.csv", "quality.json", "report.html", "report.md")
FILE_PATTERN = re.compile(r"(figures/[A-Za-z0-9._~-]+\.(svg|png)|steps/[a-z0-9_+.-]+\.json)")
"""Files below a sweep directory's folders that are published."""

MANIFEST = "manifest.json"


def publish_run(
    target: Store,
    run_id: str,
    sweeps: Mapping[str, SweepDir],
    fleet_report: SweepDir | None = None,
    *,
    promote: bool = False,
    own_classes: Mapping[str, Mapping[str, Any]] | None = None,
    failed: Mapping[str, str] | None = None,
    valid_for_s: float = DEFAULT_VALID_FOR_S,
    scheduled_at: datetime | None = None,
    now: datetime | None = None,
) -> dict[str, Any]:
    """Publish a run's sweeps below ``target`` and return what was done.

    ``sweeps``: model -> its sweep directory, which must hold ``limits.json``. ``fleet_report``: where
    ``report.html`` and ``report.md`` of the fleet are. ``own_classes``: model -> class -> ServiceClass as
    JSON, as the fleet file has them; None: the sweeps' own. ``failed``: models that gave no result, and
    why. ``scheduled_at``: when a night's run was due. ``now``: timezone-aware.

    Returns ``{"run_id", "attempt", "prefix", "url", "files", "bytes", "promoted", "moved", "kept",
    "report", "limits", "valid_until", "conditional"}``: ``moved`` lists ``{"model", "class", "measured",
    "limit", "was"}``, ``kept`` ``{"model", "class", "measured", "reason"}``, ``report`` and ``limits`` are
    keys or None, ``conditional`` says whether the store keeps runs apart that publish at once.
    PublishError names the object that could not be read or written.
    """
    now = now or datetime.now(UTC)
    valid_until = now + timedelta(seconds=valid_for_s)
    run = f"runs/{safe_name(run_id)}"
    attempt = next_attempt(target, run)
    prefix = f"{run}/{attempt}"
    limits = {model: stamped(sweep, valid_until) for model, sweep in sweeps.items()}

    files: list[dict[str, Any]] = []
    for name, data in run_files(sweeps, limits, fleet_report):
        target.write(f"{prefix}/{name}", data)
        files.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {
        "schema": SCHEMA,
        "run_id": run_id,
        "attempt": attempt,
        "published_at": stamp(now),
        "models": sorted(sweeps),
        "files": sorted(files, key=lambda file: str(file["name"])),
    }
    target.write(f"{prefix}/{MANIFEST}", as_json(manifest))

    about = {model: sweep.read_json("sweep.json") for model, sweep in sweeps.items()}
    entry = history_entry(
        run_id, attempt, now, about, limits, failed or {}, promoted=promote, scheduled_at=scheduled_at
    )
    write_entry(target, entry)

    moved: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    if promote:
        _, moved, kept = move_latest(
            target,
            lambda before: latest_limits(
                before,
                limits,
                about,
                own_classes,
                failed or {},
                run_id=run_id,
                attempt=attempt,
                prefix=prefix,
                now=now,
            ),
        )
        for name in ("report.html", "report.md"):
            if fleet_report is not None and fleet_report.exists(name):
                target.write(f"latest/{name}", relinked(fleet_report.read(name), f"../{prefix}/"))
    conditional = tidy(target, f"{prefix}/{MANIFEST}", now)
    log.info("published %d files of run %s to %s/%s", len(files), run_id, target.url, prefix)
    has_report = any(file["name"] == "report.html" for file in files)
    return {
        "run_id": run_id,
        "attempt": attempt,
        "prefix": prefix,
        "url": f"{target.url}/{prefix}",
        "files": len(files),
        "bytes": sum(file["bytes"] for file in files),
        "promoted": promote,
        "moved": moved,
        "kept": kept,
        "report": f"{prefix}/report.html" if has_report else None,
        "limits": LATEST_LIMITS if promote else None,
        "valid_until": stamp(valid_until),
        "conditional": conditional,
    }


def tidy(target: Store, written: str, now: datetime) -> bool | None:
    """Compact the history; returns whether the store writes on conditions (None: it did not say).

    ``written``: an object of ours. The run is published: what fails here is said, and left to the next run.
    """
    conditional = None
    try:
        conditional = target.conditional(written)
        if not conditional:
            log.warning(
                "%s ignores conditional writes: of two runs that publish at the same moment, one may lose "
                "its entry of %s until it runs again; the history is not compacted",
                *(target.url, LATEST_LIMITS),
            )
            return conditional
        for month in compact(target, now):
            log.info("compacted the history of %s", month)
    except PublishError as error:
        log.warning("the history was not compacted: %s", error)
    return conditional


def verify_manifest(store: Store, prefix: str) -> dict[str, Any]:
    """Read a published run back and compare every file with its manifest, which is returned.

    PublishError lists what is missing, changed or not named in it.
    """
    where = f"{store.url}/{prefix}"
    try:
        manifest = json.loads(store.read(f"{prefix}/{MANIFEST}"))
    except FileNotFoundError:
        raise PublishError(f"{where}/{MANIFEST}: missing, so this run was not published completely") from None
    except ValueError as error:
        raise PublishError(f"{where}/{MANIFEST}: not JSON: {error}") from error
    check(manifest, "manifest", f"{where}/{MANIFEST}")
    wrong = []
    for file in manifest["files"]:
        try:
            data = store.read(f"{prefix}/{file['name']}")
        except FileNotFoundError:
            wrong.append(f"{file['name']} is missing")
            continue
        if len(data) != file["bytes"] or hashlib.sha256(data).hexdigest() != file["sha256"]:
            wrong.append(f"{file['name']} differs ({len(data)} bytes, expected {file['bytes']})")
    named = {f"{prefix}/{file['name']}" for file in manifest["files"]} | {f"{prefix}/{MANIFEST}"}
    wrong += [
        f"{key.removeprefix(prefix + '/')} is not in the manifest"
        for key in store.keys(f"{prefix}/")
        if key not in named
    ]
    if wrong:
        raise PublishError(f"{where}: {'; '.join(wrong)}")
    return manifest


# -- the run's own files


def next_attempt(store: Store, run: str) -> int:
    """One more than the highest attempt that has any object, complete or not."""
    tops = {key.removeprefix(f"{run}/").split("/")[0] for key in store.keys(f"{run}/")}
    return 1 + max((int(top) for top in tops if top.isdecimal()), default=0)


def run_files(
    sweeps: Mapping[str, SweepDir], limits: Mapping[str, dict[str, Any]], fleet_report: SweepDir | None
) -> Iterator[tuple[str, bytes]]:
    """(name below the run's prefix, bytes) of every file to publish."""
    if fleet_report is not None:
        for name in ("report.html", "report.md"):
            if fleet_report.exists(name):
                yield name, fleet_report.read(name)
        for name in fleet_report.names("figures/"):
            if FILE_PATTERN.fullmatch(name):
                yield name, fleet_report.read(name)
    for model, sweep in sweeps.items():
        folder = safe_name(model)
        yield f"{folder}/limits.json", as_json(limits[model])
        names = sweep.names()
        present = set(names)
        for name in MODEL_FILES:
            if name in present:
                yield f"{folder}/{name}", sweep.read(name)
        for name in names:
            if FILE_PATTERN.fullmatch(name) and ".." not in name:
                yield f"{folder}/{name}", sweep.read(name)
        # Never those lying in the sweep: these are made from the very limits that are published.
        for name, data in policy_files(sweep.read_json("sweep.json"), limits[model]).items():
            yield f"{folder}/{name}", data
        for merged, part, columns in (
            ("requests.parquet", "requests/", REQUEST_SCHEMA.append(pa.field("step", pa.string()))),
            ("server_metrics.parquet", "metrics/", None),
        ):
            if merged in present:
                yield f"{folder}/{merged}", sweep.read(merged)
            elif parts := [n for n in names if n.startswith(part) and n.endswith(".parquet")]:
                yield f"{folder}/{merged}", merged_parquet(sweep, parts, columns)


def merged_parquet(sweep: SweepDir, names: list[str], schema: pa.Schema | None) -> bytes:
    """One Parquet file of all steps' files, a row group or more each, with a column ``step``."""
    sink = io.BytesIO()
    writer = None
    for name in names:
        table = pq.read_table(io.BytesIO(sweep.read(name)))
        if "step" not in table.column_names:
            key = name.rpartition("/")[2].removesuffix(".parquet")
            table = table.append_column("step", pa.array([key] * table.num_rows, pa.string()))
        table = table.cast(schema or table.schema)
        if writer is None:
            writer = pq.ParquetWriter(sink, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return sink.getvalue()


def stamped(sweep: SweepDir, valid_until: datetime) -> dict[str, Any]:
    """The sweep's ``limits.json`` with ``valid_until`` filled in."""
    try:
        limits = sweep.read_json("limits.json")
    except FileNotFoundError:
        raise PublishError(
            f"{sweep.url}/limits.json: missing; compute the limits before publishing"
        ) from None
    if not isinstance(limits, dict) or not isinstance(limits.get("limits"), list):
        raise PublishError(f"{sweep.url}/limits.json: expected an object with a list 'limits'")
    return {**limits, "valid_until": stamp(valid_until)}


def relinked(report: bytes, base: str) -> bytes:
    """A fleet report for ``latest/``: its links to the models' reports and figures lead into the run."""
    page = report.decode()
    return page.replace('href="./', f'href="{base}').replace("](./", f"]({base}").encode()
