from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.config import StepBounds
from include.capacity.limits.evidence import Evidence
from include.capacity.limits.planner import (
    ORDER,
    Problem,
    Search,
    SharedSearch,
    above_ceiling,
    descent,
    estimate_s,
    instances,
    ladder_steps,
    next_step,
    problem_of,
    skip_reason,
    step_s,
    with_cap,
    without_stray_crashes,
)
from include.capacity.results.spec import StepSpec
from include.capacity.words import Phase, State
from tests.limits.virtual import SlotServer, batch_class, service_class, sweep

LADDER = [1, 4, 8, 16, 32, 64]


def problem(**changes: object) -> Problem:
    both = {"interactive": service_class(ladder=LADDER), "batch": batch_class(ladder=LADDER)}
    return Problem(**{"model": "m", "classes": both, "seed": 7, **changes})


def one_class(name: str = "interactive", **changes: object) -> Problem:
    service = (service_class if name == "interactive" else batch_class)(**{"ladder": LADDER, **changes})
    return problem(classes={name: service})


def answer(spec: StepSpec, state: State | None, holds: bool | None = None, **more: object) -> list[Evidence]:
    """Evidence as it would come back from a step, with this verdict on every load."""
    loads = {load.service_class: load.concurrency for load in spec.loads}
    usual = {
        "attempted": spec.loads[0].requests,
        "holds": state is not State.FAIL if holds is None else holds,
        "state": state and state.value,
    }
    return [
        Evidence(
            **{
                "key": spec.key,
                "service_class": load.service_class,
                "phase": spec.phase.value,
                "concurrency": load.concurrency,
                "repeat": spec.repeat,
                "beside": {name: n for name, n in loads.items() if name != load.service_class},
                "planned": load.requests,
                "proof": spec.phase in (Phase.PROVE, Phase.GRID) or load.requests >= 600,
                **usual,
                **more,
            }
        )
        for load in spec.loads
    ]


def drive(asked: Problem, verdict, evidence: list[Evidence] | None = None) -> list[StepSpec]:
    """All steps that the planner asks for when ``verdict(spec)`` gives each one's evidence."""
    evidence = evidence if evidence is not None else []
    specs = []
    while (spec := next_step(asked, evidence)) is not None:
        specs.append(spec)
        evidence += verdict(spec)
        assert len(specs) < 200
    return specs


def up_to(n: int):
    """A server that holds exactly up to a concurrency."""

    def verdict(spec: StepSpec) -> list[Evidence]:
        return answer(spec, State.PASS if sum(x.concurrency for x in spec.loads) <= n else State.FAIL)

    return verdict


def labels(specs: list[StepSpec], phase: Phase, name: str = "interactive") -> list[int]:
    return [s.loads[0].concurrency for s in specs if s.phase is phase and s.loads[0].service_class == name]


# -- steps


def test_the_ladder_in_order():
    steps = ladder_steps(problem())
    assert [s.label for s in steps[:5]] == [
        "baseline interactive c=1",
        "prime interactive c=64",
        "scout interactive c=1",
        "scout interactive c=4",
        "scout interactive c=8",
    ]
    assert [s.loads[0].service_class for s in steps] == ["interactive"] * 8 + ["batch"] * 8


def test_sizes_of_steps():
    specs = drive(one_class(), up_to(40))
    sizes = {(s.phase, s.loads[0].concurrency): (s.loads[0].requests, s.loads[0].max_requests) for s in specs}
    assert sizes[Phase.BASELINE, 1] == (30, 30)
    assert sizes[Phase.PRIME, 64] == (20, 20)
    assert sizes[Phase.SCOUT, 32] == (100, 100)
    assert sizes[Phase.SCOUT, 64] == (192, 192)
    assert sizes[Phase.PROVE, 40] == (600, 3000)
    large = drive(one_class(ladder=[256, 512]), up_to(400))
    proof = next(s for s in large if s.phase is Phase.PROVE)
    assert (proof.loads[0].requests, proof.loads[0].max_requests) == (10 * proof.loads[0].concurrency,) * 2
    assert (proof.cap_s, proof.min_window_s, proof.early_stop) == (600, 120, True)
    scout = next(s for s in large if s.phase is Phase.SCOUT)
    assert (scout.cap_s, scout.min_window_s, scout.early_stop) == (60, 30, True)
    baseline = next(s for s in large if s.phase is Phase.BASELINE)
    assert (baseline.cap_s, baseline.min_window_s, baseline.early_stop) == (600, 30, False)


