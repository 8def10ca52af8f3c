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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from include.capacity.limits.evidence import Evidence

PAIR_RATIO = 1.25
CLIMB_FROM_ONE = 3.0
"""Past the knee the delay is at least this multiple of the delay with one request in flight."""
CLIMB_FROM_EDGE = 1.5
ALPHA_COMPLETION = 0.05
"""Divided by the number of steps."""
COMPLETION_DROP = 0.005
NEAR_PEAK = 0.95


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

    Without an interval (too few requests) it is unbounded, so that the step starts no knee. A step in
    which the server crashed has no delay worth the name.
    """
    found = {}
    for e in evidence:
        if e.ttft_p95_s is not None and not e.crashed:
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


class Counts(NamedTuple):
    """Successes of attempted requests at one concurrency."""

    n: int
    attempted: int
    successes: int


def completion_knee(steps: Sequence[Counts]) -> tuple[int, int] | None:
    """(last step before, first step of) a drop of the completion rate; None without one.

    ``steps`` in ascending order of concurrency.
    """
    from scipy.stats import fisher_exact  # seconds to import; tasks that only plan do without

    steps = [step for step in steps if step.attempted]
    attempted = successes = 0
    for below, step in pairwise(steps):
        attempted, successes = attempted + below.attempted, successes + below.successes
        drop = successes / attempted - step.successes / step.attempted
        table = [[step.successes, step.attempted - step.successes], [successes, attempted - successes]]
        p = fisher_exact(table, alternative="less").pvalue
        if drop >= COMPLETION_DROP and p < ALPHA_COMPLETION / len(steps):
            return below.n, step.n
    return None


class Throughput(NamedTuple):
    """A rate at one concurrency with its interval; without one, NaN."""

    n: int
    x: float
    low: float
    high: float


def throughput_knee(steps: Sequence[Throughput]) -> dict[str, int] | None:
    """The smallest N with X(N) >= 0.95 max X, and the interval of N that the intervals of X allow.

    ``{"concurrency", "low", "high"}``; None without steps or with a peak of 0. ``low``: the smallest
    N whose upper end reaches 0.95 of the peak's lower end; ``high``: the smallest whose lower end
    reaches 0.95 of the peak itself, else the peak.
    """
    steps = sorted(steps)
    if not steps:
        return None
    peak = max(steps, key=lambda s: s.x)
    if peak.x <= 0:
        return None
    at = next(s.n for s in steps if s.x >= NEAR_PEAK * peak.x)
    peak_low = peak.x if math.isnan(peak.low) else peak.low
    low = next((s.n for s in steps if s.high >= NEAR_PEAK * peak_low), at)
    high = next((s.n for s in steps if s.low >= NEAR_PEAK * peak.x), max(peak.n, at))
    return {"concurrency": at, "low": min(low, at), "high": max(high, at)}


def kneedle(steps: Sequence[Throughput]) -> int | None:
    """Kneedle's knee of throughput against concurrency, for a figure; None if it finds none."""
    if len(steps) < 4 or min(s.x for s in steps) == max(s.x for s in steps):
        return None
    from kneed import KneeLocator  # seconds to import, and only an annotation

    steps = sorted(steps)
    found = KneeLocator(
        [float(s.n) for s in steps], [s.x for s in steps], curve="concave", direction="increasing"
    ).knee
    return None if found is None else int(found)


def isotonic_crossing(steps: Sequence[Counts], at_least: float) -> float | None:
    """Where the success rate, fitted as falling in log N, crosses a floor: a best estimate.

    None if the fit stays above (or starts below) the floor. It exceeds the truth half the time.
    """
    from scipy.optimize import isotonic_regression  # as above

    steps = sorted(step for step in steps if step.attempted)
    if len(steps) < 2:
        return None
    rates = np.array([s.successes / s.attempted for s in steps])
    fit = isotonic_regression(
        rates, weights=np.array([float(s.attempted) for s in steps]), increasing=False
    ).x
    below = np.flatnonzero(fit < at_least)
    if not below.size or below[0] == 0:
        return None
    b = int(below[0])
    part = (fit[b - 1] - at_least) / (fit[b - 1] - fit[b])
    low, high = math.log(steps[b - 1].n), math.log(steps[b].n)
    return math.exp(low + part * (high - low))


KV_FULL = 0.95
REFUSED_SHARE = 0.005


def server_bound(server: Mapping[str, float | None], outcomes: Mapping[str, int]) -> str:
    """What bound a step in the server's own terms: admission, kv, slots, compute or unknown.

    ``admission``: at least 0.5 % were refused (429, 503). ``kv``: the KV cache was full or requests
    were preempted for want of it. ``slots``: requests waited while the cache had room. ``compute``:
    nobody waited and the cache had room, so what is slow is the work itself.
    """
    counted = sum(outcomes.values())
    if counted and outcomes.get("rejected", 0) >= REFUSED_SHARE * counted:
        return "admission"
    kv, preemptions = _known(server, "server_kv_use_peak"), _known(server, "server_preemptions")
    waiting = _known(server, "server_waiting_mean")
    if (preemptions or 0) > 0 or (kv or 0) >= KV_FULL:
        return "kv"
    if waiting is None or kv is None:
        return "unknown"
    return "slots" if waiting >= 1 else "compute"


def _known(server: Mapping[str, float | None], name: str) -> float | None:
    value = server.get(name)
    return None if value is None or math.isnan(value) else value
