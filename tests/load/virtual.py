"""An event loop whose time jumps to the next timer, and a sender that answers as a test says.

Nothing waits: a step of an hour takes milliseconds, and its numbers are exact.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from include.capacity.config import Lengths, ServiceClass, Workload
from include.capacity.load.clock import Clock
from include.capacity.load.loop import ClosedLoop
from include.capacity.load.request import Answer, Prepared
from include.capacity.results.spec import Load
from include.capacity.words import Outcome

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 100 s and passes only while nothing is left to do."""

    def __init__(self) -> None:
        self.virtual_s = 100.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.virtual_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("the loop would wait for ever: nothing is scheduled")
        if timeout > 0:
            self._loop.virtual_s += timeout
        return super().select(0)


def run(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``work(loop)`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(work(loop))


@dataclass
class Reply:
    """How one request goes; seconds since it was sent."""

    takes_s: float
    outcome: Outcome = Outcome.COMPLETED
    first_token_s: float | None = None
    retry_after_s: float | None = None
    wrote: bool = True
    own_fault: bool = False
    error: str | None = None
    writes_s: float = 0.0
    """When the request goes onto the socket."""
    noticed_s: float = 0.0
    """How long after the end the sender comes back with it, as on a busy event loop."""


class FakeSender:
    """Answers the k-th request (from 0) with ``reply(k, in_flight)``, bounded by the deadline."""

    def __init__(self, loop: VirtualLoop, reply: Callable[[int, int], Reply]) -> None:
        self._loop = loop
        self._reply = reply
        self.seen = 0
        self.in_flight = 0
        self.peak = 0

    async def send(self, prepared: Prepared, slot: int, deadline_wall_s: float) -> Answer:
        at = self._loop.time()
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        reply = self._reply(self.seen, self.in_flight)
        self.seen += 1
        late = reply.takes_s > deadline_wall_s
        try:
            await asyncio.sleep(min(reply.takes_s, deadline_wall_s) + reply.noticed_s)
        finally:
            self.in_flight -= 1
        first = reply.first_token_s
        return Answer(
            Outcome.DEADLINE_EXCEEDED if late else reply.outcome,
            wrote_at=at + reply.writes_s if reply.wrote else None,
            first_token_at=None if first is None else at + first,
            ended_at=self._loop.time() - reply.noticed_s,
            output_tokens=10 if reply.outcome is Outcome.COMPLETED and not late else None,
            http_status=200 if reply.wrote else None,
            retry_after_s=reply.retry_after_s,
            own_fault=reply.own_fault,
            error=reply.error,
        )


@dataclass
class FakePrompts:
    """Requests without content."""

    made: int = field(default=0)

    def next(self) -> Prepared:
        self.made += 1
        return Prepared(f"r-{self.made}", b"{}", True, asked_prompt_tokens=8, asked_max_tokens=10)

    def restock(self) -> None:
        """None is kept ahead."""


def service_class(deadline_s: float = 60.0, stream: bool = True) -> ServiceClass:
    """A class without objectives."""
    return ServiceClass(
        rule="batch",
        workload=Workload(
            name="made-up",
            stream=stream,
            prompt_tokens=Lengths(median=8, sigma=0.0),
            output_tokens=Lengths(median=10, sigma=0.0),
        ),
        deadline_s=deadline_s,
        completion_floor=0.95,
        ladder=[1],
    )


def closed_loop(
    loop: VirtualLoop,
    reply: Callable[[int, int], Reply],
    *,
    n: int,
    requests: int = 20,
    max_requests: int | None = None,
    deadline_s: float = 60.0,
    scale: float = 1.0,
) -> ClosedLoop:
    """A loop of ``n`` slots against a fake server."""
    return ClosedLoop(
        Load(
            service_class="batch",
            concurrency=n,
            requests=requests,
            max_requests=requests if max_requests is None else max_requests,
        ),
        service_class(deadline_s),
        sender=FakeSender(loop, reply),
        prompts=FakePrompts(),
        clock=Clock(scale, now=loop.time),
        columns={"model": "m", "phase": "prove", "repeat": 1},
        seed=1,
    )
