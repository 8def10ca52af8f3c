import json
from dataclasses import replace

import pandas as pd
import pytest

from include.capacity.errors import ConfigError
from include.capacity.limits.bounds import rate, tally
from include.capacity.limits.claims import without_limit
from include.capacity.limits.compute import compute_limits, judged_classes, limits_table
from include.capacity.limits.evidence import Evidence, evidence_of
from include.capacity.limits.planner import Problem, SharedSearch
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.results.spec import StepSpec
from include.capacity.words import LimitStatus, Phase, State
from tests.limits.test_evidence import facts, put, rows
from tests.limits.test_planner import answer, drive, one_class, problem, up_to
from tests.limits.virtual import SlotServer, batch_class, service_class, sweep

NO_STEPS = pd.DataFrame(columns=list(STEP_COLUMNS))


def sweep_json(asked: Problem, **changes: object) -> dict[str, object]:
    return {
        "schema": 1,
        "run_id": "night-1",
        "attempt": 1,
        "model": asked.model,
        "series": "",
        "source": "measured",
        "simulated": False,
        "clock_scale": 1.0,
        "stack_id": "abc",
        "comparison_ids": dict.fromkeys(asked.classes, "cmp"),
        "classes": {name: c.model_dump(mode="json") for name, c in asked.classes.items()},
        "bounds": asked.bounds.model_dump(mode="json"),
        "mode": asked.mode,
        "repeats": asked.repeats,
        "shared": asked.shared,
        "seed": asked.seed,
        **changes,
    }


def limit_of(asked: Problem, evidence: list[Evidence], quality=None, name: str = "interactive", **more):
    result = compute_limits(sweep_json(asked, **more), evidence, NO_STEPS, quality)
    assert json.dumps(result, allow_nan=False)
    return next(e for e in result["limits"] if e["class"] == name and e["measured"] == "alone")


def step(
    n: int,
    state: State | None,
    phase: Phase = Phase.GRID,
    repeat: int = 1,
    completed: int = 600,
    met: int | None = None,
    **more: object,
) -> Evidence:
    met = completed if met is None else met
    tally_y, tally_z = (tally([True] * good + [False] * (600 - good), 5) for good in (completed, met))
    y, z = rate(tally_y), rate(tally_z)
    usual = {
        "key": f"{phase}-interactive-c{n:05d}-r{repeat}",
        "service_class": "interactive",
        "phase": phase.value,
        "concurrency": n,
        "repeat": repeat,
        "planned": 600,
        "proof": phase in (Phase.GRID, Phase.PROVE),
        "attempted": 600,
        "completed": completed,
        "met": met,
        "missed": {"ttft": completed - met},
        "clusters_y": list(tally_y.clusters),
        "clusters_z": list(tally_z.clusters),
        "n_effective_y": y.n_effective,
        "n_effective_z": z.n_effective,
        "lower_y": y.lower,
        "lower_z": z.lower,
        "upper_y": y.upper,
        "upper_z": z.upper,
        "holds": completed >= 594 and met >= 570,
        "state": state and state.value,
        "window_s": 212.0,
        "request_per_s": 600 / 212,
    }
    return Evidence(**{**usual, **more})


def grid(**changes: object) -> Problem:
    service = service_class(ladder=[16, 32, 64, 68], **changes)
    return Problem(model="m", classes={"interactive": service}, mode="exact")


PASS, FAIL, OPEN = State.PASS, State.FAIL, State.INCONCLUSIVE


# -- number, status, claim


