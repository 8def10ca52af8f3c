"""What a request says and what an answer looks like, in bytes shaped as vLLM's.

**Tokens.** A token ends at every blank (space, tab, newline) and at the end of the text, white space
around it aside; so text with single blanks has one token a word. A chat message costs four more
(:data:`MESSAGE_TOKENS`), as a chat template's markers do. ``/tokenize`` and ``usage`` agree. Counting
and finding the blocks of a prompt must be cheap: a few hundred prompts of thousands of words may
arrive in one wall second.

**Streams.** The role chunk comes with the first token, then a chunk for every ``stream_interval``
tokens, ``finish_reason`` on the last; a usage chunk with no choices if asked for; ``[DONE]``. With
``continuous_usage_stats`` every chunk carries the usage so far. All but the words and the counts is
rendered once a request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from include.capacity.simulator.engine import BLOCK_TOKENS

MESSAGE_TOKENS = 4

_TEXT = (
    "the server holds as many answers as it has slots and every word of them takes one turn of the "
    "engine so a longer batch makes each turn a little slower while a longer queue only makes people wait"
)
WORDS = [f" {word}".encode() for word in _TEXT.split()]


class RequestError(Exception):
    """An answer of 4xx or 503 in vLLM's form."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, param: str | None = None) -> RequestError:
    """A 400."""
    return RequestError(400, "BadRequestError", message, param)


def queue_full() -> RequestError:
    """The 503 of ``--max-num-queued-reqs``."""
    return RequestError(
        503,
        "Service Unavailable",
        "The simulated engine is busy and takes no new requests. Try again later or elsewhere.",
    )


@dataclass(slots=True)
class Asked:
    """A generation request, understood."""

    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_tokens: int
    blocks: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """The request's JSON object, or RequestError."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request(f"Expected a JSON object, found {type(data).__name__}")
    return data


def check_model(data: dict[str, Any], served: str) -> None:
    """404 for a model that is not served; a request may leave it out."""
    model = data.get("model")
    if model is not None and model != served:
        raise RequestError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def read_generation(data: dict[str, Any], chat: bool, max_model_len: int, prefix_caching: bool) -> Asked:
    """A chat or completions request, checked as vLLM would; RequestError names the parameter."""
    prompt = read_prompt(data, chat)
    count = prompt.tokens
    if _number(data, "n", 1) != 1:
        raise bad_request("n other than 1 is not simulated", "n")
    if count >= max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt contains "
            f"{count} input tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    asked = _number(data, "max_completion_tokens", None) if chat else None
    if asked is None:
        # vLLM's completions default is 16, chat's is all that is left of the context.
        asked = _number(data, "max_tokens", max_model_len - count if chat else 16)
    if asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if count + asked > max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens, but {asked} output tokens "
            f"were requested with a prompt of {count} input tokens. Please reduce one of them.",
            "input_tokens",
        )
    min_tokens = _number(data, "min_tokens", 0)
    if not 0 <= min_tokens <= asked:
        raise bad_request(f"min_tokens must be in 0..max_tokens={asked}, got {min_tokens}.", "min_tokens")
    stream = data.get("stream") is True
    options = data.get("stream_options")
    if options is not None and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if options is not None and not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    include_usage = bool(options and options.get("include_usage"))
    return Asked(
        chat=chat,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.get("continuous_usage_stats")),
        prompt_tokens=count,
        blocks=prompt.blocks() if prefix_caching else (),
        max_tokens=asked,
        min_tokens=min_tokens,
        ignore_eos=data.get("ignore_eos") is True,
    )


class Prompt:
    """The text (or the ids) of a request, counted."""

    __slots__ = ("_ends", "_ids", "_text", "tokens")

    def __init__(self, text: bytes = b"", ids: list[int] | None = None) -> None:
        self._text = text
        self._ids = ids
        blanks = np.flatnonzero(np.frombuffer(text, np.uint8) <= ord(" "))
        self._ends = np.append(blanks, len(text))
        """Where every token ends."""
        self.tokens = len(ids) if ids is not None else len(self._ends)

    def blocks(self) -> tuple[int, ...]:
        """A chained identity for every whole block of 16 tokens: equal only if all before it are equal."""
        block = 0
        found = []
        if self._ids is not None:
            for at in range(BLOCK_TOKENS, len(self._ids) + 1, BLOCK_TOKENS):
                block = hash((block, *self._ids[at - BLOCK_TOKENS : at]))
                found.append(block)
            return tuple(found)
        start = 0
        for end in self._ends[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist():
            block = hash((block, self._text[start:end]))
            found.append(block)
            start = end
        return tuple(found)


def read_prompt(data: dict[str, Any], chat: bool) -> Prompt:
    """The prompt of a completions request, or a chat's messages with their markers."""
    if not chat:
        prompt = data.get("prompt")
        if isinstance(prompt, str):
            return Prompt(prompt.strip().encode())  # an empty prompt is one token, as a BOS is
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return Prompt(ids=prompt)
        raise bad_request("prompt must be a string or a list of token ids", "prompt")
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message", "messages")
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request("each message must be an object with a role", "messages")
        parts.append("\n".join((*[message["role"].replace(" ", "_")] * MESSAGE_TOKENS, "")))
        if content := _content(message.get("content")).strip():
            parts.append(content + "\n")
    return Prompt("".join(parts)[:-1].encode())


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return " ".join(texts)  # type: ignore[arg-type]  # all checked to be str
    raise bad_request("message content must be text", "messages")