def test_every_step_has_its_own_seed_and_the_same_when_asked_again():
    seeds = [s.seed for s in ladder_steps(problem())]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [s.seed for s in ladder_steps(problem())]
    assert set(seeds).isdisjoint(s.seed for s in ladder_steps(problem(seed=8)))


def test_a_problem_from_sweep_json():
    asked = problem(shared=True, repeats=3, mode="exact", budget_s=100.0)
    data = {
        "model": "m",
        "classes": {name: c.model_dump(mode="json") for name, c in asked.classes.items()},
        "bounds": StepBounds().model_dump(mode="json"),
        "mode": "exact",
        "repeats": 3,
        "shared": True,
        "seed": 7,
        "budget_s": 100.0,
    }
    assert problem_of(data) == asked


# -- the search


def test_scouts_climb_bisect_and_prove_the_edge():
    specs = drive(one_class(), up_to(40))
    assert labels(specs, Phase.SCOUT) == [1, 4, 8, 16, 32, 64, 45, 38, 41, 39, 40]
    assert labels(specs, Phase.PROVE) == [40]
    assert labels(specs, Phase.ANCHOR) == [1]
    assert specs[-1].phase is Phase.ANCHOR


@given(st.integers(1, 64), st.sampled_from([0.05, 0.1, 0.2]))
@settings(max_examples=60, deadline=None)
def test_the_limit_is_found_to_the_resolution(truth, resolution):
    asked = one_class()
    asked = replace(asked, bounds=StepBounds(resolution=resolution))
    evidence: list[Evidence] = []
    specs = drive(asked, up_to(truth), evidence)
    proven = Search(asked, "interactive", evidence).proven()
    assert proven is not None
    assert truth - max(1, resolution * truth) <= proven <= truth
    assert len(labels(specs, Phase.PROVE)) == 1
    assert len(labels(specs, Phase.SCOUT)) <= len(LADDER) + instances(asked)["refine"]


def test_two_provable_fails_end_the_ladder_and_one_does_not():
    specs = drive(one_class(), up_to(5))
    assert labels(specs, Phase.SCOUT)[:4] == [1, 4, 8, 16]
    assert 32 not in labels(specs, Phase.SCOUT)


def test_a_failure_that_is_not_provable_blocks_nothing():
    def verdict(spec: StepSpec) -> list[Evidence]:
        n = spec.loads[0].concurrency
        if spec.phase is Phase.SCOUT and n == 16:
            return answer(spec, State.INCONCLUSIVE, holds=False)
        return up_to(32)(spec)

    specs = drive(one_class(), verdict)
    assert labels(specs, Phase.PROVE) == [32]


def test_nothing_is_refined_when_the_ladder_ends_first():
    specs = drive(one_class(), up_to(1000))
    assert labels(specs, Phase.SCOUT) == LADDER
    assert labels(specs, Phase.PROVE) == [64]


def test_below_a_ladder_that_fails_at_once_is_bisected():
    evidence: list[Evidence] = []
    asked = one_class(ladder=[32, 64])
    specs = drive(asked, up_to(5), evidence)
    assert labels(specs, Phase.SCOUT)[:3] == [32, 64, 6]
    assert Search(asked, "interactive", evidence).proven() == 5


