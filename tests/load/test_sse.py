"""The event stream decoder against the specification's rules and any cutting of the bytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.load.sse import SSEDecoder


def decode(*pieces: bytes) -> list[tuple[str, str]]:
    decoder = SSEDecoder()
    return [(name, data.decode()) for piece in pieces for _, name, data in decoder.feed(piece, 0.0)]


def messages(*pieces: bytes) -> list[str]:
    return [data for _, data in decode(*pieces)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data: a\r\n\ndata: b\n\r\n", ["a", "b"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a\n\n", [" a"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data\n\ndata\ndata\n\ndata:\n\n", ["", "\n", ""]),
        (b": comment\n\n", []),
        (b": comment\ndata: a\n: another\n\n", ["a"]),
        (b"id: 1\nretry: 5\ndata: a\nunknown: x\n\n", ["a"]),
        (b"\n\n\ndata: a\n\n\n\n", ["a"]),
        (b"data: a\n\n\ndata: b\n\n", ["a", "b"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", ["a"]),
        (b"data: a: b\n\n", ["a: b"]),
        (b" data: a\n\n", []),
        (b"datax: a\n\n", []),
        (b"data: a\x00b\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8c\n\n", ["a\x00b\x0b\x0c\x1c\x85\u2028c"]),
        ("data: é漢🙂\n\n".encode(), ["é漢🙂"]),
        (b"data: unfinished", []),
        (b"data: no blank line\n", []),
        (b"data: no blank line\r\n", []),
        (b"", []),
    ],
)
def test_specification(stream: bytes, expected: list[str]) -> None:
    assert messages(stream) == expected
    assert messages(*(stream[i : i + 1] for i in range(len(stream)))) == expected


def test_event_names_last_for_one_event() -> None:
    assert decode(b"event: error\ndata: a\n\ndata: b\n\nevent: x\n\ndata: c\n\n") == [
        ("error", "a"),
        ("message", "b"),
        ("message", "c"),
    ]


def test_an_event_has_the_time_of_the_piece_that_completed_it() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: a\n\ndata: b", 1.0) == [(1.0, "message", b"a")]
    assert decoder.feed(b"\n", 2.0) == []
    assert decoder.feed(b"\ndata: c\r\n\r", 3.0) == [(3.0, "message", b"b"), (3.0, "message", b"c")]
    assert decoder.feed(b"\n", 4.0) == []  # the rest of a line end completes nothing again
    assert decoder.feed(b"\n", 5.0) == []


# Pieces of streams that are near to every rule, valid or not.
FRAGMENTS = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"data",
        b'{"choices":[{"delta":{"content":"x"}}]}',
        "é漢🙂".encode(),
        b"\n",
        b"\n\n",
        b"\r",
        b"\r\n",
        b"\r\n\r\n",
        b": ",
        b"event: error",
        b"id: 7",
        b"\xef\xbb\xbf",
        b"\xff",
        b"[DONE]",
        b" ",
    ]
)


def by_the_letter(stream: bytes) -> list[tuple[str, bytes]]:
    """The specification's algorithm on a whole stream, line by line, in the plainest way."""
    stream = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, data, name = [], b"", b""
    for line in stream.split(b"\n")[:-1]:
        if line == b"":
            if data:
                events.append((name.decode("utf-8", "replace") or "message", data[:-1]))
            data = name = b""
        elif line.startswith(b":"):
            continue
        else:
            key, colon, value = line.partition(b":")
            value = value[1:] if colon and value.startswith(b" ") else value
            if key == b"data":
                data += value + b"\n"
            elif key == b"event":
                name = value
    return events


@settings(max_examples=600, deadline=None)
@given(st.lists(FRAGMENTS, max_size=25).map(b"".join), st.data())
def test_any_cutting_gives_the_events_of_the_specification(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    decoder = SSEDecoder()
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += [(name, text) for _, name, text in decoder.feed(stream[start:end], 0.0)]
    assert got == by_the_letter(stream)


def test_a_long_line_in_small_pieces_takes_linear_time() -> None:
    def cost(pieces: int) -> float:
        best = float("inf")
        for _ in range(3):
            decoder = SSEDecoder()
            start = time.process_time()
            decoder.feed(b"data: ", 0.0)
            for _ in range(pieces):
                decoder.feed(b"x" * 64, 0.0)
            ((_, _, data),) = decoder.feed(b"\n\n", 0.0)
            best = min(best, time.process_time() - start)
            assert len(data) == pieces * 64
        return best

    # Eight times the work; quadratic time would be sixty-four times.
    assert cost(80_000) < 30 * cost(10_000)
