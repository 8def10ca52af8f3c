"""What measuring a request costs: our sender beside clients that do less, on a server of known times.

``python -m tests.benchmarks.bench_request [--in-flight 256] [--seconds 6] [--repeats 3]``

A closed loop of streams (64 tokens, one every 20 ms, starts spread over a residence time) against the null
server in a process of its own; each client runs in a process of its own, too, and the repeats interleave.
Printed are medians over the repeats, CPU per 1,000 chunks as a ratio to the bare client:

- ``floor``: an asyncio protocol that stamps each read and looks for [DONE]. Nobody can do less.
- ``bare``: asyncio streams, reading and stamping line by line, parsing each chunk with the json module.
- ``sender``: the product's :class:`~include.capacity.load.request.Sender`.

In flight and the share of the ideal rate are the server's count. The TTFT error is that of ``sender``'s
requests against the server's record of the same request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import uvloop

from include.capacity.load.request import Answer, Prepared, Sender, Target
from include.capacity.words import Outcome

TOKENS, ITL_S, TTFT_S = 64, 0.02, 0.02
RESIDENCE_S = TTFT_S + (TOKENS - 1) * ITL_S
PLAN = {"ttft_s": TTFT_S, "itl_s": ITL_S, "tokens": TOKENS}
BODY = json.dumps(
    {
        "model": "null",
        "stream": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": "x" * 2000}],
    }
).encode()
now = time.perf_counter


class Floor(asyncio.Protocol):
    """Stamps reads, looks for [DONE]."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.stamps.append(now())
        if b"[DONE]" in data and self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def request(self, message: bytes) -> int:
        self.stamps = []
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        await self.waiter
        return TOKENS


async def floor_slot(url: str, stop_at: float) -> int:
    where = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(Floor, where.hostname, where.port)
    chunks = 0
    while now() < stop_at:
        chunks += await client.request(message_to(url))
    return chunks


async def bare_slot(url: str, stop_at: float) -> int:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    chunks = 0
    while now() < stop_at:
        writer.write(message_to(url))
        stamps = []
        while line := await reader.readline():
            if line.startswith(b"data: "):
                at = now()
                if line.startswith(b"data: [DONE]"):
                    break
                for choice in json.loads(line[6:])["choices"]:
                    if choice["delta"].get("content"):
                        stamps.append(at)
        chunks += len(stamps)
    writer.close()
    return chunks


def message_to(url: str) -> bytes:
    host = f"Host: {urlsplit(url).netloc}\r\nContent-Length: {len(BODY)}"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{host}\r\n\r\n".encode() + BODY


async def drive(kind: str, url: str, in_flight: int, seconds: float, spread: bool) -> dict[str, Any]:
    """One client's run; the first residence time is not measured."""
    answers: list[tuple[str, Answer]] = []
    sender = Sender(Target(url, "null"), "chat", in_flight)
    start = now() + 0.5
    stop_at = start + RESIDENCE_S + seconds

    async def sender_slot(slot: int) -> int:
        count = 0
        while now() < stop_at:
            name = f"{slot}-{count}"
            answers.append((name, await sender.send(Prepared(name, BODY, True), slot, 60.0)))
            count += 1
        return count * TOKENS

    async def slot(i: int) -> int:
        if spread:
            await asyncio.sleep(start + RESIDENCE_S * i / in_flight - now())
        if kind == "sender":
            return await sender_slot(i)
        return await (floor_slot if kind == "floor" else bare_slot)(url, stop_at)

    if kind == "sender":
        await sender.connect()
    tasks = [asyncio.create_task(slot(i)) for i in range(in_flight)]
    await asyncio.sleep(start + RESIDENCE_S - now())
    before, cpu = state(url), time.process_time()
    await asyncio.sleep(seconds - 0.1)
    after, cpu = state(url), time.process_time() - cpu
    await asyncio.gather(*tasks)
    await sender.aclose()
    elapsed = after["now"] - before["now"]
    rate = (after["accepted"] - before["accepted"]) / elapsed
    result: dict[str, Any] = {
        "cpu_ms_per_1000_chunks": 1e6 * cpu / (rate * elapsed * TOKENS),
        "cpu_share": cpu / elapsed,
        "server_cpu_share": (after["cpu_s"] - before["cpu_s"]) / elapsed,
        "in_flight_mean": (after["busy_area"] - before["busy_area"]) / elapsed,
        "in_flight_peak": after["peak"],
        "share_of_ideal_rate": rate * RESIDENCE_S / in_flight,
    }
    if answers:
        assert all(answer.outcome is Outcome.COMPLETED for _, answer in answers), answers
        with urllib.request.urlopen(f"{url}/control/records") as response:
            # Script entry 0 is the head with the role chunk, 1 the first token.
            records = {record["request_id"].rpartition("-")[0]: record for record in json.load(response)}
        errors = sorted(
            1e3 * ((answer.first_token_at or 0) - (answer.wrote_at or 0) - TTFT_S)
            for name, answer in answers
            if name in records
        )
        receipt = sorted(
            1e3 * ((answer.first_token_at or 0) - records[name]["sent"][1])
            for name, answer in answers
            if name in records
        )
        result["ttft_error_ms_p50"], result["ttft_error_ms_p95"] = quantiles(errors)
        result["receipt_after_sending_ms_p50"], result["receipt_after_sending_ms_p95"] = quantiles(receipt)
    return result


def quantiles(values: list[float]) -> tuple[float, float]:
    return values[len(values) // 2], values[int(0.95 * len(values))]


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/control/state") as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--burst", action="store_true", help="start all at once")
    parser.add_argument("--client", nargs=2, metavar=("KIND", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        kind, url = given.client
        result = uvloop.run(drive(kind, url, given.in_flight, given.seconds, not given.burst))
        sys.stdout.write(json.dumps(result))
        return
    results: dict[str, list[dict[str, Any]]] = {"floor": [], "bare": [], "sender": []}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.nullserver", "--plan", json.dumps(PLAN)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        for _ in range(given.repeats):
            for kind, runs in results.items():
                urllib.request.urlopen(f"{url}/control/reset").close()
                command = [sys.executable, "-m", "tests.benchmarks.bench_request", "--client", kind, url]
                command += ["--in-flight", str(given.in_flight), "--seconds", str(given.seconds)]
                command += ["--burst"] if given.burst else []
                runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    finally:
        server.terminate()
        server.wait()
    bare = median(run["cpu_ms_per_1000_chunks"] for run in results["bare"])
    for kind, runs in results.items():
        medians = {key: median(run[key] for run in runs) for key in runs[0]}
        ratio = medians["cpu_ms_per_1000_chunks"] / bare
        sys.stdout.write(f"{kind:8} cpu x{ratio:.2f}  ")
        sys.stdout.write("  ".join(f"{key} {value:.3g}" for key, value in medians.items()) + "\n")


if __name__ == "__main__":
    main()
