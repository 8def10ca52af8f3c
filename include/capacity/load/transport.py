"""An httpx transport made for measuring: one connection a slot, bytes stamped on receipt.

httpx's own transport looks for a free connection through its whole pool at every request and stamps
nothing. Here each slot of a closed loop owns its connection, an :class:`asyncio.Protocol` that feeds an
httptools (llhttp) parser:

- A piece of body is stamped with ``time.perf_counter()`` when the event loop hands it over, before anything
  is parsed. A request is stamped when it is given to the socket, which both event loops do at once
  (uvloop since 0.22; before, at the end of the loop's turn).
- The reader is woken for the head of the response, and then once for every ``wake_every`` pieces (default
  1), because a wake costs ten times what parsing a piece costs. Stamps are unaffected.
- One timer serves all time limits: it is set to the earliest one and looks through the requests when it
  fires. A piece of body moves no timer.
- A protocol object is never used for a second connection, so a late ``connection_lost`` cannot hit the next
  one. httptools cannot be told of the end of the input: whether a close ends the body or cuts it off is
  decided from the head of the response (``Content-Length`` or chunked: cut off; neither: the end).
- **Nothing is retried.** A kept-alive connection that the server closed is found by a look at the socket just
  before the write, and replaced. If the close crosses our write, the server may have seen the request: the
  error goes to the caller.

Use it below any ``httpx.AsyncClient(transport=SlotTransport(), trust_env=False)``. Request extensions it
knows beside httpx's ``timeout``:

=============== ======================================================================================
``slot``        whose connection to use; requests without one take any that is free
``deadline_s``  seconds from the write after which the request fails with ``ReadTimeout``
``wake_every``  pieces of body to collect before the reader is woken
``wake_on``     bytes that wake the reader at once
=============== ======================================================================================

``request.extensions["exchange"]`` (and the response's) is the :class:`Exchange` with the time stamps.
Connections live in the event loop that opened them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import httptools
import httpx

HIGH_WATER = 1 << 20
"""Bytes of body that may wait for the reader before the socket is no longer read."""

OPENING_AT_ONCE = 64
"""Connections opened at a time by :meth:`SlotTransport.connect`: more would overflow a listen backlog
of 128, and a dropped SYN is only sent again after a second."""

OWN_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN}
)
"""Errors of connect() and socket() that say that *this* machine ran out of something."""

_Key = tuple[str, str, int, object]  # scheme, host, port, slot

now = time.perf_counter
"""The clock of every stamp."""


class OwnLimit(httpx.ConnectError):
    """We ran out of file descriptors, ports or memory: says nothing about the server."""


class ClosedEarly(httpx.RemoteProtocolError):
    """The server closed the connection, without a reset, before the response was complete."""


class Exchange:
    """One request and its response. Times are ``time.perf_counter()`` seconds; ``None``: not yet."""

    __slots__ = (
        "_connection",
        "_fresh",
        "_last_at",
        "_limit_at",
        "_loop",
        "_pieces",
        "_read_timeout_s",
        "_size",
        "_waiter",
        "_wake_every",
        "_wake_on",
        "ended_at",
        "error",
        "head_at",
        "headers",
        "http_version",
        "reason",
        "reused",
        "status",
        "wrote_at",
    )

    def __init__(self, connection: _Connection, extensions: dict[str, Any], *, reused: bool) -> None:
        self.reused = reused
        """An earlier request went over the same connection."""
        self.wrote_at: float | None = None
        self.head_at: float | None = None
        """Receipt of the piece that completed the response's head."""
        self.ended_at: float | None = None
        """Receipt of the piece (or close, or reset) that ended the response, or when its time ran out."""
        self.error: httpx.TransportError | None = None
        self.status = 0
        self.reason = b""
        self.http_version = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._pieces: list[tuple[float, bytes]] = []
        self._size = 0
        self._fresh = 0
        self._waiter: asyncio.Future[None] | None = None
        self._wake_every: int = extensions.get("wake_every", 1)
        self._wake_on: bytes | None = extensions.get("wake_on")
        self._limit_at: float | None = None
        self._read_timeout_s: float | None = (extensions.get("timeout") or {}).get("read")
        self._last_at = 0.0

    async def read(self) -> list[tuple[float, bytes]]:
        """Receipt time and bytes of the pieces since the last call; empty at the end of the body.

        Raises httpx's transport errors, after all that came before them was read.
        """
        if not self._pieces and self.ended_at is None:
            await self._wait()
        pieces = self._pieces
        if pieces:
            self._pieces = []
            self._size = self._fresh = 0
            self._connection.resume()
        elif self.error is not None:
            raise self.error
        return pieces

    def limit(self, at: float) -> None:
        """Fail with ``ReadTimeout`` at ``at``, if that is earlier than the limit so far."""
        if self._limit_at is None or at < self._limit_at:
            self._limit_at = at
        if self.ended_at is None:
            self._connection.owner.timeouts.watch(self)

    def close(self) -> None:
        """Give up the rest of the response. The connection is closed if there is a rest."""
        if self.ended_at is None:
            self._connection.drop()
            self.end(now(), httpx.ReadError("closed by us before the end of the response"))

    # What follows is the connection's side.

    async def wait_head(self) -> None:
        while self.head_at is None:
            if self.error is not None:
                raise self.error
            await self._wait()

    def due(self) -> float | None:
        """When the next limit runs out."""
        if self._read_timeout_s is None:
            return self._limit_at
        quiet_at = self._last_at + self._read_timeout_s
        return quiet_at if self._limit_at is None else min(quiet_at, self._limit_at)

    def expire(self, at: float) -> None:
        self._connection.expire(self, at)

    def written(self, at: float, deadline_s: float | None) -> None:
        self.wrote_at = self._last_at = at
        if deadline_s is not None:
            self._limit_at = at + deadline_s
        if self.due() is not None:
            self._connection.owner.timeouts.watch(self)

    def add(self, at: float, piece: bytes) -> None:
        self._pieces.append((at, piece))
        self._size += len(piece)
        self._fresh += 1

    def received(self, at: float, data: bytes) -> None:
        """All that ``data`` brought has been added: wake the reader if it is time."""
        self._last_at = at
        if self._size > HIGH_WATER:
            if self.ended_at is None:
                self._connection.pause()
            self.wake()
        elif self._waiter is not None and (
            self._fresh >= self._wake_every
            or self.ended_at is not None
            or (self.head_at == at)
            or (self._wake_on is not None and self._wake_on in data)
        ):
            self.wake()

    def end(self, at: float, error: httpx.TransportError | None) -> None:
        if self.ended_at is None:
            self.ended_at = at
            self.error = error
            self._connection.owner.timeouts.forget(self)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class SlotTransport(httpx.AsyncBaseTransport):
    """See the module's docstring. ``verify`` as httpx's: a context, or whether to check certificates."""

    def __init__(self, verify: ssl.SSLContext | bool = True) -> None:
        self._verify = verify
        self._ssl: ssl.SSLContext | None = None
        self._idle: dict[_Key, list[_Connection]] = {}
        self.connections: set[_Connection] = set()
        """All open connections."""
        self.timeouts = _Timeouts()

    async def connect(self, url: httpx.URL, slots: int, timeout_s: float | None = None) -> int:
        """Open a connection for each slot 0 .. ``slots`` - 1 that has none; returns how many have one.

        A connection that cannot be opened raises nothing here: the slot's request tries again, and fails
        where it is counted.
        """
        turns = asyncio.Semaphore(OPENING_AT_ONCE)

        async def one(slot: int) -> bool:
            key = _key(url, slot)
            connection = self._take(key)
            if connection is None:
                async with turns:
                    try:
                        connection = await self._open(key, timeout_s)
                    except httpx.TransportError:
                        return False
            self.give_back(connection)
            return True

        return sum(await asyncio.gather(*map(one, range(slots))))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and return when the head of the response is there."""
        message = await _serialised(request)
        extensions = request.extensions
        key = _key(request.url, extensions.get("slot"))
        connection = self._take(key)
        reused = connection is not None and connection.requests > 0
        if connection is None:
            connection = await self._open(key, (extensions.get("timeout") or {}).get("connect"))
        exchange = Exchange(connection, extensions, reused=reused)
        extensions["exchange"] = exchange
        try:
            connection.send(message, exchange, request.method, extensions.get("deadline_s"))
            await exchange.wait_head()
        except BaseException:  # cancelled too: the connection must not be left with half a response
            exchange.close()
            raise
        return httpx.Response(
            exchange.status,
            headers=exchange.headers,
            stream=_Body(exchange),
            extensions={
                "http_version": exchange.http_version,
                "reason_phrase": exchange.reason,
                "exchange": exchange,
            },
        )

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in tuple(self.connections):
            connection.drop()
        self._idle.clear()
        self.timeouts.stop()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn

    def give_back(self, connection: _Connection) -> None:
        """``connection`` is free for its slot's next request."""
        self._idle.setdefault(connection.key, []).append(connection)

    def _take(self, key: _Key) -> _Connection | None:
        free = self._idle.get(key)
        while free:
            connection = free.pop()
            if connection.fit():
                return connection
            connection.drop()
        return None

    async def _open(self, key: _Key, timeout_s: float | None) -> _Connection:
        scheme, host, port, _ = key
        tls = self._tls() if scheme == "https" else None
        where = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, key), host, port, ssl=tls
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"{where}: no connection within {timeout_s} s") from error
        except OSError as error:  # ssl.SSLError and socket.gaierror are OSErrors
            if isinstance(error, ssl.SSLError | socket.gaierror) or error.errno is None:
                raise httpx.ConnectError(f"{where}: {error.strerror or error}") from error
            what = os.strerror(error.errno)
            if error.errno in OWN_LIMITS:
                raise OwnLimit(f"{where}: {what} on our side") from error
            raise httpx.ConnectError(f"{where}: {what}") from error
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = httpx.create_ssl_context(self._verify, trust_env=False)
        return self._ssl