def test_no_passing_step():
    evidence: list[Evidence] = []
    asked = one_class()
    specs = drive(asked, up_to(0), evidence)
    assert labels(specs, Phase.SCOUT) == [1, 4]
    assert labels(specs, Phase.PROVE) == []
    assert Search(asked, "interactive", evidence).candidate() is None


def test_an_undecided_lowest_step_is_still_put_to_the_proof():
    def verdict(spec: StepSpec) -> list[Evidence]:
        if spec.phase is Phase.SCOUT and spec.loads[0].concurrency == 1:
            return answer(spec, State.INCONCLUSIVE, holds=False)
        return up_to(1)(spec)

    assert labels(drive(one_class(), verdict), Phase.PROVE) == [1]


def test_proof_goes_down_until_one_passes():
    def verdict(spec: StepSpec) -> list[Evidence]:
        limit = 45 if spec.phase is Phase.PROVE else 64
        return up_to(limit)(spec)

    specs = drive(one_class(), verdict)
    # 64, then 5 % three times, then 15 %
    assert labels(specs, Phase.PROVE) == [64, 60, 57, 54, 45]


def test_the_descent_and_its_end():
    assert descent(100) == [100, 95, 90, 85, 72, 61, 51, 25, 12, 6]
    assert descent(4) == [4, 3, 2, 1]
    assert descent(1) == [1]
    undecided = drive(
        one_class(),
        lambda spec: answer(spec, State.INCONCLUSIVE if spec.phase is Phase.PROVE else State.PASS),
    )
    assert labels(undecided, Phase.PROVE) == descent(64)
    assert undecided[-1].phase is Phase.ANCHOR


def test_the_latency_knee_caps_an_interactive_class():
    def verdict(spec: StepSpec) -> list[Evidence]:
        n = spec.loads[0].concurrency
        delay = 0.1 if n <= 20 else 0.1 + 0.05 * (n - 20)
        low_high = {"ttft_p95_low_s": delay, "ttft_p95_high_s": delay}
        return answer(spec, State.PASS, ttft_p95_s=delay, **low_high)

    specs = drive(one_class(), verdict)
    refined = labels(specs, Phase.SCOUT)[len(LADDER) :]
    assert refined[0] == 23
    assert labels(specs, Phase.PROVE) == [22]
    free = drive(one_class(cap_at_latency_knee=False), verdict)
    assert labels(free, Phase.SCOUT) == LADDER
    assert labels(free, Phase.PROVE) == [64]
    batch = drive(one_class("batch"), verdict)
    assert labels(batch, Phase.PROVE, "batch") == [64]


def test_a_knee_beyond_the_edge_is_not_refined():
    def verdict(spec: StepSpec) -> list[Evidence]:
        n = spec.loads[0].concurrency
        delay = 0.1 if n <= 32 else 5.0
        low_high = {"ttft_p95_low_s": delay, "ttft_p95_high_s": delay}
        return [replace(e, ttft_p95_s=delay, **low_high) for e in up_to(10)(spec)]

    specs = drive(one_class(), verdict)
    assert labels(specs, Phase.SCOUT) == [1, 4, 8, 16, 32, 11, 9, 10]


# -- steps that tell nothing, crashes


def test_an_unusable_step_is_tried_once_more_and_then_counts_as_not_measured():
    def verdict(spec: StepSpec) -> list[Evidence]:
        if spec.phase is Phase.SCOUT and spec.loads[0].concurrency == 16:
            return answer(spec, None, valid=False, why="client-bound")
        return up_to(100)(spec)

    specs = drive(one_class(), verdict)
    assert [s.repeat for s in specs if s.phase is Phase.SCOUT and s.loads[0].concurrency == 16] == [1, 2]
    assert labels(specs, Phase.PROVE) == [64]


