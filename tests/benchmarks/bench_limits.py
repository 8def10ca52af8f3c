"""How good the limits are: the real planner, decider and ``compute_limits`` on servers of known truth.

``python -m tests.benchmarks.bench_limits`` sweeps every server of ``servers.generate`` in virtual time, five
ways, and prints one table of the ways and tables of ours by family, class, trait and status:

- **ours**: what the product does, through its own interface;
- **what people do**: p95 of the first 100 requests after a burst start, up the ladder until a step misses;
- **independent bounds**: ladder and bisection, each step must pass at ``max(300, 3 N)`` requests, with
  bounds that take requests for independent;
- **fixed evidence**: ladder and bisection, each step measured with as many requests as the proof behind our
  limit of the same server has (at least ``10 N``; the most we prove with where we found no limit), judged by
  the product's own bounds;
- **fixed 600**: the same with ``max(600, 10 N)``, the least we prove with: cheaper where that decides, and
  short of the truth where it does not. Ours may cost at most 0.8 times the requests of either.

Columns, over all limits issued: share above the truth; share above by more than one bracket (``max(1, 5 %)``
of the truth); then over all servers, one without a limit as a shortfall of 100 %: median and 90th percentile
of ``1 - limit / truth`` (0 where above); mean counted requests and mean server hours, warm-up included.

The interactive cap at the latency knee is switched off, because the truth knows the objectives only.

Then **pairs**: servers that an interactive and a batch class share are swept with the shared search, and by
brute force each pair proven together is put to the test, beside both limits alone at once and half of each.
There ``above`` says that the pair does not hold, ``> 1 br.`` that it does not even one bracket lower; the
shortfall is of the sum, against the largest pair of the same proportions that holds.

Each target prints PASS or MISS, and a missed one makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.stats import beta

from include.capacity.config import StepBounds
from include.capacity.limits.compute import compute_limits
from include.capacity.limits.evidence import Evidence, decider, evidence_of
from include.capacity.limits.planner import next_step, problem_of
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.results.spec import Load, StepSpec
from include.capacity.words import Outcome, Phase, State
from tests.benchmarks import truth
from tests.benchmarks.servers import (
    FAMILIES,
    Bench,
    Loop,
    PairServer,
    VirtualServer,
    generate,
    generate_pairs,
    streams_of,
)

SWEEP_SEED = 41
"""Requests of the sweeps: others than brute force drew."""
BOUNDS = StepBounds()
PAIRS_PER_FAMILY = 4
PAIR_SEARCH_REQUESTS = 5_000
"""Of each class, to look for the largest pair and to test what was not proven; what was is put to
``truth.REQUESTS``."""
MAX_STEPS = 200
"""A sweep that plans more than this has lost its way."""


@dataclass
class Found:
    """What one way of measuring said about one server."""

    server: str
    family: str
    class_name: str
    traits: tuple[str, ...]
    truth: int
    limit: int | None
    status: str
    requests: int
    hours: float
    proof: int = 0
    """Requests of the proof behind the limit; 0 without one."""
    steps: str = ""
    """Steps in order, for people: phase, N, counted requests, state."""

    @property
    def above(self) -> bool:
        """The limit is above the truth."""
        return self.limit is not None and self.limit > self.truth

    @property
    def far_above(self) -> bool:
        """... by more than one bracket."""
        return self.limit is not None and self.limit - self.truth > max(1.0, 0.05 * self.truth)

    @property
    def shortfall(self) -> float:
        """1 - limit / truth, 0 where above; NaN where the truth is 0."""
        if not self.truth:
            return math.nan
        return max(0.0, 1 - (self.limit or 0) / self.truth)


@dataclass
class FoundPair:
    """What was said of two classes together on one server."""

    server: str
    pair: dict[str, int]
    """Empty without one."""
    true_pair: dict[str, int]
    above: bool
    """The pair does not hold."""
    far_above: bool
    """... and would not one bracket lower."""
    requests: int
    hours: float

    @property
    def limit(self) -> int | None:
        """In flight in all; None without a pair."""
        return sum(self.pair.values()) or None

    @property
    def truth(self) -> int:
        """In flight in all of the largest pair that holds; 0 if none does."""
        return sum(self.true_pair.values())

    @property
    def shortfall(self) -> float:
        """1 - limit / truth, 0 where above; NaN where the truth is 0."""
        return max(0.0, 1 - (self.limit or 0) / self.truth) if self.truth else math.nan


Row = TypeVar("Row", Found, FoundPair)


# ------------------------------------------------------------------------------------------ the five ways


def sweep_json(server: VirtualServer, seed: int) -> dict[str, object]:
    """The ``sweep.json`` of a sweep of this server."""
    return {
        "schema": 1,
        "run_id": "benchmark",
        "attempt": 1,
        "model": server.name,
        "served_name": server.name,
        "series": "",
        "source": "measured",
        "simulated": True,
        "clock_scale": 1.0,
        "accelerator": {"name": "virtual", "kind": "virtual", "count": 1},
        "stack": {},
        "stack_id": "virtual",
        "comparison_ids": dict.fromkeys(server.classes, "virtual"),
        "classes": {name: one.model_dump(mode="json") for name, one in server.classes.items()},
        "bounds": BOUNDS.model_dump(mode="json"),
        "mode": "find",
        "repeats": 1,
        "shared": len(server.classes) > 1,
        "created_at": "2026-01-01T00:00:00+00:00",
        "versions": {},
        "seed": seed,
    }


def run_sweep(server: VirtualServer, seed: int) -> tuple[Bench, list[Evidence], dict[str, object]]:
    """The whole sweep, as the flow runs it; (cost, evidence, limits.json)."""
    bench = Bench(server, seed, BOUNDS)
    asked = sweep_json(server, seed)
    problem = problem_of(asked)
    decide = decider(server.classes)
    evidence: list[Evidence] = []
    while (spec := next_step(problem, evidence)) is not None:
        result = bench.run(spec, decide)
        evidence += evidence_of(result.facts, result.rows, server.classes)
        if bench.steps > MAX_STEPS:
            raise RuntimeError(f"{server.name}: {MAX_STEPS} steps and no end: {spec.label}")
    return bench, evidence, compute_limits(asked, evidence, pd.DataFrame(columns=list(STEP_COLUMNS)), None)


def ours(server: VirtualServer, true: int, seed: int) -> Found:
    """The product."""
    bench, evidence, limits = run_sweep(server, seed)
    (entry,) = (one for one in limits["limits"] if one["class"] == server.class_name)
    steps = " ".join(f"{e.phase}@{e.concurrency}:{e.attempted}{(e.state or '-')[0]}" for e in evidence)
    proofs = [e.attempted for e in evidence if e.phase == Phase.PROVE and e.concurrency == entry["limit"]]
    found = _found(server, true, entry["limit"], entry["status"], bench, steps)
    return replace(found, proof=max(proofs, default=0))


def people(server: VirtualServer, true: int, seed: int) -> Found:
    """100 requests a step from a burst start, p95 and completion read off, until a step misses."""
    service = server.service_class
    limit, requests, clock_s = None, 0, 0.0
    for step, n in enumerate(service.ladder):
        rng = np.random.default_rng([server.seed, seed, 1000 + step])
        phase = float(np.random.default_rng([server.seed, seed]).random())
        loop = Loop(server.mechanism, streams_of(server, n, rng), rng, start_s=clock_s, phase=phase)
        loop.advance(math.inf, 100)
        ids = [request for request, end in enumerate(loop.end) if end is not None][:100]
        completed = [loop.outcome[request] is Outcome.COMPLETED for request in ids]
        holds = np.mean(completed) >= service.completion_floor
        if service.ttft is not None:
            delay = [at - loop.start[request] for request in ids if (at := loop.first[request]) is not None]
            holds = holds and bool(delay) and np.quantile(delay, 0.95) <= service.ttft.at_most_s
        requests += 100
        clock_s = loop.now
        if not holds:
            break
        limit = n
    status = "proven" if limit else "no_passing_step"
    return _row(server, true, limit, status, requests, clock_s / 3600, "")


def independent(server: VirtualServer, true: int, seed: int) -> Found:
    """Each step must pass at ``max(300, 3 N)`` requests, taken for independent."""

    def passes(evidence: Evidence) -> bool:
        return _lower(evidence.completed, evidence.attempted) >= evidence.floor and (
            evidence.share is None or _lower(evidence.met, evidence.attempted) >= evidence.share
        )

    return _bisect(server, true, seed, lambda n: max(300, 3 * n), passes)


def fixed(server: VirtualServer, true: int, seed: int, size: int) -> Found:
    """Each step measured with ``max(size, 10 N)`` requests and judged by the product's bounds."""

    def passes(evidence: Evidence) -> bool:
        return evidence.state == State.PASS

    return _bisect(server, true, seed, lambda n: max(size, 10 * n), passes)


