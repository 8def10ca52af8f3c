"""The closed loop against servers of known truth, in virtual time: numbers are exact."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest

from include.capacity.load.loop import (
    ClosedLoop,
    RunningMedian,
    checkpoints,
    cut_index,
    in_window,
    inflight,
    pause_s,
    steady,
)
from include.capacity.words import Outcome, State, StopReason
from tests.load.virtual import FakeSender, Reply, VirtualLoop, closed_loop, run


async def counted(loop: ClosedLoop, *, after_s: float = 20.0, **how: Any) -> StopReason:
    """Start, open the window after a fixed time, measure, stop."""
    loop.start()
    await asyncio.sleep(after_s)
    loop.open_window(loop.clock.now())
    options = {"min_window_s": 1.0, "cap_s": 3600.0, "decide": None, "early_stop": True}
    reason = await loop.measure(**{**options, **how})
    await loop.stop()
    return reason


def rows_of(loop: ClosedLoop) -> list[dict[str, Any]]:
    return [row for row in loop.rows() if row["counted"]]


# -- rules


@pytest.mark.parametrize(
    ("requests", "most", "sizes"),
    [(600, 600, [600]), (600, 3000, [600, 1200, 2400, 3000]), (640, 1280, [640, 1280]), (30, 30, [30])],
)
def test_checkpoints_double_up_to_the_most(requests: int, most: int, sizes: list[int]) -> None:
    assert checkpoints(requests, most) == sizes


def test_a_window_takes_what_started_in_it_each_request_once() -> None:
    """Window [10, 20], requests that end at 9.9, 10.1, 19.9, 20.1: what counts is when they started."""
    starts = [9.0, 9.9, 10.0, 12.0, 19.9, 20.0]
    assert [in_window(at, 10.0, 20.0) for at in starts] == [False, False, True, True, True, False]
    halves = [in_window(at, 10.0, 15.0) + in_window(at, 15.0, 20.0) for at in starts]
    assert halves == [0, 0, 1, 1, 1, 0]


def test_the_cut_is_the_first_request_that_no_longer_counts() -> None:
    starts = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert cut_index(starts, first=1, opened=1.0, n=3, min_window=0.0) == 4
    assert cut_index(starts, first=1, opened=1.0, n=3, min_window=3.5) == 5
    assert cut_index(starts, first=1, opened=1.0, n=5, min_window=0.0) is None, "it has not started yet"
    assert cut_index(starts, first=1, opened=1.0, n=3, min_window=9.0) is None, "the window is too short"


def test_ends_come_before_starts_at_the_same_instant() -> None:
    mean, peak = inflight([(0.0, 0.4), (0.4, 0.8), (0.0, 0.5), (0.5, 0.9)], 0.0, 1.0)
    assert peak == 2
    assert mean == pytest.approx(1.7)


def test_in_flight_is_weighed_by_time_within_the_window_only() -> None:
    assert inflight([(0.0, 10.0), (4.0, 6.0)], 2.0, 6.0) == (pytest.approx(1.5), 2)
    assert inflight([(0.0, 1.0), (9.0, 9.5)], 2.0, 6.0) == (0.0, 0)


def test_pauses_follow_retry_after_else_a_second_with_jitter() -> None:
    rng = random.Random(3)
    assert pause_s(7.0, 1.0, 60.0, rng) == 7.0
    assert pause_s(3600.0, 1.0, 60.0, rng) == 60.0, "no longer than the deadline"
    drawn = [pause_s(None, 1.0, 60.0, rng) for _ in range(2000)]
    assert 0.5 <= min(drawn) < 0.51
    assert 1.49 < max(drawn) <= 1.5
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.02)
    assert pause_s(0.0, 1.0, 60.0, rng) >= 0.5, "Retry-After: 0 is no pause"


def test_the_running_median_forgets_the_oldest() -> None:
    median = RunningMedian(of=3)
    assert median.value is None
    for value in (1.0, 9.0, 5.0):
        median.add(value)
    assert median.value == 5.0
    median.add(10.0)  # 1.0 goes
    assert median.value == 9.0


# -- warm-up


def test_a_constant_series_is_steady_and_a_short_one_is_not_known() -> None:
    assert steady([0.2] * 10)
    assert not steady([0.2] * 9)


def test_first_requests_slow_is_not_steady_until_most_of_the_series_is_past_them() -> None:
    """The first 4 take 5 s, the rest 0.2 s: steady once the slow ones fall into the first half."""
    slow, fast = [5.0] * 4, [0.2]
    assert not steady(2 * slow + fast * 4)
    assert steady(slow + fast * 6)
    assert steady(slow + fast * 40)


def test_a_series_that_still_climbs_is_not_steady() -> None:
    rng = np.random.default_rng(5)
    climbing = np.linspace(1.0, 9.0, 200) + 0.2 * rng.standard_normal(200)
    assert not steady(climbing.tolist())
    settled = np.concatenate([climbing, 9.0 + 0.2 * rng.standard_normal(500)])
    assert steady(settled.tolist())


def test_noise_about_a_level_is_mostly_called_steady() -> None:
    """A false alarm only lengthens the warm-up; it must not be the rule."""
    rng = np.random.default_rng(6)
    found = [steady(np.exp(0.6 * rng.standard_normal(100)).tolist()) for _ in range(400)]
    assert np.mean(found) > 0.75


def test_warm_up_ends_after_a_servers_drift_has() -> None:
    """The server gets faster over its first 60 requests, then answers in 1 s."""

    async def work(loop: VirtualLoop) -> tuple[int, float]:
        rng = random.Random(4)
        closed = closed_loop(
            loop, lambda k, _: Reply(max(1.0, 10.0 - 0.15 * k) * rng.uniform(0.97, 1.03)), n=10
        )
        closed.start()
        while not closed.steady_now:
            await asyncio.sleep(0.05)
        seen = len(closed.sent)
        closed.open_window(loop.time())
        await closed.measure(min_window_s=1, cap_s=600, decide=None, early_stop=True)
        await closed.stop()
        return seen, float(np.mean([row["e2e_s"] for row in rows_of(closed)]))

    seen, mean = run(work)
    assert 60 <= seen <= 400
    assert mean == pytest.approx(1.0, abs=0.1)


def test_warm_up_of_a_steady_server_takes_two_turns_of_every_slot() -> None:
    async def work(loop: VirtualLoop) -> tuple[float, int]:
        closed = closed_loop(loop, lambda k, _: Reply(2.0), n=8)
        begun = loop.time()
        closed.start()
        while not closed.steady_now:
            await asyncio.sleep(0.05)
        took = loop.time() - begun
        await closed.stop()
        return took, closed.outcomes[Outcome.COMPLETED]

    took, ended = run(work)
    assert ended == 3 + 16, "what ended before the last slot began does not count"
    assert 4.0 <= took <= 4.0 + 4.1, "two answers of 2 s each, after a ramp of 4 s"


def test_the_window_does_not_open_before_every_slot_has_begun() -> None:
    """Answers of 50 ms: long before the ramp of 2 s is over, the first slots look steady."""

    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, lambda k, _: Reply(0.05), n=4, requests=100)
        closed.start()
        while not closed.steady_now:
            await asyncio.sleep(0.01)
        closed.open_window(loop.time())
        await closed.measure(min_window_s=1.0, cap_s=60.0, decide=None, early_stop=False)
        await closed.stop()
        return closed

    closed = run(work)
    assert closed.opened is not None
    assert closed.cut is not None
    mean, peak = closed.inflight(closed.opened, closed.cut)
    assert (mean, peak) == (pytest.approx(4.0), 4)


# -- the loop


def test_throughput_is_n_over_latency_and_in_flight_is_n() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, lambda k, _: Reply(2.0), n=256, requests=1024)
        assert await counted(closed) is StopReason.ENOUGH
        return closed

    closed = run(work)
    assert closed.opened is not None
    assert closed.cut is not None
    rows = rows_of(closed)
    assert len(rows) == 1024
    assert 1024 / (closed.cut - closed.opened) == pytest.approx(256 / 2.0, rel=0.01)
    mean, peak = closed.inflight(closed.opened, closed.cut)
    assert mean == pytest.approx(256.0)
    assert peak == 256
    sender = closed._sender
    assert isinstance(sender, FakeSender)
    assert sender.peak == 256, "and so the server sees it"


def test_send_lag_and_refill_time_are_in_the_rows() -> None:
    """Writes come 0.25 s after the wish, slots start again 0.125 s after the end; one in five is refused."""

    def reply(k: int, _: int) -> Reply:
        if k % 5 == 4:
            return Reply(0.5, Outcome.REJECTED, retry_after_s=2.0, writes_s=0.25, noticed_s=0.125)
        return Reply(3.0, first_token_s=1.0, writes_s=0.25, noticed_s=0.125)

    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, reply, n=4, requests=60)
        await counted(closed)
        return closed

    rows = rows_of(run(work))
    assert {round(row["send_lag_s"], 9) for row in rows} == {0.25}
    assert {(round(row["refill_s"], 9), round(row["paused_s"], 9)) for row in rows} == {
        (0.125, 0.0),
        (2.125, 2.0),
    }
    served = [row for row in rows if row["outcome"] == "completed"]
    assert {(round(row["ttft_s"], 9), round(row["e2e_s"], 9)) for row in served} == {(0.75, 2.75)}


def test_starts_are_spread_over_a_ramp() -> None:
    async def work(loop: VirtualLoop) -> list[float]:
        closed = closed_loop(loop, lambda k, _: Reply(100.0), n=50)
        closed.start()
        await asyncio.sleep(6)
        await closed.stop()
        return [at - 100.0 for at in closed.starts]

    starts = run(work)
    assert len(starts) == 50
    assert starts[0] == 0.0
    assert 4.8 < max(starts) <= 5.0
    assert max(np.diff(starts)) <= 0.21


def test_load_is_kept_up_until_the_last_counted_request_has_ended() -> None:
    """One counted request takes 50 s: the others keep coming meanwhile, uncounted, and are aborted then."""

    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, float]:
        closed = closed_loop(loop, lambda k, _: Reply(50.0 if k == 90 else 1.0), n=4, requests=20)
        await counted(closed)
        return closed, loop.time()

    closed, ended_at = run(work)
    rows = rows_of(closed)
    assert len(rows) == 20
    assert max(row["e2e_s"] for row in rows) == 50.0
    later = [row for row in closed.rows() if not row["counted"] and row["started_s"] > rows[-1]["started_s"]]
    assert len([row for row in later if row["outcome"] == "completed"]) >= 3 * 45
    assert len([row for row in later if row["outcome"] == "aborted"]) == 4
    assert closed.opened is not None
    assert closed.cut is not None
    assert closed.cut - closed.opened < 7
    assert ended_at - closed.cut > 45


def test_the_window_is_at_least_as_long_as_asked() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, lambda k, _: Reply(0.5), n=5, requests=20)
        await counted(closed, min_window_s=30.0)
        return closed

    closed = run(work)
    assert closed.cut is not None
    assert closed.opened is not None
    assert closed.cut - closed.opened == pytest.approx(30.0, abs=0.51)
    assert len(rows_of(closed)) == pytest.approx(300, abs=5)


def test_the_cap_cuts_by_start_and_leaves_out_no_slow_request() -> None:
    """One request in ten takes 40 s. Whether it counts depends on its start, not on its length."""

    async def work(loop: VirtualLoop) -> ClosedLoop:
        rng = random.Random(8)
        closed = closed_loop(
            loop, lambda k, _: Reply(40.0 if rng.random() < 0.1 else 1.0), n=20, requests=10_000
        )
        assert await counted(closed, after_s=100.0, cap_s=100.0) is StopReason.CAP
        return closed

    closed = run(work)
    rows = rows_of(closed)
    assert closed.opened is not None
    assert closed.cut == pytest.approx(closed.opened + 100.0)
    opened = closed.clock.since_start_s(closed.opened)
    everything = [row for row in closed.rows() if opened <= row["started_s"] < opened + 100.0]
    assert rows == everything
    assert all(row["outcome"] == "completed" for row in rows)
    slow = np.mean([row["e2e_s"] == 40.0 for row in rows])
    assert slow == pytest.approx(0.1, abs=0.03)


def test_after_the_cap_the_wait_is_bounded_by_one_deadline() -> None:
    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, float]:
        closed = closed_loop(
            loop, lambda k, _: Reply(9999.0 if k % 7 == 0 else 1.0), n=8, requests=9999, deadline_s=30.0
        )
        await counted(closed, after_s=31.0, cap_s=60.0)
        return closed, loop.time()

    closed, ended_at = run(work)
    assert closed.opened is not None
    assert ended_at - closed.opened <= 60.0 + 30.0 + 0.1
    outcomes = {row["outcome"] for row in rows_of(closed)}
    assert outcomes == {"completed", "deadline_exceeded"}


def test_undecided_proof_is_extended_by_doubling_and_stops_when_decided() -> None:
    asked: list[tuple[int, bool]] = []

    def decide(name: str, rows: list[dict[str, Any]], planned: bool) -> State:
        assert name == "batch"
        assert all(row["outcome"] for row in rows)
        assert [row["started_s"] for row in rows] == sorted(row["started_s"] for row in rows)
        asked.append((len(rows), planned))
        return State.PASS if planned and len(rows) >= 200 else State.INCONCLUSIVE

    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, lambda k, _: Reply(1.0), n=10, requests=50, max_requests=350)
        assert await counted(closed, decide=decide) is StopReason.DECIDED
        return closed

    closed = run(work)
    assert [n for n, planned in asked if planned] == [50, 100, 200]
    assert len(rows_of(closed)) == 200


def test_undecided_to_the_end_is_enough_at_the_most_requests() -> None:
    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, StopReason]:
        closed = closed_loop(loop, lambda k, _: Reply(1.0), n=10, requests=50, max_requests=150)
        return closed, await counted(closed, decide=lambda *_: State.INCONCLUSIVE)

    closed, reason = run(work)
    assert reason is StopReason.ENOUGH
    assert len(rows_of(closed)) == 150


def test_a_step_that_is_not_extended_asks_for_no_planned_verdict() -> None:
    planned: list[bool] = []

    def decide(name: str, rows: list[dict[str, Any]], at_checkpoint: bool) -> State:
        planned.append(at_checkpoint)
        return State.PASS

    async def work(loop: VirtualLoop) -> StopReason:
        return await counted(closed_loop(loop, lambda k, _: Reply(1.0), n=5, requests=100), decide=decide)

    assert run(work) is StopReason.ENOUGH
    assert not any(planned)


def failing_below(share: float) -> Any:
    def decide(name: str, rows: list[dict[str, Any]], planned: bool) -> State:
        good = np.mean([row["outcome"] == "completed" for row in rows])
        return State.FAIL if good < share else State.INCONCLUSIVE

    return decide


def test_a_server_that_fails_half_is_stopped_early() -> None:
    """The early cut is one before which every request has ended."""

    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, StopReason]:
        rng = random.Random(9)
        closed = closed_loop(
            loop,
            lambda k, _: Reply(1.0, Outcome.SERVER_ERROR if rng.random() < 0.5 else Outcome.COMPLETED),
            n=10,
            requests=5000,
        )
        return closed, await counted(closed, decide=failing_below(0.8), min_window_s=30.0)

    closed, reason = run(work)
    rows = rows_of(closed)
    assert reason is StopReason.EARLY_FAIL
    assert 20 <= len(rows) <= 150
    assert closed.opened is not None
    assert closed.cut is not None
    assert closed.cut - closed.opened >= 8, "not on the first hiccup"
    assert {row["outcome"] for row in rows} == {"completed", "server_error"}


def test_early_stop_can_be_switched_off() -> None:
    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, StopReason]:
        closed = closed_loop(loop, lambda k, _: Reply(1.0, Outcome.SERVER_ERROR), n=10, requests=300)
        return closed, await counted(closed, decide=failing_below(0.8), early_stop=False)

    closed, reason = run(work)
    assert reason is StopReason.ENOUGH
    assert len(rows_of(closed)) == 300


def test_early_looks_are_few() -> None:
    looks: list[int] = []

    def decide(name: str, rows: list[dict[str, Any]], planned: bool) -> State:
        looks.append(len(rows))
        return State.INCONCLUSIVE

    async def work(loop: VirtualLoop) -> None:
        await counted(closed_loop(loop, lambda k, _: Reply(1.0), n=10, requests=2000), decide=decide)

    run(work)
    assert 10 <= len(looks) <= 26
    assert all(later >= 1.2 * earlier for earlier, later in itertools.pairwise(looks))


# -- pauses


def refusing(limit: int, serves_s: float) -> Any:
    """A server of ``limit`` slots and no queue: above them it refuses in a millisecond."""

    def reply(k: int, in_flight: int) -> Reply:
        return Reply(serves_s) if in_flight <= limit else Reply(0.001, Outcome.REJECTED)

    return reply


def test_refusals_do_not_measure_our_own_loop() -> None:
    """4 slots of 2 s and one request too many: without a pause nearly every request would be a refusal.

    With it the fifth slot tries about once a second, so 2 a second complete and about 1 is refused.
    """

    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, refusing(4, 2.0), n=5, requests=600)
        await counted(closed)
        return closed

    closed = run(work)
    rows = rows_of(closed)
    completed = np.mean([row["outcome"] == "completed" for row in rows])
    assert 0.55 <= completed <= 0.8
    assert closed.opened is not None
    assert closed.cut is not None
    paused, vain = closed.idle_on_purpose(closed.opened, closed.cut)
    mean, peak = closed.inflight(closed.opened, closed.cut)
    assert peak == 5
    assert mean + paused == pytest.approx(5.0, abs=0.02), "pauses explain what is missing"
    assert vain == 0.0
    after = [row for row in rows if row["paused_s"] > 0]
    assert after
    assert all(0.5 <= row["paused_s"] <= 1.5 for row in after)
    assert all(row["refill_s"] >= row["paused_s"] for row in after)


def test_retry_after_is_obeyed() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(
            loop,
            lambda k, n: Reply(1.0) if n <= 2 else Reply(0.001, Outcome.REJECTED, retry_after_s=7.0),
            n=3,
            requests=60,
        )
        await counted(closed)
        return closed

    pauses = {round(row["paused_s"], 6) for row in rows_of(run(work)) if row["paused_s"]}
    assert pauses == {7.0}


def test_slow_failures_are_not_paused_after() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(
            loop, lambda k, _: Reply(3.0, Outcome.SERVER_ERROR) if k % 3 == 0 else Reply(1.0), n=4
        )
        await counted(closed)
        return closed

    assert all(row["paused_s"] == 0 for row in rows_of(run(work)))


def test_pauses_deadlines_and_stamps_are_in_the_servers_seconds() -> None:
    """The server's clock runs 20 times as fast as ours."""

    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, float]:
        closed = closed_loop(
            loop,
            lambda k, n: Reply(99.0) if k % 5 == 0 else Reply(0.001, Outcome.REJECTED, retry_after_s=2.0),
            n=4,
            requests=40,
            deadline_s=60.0,
            scale=20.0,
        )
        await counted(closed)
        return closed, loop.time()

    closed, _ = run(work)
    rows = rows_of(closed)
    late = [row["e2e_s"] for row in rows if row["outcome"] == "deadline_exceeded"]
    assert late
    assert late == pytest.approx([60.0] * len(late))
    assert {round(row["paused_s"], 6) for row in rows} == {0.0, 2.0}
    assert closed.clock.wall(60.0) == 3.0


