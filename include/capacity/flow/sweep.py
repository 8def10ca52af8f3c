"""One model's sweep as a sequence of stages over a sweep directory.

    open_sweep ──▶ measure, measure, ... ──▶ judge (steps, quality, limits) ──▶ compare ──▶ report

Each stage reads files and writes files, so each can be run again alone, and limits can be computed
again from old measurements. The command line and the Airflow tasks call the same functions.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pandas as pd

from include.capacity.config import Accelerator, Model, ServiceClass, StepBounds, validate
from include.capacity.errors import DataError, ServerError
from include.capacity.limits.changes import change, comparable
from include.capacity.limits.compute import compute_limits, judged_classes
from include.capacity.limits.evidence import ROWS_NEEDED, Evidence, decider, evidence_of
from include.capacity.limits.identity import comparison_id, stack_id
from include.capacity.limits.planner import Problem, estimate_s, next_step, problem_of, step_s
from include.capacity.load.progress import Progress
from include.capacity.load.request import Target
from include.capacity.load.step import run_step
from include.capacity.quality.check import rejections
from include.capacity.results.spec import StepSpec, step_seed
from include.capacity.results.steps import derive_steps, steps_table
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import Phase

log = logging.getLogger(__name__)

SCHEMA = 1
JUDGED = frozenset({Phase.SCOUT, Phase.PROVE, Phase.GRID, Phase.SHARED, Phase.ANCHOR})
"""Phases whose steps are checked as soon as they are measured."""
PACKAGES = ("httpx", "numpy", "pandas", "scipy", "great-expectations", "matplotlib")


def open_sweep(
    sweep: SweepDir,
    *,
    run_id: str,
    model_key: str,
    model: Model,
    accelerator: Accelerator,
    bounds: StepBounds,
    now: datetime | None = None,
) -> dict[str, Any]:
    """Write ``sweep.json``: what will be measured, with everything a later stage needs to know.

    The stack is unknown until the server stands; :func:`record_stack` fills it in.
    """
    data = {
        "schema": SCHEMA,
        "run_id": run_id,
        "attempt": 1,
        "model": model_key,
        "served_name": model.served_name,
        "series": "",
        "source": "measured",
        "simulated": model.server.kind == "simulator",
        "clock_scale": 1.0,
        "server_kind": model.server.kind,
        "accelerator": {"name": model.accelerator, "kind": accelerator.kind, "count": accelerator.count},
        "stack": None,
        "stack_id": None,
        "comparison_ids": {
            name: comparison_id(model_key, name, service_class, accelerator)
            for name, service_class in model.classes.items()
        },
        "classes": {name: item.model_dump(mode="json") for name, item in model.classes.items()},
        "bounds": bounds.model_dump(mode="json"),
        "mode": model.mode,
        "repeats": model.repeats,
        "shared": model.shared,
        "gateway": model.gateway.model_dump(mode="json"),
        "created_at": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "seed": step_seed(run_id, model_key),
        "problems": [],
    }
    sweep.write_json("sweep.json", data)
    return data


def record_stack(sweep: SweepDir, stack: Mapping[str, Any], *, simulated: bool, clock_scale: float) -> None:
    """Fill in what the server turned out to be."""
    data = sweep.read_json("sweep.json")
    data.update(stack=dict(stack), stack_id=stack_id(stack), simulated=simulated, clock_scale=clock_scale)
    sweep.write_json("sweep.json", data)


def record_problem(sweep: SweepDir, stage: str, error: BaseException) -> None:
    """Keep why a stage failed, for the report: ``{"stage", "error"}`` in ``sweep.json``."""
    data = sweep.read_json("sweep.json")
    problem = {"stage": stage, "error": str(error)}
    if problem not in data["problems"]:
        data["problems"].append(problem)
        sweep.write_json("sweep.json", data)


def classes_of(data: Mapping[str, Any]) -> dict[str, ServiceClass]:
    """The service classes a sweep was measured with."""
    return {
        name: validate(ServiceClass, item, f"sweep.json: classes.{name}")
        for name, item in data["classes"].items()
    }


# -- measuring


def measure(
    sweep: SweepDir,
    spec: StepSpec,
    target: Target,
    progress: Progress | None = None,
) -> list[Evidence]:
    """Run one step and keep its rows, facts and evidence; before that, say how long it is expected to take.

    Errors: RequestRefused, MeasurementError (nothing is kept); a server that dies is a result.
    """
    data = sweep.read_json("sweep.json")
    classes = classes_of(data)
    log.info("%s", expectation(problem_of(data), evidence(sweep), spec, data["clock_scale"]))
    run = run_step(
        spec,
        target=target,
        classes=classes,
        bounds=validate(StepBounds, data["bounds"], "sweep.json: bounds"),
        clock_scale=data["clock_scale"],
        decide=decider(classes),
        progress=progress,
        run_id=data["run_id"],
        attempt=data["attempt"],
    )
    rows = run.requests.to_pandas()
    found = evidence_of(run.facts, rows, classes)
    if spec.phase in JUDGED:
        # What will be rejected is measured again now, while the server still stands.
        steps = steps_table(data, {spec.key: run.facts}, rows.assign(step=spec.key))
        reasons = rejections(steps, rows.assign(step=spec.key), data)
        for item in found:
            if item.valid and item.service_class in reasons:
                item.valid, item.why, item.state = False, reasons[item.service_class], None
    sweep.write_json(f"evidence/{spec.key}.json", [item.to_json() for item in found])
    sweep.write_step(spec.key, run.facts, run.requests, run.metrics)
    return found


def evidence(sweep: SweepDir) -> list[Evidence]:
    """Evidence of all finished steps, in the order in which they began."""
    found: list[Evidence] = []
    for key in sweep.all_facts():
        found += [Evidence.from_json(item) for item in sweep.read_json(f"evidence/{key}.json")]
    return found


def problem(sweep: SweepDir, left_s: float | None = None) -> Problem:
    """The planner's question for this sweep; ``left_s``: wall seconds left to measure in."""
    data = sweep.read_json("sweep.json")
    budget_s = None if left_s is None else left_s * data["clock_scale"]
    return problem_of({**data, "budget_s": budget_s})


