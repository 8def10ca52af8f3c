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
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from include.capacity.config import ServiceClass
from include.capacity.words import Outcome
from tests.benchmarks.servers import Loop, VirtualServer, generate, generator_hash, streams_together

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
PARTS = 64
"""True pairs are found to this part of the limits alone."""


def shares(
    server: VirtualServer, concurrency: int, requests: int = REQUESTS, seed: int = TRUTH_SEED
) -> tuple[float, float]:
    """Shares of attempted requests that completed and that met every objective; (0, 0) if the server died."""
    return shares_together(server, {server.class_name: concurrency}, requests, seed)[server.class_name]


def shares_together(
    server: VirtualServer, loads: Mapping[str, int], requests: int = REQUESTS, seed: int = TRUTH_SEED
) -> dict[str, tuple[float, float]]:
    """As :func:`shares`, of each class of ``loads`` (class -> concurrency) with all in flight at once.

    At least ``requests`` of each class, unless that takes more than ``MAX_REQUESTS`` in all.
    """
    rng = np.random.default_rng([server.seed, seed])
    mechanism = server.mechanism
    loop = Loop(mechanism, streams_together(server, loads, rng), rng)
    loop.advance(math.inf, 3 * sum(loads.values()))
    window_s, first = loop.now, len(loop.start)
    long_s = max(
        15 * mechanism.stall_gap_s if mechanism.stall_gap_s else 0.0,
        3 * mechanism.drift_period_s if mechanism.drift else 0.0,
    )
    loop.advance(math.inf, loop.ended + requests)
    while len(loads) > 1 and not loop.crashed and len(loop.start) - first < MAX_REQUESTS:
        fewest = np.bincount(loop.stream[first:], minlength=len(loads)).min()
        if fewest >= requests:
            break
        loop.advance(math.inf, loop.ended + requests)
    loop.advance(window_s + long_s, first + MAX_REQUESTS)
    last = len(loop.start)
    longest_s = max(server.classes[name].deadline_s for name in loads)
    loop.advance(loop.now + longest_s + 1)  # let those started by then end
    if loop.crashed:
        return dict.fromkeys(loads, (0.0, 0.0))
    stream = np.array(loop.stream[first:last])
    completed = np.array([outcome is Outcome.COMPLETED for outcome in loop.outcome[first:last]])
    start = np.array(loop.start[first:last])
    token = np.array([math.inf if at is None else at for at in loop.first[first:last]])
    found = {}
    for index, name in enumerate(loads):
        mine = stream == index
        met = completed[mine]
        if (objective := server.classes[name].ttft) is not None:
            added = mechanism.first_token_s * rng.lognormal(0, 0.3, len(met))
            met = met & (token[mine] - start[mine] + added <= objective.at_most_s)
        found[name] = (float(completed[mine].mean()), float(met.mean()))
    return found


def holds(service_class: ServiceClass, y: float, z: float) -> bool:
    """Whether these shares keep the class's floor and objective."""
    share = service_class.ttft.share if service_class.ttft else 0.0
    return y >= service_class.completion_floor and z >= share


def pair_holds(server: VirtualServer, loads: Mapping[str, int], requests: int = REQUESTS) -> bool:
    """Whether every class of ``loads`` holds with all of them at once."""
    found = shares_together(server, loads, requests)
    return all(holds(server.classes[name], *found[name]) for name in loads)


def true_pair(server: VirtualServer, alone: Mapping[str, int], requests: int = REQUESTS) -> dict[str, int]:
    """The largest (s n_1, s n_2), s to 1/64, that holds, by bisection; empty if not even the smallest."""

    def pair(part: int) -> dict[str, int]:
        return {name: max(1, math.floor(part * n / PARTS)) for name, n in alone.items()}

    good, bad = 0, PARTS + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if pair_holds(server, pair(middle), requests) else (good, middle)
    return pair(good) if good else {}


def true_limit(server: VirtualServer, requests: int = REQUESTS) -> dict[str, Any]:
    """``{"limit", "at": [y, z], "above": [N, y, z] | None, "tried": number of N}``; 0: not even N = 1."""
    top = server.service_class.ladder[-1]
    found: dict[int, tuple[float, float]] = {}

    def good_at(n: int) -> bool:
        if n not in found:
            found[n] = shares(server, n, requests)
        return holds(server.service_class, *found[n])

    good, bad = 0, None
    n = 1
    while bad is None and good < top:
        if good_at(n):
            good, n = n, min(2 * n, top)
        else:
            bad = n
    while True:
        while bad is not None and bad - good > max(1, math.floor(0.005 * good)):
            middle = round(math.sqrt(good * bad)) if bad > 2 * good > 0 else (good + bad) // 2
            good, bad = (middle, bad) if good_at(middle) else (good, middle)
        below = sorted(
            {good - 1, good - 2, good - 3, *(math.floor(good * f) for f in (0.97, 0.94, 0.9, 0.8))}
        )
        failing = [n for n in reversed(below) if n > 0 and not good_at(n)]
        if not failing:
            break
        bad = min(failing)
        good = max([n for n in found if n < bad and good_at(n)], default=0)
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
