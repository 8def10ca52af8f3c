"""API keys: named in the fleet file, read from the environment at the moment of use, kept nowhere."""

from __future__ import annotations

import os

from include.capacity.errors import ConfigError


def api_key(name: str | None) -> str | None:
    """The key in that environment variable; ConfigError if a name is given and it is not set."""
    if name is None:
        return None
    if not (value := os.environ.get(name)):
        raise ConfigError(f"environment variable {name} (server.api_key_env) is not set")
    return value


def key_if_set(name: str | None) -> str | None:
    """The API key in that variable, to be masked; ``None`` without one."""
    return os.environ.get(name) if name else None
