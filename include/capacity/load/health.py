"""Was the client the bottleneck? What is measured of ourselves, and when a step is called invalid.

**Event-loop lag**: a task wants to wake every 20 ms; how late it wakes is how late any byte may have been
stamped. One late wake hides the ticks it slept through, so these are filled in with the lag they would
have seen (a stall of one second then weighs as one second, not as one sample).

**CPU share** of each process, of one core: an event loop is one thread.

**Verdict**. Thresholds are effects, relative to what the step measures: an instrument is good enough if its
error is small beside the median latency; 20 ms of wall time are always allowed, which is a few time
slices of a busy machine's scheduler. Being late matters if it was for 1 % of the window (it is then in the
p99 that we report) and for 0.2 s of wall time in all: one hiccup of the machine spoils no step, however
short. CPU alone proves nothing (a busy but punctual client is fine), so it
counts only together with lag. Unexplained idle slots need no cause: concurrency was not reached.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from include.capacity.errors import MeasurementError

TICK_S = 0.02
ALLOWED_LAG_S = 0.020
"""Wall seconds of lag (p99) that are never held against the client."""
ALLOWED_LAG_SHARE = 0.10
"""... or this share of the median latency, whichever is more."""
LATE_SHARE = 0.01
LATE_LEAST = 10
"""Ticks of 20 ms, or requests, that must have been late."""
BUSY_CPU_SHARE = 0.90
"""Of one core. Above it the loop has no reserve, and half the allowed lag is enough for a verdict."""
REACHED_SHARE = 0.95
"""In flight (deliberate pauses and vain connection attempts added) below this share of N: not reached."""
BEHIND_S = 0.25
"""Server seconds a simulated server may have fallen behind its own clock within a window."""

SPARE_DESCRIPTORS = 64
"""For files, the metrics connection and what the interpreter opens meanwhile."""


def ensure_descriptors(connections: int) -> None:
    """Make sure that this process may open ``connections`` more; raises the soft limit where allowed.

    MeasurementError says how many are needed and what to do: a connection that fails for want of
    descriptors would look like the server's fault.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = psutil.Process().num_fds() + connections + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard == resource.RLIM_INFINITY or need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        return
    raise MeasurementError(
        f"file descriptors: {connections} connections need {need} open files, this process may have {hard}; "
        f"raise the limit (ulimit -n {need}) or lower the concurrency"
    )


class LagSampler:
    """Samples the running event loop's lag until cancelled."""

    def __init__(self) -> None:
        self._due: list[float] = []
        self._lag: list[float] = []

    async def run(self) -> None:
        """Sample for ever."""
        due = time.perf_counter() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            self._due.append(due)
            self._lag.append(max(0.0, now - due))
            due = max(due + TICK_S, now)

    def between(self, start: float, end: float) -> np.ndarray:
        """Lags in wall seconds of ticks due in a span of wall stamps, slept-through ones filled in."""
        return filled_in(self._due, self._lag, start, end)


def filled_in(due: Sequence[float], lag: Sequence[float], start: float, end: float) -> np.ndarray:
    """Lag of every tick in ``[start, end]``: a wake late by L also stands for the ticks within L.

    >>> filled_in([0.0], [0.05], 0.0, 1.0).round(2).tolist()
    [0.05, 0.03, 0.01]
    """
    found: list[float] = []
    for at, late in zip(due, lag, strict=True):
        missed = np.arange(0, int(late / TICK_S) + 1) * TICK_S
        inside = (at + missed >= start) & (at + missed <= end)
        found.extend((late - missed[inside]).tolist())
    return np.asarray(found)


