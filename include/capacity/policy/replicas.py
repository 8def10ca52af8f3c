"""Replicas for a day: from proven limits and a demand file, by hour.

::

    replicas = ceil(demand x (1 + headroom) / completed requests per second at the limit)

The rate is that of the very requests that proved the limit (less in proportion, where the limit was capped
below them). A model's classes get servers of their own (the sum of both), or share all (the larger of both,
at the rates of a pair proven together), whichever takes fewer replica hours over the day.

A limit says nothing about other lengths: where the demand's mean lengths are more than 10 % off those
measured, there is no plan. An hour without a row is unknown, not idle.

Beside each number stands the share of requests that would find all places taken if they came at random
(Poisson) and found any free place: Erlang's loss formula with ``replicas x limit`` places, each held
``limit / rate`` seconds. It is what headroom is for; nothing is decided by it.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BeforeValidator, Field
from scipy.stats import poisson

from include.capacity.config import Strict, parse_yaml, read_text, validate
from include.capacity.errors import ConfigError, DataError, NoLimit
from include.capacity.limits.claims import entries_of, why_not
from include.capacity.results.store import open_object, open_store
from include.capacity.results.sweepdir import SweepDir

HOURS = range(24)
HEADROOM = 0.2
LENGTHS_AGREE = 0.10
"""Largest relative difference of mean lengths."""
MOST_PLACES = 10_000
"""Up to which Erlang's formula is summed place by place."""

ASSUMES = (
    "requests are spread over the replicas so that none is above its limit",
    "the demand's mean lengths stand for a distribution like the measured one",
    "an hour's demand is its mean rate; headroom is for what varies within it",
    "replicas start and stop on the hour, at no cost",
)

Blank = BeforeValidator(lambda value: None if value == "" else value)


class Demand(Strict):
    """What one class of one model is asked for in one hour of the day."""

    hour: int = Field(ge=0, le=23)
    model: str = Field(min_length=1)
    service_class: str = Field(min_length=1, alias="class")
    requests_per_s: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    prompt_tokens: float = Field(gt=0, allow_inf_nan=False)
    """Mean of a request."""
    output_tokens: float = Field(gt=0, allow_inf_nan=False)
    price_per_hour: Annotated[float | None, Blank] = Field(None, ge=0, le=1e9, allow_inf_nan=False)
    """Of one replica."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What one server does for a class at its limit."""

    limit: int
    request_per_s: float
    """Completed, at the limit."""
    prompt_tokens: float
    output_tokens: float
    """Means over the requests that proved the limit."""


Key = tuple[str, str, str]
"""(model, class, alone or shared)."""


def read_demand(path: Path) -> list[Demand]:
    """The rows of a CSV file with a heading, or of a YAML list; ConfigError names row, key and value."""
    text = read_text(path)
    rows: Any
    if path.suffix.lower() == ".csv":
        try:
            rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))  # as Excel writes it
        except csv.Error as error:
            raise ConfigError(f"{path}: not CSV: {error}") from error
    else:
        rows = parse_yaml(text, str(path))
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: expected a list of rows (hour, model, class, requests_per_s, ...)")
    found = [validate(Demand, row, f"{path}: row {at}") for at, row in enumerate(rows, 1)]
    seen: set[tuple[int, str, str]] = set()
    for row in found:
        key = (row.hour, row.model, row.service_class)
        if key in seen:
            raise ConfigError(f"{path}: hour {row.hour} of {row.model} {row.service_class} is given twice")
        seen.add(key)
    return found


def read_capacities(where: str) -> tuple[dict[Key, Capacity | str], bool]:
    """(capacity or why there is none, of each limit; whether a server was simulated).

    ``where``: path, ``file://`` or ``s3://`` of a sweep directory (published or not), of its ``limits.json``,
    or of a ``latest/limits.json`` beside the runs it names. DataError if it is none of these.
    """
    store, name = open_object(where)
    try:
        found = json.loads(store.read(name or "limits.json"))
        entries = entries_of(found, where)
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: expected limits.json of a sweep or of latest/: {error}") from error
    latest = "updated_by_run" in found
    if latest:
        store = open_store(store.url.rpartition("/")[0])
    sweeps: dict[str, tuple[dict[str, Any], pd.DataFrame]] = {}
    result: dict[Key, Capacity | str] = {}
    for entry in entries:
        if latest and not (entry.get("report") and entry.get("valid_until")):
            raise DataError(f"{where}: the entry of {entry['class']} names no report or no valid_until")
        folder = str(entry["report"]).rpartition("/")[0] if latest else ""
        if folder not in sweeps:
            sweeps[folder] = _measured(SweepDir(store, folder), where)
        about, steps = sweeps[folder]
        key = (str(about["model"]), str(entry["class"]), str(entry.get("measured") or "alone"))
        expired = _expired(entry) if latest else None
        result[key] = expired or _capacity(entry, about, steps)
    return result, any(bool(about.get("simulated")) for about, _ in sweeps.values())


