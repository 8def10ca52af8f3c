import json
import math
from random import Random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.errors import ConfigError, DataError
from include.capacity.limits.bounds import rate, tally
from include.capacity.limits.evidence import Evidence, decider, evidence_of, evidence_of_sweep
from include.capacity.results.schema import REQUEST_SCHEMA, Facts, LoadFacts
from include.capacity.results.spec import Load, StepSpec
from include.capacity.words import Phase, State, StopReason
from tests.limits.virtual import batch_class, service_class

CLASSES = {"interactive": service_class(), "batch": batch_class()}


def spec(phase: Phase = Phase.PROVE, n: int = 8, requests: int = 600, name: str = "interactive") -> StepSpec:
    load = Load(service_class=name, concurrency=n, requests=requests, max_requests=3000)
    return StepSpec(model="m", phase=phase, loads=(load,))


def facts(
    of: StepSpec | None = None, window_s: float = 300.0, stop: str = "decided", **more: object
) -> Facts:
    of = of or spec()
    loads = [
        LoadFacts(
            service_class=load.service_class,
            concurrency=load.concurrency,
            window_start_s=100.0,
            window_s=window_s,
            warmup_s=100.0,
            stop_reason=stop,
        )
        for load in of.loads
    ]
    return Facts(spec=of.to_json(), loads=loads, **more)


def rows(n: int, **columns: object) -> pd.DataFrame:
    """``n`` good requests, one every half second from 100 s on; columns replace the usual."""
    data = {
        "service_class": "interactive",
        "concurrency": 8,
        "started_s": 100.0 + np.arange(n) / 2,
        "outcome": "completed",
        "deadline_s": 60.0,
        "ttft_s": 0.5,
        "last_token_s": 4.0,
        "e2e_s": 4.0,
        "output_tokens": 101.0,
        "first_chunk_tokens": 1.0,
        "counted": True,
        **columns,
    }
    return pd.DataFrame(data, index=range(n))


def put(table: pd.DataFrame, column: str, at: list[int], value: object) -> pd.DataFrame:
    table = table.copy()
    table[column] = table[column].astype(object)
    table.loc[at, column] = value
    return table


def judge(table: pd.DataFrame, of: StepSpec | None = None, classes=CLASSES, **more: object) -> Evidence:
    (found,) = evidence_of(facts(of, **more), table, classes)
    return found


def test_a_step_that_passes():
    e = judge(rows(600))
    assert (e.attempted, e.completed, e.met, e.state, e.holds) == (600, 600, 600, "pass", True)
    assert e.lower_y == e.lower_z == pytest.approx(0.05 ** (1 / 600))
    assert (e.n_effective, e.request_per_s, e.outcomes) == (600, 2.0, {"completed": 600})
    assert (e.key, e.planned, e.proof) == ("prove-interactive-c00008-r1", 600, True)


def test_628_requests_allow_two_failures_and_627_do_not():
    spread = [100, 400]
    assert judge(put(rows(628), "outcome", spread, "rejected")).state == State.PASS
    assert judge(put(rows(627), "outcome", spread, "rejected")).state == State.INCONCLUSIVE


def test_failing_on_completion_and_on_the_objective():
    lost = judge(put(rows(600), "outcome", list(range(0, 600, 30)), "server_error"))
    assert (lost.completed, lost.state) == (580, State.FAIL)
    late = judge(put(rows(600), "ttft_s", list(range(0, 600, 10)), 1.01))
    assert (late.completed, late.met, late.missed, late.state) == (600, 540, {"ttft": 60}, State.FAIL)
    assert late.upper_y == 1.0


def test_aborted_and_client_errors_are_in_no_rate_and_uncounted_rows_do_not_exist():
    table = put(rows(603), "outcome", [5], "aborted")
    table = put(table, "outcome", [6], "client_error")
    table.loc[7, "counted"] = False
    e = judge(table)
    assert (e.attempted, e.completed) == (600, 600)
    assert e.outcomes == {"completed": 600, "aborted": 1, "client_error": 1}