def test_a_retry_that_works_counts():
    def verdict(spec: StepSpec) -> list[Evidence]:
        if spec.phase is Phase.PROVE and spec.repeat == 1:
            return answer(spec, None, error="cancelled")
        return up_to(100)(spec)

    evidence: list[Evidence] = []
    asked = one_class()
    specs = drive(asked, verdict, evidence)
    assert [(s.loads[0].concurrency, s.repeat) for s in specs if s.phase is Phase.PROVE] == [(64, 1), (64, 2)]
    assert Search(asked, "interactive", evidence).proven() == 64


def test_proof_that_cannot_be_measured_goes_on_below():
    def verdict(spec: StepSpec) -> list[Evidence]:
        if spec.phase is Phase.PROVE and spec.loads[0].concurrency == 64:
            return answer(spec, None, valid=False)
        return up_to(100)(spec)

    assert labels(drive(one_class(), verdict), Phase.PROVE) == [64, 64, 60]


def test_a_crash_ends_the_ladder_and_is_a_failure():
    def verdict(spec: StepSpec) -> list[Evidence]:
        if spec.phase is not Phase.PRIME and spec.loads[0].concurrency >= 20:
            return answer(spec, State.FAIL, crashed=True, error="server died")
        return up_to(100)(spec)

    evidence: list[Evidence] = []
    asked = one_class()
    specs = drive(asked, verdict, evidence)
    assert 64 not in labels(specs, Phase.SCOUT)
    assert Search(asked, "interactive", evidence).proven() == 19
    scout = next(s for s in ladder_steps(asked) if s.loads[0].concurrency == 64 and s.phase is Phase.SCOUT)
    assert skip_reason(asked, scout, evidence) == "the server crashed at 20: not measured from there on"


def test_a_crash_while_priming_keeps_the_search_below():
    def verdict(spec: StepSpec) -> list[Evidence]:
        if spec.phase is Phase.PRIME:
            return answer(spec, None, crashed=True)
        return up_to(100)(spec)

    specs = drive(one_class(), verdict)
    assert labels(specs, Phase.SCOUT)[:5] == [1, 4, 8, 16, 32]
    assert 64 not in labels(specs, Phase.SCOUT)


# -- order, tasks, interruptions


def test_phases_come_in_order_and_classes_share_each():
    specs = drive(problem(shared=True), up_to(40))
    order = [ORDER[s.phase] if s.phase not in (Phase.BASELINE, Phase.PRIME) else 1 for s in specs]
    assert order == sorted(order)
    ladder = [s.label for s in ladder_steps(problem())]
    first = [s.label for s in specs if s.label in ladder]
    assert first == [label for label in ladder if label in first]


def test_no_earlier_phase_returns_once_a_later_one_began():
    asked = one_class()
    evidence: list[Evidence] = []
    specs = drive(asked, up_to(40), evidence)
    proof = next(s for s in specs if s.phase is Phase.PROVE)
    only_proof = [e for e in evidence if e.key == proof.key]
    step = next_step(asked, only_proof)
    assert step is None or ORDER[step.phase] >= ORDER[Phase.PROVE]


def test_a_task_asks_only_for_its_own_phase_on():
    asked = problem()
    scouts: list[Evidence] = []
    for spec in ladder_steps(asked):
        if spec.phase is Phase.SCOUT and spec.loads[0].service_class == "interactive":
            scouts += up_to(40)(spec)
    first = next_step(asked, scouts)
    assert first is not None
    assert first.label == "baseline batch c=1"
    refine = next_step(asked, scouts, at_least=Phase.SCOUT)
    assert refine is not None
    assert refine.label == "scout batch c=1"
    prove = next_step(asked, scouts, at_least=Phase.PROVE)
    assert prove is not None
    assert prove.label == "prove interactive c=32"


