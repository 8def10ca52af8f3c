"""vLLM's HTTP API over the simulated engine, on a clock that may run faster than life.

**The loop.** Iterations end at ideal times on the server's clock (wall time x ``time_scale``); the loop
sleeps until each, hands its tokens over and begins the next one where the last ended, so lateness never
adds up. Requests are stamped when their last byte is parsed and join the first iteration that begins
after that, however late the loop itself is. How late it is, is measured (see ``metrics``): a step in
which the simulator fell behind can be told from one in which the server it imitates was slow.

**The wire.** One asyncio protocol a connection, parsed by httptools on uvloop; answers are written as
ready-made bytes, one write for each request and chunk. A client that disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import time
from typing import Any

import httptools
import uvloop

from include.capacity.errors import ServerError
from include.capacity.simulator import api
from include.capacity.simulator.engine import Engine, EngineCrashed, Sequence
from include.capacity.simulator.metrics import Exposition, Histograms
from include.capacity.simulator.profile import Profile, load_profile

MAX_BODY_BYTES = 64 * 1024 * 1024
LOOP_SLICE_S = 0.003
"""Wall seconds the engine loop may run before sockets get their turn."""
CRASH_STATUS = 1

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Too Large"}
_REASONS[503] = "Service Unavailable"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_JSON = b"application/json"


class SimulatedServer:
    """One server: the engine, its clock and its open connections."""

    def __init__(self, profile: Profile, served_name: str | None = None) -> None:
        self.profile = profile
        self.model = served_name or profile.model
        self.engine = Engine(profile.engine)
        self.histograms = Histograms(profile.engine.max_model_len)
        self.finished = {"stop": 0, "length": 0}
        self.connections: set[Connection] = set()
        self.port = 0
        self.crashed: asyncio.Future[str] | None = None
        self._scale = profile.time_scale
        self._origin = time.perf_counter()
        self._created = int(time.time())
        self._requests = 0
        self._eos = random.Random(profile.engine.seed)
        self._timer: asyncio.Handle | None = None
        self._listener: asyncio.Server | None = None
        self._late: list[float] = []
        """Lateness of the iterations handed over in this wall second."""
        self._late_second = 0
        self._behind_s = 0.0
        self.behind_max_s = 0.0

    # Life

    async def start(self, host: str, port: int) -> None:
        """Listen; ``port`` 0 takes a free one. Raises ServerError."""
        self._loop = asyncio.get_running_loop()
        self.crashed = self._loop.create_future()
        if self.profile.startup_s:
            await asyncio.sleep(self.profile.startup_s / self._scale)
        try:
            self._listener = await self._loop.create_server(
                lambda: Connection(self), host, port, backlog=4096
            )
        except OSError as error:
            raise ServerError(
                f"simulator {self.profile.name}: cannot listen on {host}:{port}: {error}"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop what is open."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.transport.abort()
        if self._listener is not None:
            await self._listener.wait_closed()

    def now_s(self) -> float:
        """The server's clock."""
        return (time.perf_counter() - self._origin) * self._scale

    # Requests

    def submit(self, asked: api.Asked, connection: Connection) -> Reply:
        """Queue a request, or raise RequestError (503)."""
        output, reason = asked.max_tokens, "length"
        if not asked.ignore_eos:
            drawn = self._eos.lognormvariate(0.0, self.profile.eos_sigma) * self.profile.eos_median_tokens
            natural = max(1, asked.min_tokens, round(drawn))
            if natural < output:
                output, reason = natural, "stop"
        sequence = Sequence(asked.prompt_tokens, output, self.now_s(), asked.blocks)
        if not self.engine.submit(sequence):
            raise api.queue_full()
        self._requests += 1
        prefix = "chatcmpl" if asked.chat else "cmpl"
        wire = api.Wire(asked, f"{prefix}-sim{self._requests:08x}", int(time.time()), self.model)
        reply = Reply(asked, sequence, wire, reason, connection)
        sequence.owner = reply
        if self.engine.end_s is None and self._timer is None:
            self._timer = self._loop.call_soon(self._tick)
        return reply

    # The loop

    def _tick(self) -> None:
        """End every iteration that is due, begin the next, and come back when it ends."""
        engine = self.engine
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        leave_at = time.perf_counter() + LOOP_SLICE_S
        while True:
            if engine.end_s is not None:
                early_s = engine.end_s - self.now_s()
                if early_s > 0:
                    self._timer = self._loop.call_later(early_s / self._scale, self._tick)
                    return
                self._note_behind(-early_s)
                self._hand_over(engine.finish())
            start_s = engine.now_s
            if not engine.running:
                first = next((waiting for waiting in engine.waiting if not waiting.aborted), None)
                if first is not None:
                    start_s = max(start_s, first.arrived_s)
            try:
                if engine.begin(start_s) is None:
                    return
            except EngineCrashed as error:
                if self.crashed is not None and not self.crashed.done():
                    self.crashed.set_result(str(error))
                return
            self.histograms.iteration.observe(engine.iteration_tokens)
            if time.perf_counter() > leave_at:
                self._timer = self._loop.call_soon(self._tick)
                return

    def _hand_over(self, emitted: list[Sequence]) -> None:
        """Send what the iteration that just ended gave to each."""
        end_s = self.engine.now_s
        interval = self.profile.stream_interval
        inter_token = self.histograms.inter_token
        usual_s, usual = 0.0, 0
        for sequence in emitted:
            reply: Any = sequence.owner
            generated = sequence.generated
            if generated > 1:
                gap_s = end_s - reply.last_token_s
                if gap_s == usual_s:
                    usual += 1
                else:
                    if usual:
                        inter_token.observe(usual_s, usual)
                    usual_s, usual = gap_s, 1
            else:
                self.histograms.ttft.observe(end_s - sequence.arrived_s)
            reply.last_token_s = end_s
            if sequence.finished:
                self._finished(reply)
            elif reply.stream and (generated - reply.sent >= interval or generated == 1):
                reply.transport.write(reply.wire.chunk(reply.sent, generated, None))
                reply.sent = generated
        if usual:
            inter_token.observe(usual_s, usual)

    def _finished(self, reply: Reply) -> None:
        sequence, histograms = reply.sequence, self.histograms
        admitted_s, first_s, last_s = sequence.admitted_s, sequence.first_token_s, sequence.last_token_s
        assert admitted_s is not None  # a finished sequence was admitted and has its tokens
        assert first_s is not None
        assert last_s is not None
        self.finished[reply.reason] += 1
        histograms.e2e.observe(last_s - sequence.arrived_s)
        histograms.queue.observe(admitted_s - sequence.arrived_s)
        histograms.inference.observe(last_s - admitted_s)
        histograms.prefill.observe(first_s - admitted_s)
        histograms.decode.observe(last_s - first_s)
        if sequence.generated > 1:
            histograms.per_output_token.observe((last_s - first_s) / (sequence.generated - 1))
        histograms.prompt.observe(sequence.prompt_tokens)
        histograms.generation.observe(sequence.generated)
        histograms.max_tokens.observe(reply.asked.max_tokens)
        sequence.owner = None  # no cycle is left for the garbage collector
        reply.connection.finish(reply)

    def _note_behind(self, late_s: float) -> None:
        second = int(time.perf_counter())
        if second != self._late_second:
            self._close_second(second)
        self._late.append(late_s)
        self.behind_max_s = max(self.behind_max_s, late_s)

    def _close_second(self, second: int) -> None:
        late, self._late = sorted(self._late), []
        just_ended = second == self._late_second + 1
        self._behind_s = late[int(0.95 * len(late))] if late and just_ended else 0.0
        self._late_second = second

    def behind_s(self) -> float:
        """Lateness that 95 % of the iterations of the last whole wall second stayed below."""
        second = int(time.perf_counter())
        if second != self._late_second:
            self._close_second(second)
        return self._behind_s

    # Plain answers

    def metrics(self) -> bytes:
        """The Prometheus exposition."""
        engine, stats, out = self.engine, self.engine.stats, Exposition(self.model)
        running = sum(not sequence.aborted for sequence in engine.running)
        waiting = engine.unfinished - running
        used = engine.kv_tokens / self.profile.engine.kv_cache_tokens
        gauge, counter = "gauge", "counter"
        for name, kind, text, value in (
            ("vllm:num_requests_running", gauge, "Requests in execution batches.", running),
            ("vllm:num_requests_waiting", gauge, "Requests waiting to be processed.", waiting),
            ("vllm:kv_cache_usage_perc", gauge, "KV-cache usage. 1 means 100 percent usage.", used),
            ("vllm:num_preemptions_total", counter, "Preemptions.", stats.preemptions),
            ("vllm:prefix_cache_queries_total", counter, "Queried tokens.", stats.prefix_queries),
            ("vllm:prefix_cache_hits_total", counter, "Cached tokens.", stats.prefix_hits),
            ("vllm:prompt_tokens_total", counter, "Prefill tokens processed.", stats.prompt_tokens),
            ("vllm:generation_tokens_total", counter, "Generated tokens.", stats.generation_tokens),
        ):
            out.single(name, kind, text, value)
        out.head("vllm:request_success_total", counter, "Successfully processed requests.")
        for reason in ("stop", "length", "abort", "error"):
            out.sample(
                "vllm:request_success_total", self.finished.get(reason, 0), f'finished_reason="{reason}"'
            )
        out.head("vllm:admission_rejections_total", counter, "Admissions rejected by a queue limit.")
        out.sample("vllm:admission_rejections_total", stats.rejected, 'reason="max_num_queued_reqs"')
        for name, text, histogram in self.histograms.named():
            out.histogram(f"vllm:{name}", text, histogram)
        for name, kind, text, value in (
            ("sim:requests_aborted_total", counter, "Requests whose client went away.", stats.aborted),
            ("sim:behind_seconds", gauge, "Lateness, p95 of the last wall second.", self.behind_s()),
            ("sim:behind_seconds_max", gauge, "Largest lateness since the start.", self.behind_max_s),
            ("sim:time_scale", gauge, "Server seconds per wall second.", self._scale),
        ):
            out.single(name, kind, text, value)
        return out.text()

    def version(self) -> bytes:
        """Who this is: always marked as simulated."""
        profile = self.profile
        return api.dumps(
            {
                "version": profile.vllm_version,
                "simulated": True,
                "profile": profile.name,
                "engine_hash": profile.engine_hash,
                "time_scale": profile.time_scale,
            }
        )

    def models(self) -> bytes:
        """The one model, as vLLM lists it."""
        card = {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self.model,
            "parent": None,
            "max_model_len": self.profile.engine.max_model_len,
        }
        return api.dumps({"object": "list", "data": [card]})

    def tokenize(self, body: bytes) -> bytes:
        """vLLM's ``/tokenize``: of a prompt or of messages."""
        data = api.parse_json(body)
        api.check_model(data, self.model)
        count = api.read_prompt(data, chat="messages" in data).tokens
        return api.dumps(
            {
                "count": count,
                "max_model_len": self.profile.engine.max_model_len,
                "tokens": list(range(count)),
                "token_strs": None,
            }
        )


