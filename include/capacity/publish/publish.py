"""Publish a run: immutable evidence, then the few objects that others read, each replaced whole.

::

    runs/<run_id>/<attempt>/            report.html report.md (fleet), manifest.json, last
        <model>/                        report.html report.md limits.json steps.csv quality.json
                                        requests.parquet server_metrics.parquet sweep.json steps/
                                        figures/ policy/
    history/<run_id>.json               one small object per run
    latest/limits.json                  per model, class and way of measuring: the current limit
    latest/report.html, report.md       the last promoted run's fleet report

S3 cannot swap several objects at once, so the order is what keeps readers safe: all files of the run,
then its manifest, then its history entry, then ``latest/limits.json``, then the reports in ``latest/``.
Whatever is written last before a failure, every object of ``latest/`` is whole, names its run, and that
run's manifest is complete. A run that is published again (a retry) gets the next attempt number; nothing
below ``runs/`` is ever written twice.

An entry of ``latest/limits.json`` moves only if the run is promoted, the limit is ``proven`` or a
``lower_bound``, it was measured (not imported), the sweep was not rejected, and the class was the fleet's
own: same workload, deadline, floor and objectives (the ladder only says where to look). Otherwise the last
good entry stays, with its age and, in ``last_attempt``, why this run did not move it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq

from include.capacity.errors import PublishError
from include.capacity.policy import policy_files
from include.capacity.results.schema import REQUEST_SCHEMA
from include.capacity.results.store import Store, safe_name
from include.capacity.results.sweepdir import SweepDir, finite
from include.capacity.words import EXPORTABLE, LimitStatus

log = logging.getLogger(__name__)

SCHEMA = 1
SCHEMAS = Path(__file__).parent / "schemas"

LATEST_LIMITS = "latest/limits.json"
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
    now: datetime | None = None,
) -> dict[str, Any]:
    """Publish a run's sweeps below ``target`` and return what was done.

    ``sweeps``: model -> its sweep directory, which must hold ``limits.json``. ``fleet_report``: where
    ``report.html`` and ``report.md`` of the fleet are. ``own_classes``: model -> class -> ServiceClass as
    JSON, as the fleet file has them; None: the sweeps' own. ``failed``: models that gave no result, and
    why. ``now``: timezone-aware.

    Returns ``{"run_id", "attempt", "prefix", "url", "files", "bytes", "promoted", "moved", "kept",
    "report", "limits", "valid_until"}``: ``moved`` lists ``{"model", "class", "measured", "limit", "was"}``,
    ``kept`` ``{"model", "class", "measured", "reason"}``, the last four before ``valid_until`` are keys or
    None. PublishError names the object that could not be read or written.
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
    entry = history_entry(run_id, attempt, now, about, limits, failed or {}, promoted=promote)
    target.write(f"history/{safe_name(run_id)}.json", as_json(entry))

    moved: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    if promote:
        latest, moved, kept = latest_limits(
            read_latest(target),
            limits,
            about,
            own_classes,
            failed or {},
            run_id=run_id,
            attempt=attempt,
            prefix=prefix,
            now=now,
        )
        check(latest, "latest-limits", LATEST_LIMITS)
        target.write(LATEST_LIMITS, as_json(latest))
        for name in ("report.html", "report.md"):
            if fleet_report is not None and fleet_report.exists(name):
                target.write(f"latest/{name}", relinked(fleet_report.read(name), f"../{prefix}/"))
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
    }


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


def read_history(store: Store, newest: int | None = None) -> list[dict[str, Any]]:
    """History entries of all runs (or the ``newest`` so many), oldest first."""
    entries = []
    for key in store.keys("history/"):
        if not key.endswith(".json"):
            continue
        try:
            entries.append(json.loads(store.read(key)))
        except ValueError as error:
            raise PublishError(f"{store.url}/{key}: not JSON: {error}") from error
    entries.sort(key=lambda entry: (entry["published_at"], entry["run_id"]))
    return entries if newest is None else entries[-newest:]


