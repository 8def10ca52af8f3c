"""What the Airflow tasks do, called without Airflow: lateness, leases, servers, colours."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from include.capacity.config import DEFAULT_FLEET
from include.capacity.errors import ConfigError, LoadStopped, NoLimit, PublishError, ServerError
from include.capacity.flow import sweep as stages
from include.capacity.flow import tasks
from include.capacity.flow.tasks import NothingToDo, Run
from include.capacity.limits.evidence import Evidence
from include.capacity.publish.documents import check
from include.capacity.results.schema import Facts
from include.capacity.results.spec import StepSpec
from include.capacity.servers.lease import Lease
from include.capacity.words import Phase

DUE = datetime(2026, 3, 1, 1, 0, tzinfo=UTC)


@pytest.fixture
def fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped fleet, publishing into the test's folder."""
    data = yaml.safe_load(DEFAULT_FLEET.read_text())
    data["publish"]["to"] = (tmp_path / "out").as_uri()
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    monkeypatch.setenv("CAPACITY_FLEET", str(file))
    monkeypatch.setenv("CAPACITY_STATE", str(tmp_path / "state"))
    return file


def a_run(run_id: str = "run-1", scheduled_at: datetime | None = None, **params) -> Run:
    return Run.of(
        run_id=run_id,
        dag_id="capacity_sweep",
        params=params,
        scheduled_at=scheduled_at,
        is_over=lambda _: False,
    )


def wrong_file(fleet_file: Path, old: str, new: str) -> None:
    text = fleet_file.read_text()
    assert old in text
    fleet_file.write_text(text.replace(old, new))


def test_plan_lists_baseline_prime_and_ladder_of_each_class_ascending(fleet_file: Path) -> None:
    specs = tasks.plan(a_run(), "sprinter")
    labels = [tasks.label(spec) for spec in specs]
    assert labels == [
        "baseline interactive c=1",
        "prime interactive c=32",
        "scout interactive c=8",
        "scout interactive c=16",
        "scout interactive c=24",
        "scout interactive c=32",
        "baseline batch c=1",
        "prime batch c=32",
        "scout batch c=8",
        "scout batch c=16",
        "scout batch c=24",
        "scout batch c=32",
    ]


def test_plan_in_exact_mode_lists_the_steps_given_and_their_repeats(fleet_file: Path) -> None:
    run = a_run(mode="exact", concurrency="4, 8", repeats=2, classes=["batch"])
    labels = [tasks.label(spec) for spec in tasks.plan(run, "steady")]
    assert labels == ["grid batch c=4", "grid batch c=8", "grid batch c=4 #2", "grid batch c=8 #2"]


def test_a_model_not_selected_is_nothing_to_do(fleet_file: Path) -> None:
    with pytest.raises(NothingToDo, match="steady is not selected"):
        tasks.plan(a_run(models=["sprinter"]), "steady")


@pytest.mark.parametrize(("late_s", "skipped"), [(0, False), (7200, False), (7201, True)])
def test_a_nightly_run_that_starts_too_late_is_skipped(fleet_file: Path, late_s: int, skipped: bool) -> None:
    run, now = a_run(scheduled_at=DUE), DUE + timedelta(seconds=late_s)
    if skipped:
        with pytest.raises(NothingToDo, match=r"7201 s ago: later than night\.max_lateness_s"):
            tasks.plan(run, "steady", now=now)
        assert not run.sweep("steady").exists("sweep.json")
    else:
        assert tasks.plan(run, "steady", now=now)


def test_planning_again_keeps_what_was_measured(fleet_file: Path) -> None:
    run = a_run()
    tasks.plan(run, "steady")
    before = run.sweep("steady").read("sweep.json")
    tasks.plan(run, "steady", now=datetime(2030, 1, 1, tzinfo=UTC))
    assert run.sweep("steady").read("sweep.json") == before


