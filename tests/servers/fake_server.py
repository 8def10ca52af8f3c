"""A small OpenAI-like server for the tests of ``servers``: a real process, real HTTP, many bad habits.

``--health``, ``--completion``: status to answer with. ``--habit``: what it does wrong.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--served", default="fake/model")
parser.add_argument("--health", type=int, default=200)
parser.add_argument("--completion", type=int, default=200)
parser.add_argument("--habit", default="none")
parser.add_argument("--note", default="", help="where children write their pids")
options = parser.parse_args()

SLEEP = "import time, sys; open(sys.argv[1], 'w').write(str(__import__('os').getpid())); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        return bool(key) and self.headers.get("Authorization") != f"Bearer {key}"

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(options.health, {"said": "still loading"} if options.health != 200 else {})
        elif self.refused():
            self.answer(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": options.served}]})
        elif self.path == "/version":
            self.answer(200, {"version": "9.9.9"})
        else:
            self.answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            self.answer(401, {"error": "Unauthorized"})
        elif options.completion != 200:
            self.answer(options.completion, {"error": "no completion today"})
        else:
            assert asked["model"] == options.served
            self.answer(200, {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 4}})

    def log_message(self, format: str, *args: object) -> None:
        say(f"asked {self.path}")


if options.habit == "dies":
    say("CUDA error: out of memory, says the fake")
    sys.exit(7)
if options.habit == "tells its key":
    say(f"my key is {os.environ.get('VLLM_API_KEY')}")
if options.habit == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.habit == "family":
    note = Path(options.note)
    # In its session; in a session of its own; one that hides its environment and ignores SIGTERM.
    subprocess.Popen([sys.executable, "-c", SLEEP, str(note / "child")])
    subprocess.Popen([sys.executable, "-c", SLEEP, str(note / "stray")], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", STUBBORN, str(note / "nameless")], env={})
    while not all(
        (note / name).exists() and (note / name).read_text() for name in ("child", "stray", "nameless")
    ):
        time.sleep(0.01)
ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
