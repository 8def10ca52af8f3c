"""What each Airflow task does, without Airflow: every function takes the run it belongs to.

The one place that knows Airflow is :mod:`connection` (Airflow's connection holds the credentials). State
between tasks lives in the sweep directory ``work/<run>/<model>/`` of the publish target, not in XCom.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from include.capacity import servers
from include.capacity.config import EndpointServer, Fleet, Model, load_fleet, slug
from include.capacity.errors import CapacityError, LoadStopped, NoLimit, PublishError, ServerError
from include.capacity.flow import nights, notify
from include.capacity.flow import sweep as stages
from include.capacity.flow.connection import publish_store, s3_client
from include.capacity.flow.params import SweepParams, apply, parse_params
from include.capacity.flow.progress import TaskProgress, forget_progress
from include.capacity.limits.changes import Verdict
from include.capacity.limits.evidence import Evidence
from include.capacity.limits.planner import (
    above_ceiling,
    instances,
    ladder_steps,
    next_step,
    skip_reason,
    with_cap,
)
from include.capacity.load.request import Target
from include.capacity.results.spec import StepSpec
from include.capacity.results.store import Store, safe_name
from include.capacity.results.sweepdir import SweepDir
from include.capacity.servers.base import RunIsOver, load
from include.capacity.servers.endpoint import kill_switch
from include.capacity.servers.lease import Lease
from include.capacity.servers.ready import why_silent
from include.capacity.servers.state import servers_folder
from include.capacity.words import EXPORTABLE, LimitStatus, Phase, Severity

log = logging.getLogger(__name__)

KILL_SWITCH = "capacity_kill_switch"
"""The Airflow variable that stops the load on endpoints: names of models, separated by commas, or ``all``."""
MAX_RESTARTS = 3
"""How often one sweep brings back a server that died; then the sweep is given up."""


class NothingToDo(Exception):
    """Not an error: this task has nothing to do, and why."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One DAG run: the fleet as this run measures it, and where its files are."""

    run_id: str
    dag_id: str
    fleet: Fleet
    own_classes: Mapping[str, Mapping[str, Any]]
    """Per model the classes as the fleet file has them: only their limits may move ``latest/``."""
    promote: bool
    selected: frozenset[str]
    scheduled_at: datetime | None
    store: Store
    is_over: RunIsOver | None
    """Tells whether another run has ended; None where nobody can tell."""
    kill_switch: Callable[[], str] | None = None
    """Names the models whose endpoints must not be loaded just now, or ``all``; see :data:`KILL_SWITCH`."""

    @classmethod
    def of(
        cls,
        *,
        run_id: str,
        dag_id: str,
        params: Mapping[str, Any],
        scheduled_at: datetime | None = None,
        is_over: RunIsOver | None = None,
        kill_switch: Callable[[], str] | None = None,
    ) -> Run:
        """The run of these parameters; ConfigError if any is wrong or unknown."""
        fleet = load_fleet()
        asked = parse_params(SweepParams, params)
        changed = apply(asked, fleet)
        publish = changed.publish
        return cls(
            run_id=run_id,
            dag_id=dag_id,
            fleet=changed,
            own_classes={
                key: model.model_dump(mode="json")["classes"] for key, model in fleet.models.items()
            },
            promote=asked.promote,
            selected=frozenset(changed.models),
            scheduled_at=scheduled_at,
            store=publish_store(publish, lambda: s3_client(publish.connection)),
            is_over=is_over,
            kill_switch=kill_switch,
        )

    def sweep(self, model: str) -> SweepDir:
        """The model's sweep directory."""
        return SweepDir(self.store, f"work/{self.key}/{safe_name(model)}")

    @property
    def overview(self) -> SweepDir:
        """Where the report over all models is."""
        return SweepDir(self.store, f"work/{self.key}")

    def model(self, key: str) -> Model:
        """The model as this run measures it."""
        return self.fleet.models[key]

    @property
    def key(self) -> str:
        """The run's name in keys and reports: ``sweep-manual-20260301t010000.123456z``."""
        return run_key(self.dag_id, self.run_id)

    @property
    def zone(self) -> ZoneInfo:
        """The night's time zone."""
        return ZoneInfo(self.fleet.night.timezone)

    @property
    def holder(self) -> str:
        """Who holds leases and servers for this run."""
        return f"{self.dag_id}/{self.run_id}"


