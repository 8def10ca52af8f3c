"""The table fault x outcome: each way a request can end, over real sockets."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from include.capacity.load.request import END_GRACE_S, Answer, Sender, Target
from include.capacity.words import Outcome
from tests.load.asking import LOOPS, answer_to, ask, prepared, run
from tests.nullserver import PLANS, Act, NullServer, Plan, refusing_port

# fault, outcome, (finish_reason, output_tokens, usage_estimated)
TABLE = [
    ("fine", Outcome.COMPLETED, ("length", 5, False)),
    ("rejected_429", Outcome.REJECTED, (None, None, False)),
    ("rejected_429_retry_after", Outcome.REJECTED, (None, None, False)),
    ("rejected_503", Outcome.REJECTED, (None, None, False)),
    ("server_error_500", Outcome.SERVER_ERROR, (None, None, False)),
    ("server_error_502_html", Outcome.SERVER_ERROR, (None, None, False)),
    ("client_error_400", Outcome.CLIENT_ERROR, (None, None, False)),
    ("client_error_401", Outcome.CLIENT_ERROR, (None, None, False)),
    ("client_error_403", Outcome.CLIENT_ERROR, (None, None, False)),
    ("client_error_404", Outcome.CLIENT_ERROR, (None, None, False)),
    ("client_error_413", Outcome.CLIENT_ERROR, (None, None, False)),
    ("client_error_422", Outcome.CLIENT_ERROR, (None, None, False)),
    ("close_before_head", Outcome.CONNECTION_LOST, (None, None, False)),
    ("reset_before_head", Outcome.CONNECTION_LOST, (None, None, False)),
    ("reset_before_first_token", Outcome.CONNECTION_LOST, (None, None, False)),
    ("reset_after_first_token", Outcome.CONNECTION_LOST, (None, 2, True)),
    ("close_before_first_token", Outcome.CONNECTION_LOST, (None, None, False)),
    ("close_after_first_token", Outcome.CONNECTION_LOST, (None, 2, True)),
    ("close_inside_chunk", Outcome.CONNECTION_LOST, (None, 2, True)),
    ("stall_before_head", Outcome.FIRST_TOKEN_TIMEOUT, (None, None, False)),
    ("stall_before_first_token", Outcome.FIRST_TOKEN_TIMEOUT, (None, None, False)),
    ("stall_after_first_token", Outcome.DEADLINE_EXCEEDED, (None, 2, True)),
    ("end_without_finish_reason", Outcome.TRUNCATED, (None, 5, True)),
    ("end_without_finish_reason_with_usage", Outcome.TRUNCATED, (None, 5, False)),
    ("done_without_finish_reason", Outcome.COMPLETED, (None, 5, False)),
    ("finish_reason_without_done", Outcome.COMPLETED, ("length", 5, False)),
    ("finish_reason_abort", Outcome.STREAM_ERROR, ("abort", 5, True)),
    ("error_first", Outcome.STREAM_ERROR, (None, None, False)),
    ("error_mid_stream", Outcome.STREAM_ERROR, (None, 2, True)),
    ("json_error", Outcome.STREAM_ERROR, (None, None, False)),
    ("json_instead_of_stream", Outcome.COMPLETED, ("length", 5, False)),
    ("no_usage", Outcome.COMPLETED, ("length", 5, True)),
    ("usage_late", Outcome.COMPLETED, ("length", 5, False)),
    ("usage_continuous", Outcome.COMPLETED, ("length", 6, False)),
    ("several_tokens_a_chunk", Outcome.COMPLETED, ("length", 12, False)),
    ("empty", Outcome.EMPTY, ("length", 0, False)),
    ("slow_headers", Outcome.COMPLETED, ("length", 5, False)),
    ("comments", Outcome.COMPLETED, ("length", 5, False)),
    ("not_json", Outcome.MALFORMED, (None, None, False)),
    ("html", Outcome.MALFORMED, (None, None, False)),
    ("not_http", Outcome.MALFORMED, (None, None, False)),
]


def test_the_table_knows_every_plan() -> None:
    assert [fault for fault, *_ in TABLE] == list(PLANS)


@pytest.mark.parametrize(("fault", "outcome", "told"), TABLE, ids=[fault for fault, *_ in TABLE])
def test_fault(fault: str, outcome: Outcome, told: tuple[str | None, int | None, bool]) -> None:
    deadline_s = 1.0 if fault.startswith("stall") else 20.0
    answer, server = answer_to(PLANS[fault], deadline_s=deadline_s)
    assert (answer.outcome, answer.error is None) == (outcome, outcome is Outcome.COMPLETED)
    assert (answer.finish_reason, answer.output_tokens, answer.usage_estimated) == told
    assert len(server.records) == 1  # nothing is retried
    check_times(answer)


def check_times(answer: Answer) -> None:
    """What must hold for any answer to a request that was written."""
    assert answer.wrote_at is not None
    assert answer.ended_at is not None
    assert answer.ended_at >= answer.wrote_at
    if answer.chunks:
        assert answer.first_token_at is not None
        assert answer.last_token_at is not None
        assert answer.wrote_at <= answer.first_token_at <= answer.last_token_at <= answer.ended_at
    else:
        assert answer.first_token_at is None
        assert answer.last_token_at is None


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "fault", ["fine", "reset_after_first_token", "close_before_head", "stall_after_first_token"]
)
def test_the_same_on_both_event_loops(fault: str, loop: str) -> None:
    answer, _ = answer_to(
        PLANS[fault], loop=loop, deadline_s=20.0 if fault != "stall_after_first_token" else 1.0
    )
    assert answer.outcome == {row[0]: row[1] for row in TABLE}[fault]


def test_what_the_error_says() -> None:
    assert answer_to(PLANS["rejected_503"])[0].error == "HTTP 503: told to answer 503"
    assert answer_to(PLANS["server_error_502_html"])[0].error == "HTTP 502: <html>bad gateway</html>"
    assert answer_to(PLANS["error_mid_stream"])[0].error == "the engine died"
    assert answer_to(PLANS["json_error"])[0].error == "out of memory"
    assert "Field required" in (answer_to(PLANS["client_error_422"])[0].error or "")


def test_status_is_kept() -> None:
    assert answer_to(PLANS["rejected_429"])[0].http_status == 429
    assert answer_to(PLANS["rejected_429"])[0].retry_after_s is None
    assert answer_to(PLANS["rejected_429_retry_after"])[0].retry_after_s == 7.0
    assert answer_to(PLANS["fine"])[0].http_status == 200
    assert answer_to(PLANS["close_before_head"])[0].http_status is None


def test_refused() -> None:
    answer = run(ask(f"http://127.0.0.1:{refusing_port()}"))
    assert answer.outcome is Outcome.CONNECT_FAILED
    assert "refused" in (answer.error or "").lower()
    assert answer.wrote_at is None
    assert answer.own_fault is False


def test_a_host_without_a_name() -> None:
    answer = run(ask("http://no-such-host.invalid:1"))
    assert answer.outcome is Outcome.CONNECT_FAILED


def test_our_own_descriptors_running_out_is_not_the_servers_fault() -> None:
    # In a process of its own, whose limit can be lowered without harm.
    script = """