class Reply:
    """A request under way and the connection its answer goes to."""

    __slots__ = (
        *("asked", "connection", "last_token_s", "reason", "sent", "sequence", "stream"),
        *("transport", "wire"),
    )

    def __init__(
        self, asked: api.Asked, sequence: Sequence, wire: api.Wire, reason: str, connection: Connection
    ) -> None:
        self.asked = asked
        self.sequence = sequence
        self.wire = wire
        self.reason = reason
        self.connection = connection
        self.transport = connection.transport
        self.stream = asked.stream
        self.sent = 0
        """Tokens handed over."""
        self.last_token_s = 0.0


class Connection(asyncio.Protocol):
    """One client connection: keep-alive, one request after another (no pipelining)."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._size = 0
        self._url = b""
        self._too_large = False
        self._keep_alive = True
        self._reply: Reply | None = None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]  # a TCP server's
        self.transport.set_write_buffer_limits(high=1 << 30)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        """The client went: what it asked for is not wanted any more."""
        self._server.connections.discard(self)
        if self._reply is not None:
            self._server.engine.abort(self._reply.sequence)
            self._reply = None

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._answer(400, b'{"detail":"no upgrades here"}', close=True)
        except httptools.HttpParserError as error:
            self._answer(400, api.dumps({"detail": f"not HTTP: {error}"}), close=True)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """A request starts."""
        self._body.clear()
        self._size = 0
        self._url = b""
        self._too_large = False

    def on_url(self, url: bytes) -> None:
        """Part of the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._size += len(body)
        if self._size > MAX_BODY_BYTES:
            self._too_large = True
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """The whole request is here."""
        if self._reply is not None:  # pipelined: no client of ours does that
            self.transport.abort()
            return
        self._keep_alive = self._parser.should_keep_alive()
        if self._too_large:
            self._answer(413, b'{"detail":"Request body too large"}', close=True)
            return
        try:
            self._handle(
                self._parser.get_method(), self._url.split(b"?", 1)[0].decode("latin-1"), b"".join(self._body)
            )
        except api.RequestError as error:
            retry_after_s = self._server.profile.retry_after_s if error.status == 503 else None
            extra = b"retry-after: %d\r\n" % retry_after_s if retry_after_s else b""
            self._answer(error.status, error.body, extra=extra)

    def _handle(self, method: bytes, path: str, body: bytes) -> None:
        server = self._server
        if path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            if method != b"POST":
                self._answer(405, b'{"detail":"Method Not Allowed"}')
            elif path == "/tokenize":
                self._answer(200, server.tokenize(body))
            else:
                self._generate(body, chat=path == "/v1/chat/completions")
            return
        get = {
            "/health": lambda: (b"", b""),
            "/ping": lambda: (b"", b""),
            "/version": lambda: (server.version(), _JSON),
            "/v1/models": lambda: (server.models(), _JSON),
            "/metrics": lambda: (server.metrics(), b"text/plain; version=0.0.4; charset=utf-8"),
        }.get(path)
        if get is None:
            self._answer(404, b'{"detail":"Not Found"}')
        elif method not in (b"GET", b"HEAD"):
            self._answer(405, b'{"detail":"Method Not Allowed"}')
        else:
            content, kind = get()
            self._answer(200, content, kind=kind, head_only=method == b"HEAD")

    def _generate(self, body: bytes, chat: bool) -> None:
        server = self._server
        data = api.parse_json(body)
        api.check_model(data, server.model)
        engine = server.profile.engine
        asked = api.read_generation(data, chat, engine.max_model_len, engine.prefix_caching)
        self._reply = server.submit(asked, self)
        if asked.stream:
            self.transport.write(_STREAM_HEAD)

    # Answers

    def finish(self, reply: Reply) -> None:
        """The engine has the last token of the request under way."""
        generated = reply.sequence.generated
        reason = b'"%b"' % reply.reason.encode()
        self._reply = None
        if reply.stream:
            self.transport.write(reply.wire.chunk(reply.sent, generated, reason))
            if not self._keep_alive:
                self.transport.close()
        else:
            self._answer(200, reply.wire.whole(generated, reason))

    def _answer(
        self,
        status: int,
        content: bytes,
        *,
        kind: bytes = _JSON,
        extra: bytes = b"",
        close: bool = False,
        head_only: bool = False,
    ) -> None:
        close = close or not self._keep_alive
        self.transport.write(
            b"HTTP/1.1 %d %b\r\nserver: uvicorn\r\ncontent-length: %d\r\n%b%b%b\r\n%b"
            % (
                status,
                _REASONS[status].encode(),
                len(content),
                b"content-type: %b\r\n" % kind if kind else b"",
                extra,
                b"connection: close\r\n" if close else b"",
                b"" if head_only else content,
            )
        )
        if close:
            self.transport.close()