# -- ends


def test_aborted_requests_are_kept_and_never_counted() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, lambda k, _: Reply(1.0), n=6, requests=30)
        await counted(closed)
        return closed

    aborted = [row for row in run(work).rows() if row["outcome"] == "aborted"]
    assert len(aborted) == 6
    assert not any(row["counted"] for row in aborted)


def test_drain_lets_what_is_in_flight_end() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(loop, lambda k, _: Reply(5.0), n=6)
        closed.start()
        await asyncio.sleep(12.0)
        await closed.drain()
        return closed

    closed = run(work)
    assert set(closed.outcomes) == {Outcome.COMPLETED}
    assert not any(row["counted"] for row in closed.rows())


def test_no_verdict_while_nobody_may_be_there_any_more() -> None:
    """The server dies after 100 requests: the loop waits to be told, then cuts before the vain ones."""

    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(
            loop,
            lambda k, _: Reply(1.0) if k < 100 else Reply(0.0, Outcome.CONNECT_FAILED, wrote=False),
            n=4,
            requests=150,
        )
        measuring = asyncio.create_task(counted(closed, after_s=5.0))
        await asyncio.sleep(300.0)
        assert not measuring.done()
        assert closed.broken_since is not None
        closed.close_early(StopReason.SERVER_GONE)
        measuring.cancel()
        await closed.stop()
        return closed

    rows = rows_of(run(work))
    assert rows[-1]["outcome"] == "completed"
    assert all(row["outcome"] == "completed" for row in rows)
    assert 60 <= len(rows) <= 100


