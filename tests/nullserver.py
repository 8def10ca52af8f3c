"""A model server that does exactly what it is told: known times, every fault, and its own record.

What a request gets is a :class:`Plan`, by the first of: ``null_plan`` in the request's JSON body (a name of
``PLANS`` or the plan's fields), the next of ``NullServer.queue``, ``NullServer.plan``. A plan becomes a
script, a list of (seconds since the request was read, bytes for the socket or an :class:`Act`); scripts are
made once a plan and kept. One heap and one timer carry all of them out, so that a thousand streams cost
little more than their system calls. Nothing is random.

Each request leaves a :class:`Record` with the server's view of it, in ``time.perf_counter()`` seconds, a
clock that processes of one machine share on Linux.

In a test (a thread with its own event loop)::

    with NullServer(Plan(ttft_s=0.2, tokens=5)) as server:
        ...  # server.url, server.records, server.open, server.peak

As a process: ``python -m tests.nullserver --port 8000 --plan '{"ttft_s": 0.2}'``; then ``GET
/control/state`` and ``/control/records``, ``POST /control/plan`` and ``/control/reset``.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self, cast

import httptools
import uvloop

now = time.perf_counter


class Act(StrEnum):
    """What a script can do beside sending bytes."""

    CLOSE = "close"
    """Close the connection (FIN)."""
    RESET = "reset"
    """Break it (RST)."""
    STALL = "stall"
    """Never do anything again, with the connection open."""


Script = tuple[tuple[float, bytes | Act], ...]


@dataclass(frozen=True)
class Plan:
    """One answer. Times in seconds since the request was read."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens: int | None = None
    """``None``: what the request asks for (max_tokens), else 8."""
    tokens_per_chunk: int = 1
    headers_s: float = 0.0
    """When the head is sent; the role chunk goes with it."""
    role_chunk: bool = True
    comments_every_s: float = 0.0
    """Keep-alive comments until the first token."""
    field: str = "content"
    """Where the text is: content, reasoning, reasoning_content."""
    usage: str = "last"
    """``last`` (a chunk of its own), ``late`` (the same, ``usage_late_s`` later), ``continuous`` (in every
    chunk), ``none``."""
    usage_late_s: float = 0.0
    finish_reason: str | None = "length"
    done: bool = True
    """Say [DONE]."""
    newline: str = "\n"
    as_json: bool = False
    """Answer with JSON also when a stream is asked for."""
    status: int = 200
    retry_after: str | None = None
    body: str | None = None
    """Instead of the usual body of a JSON answer or error."""
    content_type: str | None = None
    keep_alive: bool = True
    """``False``: announce and do the closing of the connection after the answer."""
    close_after: bool = False
    """Close after the answer without having announced it."""
    fault: str | None = None
    """Break off with ``close``, ``reset``, ``stall``, ``inside_chunk`` or ``error`` after ``fault_after``."""
    fault_after: int = 0
    """Chunks with tokens before the fault; -1: before the head."""
    hold: bool = False
    """Wait for ``NullServer.release`` before anything else; times count from then."""
    refuse_above: int | None = None
    """Answer 503 (with ``retry_after``, if given) at once to requests that would make more than this open."""
    prompt_tokens: int = 3
    """What the usage says of the prompt."""
    pieces: Script | None = None
    """Body pieces instead of all of the above, each sent as an HTTP chunk after a usual head."""
    wire: Script | None = None
    """All the bytes on the connection, head included."""


