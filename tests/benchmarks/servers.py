"""Virtual servers of known mechanism, driven by a closed loop in virtual time.

A server is continuous batching written as a fluid. All work is counted in *iterations*: a decoding
sequence gets one token an iteration, the prompt at the head of the prefill queue ``chunk_tokens`` an
iteration, and an iteration takes ``step_s + per_seq_s k + per_seq2_s k^2`` (k sequences decode) plus
``prefill_token_s chunk_tokens`` while a prompt is being read. Between two events that time is constant, so
the simulation jumps from event to event and needs about two events a request, not one a token. Everything
that limits a real server is in it as a mechanism, and no knee is written down anywhere:

- **slots**: at most ``slots`` sequences run, the others wait first in, first out;
- **KV cache**: prompts and answers occupy ``kv_tokens``; when it is full the last admitted is preempted and
  must be read again; nothing is admitted that does not fit;
- **compute**: prefill is one queue, and slows decoding while it lasts;
- **retrograde**: ``per_seq2_s`` makes throughput fall past ``sqrt(step_s / per_seq2_s)``;
- **bounded queue**: a request that finds ``queue`` waiting is refused at once (503);
- **deadline**: the client leaves after ``deadline_s`` and the server drops the request;
- **crash**: the process dies when ``crash_running`` sequences run at once;
- **stalls** (nothing moves for a while, Poisson) and **drift** (speed swings slowly round its mean);
- **traffic**: log-normal lengths, a second mode of long requests, and regimes: stretches of requests that are
  all longer or all shorter, which is what makes neighbours correlated.

:class:`Loop` keeps exactly N requests in flight (a refused slot pauses first, as the live load does), and
:func:`run_step` measures one :class:`StepSpec` with it as the instrument would: warm-up, window, planned
checkpoints, early looks, cap, and the cut that leaves out whatever has not ended.
"""

from __future__ import annotations

import hashlib
import heapq
import inspect
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from include.capacity.config import (
    LatencyObjective,
    Lengths,
    ServiceClass,
    StepBounds,
    Workload,
)
from include.capacity.load.loop import (
    FIRST_LOOK,
    LOOK_GROWTH,
    RAMP_PER_SLOT_S,
    RAMP_S,
    WARMUP_GROWTH,
    WARMUP_LEAST,
    checkpoints,
    cut_index,
    steady,
)
from include.capacity.results.schema import REQUEST_COLUMNS, Facts, LoadFacts
from include.capacity.results.spec import Load, StepSpec
from include.capacity.words import Outcome, State, StopReason

INF = math.inf
REFUSAL_S = 0.002
"""How long a refusal takes to come back."""
BLOCK = 4096
"""Requests whose lengths are drawn at a time."""

PAIR_FAMILIES = ("slots", "kv", "compute", "deadline", "admission", "retrograde")
FAMILIES = ("slots", "kv", "compute", "deadline", "admission", "crash", "retrograde", "none")


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What makes a server slow, refuse or die. Seconds and tokens; ``None``: there is no such bound."""

    slots: int
    step_s: float
    per_seq_s: float
    per_seq2_s: float = 0.0
    chunk_tokens: int = 2048
    prefill_token_s: float = 0.0
    kv_tokens: float | None = None
    queue: int | None = None
    crash_running: int | None = None
    stall_gap_s: float | None = None
    """Mean time between stalls."""
    stall_s: float = 0.0
    """Mean length of a stall."""
    drift: float = 0.0
    """Amplitude of the swing of iteration time, as a share of it."""
    drift_period_s: float = 120.0
    first_token_s: float = 0.02
    """Median of what network and tokenizer add to a first token (log-normal, sigma 0.3)."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Lengths of requests: (median, sigma, least, most), a mode of long ones, and regimes."""

    prompt: tuple[float, float, int, int]
    output: tuple[float, float, int, int]
    long_share: float = 0.0
    long_factor: float = 1.0
    regime_requests: float = 0.0
    """Mean length of a stretch of requests that share a factor; 0: requests are independent."""
    regime_sigma: float = 0.0
    """Standard deviation of that factor's logarithm."""

    def draw(self, rng: np.random.Generator, n: int) -> tuple[list[int], list[int]]:
        """``n`` prompt and output lengths, tokens, in order of start."""
        factor = np.ones(n)
        if self.long_share:
            factor[rng.random(n) < self.long_share] = self.long_factor
        if self.regime_requests:
            ends = rng.random(n) < 1 / self.regime_requests
            regime = np.cumsum(ends)
            factor *= np.exp(rng.normal(0, self.regime_sigma, regime[-1] + 1))[regime]

        def lengths(spec: tuple[float, float, int, int]) -> list[int]:
            median, sigma, least, most = spec
            drawn = rng.lognormal(math.log(median), sigma, n) * factor
            return np.clip(np.rint(drawn), least, most).astype(int).tolist()

        return lengths(self.prompt), lengths(self.output)

    def means(self) -> tuple[float, float]:
        """Mean prompt and output length, tokens, by a fixed large draw."""
        prompts, outputs = self.draw(np.random.default_rng(7), 20_000)
        return float(np.mean(prompts)), float(np.mean(outputs))


