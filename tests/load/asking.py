"""Send one request to a null server and return what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import uvloop

from include.capacity.load.request import Answer, Prepared, Sender, Target
from tests.nullserver import NullServer, Plan

T = TypeVar("T")

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def run(work: Coroutine[Any, Any, T], loop: str = "uvloop") -> T:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(work)


def prepared(*, stream: bool = True, request_id: str = "r-1", **body: Any) -> Prepared:
    return Prepared(request_id, json.dumps({"stream": stream, **body}).encode(), stream)


async def ask(
    url: str,
    *,
    stream: bool = True,
    endpoint: Literal["chat", "completions"] = "chat",
    deadline_s: float = 20.0,
    **body: Any,
) -> Answer:
    sender = Sender(Target(url, "null"), endpoint, slots=1)
    try:
        return await sender.send(prepared(stream=stream, **body), 0, deadline_s)
    finally:
        await sender.aclose()


def answer_to(plan: Plan, *, loop: str = "uvloop", **how: Any) -> tuple[Answer, NullServer]:
    """One request to a server of its own; the server is stopped, its records remain."""
    with NullServer(plan) as server:
        answer = run(ask(server.url, **how), loop)
        server.wait_for(lambda: all(record.ended_at is not None for record in server.records))
    return answer, server