PLANS: dict[str, Plan] = {
    "fine": Plan(tokens=5),
    "rejected_429": Plan(status=429),
    "rejected_429_retry_after": Plan(status=429, retry_after="7"),
    "rejected_503": Plan(status=503),
    "server_error_500": Plan(status=500),
    "server_error_502_html": Plan(status=502, body="<html>bad gateway</html>", content_type="text/html"),
    "client_error_400": Plan(status=400),
    "client_error_401": Plan(status=401),
    "client_error_403": Plan(status=403),
    "client_error_404": Plan(status=404),
    "client_error_413": Plan(status=413),
    "client_error_422": Plan(
        status=422, body='{"detail":[{"loc":["body","messages"],"msg":"Field required"}]}'
    ),
    "close_before_head": Plan(fault="close", fault_after=-1),
    "reset_before_head": Plan(fault="reset", fault_after=-1),
    "reset_before_first_token": Plan(tokens=5, fault="reset"),
    "reset_after_first_token": Plan(tokens=5, fault="reset", fault_after=2),
    "close_before_first_token": Plan(tokens=5, fault="close"),
    "close_after_first_token": Plan(tokens=5, fault="close", fault_after=2),
    "close_inside_chunk": Plan(tokens=5, fault="inside_chunk", fault_after=2),
    "stall_before_head": Plan(fault="stall", fault_after=-1),
    "stall_before_first_token": Plan(tokens=5, fault="stall"),
    "stall_after_first_token": Plan(tokens=5, fault="stall", fault_after=2),
    "end_without_finish_reason": Plan(tokens=5, finish_reason=None, done=False, usage="none"),
    "end_without_finish_reason_with_usage": Plan(tokens=5, finish_reason=None, done=False),
    "done_without_finish_reason": Plan(tokens=5, finish_reason=None),
    "finish_reason_without_done": Plan(tokens=5, done=False),
    "finish_reason_abort": Plan(tokens=5, finish_reason="abort"),
    "error_first": Plan(tokens=5, fault="error"),
    "error_mid_stream": Plan(tokens=5, fault="error", fault_after=2),
    "json_error": Plan(as_json=True, body='{"error":{"message":"out of memory","code":500}}'),
    "json_instead_of_stream": Plan(tokens=5, as_json=True),
    "no_usage": Plan(tokens=5, usage="none"),
    "usage_late": Plan(tokens=5, usage="late", usage_late_s=0.3),
    "usage_continuous": Plan(tokens=6, tokens_per_chunk=2, usage="continuous"),
    "several_tokens_a_chunk": Plan(tokens=12, tokens_per_chunk=4),
    "empty": Plan(tokens=0),
    "slow_headers": Plan(tokens=5, headers_s=0.3, ttft_s=0.3),
    "comments": Plan(tokens=5, ttft_s=0.4, comments_every_s=0.1),
    "not_json": Plan(pieces=((0.0, b"data: {oops\n\n"), (0.0, b"data: [DONE]\n\n"))),
    "html": Plan(as_json=True, body="<html>log in</html>", content_type="text/html"),
    "not_http": Plan(wire=((0.0, b"SSH-2.0-OpenSSH_9.6\r\n"), (0.0, Act.CLOSE))),
}
"""Plans by name, for ``null_plan`` and for tables of faults."""


@dataclass
class Record:
    """The server's view of one request."""

    request_id: str
    path: str
    connection: int
    """Number of the connection it came over."""
    accepted_at: float
    """When its last byte had been read."""
    open_then: int
    """Requests open, this one included."""
    sent: list[float] = field(default_factory=list)
    """When each piece of the script was given to the socket."""
    ended_at: float | None = None
    end: str | None = None
    """``answered``, ``client_left``, or the act that ended it."""
    body: dict[str, Any] = field(default_factory=dict)
    """Only with ``keep_requests``, like the headers."""
    headers: dict[str, str] = field(default_factory=dict)
    """By their names in lower case."""


