"""One run of the whole flow against a real vLLM; the tests look at what came of it.

The run calls what the DAG's tasks call, in their order: plan, lease, start_server, the steps, stop_server,
validate, limits, report, publish.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from include.capacity import servers
from include.capacity.flow import sweep as stages
from include.capacity.flow import tasks
from include.capacity.results.sweepdir import SweepDir
from include.capacity.servers.lease import Held, leases
from include.capacity.servers.process import members
from include.capacity.words import EXPORTABLE, Severity

PROJECT = Path(__file__).parents[2]
PYTHON = PROJECT / ".venv-vllm" / "bin" / "python"
TINY = PROJECT / "var" / "vllm" / "tiny"
KEY_ENV = "CAPACITY_VLLM_TEST_KEY"
KEY = "only-for-this-test"
MODEL = "tiny"
ATTEMPTS = 3


@dataclass
class Seen:
    """What the run left behind, and what was seen on the way."""

    handle: servers.Handle
    start_s: float
    argv: list[list[str]]
    """Command lines of all the server's processes while it ran."""
    unauthorized: int
    """Status of a request without the key."""
    sweep: SweepDir
    run: tasks.Run
    before: str = ""
    after: str = ""
    """vLLM's ``/metrics`` before and after the sweep."""
    sweep_s: float = float("nan")
    stop_s: float = float("nan")
    left: list[str] = field(default_factory=list)
    """Processes that outlived ``stop_server``."""
    held: list[Held] = field(default_factory=list)
    """Leases that outlived it."""
    state: servers.Handle | None = None
    drifted: str | None = None
    """Why the last attempt was rejected, if the machine's own speed changed by more than a fifth."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Start, sweep, stop and judge; again if the sweep was rejected, as an operator would.

    On a shared machine other programs disturb a measurement, and the checks then rightly refuse it.
    """
    if not PYTHON.exists():
        pytest.fail("there is no .venv-vllm: call `make vllm`", pytrace=False)
    subprocess.run([PYTHON, PROJECT / "scripts" / "vllm_tiny.py", TINY], check=True, timeout=300)
    folder = tmp_path_factory.mktemp("vllm")
    changed = {
        "CAPACITY_FLEET": str(Path(__file__).with_name("fleet.yaml")),
        "CAPACITY_STATE": str(folder / "state"),
        KEY_ENV: KEY,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value)
        for attempt in range(1, ATTEMPTS + 1):
            seen = _run(folder, f"real-{attempt}")
            tasks.validate(seen.run, MODEL)
            found = tasks.limits(seen.run, MODEL)
            _say(f"attempt {attempt}: {found}")
            if all(item["status"] in EXPORTABLE for item in found):
                break
            seen.drifted = _drift(seen.sweep)
        return seen


def _drift(sweep: SweepDir) -> str | None:
    """Why the sweep was rejected, if only because the machine itself became faster or slower meanwhile."""
    quality = sweep.read_json("quality.json")
    against = [finding for finding in quality["findings"] if finding["severity"] == Severity.REJECT]
    if not against or any(finding["check"] != "anchor_agrees" for finding in against):
        return None
    return "; ".join(finding["reason"] for finding in against)


def _run(folder: Path, run_id: str) -> Seen:
    store = (folder / "store").as_uri()
    run = tasks.Run.of(run_id=run_id, dag_id="vllm", params={"publish_to": store, "promote": True})
    tasks.plan(run, MODEL)
    assert tasks.lease(run, MODEL)
    own_folder = tasks._folder(run, MODEL)
    try:
        began = time.monotonic()
        tasks.start_server(run, MODEL)
        handle = servers.load(own_folder)
        assert handle is not None
        seen = Seen(
            handle=handle,
            start_s=time.monotonic() - began,
            argv=[process.cmdline() for process in members(handle)],
            unauthorized=httpx.get(f"{handle.url}/v1/models", trust_env=False).status_code,
            sweep=run.sweep(MODEL),
            run=run,
        )
        _say(f"ready after {seen.start_s:.0f} s: {handle.describe()}")
        seen.before = httpx.get(handle.metrics_url, trust_env=False).text
        began = time.monotonic()
        _measure(seen)
        seen.sweep_s = time.monotonic() - began
        seen.after = httpx.get(handle.metrics_url, trust_env=False).text
        family = members(handle)
    finally:
        began = time.monotonic()
        tasks.stop_server(run, MODEL)
    seen.stop_s = time.monotonic() - began
    seen.left = [str(process) for process in family if _runs(process)]
    seen.left += [str(process) for process in psutil.process_iter() if _is_vllm_of(process, folder)]
    seen.held = leases(folder / "state" / "leases")
    seen.state = servers.load(own_folder)
    _say(f"swept in {seen.sweep_s:.0f} s, stopped in {seen.stop_s:.1f} s")
    return seen


@pytest.fixture(scope="session")
def published(served: Seen) -> Seen:
    """The same, reported and published."""
    tasks.report(served.run, MODEL)
    tasks.fleet_report(served.run)
    tasks.publish(served.run)
    return served


def _measure(seen: Seen) -> None:
    """All steps the planner asks for."""
    target = servers.target_of(seen.handle)
    asked = stages.problem(seen.sweep)
    while (spec := stages.next_step(asked, stages.evidence(seen.sweep))) is not None:
        began = time.monotonic()
        found = stages.measure(seen.sweep, spec, target)
        states = ", ".join(f"{item.state} ({item.completed} of {item.attempted})" for item in found)
        _say(f"{spec.label}: {time.monotonic() - began:.0f} s, {states}")


def _runs(process: psutil.Process) -> bool:
    """Whether it runs; one that ended and was not waited for yet (by init) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_vllm_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process writes to a log of this run."""
    try:
        output = Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return False
    return output.is_relative_to(folder)


def _say(text: str) -> None:
    """Progress, for the minutes this takes (pytest -s)."""
    print(text, flush=True)  # noqa: T201 - it is what `make vllm` shows