def test_a_proven_limit_and_its_claim():
    evidence = [step(16, PASS), step(32, PASS), step(64, PASS), step(68, FAIL, met=400)]
    entry = limit_of(grid(), evidence)
    assert (entry["limit"], entry["status"], entry["bracket"], entry["bound_by"]) == (
        64,
        "proven",
        [64, 68],
        "ttft",
    )
    assert entry["claim"] == (
        "With at most 64 in flight, this stack and workload, alone on the server: at least 95 % had the "
        "first token within 1.0 s and at least 99 % completed within 60 s (n 600, effective 600, one-sided "
        "95 %, 212 s measured, one server start). First failing: 68."
    )
    assert (entry["confidence"], entry["deadline_s"], entry["measured"]) == (0.95, 60, "alone")
    assert (entry["stack_id"], entry["comparison_id"]) == ("abc", "cmp")
    evidence_block = entry["evidence"]
    assert (evidence_block["n"], evidence_block["n_effective"], evidence_block["seconds"]) == (600, 600, 212)
    assert evidence_block["completion_lower"] == pytest.approx(0.05 ** (1 / 600))
    assert evidence_block["steps"] == ["grid-interactive-c00064-r1"]


def test_simulated_servers_say_so():
    entry = limit_of(grid(), [step(16, PASS), step(32, FAIL, met=0)], simulated=True)
    assert entry["claim"].startswith("Simulated server: with at most 16 in flight")


def test_more_objectives_and_several_starts_in_a_claim():
    asked = grid(tpot={"at_most_s": 0.05, "share": 0.95}, completion_floor=0.999)
    entry = limit_of(asked, [step(16, PASS), step(32, FAIL, met=0)], server_starts=2)
    assert (
        "at least 95 % had the first token within 1.0 s and had 50 ms or less between tokens and at least "
        "99.9 % completed within 60 s" in entry["claim"]
    )
    assert "2 server starts" in entry["claim"]


def test_a_batch_claim():
    asked = one_class("batch")
    evidence: list[Evidence] = []
    drive(asked, up_to(100), evidence)
    entry = limit_of(asked, evidence, name="batch")
    assert "alone on the server: at least 95 % completed within 120 s (" in entry["claim"]
    assert entry["objectives"] == {}
    assert entry["evidence"]["objective_met"] is None


def test_where_the_ladder_ends_first_it_is_a_lower_bound():
    entry = limit_of(grid(), [step(16, PASS), step(68, PASS)])
    assert (entry["limit"], entry["status"], entry["bound_by"]) == (68, "lower_bound", "ladder")
    assert entry["bracket"] == [68, None]
    assert entry["claim"].endswith("a lower bound (the steps ended at 68).")


def test_an_inconclusive_step_blocks_nothing_and_a_failed_one_all_above():
    entry = limit_of(
        grid(), [step(16, PASS), step(32, OPEN, completed=595), step(64, PASS), step(68, FAIL, met=0)]
    )
    assert (entry["limit"], entry["status"]) == (64, "proven")
    entry = limit_of(grid(), [step(16, PASS), step(32, FAIL, met=0), step(64, PASS)])
    assert (entry["limit"], entry["bracket"]) == (16, [16, 32])


def test_above_a_limit_that_only_failed_to_pass():
    entry = limit_of(grid(), [step(16, PASS), step(32, OPEN, completed=595), step(64, FAIL, completed=500)])
    assert (entry["bracket"], entry["first_failing"], entry["bound_by"]) == ([16, 32], 64, "completion")
    assert entry["claim"].endswith("Above it 32 did not pass; first failing: 64.")


def test_without_a_limit():
    nothing = limit_of(grid(), [])
    assert (nothing["limit"], nothing["status"], nothing["claim"]) == (
        None,
        "not_measured",
        "No limit: not measured: no step was measured.",
    )
    invalid = limit_of(grid(), [step(16, None, valid=False, why="client-bound")])
    assert (invalid["status"], invalid["reason"]) == ("not_measured", "client-bound")
    failed = limit_of(grid(), [step(16, FAIL, met=0), step(32, FAIL, met=0)])
    assert (failed["status"], failed["bracket"]) == ("no_passing_step", [None, 16])
    crashed = limit_of(grid(), [step(16, FAIL, crashed=True)])
    assert crashed["reason"] == "the lowest step measured, 16, crashed the server"
    undecided = limit_of(grid(), [step(16, OPEN, completed=595), step(32, FAIL, met=0)])
    assert (undecided["status"], undecided["reason"]) == (
        "insufficient_evidence",
        "no step of proof size passed (16 inconclusive, 32 fail)",
    )


