"""A server in a container of its own, on this machine's container engine (Docker, or podman's service).

Start: clear the accelerator; get the image; write the state file; create the container, labelled with whose
it is, and start it; wait until it is ready or has ended. Whatever goes wrong, it is removed again.

Which container is a server's is told by its label alone, never by a name or an id that was kept: so one
whose task was killed between creating it and writing that down is found all the same. Its log is the
engine's as long as it exists, and is copied beside the state file when it is ready and when it is removed.
It listens on 127.0.0.1 only, and its key is in its environment, not in a label or an argument.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from include.capacity.config import DockerServer
from include.capacity.errors import ConfigError, ServerDied, ServerError
from include.capacity.redact import MASK
from include.capacity.results.store import safe_name
from include.capacity.servers import stack as stacks
from include.capacity.servers.base import Handle
from include.capacity.servers.devices import refuse_in_use
from include.capacity.servers.key import api_key, key_if_set
from include.capacity.servers.logs import keep_log, last_lines, log_tail, may_be_lost
from include.capacity.servers.order import Order
from include.capacity.servers.process import check_port
from include.capacity.servers.ready import PROGRESS_EVERY_S
from include.capacity.servers.state import (
    MARK,
    WHOLE,
    ServerState,
    forget,
    from_mark,
    marks,
    read_states,
    this_host,
    write_state,
)

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

log = logging.getLogger(__name__)

LABEL = "capacity."
SERVER_ID = f"{LABEL}server-id"
CACHE = "/model-cache"
"""Where the model cache is mounted; ``HF_HOME`` names it."""
ENGINE_WITHIN_S = 60
GONE = ("exited", "dead", "removing")


# -- the protocol


def start(order: Order) -> Handle:
    """Start the configured container and wait until it is ready; see :class:`ServerKind`."""
    server = order.settings(DockerServer)
    model_key = order.model_key
    key = api_key(server.api_key_env)
    secret = {name: _needed(name, model_key) for name in server.pass_env}
    if key is not None:
        secret["VLLM_API_KEY"] = key
    command = order.command(server.command)
    handle = order.handle(
        server.kind,
        api_key_env=server.api_key_env,
        host=this_host(),
        stop_timeout_s=server.stop_timeout_s,
    )
    with engine(model_key) as client:
        order.clear_accelerator()
        if server.gpus is not None or server.devices:
            chosen = {stacks.VISIBLE[0]: ",".join(server.gpus)} if isinstance(server.gpus, list) else {}
            refuse_in_use(model_key, {**server.env, **chosen})
        if server.port:
            check_port("127.0.0.1", server.port, model_key)
        image = _image(client, server, model_key)
        about = _about_image(image, server.image)
        if "@" not in server.image:
            log.warning(
                "%s: %s is a tag and may be another image tomorrow; measured is %s",
                *(model_key, server.image, about["digest"] or about["id"]),
            )
        with order.bring_up(handle, stop) as state:
            # All addresses are of the container; the engine publishes its port on 127.0.0.1.
            line = order.filled(command, "0.0.0.0", server.container_port)
            wanted = options(server, line, {**secret, MARK: handle.server_id}, labels(state))
            container = client.containers.create(image.id, name=_name(handle), **wanted)
            container.start()
            _find_port(container, handle, server)
            write_state(state)
            log.info("%s: container %s started from %s", model_key, container.name, about["name"])
            order.wait(
                handle,
                timeout_s=server.start_timeout_s,
                check=_still_runs(container, handle),
                last_lines=lambda lines: _said(container, lines, key),
                where=f"container {container.name}",
            )
            _keep_log(container, handle)
            order.record(
                handle,
                args=command,
                env={**server.env, **dict.fromkeys(server.pass_env, MASK)},
                packages=None,  # the image's digest stands for them
                accelerators=_accelerators(client, server),
                image=about,
            )
    log.info("%s: ready at %s, container %s, log %s", model_key, handle.url, _name(handle), handle.log)
    return handle


def stop(handle: Handle) -> None:
    """Stop and remove the server's container, keep its log, and remove its state file; see the protocol."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    began = time.monotonic()
    with engine(handle.model) as client:
        found = _containers(client, handle)
        for container in found:
            with _already_gone():
                if container.status not in GONE:
                    container.stop(timeout=int(handle.stop_timeout_s))
            with may_be_lost(handle.model, DockerException, RequestException), _already_gone():
                _keep_log(container, handle)
            with _already_gone():
                container.remove(force=True, v=True)
        if left := _containers(client, handle):
            names = ", ".join(str(container.name) for container in left)
            raise ServerError(f"{handle.model}: could not be removed: container {names} is still there")
    forget(handle)
    took = time.monotonic() - began
    log.info("%s: %s", handle.model, f"removed in {took:.1f} s" if found else "was gone already")


