"""Is anybody else using a server that is not ours? Asked of its metrics before it is loaded.

Quiet means: for ``quiet_s`` on end every reading says that nothing runs and nothing waits. One idle
reading is not enough, for light traffic has idle moments. A server that exports no such metrics cannot
be asked; then that is said, and nothing claimed. One that has told and then does not answer is not idle.
"""

from __future__ import annotations

import time

import httpx

from include.capacity.errors import ServerError
from include.capacity.vllm_metrics import busy, parse

POLL_S = 0.25
ANSWER_WITHIN_S = 10.0


def wait_until_quiet(metrics_url: str, api_key: str | None, quiet_s: float, patience_s: float) -> bool | None:
    """True once the server has been idle for ``quiet_s``; None if it does not tell (wall seconds).

    ServerError if it has not been idle for so long within ``patience_s``.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    began = idle_since = time.monotonic()
    most, has_told = 0.0, False
    with httpx.Client(headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False) as client:
        while True:
            in_use = _in_use(client, metrics_url)
            now = time.monotonic()
            if in_use is None and not has_told:
                return None
            has_told = True
            if in_use != 0:
                most, idle_since = max(most, in_use or 0.0), now
            if now - idle_since >= quiet_s:
                return True
            if now - began >= max(patience_s, quiet_s):
                raise ServerError(
                    f"in use by others: up to {most:.0f} requests running or waiting that are not ours, and "
                    f"never idle for {quiet_s:g} s within {now - began:.0f} s ({metrics_url}); not loaded"
                )
            time.sleep(min(POLL_S, quiet_s))


def _in_use(client: httpx.Client, url: str) -> float | None:
    """Requests running or waiting; None if the server does not tell."""
    try:
        answer = client.get(url)
    except httpx.HTTPError:
        return None
    return busy(parse(answer.text)) if answer.status_code == 200 else None