def run_key(dag_id: str, run_id: str) -> str:
    """Airflow's run as one readable segment of a key; another DAG or run gives another."""
    name = f"{dag_id.removeprefix('capacity_')}-{run_id}".lower().replace("__", "-")
    stamp = re.sub(r"(\d{4})-(\d\d)-(\d\d)t(\d\d):(\d\d):(\d\d(?:\.\d+)?)\+00:00", r"\1\2\3t\4\5\6z", name)
    return safe_name(stamp)


def label(spec: Mapping[str, Any]) -> str:
    """A step's name in the grid."""
    return StepSpec.from_json(spec).label


# -- before


def plan(run: Run, model: str, now: datetime | None = None) -> list[dict[str, Any]]:
    """Open the sweep directory and list the asked-for steps (StepSpec as JSON), in order.

    Raises NothingToDo for a model not selected and for a nightly run that is too late. Planning a run again
    (cleared as a whole, or interrupted) keeps what it has measured; ConfigError if the fleet file or the
    parameters ask for something else by now.
    """
    now = now or datetime.now(UTC)
    if model not in run.selected:
        raise NothingToDo(f"{model} is not selected in this run")
    if run.scheduled_at is not None:
        late_s = (now - run.scheduled_at).total_seconds()
        if late_s > run.fleet.night.max_lateness_s:
            raise NothingToDo(
                f"due {run.scheduled_at.isoformat(timespec='minutes')}, {late_s:.0f} s ago: later than "
                f"night.max_lateness_s ({run.fleet.night.max_lateness_s:.0f} s), so not measured by day"
            )
    sweep = run.sweep(model)
    configured = run.model(model)
    sweep.store.write(f"work/{run.key}/probe", b"")  # a wrong bucket shows before a server starts,
    notify.check(run.fleet.notify)  # and so does a notifier that is not there
    data = stages.open_sweep(
        sweep,
        run_id=run.key,
        model_key=model,
        model=configured,
        accelerator=run.fleet.accelerators[configured.accelerator],
        bounds=run.fleet.steps,
        now=now,
    )
    kept = stages.keep(sweep)
    if kept:
        log.info("%s: an earlier try of this run has measured %s; kept", model, ", ".join(kept))
    steps = [*ladder_steps(stages.problem(sweep)), *above_ceiling(data)]
    log.info("%s: %d ladder steps: %s", model, len(steps), ", ".join(spec.label for spec in steps))
    return [spec.to_json() for spec in steps]


def lease(run: Run, model: str) -> bool:
    """Take the model's accelerator for this run; False while another holds it."""
    held = _lease(run, model).acquire()
    if held and not run.store.exists(_first_use(run, model)):
        run.store.write(_first_use(run, model), datetime.now(UTC).isoformat().encode())
    return held


def start_server(run: Run, model: str) -> dict[str, Any]:
    """Start the server, wait until it is ready, and record the stack.

    Holds the accelerator, too: a start that was cleared alone comes after the teardown gave it back.
    """
    sweep = run.sweep(model)
    try:
        if not lease(run, model):
            raise ServerError(
                f"{model}: accelerator {run.model(model).accelerator!r} is held by another run; clear `lease`"
            )
        handle = _start(run, model)
    except CapacityError as error:
        stages.record_problem(sweep, "start_server", error)
        raise
    stages.settle_problem(sweep, "start_server")
    return {"url": handle.url, "kind": handle.kind}


# -- measuring


