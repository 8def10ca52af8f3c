"""aiperf's exports: JSON in which every metric states its unit, and CSV in three tables.

The CSV's tables (statistics, single values, accelerators) are parted by blank lines and name units in
brackets; it does not say the concurrency, which the file's or folder's name may (``c16``).
``inter_chunk_latency`` is not ``inter_token_latency`` and is not read. Warm-up requests are not in the
numbers.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from include.capacity.errors import DataError
from include.capacity.importers.document import Document, Row, finished, lengths_name, number

NAME = "aiperf"
EXPECTS = "JSON with request_latency and its unit, or a CSV that begins with Metric,avg,min,max"

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
LATENCIES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}


def recognises(document: Document) -> bool:
    """By the unit of ``request_latency``, or the head of the CSV."""
    data = document.json
    if isinstance(data, dict):
        return isinstance(data.get("request_latency"), dict) and "unit" in data["request_latency"]
    return data is None and document.text.lstrip().startswith("Metric,avg,min,max")


def read(document: Document) -> list[Row]:
    """One row a file."""
    if isinstance(document.json, dict):
        data = document.json
        row = _row(data, document)
        phases = [
            p
            for p in (data.get("input_config") or {}).get("phases") or []
            if not p.get("exclude_from_results")
        ]
        phase = phases[-1] if phases else (data.get("input_config") or {}).get("loadgen") or {}
        models = ((data.get("input_config") or {}).get("models") or {}).get("items") or []
        row["model"] = models[0].get("name") if models else _models(data)
        row["concurrency"] = number(phase.get("concurrency")) or row["concurrency"]
        row["request_rate"] = number(phase.get("request_rate") or phase.get("rate"))
        row["started_at"] = data.get("start_time")
        errors = sum(number(item.get("count")) or 0.0 for item in data.get("error_summary") or [])
        asked = number(phase.get("requests") or phase.get("request_count"))
        done = row["completed"]
        if done is not None:
            row["attempted"] = max(asked or 0.0, done + errors)
        return [finished(row)]
    return [finished(_row(_csv_metrics(document), document))]


def _row(metrics: dict[str, Any], document: Document) -> Row:
    def value(name: str, statistic: str = "avg") -> float | None:
        metric = metrics.get(name)
        return number(metric.get(statistic)) if isinstance(metric, dict) else None

    prompt, output = value("input_sequence_length"), value("output_sequence_length")
    row: Row = {
        "series": "",
        "workload": lengths_name(prompt, output),
        "concurrency": _concurrency_in(document),
        "completed": value("request_count"),
        "attempted": value("request_count"),
        "window_s": _seconds(metrics, "benchmark_duration", "avg"),
        "request_per_s": value("request_throughput"),
        "output_tok_per_s": value("output_token_throughput"),
        "total_tok_per_s": value("total_token_throughput"),
        "prompt_tokens_mean": prompt,
        "tokens_per_answer_mean": output,
        "itl_mean_s": _seconds(metrics, "inter_token_latency", "avg"),
    }
    for latency, name in LATENCIES.items():
        for statistic, called in (("mean", "avg"), ("p50", "p50"), ("p95", "p95"), ("p99", "p99")):
            row[f"{latency}_{statistic}_s"] = _seconds(metrics, name, called)
    return row


def _seconds(metrics: dict[str, Any], name: str, statistic: str) -> float | None:
    """A metric in seconds by its own unit; DataError if the unit is unknown."""
    metric = metrics.get(name)
    if not isinstance(metric, dict):
        return None
    scale = SECONDS.get(str(metric.get("unit")))
    if scale is None:
        raise DataError(f"aiperf: {name}: unit {metric.get('unit')!r}, expected one of {sorted(SECONDS)}")
    return number(metric.get(statistic), scale)


def _csv_metrics(document: Document) -> dict[str, Any]:
    """The CSV's first two tables in the JSON's form."""
    metrics: dict[str, Any] = {}
    head: list[str] = []
    for cells in csv.reader(io.StringIO(document.text)):
        if not cells:
            head = []
        elif not head:
            head = ["avg" if name == "Value" else name for name in cells]
        elif head[0] == "Metric" and (named := re.fullmatch(r"(.*?)(?: \(([^()]*)\))?", cells[0])):
            name = re.sub(r"[^a-z0-9]+", "_", named[1].lower()).strip("_")
            metrics[name] = {"unit": named[2], **dict(zip(head[1:], cells[1:], strict=False))}
    return metrics


def _concurrency_in(document: Document) -> float | None:
    """``c16`` or ``concurrency16`` in the file's name or its folder's."""
    for text in (document.path.stem, document.path.parent.name):
        if found := re.search(r"(?:^|[^a-z])(?:c|conc|concurrency)[-_=]?(\d+)(?![a-z0-9])", text.lower()):
            return float(found[1])
    return None


def _models(data: dict[str, Any]) -> Any:
    names = ((data.get("input_config") or {}).get("endpoint") or {}).get("model_names") or []
    return names[0] if names else None
