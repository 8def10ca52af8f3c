"""Load processes: requests sent and read by several processes, for loads that one core cannot drive.

Nearly all that a request costs is reading its stream, so only that is handed out. The step and its closed
loops (slots, window, rows, verdicts) stay in one process and see a :class:`RemoteSender` where they would
see a :class:`~include.capacity.load.request.Sender`; slot ``s`` of every loop belongs to worker
``s % workers``. A worker is ``python -m include.capacity.load.workers FD``: senders behind one socket, on
which calls and replies travel as msgpack, each with its length in front.

- **Times** are stamped by the worker. On Linux ``time.perf_counter()`` is one clock for all processes
  (CLOCK_MONOTONIC); :meth:`Workers.start` makes sure: a worker's clock, read between two readings of ours,
  must lie between them.
- **The end of either side is the end of the socket.** A worker whose socket closes exits, so none outlives
  the step, however that ends. A worker that goes first makes every request of its slots fail with
  :class:`WorkerDied`: the step is invalid.
- **How many**: see :func:`workers_for`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec
import uvloop

from include.capacity.errors import MeasurementError
from include.capacity.load.health import CpuMeter, LagSampler, ProcessHealth
from include.capacity.load.request import Answer, Prepared, Sender, Target
from include.capacity.load.transport import now

if TYPE_CHECKING:  # pyarrow is a quarter of a second that a worker does without
    from include.capacity.results.schema import Facts

logger = logging.getLogger(__name__)

FULL_SHARE = 0.75
"""Share of a core that one process may be expected to need before the load is split."""
NOTHING_LEFT = 0.95
"""Share of a core above which a process would have used more, had there been more."""
NEAR = 4.0
"""A step tells what another costs if their concurrencies differ by no more than this factor."""
START_S = 60.0
"""Longest wait for a worker's first word: it imports for a second, on a busy machine for longer."""
PINGS = 10
STOP_S = 5.0

_LENGTH = struct.Struct("!I")
HERE = ("127.0.0.1", "localhost", "::1")


class WorkerDied(Exception):
    """A load process ended before the step did."""


def workers_for(concurrency: int, steps: Iterable[Facts], url: str, cores: int | None = None) -> int:
    """How many processes it takes to hold ``concurrency`` requests in flight.

    By what the steps before have cost, the prime step at the top of the ladder first of all: CPU a request
    in flight, in the step whose concurrency is nearest (a factor of 4 at most), times ``concurrency``. A
    server gives each of more streams less, so this errs to the safe side going up. A process that had
    nothing left tells only that it was not enough: twice as many then. As many processes as keep each below
    ``FULL_SHARE`` of a core; never more than there are cores, of which a server on this machine needs one.
    One, where no step tells.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    most = max(1, cores - (urlsplit(url).hostname in HERE))
    nearest, need = NEAR, 0.0
    for step in steps:
        share, workers = step.client.get("client_cpu_share"), step.client.get("client_workers")
        means = [load.inflight_mean for load in step.loads]
        in_flight = sum(mean for mean in means if mean is not None)
        if share is None or workers is None or None in means or not in_flight:
            continue
        apart = max(concurrency / in_flight, in_flight / concurrency)
        if apart <= nearest:
            used = 2 * FULL_SHARE if share > NOTHING_LEFT else share
            nearest, need = apart, used * workers * concurrency / in_flight
    return max(1, min(most, math.ceil(need / FULL_SHARE)))


# -- what travels


class _Setup(msgspec.Struct):
    target: Target
    kinds: list[tuple[Literal["chat", "completions"], int]]
    """Endpoint and slots of each sender."""


class _Call(msgspec.Struct, array_like=True):
    number: int
    what: Literal["setup", "time", "send", "cancel", "mark", "health"]
    setup: _Setup | None = None
    kind: int = 0
    slot: int = 0
    deadline_wall_s: float = 0.0
    prepared: Prepared | None = None
    span: tuple[float, float] = (0.0, 0.0)


class _Health(msgspec.Struct):
    lags_s: list[float]
    cpu_share: float | None


class _Reply(msgspec.Struct, array_like=True):
    number: int
    answer: Answer | None = None
    at: float | None = None
    health: _Health | None = None
    error: str | None = None
    """What went wrong in the worker: a fault of this program."""


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(_Call).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class _Framed(asyncio.Protocol, abc.ABC):
    """Whole messages over a stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclass

    def write(self, message: _Call | _Reply) -> None:
        data = _encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0
        while len(data) >= at + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if len(data) < at + _LENGTH.size + length:
                break
            at += _LENGTH.size
            self.take(data[at : at + length])
            at += length
        self._rest = data[at:]

    @abc.abstractmethod
    def take(self, message: bytes) -> None: ...

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


