"""Made-up sweeps that look like the demo's: ``steady`` queues without bound, ``sprinter`` sheds.

A small discrete-event model of a continuous-batching server (slots, a queue with or without a bound,
tokens that come slower the more requests run) produces request rows; the step table is derived from
them by the product's own code, limits and quality are written as the limits and quality stages do.
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
from include.capacity.report.data import binomial_bounds
from include.capacity.results.schema import METRIC_SCHEMA, Facts, LoadFacts, request_table
from include.capacity.results.spec import Load, StepSpec
from include.capacity.results.steps import derive_steps
from include.capacity.results.store import Store
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import Phase


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
    limits: dict[str, int] | None = None,
    stack: dict[str, Any] | None = None,
    ladders: dict[str, list[int]] | None = None,
    quality: bool = True,
) -> SweepDir:
    """Write a whole sweep and return it. ``limits`` gives the proven concurrency of each class."""
    fleet = load_fleet()
    classes = {name: fleet.classes[name] for name in (ladders or LADDERS)}
    limits = limits or (
        {"interactive": 22, "batch": 88} if machine is STEADY else {"interactive": 11, "batch": 11}
    )
    sweep = SweepDir(store, prefix)
    sweep.write_json(
        "sweep.json",
        {
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
            "stack": stack
            or {"engine": "simulator", "version": "0.1", "profile": model, "max_num_seqs": machine.slots},
            "stack_id": f"st-{model}",
            "comparison_ids": {name: f"cmp-{model}-{name}" for name in classes},
            "classes": {name: rule.model_dump(mode="json") for name, rule in classes.items()},
            "bounds": fleet.steps.model_dump(mode="json"),
            "mode": "find",
            "repeats": 1,
            "shared": False,
            "created_at": "2026-11-30T01:00:00+00:00",
            "versions": {"python": "3.11.9", "httpx": "0.28.1"},
            "seed": 7,
        },
    )
    clock = 0.0
    for name, rule in classes.items():
        ladder = (ladders or LADDERS)[name]
        plan = [
            (Phase.BASELINE if at == 1 else Phase.SCOUT, at, 30 if at == 1 else max(100, 3 * at))
            for at in ladder
        ]
        plan.append((Phase.PROVE, limits[name], max(600, 10 * limits[name])))
        for phase, concurrency, requests in plan:
            clock += 1
            _step(sweep, model, machine, name, rule, phase, concurrency, requests, clock, simulated, run_id)
    states = {}
    for key, facts in sweep.all_facts().items():
        for load in facts.loads:
            proved = str(facts.spec["phase"]) == "prove"
            states[(key, load.service_class)] = ("pass" if proved else None, None)
    steps = derive_steps(sweep, states)
    steps["n_effective"] = steps["attempted"].astype(float)
    sweep.write_steps(steps)
    sweep.write_json("limits.json", limits_json(model, classes, steps, limits))
    if quality:
        sweep.write_json("quality.json", quality_json(steps))
    return sweep


def limits_json(
    model: str, classes: dict[str, Any], steps: pd.DataFrame, limits: dict[str, int]
) -> dict[str, Any]:
    """``limits.json`` as the limits stage writes it."""
    entries, saturation = [], []
    for name, rule in classes.items():
        mine = steps[(steps["service_class"] == name) & (steps["phase"] != "baseline")]
        proof = mine[mine["phase"] == "prove"].iloc[0]
        above = sorted(at for at in mine["concurrency"] if at > limits[name])
        n, y, z = int(proof["attempted"]), int(proof["completed"]), int(proof["objective_met"])
        y_low, y_high = binomial_bounds(y, n)
        z_low, z_high = binomial_bounds(z, n)
        limit = limits[name]
        first_fail = above[0] if above else None
        claim = (
            f"With at most {limit} in flight, this stack and workload, alone on the server: at least "
            f"{rule.completion_floor:.0%} completed within {rule.deadline_s:g} s (n {n:,}, effective {n:,}, "
            f"one-sided 95 %, {proof['window_s']:.0f} s measured, one server start)."
            + (f" First failing: {first_fail}." if first_fail else "")
        )
        entries.append(
            {
                "model": model,
                "series": "",
                "class": name,
                "limit": limit,
                "status": "proven" if first_fail else "lower_bound",
                "measured": "alone",
                "bound_by": "ttft objective" if name == "interactive" else "completion",
                "bracket": [limit, first_fail],
                "operating_range": [8, limit] if name == "batch" else None,
                "confidence": 0.95,
                "deadline_s": rule.deadline_s,
                "claim": claim,
                "evidence": {
                    "requests": n,
                    "effective_requests": n,
                    "window_s": float(proof["window_s"]),
                    "repeats": 1,
                    "completion": {
                        "rate": y / n,
                        "lower": y_low,
                        "upper": y_high,
                        "floor": rule.completion_floor,
                    },
                    "objective": {"rate": z / n, "lower": z_low, "upper": z_high, "floor": 0.95},
                },
                "knees": _knees(name, mine, limit, first_fail),
            }
        )
        top = mine.loc[mine["total_tok_per_s"].idxmax()]
        saturation.append(
            {
                "model": model,
                "series": "",
                "class": name,
                "concurrency_at_peak": int(top["concurrency"]),
                "peak_total_tok_per_s": float(top["total_tok_per_s"]),
                "e2e_p99_at_peak_s": None if math.isnan(top["e2e_p99_s"]) else float(top["e2e_p99_s"]),
                "total_tok_per_s_min": float(mine["total_tok_per_s"].min()),
                "total_tok_per_s_max": float(mine["total_tok_per_s"].max()),
                "throughput_knee": entries[-1]["knees"]["throughput"]["concurrency"],
                "status": "measured",
            }
        )
    return {"limits": entries, "saturation": saturation}


def _knees(name: str, mine: pd.DataFrame, limit: int, first_fail: int | None) -> dict[str, Any]:
    rates = mine.groupby("concurrency")["output_tok_per_s"].mean()
    knees: dict[str, Any] = {
        "throughput": {"concurrency": int(rates[rates >= 0.95 * rates.max()].index.min())}
    }
    if name == "interactive" and first_fail:
        knees["latency"] = {"bracket": [limit, first_fail]}
    return knees


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
    model: str,
    machine: Machine,
    name: str,
    rule: Any,
    phase: Phase,
    concurrency: int,
    requests: int,
    clock: float,
    simulated: bool,
    run_id: str,
) -> None:
    rows = run_closed_loop(machine, rule, concurrency, requests, seed=int(clock) * 1000 + concurrency)
    for row in rows:
        row.update(
            model=model,
            service_class=name,
            workload=rule.workload.name,
            phase=str(phase),
            concurrency=concurrency,
            repeat=1,
        )
    window_s = rows[-1]["started_s"] - WARMUP_S
    running = min(concurrency, machine.slots)
    waiting = max(0, concurrency - machine.slots) if machine.queue is None else 0
    spec = StepSpec(
        model=model,
        phase=phase,
        loads=(Load(service_class=name, concurrency=concurrency, requests=requests, max_requests=requests),),
    )
    facts = Facts(
        spec=spec.to_json(),
        run_id=run_id,
        started_at=f"2026-11-30T01:{int(clock):02d}:00+00:00",
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
    sweep.write_step(spec.key, facts, request_table(rows), metrics)


def _length(rng: random.Random, lengths: Any) -> int:
    drawn = lengths.median * math.exp(rng.gauss(0, lengths.sigma))
    return int(min(max(drawn, lengths.at_least), lengths.at_most))