@dataclass(frozen=True, kw_only=True)
class VirtualServer:
    """One server with one class of traffic."""

    name: str
    family: str
    seed: int
    mechanism: Mechanism
    class_name: str
    service_class: ServiceClass
    traffic: Traffic
    traits: tuple[str, ...] = ()
    """Which of stalls, drift, correlated, mixed it has."""

    @property
    def tenants(self) -> dict[str, tuple[ServiceClass, Traffic]]:
        """Class and traffic by name."""
        return {self.class_name: (self.service_class, self.traffic)}

    @property
    def classes(self) -> dict[str, ServiceClass]:
        """As the planner and the evidence want it."""
        return {self.class_name: self.service_class}


@dataclass(frozen=True, kw_only=True)
class PairServer(VirtualServer):
    """A server that two classes share: its own and another one."""

    other: VirtualServer
    """Whose class and traffic come second; its mechanism is not used."""

    @property
    def tenants(self) -> dict[str, tuple[ServiceClass, Traffic]]:
        """Class and traffic by name."""
        return {**super().tenants, **self.other.tenants}

    @property
    def classes(self) -> dict[str, ServiceClass]:
        """As the planner and the evidence want it."""
        return {**super().classes, **self.other.classes}


# --------------------------------------------------------------------------------------------- the loop


def _schedule(mechanism: Mechanism, rng: np.random.Generator, start_s: float, phase: float) -> Iterator:
    """Segments (end, factor on iteration time) from ``start_s`` on; the factor is infinite in a stall."""
    at = start_s
    stall_at = at + rng.exponential(mechanism.stall_gap_s) if mechanism.stall_gap_s else INF
    piece = mechanism.drift_period_s / 24 if mechanism.drift else INF
    while True:
        if mechanism.drift:
            angle = 2 * math.pi * (at / mechanism.drift_period_s + phase)
            slow = 1 + mechanism.drift * math.sin(angle)
            until = (math.floor(at / piece + 1e-9) + 1) * piece
        else:
            slow, until = 1.0, INF
        if stall_at <= until:
            if stall_at > at:
                yield stall_at, slow
            at = stall_at + rng.exponential(mechanism.stall_s)
            yield at, INF
            stall_at = at + rng.exponential(mechanism.stall_gap_s)
        else:
            yield until, slow
            at = until


@dataclass
class _Stream:
    """One closed loop's traffic."""

    traffic: Traffic
    deadline_s: float
    streamed: bool
    concurrency: int
    rng: np.random.Generator
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def next_lengths(self) -> tuple[int, int]:
        if not self.prompts:
            prompts, outputs = self.traffic.draw(self.rng, BLOCK)
            self.prompts, self.outputs = prompts[::-1], outputs[::-1]
        return self.prompts.pop(), self.outputs.pop()


