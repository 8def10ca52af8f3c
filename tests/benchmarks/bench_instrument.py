"""What our instrument costs and how well it measures, beside clients that do less and tools that people use.

``python -m tests.benchmarks.bench_instrument [--in-flight 64,256,1000] [--seconds 20] [--repeats 3]
[--peers]``

Closed loops of streams (64 tokens, the first after 20 ms and one every 20 ms) against the null server in a
process of its own. Every client is a process of its own, too, and the repeats interleave. *spread*: the
starts are spread, so that the answers stay desynchronised. *burst*: all start at once, so that the answers
come together every 20 ms for ever, which is the worst a server could do. Clients:

- ``instrument``: one whole measured step (rows, health, metrics, evidence, quality checks, files), as a sweep
  does it;
- ``sender``: our :class:`~include.capacity.load.request.Sender` alone, in a loop of three lines;
- ``bare``: asyncio streams, stamping each piece, counting tokens in it and looking for [DONE];
- ``floor``: an asyncio protocol that stamps each read and looks for [DONE]. Nobody can do less;
- ``aiohttp``: its client session, line by line, parsing each chunk with the json module;
- with ``--peers``, those of :mod:`tests.benchmarks.peers` that are installed.

**Measured from outside**, for all alike, over a window that begins a residence time after the last slot's
start: CPU of the client's processes; in flight, chunks and refills by the server's own record of every
request. ``cpu`` is per 1,000 chunks that the server sent; ``whole`` also counts what the client does from
then until it exits (rows to a table, evidence, checks, files), and is the larger, the shorter the window.
``of ideal`` is chunks sent over those that N streams without any gap would get. ``refill`` is the time from
the last byte of an answer to the next request on the same connection. The TTFT error is, request by request,
the client's time to first token less the server's own (from having read the request to having written it):
``write`` where it counts from the write of the request, ``wish`` from when its slot fell free to send it.
``memory`` is the resident size of the client's processes.

Printed are medians over the repeats, CPU also as a ratio to ``bare``; then each target with PASS or MISS.
Exit status 1 if one is missed: the machine should be doing nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import uvloop

from tests.benchmarks import peers

TOKENS, ITL_S, TTFT_S = 64, 0.02, 0.02
RESIDENCE_S = TTFT_S + (TOKENS - 1) * ITL_S
PLAN: dict[str, Any] = {"ttft_s": TTFT_S, "itl_s": ITL_S, "tokens": TOKENS}
SLOW = 5
"""With 2,000 in flight the tokens come so many times as slowly: two cores cannot pass on 100,000 a second."""
BODY = json.dumps(
    {
        "model": "null",
        "stream": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": "x" * 2000}],
    }
).encode()
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}
OWN = ("floor", "bare", "sender", "instrument", "aiohttp")
START_S = 120.0
"""Longest wait for a client's first requests: some tools take a minute to load."""
FILL_S = 15.0
"""Longest wait from then on for all slots to have begun; some tools never fill them."""
PEER_END_S = 40.0
"""Longest wait for a tool to end and to tell its times."""
now = time.perf_counter

Log = list[tuple[str, float, float]]
"""A client's own record: request name, TTFT from the write, TTFT from the wish, in seconds."""


# -- the clients, each in a process of its own


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

    async def request(self, message: bytes) -> None:
        self.stamps = []
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        await self.waiter


async def floor_slot(url: str, slot: int, stop_at: float, log: Log) -> None:
    where = urlsplit(url)
    host, port = str(where.hostname), where.port or 80
    _, client = await asyncio.get_running_loop().create_connection(Floor, host, port)
    count = 0
    while now() < stop_at:
        await client.request(message_to(url, f"{slot}-{count}"))
        count += 1


async def bare_slot(url: str, slot: int, stop_at: float, log: Log) -> None:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    count = 0
    while now() < stop_at:
        name = f"{slot}-{count}"
        count += 1
        message = message_to(url, name)
        at = now()
        writer.write(message)
        stamps: list[float] = []
        while piece := await reader.read(65536):
            stamps += [now()] * piece.count(b'"content":"x')
            if b"data: [DONE]" in piece:
                break
        log.append((name, stamps[0] - at, stamps[0] - at))
    writer.close()


def message_to(url: str, name: str) -> bytes:
    headers = {"Host": urlsplit(url).netloc, "Content-Length": len(BODY), "X-Request-Id": name, **HEADERS}
    head = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + BODY