def alive(handle: Handle) -> bool:
    """Whether its container runs."""
    with engine(handle.model) as client:
        return any(container.status == "running" for container in _containers(client, handle))


def tail(handle: Handle, lines: int = 40) -> str:
    """The last lines of its log, secrets masked: the engine's, or what was kept of it."""
    key = key_if_set(handle.api_key_env)
    with engine(handle.model) as client:
        for container in _containers(client, handle):
            with _already_gone():
                return _said(container, lines, key)
    return log_tail(Path(handle.log), lines, key) if handle.log else ""


def running(handle: Handle) -> int | None:
    """How many containers of it run, or are about to."""
    with engine(handle.model) as client:
        return sum(container.status not in GONE for container in _containers(client, handle))


def owned(folder: Path) -> list[ServerState]:
    """Servers whose containers carry our labels, also those that have ended; see the protocol."""
    used = any(state.handle.kind == "docker" for state in read_states(folder, "**/"))
    try:
        with engine("(any model)") as client:
            found = client.containers.list(all=True, filters={"label": SERVER_ID}, ignore_removed=True)
    except ServerError:
        if used:
            raise
        return []  # no engine, and none was used
    states = [
        from_mark(
            container.labels.get(f"{LABEL}{WHOLE}", ""), f"container {container.name}", folder, "docker"
        )
        for container in found
    ]
    return [state for state in states if state is not None]


# -- what the engine is asked for


def options(
    server: DockerServer, command: list[str], secret: Mapping[str, str], marks: Mapping[str, str]
) -> dict[str, Any]:
    """The settings of a container, as the SDK's ``create`` takes them, but for its image and name."""
    from docker.types import DeviceRequest

    requests = []
    if server.gpus is not None:
        which: dict[str, Any] = (
            {"device_ids": server.gpus}
            if isinstance(server.gpus, list)
            else {"count": -1 if server.gpus == "all" else server.gpus}
        )
        requests.append(DeviceRequest(capabilities=[["gpu"]], **which))
    volumes = [f"{server.model_cache}:{CACHE}:rw"] if server.model_cache else []
    cache = {"HF_HOME": CACHE} if server.model_cache else {}
    return {
        "entrypoint": command[:1],
        "command": command[1:],
        "environment": {"PYTHONUNBUFFERED": "1", **cache, **server.env, **secret},
        "labels": dict(marks),
        "ports": {f"{server.container_port}/tcp": ("127.0.0.1", server.port or None)},
        "device_requests": requests,
        "devices": [f"{path}:{path}:rwm" for path in server.devices],
        "group_add": list(server.groups),
        "security_opt": list(server.security_opt),
        "volumes": volumes + list(server.volumes),
        "shm_size": server.shm_size,
        "detach": True,
    }


def labels(state: ServerState) -> dict[str, str]:
    """Whose a container is, for people and for :func:`owned`; holds no secret."""
    return {f"{LABEL}{name}": value for name, value in marks(state).items()}


# -- the engine


@contextmanager
def engine(model_key: str) -> Iterator[DockerClient]:
    """A client of the engine that ``DOCKER_HOST`` names, or the local one; its errors become ServerError."""
    import docker
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    where = os.environ.get("DOCKER_HOST") or "the local container engine"
    try:
        client = docker.from_env(timeout=ENGINE_WITHIN_S)
        try:
            yield client
        finally:
            client.close()
    except (DockerException, RequestException) as error:
        hint = ""
        if "could not select device driver" in str(error) or "nvidia" in str(error).lower():
            hint = " (is NVIDIA's container toolkit installed?)"
        raise ServerError(f"{model_key}: {where}: {error}{hint}") from error


