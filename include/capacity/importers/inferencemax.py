"""InferenceMAX's aggregated results: seconds without a suffix, throughput per accelerator.

``*_per_gpu`` times the tensor parallel size gives the server's throughput. How many requests were made is not
in the file. A finished run may be an empty list: no result.
"""

from __future__ import annotations

from typing import Any

from include.capacity.importers.document import Document, Row, finished, number, statistics

NAME = "InferenceMAX"
EXPECTS = "a JSON list of objects with conc, tp, tput_per_gpu and mean_ttft"

MARKS = {"conc", "tput_per_gpu", "mean_ttft"}


def recognises(document: Document) -> bool:
    """Whether every record has the tool's marks (an empty list is its way to say nothing)."""
    return document.json == [] or (
        bool(document.records) and all(set(record) >= MARKS for record in document.records)
    )


def read(document: Document) -> list[Row]:
    """One row a record."""
    return [_row(record) for record in document.records]


def _row(data: dict[str, Any]) -> Row:
    accelerators = number(data.get("num_gpus")) or number(data.get("tp")) or 1.0
    hardware = str(data.get("hw") or "unknown")
    shape = [f"{name}{data[name]}" for name in ("tp", "ep") if data.get(name) is not None]
    shape += ["dp-attention"] if str(data.get("dp_attention")).lower() == "true" else []
    row: Row = {
        "model": data.get("model") or data.get("infmax_model_prefix"),
        "series": " ".join(
            [hardware, str(data.get("precision") or ""), *shape, str(data.get("image") or "")]
        ),
        "workload": f"in{data.get('isl')} out{data.get('osl')}",
        "concurrency": number(data["conc"]),
        "output_tok_per_s": number(data.get("output_tput_per_gpu"), accelerators),
        "total_tok_per_s": number(data["tput_per_gpu"], accelerators),
        "itl_mean_s": number(data.get("mean_itl")),
        "hardware": f"{accelerators:g}x {hardware}",
        "engine": data.get("framework"),
    }
    for latency, called in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        names = {"mean": f"mean_{called}", "p50": f"median_{called}"}
        names |= {p: f"{p}_{called}" for p in ("p95", "p99")}
        row |= statistics(data, latency, names, 1.0)
    return finished(row)