def last_comparable(
    history: list[dict[str, Any]], model: str, comparison_ids: Mapping[str, str], before_run: str
) -> dict[str, dict[str, Any]]:
    """Class -> the newest earlier limit measured alone with the same ``comparison_id``.

    What :func:`include.capacity.report.build.build_model_report` takes as ``previous``.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in history:
        if entry["run_id"] == before_run:
            continue
        for limit in (entry["models"].get(model) or {}).get("limits", []):
            name = limit["class"]
            same = limit.get("comparison_id") is not None and limit["comparison_id"] == comparison_ids.get(
                name
            )
            if same and limit["measured"] == "alone" and limit["status"] in EXPORTABLE:
                found[name] = {**limit, "run_id": entry["run_id"], "published_at": entry["published_at"]}
    return found


def read_latest(store: Store) -> dict[str, Any] | None:
    """``latest/limits.json``; None if there is none yet."""
    try:
        data = json.loads(store.read(LATEST_LIMITS))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PublishError(
            f"{store.url}/{LATEST_LIMITS}: not JSON ({error}); move it away and publish again"
        ) from error
    check(data, "latest-limits", f"{store.url}/{LATEST_LIMITS}")
    return data


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
        for merged, part, schema in (
            ("requests.parquet", "requests/", REQUEST_SCHEMA.append(pa.field("step", pa.string()))),
            ("server_metrics.parquet", "metrics/", None),
        ):
            if merged in present:
                yield f"{folder}/{merged}", sweep.read(merged)
            elif parts := [n for n in names if n.startswith(part) and n.endswith(".parquet")]:
                yield f"{folder}/{merged}", merged_parquet(sweep, parts, schema)


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
    """A fleet report for ``latest/``: its links to the models' reports lead into the run."""
    page = report.decode()
    return page.replace('href="./', f'href="{base}').replace("](./", f"]({base}").encode()


# -- history and latest


HISTORY_KEYS = (
    "class",
    "measured",
    "limit",
    "status",
    "bound_by",
    "server_bound_by",
    "bracket",
    "deadline_s",
    "comparison_id",
    "stack_id",
)


def history_entry(
    run_id: str,
    attempt: int,
    now: datetime,
    about: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, dict[str, Any]],
    failed: Mapping[str, str],
    *,
    promoted: bool,
) -> dict[str, Any]:
    """What a run adds to the history: its limits and stacks, small."""
    models = {}
    for model, found in limits.items():
        models[model] = {
            "stack_id": about[model].get("stack_id"),
            "stack": about[model].get("stack"),
            "accelerator": about[model].get("accelerator"),
            "simulated": bool(about[model].get("simulated")),
            "limits": [
                {
                    **{key: entry.get(key) for key in HISTORY_KEYS},
                    "n": (entry.get("evidence") or {}).get("n"),
                    "request_per_s": (entry.get("evidence") or {}).get("request_per_s"),
                }
                for entry in found["limits"]
            ],
        }
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "attempt": attempt,
        "published_at": stamp(now),
        "promoted": promoted,
        "models": models,
        "failed": dict(failed),
    }


LATEST_KEYS = (
    "limit",
    "status",
    "bound_by",
    "server_bound_by",
    "beside",
    "bracket",
    "operating_range",
    "confidence",
    "deadline_s",
    "completion_floor",
    "objectives",
    "claim",
    "comparison_id",
    "stack_id",
    "evidence",
)


