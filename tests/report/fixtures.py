"""Made-up sweeps that look like the demo's: ``steady`` queues without bound, ``sprinter`` sheds.

A small discrete-event model of a continuous-batching server (slots, a queue with or without a bound,
tokens that come slower the more requests run) produces request rows; the step table is derived from
them, and the limits computed, by the product's own code; the planner decides what is measured.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from include.capacity.config import load_fleet
from include.capacity.limits.compute import compute_limits
from include.capacity.limits.evidence import Evidence, evidence_of
from include.capacity.limits.planner import next_step, problem_of
from include.capacity.results.schema import METRIC_SCHEMA, Facts, LoadFacts, request_table
from include.capacity.results.spec import StepSpec
from include.capacity.results.steps import derive_steps
from include.capacity.results.store import Store
from include.capacity.results.sweepdir import SweepDir


@dataclass(frozen=True)
class Machine:
    """A server: ``slots`` run at once, ``queue`` wait (None: any number), the rest get 503.

    When all slots are busy, ``drops`` of the answers break off in the middle.
    """

    slots: int
    queue: int | None
    token_s: float
    token_s_per_running: float
    prefill_s_per_1k: float
    drops: float = 0.0


STEADY = Machine(slots=24, queue=None, token_s=0.012, token_s_per_running=0.0003, prefill_s_per_1k=0.10)
SPRINTER = Machine(
    slots=12, queue=4, token_s=0.006, token_s_per_running=0.0002, prefill_s_per_1k=0.05, drops=0.04
)
WARMUP_S = 20.0
MIN_WINDOW_S = 30.0
LADDERS = {"interactive": [1, 4, 8, 16, 32, 64], "batch": [1, 4, 8, 16, 32, 64, 128]}


def run_closed_loop(machine: Machine, rule: Any, concurrency: int, requests: int, seed: int) -> list[dict]:
    """Request rows (in order of start) of one closed loop with ``concurrency`` slots of our own."""
    rng = random.Random(seed)
    workload = rule.workload
    clients = [(rng.uniform(0, 2.0), slot) for slot in range(concurrency)]
    heapq.heapify(clients)
    running: list[float] = []  # times at which running requests end
    rows: list[dict] = []
    counted = 0
    while counted < requests or rows[-1]["started_s"] < WARMUP_S + MIN_WINDOW_S:
        now, slot = heapq.heappop(clients)
        while running and running[0] <= now:
            heapq.heappop(running)
        counted += now >= WARMUP_S
        prompt = _length(rng, workload.prompt_tokens)
        output = _length(rng, workload.output_tokens)
        row = {
            "service_class": "",
            "request_id": f"{seed}-{len(rows)}",
            "slot": slot,
            "started_s": now,
            "send_lag_s": 0.0002,
            "deadline_s": rule.deadline_s,
            "asked_prompt_tokens": prompt,
            "asked_max_tokens": output,
            "worker": 0,
            "counted": now >= WARMUP_S,
            "usage_estimated": False,
        }
        if machine.queue is not None and len(running) >= machine.slots + machine.queue:
            rows.append(
                {**row, "e2e_s": 0.003, "outcome": "rejected", "http_status": 503, "error": "queue full"}
            )
            heapq.heappush(clients, (now + 0.003 + rng.uniform(0.5, 1.5), slot))
            continue
        free_at = now if len(running) < machine.slots else sorted(running)[len(running) - machine.slots]
        busy = min(len(running) + 1, machine.slots)
        token_s = (machine.token_s + machine.token_s_per_running * busy) * rng.lognormvariate(0, 0.03)
        ttft = free_at - now + prompt / 1000 * machine.prefill_s_per_1k * busy**0.5 + token_s
        e2e = ttft + token_s * (output - 1)
        heapq.heappush(running, now + e2e)
        if busy == machine.slots and rng.random() < machine.drops:
            rows.append(
                {**row, "e2e_s": e2e, "outcome": "connection_lost", "output_tokens": int(output * 0.6)}
            )
        elif e2e > rule.deadline_s:
            late = "first_token_timeout" if ttft > rule.deadline_s else "deadline_exceeded"
            rows.append({**row, "e2e_s": rule.deadline_s, "outcome": late, "output_tokens": output // 2})
        else:
            rows.append(
                {
                    **row,
                    "ttft_s": ttft if workload.stream else None,
                    "first_answer_s": ttft if workload.stream else None,
                    "last_token_s": e2e,
                    "e2e_s": e2e,
                    "prompt_tokens": prompt,
                    "output_tokens": output,
                    "chunks": output,
                    "first_chunk_tokens": 1,
                    "first_chunk_tokens_known": True,
                    "streamed": workload.stream,
                    "outcome": "completed",
                    "finish_reason": "length",
                    "http_status": 200,
                }
            )
        heapq.heappush(clients, (now + min(e2e, rule.deadline_s) + 0.0005, slot))
    return sorted(rows, key=lambda row: row["started_s"])


def make_sweep(
    store: Store,
    prefix: str,
    model: str = "steady",
    machine: Machine = STEADY,
    *,
    simulated: bool = True,
    run_id: str = "nightly-2026-11-30",
    ladders: dict[str, list[int]] | None = None,
    mode: str = "find",
    repeats: int = 1,
    changes: dict[str, Any] | None = None,
) -> SweepDir:
    """Write a whole sweep, planned by the product's planner, and return it.

    ``changes`` overrides keys of ``sweep.json``.
    """
    fleet = load_fleet()
    classes = {
        name: fleet.classes[name].model_copy(update={"ladder": ladder})
        for name, ladder in (ladders or LADDERS).items()
    }
    sweep = SweepDir(store, prefix)
    about = {
        "schema": 1,
        "run_id": run_id,
        "attempt": 1,
        "model": model,
        "served_name": f"sim/{model}-8b",
        "series": "",
        "source": "measured",
        "simulated": simulated,
        "clock_scale": 20.0 if simulated else 1.0,
        "accelerator": {"name": "sim-0", "kind": "simulated", "count": 1},
        "stack": {"engine": "simulator", "version": "0.1", "profile": model, "max_num_seqs": machine.slots},
        "stack_id": f"st-{model}",
        "comparison_ids": {name: f"cmp-{model}-{name}" for name in classes},
        "classes": {name: rule.model_dump(mode="json") for name, rule in classes.items()},
        "bounds": fleet.steps.model_dump(mode="json"),
        "mode": mode,
        "repeats": repeats,
        "shared": False,
        "created_at": "2026-11-30T01:00:00+00:00",
        "versions": {"python": "3.11.9", "httpx": "0.28.1"},
        "seed": 7,
        **(changes or {}),
    }
    sweep.write_json("sweep.json", about)
    problem = problem_of(about)
    evidence: list[Evidence] = []
    states = {}
    while (spec := next_step(problem, evidence)) is not None:
        facts, rows = _step(sweep, spec, machine, classes, len(evidence), simulated, run_id)
        for found in evidence_of(facts, rows, classes):
            evidence.append(found)
            states[found.key, found.service_class] = (found.state, found.n_effective_y)
    steps = derive_steps(sweep, states)
    sweep.write_steps(steps)
    quality = quality_json(steps)
    sweep.write_json("quality.json", quality)
    sweep.write_json("limits.json", compute_limits(about, evidence, sweep.steps(), quality))
    return sweep


def quality_json(steps: pd.DataFrame) -> dict[str, Any]:
    """``quality.json`` with one flagged step."""
    found = []
    for at, row in enumerate(steps.to_dict("records")):
        findings = (
            [
                {
                    "check": "steady_state",
                    "severity": "flag",
                    "reason": "p95 TTFT drifted by 24 % inside the window.",
                }
            ]
            if at == 2
            else []
        )
        found.append(
            {
                **{
                    key: row[key]
                    for key in ("source", "model", "service_class", "workload", "repeat", "phase")
                },
                "key": "",
                "series": "",
                "concurrency": int(row["concurrency"]),
                "verdict": "flag" if findings else "ok",
                "findings": findings,
            }
        )
    return {
        "schema": 1,
        "verdict": "ok",
        "findings": [],
        "steps": found,
        "not_checked": [{"check": "prefix_cache", "reason": "the server exports no prefix-cache counters"}],
        "gx": {},
    }


def _step(
    sweep: SweepDir,
    spec: StepSpec,
    machine: Machine,
    classes: dict[str, Any],
    number: int,
    simulated: bool,
    run_id: str,
) -> tuple[Facts, pd.DataFrame]:
    (load,) = spec.loads
    name, rule, concurrency = load.service_class, classes[load.service_class], load.concurrency
    rows = run_closed_loop(machine, rule, concurrency, load.requests, seed=number * 1000 + concurrency)
    for row in rows:
        row.update(
            model=spec.model,
            service_class=name,
            workload=rule.workload.name,
            phase=str(spec.phase),
            concurrency=concurrency,
            repeat=spec.repeat,
        )
    window_s = rows[-1]["started_s"] - WARMUP_S
    running = min(concurrency, machine.slots)
    waiting = max(0, concurrency - machine.slots)
    if machine.queue is not None:
        waiting = min(waiting, machine.queue)
    facts = Facts(
        spec=spec.to_json(),
        run_id=run_id,
        started_at=f"2026-11-30T{1 + number // 60:02d}:{number % 60:02d}:00+00:00",
        loads=[
            LoadFacts(
                service_class=name,
                concurrency=concurrency,
                warmup_s=WARMUP_S,
                warmup_steady=True,
                window_start_s=WARMUP_S,
                window_s=window_s,
                inflight_mean=concurrency * 0.998,
                inflight_peak=concurrency,
                stop_reason="enough_requests",
            )
        ],
        client={
            "client_lag_p99_s": 0.0008,
            "client_cpu_share": 0.21,
            "client_workers": 1,
            "send_lag_p99_s": 0.0009,
            "refill_p50_s": 0.0003,
            "pause_share": 0.0,
            "clock_scale": 20.0 if simulated else 1.0,
        },
        server={
            "server_running_mean": running * 0.99,
            "server_running_peak": running,
            "server_waiting_mean": float(waiting),
            "server_waiting_peak": float(waiting + 2 if waiting else 0),
            "server_kv_use_peak": min(1.0, running * 0.035),
            "server_preemptions": 0.0,
            "server_prefix_hit_share": None,
            "foreign_running_peak": 0.0,
        },
    )
    metrics = pa.Table.from_pylist(
        [
            {"at_s": float(at), "step": spec.key, "series": "running", "value": float(running)}
            for at in range(3)
        ],
        schema=METRIC_SCHEMA,
    )
    table = request_table(rows)
    sweep.write_step(spec.key, facts, table, metrics)
    return facts, table.to_pandas()


def _length(rng: random.Random, lengths: Any) -> int:
    drawn = lengths.median * math.exp(rng.gauss(0, lengths.sigma))
    return int(min(max(drawn, lengths.at_least), lengths.at_most))
