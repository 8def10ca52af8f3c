"""The closed loop: exactly N requests in flight, and a window that says which of them count.

**Loop.** N slots; each sends a request, waits until it has ended, and sends the next at once. Starts are
spread over a ramp, so that the first prompts do not all meet an empty server. Slots keep sending until
the step is over; what is still in flight then is aborted and in no rate.

**Pause.** A failure faster than the median completion so far would come back at once and make the
completion rate a measure of our own loop. So the slot waits ``Retry-After``, else 1 s +- 50 %.

**Warm-up** ends when the residence times (and the times to first token) look steady by MSER-5 (White,
Cobb and Spratt, "A comparison of five steady-state truncation heuristics for simulation", Winter
Simulation Conference 2000; used while data arrive as Hoad, Robinson and Davies, "Automating warm-up
length estimation", J. Oper. Res. Soc. 61, 2010), with a check on its blind spot: see :func:`steady`. At
least 2 N requests must have ended, so that every slot has turned over. A cap ends it anyway, and the step
says it was not steady.

**Window.** It opens without a pause. A request counts if it started in ``[opening, cut)``. The cut is the
start of the first request beyond the size wanted (and beyond the shortest window); the load is kept up,
uncounted, until every counted request has ended. So neither the fill nor the drain bends the tail, and
no request is left out for being slow. At the wall-clock cap the cut is the cap itself, and the wait for
the counted ones is bounded by one deadline.

**Size.** Planned checkpoints at n = ``requests``, doubled up to ``max_requests``, each over all requests
before its cut. Between them the verdict is looked at early over the longest prefix in which every
request has ended, each time it has grown by a fifth; only a proven failure stops the loop there.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from include.capacity.config import ServiceClass
from include.capacity.load.clock import Clock
from include.capacity.load.request import Answer, Prepared
from include.capacity.results.spec import Load
from include.capacity.words import Outcome, State, StopReason

Decide = Callable[[str, list[dict[str, Any]], bool], State]
"""(service class, rows, planned) -> verdict. ``rows`` are counted request rows (REQUEST_COLUMNS) in order
of start, every one ended. ``planned``: at a planned checkpoint; else at an early look, of which only a FAIL
counts."""

RAMP_S = 5.0
"""Longest spread of the first starts, in server seconds; half a second a slot for fewer than ten."""
RAMP_PER_SLOT_S = 0.5

LOOK_GROWTH = 1.2
"""Early looks are taken each time the ended prefix has grown by a fifth: some 20 looks a step, which
alpha = 0.005 bears."""
FIRST_LOOK = 20
LOOK_FROM = 1 / 3
"""... and not in the first third of the shortest window: one hiccup of the server is not its verdict."""

WARMUP_LEAST = 10
WARMUP_GROWTH = 1.15
MSER_BATCH = 5
MSER_TAIL = 5
"""MSER never truncates into the last five batches: their variance is too uncertain."""
HALVES_AGREE = 0.05
HALVES_ERRORS = 2.0

TICK_S = 0.02
"""Wall seconds between looks at the loop's state. Cuts follow from stamps, so this only delays them."""

SILENT = frozenset(
    {Outcome.CONNECT_FAILED, Outcome.CONNECTION_LOST, Outcome.DEADLINE_EXCEEDED, Outcome.FIRST_TOKEN_TIMEOUT}
)
"""Outcomes in which the server said nothing at the end."""

JITTER = 0.5
MEDIAN_OF = 1001
"""The median completion is that of the last this many."""


class Sends(Protocol):
    """What the loop needs of a sender."""

    async def send(self, prepared: Prepared, slot: int, deadline_wall_s: float) -> Answer:
        """Send and wait for the end; raises nothing for what server or network do."""


class Feeds(Protocol):
    """What the loop needs of a workload."""

    def next(self) -> Prepared:
        """The next request to send."""

    def restock(self) -> None:
        """Make up for one that was taken; called when there is time."""


# -- rules, as pure functions