def test_an_unwritable_target_shows_before_a_server_starts(fleet_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where a folder should be")
    with pytest.raises((PublishError, OSError)):
        tasks.plan(a_run(), "steady")


def test_the_lease_keeps_a_second_run_waiting(fleet_file: Path) -> None:
    first, second = a_run("run-1"), a_run("run-2")
    assert tasks.lease(first, "steady") is True
    assert tasks.lease(first, "sprinter") is False  # the same accelerator, another model of the same run
    assert tasks.lease(second, "steady") is False
    tasks.stop_server(first, "steady")
    assert tasks.lease(second, "steady") is True


def test_a_lease_whose_run_is_over_is_broken(fleet_file: Path) -> None:
    assert tasks.lease(a_run("run-1"), "steady")
    later = Run.of(
        run_id="run-2",
        dag_id="capacity_sweep",
        params={},
        is_over=lambda holder: holder == "capacity_sweep/run-1",
    )
    assert tasks.lease(later, "steady") is True
    held = Lease("sim-0", holder="", model="").current()
    assert held is not None
    assert held.holder == "capacity_sweep/run-2"


def test_a_server_that_cannot_start_is_told_in_the_report(fleet_file: Path) -> None:
    wrong_file(fleet_file, "profile: steady", "profile: nowhere")
    run = a_run()
    tasks.plan(run, "steady")
    with pytest.raises(ConfigError, match="nowhere"):
        tasks.start_server(run, "steady")
    problems = run.sweep("steady").read_json("sweep.json")["problems"]
    assert [problem["stage"] for problem in problems] == ["start_server"]
    assert "nowhere" in problems[0]["error"]


def test_a_step_cleared_alone_brings_its_server_and_the_runs_end_stops_it(fleet_file: Path) -> None:
    run = a_run(models=["steady"], classes=["interactive"], mode="exact", concurrency="2")
    tasks.plan(run, "steady")
    target = tasks._living_target(run, "steady")
    try:
        assert target.served_name == "sim/steady-8b"
        assert tasks._living_target(run, "steady").base_url == target.base_url  # the same server
        other = a_run("run-2")
        tasks.plan(other, "steady")
        with pytest.raises(ServerError, match="'sim-0' is held by another run; clear `lease`"):
            tasks.start_server(other, "steady")
    finally:
        tasks.check_run(run, {})
    assert tasks._handle(run, "steady") is None
    assert tasks.lease(a_run("run-3"), "steady")


def test_stopping_what_never_started_is_fine(fleet_file: Path) -> None:
    tasks.stop_server(a_run(), "steady")


def limits_json(run: Run, model: str, *entries: tuple[str, str, int | None]) -> None:
    run.sweep(model).write_json(
        "limits.json",
        {"limits": [{"class": c, "status": s, "limit": n, "claim": f"about {c}"} for c, s, n in entries]},
    )


def test_a_run_with_findings_is_green(fleet_file: Path) -> None:
    run = a_run()
    limits_json(run, "steady", ("interactive", "proven", 22), ("batch", "lower_bound", 192))
    limits_json(run, "sprinter", ("interactive", "no_passing_step", None), ("batch", "proven", 16))
    tasks.check_run(run, {"steady.ladder_0": "success", "steady.ladder_1": "skipped"})


@pytest.mark.parametrize("status", ["rejected", "not_measured", "insufficient_evidence"])
def test_a_class_without_a_limit_for_a_fault_of_ours_is_red(fleet_file: Path, status: str) -> None:
    run = a_run()
    limits_json(run, "steady", ("interactive", "proven", 22), ("batch", status, None))
    with pytest.raises(NoLimit, match=rf"steady batch: no limit \({status}\): about batch"):
        tasks.check_run(run, {})


@pytest.mark.parametrize("state", ["failed", "upstream_failed"])
def test_a_failed_task_is_red_and_named(fleet_file: Path, state: str) -> None:
    run = a_run()
    limits_json(run, "steady", ("interactive", "proven", 22))
    with pytest.raises(NoLimit, match=r"tasks failed: sprinter\.start_server"):
        tasks.check_run(run, {"sprinter.start_server": state, "steady.stop_server": "success"})


def test_a_red_run_says_what_failed_and_which_check_rejected(fleet_file: Path) -> None:
    run = a_run()
    tasks.plan(run, "steady")
    tasks.stages.record_problem(run.sweep("steady"), "start_server", ServerError("out of memory\nlog, log"))
    limits_json(run, "steady", ("interactive", "rejected", None))
    run.sweep("steady").write_json(
        "quality.json",
        {
            "findings": [
                {"severity": "reject", "reason": "The anchor step is 24 % slower."},
                {"severity": "flag", "reason": "Something small."},
            ]
        },
    )
    states = {"steady.start_server": "failed", "steady.ladder": "upstream_failed", "publish": "success"}
    assert tasks.problems(run, states) == [
        "tasks failed: steady.start_server",
        "steady interactive: no limit (rejected): about interactive",
        "steady: start_server: out of memory",
        "steady: The anchor step is 24 % slower.",
    ]
    (event,) = tasks.events(run, states)
    assert (event.name, event.title) == ("run_failed", "demo: run run-1 of capacity_sweep failed")
    assert event.text.splitlines()[1:] == [
        "- tasks failed: steady.start_server",
        "- steady interactive: no limit (rejected): about interactive",
        "- steady: start_server: out of memory",
        "- steady: The anchor step is 24 % slower.",
    ]


def test_a_limit_that_fell_is_told_and_the_run_stays_green(fleet_file: Path) -> None:
    run = a_run()
    for model, verdict in (("steady", "fell"), ("sprinter", "rose")):
        limits_json(run, model, ("interactive", "proven", 20))
        limits = run.sweep(model).read_json("limits.json")
        limits["limits"][0]["change"] = {"verdict": verdict, "sentence": f"interactive: it {verdict}."}
        run.sweep(model).write_json("limits.json", limits)
    assert [(event.name, event.title, event.sentences) for event in tasks.events(run, {})] == [
        ("limit_fell", "demo: a limit fell", ["steady, interactive: it fell."]),
        ("limit_rose", "demo: a limit rose", ["sprinter, interactive: it rose."]),
    ]
    tasks.check_run(run, {})


def test_a_night_that_starts_too_late_is_told_once(fleet_file: Path) -> None:
    def night(day: int) -> Run:
        return a_run(f"scheduled-{day}", scheduled_at=datetime(2026, 3, day, 1, 0, tzinfo=UTC))

    def told(run: Run) -> list[tuple[str, list[str]]]:
        return [(event.name, event.sentences) for event in tasks.announce(run, {}, {}, now=DUE)]

    late = "it started more than 7,200 s late (night.max_lateness_s)."
    assert told(night(1)) == [("night_missed", [f"The night due 2026-03-01 01:00 was not measured: {late}"])]
    (entry,) = tasks.read_history(night(2)) or []
    assert (entry["scheduled_at"], entry["missed"]) == ("2026-03-01T01:00:00+00:00", late[:-1])
    check(entry, "history", "here")
    on_time = night(2)
    tasks.plan(on_time, "steady", now=on_time.scheduled_at)
    assert told(on_time) == []
    assert tasks.missed_nights(on_time, tasks.read_history(on_time) or []) == [
        f"The night due 2026-03-01 01:00 was not measured: {late}"
    ]
    after_a_gap = night(4)
    tasks.plan(after_a_gap, "steady", now=after_a_gap.scheduled_at)
    ((name, sentences),) = told(after_a_gap)
    assert name == "night_missed"
    assert "nights due 2026-03-02 01:00, 2026-03-03 01:00: the DAG was paused" in sentences[0]
    assert tasks.missed_nights(a_run(), tasks.read_history(a_run()) or []) == []


def test_what_changed_is_computed_from_the_history(fleet_file: Path) -> None:
    run = a_run()
    tasks.plan(run, "steady")
    sweep = run.sweep("steady")
    about = sweep.read_json("sweep.json")
    entry = {
        "class": "interactive",
        "measured": "alone",
        "status": "proven",
        "limit": 20,
        "bracket": [20, 21],
        "deadline_s": 60.0,
        "completion_floor": 0.99,
        "objectives": {},
        "cap_at_latency_knee": True,
        "comparison_id": about["comparison_ids"]["interactive"],
        "stack_id": None,
    }
    before = {
        "schema": 1,
        "promoted": True,
        "failed": {},
        "run_id": "r0",
        "attempt": 1,
        "published_at": "2026-01-01T05:00:00+00:00",
        "models": {
            "steady": {
                "measured_at": "2026-01-01T01:00:00+00:00",
                "stack_id": None,
                "limits": [{**entry, "limit": 30, "bracket": [30, 31]}],
            }
        },
    }
    run.store.write("history/r0.json", json.dumps(before).encode())
    sweep.write_json("limits.json", {"limits": [entry, {**entry, "measured": "shared", "change": None}]})
    history = tasks.read_history(run, "steady")
    assert history is not None
    tasks.stages.compare(sweep, history)
    alone, shared = sweep.read_json("limits.json")["limits"]
    assert alone["change"]["verdict"] == "may_have_fallen"
    assert shared["change"] is None


def test_a_broken_history_costs_the_comparison_and_nothing_else(fleet_file: Path) -> None:
    run = a_run()
    tasks.plan(run, "steady")
    run.store.write("history/r0.json", b"{")
    assert tasks.read_history(run, "steady") is None
    (problem,) = run.sweep("steady").read_json("sweep.json")["problems"]
    assert problem["stage"] == "comparison with earlier runs"
    assert "history/r0.json: not an object of the history" in problem["error"]


def test_manual_runs_do_not_promote_unless_asked(fleet_file: Path) -> None:
    assert a_run().promote is False
    assert a_run(promote=True).promote is True


def test_nothing_measured_is_nothing_to_publish(fleet_file: Path) -> None:
    with pytest.raises(NothingToDo, match="no model was measured"):
        tasks.publish(a_run())


@pytest.mark.parametrize(
    ("dag", "run", "key"),
    [
        (
            "capacity_sweep",
            "manual__2026-03-01T01:02:03.456789+00:00",
            "sweep-manual-20260301t010203.456789z",
        ),
        ("capacity_nightly", "scheduled__2026-03-01T01:00:00+00:00", "nightly-scheduled-20260301t010000z"),
        ("capacity_sweep", "../../etc", "sweep-..~2f~..~2f~etc"),
        ("capacity_sweep", "before the upgrade", "sweep-before~20~the~20~upgrade"),
    ],
)
def test_a_runs_key_is_readable_and_one_segment(dag: str, run: str, key: str) -> None:
    assert tasks.run_key(dag, run) == key


def bounded(fleet_file: Path, **accelerator: object) -> None:
    data = yaml.safe_load(fleet_file.read_text())
    data["accelerators"]["sim-0"].update(accelerator)
    fleet_file.write_text(yaml.safe_dump(data, sort_keys=False))


def test_a_nights_budget_counts_from_the_first_use_of_the_accelerator(fleet_file: Path) -> None:
    bounded(fleet_file, budget_s=3600)
    run = a_run(scheduled_at=DUE)
    assert tasks.lease(run, "sprinter")
    began = datetime.fromisoformat(run.store.read(f"work/{run.key}/since-sim-0").decode())
    assert tasks.left_s(run, "sprinter", now=began + timedelta(seconds=600)) == 3000
    assert tasks.left_s(run, "steady", now=began + timedelta(seconds=4000)) == 0  # the same accelerator


def test_a_night_ends_at_its_latest_end_in_its_time_zone(fleet_file: Path) -> None:
    bounded(fleet_file, budget_s=None, latest_end="06:30")
    data = yaml.safe_load(fleet_file.read_text())
    data["night"]["timezone"] = "Europe/Berlin"
    fleet_file.write_text(yaml.safe_dump(data, sort_keys=False))
    run = a_run(
        scheduled_at=datetime(2026, 3, 1, 22, 0, tzinfo=UTC)
    )  # 23:00 in Berlin, so 06:30 the next day
    assert tasks.left_s(run, "steady", now=datetime(2026, 3, 2, 5, 0, tzinfo=UTC)) == 1800


def test_what_a_person_starts_has_no_budget(fleet_file: Path) -> None:
    bounded(fleet_file, budget_s=1, latest_end="00:01")
    assert tasks.left_s(a_run(), "steady") is None


def test_steps_that_do_not_fit_into_the_night_are_skipped_with_the_reason(fleet_file: Path) -> None:
    bounded(fleet_file, budget_s=1)
    run = a_run(scheduled_at=DUE)
    specs = tasks.plan(run, "steady", now=DUE)
    assert tasks.lease(run, "steady")
    with pytest.raises(NothingToDo, match="budget: about"):
        tasks.ladder_step(run, "steady", specs[2])


def test_an_endpoint_that_died_is_not_taken_for_a_crash_by_load(fleet_file: Path) -> None:
    data = yaml.safe_load(fleet_file.read_text())
    data["models"]["steady"]["server"] = {"kind": "endpoint", "url": "http://127.0.0.1:9"}
    fleet_file.write_text(yaml.safe_dump(data, sort_keys=False))
    run = a_run()
    specs = tasks.plan(run, "steady")
    handle = tasks.servers.Handle(
        kind="endpoint", model="steady", url="http://127.0.0.1:9", metrics_url="", served_name="x"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "_handle", lambda *_: handle)
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 does not answer any more"):
            tasks.ladder_step(run, "steady", specs[0])
    assert run.sweep("steady").step_keys() == []


# -- endpoints: kill switch and ceiling


def endpoint_fleet(fleet_file: Path, **server: object) -> None:
    data = yaml.safe_load(fleet_file.read_text())
    data["models"]["steady"]["server"] = {"kind": "endpoint", "url": "http://127.0.0.1:9", **server}
    fleet_file.write_text(yaml.safe_dump(data, sort_keys=False))


def test_the_kill_switch_is_a_file_or_airflows_variable(fleet_file: Path, tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    endpoint_fleet(fleet_file, kill_switch="stop")  # from whose folder?
    with pytest.raises(ConfigError, match=r"models\.steady\.server\.kill_switch: "):
        a_run()
    endpoint_fleet(fleet_file, kill_switch=str(switch))
    named = ""
    run = replace(a_run(), kill_switch=lambda: named)
    asked = tasks._stop_asked(run, "steady")
    assert asked is not None
    assert asked() is None
    for named in ("steady", "other, steady", "all"):
        assert asked() == f"the Airflow variable capacity_kill_switch names {named.split()[-1]!r}"
    for named in (
        "Steady",
        "ALL",
        "a;steady",
        "a\nsteady",
        '["a", "steady"]',
    ):  # a brake takes any handwriting
        assert asked() is not None, named
    for named in ("sprinter", "steady-2", "not steadyy", "small"):
        assert asked() is None, named
    assert tasks._stop_asked(run, "sprinter") is None  # a server of our own is stopped by its run
    switch.touch()
    assert asked() == f"the file {switch} exists"
    with pytest.raises(LoadStopped, match=f"steady: not loaded: kill switch: the file {switch} exists"):
        tasks._start(run, "steady")


def test_a_run_that_the_kill_switch_ended_is_red_with_the_reason(fleet_file: Path) -> None:
    run = a_run()
    tasks.plan(run, "steady")
    stages.record_problem(
        run.sweep("steady"), "prove interactive c=8", LoadStopped("aborted: kill switch: X")
    )
    with pytest.raises(NoLimit, match=r"tasks failed: steady\.prove.*; steady: .*aborted: kill switch: X"):
        tasks.check_run(run, {"steady.prove[0]": "failed"})


def test_steps_above_the_ceiling_are_shown_as_skipped(fleet_file: Path) -> None:
    endpoint_fleet(fleet_file, max_concurrency=20)
    run = a_run(classes=["interactive"])
    specs = tasks.plan(run, "steady")
    assert [tasks.label(spec) for spec in specs][2:] == [
        f"scout interactive c={n}" for n in (8, 16, 20, 32, 48)
    ]
    with pytest.raises(NothingToDo, match="not measured: above the ceiling of 20"):
        tasks.ladder_step(run, "steady", specs[-1])
    with pytest.raises(LoadStopped, match="above the ceiling of 20"):  # whoever asks for it
        stages.measure(
            run.sweep("steady"), StepSpec.from_json(specs[-1]), None
        )  # no target: it is not reached


def test_an_exact_ladder_wholly_above_the_ceiling_is_refused(fleet_file: Path) -> None:
    endpoint_fleet(fleet_file, max_concurrency=2)
    with pytest.raises(ConfigError, match=r"every step is above server.max_concurrency \(2\)"):
        a_run(mode="exact", models=["steady"])


# -- going on with an interrupted run


@pytest.fixture
def measured(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that would be measured, by label; each leaves facts and evidence as a step does."""
    labels: list[str] = []

    def measure(run: Run, model: str, spec: StepSpec) -> dict[str, object]:
        labels.append(spec.label)
        sweep = run.sweep(model)
        load = spec.loads[0]
        found = Evidence(
            key=spec.key,
            service_class=load.service_class,
            phase=spec.phase.value,
            concurrency=load.concurrency,
            repeat=spec.repeat,
            planned=load.requests,
            attempted=load.requests,
            holds=True,
            valid=load.concurrency != 16,  # this one comes out client-bound
        )
        sweep.write_json(f"evidence/{spec.key}.json", [found.to_json()])
        sweep.write_step(spec.key, Facts(spec=spec.to_json(), started_at=f"{len(labels):04d}"), None)
        return {}

    monkeypatch.setattr(tasks, "_measure", measure)
    return labels


def test_a_run_planned_again_measures_only_what_is_missing(fleet_file: Path, measured: list[str]) -> None:
    run = a_run(classes=["interactive"])
    first = tasks.plan(run, "sprinter")
    seed = run.sweep("sprinter").read_json("sweep.json")["seed"]
    for spec in first[:4]:  # baseline, prime, 8, 16; then it was interrupted
        tasks.ladder_step(run, "sprinter", spec)
    measured.clear()

    again = a_run(classes=["interactive"])
    specs = tasks.plan(again, "sprinter")
    assert specs == first
    assert again.sweep("sprinter").read_json("sweep.json")["seed"] == seed
    for spec in specs:
        tasks.ladder_step(again, "sprinter", spec)
    # A new server must be primed; what came out unusable is worth another try.
    assert measured == [f"{phase} interactive c={n}" for phase, n in
                        (("prime", 32), ("scout", 16), ("scout", 24), ("scout", 32))]  # fmt: skip
    measured.clear()
    tasks.ladder_step(again, "sprinter", specs[2])  # cleared by itself: somebody wants it measured again
    assert measured == ["scout interactive c=8"]


def test_a_planned_step_that_is_there_is_kept_too(fleet_file: Path, measured: list[str]) -> None:
    """The slot remembers its step; here the unusable c=16 was measured once more under another number."""
    run = a_run(classes=["interactive"])
    for spec in tasks.plan(run, "sprinter"):
        tasks.ladder_step(run, "sprinter", spec)
    labels: list[str] = []
    tasks.planned_step(run, "sprinter", Phase.SCOUT, 0, labels.append)
    assert measured[-1] == "scout interactive c=16 #2"
    sweep = run.sweep("sprinter")
    key = "scout-interactive-c00016-r2"
    found = [{**item, "valid": True} for item in sweep.read_json(f"evidence/{key}.json")]
    sweep.write_json(f"evidence/{key}.json", found)
    measured.clear()
    tasks.plan(run, "sprinter")
    tasks.planned_step(run, "sprinter", Phase.SCOUT, 0, labels.append)
    assert measured == []
    assert labels == ["scout interactive c=16 #2", "scout interactive c=16 #2 (kept)"]
    tasks.planned_step(run, "sprinter", Phase.SCOUT, 0, labels.append)  # cleared by itself
    assert measured == ["scout interactive c=16 #2"]


def test_a_run_that_asks_for_something_else_by_now_is_refused(fleet_file: Path, measured: list[str]) -> None:
    run = a_run(classes=["interactive"])
    specs = tasks.plan(run, "sprinter")
    wrong_file(fleet_file, "completion_floor: 0.99", "completion_floor: 0.98")
    changed = a_run(classes=["interactive"])
    tasks.plan(changed, "sprinter")  # nothing was measured yet: then it is asked for the new thing
    assert (
        changed.sweep("sprinter").read_json("sweep.json")["classes"]["interactive"]["completion_floor"]
        == 0.98
    )
    tasks.ladder_step(changed, "sprinter", specs[2])
    wrong_file(fleet_file, "completion_floor: 0.98", "completion_floor: 0.97")
    told = r"holds 1 steps .*classes\.interactive\.completion_floor: 0\.98, now 0\.97\); ask for the same"
    with pytest.raises(ConfigError, match=told):
        tasks.plan(a_run(classes=["interactive"]), "sprinter")


def test_results_of_two_stacks_are_not_mixed(fleet_file: Path, measured: list[str]) -> None:
    run = a_run(classes=["interactive"])
    specs, sweep = tasks.plan(run, "sprinter"), run.sweep("sprinter")
    for version in ("0.32", "0.33"):  # before anything is measured the stack may change
        stages.record_stack(sweep, {"vllm_version": version}, simulated=False, clock_scale=1.0)
    tasks.ladder_step(run, "sprinter", specs[2])
    stages.record_stack(
        sweep, {"vllm_version": "0.33", "observed": {"kv": 7}}, simulated=False, clock_scale=1.0
    )
    with pytest.raises(ConfigError, match=r"vllm_version: '0\.33', now '0\.34'"):
        stages.record_stack(sweep, {"vllm_version": "0.34"}, simulated=False, clock_scale=1.0)


def test_a_problem_that_was_settled_is_told_no_more(fleet_file: Path) -> None:
    run = a_run()
    tasks.plan(run, "steady")
    sweep = run.sweep("steady")
    for stage in ("start_server", "scout interactive c=8"):
        stages.record_problem(sweep, stage, ServerError("no"))
    stages.settle_problem(sweep, "start_server")
    assert sweep.read_json("sweep.json")["problems"] == [{"stage": "scout interactive c=8", "error": "no"}]