# -- our side


class Workers:
    """Load processes of one step, from :meth:`start` to :meth:`aclose`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.clock_error_s: float | None = None
        """By how much the workers' clocks may differ from ours at most."""
        self._links: list[_Link] = []
        self._slots: list[int] = []

    async def start(
        self, target: Target, kinds: Sequence[tuple[Literal["chat", "completions"], int]]
    ) -> list[RemoteSender]:
        """Start the processes, open all connections; a sender for each (endpoint, slots) of ``kinds``.

        MeasurementError if a process does not come up or its clock is another than ours.
        """
        for number in range(self.count):
            self._links.append(await _Link.open(number, self.count))
        setups = []
        for link in self._links:
            own = [(endpoint, len(range(link.number, slots, self.count))) for endpoint, slots in kinds]
            setups.append(link.ask("setup", setup=_Setup(target, own)))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*setups)
                self.clock_error_s = max([await link.compare_clocks() for link in self._links])
        except TimeoutError as error:
            raise MeasurementError(f"load processes: not ready within {START_S:.0f} s") from error
        except WorkerDied as error:
            raise MeasurementError(f"{error} while it was being started") from error
        return [RemoteSender(self._links, kind) for kind in range(len(kinds))]

    def mark(self) -> None:
        """Note the workers' CPU time: what lies between the first and the last mark counts."""
        for link in self._links:
            link.tell("mark")

    async def health(self, start: float, end: float) -> list[ProcessHealth]:
        """How each worker was over a span of stamps. Raises WorkerDied."""
        found = []
        for link in self._links:
            health = (await link.ask("health", span=(start, end))).health
            assert health is not None
            found.append(ProcessHealth(f"load process {link.number + 1}", health.lags_s, health.cpu_share))
        return found

    async def aclose(self) -> None:
        """End the processes."""
        for link in self._links:
            link.leaving = True
            link.close()
        for link in self._links:
            await asyncio.to_thread(link.end)
        self._links.clear()


class RemoteSender:
    """A :class:`~include.capacity.load.request.Sender` spread over workers."""

    def __init__(self, links: Sequence[_Link], kind: int) -> None:
        self._links = links
        self._kind = kind
        self._count = len(links)

    async def send(self, prepared: Prepared, slot: int, deadline_wall_s: float) -> Answer:
        """As the sender's; WorkerDied if the slot's worker is gone."""
        slot, worker = divmod(slot, self._count)
        reply = await self._links[worker].ask(
            "send", kind=self._kind, slot=slot, deadline_wall_s=deadline_wall_s, prepared=prepared
        )
        assert reply.answer is not None
        return reply.answer


