"""Server processes: started, waited for, stopped whole, and never mistaken for others."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from include.capacity import servers
from include.capacity.config import Model
from include.capacity.errors import ConfigError, ServerDied, ServerError
from include.capacity.servers import Handle, command, process
from tests.servers.conftest import processes_of
from tests.servers.killed import half_started

MakeModel = Callable[..., Model]
OWNER: servers.Owner = {"run_id": "run-1", "dag_id": "dag", "model": "fake"}


def running(pid: int) -> bool:
    """Whether a process runs (one that ended but was not waited for does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_is_ready_then_stopped_and_leaves_nothing_but_its_log(
    folder: Path, fake_model: MakeModel
) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)

    assert handle.kind == "process"
    assert handle.served_name == "fake/model"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", handle.url)
    assert handle.metrics_url == handle.url + "/metrics"
    assert (handle.clock_scale, handle.simulated) == (1.0, False)
    assert handle.stack["vllm_version"] == "9.9.9"
    assert handle.stack["source"] == "fake/weights"
    assert servers.alive(handle)
    assert servers.load(folder) == handle
    assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle
    assert json.loads(Path(str(handle.state)).read_text())["status"] == "ready"
    said = Path(str(handle.log)).read_text()
    asked = [line.split()[1] for line in said.splitlines() if line.startswith("asked")]
    assert asked[:3] == ["/health", "/v1/models", "/v1/chat/completions"]

    env = psutil.Process(handle.pid).environ()
    assert env["CAPACITY_RUN_ID"] == "run-1"
    assert env["CAPACITY_DAG_ID"] == "dag"
    assert env["CAPACITY_MODEL"] == "fake"
    assert env["CAPACITY_ACCELERATOR"] == "gpu-0"
    assert os.getsid(handle.pid or 0) == handle.pid

    servers.stop(handle)
    assert not servers.alive(handle)
    assert servers.load(folder) is None
    assert [path.name for path in folder.iterdir()] == [Path(str(handle.log)).name]
    servers.stop(handle)  # of something already gone: nothing to do


def test_a_server_that_dies_early_fails_at_once_with_its_last_words(
    folder: Path, fake_model: MakeModel
) -> None:
    model = fake_model("--habit", "dies", start_timeout_s=3600)
    with pytest.raises(ServerDied, match="with status 7") as caught:
        servers.start("fake", model, OWNER, folder)
    assert "CUDA error: out of memory, says the fake" in str(caught.value)
    assert servers.load(folder) is None


def test_a_server_that_never_gets_ready_is_given_up_with_the_stage(
    folder: Path, fake_model: MakeModel
) -> None:
    with pytest.raises(ServerError, match=r"fake: not ready after 1 s: waiting for /health") as caught:
        servers.start("fake", fake_model("--health", "503", start_timeout_s=1), OWNER, folder)
    assert "last lines of" in str(caught.value)
    assert servers.load(folder) is None


def test_a_server_with_another_name_is_told_from_a_slow_one(folder: Path, fake_model: MakeModel) -> None:
    model = fake_model("--served", "other/model", start_timeout_s=3600)
    with pytest.raises(ServerError, match=r"serves \['other/model'\], and no model named 'fake/model'"):
        servers.start("fake", model, OWNER, folder)


def test_a_refused_completion_is_not_waited_for(folder: Path, fake_model: MakeModel) -> None:
    model = fake_model("--completion", "400", start_timeout_s=3600)
    with pytest.raises(ServerError, match="first completion is refused: status 400"):
        servers.start("fake", model, OWNER, folder)


def test_a_taken_port_is_named_with_its_holder(folder: Path, fake_model: MakeModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError) as caught:
            servers.start("fake", fake_model(port=port), OWNER, folder)
    assert f"port {port} on 127.0.0.1 cannot be used" in str(caught.value)
    assert f"held by pid {os.getpid()}" in str(caught.value)


