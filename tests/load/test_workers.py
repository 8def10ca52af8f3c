"""Load split over processes: the same numbers, counted together, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from include.capacity.errors import MeasurementError
from include.capacity.load import workers as workers_module
from include.capacity.load.loop import inflight
from include.capacity.load.request import Answer, Target
from include.capacity.load.workers import RemoteSender, Workers, workers_for
from include.capacity.results.schema import Facts, LoadFacts
from include.capacity.results.spec import Load
from include.capacity.words import Outcome, Phase
from tests.load.asking import prepared
from tests.load.test_step import FAST, Terminated, Watching, measured, service_class, spec
from tests.nullserver import NullServer, Plan

AT = "include.capacity.load.workers"


def load_processes() -> list[psutil.Process]:
    """Our own children that are load processes."""
    found = []
    for child in psutil.Process().children():
        try:
            if AT in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert load_processes() == []


def test_the_split_changes_nothing_but_the_worker_column() -> None:
    runs = {}
    for count in (1, 2, 3):
        with NullServer(FAST, keep_requests=True) as server:
            run = measured(server, spec(4, 40), workers=count)
        assert run.facts.client["client_workers"] == count
        bodies = {record.request_id.rpartition("-")[0]: record.body for record in server.records}
        runs[count] = run.requests.to_pandas().set_index("request_id"), bodies
    one, its_bodies = runs[1]
    assert set(one["worker"]) == {0}
    for count in (2, 3):
        rows, bodies = runs[count]
        assert (rows["worker"] == rows["slot"] % count).all()
        assert set(rows["worker"]) == set(range(count))
        assert rows.index.is_unique
        assert rows["counted"].sum() == one["counted"].sum() == 40
        both = rows.index.intersection(one.index)
        assert len(both) >= 40
        same = ["model", "service_class", "workload", "phase", "concurrency", "repeat", "deadline_s"]
        same += ["asked_prompt_tokens", "asked_max_tokens"]
        assert rows.loc[both, same].equals(one.loc[both, same])
        told = ["prompt_tokens", "output_tokens", "chunks", "first_chunk_tokens", "streamed", "finish_reason"]
        for frame in (rows, one):
            answered = frame.loc[both][frame.loc[both, "outcome"] == "completed"]
            assert answered[told].drop_duplicates().values.tolist() == [[3, 5, 5, 1, True, "length"]]
        assert all(bodies[name] == its_bodies[name] for name in both if name in bodies and name in its_bodies)


@pytest.mark.parametrize(("n", "count"), [(1, 1), (64, 1), (256, 1), (1000, 1), (64, 2), (1000, 2)])
def test_a_server_that_counts_sees_exactly_n(n: int, count: int) -> None:
    """It keeps the first answers back until all slots have asked, and counts to the end."""
    with NullServer(Plan(hold=True, tokens=1)) as server:

        def let_go() -> None:
            if server.wait_for(lambda: server.open == n, 60):
                server.plan = Plan(ttft_s=0.2, tokens=1)
                server.in_loop(server.release)

        threading.Thread(target=let_go, daemon=True).start()
        classes = {"interactive": service_class(deadline_s=2000.0)}
        what = spec(n, n + 1, phase=Phase.PRIME)  # the load alone: more than one request of some slot
        rows = measured(server, what, workers=count, classes=classes).requests.to_pandas()
        assert server.peak == n
    assert set(rows["outcome"]) == {"completed"}
    spans = list(zip(rows["started_s"], rows["started_s"] + rows["e2e_s"], strict=True))
    assert inflight(spans, 0.0, 1e6)[1] == n


def test_two_classes_share_the_workers() -> None:
    loads = (
        Load(service_class="interactive", concurrency=5, requests=40, max_requests=40),
        Load(service_class="batch", concurrency=3, requests=30, max_requests=30),
    )
    with NullServer(FAST, keep_requests=True) as server:
        run = measured(server, spec(loads=loads, phase=Phase.SHARED), workers=2)
        assert server.peak == 8
        assert {record.body["stream"] for record in server.records} == {True, False}
    rows = run.requests.to_pandas()
    assert rows.groupby(["service_class", "worker"])["slot"].nunique().to_dict() == {
        ("interactive", 0): 3,
        ("interactive", 1): 2,
        ("batch", 0): 2,
        ("batch", 1): 1,
    }


def test_a_worker_that_is_killed_makes_the_step_invalid_and_leaves_its_rows() -> None:
    watching = Watching(lambda snapshot: snapshot.counted > 20)
    with NullServer(FAST) as server:
        with watching.then(lambda: load_processes()[1].kill()):
            run = measured(server, spec(4, 100_000, cap_s=5000.0), progress=watching, workers=2)
        assert server.wait_for(lambda: server.open == 0)
    facts = run.facts
    assert facts.invalid is not None
    assert facts.invalid.startswith("client-bound: load process")
    assert "of 2 was ended by SIGKILL" in facts.invalid
    assert (facts.error, facts.server_crashed) == (None, False)
    assert facts.loads[0].stop_reason == "error"
    rows = run.requests.to_pandas()
    assert rows["counted"].sum() > 20
    assert set(rows[rows["counted"]]["outcome"]) == {"completed"}
    assert set(rows["outcome"]) <= {"completed", "aborted"}


def test_an_interrupt_ends_the_workers() -> None:
    def handler(*_: object) -> None:
        raise Terminated

    former = signal.signal(signal.SIGTERM, handler)
    try:
        with NullServer(FAST) as server:

            def interrupt() -> None:
                server.wait_for(lambda: len(server.records) > 20)
                os.kill(os.getpid(), signal.SIGTERM)

            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(Terminated):
                measured(server, spec(4, 100_000, cap_s=5000.0), workers=2)
            assert server.wait_for(lambda: server.open == 0)
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_worker_ends_when_its_parent_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", AT, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    ours.close()
    assert process.wait(60) == 0


async def on_workers(server: NullServer, work: Any, count: int = 2) -> Any:
    workers = Workers(count)
    try:
        (sender,) = await workers.start(Target(server.url, "null"), [("chat", 4)])
        return await work(workers, sender)
    finally:
        await workers.aclose()


def test_a_cancelled_request_is_given_up_by_its_worker() -> None:
    async def work(workers: Workers, sender: RemoteSender) -> Answer:
        waiting = asyncio.create_task(sender.send(prepared(null_plan={"hold": True}), 1, 60.0))
        assert await asyncio.to_thread(server.wait_for, lambda: server.open == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(server.wait_for, lambda: server.open == 0)
        return await sender.send(prepared(null_plan={"tokens": 3}), 1, 60.0)

    with NullServer() as server:
        answer = asyncio.run(on_workers(server, work))
    assert (answer.outcome, answer.output_tokens, answer.chunks) == (Outcome.COMPLETED, 3, 3)
    assert [record.end for record in server.records] == ["client_left", "answered"]


def test_a_workers_stamps_are_on_our_clock() -> None:
    async def work(workers: Workers, sender: RemoteSender) -> tuple[Answer, float | None]:
        return await sender.send(prepared(null_plan={"tokens": 3}), 0, 60.0), workers.clock_error_s

    with NullServer() as server:
        answer, error_s = asyncio.run(on_workers(server, work))
        (record,) = server.records
    assert error_s is not None
    assert error_s > 0
    assert answer.wrote_at is not None
    assert answer.first_token_at is not None
    assert answer.ended_at is not None
    assert answer.wrote_at <= record.accepted_at
    assert record.sent[0] <= answer.first_token_at <= answer.ended_at


def test_a_worker_with_another_clock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(workers: Workers, sender: RemoteSender) -> None:
        raise AssertionError("should not have started")

    monkeypatch.setattr(workers_module, "now", lambda: 5.0)
    with NullServer() as server, pytest.raises(MeasurementError, match="share one clock"):
        asyncio.run(on_workers(server, work))


def test_each_worker_tells_how_it_was() -> None:
    async def work(workers: Workers, sender: RemoteSender) -> list[Any]:
        begun = workers_module.now()
        workers.mark()
        for slot in range(4):
            await sender.send(prepared(null_plan={"tokens": 3, "ttft_s": 0.05}), slot, 60.0)
        workers.mark()
        return await workers.health(begun, workers_module.now())

    with NullServer() as server:
        found = asyncio.run(on_workers(server, work))
    assert [process.name for process in found] == ["load process 1", "load process 2"]
    assert all(len(process.lags_s) >= 5 for process in found)
    assert all(process.cpu_share is not None and process.cpu_share >= 0 for process in found)


def test_messages_arrive_whole_however_they_are_cut() -> None:
    class Taking(workers_module._Framed):
        def __init__(self) -> None:
            super().__init__()
            self.taken: list[bytes] = []

        def take(self, message: bytes) -> None:
            self.taken.append(message)

    messages = [b"", b"one", b"x" * 300]
    stream = b"".join(workers_module._LENGTH.pack(len(message)) + message for message in messages)
    for first in range(len(stream) + 1):
        taking = Taking()
        for piece in (stream[:first], stream[first : first + 2], stream[first + 2 :]):
            taking.data_received(piece)
        assert taking.taken == messages


def facts(in_flight: float | None, share: float | None, workers: int = 1) -> Facts:
    return Facts(
        spec={},
        loads=[LoadFacts(service_class="interactive", concurrency=64, inflight_mean=in_flight)],
        client={"client_cpu_share": share, "client_workers": workers},
    )


@pytest.mark.parametrize(
    ("concurrency", "steps", "count"),
    [
        (1000, [], 1),
        (256, [facts(128, 0.30)], 1),  # 0.6 of a core
        (512, [facts(128, 0.30)], 2),  # 1.2
        (513, [facts(128, 0.30)], 1),  # more than four times as much tells nothing
        (1000, [facts(500, 0.6, workers=2)], 4),  # 2 x 0.6 x 2 = 2.4 cores
        (250, [facts(500, 0.6, workers=2)], 1),  # half a core is enough for half of it
        (1000, [facts(1000, 0.99), facts(250, 0.10)], 2),  # the nearest has the word
        (1000, [facts(1000, 0.99, workers=2)], 4),  # full: twice as many
        (2000, [facts(1000, 0.94)], 3),
        (8000, [facts(4000, 1.0, workers=2)], 7),  # a core is left to a server on this machine
        (256, [facts(None, 0.9), facts(128, None)], 1),  # unknown
    ],
)
def test_how_many_by_what_earlier_steps_have_cost(concurrency: int, steps: list[Facts], count: int) -> None:
    assert workers_for(concurrency, steps, "http://127.0.0.1:8000", cores=8) == count


def test_a_server_elsewhere_needs_no_core_here() -> None:
    for url, count in (("http://10.0.0.7:8000", 2), ("http://localhost:8000", 1)):
        assert workers_for(256, [facts(256, 0.95)], url, cores=2) == count
