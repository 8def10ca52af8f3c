"""The fleet file: models, servers, service classes, and where and when to measure.

``load_fleet`` reads ``include/config/fleet.yaml`` (whose comments are its manual), refuses unknown
and repeated keys, and names file, key, value and expectation in every error. Units live in names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml
from croniter import croniter
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from include.capacity.errors import ConfigError
from include.capacity.redact import MASK, is_secret, redact_text, where_secret

DEFAULT_FLEET = Path(__file__).parents[1] / "config" / "fleet.yaml"
FLEET_ENV = "CAPACITY_FLEET"
"""Environment variable that names another fleet file."""

MAX_CONCURRENCY = 100_000

RUN_TASKS = ("fleet_report", "publish", "check_run")
"""Tasks of a whole run; a model's task group cannot have the name of one."""

T = TypeVar("T", bound=BaseModel)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Share = Annotated[float, Field(gt=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Concurrency = Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)]


def _ascending(ladder: list[int]) -> list[int]:
    if sorted(set(ladder)) != ladder:
        raise ValueError("expected concurrencies in ascending order, each once")
    return ladder


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise ValueError("expected a time zone such as Europe/Berlin") from None
    return name


def _cron(text: str) -> str:
    if not croniter.is_valid(text):
        raise ValueError("expected a cron expression such as 0 1 * * *")
    return text


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, an unclosed bracket
        good = False
    if not good or re.search(r"[\s\x00-\x1f]", text):
        raise ValueError("expected http://host:port or https://host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            "expected no user, password, query or fragment: it would be logged; name a key in api_key_env"
        )
    return text


