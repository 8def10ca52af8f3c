"""The true limit of a virtual server, by brute force.

At each concurrency tried the loop runs for at least 40,000 requests, longer where stalls and drift need it
(15 stalls, 3 periods), with one seed no sweep uses. A concurrency holds if the share that completed is at
least the floor of the class and the share that completed with the first token in time at least that of its
objective. The true limit is the highest N that holds with all lower N holding: doubling until one fails,
bisection to 1 (0.5 % above 200), then the neighbours below, from near to far; one that fails becomes the new
upper end. A server that holds at the top of its ladder has the top as its truth: no sweep looks further.

``python -m tests.benchmarks.truth`` computes the truths of the benchmark's servers again and keeps them in
``truth.json``, with the seed and a hash of generator and mechanism; the benchmark refuses truths of another
hash.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from include.capacity.words import Outcome
from tests.benchmarks.servers import Loop, VirtualServer, generate, generator_hash, streams_of

KEPT = Path(__file__).with_name("truth.json")
REQUESTS = 40_000
TRUTH_SEED = 777_000_111
"""Enters only brute force; sweeps use other seeds."""
SERVER_SEED = 3001
"""The servers the benchmark reports on: drawn after the method was settled."""
TUNE_SEED = 1
"""Servers to look at while changing the method; never reported."""
PER_FAMILY = 28
MAX_REQUESTS = 160_000


def shares(
    server: VirtualServer, concurrency: int, requests: int = REQUESTS, seed: int = TRUTH_SEED
) -> tuple[float, float]:
    """Shares of attempted requests that completed and that met every objective; (0, 0) if the server died."""
    rng = np.random.default_rng([server.seed, seed])
    mechanism = server.mechanism
    loop = Loop(mechanism, streams_of(server, concurrency, rng), rng)
    loop.advance(math.inf, 3 * concurrency)
    window_s, first = loop.now, len(loop.start)
    long_s = max(
        15 * mechanism.stall_gap_s if mechanism.stall_gap_s else 0.0,
        3 * mechanism.drift_period_s if mechanism.drift else 0.0,
    )
    loop.advance(math.inf, loop.ended + requests)
    loop.advance(window_s + long_s, first + MAX_REQUESTS)
    last = len(loop.start)
    loop.advance(loop.now + server.service_class.deadline_s + 1)  # let those started by then end
    if loop.crashed:
        return 0.0, 0.0
    completed = np.array([outcome is Outcome.COMPLETED for outcome in loop.outcome[first:last]])
    met = completed
    if (objective := server.service_class.ttft) is not None:
        start = np.array(loop.start[first:last])
        token = np.array([math.inf if at is None else at for at in loop.first[first:last]])
        added = mechanism.first_token_s * rng.lognormal(0, 0.3, len(start))
        met = completed & (token - start + added <= objective.at_most_s)
    return float(completed.mean()), float(met.mean())


def true_limit(server: VirtualServer, requests: int = REQUESTS) -> dict[str, Any]:
    """``{"limit", "at": [y, z], "above": [N, y, z] | None, "tried": number of N}``; 0: not even N = 1."""
    service_class = server.service_class
    share = service_class.ttft.share if service_class.ttft else 0.0
    top = service_class.ladder[-1]
    found: dict[int, tuple[float, float]] = {}

    def holds(n: int) -> bool:
        if n not in found:
            found[n] = shares(server, n, requests)
        y, z = found[n]
        return y >= service_class.completion_floor and z >= share

    good, bad = 0, None
    n = 1
    while bad is None and good < top:
        if holds(n):
            good, n = n, min(2 * n, top)
        else:
            bad = n
    while True:
        while bad is not None and bad - good > max(1, math.floor(0.005 * good)):
            middle = round(math.sqrt(good * bad)) if bad > 2 * good > 0 else (good + bad) // 2
            good, bad = (middle, bad) if holds(middle) else (good, middle)
        below = sorted(
            {good - 1, good - 2, good - 3, *(math.floor(good * f) for f in (0.97, 0.94, 0.9, 0.8))}
        )
        failing = [n for n in reversed(below) if n > 0 and not holds(n)]
        if not failing:
            break
        bad = min(failing)
        good = max([n for n in found if n < bad and holds(n)], default=0)
    return {
        "limit": good,
        "at": [round(value, 4) for value in found.get(good, (0.0, 0.0))],
        "above": [bad, *(round(value, 4) for value in found[bad])] if bad is not None else None,
        "tried": len(found),
    }


def compute(servers: list[VirtualServer], jobs: int = 1) -> dict[str, dict[str, Any]]:
    """True limits by name of server, with progress on stderr."""
    truths = {}
    with ProcessPoolExecutor(jobs) as pool:
        for done, (server, truth) in enumerate(zip(servers, pool.map(true_limit, servers), strict=True), 1):
            truths[server.name] = truth
            sys.stderr.write(f"\r{done}/{len(servers)} {server.name} {truth['limit']}          ")
    sys.stderr.write("\n")
    return truths


def kept(servers: list[VirtualServer], file: Path = KEPT) -> dict[str, int]:
    """The kept true limits; ValueError if they are of other servers or another mechanism."""
    data = json.loads(file.read_text())
    if data["generator"] != generator_hash(servers):
        raise ValueError(
            f"{file}: generator {data['generator']}, expected {generator_hash(servers)}: the servers have "
            "changed; compute their truths again with `python -m tests.benchmarks.truth`"
        )
    return {name: truth["limit"] for name, truth in data["truths"].items()}


def main(argv: list[str] | None = None) -> int:
    """Compute and keep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=SERVER_SEED)
    parser.add_argument("--per-family", type=int, default=PER_FAMILY)
    parser.add_argument("--file", type=Path, default=KEPT)
    arguments = parser.parse_args(argv)
    servers = generate(arguments.per_family, arguments.seed)
    truths = compute(servers, arguments.jobs)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(truth)}" for name, truth in truths.items())
    arguments.file.write_text(
        f'{{"schema": 1, "generator": "{generator_hash(servers)}", "server_seed": {arguments.seed},\n'
        f' "truth_seed": {TRUTH_SEED}, "requests": {REQUESTS}, "truths": {{\n{lines}\n}}}}\n'
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