async def drive(kind: str, url: str, n: int, seconds: float, spread: bool) -> Log:
    """``n`` slots of a simple client until ``seconds`` after the last has begun."""
    log: Log = []
    async with client_of(kind, url, n) as slot_of:
        start = now() + 0.5
        begun = start + (RESIDENCE_S * (n - 1) / n if spread else 0.0)

        async def slot(i: int) -> None:
            if spread:
                await asyncio.sleep(start + RESIDENCE_S * i / n - now())
            await slot_of(url, i, begun + seconds, log)

        await asyncio.gather(*map(slot, range(n)))
    return log


class client_of:
    """The slot function of a simple client."""

    def __init__(self, kind: str, url: str, n: int) -> None:
        self.kind, self.url, self.n = kind, url, n
        self.close: Any = None

    async def __aenter__(self) -> Callable[[str, int, float, Log], Any]:
        if self.kind == "floor":
            return floor_slot
        if self.kind == "bare":
            return bare_slot
        if self.kind == "sender":
            return await self._sender()
        return self._aiohttp()

    async def __aexit__(self, *error: object) -> None:
        if self.close is not None:
            await self.close()

    async def _sender(self) -> Callable[[str, int, float, Log], Any]:
        from include.capacity.load.request import Prepared, Sender, Target

        sender = Sender(Target(self.url, "null"), "chat", self.n)
        self.close = sender.aclose
        await sender.connect()

        async def slot_of(url: str, slot: int, stop_at: float, log: Log) -> None:
            count = 0
            while now() < stop_at:
                name = f"{slot}-{count}"
                wished = now()
                answer = await sender.send(Prepared(name, BODY, True), slot, 60.0)
                assert answer.wrote_at is not None
                assert answer.first_token_at is not None, answer
                log.append((name, answer.first_token_at - answer.wrote_at, answer.first_token_at - wished))
                count += 1

        return slot_of

    def _aiohttp(self) -> Callable[[str, int, float, Log], Any]:
        import aiohttp

        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.close = session.close

        async def slot_of(url: str, slot: int, stop_at: float, log: Log) -> None:
            count = 0
            while now() < stop_at:
                name = f"{slot}-{count}"
                count += 1
                at = now()
                stamps = []
                async with session.post(
                    f"{url}/v1/chat/completions", data=BODY, headers={**HEADERS, "X-Request-Id": name}
                ) as response:
                    async for line in response.content:
                        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                            received = now()
                            for choice in json.loads(line[6:])["choices"]:
                                if choice["delta"].get("content"):
                                    stamps.append(received)
                log.append((name, stamps[0] - at, stamps[0] - at))

        return slot_of


def instrument(url: str, n: int, seconds: float, spread: bool) -> dict[str, Any]:
    """One step of a sweep, from the spec to the evidence on disk."""
    from include.capacity.config import Accelerator, EndpointServer, Model, ServiceClass, StepBounds, Workload
    from include.capacity.flow import sweep as stages
    from include.capacity.load import loop
    from include.capacity.load.request import Target
    from include.capacity.results.spec import Load, StepSpec
    from include.capacity.results.store import FolderStore
    from include.capacity.results.sweepdir import SweepDir
    from include.capacity.words import Phase

    if not spread:
        loop.RAMP_S = 1e-6
    service_class = ServiceClass(
        rule="batch",
        workload=Workload(
            name="benchmark",
            prompt_tokens={"median": 400, "sigma": 0.6},
            output_tokens={"median": TOKENS, "sigma": 0.0},
        ),
        deadline_s=60.0,
        completion_floor=0.95,
        ladder=[n],
    )
    model = Model(
        served_name="null",
        server=EndpointServer(kind="endpoint", url=url),
        accelerator="none",
        classes={"interactive": service_class},
    )
    load = Load(service_class="interactive", concurrency=n, requests=10**6, max_requests=10**6)
    spec = StepSpec(
        model="null", phase=Phase.PROVE, loads=(load,), min_window_s=seconds, cap_s=seconds, early_stop=False
    )
    with tempfile.TemporaryDirectory() as folder:
        sweep = SweepDir(FolderStore(Path(folder)))
        stages.open_sweep(
            sweep,
            run_id="benchmark",
            model_key="null",
            model=model,
            accelerator=Accelerator(kind="none"),
            bounds=StepBounds(),
        )
        stages.measure(sweep, spec, Target(url, "null"))
        (facts,) = sweep.all_facts().values()
        rows = sweep.requests()
    answered = rows[rows["outcome"] == "completed"]
    names, ttft, lag = answered["request_id"], answered["ttft_s"], answered["send_lag_s"]
    return {
        "log": list(zip(names, ttft, ttft + lag, strict=True)),
        "inflight_mean": facts.loads[0].inflight_mean,
        "inflight_peak": facts.loads[0].inflight_peak,
        "refill_p50_ms": 1e3 * (facts.client["refill_p50_s"] or math.nan),
        "workers": facts.client["client_workers"],
        "invalid": facts.invalid,
        "outcomes": rows["outcome"].value_counts().to_dict(),
    }


