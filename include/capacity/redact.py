"""Keeping secrets out of what people and files are told: logs, errors, reports.

A secret is known by its value (the key in use), by its name (``api_key=...``, ``--api-key ...``), by its look
(``sk-...``), or by where it stands: behind ``Bearer``, in the user's part of a URL, in a signature.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth(?!or)", re.IGNORECASE)
_NOT_SECRET = re.compile(
    r"tokens|tokenizer|token[-_]?(id|budget|limit|len)|key[-_]?(value|norm)", re.IGNORECASE
)
_SECRET_LOOK = re.compile(r"\b(sk-|hf_|ghp_|xox[abp]-|AKIA|eyJ)[A-Za-z0-9._-]{8,}")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SIGNED = re.compile(
    r"(?<=[?&])(X-Amz-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId|sig|token|api[-_]?key|key)"
    r"=[^&\s\"'<>]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?<=bearer )\s*(?!tokens?\b)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_CREDENTIAL = (
    r"(?:[a-z0-9_-]*[_-])?(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|"
    r"(?:hf|hub|auth|access|api|security|session|refresh)[_-]?token)"
)
"""Names that nothing else than a secret has; in free text ``key`` and ``token`` are mostly something else."""
_NAMED = re.compile(
    rf"(?<![a-z0-9_-])({_CREDENTIAL}[\"']?\s*(?:=|:\s*(?=[\"'[]))\s*\[?[\"']?|-{{1,2}}{_CREDENTIAL}\s+[\"']?)"
    r"(?!\*\*\*)[^\s\"',;&}\]]+",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether what has this name (an option, a variable, a key) is likely a secret."""
    return bool(_SECRET_NAME.search(_NOT_SECRET.sub("", name)))


def redact_text(text: str, secrets: Iterable[str | None] = ()) -> str:
    """``text`` without the given secrets, what looks like a key, passwords in URLs and URLs' signatures."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _SIGNED.sub(lambda match: f"{match.group(1)}={MASK}", text)
    text = _NAMED.sub(lambda match: f"{match.group(1)}{MASK}", _BEARER.sub(MASK, text))
    return _URL_PASSWORD.sub(MASK, _SECRET_LOOK.sub(MASK, text))


def where_secret(data: Any, path: str = "") -> str | None:
    """The path of the first value in JSON-like data that is likely a secret; None if there is none."""
    if isinstance(data, dict):
        for name, value in data.items():
            below = f"{path}.{name}".strip(".")
            if isinstance(value, str) and value and re.fullmatch(_CREDENTIAL, str(name), re.IGNORECASE):
                return below
            if found := where_secret(value, below):
                return found
    elif isinstance(data, list):
        return next((found for item in data if (found := where_secret(item, path))), None)
    elif isinstance(data, str) and redact_text(data) != data:
        return path
    return None