def _json_value(data: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected values of JSON: {error}") from None
    if secret := where_secret(data):
        raise ValueError(f"{secret}: a secret; it would be published. Name a key in api_key_env")
    return data


_HARMLESS = re.compile(r"\d*|true|false|yes|no|on|off|/.*", re.IGNORECASE)
"""Values of variables that are no secret whatever the name: switches, numbers, paths."""


def _no_secrets(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if (is_secret(name) and not _HARMLESS.fullmatch(value)) or redact_text(value) != value:
            raise ValueError(
                f"{name}: a secret does not belong into this file: a process inherits it from the worker's "
                "environment, a container gets it by pass_env, a pod by secret_env"
            )
    return env


Env = Annotated[dict[str, str], AfterValidator(_no_secrets)]


def _listen(text: str) -> str:
    host, _, port = text.rpartition(":")
    try:
        good = int(port) <= 65535 and IPv4Address(host)
    except ValueError:
        good = False
    if not good:
        raise ValueError("expected an IPv4 address and a port, such as 0.0.0.0:8080")
    return text


Url = Annotated[str, AfterValidator(_url)]
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
EnvName = Annotated[str, Field(pattern=ENV_NAME)]
"""Name of an environment variable: what is no name may be the secret itself, so it is not repeated."""
OneLine = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
STORE_URL = r"^(s3://[^/\s@]+(/.*)?|file:///.+)$"
Ladder = Annotated[list[Concurrency], Field(min_length=1, max_length=64), AfterValidator(_ascending)]


class Strict(BaseModel):
    """Unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Lengths(Strict):
    """A log-normal distribution of token counts, clipped."""

    median: float = Field(gt=0, le=1_000_000)
    sigma: float = Field(ge=0, le=3)
    at_least: int = Field(1, ge=1)
    at_most: int = Field(131_072, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} is above at_most {self.at_most}")
        return self


class Workload(Strict):
    """What is sent."""

    name: Name
    endpoint: Literal["chat", "completions"] = "chat"
    stream: bool = True
    prompt_tokens: Lengths
    output_tokens: Lengths
    ignore_eos: bool = True
    shared_prefix_tokens: int = Field(0, ge=0)
    """Tokens at the head of every prompt that are the same in all (0: prompts are unique)."""
    replay: str | None = None
    """A JSONL file of real requests to send instead of made-up prompts."""
    extra_body: Annotated[dict[str, Any], AfterValidator(_json_value)] = Field(default_factory=dict)
    """Sent with every request as is, e.g. temperature."""


class LatencyObjective(Strict):
    """At least ``share`` of attempted requests complete with the latency at most ``at_most_s``."""

    at_most_s: Seconds
    share: Share = 0.95


class Retries(Strict):
    """What a gateway may do after a failure; carried into policies, never done while measuring."""

    attempts: int = Field(0, ge=0, le=10)
    backoff_s: float = Field(1.0, ge=0, le=86400)


class ServiceClass(Strict):
    """A class of traffic: what it sends and what it must be served with."""

    rule: Literal["interactive", "batch"]
    """``interactive`` limits need every objective and stop at the latency knee; ``batch`` need
    completion (and E2E, if set)."""
    workload: Workload
    deadline_s: Seconds
    completion_floor: Share
    ttft: LatencyObjective | None = None
    tpot: LatencyObjective | None = None
    e2e: LatencyObjective | None = None
    cap_at_latency_knee: bool = True
    retries: Retries = Retries()
    ladder: Ladder

    @model_validator(mode="after")
    def _consistent(self) -> ServiceClass:
        if self.rule == "interactive" and self.ttft is None:
            raise ValueError("an interactive class needs a ttft objective")
        if (self.ttft or self.tpot) and not self.workload.stream:
            raise ValueError("ttft and tpot objectives need a streamed workload (workload.stream)")
        for objective in (self.ttft, self.e2e):
            if objective and objective.at_most_s > self.deadline_s:
                raise ValueError(
                    f"objective of {objective.at_most_s} s is beyond the deadline of {self.deadline_s} s"
                )
        return self


class SimulatorServer(Strict):
    """A simulated vLLM server, started by us."""

    kind: Literal["simulator"]
    profile: OneLine
    """Name of a profile in ``include/config/profiles`` or path of a profile file."""
    port: int = Field(0, ge=0, le=65535)
    start_timeout_s: Seconds = 60


class ProcessServer(Strict):
    """A server process, started by us: any command line, ``vllm serve`` by default."""

    kind: Literal["process"]
    command: list[str] = Field(default_factory=lambda: ["vllm", "serve", "{source}"], min_length=1)
    """``{source}``, ``{served_name}``, ``{host}``, ``{port}`` and ``{revision}`` are filled in.
    vLLM's own arguments (host, port, served name, revision, the model's ``vllm_args``) are appended
    when the command mentions no ``{port}``."""
    env: Env = Field(default_factory=dict)
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(0, ge=0, le=65535)
    """0: a free one."""
    api_key_env: EnvName | None = None
    """Environment variable that holds the API key given to server and client."""
    start_timeout_s: Seconds = 3600
    stop_timeout_s: Seconds = 60


class EndpointServer(Strict):
    """A server that somebody else runs; neither started nor stopped."""

    kind: Literal["endpoint"]
    url: Url
    api_key_env: EnvName | None = None
    metrics_url: Url | None = None
    """Where its Prometheus metrics are, if not at ``<url>/metrics``."""
    max_concurrency: Concurrency | None = None
    """Ceiling: never more of our requests in flight. Steps above it are not measured."""
    kill_switch: str | None = Field(None, pattern=r"^/[^\x00]+$", max_length=4096)
    """A file, by its whole path. While it exists, this endpoint is not loaded; looked for every second."""
    quiet_s: float = Field(3.0, ge=0, le=3600)
    """It must have been idle for so long, by its own metrics, before it is loaded (0: not asked)."""
    quiet_patience_s: Seconds = 30
    """How long to wait for that; then it is in use by others, and refused."""
    start_timeout_s: Seconds = 60


class DockerServer(Strict):
    """A server in a container of its own, started by us on this machine's container engine."""

    kind: Literal["docker"]
    image: str = Field(pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")
    """By digest (``vllm/vllm-openai@sha256:...``, also ``name:tag@sha256:...``), so that it cannot change
    unseen. A tag is allowed: the digest it stands for is recorded, with a warning."""
    pull: Literal["missing", "always", "never"] = "missing"
    command: list[str] = Field(default_factory=lambda: ["vllm", "serve", "{source}"], min_length=1)
    """In place of the image's entrypoint; completed as for ``process``."""
    env: Env = Field(default_factory=dict)
    pass_env: list[EnvName] = Field(default_factory=list)
    """Variables given to the container with the values they have here, e.g. ``HF_TOKEN``."""
    api_key_env: EnvName | None = None
    """Environment variable that holds the API key given to server and client."""
    gpus: Literal["all"] | Annotated[int, Field(ge=1, le=64)] | list[str] | None = None
    """NVIDIA: ``all``, how many, or which (indices or UUIDs). Needs NVIDIA's container toolkit."""
    devices: list[Annotated[str, Field(pattern=r"^/dev/[^:\s]+$")]] = Field(default_factory=list)
    """Device files, e.g. AMD's ``/dev/kfd`` and ``/dev/dri``."""
    groups: list[str] = Field(default_factory=list)
    """Groups the devices need, e.g. ``video`` and ``render``."""
    security_opt: list[str] = Field(default_factory=list)
    model_cache: str | None = Field(None, pattern=r"^(/[^:\s]+|[A-Za-z0-9][A-Za-z0-9_.-]*)$")
    """A volume's name, or a folder of this machine, that keeps downloaded weights (``HF_HOME``)."""
    volumes: list[Annotated[str, Field(pattern=r"^[^:\s]+:/[^:\s]*(:(ro|rw))?$")]] = Field(
        default_factory=list
    )
    """``source:/target[:ro]``, e.g. for weights that lie in a folder."""
    shm_size: str = Field("8g", pattern=r"^[1-9]\d*[kmg]$")
    """Shared memory: tensor parallelism needs gigabytes of it."""
    container_port: int = Field(8000, ge=1, le=65535)
    port: int = Field(0, ge=0, le=65535)
    """On 127.0.0.1. 0: a free one."""
    start_timeout_s: Seconds = 3600
    stop_timeout_s: Seconds = 60


class SecretKey(Strict):
    """One key of a Kubernetes Secret, by name; its value is never read by us."""

    secret: str = Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
    key: str = Field(pattern=r"^[A-Za-z0-9._-]{1,253}$")


K8sName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class KubernetesServer(Strict):
    """A server in a Kubernetes cluster: a Deployment and a Service of its own, made and removed by us."""

    kind: Literal["kubernetes"]
    image: str = Field(pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")
    """By digest, if limits are to mean anything tomorrow; the digest that ran is recorded."""
    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: list[K8sName] = Field(default_factory=list)
    command: list[str] = Field(default_factory=lambda: ["vllm", "serve", "{source}"], min_length=1)
    """In place of the image's entrypoint; completed as for ``process``."""
    env: Env = Field(default_factory=dict)
    secret_env: dict[EnvName, SecretKey] = Field(default_factory=dict)
    """Variables from Secrets, e.g. ``HF_TOKEN: {secret: hf, key: token}``."""
    api_key_env: EnvName | None = None
    """Environment variable of the worker that holds the API key; needs ``api_key_secret``."""
    api_key_secret: SecretKey | None = None
    """Where the server's pod gets the same key from."""
    gpus: Annotated[int, Field(ge=1, le=64)] | None = None
    gpu_resource: str = Field("nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")
    """AMD: ``amd.com/gpu``."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    model_cache: K8sName | None = None
    """A PersistentVolumeClaim that keeps downloaded weights (``HF_HOME``)."""
    shm_size: str = Field("8Gi", pattern=r"^[1-9]\d*[KMG]i$")
    container_port: int = Field(8000, ge=1, le=65535)
    namespace: K8sName
    context: str | None = Field(None, min_length=1, max_length=253)
    """Of the kubeconfig (``KUBECONFIG``). ``null``: the cluster the worker runs in, else the current one."""
    url: Url | None = None
    """Where the Service is reached from outside the cluster; ``null``: by its DNS name, inside."""
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The Service's port on every node, for such a ``url``."""
    template: str | None = Field(None, min_length=1, max_length=4096)
    """Path of a template to use in place of ``include/config/kubernetes/server.yaml.j2``."""
    unschedulable_s: Seconds = 600
    """How long a pod may find no node: a cluster that grows needs minutes for one."""
    start_timeout_s: Seconds = 3600
    stop_timeout_s: Seconds = 60

    @model_validator(mode="after")
    def _key_twice(self) -> KubernetesServer:
        if (self.api_key_env is None) != (self.api_key_secret is None):
            raise ValueError("api_key_env (the client's) and api_key_secret (the server's) need each other")
        return self


SERVER_KINDS = ("simulator", "process", "docker", "kubernetes", "endpoint")
Server = Annotated[
    SimulatorServer | ProcessServer | DockerServer | KubernetesServer | EndpointServer,
    Field(discriminator="kind"),
]


def _plain_http(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        raise ValueError("expected http://host:port (TLS towards the server is the gateway's own matter)")
    if not re.fullmatch(r"[A-Za-z0-9._-]+(:\d+)?", parts.netloc):
        raise ValueError("expected a host name or IPv4 address, and a port")
    return url


class Gateway(Strict):
    """What stands before a model's server; for the files under ``policy/``."""

    replicas: int = Field(1, ge=1, le=10_000)
    """Gateways that send to one server: each counts for itself, so each gets its share of the limit."""
    processes: int = Field(1, ge=1, le=1024)
    """Worker processes of each, where they count for themselves (LiteLLM)."""
    listen: Annotated[str, AfterValidator(_listen)] = Field("0.0.0.0:8080", pattern=r"^[0-9.]+:[1-9]\d{0,4}$")
    """Address and port where the gateway listens (nginx, Envoy)."""
    upstream: Annotated[Url, AfterValidator(_plain_http)] = "http://127.0.0.1:8000"
    """Where the gateway finds the server."""
    fallbacks: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Models that LiteLLM asks instead when this one fails or is full."""


class Accelerator(Strict):
    """What servers occupy: never two at once."""

    kind: str
    """What it is, e.g. ``H100-SXM-80GB``; part of what limits are compared by."""
    count: int = Field(1, ge=1, le=4096)
    queue: Name | None = None
    """Airflow queue of the worker that has it (None: default): servers are started and loaded there."""
    budget_s: Seconds | None = None
    """Longest time a night may use it; what is proven by then is published."""
    latest_end: str | None = Field(None, pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """``HH:MM`` in the night's time zone: no step starts that would end later."""


class Model(Strict):
    """One model to plan for."""

    served_name: OneLine = Field(min_length=1, max_length=256)
    source: OneLine = ""
    """Where the weights come from (hub name or path)."""
    revision: OneLine | None = None
    vllm_args: list[str] = Field(default_factory=list)
    server: Server
    accelerator: Name
    mode: Literal["find", "exact"] = "find"
    """``find`` a limit, or measure ``exact``-ly the ladder's steps."""
    repeats: int = Field(1, ge=1, le=20)
    """Runs of each step in exact mode."""
    classes: dict[Name, ServiceClass]
    """Filled from the fleet's classes with the model's overrides merged in."""
    shared: bool = False
    """Also prove a pair of limits with both classes on the server at once."""
    gateway: Gateway = Gateway()

    @property
    def ceiling(self) -> int | None:
        """Most of our requests that the server may ever have in flight; None: no bound of its own."""
        return self.server.max_concurrency if isinstance(self.server, EndpointServer) else None

    @model_validator(mode="after")
    def _below_ceiling(self) -> Model:
        for name, item in self.classes.items():
            if self.ceiling is not None and self.mode == "exact" and item.ladder[0] > self.ceiling:
                raise ValueError(
                    f"classes.{name}.ladder: every step is above server.max_concurrency ({self.ceiling})"
                )
        return self


class StepBounds(Strict):
    """How long and how large steps are; defaults and reasons in the method."""

    prime_requests: int = Field(20, ge=1)
    """Prime: at least so many requests before anything is measured; more where a cold server is slow."""
    scout_requests: int = Field(100, ge=20)
    """Scout: ``max(scout_requests, 3 N)`` requests."""
    prove_requests: int = Field(600, ge=20)
    """Prove: ``max(prove_requests, 10 N)`` fresh requests."""
    prove_requests_max: int = Field(3000, ge=20)
    """... extended up to ``max(prove_requests_max, 10 N)`` while inconclusive."""
    min_window_s: Seconds = 30
    scout_cap_s: Seconds = 60
    prove_cap_s: Seconds = 600
    prove_cap_slow_s: Seconds = 3600
    """Where the server, by what was measured before, is too slow for a proof within ``prove_cap_s``: twice
    what the proof is expected to take, at most this."""
    warmup_cap_s: Seconds = 120
    pause_after_refusal_s: float = Field(1.0, gt=0, le=3600)
    resolution: float = Field(0.05, gt=0, lt=1)
    """Bisection ends at ``max(1, resolution x N)``."""


class Night(Strict):
    """When the nightly sweep runs."""

    schedule: Annotated[str, AfterValidator(_cron)] = "0 1 * * *"
    timezone: Annotated[str, AfterValidator(_zone)] = "UTC"
    max_lateness_s: Seconds = 7200
    """A run that starts later than this is skipped, so that it does not run into the day."""


class Publish(Strict):
    """Where results go."""

    to: str = Field(pattern=STORE_URL)
    connection: str = "aws_default"
    """Airflow connection for ``s3://``."""
    valid_for_s: Seconds = 3 * 86400
    """How long a published limit may be used (``valid_until``)."""
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption asked for with every object; None: as the bucket says."""
    sse_kms_key_id: str | None = None

    @model_validator(mode="after")
    def _encrypted(self) -> Publish:
        if self.sse_kms_key_id and self.sse not in ("aws:kms", "aws:kms:dsse"):
            raise ValueError("sse_kms_key_id needs sse: aws:kms (or aws:kms:dsse)")
        return self


class Notify(Strict):
    """Whom to tell of what, by one of Airflow's notifiers."""

    notifier: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    """The class, as ``package.module.Class``."""
    on: list[Literal["run_failed", "limit_fell", "limit_rose", "night_missed"]] = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)
    """The class's own. Its template fields may say ``{{ capacity.text }}`` and the like."""

    @model_validator(mode="after")
    def _no_secrets(self) -> Notify:
        named = [name for name in self.arguments if re.search(r"passw|secret|token|api_?key", name, re.I)]
        if secret := next(iter(named), None) or where_secret(self.arguments):
            raise ValueError(f"arguments.{secret}: a secret belongs into an Airflow connection")
        return self


class Fleet(Strict):
    """All models to plan for, with their servers."""

    fleet: Name
    night: Night = Night()
    publish: Publish
    notify: list[Notify] = Field(default_factory=list)
    accelerators: dict[Name, Accelerator] = Field(min_length=1)
    steps: StepBounds = StepBounds()
    classes: dict[Name, ServiceClass] = Field(min_length=1)
    models: dict[Name, Model] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> Fleet:
        """Task groups, files and folders are named after these, in a form that keeps less of them."""
        _distinct("models", self.models)
        taken = [name for name in self.models if slug(name) in RUN_TASKS]
        if taken:
            raise ValueError(f"models: {taken[0]!r} is the name of a task of the whole run; choose another")
        _distinct("classes", self.classes)
        _distinct("accelerators", self.accelerators)
        return self

    @model_validator(mode="after")
    def _references(self) -> Fleet:
        for name, model in self.models.items():
            if model.accelerator not in self.accelerators:
                raise ValueError(
                    f"models.{name}.accelerator: {model.accelerator!r} is none of {sorted(self.accelerators)}"
                )
        return self


def load_fleet(path: str | Path | None = None) -> Fleet:
    """Read and validate a fleet file (default: ``$CAPACITY_FLEET``, else the one shipped)."""
    file = Path(path or os.environ.get(FLEET_ENV) or DEFAULT_FLEET)
    return parse_fleet(read_text(file), str(file))


def read_text(file: Path) -> str:
    """A configuration file's text; ConfigError if it cannot be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error}") from error


def parse_fleet(text: str, where: str) -> Fleet:
    """Validate the text of a fleet file; ``where`` names it in errors."""
    data = parse_yaml(text, where)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping at the top, found {type(data).__name__}")
    return validate(Fleet, _inherit_classes(data, where), where)


def parse_yaml(text: str, where: str) -> Any:
    """YAML without tags, aliases that explode, or repeated keys."""
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    _printable(data, where)
    return data


def _printable(data: Any, where: str, path: str = "(top)") -> None:
    """ConfigError for text with control characters: no name, path or argument has any."""
    if isinstance(data, dict):
        for key, value in data.items():
            _printable(key, where, path)
            _printable(value, where, f"{path}.{key}".removeprefix("(top)."))
    elif isinstance(data, list):
        for value in data:
            _printable(value, where, path)
    elif isinstance(data, str) and (found := _CONTROL.search(data)):
        raise ConfigError(f"{where}: {path}: holds the control character {found.group()!r}")


def validate(kind: type[T], data: Any, where: str) -> T:
    """``data`` as a ``kind``; ConfigError lists every problem with its path and value."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            loc, value = problem["loc"], problem.get("input")
            no_name = problem.get("ctx", {}).get("pattern") == ENV_NAME
            hidden = no_name or any(is_secret(str(part)) for part in loc)
            path = _path(loc)
            shown = "" if isinstance(value, dict) else f", found {MASK if hidden else _short(value)}"
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {path}: {message}{shown}")
        raise ConfigError("\n".join(lines)) from None  # pydantic's own text repeats the values


def _inherit_classes(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Give every model the fleet's classes, with its own ``classes`` entries merged over them.

    A model's ``classes`` may name a fleet class with ``null`` to leave it out.
    """
    base = data.get("classes")
    models = data.get("models")
    if not isinstance(base, dict) or not isinstance(models, dict):
        return data
    filled = {}
    for name, model in models.items():
        if not isinstance(model, dict):
            raise ConfigError(f"{where}: models.{name}: expected a mapping, found {_short(model)}")
        overrides = model.get("classes") or {}
        if not isinstance(overrides, dict):
            raise ConfigError(
                f"{where}: models.{name}.classes: expected a mapping, found {_short(overrides)}"
            )
        unknown = sorted(set(overrides) - set(base))
        if unknown:
            raise ConfigError(f"{where}: models.{name}.classes: {unknown} are none of {sorted(base)}")
        classes = {
            key: _merged(value, overrides.get(key, {}))
            for key, value in base.items()
            if not (key in overrides and overrides[key] is None)
        }
        filled[name] = {**model, "classes": classes}
    return {**data, "models": filled}


def _merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            **base,
            **{key: _merged(base[key], value) if key in base else value for key, value in over.items()},
        }
    return over


def _path(loc: tuple[int | str, ...]) -> str:
    """``models.x.server.port``: pydantic's location without the union tag after ``server``.

    What is no variable's name where one belongs (``secret_env``) may be the secret itself.
    """
    parts: list[str] = []
    for before, part in zip(("", *loc), map(str, loc), strict=False):
        if before == "secret_env" and not re.match(ENV_NAME, part):
            parts.append(MASK)
        elif not (before == "server" and part in SERVER_KINDS):
            parts.append(part)
    return ".".join(parts) or "(top)"


def _distinct(key: str, names: Iterable[str]) -> None:
    """ValueError if two names are the same but for case and punctuation."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(slug(name).lower(), name)
        if other != name:
            raise ValueError(f"{key}: {other!r} and {name!r} differ only in case or punctuation")


def _short(value: object) -> str:
    text = redact_text(repr(value)[:1000])
    return text if len(text) <= 80 else text[:77] + "..."


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys, aliases and tags; dates, on, off, yes and no are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [
            (tag, pattern)
            for tag, pattern in known
            if tag != "tag:yaml.org,2002:timestamp" and (tag != "tag:yaml.org,2002:bool" or first in "tTfF")
        ]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not allowed", event.start_mark
            )
        if getattr(self.peek_event(), "tag", None) is not None:
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"tags ({event.tag}) are not allowed", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise yaml.constructor.ConstructorError(None, None, "keys must be plain", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def slug(text: str) -> str:
    """``text`` in a form that names a task group: letters, digits and ``_``."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text)