def test_a_server_too_slow_for_a_proof_is_said_to_be():
    capped = {"stop_reason": "wall_clock_cap", "attempted": 240, "window_s": 3600.0}
    entry = limit_of(grid(), [step(16, OPEN, completed=240, **capped)])
    assert (entry["limit"], entry["status"]) == (None, "insufficient_evidence")
    assert entry["reason"] == (
        "no step of proof size passed (16 inconclusive); the server is too slow for the time a proof may "
        "take: 240 requests in 3,600 s at 16, 600 or more wanted: raise prove_cap_slow_s"
    )


def test_scouts_prove_nothing():
    entry = limit_of(one_class(), [step(16, PASS, Phase.SCOUT), step(32, FAIL, Phase.SCOUT, met=0)])
    assert (entry["limit"], entry["status"]) == (None, "insufficient_evidence")


def test_the_latency_knee_caps_interactive_and_says_so():
    delays = {16: 0.1, 32: 0.1, 64: 0.9, 68: 0.95}
    evidence = [step(n, PASS, ttft_p95_s=t, ttft_p95_low_s=t, ttft_p95_high_s=t) for n, t in delays.items()]
    entry = limit_of(grid(), evidence)
    assert (entry["limit"], entry["bound_by"], entry["status"]) == (64, "latency_knee", "proven")
    assert entry["knees"]["latency"] == {"low": 32, "high": 64}
    assert "Capped at the latency knee (32 to 64)" in entry["claim"]
    free = limit_of(grid(cap_at_latency_knee=False), evidence)
    assert (free["limit"], free["bound_by"], free["status"]) == (68, "ladder", "lower_bound")
    assert free["knees"]["latency"] == {"low": 32, "high": 64}


def test_a_crash_bounds_and_is_a_finding():
    entry = limit_of(grid(), [step(16, PASS), step(32, FAIL, crashed=True)])
    assert (entry["bound_by"], entry["knees"]["server_crashed_at"]) == ("server_crash", 32)


def test_what_bound_the_server_is_read_at_the_first_step_above():
    full = {"server_kv_use_peak": 0.99, "server_waiting_mean": 4.0}
    entry = limit_of(grid(), [step(16, PASS), step(32, FAIL, met=0, server=full)])
    assert entry["server_bound_by"] == "kv"
    assert limit_of(grid(), [step(16, PASS)])["server_bound_by"] == "unknown"


def test_first_error_and_operating_range():
    evidence = [
        step(16, PASS, request_per_s=5.0),
        step(32, PASS, completed=599, request_per_s=9.7, first_error_s=41.5),
        step(64, PASS, request_per_s=10.0),
        step(68, FAIL, completed=500, request_per_s=8.0),
    ]
    entry = limit_of(grid(), evidence)
    knees = entry["knees"]
    assert (knees["first_error_concurrency"], knees["first_error_s"]) == (32, 41.5)
    assert knees["throughput"] == {"concurrency": 32, "low": 32, "high": 64}
    assert knees["completion"] == {"low": 64, "high": 68}
    assert entry["operating_range"] == [32, 64]
    assert 64 < entry["best_estimate"] < 68


# -- repeats


def test_repeats_are_pooled():
    # 597 of 600 twice: one alone proves nothing, 1194 of 1200 proves 99 %
    assert rate(tally([True] * 597 + [False] * 3, 5)).lower < 0.99
    spread = {"clusters_y": [1, 1, 1], "clusters_z": [1, 1, 1]}
    entry = limit_of(grid(), [step(16, OPEN, completed=597, repeat=r, **spread) for r in (1, 2)])
    assert (entry["limit"], entry["evidence"]["n"], entry["evidence"]["repeats"]) == (16, 1200, 2)
    assert "424 s measured, 2 runs" in entry["claim"]