def _expired(entry: Mapping[str, Any]) -> str | None:
    """Why a current limit is one no longer; None while it is."""
    if datetime.fromisoformat(entry["valid_until"]) >= datetime.now(UTC):
        return None
    why = (entry.get("last_attempt") or {}).get("reason")
    return f"the limit of {entry['limit']} was valid until {entry['valid_until']}{f'; {why}' if why else ''}"


def _measured(sweep: SweepDir, where: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """What a limit was measured with, and its steps."""
    try:
        about = sweep.read_json("sweep.json")
        if not isinstance(about, dict) or "model" not in about:
            raise DataError(f"{where}: its sweep.json is not what a sweep writes")
        return about, sweep.steps()
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename or error}: missing; the lengths that {where} was measured with are there"
        ) from error


def _capacity(entry: Mapping[str, Any], about: Mapping[str, Any], steps: pd.DataFrame) -> Capacity | str:
    """What a limit's entry and the steps that proved it say, or why they say nothing."""
    if unusable := why_not(entry, about):
        return unusable
    evidence = entry.get("evidence") or {}
    at, rate = evidence.get("concurrency"), evidence.get("request_per_s")
    phases = ("shared",) if entry.get("measured") == "shared" else ("prove", "grid")
    mine = steps[
        (steps["service_class"] == entry["class"])
        & (steps["concurrency"] == at)
        & steps["phase"].isin(phases)
    ]
    weight = mine["completed"]
    if not at or not rate or not weight.sum() > 0:
        return "the rate and the lengths at the limit are not known"
    return Capacity(
        limit=int(entry["limit"]),
        request_per_s=float(rate) * min(1.0, entry["limit"] / at),
        prompt_tokens=float((mine["prompt_tokens_mean"] * weight).sum() / weight.sum()),
        output_tokens=float((mine["tokens_per_answer_mean"] * weight).sum() / weight.sum()),
    )


def plan(
    demand: Sequence[Demand], capacities: Mapping[Key, Capacity | str], headroom: float = HEADROOM
) -> dict[str, Any]:
    """``{"headroom", "assumes", "models": [{"model", "layout", "hours", "most", "replica_hours", "cost"}]}``.

    ``layout``: alone (servers of their own) or shared. Each of ``hours`` has ``hour``, ``replicas``, ``cost``
    and, per class, ``requests_per_s``, ``replicas`` and ``refused_share``; an hour that lacks a class's row
    has ``replicas`` None and ``missing``. Totals are None where an hour (or a price) is missing. DataError
    for a model or class without an entry; NoLimit where a limit may not be used, or the lengths differ.
    """
    models = list(dict.fromkeys(row.model for row in demand))
    return {
        "headroom": headroom,
        "assumes": list(ASSUMES),
        "models": [
            _model([row for row in demand if row.model == model], model, capacities, headroom)
            for model in models
        ],
    }


def _model(
    rows: Sequence[Demand], model: str, capacities: Mapping[Key, Capacity | str], headroom: float
) -> dict[str, Any]:
    names = list(dict.fromkeys(row.service_class for row in rows))
    alone = {name: _usable(model, name, "alone", capacities) for name in names}
    layouts = {"alone": alone}
    pair = {name: capacities.get((model, name, "shared")) for name in names}
    if len(names) > 1 and all(isinstance(one, Capacity) for one in pair.values()):
        layouts["shared"] = {name: one for name, one in pair.items() if isinstance(one, Capacity)}
    for row in rows:
        if row.requests_per_s > 0:
            _lengths_agree(row, alone[row.service_class])
    plans = {
        layout: [_hour(hour, rows, names, able, layout, headroom) for hour in HOURS]
        for layout, able in layouts.items()
    }
    chosen = min(plans, key=lambda layout: sum(hour["replicas"] or 0 for hour in plans[layout]))
    hours = plans[chosen]
    complete = all(hour["replicas"] is not None for hour in hours)
    return {
        "model": model,
        "layout": chosen,
        "hours": hours,
        "most": max((hour["replicas"] for hour in hours if hour["replicas"] is not None), default=None),
        "replica_hours": sum(hour["replicas"] for hour in hours) if complete else None,
        "cost": sum(hour["cost"] for hour in hours)
        if complete and all(hour["cost"] is not None for hour in hours)
        else None,
    }


