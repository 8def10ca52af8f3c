"""What is sent: seeded prompts that no cache can know, or real requests from a file.

**Made-up prompts.** Lengths are log-normal, ``median * exp(sigma * z)``, rounded and clipped; every step
draws from the same distribution with another seed, so steps are comparable and the prefix cache has
seen nothing. A prompt is a random tag of 64 bits followed by random common words: prompts differ from
their first token on. With ``shared_prefix_tokens`` the tag comes after a prefix that is the same in all
requests of all steps; the sampled length is then the length of what follows the prefix.

**Length in tokens.** Words are not tokens. Where the server has ``/tokenize``, a straight line
``tokens = overhead + tokens_per_word * words`` is fitted to prompts of the same make (so the chat
template and the tag are in the overhead), and read backwards to find how many words a sampled length
takes. Without it a ratio is assumed and said. Afterwards ``usage`` tells the truth: see :func:`length_note`.

**Answers** have the sampled ``max_tokens`` and, with ``ignore_eos``, exactly that length.

**Replay.** Each line of a JSONL file is one request body (or OpenAI's batch form with the body under
``body``). A line's own keys win; what it leaves out is filled in as for made-up prompts. Lines are
sent in an order shuffled by the step's seed, again and again if there are too few.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from include.capacity.config import Lengths, Workload
from include.capacity.errors import ConfigError, DataError
from include.capacity.load.request import Prepared

_TEXT = (
    "about above across after again against age air all almost along also always among and animal answer "
    "any appear area arm around ask away back ball base bear beauty because become bed before began begin "
    "behind best better between big bird black blue boat body book both bottom box boy bring brown build "
    "busy call came can car care carry case cause center certain change check child city class clear close "
    "cold color come common complete contain correct could country course cover cross cry cut dark day deep "
    "did differ direct do dog done door down draw dream drive dry during each early earth ease east eat end "
    "enough even ever every exact example eye face fact fall family far farm fast father feel feet few field "
    "fight figure fill final find fine fire first fish five fly follow food foot force form found four free "
    "friend from front full game gave get girl give glass go gold gone good got govern grand great green "
    "ground group grow half hand happen hard has have head hear heart heat heavy held help here high hold "
    "home horse hot hour house how hundred hunt idea inch island just keep kind king knew know land language "
    "large last late laugh law lay lead learn least leave left less let letter life light like line list "
    "listen little live long look lost love low machine made main make man many map mark may mean measure "
    "men might mile mind minute miss money moon more morning most mother mountain move much music must name "
    "near need never new next night north note nothing notice noun now number object ocean often old once "
    "one only open order other our out over own page paper part pass pattern people perhaps person picture "
    "piece place plain plan plane plant play point port pose possible pound power present press problem "
    "produce product pull put question quick rain ran reach read ready real record red remember rest right "
    "river road rock room round rule run said same saw say school science sea second see seem self sentence "
    "serve set seven several shape she ship short should show side simple since sing sit six size sleep slow "
    "small snow some song soon sound south special spell stand star start state stay step still stood stop "
    "story street strong study such sun sure surface table tail take talk teach tell ten test than that "
    "their them then there these they thing think this those thought thousand three through time together "
    "told too took top toward town travel tree true try turn two under unit until use usual very voice vowel "
    "wait walk want war warm was watch water way week weight well went were west what wheel when where "
    "which while white whole why wide will wind winter wish with wonder wood word work world would write "
    "year yes yet young your"
)
COMMON_WORDS = _TEXT.split()
"""Short and common, so that most are one token in any vocabulary."""

ASSUMED_TOKENS_PER_WORD = 1.0
ASSUMED_OVERHEAD = 18.0
"""A chat template and the tag, where the server cannot be asked."""

CALIBRATION_WORDS = (16, 64, 256, 1024)
LENGTH_TOLERANCE = 0.05
"""Measured prompt lengths further than this from the asked ones are worth a note: latency follows length."""
AHEAD_BYTES = 64_000_000
"""Most memory that requests built ahead may take."""
CONTEXT_MARGIN = 8
"""Tokens left free in the model's context: a calibrated length is not an exact one."""

OURS = frozenset({"model", "messages", "prompt", "stream", "stream_options"})
"""Keys of a request that are set here and that ``extra_body`` must not."""


@dataclass(frozen=True)
class Tokenizing:
    """How words become tokens: ``tokens = overhead + tokens_per_word * words``."""

    tokens_per_word: float = ASSUMED_TOKENS_PER_WORD
    overhead: float = ASSUMED_OVERHEAD
    known: bool = False
    """Measured through ``/tokenize``, not assumed."""
    context: int | None = None
    """The model's context length in tokens, if the server tells."""


def root_url(base_url: str) -> str:
    """The server's root: ``/tokenize``, ``/version`` and ``/health`` live beside ``/v1``."""
    return base_url.rstrip("/").removesuffix("/v1")


