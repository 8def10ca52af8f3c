"""The docker kind as far as it needs no engine; tests/compose has it on a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from include.capacity import servers
from include.capacity.config import DockerServer, Model, validate
from include.capacity.errors import ConfigError, ServerError
from include.capacity.servers import docker, state

MakeModel = Callable[..., Model]
OWNER: servers.Owner = {"run_id": "run-1", "dag_id": "dag", "model": "fake"}
DIGEST = "sha256:" + "0" * 64


def container_server(**settings: Any) -> DockerServer:
    return validate(
        DockerServer, {"kind": "docker", "image": f"vllm/vllm-openai@{DIGEST}", **settings}, "test"
    )


def contained(model: Model, **settings: Any) -> Model:
    return model.model_copy(update={"server": container_server(**settings)})


def test_a_container_is_bound_to_this_machine_and_given_what_is_configured() -> None:
    server = container_server(
        gpus=["0", "GPU-12ab"],
        devices=["/dev/kfd", "/dev/dri"],
        groups=["video"],
        model_cache="hf-cache",
        volumes=["/models:/models:ro"],
        shm_size="16g",
        env={"VLLM_ROCM_USE_AITER": "1"},
    )
    asked = docker.options(
        server, ["vllm", "serve", "org/m", "--port", "8000"], {"VLLM_API_KEY": "k"}, {"a": "b"}
    )
    assert asked["entrypoint"] == ["vllm"]
    assert asked["command"] == ["serve", "org/m", "--port", "8000"]
    assert asked["ports"] == {"8000/tcp": ("127.0.0.1", None)}
    assert asked["environment"] == {
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": "/model-cache",
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_API_KEY": "k",
    }
    assert asked["volumes"] == ["hf-cache:/model-cache:rw", "/models:/models:ro"]
    assert asked["devices"] == ["/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"]
    assert (asked["group_add"], asked["shm_size"], asked["labels"]) == (["video"], "16g", {"a": "b"})
    (request,) = asked["device_requests"]
    assert request["DeviceIDs"] == ["0", "GPU-12ab"]
    assert request["Capabilities"] == [["gpu"]]


@pytest.mark.parametrize(("gpus", "count"), [("all", -1), (2, 2)])
def test_gpus_are_all_or_so_many(gpus: object, count: int) -> None:
    (request,) = docker.options(container_server(gpus=gpus), ["x"], {}, {})["device_requests"]
    assert request["Count"] == count
    assert not docker.options(container_server(), ["x"], {}, {})["device_requests"]


def test_the_labels_say_whose_it_is() -> None:
    handle = servers.Handle(
        kind="docker",
        model="llama",
        url="",
        metrics_url="",
        served_name="l",
        api_key_env="KEY",
        server_id="0" * 32,
        log="/state/servers/a/x.log",
        state="/state/servers/a/x.server.json",
    )
    made = state.started_here(handle, {"run_id": "manual__1", "dag_id": "dag", "model": "llama"}, "h100-0")
    found = docker.labels(made)
    assert found["capacity.owner"] == "dag/manual__1"
    assert found["capacity.model"] == "llama"
    assert found["capacity.accelerator"] == "h100-0"
    assert found["capacity.server-id"] == "0" * 32


class OneImage:
    id = "sha256:" + "1" * 64

    def __init__(self, *digests: str) -> None:
        self.attrs = {"RepoDigests": list(digests)}


@pytest.mark.parametrize(
    ("name", "digests", "digest"),
    [
        ("vllm/vllm-openai:v0.32.0", [f"vllm/vllm-openai@{DIGEST}"], DIGEST),
        ("vllm/vllm-openai:v0.32.0", [f"registry.example/vllm/vllm-openai@{DIGEST}"], DIGEST),
        (f"vllm/vllm-openai:v0.32.0@{DIGEST}", [f"vllm/vllm-openai@{DIGEST}"], DIGEST),
        ("host:5000/vllm", [f"other/vllm@sha256:{'2' * 64}", f"host:5000/vllm@{DIGEST}"], DIGEST),
        ("host:5000/vllm:1", [f"host:5000/vllm@{DIGEST}"], DIGEST),
        ("made-here", [], None),
    ],
)
def test_the_digest_is_that_of_the_repository_asked_for(
    name: str, digests: list[str], digest: str | None
) -> None:
    found = docker._about_image(OneImage(*digests), name)  # type: ignore[arg-type]  # what of an image is read
    assert found == {"name": name, "digest": digest, "id": OneImage.id}


def test_without_a_tag_only_latest_is_pulled() -> None:
    assert docker._tag("host:5000/vllm") == "latest"
    assert docker._tag("host:5000/vllm:1") is None
    assert docker._tag(f"vllm@{DIGEST}") is None


def test_an_engine_that_does_not_answer_is_named_and_nothing_is_written(
    folder: Path, fake_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/no.sock")
    with pytest.raises(ServerError, match=r"fake: unix://.*/no\.sock: "):
        servers.start("fake", contained(fake_model()), OWNER, folder)
    assert list(folder.iterdir()) == []
    assert docker.owned(folder) == []  # no engine, and no state file that tells of a container


def test_an_engine_that_is_away_is_an_error_where_containers_were_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/no.sock")
    path = state.state_file(folder, "fake")
    handle = servers.Handle(
        kind="docker", model="fake", url="", metrics_url="", served_name="f", server_id="1", state=str(path)
    )
    state.write_state(state.started_here(handle, OWNER, "gpu-0"))
    with pytest.raises(ServerError, match=r"no\.sock"):
        docker.owned(folder)
    with pytest.raises(ServerError, match=r"no\.sock"):
        servers.stop(handle)
    assert path.exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"api_key_env": "NOT_SET_HERE"}, "NOT_SET_HERE"),
        ({"pass_env": ["NOT_SET_HERE"]}, "server.pass_env: environment variable NOT_SET_HERE is not set"),
        ({"command": ["vllm", "--api-key=abc"]}, "--api-key shows a secret"),
    ],
)
def test_what_is_missing_is_said_before_the_engine_is_asked(
    settings: dict[str, Any],
    said: str,
    folder: Path,
    fake_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/no.sock")
    with pytest.raises(ConfigError, match=said):
        servers.start("fake", contained(fake_model(), **settings), OWNER, folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"image": "--privileged"},
        {"pass_env": ["HF_TOKEN=secret"]},
        {"devices": ["/etc/passwd"]},
        {"volumes": ["/models"]},
        {"model_cache": "a:/b"},
        {"gpus": 0},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"test: {next(iter(settings))}"):
        container_server(**settings)