@given(st.integers(1, 70), st.data())
@settings(max_examples=40, deadline=None)
def test_a_run_that_lost_some_results_converges_to_the_same_limit(truth, data):
    asked = problem(shared=True)
    evidence: list[Evidence] = []
    specs = drive(asked, up_to(truth), evidence)
    kept = [e for e in evidence if not data.draw(st.booleans())]
    again = drive(asked, up_to(truth), kept)
    assert len(again) <= len(specs) + 4
    for name in asked.classes:
        lost_proof = not any(e.phase == Phase.PROVE and e.service_class == name for e in kept)
        late = any(ORDER[Phase(e.phase)] > ORDER[Phase.PROVE] for e in kept)
        found = Search(asked, name, kept).proven()
        assert found is None or found <= truth
        if not lost_proof and not late:
            assert found is not None


def test_the_planner_is_a_pure_function():
    asked = problem(shared=True)
    evidence: list[Evidence] = []
    drive(asked, up_to(40), evidence)
    for n in range(0, len(evidence), 5):
        assert next_step(asked, evidence[:n]) == next_step(asked, list(evidence[:n]))


def test_instances_are_enough_in_the_worst_case():
    for truth in range(0, 70, 3):
        specs = drive(problem(shared=True), up_to(truth))
        ladder = {s.key for s in ladder_steps(problem())}
        counts = instances(problem(shared=True))
        assert len([s for s in specs if s.phase is Phase.SCOUT and s.key not in ladder]) <= counts["refine"]
        assert len([s for s in specs if s.phase is Phase.PROVE]) <= counts["prove"]
        assert len([s for s in specs if s.phase is Phase.SHARED]) <= counts["shared"]
        assert len([s for s in specs if s.phase is Phase.ANCHOR]) <= counts["anchor"]


def test_instances_stay_small():
    default = Problem(
        model="m", classes={"interactive": service_class(), "batch": batch_class()}, shared=True
    )
    assert instances(default) == {"refine": 16, "prove": 21, "shared": 16, "anchor": 3}
    assert instances(replace(default, shared=False))["shared"] == 0


# -- shared


def test_a_pair_is_scouted_by_bisection_and_proven_afresh():
    evidence: list[Evidence] = []
    asked = problem(shared=True)
    specs = [s for s in drive(asked, up_to(40), evidence) if s.phase is Phase.SHARED]
    # alone both hold up to about 40, together up to 40 in flight: s = 1/2
    scouts = [s for s in specs if s.repeat < 3]
    proofs = [s for s in specs if s.repeat >= 3]
    assert len(scouts) <= 5
    assert [load.requests for load in scouts[0].loads] == [100, 100]
    assert [load.requests for load in proofs[-1].loads] == [600, 600]
    pair = {e.service_class: e.concurrency for e in SharedSearch(asked, evidence).proven()}
    assert 36 <= sum(pair.values()) <= 40
    assert not {s.key for s in scouts} & {s.key for s in proofs}


def test_no_pair_without_two_limits():
    asked = problem(shared=True, classes={"interactive": service_class(ladder=LADDER)})
    assert labels(drive(asked, up_to(40)), Phase.SHARED) == []


def test_a_pair_that_never_holds_ends():
    def verdict(spec: StepSpec) -> list[Evidence]:
        return answer(spec, State.FAIL) if spec.phase is Phase.SHARED else up_to(40)(spec)

    evidence: list[Evidence] = []
    specs = drive(problem(shared=True), verdict, evidence)
    shared = [s for s in specs if s.phase is Phase.SHARED]
    assert all(s.repeat == 1 for s in shared)
    assert SharedSearch(problem(shared=True), evidence).proven() == []


# -- exact mode


def test_exact_mode_measures_what_was_given_and_nothing_else():
    asked = problem(mode="exact", repeats=2, classes={"interactive": service_class(ladder=[8, 16])})
    specs = drive(asked, up_to(4))
    assert [(s.phase, s.loads[0].concurrency, s.repeat) for s in specs] == [
        (Phase.GRID, 8, 1),
        (Phase.GRID, 16, 1),
        (Phase.GRID, 8, 2),
        (Phase.GRID, 16, 2),
    ]
    assert [s.key for s in specs] == [s.key for s in ladder_steps(asked)]
    assert (specs[0].loads[0].requests, specs[0].early_stop) == (600, False)
    assert instances(asked) == {"refine": 2, "prove": 0, "shared": 0, "anchor": 0}
    assert next_step(asked, [], at_least=Phase.PROVE) is None


