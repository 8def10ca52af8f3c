"""Small sweep directories with a little of everything, for what is published of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from include.capacity.config import load_fleet
from include.capacity.results.schema import METRIC_SCHEMA, Facts, request_table
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir

Entry = dict[str, Any]

CLASSES = {name: rule.model_dump(mode="json") for name, rule in load_fleet().classes.items()}


def limit_entry(model: str, name: str, limit: int | None, status: str = "proven", **more: Any) -> Entry:
    """An entry of limits.json as the limits stage writes it."""
    return {
        "model": model,
        "series": "",
        "class": name,
        "limit": limit,
        "status": status,
        "measured": "alone",
        "beside": {},
        "bound_by": "ttft" if limit else None,
        "server_bound_by": "slots",
        "bracket": [limit, limit + 1 if limit else 4],
        "first_failing": None,
        "operating_range": None,
        "confidence": 0.95,
        "deadline_s": 60.0,
        "completion_floor": 0.99,
        "objectives": {"ttft": {"at_most_s": 1.0, "share": 0.95}},
        "comparison_id": f"cmp-{model}-{name}",
        "stack_id": "st-1",
        "source": "measured",
        "reason": None if limit else "the proof was rejected: it drifted",
        "claim": f"With at most {limit} in flight.",
        "evidence": {"n": 600, "completed": 600, "completion_rate": 1.0, "repeats": 1} if limit else None,
        "knees": None,
        **more,
    }


def small_sweep(store: FolderStore, model: str, entries: list[Entry], **about: Any) -> SweepDir:
    """A sweep directory of two steps with three rows each; ``about`` overrides keys of sweep.json."""
    sweep = SweepDir(store, f"work/{len(store.keys())}")
    sweep.write_json(
        "sweep.json",
        {
            "schema": 1,
            "run_id": "r",
            "model": model,
            "served_name": f"org/{model}",
            "source": "measured",
            "simulated": True,
            "accelerator": {"name": "gpu-0", "kind": "H100", "count": 8},
            "stack": {"vllm": "0.32"},
            "stack_id": "st-1",
            "classes": CLASSES,
            "created_at": "2026-11-30T01:00:00+00:00",
            **about,
        },
    )
    for key in ("scout-interactive-c00004-r1", "prove-interactive-c00024-r1"):
        rows = [{"model": model, "request_id": f"{key}-{at}", "outcome": "completed"} for at in range(3)]
        seen = [{"at_s": 0.0, "step": key, "series": "running", "value": 4.0}]
        metrics = pa.Table.from_pylist(seen, schema=METRIC_SCHEMA)
        sweep.write_step(key, Facts(spec={}), request_table(rows), metrics)
    checked = {"schema": 1, "verdict": "ok", "findings": [], "steps": [], "not_checked": []}
    sweep.write("steps.csv", "model,concurrency\n")
    sweep.write_json("quality.json", checked)
    sweep.write_json("limits.json", {"schema": 1, "limits": entries, "saturation": [], "valid_until": None})
    sweep.write("report.html", f"<html>{model}</html>")
    sweep.write("report.md", f"# {model}")
    sweep.write("figures/interactive-latency.svg", "<svg/>")
    sweep.write("figures/interactive-latency.png", b"\x89PNG")
    return sweep