class _Link(_Framed):
    """The socket to one worker, and its process."""

    def __init__(self, number: int, of: int) -> None:
        super().__init__()
        self.number = number
        self.leaving = False
        self._of = of
        self._process: subprocess.Popen[bytes] | None = None
        self._last = 0
        self._waiting: dict[int, asyncio.Future[_Reply]] = {}
        self._died: WorkerDied | None = None

    @classmethod
    async def open(cls, number: int, of: int) -> _Link:
        link = cls(number, of)
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).parents[3])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            link._process = subprocess.Popen(
                [sys.executable, "-m", "include.capacity.load.workers", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
            )
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        return link

    async def ask(self, what: Any, **more: Any) -> _Reply:
        """Call and wait for the reply; a cancellation is told to the worker."""
        if self._died is not None:
            raise self._died
        number = self.tell(what, **more)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            found = await reply
        except asyncio.CancelledError:
            self.write(_Call(number, "cancel"))
            raise
        finally:
            self._waiting.pop(number, None)
        if found.error is not None:
            raise RuntimeError(f"load process {self.number + 1}: {found.error}")
        return found

    def tell(self, what: Any, **more: Any) -> int:
        """Call without waiting; returns the call's number."""
        self._last += 1
        self.write(_Call(self._last, what, **more))
        return self._last

    async def compare_clocks(self) -> float:
        """Largest difference that the worker's clock may have to ours, in seconds."""
        apart = math.inf
        for _ in range(PINGS):
            before = now()
            there = (await self.ask("time")).at
            after = now()
            assert there is not None
            if not before <= there <= after:
                raise MeasurementError(
                    f"load process {self.number + 1}: its clock says {there:.6f} between our {before:.6f} "
                    f"and {after:.6f}; several load processes need a machine whose processes share one clock"
                )
            apart = min(apart, max(there - before, after - there))
        return apart

    def take(self, message: bytes) -> None:
        reply = _decode_reply(message)
        waiting = self._waiting.get(reply.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self.leaving:
            return
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its socket closed as it ended
        how = self._process.returncode
        if how is None:
            words = "closed its socket"
        elif how < 0:
            words = f"was ended by {signal.Signals(-how).name}"
        else:
            words = f"ended with status {how}"
        self._died = WorkerDied(f"load process {self.number + 1} of {self._of} {words}")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._died)

    def end(self) -> None:
        """Wait until the process has ended; not for long."""
        assert self._process is not None
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("load process %d does not end; killed", self.number + 1)
            self._process.kill()
            self._process.wait()


# -- the worker's side


class _Worker(_Framed):
    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()
        self._senders: list[Sender] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lag = LagSampler()
        self._cpu = CpuMeter()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.over.set()

    def take(self, message: bytes) -> None:
        call = _decode_call(message)
        if call.what == "cancel":
            if call.number in self._tasks:
                self._tasks[call.number].cancel()
        elif call.what == "time":
            self.write(_Reply(call.number, at=now()))
        elif call.what == "mark":
            self._cpu.mark()
        elif call.what == "health":
            lags = self._lag.between(*call.span).tolist()
            self.write(_Reply(call.number, health=_Health(lags, self._cpu.share)))
        else:
            self._tasks[call.number] = asyncio.create_task(self._carry_out(call))

    async def sample(self) -> None:
        """Watch the event loop until the other side is gone."""
        sampling = asyncio.create_task(self._lag.run())
        await self.over.wait()
        for task in (sampling, *self._tasks.values()):
            task.cancel()

    async def _carry_out(self, call: _Call) -> None:
        try:
            if call.setup is not None:
                for endpoint, slots in call.setup.kinds:
                    sender = Sender(call.setup.target, endpoint, slots)
                    self._senders.append(sender)
                    await sender.connect()
                self.write(_Reply(call.number))
            else:
                assert call.prepared is not None
                sender = self._senders[call.kind]
                answer = await sender.send(call.prepared, call.slot, call.deadline_wall_s)
                self.write(_Reply(call.number, answer))
        except Exception as error:  # told to the other side, where it ends the step
            self.write(_Reply(call.number, error=f"{type(error).__name__}: {error}"))
            raise
        finally:
            del self._tasks[call.number]


async def _work(descriptor: int) -> None:
    worker = _Worker()
    await asyncio.get_running_loop().create_connection(lambda: worker, sock=socket.socket(fileno=descriptor))
    gc.collect()
    gc.freeze()
    await worker.sample()


def main(arguments: Sequence[str]) -> None:
    """Be a worker at the other end of an inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; our parent ends us
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
