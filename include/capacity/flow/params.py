"""What a person may ask of one run: the parameters of a form, validated, and those of a sweep applied.

Blank means "as the fleet file says". An unknown key is an error: Airflow itself accepts any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from include.capacity.config import MAX_CONCURRENCY, Fleet, Ladder, Seconds, Share, Strict, validate
from include.capacity.errors import ConfigError

MOST_SECONDS_PER_STEP = 3600.0


class Params(Strict):
    """A form's fields; what is left blank is as if it were not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if value is not None and value != ""}


P = TypeVar("P", bound=Params)


class SweepParams(Params):
    """What may be asked of a sweep."""

    models: list[str] = Field(default_factory=list)
    """Models to sweep; none named: all of the fleet."""
    classes: list[str] = Field(default_factory=list)
    """Classes to sweep; none named: all the model has."""
    mode: Literal["find", "exact"] | None = None
    concurrency: Ladder | None = None
    """Steps of the ladder instead of the fleet file's."""
    repeats: int | None = Field(None, ge=1, le=20)
    requests_per_step: int | None = Field(None, ge=20, le=1_000_000)
    seconds_per_step: float | None = Field(None, gt=0, le=MOST_SECONDS_PER_STEP)
    deadline_s: Seconds | None = None
    ttft_objective_s: Seconds | None = None
    completion_floor: Share | None = None
    publish_to: str | None = None
    promote: bool = False
    """Whether this run may move ``latest/``."""

    @field_validator("concurrency", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """``"1, 4, 8"`` as the form gives it."""
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            return None
        if not all(part.isdecimal() for part in parts):
            raise ValueError("expected whole numbers separated by commas, such as 1, 4, 8, 16")
        numbers = sorted({int(part) for part in parts})
        if numbers[-1] > MAX_CONCURRENCY:
            raise ValueError(f"expected at most {MAX_CONCURRENCY}")
        return numbers


def parse_params(kind: type[P], given: Mapping[str, Any]) -> P:
    """The parameters of a run; ConfigError lists every wrong or unknown one."""
    if unknown := sorted(set(given) - set(kind.model_fields)):
        raise ConfigError(f"params: unknown {unknown}; expected only {sorted(kind.model_fields)}")
    return validate(kind, dict(given), "params")


def apply(params: SweepParams, fleet: Fleet) -> Fleet:
    """The fleet as this run is to measure it: selected models and classes, overridden steps."""
    for asked in params.models:
        if asked not in fleet.models:
            raise ConfigError(f"params: models: {asked!r} is none of {sorted(fleet.models)}")
    for asked in params.classes:
        if asked not in fleet.classes:
            raise ConfigError(f"params: classes: {asked!r} is none of {sorted(fleet.classes)}")
    data = fleet.model_dump(mode="json")
    data["models"] = {
        key: _model(params, model)
        for key, model in data["models"].items()
        if not params.models or key in params.models
    }
    if params.publish_to is not None:
        data["publish"]["to"] = params.publish_to
    data["steps"] = resized(data["steps"], params.requests_per_step, params.seconds_per_step)
    return validate(Fleet, data, "params")


def resized(steps: Mapping[str, Any], requests: int | None, seconds: float | None) -> dict[str, Any]:
    """StepBounds as JSON with another proof size and shortest window; what bounds them gives way."""
    changed = dict(steps)
    if requests is not None:
        changed["prove_requests"] = requests
        changed["prove_requests_max"] = max(steps["prove_requests_max"], requests)
    if seconds is not None:
        changed["min_window_s"] = seconds
        changed["scout_cap_s"] = max(steps["scout_cap_s"], seconds)
        changed["prove_cap_s"] = max(steps["prove_cap_s"], seconds)
        changed["prove_cap_slow_s"] = max(steps["prove_cap_slow_s"], seconds)
    return changed


def _model(params: SweepParams, model: dict[str, Any]) -> dict[str, Any]:
    classes = {
        name: _service_class(params, item)
        for name, item in model["classes"].items()
        if not params.classes or name in params.classes
    }
    changed = {**model, "classes": classes}
    if params.mode is not None:
        changed["mode"] = params.mode
    if params.repeats is not None:
        changed["repeats"] = params.repeats
    if len(classes) < 2:
        changed["shared"] = False
    return changed


def _service_class(params: SweepParams, item: dict[str, Any]) -> dict[str, Any]:
    changed = dict(item)
    if params.concurrency is not None:
        changed["ladder"] = params.concurrency
    if params.deadline_s is not None:
        changed["deadline_s"] = params.deadline_s
    if params.completion_floor is not None:
        changed["completion_floor"] = params.completion_floor
    if params.ttft_objective_s is not None and item["ttft"] is not None:
        changed["ttft"] = {**item["ttft"], "at_most_s": params.ttft_objective_s}
    return changed
