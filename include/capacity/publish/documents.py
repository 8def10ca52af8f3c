"""The documents that are published: their JSON, their time stamps, their shipped schemas."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from include.capacity.errors import PublishError
from include.capacity.results.plain import finite

SCHEMA = 1
SCHEMAS = Path(__file__).parent / "schemas"


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


def moment(stamp: Any) -> datetime | None:
    """A time stamp as a time; None if it is not one."""
    try:
        found = datetime.fromisoformat(str(stamp))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def age_s(since: str, now: datetime) -> float | None:
    """Seconds since a time stamp; None if it is not one."""
    begun = moment(since)
    return None if begun is None else max(0.0, (now - begun).total_seconds())


def as_json(data: Any) -> bytes:
    """JSON that every parser takes: NaN and infinities become null."""
    return (json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