def test_a_repeat_that_failed_keeps_the_others_from_passing():
    evidence = [step(16, PASS, repeat=1), step(16, PASS, repeat=2), step(16, FAIL, met=540, repeat=3)]
    entry = limit_of(grid(), evidence)
    assert (entry["limit"], entry["status"]) == (None, "insufficient_evidence")


def test_a_repeat_that_does_not_hold_keeps_the_others_from_passing():
    # 1782 of 1800 would prove 98 %: but one of the three runs had 97 %
    asked, spread = grid(completion_floor=0.98), {"clusters_y": [], "clusters_z": []}
    evidence = [step(16, PASS, repeat=1), step(16, PASS, repeat=2)]
    assert limit_of(asked, evidence)["limit"] == 16
    third = step(16, OPEN, completed=582, repeat=3, holds=False, **spread)
    assert limit_of(asked, [*evidence, third])["limit"] is None


# -- quality


def rejected(*keys: str, verdict: str = "flag") -> dict[str, object]:
    finding = {"check": "client_bound", "severity": "reject", "reason": "The client was the bottleneck."}
    return {
        "schema": 1,
        "verdict": verdict,
        "steps": [
            {"key": key, "service_class": "interactive", "verdict": "reject", "findings": [finding]}
            for key in keys
        ],
    }


def test_rejected_steps_leave_the_evidence():
    evidence = [step(16, PASS), step(32, PASS), step(64, FAIL, met=0)]
    entry = limit_of(grid(), evidence, rejected("grid-interactive-c00032-r1"))
    assert (entry["limit"], entry["bracket"]) == (16, [16, 64])
    all_of_them = limit_of(grid(), evidence, rejected(*(e.key for e in evidence)))
    assert (all_of_them["limit"], all_of_them["status"]) == (None, "rejected")
    assert all_of_them["reason"] == "all steps were rejected: The client was the bottleneck."


def test_a_rejected_failure_is_no_failure():
    evidence = [step(16, FAIL, met=0), step(32, PASS)]
    assert limit_of(grid(), evidence, rejected("grid-interactive-c00016-r1"))["limit"] == 32


def test_a_rejected_sweep_has_no_limits():
    entry = limit_of(grid(), [step(16, PASS)], rejected(verdict="reject"))
    assert (entry["limit"], entry["status"], entry["reason"]) == (
        None,
        "rejected",
        "data quality rejected the sweep",
    )


# -- after a search


def test_a_finished_search_is_proven_and_one_cut_short_a_lower_bound():
    asked = one_class()
    evidence: list[Evidence] = []
    drive(asked, up_to(40), evidence)
    entry = limit_of(asked, evidence)
    assert (entry["limit"], entry["status"], entry["bracket"]) == (40, "proven", [40, 41])
    unrefined = [e for e in evidence if e.concurrency in (1, 4, 8, 16, 32, 64)]
    proof = next(e for e in evidence if e.phase == Phase.PROVE)
    early = [*unrefined, replace(proof, concurrency=32)]
    entry = limit_of(asked, early)
    assert (entry["limit"], entry["status"], entry["bound_by"]) == (32, "lower_bound", "completion")
    assert entry["reason"] == "the search was cut short (budget or interruption)"
    assert entry["bracket"] == [32, 64]


def test_a_rejected_proof():
    asked = one_class()
    evidence: list[Evidence] = []
    drive(asked, up_to(40), evidence)
    entry = limit_of(asked, evidence, rejected("prove-interactive-c00040-r1"))
    assert (entry["limit"], entry["status"]) == (None, "rejected")