import asyncio, os, resource, sys, uvloop
from include.capacity.load.request import Sender, Target
from tests.load.asking import LOOPS, prepared
async def main(url):
    sender = Sender(Target(url, "null"), "chat", 2)
    await asyncio.sleep(0)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    hold = []
    try:
        while True:
            hold.append(os.dup(0))
    except OSError:
        pass
    answer = await sender.send(prepared(), 0, 5.0)
    print(answer.outcome, answer.own_fault, answer.error)
for name, loop in LOOPS.items():
    if name == sys.argv[2]:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main(sys.argv[1]))
"""
    with NullServer(Plan()) as server:
        for loop in LOOPS:
            done = subprocess.run(
                [sys.executable, "-c", script, server.url, loop], capture_output=True, text=True, timeout=60
            )
            assert done.stdout.startswith("connect_failed True OwnLimit"), done.stdout + done.stderr
        assert server.records == []


def test_a_stalled_request_ends_at_its_deadline_and_leaves_the_server() -> None:
    answer, server = answer_to(PLANS["stall_after_first_token"], deadline_s=0.3)
    assert answer.wrote_at is not None
    assert answer.ended_at is not None
    assert answer.ended_at - answer.wrote_at >= 0.3
    assert server.records[0].end == "client_left"


def test_slow_headers_are_part_of_the_first_token_time() -> None:
    answer, _ = answer_to(PLANS["slow_headers"])
    assert answer.first_token_at is not None
    assert answer.wrote_at is not None
    assert answer.first_token_at - answer.wrote_at >= 0.3


@pytest.mark.parametrize("loop", LOOPS)
def test_our_stamps_enclose_the_servers(loop: str) -> None:
    """Both clocks are one: written before it was read there, received after it was sent there."""
    answer, server = answer_to(Plan(ttft_s=0.05, itl_s=0.02, tokens=3, finish_reason=None), loop=loop)
    (record,) = server.records
    _, first, _, last = record.sent  # the role chunk, and three tokens
    assert answer.wrote_at is not None
    assert answer.first_token_at is not None
    assert answer.last_token_at is not None
    assert answer.wrote_at <= record.accepted_at
    assert record.accepted_at + 0.05 <= first <= answer.first_token_at
    assert record.accepted_at + 0.05 + 2 * 0.02 <= last <= answer.last_token_at


def test_a_token_that_comes_after_the_deadline_is_none() -> None:
    answer, _ = answer_to(Plan(ttft_s=5.0, tokens=2), deadline_s=0.2)
    assert (answer.outcome, answer.first_token_at) == (Outcome.FIRST_TOKEN_TIMEOUT, None)


def test_not_streamed_and_late_is_deadline_exceeded() -> None:
    answer, _ = answer_to(Plan(ttft_s=5.0, tokens=2), stream=False, deadline_s=0.2)
    assert answer.outcome is Outcome.DEADLINE_EXCEEDED


def test_done_with_the_connection_left_hanging_is_completed() -> None:
    """The HTTP message never ends, but the stream said that it is done."""
    content = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    plan = Plan(pieces=((0.0, content), (0.0, b"data: [DONE]\n\n"), (0.01, Act.STALL)))
    answer, server = answer_to(plan)
    assert answer.outcome is Outcome.COMPLETED
    assert answer.ended_at is not None
    assert answer.ended_at == answer.last_token_at
    assert server.records[0].end == "client_left"
    assert (server.records[0].ended_at or 0.0) >= answer.ended_at + END_GRACE_S


def test_a_reset_after_done_takes_nothing_back() -> None:
    content = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    plan = Plan(pieces=((0.0, content), (0.0, b"data: [DONE]\n\n"), (0.1, Act.RESET)))
    assert answer_to(plan)[0].outcome is Outcome.COMPLETED


def test_a_reset_after_finish_reason_is_a_lost_connection() -> None:
    content = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    answer, _ = answer_to(Plan(pieces=((0.0, content), (0.1, Act.RESET))))
    assert (answer.outcome, answer.finish_reason) == (Outcome.CONNECTION_LOST, "stop")


def test_an_error_status_whose_body_stalls_is_still_that_error() -> None:
    head = b"HTTP/1.1 503 no\r\nContent-Length: 100\r\n\r\npart"
    answer, _ = answer_to(Plan(wire=((0.0, head), (0.0, Act.STALL))))
    assert (answer.outcome, answer.error) == (Outcome.REJECTED, "HTTP 503: part")


@pytest.mark.parametrize(
    ("stream", "fault", "outcome"),
    [
        (False, None, Outcome.COMPLETED),
        (False, "reset", Outcome.CONNECTION_LOST),
        (False, "close", Outcome.CONNECTION_LOST),
        (False, "stall", Outcome.DEADLINE_EXCEEDED),
    ],
)
def test_not_streamed(stream: bool, fault: str | None, outcome: Outcome) -> None:
    answer, _ = answer_to(
        Plan(tokens=3, fault=fault), stream=stream, deadline_s=0.5 if fault == "stall" else 20
    )
    assert answer.outcome is outcome
    if fault is None:
        assert (answer.output_tokens, answer.first_token_at, answer.streamed, answer.chunks) == (
            3,
            None,
            False,
            0,
        )


def test_completions_endpoint() -> None:
    answer, server = answer_to(Plan(tokens=3), endpoint="completions")
    assert (answer.outcome, answer.output_tokens, answer.chunks) == (Outcome.COMPLETED, 3, 3)
    assert server.records[0].path == "/v1/completions"


def test_what_is_sent() -> None:
    async def work() -> None:
        sender = Sender(Target(server.url, "null", api_key="secret"), "chat", 1)
        await sender.send(prepared(request_id="r-7", max_tokens=2), 0, 20.0)
        await sender.aclose()

    with NullServer(keep_requests=True) as server:
        run(work())
        (record,) = server.records
        assert record.body == {"stream": True, "max_tokens": 2}
        assert record.headers["authorization"] == "Bearer secret"
        assert record.headers["content-type"] == "application/json"
        assert record.headers["host"] == f"127.0.0.1:{server.port}"
        assert record.headers["accept-encoding"] == "identity"
        assert record.request_id.startswith("r-7-")


@pytest.mark.parametrize("n", [1, 64, 256, 1000])
def test_the_server_sees_as_many_requests_as_there_are_slots(n: int) -> None:
    async def work() -> list[Answer]:
        sender = Sender(Target(server.url, "null"), "chat", n)
        assert await sender.connect() == n
        tasks = [asyncio.create_task(sender.send(prepared(), slot, 60.0)) for slot in range(n)]
        assert await asyncio.to_thread(server.wait_for, lambda: server.open == n, 60.0)
        server.in_loop(server.release)
        answers = await asyncio.gather(*tasks)
        await sender.aclose()
        return answers

    with NullServer(Plan(tokens=2, hold=True)) as server:
        answers = run(work())
        assert [answer.outcome for answer in answers] == [Outcome.COMPLETED] * n
        assert (server.peak, server.connections_made, len(server.records)) == (n, n, n)


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_a_base_url_with_or_without_v1(base: str) -> None:
    with NullServer(Plan(tokens=1)) as server:
        assert run(ask(server.url + base)).outcome is Outcome.COMPLETED
        assert server.records[0].path == "/v1/chat/completions"


def test_a_redirect_is_configuration() -> None:
    head = b"HTTP/1.1 307 go\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n"
    answer, _ = answer_to(Plan(wire=((0.0, head),)))
    assert answer.outcome is Outcome.CLIENT_ERROR
    assert "http://elsewhere/" in (answer.error or "")


def test_cancelling_leaves_the_server_and_the_next_request_alone() -> None:
    async def work(server: NullServer) -> Answer:
        sender = Sender(Target(server.url, "null"), "chat", 1)
        task = asyncio.create_task(sender.send(prepared(null_plan="stall_after_first_token"), 0, 20.0))
        while not (server.records and server.records[0].sent):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer = await sender.send(prepared(null_plan="fine"), 0, 20.0)
        await sender.aclose()
        return answer

    with NullServer() as server:
        answer = run(work(server))
        assert answer.outcome is Outcome.COMPLETED
        assert answer.connection_reused is False
        assert server.wait_for(lambda: server.open == 0)
        assert server.records[0].end == "client_left"
