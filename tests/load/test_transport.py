"""The transport on its own: bytes in any pieces, broken connections, and ordinary httpx on top."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.load.transport import (
    HIGH_WATER,
    ClosedEarly,
    Exchange,
    SlotTransport,
    _Connection,
)
from tests.load.asking import LOOPS, run
from tests.nullserver import Act, NullServer, Plan, Script, refusing_port

URL = "/v1/completions"


class FakeSocket(asyncio.Transport):
    """An asyncio transport over nothing; what arrives is given to the protocol by the test."""

    def __init__(self) -> None:
        self.pair = socket.socketpair()
        self.written = b""
        self.aborted = False
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.pair[0]

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def discard(self) -> None:
        for end in self.pair:
            end.close()


async def given_pieces(
    pieces: list[bytes | Exception | None], method: str = "GET"
) -> tuple[Exchange, bytes, bool, Exception | None]:
    """A response arriving in ``pieces`` (None: the server closes, an exception: the connection breaks).

    Returns the exchange, its body, whether the connection is kept, and what was raised.
    """
    owner = SlotTransport()
    connection = _Connection(owner, ("http", "h", 80, None))
    fake = FakeSocket()
    connection.connection_made(fake)
    exchange = Exchange(connection, {}, reused=False)
    connection.send(b"request", exchange, method, None)
    reader = asyncio.create_task(body_of(exchange))
    await asyncio.sleep(0)  # the reader waits before the first piece comes
    for piece in pieces:
        if piece is None:
            connection.eof_received()
            connection.connection_lost(None)
        elif isinstance(piece, Exception):
            connection.connection_lost(piece)
        else:
            connection.data_received(piece)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not reader.done():
        exchange.close()
    body, error = await reader
    kept = bool(owner._idle) and connection.fit()
    fake.discard()
    return exchange, body, kept, error


async def body_of(exchange: Exchange) -> tuple[bytes, Exception | None]:
    body = b""
    try:
        await exchange.wait_head()
        while pieces := await exchange.read():
            body += b"".join(piece for _, piece in pieces)
    except httpx.TransportError as error:
        return body, error
    return body, None


RESPONSES: dict[str, tuple[bytes, int, bytes, bool]] = {
    # bytes, status, body, kept
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello", 200, b"hello", True),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: u\r\n\r\n",
        200,
        b"abc0123456789",
        True,
    ),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "empty body": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
    "interim": (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        200,
        b"ok",
        True,
    ),
    "announced close": (
        b"HTTP/1.1 503 no\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno",
        503,
        b"no",
        False,
    ),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
}


@pytest.mark.parametrize(("stream", "status", "body", "kept"), RESPONSES.values(), ids=RESPONSES)
def test_every_split_in_two(stream: bytes, status: int, body: bytes, kept: bool) -> None:
    async def work() -> None:
        for cut in range(1, len(stream) + 1):
            pieces = [piece for piece in (stream[:cut], stream[cut:]) if piece]
            exchange, got, reusable, error = await given_pieces([*pieces])
            assert (exchange.status, got, reusable, error) == (status, body, kept, None), cut

    asyncio.run(work())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(RESPONSES)), st.data())
def test_any_split(name: str, data: st.DataObject) -> None:
    stream, status, body, kept = RESPONSES[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1))))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    exchange, got, reusable, error = asyncio.run(given_pieces([*pieces]))
    assert (exchange.status, got, reusable, error) == (status, body, kept, None)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nabc"


@pytest.mark.parametrize(
    ("pieces", "body", "error"),
    [
        ([None], b"", ClosedEarly),
        ([b"HTTP/1.1 200 OK\r\n", None], b"", ClosedEarly),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", None], b"ab", ClosedEarly),
        ([CHUNKED, None], b"abc", ClosedEarly),
        ([CHUNKED + b"3\r\nx", None], b"abcx", ClosedEarly),
        ([CHUNKED + b"0\r\n", None], b"abc", ClosedEarly),
        ([UNTIL_CLOSE, None], b"abc", None),
        ([UNTIL_CLOSE, ConnectionResetError(104, "reset")], b"abc", httpx.ReadError),
        ([CHUNKED, ConnectionResetError(104, "reset")], b"abc", httpx.ReadError),
        ([ConnectionResetError(104, "reset")], b"", httpx.ReadError),
        ([b"SSH-2.0\r\n"], b"", httpx.RemoteProtocolError),
        ([CHUNKED + b"zz\r\n"], b"abc", httpx.RemoteProtocolError),
        (
            [b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
            b"",
            httpx.RemoteProtocolError,
        ),
    ],
)
def test_broken_responses(
    pieces: list[bytes | Exception | None], body: bytes, error: type[Exception] | None
) -> None:
    _, got, kept, raised = asyncio.run(given_pieces(pieces))
    assert (got, kept) == (body, False)
    assert type(raised) is (error or type(None))


def test_what_follows_a_whole_response_spoils_the_connection_only() -> None:
    whole = RESPONSES["length"][0]
    for junk in (b"\x00junk", whole):
        _, body, kept, error = asyncio.run(given_pieces([whole + junk]))
        assert (body, kept, error) == (b"hello", False, None)


def test_bytes_between_requests_close_the_connection() -> None:
    _, body, kept, error = asyncio.run(given_pieces([RESPONSES["length"][0], b"HTTP/1.1 408 late\r\n\r\n"]))
    assert (body, kept, error) == (b"hello", False, None)


def test_a_head_has_no_body() -> None:
    exchange, body, _, error = asyncio.run(
        given_pieces([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"], method="HEAD")
    )
    assert (exchange.status, body, error) == (200, b"", None)


def test_a_late_connection_lost_of_a_dropped_connection_touches_nothing() -> None:
    async def work() -> None:
        owner = SlotTransport()
        first, second = (_Connection(owner, ("http", "h", 80, 0)) for _ in range(2))
        fakes = [FakeSocket(), FakeSocket()]
        first.connection_made(fakes[0])
        exchange = Exchange(first, {}, reused=False)
        first.send(b"request", exchange, "GET", None)
        exchange.close()
        second.connection_made(fakes[1])
        answered = Exchange(second, {}, reused=False)
        second.send(b"request", answered, "GET", None)
        first.data_received(b"HTTP/1.1 500 late\r\n\r\n")
        first.connection_lost(None)
        assert (answered.ended_at, answered.error) == (None, None)
        second.data_received(RESPONSES["length"][0])
        assert await body_of(answered) == (b"hello", None)
        for fake in fakes:
            fake.discard()

    asyncio.run(work())


def test_the_reader_is_woken_for_every_few_pieces_with_their_own_times() -> None:
    async def work() -> None:
        owner = SlotTransport()
        connection, fake = _Connection(owner, ("http", "h", 80, 0)), FakeSocket()
        connection.connection_made(fake)
        exchange = Exchange(connection, {"wake_every": 3, "wake_on": b"!"}, reused=False)
        connection.send(b"request", exchange, "GET", None)
        connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await exchange.wait_head()
        batches: list[list[tuple[float, bytes]]] = []

        async def read() -> None:
            while pieces := await exchange.read():
                batches.append(pieces)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for piece in (b"a", b"b", b"c", b"d", b"!", b"e"):
            connection.data_received(b"1\r\n" + piece + b"\r\n")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        connection.data_received(b"0\r\n\r\n")
        await reader
        assert [[piece for _, piece in batch] for batch in batches] == [
            [b"a", b"b", b"c"],
            [b"d", b"!"],
            [b"e"],
        ]
        times = [at for batch in batches for at, _ in batch]
        assert times == sorted(times)
        assert len(set(times)) == 6
        fake.discard()

    asyncio.run(work())


def test_headers_cannot_carry_line_ends() -> None:
    async def work(server: NullServer) -> None:
        async with httpx.AsyncClient(transport=SlotTransport(), trust_env=False) as client:
            with pytest.raises(httpx.LocalProtocolError):
                await client.get(server.url + "/health", headers={"X-A": "b\r\nX-C: d"})

    with NullServer() as server:
        run(work(server))


# Over real sockets, below an ordinary client


@pytest.fixture(params=list(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture
def server() -> Iterator[NullServer]:
    with NullServer() as running:
        yield running


def wire(*script: tuple[float, bytes | Act]) -> Plan:
    return Plan(wire=cast(Script, script))


def client(**how: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=SlotTransport(**how), trust_env=False)


def test_ordinary_get_and_stream(server: NullServer, loop: str) -> None:
    async def work() -> tuple[Any, list[str]]:
        async with client() as http:
            state = (await http.get(server.url + "/control/state")).json()
            body = {"stream": True, "null_plan": {"tokens": 2, "usage": "none"}}
            async with http.stream("POST", server.url + URL, json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
            return state, lines

    state, lines = run(work(), loop)
    assert state["open"] == 0
    assert len(lines) == 4
    assert lines[-1] == "data: [DONE]"
    assert server.connections_made == 1


def test_a_piece_is_there_when_it_has_come(server: NullServer, loop: str) -> None:
    async def work() -> bytes:
        server.plan = Plan(pieces=((0.0, b"first"), (0.0, Act.STALL)))
        async with client() as http, http.stream("POST", server.url + URL, json={}) as response:
            return await anext(response.aiter_raw())

    assert run(work(), loop) == b"first"


def test_request_bodies_of_every_kind_arrive(server: NullServer) -> None:
    async def parts() -> Any:
        yield b'{"null_plan": {"tokens"'
        yield b": 3}}"

    async def work() -> list[int]:
        async with client() as http:
            answers = [
                await http.post(server.url + URL, content=parts()),
                await http.post(server.url + URL, json={"null_plan": {"tokens": 4}}),
                await http.post(server.url + URL, content=b'{"null_plan": {"tokens": 5}}'),
            ]
        return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    assert run(work()) == [3, 4, 5]


def test_error_statuses_with_bodies_keep_the_connection(server: NullServer, loop: str) -> None:
    async def work() -> None:
        async with client() as http:
            for status in (400, 404, 429, 500, 503):
                response = await http.post(
                    server.url + URL, json={"null_plan": {"status": status, "body": "why"}}
                )
                assert (response.status_code, response.text) == (status, "why")

    run(work(), loop)
    assert server.connections_made == 1


def test_each_slot_has_its_own_connection(server: NullServer) -> None:
    async def work() -> None:
        transport = SlotTransport()
        async with httpx.AsyncClient(transport=transport, trust_env=False) as http:
            assert await transport.connect(httpx.URL(server.url), 3) == 3
            assert server.wait_for(lambda: server.connections_made == 3)
            for slot in (2, 0, 1, 0, 2, 2):
                await http.post(server.url + URL, json={}, extensions={"slot": slot})

    run(work())
    assert server.connections_made == 3
    used = [record.connection for record in server.records]
    assert len({used[0], used[1], used[2]}) == 3
    assert used[3] == used[1]
    assert used[4] == used[5] == used[0]


def test_the_request_is_on_the_wire_when_its_time_is_stamped(server: NullServer, loop: str) -> None:
    """Not at the end of the event loop's turn: other tasks' work would count as the server's."""

    async def block() -> bool:
        # In the same turn as the write, and the loop does nothing else until the server has the request.
        return server.wait_for(lambda: len(server.records) == 1)

    async def work() -> bool:
        transport = SlotTransport()
        async with httpx.AsyncClient(transport=transport, trust_env=False) as http:
            await transport.connect(httpx.URL(server.url), 1)
            request = http.build_request("POST", server.url + URL, json={}, extensions={"slot": 0})
            sending = asyncio.create_task(transport.handle_async_request(request))
            arrived = await asyncio.create_task(block())
            response = await sending
            await response.aread()
            return arrived

    assert run(work(), loop)


