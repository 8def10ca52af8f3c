"""A server in a Kubernetes cluster: one Deployment with one pod, and one Service.

Start: clear the accelerator; write the state file; render the template and create what it gives, labelled
with whose it is; watch the pod until it is ready (telling its events meanwhile), then ask the server itself.
A pod that cannot become ready (image, crash, missing Secret, no node for long) ends the waiting at once, with
its events and log. Whatever goes wrong, everything is removed again.

Which objects are a server's is told by one label alone, so what a killed task left is found all the same.
Labels hold only short plain values; the true ones are annotations. The cluster would restart a server that
crashed, cold and in the middle of a measurement: one that was restarted does not count as alive.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from include.capacity.config import KubernetesServer, parse_yaml
from include.capacity.errors import ConfigError, ServerDied, ServerError
from include.capacity.redact import MASK, redact_text
from include.capacity.servers.base import PROJECT, Handle
from include.capacity.servers.key import api_key, key_if_set
from include.capacity.servers.logs import keep_log, last_lines, log_tail, may_be_lost
from include.capacity.servers.order import Order
from include.capacity.servers.ready import PROGRESS_EVERY_S
from include.capacity.servers.state import (
    WHOLE,
    ServerState,
    forget,
    from_mark,
    marks,
    read_states,
    started_here,
)

log = logging.getLogger(__name__)

TEMPLATE = PROJECT / "include" / "config" / "kubernetes" / "server.yaml.j2"
CACHE = "/model-cache"
SERVER_ID = "capacity-server-id"
NOTES = "capacity/state"
"""The annotation with the server's state, JSON."""
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANSWER_WITHIN_S = 30
POLL_S = 1.0
GONE_WITHIN_S = 60.0
"""Beyond the pod's own time to stop."""
HOPELESS = (
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)


# -- the protocol


def start(order: Order) -> Handle:
    """Create the Deployment and Service and wait until the server is ready; see :class:`ServerKind`."""
    server = order.settings(KubernetesServer)
    model_key = order.model_key
    inside = server.context is None and IN_CLUSTER in os.environ
    if server.url is None and not inside:
        raise ConfigError(f"models.{model_key}.server.url: needed outside the cluster, found nothing")
    key = api_key(server.api_key_env)
    command = order.command(server.command)
    handle = order.handle(
        server.kind,
        api_key_env=server.api_key_env,
        stop_timeout_s=server.stop_timeout_s,
        namespace=server.namespace,
        context=server.context,
    )
    name = f"capacity-{handle.server_id[:12]}"
    url = server.url or f"http://{name}.{server.namespace}.svc:{server.container_port}"
    handle.reached_at(url.rstrip("/"))
    line = order.filled(command, "0.0.0.0", server.container_port)  # all addresses of the pod
    deployment, service = render(
        server, name, line, started_here(handle, order.owner, order.model.accelerator)
    )
    began = time.monotonic()
    with cluster(handle) as api:
        order.clear_accelerator()
        with order.bring_up(handle, stop):
            api.apps.create_namespaced_deployment(server.namespace, deployment, **WITHIN)
            api.core.create_namespaced_service(server.namespace, service, **WITHIN)
            log.info("%s: deployment %s in namespace %s", model_key, name, server.namespace)
            pod = _wait_for_pod(api, handle, server, key)
            order.wait(
                handle,
                timeout_s=max(1.0, server.start_timeout_s - (time.monotonic() - began)),
                check=_throttled(lambda: _refuse_hopeless(api, handle, server, time.monotonic())),
                last_lines=lambda lines: _said(api, handle, lines, key),
                where=f"deployment {name}",
            )
            _keep_log(api, handle, key)
            order.record(
                handle,
                args=command,
                env={**server.env, **dict.fromkeys(server.secret_env, MASK)},
                packages=None,  # the image's digest stands for them
                accelerators=_accelerators(api, pod, server),
                image=_image(pod, server.image),
            )
    log.info("%s: ready at %s, deployment %s", model_key, handle.url, name)
    return handle


