"""The docker kind on a real engine: podman's service, asked through the Docker SDK."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker as sdk
import httpx
import pytest

from include.capacity import servers
from include.capacity.config import DockerServer, Model, validate
from include.capacity.errors import ServerDied, ServerError
from include.capacity.servers import docker, reap, state
from tests.compose.conftest import ROOT
from tests.servers.conftest import served_by, server_folder
from tests.servers.killed import half_started

pytestmark = pytest.mark.usefixtures("engine")

IMAGE = os.environ.get("CAPACITY_TEST_IMAGE", "localhost/llm-capacity:local")
OWNER: servers.Owner = {"run_id": "run-1", "dag_id": "dag", "model": "fake"}
KEY = "only-for-this-test"
FAKE = ["python3", "/fake/fake_server.py", "--host", "{host}", "--port", "{port}"]
MakeModel = Callable[..., Model]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A server folder; no container of it may be left."""
    yield server_folder(tmp_path)
    left = containers_of(tmp_path)
    for container in left:
        container.remove(force=True)
    assert left == []


@pytest.fixture
def contained() -> MakeModel:
    """Makes a model served by the fake server in a container: ``contained("--habit", "dies")``."""

    def make(*args: str, **server: Any) -> Model:
        settings = {
            "kind": "docker",
            "image": IMAGE,
            "pull": "never",
            "command": [*FAKE, *args],
            "volumes": [f"{ROOT}/tests/servers:/fake:ro"],
            "shm_size": "64m",
            "start_timeout_s": 60,
            "stop_timeout_s": 1,
            **server,
        }
        return served_by(validate(DockerServer, settings, "test"))

    return make


def containers_of(folder: Path) -> list[Any]:
    """All containers whose state file lies below a folder."""
    client = sdk.from_env()
    found = client.containers.list(all=True, filters={"label": docker.SERVER_ID})
    return [item for item in found if item.labels.get("capacity.state-file", "").startswith(str(folder))]


def test_a_server_is_ready_then_removed_and_leaves_nothing_but_its_log(
    folder: Path, contained: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_KEY", KEY)
    model = contained("--habit", "tells its key", api_key_env="FAKE_KEY", env={"COLOUR": "green"})
    handle = servers.start("fake", model, OWNER, folder)

    assert (handle.kind, handle.served_name, handle.pid) == ("docker", "fake/model", None)
    assert servers.alive(handle)
    assert docker.running(handle) == 1
    assert servers.load(folder) == handle
    assert handle.stack["vllm_version"] == "9.9.9"
    assert handle.stack["image"]["name"] == IMAGE
    assert handle.stack["image"]["id"].startswith("sha256:")
    assert handle.stack["args"] == [*FAKE, "--habit", "tells its key"]
    assert handle.stack["env"] == {"COLOUR": "green"}
    assert handle.stack["accelerators"] == []
    assert f"{IMAGE} is a tag and may be another image tomorrow" in caplog.text
    assert httpx.get(f"{handle.url}/v1/models").status_code == 401
    assert servers.target_of(handle).api_key == KEY

    (container,) = containers_of(folder)
    labels = container.labels
    assert (labels["capacity.owner"], labels["capacity.model"]) == ("dag/run-1", "fake")
    assert labels["capacity.accelerator"] == "gpu-0"
    ports = container.attrs["NetworkSettings"]["Ports"]["8000/tcp"]
    assert [item["HostIp"] for item in ports] == ["127.0.0.1"]
    config = container.attrs["Config"]
    assert f"VLLM_API_KEY={KEY}" in config["Env"]
    assert KEY not in json.dumps({**config, "Env": []})
    assert KEY not in Path(str(handle.state)).read_text()
    said = servers.tail(handle)
    assert "my key is ***" in said

    servers.stop(handle)
    assert not servers.alive(handle)
    assert docker.running(handle) == 0
    assert servers.load(folder) is None
    assert [path.name for path in folder.iterdir()] == [Path(str(handle.log)).name]
    assert "asked /v1/chat/completions" in servers.tail(handle)
    assert KEY not in servers.tail(handle)
    servers.stop(handle)  # of something already gone: nothing to do


def test_a_simulator_in_a_container_tells_its_clock(folder: Path, contained: MakeModel) -> None:
    command = ["python", "-m", "include.capacity.simulator", "--profile", "steady", "--host", "{host}"]
    model = contained(command=[*command, "--port", "{port}", "--served-model-name={served_name}"], volumes=[])
    handle = servers.start("fake", model, OWNER, folder)
    assert handle.simulated
    assert handle.clock_scale == handle.stack["time_scale"] == 20
    servers.stop(handle)


def test_a_given_port_is_used(folder: Path, contained: MakeModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    handle = servers.start("fake", contained(port=port), OWNER, folder)
    assert handle.url == f"http://127.0.0.1:{port}"
    servers.stop(handle)


def test_a_container_that_ends_early_fails_at_once_with_its_last_words(
    folder: Path, contained: MakeModel
) -> None:
    with pytest.raises(ServerDied, match="with status 7") as caught:
        servers.start("fake", contained("--habit", "dies", start_timeout_s=3600), OWNER, folder)
    assert "CUDA error: out of memory, says the fake" in str(caught.value)
    assert servers.load(folder) is None
    (log,) = folder.iterdir()
    assert "CUDA error" in log.read_text()


def test_a_container_that_never_gets_ready_is_given_up_and_removed(
    folder: Path, contained: MakeModel
) -> None:
    with pytest.raises(ServerError, match=r"fake: not ready after 2 s: waiting for /health"):
        servers.start("fake", contained("--health", "503", start_timeout_s=2), OWNER, folder)
    assert containers_of(folder) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image": "localhost/there-is-none:1"}, "is not on this machine"),
        ({"image": "localhost:1/there-is-none:1", "pull": "missing"}, "localhost:1/there-is-none"),
        ({"command": ["no-such-program", "{port}"]}, "no-such-program"),
        ({"devices": ["/dev/there-is-none"]}, "/dev/there-is-none"),
    ],
)
def test_what_the_engine_refuses_is_said_and_leaves_nothing(
    settings: dict[str, Any], said: str, folder: Path, contained: MakeModel
) -> None:
    with pytest.raises(ServerError, match=said):
        servers.start("fake", contained(**settings), OWNER, folder)
    assert containers_of(folder) == []
    assert servers.load(folder) is None


