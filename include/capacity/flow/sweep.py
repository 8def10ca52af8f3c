"""One model's sweep as a sequence of stages over a sweep directory.

    open_sweep ──▶ measure, measure, ... ──▶ judge (steps, quality, limits) ──▶ compare ──▶ report

Each stage reads files and writes files, so each can be run again alone, and limits can be computed
again from old measurements. The command line and the Airflow tasks call the same functions.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pandas as pd

from include.capacity.config import Accelerator, Model, ServiceClass, StepBounds, validate
from include.capacity.errors import ConfigError, DataError, LoadStopped, ServerError
from include.capacity.limits.changes import change, comparable
from include.capacity.limits.compute import compute_limits, judged_classes
from include.capacity.limits.evidence import ROWS_NEEDED, Evidence, decider, evidence_of
from include.capacity.limits.identity import comparison_id, stack_id
from include.capacity.limits.planner import Problem, estimate_s, next_step, over_ceiling, problem_of, step_s
from include.capacity.load.progress import Progress
from include.capacity.load.request import Target
from include.capacity.load.step import run_step
from include.capacity.load.workers import workers_for
from include.capacity.quality.check import rejections
from include.capacity.results.spec import StepSpec, step_seed
from include.capacity.results.steps import derive_steps, steps_table
from include.capacity.results.sweepdir import SweepDir, finite
from include.capacity.words import Phase

log = logging.getLogger(__name__)

SCHEMA = 1
ASKED = (
    *("model", "served_name", "server_kind", "accelerator", "classes", "bounds"),
    *("mode", "repeats", "shared", "ceiling"),
)
"""What an interrupted sweep must have been asked for, too, to be gone on with."""
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

    The stack is unknown until the server stands; :func:`record_stack` fills it in. A sweep that is there
    already, and asks for the same, goes on: it keeps its run, its seed and what was measured. ConfigError if
    it asks for something else and has measured already: results of two configurations make no limit.
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
        "ceiling": model.ceiling,
        "gateway": model.gateway.model_dump(mode="json"),
        "created_at": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "seed": step_seed(run_id, model_key),
        "problems": [],
    }
    if sweep.exists("sweep.json"):
        data = _resumed(sweep, data)
    sweep.write_json("sweep.json", data)
    return data


def _resumed(sweep: SweepDir, asked: dict[str, Any]) -> dict[str, Any]:
    """The sweep that is there, if it asks for the same; what is ``asked``, if it has measured nothing yet."""
    found = sweep.read_json("sweep.json")
    if not isinstance(found, dict) or found.get("source") != "measured":
        raise ConfigError(
            f"{sweep.url}: already holds something that no sweep has measured; name a new folder"
        )
    keys = sweep.step_keys()
    changed = differences({key: found.get(key) for key in ASKED}, {key: asked[key] for key in ASKED})
    if changed and keys:
        raise ConfigError(
            f"{sweep.url}: holds {len(keys)} steps of a sweep that was asked for something else ("
            f"{'; '.join(changed)}); ask for the same, or start a new run (a new folder)"
        )
    if changed:
        return asked
    if keys:
        log.info("%s: going on with it: %d steps are there and kept", sweep.url, len(keys))
    return {**found, "problems": []}


def differences(found: Any, asked: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, as ``path: old, now new``."""
    if isinstance(found, dict) and isinstance(asked, dict):
        keys = dict.fromkeys([*found, *asked])
        below = (differences(found.get(key), asked.get(key), f"{path}.{key}".strip(".")) for key in keys)
        return [line for lines in below for line in lines]
    return [] if found == asked else [f"{path}: {found!r}, now {asked!r}"]


def record_stack(sweep: SweepDir, stack: Mapping[str, Any], *, simulated: bool, clock_scale: float) -> None:
    """Fill in what the server turned out to be.

    ConfigError if steps were measured on another stack: results of two stacks make no limit.
    """
    data = sweep.read_json("sweep.json")
    former = data["stack"]
    if former is not None and data["stack_id"] != stack_id(stack) and sweep.step_keys():
        changed = differences({**former, "observed": None}, finite({**stack, "observed": None}))
        raise ConfigError(
            f"{sweep.url}: the server is not the one its steps were measured on ({'; '.join(changed)}); "
            "start a new run (a new folder)"
        )
    data.update(stack=dict(stack), stack_id=stack_id(stack), simulated=simulated, clock_scale=clock_scale)
    sweep.write_json("sweep.json", data)