def test_a_request_on_time_and_one_late():
    at = judge(put(rows(600), "ttft_s", [3], 1.0))
    assert at.met == 600
    assert judge(put(rows(600), "ttft_s", [3], 1.0000001)).met == 599


def test_first_token_in_time_and_then_lost_meets_nothing():
    e = judge(put(rows(600), "outcome", [9], "connection_lost"))
    assert (e.completed, e.met, e.first_error_s) == (599, 599, 4.5)


def test_a_completed_answer_without_a_first_token_is_not_in_time():
    assert judge(put(rows(600), "ttft_s", [1], None)).met == 599


def test_tpot():
    classes = {"interactive": service_class(tpot={"at_most_s": 0.05, "share": 0.95})}
    # (4.0 - 0.5) / (101 - 1) = 0.035 s a token
    assert judge(rows(600), classes=classes).met == 600
    slow = put(rows(600), "output_tokens", [0], 61)  # 3.5 s / 60 tokens = 0.058 s
    assert judge(slow, classes=classes).missed == {"ttft": 0, "tpot": 1}
    one_token = put(slow, "output_tokens", [0], 1)
    assert judge(one_token, classes=classes).met == 600
    one_chunk = put(put(slow, "first_chunk_tokens", [0], 61), "output_tokens", [0], 61)
    assert judge(one_chunk, classes=classes).met == 600
    unknown = put(slow, "output_tokens", [0], None)
    assert judge(unknown, classes=classes).met == 599
    unknown_chunk = put(slow, "first_chunk_tokens", [0], None)  # taken as 1
    assert judge(unknown_chunk, classes=classes).met == 599


def test_batch_needs_completion_and_e2e_where_it_is_set():
    table = put(rows(600, service_class="batch", deadline_s=120.0), "ttft_s", list(range(300)), 50.0)
    of = spec(name="batch")
    assert judge(table, of).state == State.PASS
    classes = {"batch": batch_class(e2e={"at_most_s": 3.0, "share": 0.9})}
    assert judge(table, of, classes).state == State.FAIL
    assert judge(table, of, classes).missed == {"e2e": 600}


def test_the_strictest_share_binds_all_objectives():
    classes = {"interactive": service_class(tpot={"at_most_s": 0.05, "share": 0.9})}
    assert judge(rows(600), classes=classes).share == 0.95


def test_a_longer_deadline_is_refused_and_a_shorter_judged():
    table = put(rows(600), "e2e_s", [0, 1], 45.0)
    with pytest.raises(ConfigError, match="deadline_s 90 is longer than the 60 s it was measured with"):
        judge(table, classes={"interactive": service_class(deadline_s=90)})
    assert judge(table, classes={"interactive": service_class(deadline_s=45)}).completed == 600
    assert judge(table, classes={"interactive": service_class(deadline_s=44)}).completed == 598


def test_an_unknown_class_is_named():
    with pytest.raises(DataError, match="class 'interactive' is none of \\['batch'\\]"):
        judge(rows(600), classes={"batch": batch_class()})


def test_a_step_cut_by_its_cap_may_fail_and_passes_only_with_half_its_requests_and_ten_a_slot():
    assert judge(rows(600), spec(n=8), stop=StopReason.CAP).state == State.PASS
    assert judge(rows(300), spec(n=8), stop=StopReason.CAP).state == State.PASS
    assert judge(rows(299), spec(n=8), stop=StopReason.CAP).state == State.INCONCLUSIVE
    assert judge(rows(400), spec(n=40), stop=StopReason.CAP).state == State.PASS
    assert judge(rows(399), spec(n=40), stop=StopReason.CAP).state == State.INCONCLUSIVE
    assert judge(rows(639), spec(n=64, requests=640), stop=StopReason.CAP).state == State.INCONCLUSIVE
    assert judge(rows(640), spec(n=64, requests=640), stop=StopReason.CAP).state == State.PASS
    failed = rows(100, outcome="first_token_timeout")
    assert judge(failed, spec(n=40), stop=StopReason.CAP).state == State.FAIL