class NullServer:
    """See the module. All of it lives in the event loop that serves; other threads may read."""

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        keep_requests: bool = False,
    ) -> None:
        self.plan = plan or Plan()
        self.queue: deque[Plan] = deque()
        self.records: list[Record] = []
        self.open = 0
        """Requests read and not yet answered."""
        self.peak = 0
        self.connections_made = 0
        self.port = port
        self._host = host
        self._tls = tls
        self._keep_requests = keep_requests
        self._connections: set[_Connection] = set()
        self._heap: list[tuple[float, int, _Serving]] = []
        self._held: list[_Serving] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._busy_area = 0.0
        self._busy_since = now()
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self._host}:{self.port}"

    # running it

    async def start(self) -> None:
        """Listen, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(
            lambda: _Connection(self), self._host, self.port, ssl=self._tls, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def __enter__(self) -> Self:
        ready = threading.Event()
        stop: list[asyncio.Event] = []

        async def main() -> None:
            stop.append(asyncio.Event())
            await self.start()
            ready.set()
            await stop[0].wait()
            await self.stop()

        self._thread = threading.Thread(target=uvloop.run, args=(main(),), daemon=True, name="null server")
        self._thread.start()
        assert ready.wait(10)
        self._stop = stop[0]
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait, in another thread, until something that the server did makes ``condition`` true."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def in_loop(self, call: Callable[[], None]) -> None:
        """Do ``call`` in the server's loop and wait until it is done."""
        assert self._loop is not None
        done = threading.Event()

        def do() -> None:
            call()
            self._loop.call_soon(done.set)  # after what the call scheduled

        self._loop.call_soon_threadsafe(do)
        assert done.wait(10)

    def close_idle(self) -> None:
        """Close the connections that carry no request; back when the closes are on the wire."""

        def close() -> None:
            for connection in tuple(self._connections):
                if connection.serving is None:
                    connection.transport.close()

        self.in_loop(close)

    def stop_listening(self) -> None:
        """Refuse new connections."""
        assert self._server is not None
        self.in_loop(self._server.close)

    # what it knows

    def busy_area(self) -> float:
        """The integral of ``open`` over time, in request seconds."""
        return self._busy_area + self.open * (now() - self._busy_since)

    def state(self) -> dict[str, Any]:
        return {
            "open": self.open,
            "peak": self.peak,
            "accepted": len(self.records),
            "connections": len(self._connections),
            "connections_made": self.connections_made,
            "busy_area": self.busy_area(),
            "now": now(),
            "cpu_s": time.process_time(),
        }

    def reset(self) -> None:
        """Forget the past: records, peak."""
        self.records = []
        self.peak = self.open
        self._busy_area = 0.0
        self._busy_since = now()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _count(self, change: int) -> None:
        at = now()
        self._busy_area += self.open * (at - self._busy_since)
        self._busy_since = at
        self.open += change
        self.peak = max(self.peak, self.open)

    # serving

    def begin(
        self, connection: _Connection, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        plan = self._plan_for(body)
        self._count(+1)
        record = Record(headers.get("x-request-id", ""), path, connection.number, now(), self.open)
        if self._keep_requests:
            record.body, record.headers = body, headers
        self.records.append(record)
        if plan.refuse_above is not None and self.open > plan.refuse_above:
            plan = Plan(status=503, retry_after=plan.retry_after)
        asked = body.get("max_tokens") or body.get("max_completion_tokens")
        tokens = plan.tokens if plan.tokens is not None else (asked if isinstance(asked, int) else 8)
        script = script_of(
            replace(plan, tokens=tokens),
            chat=path.endswith("/chat/completions"),
            stream=bool(body.get("stream")),
        )
        serving = _Serving(connection, script, record, plan, record.accepted_at)
        connection.serving = serving
        self._notify()
        if plan.hold:
            self._held.append(serving)
        else:
            self._carry_on(serving)

    def release(self) -> None:
        """Let the requests go on whose plan has ``hold``."""
        held, self._held = self._held, []
        for serving in held:
            serving.start_at = now()
            self._carry_on(serving)

    def end(self, serving: _Serving, how: str) -> None:
        if serving.record.ended_at is None:
            serving.record.ended_at = now()
            serving.record.end = how
            serving.connection.serving = None
            self._count(-1)
            self._notify()

    def _plan_for(self, body: dict[str, Any]) -> Plan:
        asked = body.get("null_plan")
        if asked is not None:
            return PLANS[asked] if isinstance(asked, str) else plan_of(asked)
        return self.queue.popleft() if self.queue else self.plan

    def _carry_on(self, serving: _Serving) -> None:
        """Do what is due, and come back for the next when it is."""
        script, record, transport = serving.script, serving.record, serving.connection.transport
        while serving.at < len(script):
            due = serving.start_at + script[serving.at][0]
            if due > now():
                self._sequence += 1
                heapq.heappush(self._heap, (due, self._sequence, serving))
                self._set_timer(due)
                return
            what = script[serving.at][1]
            serving.at += 1
            record.sent.append(now())
            if isinstance(what, bytes):
                transport.write(what)
            elif what is Act.STALL:
                return
            else:
                self.end(serving, what.value)
                serving.connection.leave(reset=what is Act.RESET)
                return
        self.end(serving, "answered")
        if serving.plan.close_after or not serving.plan.keep_alive:
            transport.close()

    def _set_timer(self, at: float) -> None:
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            assert self._loop is not None
            self._timer = self._loop.call_later(max(0.001, at - now()), self._fire)

    def _fire(self) -> None:
        self._timer_at = float("inf")
        heap = self._heap
        at = now()
        while heap and heap[0][0] <= at:
            serving = heapq.heappop(heap)[2]
            if serving.record.ended_at is None:
                self._carry_on(serving)
        if heap:
            self._set_timer(heap[0][0])


@dataclass(eq=False)
class _Serving:
    connection: _Connection
    script: Script
    record: Record
    plan: Plan
    start_at: float
    at: int = 0


class _Connection(asyncio.Protocol):
    def __init__(self, server: NullServer) -> None:
        self.server = server
        self.serving: _Serving | None = None
        self.number = 0
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._headers: dict[str, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections_made += 1
        self.number = self.server.connections_made
        self.server._connections.add(self)
        self.server._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server._connections.discard(self)
        if self.serving is not None:
            self.server.end(self.serving, "client_left")
        self.server._notify()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, body, headers = self._url.decode("latin-1"), b"".join(self._body), self._headers
        self._url, self._body, self._headers = b"", [], {}
        method = self._parser.get_method()
        if method == b"POST" and path.endswith("completions"):
            self.server.begin(self, path, headers, json.loads(body) if body else {})
            return
        self.transport.write(self._other(method, path, body))

    def leave(self, *, reset: bool) -> None:
        if not reset:
            self.transport.close()
            return
        with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _other(self, method: bytes, path: str, body: bytes) -> bytes:
        server = self.server
        if path == "/metrics":
            gauge = 'vllm:num_requests_%s{engine="0"} %d\n'
            text = gauge % ("running", server.open) + gauge % ("waiting", 0)
            return whole(200, text.encode(), "text/plain; version=0.0.4")
        answer: Any = {}
        if path == "/control/state":
            answer = server.state()
        elif path == "/control/records":
            answer = [asdict(record) for record in server.records]
        elif path == "/control/reset":
            server.reset()
        elif path == "/control/plan" and method == b"POST":
            server.plan = plan_of(json.loads(body))
        elif path == "/v1/models":
            answer = {"object": "list", "data": [{"id": "null", "object": "model"}]}
        elif path == "/version":
            answer = {"version": "null"}
        elif path != "/health":
            return whole(404, b'{"error":{"message":"no such path"}}')
        return whole(200, json.dumps(answer).encode())


# scripts


def plan_of(data: dict[str, Any]) -> Plan:
    """A plan from JSON: bytes of ``pieces`` and ``wire`` are strings, acts their names."""
    names = {item.name for item in fields(Plan)}
    if unknown := set(data) - names:
        raise ValueError(f"a plan has no {sorted(unknown)}")
    data = dict(data)
    acts = {act.value: act for act in Act}
    for key in ("pieces", "wire"):
        if data.get(key) is not None:
            data[key] = tuple((at, acts.get(what) or what.encode()) for at, what in data[key])
    return Plan(**data)


@functools.lru_cache(maxsize=4096)
def script_of(plan: Plan, *, chat: bool, stream: bool) -> Script:
    """What to send when, for a plan with its number of tokens filled in."""
    if plan.wire is not None:
        return plan.wire
    if plan.pieces is not None:
        return _script([(0.0, head(200, plan)), *_chunked(plan.pieces)])
    if plan.status != 200:
        body = plan.body or json.dumps({"error": {"message": f"told to answer {plan.status}"}})
        return _script([(plan.ttft_s, whole(plan.status, body.encode(), plan=plan))])
    if plan.fault is not None and plan.fault_after < 0:
        return ((plan.headers_s, Act(plan.fault)),)
    if plan.as_json or not stream:
        return _json_script(plan, chat)
    return _stream_script(plan, chat)


def _json_script(plan: Plan, chat: bool) -> Script:
    assert plan.tokens is not None
    text = "x" * plan.tokens
    choice: dict[str, Any] = {"index": 0, "finish_reason": plan.finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", plan.field: text}
    else:
        choice["text"] = text
    answer: dict[str, Any] = {"object": "chat.completion" if chat else "text_completion", "choices": [choice]}
    if plan.usage != "none":
        answer["usage"] = _usage(plan, plan.tokens)
    body = (plan.body or json.dumps(answer)).encode()
    at = plan.ttft_s + max(0, plan.tokens - 1) * plan.itl_s
    message = whole(200, body, plan=plan)
    if plan.fault is None:
        return ((at, message),)
    act = Act.CLOSE if plan.fault == "inside_chunk" else Act(plan.fault)
    return ((at, message[: len(message) - len(body) // 2]), (at, act))


def _stream_script(plan: Plan, chat: bool) -> Script:
    assert plan.tokens is not None
    script: list[tuple[float, bytes | Act]] = [(plan.headers_s, head(200, plan))]

    def chunk(at: float, choices: list[dict[str, Any]], tokens: int | None = None) -> None:
        data: dict[str, Any] = {
            "id": "null-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 0,
            "model": "null",
            "choices": choices,
        }
        if tokens is not None:
            data["usage"] = _usage(plan, tokens)
        line = f"data: {json.dumps(data, separators=(',', ':'))}{plan.newline}{plan.newline}"
        script.append((at, _chunk(line.encode())))

    running = plan.usage == "continuous"
    if chat and plan.role_chunk:
        delta = {"role": "assistant", "content": ""}
        chunk(
            plan.headers_s,
            [{"index": 0, "delta": delta, "finish_reason": None}],
            0 if running else None,
        )
    if plan.comments_every_s:
        for i in range(1, int(plan.ttft_s / plan.comments_every_s) + 1):
            if i * plan.comments_every_s < plan.ttft_s:
                script.append((i * plan.comments_every_s, _chunk(b": keep-alive\n\n")))
    sent = chunks = 0
    at = plan.ttft_s
    while sent < plan.tokens and (plan.fault is None or chunks < plan.fault_after):
        at = plan.ttft_s + chunks * plan.itl_s
        some = min(plan.tokens_per_chunk, plan.tokens - sent)
        sent += some
        chunks += 1
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if chat:
            choice["delta"] = {plan.field: "x" * some}
        else:
            choice["text"] = "x" * some
        chunk(at, [choice], sent if running else None)
    if plan.fault is not None:
        # A moment later, so that what was sent has been read before a reset throws it away.
        at += 0.05
        if plan.fault == "inside_chunk":
            return _script([*script, (at, b'40\r\ndata: {"choi'), (at, Act.CLOSE)])
        if plan.fault == "error":
            error = b'data: {"error":{"message":"the engine died","type":"internal","code":500}}\n\n'
            return _script([*script, (at, _chunk(error)), (at, _chunk(b"data: [DONE]\n\n")), (at, LAST)])
        return _script([*script, (at, Act(plan.fault))])
    if plan.finish_reason is not None:
        last = {"delta": {}} if chat else {"text": ""}
        chunk(at, [{"index": 0, **last, "finish_reason": plan.finish_reason}], sent if running else None)
    if plan.usage in ("last", "late", "continuous"):
        at += plan.usage_late_s if plan.usage == "late" else 0.0
        chunk(at, [], sent)
    if plan.done:
        script.append((at, _chunk(f"data: [DONE]{plan.newline}{plan.newline}".encode())))
    return _script([*script, (at, LAST)])


LAST = b"0\r\n\r\n"


def head(status: int, plan: Plan) -> bytes:
    """The head of a stream."""
    kind = plan.content_type or "text/event-stream; charset=utf-8"
    keep = "" if plan.keep_alive else "Connection: close\r\n"
    return (
        f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\n{keep}Transfer-Encoding: chunked\r\n\r\n".encode()
    )


def whole(
    status: int, body: bytes, content_type: str = "application/json", plan: Plan | None = None
) -> bytes:
    """A whole message with a length."""
    extra = ""
    if plan is not None:
        content_type = plan.content_type or content_type
        extra += "" if plan.retry_after is None else f"Retry-After: {plan.retry_after}\r\n"
        extra += "" if plan.keep_alive else "Connection: close\r\n"
    extra += f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status} told\r\nContent-Type: {content_type}\r\n{extra}\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunked(pieces: Script) -> Script:
    """``pieces`` as HTTP chunks, with the end of the message unless an act ends it."""
    body = tuple((at, _chunk(what) if isinstance(what, bytes) else what) for at, what in pieces)
    ended = bool(body) and isinstance(body[-1][1], Act)
    return body if ended else (*body, (body[-1][0] if body else 0.0, LAST))


def _script(parts: list[tuple[float, bytes | Act]]) -> Script:
    """In one write what is sent at one time."""
    script: list[tuple[float, bytes | Act]] = []
    for at, what in parts:
        if script and isinstance(what, bytes) and script[-1][0] == at and isinstance(script[-1][1], bytes):
            script[-1] = (at, script[-1][1] + what)
        else:
            script.append((at, what))
    return tuple(script)


def _usage(plan: Plan, tokens: int) -> dict[str, int]:
    prompt = plan.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def refusing_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A model server that does exactly what it is told.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--plan", default="{}", help="a plan's fields as JSON, or the name of one")
    given = parser.parse_args(arguments)
    plan = PLANS[given.plan] if given.plan in PLANS else plan_of(json.loads(given.plan))

    async def serve() -> None:
        server = NullServer(plan, host=given.host, port=given.port)
        await server.start()
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
