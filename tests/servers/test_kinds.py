"""The registry, endpoints, simulators, and clearing away what runs have left."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from include.capacity import servers
from include.capacity.config import SERVER_KINDS, EndpointServer, Model, SimulatorServer
from include.capacity.errors import ConfigError, ServerError
from include.capacity.servers import reap, state
from include.capacity.servers.base import ServerKind
from include.capacity.servers.lease import Lease, leases
from include.capacity.servers.quiet import wait_until_quiet
from tests.servers.conftest import processes_of
from tests.servers.killed import starting

MakeModel = Callable[..., Model]
OWNER: servers.Owner = {"run_id": "run-1", "dag_id": "dag", "model": "fake"}


@pytest.mark.parametrize("name", SERVER_KINDS)
def test_every_kind_of_the_fleet_file_follows_the_protocol(name: str) -> None:
    kind = servers.server_kind(name)
    for function in ("start", "stop", "alive", "tail", "running", "owned"):
        asked = list(inspect.signature(getattr(ServerKind, function)).parameters.values())[1:]
        given = list(inspect.signature(getattr(kind, function)).parameters.values())
        assert [(item.name, item.kind, item.default) for item in given] == [
            (item.name, item.kind, item.default) for item in asked
        ]


def test_the_registry_has_the_fleet_files_kinds() -> None:
    assert sorted(servers.KINDS) == sorted(SERVER_KINDS)
    with pytest.raises(ConfigError, match="server kind 'pigeon' is none of"):
        servers.server_kind("pigeon")


# -- endpoint


def endpoint(model: Model, url: str, timeout_s: float = 10) -> Model:
    server = EndpointServer(kind="endpoint", url=url, start_timeout_s=timeout_s)
    return model.model_copy(update={"server": server})


def test_an_endpoint_is_checked_and_left_running(folder: Path, fake_model: MakeModel) -> None:
    theirs = servers.start("fake", fake_model(), OWNER, folder)
    beside = folder.parent / "endpoint"
    handle = servers.start("mine", endpoint(fake_model(), theirs.url + "/v1/"), OWNER, beside)
    assert (handle.kind, handle.url, handle.pid) == ("endpoint", theirs.url, None)
    assert handle.stack["vllm_version"] == "9.9.9"
    assert servers.load(beside) == handle
    servers.stop(handle)
    assert servers.load(beside) is None
    assert servers.alive(handle)
    assert servers.alive(theirs)
    servers.stop(theirs)
    assert not servers.alive(handle)


def test_an_endpoint_that_does_not_answer_is_named(folder: Path, fake_model: MakeModel) -> None:
    with pytest.raises(
        ServerError, match=r"fake: http://127.0.0.1:9: not ready after 1 s: waiting for /health"
    ):
        servers.start("fake", endpoint(fake_model(), "http://127.0.0.1:9", 1), OWNER, folder)


@pytest.fixture
def metrics() -> Iterator[tuple[str, list[str]]]:
    """A metrics page, and what it says: one text after the other, the last one for ever."""
    said: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (said.pop(0) if len(said) > 1 else said[0]).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    page = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{page.server_address[1]}/metrics", said
    page.shutdown()
    page.server_close()


def load_of(running: int, waiting: int) -> str:
    lines = (f'vllm:num_requests_{name}{{engine="{engine}"}} {count / 2}\n' for engine in (0, 1)
             for name, count in (("running", running), ("waiting", waiting)))  # fmt: skip
    return "".join(lines)


def test_an_endpoint_that_serves_others_is_refused(metrics: tuple[str, list[str]]) -> None:
    url, said = metrics
    # Light traffic has idle moments, which do not count.
    said += [load_of(0, 0), load_of(2, 2), load_of(0, 0), load_of(4, 2), load_of(2, 0)]
    told = r"in use by others: up to 6 requests running or waiting that are not ours, and never idle for 1 s"
    with pytest.raises(ServerError, match=told):
        wait_until_quiet(url, None, quiet_s=1.0, patience_s=1.2)


def test_an_endpoint_that_falls_idle_is_taken_and_one_that_tells_nothing_is_not_claimed(
    metrics: tuple[str, list[str]],
) -> None:
    url, said = metrics
    said += [load_of(3, 0), load_of(0, 0)]
    assert wait_until_quiet(url, None, quiet_s=0.3, patience_s=60) is True
    for unknown in ("", "no_metrics_of_ours 1\n", "vllm:num_requests_running{ 1\n", "<html>"):
        said[:] = [unknown]
        assert wait_until_quiet(url, None, quiet_s=1.0, patience_s=60) is None
    said[:] = [load_of(3, 0), ""]  # busy, then silent
    with pytest.raises(ServerError, match="in use by others: up to 3 requests"):
        wait_until_quiet(url, None, quiet_s=0.3, patience_s=0.4)
    assert wait_until_quiet("http://127.0.0.1:9/metrics", None, quiet_s=1.0, patience_s=60) is None


def test_whether_an_endpoint_is_quiet_is_asked_before_it_is_given(
    folder: Path, fake_model: MakeModel, metrics: tuple[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    url, said = metrics
    said.append(load_of(2, 0))
    theirs = servers.start("fake", fake_model(), OWNER, folder)
    model = endpoint(fake_model(), theirs.url)
    beside = folder.parent / "endpoint"
    busy = model.server.model_copy(update={"metrics_url": url, "quiet_s": 0.1, "quiet_patience_s": 0.2})
    with pytest.raises(ServerError, match=r"mine: http://\S+: in use by others: up to 2 requests"):
        servers.start("mine", model.model_copy(update={"server": busy}), OWNER, beside)
    assert servers.load(beside) is None
    servers.start("mine", model, OWNER, beside)
    assert "tells no metrics: whether others use it cannot be checked" in caplog.text
    unasked = busy.model_copy(update={"quiet_s": 0.0})
    servers.start("mine", model.model_copy(update={"server": unasked}), OWNER, beside)
    servers.stop(theirs)


# -- simulator


def test_a_simulated_server_says_so_and_tells_its_clock(folder: Path, fake_model: MakeModel) -> None:
    settings = SimulatorServer(kind="simulator", profile="steady")
    model = fake_model().model_copy(update={"server": settings, "served_name": "sim/any name"})
    handle = servers.start("fake", model, OWNER, folder)
    assert (handle.kind, handle.served_name, handle.simulated) == ("simulator", "sim/any name", True)
    assert handle.clock_scale == handle.stack["time_scale"] > 0
    assert handle.stack["profile"] == "steady"
    assert handle.stack["args"] == ["--profile", "steady"]
    servers.stop(handle)
    assert not servers.alive(handle)


def test_a_profile_that_is_not_there_starts_nothing(folder: Path, fake_model: MakeModel) -> None:
    settings = SimulatorServer(kind="simulator", profile="../../nothing; ls")
    with pytest.raises(ConfigError, match="nothing; ls"):
        servers.start("fake", fake_model().model_copy(update={"server": settings}), OWNER, folder)
    assert list(folder.iterdir()) == []


# -- reaping


def test_only_servers_of_runs_that_are_over_are_reaped(folder: Path, fake_model: MakeModel) -> None:
    root = folder.parents[1]
    old: servers.Owner = {"run_id": "run-0", "dag_id": "dag", "model": "old"}
    over = servers.start("old", fake_model(), old, root / "gpu-0" / "old")
    going_on = servers.start(
        "fake", fake_model(model={"accelerator": "gpu-1"}), OWNER, root / "gpu-1" / "fake"
    )

    unknown = "nobody here can tell whether its run is over"
    untold = reap.reap(None, root, root / "leases")
    assert [(item.stale, item.kept, item.done) for item in untold.servers] == [(None, unknown, None)] * 2
    found = reap.reap(lambda run: run == "dag/run-0", root, root / "leases", dry_run=True)
    seen = [(item.to_json()["run"], item.processes, item.stale, item.done) for item in found.servers]
    assert seen == [("dag/run-0", 1, "its run is over", None), ("dag/run-1", 1, None, None)]
    assert servers.alive(over)
    done = reap.reap(lambda run: run == "dag/run-0", root, root / "leases")
    assert [item.state.handle.model for item in done.stopped] == ["old"]
    assert done.servers[1].kept == "its run goes on"
    assert not servers.alive(over)
    assert servers.alive(going_on)
    servers.stop(going_on)


def test_a_server_of_another_machine_is_listed_and_left_to_it(folder: Path, fake_model: MakeModel) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    path = Path(str(handle.state))
    path.write_text(path.read_text().replace(f'"host": "{handle.host}"', '"host": "another-machine"'))
    # Nor does the mark on its process bring it to an end: that server is listed already.
    done = reap.reap(lambda run: True, folder, folder / "leases")
    kept = "it runs on another-machine, which is not this machine"
    assert [(item.to_json()["host"], item.kept) for item in done.servers] == [("another-machine", kept)]
    assert done.stopped == []
    assert servers.alive(handle)
    servers.stop(handle)


def test_a_broken_state_file_is_reported_and_keeps_nobody_from_being_stopped(
    folder: Path, fake_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    (folder / "broken.server.json").write_text('{"status"')
    with caplog.at_level(logging.ERROR):
        stopped = reap.reap(lambda run: True, folder, folder / "leases").stopped
    assert "broken.server.json: not a server's state file" in caplog.text
    assert [item.state.handle.model for item in stopped] == ["fake"]
    assert not servers.alive(handle)


@pytest.mark.parametrize(
    "change",
    [
        {"starter_pid": "me"},
        {"owner": None},
        {"owner": {"run_id": 7}},
        {"handle": {"kind": "process", "model": "m", "served_name": "s", "pid": "7"}},
        {"handle": {"kind": "magic", "model": "m", "served_name": "s"}},
        {"handle": None},
    ],
)
def test_a_state_file_of_wrong_values_keeps_nobody_from_being_stopped(
    folder: Path, fake_model: MakeModel, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    good = json.loads(Path(str(handle.state)).read_text())
    (folder / "a.server.json").write_text(json.dumps({**good, **change}))
    (folder / "b.server.json").mkdir()
    with caplog.at_level(logging.ERROR):
        stopped = reap.reap(lambda run: True, folder, folder / "leases").stopped
    assert "a.server.json: not a server's state file" in caplog.text
    assert "b.server.json: cannot be read: Is a directory" in caplog.text
    assert [item.state.handle.model for item in stopped] == ["fake"]


def test_a_number_that_is_no_time_proves_no_process() -> None:
    pid = os.getpid()
    for started_at in (math.nan, math.inf, psutil.Process().create_time() - 100):
        assert state.same_process(pid, started_at) is None
    assert state.same_process(-1, 0.0) is None


def test_a_mark_made_by_others_names_no_process_and_no_file_outside(tmp_path: Path) -> None:
    handle = servers.Handle(
        kind="kubernetes",
        model="m",
        served_name="s",
        pid=os.getpid(),
        pid_started_at=psutil.Process().create_time(),
        state=str(tmp_path / "m.server.json"),
        log=str(tmp_path / "m.log"),
    )
    told = asdict(state.started_here(handle, OWNER, "gpu-0"))
    read = state.from_mark(json.dumps(told), "deployment x", tmp_path, "kubernetes")
    assert read is not None
    assert (read.handle.pid, read.handle.pid_started_at) == (None, None)
    assert state.from_mark(json.dumps(told), "deployment x", tmp_path, "process") is None
    for name in ("state", "log"):
        for path in ("/etc/x", f"{tmp_path}/../x", f"{tmp_path}/a/../../x"):
            forged = {**told, "handle": {**told["handle"], name: path}}
            assert state.from_mark(json.dumps(forged), "deployment x", tmp_path, "kubernetes") is None


def test_a_server_that_no_state_file_tells_of_is_found_by_its_marks(
    folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    root = folder.parents[1]
    handle = servers.start("fake", fake_model("--habit", "family", "--note", str(tmp_path)), OWNER, folder)
    Path(str(handle.state)).unlink()
    elsewhere = reap.reap(lambda run: True, tmp_path / "another-state", tmp_path / "leases")
    assert elsewhere.servers == []  # another installation's reaper does not know it
    goes_on = reap.reap(lambda run: False, root, root / "leases")
    assert [(item.state.handle.pid, item.kept) for item in goes_on.servers] == [
        (handle.pid, "its run goes on")
    ]
    assert servers.alive(handle)
    done = reap.reap(lambda run: run == "dag/run-1", root, root / "leases")
    assert [(item.state.handle.server_id, item.stale) for item in done.stopped] == [
        (handle.server_id, "its run is over")
    ]
    assert processes_of(tmp_path) == []


def test_the_server_of_a_command_line_ends_with_its_process(
    folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    """A run without a DAG is one process's own: nobody needs to be asked whether it is over."""
    task = starting(fake_model(), {"run_id": "cli", "model": "fake"}, folder, tmp_path)
    assert task.stdout is not None
    assert task.stdout.readline() == "ready\n"
    going_on = reap.reap(lambda run: True, folder, folder / "leases")
    assert [(item.stale, item.kept) for item in going_on.servers] == [(None, "its run goes on")]
    task.kill()
    task.communicate()
    done = reap.reap(None, folder, folder / "leases")
    assert [item.stale for item in done.stopped] == [f"its run was the process {task.pid}, which is gone"]