def be_client(kind: str, url: str, n: int, seconds: float, spread: bool) -> None:
    if kind == "instrument":
        result = instrument(url, n, seconds, spread)
    else:
        result = {"log": uvloop.run(drive(kind, url, n, seconds, spread))}
    sys.stdout.write(json.dumps(result))


# -- measuring them from outside


@dataclass
class Server:
    """The null server in a process of its own."""

    url: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, plan: dict[str, Any]) -> Server:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.nullserver", "--plan", json.dumps(plan)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return cls(process.stdout.readline().strip(), process)

    def ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/control/{what}") as response:
            return json.load(response)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants so far, the ended ones included."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def rss_mb(pid: int) -> float:
    total = 0
    for process in tree(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


def run_client(
    server: Server, kind: str, n: int, seconds: float, spread: bool, slow: int = 1
) -> dict[str, Any]:
    """One client's run, measured; see the module for what the numbers are."""
    server.ask("reset")
    residence_s, patience_s = slow * RESIDENCE_S, START_S
    # The window begins a residence time after the last start, and a little is kept back at its end.
    lasts_s = residence_s + seconds + 1.5
    if kind in OWN:
        command = [sys.executable, "-m", "tests.benchmarks.bench_instrument", "--client", kind, server.url]
        command += ["--in-flight", str(n), "--seconds", str(lasts_s), *([] if spread else ["--burst"])]
        environment = dict(os.environ)
    else:
        ramp_s = residence_s if spread else 0.0
        command, environment = peers.command(kind, server.url, n, lasts_s, ramp_s, TOKENS)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            fill(server, process, n, patience_s)
            time.sleep(residence_s)
            before, opened = cpu_s(process.pid), now()
            server_before = server.ask("state")["cpu_s"]
            time.sleep(seconds)
            after, closed = cpu_s(process.pid), now()
            server_cpu = server.ask("state")["cpu_s"] - server_before
            memory = rss_mb(process.pid)
            whole = math.nan
            if kind not in OWN:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PEER_END_S)
            else:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                whole = usage.ru_utime + usage.ru_stime
            errors.seek(0)
            if process.returncode:
                raise RuntimeError(f"{kind}: exit status {process.returncode}: {errors.read()[-2000:]}")
        finally:
            end(process)
        output.seek(0)
        told = json.load(output) if kind in OWN else {"log": peers.log(kind)}
    records = server.ask("records")
    found = by_the_server(records, opened, closed, n, slow)
    chunks_after = sum(sent >= opened for record in records for sent in record["sent"][1 : TOKENS + 1])
    found["peak"] = server.ask("state")["peak"]
    found["cpu_ms"] = 1e6 * (after - before) / found.pop("chunks")
    found["whole_ms"] = 1e6 * (whole - before) / chunks_after
    found["client_cpu"], found["server_cpu"] = (after - before) / (closed - opened), server_cpu / seconds
    found["memory_mb"] = memory
    found |= ttft_errors(told.pop("log"), records, kind, spread)
    found |= {f"own_{key}": value for key, value in told.items()}
    return found


def fill(server: Server, process: subprocess.Popen[Any], n: int, patience_s: float) -> None:
    """Wait until every slot has begun, or as many as ever will."""
    until = now() + patience_s
    begun = False
    while now() < until and process.poll() is None:
        state = server.ask("state")
        if state["peak"] >= n:
            return
        if state["accepted"] and not begun:
            begun, until = True, now() + FILL_S
        time.sleep(0.1)


def end(process: subprocess.Popen[Any]) -> None:
    """End a client and all it has started, most gently first."""
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        left = tree(process.pid)
        for one in left:
            try:
                stop(one)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(left, timeout=5.0)
        if not alive:
            break
    if process.returncode is None:
        process.wait()


