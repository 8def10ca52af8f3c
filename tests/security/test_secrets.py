"""No secret in logs, errors, rows, state files, reports or process lists, whatever a server says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from include.capacity import servers
from include.capacity.config import DEFAULT_FLEET, ProcessServer, parse_fleet
from include.capacity.errors import ConfigError, ServerError
from include.capacity.load.request import Target
from include.capacity.redact import redact_text
from include.capacity.servers.ready import wait_until_ready

PROJECT = Path(__file__).parents[2]
KEY = "correct-horse-battery"


class Parrot(BaseHTTPRequestHandler):
    """Repeats the key it was given in every answer, as some gateways do when they refuse it."""

    refuse = "/nothing"

    def _answer(self) -> None:
        said = self.headers.get("Authorization", "")
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        refused = self.path == self.refuse
        body = {"error": {"message": f"Incorrect key: {said}"}} if refused else {"data": [{"id": "m"}]}
        if self.path.endswith("completions") and not refused:
            body = {"choices": [{"finish_reason": "stop"}]}
        data = json.dumps(body).encode()
        self.send_response(401 if refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Starts it: ``parrot("/v1/models")`` refuses the key there, and gives the URL."""
    running = []

    def start(refuse: str) -> str:
        monkeypatch.setattr(Parrot, "refuse", refuse)
        server = ThreadingHTTPServer(("127.0.0.1", 0), Parrot)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions"])
def test_a_key_that_a_server_repeats_is_in_no_error_nor_in_its_traceback(
    parrot: Callable[[str], str], path: str
) -> None:
    with pytest.raises(ServerError, match="Incorrect key: Bearer \\*\\*\\*") as caught:
        wait_until_ready(parrot(path), "m", api_key=KEY, timeout_s=20)
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_a_whole_sweep_with_a_key_leaves_it_nowhere(parrot: Callable[[str], str], tmp_path: Path) -> None:
    """The command line, its process list entry, its log and all its files; the server refuses under load."""
    url = parrot("/nothing")
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "include.capacity", "sweep", "--url", url, "--model", "m"),
            *("--class", "interactive", "--concurrency", "1", "--out", str(tmp_path / "out")),
            *("--api-key-env", "TEST_KEY"),
        ],
        cwd=PROJECT,
        env={**os.environ, "TEST_KEY": KEY, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert KEY not in " ".join(psutil.Process(child.pid).cmdline())
    while not (tmp_path / "out" / "server").exists():  # ready: it answered a completion
        assert child.poll() is None
    Parrot.refuse = "/v1/chat/completions"
    said, _ = child.communicate()
    assert child.returncode == 3
    assert "Incorrect key: Bearer ***" in said
    assert KEY not in said
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_the_key_is_not_shown_where_its_holder_is() -> None:
    assert KEY not in repr(Target("http://h", "m", api_key=KEY))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pass@host/x", "http://***@host/x"),
        (
            "GET https://s3/b/k?X-Amz-Credential=AKIA/2&X-Amz-Signature=abc&x=1 failed",
            "GET https://s3/b/k?X-Amz-Credential=***&X-Amz-Signature=***&x=1 failed",
        ),
        (
            "https://s3/b?AWSAccessKeyId=A1&Signature=s%2F1&Expires=5",
            "https://s3/b?AWSAccessKeyId=***&Signature=***&Expires=5",
        ),
        ("https://h/v1?api_key=abc", "https://h/v1?api_key=***"),
        ("key sk-abcdefgh1234 was refused", "key *** was refused"),
        ("max_tokens=5, tokenizer x", "max_tokens=5, tokenizer x"),
        ("serve --api-key hunter2 --port 1", "serve --api-key *** --port 1"),
        ("--hf_token=hunter2", "--hf_token=***"),
        ("{'api_key': 'hunter2', 'n': 1}", "{'api_key': '***', 'n': 1}"),
        ('{"client_secret":"hunter2"}', '{"client_secret":"***"}'),
        ("args: {'api_key': ['hunter2'], 'port': 1}", "args: {'api_key': ['***'], 'port': 1}"),
        ("HF_TOKEN=hunter2 vllm serve", "HF_TOKEN=*** vllm serve"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        (
            "a bearer token is needed; api_key: Field required",
            "a bearer token is needed; api_key: Field required",
        ),
        ('{"pad_token": "<pad>"} --ssl-keyfile=/k', '{"pad_token": "<pad>"} --ssl-keyfile=/k'),
    ],
)
def test_what_stands_where_secrets_stand_is_masked(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    ("entry", "secret"),
    [
        ('{kind: endpoint, url: "http://user:hunter2@h"}', "hunter2"),
        ('{kind: endpoint, url: "https://h/v1?sig=hunter2"}', "hunter2"),
        ('{kind: endpoint, url: "http://h", metrics_url: "http://user:hunter2@h/m"}', "hunter2"),
        ('{kind: endpoint, url: "http://h", api_key_env: "my-hunter2-key"}', "hunter2"),
        ('{kind: endpoint, url: "http://h", api_key: hunter2}', "hunter2"),
        ('{kind: endpoint, url: "http://h", api_key_env: sk-hunter2hunter2}', "hunter2"),
        ("{kind: docker, image: vllm, pass_env: [HF_TOKEN=hunter2]}", "hunter2"),
        (
            "{kind: kubernetes, namespace: n, image: vllm, secret_env: {HF=hunter2: {name: a, key: b}}}",
            "hunter2",
        ),
        ("{kind: kubernetes, namespace: n, image: vllm, secret_env: {DB: hunter2}}", "hunter2"),
        ("{kind: kubernetes, namespace: n, image: vllm, env: {HF_TOKEN: hunter2}}", "hunter2"),
        ("{kind: docker, image: vllm, env: {AWS_SECRET_ACCESS_KEY: hunter2}}", "hunter2"),
        ("{kind: process, env: {HF_TOKEN: hunter2}}", "hunter2"),
        ('{kind: process, env: {HTTPS_PROXY: "http://me:hunter2@proxy"}}', "hunter2"),
        ("{kind: process, env: [HF_TOKEN=hunter2]}", "hunter2"),
        ("{kind: process, env: [{HF_TOKEN: hunter2}]}", "hunter2"),
        ("{kind: process, command: vllm serve --api-key hunter2}", "hunter2"),
    ],
)
def test_a_secret_written_into_the_fleet_file_is_refused_and_not_repeated(entry: str, secret: str) -> None:
    text = DEFAULT_FLEET.read_text().replace("{kind: simulator, profile: steady}", entry)
    assert secret in text
    with pytest.raises(ConfigError, match=r"models\.steady\.server\.") as caught:
        parse_fleet(text, "fleet.yaml")
    assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "body",
    ["{api_key: hunter2}", "{a: [{client_secret: hunter2}]}", '{h: {Authorization: "Bearer hunter2"}}'],
)
def test_a_secret_in_what_is_sent_is_refused_for_it_would_be_published(body: str) -> None:
    text = DEFAULT_FLEET.read_text().replace("extra_body: {}", f"extra_body: {body}")
    with pytest.raises(ConfigError, match=r"extra_body: .*: a secret; it would be published") as caught:
        parse_fleet(text, "fleet.yaml")
    assert "hunter2" not in str(caught.value)


