"""Is the simulated server fast enough never to be the bottleneck? Prints what it needs, asserts nothing.

``python -m tests.simulator.bench_server [STREAMS]``: that many streams (default 1,000) of one token a chunk
against a server process of its own. Shown: chunks per wall second, the server's CPU time per chunk, and
the ratio that counts, how many chunks a second one core could serve against the 20,000 wanted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

WANTED_PER_S = 20_000
TURNS, TOKENS = 2, 100
PROFILE = {
    "model": "sim/bench",
    "time_scale": 20,
    "engine": {
        "max_num_seqs": 4096,
        "max_num_batched_tokens": 65_536,
        "kv_cache_tokens": 10_000_000,
        "iteration": {"base_s": 0.5},
    },
}


class Client(asyncio.Protocol):
    """Sends its request again and again, counts chunks, parses nothing."""

    def __init__(self, request: bytes, done: asyncio.Queue[int]) -> None:
        self._request, self._done = request, done
        self._left, self._chunks, self._tail = TURNS, 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]  # a TCP transport

    def data_received(self, data: bytes) -> None:
        self._chunks += data.count(b'"finish_reason"')
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._left -= 1
            self._tail = b""
            if self._left:
                self._transport.write(self._request)  # type: ignore[attr-defined]  # a TCP transport
            else:
                self._transport.close()
                self._done.put_nowait(self._chunks)


async def drive(port: int, streams: int) -> int:
    """Chunks received over all streams."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "word " * 200}],
            "max_tokens": TOKENS,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    loop, done = asyncio.get_running_loop(), asyncio.Queue[int]()
    for _ in range(streams):
        await loop.create_connection(lambda: Client(head.encode() + body, done), "127.0.0.1", port)
    return sum([await done.get() for _ in range(streams)])


def main(streams: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.yaml")
        file.write_text(json.dumps(PROFILE))
        server = subprocess.Popen(
            [sys.executable, "-m", "include.capacity.simulator", "--profile", str(file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split()[2].rsplit(":", 1)[1])
            before = sum(psutil.Process(server.pid).cpu_times()[:2])
            begun = time.perf_counter()
            chunks = uvloop.run(drive(port, streams))
            wall_s = time.perf_counter() - begun
            cpu_s = sum(psutil.Process(server.pid).cpu_times()[:2]) - before
        finally:
            server.terminate()
            server.wait()
    sys.stdout.write(
        f"{streams} streams: {chunks} chunks in {wall_s:.1f} s, {chunks / wall_s:,.0f} a second; server "
        f"{cpu_s / chunks * 1e6:.0f} us of CPU a chunk: one core serves {chunks / cpu_s / WANTED_PER_S:.1f} "
        f"times the {WANTED_PER_S:,} a second wanted\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
