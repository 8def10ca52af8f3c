"""What a gateway's file must say, whatever its format, and how to say it safely.

Names (of models, of classes) come from outside: ``comment`` keeps them inside a comment, ``identifier``
makes from them what every format takes as a name, YAML writers quote the rest.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from include.capacity.config import Gateway, Retries

FREE_PATHS = ("/health", "/metrics", "/version", "/v1/models")
"""Not counted: a full server is still healthy, and its probes must see that."""

WIDTH = 100
"""Of comments, in characters."""


class NotPossible(Exception):
    """This format cannot carry this limit; the message is the reason, for people."""


@dataclass(frozen=True, kw_only=True)
class ClassLimit:
    """One class's part of a policy."""

    name: str
    limit: int
    """Requests in flight at the server, from all gateways together."""
    deadline_s: float
    """For the whole answer, from the request on."""
    retries: Retries
    status: str
    claim: str


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one server may be given: by one class alone, or by two that were proven together."""

    model: str
    served_name: str
    run_id: str
    valid_until: str | None
    simulated: bool
    vllm_version: str | None
    """Of the server that was measured; None if unknown."""
    gateway: Gateway
    classes: tuple[ClassLimit, ...]

    @property
    def shared(self) -> bool:
        """Two classes on one server."""
        return len(self.classes) > 1

    def divided(self, item: ClassLimit, counters: int, who: str) -> int:
        """The limit of each of ``counters``; NotPossible if there are more of them than requests."""
        each = item.limit // counters
        if each < 1:
            raise NotPossible(
                f"{item.name}: a limit of {item.limit} cannot be divided among {counters} {who}; "
                "use fewer of them, or let one gateway stand before this server"
            )
        return each

    def path(self, item: ClassLimit) -> str:
        """Where clients reach the class at the gateway: ``/`` alone, ``/<class>/`` shared."""
        return f"/{item.name}/" if self.shared else "/"

    def identifier(self, item: ClassLimit) -> str:
        """A name for the class's part in a configuration: ``[a-z0-9-]``, no other policy has the same."""
        return identifier(self.model, item.name, "shared" if self.shared else "alone")


def identifier(*names: str) -> str:
    """A name of letters, digits and hyphens (a DNS label of at most 52 characters) for a list of names.

    Readable, and distinct for distinct lists by its digest.

    >>> identifier("steady", "interactive")
    'steady-interactive-48cbe7b1'
    """
    whole = "\0".join(names).encode(errors="surrogatepass")
    readable = re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")[:43].strip("-")
    return f"{readable or 'capacity'}-{hashlib.sha256(whole).hexdigest()[:8]}"


def one_line(text: str) -> str:
    """``text`` with everything that could end a line, or is no character, spelled out."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def comment(*paragraphs: str) -> str:
    """Paragraphs as comments of YAML and nginx alike: whatever is in them, every line begins with ``#``."""
    lines = [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(one_line(paragraph), WIDTH, break_on_hyphens=False) or [""]
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def heading(policy: Policy, *counts: str) -> str:
    """The comments every file begins with: what for, from where, what was proven, how this format counts."""
    both = " and ".join(item.name for item in policy.classes)
    return comment(
        f"{both} of model {policy.model} ({policy.served_name})"
        + ("; SIMULATED server, for trying out only" if policy.simulated else ""),
        f"run {policy.run_id}, valid until {policy.valid_until or 'unknown: not published yet'}",
        "",
        *(
            f"{item.name}: at most {item.limit} in flight ({item.status}). {item.claim}"
            for item in policy.classes
        ),
        "Proven for both classes together; neither may take what the other leaves free."
        if policy.shared
        else "Measured alone: for a server that serves nothing else.",
        "For one server; where there are more, each gets an entry of its own with this limit.",
        "",
        *counts,
    )


def division(policy: Policy) -> str:
    """The sentence on how many count."""
    count = policy.gateway.replicas
    if count == 1:
        return "This is for one gateway before the server (gateway.replicas: 1)."
    return f"{count} gateways stand before the server (gateway.replicas); this is each one's share."


def to_yaml(data: Mapping[str, Any]) -> str:
    """YAML that every parser reads as the same data: ASCII, block style, strings quoted where needed."""
    return yaml.dump(data, Dumper=_Quoting, sort_keys=False, allow_unicode=False, width=100)


class _Quoting(yaml.SafeDumper):
    """Strings in double quotes: no parser takes ``no``, ``1e3`` or ``0o7`` for something else."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z][A-Za-z_./@-]*", text) and yaml.safe_load(text) == text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Quoting.add_representer(str, _text)
