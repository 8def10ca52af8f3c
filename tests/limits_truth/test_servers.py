"""The virtual servers do what their mechanism says: known cases worked out by hand, and conservation."""

import math

import numpy as np
import pytest

from include.capacity.words import Outcome
from tests.benchmarks.servers import (
    Loop,
    Mechanism,
    Traffic,
    VirtualServer,
    _schedule,
    generate,
    make_server,
    streams_of,
)

FIXED = Traffic(prompt=(100, 0.0, 1, 10_000), output=(101, 0.0, 1, 10_000))
"""Every prompt 100 tokens, every answer 101: one with the prefill, 100 decoded."""


def loop_of(
    mechanism: Mechanism,
    concurrency: int,
    traffic: Traffic = FIXED,
    deadline_s: float = 1e9,
    streamed: bool = True,
) -> Loop:
    server = make_server("slots", "interactive" if streamed else "batch", 0, 1)
    server = VirtualServer(
        name="by-hand",
        family="slots",
        seed=1,
        mechanism=mechanism,
        class_name=server.class_name,
        service_class=server.service_class.model_copy(update={"deadline_s": deadline_s}),
        traffic=traffic,
    )
    rng = np.random.default_rng(3)
    return Loop(mechanism, streams_of(server, concurrency, rng), rng)


def ended(loop: Loop) -> list[int]:
    return [request for request, end in enumerate(loop.end) if end is not None]


def test_alone_a_request_takes_prefill_and_decode_iterations():
    loop = loop_of(
        Mechanism(slots=8, step_s=0.01, per_seq_s=0.001, chunk_tokens=200, prefill_token_s=1e-4), 1
    )
    loop.advance(math.inf, 1)
    # Prefill: half an iteration of 10 ms + 200 x 0.1 ms; decode: 100 iterations of 10 + 1 ms.
    assert loop.first[0] == pytest.approx(0.5 * (0.010 + 0.020))
    assert loop.end[0] == pytest.approx(0.015 + 100 * 0.011)


def test_more_requests_than_slots_wait_first_in_first_out():
    loop = loop_of(Mechanism(slots=2, step_s=0.01, per_seq_s=0.0, chunk_tokens=10**9), 4)
    loop.advance(10.0)
    # Two at a time, one second each, no prefill to speak of: two a second, and each waits one second.
    assert len(ended(loop)) == pytest.approx(20, abs=2)
    assert [loop.first[n] - loop.start[n] for n in (0, 1)] == pytest.approx([0, 0], abs=1e-6)
    assert [loop.first[n] - loop.start[n] for n in (2, 3, 8, 9)] == pytest.approx([1, 1, 1, 1], abs=1e-6)
    assert ended(loop) == sorted(ended(loop))


def test_a_full_queue_refuses_and_the_slot_pauses():
    loop = loop_of(Mechanism(slots=2, step_s=0.01, per_seq_s=0.0, queue=1, chunk_tokens=10**9), 4)
    loop.advance(0.0005)
    assert loop.outcome == [None, None, None, Outcome.REJECTED]
    loop.advance(100.0)
    rejected = [n for n, outcome in enumerate(loop.outcome) if outcome is Outcome.REJECTED]
    # The fourth slot tries about once a second; two requests a second complete.
    assert 75 <= len(rejected) <= 125
    assert all(0.5 <= pause <= 1.5 for pause in loop.paused if pause)
    completed = sum(outcome is Outcome.COMPLETED for outcome in loop.outcome)
    assert completed == pytest.approx(200, abs=4)


@pytest.mark.parametrize(
    ("streamed", "outcome"), [(True, Outcome.FIRST_TOKEN_TIMEOUT), (False, Outcome.DEADLINE_EXCEEDED)]
)
def test_a_deadline_passed_in_the_queue(streamed, outcome):
    loop = loop_of(
        Mechanism(slots=1, step_s=0.01, per_seq_s=0.0, chunk_tokens=10**9),
        4,
        deadline_s=2.5,
        streamed=streamed,
    )
    loop.advance(2.6)
    # One a second: the first two end, the third is cut off while decoding, the fourth while waiting.
    assert loop.outcome[:4] == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.DEADLINE_EXCEEDED, outcome]
    assert loop.end[2] == loop.end[3] == 2.5


