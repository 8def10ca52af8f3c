"""One request, measured and judged: what was sent, when its tokens came, and how it ended.

**Times** are those of receipt, stamped by the transport; parsing may come later. They count from
``wrote_at``, when the request was given to the socket. The time from the wish to send until then is the
caller's to record.

**First token** is the first chunk with generated content: ``text``, ``content`` (a string, or a list of parts
with text in one), ``reasoning``, ``reasoning_content``, ``refusal`` or tool-call arguments. Never the role
chunk, a comment, an empty chunk or a usage chunk. The first *answer* token leaves reasoning out.

**Tokens** come from the server's ``usage``, wherever in the stream it comes. Without one, chunks with content
are counted and the number is flagged as estimated. Tokens of the first chunk are known where it carries a
running ``usage`` (``continuous_usage_stats``) or is the only chunk with content; else 1 is assumed, and
flagged.

**Outcome**, exactly one, by the first rule that fits:

1. never written: ``connect_failed``;
2. a status of 400 and above (or a redirect, which we do not follow): 429 and 503 ``rejected``, other 5xx
   ``server_error``, the rest ``client_error``. The body only gives the words;
3. inside a 200: an error object, an ``error`` event, or a ``finish_reason`` by which the server gives up
   (``abort``, ``error``): ``stream_error``, at the moment it came. What is no JSON, or JSON of another shape
   than the API's: ``malformed``;
4. a stream that said [DONE] or ended properly after a ``finish_reason``: ``completed``, or ``empty`` if no
   generated content came at all, whatever ``usage`` says (vLLM counts the end-of-sequence token, so an answer
   that ended at once has usage 1);
5. the connection closed or was reset before a proper end: ``connection_lost``, also after ``finish_reason``,
   because no client would accept such a stream; not HTTP: ``malformed``;
6. a clean end with neither ``finish_reason`` nor [DONE]: ``truncated``.

Whatever was found, if it came later than the deadline after the write it is ``first_token_timeout`` (a
stream without a first token in time) or ``deadline_exceeded``.

A stream ends at its [DONE]; the connection gets a moment more (``END_GRACE_S``) to end the HTTP message, so
that it can be used again. Nothing is retried.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from include.capacity.load.sse import Event, SSEDecoder
from include.capacity.load.transport import ClosedEarly, Exchange, OwnLimit, SlotTransport, now
from include.capacity.redact import redact_text
from include.capacity.words import Outcome

_decode = msgspec.json.Decoder().decode


class _Delta(msgspec.Struct):
    """Every key that :func:`_said` looks at."""

    content: str | None = None
    refusal: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    """Every key that :meth:`Reading._take` looks at."""

    choices: tuple[_Choice]
    usage: dict[str, Any] | None = None
    error: Any = None
    object: Any = None


_decode_usual = msgspec.json.Decoder(_Chunk).decode

Headers = Sequence[tuple[bytes, bytes]]

END_GRACE_S = 1.0
"""Wall seconds the server has to end the HTTP message once the answer is decided."""

WAKE_EVERY = 4
"""Pieces of a stream collected before the request's task is woken."""

ERROR_CHARS = 500
"""Longest error text kept."""

ERROR_PIECES = 64
"""Pieces of an error body kept for its words."""

GAVE_UP = frozenset({"abort", "error"})
"""Values of ``finish_reason`` by which the server says that it did not finish."""


@dataclass(slots=True)
class Prepared:
    """A request ready to be sent."""

    request_id: str
    body: bytes
    """JSON."""
    stream: bool
    """An event stream is asked for."""
    asked_prompt_tokens: int | None = None
    asked_max_tokens: int | None = None


@dataclass(slots=True)
class Answer:
    """What came of a request. Times are ``time.perf_counter()`` seconds of receipt; ``None``: none."""

    outcome: Outcome
    wrote_at: float | None = None
    first_token_at: float | None = None
    """``None`` also where no stream was answered: TTFT is not applicable then."""
    first_answer_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    usage_estimated: bool = False
    """``output_tokens`` was counted from chunks, in whole or for the last part."""
    chunks: int = 0
    """Chunks with generated content."""
    first_chunk_tokens: int | None = None
    first_chunk_tokens_known: bool = False
    streamed: bool | None = None
    """An event stream came back; ``None`` where no successful answer began."""
    finish_reason: str | None = None
    http_status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    """What the server's ``Retry-After`` asked for, in the server's seconds."""
    connection_reused: bool = False
    own_fault: bool = False
    """The connection failed for want of our own descriptors or ports: the step is invalid."""


