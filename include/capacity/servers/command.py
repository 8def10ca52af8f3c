"""The command line of a server of our own, whatever starts it: a process, a container, a pod."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from include.capacity.config import Model
from include.capacity.errors import ConfigError
from include.capacity.redact import redact_text

OURS = {"--host": "server.host", "--port": "server.port", "--served-model-name": "served_name"}
"""vLLM's options that are appended to a command -> where they come from."""

_PLACEHOLDER = re.compile(r"\{(source|served_name|host|port|revision)\}")


def command_line(model_key: str, model: Model, configured: Sequence[str]) -> list[str]:
    """The configured command; with vLLM's arguments appended where it mentions no ``{port}``.

    Placeholders are left in. ConfigError for what would be read as an option or shown to everybody.
    """
    where = f"models.{model_key}"
    command = list(configured)
    if not any("{port}" in arg for arg in command):
        _refuse_ours(model.vllm_args, where)
        command += ["--host", "{host}", "--port", "{port}", "--served-model-name", "{served_name}"]
        command += ["--revision", "{revision}"] if model.revision else []
        command += model.vllm_args
    for arg in command:
        if "\0" in arg:
            raise ConfigError(f"{where}: argument {arg!r} holds a zero byte")
        if _shows_secret(arg):
            shown = arg.partition("=")[0] if arg.startswith("-") else "an argument"
            raise ConfigError(
                f"{where}: {shown} shows a secret in process lists; name the API key's variable in "
                "server.api_key_env, and keep tokens in the environment"
            )
    used = {name for arg in command for name in _PLACEHOLDER.findall(arg)}
    for name, value in {
        "source": model.source,
        "served_name": model.served_name,
        "revision": model.revision,
    }.items():
        if name in used and not value:
            raise ConfigError(f"{where}.{name}: the server's command needs it, found nothing")
        if value and (value.startswith("-") or "\0" in value):
            raise ConfigError(f"{where}.{name}: {value!r} would be read as an option")
    return command


def _shows_secret(arg: str) -> bool:
    """Whether an argument is, or brings, a secret; vLLM takes options cut short, and ``_`` for ``-``, too."""
    option = arg.partition("=")[0].replace("_", "-")
    cut_short = any(full.startswith(option) and len(option) >= 6 for full in ("--api-key", "--hf-token"))
    return cut_short or redact_text(arg) != arg


def _refuse_ours(vllm_args: Sequence[str], where: str) -> None:
    """ConfigError for options that would overrule ours: the last one counts, and opens another address."""
    for arg in vllm_args:
        option = arg.partition("=")[0].replace("_", "-")
        full = next((one for one in OURS if one.startswith(option) and len(option) >= 4), None)
        if full:
            raise ConfigError(f"{where}.vllm_args: {full} is set from {OURS[full]}; say it there")


def fill(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with its placeholders filled in; other braces stay as they are."""
    return [_PLACEHOLDER.sub(lambda match: values[match.group(1)], arg) for arg in command]


def endpoints_of(model: Model) -> list[str]:
    """The API endpoints that the model's classes will load."""
    return sorted({item.workload.endpoint for item in model.classes.values()}) or ["chat"]