def test_what_says_nothing():
    invalid = judge(rows(600), invalid="client CPU at 100 %: use more workers")
    assert (invalid.state, invalid.usable, invalid.why) == (
        None,
        False,
        "client CPU at 100 %: use more workers",
    )
    wrong = judge(rows(600), error="404")
    assert (wrong.state, wrong.usable) == (None, False)
    assert judge(rows(30), spec(Phase.BASELINE)).state is None
    nothing = judge(rows(0))
    assert (nothing.state, nothing.usable, nothing.attempted) == (None, False, 0)


def test_a_crash_is_a_failure():
    for table in (rows(600), rows(0)):
        e = judge(table, error="server died", server_crashed=True)
        assert (e.state, e.holds, e.usable, e.failed) == (State.FAIL, False, True, True)
    primed = judge(rows(5), spec(Phase.PRIME), server_crashed=True)
    assert (primed.state, primed.failed) == (None, True)


def test_first_token_delay_over_attempted_requests():
    # 100 requests in 10 batches of 10; 4 lost: p95 of 96 x 0.5 and 4 x 60 interpolates rank 94.05
    even = judge(rows(100))
    assert (even.ttft_p95_s, even.ttft_p95_low_s, even.ttft_p95_high_s) == (0.5, 0.5, 0.5)
    lost = judge(put(rows(100), "outcome", [0, 1, 2, 3, 4, 5], "rejected"))
    assert lost.ttft_p95_s == 60.0
    # batches: one with p95 = 60 (6 of 10 lost), nine with 0.5: s = 59.5 / sqrt(10), half = 1.8 s / sqrt(10)
    assert lost.ttft_p95_low_s == pytest.approx(60 - 1.8 * 59.5 / 10)
    assert judge(rows(15)).ttft_p95_low_s is None


def test_no_first_token_where_nothing_is_streamed():
    e = judge(rows(600, service_class="batch", deadline_s=120.0), spec(name="batch"))
    assert e.ttft_p95_s is None


def test_request_rate_by_batch_means():
    # 60 requests: 10 batches of 6 in 3 s each, except that the second takes 6 s
    started = 100.0 + np.arange(60) / 2
    started[12:] += 3.0
    e = judge(rows(60, started_s=started), window_s=33.0)
    assert e.request_per_s == pytest.approx(60 / 33)
    # rates 2 x 9 and 1: s = 1 / sqrt(10), half = t(0.975, 9) / 10
    assert e.request_per_s_high - e.request_per_s == pytest.approx(2.262157 / 10, abs=1e-6)
    assert judge(rows(60), window_s=None).request_per_s is None


def test_two_classes_at_once():
    loads = tuple(
        Load(service_class=name, concurrency=n, requests=600, max_requests=3000)
        for name, n in (("interactive", 8), ("batch", 16))
    )
    of = StepSpec(model="m", phase=Phase.SHARED, loads=loads, repeat=3)
    table = pd.concat([rows(600), rows(700, service_class="batch", deadline_s=120.0)])
    first, second = evidence_of(facts(of), table, CLASSES)
    assert (first.attempted, first.beside, first.proof) == (600, {"batch": 16}, True)
    assert (second.attempted, second.beside, second.state) == (700, {"interactive": 8}, "pass")
    assert first.key == second.key == "shared-interactive-c00008+batch-c00016-r3"


def test_json_round_trip():
    e = judge(put(rows(600), "outcome", [9], "connection_lost"))
    assert Evidence.from_json(json.loads(json.dumps(e.to_json(), allow_nan=False))) == e


def test_a_sweep_of_steps():
    one, two = spec(n=8), spec(n=16)
    table = pd.concat([rows(600).assign(step=one.key), rows(700).assign(step=two.key)])
    found = evidence_of_sweep(
        {two.key: facts(two), one.key: facts(one), "x": facts(spec(n=4))}, table, CLASSES
    )
    assert [(e.concurrency, e.attempted) for e in found] == [(16, 700), (8, 600), (4, 0)]


