"""Keeping secrets out of what people and files are told: logs, errors, reports.

A secret is known by its value (the key in use), by its name (``api_key: ...``), by its look (``sk-...``), or
by where it stands: the user's part of a URL, the signature in a presigned one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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


def is_secret(name: str) -> bool:
    """Whether what has this name (an option, a variable, a key) is likely a secret."""
    return bool(_SECRET_NAME.search(_NOT_SECRET.sub("", name)))


def redact_text(text: str, secrets: Iterable[str | None] = ()) -> str:
    """``text`` without the given secrets, what looks like a key, passwords in URLs and URLs' signatures."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _SIGNED.sub(lambda match: f"{match.group(1)}={MASK}", text)
    return _URL_PASSWORD.sub(MASK, _SECRET_LOOK.sub(MASK, text))
