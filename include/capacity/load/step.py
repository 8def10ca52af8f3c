"""One step: load a server at a concurrency, and keep everything that happened.

In order: check that we can (file descriptors) and that the server is idle; calibrate prompt lengths; open
the connections; start the loops (two, if two classes share the server); wait until all are steady; open
every window at the same instant; keep the load up until each has counted enough; abort the rest. Beside
that run the server's metrics, our own health and the progress. What came of it is a :class:`StepRun`.

A **prime** step only runs the load for a while and drains it, until the server is idle again; none of its
requests counts. What it cost us is kept: it says how many load processes the later steps need.

A server that dies ends the step, not the program: the rows up to then are kept, ``server_crashed`` is set.
It is dead when connections fail, nothing has been answered for a second, and three further attempts
at ``/health`` fail. It hangs when there was no token and no answer for ten seconds (half the deadline, if
that is shorter: its time-outs must not be taken for slow answers) and ``/health`` says nothing either. All
is bounded: warm-up and window by their caps, the last answers by the deadline.

A server that is somebody else's (``theirs``) is not loaded while it serves others. The load ends within a
second once the kill switch (``stop_asked``) gives a reason: everything is aborted and nothing kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import logging
import signal
import statistics
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import uvloop

from include.capacity import vllm_metrics
from include.capacity.config import ServiceClass, StepBounds
from include.capacity.errors import ConfigError, LoadStopped, MeasurementError, RequestRefused
from include.capacity.load.clock import Clock
from include.capacity.load.health import (
    ClientHealth,
    CpuMeter,
    LagSampler,
    LoopHealth,
    ProcessHealth,
    bottleneck,
    ensure_descriptors,
)
from include.capacity.load.loop import ClosedLoop, Decide, Sends
from include.capacity.load.progress import Progress, Snapshot
from include.capacity.load.request import Sender, Target
from include.capacity.load.server_metrics import MetricsPoller
from include.capacity.load.workers import WorkerDied, Workers
from include.capacity.load.workload import Prompts, calibrate, length_note, root_url, speaks_vllm
from include.capacity.results.schema import CLIENT_COLUMNS, Facts, LoadFacts, request_table
from include.capacity.results.spec import StepSpec, step_seed
from include.capacity.words import Outcome, Phase, StopReason

logger = logging.getLogger(__name__)

TICK_S = 0.05
PROGRESS_EVERY_S = 0.25
BUILT_AHEAD = 2000
"""Most requests of a loop built before the load starts, or twice its concurrency if that is more."""

BEFORE = "before the start"
IDLE_WAIT_S = 30.0
"""Longest wait for the server to become idle before the start, in wall seconds."""
POLLS_PER_WINDOW = 6
POLL_LEAST_S, POLL_MOST_S = 0.2, 1.0

SILENT_S = 1.0
"""Wall seconds without any answer, while connections fail, before the server is suspected dead."""
HANG_SILENT_S = 10.0
"""... and without any sign of life, connections open, before it is suspected to hang; half the deadline if
that is shorter."""
PROBES = 3
PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 5.0
SETUP_TIMEOUT_S = 30.0
STOP_ASKED_EVERY_S = 1.0
"""Wall seconds between looks at the kill switch."""

FOREIGN_SHARE = 0.02
"""Foreign requests below one, or below this share of our own concurrency, are not worth a note."""


@dataclass
class StepRun:
    """What came of a step."""

    facts: Facts
    requests: pa.Table
    """REQUEST_SCHEMA, one row for every request sent, the uncounted ones included."""
    metrics: pa.Table
    """METRIC_SCHEMA; empty if the server exports none."""


def run_step(
    spec: StepSpec,
    *,
    target: Target,
    classes: Mapping[str, ServiceClass],
    bounds: StepBounds,
    clock_scale: float = 1.0,
    decide: Decide | None = None,
    progress: Progress | None = None,
    stop_asked: Callable[[], str | None] | None = None,
    theirs: bool = False,
    workers: int = 1,
    run_id: str = "",
    attempt: int = 1,
) -> StepRun:
    """Carry out ``spec`` against ``target``; blocks, on an event loop of its own.

    ``clock_scale``: server seconds per wall second (1 for anything real); all times in ``spec``, ``classes``,
    ``bounds`` and in the result are the server's. ``decide`` judges extendable loads and stops early on
    proven failure (see ``load.loop``). ``stop_asked`` is the kill switch, asked in another thread: why
    the load must stop, None while it may go on. ``theirs``: the server is somebody else's, so it is refused,
    not noted, if it does not become idle before the start. ``workers``: processes that send and read (see
    ``load.workers``); if one, it is this one.

    Errors: ConfigError if a load names an unknown class or its workload cannot be built (DataError for a
    replay file); RequestRefused if the server calls our requests wrong (400, 401, 404, ...);
    MeasurementError if this machine cannot measure it (file descriptors); LoadStopped by the kill
    switch, or for a server that others are using. On Ctrl-C or SIGTERM everything is closed, nothing is kept,
    and the interrupt goes on.
    """
    unknown = sorted({load.service_class for load in spec.loads} - set(classes))
    if unknown:
        raise ConfigError(f"{spec.key}: loads name classes {unknown}, expected some of {sorted(classes)}")
    ensure_descriptors(sum(load.concurrency for load in spec.loads))
    step = _Step(spec, target, classes, bounds, clock_scale, decide, progress, stop_asked, theirs, workers)
    with _quiet_collector(), _forwarded_sigterm() as terminated:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                run = runner.run(step.run(terminated))
        except asyncio.CancelledError:
            # Only our SIGTERM handler cancels from outside; the signal itself goes on below.
            if not terminated.is_set():
                raise
            run = None
        finally:
            if progress is not None:
                progress.close()
    if run is None:
        raise MeasurementError(f"{spec.key}: terminated")
    run.facts.run_id, run.facts.attempt = run_id, attempt
    return run


def poll_every_s(window_wall_s: float) -> float:
    """Wall seconds between readings of the metrics: one, less where a window would hold fewer than six.

    >>> poll_every_s(30.0), poll_every_s(3.0)
    (1.0, 0.5)
    """
    return min(POLL_MOST_S, max(POLL_LEAST_S, window_wall_s / POLLS_PER_WINDOW))


class _ServerGone(Exception):
    """The server answers nothing any more."""


class _Step:
    def __init__(
        self,
        spec: StepSpec,
        target: Target,
        classes: Mapping[str, ServiceClass],
        bounds: StepBounds,
        scale: float,
        decide: Decide | None,
        progress: Progress | None,
        stop_asked: Callable[[], str | None] | None,
        theirs: bool,
        workers: int,
    ) -> None:
        self.spec = spec
        self.stop_asked = stop_asked
        self.theirs = theirs
        self.target = target
        self.classes = classes
        self.bounds = bounds
        self.decide = None if spec.phase is Phase.BASELINE else decide
        self.progress = progress
        self.clock = Clock(scale)
        self.loops: list[ClosedLoop] = []
        self.prompts: list[Prompts] = []
        self.notes: list[str] = []
        self.stage = "setting up"
        self.lag = LagSampler()
        self.cpu = CpuMeter()
        self.workers = Workers(workers) if workers > 1 else None
        self.worker_health: list[ProcessHealth] = []
        self.invalid: str | None = None
        self.steady = False
        self.ready_at: float | None = None
        """When warm-up ended."""
        self.drained_at: float | None = None
        """When a prime step's last answer had ended."""
        self.shortest_deadline_s = min(classes[load.service_class].deadline_s for load in spec.loads)
        self.longest_deadline_s = max(classes[load.service_class].deadline_s for load in spec.loads)

    async def run(self, terminated: threading.Event) -> StepRun:
        """The whole step."""
        _cancel_on(terminated)
        headers = {"Authorization": f"Bearer {self.target.api_key}"} if self.target.api_key else {}
        async with contextlib.AsyncExitStack() as stack:
            await self._obey("not loaded")
            await stack.enter_async_context(_beside(self._report()))
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=SETUP_TIMEOUT_S, headers=headers, trust_env=False)
            )
            await self._prepare(client)
            poller = MetricsPoller(
                self.target.metrics_url or f"{root_url(self.target.base_url)}/metrics",
                self.clock,
                every_wall_s=poll_every_s(self.clock.wall(min(self.spec.min_window_s, self.spec.cap_s))),
                own=lambda: sum(loop.in_flight for loop in self.loops),
                api_key=self.target.api_key,
            )
            stack.push_async_callback(asyncio.to_thread, poller.stop)
            await self._wait_idle(poller, IDLE_WAIT_S, BEFORE)
            senders = await self._open_senders(stack)
            self.clock = poller.clock = Clock(self.clock.scale)
            facts = Facts(
                spec=self.spec.to_json(), started_at=datetime.datetime.now(datetime.UTC).isoformat()
            )
            self._make_loops(senders)
            poller.polls.clear()
            poller.start()
            async with _beside(self.lag.run()):
                try:
                    await self._load(client, poller)
                except _ServerGone as gone:
                    facts.error = str(gone)
                    facts.server_crashed = True
                    self._end_loops(StopReason.SERVER_GONE)
                except WorkerDied as died:
                    self.invalid = f"client-bound: {died}; its requests are lost"
                    self._end_loops(StopReason.ERROR)
                finally:
                    self._mark_cpu()
                    for loop in self.loops:
                        with contextlib.suppress(WorkerDied):  # known by now
                            await loop.stop()
                await self._ask_workers()
                if self.spec.phase is Phase.PRIME and not facts.server_crashed:
                    await self._wait_idle(poller, self.clock.wall(self.longest_deadline_s), "after the drain")
            await asyncio.to_thread(poller.stop)
        return self._result(facts, poller)

    # -- before

    async def _prepare(self, client: httpx.AsyncClient) -> None:
        base, name = self.target.base_url, self.target.served_name
        vllm = await speaks_vllm(client, base)
        for load in self.spec.loads:
            workload = self.classes[load.service_class].workload
            prompts = Prompts(
                workload,
                served_name=name,
                seed=step_seed(self.spec.seed, self.spec.key, load.service_class),
                tokenizing=None
                if workload.replay
                else await calibrate(client, base, name, workload.endpoint),
                vllm=vllm,
            )
            most = max(BUILT_AHEAD, 2 * load.concurrency)
            prompts.build_ahead(min(most, load.max_requests + 4 * load.concurrency))
            self.prompts.append(prompts)

    async def _wait_idle(self, poller: MetricsPoller, longest_wall_s: float, when: str) -> None:
        """Wait until the server runs nothing and nothing waits, as its metrics tell it."""
        self.stage = f"waiting for an idle server {when}"
        until = self.clock.now() + longest_wall_s
        while True:
            poll = await asyncio.to_thread(poller.poll)
            busy = None if poll is None else vllm_metrics.busy(poll.series)
            if not busy:
                return
            if self.clock.now() >= until and self.theirs and when == BEFORE:
                raise LoadStopped(
                    f"{self.spec.label}: not loaded: {self.target.base_url} had {busy:.0f} requests of others"
                    f" running or waiting, after {longest_wall_s:.0f} s of waiting for it to become idle"
                )
            if self.clock.now() >= until:
                self.notes.append(
                    f"foreign traffic: the server had {busy:.0f} requests running or waiting {when}, after "
                    f"{longest_wall_s:.0f} s of waiting for it to become idle"
                )
                return
            await asyncio.sleep(TICK_S)

    async def _open_senders(self, stack: contextlib.AsyncExitStack) -> Sequence[Sends]:
        """A sender for each load, with its connections open."""
        kinds = [
            (self.classes[load.service_class].workload.endpoint, load.concurrency) for load in self.spec.loads
        ]
        if self.workers is not None:
            stack.push_async_callback(self.workers.aclose)
            return await self.workers.start(self.target, kinds)
        senders = []
        for endpoint, slots in kinds:
            sender = Sender(self.target, endpoint, slots)
            stack.push_async_callback(sender.aclose)
            await sender.connect()
            senders.append(sender)
        return senders

    def _make_loops(self, senders: Sequence[Sends]) -> None:
        for load, prompts, sender in zip(self.spec.loads, self.prompts, senders, strict=True):
            self.loops.append(
                ClosedLoop(
                    load,
                    self.classes[load.service_class],
                    sender=sender,
                    prompts=prompts,
                    clock=self.clock,
                    columns={
                        "model": self.spec.model,
                        "phase": self.spec.phase.value,
                        "repeat": self.spec.repeat,
                    },
                    seed=step_seed(self.spec.seed, self.spec.key, load.service_class, "slots"),
                    pause_after_refusal_s=self.bounds.pause_after_refusal_s,
                    workers=self.workers.count if self.workers else 1,
                )
            )

    # -- under load

    async def _load(self, client: httpx.AsyncClient, poller: MetricsPoller) -> None:
        """Run the load until all is counted; raises what ends the step before that."""
        self.stage = "starting"
        for loop in self.loops:
            loop.start()
        work = asyncio.create_task(self._prime() if self.spec.phase is Phase.PRIME else self._measure(poller))
        watches = {asyncio.create_task(self._watch(client)), asyncio.create_task(self._watch_switch())}
        try:
            done, _ = await asyncio.wait({work, *watches}, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                work.result()
                self._raise_refusal()
            else:
                done.pop().result()
        finally:
            for task in (work, *watches):
                task.cancel()
            await asyncio.gather(work, *watches, return_exceptions=True)

    async def _prime(self) -> None:
        self.stage = "priming"
        self._mark_cpu()
        until = self.clock.now() + self.clock.wall(self.spec.cap_s)
        for loop in self.loops:
            loop.stop_reason = StopReason.ENOUGH
        while not all(sum(loop.outcomes.values()) >= loop.load.requests for loop in self.loops):
            if self.clock.now() >= until:
                for loop in self.loops:
                    loop.stop_reason = StopReason.CAP
                break
            await asyncio.sleep(TICK_S)
        self.stage = "draining"
        await asyncio.gather(*(loop.drain() for loop in self.loops))
        self.drained_at = self.clock.now()

    async def _measure(self, poller: MetricsPoller) -> None:
        self.stage = "warm-up"
        until = self.clock.started + self.clock.wall(self.bounds.warmup_cap_s)
        while not (steady := all(loop.steady_now for loop in self.loops)):
            if self.clock.now() >= until:
                self.notes.append(
                    f"warm-up: not steady at its cap of {self.bounds.warmup_cap_s:g} s; measured all the same"
                )
                break
            await asyncio.sleep(TICK_S / 2)
        self.steady = steady
        poller.poke()
        self._mark_cpu()
        self.ready_at = self.clock.now()
        for loop in self.loops:
            loop.open_window(self.ready_at)
        self.stage = "measuring"
        tasks = {
            asyncio.create_task(
                loop.measure(
                    min_window_s=self.spec.min_window_s,
                    cap_s=self.spec.cap_s,
                    decide=self.decide,
                    early_stop=self.spec.early_stop,
                )
            ): loop
            for loop in self.loops
        }
        try:
            await self._until_counted(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.stage = "finishing"
        poller.poke()

    async def _until_counted(self, tasks: Mapping[asyncio.Task[StopReason], ClosedLoop]) -> None:
        """Wait for all loops; a proven failure of one ends the others, too: the pair has failed."""
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = [tasks[task] for task in done if task.result() is StopReason.EARLY_FAIL]
            if failed and pending:
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)
                for task in pending:
                    tasks[task].close_early(StopReason.EARLY_FAIL)
                self.notes.append(f"stopped early because {failed[0].load.service_class} had failed")
                return

    def _end_loops(self, reason: StopReason) -> None:
        """End all loops for ``reason``; of a window that is open counts what had ended."""
        for loop in self.loops:
            if loop.opened is not None and loop.stop_reason is None:
                loop.close_early(reason)
            loop.stop_reason = reason

    async def _watch_switch(self) -> None:
        """Returns never; raises once the kill switch is on."""
        while True:
            await asyncio.sleep(STOP_ASKED_EVERY_S)
            await self._obey("aborted, nothing of it is kept")

    async def _obey(self, what: str) -> None:
        """Raise LoadStopped if the kill switch is on."""
        reason = await asyncio.to_thread(self.stop_asked) if self.stop_asked is not None else None
        if reason is not None:
            raise LoadStopped(f"{self.spec.label}: {what}: kill switch: {reason}")

    def _mark_cpu(self) -> None:
        self.cpu.mark()
        if self.workers is not None:
            self.workers.mark()

    async def _ask_workers(self) -> None:
        """Fetch the workers' health over the window."""
        if self.workers is None or self.invalid is not None:
            return
        try:
            self.worker_health = await self.workers.health(*self._span())
        except WorkerDied as died:
            self.invalid = f"client-bound: {died} before it told how it had been"

    def _span(self) -> tuple[float, float]:
        """Wall stamps of the windows' first opening and last cut; of the whole load, where there is none."""
        opened = [loop.opened for loop in self.loops if loop.opened is not None]
        cuts = [loop.cut for loop in self.loops if loop.cut is not None]
        return min(opened, default=self.clock.started), max(cuts, default=self.clock.now())

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """Returns never; raises when the step cannot go on."""
        vouched_at = alive_at = self.clock.now()
        patience_s = min(HANG_SILENT_S, self.clock.wall(self.shortest_deadline_s) / 2)
        while True:
            await asyncio.sleep(TICK_S)
            self._raise_refusal()
            for loop in self.loops:
                if loop.failure is not None:
                    raise loop.failure
            broken = [loop.broken_since for loop in self.loops if loop.broken_since is not None]
            if broken and self.clock.now() - max(vouched_at, *broken) >= SILENT_S:
                why = await self._probe(client)
                if why is not None and all(loop.broken_since is not None for loop in self.loops):
                    raise _ServerGone(f"the server stopped answering: {why}")
                vouched_at = self.clock.now()
                for loop in self.loops:
                    loop.vouched = loop.broken_since is not None
            heard_at = self._heard_at(alive_at)
            if self.clock.now() - heard_at >= patience_s:
                for loop in self.loops:
                    loop.doubted = True
                why = await self._probe(client)
                if why is not None and self._heard_at(alive_at) == heard_at:
                    silent_s = self.clock.now() - heard_at
                    raise _ServerGone(f"the server hangs: nothing heard for {silent_s:.0f} s, {why}")
                alive_at = self.clock.now()
                for loop in self.loops:
                    loop.doubted = False

    def _heard_at(self, at_least: float) -> float:
        """When any loop last heard of the server, but not before ``at_least``."""
        return max([at_least, *(loop.heard_at for loop in self.loops if loop.heard_at is not None)])

    async def _probe(self, client: httpx.AsyncClient) -> str | None:
        """Why ``/health`` cannot be had in three attempts half a second apart; None if it can."""
        why = ""
        for attempt in range(PROBES):
            if attempt:
                await asyncio.sleep(PROBE_EVERY_S)
            try:
                answer = await client.get(f"{root_url(self.target.base_url)}/health", timeout=PROBE_TIMEOUT_S)
            except httpx.HTTPError as error:
                why = f"/health: {type(error).__name__}: {error}"
                continue
            if answer.status_code < 500:
                return None
            why = f"/health: HTTP {answer.status_code}"
        return why

    def _raise_refusal(self) -> None:
        for loop in self.loops:
            if loop.refused is not None:
                raise RequestRefused(
                    f"{self.spec.label}: {self.target.base_url} ({self.target.served_name}) calls our "
                    f"{loop.load.service_class} requests wrong: {loop.refused.error}"
                )

    # -- progress

    async def _report(self) -> None:
        while self.progress is not None:
            self.progress.update(self._snapshot())
            await asyncio.sleep(PROGRESS_EVERY_S)

    def _snapshot(self) -> Snapshot:
        now = self.clock.now()
        elapsed = now - self.clock.started
        failures: dict[str, int] = {}
        for loop in self.loops:
            for outcome, count in loop.outcomes.items():
                if outcome is not Outcome.COMPLETED:
                    failures[outcome.value] = failures.get(outcome.value, 0) + count
        counted = sum(loop.counted_ended for loop in self.loops if loop.opened is not None)
        wanted = sum(load.requests for load in self.spec.loads)
        return Snapshot(
            label=self.spec.label,
            stage=self.stage,
            in_flight=sum(loop.in_flight for loop in self.loops),
            concurrency=sum(load.concurrency for load in self.spec.loads),
            counted=counted,
            wanted=wanted,
            elapsed_s=elapsed,
            eta_s=self._eta_s(now),
            failures=failures,
        )

    def _eta_s(self, now: float) -> float | None:
        """Wall seconds to go, by the rate of requests so far; None before any has ended."""
        if not self.loops:
            return None
        etas = []
        for loop in self.loops:
            ended = sum(loop.outcomes.values())
            elapsed = now - self.clock.started
            if not ended or elapsed <= 0:
                return None
            if loop.stop_reason is not None and self.spec.phase is not Phase.PRIME:
                continue
            counted = loop.counted_ended if loop.opened is not None else 0
            left = max(0, loop.load.requests - counted) * elapsed / ended
            open_for = now - loop.opened if loop.opened is not None else 0.0
            least = self.clock.wall(self.spec.min_window_s) - open_for
            most = self.clock.wall(self.spec.cap_s) - open_for
            etas.append(max(0.0, min(max(left, least), most)))
        return max(etas, default=0.0)

    # -- after

    def _result(self, facts: Facts, poller: MetricsPoller) -> StepRun:
        clock = self.clock
        rows = [row for loop in self.loops for row in loop.rows()]
        opened = any(loop.opened is not None for loop in self.loops)
        start, end = self._span()
        healths = []
        for loop in self.loops:
            loop_facts, health = self._of_loop(loop)
            facts.loads.append(loop_facts)
            healths.append(health)
        facts.server = poller.summary(start, end)
        facts.client = dict.fromkeys(CLIENT_COLUMNS)
        counted = [row for row in rows if row["counted"]]
        ours = "" if self.workers is None else "the process that keeps the loops"
        processes = [ProcessHealth(ours, self.lag.between(start, end), self.cpu.share), *self.worker_health]
        lag_p99 = max((q for p in processes if (q := _quantile(p.lags_s, 0.99)) is not None), default=None)
        shares = [p.cpu_share for p in processes if p.cpu_share is not None]
        send_lags = self._send_lags()
        send_lag_p99 = _quantile(send_lags, 0.99)
        slots = sum(load.concurrency for load in self.spec.loads)
        facts.client |= {
            "client_lag_p99_s": None if lag_p99 is None else lag_p99 * clock.scale,
            "client_cpu_share": max(shares, default=None),
            "client_workers": self.workers.count if self.workers else 1,
            "send_lag_p99_s": None if send_lag_p99 is None else send_lag_p99 * clock.scale,
            "refill_p50_s": _quantile(
                [r["refill_s"] - r["paused_s"] for r in counted if r["refill_s"] is not None], 0.5
            ),
            "pause_share": sum(health.paused_mean for health in healths) / slots if opened else None,
            "clock_scale": clock.scale,
        }
        facts.invalid = self.invalid
        if opened and not facts.server_crashed and facts.invalid is None:
            behind = [
                poll.series[vllm_metrics.BEHIND]
                for poll in poller.polls
                if start <= poll.at <= end and vllm_metrics.BEHIND in poll.series
            ]
            facts.invalid = bottleneck(
                ClientHealth(
                    loops=healths,
                    processes=processes,
                    send_lags_s=send_lags,
                    server_behind_s=statistics.median(behind) if behind else None,
                )
            )
        facts.notes = [*self.notes, *self._notes(poller, facts)]
        return StepRun(facts, request_table(rows), poller.table(self.spec.key))

    def _of_loop(self, loop: ClosedLoop) -> tuple[LoadFacts, LoopHealth]:
        clock = self.clock
        facts = LoadFacts(
            service_class=loop.load.service_class,
            concurrency=loop.load.concurrency,
            stop_reason=None if loop.stop_reason is None else loop.stop_reason.value,
        )
        counted = [row for row in loop.rows() if row["counted"]]
        health = LoopHealth(
            service_class=loop.load.service_class,
            concurrency=loop.load.concurrency,
            attempted=len(counted),
            complete=loop.stop_reason in (StopReason.ENOUGH, StopReason.DECIDED),
            inflight_mean=None,
            own_fault=loop.own_fault,
        )
        if self.drained_at is not None:
            facts.inflight_mean, facts.inflight_peak = loop.inflight(clock.started, self.drained_at)
        if loop.opened is None:
            return facts, health
        facts.warmup_s = clock.since_start_s(loop.opened)
        facts.warmup_steady = self.steady
        facts.window_start_s = clock.since_start_s(loop.opened)
        if loop.cut is None or loop.cut <= loop.opened:
            return facts, health
        facts.window_s = clock.between_s(loop.opened, loop.cut)
        facts.inflight_mean, facts.inflight_peak = loop.inflight(loop.opened, loop.cut)
        health.inflight_mean = facts.inflight_mean
        health.paused_mean, health.vain_mean = loop.idle_on_purpose(loop.opened, loop.cut)
        latency = "ttft_s" if loop.service_class.workload.stream else "e2e_s"
        median = _quantile(
            [r[latency] for r in counted if r["outcome"] == Outcome.COMPLETED and r.get(latency) is not None],
            0.5,
        )
        health.median_latency_s = None if median is None else clock.wall(median)
        return facts, health

    def _send_lags(self) -> list[float]:
        """Wall seconds from the wish to the write, of requests on connections that were open already."""
        return [
            sent.wrote - sent.wished
            for loop in self.loops
            for sent in loop.sent
            if sent.wrote is not None
            and sent.answer is not None
            and sent.answer.connection_reused
            and (loop.opened is None or sent.wished >= loop.opened)
        ]

    def _notes(self, poller: MetricsPoller, facts: Facts) -> Iterator[str]:
        for loop, prompts in zip(self.loops, self.prompts, strict=True):
            name = prompts.workload.name
            yield from prompts.notes(len(loop.sent))
            answers = [sent.answer for sent in loop.sent]
            note = length_note(
                name,
                [sent.prepared.asked_prompt_tokens for sent in loop.sent],
                [answer.prompt_tokens if answer else None for answer in answers],
            )
            if note:
                yield note
            estimated = sum(answer is not None and answer.usage_estimated for answer in answers)
            if estimated:
                yield f"{name}: {estimated} answers came without usage; their tokens were counted from chunks"
            whole = sum(answer is not None and answer.streamed is False for answer in answers)
            if prompts.workload.stream and whole:
                yield f"{name}: {whole} answers came whole though a stream was asked for; they have no TTFT"
        if self.workers is not None and self.workers.clock_error_s is not None:
            yield (
                f"{self.workers.count} load processes sent and read the requests; their clocks differ by at "
                f"most {self.workers.clock_error_s * 1000:.2f} ms"
            )
        if not poller.polls:
            yield "the server exports no metrics that we know; its side of the step is unknown"
        foreign = facts.server.get("foreign_running_peak")
        own = sum(load.concurrency for load in self.spec.loads)
        if foreign is not None and foreign > max(1.0, FOREIGN_SHARE * own):
            yield (
                f"foreign traffic: for three readings on end the server had up to {foreign:.0f} requests "
                "running or waiting that were not ours"
            )


def _quantile(values: Sequence[float] | np.ndarray, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


@contextlib.asynccontextmanager
async def _beside(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block and end them with it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):  # progress that cannot be shown spoils no measurement
                logger.warning("beside the load: %s: %s", type(result).__name__, result, exc_info=result)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep what exists already out of garbage collections: a full one stops the loop for 0.1 s and more."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _forwarded_sigterm() -> Iterator[threading.Event]:
    """A flag for :func:`_cancel_on`; if it was set, SIGTERM goes on to its former handler afterwards."""
    flag = threading.Event()
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield flag
    finally:
        if threading.current_thread() is threading.main_thread() and former is not None:
            signal.signal(signal.SIGTERM, former)
        if flag.is_set():
            signal.raise_signal(signal.SIGTERM)


def _cancel_on(flag: threading.Event) -> None:
    """On SIGTERM set the flag and cancel the running task, so that everything is closed in order."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's affair
    task = asyncio.current_task()

    def terminate() -> None:
        flag.set()
        if task is not None:
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
