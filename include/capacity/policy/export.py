"""From a sweep's limits to the files of every format; see the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from include.capacity.config import Gateway, Retries, validate
from include.capacity.limits.claims import entries_of, why_not
from include.capacity.policy.base import ClassLimit, NotPossible, Policy, one_line
from include.capacity.results.store import safe_name

FORMATS = {
    "litellm": "include.capacity.policy.litellm",
    "envoy-gateway": "include.capacity.policy.envoy_gateway",
    "envoy": "include.capacity.policy.envoy",
    "nginx": "include.capacity.policy.nginx",
    "vllm": "include.capacity.policy.vllm",
}

SCHEMA = 1
CLASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NO_LIMIT = "NO-LIMIT.txt"
INDEX = "policy/index.json"


def policy_files(
    about: Mapping[str, Any], limits: Mapping[str, Any], gateway: Gateway | None = None
) -> dict[str, bytes]:
    """Name (``policy/...``) -> content of every file for one sweep.

    ``about``: sweep.json; ``limits``: limits.json; ``gateway``: instead of the one in sweep.json. ConfigError
    if retries or gateway in sweep.json are not what they should be, DataError if limits.json is not.
    """
    files: dict[str, bytes] = {}
    entries = []
    for folder, measured, made in _policies(about, limits, gateway):
        written, reasons = {}, {}
        for name, module in FORMATS.items():
            if isinstance(made, str):
                reasons[name] = made
                continue
            form = import_module(module)
            try:
                text = form.render(made)
            except NotPossible as why:
                reasons[name] = str(why)
                continue
            written[name] = f"{folder}/{form.FILE}"
            files[written[name]] = text.encode()
        if reasons:
            files[f"{folder}/{NO_LIMIT}"] = _why_not(reasons).encode()
        classes = () if isinstance(made, str) else made.classes
        entries.append(
            {
                "measured": "shared" if folder == "policy/shared" else "alone",
                "classes": dict.fromkeys(measured) | {item.name: item.limit for item in classes},
                "files": written,
                "why_not": reasons,
            }
        )
    index = {
        "schema": SCHEMA,
        "model": about["model"],
        "run_id": about.get("run_id"),
        "valid_until": limits.get("valid_until"),
        "policies": entries,
    }
    files[INDEX] = (json.dumps(index, indent=1, allow_nan=False) + "\n").encode()
    return files


def _policies(
    about: Mapping[str, Any], limits: Mapping[str, Any], gateway: Gateway | None
) -> Iterator[tuple[str, list[str], Policy | str]]:
    """(folder, classes, the policy or why there is none) of every class alone and of the pair."""
    entries = entries_of(limits, "limits.json")
    alone = [entry for entry in entries if entry.get("measured", "alone") == "alone"]
    for entry in alone:
        series = f"{safe_name(entry['series'])}/" if entry.get("series") else ""
        folder = f"policy/alone/{series}{safe_name(entry['class'])}"
        yield folder, [entry["class"]], _policy(about, limits, [entry], gateway)
    names = list(dict.fromkeys(entry["class"] for entry in alone))
    if len(names) > 1:
        pair = [entry for entry in entries if entry.get("measured") == "shared"]
        made: Policy | str = (
            _not_a_pair(pair) or _policy(about, limits, pair, gateway)
            if pair
            else "no pair was proven together (shared: true in the fleet file measures one), and limits "
            "measured alone do not add up"
        )
        yield "policy/shared", names, made


def _policy(
    about: Mapping[str, Any],
    limits: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    gateway: Gateway | None,
) -> Policy | str:
    """The policy of these limits, or why there is none."""
    parts = []
    for entry in entries:
        if unusable := why_not(entry, about):
            return unusable
        name = str(entry["class"])
        if not CLASS_NAME.fullmatch(name):  # it becomes a path at the gateway
            return f"{name!r} is no name of a class"
        if entry.get("deadline_s") is None:
            return f"{name} has no deadline, and a limit means nothing without one"
        service = (about.get("classes") or {}).get(name)
        where = f"sweep.json: classes.{name}.retries"
        if service is None:
            return f"sweep.json does not say what class {name} was measured with"
        parts.append(
            ClassLimit(
                name=name,
                limit=int(entry["limit"]),
                deadline_s=float(entry["deadline_s"]),
                retries=validate(Retries, service.get("retries") or {}, where),
                status=str(entry["status"]),
                claim=str(entry.get("claim") or ""),
            )
        )
    return Policy(
        model=str(about["model"]),
        served_name=str(about.get("served_name") or about["model"]),
        run_id=str(about.get("run_id")),
        valid_until=limits.get("valid_until"),
        simulated=bool(about.get("simulated")),
        vllm_version=(about.get("stack") or {}).get("vllm_version"),
        gateway=gateway or validate(Gateway, about.get("gateway") or {}, "sweep.json: gateway"),
        classes=tuple(parts),
    )


def _not_a_pair(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Why these entries are not one pair that was on the server together; None if they are."""
    limits = {entry["class"]: entry.get("limit") for entry in entries}
    for entry in entries:
        if entry.get("limit") is None:
            continue  # its own reason says more
        others = {name: limit for name, limit in limits.items() if name != entry["class"]}
        if not others or (entry.get("beside") or {}) != others:
            return f"{entry['class']} was proven beside {entry.get('beside')}, not beside {others}"
    return None


def _why_not(reasons: Mapping[str, str]) -> str:
    """Text for people: one reason for all formats, or each with its own."""
    lines = ["There is no limit here for a gateway to use."] if len(reasons) == len(FORMATS) else []
    if len(set(reasons.values())) == 1 and lines:
        return f"{lines[0]}\n{one_line(next(iter(reasons.values())))}\n"
    return "\n".join([*lines, *(f"{name}: {one_line(reason)}" for name, reason in reasons.items())]) + "\n"