class _Body(httpx.AsyncByteStream):
    """A response's body for httpx; ``Exchange.read`` gives the same with receipt times."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while pieces := await self._exchange.read():
            for _, piece in pieces:
                yield piece

    async def aclose(self) -> None:
        self._exchange.close()


class _Connection(asyncio.Protocol):
    """One TCP (or TLS) connection and the response under way on it."""

    def __init__(self, owner: SlotTransport, key: _Key) -> None:
        self.owner = owner
        self.key = key
        self.requests = 0
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._at = 0.0
        self._usable = True  # may carry another request
        self._paused = False
        self._complete = False
        self._head_only = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = b""

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self.owner.connections.add(self)

    def data_received(self, data: bytes) -> None:
        at = self._at = now()
        exchange = self._exchange
        if exchange is None:  # nobody asked: not HTTP as we know it, or a parting word
            self.drop()
            return
        problem = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            problem = error
            self._usable = False
        if self._complete:  # decided first: what follows a complete response cannot spoil it
            self._finish(exchange, at, None)
        elif problem is not None:
            self._finish(exchange, at, httpx.RemoteProtocolError(f"not valid HTTP: {problem!r}"))
        exchange.received(at, data)

    def eof_received(self) -> None:
        self._over(now(), None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(now(), exc)
        self.owner.connections.discard(self)

    # the parser's calls

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        status = self._parser.get_status_code()
        if exchange is None or self._complete or 100 <= status < 200:
            return
        exchange.status = status
        exchange.reason = self._reason
        exchange.headers = self._headers
        exchange.http_version = b"HTTP/" + self._parser.get_http_version().encode()
        exchange.head_at = self._at
        if self._head_only:  # the parser waits for a body that will not come
            self._complete = True
            self._usable = False

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None and not self._complete:
            self._exchange.add(self._at, body)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if self._complete:
            self._usable = False  # a second response to one request
        elif exchange is not None and exchange.head_at is not None:
            self._complete = True
            self._usable = self._usable and self._parser.should_keep_alive()
        self._headers = []  # an interim response (1xx) is skipped
        self._reason = b""

    # the transport's and the exchange's calls

    def fit(self) -> bool:
        """Whether another request may be sent: open, and nothing (no close either) waits to be read."""
        assert self._poll is not None
        assert self._transport is not None
        return self._usable and not self._transport.is_closing() and not self._poll.poll(0)

    def send(self, message: bytes, exchange: Exchange, method: str, deadline_s: float | None) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._complete = False
        self._head_only = method == "HEAD"
        self.requests += 1
        exchange.written(now(), deadline_s)
        self._transport.write(message)

    def pause(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def expire(self, exchange: Exchange, at: float) -> None:
        """A time limit of ``exchange`` ran out."""
        self._finish(exchange, at, httpx.ReadTimeout("the time limit of the request ran out"))

    def drop(self) -> None:
        """Close without waiting for anything."""
        self._usable = False
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, exchange: Exchange, at: float, error: httpx.TransportError | None) -> None:
        self._exchange = None
        self.resume()
        exchange.end(at, error)
        if self._usable and error is None:
            self.owner.give_back(self)
        else:
            self.drop()

    def _over(self, at: float, exc: Exception | None) -> None:
        """The server closed (``exc`` is None) or reset the connection."""
        self._usable = False
        exchange = self._exchange
        if exchange is None:
            return
        error: httpx.TransportError | None
        if exc is not None:
            error = httpx.ReadError(f"connection lost: {exc}")
            error.__cause__ = exc
        elif exchange.head_at is None:
            error = ClosedEarly("the server closed the connection without an answer")
        elif _ends_by_close(exchange.headers):
            error = None
        else:
            error = ClosedEarly("the server closed the connection inside the answer")
        self._finish(exchange, at, error)


class _Timeouts:
    """All limits of a transport behind one timer, set to the earliest.

    A limit that moves later (a read time-out, by a piece of body) needs no call: it is looked at anew when
    the timer fires.
    """

    def __init__(self) -> None:
        self._watched: set[Exchange] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def watch(self, exchange: Exchange) -> None:
        self._watched.add(exchange)
        self._set(exchange.due())

    def forget(self, exchange: Exchange) -> None:
        self._watched.discard(exchange)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = float("inf")

    def _set(self, at: float | None) -> None:
        if at is None or at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        # At least a millisecond apart: that is the resolution of uvloop's timers.
        self._timer = asyncio.get_running_loop().call_later(max(0.001, at - now()), self._fire)

    def _fire(self) -> None:
        self._timer_at = float("inf")
        at = now()
        earliest = None
        for exchange in tuple(self._watched):
            due = exchange.due()
            if due is None:
                continue
            if due <= at:
                exchange.expire(at)
            elif earliest is None or due < earliest:
                earliest = due
        self._set(earliest)


async def _serialised(request: httpx.Request) -> bytes:
    body = await request.aread()
    headers = request.headers.raw
    lines = [request.method.encode("ascii"), b" ", request.url.raw_path, b" HTTP/1.1\r\n"]
    chunked = False
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
        chunked = chunked or name.lower() == b"transfer-encoding"
    head = b"".join(lines)
    if head.count(b"\n") != len(headers) + 1 or head.count(b"\r") != len(headers) + 1:
        raise httpx.LocalProtocolError("a header holds a line end")
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    return b"%b\r\n%b" % (head, body)


def _ends_by_close(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a body without a length of its own was announced (RFC 9112, 6.3)."""
    for name, value in headers:
        name = name.lower()
        if name == b"content-length" or (
            name == b"transfer-encoding" and value.strip().lower().endswith(b"chunked")
        ):
            return False
    return True


def _key(url: httpx.URL, slot: object) -> _Key:
    return (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80), slot)
