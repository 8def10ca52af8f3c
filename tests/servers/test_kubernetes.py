"""The kubernetes kind, by the official client over real HTTP, against a MOCK of what it uses of the API.

It is a mock because no API server can be had here: its programs come from container registries and release
pages, not from Debian or PyPI. So what a real cluster makes of the objects (admission, scheduling, images)
is not seen here. The same port also answers as the model server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from include.capacity import servers
from include.capacity.config import KubernetesServer, Model, validate
from include.capacity.errors import ConfigError, ServerDied, ServerError
from include.capacity.servers import kubernetes, reap, state

MakeModel = Callable[..., Model]
OWNER: servers.Owner = {"run_id": "manual__2026-01-01T00:00:00+00:00", "dag_id": "dag", "model": "fake"}
DEPLOY = Path(__file__).parents[2] / "deploy"
DIGEST = "sha256:" + "a" * 64
READY = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [
        {
            "name": "server",
            "ready": True,
            "restartCount": 0,
            "image": "v",
            "imageID": f"registry.example/vllm/vllm-openai@{DIGEST}",
            "state": {"running": {}},
        }
    ],
}


def pending(reason: str, message: str) -> dict[str, Any]:
    status: dict[str, Any] = deepcopy(READY)
    status |= {"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}]}
    status["containerStatuses"][0] |= {
        "ready": False,
        "state": {"waiting": {"reason": reason, "message": message}},
    }
    return status


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ],
}


class Cluster:
    """What the mock holds, and what it was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {"deployments": {}, "services": {}, "pods": {}}
        self.status: dict[str, Any] = READY
        self.asked: set[tuple[str, str, str]] = set()
        self.forbidden: set[tuple[str, str]] = set()
        self.conflict = ""
        self.url = ""
        self.log = "GPU KV cache size: 12,345 tokens\nhello from the pod\n"

    def handle(self, verb: str, group: str, kind: str, name: str, query: Any, body: Any) -> tuple[int, Any]:
        verb = "list" if verb == "get" and not name else verb
        self.asked.add((verb, group, kind))
        if (verb, kind) in self.forbidden:
            return 403, f"cannot {verb} resource {kind}"
        if kind == "nodes":
            return 200, {
                "metadata": {
                    "name": name,
                    "labels": {"nvidia.com/gpu.product": "H100", "nvidia.com/gpu.memory": "81559"},
                }
            }
        if kind == "pods/log":
            return 200, self.log.encode()
        if kind == "events":
            event = {
                "reason": "FailedScheduling",
                "message": "told by an event",
                "metadata": {},
                "involvedObject": {},
            }
            return 200, {"items": [event]}
        held = self.objects[kind]
        if verb == "list":
            wanted, _, value = query.get("labelSelector", [""])[0].partition("=")
            found = [
                item
                for item in held.values()
                if wanted in (marks := item["metadata"]["labels"]) and value in ("", marks[wanted])
            ]
            if kind == "pods":  # one on its way out is seen once more, then it is gone
                for item in found:
                    if "deletionTimestamp" in item["metadata"]:
                        del held[item["metadata"]["name"]]
            return 200, {"items": deepcopy(found)}
        if verb == "create":
            name = body["metadata"]["name"]
            if kind == self.conflict or name in held:
                return 409, f"{kind} {name} already exists"
            held[name] = body
            if kind == "deployments":
                pod = body["spec"]["template"]
                meta = {**pod["metadata"], "name": f"{name}-pod"}
                self.objects["pods"][f"{name}-pod"] = {
                    "metadata": meta,
                    "spec": {**pod["spec"], "nodeName": "node-1"},
                    "status": self.status,
                }
            return 201, body
        if name not in held:
            return 404, f"{kind} {name} not found"
        gone = held.pop(name)
        if kind == "deployments" and f"{name}-pod" in self.objects["pods"]:
            self.objects["pods"][f"{name}-pod"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            return 200, {**gone, "status": {}}  # as foreground deletion is answered
        return 200, {"kind": "Status", "status": "Success"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    held = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, data: Any) -> None:
            if status >= 400:
                data = {"kind": "Status", "message": data, "code": status}
            raw = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def served(self, verb: str) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            parts = urlsplit(self.path)
            words = parts.path.strip("/").split("/")
            if parts.path == "/v1/models":
                self.answer(200, {"data": [{"id": "fake/model"}]})
            elif parts.path == "/v1/chat/completions":
                self.answer(200, {"choices": [{"finish_reason": "length"}]})
            elif words[0] not in ("api", "apis"):
                self.answer(200 if parts.path == "/health" else 404, {})
            else:
                group = words[1] if words[0] == "apis" else ""
                rest = words[3:] if group else words[2:]
                rest = rest[2:] if rest[0] == "namespaces" else rest
                kind = "/".join([rest[0], *rest[2:]])
                name = rest[1] if len(rest) > 1 else ""
                self.answer(*held.handle(verb, group, kind, name, parse_qs(parts.query), body))

        def do_GET(self) -> None:
            self.served("get")

        def do_POST(self) -> None:
            self.served("create" if self.path.startswith("/api") else "post")

        def do_DELETE(self) -> None:
            self.served("delete")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    held.url = f"http://127.0.0.1:{server.server_port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "mock",
        "clusters": [{"name": "mock", "cluster": {"server": held.url}}],
        "contexts": [{"name": "mock", "context": {"cluster": "mock", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kubernetes, "POLL_S", 0.02)
    yield held
    server.shutdown()
    thread.join()
    server.server_close()


def in_cluster(model: Model, url: str | None, **settings: Any) -> Model:
    said = {
        "kind": "kubernetes",
        "namespace": "models",
        "image": "vllm/vllm-openai:v1",
        "url": url,
        "start_timeout_s": 20,
        "stop_timeout_s": 1,
        **settings,
    }
    return model.model_copy(update={"server": validate(KubernetesServer, said, "test")})


def empty(cluster: Cluster) -> bool:
    return not any(cluster.objects.values())


def test_a_server_is_made_found_and_removed(
    cluster: Cluster, folder: Path, fake_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "very-secret-key")
    cluster.log += "my key is very-secret-key\n"
    model = in_cluster(
        fake_model(),
        cluster.url,
        gpus=1,
        model_cache="hf",
        node_port=30080,
        api_key_env="KEY",
        api_key_secret={"secret": "vllm-key", "key": "k"},
    )
    handle = servers.start("fake", model, OWNER, folder)
    assert "very-secret-key" not in json.dumps(cluster.objects) + servers.tail(handle)
    (made,), (service,) = cluster.objects["deployments"].values(), cluster.objects["services"].values()
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert {
        "name": "VLLM_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "vllm-key", "key": "k"}},
    } in container["env"]
    assert made["spec"]["template"]["spec"]["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "model-cache", "persistentVolumeClaim": {"claimName": "hf"}},
    ]
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 8000, "targetPort": "http", "nodePort": 30080}
    ]
    assert json.loads(made["metadata"]["annotations"]["capacity/state"])["owner"] == OWNER
    assert handle.stack["image"]["digest"] == DIGEST
    assert handle.stack["accelerators"] == [
        {"uuid": None, "name": "H100", "memory_bytes": 81559 * 2**20, "driver": None}
    ]
    assert handle.stack["observed"]["kv_cache_tokens"] == 12345
    assert servers.alive(handle)
    assert kubernetes.running(handle) == 1
    servers.stop(handle)
    assert empty(cluster)
    servers.stop(handle)  # gone already
    assert not Path(str(handle.state)).exists()
    assert "hello from the pod" in servers.tail(handle)


def test_the_role_has_exactly_the_rights_that_are_used(
    cluster: Cluster, folder: Path, fake_model: MakeModel
) -> None:
    model = in_cluster(fake_model(), cluster.url, gpus=1)
    cluster.status = pending("ImagePullBackOff", "no such image")
    with pytest.raises(ServerError):  # events are asked for while it is pending
        servers.start("fake", model, OWNER, folder)
    cluster.status = READY
    servers.stop(servers.start("fake", model, OWNER, folder))
    documents = list(yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text()))
    granted = {
        (verb, group, resource)
        for document in documents
        for rule in document.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == cluster.asked
    values = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text())
    account = values["workers"]["celery"]["serviceAccount"]["name"]
    bound = {item["name"] for document in documents for item in document.get("subjects", [])}
    assert bound == {account}
    assert [item["queue"] for item in values["workers"]["celery"]["sets"]] == ["gpu"]


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (pending("ImagePullBackOff", "no such image"), "ImagePullBackOff: no such image", ServerError),
        (pending("CrashLoopBackOff", "back-off"), "CrashLoopBackOff: back-off", ServerDied),
        (UNSCHEDULABLE, "Insufficient nvidia.com/gpu", ServerError),
    ],
)
def test_a_pod_that_cannot_start_is_told_with_events_and_log_and_removed(
    cluster: Cluster, folder: Path, fake_model: MakeModel, status: Any, said: str, kind: type[ServerError]
) -> None:
    cluster.status = status
    with pytest.raises(kind) as caught:
        servers.start("fake", in_cluster(fake_model(), cluster.url, unschedulable_s=0.01), OWNER, folder)
    for part in (said, "FailedScheduling: told by an event", "hello from the pod"):
        assert part in str(caught.value)
    assert empty(cluster)