def checkpoints(requests: int, max_requests: int) -> list[int]:
    """Planned sizes: ``requests``, doubled, up to ``max_requests``.

    >>> checkpoints(600, 3000)
    [600, 1200, 2400, 3000]
    """
    sizes = [requests]
    while sizes[-1] < max_requests:
        sizes.append(min(2 * sizes[-1], max_requests))
    return sizes


def cut_index(starts: Sequence[float], first: int, opened: float, n: int, min_window: float) -> int | None:
    """Index of the first request that no longer counts; None if it has not started yet.

    ``starts`` are the start stamps of all requests in order, ``first`` the index of the first one in
    the window. The cut leaves at least ``n`` requests and ``min_window`` seconds before it.
    """
    cut = max(first + n, bisect_left(starts, opened + min_window, lo=first))
    return cut if cut < len(starts) else None


def in_window(started: float, opened: float, cut: float) -> bool:
    """The one rule by which a request belongs to a window: it *started* in ``[opened, cut)``."""
    return opened <= started < cut


def inflight(intervals: Sequence[tuple[float, float]], start: float, end: float) -> tuple[float, int]:
    """Time-weighted mean and peak number of open intervals within ``[start, end]``.

    Intervals are (start, end); at the same instant ends come before starts.
    """
    if end <= start:
        return 0.0, 0
    area = 0.0
    events: list[tuple[float, int]] = []
    for begun, ended in intervals:
        if begun >= end or ended <= start or ended <= begun:
            continue
        low, high = max(begun, start), min(ended, end)
        area += high - low
        events += [(low, 1), (high, -1)]
    peak = level = 0
    for _, change in sorted(events):  # -1 sorts before +1
        level += change
        peak = max(peak, level)
    return area / (end - start), peak