class Loop:
    """N requests in flight on a server, from idle, in virtual time.

    Requests are numbered in order of start; ``start``, ``first``, ``end`` (absolute seconds), ``outcome``,
    ``prompt``, ``output``, ``stream`` and ``paused`` are lists over them; ``end`` is None while in flight.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        streams: Sequence[_Stream],
        rng: np.random.Generator,
        *,
        start_s: float = 0.0,
        phase: float = 0.0,
        ramp_s: float = 0.0,
        pause_s: float = 1.0,
    ) -> None:
        self.mechanism = mechanism
        self.streams = streams
        self.rng = rng
        self.pause_s = pause_s
        self.now = start_s
        self.ended = 0
        self.crashed = False
        self.preemptions = 0
        self.start: list[float] = []
        self.first: list[float | None] = []
        self.end: list[float | None] = []
        self.outcome: list[Outcome | None] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.stream: list[int] = []
        self.paused: list[float] = []
        # Server state. ``iteration`` is the clock all work is counted in.
        self._iteration = 0.0
        self._decoding = 0
        self._running = 0
        self._heap: list[tuple[float, int]] = []  # (iteration of the last token, request)
        self._finish: list[float] = []  # valid heap key; -1 when not decoding
        self._left: list[int] = []  # tokens still to decode when admitted next
        self._seated: list[bool] = []
        self._held: list[float] = []  # KV tokens held at admission plus decoded, less the running clock
        self._prefill: deque[int] = deque()
        self._prefill_end = INF
        self._admitted: list[int] = []  # order of admission, for preemption
        self._waiting: deque[int] = deque()
        self._n_waiting = 0
        self._kv = 0.0
        self._expiry: list[deque[int]] = [deque() for _ in streams]
        self._next_expiry = INF
        self._segments = _schedule(mechanism, rng, start_s, phase)
        self._segment_end, self._slow = next(self._segments)
        # Slots waiting to start: the ramp at first, later those that pause.
        self._resting: list[tuple[float, int, float]] = []
        for index, stream in enumerate(streams):
            for slot in range(stream.concurrency):
                at = start_s + ramp_s * slot / stream.concurrency
                heapq.heappush(self._resting, (at, index, 0.0))

    def advance(self, until_s: float, until_ended: float = INF) -> None:
        """Run until the clock reaches ``until_s``, ``until_ended`` requests ended, or the server died."""
        mechanism = self.mechanism
        base, per_seq, per_seq2 = mechanism.step_s, mechanism.per_seq_s, mechanism.per_seq2_s
        prefill_cost = mechanism.prefill_token_s * mechanism.chunk_tokens
        kv_cap = mechanism.kv_tokens
        heap, prefill, resting = self._heap, self._prefill, self._resting
        while self.now < until_s and self.ended < until_ended and not self.crashed:
            now, k = self.now, self._decoding
            # The next event of the server's own, on the iteration clock.
            at = heap[0][0] if heap else INF
            kind = 1
            if self._prefill_end < at:
                at, kind = self._prefill_end, 2
            if kv_cap is not None and k:
                full = self._iteration + max(0.0, kv_cap - self._kv) / k
                if full < at:
                    at, kind = full, 3
            step = self._slow * (base + k * (per_seq + per_seq2 * k) + (prefill_cost if prefill else 0.0))
            event_s = now + (at - self._iteration) * step if at < INF else INF
            # The next event of the outside world, on the clock of seconds.
            outside_s = min(self._segment_end, self._next_expiry, until_s)
            if resting and resting[0][0] < outside_s:
                outside_s = resting[0][0]
            if outside_s <= event_s:
                if step < INF:
                    done = (outside_s - now) / step
                    if kv_cap is not None:
                        self._kv += k * done
                    self._iteration += done
                self.now = outside_s
                if resting and resting[0][0] <= outside_s:
                    _, stream, paused = heapq.heappop(resting)
                    self._begin(stream, paused)
                elif self._next_expiry <= outside_s:
                    self._expire()
                elif self._segment_end <= outside_s:
                    self._segment_end, self._slow = next(self._segments)
                continue
            if kv_cap is not None:
                self._kv += k * (at - self._iteration)
            self._iteration = at
            self.now = event_s
            if kind == 1:
                _, request = heapq.heappop(heap)
                if self._finish[request] == at:
                    self._decoding -= 1
                    self._leave_server(request)
                    self._close(request, Outcome.COMPLETED)
            elif kind == 2:
                self._first_token()
            else:
                self._preempt()

    # -- what happens to a request

    def _begin(self, stream: int, paused: float) -> None:
        request = len(self.start)
        loop = self.streams[stream]
        prompt, output = loop.next_lengths()
        self.start.append(self.now)
        self.first.append(None)
        self.end.append(None)
        self.outcome.append(None)
        self.prompt.append(prompt)
        self.output.append(output)
        self.stream.append(stream)
        self.paused.append(paused)
        self._finish.append(-1.0)
        self._left.append(output)
        self._held.append(0.0)
        self._seated.append(False)
        bound = self.mechanism.queue
        if self._n_waiting or not self._fits(request):
            if bound is not None and self._n_waiting >= bound:
                self._close(request, Outcome.REJECTED)
                return
            self._waiting.append(request)
            self._n_waiting += 1
        else:
            self._admit(request)
        self._expiry[stream].append(request)
        self._next_expiry = min(self._next_expiry, self.now + loop.deadline_s)

    def _fits(self, request: int) -> bool:
        if self._running >= self.mechanism.slots:
            return False
        cap = self.mechanism.kv_tokens
        return cap is None or not self._running or self._kv + self._to_read(request) <= 0.99 * cap

    def _to_read(self, request: int) -> int:
        """Tokens to prefill: the prompt, after a preemption with what had been decoded."""
        return self.prompt[request] + self.output[request] - self._left[request]

    def _admit(self, request: int) -> None:
        self._running += 1
        self._seated[request] = True
        if self.mechanism.kv_tokens is not None:
            self._held[request] = self._to_read(request)
            self._kv += self._held[request]
            self._admitted.append(request)
        self._prefill.append(request)
        if len(self._prefill) == 1:
            self._next_prefill()
        crash = self.mechanism.crash_running
        if crash is not None and self._running >= crash:
            self.crashed = True
            for other, end in enumerate(self.end):
                if end is None:
                    self.end[other] = self.now
                    self.outcome[other] = Outcome.CONNECTION_LOST
                    self.ended += 1

    def _next_prefill(self) -> None:
        """Start on the head of the prefill queue."""
        prefill = self._prefill
        if prefill:
            self._prefill_end = self._iteration + self._to_read(prefill[0]) / self.mechanism.chunk_tokens
        else:
            self._prefill_end = INF

    def _first_token(self) -> None:
        request = self._prefill.popleft()
        if self.first[request] is None:
            self.first[request] = self.now
            self._left[request] -= 1
        self._next_prefill()
        if self._left[request] == 0:
            self._leave_server(request)
            self._close(request, Outcome.COMPLETED)
            return
        self._decoding += 1
        self._held[request] -= self._iteration
        self._finish[request] = self._iteration + self._left[request]
        heapq.heappush(self._heap, (self._finish[request], request))

    def _leave_server(self, request: int) -> None:
        """Free slot and KV cache (the caller has taken it out of ``_decoding``)."""
        self._running -= 1
        self._seated[request] = False
        if self.mechanism.kv_tokens is not None:
            decoding = self._finish[request] >= 0
            self._kv -= self._held[request] + (self._iteration if decoding else 0.0)
            self._held[request] = 0.0
            if not self._running:
                self._kv = 0.0  # float dust
        self._finish[request] = -1.0

    def _preempt(self) -> None:
        """The last admitted gives its cache back and waits at the head of the queue."""
        admitted = self._admitted
        while True:
            request = admitted.pop()
            if self._seated[request]:
                break
        if self._finish[request] >= 0:
            self._left[request] = max(1, math.ceil(self._finish[request] - self._iteration))
        self._take_off(request)
        self.preemptions += 1
        self._waiting.appendleft(request)
        self._n_waiting += 1

    def _take_off(self, request: int) -> None:
        """Out of prefill or decoding, before its end."""
        if self._finish[request] >= 0:
            self._decoding -= 1
            self._leave_server(request)
            return
        self._leave_server(request)
        head = self._prefill[0] == request
        self._prefill.remove(request)
        if head:
            self._next_prefill()

    def _expire(self) -> None:
        """Clients whose deadline has passed leave."""
        nearest = INF
        for stream, queue in enumerate(self._expiry):
            deadline_s = self.streams[stream].deadline_s
            while queue:
                request = queue[0]
                if self.end[request] is not None:
                    queue.popleft()
                elif self.start[request] + deadline_s <= self.now:
                    queue.popleft()
                    self._abandon(request)
                else:
                    nearest = min(nearest, self.start[request] + deadline_s)
                    break
        # New requests begun by abandoned slots are due a whole deadline from now.
        for stream, queue in enumerate(self._expiry):
            if queue:
                nearest = min(nearest, self.start[queue[0]] + self.streams[stream].deadline_s)
        self._next_expiry = nearest

    def _abandon(self, request: int) -> None:
        late = self.first[request] is not None or not self.streams[self.stream[request]].streamed
        outcome = Outcome.DEADLINE_EXCEEDED if late else Outcome.FIRST_TOKEN_TIMEOUT
        if self._seated[request]:
            self._take_off(request)
        else:
            self._waiting.remove(request)
            self._n_waiting -= 1
        self._close(request, outcome)

    def _close(self, request: int, outcome: Outcome) -> None:
        """The request ended: its slot goes on, and the server takes the next that waits."""
        stream = self.stream[request]
        self.outcome[request] = outcome
        self.ended += 1
        if outcome is Outcome.REJECTED:
            self.end[request] = self.now + REFUSAL_S
            paused = self.pause_s * self.rng.uniform(0.5, 1.5)
            heapq.heappush(self._resting, (self.now + REFUSAL_S + paused, stream, paused))
            return
        self.end[request] = self.now
        while self._n_waiting and self._fits(self._waiting[0]):
            self._n_waiting -= 1
            self._admit(self._waiting.popleft())
            if self.crashed:
                return
        self._begin(stream, 0.0)


# --------------------------------------------------------------------------------- a step, as measured

Decide = Callable[[str, list[dict[str, Any]], bool], State]


def streams_of(server: VirtualServer, concurrency: int, rng: np.random.Generator) -> list[_Stream]:
    """The traffic of a step of the server's one class."""
    return streams_together(server, {server.class_name: concurrency}, rng)