def latest_limits(
    before: Mapping[str, Any] | None,
    limits: Mapping[str, dict[str, Any]],
    about: Mapping[str, Mapping[str, Any]],
    own_classes: Mapping[str, Mapping[str, Any]] | None,
    failed: Mapping[str, str],
    *,
    run_id: str,
    attempt: int,
    prefix: str,
    now: datetime,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(the new ``latest/limits.json``, entries moved, entries kept and why)."""
    entries = {_key(entry): dict(entry) for entry in (before or {}).get("limits", [])}
    moved, kept = [], []
    for model, found in limits.items():
        for limit in found["limits"]:
            key = (model, str(limit["class"]), str(limit.get("measured") or "alone"))
            at = {"model": key[0], "class": key[1], "measured": key[2]}
            why = why_not(limit, about[model], own_classes, model)
            if why is None:
                was = entries.get(key, {}).get("limit")
                entries[key] = {
                    **at,
                    **{name: limit.get(name) for name in LATEST_KEYS},
                    "served_name": about[model].get("served_name"),
                    "accelerator": about[model].get("accelerator"),
                    "simulated": bool(about[model].get("simulated")),
                    "run_id": run_id,
                    "attempt": attempt,
                    "measured_at": about[model].get("created_at") or stamp(now),
                    "valid_until": found["valid_until"],
                    "report": f"{prefix}/{safe_name(model)}/report.html",
                    "last_attempt": None,
                }
                moved.append({**at, "limit": limit["limit"], "was": was})
                continue
            kept.append({**at, "reason": why})
            if key in entries:
                entries[key]["last_attempt"] = {
                    "run_id": run_id,
                    "at": stamp(now),
                    "status": str(limit.get("status")),
                    "reason": why,
                }
    for model, reason in failed.items():
        for key in [key for key in entries if key[0] == model]:
            kept.append({"model": key[0], "class": key[1], "measured": key[2], "reason": reason})
            entries[key]["last_attempt"] = {
                "run_id": run_id,
                "at": stamp(now),
                "status": LimitStatus.NOT_MEASURED.value,
                "reason": reason,
            }
    for entry in entries.values():
        entry["age_s"] = age_s(entry["measured_at"], now)
    latest = {
        "schema": SCHEMA,
        "updated_at": stamp(now),
        "updated_by_run": run_id,
        "limits": [entries[key] for key in sorted(entries)],
    }
    return finite(latest), moved, kept


def why_not(
    limit: Mapping[str, Any],
    about: Mapping[str, Any],
    own_classes: Mapping[str, Mapping[str, Any]] | None,
    model: str,
) -> str | None:
    """Why a limit may not become the current one; None if it may."""
    if limit.get("limit") is None or limit.get("status") not in EXPORTABLE:
        return str(limit.get("reason") or limit.get("claim") or f"status {limit.get('status')}")
    if (limit.get("source") or about.get("source") or "measured") != "measured":
        return "imported, not measured by us"
    if own_classes is not None:
        name = str(limit["class"])
        own = (own_classes.get(model) or {}).get(name)
        if own is None:
            return "the fleet file has no such class for this model"
        differing = _differs(own, (about.get("classes") or {}).get(name) or {})
        if differing:
            return f"measured with another {', '.join(differing)} than the fleet's class"
    return None


def _differs(own: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Settings in which two classes differ; the ladder only says where to look."""
    keys = (set(own) | set(measured)) - {"ladder"}
    plain_own, plain = json.loads(as_json(own)), json.loads(as_json(measured))
    return sorted(key for key in keys if plain_own.get(key) != plain.get(key))


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(entry["model"]), str(entry["class"]), str(entry["measured"])


# -- schemas, times, JSON


@cache
def schema(name: str) -> dict[str, Any]:
    """A shipped JSON Schema: limits, latest-limits, manifest, quality or history."""
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))


def check(data: Any, name: str, where: str) -> None:
    """PublishError if ``data`` does not match the schema; names the place in it."""
    error = jsonschema.Draft202012Validator(schema(name)).iter_errors(data)
    first = next(iter(sorted(error, key=lambda found: list(map(str, found.path)))), None)
    if first is not None:
        place = "/".join(map(str, first.path)) or "top"
        raise PublishError(f"{where}: does not match {name}.schema.json at {place}: {first.message}")


def stamp(at: datetime) -> str:
    """UTC, ISO 8601, whole seconds."""
    return at.astimezone(UTC).replace(microsecond=0).isoformat()


def age_s(since: str, now: datetime) -> float | None:
    """Seconds since a time stamp; None if it is not one."""
    try:
        begun = datetime.fromisoformat(since)
    except (TypeError, ValueError):
        return None
    return max(0.0, (now - (begun if begun.tzinfo else begun.replace(tzinfo=UTC))).total_seconds())


def as_json(data: Any) -> bytes:
    """JSON that every parser takes: NaN and infinities become null."""
    return (json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
