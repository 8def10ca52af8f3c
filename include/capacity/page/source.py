"""Where the page reads: the fleet's publish target, with waits short enough for somebody who looks at a page.

Opened anew every minute, so that a changed fleet file or connection shows without a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from include.capacity.results.store import Store

CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 8
KEEP_S = 60.0


def fleet_store(clock: Callable[[], float] = time.monotonic) -> Callable[[], Store]:
    """A function that opens the fleet's store; ConfigError if the fleet file is wrong."""
    opened: list[tuple[float, Store]] = []

    def open_it() -> Store:
        if opened and clock() - opened[-1][0] < KEEP_S:
            return opened[-1][1]
        store = _open()
        opened[:] = [(clock(), store)]
        return store

    return open_it


def _open() -> Store:
    from include.capacity.config import load_fleet
    from include.capacity.flow.connection import s3_client
    from include.capacity.results.store import open_store

    publish = load_fleet().publish
    return open_store(
        publish.to,
        lambda: s3_client(
            publish.connection,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 1},
        ),
    )