def test_connecting_to_nobody_is_told_by_the_count() -> None:
    async def work() -> int:
        return await SlotTransport().connect(httpx.URL(f"http://127.0.0.1:{refusing_port()}"), 2)

    assert run(work()) == 0


def test_requests_at_once_without_a_slot_get_connections_of_their_own(server: NullServer) -> None:
    async def work() -> None:
        async with client() as http:
            body = {"null_plan": {"hold": True}}
            tasks = [asyncio.create_task(http.post(server.url + URL, json=body)) for _ in range(5)]
            assert await asyncio.to_thread(server.wait_for, lambda: server.open == 5)
            server.in_loop(server.release)
            await asyncio.gather(*tasks)
            await http.post(server.url + URL, json={})

    run(work())
    assert (server.peak, server.connections_made) == (5, 5)


def test_refused(loop: str) -> None:
    async def work() -> None:
        async with client() as http:
            with pytest.raises(httpx.ConnectError, match="refused"):
                await http.get(f"http://127.0.0.1:{refusing_port()}/")

    run(work(), loop)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (wire((0.0, Act.RESET)), httpx.ReadError),
        (wire((0.0, Act.CLOSE)), ClosedEarly),
        (wire((0.0, HEAD), (0.05, Act.RESET)), httpx.ReadError),
        (wire((0.0, HEAD + b"part"), (0.05, Act.CLOSE)), ClosedEarly),
        (wire((0.0, b"hello\r\n\r\n")), httpx.RemoteProtocolError),
    ],
)
def test_broken_connections(server: NullServer, loop: str, plan: Plan, error: type[Exception]) -> None:
    async def work() -> type[Exception]:
        server.plan = plan
        async with client() as http:
            with pytest.raises(httpx.TransportError) as caught:
                await http.post(server.url + URL, json={})
            return caught.type

    assert run(work(), loop) is error
    assert len(server.records) == 1