def all_ways(server: VirtualServer, true: int, seed: int) -> dict[str, Found]:
    """Every way on one server."""
    mine = ours(server, true, seed)
    return {
        "ours": mine,
        "what people do": people(server, true, seed),
        "independent bounds": independent(server, true, seed),
        "fixed evidence": fixed(server, true, seed, mine.proof or BOUNDS.prove_requests_max),
        "fixed 600": fixed(server, true, seed, BOUNDS.prove_requests),
    }


def all_pairs(server: PairServer, seed: int) -> dict[str, FoundPair]:
    """The proven pair of a server, and what the limits alone would have suggested."""
    bench, _, limits = run_sweep(server, seed)
    found: dict[str, dict[str, int]] = {"alone": {}, "shared": {}}
    for one in limits["limits"]:
        if one["limit"] is not None:
            found[one["measured"]][one["class"]] = one["limit"]
    alone = found["alone"] if len(found["alone"]) == len(server.classes) else {}
    best = truth.true_pair(server, alone, PAIR_SEARCH_REQUESTS) if alone else {}
    ways = {
        "proven together": found["shared"],
        "half of each limit": {name: max(1, n // 2) for name, n in alone.items()},
        "both limits at once": alone,
    }
    return {
        way: _found_pair(
            server, pair, best, bench, truth.REQUESTS if pair is found["shared"] else PAIR_SEARCH_REQUESTS
        )
        for way, pair in ways.items()
    }


def _found_pair(
    server: PairServer, pair: dict[str, int], best: dict[str, int], bench: Bench, requests: int
) -> FoundPair:
    lower = {name: max(1, min(n - 1, math.floor(0.95 * n))) for name, n in pair.items()}
    above = bool(pair) and not truth.pair_holds(server, pair, requests)
    return FoundPair(
        server=server.name,
        pair=pair,
        true_pair=best,
        above=above,
        far_above=above and not truth.pair_holds(server, lower, requests),
        requests=bench.counted,
        hours=bench.clock_s / 3600,
    )


def _lower(successes: int, n: int) -> float:
    return float(beta.ppf(0.05, successes, n - successes + 1)) if successes else 0.0


def _bisect(
    server: VirtualServer,
    true: int,
    seed: int,
    size: Callable[[int], int],
    passes: Callable[[Evidence], bool],
) -> Found:
    """Up the ladder until a step does not pass, then bisection to ``max(1, 5 %)``."""
    bench, steps = Bench(server, seed, BOUNDS), []

    def holds(n: int) -> bool:
        load = Load(service_class=server.class_name, concurrency=n, requests=size(n), max_requests=size(n))
        spec = StepSpec(
            model=server.name,
            phase=Phase.GRID,
            loads=(load,),
            cap_s=math.inf,  # the size is fixed, however long it takes
            early_stop=False,
            repeat=bench.steps + 1,
        )
        result = bench.run(spec)
        (evidence,) = evidence_of(result.facts, result.rows, server.classes)
        good = not evidence.crashed and passes(evidence)
        steps.append(f"{n}:{evidence.attempted}{'p' if good else 'f'}")
        return good

    low, high = 0, None
    for n in server.service_class.ladder:
        if not holds(n):
            high = n
            break
        low = n
    while high is not None and high - low > max(1.0, BOUNDS.resolution * low):
        middle = min(max(round(math.sqrt(max(low, 1) * high)), low + 1), high - 1)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return _found(server, true, low or None, "proven" if low else "no_passing_step", bench, " ".join(steps))


def _found(
    server: VirtualServer, true: int, limit: int | None, status: str, bench: Bench, steps: str
) -> Found:
    return _row(server, true, limit, status, bench.counted, bench.clock_s / 3600, steps)


def _row(
    server: VirtualServer, true: int, limit: int | None, status: str, requests: int, hours: float, steps: str
) -> Found:
    return Found(
        server=server.name,
        family=server.family,
        class_name=server.class_name,
        traits=server.traits,
        truth=true,
        limit=limit,
        status=status,
        requests=requests,
        hours=hours,
        steps=steps,
    )


# ---------------------------------------------------------------------------------------------- the tables


@dataclass(frozen=True)
class Summary:
    """One line of a table."""

    n: int
    limits: int
    above: float
    far_above: float
    median: float
    p90: float
    requests: float
    hours: float


def summary(found: Sequence[Found] | Sequence[FoundPair]) -> Summary:
    """Shares, quantiles and means over servers."""
    issued = [one for one in found if one.limit is not None]
    shortfalls = [one.shortfall for one in found if one.truth]
    return Summary(
        n=len(found),
        limits=len(issued),
        above=float(np.mean([one.above for one in issued])) if issued else 0.0,
        far_above=float(np.mean([one.far_above for one in issued])) if issued else 0.0,
        median=float(np.median(shortfalls)) if shortfalls else math.nan,
        p90=float(np.quantile(shortfalls, 0.9)) if shortfalls else math.nan,
        requests=float(np.mean([one.requests for one in found])),
        hours=float(np.mean([one.hours for one in found])),
    )


HEAD = "".join(
    [
        f"{'':24}",
        *(f"{name:>8}" for name in ("servers", "limits", "above", ">1 br.", "median", "p90")),
        f"{'requests':>10}{'hours':>7}",
    ]
)


def line(name: str, s: Summary) -> str:
    """One line of a table."""
    return (
        f"{name:24}{s.n:8}{s.limits:8}{s.above:8.1%}{s.far_above:8.1%}{s.median:8.1%}{s.p90:8.1%}"
        f"{s.requests:10.0f}{s.hours:7.2f}"
    )


def targets(
    found: dict[str, list[Found]], pairs: dict[str, list[FoundPair]]
) -> list[tuple[str, float, float]]:
    """(what, value, at most)."""
    mine = summary(found["ours"])
    families = sorted({one.family for one in found["ours"]}, key=FAMILIES.index)
    worst = max(summary([one for one in found["ours"] if one.family == family]).median for family in families)
    return [
        ("limits above the truth", mine.above, 0.05),
        ("above by more than one bracket", mine.far_above, 0.01),
        ("median shortfall", mine.median, 0.07),
        ("median shortfall of the worst family", worst, 0.12),
        ("p90 of the shortfall", mine.p90, 0.30),
        *(
            (f"requests / those of {way}", mine.requests / summary(found[way]).requests, 0.8)
            for way in ("fixed evidence", "fixed 600")
        ),
        *(
            ("proven pairs above the truth", summary(rows).above, 0.05)
            for way, rows in pairs.items()
            if way == "proven together"
        ),
    ]


def print_tables(found: dict[str, list[Found]]) -> None:
    """The five ways, and ours by family, class, trait and status."""
    out = sys.stdout.write
    out(f"\n{HEAD}\n")
    for way, rows in found.items():
        out(line(way, summary(rows)) + "\n")
    mine = found["ours"]
    for title, group in (
        ("family", lambda one: [one.family]),
        ("class", lambda one: [one.class_name]),
        ("trait", lambda one: one.traits or ["none"]),
        ("status", lambda one: [one.status]),
    ):
        out(f"\nours, by {title}\n{HEAD}\n")
        names = list(dict.fromkeys(name for one in mine for name in group(one)))
        for name in names:
            out(line(name, summary([one for one in mine if name in group(one)])) + "\n")
    above = [one for one in mine if one.above]
    if above:
        out(
            "\nabove the truth: "
            + ", ".join(f"{one.server} {one.limit} > {one.truth}" for one in above)
            + "\n"
        )
    sys.stdout.flush()


def verdict(found: dict[str, list[Found]], pairs: dict[str, list[FoundPair]]) -> bool:
    """Print the pairs and each target's PASS or MISS; whether all are met."""
    out = sys.stdout.write
    if pairs:
        out(f"\nshared by two classes\n{HEAD}\n")
        for way, rows in pairs.items():
            out(line(way, summary(rows)) + "\n")
        wrong = [one for one in pairs["proven together"] if one.above]
        for one in wrong:
            out(f"above the truth: {one.server} {one.pair}, {one.true_pair} holds\n")
    out("\n")
    good = True
    for what, value, most in targets(found, pairs):
        good &= value <= most
        out(f"{'PASS' if value <= most else 'MISS'} {what}: {value:.3f} (at most {most:.3f})\n")
    return good


def sweep_all(
    servers: Sequence[VirtualServer], truths: dict[str, int], seed: int, jobs: int = 1
) -> dict[str, list[Found]]:
    """Every way on every server, with progress on stderr."""
    trues = [truths[server.name] for server in servers]
    seeds = [seed] * len(servers)
    if jobs == 1:
        return _collect(map(all_ways, servers, trues, seeds), len(servers))
    with ProcessPoolExecutor(jobs) as pool:
        return _collect(pool.map(all_ways, servers, trues, seeds), len(servers))


def sweep_pairs(servers: Sequence[PairServer], seed: int, jobs: int = 1) -> dict[str, list[FoundPair]]:
    """Every shared server, with progress on stderr."""
    seeds = [seed] * len(servers)
    if jobs == 1:
        return _collect(map(all_pairs, servers, seeds), len(servers))
    with ProcessPoolExecutor(jobs) as pool:
        return _collect(pool.map(all_pairs, servers, seeds), len(servers))


def _collect(results: Iterable[dict[str, Row]], total: int) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    started = time.monotonic()
    for done, result in enumerate(results, 1):
        for way, row in result.items():
            found.setdefault(way, []).append(row)
        left_s = (time.monotonic() - started) / done * (total - done)
        sys.stderr.write(f"\r{done}/{total} servers, {left_s:.0f} s left ")
    sys.stderr.write("\n")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", type=int, help="only so many, spread over the families")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one (repeatable)")
    parser.add_argument("--seed", type=int, default=SWEEP_SEED, help="of the sweeps' requests")
    parser.add_argument("--server-seed", type=int, default=truth.SERVER_SEED)
    parser.add_argument("--per-family", type=int, default=truth.PER_FAMILY)
    parser.add_argument("--truth", type=Path, default=truth.KEPT, help="kept truths of those servers")
    parser.add_argument("--pairs", type=int, default=PAIRS_PER_FAMILY, help="shared servers of each family")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=Path, help="write every result to this JSON file")
    arguments = parser.parse_args(argv)
    servers = generate(arguments.per_family, arguments.server_seed)
    truths = truth.kept(servers, arguments.truth)
    if arguments.family:
        servers = [server for server in servers if server.family in arguments.family]
    if arguments.servers and arguments.servers < len(servers):
        picked = np.linspace(0, len(servers) - 1, arguments.servers).round().astype(int)
        servers = [servers[at] for at in sorted(set(picked))]
    started = time.monotonic()
    found = sweep_all(servers, truths, arguments.seed, arguments.jobs)
    print_tables(found)
    pairs: dict[str, list[FoundPair]] = {}
    if arguments.pairs:
        pairs = sweep_pairs(
            generate_pairs(arguments.pairs, arguments.server_seed), arguments.seed, arguments.jobs
        )
    good = verdict(found, pairs)
    sys.stdout.write(f"{time.monotonic() - started:.0f} s\n")
    if arguments.rows:
        arguments.rows.write_text(
            json.dumps(
                {way: [asdict(one) for one in rows] for way, rows in [*found.items(), *pairs.items()]},
                indent=0,
            )
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
