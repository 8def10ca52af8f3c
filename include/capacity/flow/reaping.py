"""What the task of ``capacity_reaper`` does, without Airflow."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from include.capacity.config import Strict, validate
from include.capacity.errors import ServerError
from include.capacity.servers import reap as servers
from include.capacity.servers.base import RunIsOver

log = logging.getLogger(__name__)


class ReapParams(Strict):
    """What a person may ask of one run."""

    dry_run: bool = False


def reap(params: Mapping[str, Any], is_over: RunIsOver) -> dict[str, int]:
    """Clear away what belongs to runs that are over; returns counts.

    ConfigError for unknown parameters; ServerError at the end if something could not be asked or stopped.
    """
    asked = validate(ReapParams, dict(params), "params")
    found = servers.reap(is_over, dry_run=asked.dry_run)
    for line in servers.lines(found.to_json(), dry_run=asked.dry_run):
        log.info("%s", line)
    if found.failed:
        raise ServerError("; ".join(found.failed))
    return {
        "servers": len(found.servers),
        "stopped": len(found.stopped),
        "leases": len(found.leases),
        "broken": sum(item.done == "broken" for item in found.leases),
    }
