"""Steps on virtual servers follow the live load's rules: checkpoints, early looks, cap, cut, crash."""

import numpy as np
import pytest

from include.capacity.limits.evidence import decider, evidence_of
from include.capacity.results.spec import Load, StepSpec
from include.capacity.words import Outcome, Phase, State
from tests.benchmarks.servers import Bench, Mechanism, Traffic, VirtualServer, make_server, run_step


def by_hand(deadline_s: float = 60.0, streamed: bool = True, **mechanism) -> VirtualServer:
    """A server that answers each request in one second, as many at once as it has slots."""
    like = make_server("slots", "interactive" if streamed else "batch", 0, 1)
    traits = {"step_s": 0.01, "per_seq_s": 0.0, "chunk_tokens": 10**9, "first_token_s": 1e-6, **mechanism}
    return VirtualServer(
        name="by-hand",
        family="slots",
        seed=1,
        mechanism=Mechanism(**traits),
        class_name=like.class_name,
        service_class=like.service_class.model_copy(update={"deadline_s": deadline_s}),
        traffic=Traffic(prompt=(100, 0.1, 1, 10_000), output=(101, 0.1, 1, 10_000)),
    )


def step(server: VirtualServer, n: int, requests: int, most: int | None = None, **more) -> StepSpec:
    load = Load(
        service_class=server.class_name, concurrency=n, requests=requests, max_requests=most or requests
    )
    return StepSpec(model="m", phase=Phase.PROVE, loads=(load,), **more)


def run(server: VirtualServer, spec: StepSpec, decide=None):
    return run_step(server, spec, np.random.default_rng(1), decide)


def test_a_step_counts_what_it_was_asked_for_and_lasts_at_least_its_window():
    server = by_hand(slots=10)
    long = run(server, step(server, 10, 600))
    assert long.counted == 600
    assert long.facts.loads[0].stop_reason == "enough_requests"
    assert long.facts.loads[0].window_s == pytest.approx(60, rel=0.05)
    short = run(server, step(server, 10, 20))
    assert short.facts.loads[0].window_s == pytest.approx(30, abs=0.5)
    assert short.counted == pytest.approx(300, rel=0.06)


def test_the_cap_cuts_by_start_and_leaves_no_slow_request_out():
    server = by_hand(slots=4)
    result = run(server, step(server, 8, 600, cap_s=40.0))
    load = result.facts.loads[0]
    assert load.stop_reason == "wall_clock_cap"
    assert load.window_s == pytest.approx(40.0)
    assert result.counted == pytest.approx(160, rel=0.06)
    assert result.rows["started_s"].max() < load.window_start_s + 40
    # The last counted ones ended up to two seconds after the cap, and are there.
    assert (result.rows["started_s"] + result.rows["e2e_s"]).max() > load.window_start_s + 40.5


def test_an_undecided_step_is_asked_at_its_doublings():
    server = by_hand(slots=50)
    asked = []

    def decide(name, rows, planned):
        if planned:
            asked.append(len(rows))
        return State.INCONCLUSIVE

    result = run(server, step(server, 50, 600, 3000, min_window_s=1.0), decide)
    assert asked == [600, 1200, 2400, 3000]
    assert result.counted == 3000


def test_a_decided_step_stops_at_the_checkpoint():
    server = by_hand(slots=50)
    result = run(server, step(server, 50, 600, 3000, min_window_s=1.0), lambda *_: State.PASS)
    assert result.counted == 600
    assert result.facts.loads[0].stop_reason == "decided"


def test_a_failing_step_stops_early_over_ended_requests_only():
    server = by_hand(slots=4, deadline_s=3.0)
    result = run(server, step(server, 40, 600, 3000), decider(server.classes))
    assert result.facts.loads[0].stop_reason == "early_fail"
    assert result.counted < 300
    (evidence,) = evidence_of(result.facts, result.rows, server.classes)
    assert evidence.state == State.FAIL
    assert evidence.completed < evidence.attempted / 2
    assert result.rows["outcome"].isin([Outcome.DEADLINE_EXCEEDED, Outcome.FIRST_TOKEN_TIMEOUT]).any()


def test_a_crash_ends_the_step_and_is_a_failure():
    server = by_hand(slots=50, crash_running=12)
    result = run(server, step(server, 12, 600), decider(server.classes))
    assert result.facts.server_crashed
    assert result.facts.loads[0].stop_reason == "server_gone"
    (evidence,) = evidence_of(result.facts, result.rows, server.classes)
    assert evidence.state == State.FAIL


def test_refusals_are_rows_and_the_loop_is_short_of_n_then():
    server = by_hand(slots=4, queue=0)
    result = run(server, step(server, 8, 300))
    outcomes = result.rows["outcome"].value_counts()
    # Four slots of a second each; four loops that are refused about once a second each.
    assert outcomes["rejected"] / outcomes["completed"] == pytest.approx(1.0, rel=0.25)
    assert result.facts.loads[0].inflight_mean == pytest.approx(4, rel=0.1)
    refused = result.rows[result.rows["outcome"] == "rejected"]
    assert refused["e2e_s"].max() < 0.01


def test_an_answer_that_is_not_streamed_has_no_first_token():
    server = by_hand(slots=4, streamed=False)
    result = run(server, step(server, 4, 100))
    assert result.rows["ttft_s"].isna().all()
    assert (result.rows["e2e_s"] > 0.5).all()


def test_a_sweeps_steps_have_fresh_requests_and_can_be_repeated():
    server = make_server("slots", "interactive", 0, 1)
    spec = step(server, 4, 100)
    first, again = Bench(server, 5), Bench(server, 5)
    a, b, c = first.run(spec), first.run(spec), again.run(spec)
    assert a.rows["prompt_tokens"].tolist() == c.rows["prompt_tokens"].tolist()
    assert a.rows["prompt_tokens"].tolist() != b.rows["prompt_tokens"].tolist()
    assert first.clock_s == pytest.approx(a.seconds + b.seconds)