def _hour(
    hour: int,
    rows: Sequence[Demand],
    names: Sequence[str],
    able: Mapping[str, Capacity],
    layout: str,
    headroom: float,
) -> dict[str, Any]:
    asked = {row.service_class: row for row in rows if row.hour == hour}
    missing = [name for name in names if name not in asked]
    if missing:
        return {"hour": hour, "replicas": None, "cost": None, "missing": missing, "classes": {}}
    needed = {
        name: max(
            math.ceil(row.requests_per_s * (1 + headroom) / able[name].request_per_s - 1e-9),
            int(row.requests_per_s > 0),  # a little is not nothing
        )
        for name, row in asked.items()
    }
    replicas = max(needed.values()) if layout == "shared" else sum(needed.values())
    prices = {row.price_per_hour for row in asked.values()} - {None}
    if len(prices) > 1:
        raise ConfigError(f"hour {hour} of {rows[0].model}: price_per_hour is {sorted(map(str, prices))}")
    price = next(iter(prices), None)
    return {
        "hour": hour,
        "replicas": replicas,
        "cost": None if price is None else price * replicas,
        "missing": [],
        "classes": {
            name: {
                "requests_per_s": row.requests_per_s,
                "replicas": needed[name],
                "refused_share": refused_share(
                    (replicas if layout == "shared" else needed[name]) * able[name].limit,
                    row.requests_per_s * able[name].limit / able[name].request_per_s,
                ),
            }
            for name, row in asked.items()
        },
    }


def _usable(model: str, name: str, measured: str, capacities: Mapping[Key, Capacity | str]) -> Capacity:
    found = capacities.get((model, name, measured))
    if found is None:
        known = sorted(f"{key[0]} {key[1]}" for key in capacities if key[2] == measured)
        raise DataError(f"demand for {model} {name}: there is no such limit; there are {', '.join(known)}")
    if isinstance(found, str):
        raise NoLimit(f"{model} {name}: no limit to plan with: {found}")
    return found


def _lengths_agree(row: Demand, able: Capacity) -> None:
    off = []
    for what in ("prompt_tokens", "output_tokens"):
        asked, measured = getattr(row, what), getattr(able, what)
        difference = asked / measured - 1
        if not abs(difference) <= LENGTHS_AGREE:
            off.append(f"{what} {asked:g} against {measured:.0f} measured ({difference:+.0%})")
    if off:
        raise NoLimit(
            f"{row.model} {row.service_class}, hour {row.hour}: {'; '.join(off)}. A limit says nothing about "
            "other lengths: measure with a workload like the demand's"
        )


def refused_share(places: int, offered: float) -> float:
    """Erlang's loss formula: the share of random arrivals that find all ``places`` taken.

    ``offered``: arrivals per second times seconds a place is held. Independent of how these are distributed.

    >>> round(refused_share(1, 1.0), 3), round(refused_share(2, 1.0), 3)
    (0.5, 0.2)
    """
    if offered <= 0:
        return 0.0
    if places > MOST_PLACES:  # the same in closed form: Poisson's density over its distribution
        ratio = poisson.logpmf(places, offered) - poisson.logcdf(places, offered)
        return min(1.0, math.exp(ratio))
    loss = 1.0
    for place in range(1, places + 1):
        loss = offered * loss / (place + offered * loss)
    return loss


def replicas_table(found: Mapping[str, Any]) -> str:
    """The plan for people."""
    lines = []
    for model in found["models"]:
        how = (
            "both classes on every server" if model["layout"] == "shared" else "each class on its own servers"
        )
        lines.append(f"{model['model']} ({how})" if len(_classes(model)) > 1 else model["model"])
        for hour in model["hours"]:
            if hour["replicas"] is None:
                lines.append(f"  {hour['hour']:02d}  unknown: no row for {', '.join(hour['missing'])}")
                continue
            detail = ", ".join(
                f"{name} {one['requests_per_s']:g}/s (full for {one['refused_share']:.1%})"
                for name, one in hour["classes"].items()
            )
            cost = "" if hour["cost"] is None else f"  {hour['cost']:,.2f}"
            lines.append(f"  {hour['hour']:02d}  {hour['replicas']:4d} replicas{cost}  {detail}")
        total = "unknown" if model["replica_hours"] is None else f"{model['replica_hours']:,}"
        cost = "" if model["cost"] is None else f", cost {model['cost']:,.2f}"
        lines.append(
            f"  most {model['most'] if model['most'] is not None else 'unknown'}, replica hours {total}{cost}"
        )
    lines.append(f"With {found['headroom']:.0%} headroom. Assumes that {'; '.join(found['assumes'])}.")
    lines.append('"full for": share of requests that would find no free place if they came at random.')
    return "\n".join(lines)


def _classes(model: Mapping[str, Any]) -> set[str]:
    return {name for hour in model["hours"] for name in hour["classes"]}
