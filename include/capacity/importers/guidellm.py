"""guidellm's benchmark reports, the old layout (``run_stats``, ``args``) and the new one (``metadata``).

``request_latency`` is in **seconds**, every ``*_ms`` in ms. Successful, errored and incomplete requests are
kept apart; latencies here are of the successful. ``request_concurrency`` is the number really in flight, so
a rate sweep says what was reached. Incomplete requests (cut off at the end) are neither successes nor
failures: ``aborted``, in no rate. Percentiles of rates mean nothing and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from include.capacity.importers.document import Document, Row, finished, level_workload, number

NAME = "guidellm"
EXPECTS = "a JSON object with benchmarks, each with metrics.request_latency"


def recognises(document: Document) -> bool:
    """Whether it is an object with ``benchmarks`` that carry guidellm's metrics."""
    data = document.json
    benchmarks = data.get("benchmarks") if isinstance(data, dict) else None
    return isinstance(benchmarks, list) and all(
        isinstance(item, dict) and "request_latency" in (item.get("metrics") or {}) for item in benchmarks
    )


def read(document: Document) -> list[Row]:
    """One row a benchmark."""
    return [_row(item, document.json) for item in document.json["benchmarks"]]


def _row(data: dict[str, Any], report: Mapping[str, Any]) -> Row:
    metrics = data["metrics"]
    strategy = _first(data, "args.strategy", "config.strategy", "scheduler.strategy", "strategy") or {}
    totals = _first(
        data, "metrics.request_totals", "run_stats.requests_made", "scheduler_metrics.requests_made",
        "request_totals",
    ) or {}  # fmt: skip
    successful, errored = number(totals.get("successful")), number(totals.get("errored"))
    start = _first(data, "scheduler_metrics.measure_start_time", "run_stats.start_time", "start_time")
    end = _first(data, "scheduler_metrics.measure_end_time", "run_stats.end_time", "end_time")
    kind = str(strategy.get("type_") or strategy.get("kind") or "")
    streams = number(strategy.get("streams") or strategy.get("max_concurrency"))
    row: Row = {
        "model": _first(
            data, "worker.backend_model", "config.backend.model", "benchmarker.backend.model",
            "backend.model", "config.model",
        )
        or _first(report, "args.model", "args.backend_kwargs.model"),
        "series": kind if kind not in ("concurrent", "constant", "poisson", "async") else "",
        "concurrency": 1.0 if kind == "synchronous" else streams,
        "request_rate": number(strategy.get("rate")) if kind in ("constant", "poisson", "async") else None,
        "started_at": _iso(start),
        "attempted": None if successful is None or errored is None else successful + errored,
        "completed": successful,
        "aborted": number(totals.get("incomplete")),
        "window_s": None if start is None or end is None else float(end) - float(start),
        "inflight_mean": _statistic(metrics, "request_concurrency", "mean"),
        "request_per_s": _statistic(metrics, "requests_per_second", "mean"),
        "output_tok_per_s": _statistic(metrics, "output_tokens_per_second", "mean"),
        "total_tok_per_s": _statistic(metrics, "tokens_per_second", "mean"),
        "prompt_tokens_mean": _statistic(metrics, "prompt_token_count", "mean"),
        "tokens_per_answer_mean": _statistic(metrics, "output_token_count", "mean"),
        "itl_mean_s": _statistic(metrics, "inter_token_latency_ms", "mean", 1e-3),
    }  # fmt: skip
    for latency, name, scale in (
        ("ttft", "time_to_first_token_ms", 1e-3),
        ("tpot", "time_per_output_token_ms", 1e-3),
        ("e2e", "request_latency", 1.0),
    ):
        for statistic in ("mean", "p50", "p95", "p99"):
            row[f"{latency}_{statistic}_s"] = _statistic(metrics, name, statistic, scale)
    row["workload"] = level_workload(row, _lengths(data, report))
    return finished(row)


def _statistic(metrics: Mapping[str, Any], name: str, statistic: str, scale: float = 1.0) -> float | None:
    """A statistic of the successful requests; unknown where none succeeded."""
    found = (metrics.get(name) or {}).get("successful") or {}
    if found.get("count") == 0:
        return None
    value = found.get("mean") if statistic == "mean" else (found.get("percentiles") or {}).get(statistic)
    return number(value, scale)


def _first(data: Mapping[str, Any], *paths: str) -> Any:
    """The value at the first path that leads anywhere."""
    for path in paths:
        at: Any = data
        for key in path.split("."):
            at = at.get(key) if isinstance(at, Mapping) else None
        if at is not None:
            return at
    return None


def _lengths(data: Mapping[str, Any], report: Mapping[str, Any]) -> str | None:
    described = _first(data, "request_loader.data", "config.requests.data") or _first(report, "args.data")
    if isinstance(described, list) and len(described) == 1:
        described = described[0]
    return described if isinstance(described, str) and len(described) <= 120 else None


def _iso(stamp: Any) -> str | None:
    seconds = number(stamp)
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