def test_a_server_that_is_vouched_for_is_judged_by_its_failures() -> None:
    async def work(loop: VirtualLoop) -> StopReason:
        closed = closed_loop(
            loop, lambda k, _: Reply(0.0, Outcome.CONNECT_FAILED, wrote=False), n=4, requests=50
        )
        measuring = asyncio.create_task(counted(closed, after_s=5.0))
        await asyncio.sleep(60.0)
        assert not measuring.done()
        closed.vouched = True
        return await measuring

    assert run(work) is StopReason.ENOUGH


def test_our_own_lack_of_descriptors_is_remembered() -> None:
    async def work(loop: VirtualLoop) -> ClosedLoop:
        closed = closed_loop(
            loop,
            lambda k, _: (
                Reply(1.0)
                if k % 9
                else Reply(
                    0.0, Outcome.CONNECT_FAILED, wrote=False, own_fault=True, error="Too many open files"
                )
            ),
            n=4,
        )
        await counted(closed)
        return closed

    closed = run(work)
    assert closed.own_fault == "Too many open files"


def test_our_own_lack_of_descriptors_is_no_sign_of_a_dead_server() -> None:
    async def work(loop: VirtualLoop) -> tuple[ClosedLoop, StopReason]:
        closed = closed_loop(
            loop, lambda k, _: Reply(0.0, Outcome.CONNECT_FAILED, wrote=False, own_fault=True), n=4
        )
        return closed, await counted(closed)

    closed, reason = run(work)
    assert reason is StopReason.ENOUGH
    assert closed.broken_since is None


def test_a_fault_of_the_sender_itself_is_not_swallowed() -> None:
    async def work(loop: VirtualLoop) -> None:
        closed = closed_loop(loop, lambda k, _: Reply(1.0), n=2)

        async def broken(*_: Any) -> Any:
            raise RuntimeError("a bug of ours")

        closed._sender = type("Broken", (), {"send": staticmethod(broken)})()
        closed.start()
        await asyncio.sleep(6.0)
        assert isinstance(closed.failure, RuntimeError)
        await closed.stop()

    with pytest.raises(RuntimeError, match="a bug of ours"):
        run(work)