def test_a_full_cache_preempts_the_last_admitted_which_reads_again():
    # Two prompts of 100 fit; together they grow until 300 tokens are held, 50 iterations in.
    loop = loop_of(Mechanism(slots=9, step_s=0.01, per_seq_s=0.0, chunk_tokens=10**9, kv_tokens=300), 2)
    loop.advance(0.505)
    assert loop.preemptions == 1
    assert loop.end[:2] == [None, None]
    loop.advance(1.005)
    assert loop.outcome[0] is Outcome.COMPLETED
    # Request 1 resumes where it was when request 0 leaves, and the new request fits beside it no more.
    loop.advance(1.6)
    assert loop.end[1] == pytest.approx(1.5, abs=0.02)


def test_the_server_dies_at_its_concurrency_and_not_below():
    mechanism = Mechanism(slots=99, step_s=0.01, per_seq_s=0.0, crash_running=5)
    below, at = loop_of(mechanism, 4), loop_of(mechanism, 5)
    below.advance(50)
    at.advance(50)
    assert not below.crashed
    assert at.crashed
    assert at.outcome == [Outcome.CONNECTION_LOST] * 5


def test_throughput_falls_past_the_square_root_of_the_retrograde_term():
    mechanism = Mechanism(slots=999, step_s=0.01, per_seq_s=0.0, per_seq2_s=0.01 / 20**2, chunk_tokens=10**9)

    def rate(concurrency: int) -> float:
        loop = loop_of(mechanism, concurrency)
        loop.advance(300)
        return loop.ended / 300

    assert rate(10) < rate(20) > rate(40) > rate(80)
    assert rate(20) == pytest.approx(20 / (100 * 0.02), rel=0.1)


def test_stalls_and_drift_have_their_mean():
    mechanism = Mechanism(
        slots=1, step_s=1, per_seq_s=0, stall_gap_s=10, stall_s=0.5, drift=0.1, drift_period_s=100
    )
    at, stalled, weighted = 0.0, 0.0, 0.0
    for end, slow in _schedule(mechanism, np.random.default_rng(1), 0.0, 0.3):
        if slow == math.inf:
            stalled += end - at
        else:
            weighted += slow * (end - at)
        at = end
        if at > 100_000:
            break
    assert stalled / at == pytest.approx(0.5 / 10.5, rel=0.05)
    assert weighted / (at - stalled) == pytest.approx(1.0, abs=0.002)


def test_regimes_make_neighbours_alike():
    traffic = Traffic(
        prompt=(500, 0.3, 1, 10**6), output=(100, 0.3, 1, 10**6), regime_requests=40, regime_sigma=0.5
    )
    prompts, outputs = (np.log(x) for x in traffic.draw(np.random.default_rng(1), 20_000))
    assert np.corrcoef(prompts[:-1], prompts[1:])[0, 1] > 0.6
    assert np.corrcoef(prompts, outputs)[0, 1] > 0.6


@pytest.mark.parametrize("server", generate(2, 11), ids=lambda server: server.name)
def test_nothing_is_lost(server):
    """N in flight (or resting) always; slots and cache are given back; no request ends before it starts."""
    rng = np.random.default_rng(5)
    loop = Loop(server.mechanism, streams_of(server, 48, rng), rng)
    for _ in range(40):
        loop.advance(math.inf, loop.ended + 25)
        if loop.crashed:
            assert server.family == "crash"
            break
        open_ = [n for n, end in enumerate(loop.end) if end is None]
        assert len(open_) + len(loop._resting) == 48
        assert sum(loop._seated) == loop._running == len(loop._prefill) + loop._decoding
        assert loop._n_waiting == len(loop._waiting) == len(open_) - loop._running
        assert loop._running <= server.mechanism.slots
        if server.mechanism.kv_tokens is not None:
            held = sum(
                loop._held[n] + (loop._iteration if loop._finish[n] >= 0 else 0)
                for n in open_
                if loop._seated[n]
            )
            assert loop._kv == pytest.approx(held, abs=1e-3)
    starts = np.array(loop.start)
    ends = np.array([math.inf if end is None else end for end in loop.end])
    assert (np.diff(starts) >= 0).all()
    assert (ends >= starts).all()
    assert (ends - starts <= server.service_class.deadline_s + 1e-6)[np.isfinite(ends)].all()


def test_servers_are_the_same_every_time_and_differ_by_seed():
    assert generate(2, 5) == generate(2, 5)
    assert generate(2, 5) != generate(2, 6)
    assert len({server.seed for server in generate(28, 2026)}) == 8 * 28