async def calibrate(client: httpx.AsyncClient, base_url: str, served_name: str, endpoint: str) -> Tokenizing:
    """Fit tokens to words through ``/tokenize``; the assumed ratio where there is no such thing."""
    rng = np.random.default_rng(0)
    words, tokens, context = [], [], None
    for count in CALIBRATION_WORDS:
        text = _tagged(rng, count)
        body: dict[str, Any] = {"model": served_name}
        if endpoint == "chat":
            body |= {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        else:
            body |= {"prompt": text}
        try:
            answer = await client.post(f"{root_url(base_url)}/tokenize", json=body)
            answer.raise_for_status()
            found = answer.json()
            words.append(count)
            tokens.append(int(found["count"]))
            context = found.get("max_model_len", context)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            if len(words) >= 2:  # the longest do not fit a small context
                break
            return Tokenizing(context=await _context(client, base_url, served_name))
    slope, intercept = np.polyfit(words, tokens, 1)
    if not slope > 0:
        return Tokenizing(context=context)
    return Tokenizing(
        float(slope), max(0.0, float(intercept)), known=True, context=int(context) if context else None
    )


async def _context(client: httpx.AsyncClient, base_url: str, served_name: str) -> int | None:
    """``max_model_len`` as ``/v1/models`` tells it; None if it does not."""
    try:
        answer = await client.get(f"{root_url(base_url)}/v1/models")
        answer.raise_for_status()
        for model in answer.json()["data"]:
            if model.get("id") == served_name and model.get("max_model_len"):
                return int(model["max_model_len"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


async def speaks_vllm(client: httpx.AsyncClient, base_url: str) -> bool:
    """Whether the server has vLLM's ``/version``: it then takes vLLM's own request keys."""
    try:
        answer = await client.get(f"{root_url(base_url)}/version")
        return answer.status_code == 200 and "version" in answer.json()
    except (httpx.HTTPError, ValueError, TypeError):
        return False


class Prompts:
    """An endless, seeded source of requests of one workload."""

    def __init__(
        self,
        workload: Workload,
        *,
        served_name: str,
        seed: int,
        tokenizing: Tokenizing | None = None,
        vllm: bool = True,
    ) -> None:
        """``vllm``: the server understands ``ignore_eos`` and ``continuous_usage_stats``."""
        clash = sorted(OURS & set(workload.extra_body))
        if clash:
            raise ConfigError(f"workload {workload.name}: extra_body must not set {clash}")
        self.workload = workload
        self.tokenizing = tokenizing or Tokenizing()
        self.shortened = 0
        """Requests whose lengths were cut to fit the model's context."""
        self._vllm = vllm
        self._name = served_name
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._built = 0
        self._ahead: deque[Prepared] = deque()
        self._stock = 0
        """How many are kept ahead."""
        self._lengths: deque[tuple[int, int]] = deque()
        self._lines: list[dict[str, Any]] | None = None
        if workload.replay:
            self._lines = read_requests(Path(workload.replay), workload.endpoint)
            self._order = self._rng.permutation(len(self._lines))
        self._prefix = ""
        if workload.shared_prefix_tokens:
            count = round(workload.shared_prefix_tokens / self.tokenizing.tokens_per_word)
            self._prefix = _words(np.random.default_rng(1), max(1, count)) + " "

    def build_ahead(self, count: int) -> None:
        """Build up to ``count`` requests now, so that the loop need not while it measures."""
        size = 0
        while len(self._ahead) < count and size < AHEAD_BYTES:
            prepared = self._build()
            size += len(prepared.body)
            self._ahead.append(prepared)
        self._stock = len(self._ahead)

    def next(self) -> Prepared:
        """The next request."""
        return self._ahead.popleft() if self._ahead else self._build()

    def restock(self) -> None:
        """Build one request, if fewer are there than were built ahead."""
        if len(self._ahead) < self._stock:
            self._ahead.append(self._build())

    def notes(self, sent: int) -> list[str]:
        """What a reader should know about the requests sent."""
        notes = []
        name = self.workload.name
        if self._lines is not None and sent > len(self._lines):
            notes.append(
                f"{name}: {sent} requests sent from a file of {len(self._lines)}: prompts repeat, the prefix "
                "cache may help"
            )
        if self._lines is None and not self.tokenizing.known:
            notes.append(
                f"{name}: the server has no /tokenize; prompt lengths assume "
                f"{self.tokenizing.tokens_per_word:g} tokens a word"
            )
        if self.shortened:
            notes.append(
                f"{name}: {self.shortened} of {self._built} requests were shortened to fit the model's "
                f"context of {self.tokenizing.context} tokens"
            )
        return notes

    def _build(self) -> Prepared:
        prompt_tokens, max_tokens = self._next_lengths()
        asked_prompt: int | None
        body: dict[str, Any] = {"model": self._name}
        if self._lines is None:
            prefix = self.workload.shared_prefix_tokens
            fit = self._fitted(prompt_tokens, max_tokens, prefix)
            if fit != (prompt_tokens, max_tokens):
                self.shortened += 1
                prompt_tokens, max_tokens = fit
            words = (prompt_tokens - self.tokenizing.overhead) / self.tokenizing.tokens_per_word
            text = self._prefix + _tagged(self._rng, max(0, round(words)))
            if self.workload.endpoint == "chat":
                body["messages"] = [{"role": "user", "content": text}]
            else:
                body["prompt"] = text
            asked_prompt = prefix + prompt_tokens
        else:
            line = self._lines[self._order[self._built % len(self._lines)]]
            body |= line
            body["model"] = self._name
            own = next((line[key] for key in ("max_completion_tokens", "max_tokens") if key in line), None)
            asked_prompt = None
            if own is not None:
                return self._finished(body, asked_prompt, own)
        body["max_tokens"] = max_tokens
        if self.workload.ignore_eos and self._vllm:
            body["ignore_eos"] = True
        return self._finished(body, asked_prompt, max_tokens)

    def _finished(self, body: dict[str, Any], asked_prompt: int | None, max_tokens: int | None) -> Prepared:
        body |= self.workload.extra_body
        stream = self.workload.stream
        body["stream"] = stream
        body.pop("stream_options", None)
        if stream:
            body["stream_options"] = {"include_usage": True}
            if self._vllm:
                body["stream_options"]["continuous_usage_stats"] = True
        self._built += 1
        return Prepared(
            request_id=f"{self._seed:08x}-{self._built:06d}",
            body=json.dumps(body, separators=(",", ":")).encode(),
            stream=stream,
            asked_prompt_tokens=asked_prompt,
            asked_max_tokens=max_tokens,
        )

    def _fitted(self, prompt_tokens: int, max_tokens: int, prefix: int) -> tuple[int, int]:
        """Both lengths cut so that prompt and answer fit the context; the answer gives way last."""
        context = self.tokenizing.context
        if context is None:
            return prompt_tokens, max_tokens
        room = context - prefix - CONTEXT_MARGIN
        if prompt_tokens + max_tokens <= room:
            return prompt_tokens, max_tokens
        least_prompt = int(self.tokenizing.overhead) + 1
        max_tokens = max(1, min(max_tokens, room - least_prompt))
        return max(1, min(prompt_tokens, room - max_tokens)), max_tokens

    def _next_lengths(self) -> tuple[int, int]:
        if not self._lengths:
            prompts = sample_lengths(self._rng, self.workload.prompt_tokens, 512)
            outputs = sample_lengths(self._rng, self.workload.output_tokens, 512)
            self._lengths.extend(zip(prompts.tolist(), outputs.tolist(), strict=True))
        return self._lengths.popleft()


def sample_lengths(rng: np.random.Generator, lengths: Lengths, count: int) -> np.ndarray:
    """``count`` token counts, log-normal with the given median and sigma, rounded and clipped."""
    drawn = lengths.median * np.exp(lengths.sigma * rng.standard_normal(count))
    return np.clip(np.rint(drawn), lengths.at_least, lengths.at_most).astype(np.int64)


def length_note(name: str, asked: Sequence[int | None], used: Sequence[int | None]) -> str | None:
    """A sentence if prompts were not as long as asked: median of used over asked off by more than 5 %.

    ``asked`` and ``used`` (the server's ``usage.prompt_tokens``) are parallel; unknown is None.
    """
    ratios = [have / want for want, have in zip(asked, used, strict=True) if want and have]
    if not ratios:
        return None
    off = statistics.median(ratios) - 1
    if abs(off) <= LENGTH_TOLERANCE:
        return None
    return (
        f"{name}: prompts were {abs(off):.1%} {'longer' if off > 0 else 'shorter'} than asked (median of the "
        f"server's usage over the nominal length, n={len(ratios)}); latencies go with the measured length"
    )


def read_requests(path: Path, endpoint: str) -> list[dict[str, Any]]:
    """The request bodies of a JSONL file; DataError names file, line and what was expected."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            found.append(_request_of(line, f"{path}: line {number}", endpoint))
    if not found:
        raise DataError(f"{path}: expected one JSON request a line, found no line")
    return found


def _request_of(line: bytes, where: str, endpoint: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(data).__name__}")
    body = data.get("body", data)
    if not isinstance(body, dict):
        raise DataError(f"{where}: body: expected a JSON object, found {type(body).__name__}")
    if endpoint == "chat":
        messages = body.get("messages")
        good = isinstance(messages, list) and messages and all(_is_message(item) for item in messages)
        if not good:
            raise DataError(
                f"{where}: messages: expected a non-empty list of objects with a role, "
                f"found {_short(messages)}"
            )
    else:
        prompt = body.get("prompt")
        if not (isinstance(prompt, str | list) and prompt):
            raise DataError(
                f"{where}: prompt: expected a non-empty text or list of tokens, found {_short(prompt)}"
            )
    for key in ("max_tokens", "max_completion_tokens"):
        value = body.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{where}: {key}: expected a whole number of at least 1, found {_short(value)}")
    return body


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_WORDS = np.array(COMMON_WORDS, dtype=object)


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(_WORDS[rng.integers(0, len(_WORDS), count)].tolist())


def _tagged(rng: np.random.Generator, count: int) -> str:
    """A tag that no other prompt has, then ``count`` words."""
    tag = f"{int(rng.integers(0, 1 << 63)):016x}"
    return f"{tag} {_words(rng, count)}" if count else tag