async def start(
    profile: Profile, host: str = "127.0.0.1", port: int = 0, served_name: str | None = None
) -> SimulatedServer:
    """A listening server on the running loop; ``.port`` says where, ``await .stop()`` ends it."""
    server = SimulatedServer(profile, served_name)
    await server.start(host, port)
    return server


async def _serve(profile: Profile, host: str, port: int, served_name: str | None) -> int:
    server = await start(profile, host, port, served_name)
    # A collector's pause is multiplied by the time scale like any other.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    sys.stdout.write(
        f"listening on http://{host}:{server.port} simulated vLLM {profile.vllm_version} "
        f"profile={profile.name} model={server.model} time_scale={profile.time_scale:g} pid={os.getpid()}\n"
    )
    sys.stdout.flush()
    assert server.crashed is not None  # set by start
    waiter: asyncio.Future[Any] = asyncio.ensure_future(told.wait())
    awaited: list[asyncio.Future[Any]] = [waiter, server.crashed]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if server.crashed.done():
        sys.stderr.write(f"simulated crash: {server.crashed.result()}: EngineDeadError\n")
        sys.stderr.flush()
        os._exit(CRASH_STATUS)  # connections are reset, as when a process dies
    await server.stop()
    return 0


def serve(profile: Profile, host: str = "127.0.0.1", port: int = 0, served_name: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status (0, or 1 after a simulated crash).

    Prints one line that starts with ``listening on http://HOST:PORT`` when ready. Raises ServerError.
    """
    return uvloop.run(_serve(profile, host, port, served_name))


def main(profile: str, host: str = "127.0.0.1", port: int = 0, served_name: str | None = None) -> int:
    """``simulate`` of the command line: ``profile`` is a name or a file. Raises CapacityError."""
    return serve(load_profile(profile), host, port, served_name)