def _image(client: DockerClient, server: DockerServer, model_key: str) -> Image:
    """The image, pulled if asked to or if it is not here; ServerError if it cannot be had."""
    from docker.errors import ImageNotFound

    if server.pull != "always":
        try:
            return client.images.get(server.image)
        except ImageNotFound as error:
            if server.pull == "never":
                raise ServerError(
                    f"{model_key}: image {server.image} is not on this machine (server.pull: never)"
                ) from error
    log.info("%s: pulling %s", model_key, server.image)
    layers: dict[str, str] = {}
    told = time.monotonic()
    for event in client.api.pull(server.image, stream=True, decode=True, tag=_tag(server.image)):
        if "error" in event:
            raise ServerError(f"{model_key}: image {server.image} cannot be pulled: {event['error']}")
        layers[event.get("id", "")] = event.get("status", "")
        if time.monotonic() - told >= PROGRESS_EVERY_S:
            told = time.monotonic()
            done = sum(status in ("Pull complete", "Already exists") for status in layers.values())
            log.info("%s: pulling %s: %d of %d layers", model_key, server.image, done, len(layers))
    return client.images.get(server.image)


def _tag(image: str) -> str | None:
    """``latest`` where neither tag nor digest is given: the engine would pull every tag."""
    return None if "@" in image or ":" in image.rpartition("/")[2] else "latest"


def _about_image(image: Image, name: str) -> dict[str, str | None]:
    """The image's name as configured, its digest in the registry (if it was ever in one), and its id."""
    repository = name.partition("@")[0]
    repository = repository if ":" not in repository.rpartition("/")[2] else repository.rpartition(":")[0]
    digests = [str(item).partition("@") for item in image.attrs.get("RepoDigests") or []]
    ours = [found for found, _, _ in digests if found == repository or found.endswith(f"/{repository}")]
    digest = next((value for found, _, value in digests if found in ours), None)
    return {"name": name, "digest": digest, "id": image.id}


def _containers(client: DockerClient, handle: Handle) -> list[Container]:
    """All containers of this server, whatever their state."""
    if not handle.server_id:
        return []
    marked = {"label": f"{SERVER_ID}={handle.server_id}"}
    return list(client.containers.list(all=True, filters=marked, ignore_removed=True))


@contextmanager
def _already_gone() -> Iterator[None]:
    """Somebody else may remove a container at any moment."""
    from docker.errors import NotFound

    with suppress(NotFound):
        yield


def _find_port(container: Container, handle: Handle, server: DockerServer) -> None:
    """Read the port that the engine has published."""
    container.reload()
    published = (container.ports or {}).get(f"{server.container_port}/tcp") or []
    port = next((item["HostPort"] for item in published if item["HostPort"]), None)
    if port is None:
        _still_runs(container, handle)()
        raise ServerError(
            f"{handle.model}: container {container.name} has no published port {server.container_port}"
        )
    handle.reached_at(f"http://127.0.0.1:{port}")


def _still_runs(container: Container, handle: Handle) -> Any:
    """A check that raises ServerDied once the container has ended."""
    began = time.monotonic()

    def check() -> None:
        container.reload()
        state = container.attrs["State"]
        if container.status in GONE:
            how = f"with status {state.get('ExitCode')}"
            if state.get("OOMKilled"):
                how += " (out of memory)"
            raise ServerDied(f"{handle.model}: the server ended {how} after {time.monotonic() - began:.1f} s")

    return check


def _said(container: Container, lines: int, key: str | None) -> str:
    """The last lines of a container's log, secrets masked."""
    return last_lines(container.logs(tail=lines).decode("utf-8", "replace"), lines, key)


def _keep_log(container: Container, handle: Handle) -> None:
    """Copy the container's log to the server folder."""
    keep_log(Path(str(handle.log)), container.logs(stream=True, follow=False))


def _accelerators(client: DockerClient, server: DockerServer) -> list[dict[str, Any]] | None:
    """The accelerators the container was given, if the engine runs on this machine."""
    if not server.gpus and not server.devices:
        return []
    if not client.api.base_url.startswith(("http+docker", "http://localhost", "http://127.0.0.1")):
        return None
    if isinstance(server.gpus, list):
        return stacks.accelerators(server.gpus)
    if isinstance(server.gpus, int):
        return stacks.accelerators(map(str, range(server.gpus)))
    return stacks.accelerators(stacks.visible(server.env))


def _name(handle: Handle) -> str:
    return f"capacity-{safe_name(handle.model)}-{handle.server_id[:12]}"


def _needed(name: str, model_key: str) -> str:
    if (value := os.environ.get(name)) is None:
        raise ConfigError(f"models.{model_key}.server.pass_env: environment variable {name} is not set")
    return value
