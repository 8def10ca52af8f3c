"""The server's side: vLLM's ``/metrics``, read once a second beside the load.

A thread of its own polls and parses, so that neither disturbs the event loop; only lines of series we
use reach the parser. Samples are summed over ``engine`` (and model) labels, except use of the KV cache,
of which the fullest engine counts. A series the server does not export is None, never 0.

Counters are differenced over the window between values interpolated at its two ends. A counter that
falls (the server was restarted) is unknown.

**Foreign traffic** is what the server runs or keeps waiting above our own requests in flight. Our own
count moves while the server is asked, so the larger of before and after is taken, and an excess counts
only as far as it lasted three polls.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import numpy as np
import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from include.capacity.load.clock import Clock
from include.capacity.results.schema import METRIC_SCHEMA

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
REJECTIONS = "vllm:admission_rejections_total"
FINISHED = "vllm:request_success_total"
TTFT_SUM = "vllm:time_to_first_token_seconds_sum"
TTFT_COUNT = "vllm:time_to_first_token_seconds_count"
E2E_SUM = "vllm:e2e_request_latency_seconds_sum"
E2E_COUNT = "vllm:e2e_request_latency_seconds_count"
BY_STATUS = "http_requests_total"
BEHIND = "sim:behind_seconds"

OLD_NAMES = {
    "vllm:gpu_cache_usage_perc": KV_USE,
    "vllm:gpu_prefix_cache_queries_total": PREFIX_QUERIES,
    "vllm:gpu_prefix_cache_hits_total": PREFIX_HITS,
}
"""Names of older vLLM versions -> today's."""

KEPT = frozenset(
    {RUNNING, WAITING, KV_USE, PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS, FINISHED, TTFT_SUM, TTFT_COUNT}
    | {E2E_SUM, E2E_COUNT, REJECTIONS, BY_STATUS}
    | {"vllm:prompt_tokens_total", "vllm:generation_tokens_total"}
)
SPLIT = {FINISHED: "finished_reason", REJECTIONS: "reason", BY_STATUS: "status"}
"""Series that are also kept apart by a label, as ``name{value}``."""
FULLEST = frozenset({KV_USE})
"""Series of which the largest label set counts, instead of the sum."""

_WANTED = re.compile(
    r"^(?:"
    + "|".join(
        re.escape(name) for name in sorted(KEPT | set(OLD_NAMES) | {n.removesuffix("_total") for n in KEPT})
    )
    + r"|sim:[a-z_]+)(?=[\s{])"
)

LASTING_POLLS = 3
TIMEOUT_S = 5.0


def parse(text: str) -> dict[str, float]:
    """The series we use, by today's names; absent where the server does not export them.

    What is split by a label also comes apart, ``request_success_total`` by reason (as
    ``vllm:request_success_total{length}``), ``admission_rejections_total`` likewise,
    ``http_requests_total`` by status. Text that is no Prometheus exposition gives ``{}``.
    """
    lines = [line for line in text.splitlines() if _WANTED.match(line)]
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = OLD_NAMES.get(sample.name, sample.name)
                if name in FULLEST:
                    found[name] = max(found.get(name, 0.0), sample.value)
                    continue
                found[name] = found.get(name, 0.0) + sample.value
                label = sample.labels.get(SPLIT.get(name, ""))
                if label:
                    found[f"{name}{{{label}}}"] = found.get(f"{name}{{{label}}}", 0.0) + sample.value
    except ValueError:
        return {}
    return found


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
    excess = [
        poll.series[RUNNING] + poll.series[WAITING] - poll.own
        for poll in polls
        if RUNNING in poll.series and WAITING in poll.series
    ]
    if len(excess) < LASTING_POLLS:
        return None
    lasting = (min(excess[i : i + LASTING_POLLS]) for i in range(len(excess) - LASTING_POLLS + 1))
    return max(0.0, *itertools.chain(lasting, [0.0]))


def busy(series: dict[str, float]) -> float | None:
    """Requests the server runs or keeps waiting; None if it does not tell."""
    if RUNNING not in series or WAITING not in series:
        return None
    return series[RUNNING] + series[WAITING]


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