def test_what_is_only_slow_ends_at_the_time_limit(
    cluster: Cluster, folder: Path, fake_model: MakeModel
) -> None:
    cluster.status = pending("ContainerCreating", "")
    with pytest.raises(ServerError, match=r"not ready after 0\.1 s\n(.*\n)*.*ContainerCreating"):
        servers.start("fake", in_cluster(fake_model(), cluster.url, start_timeout_s=0.1), OWNER, folder)
    assert empty(cluster)


def test_forbidden_and_conflict_are_named_and_leave_nothing(
    cluster: Cluster, folder: Path, fake_model: MakeModel
) -> None:
    model = in_cluster(fake_model(), cluster.url)
    cluster.forbidden = {("create", "deployments")}
    with pytest.raises(ServerError, match="403 Forbidden: cannot create resource deployments"):
        servers.start("fake", model, OWNER, folder)
    cluster.forbidden, cluster.conflict = set(), "services"
    with pytest.raises(ServerError, match=r"409 Conflict: services .* already exists"):
        servers.start("fake", model, OWNER, folder)
    assert empty(cluster)
    assert state.read_states(folder) == []


def test_nodes_that_may_not_be_read_leave_the_accelerator_unknown(
    cluster: Cluster, folder: Path, fake_model: MakeModel
) -> None:
    cluster.forbidden = {("get", "nodes")}
    handle = servers.start("fake", in_cluster(fake_model(), cluster.url, gpus=1), OWNER, folder)
    assert handle.stack["accelerators"] is None
    servers.stop(handle)