def test_a_pid_that_is_anothers_by_now_is_not_touched(folder: Path, fake_model: MakeModel) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = servers.start("fake", fake_model(), OWNER, folder)
    servers.stop(handle)
    handle.pid, handle.pid_started_at = bystander.pid, psutil.Process(bystander.pid).create_time() - 100
    state.write_state(state.started_here(handle, OWNER, "gpu-0", state.READY))
    done = reap.reap(lambda run: True, folder, folder / "leases")
    assert [item.processes for item in done.stopped] == [0]
    assert bystander.poll() is None
    assert not Path(str(handle.state)).exists()
    bystander.communicate(b"\n")


def test_stopping_an_earlier_server_leaves_the_state_file_of_the_next(
    folder: Path, fake_model: MakeModel
) -> None:
    first = servers.start("fake", fake_model(), OWNER, folder)
    second = servers.start("fake", fake_model(), OWNER, folder)
    servers.stop(first)  # as a reaper does that has looked just before the second was started
    assert servers.load(folder) == second
    servers.stop(second)
    assert servers.load(folder) is None


def test_leases_are_broken_with_a_line_or_left_alone_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, run in enumerate(("dag/over", "dag/going-on")):
        assert Lease(f"gpu-{number}", holder=run, model="m", folder=tmp_path).acquire()
    looked = reap.reap(lambda run: run == "dag/over", tmp_path / "servers", tmp_path, dry_run=True)
    assert [item.done for item in looked.leases] == [None, None]
    done = reap.reap(lambda run: run == "dag/over", tmp_path / "servers", tmp_path)
    assert [(item.stale, item.kept, item.done) for item in done.leases] == [
        ("its run is over", None, "broken"),
        (None, "its run goes on", None),
    ]
    assert "gpu-0: breaking the lease of run dag/over for model m: its run is over" in caplog.text
    assert [held.holder for held in leases(tmp_path)] == ["dag/going-on"]


def test_nothing_is_stopped_where_nobody_can_be_asked(folder: Path, fake_model: MakeModel) -> None:
    def unreachable(run: str) -> bool:
        raise ConnectionError("Airflow does not answer")

    handle = servers.start("fake", fake_model(), OWNER, folder)
    with pytest.raises(ConnectionError):
        reap.reap(unreachable, folder, folder / "leases")
    assert servers.alive(handle)
    servers.stop(handle)


def test_model_names_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    file = state.state_file(tmp_path, "../../etc/passwd")
    assert file.parent == tmp_path.resolve()
