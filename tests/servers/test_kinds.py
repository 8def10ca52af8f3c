"""The registry, endpoints, simulators, and clearing away what runs have left."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from include.capacity import servers
from include.capacity.config import SERVER_KINDS, EndpointServer, Model, SimulatorServer
from include.capacity.errors import ConfigError, ServerError
from include.capacity.servers import reap, state
from include.capacity.servers.base import ServerKind

MakeModel = Callable[..., Model]
OWNER: servers.Owner = {"run_id": "run-1", "dag_id": "dag", "model": "fake"}


@pytest.mark.parametrize("name", SERVER_KINDS)
def test_every_kind_of_the_fleet_file_follows_the_protocol(name: str) -> None:
    kind = servers.server_kind(name)
    for function in ("start", "stop", "alive", "tail"):
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

    assert [item.stale for item in reap.find(None, root)] == [None, None]
    found = reap.find(lambda run: run == "dag/run-0", root)
    assert [(item.to_json()["run"], item.processes, item.stale) for item in found] == [
        ("dag/run-0", 1, "its run is over"),
        ("dag/run-1", 1, None),
    ]
    stopped = reap.reap(lambda run: run == "dag/run-0", root, root / "leases")
    assert [item.state.handle.model for item in stopped] == ["old"]
    assert not servers.alive(over)
    assert servers.alive(going_on)
    servers.stop(going_on)


def test_a_server_of_another_machine_is_listed_and_left_to_it(folder: Path, fake_model: MakeModel) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    path = Path(str(handle.state))
    path.write_text(path.read_text().replace(f'"host": "{handle.host}"', '"host": "another-machine"'))
    assert [item.to_json()["host"] for item in reap.find(lambda run: True, folder)] == ["another-machine"]
    assert reap.reap(lambda run: True, folder, folder / "leases") == []
    assert servers.alive(handle)
    servers.stop(handle)


def test_a_broken_state_file_is_reported_and_keeps_nobody_from_being_stopped(
    folder: Path, fake_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    handle = servers.start("fake", fake_model(), OWNER, folder)
    (folder / "broken.server.json").write_text('{"status"')
    with caplog.at_level(logging.ERROR):
        stopped = reap.reap(lambda run: True, folder, folder / "leases")
    assert "broken.server.json: not a server's state file" in caplog.text
    assert [item.state.handle.model for item in stopped] == ["fake"]
    assert not servers.alive(handle)


def test_model_names_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    file = state.state_file(tmp_path, "../../etc/passwd")
    assert file.parent == tmp_path.resolve()