def test_a_connection_closed_between_requests_is_replaced_before_the_write(
    server: NullServer, loop: str
) -> None:
    async def work() -> list[bool]:
        reused = []
        async with client() as http:
            for _ in range(3):
                response = await http.post(server.url + URL, json={})
                reused.append(response.extensions["exchange"].reused)
                server.close_idle()  # in the kernel when it returns; our loop has not looked yet
            return reused

    assert run(work(), loop) == [False, False, False]
    assert [record.end for record in server.records] == ["answered"] * 3


def test_a_close_that_crosses_our_write_is_told_and_not_retried(server: NullServer, loop: str) -> None:
    async def work() -> Exchange:
        async with client() as http:
            await http.post(server.url + URL, json={})
            server.plan = wire((0.0, Act.CLOSE))
            request = http.build_request("POST", server.url + URL, json={})
            with pytest.raises(ClosedEarly):
                await http.send(request)
            return cast(Exchange, request.extensions["exchange"])

    assert run(work(), loop).reused is True
    assert len(server.records) == 2


def test_announced_close_opens_a_new_connection(server: NullServer, loop: str) -> None:
    async def work() -> None:
        server.plan = Plan(keep_alive=False)
        async with client() as http:
            for _ in range(3):
                assert (await http.post(server.url + URL, json={})).status_code == 200

    run(work(), loop)
    assert server.connections_made == 3