def _number(data: dict[str, Any], key: str, default: Any) -> Any:
    value = data.get(key)
    if value is None:
        return default
    if type(value) is not int:
        raise bad_request(f"{key} must be an integer, got {value!r}", key)
    return value


def dumps(data: object) -> bytes:
    """JSON without blanks, as vLLM sends it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()


def words(first: int, after: int) -> bytes:
    """The text of the answer's tokens ``first`` up to, not including, ``after``."""
    size = len(WORDS)
    if after == first + 1:
        return WORDS[first % size]
    return b"".join([WORDS[at % size] for at in range(first, after)])


class Wire:
    """Renders the answer to one request."""

    __slots__ = ("_asked", "_finish_tail", "_head", "_open", "_tail", "_whole")

    def __init__(self, asked: Asked, request_id: str, created: int, model: str) -> None:
        self._asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        event_kind = "chat.completion.chunk" if asked.chat else "text_completion"
        head = '{"id":%s,"object":"%s","created":%d,"model":%s,"choices":['
        name = json.dumps(model)
        self._whole = (head % (json.dumps(request_id), kind, created, name)).encode()
        self._open = b"data: " + (head % (json.dumps(request_id), event_kind, created, name)).encode()
        if asked.chat:
            self._head = self._open + b'{"index":0,"delta":{"content":"'
            self._tail = b'"},"logprobs":null,"finish_reason":%b,"token_ids":null}]'
            self._finish_tail = b'"},"logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":null}]'
        else:
            self._head = self._open + b'{"index":0,"text":"'
            self._tail = (
                b'","logprobs":null,"finish_reason":%b,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]'
            )
            self._finish_tail = self._tail
        self._tail = self._tail % b"null"

    def chunk(self, first: int, after: int, finish_reason: bytes | None) -> bytes:
        """The bytes that hand over tokens ``first`` up to ``after``; all that ends a stream with the last.

        In HTTP's chunked coding.
        """
        asked = self._asked
        usage = self._usage(after) if asked.continuous_usage else b""
        if finish_reason is None:
            event = self._head + words(first, after) + self._tail + usage + b"}\n\n"
            if first or not asked.chat:
                return b"%x\r\n%b\r\n" % (len(event), event)
            return _chunked(self._role() + event)
        # A token that ends the answer by itself has no text.
        text = words(first, after - 1 if finish_reason == b'"stop"' else after)
        events = self._head + text + self._finish_tail % finish_reason + usage + b"}\n\n"
        if not first and asked.chat:
            events = self._role() + events
        if asked.include_usage:
            events += self._open + b"]" + self._usage(after) + b"}\n\n"
        return _chunked(events + b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _role(self) -> bytes:
        usage = self._usage(0) if self._asked.continuous_usage else b""
        return (
            self._open + b'{"index":0,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null' + usage + b"}\n\n"
        )

    def _usage(self, generated: int) -> bytes:
        prompt = self._asked.prompt_tokens
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            prompt,
            prompt + generated,
            generated,
        )

    def whole(self, generated: int, finish_reason: bytes) -> bytes:
        """The JSON of an answer that is not streamed."""
        text = words(0, generated - 1 if finish_reason == b'"stop"' else generated)
        if self._asked.chat:
            choice = (
                b'{"index":0,"message":{"role":"assistant","content":"%b","refusal":null,"annotations":null,'
                b'"audio":null,"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":null,'
                b'"finish_reason":%b,"stop_reason":null,"token_ids":null}'
            ) % (text, finish_reason)
        else:
            choice = (
                b'{"index":0,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,'
                b'"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null}'
            ) % (text, finish_reason)
        return (
            self._whole
            + choice
            + b'],"service_tier":null,"system_fingerprint":null'
            + self._usage(generated)
            + b',"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null}'
        )


def _chunked(events: bytes) -> bytes:
    """One HTTP chunk; several events in it arrive together, as they would from one engine step."""
    return b"%x\r\n%b\r\n" % (len(events), events)