def steady(series: Sequence[float]) -> bool:
    """Whether a series, in order of time, has left its transient behind, by MSER.

    Means of batches of 5 (fewer while there are few values; always 10 batches or more). The truncation d
    minimises ``sum((y_i - mean)^2) / (k - d)^2`` over the batches left, which balances what is lost to
    noise against what is left of bias; d may not reach into the last five batches. Steady means that d
    lies in the first half and is not the last one permitted (a series still moving puts it there), and
    that the two halves of what is left (of two thirds at least) agree, after Geweke ("Evaluating the
    accuracy of sampling-based approaches", 1992): means within 5 %, or within two standard errors of their
    difference. MSER alone sees neither a change in the last five batches nor a slow trend under noise.
    """
    n = len(series)
    if n < WARMUP_LEAST:
        return False
    size = max(1, min(MSER_BATCH, n // WARMUP_LEAST))
    count = n // size
    # The latest values matter most, so an incomplete batch is left out at the beginning.
    means = np.asarray(series[n - count * size :], dtype=float).reshape(count, size).mean(axis=1)
    left = count - np.arange(count)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means**2)[::-1])[::-1]
    spread = np.maximum(squares - sums**2 / left, 0.0)
    # Differences below rounding are ties; the first of them truncates least.
    statistic = np.round(spread / left**2 / max(float(np.mean(means**2)), 1e-300), 12)
    permitted = count - MSER_TAIL
    best = int(np.argmin(statistic[: permitted + 1]))
    if best > count / 2 or (best == permitted and best > 0):
        return False
    early, late = np.array_split(means[min(best, count // 3) :], 2)
    difference = abs(float(late.mean() - early.mean()))
    error = math.sqrt(early.var(ddof=1) / len(early) + late.var(ddof=1) / len(late))
    return difference <= max(HALVES_AGREE * abs(float(late.mean())), HALVES_ERRORS * error)


def pause_s(retry_after_s: float | None, usual_s: float, longest_s: float, rng: random.Random) -> float:
    """Server seconds to wait after a fast failure: ``Retry-After`` if given, else ``usual_s`` +- 50 %.

    ``Retry-After: 0`` is no pause and counts as not given; no pause exceeds ``longest_s``.
    """
    if retry_after_s is not None and retry_after_s > 0:
        return min(retry_after_s, longest_s)
    return min(usual_s * rng.uniform(1 - JITTER, 1 + JITTER), longest_s)


class RunningMedian:
    """Median of the last values; None before the first."""

    def __init__(self, of: int = MEDIAN_OF) -> None:
        self._of = of
        self._order: list[float] = []
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Take one more value."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self._of:
            old = self._order.pop(0)
            del self._sorted[bisect_left(self._sorted, old)]

    @property
    def value(self) -> float | None:
        """The (lower) median."""
        return self._sorted[(len(self._sorted) - 1) // 2] if self._sorted else None


# -- the loop


@dataclass(slots=True)
class Sent:
    """One request of a loop, from the wish to send it to its end. Stamps are the wall's."""

    slot: int
    prepared: Prepared
    wished: float
    freed: float | None
    """When its slot fell free; None for a slot's first."""
    paused: float
    """Wall seconds of deliberate pause before it."""
    ended: float | None = None
    answer: Answer | None = None
    row: dict[str, Any] | None = None

    @property
    def wrote(self) -> float | None:
        """When it went onto the socket; None if it never did."""
        return self.answer.wrote_at if self.answer else None


class ClosedLoop:
    """N slots of one service class, and the window over their requests.

    Life: :meth:`start`, wait for :attr:`steady_now`, :meth:`open_window`, :meth:`measure`, and
    :meth:`stop` (or :meth:`drain`, which lets what is in flight end).
    """

    def __init__(
        self,
        load: Load,
        service_class: ServiceClass,
        *,
        sender: Sends,
        prompts: Feeds,
        clock: Clock,
        columns: Mapping[str, Any],
        seed: int,
        pause_after_refusal_s: float = 1.0,
        workers: int = 1,
    ) -> None:
        """``columns``: what is the same in every row (model, phase, repeat, ...). ``workers``: processes
        that send; slot ``s`` is the affair of worker ``s % workers``."""
        self.load = load
        self.service_class = service_class
        self.clock = clock
        self.sent: list[Sent] = []
        self.starts: list[float] = []
        """``wished`` of each request, for searching."""
        self.in_flight = 0
        self.outcomes: dict[Outcome, int] = {}
        self.refused: Answer | None = None
        """The first answer that calls our request wrong."""
        self.own_fault: str | None = None
        """The error of the first request that failed for want of our own descriptors or ports."""
        self.broken_since: float | None = None
        """When connections began to fail, if nothing has been answered since."""
        self.vouched = False
        """... and somebody found the server alive all the same."""
        self.heard_at: float | None = None
        """When the server last gave a sign of life: a token, or an answer of any kind."""
        self.doubted = False
        """Whether the server has been silent for so long that somebody is asking whether it hangs."""
        self.opened: float | None = None
        self.cut: float | None = None
        """Stamp of the end of the window, once known."""
        self.stop_reason: StopReason | None = None
        self.ramp_s = min(RAMP_S, RAMP_PER_SLOT_S * load.concurrency)

        self._sender = sender
        self._prompts = prompts
        self._columns = {
            **columns,
            "service_class": load.service_class,
            "workload": service_class.workload.name,
            "concurrency": load.concurrency,
            "deadline_s": service_class.deadline_s,
        }
        self._rng = random.Random(seed)
        self._pause_s = pause_after_refusal_s
        self._workers = workers
        self._median = RunningMedian()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._ends: list[tuple[float, float | None]] = []
        self._next_check = max(WARMUP_LEAST, 2 * load.concurrency)
        self._was_steady = False
        self._slots_begun = 0
        self._first = 0
        self._cut_at = 0
        self._prefix = 0

    # -- slots

    def start(self) -> None:
        """Let the slots begin, spread over the ramp."""
        ramp = self.clock.wall(self.ramp_s)
        count = self.load.concurrency
        for slot in range(count):
            delay = ramp * (slot + self._rng.random()) / count if slot else 0.0
            self._tasks.append(asyncio.create_task(self._slot(slot, delay)))

    async def stop(self) -> None:
        """Abort what is in flight and end the slots."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await self._finish()

    async def drain(self) -> None:
        """Start nothing more and wait until what is in flight has ended."""
        self._closing = True
        while self.in_flight:
            await asyncio.sleep(TICK_S)
        await self.stop()

    async def _finish(self) -> None:
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._tasks.clear()

    @property
    def failure(self) -> BaseException | None:
        """A slot's own error (a fault of this program), if there is one."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return task.exception()
        return None

    async def _slot(self, slot: int, delay: float) -> None:
        await asyncio.sleep(delay)
        now = self.clock.now
        deadline = self.clock.wall(self.service_class.deadline_s)
        freed: float | None = None
        paused = 0.0
        while not self._closing:
            prepared = self._prompts.next()
            sent = Sent(slot, prepared, now(), freed, paused)
            self._slots_begun += freed is None
            self.sent.append(sent)
            self.starts.append(sent.wished)
            self.in_flight += 1
            try:
                sent.answer = await self._sender.send(prepared, slot, deadline)
            finally:  # a cancelled send is an aborted request
                self.in_flight -= 1
                freed = self._note_end(sent)
            paused = self._pause_after(sent)
            if paused and not self._closing:
                begun = now()
                await asyncio.sleep(paused)
                paused = now() - begun

    def _note_end(self, sent: Sent) -> float:
        """Keep how a request ended; returns when its slot fell free."""
        answer = sent.answer
        ended = answer.ended_at if answer and answer.ended_at is not None else self.clock.now()
        sent.ended = ended
        # What can wait does: first the slot sends again, and so do all whose answers came with this one.
        asyncio.get_running_loop().call_soon(self._catch_up, sent)
        outcome = answer.outcome if answer else Outcome.ABORTED
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if answer is None:
            return ended
        begun = sent.wished if answer.wrote_at is None else answer.wrote_at
        if outcome is Outcome.COMPLETED:
            self._median.add(ended - begun)
        elif outcome is Outcome.CLIENT_ERROR and self.refused is None:
            self.refused = answer
        if answer.own_fault and self.own_fault is None:
            self.own_fault = answer.error or outcome.value
        if answer.own_fault:
            pass  # says nothing of the server, alive or dead
        elif outcome in (Outcome.CONNECT_FAILED, Outcome.CONNECTION_LOST) and answer.http_status is None:
            if self.broken_since is None:
                self.broken_since = ended
        else:
            self.broken_since, self.vouched = None, False
        self._note_life(answer)
        if self.opened is None and self._slots_begun == self.load.concurrency:
            # Before all slots have begun, what ends was served at a lower concurrency.
            first = answer.first_token_at
            self._ends.append((ended - begun, None if first is None else first - begun))
        return ended

    def _catch_up(self, sent: Sent) -> None:
        """Do what a request's end left undone."""
        self._row_of(sent)
        self._prompts.restock()

    def _note_life(self, answer: Answer) -> None:
        """Keep when the server was last heard; a request that ended for want of time is no sign of life."""
        heard = [answer.last_token_at, answer.first_token_at]
        if answer.outcome not in SILENT and not answer.own_fault:
            heard.append(answer.ended_at)
        latest = max((at for at in [*heard, self.heard_at] if at is not None), default=None)
        if latest != self.heard_at:
            self.heard_at, self.doubted = latest, False

    def _pause_after(self, sent: Sent) -> float:
        """Wall seconds to wait before the slot's next request."""
        answer = sent.answer
        if answer is None or answer.outcome is Outcome.COMPLETED or sent.ended is None:
            return 0.0
        took = sent.ended - sent.wished
        usual = self._median.value
        if usual is None:  # nothing has completed yet: fast is well before the deadline
            usual = self.clock.wall(self.service_class.deadline_s) / 2
        if took >= usual:
            return 0.0
        longest = self.service_class.deadline_s
        return self.clock.wall(pause_s(answer.retry_after_s, self._pause_s, longest, self._rng))

    # -- warm-up

    @property
    def steady_now(self) -> bool:
        """Whether the loop has been found steady; looked at anew as requests end."""
        if not self._was_steady and len(self._ends) >= self._next_check:
            self._next_check = math.ceil(len(self._ends) * WARMUP_GROWTH)
            first_tokens = [first for _, first in self._ends if first is not None]
            series = [[took for took, _ in self._ends]]
            if len(first_tokens) >= WARMUP_LEAST:
                series.append(first_tokens)
            self._was_steady = all(steady(values) for values in series)
        return self._was_steady

    # -- the window

    def open_window(self, now: float) -> None:
        """Requests that start from now on count."""
        self.opened = now
        self._first = self._prefix = bisect_left(self.starts, now)

    @property
    def counted_ended(self) -> int:
        """Requests in the window that have ended, for progress."""
        prefix = self._ended_prefix()
        return (prefix if self.cut is None else min(prefix, self._cut_at)) - self._first

    async def measure(
        self, *, min_window_s: float, cap_s: float, decide: Decide | None, early_stop: bool
    ) -> StopReason:
        """Wait until enough is counted; sets :attr:`cut` and :attr:`stop_reason`.

        ``decide`` is asked at planned checkpoints of an extendable load and at early looks.
        """
        if self.opened is None:
            raise RuntimeError("measure before open_window")
        name = self.load.service_class
        sizes = checkpoints(self.load.requests, self.load.max_requests)
        extendable = len(sizes) > 1 and decide is not None
        min_window = self.clock.wall(min(min_window_s, cap_s))
        cap_at = self.opened + self.clock.wall(cap_s)
        next_look = max(FIRST_LOOK, self.load.concurrency)
        look_from = self.opened + min_window * LOOK_FROM
        while True:
            await asyncio.sleep(TICK_S)
            if self.doubted or (self.broken_since is not None and not self.vouched):
                continue  # perhaps nobody is there any more: no verdict on requests to a dead server
            prefix = self._ended_prefix()
            capped = self.clock.now() >= cap_at
            cut = cut_index(self.starts, self._first, self.opened, sizes[0], min_window)
            if cut is not None and self.starts[cut] <= cap_at:
                if prefix >= cut:
                    counted = cut - self._first
                    if not extendable or decide is None:
                        return self._close(cut, self.starts[cut], StopReason.ENOUGH)
                    verdict = decide(name, self._rows(cut), True)
                    if verdict is not State.INCONCLUSIVE:
                        return self._close(cut, self.starts[cut], StopReason.DECIDED)
                    sizes = [size for size in sizes if size > counted]
                    if not sizes:
                        return self._close(cut, self.starts[cut], StopReason.ENOUGH)
                    continue
            elif capped:
                cut = bisect_left(self.starts, cap_at, lo=self._first)
                if prefix >= cut:
                    return self._close(cut, cap_at, StopReason.CAP)
            looking = early_stop and self.clock.now() >= look_from and prefix - self._first >= next_look
            if looking and decide is not None:
                if decide(name, self._rows(prefix), False) is State.FAIL:
                    return self.close_early(StopReason.EARLY_FAIL)
                next_look = math.ceil((prefix - self._first) * LOOK_GROWTH)

    def close_early(self, reason: StopReason) -> StopReason:
        """End the window at the latest cut before which every request has ended.

        Requests that only found nobody there any more (a dead server) are left out at the end, and after an
        error of our own all from the first on that it broke off.
        """
        cut = self._ended_prefix()
        if reason is StopReason.ERROR:
            cut = next((i for i in range(self._first, cut) if self.sent[i].answer is None), cut)
        if reason is StopReason.SERVER_GONE:
            while cut > self._first and self._outcome(cut - 1) is Outcome.CONNECT_FAILED:
                cut -= 1
        return self._close(cut, self.starts[cut] if cut < len(self.starts) else self.clock.now(), reason)

    def _outcome(self, index: int) -> Outcome | None:
        answer = self.sent[index].answer
        return answer.outcome if answer else None

    def _close(self, cut_at: int, cut: float, reason: StopReason) -> StopReason:
        self._cut_at, self.cut, self.stop_reason = cut_at, cut, reason
        return reason

    def _ended_prefix(self) -> int:
        """Index of the first request in the window that has not ended yet."""
        while self._prefix < len(self.sent) and self.sent[self._prefix].ended is not None:
            self._prefix += 1
        return self._prefix

    def _rows(self, cut: int) -> list[dict[str, Any]]:
        return [{**self._row_of(sent), "counted": True} for sent in self.sent[self._first : cut]]

    # -- what it saw

    def rows(self) -> list[dict[str, Any]]:
        """One row for every request sent, in order of start, with ``counted`` set."""
        window = range(self._first, self._cut_at) if self.opened is not None else range(0)
        return [
            {**self._row_of(sent), "counted": index in window}
            for index, sent in enumerate(self.sent)
            if sent.ended is not None
        ]

    def inflight(self, start: float, end: float) -> tuple[float, int]:
        """Time-weighted mean and peak of requests on the wire within a span of wall stamps."""
        return inflight(
            [(s.wrote, s.ended) for s in self.sent if s.wrote is not None and s.ended is not None]
            + [(s.wished, s.ended) for s in self.sent if s.answer is None and s.ended is not None],
            start,
            end,
        )

    def idle_on_purpose(self, start: float, end: float) -> tuple[float, float]:
        """Mean slots within a span that were (paused on purpose, trying in vain to reach the server)."""
        pauses = [(s.wished - s.paused, s.wished) for s in self.sent if s.paused]
        vain = [
            (s.wished, s.ended)
            for s in self.sent
            if s.answer is not None and s.answer.wrote_at is None and s.ended is not None
        ]
        return inflight(pauses, start, end)[0], inflight(vain, start, end)[0]

    def _row_of(self, sent: Sent) -> dict[str, Any]:
        """The row of a request that has ended."""
        if sent.row is None:
            sent.row = self._row(sent)
        return sent.row

    def _row(self, sent: Sent) -> dict[str, Any]:
        clock, prepared, answer = self.clock, sent.prepared, sent.answer
        row = {
            **self._columns,
            "request_id": prepared.request_id,
            "worker": sent.slot % self._workers,
            "slot": sent.slot,
            "asked_prompt_tokens": prepared.asked_prompt_tokens,
            "asked_max_tokens": prepared.asked_max_tokens,
            "refill_s": clock.between_s(sent.freed, sent.wished),
            "paused_s": sent.paused * clock.scale,
        }
        if answer is None:
            return {
                **row,
                "started_s": clock.since_start_s(sent.wished),
                "e2e_s": clock.between_s(sent.wished, sent.ended),
                "outcome": Outcome.ABORTED.value,
            }
        begun = sent.wished if answer.wrote_at is None else answer.wrote_at
        return {
            **row,
            "started_s": clock.since_start_s(begun),
            "send_lag_s": clock.between_s(sent.wished, answer.wrote_at),
            "ttft_s": clock.between_s(begun, answer.first_token_at),
            "first_answer_s": clock.between_s(begun, answer.first_answer_at),
            "last_token_s": clock.between_s(begun, answer.last_token_at),
            "e2e_s": clock.between_s(begun, answer.ended_at),
            "prompt_tokens": answer.prompt_tokens,
            "output_tokens": answer.output_tokens,
            "usage_estimated": answer.usage_estimated,
            "chunks": answer.chunks,
            "first_chunk_tokens": answer.first_chunk_tokens,
            "first_chunk_tokens_known": answer.first_chunk_tokens_known,
            "streamed": answer.streamed,
            "outcome": answer.outcome.value,
            "finish_reason": answer.finish_reason,
            "http_status": answer.http_status,
            "error": answer.error,
        }