@pytest.mark.parametrize("when", ["before the head", "in the body"])
def test_cancelling_closes_the_connection(server: NullServer, loop: str, when: str) -> None:
    async def work() -> None:
        server.plan = (
            wire((0.0, Act.STALL)) if when == "before the head" else wire((0.0, HEAD), (0.0, Act.STALL))
        )
        async with client() as http:
            task = asyncio.create_task(http.post(server.url + URL, json={}))
            while not (server.records and server.records[0].sent):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.wait_for, lambda: server.open == 0)
            server.plan = Plan()
            assert (await http.post(server.url + URL, json={})).status_code == 200

    run(work(), loop)
    assert [record.end for record in server.records] == ["client_left", "answered"]


def test_leaving_a_stream_early_closes_the_connection(server: NullServer, loop: str) -> None:
    async def work() -> None:
        server.plan = Plan(pieces=((0.0, b"first"), (0.0, Act.STALL)))
        async with client() as http:
            async with http.stream("POST", server.url + URL, json={}) as response:
                async for _ in response.aiter_raw():
                    break
            assert await asyncio.to_thread(server.wait_for, lambda: server.open == 0)

    run(work(), loop)
    assert server.records[0].end == "client_left"


@pytest.mark.parametrize(
    "extensions",
    [
        {"timeout": {"read": 0.2}},
        {"deadline_s": 0.2},
        {"deadline_s": 0.2, "timeout": {"read": 5.0}},
        {"deadline_s": 5.0, "timeout": {"read": 0.2}},
    ],
)
@pytest.mark.parametrize("head", [b"", HEAD])
def test_time_limits(server: NullServer, loop: str, extensions: dict[str, Any], head: bytes) -> None:
    async def work() -> Exchange:
        server.plan = wire((0.0, head), (0.0, Act.STALL))
        async with client() as http:
            request = http.build_request("POST", server.url + URL, json={}, extensions=extensions)
            with pytest.raises(httpx.ReadTimeout):
                await http.send(request)
            return cast(Exchange, request.extensions["exchange"])

    exchange = run(work(), loop)
    assert exchange.wrote_at is not None
    assert exchange.ended_at is not None
    assert exchange.ended_at - exchange.wrote_at >= 0.2
    assert server.wait_for(lambda: server.open == 0)


