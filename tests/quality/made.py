"""Made sweeps of known quality: a slot server driven by a closed loop, in virtual time.

``sweep(seed)`` measures a server with ``slots`` decode slots and a queue without bound the way the
instrument does: baseline, prime, scouts, proofs of the candidate, an anchor; log-normal lengths, a
warm-up that is kept out, load kept up after the cut. Nothing is wrong with it. Each mutation of the
tests then makes one thing wrong.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from include.capacity.results.schema import REQUEST_SCHEMA, Facts, LoadFacts
from include.capacity.results.spec import Load, StepSpec
from include.capacity.results.steps import steps_table
from include.capacity.words import Phase

CREATED = datetime(2026, 1, 2, 1, 0, tzinfo=UTC)
DEADLINE_S = 300.0


@dataclass
class Server:
    """Service time = (prompt x prefill + output x pace) x noise; pace grows with what is running."""

    slots: int = 16
    prefill_s: float = 1e-4
    pace_s: float = 0.02
    crowding: float = 1.0
    """Pace with all slots busy over pace alone, minus 1."""
    noise: float = 0.05
    wander: float = 0.02
    """Size of a slow wandering of the speed (AR(1) over a few seconds)."""
    queue: int | None = None
    """Most waiting requests before it says 503; None: no bound."""


@dataclass
class Made:
    """A sweep in memory."""

    sweep_json: dict[str, Any]
    facts: dict[str, Facts] = field(default_factory=dict)
    requests: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def steps(self) -> pd.DataFrame:
        return steps_table(self.sweep_json, self.facts, self.requests)


def sweep(
    seed: int = 0,
    server: Server | None = None,
    ladder: tuple[int, ...] = (4, 8, 16, 32),
    proofs: tuple[int, ...] = (14,),
    repeats: int = 1,
    mode: str = "find",
    stream: bool = True,
) -> Made:
    """A clean sweep; in ``exact`` mode the ladder is measured ``repeats`` times at proof size."""
    rng = np.random.default_rng(seed)
    server = server or Server()
    run_id = f"run-{seed}"
    made = Made(sweep_json(run_id, stream))
    plan = [(Phase.BASELINE, 1, 30, 1), (Phase.PRIME, max(ladder), 2 * max(ladder), 1)]
    if mode == "find":
        plan += [(Phase.SCOUT, n, max(100, 3 * n), 1) for n in ladder]
        plan += [(Phase.PROVE, n, max(600, 10 * n), 1) for n in proofs]
    else:
        plan += [(Phase.GRID, n, max(600, 10 * n), r + 1) for n in ladder for r in range(repeats)]
    plan.append((Phase.ANCHOR, min(ladder), max(100, 3 * min(ladder)), 1))
    tables, started = [], CREATED + timedelta(minutes=1)
    for phase, n, count, repeat in plan:
        spec = StepSpec(
            model="m",
            phase=phase,
            loads=(Load(service_class="interactive", concurrency=n, requests=count, max_requests=count),),
            repeat=repeat,
        )
        rows, load, ended_s = run(rng, server, n, count, stream, min_window_s=30.0 if count >= 600 else 0.0)
        rows = rows.assign(phase=str(phase), concurrency=n, repeat=repeat, step=spec.key)
        rows["request_id"] = [f"{spec.key}-{at:06d}" for at in range(len(rows))]
        tables.append(rows)
        running = min(n, server.slots)
        made.facts[spec.key] = Facts(
            spec=spec.to_json(),
            run_id=run_id,
            started_at=started.isoformat(),
            loads=[load],
            client={
                "pause_share": pause_share(rows, load),
                "client_lag_p99_s": 0.002,
                "client_cpu_share": 0.2,
                "client_workers": 1,
                "clock_scale": 1.0,
            },
            server={
                "server_running_mean": running * 0.99,
                "server_waiting_mean": (load.inflight_mean or n) * 0.99 - running * 0.99,
                "server_kv_use_peak": 0.4,
                "server_prefix_hit_share": 0.01,
            },
        )
        started += timedelta(seconds=ended_s + 10)
    made.requests = pd.concat(tables, ignore_index=True)
    return made


def pause_share(rows: pd.DataFrame, load: LoadFacts) -> float:
    """Share of slot time in the window spent in deliberate pauses."""
    opened, closed = load.window_start_s, load.window_start_s + load.window_s
    wished = rows["started_s"] - rows["send_lag_s"]
    paused = (wished.clip(upper=closed) - (wished - rows["paused_s"]).clip(lower=opened)).clip(lower=0.0)
    return float(paused.sum() / (load.window_s * load.concurrency))


def sweep_json(run_id: str, stream: bool = True) -> dict[str, Any]:
    return {
        "schema": 1,
        "run_id": run_id,
        "model": "m",
        "series": "",
        "source": "measured",
        "created_at": CREATED.isoformat(),
        "bounds": {"min_window_s": 30.0},
        "classes": {
            "interactive": {
                "rule": "interactive",
                "deadline_s": DEADLINE_S,
                "workload": {"name": "chat", "stream": stream, "ignore_eos": True, "shared_prefix_tokens": 0},
            }
        },
    }


def run(
    rng: np.random.Generator,
    server: Server,
    n: int,
    count: int,
    stream: bool = True,
    min_window_s: float = 0.0,
) -> tuple[pd.DataFrame, LoadFacts, float]:
    """One closed loop of n slots: (rows without labels, facts, when it ended)."""
    warm = 4 * n + 10
    free = [(float(rng.uniform(0, 0.05)), slot, 0.0) for slot in range(n)]
    heapq.heapify(free)
    busy = [0.0] * server.slots
    pace = server.pace_s * (1 + server.crowding * min(n, server.slots) / server.slots)
    sent: list[tuple[float, ...]] = []
    opened, cut, last_counted_end, level = 0.0, np.inf, 0.0, 0.0
    counted = 0
    while free:
        ready, slot, paused = heapq.heappop(free)
        freed, wished = ready - paused, ready + 0.0003
        start = wished + 0.0002
        if start > cut and start > last_counted_end:
            continue
        at = len(sent)
        if at == warm:
            opened = start
        is_counted = at >= warm and start < cut
        prompt = int(np.clip(rng.lognormal(np.log(512), 0.6), 16, 4096))
        output = int(np.clip(rng.lognormal(np.log(200), 0.6), 16, 1024))
        level = 0.98 * level + rng.normal(0, server.wander * 0.2)
        if server.queue is not None and sum(s[9] > start for s in sent[-2 * n :]) >= server.queue:
            end = start + 0.002
            sent.append((slot, start, wished, freed, paused, np.nan, 0.002, prompt, 0, start, is_counted, 1))
            pause = float(rng.uniform(0.5, 1.5))
            heapq.heappush(free, (end + pause, slot, pause))
        else:
            begin = max(start, heapq.heappop(busy))
            noise = np.exp(rng.normal(0, server.noise) + level)
            first = begin + (prompt * server.prefill_s + pace) * noise
            end = first + (output - 1) * pace * noise
            heapq.heappush(busy, end)
            sent.append(
                (
                    slot,
                    start,
                    wished,
                    freed,
                    paused,
                    first - start,
                    end - start,
                    prompt,
                    output,
                    begin,
                    is_counted,
                    0,
                )
            )
            heapq.heappush(free, (end, slot, 0.0))
        if is_counted:
            counted += 1
            last_counted_end = max(last_counted_end, end)
            if counted >= count and start - opened >= min_window_s:
                cut = np.nextafter(start, np.inf)
    data = np.array(sent)
    refused = data[:, 11] == 1
    rows = pd.DataFrame(
        {
            "model": "m",
            "service_class": "interactive",
            "workload": "chat",
            "worker": 0,
            "slot": data[:, 0].astype(int),
            "started_s": data[:, 1],
            "send_lag_s": data[:, 1] - data[:, 2],
            "refill_s": data[:, 2] - data[:, 3],
            "paused_s": data[:, 4],
            "ttft_s": data[:, 5] if stream else np.nan,
            "last_token_s": np.where(refused | (not stream), np.nan, data[:, 6]),
            "e2e_s": data[:, 6] + 0.0001,
            "deadline_s": DEADLINE_S,
            "asked_prompt_tokens": data[:, 7],
            "prompt_tokens": np.where(refused, np.nan, data[:, 7]),
            "asked_max_tokens": data[:, 8],
            "output_tokens": np.where(refused, np.nan, data[:, 8]),
            "usage_estimated": False,
            "first_chunk_tokens": 1,
            "streamed": stream,
            "outcome": np.where(refused, "rejected", "completed"),
            "counted": data[:, 10] == 1,
        }
    )
    for name in REQUEST_SCHEMA.names:
        if name not in rows:
            rows[name] = None
    window_s = float(min(cut, data[-1, 1]) - opened)
    held = np.clip(
        np.minimum(data[:, 1] + data[:, 6], opened + window_s) - np.maximum(data[:, 1], opened), 0, None
    )
    load = LoadFacts(
        service_class="interactive",
        concurrency=n,
        warmup_s=opened,
        warmup_steady=True,
        window_start_s=opened,
        window_s=window_s,
        inflight_mean=float(held.sum() / window_s),
        inflight_peak=n,
        stop_reason="enough_requests",
    )
    return rows, load, float((data[:, 1] + data[:, 6]).max())
