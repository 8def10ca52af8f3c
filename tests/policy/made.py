"""Sweeps and limits to export, small."""

from __future__ import annotations

from typing import Any

from include.capacity.config import load_fleet

FLEET = load_fleet()
CLASSES = {name: rule.model_dump(mode="json") for name, rule in FLEET.models["steady"].classes.items()}


def about(**more: Any) -> dict[str, Any]:
    """sweep.json of the demo's ``steady``."""
    return {
        "model": "steady",
        "served_name": "sim/steady-8b",
        "run_id": "r1",
        "source": "measured",
        "simulated": True,
        "stack": {"vllm_version": "0.32.0"},
        "classes": CLASSES,
        **more,
    }


def entry(name: str, limit: int | None, **more: Any) -> dict[str, Any]:
    """An entry of limits.json."""
    return {
        "class": name,
        "limit": limit,
        "status": "proven" if limit else "insufficient_evidence",
        "measured": "alone",
        "beside": {},
        "deadline_s": CLASSES.get(name, CLASSES["interactive"])["deadline_s"],
        "source": "measured",
        "reason": None if limit else "no step of proof size passed",
        "claim": f"With at most {limit} in flight.",
        "evidence": {"concurrency": limit, "request_per_s": 5.5, "steps": [f"prove-{name}"]}
        if limit
        else None,
        **more,
    }


def pair(interactive: int, batch: int, **more: Any) -> list[dict[str, Any]]:
    """The two entries of a pair proven together."""
    return [
        entry("interactive", interactive, measured="shared", beside={"batch": batch}, **more),
        entry("batch", batch, measured="shared", beside={"interactive": interactive}, **more),
    ]


def limits(*entries: dict[str, Any]) -> dict[str, Any]:
    """limits.json."""
    return {"limits": list(entries), "valid_until": "2026-12-03T05:00:00+00:00"}