def by_the_server(
    records: Sequence[dict[str, Any]], opened: float, closed: float, n: int, slow: int
) -> dict[str, Any]:
    """What the server's records say of ``[opened, closed]``."""
    begun = np.array([record["accepted_at"] for record in records])
    ended = np.array([record["ended_at"] or math.inf for record in records])
    inside = np.minimum(ended, closed) - np.maximum(begun, opened)
    # The script's first entry is the head with the role chunk; the last goes with the end of the message.
    sent = np.array([at for record in records for at in record["sent"][1 : TOKENS + 1]])
    chunks = float(((sent >= opened) & (sent < closed)).sum())
    refills = []
    last: dict[int, float] = {}
    for record in sorted(records, key=lambda record: record["accepted_at"]):
        freed = last.get(record["connection"])
        if freed is not None and opened <= record["accepted_at"] < closed:
            refills.append(record["accepted_at"] - freed)
        if record["ended_at"] is not None:
            last[record["connection"]] = record["ended_at"]
    return {
        "chunks": chunks,
        "mean_share": float(inside.clip(0).sum()) / (closed - opened) / n,
        "ideal_share": chunks / ((closed - opened) * n * TOKENS / (slow * RESIDENCE_S)),
        "refill_ms": 1e3 * median(refills) if refills else math.nan,
    }


def ttft_errors(
    log: list[Any], records: Sequence[dict[str, Any]], kind: str, spread: bool
) -> dict[str, float]:
    """p50 and p95 of the client's TTFT less the server's, in ms.

    Request by request where the client named its requests. A tool that keeps TTFTs without names is
    compared quantile by quantile, which can only make it look better.
    """
    theirs = {}
    for record in records:
        name = record["request_id"]
        if kind == "instrument":
            name = name.rpartition("-")[0]  # the sender's tag
        if len(record["sent"]) > 1:
            theirs[name] = record["sent"][1] - record["accepted_at"]
    result: dict[str, float] = {}
    named = [item for item in log if isinstance(item, list | tuple)]
    for at, what in ((1, "write"), (2, "wish")):
        if named:
            errors = [item[at] - theirs[item[0]] for item in named if item[0] in theirs]
            found = np.quantile(errors, [0.5, 0.95]) if errors else [math.nan, math.nan]
        elif log and what == "wish":
            found = np.quantile(log, [0.5, 0.95]) - np.quantile(list(theirs.values()), [0.5, 0.95])
        else:
            found = [math.nan, math.nan]
        result[f"{what}_p50_ms"], result[f"{what}_p95_ms"] = 1e3 * found[0], 1e3 * found[1]
    return result


# -- the whole


@dataclass
class Targets:
    """What was asked for and what was found."""

    missed: int = 0

    def check(self, what: str, found: float, good: bool, wanted: str) -> None:
        self.missed += not good
        say(f"{'PASS' if good else 'MISS'}  {what}: {found:.4g} ({wanted})")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


COLUMNS = (
    ("cpu_ms", "cpu ms"),
    ("whole_ms", "whole ms"),
    ("ideal_share", "of ideal"),
    ("mean_share", "mean/N"),
    ("peak", "peak"),
    ("refill_ms", "refill ms"),
    ("write_p50_ms", "write p50"),
    ("write_p95_ms", "p95"),
    ("wish_p50_ms", "wish p50"),
    ("wish_p95_ms", "p95"),
    ("memory_mb", "memory MB"),
    ("client_cpu", "client CPU"),
    ("server_cpu", "server CPU"),
)

Medians = dict[str, dict[str, float]]