def test_a_crashed_server_is_replaced_by_the_same_run(folder: Path, contained: MakeModel) -> None:
    first = servers.start("fake", contained(), OWNER, folder)
    (container,) = containers_of(folder)
    container.kill()
    container.wait()
    assert not servers.alive(first)
    assert docker.running(first) == 0
    second = servers.start("fake", contained(), OWNER, folder)
    assert servers.alive(second)
    assert len(containers_of(folder)) == 1
    assert len(list(folder.glob("*.log"))) == 2
    servers.stop(second)


def test_a_container_half_started_by_a_killed_task_is_removed_first(
    folder: Path, contained: MakeModel, tmp_path: Path
) -> None:
    never_ready = contained("--health", "503", start_timeout_s=3600)

    def runs() -> bool:
        found = containers_of(folder)
        return bool(found) and found[0].status == "running"

    half = half_started(never_ready, OWNER, folder, tmp_path, runs)
    assert servers.alive(half)
    other: servers.Owner = {"run_id": "run-2", "dag_id": "dag", "model": "fake"}
    handle = servers.start("fake", contained(), other, folder, run_is_over=lambda run: False)
    assert not servers.alive(half)
    servers.stop(handle)


def test_a_container_no_state_file_tells_of_is_found_by_its_labels_and_reaped(
    folder: Path, contained: MakeModel
) -> None:
    handle = servers.start("fake", contained(), OWNER, folder)
    Path(str(handle.state)).unlink()
    root = folder.parents[1]
    (found,) = docker.owned(root)
    assert found.owner == OWNER
    assert (found.accelerator, found.handle.server_id) == ("gpu-0", handle.server_id)
    assert found.starter_host == state.this_host()
    assert docker.owned(root / "elsewhere") == []

    assert reap.reap(lambda run: False, root, root / "leases").stopped == []
    assert servers.alive(handle)
    stopped = reap.reap(lambda run: run == "dag/run-1", root, root / "leases").stopped
    assert [item.state.handle.model for item in stopped] == ["fake"]
    assert containers_of(folder) == []


def test_a_container_of_a_run_that_goes_on_keeps_its_accelerator(folder: Path, contained: MakeModel) -> None:
    handle = servers.start("fake", contained(), OWNER, folder)
    other: servers.Owner = {"run_id": "run-2", "dag_id": "dag", "model": "other"}
    with pytest.raises(ServerError, match="accelerator 'gpu-0' is occupied by the docker server of fake"):
        servers.start("other", contained(), other, folder.parent / "other", run_is_over=lambda run: False)
    assert servers.alive(handle)
    servers.stop(handle)