def test_exact_mode_tries_an_unusable_step_once_more_beyond_the_repeats():
    asked = problem(mode="exact", repeats=2, classes={"interactive": service_class(ladder=[8])})

    def verdict(spec: StepSpec) -> list[Evidence]:
        return answer(spec, None, valid=False) if spec.repeat == 1 else up_to(9)(spec)

    assert [s.repeat for s in drive(asked, verdict)] == [1, 3, 2]


def test_exact_mode_stays_below_a_crash():
    asked = problem(mode="exact", repeats=2, classes={"interactive": service_class(ladder=[8, 16, 32])})

    def verdict(spec: StepSpec) -> list[Evidence]:
        return answer(spec, State.FAIL, crashed=spec.loads[0].concurrency == 16)

    evidence: list[Evidence] = []
    specs = drive(asked, verdict, evidence)
    assert [(s.loads[0].concurrency, s.repeat) for s in specs] == [(8, 1), (16, 1), (16, 3), (8, 2)]
    assert skip_reason(asked, ladder_steps(asked)[2], evidence) == (
        "the server crashed at 16: not measured from there on"
    )


@pytest.mark.parametrize("mode", ["find", "exact"])
def test_a_crash_that_does_not_happen_again_is_no_finding(mode):
    asked = problem(mode=mode, classes={"interactive": service_class(ladder=[8, 16, 32])})
    evidence: list[Evidence] = []

    def killed_once_at_16(spec: StepSpec) -> list[Evidence]:
        first = spec.loads[0].concurrency == 16 and not any(e.concurrency == 16 for e in evidence)
        return answer(spec, State.PASS, crashed=first)

    specs = drive(asked, killed_once_at_16, evidence)
    asked_at_16 = [s for s in specs if s.loads[0].concurrency == 16 and s.phase in (Phase.SCOUT, Phase.GRID)]
    assert [s.repeat for s in asked_at_16] == [1, 2]
    assert any(s.loads[0].concurrency == 32 and s.phase is not Phase.PRIME for s in specs)
    assert not any(e.crashed for e in without_stray_crashes(evidence))


def test_a_crash_after_success_counts():
    scout = answer(ladder_steps(problem())[2], State.PASS)
    proof = [replace(e, phase=Phase.PROVE.value, crashed=True) for e in scout]
    assert without_stray_crashes([*scout, *proof]) == [*scout, *proof]


# -- skipping, time


def test_ladder_steps_past_the_cliff_are_skipped_with_the_reason():
    asked = one_class()
    evidence: list[Evidence] = []
    for spec in ladder_steps(asked):
        if spec.loads[0].concurrency <= 16 and spec.phase is Phase.SCOUT:
            evidence += up_to(4)(spec)
    steps = {s.loads[0].concurrency: s for s in ladder_steps(asked) if s.phase is Phase.SCOUT}
    assert skip_reason(asked, steps[32], evidence) == "past the cliff: 8 and 16 provably fail"
    assert skip_reason(asked, steps[8], evidence) is None
    assert skip_reason(asked, ladder_steps(asked)[0], evidence) is None


def test_time_of_a_step_from_what_was_measured():
    asked = one_class()
    evidence = answer(ladder_steps(asked)[4], State.PASS, request_per_s=4.0)  # scout at 8: 2 s a request
    proof = next(s for s in drive(asked, up_to(8)) if s.phase is Phase.PROVE)
    # 600 requests at 4 a second, warm-up and last answers 4 s each
    assert proof.loads[0].concurrency == 8
    assert step_s(asked, proof, evidence) == pytest.approx(150 + 4 + 4)


