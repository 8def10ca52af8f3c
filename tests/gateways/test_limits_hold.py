"""Real nginx and Envoy with our files, before a simulated server of known truth, under too much load.

Our own instrument sends three times the interactive limit. With the file, what is admitted keeps floor and
objective, proven as any limit is, and the rest is turned away at once; with the same file and no limit in it,
everything comes too late. The server runs five times faster than life, so a gateway's own millisecond counts
as five.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pandas as pd
import pytest

from include.capacity.config import Gateway, ServiceClass, StepBounds, load_fleet
from include.capacity.limits.evidence import Evidence, decider, evidence_of
from include.capacity.load.request import Target
from include.capacity.load.step import StepRun, run_step
from include.capacity.policy import policy_files
from include.capacity.policy.base import FREE_PATHS
from include.capacity.results.spec import Load, StepSpec
from include.capacity.simulator.profile import PROFILES
from include.capacity.words import Phase, State
from scripts.local_stack import free_port
from tests.gateways import started
from tests.policy.made import about, entry, limits
from tests.running import running

SCALE = 5.0
WINDOW_S = 110.0
"""Long enough for 600 admitted requests at some 5.5 a second."""
MODEL = load_fleet().models["steady"]
CHAT = MODEL.classes["interactive"]
LIMIT = json.loads((PROFILES / "steady.truth.json").read_text())["classes"]["interactive"]["limit"] - 1
"""25: what a sweep proves of the true 26."""
TIMES = 3


@dataclass(frozen=True)
class Kind:
    """A gateway: our file for it, how it runs, and how that file looks without its limit."""

    name: str
    file: str
    command: Callable[[Path, Path], started.Command]
    unlimited: Callable[[str], str]
    refusal: int
    over: float
    """How many more than the limit the server may see on average: an answer ends a moment earlier outside."""


KINDS = [
    Kind(
        "nginx",
        "nginx.conf",
        started.nginx,
        lambda text: "\n".join(
            line for line in text.splitlines() if not line.strip().startswith("limit_conn ")
        ),
        429,
        0.5,
    ),
    Kind(
        "envoy",
        "envoy.yaml",
        lambda folder, file: started.envoy(file),
        lambda text: text.replace(f": {LIMIT}\n", ": 10000\n").replace(f": {2 * LIMIT + 1}\n", ": 10000\n"),
        503,
        1.5,  # its count is without a lock
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started.simulator(tmp_path_factory.mktemp("simulator"), "steady", SCALE) as url:
        yield url


def our_file(kind: Kind, folder: Path, server: str, limit: int, listen: str) -> str:
    found = limits(entry("interactive", limit))
    files = policy_files(about(), found, Gateway(upstream=server, listen=listen))
    folder.mkdir(parents=True, exist_ok=True)
    return files[f"policy/alone/interactive/{kind.file}"].decode()


def through(kind: Kind, folder: Path, server: str, change: Callable[[str], str], stop_early: bool) -> StepRun:
    """A step at three times the limit through a gateway with our file, changed."""
    port = free_port()
    text = our_file(kind, folder, server, LIMIT, f"127.0.0.1:{port}")
    file = folder / kind.file
    file.write_text(change(text))
    url = f"http://127.0.0.1:{port}"
    spec = StepSpec(
        model="steady",
        phase=Phase.PROVE,
        loads=(Load(service_class="interactive", concurrency=TIMES * LIMIT, requests=600, max_requests=600),),
        min_window_s=30.0 if stop_early else WINDOW_S,
        cap_s=600.0,
        early_stop=stop_early,
    )
    with running(kind.command(folder, file), f"{url}/v1/models", folder / "gateway.log"):
        return run_step(
            spec,
            target=Target(f"{url}/", MODEL.served_name, metrics_url=f"{server}/metrics"),
            classes={"interactive": CHAT},
            bounds=StepBounds(),
            clock_scale=SCALE,
            decide=decider({"interactive": CHAT}) if stop_early else None,
        )


def measured_again(
    kind: Kind, folder: Path, server: str, change: Callable[[str], str], stop_early: bool
) -> StepRun:
    """As in a sweep: a step that the instrument calls invalid (a busy machine) is measured again."""
    for attempt in range(3):
        run = through(kind, folder / str(attempt), server, change, stop_early)
        if run.facts.invalid is None:
            break
    return run


def judged(run: StepRun, rows: pd.DataFrame) -> Evidence:
    (evidence,) = evidence_of(run.facts, rows, {"interactive": CHAT})
    return evidence


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_admitted_requests_keep_their_objective(kind: Kind, server: str, tmp_path: Path) -> None:
    assert LIMIT == 25
    held = measured_again(kind, tmp_path / "limited", server, lambda text: text, stop_early=False)
    free = measured_again(kind, tmp_path / "unlimited", server, kind.unlimited, stop_early=True)

    rows = held.requests.to_pandas()
    counted = rows[rows["counted"]]
    refused = counted[counted["outcome"] == "rejected"]
    with_file = judged(held, rows[rows["outcome"] != "rejected"])
    without = judged(free, free.requests.to_pandas())
    say(kind, with_file, without, refused)

    assert held.facts.invalid is None, held.facts.invalid
    assert with_file.attempted >= 500
    assert with_file.state == State.PASS, with_file
    assert without.state == State.FAIL, without
    # Turned away at once: by the gateway, in a fraction of what a first token may take.
    assert set(refused["http_status"]) == {kind.refusal}
    assert len(refused) > len(counted) / 2
    assert refused["e2e_s"].median() < CHAT.ttft.at_most_s / 5
    seen = held.facts.server
    assert seen["server_running_mean"] + seen["server_waiting_mean"] <= LIMIT + kind.over
    assert free.facts.server["server_waiting_peak"] > LIMIT


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_probes_pass_a_full_gateway(kind: Kind, tmp_path: Path) -> None:
    body = {
        "model": MODEL.served_name,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started.simulator(tmp_path / "simulator", "steady", 1.0) as server:
        file = tmp_path / kind.file
        file.write_text(our_file(kind, tmp_path, server, 1, f"127.0.0.1:{port}"))
        with (
            running(kind.command(tmp_path, file), f"{url}/health", tmp_path / "gateway.log"),
            httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()  # kept: the stream ends with its iterator
            assert next(lines).startswith("data:")  # it is in flight, for a minute
            for path in FREE_PATHS:
                assert client.get(path).status_code == 200, path
            refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == kind.refusal
    assert refused.headers.get("retry-after", "1") == "1"


def say(kind: Kind, held: Evidence, free: Evidence, refused: pd.DataFrame) -> None:
    """A table for the README."""
    lines = ["| | admitted | completed | first token within 1 s | TTFT p95 | turned away within (median) |"]
    for name, one in ((f"{kind.name}, with our file", held), (f"{kind.name}, without", free)):
        away = f"{1000 * refused['e2e_s'].median() / SCALE:.1f} ms" if one is held else "-"
        shares = f"{one.completed / one.attempted:.1%} | {one.met / one.attempted:.1%}"
        lines.append(f"| {name} | {one.attempted} | {shares} | {one.ttft_p95_s:.2f} s | {away} |")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


def test_the_class_is_the_demos() -> None:
    assert isinstance(CHAT, ServiceClass)
    assert CHAT.ttft is not None
    assert (CHAT.ttft.at_most_s, CHAT.ttft.share, CHAT.completion_floor) == (1.0, 0.95, 0.99)
