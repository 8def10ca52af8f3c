"""When the client was what was measured: lag, CPU, concurrency not reached, our own limits."""

from __future__ import annotations

import asyncio
import resource
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from include.capacity.errors import MeasurementError
from include.capacity.load import health
from include.capacity.load.health import (
    ClientHealth,
    CpuMeter,
    LagSampler,
    LoopHealth,
    ProcessHealth,
    bottleneck,
    ensure_descriptors,
    filled_in,
)


def loop(**changes: Any) -> LoopHealth:
    usual: dict[str, Any] = {
        "service_class": "interactive",
        "concurrency": 64,
        "attempted": 640,
        "complete": True,
        "inflight_mean": 63.9,
        "median_latency_s": 0.1,
    }
    return LoopHealth(**{**usual, **changes})


def client(*loops: LoopHealth, **changes: Any) -> ClientHealth:
    """One process, or with ``processes`` several."""
    usual: dict[str, Any] = {"lags_s": [0.002] * 1000, "send_lags_s": [0.001] * 600, "cpu_share": 0.4}
    given = {**usual, **changes}
    one = ProcessHealth("", given.pop("lags_s"), given.pop("cpu_share"))
    return ClientHealth(**{"loops": loops or [loop()], "processes": [one], **given})


def test_one_late_process_of_several_is_enough_and_is_named() -> None:
    fine, late = [0.002] * 1000, [0.030] * 1000
    processes = [ProcessHealth("the first", fine, 0.99), ProcessHealth("the second", fine, 0.2)]
    assert bottleneck(client(processes=processes)) is None
    for at, name in enumerate(("the first", "the second")):
        processes[at].lags_s = late
        why = bottleneck(client(processes=processes))
        assert why is not None
        assert f"event-loop lag of {name} above" in why
        processes[at].lags_s = fine


def test_a_healthy_client_is_not_suspected() -> None:
    assert bottleneck(client()) is None
    assert bottleneck(client(lags_s=[], send_lags_s=[], cpu_share=None)) is None


@pytest.mark.parametrize(
    ("changes", "suspected"),
    [
        ({"lags_s": [0.019] * 1000}, False),  # a busy machine's scheduler
        ({"lags_s": [0.001] * 985 + [0.030] * 15}, True),
        ({"lags_s": [0.001] * 995 + [0.9] * 5}, False),  # one hiccup of 0.1 s
        ({"lags_s": [0.001] * 50 + [0.05] * 3}, False),  # one hiccup in a short window
        ({"lags_s": [0.001] * 5000 + [0.05] * 30}, False),  # late for less than 1 %
        ({"send_lags_s": [0.030] * 600}, True),
        ({"send_lags_s": [30.0] * 20}, True),  # requests sent 30 s late
        ({"cpu_share": 0.99}, False),  # busy and punctual
        ({"cpu_share": 0.99, "lags_s": [0.015] * 1000}, True),  # busy and no reserve
    ],
)
def test_lag_beyond_what_the_latency_bears_is_the_clients(changes: dict[str, Any], suspected: bool) -> None:
    said = bottleneck(client(**changes))
    assert (said is not None) is suspected
    if said:
        assert said.startswith("client-bound:")
        assert "a core of its own, or lower the concurrency" in said


def test_lag_is_judged_against_the_latency_measured() -> None:
    assert bottleneck(client(loop(median_latency_s=4.0), lags_s=[0.3] * 99)) is None
    assert bottleneck(client(loop(median_latency_s=4.0), loop(median_latency_s=0.2), lags_s=[0.3] * 99))


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({"inflight_mean": 61.0}, True),
        ({"inflight_mean": 50.0}, False),
        ({"inflight_mean": 20.0, "paused_mean": 43.5}, True),  # refusals explain it
        ({"inflight_mean": 20.0, "vain_mean": 43.5}, True),
        ({"attempted": 10}, False),  # concurrency 64, 10 requests in all
        ({"attempted": 10, "complete": False}, True),  # stopped before that
        ({"inflight_mean": None}, True),  # unknown
    ],
)
def test_concurrency_not_reached_needs_an_explanation(changes: dict[str, Any], reached: bool) -> None:
    said = bottleneck(client(loop(**changes)))
    assert (said is None) is reached
    if said:
        assert said.startswith("concurrency not reached: interactive")


def test_our_own_limits_are_named_with_what_to_change() -> None:
    said = bottleneck(client(loop(own_fault="127.0.0.1:8000: Too many open files on our side")))
    assert said is not None
    assert "Too many open files" in said
    assert "ulimit -n" in said


def test_a_simulator_behind_its_clock_is_no_server() -> None:
    assert bottleneck(client(server_behind_s=0.02)) is None
    assert "simulator-bound" in (bottleneck(client(server_behind_s=3.0)) or "")


def test_a_stall_stands_for_all_the_ticks_it_slept_through() -> None:
    due = [0.0, 1.0, 2.0]
    lag = [0.001, 0.2, 0.001]
    filled = filled_in(due, lag, 0.0, 3.0)
    assert len(filled) == 1 + 11 + 1
    assert filled.max() == pytest.approx(0.2)
    assert filled_in(due, lag, 1.9, 3.0).tolist() == [0.001]


def test_a_blocked_event_loop_shows_and_a_free_one_does_not() -> None:
    """In a second, the loop is blocked for 0.3 s: a lag of p99 near 0.3 s."""

    async def work(blocked_s: float) -> np.ndarray:
        sampler = LagSampler()
        start = time.perf_counter()
        task = asyncio.create_task(sampler.run())
        await asyncio.sleep(0.1)
        time.sleep(blocked_s)
        await asyncio.sleep(0.5)
        task.cancel()
        return sampler.between(start, time.perf_counter())

    lags = asyncio.run(work(0.3))
    assert np.quantile(lags, 0.99) > 0.2
    assert bottleneck(client(lags_s=lags)) is not None
    assert len(lags) >= 20


def test_cpu_share_is_of_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 s of CPU time, its own and the kernel's, in 2 s; later 3 s in 4 s."""
    readings = iter([(100.0, 7.0, 1.0), (102.0, 8.0, 1.5), (104.0, 9.25, 1.75)])
    meter = CpuMeter()
    assert meter.share is None

    def mark() -> None:
        at, user, system = next(readings)
        monkeypatch.setattr(health.time, "perf_counter", lambda: at)
        monkeypatch.setattr(meter._process, "cpu_times", lambda: SimpleNamespace(user=user, system=system))
        meter.mark()

    mark()
    assert meter.share is None, "of no time there is no share"
    mark()
    assert meter.share == pytest.approx(0.75)
    mark()
    assert meter.share == pytest.approx(0.75)


def test_cpu_time_is_this_processs() -> None:
    begun = time.perf_counter()
    meter = CpuMeter()
    meter.mark()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    meter.mark()
    took = time.perf_counter() - begun
    assert meter.share is not None
    assert meter.share * took >= 0.15, "however long the machine made us wait for it"


def test_descriptors_are_raised_where_allowed_and_refused_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    ensure_descriptors(100)
    assert limits["now"] == (1024, 4096), "enough already"
    ensure_descriptors(2000)
    soft, hard = limits["now"]
    assert 2064 <= soft <= 4096
    assert hard == 4096
    with pytest.raises(MeasurementError) as error:
        ensure_descriptors(5000)
    said = str(error.value)
    assert "5000 connections need" in said
    assert "this process may have 4096" in said
    assert "ulimit -n" in said
