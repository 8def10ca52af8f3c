"""A tidy CSV: one row a step, column names that carry units.

Needed are ``concurrency`` or ``request_rate_target``, and at least one throughput or latency. Latencies are
``{ttft,tpot,itl,e2e}_{mean,p50,p95,p99}_{ms,s}``; throughputs ``req_per_s``, ``output_tok_per_s``,
``total_tok_per_s`` (or ``..._mean`` with a ``..._ci95`` over repeats). Blank is unknown. ``requests`` were
to be made, ``completed`` of them did. ``repeat`` may say "1 valid of 3", ``note`` may state
``request_timeout=30s`` or ``nominal output 128``. Columns of other names are left alone.
"""

from __future__ import annotations

import io
import re
from typing import Any

import pandas as pd

from include.capacity.importers.document import Document, Row, finished, level_workload, number
from include.capacity.results.schema import LATENCIES, STATISTICS

NAME = "tidy CSV"
EXPECTS = (
    "a header with concurrency or request_rate_target and columns such as req_per_s, total_tok_per_s, "
    "ttft_p50_ms, "
    "e2e_p99_s"
)

LEVELS = ("concurrency", "request_rate_target", "request_rate")
MEASURED = re.compile(r"((ttft|tpot|itl|e2e)_(mean|p50|p95|p99)_m?s|.*(req|request|tok)_per_s(_mean)?)")


def recognises(document: Document) -> bool:
    """Whether the first line names a level and something measured at it."""
    head = [name.strip() for name in document.text.partition("\n")[0].split(",")]
    return any(name in LEVELS for name in head) and any(MEASURED.fullmatch(name) for name in head)


def read(document: Document) -> list[Row]:
    """One row a line."""
    table = pd.read_csv(io.StringIO(document.text), dtype=str, keep_default_na=False, skipinitialspace=True)
    return [_row({str(k).strip(): v.strip() for k, v in line.items()}) for line in table.to_dict("records")]


def _row(line: dict[str, str]) -> Row:
    def known(*names: str) -> float | None:
        return next((found for name in names if (found := number(line.get(name) or None)) is not None), None)

    note = line.get("note") or ""
    completed, success = known("completed"), known("success_pct")
    attempted = known("requests", "attempted")
    if completed is None and success is not None and attempted is not None:
        completed = round(attempted * success / 100)
    row: Row = {
        "model": line.get("model") or None,
        "series": line.get("series") or "",
        "concurrency": known("concurrency"),
        "request_rate": known("request_rate_target", "request_rate"),
        "attempted": attempted,
        "completed": completed,
        "failed": known("failed"),
        "window_s": known("duration_s", "window_s"),
        "deadline_s": known("deadline_s") or _in_note(r"timeout=(\d+(?:\.\d+)?) ?s\b", note),
        "inflight_peak": known("peak_concurrent_reported", "inflight_peak"),
        "inflight_mean": known("inflight_mean"),
        "request_per_s": known("req_per_s", "request_per_s", "req_per_s_mean"),
        "output_tok_per_s": known("output_tok_per_s", "output_tok_per_s_mean"),
        "total_tok_per_s": known("total_tok_per_s", "total_tok_per_s_mean"),
        "tokens_per_s_ci95": known("total_tok_per_s_ci95"),
        "prompt_tokens_mean": known("input_tokens", "prompt_tokens_mean"),
        "tokens_per_answer_mean": known("output_tokens", "tokens_per_answer_mean"),
        "asked_output_tokens": known("asked_output_tokens") or _in_note(r"nominal output (\d+)", note),
        "hardware": line.get("hardware") or None,
        "engine": line.get("engine") or None,
        "note": note or None,
        **_runs(line.get("repeat") or ""),
    }
    for latency in (*LATENCIES, "itl"):
        for statistic in STATISTICS if latency != "itl" else ("mean",):
            ms = known(f"{latency}_{statistic}_ms")
            row[f"{latency}_{statistic}_s"] = (
                ms / 1e3 if ms is not None else known(f"{latency}_{statistic}_s")
            )
    if row["tokens_per_answer_mean"] is None and row["request_per_s"] and row["output_tok_per_s"]:
        row["tokens_per_answer_mean"] = row["output_tok_per_s"] / row["request_per_s"]
    row["workload"] = level_workload(row)
    return finished(row)


def _in_note(pattern: str, note: str) -> float | None:
    found = re.search(pattern, note)
    return float(found[1]) if found else None


def _runs(repeat: str) -> dict[str, Any]:
    """``1 valid of 3``: how many of the runs made entered the row."""
    found = re.search(r"(\d+)\s+(?:valid |good |of which )?of\s+(\d+)", repeat)
    return {"runs_kept": float(found[1]), "runs_made": float(found[2])} if found else {}