def streams_together(
    server: VirtualServer, loads: Mapping[str, int], rng: np.random.Generator
) -> list[_Stream]:
    """The traffic of a step of several classes, in the order of ``loads``: class -> concurrency."""
    return [_stream(*server.tenants[name], n, rng) for name, n in loads.items()]


def _stream(
    service_class: ServiceClass, traffic: Traffic, concurrency: int, rng: np.random.Generator
) -> _Stream:
    return _Stream(traffic, service_class.deadline_s, service_class.workload.stream, concurrency, rng)


class Window:
    """One load's window over a loop: the live load's rules (``load.loop``), in virtual time."""

    def __init__(
        self,
        loop: Loop,
        stream: int,
        load: Load,
        spec: StepSpec,
        common: dict[str, Any],
        step_start_s: float,
        rng: np.random.Generator,
    ) -> None:
        self.loop, self.stream, self.load, self.spec = loop, stream, load, spec
        self.common, self.step_start_s, self.rng = common, step_start_s, rng
        self.opened_s = loop.now
        self.cut_s: float | None = None
        self.stop: StopReason | None = None
        self.counted = 0
        self._ids: list[int] = []
        self._starts: list[float] = []
        self._next = len(loop.start)
        self._ended = 0
        self._sizes = checkpoints(load.requests, load.max_requests)
        self._extendable = len(self._sizes) > 1
        self._look = max(FIRST_LOOK, load.concurrency)
        self._rows: list[dict[str, Any]] = []

    def _update(self) -> None:
        loop, ids = self.loop, self._ids
        for request in range(self._next, len(loop.start)):
            if loop.stream[request] == self.stream:
                ids.append(request)
                self._starts.append(loop.start[request])
        self._next = len(loop.start)
        while self._ended < len(ids) and loop.end[ids[self._ended]] is not None:
            self._ended += 1

    def poll(self, decide: Decide | None) -> None:
        """Look at what happened; sets ``stop`` when the window is over."""
        self._update()
        spec, name, starts = self.spec, self.load.service_class, self._starts
        cap_s = self.opened_s + spec.cap_s
        if self.loop.crashed:
            self._close(self._ended, self.loop.now, StopReason.SERVER_GONE)
            return
        while True:
            cut = cut_index(starts, 0, self.opened_s, self._sizes[0], min(spec.min_window_s, spec.cap_s))
            if cut is None or starts[cut] > cap_s or self._ended < cut:
                break
            if not self._extendable or decide is None:
                self._close(cut, starts[cut], StopReason.ENOUGH)
                return
            if decide(name, self.rows(cut), True) is not State.INCONCLUSIVE:
                self._close(cut, starts[cut], StopReason.DECIDED)
                return
            self._sizes = [size for size in self._sizes if size > cut]
            if not self._sizes:
                self._close(cut, starts[cut], StopReason.ENOUGH)
                return
        if (cut is None or starts[cut] > cap_s) and self.loop.now >= cap_s:
            cut = bisect_left(starts, cap_s)
            if self._ended >= cut:
                self._close(cut, cap_s, StopReason.CAP)
                return
        if spec.early_stop and decide is not None and self._ended >= self._look:
            if decide(name, self.rows(self._ended), False) is State.FAIL:
                at_s = starts[self._ended] if self._ended < len(starts) else self.loop.now
                self._close(self._ended, at_s, StopReason.EARLY_FAIL)
                return
            self._look = math.ceil(self._ended * LOOK_GROWTH)

    def _close(self, counted: int, cut_s: float, reason: StopReason) -> None:
        self.counted, self.cut_s, self.stop = counted, cut_s, reason

    def rows(self, n: int) -> list[dict[str, Any]]:
        """The first ``n`` as request rows, every one ended."""
        loop = self.loop
        deadline_s = loop.streams[self.stream].deadline_s
        streamed = loop.streams[self.stream].streamed
        for request in self._ids[len(self._rows) : n]:
            start, first, end = loop.start[request], loop.first[request], loop.end[request]
            outcome = loop.outcome[request]
            assert end is not None
            assert outcome is not None
            completed = outcome is Outcome.COMPLETED
            added = loop.mechanism.first_token_s * math.exp(self.rng.normal(0, 0.3))
            ttft = first - start + added if first is not None and streamed else None
            # The last token cannot overtake the first.
            e2e = max(end - start, ttft or 0.0)
            self._rows.append(
                {
                    **self.common,
                    "request_id": f"r{request}",
                    "started_s": start - self.step_start_s,
                    "paused_s": loop.paused[request],
                    "ttft_s": ttft,
                    "first_answer_s": ttft,
                    "last_token_s": e2e if completed else None,
                    "e2e_s": e2e,
                    "deadline_s": deadline_s,
                    "asked_prompt_tokens": loop.prompt[request],
                    "asked_max_tokens": loop.output[request],
                    "prompt_tokens": loop.prompt[request],
                    "output_tokens": loop.output[request] if completed else None,
                    "first_chunk_tokens": 1 if ttft is not None else None,
                    "first_chunk_tokens_known": True,
                    "streamed": streamed,
                    "outcome": outcome.value,
                    "counted": True,
                }
            )
        return self._rows[:n]

    def facts(self) -> LoadFacts:
        """As the instrument would state them."""
        assert self.cut_s is not None
        window_s = self.cut_s - self.opened_s
        n = self.load.concurrency
        busy_s = sum(row["e2e_s"] for row in self._rows[: self.counted])
        return LoadFacts(
            service_class=self.load.service_class,
            concurrency=n,
            warmup_s=self.opened_s - self.step_start_s,
            warmup_steady=True,
            window_start_s=self.opened_s - self.step_start_s,
            window_s=window_s,
            inflight_mean=min(float(n), busy_s / window_s) if window_s > 0 else None,
            inflight_peak=n,
            stop_reason=self.stop.value if self.stop else None,
        )