def ladder_step(run: Run, model: str, spec_json: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one asked-for step, unless what lies below it has made it pointless."""
    sweep = run.sweep(model)
    spec = StepSpec.from_json(spec_json)
    if kept := stages.kept(sweep, spec):
        return _told(spec, kept)
    asked, known = stages.problem(sweep, left_s(run, model)), stages.evidence(sweep)
    reason = skip_reason(asked, spec, known)
    if reason:
        raise NothingToDo(reason)
    return _measure(run, model, with_cap(asked, spec, known))


def slots(run: Run, model: str, phase: str) -> list[int]:
    """Slots for the most steps the phase can need."""
    return list(range(instances(stages.problem(run.sweep(model)))[phase]))


def planned_step(run: Run, model: str, phase: Phase, slot: int, label: Callable[[str], None]) -> bool:
    """Measure what the planner asks for next in this phase; False if nothing is left for the next slot.

    A slot remembers its step, so clearing it measures that step again.
    """
    sweep = run.sweep(model)
    memory = f"slots/{phase}-{slot}.json"
    spec = StepSpec.from_json(sweep.read_json(memory)) if sweep.exists(memory) else _next(run, model, phase)
    if spec is None:
        return False
    sweep.write_json(memory, spec.to_json())
    if kept := stages.kept(sweep, spec):
        label(f"{spec.label} (kept)")
        _told(spec, kept)
    else:
        label(spec.label)
        _measure(run, model, spec)
    return _next(run, model, phase) is not None


def _next(run: Run, model: str, phase: Phase) -> StepSpec | None:
    """What the planner asks for next, if it belongs to this phase."""
    sweep = run.sweep(model)
    asked = stages.problem(sweep, left_s(run, model))
    spec = next_step(asked, stages.evidence(sweep), at_least=phase)
    if spec is None:
        log.info("the planner has nothing more to measure")
    elif spec.phase is not phase and not (phase is Phase.SCOUT and spec.phase is Phase.GRID):
        log.info("nothing more to %s: next is %s", phase, spec.label)
        return None
    return spec


def left_s(run: Run, model: str, now: datetime | None = None) -> float | None:
    """Wall seconds that this night's run may still use the model's accelerator; None: as long as it takes.

    Bounded by the accelerator's ``budget_s``, from when the run first held it, and by its ``latest_end``.
    Runs that a person started are not bounded.
    """
    accelerator = run.fleet.accelerators[run.model(model).accelerator]
    if run.scheduled_at is None:
        return None
    now = now or datetime.now(UTC)
    left = []
    if accelerator.budget_s is not None:
        began = datetime.fromisoformat(run.store.read(_first_use(run, model)).decode())
        left.append(accelerator.budget_s - (now - began).total_seconds())
    if accelerator.latest_end is not None:
        left.append((latest_end(run.scheduled_at, accelerator.latest_end, run.zone) - now).total_seconds())
    return max(0.0, min(left)) if left else None


def latest_end(scheduled_at: datetime, clock: str, zone: ZoneInfo) -> datetime:
    """The first time after ``scheduled_at`` at which the clock of that zone shows ``HH:MM``."""
    local = scheduled_at.astimezone(zone)
    hour, minute = map(int, clock.split(":"))
    end = local.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return end if end > local else end + timedelta(days=1)


def _first_use(run: Run, model: str) -> str:
    """The object that tells since when this run has used an accelerator."""
    return f"work/{run.key}/since-{safe_name(run.fleet.models[model].accelerator)}"


def _measure(run: Run, model: str, spec: StepSpec) -> dict[str, Any]:
    """Measure one step on this run's server, and keep its results."""
    sweep = run.sweep(model)
    target = _living_target(run, model)
    try:
        found = stages.measure(sweep, spec, target, TaskProgress(model), _stop_asked(run, model))
    except CapacityError as error:
        stages.record_problem(sweep, spec.label, error)
        raise
    stages.settle_problem(sweep, spec.label)
    return _told(spec, found)


def _stop_asked(run: Run, model: str) -> Callable[[], str | None] | None:
    """The kill switch of an endpoint: its file, or Airflow's variable; None for servers of our own."""
    server = run.model(model).server
    if not isinstance(server, EndpointServer):
        return None

    def asked() -> str | None:
        if reason := kill_switch(server):
            return reason
        named = run.kill_switch() if run.kill_switch is not None else ""
        off = {name.casefold() for name in re.split(r"[^\w.-]+", named)} & {model.casefold(), "all"}
        return f"the Airflow variable {KILL_SWITCH} names {off.pop()!r}" if off else None

    return asked


def _told(spec: StepSpec, found: Sequence[Evidence]) -> dict[str, Any]:
    """Log what a step has shown; returns what goes to XCom."""
    for item in found:
        log.info(
            "%s: %s at %d: %d of %d completed, %d with every objective met; %s",
            *(spec.label, item.service_class, item.concurrency),
            *(item.completed, item.attempted, item.met, item.state or item.why or item.error),
        )
    return {"key": spec.key, "states": {item.service_class: item.state for item in found}}


def _living_target(run: Run, model: str) -> Target:
    """Where to send requests; brings back a server that died, hangs or was stopped since an earlier step.

    Stopped: who clears only the failed tasks of a run clears no setup with them. ``check_run`` ends what
    is started here then.
    """
    sweep = run.sweep(model)
    handle = _handle(run, model)
    if handle is None:
        log.warning("%s: no server is recorded for run %s; starting one", model, run.run_id)
        start_server(run, model)
        handle = _handle(run, model)
        if handle is None:
            raise ServerError(f"{model}: its server is gone as soon as it was started")
    why = why_silent(handle.url) if servers.alive(handle) else "it is gone"
    if why is not None:
        if handle.kind == "endpoint":
            raise ServerError(
                f"{model}: {handle.url} does not answer any more ({why}); it is not ours to start"
            )
        data = sweep.read_json("sweep.json")
        restarts = data.get("restarts", 0)
        if restarts >= MAX_RESTARTS:
            raise ServerError(
                f"{model}: the server died or hung {restarts + 1} times in this sweep; given up"
            )
        log.warning(
            "%s: the server does not serve (%s): %s; starting it again", model, why, handle.describe()
        )
        sweep.write_json("sweep.json", {**data, "restarts": restarts + 1})
        handle = _start(run, model)
    return servers.target_of(handle)


# -- after


def stop_server(run: Run, model: str) -> None:
    """Stop the server if there is one, and give the accelerator back."""
    try:
        handle = _handle(run, model)
        if handle is not None:
            servers.stop(handle)
    finally:
        _lease(run, model).release()
        forget_progress(model)


def validate(run: Run, model: str) -> dict[str, Any]:
    """Judge the model's measurements; returns the verdict and its counts."""
    sweep = run.sweep(model)
    if model not in run.selected or not sweep.exists("sweep.json"):
        raise NothingToDo(f"{model} was not measured in this run")
    quality = stages.check(sweep)
    return {"verdict": quality["verdict"], "findings": log_findings(quality)}


def log_findings(quality: Mapping[str, Any]) -> int:
    """Log every finding of ``quality.json``; returns how many there are."""
    findings = [*quality["findings"], *(found for step in quality["steps"] for found in step["findings"])]
    for finding in findings:
        log.info("%s %s: %s", finding["severity"], finding["check"], finding["reason"])
    return len(findings)


def limits(run: Run, model: str) -> list[dict[str, Any]]:
    """Compute the model's limits and what changed; returns one small entry per class."""
    sweep = run.sweep(model)
    result = stages.limits(sweep)
    history = read_history(run, model)
    if history is not None:
        result = stages.compare(sweep, history)
    for item in result["limits"]:
        log.info("%s %s: %s (%s): %s", model, item["class"], item["limit"], item["status"], item["claim"])
    return [{key: item[key] for key in ("class", "limit", "status")} for item in result["limits"]]


def read_history(run: Run, model: str | None = None) -> list[dict[str, Any]] | None:
    """The runs before; None if they cannot be read, which the report of ``model`` says and costs no limit."""
    from include.capacity.publish import history

    try:
        return history.read_history(run.store)
    except PublishError as error:
        log.warning("nothing is compared with earlier runs: %s", error)
        if model is not None:
            stages.record_problem(run.sweep(model), "comparison with earlier runs", error)
        return None


def report(run: Run, model: str) -> str:
    """Write the model's report; returns where its sweep directory is."""
    sweep = run.sweep(model)
    stages.report(sweep)
    return sweep.url


def fleet_report(run: Run) -> str:
    """Write the report over all models of the run."""
    from include.capacity.report.build import build_fleet_report

    sweeps = measured(run)
    history = read_history(run) or []
    about = {
        "run_id": run.key,
        "fleet": run.fleet.fleet,
        "failed": unserved(run),
        "missed": missed_nights(run, history),
    }
    build_fleet_report(sweeps, run.overview, run=about, history=history)
    return run.overview.url


def publish(run: Run) -> dict[str, Any]:
    """Publish the run; returns what moved."""
    from include.capacity.publish.publish import publish_run

    return publish_run(
        run.store,
        run_id=run.key,
        sweeps=measured(run),
        fleet_report=run.overview,
        promote=run.promote,
        own_classes=run.own_classes,
        failed=unserved(run),
        valid_for_s=run.fleet.publish.valid_for_s,
        scheduled_at=run.scheduled_at,
    )


def event(run: Run, published: Mapping[str, Any]) -> dict[str, Any]:
    """What the asset's event says of a published run: small, and enough for a gateway to act on.

    ``{"run", "attempt", "url", "promoted", "valid_until", "limits": [{"model", "class", "measured", "limit",
    "status"}]}``; ``limit`` is None where the status says that there is none.
    """
    names = ("class", "measured", "limit", "status")
    found = [
        {"model": model, **{name: entry.get(name) for name in names}}
        for model, sweep in measured(run).items()
        for entry in sweep.read_json("limits.json")["limits"]
    ]
    about = {name: published[name] for name in ("attempt", "url", "promoted", "valid_until")}
    return {"run": published["run_id"], **about, "limits": found}


def measured(run: Run) -> dict[str, SweepDir]:
    """Sweep directories of this run that carry limits; NothingToDo if there is none."""
    sweeps = {model: run.sweep(model) for model in sorted(run.selected)}
    found = {model: sweep for model, sweep in sweeps.items() if sweep.exists("limits.json")}
    if not found:
        raise NothingToDo("no model was measured in this run")
    return found


def unserved(run: Run) -> dict[str, str]:
    """Selected models that gave no result, and why."""
    missing = sorted(run.selected - measured(run).keys())
    return dict.fromkeys(missing, "no limits were computed; see the run's failed tasks")


NO_LIMIT = frozenset({LimitStatus.REJECTED, LimitStatus.NOT_MEASURED, LimitStatus.INSUFFICIENT_EVIDENCE})
"""Statuses of a class without a limit for a fault of ours."""


def check_run(run: Run, states: Mapping[str, Any]) -> None:
    """Raise if any task of the run failed, or a class has no limit for a fault of ours.

    ``states``: task id (with map index) to state, as Airflow tells them. It comes last, so a server that
    is still there by now (its teardown was not cleared with its steps) is stopped.
    """
    for model in sorted(run.selected):
        if _handle(run, model) is not None:
            log.warning("%s: its server is still there; stopping it", model)
            stop_server(run, model)
    if found := problems(run, states):
        raise NoLimit("; ".join(found))


def problems(run: Run, states: Mapping[str, Any]) -> list[str]:
    """Why the run is red, one sentence each; empty if it is green."""
    by_state = {
        state: sorted(task for task, found in states.items() if str(found) == state)
        for state in ("failed", "upstream_failed")
    }
    bad = by_state["failed"] or by_state["upstream_failed"]
    found = [f"tasks failed: {', '.join(bad)}"] if bad else []
    for model in sorted(run.selected):
        sweep = run.sweep(model)
        limitless = []
        if sweep.exists("limits.json"):
            for item in sweep.read_json("limits.json")["limits"]:
                if item["status"] in NO_LIMIT:
                    limitless.append(f"{model} {item['class']}: no limit ({item['status']}): {item['claim']}")
                elif item["status"] in EXPORTABLE:
                    log.info("%s %s: %s (%s)", model, item["class"], item["limit"], item["status"])
        found += limitless
        if limitless or bad:
            found += [f"{model}: {why}" for why in reasons(sweep)]
    return found


def reasons(sweep: SweepDir) -> list[str]:
    """What went wrong in a sweep: stages that failed, and checks that rejected it as a whole."""
    found = []
    if sweep.exists("sweep.json"):
        for problem in sweep.read_json("sweep.json")["problems"]:
            found.append(f"{problem['stage']}: {_one_line(problem['error'])}")
    if sweep.exists("quality.json"):
        findings = sweep.read_json("quality.json").get("findings") or []
        found += [str(one["reason"]) for one in findings if one.get("severity") == Severity.REJECT]
    return found


# -- whom to tell


def announce(
    run: Run, states: Mapping[str, Any], context: Mapping[str, Any], now: datetime | None = None
) -> list[notify.Event]:
    """Tell those whom the fleet file names what happened in this run; returns what there was to tell.

    A night that started too late is noted in the history, so that the next one does not tell of it again.
    """
    found = events(run, states)
    about = {
        "fleet": run.fleet.fleet,
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "results": f"{run.store.url}/runs/{run.key}/",
    }
    notify.announce(run.fleet.notify, found, context, about)
    if run.scheduled_at is not None and started_too_late(run, states):
        from include.capacity.publish import history

        entry = history.missed_entry(run.key, now or datetime.now(UTC), run.scheduled_at, _too_late(run))
        history.write_entry(run.store, entry)
    return found


def events(run: Run, states: Mapping[str, Any]) -> list[notify.Event]:
    """What this run has to tell, by kind."""
    fleet = run.fleet.fleet
    found = []
    if red := problems(run, states):
        found.append(notify.Event("run_failed", f"{fleet}: run {run.run_id} of {run.dag_id} failed", red))
    changed = changed_limits(run)
    if fell := changed[Verdict.FELL]:
        found.append(notify.Event("limit_fell", f"{fleet}: {_counted(fell)} fell", fell))
    if rose := changed[Verdict.ROSE]:
        found.append(notify.Event("limit_rose", f"{fleet}: {_counted(rose)} rose", rose))
    if run.scheduled_at is not None:
        late = [(run.scheduled_at, _too_late(run))] if started_too_late(run, states) else []
        unseen = nights.unpublished(
            read_history(run) or [], run.fleet.night.schedule, run.zone, run.scheduled_at
        )
        if missed := nights.sentences(unseen, late, run.zone):
            found.append(notify.Event("night_missed", f"{fleet}: a night was missed", missed))
    return found


def changed_limits(run: Run) -> dict[Verdict, list[str]]:
    """Sentences about limits of this run that changed, by direction."""
    found: dict[Verdict, list[str]] = {Verdict.FELL: [], Verdict.ROSE: []}
    for model in sorted(run.selected):
        sweep = run.sweep(model)
        if not sweep.exists("limits.json"):
            continue
        for entry in sweep.read_json("limits.json")["limits"]:
            change = entry.get("change") or {}
            if change.get("verdict") in found:
                found[Verdict(change["verdict"])].append(f"{model}, {change['sentence']}")
    return found


def missed_nights(run: Run, before: list[dict[str, Any]]) -> list[str]:
    """Sentences on nights missed since the last one measured, given the history ``before`` it."""
    if run.scheduled_at is None:
        return []
    unseen = nights.unpublished(before, run.fleet.night.schedule, run.zone, run.scheduled_at)
    return nights.sentences(unseen, nights.too_late(before, run.scheduled_at), run.zone)


def started_too_late(run: Run, states: Mapping[str, Any]) -> bool:
    """Whether this night was skipped whole: nothing failed, and no model was even planned."""
    quiet = not any(str(state) in ("failed", "upstream_failed") for state in states.values())
    return quiet and not any(run.sweep(model).exists("sweep.json") for model in run.selected)


def _too_late(run: Run) -> str:
    return f"it started more than {run.fleet.night.max_lateness_s:,.0f} s late (night.max_lateness_s)"


def _counted(sentences: list[str]) -> str:
    return "a limit" if len(sentences) == 1 else f"{len(sentences)} limits"


def _one_line(text: str, most: int = 400) -> str:
    """The first line of an error, which may go on with the tail of a server's log."""
    first = text.partition("\n")[0]
    return first if len(first) <= most else f"{first[:most]} ..."


# -- servers and leases


def _owner(run: Run, model: str) -> servers.Owner:
    return {"run_id": run.run_id, "dag_id": run.dag_id, "model": model}


def _folder(run: Run, model: str) -> Path:
    """Where the server's state file and log lie: per accelerator, for stale ones are found there."""
    return servers_folder() / slug(run.fleet.models[model].accelerator) / slug(model)


def _start(run: Run, model: str) -> servers.Handle:
    """Start the server and record what it is; stopped again if its steps were measured on another."""
    asked = _stop_asked(run, model)
    if asked is not None and (reason := asked()):
        raise LoadStopped(f"{model}: not loaded: kill switch: {reason}")
    handle = servers.start(
        model, run.model(model), _owner(run, model), _folder(run, model), run_is_over=run.is_over
    )
    try:
        stages.record_stack(
            run.sweep(model), handle.stack, simulated=handle.simulated, clock_scale=handle.clock_scale
        )
    except CapacityError:
        servers.stop(handle)
        raise
    return handle


def _handle(run: Run, model: str) -> servers.Handle | None:
    """This run's server of the model, ready or half-started."""
    return load(_folder(run, model), _owner(run, model))


def _lease(run: Run, model: str) -> Lease:
    accelerator = run.fleet.models[model].accelerator
    return Lease(accelerator, holder=run.holder, model=model, run_is_over=run.is_over)
