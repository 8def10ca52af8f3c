"""The request table and the step table: columns, types and units.

The request table is the source of truth, one row a request. The step table is derived from it
(and from the step's :class:`Facts`) where we measured, and primary where it was imported. Times are
seconds of the server's clock; blank (NaN, null) means unknown and is never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from include.capacity.errors import DataError
from include.capacity.words import Outcome

REQUEST_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("service_class", pa.string()),
        ("workload", pa.string()),
        ("phase", pa.string()),
        ("concurrency", pa.int32()),
        ("repeat", pa.int32()),
        ("worker", pa.int32()),
        ("request_id", pa.string()),
        ("slot", pa.int32()),
        ("started_s", pa.float64()),  # written to the socket, since the step began
        ("send_lag_s", pa.float64()),  # from the wish to send to the write
        ("refill_s", pa.float64()),  # from the slot falling free (pause included) to the wish to send
        ("paused_s", pa.float64()),  # of which: deliberate pause after a fast failure
        ("ttft_s", pa.float64()),
        ("first_answer_s", pa.float64()),
        ("last_token_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("deadline_s", pa.float64()),
        ("asked_prompt_tokens", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("asked_max_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("usage_estimated", pa.bool_()),
        ("chunks", pa.int32()),
        ("first_chunk_tokens", pa.int32()),
        ("first_chunk_tokens_known", pa.bool_()),
        ("streamed", pa.bool_()),  # the answer came as an event stream
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
        ("http_status", pa.int32()),
        ("error", pa.string()),
        ("counted", pa.bool_()),  # started in the window and before the cut
    ]
)
"""Latencies (``ttft_s``, ``first_answer_s``, ``last_token_s``, ``e2e_s``) count from the write."""

REQUEST_COLUMNS = tuple(REQUEST_SCHEMA.names)

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = ("p50", "p95", "p99", "mean")

CLIENT_COLUMNS = (
    "client_lag_p99_s",  # event-loop lag
    "client_cpu_share",  # of one core, busiest worker
    "client_workers",
    "send_lag_p99_s",
    "refill_p50_s",
    "pause_share",  # of slot time spent in deliberate pauses
    "clock_scale",  # server seconds per wall second; 1 for anything real
)
SERVER_COLUMNS = (
    "server_running_mean",
    "server_running_peak",
    "server_waiting_mean",
    "server_waiting_peak",
    "server_kv_use_peak",  # 0..1
    "server_preemptions",  # counter difference over the window, likewise below
    "server_prefix_hit_share",
    "server_rejections",  # by a queue limit, before the engine
    "server_requests_finished",
    "server_ttft_mean_s",
    "server_e2e_mean_s",
    "foreign_running_peak",  # server's running + waiting above our own in flight
)

STEP_COLUMNS: tuple[str, ...] = (
    "run_id",
    "attempt",
    "source",
    "model",
    "series",
    "service_class",
    "workload",
    "phase",
    "concurrency",
    "repeat",
    "started_at",
    "warmup_s",
    "warmup_steady",  # the steadiness rule was met before its cap
    "stop_reason",
    "attempted",
    "completed",
    "n_effective",
    "deadline_s",
    *(outcome.value for outcome in Outcome if outcome is not Outcome.COMPLETED),
    "window_s",
    "inflight_mean",
    "inflight_peak",
    "request_per_s",  # completed requests
    "output_tok_per_s",  # of completed requests
    "total_tok_per_s",
    "raw_output_tok_per_s",
    "tokens_per_answer_mean",
    "prompt_tokens_mean",
    *(f"{latency}_{statistic}_s" for latency in LATENCIES for statistic in STATISTICS),
    "ttft_n",
    "tpot_n",
    "e2e_n",
    "objective_met",  # attempted requests completed with first token (and TPOT, if set) in time
    "state",
    "invalid",  # why the instrument itself calls the step invalid; blank if it does not
    "error",
    *CLIENT_COLUMNS,
    *SERVER_COLUMNS,
)

METRIC_SCHEMA = pa.schema(
    [
        ("at_s", pa.float64()),  # since the step began
        ("step", pa.string()),
        ("series", pa.string()),
        ("value", pa.float64()),
    ]
)


@dataclass(kw_only=True)
class LoadFacts:
    """What one loop of a step knows beyond its request rows. ``None`` is unknown."""

    service_class: str
    concurrency: int
    warmup_s: float | None = None
    warmup_steady: bool | None = None
    window_start_s: float | None = None
    """When the window opened, since the step began."""
    window_s: float | None = None
    """Length of the window: from its opening to the cut."""
    inflight_mean: float | None = None
    """Time-weighted over the window; of a prime step, which has none, over all of it."""
    inflight_peak: int | None = None
    stop_reason: str | None = None


@dataclass(kw_only=True)
class Facts:
    """What a step knows beyond its request rows; stored as ``steps/<key>.json``."""

    spec: dict[str, Any]
    """The :class:`~include.capacity.results.spec.StepSpec` as JSON."""
    run_id: str = ""
    attempt: int = 1
    started_at: str = ""
    """UTC, ISO 8601."""
    loads: list[LoadFacts] = field(default_factory=list)
    client: dict[str, float | None] = field(default_factory=dict)
    """Keys: CLIENT_COLUMNS."""
    server: dict[str, float | None] = field(default_factory=dict)
    """Keys: SERVER_COLUMNS; a series the server does not export is ``None``."""
    notes: list[str] = field(default_factory=list)
    invalid: str | None = None
    """Why the instrument itself calls the step invalid, and what to change."""
    error: str | None = None
    """What ended the step before it could finish (the server died, ...)."""
    server_crashed: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "loads": [LoadFacts(**load) for load in data["loads"]]})


def request_table(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Rows (dicts with any of REQUEST_COLUMNS; missing is null) as an Arrow table."""
    rows = list(rows)
    unknown = {key for row in rows[:1] for key in row} - set(REQUEST_COLUMNS)
    if unknown:
        raise DataError(f"request row has unknown columns {sorted(unknown)}")
    return pa.Table.from_pylist(rows, schema=REQUEST_SCHEMA)
