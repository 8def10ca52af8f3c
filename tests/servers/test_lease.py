"""Leases: one holder at a time, whoever asks at once, and none that outlives its run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from include.capacity.errors import DataError
from include.capacity.servers.lease import Lease, leases
from include.capacity.servers.reap import reap

PROJECT = Path(__file__).parents[2]


def lease(folder: Path, run: str, model: str = "m", **options: Any) -> Lease:
    return Lease("gpu-0", holder=run, model=model, folder=folder, **options)


def test_one_holds_it_until_it_gives_it_back(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "dag/a"), lease(tmp_path, "dag/b")
    assert first.acquire()
    assert not second.acquire()
    assert first.acquire()  # again, by its holder: a task that runs twice
    held = second.current()
    assert held is not None
    assert (held.holder, held.model, held.accelerator) == ("dag/a", "m", "gpu-0")
    assert [item.holder for item in leases(tmp_path)] == ["dag/a"]
    assert not second.release()  # only by its holder
    assert first.release()
    assert not first.release()
    assert second.acquire()
    assert leases(tmp_path)[0].holder == "dag/b"


def test_models_of_one_run_wait_for_each_other(tmp_path: Path) -> None:
    assert lease(tmp_path, "dag/a", "one").acquire()
    assert not lease(tmp_path, "dag/a", "two").acquire()


def test_accelerators_are_leased_apart(tmp_path: Path) -> None:
    assert lease(tmp_path, "dag/a").acquire()
    assert Lease("gpu-1", holder="dag/b", model="m", folder=tmp_path).acquire()


def test_a_lease_of_a_run_that_is_over_is_broken_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lease(tmp_path, "dag/a").acquire()
    assert not lease(tmp_path, "dag/b", run_is_over=lambda run: False).acquire()
    assert lease(tmp_path, "dag/b", run_is_over=lambda run: run == "dag/a").acquire()
    assert "gpu-0: breaking the lease of run dag/a for model m: its run is over" in caplog.text
    assert not lease(tmp_path, "dag/a").release()  # it is another's now


def test_a_lease_nobody_renews_expires(tmp_path: Path) -> None:
    lease(tmp_path, "dag/a", expires_s=0).acquire()
    assert lease(tmp_path, "dag/b").acquire()
    lease(tmp_path, "dag/b", expires_s=0).acquire()
    assert lease(tmp_path, "dag/b", expires_s=1000).acquire()
    assert not lease(tmp_path, "dag/c").acquire()


TAKE = """
import sys
from pathlib import Path
from include.capacity.servers.lease import Lease
folder, run, bound = sys.argv[1:]
lease = Lease("gpu-0", holder=run, model="m", folder=Path(folder), of_this_process=bound == "bound")
sys.stdin.readline()
print(lease.acquire(), flush=True)
sys.stdin.readline()
"""


def taker(folder: Path, run: str, bound: str = "free") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder), run, bound],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("stale", [False, True])
def test_of_several_processes_that_ask_at_once_one_gets_it(tmp_path: Path, stale: bool) -> None:
    if stale:  # breaking is part of taking: two that find the same stale lease must not both win
        lease(tmp_path, "dag/old", expires_s=0).acquire()
    takers = [taker(tmp_path, f"dag/{number}") for number in range(4)]
    for process in takers:
        say(process)
    assert sorted(hear(process) for process in takers) == ["False", "False", "False", "True"]
    for process in takers:
        process.communicate("end\n")


def test_a_lease_bound_to_a_process_ends_with_it(tmp_path: Path) -> None:
    process = taker(tmp_path, "cli", "bound")
    say(process)
    assert hear(process) == "True"
    waiting = lease(tmp_path, "dag/b", run_is_over=lambda run: True)  # it has no run to be over
    assert not waiting.acquire()
    process.kill()
    process.communicate()
    assert waiting.acquire()


def test_stale_leases_can_be_cleared_without_taking_them(tmp_path: Path) -> None:
    lease(tmp_path, "dag/a").acquire()
    assert lease(tmp_path, "", run_is_over=lambda run: False).break_if_stale() is None
    assert lease(tmp_path, "", run_is_over=lambda run: True).break_if_stale() == "its run is over"
    assert leases(tmp_path) == []


def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    odd = Lease("../../etc/x", holder="dag/a", model="m", folder=folder)
    assert odd.acquire()
    assert odd.path.parent == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["leases"]


@pytest.mark.parametrize(
    "change",
    [
        {"expires_at_s": "x"},
        {"expires_at_s": math.nan},
        {"expires_at_s": 1e300},
        {"since_s": -1e300},
        {"pid": "x"},
        {"accelerator": None},
    ],
)
def test_a_lease_of_wrong_values_keeps_no_other_from_being_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    for name in ("gpu-0", "gpu-1"):
        assert Lease(name, holder="dag/over", model="m", folder=tmp_path).acquire()
    broken = tmp_path / "gpu-0.json"
    broken.write_text(json.dumps({**json.loads(broken.read_text()), **change}))
    (tmp_path / "folder.json").mkdir()
    found = reap(lambda run: True, tmp_path / "servers", tmp_path)
    assert [item.held.accelerator for item in found.leases] == ["gpu-1"]
    assert f"{broken}: not a lease" in caplog.text
    assert "folder.json: not a lease: " in caplog.text


def test_a_file_that_is_no_lease_is_named(tmp_path: Path) -> None:
    (tmp_path / "gpu-0.json").write_text(json.dumps({"holder": 3}))
    with pytest.raises(DataError, match=r"gpu-0\.json: not a lease"):
        lease(tmp_path, "dag/a").acquire()
