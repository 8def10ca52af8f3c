"""A server of known truth in virtual time, and the loop that lets the planner drive it.

A closed loop of N clients over S slots and one queue in order of arrival, without bound. A request holds a
slot for a log-normal time; its first token comes a fixed time after it got the slot. At the deadline
the client hangs up and the slot is free. So up to S in flight nobody waits, and above it the
first-token delay jumps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from include.capacity.config import ServiceClass
from include.capacity.limits.evidence import Evidence, decider, evidence_of
from include.capacity.limits.planner import Problem, next_step
from include.capacity.results.schema import Facts, LoadFacts
from include.capacity.results.spec import Load, StepSpec
from include.capacity.words import Outcome, Phase, State, StopReason


def service_class(**changes: object) -> ServiceClass:
    """The default interactive class, or with changes."""
    data: dict[str, object] = {
        "rule": "interactive",
        "workload": {
            "name": "chat",
            "prompt_tokens": {"median": 512, "sigma": 0.6},
            "output_tokens": {"median": 200, "sigma": 0.6},
        },
        "deadline_s": 60,
        "completion_floor": 0.99,
        "ttft": {"at_most_s": 1.0, "share": 0.95},
        "ladder": [1, 4, 8, 16, 32, 64, 128, 256],
    }
    return ServiceClass.model_validate({**data, **changes})


def batch_class(**changes: object) -> ServiceClass:
    """The default batch class, or with changes."""
    data: dict[str, object] = {
        "rule": "batch",
        "workload": {
            "name": "classification",
            "stream": False,
            "prompt_tokens": {"median": 1500, "sigma": 0.5},
            "output_tokens": {"median": 16, "sigma": 0.5},
        },
        "deadline_s": 120,
        "completion_floor": 0.95,
        "ladder": [1, 4, 8, 16, 32, 64, 128, 256],
    }
    return ServiceClass.model_validate({**data, **changes})


@dataclass(frozen=True)
class SlotServer:
    """S slots; ``crash_at``: dies when so many are in flight; ``failing``: share of requests that fail."""

    slots: int
    mean_s: float = 4.0
    sigma: float = 0.5
    first_token_s: float = 0.1
    crash_at: int | None = None
    failing: float = 0.0

    def requests(self, n: int, count: int, service: ServiceClass, seed: int) -> pd.DataFrame:
        """``count`` requests in order of start, after 2 N of warm-up."""
        rng = np.random.default_rng(seed)
        warm = 2 * n
        total = warm + count
        hold = self.mean_s * np.exp(self.sigma * rng.standard_normal(total) - self.sigma**2 / 2)
        fails = rng.random(total) < self.failing
        clients = [(float(at), i) for i, at in enumerate(np.sort(rng.random(n)) * self.mean_s)]
        heapq.heapify(clients)
        free = [0.0] * self.slots
        started, ttft, e2e = np.empty(total), np.full(total, np.nan), np.full(total, np.nan)
        outcome = np.full(total, Outcome.COMPLETED.value, dtype=object)
        for i in range(total):
            at, client = heapq.heappop(clients)
            started[i] = at
            begin = max(at, free[0])
            if begin - at >= service.deadline_s:
                outcome[i] = Outcome.FIRST_TOKEN_TIMEOUT.value
                end = at + service.deadline_s
            else:
                end = min(begin + hold[i], at + service.deadline_s)
                heapq.heapreplace(free, end)
                ttft[i] = begin + self.first_token_s - at
                if begin + hold[i] > at + service.deadline_s:
                    outcome[i] = Outcome.DEADLINE_EXCEEDED.value
                elif fails[i]:
                    outcome[i] = Outcome.SERVER_ERROR.value
                else:
                    e2e[i] = end - at
            heapq.heappush(clients, (end, client))
        rows = pd.DataFrame(
            {
                "started_s": started,
                "ttft_s": ttft,
                "last_token_s": e2e,
                "e2e_s": e2e,
                "deadline_s": service.deadline_s,
                "output_tokens": 200,
                "first_chunk_tokens": 1,
                "outcome": outcome,
                "concurrency": n,
                "counted": True,
            }
        )
        return rows.iloc[warm:].reset_index(drop=True)


def measure(
    server: SlotServer, spec: StepSpec, classes: dict[str, ServiceClass], slots_of: float = 1.0
) -> tuple[Facts, pd.DataFrame]:
    """Carry out a step. In a shared step each class gets the slots in proportion to its load."""
    decide = decider(classes)
    everyone = sum(load.concurrency for load in spec.loads)
    tables, loads = [], []
    crashed = server.crash_at is not None and everyone >= server.crash_at
    for load in spec.loads:
        part = SlotServer(
            max(1, round(server.slots * load.concurrency / everyone)),
            server.mean_s,
            server.sigma,
            server.first_token_s,
            failing=server.failing,
        )
        rows, reason = _counted(part, spec, load, classes[load.service_class], decide)
        rows.insert(0, "service_class", load.service_class)
        start = float(rows["started_s"].iloc[0])
        loads.append(
            LoadFacts(
                service_class=load.service_class,
                concurrency=load.concurrency,
                window_start_s=start,
                window_s=float(rows["started_s"].iloc[-1]) - start,
                warmup_s=start,
                stop_reason=reason,
            )
        )
        tables.append(rows)
    facts = Facts(
        spec=spec.to_json(), loads=loads, server_crashed=crashed, error="server died" if crashed else None
    )
    return facts, pd.concat(tables)


def _counted(
    server: SlotServer,
    spec: StepSpec,
    load: Load,
    service: ServiceClass,
    decide: Callable[[str, list[dict[str, object]], bool], State],
) -> tuple[pd.DataFrame, str]:
    most = server.requests(load.concurrency, load.max_requests, service, spec.seed)
    count = load.requests
    while True:
        rows = most.iloc[:count]
        if spec.phase is Phase.SCOUT:
            return rows.copy(), StopReason.ENOUGH.value
        state = decide(load.service_class, rows.to_dict("records"), True)
        if state is not State.INCONCLUSIVE or count >= load.max_requests:
            reason = StopReason.ENOUGH if count == load.max_requests else StopReason.DECIDED
            return rows.copy(), reason.value
        count = min(2 * count, load.max_requests)


def sweep(problem: Problem, server: SlotServer, most: int = 200) -> tuple[list[Evidence], list[StepSpec]]:
    """Let the planner drive the server to the end."""
    evidence: list[Evidence] = []
    specs: list[StepSpec] = []
    while (spec := next_step(problem, evidence)) is not None:
        specs.append(spec)
        facts, rows = measure(server, spec, dict(problem.classes))
        evidence += evidence_of(facts, rows, problem.classes)
        assert len(specs) < most, "the planner does not end"
    return evidence, specs
