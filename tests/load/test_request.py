"""Streams and answers as servers really send them: each case by literal times, and over a socket."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from include.capacity.load.request import Answer, Reading, _retry_after
from include.capacity.words import Outcome
from tests.load.asking import answer_to
from tests.nullserver import Plan

STREAM = ((b"Content-Type", b"text/event-stream"),)
JSON = ((b"Content-Type", b"application/json"),)
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **message: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": message, "finish_reason": finish_reason}]})


def usage(tokens: int, prompt: int = 7, **more: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, **more}})


ROLE = delta(role="assistant", content="")
Pieces = list[tuple[float, bytes]]

# S1: the bytes of one event cut inside each character, pieces 20 ms apart.
CUT = delta(content="é漢🙂")
_at = CUT.index("é".encode())
S1 = [CUT[: _at + 1], CUT[_at + 1 : _at + 4], CUT[_at + 4 : _at + 7], CUT[_at + 7 :]]


@dataclass
class Case:
    pieces: Pieces
    """Seconds after the write, bytes of the body."""
    ttft: float | None
    last: float | None
    e2e: float
    tokens: int | None
    outcome: Outcome = Outcome.COMPLETED
    first_answer: float | None = -1.0
    """-1: the same as ``ttft``."""
    estimated: bool = False
    chunks: int | None = None
    """``None``: as many as tokens."""
    scale: float = 1.0
    """Of the times, when sent over a socket."""


def ticks(first: float, step: float, *events: bytes) -> Pieces:
    return [(round(first + i * step, 6), data) for i, data in enumerate(events)]


CASES: dict[str, Case] = {
    "S1 a character in pieces": Case(
        [*ticks(0.1, 0.02, *S1), (0.2, delta("stop")), (0.2, DONE)], 0.16, 0.16, 0.2, 1, estimated=True
    ),
    "S2 a line of 300 KB": Case(
        [(0.1, delta(content="x" * 300_000)), (0.2, DONE)], 0.1, 0.1, 0.2, 1, estimated=True
    ),
    "S3 the role chunk is no token": Case(
        [(0.005, ROLE), (0.2, delta(content="a")), (0.3, delta("stop")), (0.3, DONE)],
        0.2,
        0.2,
        0.3,
        1,
        estimated=True,
    ),
    "S4 first gap is no ITL": Case(
        [(0.9, ROLE), *ticks(2.2, 0.02, *[delta(content="a")] * 6), (2.31, usage(6)), (2.31, DONE)],
        2.2,
        2.3,
        2.31,
        6,
        scale=0.1,
    ),
    "S5 reasoning first": Case(
        [
            (0.05, ROLE),
            *ticks(0.1, 0.01, *[delta(reasoning="r")] * 50),
            *ticks(0.7, 0.01, *[delta(content="a")] * 5),
            (0.8, usage(55)),
            (0.8, DONE),
        ],
        0.1,
        0.74,
        0.8,
        55,
        first_answer=0.7,
        scale=0.3,
    ),
    "S5 reasoning under its older name": Case(
        [(0.1, delta(reasoning_content="r")), (0.2, delta(content="a")), (0.3, usage(2)), (0.3, DONE)],
        0.1,
        0.2,
        0.3,
        2,
        first_answer=0.2,
    ),
    "S6 reasoning only": Case(
        [*ticks(0.1, 0.1, *[delta(reasoning="r")] * 3), (0.4, delta("length")), (0.4, usage(3)), (0.4, DONE)],
        0.1,
        0.3,
        0.4,
        3,
        first_answer=None,
    ),
    "S6 no text at all": Case(
        [(0.1, ROLE), (0.2, delta("length", content="")), (0.2, usage(3)), (0.2, DONE)],
        None,
        None,
        0.2,
        3,
        outcome=Outcome.EMPTY,
        chunks=0,
    ),
    "S7 usage at the end": Case(
        [*ticks(0.1, 0.1, *[delta(content="a")] * 3), (0.4, usage(3)), (0.4, DONE)], 0.1, 0.3, 0.4, 3
    ),
    "S8 usage three seconds late": Case(
        [*ticks(0.1, 0.1, *[delta(content="a")] * 3), (3.3, usage(3)), (3.3, DONE)],
        0.1,
        0.3,
        3.3,
        3,
        scale=0.1,
    ),
    "S9 no space after the colon": Case(
        [(0.1, delta(content="a").replace(b"data: ", b"data:")), (0.2, DONE.replace(b" ", b""))],
        0.1,
        0.1,
        0.2,
        1,
        estimated=True,
    ),
    "S11 comments and an empty event": Case(
        [
            *ticks(1.0, 1.0, *[b": keep-alive\n\n"] * 5),
            (5.2, delta(content="a")),
            (5.3, b": keep-alive\n\n"),
            (5.4, b"data:\n\n"),
            (5.5, delta(content="b")),
            (5.6, usage(2)),
            (5.6, DONE),
        ],
        5.2,
        5.5,
        5.6,
        2,
        scale=0.1,
    ),
    "S12 an error in the stream": Case(
        [
            *ticks(0.1, 0.1, *[delta(content="a")] * 2),
            (0.3, event({"error": {"message": "oh"}})),
            (0.4, DONE),
        ],
        0.1,
        0.2,
        0.3,
        2,
        outcome=Outcome.STREAM_ERROR,
        estimated=True,
    ),
    "S12 an error by the event's name": Case(
        [(0.1, delta(content="a")), (0.3, b"event: error\ndata: gone\n\n"), (0.4, DONE)],
        0.1,
        0.1,
        0.3,
        1,
        outcome=Outcome.STREAM_ERROR,
        estimated=True,
    ),
    "S12 an error object of older servers": Case(
        [(0.1, event({"object": "error", "message": "oh", "code": 500})), (0.2, DONE)],
        None,
        None,
        0.1,
        None,
        outcome=Outcome.STREAM_ERROR,
        chunks=0,
    ),
    "S14 empty": Case(
        [(0.1, ROLE), (0.2, delta("stop")), (0.3, DONE)],
        None,
        None,
        0.3,
        None,
        outcome=Outcome.EMPTY,
        chunks=0,
    ),
    "S16 usage with the last, empty chunk": Case(
        [
            *ticks(0.1, 0.1, *[event({"choices": [{"index": 0, "text": "a"}]})] * 9),
            (
                1.1,
                event(
                    {
                        "choices": [{"index": 0, "text": "", "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": 1, "completion_tokens": 10},
                    }
                ),
            ),
            (1.1, DONE),
        ],
        0.1,
        0.9,
        1.1,
        10,
        chunks=9,
        scale=0.2,
    ),
    "S17 usage never sent": Case(
        [*ticks(0.1, 0.1, *[delta(content="a")] * 4), (0.5, delta("stop")), (0.5, DONE)],
        0.1,
        0.4,
        0.5,
        4,
        estimated=True,
    ),
    "S18 reasoning is part of the tokens": Case(
        [
            (0.1, delta(content="a")),
            (0.2, delta(content="b")),
            (0.3, usage(100, completion_tokens_details={"reasoning_tokens": 60})),
            (0.3, DONE),
        ],
        0.1,
        0.2,
        0.3,
        100,
        chunks=2,
    ),
    "S21 headers at once, tokens for ten seconds": Case(
        [*ticks(0.1, 0.1, *[delta(content="a")] * 100), (10.0, usage(100)), (10.0, DONE)],
        0.1,
        10.0,
        10.0,
        100,
        scale=0.05,
    ),
    "S22 content as a list of parts": Case(
        [
            (0.1, delta(content=[])),
            (0.2, delta(content=[{"type": "text", "text": "a"}])),
            (0.3, delta(content=[{"type": "text", "text": ""}])),
            (0.4, usage(1)),
            (0.4, DONE),
        ],
        0.2,
        0.2,
        0.4,
        1,
    ),
    "S46 a line in three segments": Case(
        [(0.1, b"data:"), (0.2, delta(content="a")[5:-2]), (0.3, b"\n\n"), (0.4, usage(1)), (0.4, DONE)],
        0.3,
        0.3,
        0.4,
        1,
    ),
    "tool-call arguments are content, the call's name is not": Case(
        [
            (0.1, delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])),
            (0.2, delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])),
            (0.3, delta("tool_calls")),
            (0.3, DONE),
        ],
        0.2,
        0.2,
        0.3,
        1,
        estimated=True,
    ),
    "text after the last running usage is estimated": Case(
        [
            (0.1, event({"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 4}})),
            (0.2, delta(content="b")),
            (0.3, DONE),
        ],
        0.1,
        0.2,
        0.3,
        5,
        estimated=True,
        chunks=2,
    ),
    "several choices": Case(
        [
            (0.1, event({"choices": [{"delta": {"role": "assistant"}}, {"delta": {"content": "a"}}]})),
            (0.2, event({"choices": [{"delta": {}, "finish_reason": "stop"}, {"delta": {"content": "b"}}]})),
            (0.3, usage(2)),
            (0.3, DONE),
        ],
        0.1,
        0.2,
        0.3,
        2,
    ),
    "nulls everywhere": Case(
        [
            (0.1, event({"error": None, "usage": None, "choices": [{"delta": None, "text": None}]})),
            (0.2, delta(content="a", reasoning=None, tool_calls=None, refusal=None, function_call=None)),
            (0.3, DONE),
        ],
        0.2,
        0.2,
        0.3,
        1,
        estimated=True,
    ),
}


def read(
    pieces: Pieces,
    *,
    headers: tuple[tuple[bytes, bytes], ...] = STREAM,
    status: int = 200,
    stream: bool = True,
    failure: httpx.TransportError | None = None,
    ended: float | None = None,
    deadline: float = 60.0,
) -> Answer:
    """The answer to a response of these pieces, written at time 0."""
    reading = Reading(stream)
    reading.head(status, headers, 0.0)
    reading.feed(pieces)
    end = ended if ended is not None else (pieces[-1][0] if pieces else 0.0)
    return reading.answer(failure, wrote_at=0.0, ended_at=end, deadline_s=deadline)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case_by_literal_times(case: Case) -> None:
    answer = read(case.pieces)
    assert answer.outcome is case.outcome
    assert answer.first_token_at == case.ttft
    assert answer.first_answer_at == (case.ttft if case.first_answer == -1.0 else case.first_answer)
    assert answer.last_token_at == case.last
    assert answer.ended_at == case.e2e
    assert answer.output_tokens == case.tokens
    assert answer.usage_estimated is case.estimated
    assert answer.chunks == (case.tokens if case.chunks is None else case.chunks)
    assert answer.streamed is True


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case_over_a_socket(case: Case) -> None:
    plan = Plan(pieces=tuple((at * case.scale, data) for at, data in case.pieces))
    answer, server = answer_to(plan)
    assert answer.outcome is case.outcome
    assert answer.output_tokens == case.tokens
    assert answer.usage_estimated is case.estimated
    assert answer.chunks == (case.tokens if case.chunks is None else case.chunks)
    assert server.records[0].end == "answered"
    # Never before the server sent it: bounds that hold on a busy machine, too.
    wrote_at = answer.wrote_at
    assert wrote_at is not None
    for measured, true in (
        (answer.first_token_at, case.ttft),
        (answer.last_token_at, case.last),
        (answer.ended_at, case.e2e),
    ):
        assert (measured is None) == (true is None)
        if measured is not None and true is not None:
            assert measured - wrote_at >= true * case.scale - 1e-6


def test_the_text_of_s1_is_whole() -> None:
    from include.capacity.load.sse import SSEDecoder

    decoder = SSEDecoder()
    events = [found for piece in S1 for found in decoder.feed(piece, 0.0)]
    assert len(events) == 1
    assert json.loads(events[0][2])["choices"][0]["delta"]["content"] == "é漢🙂"


def test_s12_an_error_object_with_status_200() -> None:
    for headers in (JSON, STREAM, ()):
        answer = read([(0.1, b'{"error":{"message":"out of memory"}}')], headers=headers)
        assert (answer.outcome, answer.error, answer.first_token_at) == (
            Outcome.STREAM_ERROR,
            "out of memory",
            None,
        )


def message(content: Any = "hello", finish_reason: str = "stop", **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **more}}
    return json.dumps(
        {
            "choices": [{**choice, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 1127, "completion_tokens": 5},
        }
    ).encode()


def test_s20_json_where_a_stream_was_asked_for() -> None:
    answer = read([(2.0, message()[:20]), (2.5, message()[20:])], headers=JSON)
    assert (answer.outcome, answer.streamed) == (Outcome.COMPLETED, False)
    assert (answer.first_token_at, answer.last_token_at, answer.ended_at) == (None, None, 2.5)
    assert (answer.output_tokens, answer.first_chunk_tokens, answer.chunks) == (5, None, 0)


def test_s23_the_servers_count_of_the_prompt_is_kept() -> None:
    assert read([(1.0, message())], headers=JSON, stream=False).prompt_tokens == 1127
    assert read([(0.1, delta(content="a")), (0.2, usage(1, prompt=961)), (0.2, DONE)]).prompt_tokens == 961


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (message(), Outcome.COMPLETED),
        (message(content=""), Outcome.EMPTY),
        (message(content=None), Outcome.EMPTY),
        (message(content=None, reasoning="r"), Outcome.COMPLETED),
        (
            message(content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
            Outcome.COMPLETED,
        ),
        (message(finish_reason="abort"), Outcome.STREAM_ERROR),
        (message(content=5), Outcome.MALFORMED),
        (b'{"choices":[{"text":"a","finish_reason":"length"}]}', Outcome.COMPLETED),
        (b'{"choices":"none"}', Outcome.MALFORMED),
        (b'{"choices":[null]}', Outcome.MALFORMED),
        (b'{"choices":[{"message":[]}]}', Outcome.MALFORMED),
        (b'{"detail":"x"}', Outcome.MALFORMED),
        (b'{"choices":[]', Outcome.MALFORMED),
        (b"[]", Outcome.MALFORMED),
        (b"null", Outcome.MALFORMED),
        (b"", Outcome.MALFORMED),
        (b"OK", Outcome.MALFORMED),
        (b'{"choices":' + b"[" * 100_000, Outcome.MALFORMED),
    ],
)
def test_not_streamed_bodies(body: bytes, outcome: Outcome) -> None:
    answer = read([(1.0, body)] if body else [], headers=JSON, stream=False, ended=1.0)
    assert (answer.outcome, answer.first_token_at, answer.ended_at) == (outcome, None, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        b"data: {\n\n",
        b"data: 5\n\n",
        b"data: []\n\n",
        event({"choices": {}}),
        event({"choices": ["a"]}),
        event({"choices": [{"delta": "a"}]}),
        event({"choices": [{"delta": {"content": 5}}]}),
        event({"choices": [{"delta": {"content": [5]}}]}),
        event({"choices": [{"delta": {"tool_calls": "f"}}]}),
        event({"id": 1}),
        b"data: " + b"[" * 100_000 + b"\n\n",
    ],
)
def test_malformed_events_end_the_answer_and_never_crash(wrong: bytes) -> None:
    answer = read([(0.1, delta(content="a")), (0.2, wrong), (0.3, delta(content="b")), (0.4, DONE)])
    assert (answer.outcome, answer.ended_at, answer.chunks) == (Outcome.MALFORMED, 0.2, 1)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"delta":{"content":"a"},"logprobs":NaN}]}',
        b'{"choices":[{"delta":{"content":"\\ud83d"}}]}',
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
    ],
)
def test_json_that_only_the_standard_library_reads(data: bytes) -> None:
    answer = read([(0.1, b"data: " + data + b"\n\n"), (0.2, DONE)])
    assert (answer.outcome, answer.chunks) == (Outcome.COMPLETED, 1)


@pytest.mark.parametrize("strange", ["5", -1, 1.5, True, None, 2**40, [5]])
def test_a_usage_that_is_no_count_is_unknown(strange: Any) -> None:
    last = event({"choices": [], "usage": {"completion_tokens": strange, "prompt_tokens": strange}})
    answer = read([(0.1, delta(content="a")), (0.2, delta(content="b")), (0.3, last), (0.3, DONE)])
    assert (answer.output_tokens, answer.usage_estimated, answer.prompt_tokens) == (2, True, None)


@pytest.mark.parametrize(
    ("usages", "first", "known"),
    [
        ((3, 5), 3, True),  # running usage: the first chunk held three tokens
        ((None, 5), 1, False),
        ((None, None), 1, False),
    ],
)
def test_tokens_of_the_first_chunk(usages: tuple[int | None, int | None], first: int, known: bool) -> None:
    pieces: Pieces = [
        (0.1, event({"choices": [{"delta": {"role": "assistant"}}], "usage": {"completion_tokens": 0}}))
    ]
    for at, tokens in zip((0.2, 0.3), usages, strict=True):
        counted = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
        pieces.append((at, event({"choices": [{"delta": {"content": "a"}}], **counted})))
    answer = read([*pieces, (0.4, usage(5)), (0.4, DONE)])
    assert (answer.first_chunk_tokens, answer.first_chunk_tokens_known) == (first, known)


def test_a_single_chunk_held_all_tokens() -> None:
    answer = read([(0.1, delta(content="a b c")), (0.2, usage(3)), (0.2, DONE)])
    assert (answer.output_tokens, answer.first_chunk_tokens, answer.first_chunk_tokens_known) == (3, 3, True)


LOST = httpx.ReadError("reset")


@pytest.mark.parametrize(
    ("pieces", "failure", "outcome"),
    [
        ([(1.0, delta(content="a")), (2.0, DONE)], None, Outcome.COMPLETED),
        ([(1.0, delta(content="a")), (11.0, DONE)], None, Outcome.DEADLINE_EXCEEDED),
        ([(11.0, delta(content="a")), (12.0, DONE)], None, Outcome.FIRST_TOKEN_TIMEOUT),
        ([(1.0, ROLE), (11.0, delta("stop")), (11.0, DONE)], None, Outcome.FIRST_TOKEN_TIMEOUT),
        (
            [(1.0, delta(content="a")), (11.0, event({"error": {"message": "x"}}))],
            None,
            Outcome.DEADLINE_EXCEEDED,
        ),
        ([(1.0, delta(content="a"))], httpx.ReadTimeout("late"), Outcome.DEADLINE_EXCEEDED),
        ([(1.0, delta(content="a"))], LOST, Outcome.DEADLINE_EXCEEDED),
    ],
)
def test_the_deadline_has_the_last_word(
    pieces: Pieces, failure: httpx.TransportError | None, outcome: Outcome
) -> None:
    answer = read(pieces, failure=failure, ended=12.0, deadline=10.0)
    assert answer.outcome is outcome
    assert (answer.first_token_at is None) == (outcome is Outcome.FIRST_TOKEN_TIMEOUT)


def test_a_stream_without_an_event_is_truncated() -> None:
    assert read([], ended=1.0).outcome is Outcome.TRUNCATED
    assert read([(0.5, b"\n\n")], ended=1.0).outcome is Outcome.TRUNCATED


def test_a_stream_under_another_content_type_is_read() -> None:
    for headers in ((), ((b"content-type", b"text/plain"),)):
        answer = read([(0.1, b"d"), (0.2, delta(content="a")[1:]), (0.3, DONE)], headers=headers)
        assert (answer.outcome, answer.streamed, answer.first_token_at) == (Outcome.COMPLETED, True, 0.2)


def test_an_encoding_we_did_not_accept_is_malformed() -> None:
    answer = read([(0.1, b"\x1f\x8b")], headers=(*STREAM, (b"Content-Encoding", b"gzip")))
    assert answer.outcome is Outcome.MALFORMED
    assert "gzip" in (answer.error or "")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", None),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Mon, 01 Jan 2035 00:00:30 GMT", 30.0),
        ("Sun, 31 Dec 2034 23:00:00 GMT", 0.0),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    headers = ((b"Date", b"Mon, 01 Jan 2035 00:00:00 GMT"), (b"Retry-After", value.encode()))
    assert _retry_after(headers) == seconds
    assert read([], headers=headers, status=429).retry_after_s == seconds


def test_retry_after_a_date_without_the_servers_own() -> None:
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
    headers = ((b"retry-after", at.strftime("%a, %d %b %Y %H:%M:%S GMT").encode()),)
    seconds = _retry_after(headers)
    assert seconds is not None
    assert 50 < seconds <= 100