@pytest.mark.parametrize(
    ("request_per_s", "cap_s"),
    [
        (1.0, 600),  # 600 requests take 600 s: the usual cap suffices
        (0.99, 2 * 600 / 0.99),
        (0.5, 2 * 600 / 0.5),
        (0.1, 3600),  # 6,000 s: too slow even for the longer cap, which bounds it
    ],
)
def test_a_slow_server_gets_a_longer_bounded_proof(request_per_s: float, cap_s: float):
    asked = one_class()
    evidence: list[Evidence] = []
    specs = drive(
        asked, lambda spec: [replace(e, request_per_s=request_per_s) for e in up_to(8)(spec)], evidence
    )
    assert {s.cap_s for s in specs if s.phase is Phase.PROVE} == {cap_s}
    assert {s.cap_s for s in specs if s.phase in (Phase.SCOUT, Phase.ANCHOR)} == {60}
    proof = next(s for s in specs if s.phase is Phase.PROVE)
    expected_s = min(600 / request_per_s, cap_s)  # and 100 s at most before and 60 s after
    assert expected_s < step_s(asked, proof, evidence) <= expected_s + 120 + 60


def test_the_longer_cap_is_bounded_by_configuration_and_by_what_is_left():
    slow = answer(ladder_steps(one_class())[4], State.PASS, request_per_s=0.5)  # 1,200 s for 600
    proof = next(s for s in drive(one_class(), up_to(8)) if s.phase is Phase.PROVE)
    switched_off = one_class()
    switched_off = replace(switched_off, bounds=StepBounds(prove_cap_slow_s=600))
    assert with_cap(switched_off, proof, slow).cap_s == 600
    # a request takes 16 s at 8 in flight: 32 s to warm up, 32 s for the last answers
    assert with_cap(replace(one_class(), budget_s=1500.0), proof, slow).cap_s == 1500 - 64
    assert with_cap(one_class(), proof, []).cap_s == 600  # nothing is known of its speed


def test_a_slow_server_in_exact_mode_and_with_classes_together():
    exact = replace(one_class(ladder=[4, 8]), mode="exact")
    first, second = ladder_steps(exact)
    slow = answer(first, State.PASS, request_per_s=0.5)
    assert [with_cap(exact, first, []).cap_s, with_cap(exact, second, slow).cap_s] == [600, 2400]
    assert next_step(exact, slow) == with_cap(exact, second, slow)

    def slowly(spec: StepSpec) -> list[Evidence]:
        return [replace(e, request_per_s=1.0) for e in up_to(40)(spec)]

    pairs = [s for s in drive(problem(shared=True), slowly) if s.phase is Phase.SHARED]
    # each of two classes is expected to get half the server
    assert {s.cap_s for s in pairs if s.loads[0].requests == 600} == {2400}
    assert {s.cap_s for s in pairs if s.loads[0].requests < 600} == {60}


def test_the_budget_keeps_time_for_the_proof():
    asked = replace(one_class(), budget_s=200.0)
    evidence: list[Evidence] = []
    for spec in ladder_steps(asked)[:5]:
        evidence += [replace(e, request_per_s=4.0) for e in up_to(64)(spec)]
    # the proof at 8 takes 158 s and a scout at 16 at least 30 s: they do not both fit with the rest
    scout = next(s for s in ladder_steps(asked) if s.loads[0].concurrency == 16)
    assert "budget: about" in str(skip_reason(asked, scout, evidence))
    step = next_step(asked, evidence)
    assert step is not None
    assert step.label == "prove interactive c=8"
    anchor = next_step(replace(asked, budget_s=120.0), evidence)
    assert anchor is not None
    assert anchor.phase is Phase.ANCHOR
    assert next_step(replace(asked, budget_s=20.0), evidence) is None
    assert next_step(replace(asked, budget_s=None), evidence) == scout
    assert Search(asked, "interactive", evidence + up_to(64)(step)).unfinished()