def expectation(asked: Problem, known: Sequence[Evidence], spec: StepSpec, clock_scale: float) -> str:
    """How long a step, and with it the rest of the sweep, is expected to take (wall time)."""
    step, cap = step_s(asked, spec, known) / clock_scale, spec.cap_s / clock_scale
    left = estimate_s(asked, known) / clock_scale
    return (
        f"{spec.label}: expected to take {step:,.0f} s, its window {cap:,.0f} s at most; "
        f"the sweep from here on {left / 60:,.0f} min"
    )


def run_all(
    sweep: SweepDir,
    target: Target,
    progress: Callable[[StepSpec], Progress | None] = lambda _: None,
    alive: Callable[[], bool] = lambda: True,
) -> list[Evidence]:
    """Measure what the planner asks for until it asks for nothing more.

    ``alive`` is asked before each step: a server that is gone and that nobody brings back must not look
    as if the next concurrency had crashed it. ServerError then; what was measured is kept.
    """
    asked = problem(sweep)
    while (spec := next_step(asked, evidence(sweep))) is not None:
        if not alive():
            raise ServerError(f"{target.base_url}: the server is gone; {spec.label} was not measured")
        measure(sweep, spec, target, progress(spec))
    return evidence(sweep)


# -- judging


def recompute_evidence(sweep: SweepDir, classes: Mapping[str, ServiceClass] | None = None) -> list[Evidence]:
    """Evidence anew from the request rows, e.g. for other objectives than those measured with."""
    data = sweep.read_json("sweep.json")
    judged = classes or classes_of(data)
    found: list[Evidence] = []
    for key, facts in sweep.all_facts().items():
        if not sweep.exists(f"requests/{key}.parquet") and not sweep.exists("requests.parquet"):
            raise DataError(
                f"{sweep.url}/requests/{key}.parquet: missing, and steps/{key}.json says it was measured"
            )
        found += evidence_of(facts, sweep.requests([key], ROWS_NEEDED), judged)
    return found


def write_steps(sweep: SweepDir, found: Sequence[Evidence]) -> pd.DataFrame:
    """Derive ``steps.csv`` from rows, facts and evidence."""
    states = {(item.key, item.service_class): (item.state, item.n_effective) for item in found}
    steps = derive_steps(sweep, states)
    sweep.write_steps(steps)
    return steps


def check(sweep: SweepDir) -> dict[str, Any]:
    """Judge the data: write ``steps.csv`` and ``quality.json``; returns the latter."""
    from include.capacity.quality import check_sweep  # Great Expectations: seconds to import

    if sweep.read_json("sweep.json")["source"] == "measured":
        write_steps(sweep, recompute_evidence(sweep))
    return check_sweep(sweep)


def limits(sweep: SweepDir, classes: Mapping[str, ServiceClass] | None = None) -> dict[str, Any]:
    """Compute the limits from what quality has left standing; writes ``limits.json``.

    ``classes`` judges the same measurements by other floors or objectives; the result is returned
    and not written then.
    """
    data = sweep.read_json("sweep.json")
    for name in ("quality.json", "steps.csv"):
        if not sweep.exists(name):
            raise DataError(f"{sweep.url}: no {name}: run `check` first; unchecked data carry no limit")
    quality = sweep.read_json("quality.json")
    if not isinstance(quality, dict) or not {"verdict", "findings", "steps"} <= quality.keys():
        raise DataError(f"{sweep.url}/quality.json: expected verdict, findings and steps; run `check` again")
    found: list[Evidence] = []
    if data["source"] == "measured":
        judged, _ = judged_classes(data, classes)
        found = recompute_evidence(sweep, judged)
    result = compute_limits(data, found, sweep.steps(), quality, classes=classes)
    if classes is None:
        sweep.write_json("limits.json", result)
    return result


def compare(sweep: SweepDir, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fill in what changed since the runs of the history; writes ``limits.json`` and returns it."""
    data, result = sweep.read_json("sweep.json"), sweep.read_json("limits.json")
    about = {"run_id": data["run_id"], "measured_at": data["created_at"], "stack": data["stack"]}
    for entry in result["limits"]:
        now = {**entry, **about}
        if entry["measured"] == "alone" and entry["comparison_id"] is not None:
            entry["change"] = change(comparable(history, now, data["model"]), now)
    result["compared"] = True
    sweep.write_json("limits.json", result)
    return result


def report(sweep: SweepDir) -> None:
    """Write the model's report and figures."""
    from include.capacity.report.build import build_model_report  # matplotlib: only here

    build_model_report(sweep)