def test_a_given_port_is_used(folder: Path, fake_model: MakeModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    handle = servers.start("fake", fake_model(port=port), OWNER, folder)
    assert handle.url == f"http://127.0.0.1:{port}"
    servers.stop(handle)


def test_a_program_that_is_not_there_is_a_matter_of_configuration(
    folder: Path, fake_model: MakeModel
) -> None:
    with pytest.raises(ConfigError, match="there is no program 'no-such-vllm'"):
        servers.start("fake", fake_model(command=["no-such-vllm", "serve", "{source}"]), OWNER, folder)


# -- stopping


def test_stop_ends_children_strays_and_those_that_ignore_it(
    folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    model = fake_model("--habit", "family", "--note", str(tmp_path), stop_timeout_s=0.5)
    handle = servers.start("fake", model, OWNER, folder)
    pids = [int((tmp_path / name).read_text()) for name in ("child", "stray", "nameless")]
    assert all(running(pid) for pid in pids)
    servers.stop(handle)
    assert not any(running(pid) for pid in (*pids, handle.pid or 0))


def test_stop_finds_the_family_of_a_server_that_was_killed(
    folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    """As when the kernel kills vLLM's front end: its engine, renamed and without environment, lives on."""
    model = fake_model("--habit", "family", "--note", str(tmp_path), stop_timeout_s=0.5)
    handle = servers.start("fake", model, OWNER, folder)
    pids = [int((tmp_path / name).read_text()) for name in ("child", "stray", "nameless")]
    os.kill(handle.pid or 0, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(handle.pid)])
    assert not servers.alive(handle)
    servers.stop(handle)
    assert not any(running(pid) for pid in pids)


def test_a_server_that_ignores_sigterm_is_killed(folder: Path, fake_model: MakeModel) -> None:
    handle = servers.start(
        "fake", fake_model("--habit", "ignores SIGTERM", stop_timeout_s=0.3), OWNER, folder
    )
    servers.stop(handle)
    assert not servers.alive(handle)


def test_a_recycled_pid_is_not_killed(folder: Path) -> None:
    bystander = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    began = psutil.Process(bystander.pid).create_time()
    handle = Handle(
        kind="process",
        model="fake",
        url="http://127.0.0.1:1",
        metrics_url="http://127.0.0.1:1/metrics",
        served_name="fake/model",
        server_id="0" * 32,
        host=socket.gethostname(),
        pid=bystander.pid,
        pid_started_at=began - 100,
        log=str(folder / "fake.log"),
        stop_timeout_s=0.3,
    )
    assert not servers.alive(handle)
    servers.stop(handle)
    assert bystander.poll() is None
    bystander.communicate(b"\n")


def test_a_server_on_another_machine_is_not_stopped_by_its_pid(folder: Path, fake_model: MakeModel) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    elsewhere = Handle.from_json({**handle.to_json(), "host": "another-machine"})
    with pytest.raises(ServerError, match="runs on 'another-machine'"):
        servers.stop(elsewhere)
    assert servers.alive(handle)
    servers.stop(handle)


# -- stale servers


def test_a_second_try_of_the_same_run_replaces_its_server(folder: Path, fake_model: MakeModel) -> None:
    first = servers.start("fake", fake_model(), OWNER, folder)
    second = servers.start("fake", fake_model(), OWNER, folder)
    assert not servers.alive(first)
    assert servers.alive(second)
    servers.stop(second)


def test_a_server_of_a_run_that_is_over_is_stopped_first(
    folder: Path, fake_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    old = servers.start(
        "old", fake_model(), {"run_id": "run-0", "dag_id": "dag", "model": "old"}, folder.parent / "old"
    )
    new = servers.start("fake", fake_model(), OWNER, folder, run_is_over=lambda run: run == "dag/run-0")
    assert not servers.alive(old)
    assert servers.load(folder.parent / "old") is None
    assert "of run dag/run-0: its run is over" in caplog.text
    servers.stop(new)


def test_a_server_of_a_run_that_goes_on_is_left_alone(folder: Path, fake_model: MakeModel) -> None:
    other = servers.start(
        "other", fake_model(), {"run_id": "run-0", "dag_id": "dag", "model": "other"}, folder.parent / "other"
    )
    with pytest.raises(ServerError, match=r"accelerator 'gpu-0' is occupied by the process server of other"):
        servers.start("fake", fake_model(), OWNER, folder, run_is_over=lambda run: False)
    assert servers.alive(other)
    elsewhere = fake_model(model={"accelerator": "gpu-1"})
    beside = servers.start("fake", elsewhere, OWNER, folder, run_is_over=lambda run: False)
    servers.stop(beside)
    servers.stop(other)


def test_a_server_half_started_by_a_killed_task_is_stopped_first(
    folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    never_ready = fake_model("--health", "503", start_timeout_s=3600)
    owner: servers.Owner = {"run_id": "run-0", "dag_id": "dag", "model": "fake"}

    def runs() -> bool:
        half = servers.load(folder)
        return half is not None and half.pid is not None and servers.alive(half)

    half = half_started(never_ready, owner, folder, tmp_path, runs)
    assert servers.alive(half)

    handle = servers.start("fake", fake_model(), OWNER, folder, run_is_over=lambda run: False)
    assert not servers.alive(half)
    servers.stop(handle)


def test_a_server_whose_pid_was_never_written_down_is_found_by_its_mark(
    folder: Path, fake_model: MakeModel
) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    nameless = Handle.from_json({**handle.to_json(), "pid": None, "pid_started_at": None})
    servers.stop(nameless)
    assert not servers.alive(handle)


# -- what a server is given


def test_names_with_shell_metacharacters_arrive_as_they_are_and_do_nothing(
    folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    nasty = f"x; touch {trap} $(touch {trap}) `touch {trap}` | tee {trap} > {trap} {{0.__class__}} 'q\" \n*"
    model = fake_model(
        "--served", "{served_name}", "--note", "{source}", model={"served_name": nasty, "source": nasty}
    )
    handle = servers.start("fake", model, OWNER, folder)
    argv = psutil.Process(handle.pid).cmdline()
    assert argv[-4:] == ["--served", nasty, "--note", nasty]
    assert not trap.exists()
    servers.stop(handle)


def test_vllm_is_the_default_command(fake_model: MakeModel) -> None:
    settings = {
        "served_name": "m",
        "source": "org/m",
        "revision": "abc",
        "vllm_args": ["--max-num-seqs", "8"],
    }
    model = fake_model(model=settings, command=["vllm", "serve", "{source}"])
    line = command.command_line("m", model, ["vllm", "serve", "{source}"])
    values = {"source": "org/m", "served_name": "m", "revision": "abc", "host": "127.0.0.1", "port": "8000"}
    assert command.fill(line, values) == [
        *("vllm", "serve", "org/m", "--host", "127.0.0.1", "--port", "8000", "--served-model-name", "m"),
        *("--revision", "abc", "--max-num-seqs", "8"),
    ]


def test_json_arguments_keep_their_braces() -> None:
    given = ["--override", '{"temperature": 0.5, "port": {"a": 1}}', "--at", "{host}:{port}"]
    values = {"source": "", "served_name": "", "revision": "", "host": "h", "port": "1"}
    assert command.fill(given, values) == [given[0], given[1], "--at", "h:1"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model": {"source": "--trust-remote-code"}},
            "models.fake.source: '--trust-remote-code' would be read as",
        ),
        (
            {"model": {"source": ""}, "command": ["serve", "{source}"]},
            "models.fake.source: the server's command needs",
        ),
        ({"command": ["serve", "{port}", "--api-key=abc"]}, "--api-key shows a secret in process lists"),
        ({"command": ["serve", "{port}", "--api_k", "abc"]}, "--api_k shows a secret in process lists"),
        ({"command": ["serve", "{port}", "--hf-token=abc"]}, "--hf-token shows a secret in process lists"),
        ({"command": ["serve", "{port}", "sk-abcdefghijk"]}, "an argument shows a secret in process lists"),
        ({"command": ["serve", "a\0b", "{port}"]}, "holds a zero byte"),
        (
            {
                "model": {"source": "m", "vllm_args": ["--host=0.0.0.0"]},
                "command": ["vllm", "serve", "{source}"],
            },
            "models.fake.vllm_args: --host is set from server.host; say it there",
        ),
        (
            {"model": {"source": "m", "vllm_args": ["--served_model", "x"]}, "command": ["vllm", "serve"]},
            "models.fake.vllm_args: --served-model-name is set from served_name; say it there",
        ),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "environment variable NOT_SET_ANYWHERE"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    folder: Path, fake_model: MakeModel, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        servers.start("fake", fake_model(**changes), OWNER, folder)
    assert list(folder.iterdir()) == []


def test_the_api_key_is_nowhere_to_be_seen(
    folder: Path,
    fake_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level("DEBUG", "include")
    secret = "correct-horse-battery"
    monkeypatch.setenv("TEST_SERVER_KEY", secret)
    handle = servers.start(
        "fake", fake_model("--habit", "tells its key", api_key_env="TEST_SERVER_KEY"), OWNER, folder
    )

    assert handle.api_key_env == "TEST_SERVER_KEY"
    assert httpx.get(f"{handle.url}/v1/models").status_code == 401
    for running in processes_of(tmp_path):
        assert secret not in " ".join(running.cmdline())
    assert secret not in json.dumps(handle.to_json())
    assert secret not in Path(str(handle.state)).read_text()
    assert secret not in caplog.text
    assert "my key is ***" in servers.tail(handle)
    servers.stop(handle)


def test_servers_do_not_inherit_airflows_secrets() -> None:
    ours = {
        "AIRFLOW_CONN_AWS_DEFAULT": "secret",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "secret",
        "VLLM_API_KEY": "somebody else's",
        "PYTHONPATH": "/ours",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    env = process.server_env(ours, {"VLLM_CPU_KVCACHE_SPACE": "1"}, None)
    assert env == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def test_the_server_binds_to_this_machine_only_unless_asked(fake_model: MakeModel) -> None:
    assert fake_model().server.host == "127.0.0.1"  # type: ignore[union-attr]  # a ProcessServer
    assert process._url("0.0.0.0", 8000) == "http://127.0.0.1:8000"


def test_only_the_last_logs_of_a_model_are_kept(folder: Path, fake_model: MakeModel) -> None:
    old = [folder / f"fake.{number:032x}.log" for number in range(12)]
    for age, path in enumerate(reversed(old)):
        path.write_text("old")
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    (folder / "fake.notes.log").write_text("not a server's")
    servers.stop(servers.start("fake", fake_model(), OWNER, folder))
    assert [path.exists() for path in old] == [False] * 3 + [True] * 9
    assert (folder / "fake.notes.log").exists()