def test_the_estimate_falls_to_nothing():
    asked = problem(shared=True)
    evidence: list[Evidence] = []
    before = estimate_s(asked, evidence)
    drive(asked, lambda spec: [replace(e, request_per_s=10.0) for e in up_to(40)(spec)], evidence)
    assert before > 1000
    assert estimate_s(asked, evidence) == 0


# -- with real statistics: a slot server in virtual time


@pytest.mark.parametrize("slots", [5, 50])
def test_converges_to_the_slot_count_and_proves_on_fresh_requests(slots):
    service = service_class(ladder=[1, 4, 8, 16, 32, 64, 128])
    asked = Problem(model="m", classes={"interactive": service}, seed=3)
    evidence, specs = sweep(asked, SlotServer(slots))
    proven = Search(asked, "interactive", evidence).proven()
    assert proven is not None
    assert abs(proven - slots) <= max(1, 0.06 * slots)
    proof = next(s for s in specs if s.phase is Phase.PROVE)
    assert proof.seed not in {s.seed for s in specs if s.phase is Phase.SCOUT}
    passed = next(e for e in evidence if e.phase == Phase.PROVE and e.state == State.PASS)
    assert passed.attempted >= max(600, 10 * passed.concurrency)


def test_a_server_without_an_edge_in_range():
    asked = Problem(model="m", classes={"batch": batch_class(ladder=[1, 8, 32])})
    evidence, _ = sweep(asked, SlotServer(50))
    search = Search(asked, "batch", evidence)
    assert (search.proven(), search.edge(), search.unfinished()) == (32, (32, None), False)


def test_a_server_that_crashes():
    asked = Problem(model="m", classes={"batch": batch_class()})
    evidence, _ = sweep(asked, SlotServer(50, crash_at=40))
    assert Search(asked, "batch", evidence).proven() in (38, 39)


# -- a ceiling


def test_nothing_is_planned_above_the_ceiling_of_a_server_and_the_limit_is_a_lower_bound():
    classes = {"interactive": service_class(ladder=LADDER), "batch": batch_class(ladder=LADDER)}
    asked = Problem(model="m", classes=classes, shared=True, seed=7, ceiling=20)
    specs = drive(asked, up_to(1000))
    assert labels(specs, Phase.PRIME) == [20]
    assert labels(specs, Phase.SCOUT) == [1, 4, 8, 16, 20]
    assert labels(specs, Phase.PROVE) == [20]
    assert max(sum(load.concurrency for load in spec.loads) for spec in specs) == 20
    assert [sum(load.concurrency for load in spec.loads) for spec in specs if spec.phase is Phase.SHARED]


def test_asked_for_steps_above_the_ceiling_are_skipped_with_the_reason():
    data = {
        "model": "m",
        "classes": {"batch": batch_class(ladder=LADDER).model_dump(mode="json")},
        "ceiling": 20,
    }
    above = above_ceiling(data)
    assert [spec.label for spec in above] == ["scout batch c=32", "scout batch c=64"]
    says = "not measured: above the ceiling of 20 (server.max_concurrency)"
    assert [skip_reason(problem_of(data), spec, []) for spec in above] == [says, says]
    assert above_ceiling({**data, "ceiling": None}) == []
    assert [spec.label for spec in ladder_steps(problem_of({**data, "mode": "exact"}))] == [
        f"grid batch c={n}" for n in (1, 4, 8, 16)
    ]


def test_two_classes_on_one_server():
    classes = {
        "interactive": service_class(ladder=[1, 8, 32, 64]),
        "batch": batch_class(ladder=[1, 8, 32, 64]),
    }
    asked = Problem(model="m", classes=classes, shared=True)
    evidence, _ = sweep(asked, SlotServer(40))
    pair = {e.service_class: e.concurrency for e in SharedSearch(asked, evidence).proven()}
    assert set(pair) == {"interactive", "batch"}
    assert sum(pair.values()) <= 48
