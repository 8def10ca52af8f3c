"""When a server counts as ready.

Three stages in order, each asked again until it is passed or the time is up:

1. ``GET /health`` answers 200 (404: it has none, as some gateways; the next stage decides);
2. ``GET /v1/models`` lists the served name;
3. one real, short completion on every endpoint that will be loaded comes back finished.

An answer that waiting cannot change (the key is refused, another name is served, the completion is
called wrong) ends the waiting at once. The error names the stage and the last thing seen there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from include.capacity.errors import ServerDied, ServerError
from include.capacity.redact import redact_text
from include.capacity.servers.base import Handle

log = logging.getLogger(__name__)

POLL_S = 0.2
PROGRESS_EVERY_S = 5.0
ANSWER_WITHIN_S = 10.0
COMPLETION_WITHIN_S = 60.0
"""For one try; the first completion of a cold server may take several."""
COMPLETION_TOKENS = 4
PROBE_WITHIN_S = 5.0
NOTHING = "nothing yet"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

Progress = Callable[[str, float, str], None]
"""Told every few seconds: stage, seconds waited, the last thing seen."""


def wait_until_ready(
    url: str,
    served_name: str,
    *,
    api_key: str | None = None,
    endpoints: Iterable[str] = ("chat",),
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> None:
    """Return once the server at ``url`` (without ``/v1``) is ready.

    ``check`` is called between questions and raises if waiting has become pointless (the process
    died). Errors: ServerError after ``timeout_s``, or at once for an answer that will not change. What the
    server said is told without the key, which it may have repeated.
    """
    began = told = time.monotonic()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        for stage, method, path, body, judge in _stages(served_name, endpoints):
            within_s = COMPLETION_WITHIN_S if body else ANSWER_WITHIN_S
            seen: str | None = NOTHING
            while True:
                left_s = began + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise ServerError(
                        f"not ready after {timeout_s:g} s: waiting for {stage}; last seen: {seen}"
                    )
                try:
                    seen = judge(client.request(method, path, json=body, timeout=min(within_s, left_s)))
                    seen = None if seen is None else redact_text(seen, [api_key])
                except ServerError as error:
                    raise ServerError(redact_text(str(error), [api_key])) from None
                except httpx.TimeoutException:
                    if left_s >= within_s or seen == NOTHING:  # else it was we who cut it short
                        seen = "no answer in time"
                except httpx.HTTPError as error:
                    seen = str(error) or type(error).__name__
                check()
                if seen is None:
                    break
                now = time.monotonic()
                if progress and now - told >= PROGRESS_EVERY_S:
                    told = now
                    progress(stage, now - began, seen)
                time.sleep(POLL_S)


def wait_or_tell(
    handle: Handle,
    *,
    endpoints: Iterable[str],
    api_key: str | None,
    timeout_s: float,
    check: Callable[[], None],
    last_lines: Callable[[int], str],
    where: str,
) -> None:
    """Wait for a server that we have started; its log's end is told on the way and in errors.

    See :func:`wait_until_ready`. ``last_lines`` gives that many last lines of the log, secrets masked, and
    ``where`` names the log.
    """

    def progress(stage: str, waited_s: float, seen: str) -> None:
        log.info(
            "%s: starting, %.0f s of at most %.0f s, waiting for %s (%s); log: %s",
            *(handle.model, waited_s, timeout_s, stage, seen, last_lines(1)),
        )

    try:
        wait_until_ready(
            handle.url,
            handle.served_name,
            api_key=api_key,
            endpoints=endpoints,
            timeout_s=timeout_s,
            check=check,
            progress=progress,
        )
    except ServerError as error:
        about = str(error) if isinstance(error, ServerDied) else f"{handle.model}: {error}"
        said = last_lines(40) or "(nothing)"
        raise type(error)(f"{about}\n--- last lines of {where} ---\n{said}") from error


def why_silent(url: str, tries: int = 3) -> str | None:
    """Why a server that should be up does not answer ``/health``; None if it answers anything below 500.

    A process can live on and hang; a busy server is given three times five seconds.
    """
    seen = ""
    with httpx.Client(base_url=url, trust_env=False, timeout=PROBE_WITHIN_S) as client:
        for attempt in range(tries):
            if attempt:
                time.sleep(POLL_S)
            try:
                answer = client.get("/health")
            except httpx.TimeoutException:
                seen = "no answer in time"
            except httpx.HTTPError as error:
                seen = str(error) or type(error).__name__
            else:
                if answer.status_code < 500:
                    return None
                seen = _said(answer)
    return f"/health, asked {tries} times: {seen}"


Judge = Callable[[httpx.Response], str | None]
"""What speaks against an answer; ``None``: nothing. Raises if waiting cannot help."""


def _stages(
    served_name: str, endpoints: Iterable[str]
) -> Iterator[tuple[str, str, str, dict[str, Any] | None, Judge]]:
    yield "/health", "GET", "/health", None, _healthy
    yield "/v1/models", "GET", "/v1/models", None, lambda answer: _listed(answer, served_name)
    for endpoint in sorted(set(endpoints)):
        path = PATHS[endpoint]
        yield f"a completion at {path}", "POST", path, _completion(endpoint, served_name), _completed


def _healthy(answer: httpx.Response) -> str | None:
    if answer.status_code in (401, 403):
        raise ServerError(f"/health refuses the API key: {_said(answer)}")
    return None if answer.status_code in (200, 204, 404, 405) else _said(answer)


def _listed(answer: httpx.Response, served_name: str) -> str | None:
    if answer.status_code in (401, 403):
        raise ServerError(f"/v1/models refuses the API key: {_said(answer)}")
    if answer.status_code != 200:
        return _said(answer)
    try:
        names = [str(item["id"]) for item in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return f"not a list of models: {_said(answer)}"
    if served_name not in names:
        raise ServerError(
            f"serves {names}, and no model named {served_name!r} (served_name in the fleet file)"
        )
    return None


def _completion(endpoint: str, served_name: str) -> dict[str, Any]:
    asked = (
        {"messages": [{"role": "user", "content": "Say hello."}]}
        if endpoint == "chat"
        else {"prompt": "Say hello."}
    )
    return {"model": served_name, **asked, "max_tokens": COMPLETION_TOKENS, "stream": False}


def _completed(answer: httpx.Response) -> str | None:
    status = answer.status_code
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise ServerError(f"the first completion is refused: {_said(answer)}")
    if status != 200:
        return _said(answer)
    try:
        finished = answer.json()["choices"][0]["finish_reason"]
    except (ValueError, KeyError, TypeError, IndexError):
        return f"not a completion: {_said(answer)}"
    return None if finished in ("stop", "length") else f"the completion ended with {finished!r}"


def _said(answer: httpx.Response) -> str:
    text = " ".join(answer.text.split())
    return f"status {answer.status_code}" + (f", {text[:300]}" if text else "")
