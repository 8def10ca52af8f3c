"""Where a server's behaviour changes as concurrency grows.

- **Latency knee**: where the first-token delay climbs faster than request volume. With t = p95 TTFT
  and its 90 % interval [t-, t+], it is the first pair (a, b) of steps, b/a >= 1.25, with
  ln(t-_b / t+_a) / ln(b / a) > 1 and t_b > 3 t_1. Between them a step m is past the knee if its slope
  from the fixed lower edge, ln(t_m / t_a) / ln(m / a), is above 1 and t_m > 1.5 t_a. It is a bracket.
- **Completion knee**: the last step before one whose completion is lower than that of the pooled
  lower steps (Fisher's exact test, one-sided, 0.05 / number of steps) by at least 0.5 points.
- **Throughput knee**: the smallest N with X(N) >= 0.95 max X.
- **Kneedle** (Satopaa et al. 2011) is an annotation for a figure and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from include.capacity.limits.evidence import Evidence

PAIR_RATIO = 1.25
CLIMB_FROM_ONE = 3.0
"""Past the knee the delay is at least this multiple of the delay with one request in flight."""
CLIMB_FROM_EDGE = 1.5


@dataclass(frozen=True, kw_only=True)
class LatencyKnee:
    """A bracket: up to ``low`` the first-token delay grows slower than volume, at ``high`` faster."""

    low: int
    high: int


class Delay(NamedTuple):
    """p95 of the first-token delay at one concurrency, with its interval; seconds."""

    n: int
    p95: float
    low: float
    high: float


def delays(evidence: Iterable[Evidence]) -> list[Delay]:
    """First-token delays by concurrency, ascending; of two steps at one concurrency the last counts.

    Without an interval (too few requests) it is unbounded, so that the step starts no knee.
    """
    found = {}
    for e in evidence:
        if e.ttft_p95_s is not None:
            low = 0.0 if e.ttft_p95_low_s is None else e.ttft_p95_low_s
            high = math.inf if e.ttft_p95_high_s is None else e.ttft_p95_high_s
            found[e.concurrency] = Delay(e.concurrency, e.ttft_p95_s, low, high)
    return [found[n] for n in sorted(found)]


def latency_knee(ladder: Iterable[Evidence], between: Iterable[Evidence] = ()) -> LatencyKnee | None:
    """The latency knee, or None if there is none in the range.

    ``ladder``: the steps in which the pair is looked for, of which the lowest is t_1; ``between``:
    further steps, from bisecting the pair.
    """
    steps = delays(ladder)
    further = delays(between)
    for at, b in enumerate(steps):
        a = next((below for below in reversed(steps[:at]) if b.n >= PAIR_RATIO * below.n), None)
        if a is None or not _climbs(a, b, steps[0]):
            continue
        inside = {d.n: d for d in [*steps, *further] if a.n < d.n < b.n}
        high = min((n for n, d in inside.items() if _past(a, d)), default=b.n)
        low = max((n for n in inside if n < high), default=a.n)
        return LatencyKnee(low=low, high=high)
    return None


def _climbs(a: Delay, b: Delay, first: Delay) -> bool:
    return _slope(a.high, b.low, b.n / a.n) > 1 and b.p95 > CLIMB_FROM_ONE * first.p95


def _past(a: Delay, m: Delay) -> bool:
    return _slope(a.p95, m.p95, m.n / a.n) > 1 and m.p95 > CLIMB_FROM_EDGE * a.p95


def _slope(t_a: float, t_b: float, ratio: float) -> float:
    """Slope in log-log; from or to a delay of 0 it is infinite."""
    if t_b <= 0 or math.isinf(t_a):
        return -math.inf
    return math.inf if t_a <= 0 else math.log(t_b / t_a) / math.log(ratio)