def test_the_shared_pair_stands_beside_the_limits_alone():
    asked = problem(shared=True)
    evidence: list[Evidence] = []
    drive(asked, up_to(40), evidence)
    result = compute_limits(sweep_json(asked), evidence, NO_STEPS, None)
    assert [(e["class"], e["measured"]) for e in result["limits"]] == [
        ("interactive", "alone"),
        ("batch", "alone"),
        ("interactive", "shared"),
        ("batch", "shared"),
    ]
    pair = {e.service_class: e.concurrency for e in SharedSearch(asked, evidence).proven()}
    first, second = result["limits"][2:]
    assert (first["limit"], first["beside"], first["status"]) == (
        pair["interactive"],
        {"batch": pair["batch"]},
        "proven",
    )
    assert f"together with {pair['batch']} batch in flight" in first["claim"]
    assert second["limit"] == pair["batch"]
    assert first["bracket"][1] > first["limit"]


def test_a_pair_that_never_held():
    asked = problem(shared=True)
    evidence: list[Evidence] = []

    def verdict(spec: StepSpec) -> list[Evidence]:
        return answer(spec, FAIL) if spec.phase is Phase.SHARED else up_to(40)(spec)

    drive(asked, verdict, evidence)
    shared = compute_limits(sweep_json(asked), evidence, NO_STEPS, None)["limits"][2:]
    assert [(e["limit"], e["status"]) for e in shared] == [(None, "insufficient_evidence")] * 2


def test_end_to_end_on_a_slot_server():
    asked = Problem(model="m", classes={"interactive": service_class(), "batch": batch_class()}, seed=1)
    evidence, _ = sweep(asked, SlotServer(20))
    result = compute_limits(sweep_json(asked), evidence, NO_STEPS, None)
    interactive, batch = result["limits"]
    assert abs(interactive["limit"] - 20) <= 1
    assert interactive["status"] == "proven"
    assert interactive["evidence"]["n"] >= 600
    assert batch["status"] == "lower_bound"
    # closed loop over 20 slots: throughput saturates at the slots
    assert 16 <= interactive["knees"]["throughput"]["concurrency"] <= 23


def test_three_classes_with_tpot_and_e2e_objectives_alone_and_together():
    ladder = [4, 8, 16, 32, 64]
    classes = {
        "chat": service_class(ladder=ladder, tpot={"at_most_s": 0.1, "share": 0.95}),
        "slow": batch_class(ladder=ladder, e2e={"at_most_s": 8.0, "share": 0.9}),
        "bulk": batch_class(ladder=ladder),
    }
    asked = Problem(model="m", classes=classes, seed=1, shared=True)
    evidence, _ = sweep(asked, SlotServer(20))
    result = compute_limits(sweep_json(asked), evidence, NO_STEPS, None)
    chat, slow, bulk = (e for e in result["limits"] if e["measured"] == "alone")
    assert abs(chat["limit"] - 20) <= 1  # the first token waits for a slot
    assert list(chat["objectives"]) == ["ttft", "tpot"]
    # a request holds its slot for 7 s at most in nine of ten, so one of 8 s may wait a little
    assert 18 <= slow["limit"] <= 30
    assert (slow["status"], slow["bound_by"]) == ("proven", "e2e")
    assert "had the whole answer within 8.0 s" in slow["claim"]
    assert (bulk["limit"], bulk["status"], bulk["objectives"]) == (64, "lower_bound", {})
    together = [e for e in result["limits"] if e["measured"] == "shared"]
    assert [e["class"] for e in together] == ["chat", "slow", "bulk"]
    assert all(len(e["beside"]) == 2 and e["limit"] for e in together)
    # answers slower than asked for meet nothing, however early they begin
    strict = service_class(ladder=ladder, tpot={"at_most_s": 0.01, "share": 0.95})
    asked = Problem(model="m", classes={"chat": strict}, seed=1)
    evidence, _ = sweep(asked, SlotServer(20))
    (chat,) = compute_limits(sweep_json(asked), evidence, NO_STEPS, None)["limits"]
    assert (chat["limit"], chat["status"]) == (None, "no_passing_step")