def test_variables_that_only_sound_like_secrets_are_taken() -> None:
    env = {
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_TOKEN_PATH": "/run/token",
        "TOKENIZERS_PARALLELISM": "no way",
    }
    assert ProcessServer(kind="process", env=env).env == env


def test_a_secret_deep_in_a_notifiers_arguments_is_refused() -> None:
    entry = (
        "notify: [{notifier: a.B, on: [run_failed], "
        'arguments: {headers: [{Authorization: "Bearer hunter2"}]}}]'
    )
    text = DEFAULT_FLEET.read_text().replace("notify: []", entry)
    with pytest.raises(ConfigError, match=r"arguments\.headers\.Authorization: a secret") as caught:
        parse_fleet(text, "fleet.yaml")
    assert "hunter2" not in str(caught.value)


def test_credentials_in_a_bucket_url_are_refused_and_not_repeated() -> None:
    text = DEFAULT_FLEET.read_text().replace("s3://capacity/demo", "s3://AKIAEXAMPLE:hunter2@bucket/x")
    with pytest.raises(ConfigError, match=r"publish\.to") as caught:
        parse_fleet(text, "fleet.yaml")
    assert "hunter2" not in str(caught.value)


def test_state_files_name_the_variable_and_never_the_key(
    parrot: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    entry = f'{{kind: endpoint, url: "{parrot("/nothing")}", api_key_env: TEST_KEY}}'
    text = DEFAULT_FLEET.read_text().replace("{kind: simulator, profile: steady}", entry)
    model = parse_fleet(text.replace("sim/steady-8b", "m"), "fleet.yaml").models["steady"]
    handle = servers.start("steady", model, {"run_id": "r", "model": "steady"}, tmp_path / "a" / "b")
    written = Path(str(handle.state)).read_text()
    assert "TEST_KEY" in written
    assert KEY not in written + json.dumps(handle.to_json())