@dataclass(frozen=True)
class Target:
    """Where a model is served."""

    base_url: str
    """With or without a trailing ``/v1``."""
    served_name: str
    api_key: str | None = field(default=None, repr=False)
    metrics_url: str = ""


class Sender:
    """Sends requests of one kind to one target, each slot over its own connection."""

    def __init__(
        self,
        target: Target,
        endpoint: Literal["chat", "completions"],
        slots: int,
        transport: SlotTransport | None = None,
    ) -> None:
        base = target.base_url.rstrip("/").removesuffix("/v1")
        path = "chat/completions" if endpoint == "chat" else "completions"
        self._url = httpx.URL(f"{base}/v1/{path}")
        self._slots = slots
        self._transport = transport or SlotTransport()
        headers = {
            "Host": self._url.netloc.decode("ascii"),
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "capacity-sweep",
        }
        self._api_key = target.api_key
        if target.api_key is not None:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._headers = list(headers.items())
        # For the server's log. A server may refuse a name that is in use, and a step that is run again
        # has the request names of its first run: so each sender adds a part of its own.
        self._tag = secrets.token_hex(4)
        # httpx logs a line for every request at INFO, which is the level Airflow's tasks log at.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    async def connect(self, n: int | None = None) -> int:
        """Open ``n`` (default: all) slots' connections ahead of a burst; returns how many are open.

        A failure shows in the slot's request.
        """
        return await self._transport.connect(self._url, self._slots if n is None else n, timeout_s=10.0)

    async def send(self, prepared: Prepared, slot: int, deadline_wall_s: float) -> Answer:
        """Send ``prepared`` over the connection of ``slot``, and say what came of it.

        ``deadline_wall_s``: wall seconds from the write to the end of the answer; it also bounds the opening
        of a connection. Raises nothing for what server or network do; a cancellation closes the connection.
        """
        request = httpx.Request(
            "POST",
            self._url,
            headers=[*self._headers, ("X-Request-Id", f"{prepared.request_id}-{self._tag}")],
            content=prepared.body,
            extensions={
                "slot": slot,
                "deadline_s": deadline_wall_s,
                "timeout": {"connect": deadline_wall_s},
                "wake_every": WAKE_EVERY,
                "wake_on": b"[DONE]",
            },
        )
        reading = Reading(prepared.stream)
        failure: httpx.TransportError | None = None
        try:
            await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            failure = error
        exchange: Exchange | None = request.extensions.get("exchange")
        if exchange is None:
            return Answer(
                Outcome.CONNECT_FAILED,
                ended_at=now(),
                error=_words(failure),
                own_fault=isinstance(failure, OwnLimit),
            )
        if failure is None:
            try:
                assert exchange.head_at is not None
                reading.head(exchange.status, exchange.headers, exchange.head_at)
                while True:
                    if reading.decided_at is not None:
                        exchange.limit(reading.decided_at + END_GRACE_S)
                    pieces = await exchange.read()
                    if not pieces:
                        break
                    reading.feed(pieces)
            except httpx.TransportError as error:
                failure = error
            finally:
                exchange.close()
        assert exchange.wrote_at is not None
        answer = reading.answer(
            failure,
            wrote_at=exchange.wrote_at,
            ended_at=exchange.ended_at if exchange.ended_at is not None else now(),
            deadline_s=deadline_wall_s,
        )
        answer.connection_reused = exchange.reused
        if answer.error is not None:  # a server may repeat the key that it refuses
            answer.error = redact_text(answer.error, [self._api_key])
        return answer

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