def test_the_types_of_the_stored_table_are_taken():
    table = rows(600)
    stored = pd.DataFrame({name: table.get(name) for name in REQUEST_SCHEMA.names})
    stored["counted"] = stored["counted"].astype("boolean")
    stored["output_tokens"] = stored["output_tokens"].astype("Int32")
    stored.loc[0, "counted"] = pd.NA
    assert judge(stored).attempted == 599


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_row_order_worker_split_and_time_unit_change_nothing(seed, unit):
    random = Random(seed)
    failures = random.sample(range(600), 12)
    table = put(rows(600), "outcome", failures, "rejected")
    table["ttft_s"] = [random.random() * 1.05 for _ in range(600)]
    before = judge(table)

    order = list(range(600))
    random.shuffle(order)
    assert judge(table.iloc[order]) == before

    split = table.assign(worker=[random.randrange(4) for _ in range(600)])
    merged = pd.concat([split[split["worker"] == worker] for worker in range(4)], ignore_index=True)
    assert judge(merged) == before

    times = ["started_s", "deadline_s", "ttft_s", "last_token_s", "e2e_s"]
    scaled = table.assign(**{name: table[name] * unit for name in times})
    classes = {
        "interactive": service_class().model_copy(
            update={
                "deadline_s": 60 * unit,
                "ttft": service_class().ttft.model_copy(update={"at_most_s": 1.0 * unit}),
            }
        )
    }
    after = judge(scaled, classes=classes)
    for name in ("attempted", "completed", "met", "lower_y", "upper_y", "lower_z", "upper_z", "state"):
        assert getattr(after, name) == getattr(before, name)
    assert after.ttft_p95_s == pytest.approx(before.ttft_p95_s * unit)


class TestDecider:
    def records(self, n: int, failures: int) -> list[dict[str, object]]:
        return put(
            rows(n), "outcome", list(range(0, n, max(1, n // max(1, failures))))[:failures], "rejected"
        ).to_dict("records")

    def test_planned_looks_see_all_three_states(self):
        decide = decider(CLASSES)
        assert decide("interactive", self.records(600, 0), True) is State.PASS
        assert decide("interactive", self.records(600, 5), True) is State.INCONCLUSIVE
        assert decide("interactive", self.records(600, 12), True) is State.FAIL

    def test_early_looks_see_only_failures_proven_at_a_half_percent(self):
        decide = decider(CLASSES)
        assert decide("interactive", self.records(600, 0), False) is State.INCONCLUSIVE
        assert decide("interactive", self.records(600, 12), False) is State.INCONCLUSIVE
        assert decide("interactive", self.records(600, 18), False) is State.FAIL

    def test_agrees_with_the_step_judged_afterwards(self):
        for failures in (0, 2, 3, 8, 12, 20):
            records = self.records(640, failures)
            assert decider(CLASSES)("interactive", records, True) == judge(pd.DataFrame(records)).state

    def test_no_rated_request_decides_nothing(self):
        aborted = [{**row, "outcome": "aborted"} for row in self.records(3, 0)]
        assert decider(CLASSES)("interactive", aborted, True) is State.INCONCLUSIVE

    def test_early_failure_is_rare_at_the_floor(self):
        """Exactly at its floor, looked at every 60 requests: few runs of 200 may be called failed."""
        rng = np.random.default_rng(5)
        called = 0
        for _ in range(200):
            ok = rng.random(600) < 0.99
            looks = (judge_upper(ok[:n]) for n in range(60, 601, 60))
            called += any(upper < 0.99 for upper in looks)
        assert called <= 8


def judge_upper(ok: np.ndarray) -> float:
    return rate(tally(ok, 8)).upper_early


def test_shares_are_finite():
    assert math.isfinite(judge(rows(600)).upper_early_y)