def record_problem(sweep: SweepDir, stage: str, error: BaseException) -> None:
    """Keep why a stage failed, for the report: ``{"stage", "error"}`` in ``sweep.json``."""
    data = sweep.read_json("sweep.json")
    problem = {"stage": stage, "error": str(error)}
    if problem not in data["problems"]:
        data["problems"].append(problem)
        sweep.write_json("sweep.json", data)


def settle_problem(sweep: SweepDir, stage: str) -> None:
    """Forget why a stage failed: it has been done since."""
    data = sweep.read_json("sweep.json")
    left = [problem for problem in data["problems"] if problem["stage"] != stage]
    if left != data["problems"]:
        sweep.write_json("sweep.json", {**data, "problems": left})


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
    stop_asked: Callable[[], str | None] | None = None,
) -> list[Evidence]:
    """Run one step and keep its rows, facts and evidence; before that, say how long it is expected to take.

    ``stop_asked``: the kill switch (see ``load.step``). Errors: RequestRefused, MeasurementError, LoadStopped
    (nothing is kept); a server that dies is a result.
    """
    data = sweep.read_json("sweep.json")
    if above := over_ceiling(data.get("ceiling"), spec):
        raise LoadStopped(f"{spec.label}: {above}")
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
        stop_asked=stop_asked,
        theirs=data["server_kind"] == "endpoint",
        workers=workers_for(
            sum(load.concurrency for load in spec.loads), sweep.all_facts().values(), target.base_url
        ),
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
    return [item for key in sweep.all_facts() for item in _evidence(sweep, key)]


def _evidence(sweep: SweepDir, key: str) -> list[Evidence]:
    """Evidence of one finished step, an item a class."""
    return [Evidence.from_json(item) for item in sweep.read_json(f"evidence/{key}.json")]


KEPT = "kept.json"
"""Keys of steps that an earlier try of the run has measured and that need not be measured again."""


def keep(sweep: SweepDir) -> list[str]:
    """Mark all that was measured and can be used as not to be measured again; returns its keys.

    Prime steps are not among them: what they were run for, a warm server, is gone.
    """
    keys = []
    for key, facts in sweep.all_facts().items():
        found = _evidence(sweep, key)
        if facts.spec["phase"] != Phase.PRIME and found and all(item.usable for item in found):
            keys.append(key)
    if keys or sweep.exists(KEPT):
        sweep.write_json(KEPT, keys)
    return keys


def kept(sweep: SweepDir, spec: StepSpec) -> list[Evidence]:
    """What an earlier try has measured of exactly this step; empty if it is to be measured.

    Asked once a try: who clears the step afterwards wants it measured again.
    """
    keys = sweep.read_json(KEPT) if sweep.exists(KEPT) else []
    if spec.key not in keys:
        return []
    sweep.write_json(KEPT, [key for key in keys if key != spec.key])
    before = StepSpec.from_json(sweep.facts(spec.key).spec)
    if replace(before, cap_s=spec.cap_s) != spec:  # the cap follows from what else was known
        return []
    log.info("%s: measured by an earlier try of this run; kept", spec.label)
    return _evidence(sweep, spec.key)


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
    """Write the model's report and figures.

    DataError if what they are made from is not what the stages before write.
    """
    found = sweep.read_json("limits.json")
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), list) for key in ("limits", "saturation")
    ):
        raise DataError(
            f"{sweep.url}/limits.json: expected lists `limits` and `saturation`; run `limits` again"
        )
    for key in sweep.all_facts():
        sweep.metrics(key)  # the report shows their summaries: DataError if they cannot be those
    from include.capacity.report.build import build_model_report  # matplotlib: only here

    build_model_report(sweep)
