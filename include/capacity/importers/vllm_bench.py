"""``vllm bench serve`` results of all ages (JSON, JSON lines, appended lines) and ``vllm bench sweep`` runs.

Latencies in ms, duration in s. ``failed`` is missing in older files: failures are prompts without a
completion. A run in which everything failed prints 0.0 everywhere: no data. ``max_concurrent_requests``
counts whole seconds and exceeds the limit, so it is no measure of what was in flight. The rate is a number,
``"inf"`` or Infinity; keys may carry a stray colon. Of a sweep, run 0 meets a cold server, and keys beyond
the tool's own name the parameter set.
"""

from __future__ import annotations

import math
from typing import Any

from include.capacity.importers.document import (
    Document,
    Row,
    finished,
    lengths_name,
    level_workload,
    number,
    statistics,
)

NAME = "vllm bench serve / sweep"
EXPECTS = "JSON objects with num_prompts, completed, duration and mean_ttft_ms"

MARKS = {"num_prompts", "completed", "duration", "total_output_tokens"}
PARAMETERS_LEFT_OUT = {"run_number", "random_seed"}
PER_REQUEST = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times"}
OWN = {
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "best_of",
    "num_prompts",
    "framework",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "total_input_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    "run_number",
    "ramp_up_strategy",
    "ramp_up_start_rps",
    "ramp_up_end_rps",
    "spec_decode_acceptance_rate",
}
"""The tool's own keys; statistics end in ``_ms``."""


def recognises(document: Document) -> bool:
    """Whether every record has the tool's marks."""
    records = document.records
    return bool(records) and all(set(_clean(record)) >= MARKS for record in records)


def read(document: Document) -> list[Row]:
    """One row a record."""
    return [_row(_clean(record)) for record in document.records]


def _clean(record: dict[str, Any]) -> dict[str, Any]:
    return {key.strip().rstrip(":"): value for key, value in record.items()}


def _row(data: dict[str, Any]) -> Row:
    completed, prompts = number(data["completed"]), number(data["num_prompts"])
    rate = number(data.get("request_rate"))
    concurrency = number(data.get("max_concurrency"))
    each = completed or math.nan
    prompt, output = (
        number((number(data.get(f"total_{kind}_tokens")) or 0.0) / each) for kind in ("input", "output")
    )
    row: Row = {
        "model": data.get("model_id"),
        "series": _parameters(data),
        "concurrency": concurrency,
        # Without a limit all prompts are in flight at once if the rate is infinite, else it is open.
        "request_rate": None if concurrency is not None and rate == math.inf else rate,
        "started_at": _started(data.get("date")),
        "attempted": prompts,
        "completed": completed,
        "window_s": number(data["duration"]),
        "request_per_s": number(data.get("request_throughput")),
        "output_tok_per_s": number(data.get("output_throughput")),
        "total_tok_per_s": number(data.get("total_token_throughput")),
        "prompt_tokens_mean": prompt,
        "tokens_per_answer_mean": output,
        "itl_mean_s": number(data.get("mean_itl_ms"), 1e-3),
        "engine": data.get("framework") or data.get("backend") or data.get("endpoint_type"),
        "cold": 1.0 if number(data.get("run_number")) == 0 else None,
    }
    for latency, called in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        names = {"mean": f"mean_{called}_ms", "p50": f"median_{called}_ms"}
        names |= {p: f"{p}_{called}_ms" for p in ("p95", "p99")}
        row |= statistics(data, latency, names, 1e-3)
    row["workload"] = level_workload(row, lengths_name(prompt, output))
    return finished(row)


def _parameters(data: dict[str, Any]) -> str:
    """``max_num_seqs=4``: what a sweep, or the user's metadata, added to the record."""
    extra = {
        key: value
        for key, value in sorted(data.items())
        if key not in OWN | PER_REQUEST | PARAMETERS_LEFT_OUT
        and not key.endswith("_ms")
        and isinstance(value, str | int | float)
    }
    label = [str(data["label"])] if data.get("label") else []
    return " ".join([*label, *(f"{key}={value}" for key, value in extra.items())])


def _started(date: Any) -> str | None:
    """``20260818-041350`` (the client's local time, zone unknown) as ISO 8601 without a zone."""
    text = str(date or "")
    if len(text) != 15 or text[8] != "-" or not (text[:8] + text[9:]).isdigit():
        return None
    return f"{text[:4]}-{text[4:6]}-{text[6:8]}T{text[9:11]}:{text[11:13]}:{text[13:15]}"