def compare(
    server: Server, kinds: Sequence[str], n: int, seconds: float, repeats: int, spread: bool
) -> Medians:
    """Interleaved runs of all clients at one load, printed as a table."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            try:
                runs[kind].append(run_client(server, kind, n, seconds, spread))
            except (RuntimeError, ZeroDivisionError) as error:
                if kind in OWN:
                    raise
                say(f"{kind}: did not run: {error}")
    found: Medians = {
        kind: {key: median(run[key] for run in of) for key, _ in COLUMNS} for kind, of in runs.items() if of
    }
    for kind, of in runs.items():
        for run in of:
            if run.get("own_invalid"):
                say(f"{kind}: called its own step invalid: {run['own_invalid']}")
        if of and "own_refill_p50_ms" in of[0]:
            found[kind]["own_refill_p50_ms"] = median(run["own_refill_p50_ms"] for run in of)
            found[kind]["own_peak"] = median(run["own_inflight_peak"] for run in of)
    say(f"\n{n} in flight, {'spread' if spread else 'burst'}, {seconds:g} s, median of {repeats}")
    say(f"{'':12}{'cpu x bare':>11}{'whole x':>9}" + "".join(f"{name:>11}" for _, name in COLUMNS))
    bare = found.get("bare", {"cpu_ms": math.nan, "whole_ms": math.nan})
    for kind, values in found.items():
        ratios = (values["cpu_ms"] / bare["cpu_ms"], values["whole_ms"] / bare["whole_ms"])
        row = "".join(f"{shown(values[key]):>11}" for key, _ in COLUMNS)
        say(f"{kind:12}{shown(ratios[0]):>11}{shown(ratios[1]):>9}{row}")
    return found


def judge(targets: Targets, found: Medians, n: int, spread: bool) -> None:
    ours = found.get("instrument")
    if ours is None:
        return
    where = f"{n} {'spread' if spread else 'burst'}"
    at_least = 0.99 if spread else 0.97
    share, peak, refill = ours["mean_share"], ours["peak"], ours["refill_ms"]
    targets.check(f"{where}: mean in flight / N", share, share >= at_least, f">= {at_least}")
    targets.check(f"{where}: peak by the server", peak, peak == n, f"exactly {n}")
    if spread:
        targets.check(f"{where}: refill p50, ms", refill, refill < 1, "< 1, by the server")
    elif n == 1000:
        ideal = ours["ideal_share"]
        targets.check(f"{where}: share of the ideal rate", ideal, ideal >= 0.95, ">= 0.95")
    if not spread or n != 256:
        return
    for which in ("cpu_ms", "whole_ms"):
        ratio = ours[which] / found["bare"][which]
        targets.check(f"{where}: {which[:-3]} / bare", ratio, ratio <= 1.6, "<= 1.6")
    for kind in found.keys() - {"floor", "bare", "sender", "instrument"}:
        ratio = ours["cpu_ms"] / found[kind]["cpu_ms"]
        targets.check(f"{where}: cpu / {kind}", ratio, ratio < 1, "< 1")
    for quantile, most in (("p50", 1), ("p95", 5)):
        error = ours[f"write_{quantile}_ms"]
        targets.check(f"{where}: TTFT error {quantile}, ms", error, error <= most, f"<= {most}")


def hold(targets: Targets, n: int, slow: int, seconds: float) -> None:
    """The instrument alone: does the server see exactly N, and does nothing fail?"""
    server = Server.start({**PLAN, "ttft_s": slow * TTFT_S, "itl_s": slow * ITL_S})
    try:
        run = run_client(server, "instrument", n, seconds, True, slow)
    finally:
        server.stop()
    outcomes: dict[str, int] = run["own_outcomes"]
    failed = sum(outcomes.values()) - outcomes.get("completed", 0) - outcomes.get("aborted", 0)
    where, mean, total = f"{n} held", run["mean_share"], sum(outcomes.values())
    for who, peak in (("server", run["peak"]), ("instrument", run["own_inflight_peak"])):
        targets.check(f"{where}: peak by the {who}", peak, peak == n, f"exactly {n}")
    targets.check(f"{where}: mean in flight / N", mean, mean >= 0.99, ">= 0.99")
    targets.check(f"{where}: failed requests", failed, failed == 0, f"none of {total:,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--in-flight", default="64,256,1000")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", help=f"some of {','.join(OWN)}")
    parser.add_argument("--peers", action="store_true", help="also the tools of scripts/setup_peers.sh")
    parser.add_argument("--no-hold", action="store_true")
    parser.add_argument("--burst", action="store_true", help="only the burst, at every load")
    parser.add_argument("--client", nargs=2, metavar=("KIND", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        kind, url = given.client
        be_client(kind, url, int(given.in_flight), given.seconds, not given.burst)
        return 0
    kinds = given.kinds.split(",") if given.kinds else list(OWN)
    others = []
    if given.peers:
        for kind in peers.KINDS:
            why = peers.missing(kind)
            if why:
                say(f"{kind}: skipped: {why}")
            else:
                others.append(kind)
                say(f"{kind}: {peers.version(kind)}")
    targets = Targets()
    server = Server.start(PLAN)
    loads = [int(n) for n in given.in_flight.split(",")]
    try:
        for n in loads:
            if not given.burst:
                found = compare(server, [*kinds, *others], n, given.seconds, given.repeats, True)
                judge(targets, found, n, True)
            if given.burst or n == 1000:
                found = compare(server, [*kinds, *others], n, given.seconds, given.repeats, False)
                judge(targets, found, n, False)
    finally:
        server.stop()
    if not given.no_hold:
        hold(targets, 1, 1, given.seconds)
        hold(targets, 2000, SLOW, 2 * given.seconds)
    return 1 if targets.missed else 0


if __name__ == "__main__":
    sys.exit(main())