def stop(handle: Handle) -> None:
    """Remove Deployment and Service, wait until the pods are gone, forget the state file."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    with cluster(handle) as api:
        deployments, services, pods = (
            _deployments(api, handle),
            _services(api, handle),
            _pods(api, handle),
        )
        if pods:
            with may_be_lost(handle.model, ApiException, HTTPError):
                _keep_log(api, handle, key_if_set(handle.api_key_env))
        for item in deployments:
            with _already_gone():
                api.apps.delete_namespaced_deployment(
                    item.metadata.name, handle.namespace, propagation_policy="Foreground", **UNREAD
                )
        for item in services:
            with _already_gone():
                api.core.delete_namespaced_service(item.metadata.name, handle.namespace, **UNREAD)
        until = time.monotonic() + handle.stop_timeout_s + GONE_WITHIN_S
        while left := [*_deployments(api, handle), *_services(api, handle), *_pods(api, handle)]:
            if time.monotonic() > until:
                names = ", ".join(str(item.metadata.name) for item in left)
                raise ServerError(f"{handle.model}: could not be removed: {names} still there")
            time.sleep(POLL_S)
    forget(handle)
    log.info("%s: %s", handle.model, "removed" if deployments or pods else "was gone already")


def alive(handle: Handle) -> bool:
    """Whether its one pod runs, is ready, and has never been restarted."""
    with cluster(handle) as api:
        pods = _pods(api, handle)
        return len(pods) == 1 and _ready(pods[0]) and not _restarts(pods[0])


def tail(handle: Handle, lines: int = 40) -> str:
    """The last lines of its log, secrets masked: the pod's, or what was kept of it."""
    key = key_if_set(handle.api_key_env)
    with cluster(handle) as api:
        if _pods(api, handle):
            return _said(api, handle, lines, key)
    return log_tail(Path(handle.log), lines, key) if handle.log else ""


def running(handle: Handle) -> int | None:
    """How many pods it has, or will have: a Deployment without one counts as one."""
    with cluster(handle) as api:
        return max(len(_pods(api, handle)), len(_deployments(api, handle)))


def owned(folder: Path) -> list[ServerState]:
    """Servers whose Deployments carry our label; see the protocol.

    Looked for in the namespaces that state files name, and in the worker's own inside a cluster.
    """
    places = {
        (state.handle.context, state.handle.namespace)
        for state in read_states(folder, "**/")
        if state.handle.kind == "kubernetes"
    }
    if OWN_NAMESPACE.exists():
        places.add((None, OWN_NAMESPACE.read_text(encoding="utf-8").strip()))
    found = []
    for context, namespace in sorted(places, key=str):
        place = Handle(
            kind="kubernetes", model="(any model)", served_name="", context=context, namespace=namespace
        )
        with cluster(place) as api:
            items = api.apps.list_namespaced_deployment(namespace, label_selector=SERVER_ID, **WITHIN).items
        for item in items:
            text = (item.metadata.annotations or {}).get(NOTES, "")
            state = from_mark(text, f"deployment {item.metadata.name}", folder, "kubernetes")
            if state is not None:
                state.handle.context, state.handle.namespace = context, namespace
                found.append(state)
    return found


# -- what the cluster is asked for


