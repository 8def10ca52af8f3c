"""Step tables of other tools: each check beyond its border and at it, on made numbers."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from include.capacity.quality import check_tables

CLOSED: dict[str, Any] = {
    "source": "made.csv",
    "model": "m",
    "concurrency": 10,
    "attempted": 200,
    "completed": 200,
    "window_s": 40.0,
    "request_per_s": 5.0,
    "tokens_per_answer_mean": 100.0,
    "prompt_tokens_mean": 400.0,
    "output_tok_per_s": 500.0,
    "total_tok_per_s": 2500.0,
    "e2e_mean_s": 2.0,
    "e2e_p50_s": 1.9,
    "e2e_p99_s": 4.0,
    "engine": "vllm",
    "hardware": "H100",
}
"""Ten in flight: 5/s x 2 s. The drain may take away 4 s of 40 s."""


def closed(**changes: Any) -> dict[str, Any]:
    return {**CLOSED, **changes}


def plateau(
    *levels: int, rate: float = 30_000.0, p50_s: float = 4.0, growing: bool = False
) -> list[dict[str, Any]]:
    """Only a throughput and percentiles, flat (or latency growing with concurrency)."""
    blank = dict.fromkeys(
        ("attempted", "completed", "window_s", "request_per_s", "e2e_mean_s", "output_tok_per_s",
         "tokens_per_answer_mean", "prompt_tokens_mean")
    )  # fmt: skip
    rows = []
    for at, n in enumerate(levels):
        latency_s = p50_s * (n / levels[0] if growing else 1 + 0.01 * at)
        known = {"total_tok_per_s": rate - 10 * at, "e2e_p50_s": latency_s, "e2e_p99_s": 1.1 * latency_s}
        rows.append(closed(concurrency=n, **blank, **known))
    return rows


def tails(*levels: tuple[int, float]) -> list[dict[str, Any]]:
    """(concurrency, p99) at the same throughput; nothing else is known."""
    return [{**row, "concurrency": n, "e2e_p50_s": None, "e2e_p99_s": p99_s}
            for (n, p99_s), row in zip(levels, plateau(*range(1, len(levels) + 1)), strict=True)]  # fmt: skip


def medians(*steps: tuple[int, int, float]) -> list[dict[str, Any]]:
    """(concurrency, requests, median latency) of answers whose p99 is three times their median."""
    return [
        closed(concurrency=n, attempted=k, completed=k, request_per_s=n / s, output_tok_per_s=100 * n / s,
               total_tok_per_s=500 * n / s, window_s=k * s / n, e2e_mean_s=None, e2e_p50_s=s, e2e_p99_s=3 * s)
        for n, k, s in steps
    ]  # fmt: skip


def rates(served: list[float], latency_s: list[float], n: int = 1000) -> list[dict[str, Any]]:
    """An open loop at 2, 4, 8 ... requests a second."""
    rows = []
    for at, (x, s) in enumerate(zip(served, latency_s, strict=True)):
        asked = 2.0 * 2**at
        level = {"concurrency": None, "request_rate": asked, "workload": f"{asked:g} requests/s"}
        size = {"attempted": n, "completed": n, "window_s": n / x, "request_per_s": x}
        tokens = {"output_tok_per_s": 100 * x, "total_tok_per_s": 500 * x}
        rows.append(closed(**level, **size, **tokens, e2e_mean_s=s, e2e_p50_s=0.95 * s, e2e_p99_s=2 * s))
    return rows


def shapes(*tokens: float) -> list[dict[str, Any]]:
    """A curve whose answers have these lengths."""
    levels = (10, 20, 40)
    return [
        closed(
            concurrency=n, attempted=20 * n, completed=20 * n, request_per_s=n / 2,
            tokens_per_answer_mean=t, output_tok_per_s=t * n / 2, total_tok_per_s=(t + 400) * n / 2,
        )
        for n, t in zip(levels, tokens, strict=True)
    ]  # fmt: skip


def two_servers(completed: tuple[int, int], attempted: int = 2000) -> list[dict[str, Any]]:
    """Two engines at one rate."""
    row = rates([27.0], [20.0], attempted)[0]
    return [{**row, "series": name, "completed": n} for name, n in zip(("a", "b"), completed, strict=True)]


NONE: set[tuple[str, str]] = set()
REACHED = {("concurrency_reached", "reject")}

SCENES: dict[str, tuple[list[dict[str, Any]], list[set[tuple[str, str]]]]] = {
    # name: (steps, findings of each)
    "clean": ([closed()], [NONE]),
    "Little at the border": (
        [closed(request_per_s=4.25, output_tok_per_s=425, total_tok_per_s=2125)],
        [NONE],
    ),
    "Little beyond": ([closed(request_per_s=4.2, output_tok_per_s=420, total_tok_per_s=2100)], [REACHED]),
    "failures held their slots": (
        [
            closed(
                completed=150, request_per_s=3.75, output_tok_per_s=375, total_tok_per_s=1875, deadline_s=10.0
            )
        ],
        [NONE],
    ),
    "too much in flight": (
        [closed(request_per_s=5.8, output_tok_per_s=580, total_tok_per_s=2900)],
        [{("concurrency_exceeded", "flag")}],
    ),
    "enough requests": ([closed(attempted=30, completed=30, window_s=6.0)], [NONE]),
    "too few requests": (
        [closed(attempted=29, completed=29, window_s=5.8)],
        [{("enough_requests", "reject")}],
    ),
    "flat over flat": (plateau(500, 750, 1000), [REACHED] * 3),
    "flat, but one level after another": (plateau(500, 600), [NONE] * 2),
    "latency grows": (plateau(500, 750, 1000, growing=True), [NONE] * 3),
    # One request after another: alone, p99 is 2.8 times the mean; in a queue of many it is near the mean.
    "a serial server's tails": (tails((1, 2.8), (2, 4.2), (8, 10.5), (32, 36.0)), [NONE] * 4),
    "tails that do not grow": (tails((64, 9.0), (128, 9.1), (256, 9.2)), [REACHED] * 3),
    "tails of a handful of requests": (tails((1, 9.0), (2, 9.1), (4, 9.2)), [NONE] * 3),
    "an estimate beside the mean": (
        [
            closed(e2e_estimate_s=3.0),
            closed(
                concurrency=20,
                attempted=400,
                completed=400,
                request_per_s=10.0,
                output_tok_per_s=1000.0,
                total_tok_per_s=5000.0,
                e2e_estimate_s=2.0,
            ),
        ],
        [NONE] * 2,
    ),
    "medians within their scatter": (medians((1, 50, 2.0), (2, 50, 1.5)), [NONE] * 2),
    "medians beyond their scatter": (
        medians((1, 5000, 2.0), (2, 5000, 1.5)),
        [{("latency_falls", "flag")}, NONE],
    ),
    "the drain of short runs": (
        [{**row, "e2e_p99_s": 2.5 * row["e2e_p50_s"]} for row in plateau(500, 750)],
        [NONE] * 2,
    ),
    "arrivals set the rate": ([closed(request_rate=5.2)], [{("arrival_capped", "flag")}]),
    "arrivals do not": ([closed(request_rate=6.0)], [NONE]),
    "a replayed trace": (rates([3.8, 3.8, 3.7], [2.0, 2.1, 2.0]), [{("rate_without_effect", "reject")}] * 3),
    "a real rate sweep": (rates([2.0, 3.9, 7.0], [2.0, 2.2, 8.0]), [NONE] * 3),
    "overloaded from the first rate": (
        rates([1.0, 1.0, 1.0], [100.0, 250.0, 400.0]),
        [{("saturated_at_once", "flag")}, NONE, NONE],
    ),
    "a cap of the client": (
        rates([2.0, 4.0, 6.0, 6.0], [2.0, 2.2, 8.3, 8.5]),
        [NONE, NONE, {("client_capped", "flag")}, {("client_capped", "flag")}],
    ),
    "one level's answers end early": (shapes(100, 100, 49), [NONE, NONE, {("output_length", "reject")}]),
    "half as long": (shapes(100, 100, 50), [NONE] * 3),
    "asked for more": ([closed(asked_output_tokens=128)], [{("output_length", "flag")}]),
    "asked for as much": ([closed(asked_output_tokens=110)], [NONE]),
    "totals do not add up": ([closed(total_tok_per_s=2800.0)], [{("counts_add_up", "flag")}]),
    "totals nearly add up": ([closed(total_tok_per_s=2740.0)], [NONE]),
    "more completed than asked": ([closed(completed=201)], [{("counts_add_up", "reject")}]),
    "a tail": ([closed(e2e_p99_s=19.0, window_s=400.0, attempted=2000, completed=2000)], [NONE]),
    "most ended at once": (
        [closed(e2e_p99_s=19.1, window_s=400.0, attempted=2000, completed=2000)],
        [{("bimodal_latency", "flag")}],
    ),
    "median above the mean": ([closed(e2e_p50_s=2.41)], [{("bimodal_latency", "flag")}]),
    "nothing completed": (
        [closed(completed=0, **dict.fromkeys(k for k in CLOSED if k.endswith("_s") and k != "window_s"))],
        [{("no_data", "reject")}],
    ),
    "zeros": ([closed(e2e_p50_s=0.0)], [{("zero_is_no_data", "reject")}]),
    "survivors": ([closed(runs_made=3, runs_kept=1)], [{("survivors_only", "reject")}]),
    "all runs": ([closed(runs_made=3, runs_kept=3)], [NONE]),
    "unlike servers, one count": (two_servers((1015, 1015)), [{("client_bound", "reject")}] * 2),
    "unlike counts": (two_servers((1015, 1016)), [NONE] * 2),
    "no level": ([closed(concurrency=None)], [{("step_level", "reject")}]),
    "level 0": ([closed(concurrency=0)], [{("step_level", "reject")}]),
    "pinned at a usual time-out": (
        [closed(completed=190, e2e_p99_s=9.9)],
        [{("p99_at_deadline", "flag")}],
    ),
    "cold": ([closed(cold=1.0)], [{("warm_up", "flag")}]),
    "quoted twice": ([closed(), closed(repeat=2)], [NONE, {("duplicate_step", "reject")}]),
}


@pytest.fixture(scope="module")
def judged() -> dict[str, list[set[tuple[str, str]]]]:
    """Findings of every scene's steps; each scene is a source of its own and has its own numbers."""
    rows = []
    for at, (name, (steps, _)) in enumerate(SCENES.items()):
        rows += [{"series": "", **step, "source": name, "prompt_tokens_mean": step.get("prompt_tokens_mean")}
                 for step in steps]  # fmt: skip
        for row in rows[-len(steps) :]:
            if row.get("e2e_mean_s"):
                row["e2e_mean_s"] *= 1 + at * 1e-9
    for at, row in enumerate(rows):
        if row["source"] != "quoted twice" and row.get("e2e_p50_s"):
            row["e2e_p50_s"] += at * 1e-9
    result = check_tables(pd.DataFrame(rows), None, {"model": "m", "source": "imported", "run_id": "x"})
    found: dict[str, list[set[tuple[str, str]]]] = {name: [] for name in SCENES}
    for step in result["steps"]:
        found[step["source"]].append({(f["check"], f["severity"]) for f in step["findings"]})
        assert all(finding["reason"].endswith(".") for finding in step["findings"])
    return found


@pytest.mark.parametrize("name", SCENES)
def test_each_step_has_the_findings_it_deserves_and_no_other(name, judged):
    assert judged[name] == SCENES[name][1]


def test_only_a_median_bounds_nothing():
    steps = pd.DataFrame(
        [{"source": "a", "model": "m", "concurrency": 64, "e2e_p50_s": 1.0, "request_per_s": 2.0}]
    )
    result = check_tables(steps, None, {"model": "m", "source": "imported"})
    assert result["verdict"] == "ok"
    reasons = {entry["check"]: entry["reason"] for entry in result["not_checked"]}
    assert "little_margin" in reasons["concurrency_reached"]


def test_a_blank_is_never_zero():
    steps = pd.DataFrame([{"source": "a", "model": "m", "concurrency": 4, "e2e_p99_s": math.nan}])
    assert check_tables(steps, None, {"model": "m", "source": "imported"})["steps"][0]["findings"] == []