class CpuMeter:
    """CPU time of this process between two stamps, as a share of one core."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """Note the CPU time used so far."""
        times = self._process.cpu_times()
        self._marks.append((time.perf_counter(), times.user + times.system))

    @property
    def share(self) -> float | None:
        """Between the first and the last mark; None before there are two."""
        if len(self._marks) < 2:
            return None
        (start, used), (end, used_later) = self._marks[0], self._marks[-1]
        return (used_later - used) / (end - start) if end > start else None


@dataclass(kw_only=True)
class LoopHealth:
    """One loop over its window; seconds are the wall's."""

    service_class: str
    concurrency: int
    attempted: int
    """Counted requests, in the window."""
    complete: bool
    """The loop counted all it was asked to (neither capped nor stopped)."""
    inflight_mean: float | None
    paused_mean: float = 0.0
    """Slots in a deliberate pause, on average."""
    vain_mean: float = 0.0
    """Slots trying in vain to reach the server, on average."""
    median_latency_s: float | None = None
    """TTFT where streamed, else E2E, of completed requests."""
    own_fault: str | None = None
    """The error of a request that failed for want of our own descriptors, ports or memory."""


@dataclass
class ProcessHealth:
    """One process of the client over a step's window."""

    name: str
    """For people; empty where there is only one."""
    lags_s: Sequence[float] | np.ndarray
    """Event-loop lag of every tick in the window, in wall seconds."""
    cpu_share: float | None


@dataclass(kw_only=True)
class ClientHealth:
    """The client over a step's window; seconds are the wall's. None is unknown."""

    loops: Sequence[LoopHealth]
    processes: Sequence[ProcessHealth]
    send_lags_s: Sequence[float] | np.ndarray
    """From the wish to send to the write, of requests on connections that were open already."""
    server_behind_s: float | None = None
    """Server seconds a simulated server fell behind its clock."""


def bottleneck(health: ClientHealth) -> str | None:
    """Why the step does not measure the server, and what to change; None if it does."""
    for loop in health.loops:
        if loop.own_fault:
            return (
                f"client-bound: {loop.service_class}: a limit of our own ({loop.own_fault}); raise those of "
                "open files (ulimit -n) and local ports (ip_local_port_range), or lower the concurrency"
            )
    latencies = [loop.median_latency_s for loop in health.loops if loop.median_latency_s is not None]
    allowed = max(ALLOWED_LAG_S, ALLOWED_LAG_SHARE * min(latencies, default=0.0))
    remedy = "give the client a machine or a core of its own, or lower the concurrency"
    shares = [process.cpu_share for process in health.processes if process.cpu_share is not None]
    busiest = max(shares, default=None)
    shown_cpu = _shown(busiest)
    lags_of = [
        (f"event-loop lag{process.name and ' of '}{process.name}", process.lags_s, process.cpu_share)
        for process in health.processes
    ]
    for what, lags, cpu in (*lags_of, ("send lag", health.send_lags_s, busiest)):
        limit = allowed / 2 if cpu is not None and cpu > BUSY_CPU_SHARE else allowed
        late = np.asarray(lags) > limit
        if late.sum() >= max(LATE_LEAST, LATE_SHARE * late.size):
            return (
                f"client-bound: {what} above {limit * 1000:.0f} ms of wall time for {late.mean():.1%} "
                f"of the window (p99 {np.quantile(lags, 0.99) * 1000:.0f} ms{_shown(cpu)}); {remedy}"
            )
    for loop in health.loops:
        if loop.complete and loop.attempted < loop.concurrency:
            return (
                f"concurrency not reached: {loop.service_class}: {loop.attempted} requests counted at "
                f"concurrency {loop.concurrency}; ask for at least three times the concurrency"
            )
        if loop.inflight_mean is None:
            continue
        reached = loop.inflight_mean + loop.paused_mean + loop.vain_mean
        if reached < REACHED_SHARE * loop.concurrency:
            return (
                f"concurrency not reached: {loop.service_class}: {loop.inflight_mean:.1f} in flight on "
                f"average, {loop.concurrency} asked for, only {loop.paused_mean + loop.vain_mean:.1f} "
                f"explained by failures{shown_cpu}; {remedy}"
            )
    behind = health.server_behind_s
    if behind is not None and behind > BEHIND_S:
        return (
            f"simulator-bound: the simulated server fell {behind:.2f} s behind its own clock; lower its time "
            "scale or free the machine's cores"
        )
    return None


def _shown(cpu_share: float | None) -> str:
    return "" if cpu_share is None else f", CPU {cpu_share:.0%} of a core"