def render(
    server: KubernetesServer, name: str, command: list[str], state: ServerState
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Deployment and Service from the template, with names, namespace and owner put on them.

    ConfigError naming the template for anything it gets wrong. No secret goes in, only names of Secrets.
    """
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    path = Path(server.template) if server.template else TEMPLATE
    secrets = dict(server.secret_env)
    if server.api_key_secret is not None:
        secrets["VLLM_API_KEY"] = server.api_key_secret
    plain = {
        "PYTHONUNBUFFERED": "1",
        **({"HF_HOME": CACHE} if server.model_cache else {}),
        **{key: value for key, value in server.env.items() if key not in secrets},
    }
    # $(NAME) would be filled in by the cluster; $$ is its way of writing $.
    env: list[dict[str, Any]] = [
        {"name": key, "value": value.replace("$(", "$$(")} for key, value in plain.items()
    ]
    env += [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": ref.secret, "key": ref.key}}}
        for key, ref in secrets.items()
    ]
    try:
        text = (
            SandboxedEnvironment(undefined=StrictUndefined)
            .from_string(path.read_text(encoding="utf-8"))
            .render(
                name=name,
                server=server,
                command=[arg.replace("$(", "$$(") for arg in command],
                env=env,
                selector={SERVER_ID: state.handle.server_id},
                pull_secrets=[{"name": item} for item in server.pull_secrets],
                cache=CACHE,
                stop_timeout_s=max(1, int(server.stop_timeout_s)),
            )
        )
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ConfigError(f"{path}: template of a Kubernetes server: {error}") from error
    made: dict[str, dict[str, Any]] = {}
    parts = [part for part in re.split(r"(?m)^---\s*$", text) if part.strip()]
    for part in parts:
        item = parse_yaml(part, str(path))
        if isinstance(item, dict):
            made[str(item.get("kind"))] = item
    if len(parts) != 2 or set(made) != {"Deployment", "Service"}:
        raise ConfigError(f"{path}: expected one Deployment and one Service, found {sorted(made)}")
    deployment, service = made["Deployment"], made["Service"]
    try:
        pod = deployment["spec"]["template"]
        for item in (deployment, service, pod):
            meta = item.setdefault("metadata", {})
            meta["labels"] = {**(meta.get("labels") or {}), **labels(state)}
        for item in (deployment, service):
            item["metadata"] |= {"name": name, "namespace": server.namespace}
            notes = item["metadata"].get("annotations") or {}
            item["metadata"]["annotations"] = {**notes, NOTES: marks(state)[WHOLE]}
        chosen = deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]
        if any(selector.get(SERVER_ID) != state.handle.server_id for selector in chosen):
            raise ConfigError(f"{path}: both selectors need the template's value `selector`")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a Deployment and a Service: missing or wrong {error}") from error
    _check(deployment, service, path)
    return deployment, service


def _check(deployment: dict[str, Any], service: dict[str, Any], path: Path) -> None:
    """What the client itself would refuse to send, told by the template's name."""
    from kubernetes.client import V1Deployment, V1Service
    from pydantic import ValidationError

    try:
        V1Deployment.model_validate(deployment)
        V1Service.model_validate(service)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{path}: {said}") from None


def labels(state: ServerState) -> dict[str, str]:
    """Whose it is, for ``kubectl get -l``; the true values are in the annotation."""
    return {f"capacity-{name}": label(value) for name, value in marks(state).items() if name != WHOLE}


def label(value: str) -> str:
    """A value that a label may have; where that changes it, with a hash that keeps two apart."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", value)[:52].strip("._-")
    if plain == value:
        return value
    return f"{plain}-{hashlib.sha256(value.encode()).hexdigest()[:10]}".lstrip("-")


# -- the cluster

WITHIN: Mapping[str, Any] = {"_request_timeout": ANSWER_WITHIN_S}
UNREAD: Mapping[str, Any] = {**WITHIN, "_preload_content": False}
"""A delete is answered by a Status or by the object, as the cluster likes; the client knows only one."""


class _Api:
    def __init__(self, client: Any) -> None:
        from kubernetes.client import AppsV1Api, CoreV1Api

        self.apps: Any = AppsV1Api(client)
        self.core: Any = CoreV1Api(client)


@contextmanager
def cluster(handle: Handle) -> Iterator[_Api]:
    """The cluster of a server; its errors become ServerError with what it said."""
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from pydantic import ValidationError
    from urllib3.exceptions import HTTPError

    where = f"{handle.model}: cluster {handle.context or '(this one)'}, namespace {handle.namespace}"
    try:
        settings = client.Configuration()
        if handle.context is None and IN_CLUSTER in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"),
                context=handle.context,
                client_configuration=settings,
                persist_config=False,
            )
        with client.ApiClient(settings) as made:
            yield _Api(made)
    except ApiException as error:
        raise ServerError(f"{where}: {error.status} {error.reason}: {_message(error)}") from error
    except ValidationError as error:
        raise ServerError(f"{where}: an answer the client does not understand: {error}") from error
    except (ConfigException, HTTPError, OSError) as error:
        raise ServerError(f"{where}: {error}") from error


def _message(error: Any) -> str:
    try:
        return redact_text(str(json.loads(error.body)["message"]))
    except (ValueError, KeyError, TypeError):
        return "(it said nothing)"


@contextmanager
def _already_gone() -> Iterator[None]:
    from kubernetes.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        if error.status != 404:
            raise


def _mine(handle: Handle) -> dict[str, Any]:
    return {"label_selector": f"{SERVER_ID}={handle.server_id or 'none'}", **WITHIN}


def _deployments(api: _Api, handle: Handle) -> list[Any]:
    return list(api.apps.list_namespaced_deployment(handle.namespace, **_mine(handle)).items)


def _services(api: _Api, handle: Handle) -> list[Any]:
    return list(api.core.list_namespaced_service(handle.namespace, **_mine(handle)).items)


def _pods(api: _Api, handle: Handle) -> list[Any]:
    return list(api.core.list_namespaced_pod(handle.namespace, **_mine(handle)).items)


# -- the pod


def _throttled(check: Any) -> Any:
    """At most one question each ``POLL_S``."""
    asked = -POLL_S

    def seldom() -> None:
        nonlocal asked
        if time.monotonic() - asked >= POLL_S:
            check()
            asked = time.monotonic()

    return seldom


def _wait_for_pod(api: _Api, handle: Handle, server: KubernetesServer, key: str | None) -> Any:
    began = told = time.monotonic()
    last = ""
    try:
        while True:
            pods = _refuse_hopeless(api, handle, server, began)
            if pods and _ready(pods[0]):
                return pods[0]
            waited = time.monotonic() - began
            if waited > server.start_timeout_s:
                raise ServerError(f"{handle.model}: its pod is not ready after {server.start_timeout_s:g} s")
            if time.monotonic() - told >= PROGRESS_EVERY_S or not last:
                told = time.monotonic()
                now = _why_pending(api, handle)
                log.info(
                    "%s: starting, %.0f s: %s", handle.model, waited, now if now != last else "as before"
                )
                last = now
            time.sleep(POLL_S)
    except ServerError as error:
        said = _said(api, handle, 40, key) or "(nothing)"
        why = _why_pending(api, handle)
        raise type(error)(
            f"{error}\n--- pods and events ---\n{why}\n--- last lines of its log ---\n{said}"
        ) from error


def _refuse_hopeless(api: _Api, handle: Handle, server: KubernetesServer, began: float) -> list[Any]:
    """The server's pods; raises if none can become ready."""
    pods = _pods(api, handle)
    for pod in pods:
        for status in pod.status.container_statuses or []:
            waiting = status.state.waiting if status.state else None
            if waiting and waiting.reason in HOPELESS:
                kind = ServerDied if waiting.reason == "CrashLoopBackOff" else ServerError
                raise kind(f"{handle.model}: {waiting.reason}: {waiting.message or ''}")
            ended = status.state.terminated if status.state else None
            ended = ended or (status.last_state.terminated if status.last_state else None)
            if ended:
                raise ServerDied(
                    f"{handle.model}: the server ended with status {ended.exit_code} ({ended.reason})"
                )
        for condition in pod.status.conditions or []:
            if condition.reason == "Unschedulable" and time.monotonic() - began > server.unschedulable_s:
                raise ServerError(f"{handle.model}: Unschedulable: {condition.message}")
    return pods


def _ready(pod: Any) -> bool:
    return pod.metadata.deletion_timestamp is None and any(
        item.type == "Ready" and item.status == "True" for item in pod.status.conditions or []
    )


def _restarts(pod: Any) -> int:
    return sum(item.restart_count or 0 for item in pod.status.container_statuses or [])


def _why_pending(api: _Api, handle: Handle) -> str:
    """One line a pod, and the last events of each."""
    lines = []
    for pod in _pods(api, handle):
        name = pod.metadata.name
        states = [
            f"{item.state.waiting.reason}: {item.state.waiting.message or ''}".rstrip(": ")
            for item in pod.status.container_statuses or []
            if item.state and item.state.waiting
        ]
        lines.append(f"pod {name}: {', '.join([pod.status.phase or 'unknown', *states])}")
        events = api.core.list_namespaced_event(
            handle.namespace, field_selector=f"involvedObject.name={name}", **WITHIN
        ).items
        lines += [f"  {event.reason}: {event.message}" for event in events[-5:]]
    return redact_text("\n".join(lines) or "no pod yet")


def _log_text(api: _Api, handle: Handle, lines: int | None) -> str:
    """The log of the server's pods, of a crashed container's last life where the new one said nothing."""
    from kubernetes.client.exceptions import ApiException

    texts = []
    for pod in _pods(api, handle):
        for previous in [True, False] if _restarts(pod) else [False]:
            try:
                answer = api.core.read_namespaced_pod_log(
                    pod.metadata.name,
                    handle.namespace,
                    container=pod.spec.containers[0].name,
                    previous=previous,
                    _preload_content=False,
                    **({"tail_lines": lines} if lines else {}),
                    **WITHIN,
                )
            except ApiException as error:
                if error.status not in (400, 404):  # it has not begun, or is gone
                    raise
                continue
            texts.append(answer.data.decode("utf-8", "replace"))
    return "".join(texts)


def _said(api: _Api, handle: Handle, lines: int, key: str | None) -> str:
    return last_lines(_log_text(api, handle, lines), lines, key)


def _keep_log(api: _Api, handle: Handle, key: str | None) -> None:
    """Copy the log to the server folder."""
    text = redact_text(_log_text(api, handle, None), [key])
    keep_log(Path(str(handle.log)), [text.encode("utf-8")])


def _image(pod: Any, name: str) -> dict[str, str | None]:
    """The image as configured, and the digest of what runs."""
    statuses = pod.status.container_statuses or []
    image_id = statuses[0].image_id if statuses else None
    digest = (image_id or "").rpartition("@")[2]
    return {"name": name, "digest": digest if digest.startswith("sha256:") else None, "id": image_id or None}


def _accelerators(api: _Api, pod: Any, server: KubernetesServer) -> list[dict[str, Any]] | None:
    """What the node's labels tell of its GPUs (NVIDIA's and AMD's node labellers); None if nothing."""
    from kubernetes.client.exceptions import ApiException

    if not server.gpus:
        return []
    try:
        found = api.core.read_node(pod.spec.node_name, **WITHIN).metadata.labels or {}
    except ApiException as error:
        if error.status not in (403, 404):
            raise
        log.warning("node %s cannot be read: its GPUs stay unknown", pod.spec.node_name)
        return None
    name = found.get("nvidia.com/gpu.product") or found.get("amd.com/gpu.product-name")
    if name is None:
        return None
    memory = found.get("nvidia.com/gpu.memory", "")  # MiB
    driver = found.get("nvidia.com/cuda.driver-version.full") or found.get("amd.com/gpu.driver-version")
    card = {
        "uuid": None,
        "name": name,
        "memory_bytes": int(memory) * 2**20 if memory.isdigit() else None,
        "driver": driver,
    }
    return [dict(card) for _ in range(server.gpus)]
