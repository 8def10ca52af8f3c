"""How often an unchanged server is said to have changed, and how soon a slower one is found.

``python -m tests.benchmarks.bench_changes`` sweeps virtual servers (``servers.generate``) night after
night, each night with other requests, through the real planner, decider and ``compute_limits``, and puts
the limits through ``limits.changes``. The first ``--nights`` nights are one and the same server: a change
claimed in them is a false alarm. Then come two nights on which all the server's work takes ``--slower``
times as long; where the slow nights' limits are lower at all, a fall should be claimed. The interactive cap
at the latency knee is as in ``bench_limits``. Nothing here is tuned on: the seed is another one than that
of ``bench_limits``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from include.capacity.limits.changes import CHANGED, LEAST_SHARE, Verdict, changes
from include.capacity.words import EXPORTABLE
from tests.benchmarks.bench_limits import run_sweep
from tests.benchmarks.servers import VirtualServer, generate

SLOW_NIGHTS = 2


def slowed(server: VirtualServer, factor: float) -> VirtualServer:
    """The server with all its work taking ``factor`` times as long."""
    one = server.mechanism
    return replace(
        server,
        mechanism=replace(
            one,
            step_s=one.step_s * factor,
            per_seq_s=one.per_seq_s * factor,
            per_seq2_s=one.per_seq2_s * factor,
            prefill_token_s=one.prefill_token_s * factor,
        ),
    )


def limits_of(server: VirtualServer, nights: int, factor: float) -> list[dict[str, Any]]:
    """The server's limit of each night, in order."""
    slow = slowed(server, factor)
    found: list[dict[str, Any]] = []
    for night in range(nights + SLOW_NIGHTS):
        _, _, result = run_sweep(server if night < nights else slow, 9000 + night)
        limits: Any = result["limits"]
        (entry,) = (one for one in limits if one["class"] == server.class_name)
        about = {"run_id": f"n{night}", "measured_at": f"2026-01-{1 + night:02d}", "stack": None}
        found.append({**entry, **about})
    return found


def print_line(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, and print what was claimed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--per-family", type=int, default=4)
    parser.add_argument("--nights", type=int, default=6)
    parser.add_argument("--slower", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    servers = generate(asked.per_family, asked.seed)
    with ProcessPoolExecutor(asked.processes) as pool:
        swept = list(pool.map(partial(limits_of, nights=asked.nights, factor=asked.slower), servers))
    unchanged: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for server, limits in zip(servers, swept, strict=True):
        verdicts = [change["verdict"] if change else "none" for change in changes(limits)]
        calm, slow = verdicts[: asked.nights], verdicts[asked.nights :]
        unchanged.update(calm[1:])
        numbers = [one["limit"] or 0 for one in limits]
        usable = all(one["status"] in EXPORTABLE for one in limits[: asked.nights])
        level = sorted(numbers[: asked.nights])[asked.nights // 2]
        lower = max(numbers[asked.nights :]) < (1 - LEAST_SHARE) * level
        if usable and lower:
            found["first" if slow[0] == Verdict.FELL else "second" if Verdict.FELL in slow else "not"] += 1
        print_line(f"{server.name:24} {' '.join(f'{n:4}' for n in numbers)}  {' '.join(verdicts)}")
    claims = sum(n for verdict, n in unchanged.items() if verdict in CHANGED)
    print_line(
        f"\nunchanged: {claims} changes claimed in {sum(unchanged.values())} nights: {dict(unchanged)}"
    )
    print_line(
        f"{asked.slower:g} times slower, and lower on both nights: fall claimed on night {dict(found)}"
    )


if __name__ == "__main__":
    main()