# -- judged by other values


def judged(asked: Problem, table: pd.DataFrame, classes) -> list[Evidence]:
    spec = next(s for s in drive(asked, up_to(1)) if s.phase is Phase.GRID)
    return evidence_of(facts(spec), table, classes)


def test_other_objectives_are_judged_and_flagged():
    asked = grid()
    table = put(rows(640), "ttft_s", list(range(0, 640, 12)), 1.5)
    strict = {"interactive": service_class(ladder=[16, 32, 64, 68])}
    lax = {
        "interactive": service_class(ladder=[16, 32, 64, 68], ttft={"at_most_s": 2.0, "share": 0.95}),
    }
    assert limit_of(asked, judged(asked, table, strict))["limit"] is None
    result = compute_limits(sweep_json(asked), judged(asked, table, lax), NO_STEPS, None, classes=lax)
    assert result["limits"][0]["limit"] == 16
    assert result["limits"][0]["objectives"] == {"ttft": {"at_most_s": 2.0, "share": 0.95}}
    assert result["flags"] == ["interactive: judged by another floor or objective than it was searched with"]


def test_a_longer_deadline_is_refused_and_a_shorter_flagged():
    data = sweep_json(grid())
    with pytest.raises(ConfigError, match="deadline_s 90 is longer than the 60 s it was measured with"):
        judged_classes(data, {"interactive": service_class(deadline_s=90)})
    classes, flags = judged_classes(
        data, {"interactive": service_class(deadline_s=30, ladder=[16, 32, 64, 68])}
    )
    assert classes["interactive"].deadline_s == 30
    assert len(flags) == 1
    assert flags[0].startswith("interactive: judged by a deadline of 30 s, measured with 60 s")


def test_another_workload_is_refused():
    other = service_class().model_copy(
        update={"workload": service_class().workload.model_copy(update={"name": "other"})}
    )
    with pytest.raises(ConfigError, match="workload differs from the one measured"):
        judged_classes(sweep_json(grid()), {"interactive": other})


def test_classes_that_are_not_named_stay():
    classes, flags = judged_classes(sweep_json(problem()), {"batch": problem().classes["batch"]})
    assert set(classes) == {"interactive", "batch"}
    assert flags == []


# -- table


def test_the_table():
    asked = problem()
    evidence: list[Evidence] = []
    drive(one_class(), up_to(40), evidence)
    text = limits_table(compute_limits(sweep_json(asked, simulated=True), evidence, NO_STEPS, None))
    header, first, second, note = text.splitlines()
    assert header == (
        "model  class        measured  limit  status          n  effective  seconds  bound by    next above"
    )
    assert first == (
        "m      interactive  alone        40  proven        600          -        -  completion          41"
    )
    assert second == (
        "m      batch        alone         -  not_measured    -          -        -  -                    -"
    )
    assert note.startswith("simulated")
    assert limits_table({"limits": []}) == "no limits"


def test_a_limit_at_the_ceiling_of_an_endpoint_is_a_lower_bound_and_says_so() -> None:
    asked = replace(grid(), ceiling=32)
    entry = limit_of(asked, [step(16, PASS), step(32, PASS)], ceiling=32)
    assert (entry["limit"], entry["status"], entry["bound_by"]) == (32, "lower_bound", "ceiling")
    lower = limit_of(asked, [step(16, PASS), step(32, FAIL, completed=300)], ceiling=32)
    assert (lower["limit"], lower["status"], lower["bound_by"]) == (16, "proven", "completion")


def test_a_reason_that_ends_with_a_full_stop_gets_no_second_one() -> None:
    assert without_limit(LimitStatus.REJECTED, "client-bound.") == (
        "No limit: the measurement was rejected: client-bound."
    )
