"""The stages of getting ready, against a server in this process that answers as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from include.capacity.errors import ServerDied, ServerError
from include.capacity.servers.ready import wait_until_ready

DONE = {"choices": [{"finish_reason": "length", "message": {"content": "hello"}}]}


class Told:
    """Answers by path: the first of a list until it is the last one."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, Any]]] = {
            "/health": [(200, {})],
            "/v1/models": [(200, {"data": [{"id": "m"}]})],
            "/v1/chat/completions": [(200, DONE)],
            "/v1/completions": [(200, DONE)],
        }
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = ""


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.asked.append(self.path)
            told.keys.add(self.headers.get("Authorization"))
            answers = told.answers[self.path]
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            told.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


def test_health_then_the_name_then_a_completion_on_each_endpoint(told: Told) -> None:
    wait_until_ready(told.url, "m", endpoints=["completions", "chat"], api_key="k", timeout_s=30)
    assert told.asked == ["/health", "/v1/models", "/v1/chat/completions", "/v1/completions"]
    assert told.keys == {"Bearer k"}
    assert [body["model"] for body in told.bodies] == ["m", "m"]
    assert [body["max_tokens"] for body in told.bodies] == [4, 4]


def test_what_may_pass_is_waited_for(told: Told) -> None:
    told.answers["/health"] = [(503, "loading"), (404, "this gateway has no /health")]
    told.answers["/v1/models"] = [(502, b"<html>"), (200, b"not JSON"), *told.answers["/v1/models"]]
    told.answers["/v1/chat/completions"] = [(429, "busy"), (500, "cold"), (200, DONE)]
    wait_until_ready(told.url, "m", timeout_s=30)
    assert told.asked == ["/health"] * 2 + ["/v1/models"] * 3 + ["/v1/chat/completions"] * 3


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("/health", (503, "still loading"), 'waiting for /health; last seen: status 503, "still loading"'),
        ("/v1/models", (500, {}), "waiting for /v1/models; last seen: status 500"),
        ("/v1/chat/completions", (500, "cold"), "waiting for a completion at /v1/chat/completions; last"),
        ("/v1/chat/completions", (200, {"choices": []}), "last seen: not a completion"),
        (
            "/v1/chat/completions",
            (200, {"choices": [{"finish_reason": "abort"}]}),
            "last seen: the completion ended with 'abort'",
        ),
    ],
)
def test_the_stage_it_hangs_at_is_named(told: Told, path: str, answer: tuple[int, Any], says: str) -> None:
    told.answers[path] = [answer]
    with pytest.raises(ServerError, match=r"not ready after 2 s") as caught:
        wait_until_ready(told.url, "m", timeout_s=2)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("/v1/models", (401, "no"), "/v1/models refuses the API key: status 401"),
        (
            "/v1/models",
            (200, {"data": [{"id": "a"}, {"id": "b"}]}),
            "serves ['a', 'b'], and no model named 'm'",
        ),
        ("/v1/chat/completions", (400, "no chat template"), 'is refused: status 400, "no chat template"'),
        ("/v1/chat/completions", (404, {}), "the first completion is refused: status 404"),
    ],
)
def test_what_cannot_pass_is_not_waited_for(
    told: Told, path: str, answer: tuple[int, Any], says: str
) -> None:
    told.answers[path] = [answer]
    with pytest.raises(ServerError) as caught:
        wait_until_ready(told.url, "m", timeout_s=3600)
    assert says in str(caught.value)
    assert told.asked.count(path) == 1


def test_a_check_that_raises_ends_the_waiting(told: Told) -> None:
    told.answers["/health"] = [(503, "loading")]
    looks = iter([None, None, ServerDied("its process ended")])

    def check() -> None:
        if error := next(looks):
            raise error

    with pytest.raises(ServerDied, match="its process ended"):
        wait_until_ready(told.url, "m", timeout_s=3600, check=check)
    assert told.asked == ["/health"] * 3


def test_progress_is_told_while_it_waits(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("include.capacity.servers.ready.PROGRESS_EVERY_S", 0)
    told.answers["/health"] = [(503, "loading"), (200, {})]
    lines: list[tuple[str, str]] = []
    wait_until_ready(
        told.url, "m", timeout_s=30, progress=lambda stage, waited_s, seen: lines.append((stage, seen))
    )
    assert lines == [("/health", 'status 503, "loading"')]