@dataclass
class StepResult:
    """What a step gave and what it cost."""

    facts: Facts
    rows: pd.DataFrame
    sent: int
    """Requests sent, warm-up and uncounted ones included."""
    counted: int
    seconds: float
    """Server time, warm-up included."""


class Bench:
    """A server over the course of a sweep: its clock goes on, its drift keeps its phase."""

    def __init__(self, server: VirtualServer, seed: int, bounds: StepBounds | None = None) -> None:
        self.server = server
        self.seed = seed
        self.bounds = bounds or StepBounds()
        self.clock_s = 0.0
        self.steps = 0
        self.sent = 0
        self.counted = 0
        self.phase = float(np.random.default_rng([server.seed, seed]).random())

    def run(self, spec: StepSpec, decide: Decide | None = None) -> StepResult:
        """Measure one step; every call has its own requests, as fresh ones must be."""
        self.steps += 1
        rng = np.random.default_rng([self.server.seed, self.seed, self.steps])
        result = run_step(self.server, spec, rng, decide, self.bounds, self.clock_s, self.phase)
        self.clock_s += result.seconds
        self.sent += result.sent
        self.counted += result.counted
        return result


def run_step(
    server: VirtualServer,
    spec: StepSpec,
    rng: np.random.Generator,
    decide: Decide | None = None,
    bounds: StepBounds | None = None,
    clock_s: float = 0.0,
    phase: float = 0.0,
) -> StepResult:
    """Measure ``spec`` with the live load's rules: ramp, warm-up until steady, window, checkpoints, cut.

    ``decide`` judges running steps (``None``: every step runs to its size); ``clock_s`` and ``phase`` place
    the step in the server's drift.
    """
    bounds = bounds or StepBounds()
    in_flight = sum(load.concurrency for load in spec.loads)
    loop = Loop(
        server.mechanism,
        [_stream(*server.tenants[load.service_class], load.concurrency, rng) for load in spec.loads],
        rng,
        start_s=clock_s,
        phase=phase,
        ramp_s=min(RAMP_S, RAMP_PER_SLOT_S * in_flight),
        pause_s=bounds.pause_after_refusal_s,
    )
    _warm_up(loop, in_flight, clock_s + bounds.warmup_cap_s)
    windows = []
    for stream, load in enumerate(spec.loads):
        service_class, _ = server.tenants[load.service_class]
        common = {
            "model": spec.model,
            "service_class": load.service_class,
            "workload": service_class.workload.name,
            "phase": spec.phase.value,
            "concurrency": load.concurrency,
            "repeat": spec.repeat,
            "worker": 0,
        }
        windows.append(Window(loop, stream, load, spec, common, clock_s, rng))
    while any(window.stop is None for window in windows):
        loop.advance(loop.now + 2.0, loop.ended + max(5, in_flight // 8))
        for window in windows:
            if window.stop is None:
                window.poll(decide)
        if any(window.stop is StopReason.EARLY_FAIL for window in windows):
            for window in windows:
                if window.stop is None:
                    window._close(window._ended, loop.now, StopReason.EARLY_FAIL)
    rows = [row for window in windows for row in window.rows(window.counted)]
    facts = Facts(
        spec=spec.to_json(),
        run_id="benchmark",
        started_at=_utc(clock_s),
        loads=[window.facts() for window in windows],
        error="the server died" if loop.crashed else None,
        server_crashed=loop.crashed,
    )
    table = pd.DataFrame(rows, columns=None if rows else list(REQUEST_COLUMNS))
    return StepResult(facts, table, len(loop.start), len(rows), loop.now - clock_s)


def _warm_up(loop: Loop, in_flight: int, until_s: float) -> None:
    """Until every slot has turned over and residence and first tokens look steady, or ``until_s``."""
    check = max(WARMUP_LEAST, 2 * in_flight)
    while loop.now < until_s and not loop.crashed:
        loop.advance(until_s, check)
        if loop.ended < check:
            return
        closed = sorted((end, n) for n, end in enumerate(loop.end) if end is not None)
        took = [end - loop.start[n] for end, n in closed]
        first = [at - loop.start[n] for _, n in closed if (at := loop.first[n]) is not None]
        if steady(took) and (len(first) < WARMUP_LEAST or steady(first)):
            return
        check = math.ceil(loop.ended * WARMUP_GROWTH)


def _utc(clock_s: float) -> str:
    return (pd.Timestamp("2026-01-01", tz="UTC") + pd.Timedelta(seconds=clock_s)).isoformat()


# ---------------------------------------------------------------------------------------- the generator


def make_server(family: str, class_name: str, index: int, seed: int) -> VirtualServer:
    """Draw one server of a family; the limit its parameters aim at is log-uniform and only roughly hit."""
    server_seed = int.from_bytes(
        hashlib.sha256(f"{seed}/{family}/{class_name}/{index}".encode()).digest()[:4]
    )
    rng = np.random.default_rng(server_seed)
    interactive = class_name == "interactive"

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    stalls, drift, correlated, mixed = (
        bool(draw < share) for draw, share in zip(rng.random(4), (0.5, 0.5, 0.35, 0.35), strict=True)
    )
    aim = log_uniform(6, 250)
    chunk_tokens = int(rng.choice([512, 1024, 2048]))
    prompt = (512.0, 0.6, 16, 4096) if interactive else (1500.0, 0.5, 16, 8192)
    output = (200.0, 0.6, 16, 1024) if interactive else (float(rng.choice([16, 64])), 0.5, 1, 256)
    if family == "compute" and interactive:
        # Reading takes prompt / chunk iterations one after another, answering takes as many iterations as
        # tokens side by side: the prefill queue is full at about answer x chunk / prompt sequences.
        output = (log_uniform(100, 300), 0.6, 16, 1024)
        chunk_tokens = int(rng.choice([256, 512, 1024]))
        prompt = (max(256.0, output[0] * chunk_tokens / aim), 0.6, 16, 16_384)
    traffic = Traffic(
        prompt=prompt,
        output=output,
        long_share=0.15 if mixed else 0.0,
        long_factor=3.0 if mixed else 1.0,
        regime_requests=log_uniform(10, 60) if correlated else 0.0,
        regime_sigma=0.35 if correlated else 0.0,
    )
    prompt_mean, output_mean = traffic.means()
    step_s = log_uniform(0.012, 0.03)
    per_seq_s = step_s * log_uniform(0.001, 0.006)
    deadline_s = 60.0 if interactive else log_uniform(8, 60)
    ttft_s, share = (1.0, 0.95) if interactive else (None, 0.95)
    slots, kv, queue, crash, per_seq2_s = 4096, None, None, None, 0.0
    # Seconds of a request's decoding with ``aim`` of them at once, and alone.
    decode_s = output_mean * (step_s + per_seq_s * aim)
    # Prefill that keeps the server half busy at the aim unless the family says otherwise.
    prefill_token_s = min(8e-5, 0.35 * decode_s / (aim * prompt_mean))
    top = None

    if family in ("slots", "kv", "crash"):
        width = max(2, round(aim if interactive or family == "crash" else aim * decode_s / deadline_s))
        if not interactive and family != "crash":
            decode_s = output_mean * (step_s + per_seq_s * width)
            prefill_token_s = min(8e-5, 0.35 * decode_s / (width * prompt_mean))
        if family == "slots":
            slots = width
        elif family == "kv":
            kv = max(width * (prompt_mean + output_mean * 0.6), 1.3 * (traffic.prompt[3] + traffic.output[3]))
        else:
            crash = width
    elif family == "compute":
        if interactive:
            prefill_token_s = step_s * log_uniform(0.3, 1.5) / chunk_tokens
            alone_s = prompt_mean * (step_s / chunk_tokens + prefill_token_s)
            ttft_s = max(1.0, round(6 * alone_s, 1))
        else:
            prefill_token_s = deadline_s / (aim * prompt_mean)
    elif family == "deadline":
        # Decoding slows with every sequence until long answers do not end in time.
        long_output = float(
            np.quantile(traffic.draw(np.random.default_rng(8), 20_000)[1], 0.99 if interactive else 0.95)
        )
        deadline_s = long_output * step_s * log_uniform(1.6, 3.0)
        per_seq_s = max(0.0, deadline_s / long_output - step_s) / aim
        prefill_token_s = min(prefill_token_s, 2e-5)
        ttft_s = min(3.0, deadline_s / 2) if interactive else None
        deadline_s = max(deadline_s, 2.0)
    elif family == "admission":
        slots = max(2, round(aim / 1.15))
        queue = round(slots * rng.uniform(0.0, 0.3))
    elif family == "retrograde":
        peak = aim / rng.uniform(1.2, 2.5)
        per_seq2_s = step_s / peak**2
        if interactive:
            ttft_s = float(rng.choice([1.0, 3.0]))
            deadline_s = 60.0
        else:
            deadline_s = output_mean * 2 * step_s * (aim / peak) ** 2 * rng.uniform(1.5, 3) + 1.0
    elif family == "none":
        top = int(rng.choice([32, 64, 128]))
        decode_s = output_mean * (step_s + per_seq_s * top)
        prefill_token_s = min(2e-5, 0.1 * decode_s / (top * prompt_mean))
        deadline_s = 60.0
    else:
        raise ValueError(f"unknown family {family!r}")

    mechanism = Mechanism(
        slots=slots,
        step_s=step_s,
        per_seq_s=per_seq_s,
        per_seq2_s=per_seq2_s,
        chunk_tokens=chunk_tokens,
        prefill_token_s=prefill_token_s,
        kv_tokens=kv,
        queue=queue,
        crash_running=crash,
        stall_gap_s=log_uniform(20, 120) if stalls else None,
        stall_s=log_uniform(0.2, 1.2),
        drift=float(rng.uniform(0.02, 0.08)) if drift else 0.0,
        drift_period_s=log_uniform(60, 600),
    )
    ladder = [1, 4, 8, 16, 32, 64, 128, 256, 512] + ([] if interactive else [1024])
    service_class = ServiceClass(
        rule="interactive" if interactive else "batch",
        workload=Workload(
            name="chat" if interactive else "classification",
            stream=interactive,
            prompt_tokens=_lengths(traffic.prompt),
            output_tokens=_lengths(traffic.output),
        ),
        deadline_s=deadline_s,
        completion_floor=0.99 if interactive else 0.95,
        ttft=LatencyObjective(at_most_s=ttft_s, share=share) if ttft_s else None,
        cap_at_latency_knee=False,
        ladder=[n for n in ladder if top is None or n <= top],
    )
    traits = tuple(
        name
        for name, has in (("stalls", stalls), ("drift", drift), ("correlated", correlated), ("mixed", mixed))
        if has
    )
    return VirtualServer(
        name=f"{family}-{class_name}-{index:02d}",
        family=family,
        seed=server_seed,
        mechanism=mechanism,
        class_name=class_name,
        service_class=service_class,
        traffic=traffic,
        traits=traits,
    )


def _lengths(spec: tuple[float, float, int, int]) -> Lengths:
    return Lengths(median=spec[0], sigma=spec[1], at_least=spec[2], at_most=spec[3])


def generate(per_family: int, seed: int, families: Sequence[str] = FAMILIES) -> list[VirtualServer]:
    """``per_family`` servers of each family, classes in turn."""
    return [
        make_server(family, ("interactive", "batch")[index % 2], index, seed)
        for family in families
        for index in range(per_family)
    ]


def generate_pairs(per_family: int, seed: int) -> list[PairServer]:
    """``per_family`` servers of each of ``PAIR_FAMILIES``, shared by an interactive and a batch class."""
    return [_make_pair(family, index, seed) for family in PAIR_FAMILIES for index in range(per_family)]


def _make_pair(family: str, index: int, seed: int) -> PairServer:
    """An interactive server, and beside it a batch class whose deadline bites within its ladder.

    The deadline is what 95 % of the batch requests keep at 16 to 128 in flight, alone on the server.
    """
    base = make_server(family, "interactive", index, seed)
    other = make_server(family, "batch", index, seed)
    rng = np.random.default_rng([base.seed, other.seed])
    n = round(math.exp(rng.uniform(math.log(16), math.log(128))))
    stream = _Stream(other.traffic, INF, False, n, rng)
    loop = Loop(base.mechanism, [stream], rng)
    loop.advance(INF, 3 * n + 3000)
    took = [
        end - start
        for start, end, outcome in zip(loop.start, loop.end, loop.outcome, strict=True)
        if end is not None and outcome is Outcome.COMPLETED
    ]
    service_class = other.service_class.model_copy(
        update={"deadline_s": float(np.quantile(took[len(took) // 4 :], 0.95)), "ladder": [1, 4, 16, 64, 256]}
    )
    return PairServer(
        **{
            **vars(base),
            "name": f"{family}-pair-{index:02d}",
            "service_class": base.service_class.model_copy(update={"ladder": [1, 4, 16, 64, 256]}),
        },
        other=replace(other, service_class=service_class),
    )


def generator_hash(servers: Sequence[VirtualServer]) -> str:
    """Changes with the servers drawn and the code that moves them; kept truths are of one value of it."""
    code = [inspect.getsource(part) for part in (Traffic, Loop, _schedule)]
    text = "\n".join([*code, *(repr(server) for server in servers)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
