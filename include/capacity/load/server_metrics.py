"""The server's side: vLLM's ``/metrics``, read once a second beside the load.

A thread of its own polls and parses, so that neither disturbs the event loop. A series the server does not
export is None, never 0.

Counters are differenced over the window between values interpolated at its two ends. A counter that
falls (the server was restarted) is unknown.

**Foreign traffic** is what the server runs or keeps waiting above our own requests in flight. Our own
count moves while the server is asked, so the larger of before and after is taken, and an excess counts
only as far as it lasted three polls.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import numpy as np
import pyarrow as pa

from include.capacity.load.clock import Clock
from include.capacity.results.schema import METRIC_SCHEMA
from include.capacity.vllm_metrics import (
    E2E_COUNT,
    E2E_SUM,
    FINISHED,
    KV_USE,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    REJECTIONS,
    RUNNING,
    TTFT_COUNT,
    TTFT_SUM,
    WAITING,
    busy,
    parse,
)

LASTING_POLLS = 3
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Poll:
    """One reading: wall stamp, series, and our own requests in flight around it."""

    at: float
    series: dict[str, float]
    own: int


class MetricsPoller:
    """Polls in a thread from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        every_wall_s: float,
        own: Callable[[], int],
        api_key: str | None = None,
    ) -> None:
        """``own``: our requests in flight just now, in all loops."""
        self.polls: list[Poll] = []
        self.misses = 0
        """Readings that failed or held none of our series."""
        self._url = url
        self.clock = clock
        self._every = every_wall_s
        self._own = own
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=TIMEOUT_S, headers=headers, trust_env=False)
        self._wake = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def poll(self) -> Poll | None:
        """Read once; None where there is nothing to read."""
        before = self._own()
        at = self.clock.now()
        try:
            answer = self._client.get(self._url)
            series = parse(answer.text) if answer.status_code == 200 else {}
        except (httpx.HTTPError, httpx.InvalidURL):
            series = {}
        if not series:
            self.misses += 1
            return None
        found = Poll((at + self.clock.now()) / 2, series, max(before, self._own()))
        self.polls.append(found)
        return found

    def start(self) -> None:
        """Begin to poll."""
        self._thread = threading.Thread(target=self._run, name="server-metrics", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Poll now: the window opens or closes."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; blocks for at most one reading."""
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * TIMEOUT_S)
        self._client.close()

    def _run(self) -> None:
        while not self._over:
            begun = time.perf_counter()
            self.poll()
            self._wake.wait(max(0.01, self._every - (time.perf_counter() - begun)))
            self._wake.clear()

    # -- summaries

    def table(self, step: str) -> pa.Table:
        """All readings, one row per poll and series (METRIC_SCHEMA)."""
        rows = [
            {"at_s": self.clock.since_start_s(poll.at), "step": step, "series": name, "value": value}
            for poll in self.polls
            for name, value in poll.series.items()
        ]
        return pa.Table.from_pylist(rows, schema=METRIC_SCHEMA)

    def summary(self, start: float, end: float) -> dict[str, float | None]:
        """SERVER_COLUMNS over a span of wall stamps."""
        return summarize(sorted(self.polls, key=lambda poll: poll.at), start, end)


def summarize(polls: list[Poll], start: float, end: float) -> dict[str, float | None]:
    """SERVER_COLUMNS from the readings within ``[start, end]``; None where unknown."""
    inside = [poll for poll in polls if start <= poll.at <= end]
    queries, hits = rise(polls, PREFIX_QUERIES, start, end), rise(polls, PREFIX_HITS, start, end)
    return {
        "server_running_mean": _mean(inside, RUNNING),
        "server_running_peak": _peak(inside, RUNNING),
        "server_waiting_mean": _mean(inside, WAITING),
        "server_waiting_peak": _peak(inside, WAITING),
        "server_kv_use_peak": _peak(inside, KV_USE),
        "server_preemptions": rise(polls, PREEMPTIONS, start, end),
        "server_prefix_hit_share": _ratio(hits, queries),
        "server_rejections": rise(polls, REJECTIONS, start, end),
        "server_requests_finished": rise(polls, FINISHED, start, end),
        "server_ttft_mean_s": _ratio(rise(polls, TTFT_SUM, start, end), rise(polls, TTFT_COUNT, start, end)),
        "server_e2e_mean_s": _ratio(rise(polls, E2E_SUM, start, end), rise(polls, E2E_COUNT, start, end)),
        "foreign_running_peak": foreign_peak(inside),
    }


def rise(polls: list[Poll], series: str, start: float, end: float) -> float | None:
    """How much a counter rose within a span; None if it is not exported, fell, or was read only once."""
    at = np.array([poll.at for poll in polls if series in poll.series])
    values = np.array([poll.series[series] for poll in polls if series in poll.series])
    if len(at) < 2 or end <= start or at[0] > end or at[-1] < start:
        return None
    first = max(0, int(np.searchsorted(at, start, side="right")) - 1)
    last = min(len(at) - 1, int(np.searchsorted(at, end, side="left")))
    if last <= first or np.any(np.diff(values[first : last + 1]) < 0):
        return None
    return float(np.interp(end, at, values) - np.interp(start, at, values))


def foreign_peak(polls: list[Poll]) -> float | None:
    """Largest excess of the server's running + waiting over our own in flight that lasted three polls.

    None if the server does not tell; with fewer than three polls nothing can have lasted.
    """
    excess = [found - poll.own for poll in polls if (found := busy(poll.series)) is not None]
    if len(excess) < LASTING_POLLS:
        return None
    lasting = (min(excess[i : i + LASTING_POLLS]) for i in range(len(excess) - LASTING_POLLS + 1))
    return max(0.0, *itertools.chain(lasting, [0.0]))


def _values(polls: list[Poll], series: str) -> list[float]:
    return [poll.series[series] for poll in polls if series in poll.series]


def _mean(polls: list[Poll], series: str) -> float | None:
    values = _values(polls, series)
    return float(np.mean(values)) if values else None


def _peak(polls: list[Poll], series: str) -> float | None:
    values = _values(polls, series)
    return max(values) if values else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