def test_pieces_put_off_the_read_timeout_but_not_the_deadline() -> None:
    async def work() -> None:
        owner = SlotTransport()
        connection, fake = _Connection(owner, ("http", "h", 80, 0)), FakeSocket()
        connection.connection_made(fake)
        exchange = Exchange(connection, {"timeout": {"read": 50.0}}, reused=False)
        connection.send(b"request", exchange, "GET", 100.0)
        assert exchange.wrote_at is not None
        assert exchange.due() == exchange.wrote_at + 50.0
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        assert exchange.head_at is not None
        assert exchange.due() == exchange.head_at + 50.0 > exchange.wrote_at + 50.0
        exchange.limit(exchange.wrote_at + 20.0)
        connection.data_received(b"a")
        assert exchange.due() == exchange.wrote_at + 20.0
        exchange.close()
        await owner.aclose()
        fake.discard()

    asyncio.run(work())


def test_a_large_body_waits_for_a_slow_reader(server: NullServer, loop: str) -> None:
    size = 12 * HIGH_WATER

    async def work() -> tuple[int, int]:
        part = b"x" * (size // 12)
        server.plan = wire(
            (0.0, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size), *(((0.0, part),) * 12)
        )
        most = total = 0
        async with client() as http, http.stream("POST", server.url + URL, json={}) as response:
            exchange = response.extensions["exchange"]
            while total < size:
                # Until it stops growing: full, and the socket is no longer read.
                seen = -1
                while exchange._size != seen:
                    seen = exchange._size
                    await asyncio.sleep(0.01)
                most = max(most, seen)
                total += sum(len(piece) for _, piece in await exchange.read())
            assert await exchange.read() == []
            return most, total

    most, total = run(work(), loop)
    assert total == size
    # Above the mark by no more than one read from the socket (256 KiB in both event loops).
    assert most <= HIGH_WATER + 2 * 256 * 1024


def test_a_paused_connection_that_completes_can_be_used_again(server: NullServer, loop: str) -> None:
    size = 3 * HIGH_WATER

    async def work() -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
        server.plan = wire((0.0, head + b"x" * size))
        async with client() as http:
            for _ in range(3):
                response = await http.post(server.url + URL, json={})
                assert len(response.content) == size

    run(work(), loop)
    assert server.connections_made == 1


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-made certificate for 127.0.0.1, with its key, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "null server")])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "null.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


def test_tls(certificate: Path, loop: str) -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)
    ours = ssl.create_default_context(cafile=str(certificate))

    async def work(url: str) -> None:
        async with client(verify=ours) as http:
            for _ in range(3):
                body = {"stream": True, "null_plan": {"tokens": 3}}
                response = await http.post(url + URL, json=body)
                assert response.text.endswith("data: [DONE]\n\n")
            with pytest.raises((ClosedEarly, httpx.ReadError)):
                await http.post(url + URL, json={"null_plan": "close_before_head"})
        async with client() as http:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await http.post(url + URL, json={})

    with NullServer(tls=theirs) as server:
        run(work(server.url), loop)
        assert [record.connection for record in server.records] == [1, 1, 1, 1]