class Reading:
    """Makes an :class:`Answer` of one response as its pieces come; knows nothing of sockets or clocks."""

    def __init__(self, asked_stream: bool) -> None:
        self.decided_at: float | None = None
        """When the outcome became certain: [DONE], or what makes the answer a failure."""
        self._asked_stream = asked_stream
        self._status = 0
        self._headers: Headers = ()
        self._event_stream = False
        self._sse: SSEDecoder | None = None
        self._body: list[bytes] = []
        self._failure: tuple[Outcome, str] | None = None
        self._done = False
        self._finish_reason: str | None = None
        self._first_token_at: float | None = None
        self._first_answer_at: float | None = None
        self._last_token_at: float | None = None
        self._chunks = 0
        self._prompt_tokens: int | None = None
        self._tokens: int | None = None
        self._chunks_since_usage = 0
        self._first_chunk_tokens: int | None = None
        self._streamed: bool | None = None
        self._content = False

    def head(self, status: int, headers: Headers, at: float) -> None:
        """The head of the response, received at ``at``."""
        self._status = status
        self._headers = headers
        if status >= 300:
            self.decided_at = at
            return
        self._event_stream = "event-stream" in (_header(headers, b"content-type") or "").lower()
        encoding = _header(headers, b"content-encoding") or "identity"
        if encoding.lower() != "identity":
            self._fail(at, Outcome.MALFORMED, f"content-encoding {encoding!r} though none was accepted")

    def feed(self, pieces: Sequence[tuple[float, bytes]]) -> None:
        """Pieces of the body with their times of receipt."""
        for at, piece in pieces:
            if self._sse is None:
                piece = self._sniffed(piece)
                if self._sse is None:
                    continue
            for event in self._sse.feed(piece, at):
                if self.decided_at is not None:
                    return  # what follows cannot change the answer
                self._event(event)

    def _sniffed(self, piece: bytes) -> bytes:
        """Keep ``piece`` as part of a plain body, or find an event stream and return all of it so far."""
        if self._status >= 300 and len(self._body) >= ERROR_PIECES:
            return b""
        self._body.append(piece)
        if self._status >= 300 or self._streamed is not None:
            return b""
        body = b"".join(self._body)
        start = body.lstrip()
        if start:
            # A stream cannot begin with "{" (that would be a field without a meaning), so an error
            # object under a stream's content type is found, too.
            if start.startswith(b"{"):
                self._streamed = False
            elif self._event_stream or start.startswith((b"data:", b"event:", b":", b"id:", b"retry:")):
                self._streamed = True
                self._sse = SSEDecoder()
                self._body = []
            elif len(start) >= len(b"event:"):
                self._streamed = False
        return body

    def _event(self, event: Event) -> None:
        at, name, data = event
        if data == b"[DONE]" or data.strip() == b"[DONE]":
            self._done = True
            self.decided_at = at
            return
        if self._took_usual(at, name, data) or not data.strip():
            return
        try:
            chunk = _json(data)
        except ValueError as error:
            if name == "error":
                self._fail(at, Outcome.STREAM_ERROR, _text(data))
            else:
                self._fail(at, Outcome.MALFORMED, f"event is not JSON ({error}): {_text(data)}")
            return
        if name == "error" and isinstance(chunk, dict):
            self._fail(at, Outcome.STREAM_ERROR, _error_text(chunk) or _text(data))
            return
        problem = self._take(at, chunk, "delta")
        if problem is not None:
            self._fail(at, *problem)

    def _took_usual(self, at: float, name: str, data: bytes) -> bool:
        """The short way for almost every chunk: one choice with nothing but text. False: not such a one."""
        try:
            chunk = _decode_usual(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        (choice,) = chunk.choices
        delta = choice.delta
        if choice.finish_reason or chunk.error or chunk.object == "error" or name == "error":
            return False
        text = choice.text
        if delta is not None:
            if (
                delta.reasoning
                or delta.reasoning_content
                or delta.tool_calls
                or delta.refusal
                or delta.function_call
            ):
                return False
            text = delta.content or text
        if text:
            self._token(at, answer=True)
        if chunk.usage is not None:
            self._usage(chunk.usage, first=bool(text) and self._chunks == 1)
        return True

    def _token(self, at: float, *, answer: bool) -> None:
        """A chunk of a stream with generated content."""
        self._content = True
        self._chunks += 1
        self._chunks_since_usage += 1
        if self._first_token_at is None:
            self._first_token_at = at
        self._last_token_at = at
        if answer and self._first_answer_at is None:
            self._first_answer_at = at

    def _take(self, at: float, chunk: Any, message_key: str) -> tuple[Outcome, str] | None:
        """One chunk (or, with ``message``, the whole answer); returns what is wrong with it."""
        if not isinstance(chunk, dict):
            return Outcome.MALFORMED, f"expected a JSON object, found {_text(chunk)}"
        error = chunk.get("error") or (chunk if chunk.get("object") == "error" else None)
        if error:
            return Outcome.STREAM_ERROR, _error_text({"error": error}) or _text(error)
        choices = chunk.get("choices")
        usage = chunk.get("usage")
        if choices is None:
            if not isinstance(usage, dict):
                return Outcome.MALFORMED, f"no choices in {_text(chunk)}"
            choices = ()
        content = answer = False
        for choice in choices if isinstance(choices, list | tuple) else (None,):
            message = choice.get(message_key) if isinstance(choice, dict) else None
            if not isinstance(choice, dict) or not isinstance(message, dict | None):
                return Outcome.MALFORMED, f"choices of an unknown shape: {_text(choices)}"
            try:
                if _visible(choice.get("text")):
                    content = answer = True
                if message:
                    said, thought = _said(message)
                    answer = answer or said
                    content = content or said or thought
            except TypeError as wrong:
                return Outcome.MALFORMED, f"{wrong}: {_text(choice)}"
            reason = choice.get("finish_reason")
            if reason:
                self._finish_reason = str(reason)
        if content and self._streamed:
            self._token(at, answer=answer)
        elif content:
            self._content = True
        if isinstance(usage, dict):
            self._usage(usage, first=content and self._chunks == 1)
        if self._finish_reason in GAVE_UP:
            return Outcome.STREAM_ERROR, f"the server gave up: finish_reason {self._finish_reason!r}"
        return None

    def _usage(self, usage: dict[str, Any], *, first: bool) -> None:
        prompt = _count(usage.get("prompt_tokens"))
        if prompt is not None:
            self._prompt_tokens = prompt
        tokens = _count(usage.get("completion_tokens"))
        if tokens is None:
            return
        if first and tokens > 0:
            self._first_chunk_tokens = tokens
        self._tokens = tokens
        self._chunks_since_usage = 0

    def _fail(self, at: float, outcome: Outcome, error: str) -> None:
        self._failure = (outcome, error[:ERROR_CHARS])
        self.decided_at = at

    def answer(
        self, failure: httpx.TransportError | None, *, wrote_at: float, ended_at: float, deadline_s: float
    ) -> Answer:
        """The verdict, once nothing more will be read; ``failure``: what broke the response off."""
        outcome: Outcome
        error: str | None
        if self._status == 0:
            outcome, error = _lost(failure)
        elif self._status >= 300:
            outcome, error = self._by_status()
        else:
            if self._streamed is not True and self.decided_at is None and failure is None:
                self._whole_body(ended_at)
            outcome, error = self._by_body(failure)
        if self.decided_at is not None and (self._status < 300 or failure is not None):
            ended_at = self.decided_at
        answer = self._filled(outcome, error)
        answer.wrote_at = wrote_at
        answer.ended_at = ended_at
        if ended_at >= wrote_at + deadline_s:
            self._late(answer, wrote_at + deadline_s)
        return answer

    def _whole_body(self, at: float) -> None:
        """The body ended and is no event stream."""
        body = b"".join(self._body)
        self._streamed = False
        if not body.strip():
            if self._event_stream:
                self._streamed = True  # a stream without an event
            else:
                self._fail(at, Outcome.MALFORMED, "an empty body")
            return
        try:
            whole = _json(body)
        except ValueError as error:
            self._fail(at, Outcome.MALFORMED, f"body is not JSON ({error}): {_text(body)}")
            return
        problem = self._take(at, whole, "message")
        if problem is not None:
            self._fail(at, *problem)
        else:
            self._done = True

    def _by_body(self, failure: httpx.TransportError | None) -> tuple[Outcome, str | None]:
        if self._failure is not None:
            return self._failure
        if not self._done:
            if failure is not None:
                return _lost(failure)
            if self._finish_reason is None:
                return Outcome.TRUNCATED, "ended with neither finish_reason nor [DONE]"
        if not self._content:
            return Outcome.EMPTY, "ended without any generated content"
        return Outcome.COMPLETED, None

    def _by_status(self) -> tuple[Outcome, str]:
        status = self._status
        body = b"".join(self._body)
        try:
            parsed = _json(body) if body else None
        except ValueError:
            parsed = None
        said = (_error_text(parsed) if isinstance(parsed, dict) else None) or _text(body)
        if 300 <= status < 400:
            location = _header(self._headers, b"location")
            said = f"redirected to {location}; give the final URL" if location else said
        error = f"HTTP {status}: {said}"[:ERROR_CHARS]
        if status in (429, 503):
            return Outcome.REJECTED, error
        return (Outcome.SERVER_ERROR if status >= 500 else Outcome.CLIENT_ERROR), error

    def _filled(self, outcome: Outcome, error: str | None) -> Answer:
        tokens, estimated = self._tokens, False
        if self._chunks_since_usage:
            # No usage at all, or content came after the last running usage.
            tokens, estimated = (tokens or 0) + self._chunks_since_usage, True
        first, known = self._first_chunk_tokens, self._first_chunk_tokens is not None
        if first is None and self._first_token_at is not None:
            first = 1
            if self._chunks == 1 and tokens is not None and not estimated and outcome is Outcome.COMPLETED:
                first, known = max(1, tokens), True
        return Answer(
            outcome,
            first_token_at=self._first_token_at,
            first_answer_at=self._first_answer_at,
            last_token_at=self._last_token_at,
            prompt_tokens=self._prompt_tokens,
            output_tokens=tokens,
            usage_estimated=estimated,
            chunks=self._chunks,
            first_chunk_tokens=first,
            first_chunk_tokens_known=known,
            streamed=self._streamed,
            finish_reason=self._finish_reason,
            http_status=self._status or None,
            error=error,
            retry_after_s=_retry_after(self._headers),
        )

    def _late(self, answer: Answer, limit_at: float) -> None:
        """The deadline has the last word: times decide, not which of two timers fired first."""
        if answer.first_token_at is not None and answer.first_token_at > limit_at:
            answer.first_token_at = answer.last_token_at = None
        if answer.first_answer_at is not None and answer.first_answer_at > limit_at:
            answer.first_answer_at = None
        waiting = self._asked_stream and answer.streamed is not False and answer.first_token_at is None
        answer.outcome = Outcome.FIRST_TOKEN_TIMEOUT if waiting else Outcome.DEADLINE_EXCEEDED
        what = "no token" if waiting else "not ended"
        answer.error = f"{what} within the deadline" + (f" ({answer.error})" if answer.error else "")


def _lost(failure: httpx.TransportError | None) -> tuple[Outcome, str]:
    if isinstance(failure, httpx.RemoteProtocolError) and not isinstance(failure, ClosedEarly):
        return Outcome.MALFORMED, _words(failure)
    return Outcome.CONNECTION_LOST, _words(failure)


def _json(data: bytes) -> Any:
    """``data`` as JSON. Raises ValueError, whatever is wrong with it.

    msgspec is several times as fast and stricter than the standard library (NaN, lone surrogates, bytes
    that are not UTF-8), so that one has the last word.
    """
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # judged below
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _said(message: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a message or delta has answer content, and reasoning. TypeError: not what the API promises."""
    said = thought = False
    for key, value in message.items():
        if not value:
            continue
        if key in ("content", "refusal"):
            said = _visible(value) or said
        elif key in ("reasoning", "reasoning_content"):
            thought = _visible(value) or thought
        elif key == "tool_calls":
            if not isinstance(value, list):
                raise TypeError(f"tool_calls is a {type(value).__name__}")
            said = any(map(_called, value)) or said
        elif key == "function_call":
            said = _called({"function": value}) or said
    return said, thought


def _called(call: Any) -> bool:
    """Whether a tool call has arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and _visible(function.get("arguments"))


def _visible(content: Any) -> bool:
    """Whether there is text in a string or a list of parts. TypeError: neither."""
    if content is None or isinstance(content, str):
        return bool(content)
    if isinstance(content, list):
        return any(_visible(part) for part in content)
    if isinstance(content, dict):  # a part: {"type": "text", "text": "..."} and the like
        return any(
            _visible(value) for key, value in content.items() if key in ("text", "content", "thinking")
        )
    raise TypeError(f"content is a {type(content).__name__}")


def _count(value: Any) -> int | None:
    """A token count that a server may claim, else ``None``."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return value
    return None


def _retry_after(headers: Headers) -> float | None:
    """``Retry-After`` in seconds: a number, or a date less the response's own ``Date`` (RFC 9110, 10.2.3)."""
    value = _header(headers, b"retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        at = _http_date(value)
        if at is None:
            return None
        sent = _header(headers, b"date")
        now = (_http_date(sent) if sent else None) or datetime.datetime.now(datetime.UTC)
        return max(0.0, (at - now).total_seconds())
    return seconds if 0 <= seconds < float("inf") else None


def _http_date(text: str) -> datetime.datetime | None:
    try:
        at = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)


def _header(headers: Headers, name: bytes) -> str | None:
    for key, value in headers:
        if key.lower() == name:
            return value.decode("latin-1").strip()
    return None


def _error_text(body: dict[str, Any]) -> str | None:
    """The words of an error body: OpenAI's, vLLM's older, FastAPI's."""
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error
    words = error or body.get("message") or body.get("detail")
    return _text(words) if words else None


def _text(value: object) -> str:
    """``value`` for people: short, on one line."""
    if isinstance(value, bytes):
        value = value[: 4 * ERROR_CHARS].decode("utf-8", "replace")
    text = value if isinstance(value, str) else repr(value)
    return " ".join(text.split())[:ERROR_CHARS]


def _words(failure: BaseException | None) -> str:
    return _text(f"{type(failure).__name__}: {failure}")