def test_a_server_whose_log_cannot_be_kept_is_removed_all_the_same(
    cluster: Cluster, folder: Path, fake_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    handle = servers.start("fake", in_cluster(fake_model(), cluster.url), OWNER, folder)
    cluster.forbidden = {("get", "pods/log")}  # as when its node does not answer
    servers.stop(handle)
    assert empty(cluster)
    assert state.read_states(folder) == []
    assert "fake: its log is not kept: (403)" in caplog.text

    cluster.forbidden = set()
    handle = servers.start("fake", in_cluster(fake_model(), cluster.url), OWNER, folder)
    log = Path(str(handle.log))
    log.unlink()
    (log / "in the way").mkdir(parents=True)
    servers.stop(handle)
    assert empty(cluster)
    assert f"fake: its log is not kept: {log}: cannot be written" in caplog.text


def test_a_restarted_pod_is_not_alive_and_the_next_start_replaces_it(
    cluster: Cluster, folder: Path, fake_model: MakeModel
) -> None:
    model = in_cluster(fake_model(), cluster.url)
    first = servers.start("fake", model, OWNER, folder)
    (pod,) = cluster.objects["pods"].values()
    pod["status"] = deepcopy(READY)
    pod["status"]["containerStatuses"][0]["restartCount"] = 1
    assert not servers.alive(first)
    second = servers.start("fake", model, OWNER, folder)
    assert servers.alive(second)
    assert len(cluster.objects["deployments"]) == 1
    servers.stop(second)


def test_the_reaper_finds_by_label_what_no_state_file_tells_of(
    cluster: Cluster, folder: Path, fake_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder.parents[1]
    handle = servers.start("fake", in_cluster(fake_model(), cluster.url), OWNER, folder)
    Path(str(handle.state)).unlink()
    (tmp_path / "namespace").write_text("models")
    monkeypatch.setattr(kubernetes, "OWN_NAMESPACE", tmp_path / "namespace")
    assert reap.reap(lambda run: False, root, root / "leases").stopped == []
    stopped = reap.reap(lambda run: True, root, root / "leases").stopped
    assert [item.state.owner for item in stopped] == [OWNER]
    assert empty(cluster)


@pytest.mark.parametrize("value", ["dag/manual__2026-01-01T00:00:00+00:00", "x" * 200, "-a-", "ü", ""])
def test_label_values_are_valid_and_distinct(value: str) -> None:
    made = kubernetes.label(value)
    assert len(made) <= 63
    assert made == "" or (made[0].isalnum() and made[-1].isalnum())
    assert kubernetes.label("a/b") != kubernetes.label("a:b")


def test_errors_in_the_settings_are_named(
    cluster: Cluster, folder: Path, fake_model: MakeModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"api_key_env .* and api_key_secret .* need each other"):
        in_cluster(fake_model(), None, api_key_env="KEY")
    with pytest.raises(ConfigError, match=r"models\.fake\.server\.url: needed outside the cluster"):
        servers.start("fake", in_cluster(fake_model(), None), OWNER, folder)
    (tmp_path / "own.j2").write_text("kind: Secret\n")
    own = in_cluster(fake_model(), cluster.url, template=str(tmp_path / "own.j2"))
    with pytest.raises(ConfigError, match=r"own\.j2: expected one Deployment and one Service"):
        servers.start("fake", own, OWNER, folder)
    (tmp_path / "own.j2").write_text("{{ nothing }}")
    with pytest.raises(ConfigError, match=r"own\.j2: .*'nothing' is undefined"):
        servers.start("fake", own, OWNER, folder)
    assert cluster.asked == set()
