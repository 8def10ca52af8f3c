"""Continuous batching, worked out by hand: one second an iteration, no noise."""

from __future__ import annotations

from typing import Any

import pytest

from include.capacity.simulator.engine import Engine, EngineCrashed, Sequence
from tests.simulator.profiles import tiny


def engine(**changes: Any) -> Engine:
    return Engine(tiny(**changes).engine)


def submitted(to: Engine, *sizes: tuple[int, int]) -> list[Sequence]:
    sequences = [Sequence(prompt, output, to.now_s) for prompt, output in sizes]
    assert all(to.submit(sequence) for sequence in sequences)
    return sequences


def iterate(this: Engine, times: int = 1_000_000) -> Engine:
    for _ in range(times):
        if this.begin(this.now_s) is None:
            break
        this.finish()
    return this


def times_of(sequences: list[Sequence]) -> list[tuple[float | None, float | None]]:
    return [(sequence.first_token_s, sequence.last_token_s) for sequence in sequences]


def test_the_third_of_two_slots_waits_for_a_slot() -> None:
    this = engine()
    sequences = submitted(this, (10, 3), (10, 3), (10, 3))
    iterate(this)
    assert times_of(sequences) == [(1.0, 3.0), (1.0, 3.0), (4.0, 6.0)]
    assert [sequence.admitted_s for sequence in sequences] == [0.0, 0.0, 3.0]
    assert (this.kv_tokens, this.unfinished) == (0, 0)
    assert (this.stats.prompt_tokens, this.stats.generation_tokens) == (30, 9)


def test_an_iteration_takes_longer_the_more_work_is_in_it() -> None:
    this = engine(per_sequence_s=0.25, per_prefill_token_s=0.125, per_context_token_s=0.5)
    sequences = submitted(this, (8, 3))
    iterate(this)
    # Prefill of 8: 1 + 8/8. Then one decoding sequence with 8 and 9 tokens of context.
    assert times_of(sequences) == [(2.0, 2.0 + (1.25 + 4.0) + (1.25 + 4.5))]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    this = engine(max_num_batched_tokens=8)
    (short,) = submitted(this, (8, 10))
    iterate(this, 1)
    (long,) = submitted(this, (15, 1))
    iterate(this)
    # Beside one decoding sequence 7 of 8 tokens are left: 15 tokens take three iterations.
    assert times_of([short, long]) == [(1.0, 10.0), (4.0, 4.0)]


def test_an_arrival_during_an_iteration_joins_the_next() -> None:
    this = engine()
    submitted(this, (10, 2))
    assert this.begin(0.0) == 1.0
    late = Sequence(10, 1, 0.5)
    assert this.submit(late)
    this.finish()
    iterate(this)
    assert (late.admitted_s, late.first_token_s) == (1.0, 2.0)


def test_without_kv_cache_the_youngest_is_preempted_and_computed_again() -> None:
    this = engine(kv_cache_tokens=24, max_model_len=24)
    first, second = submitted(this, (10, 6), (10, 6))
    iterate(this, 3)
    assert (this.kv_tokens, first.generated, second.generated) == (24, 3, 3)
    iterate(this, 1)
    assert (this.stats.preemptions, second.running, this.kv_tokens) == (1, False, 13)
    assert list(this.waiting) == [second]
    iterate(this)
    # The first goes on alone; the second's 13 tokens are computed again in the seventh iteration.
    assert times_of([first, second]) == [(1.0, 6.0), (1.0, 9.0)]
    assert this.stats.generation_tokens == 12
    assert this.stats.prompt_tokens == 20


def test_a_full_queue_refuses_and_an_abort_makes_room_at_once() -> None:
    this = engine(max_num_queued_reqs=2)
    first, second = submitted(this, (10, 5), (10, 5))
    assert not this.submit(Sequence(10, 5, 0.0))
    this.abort(second)
    this.abort(second)  # twice is once
    assert this.submit(Sequence(10, 5, 0.0))
    assert (this.stats.rejected, this.stats.aborted, this.unfinished) == (1, 1, 2)
    iterate(this)
    assert (first.generated, second.generated, second.first_token_s) == (5, 0, None)


def test_an_abort_during_an_iteration_frees_the_slot_at_the_next() -> None:
    this = engine()
    first, second, third = submitted(this, (10, 50), (10, 4), (10, 1))
    iterate(this, 1)
    this.begin(1.0)
    this.abort(first)
    assert [sequence is second for sequence in this.finish()] == [True]
    iterate(this)
    assert (first.generated, third.admitted_s, third.first_token_s) == (1, 2.0, 3.0)
    assert this.kv_tokens == 0


def test_a_shared_head_is_not_computed_again() -> None:
    this = engine(per_prefill_token_s=0.125)
    first = Sequence(40, 1, 0.0, blocks=(101, 102))
    assert this.submit(first)
    iterate(this)
    assert first.first_token_s == 6.0
    second = Sequence(40, 1, 6.0, blocks=(101, 103))
    assert this.submit(second)
    iterate(this)
    # 16 of 40 tokens are there already.
    assert (second.cached, second.first_token_s) == (16, 6.0 + 1.0 + 24 / 8)
    assert (this.stats.prefix_queries, this.stats.prefix_hits) == (80, 16)


def test_without_prefix_caching_nothing_is_shared() -> None:
    this = engine(prefix_caching=False)
    for _ in range(2):
        assert this.submit(Sequence(40, 1, this.now_s, blocks=(101, 102)))
        iterate(this)
    assert this.stats.prefix_hits == 0


def test_a_profile_may_crash_under_load() -> None:
    this = engine(crash_at_running=2)
    submitted(this, (10, 5), (10, 5))
    with pytest.raises(EngineCrashed, match="2 sequences running"):
        this.begin(0.0)


def test_noise_has_mean_one_and_repeats_by_seed() -> None:
    def ends(seed: int) -> list[float]:
        this = engine(noise_sigma=0.5, seed=seed)
        submitted(this, (10, 900))
        found = []
        while (end_s := this.begin(this.now_s)) is not None:
            this.finish()
            found.append(end_s)
        return found

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)
    assert ends(1)[-1] == pytest.approx(900, rel=0.06)  # 900 draws: standard error 1.8 %


def test_a_stall_lengthens_the_iteration_it_falls_in() -> None:
    this = engine(stalls={"mean_every_s": 1e-9, "duration_s": 10.0})
    (sequence,) = submitted(this, (10, 2))
    iterate(this)
    # Due within nanoseconds of 0, so the iteration that begins at 1 is the first it can fall in.
    assert times_of([sequence]) == [(1.0, 12.0)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise_sigma": 0.3, "per_context_token_s": 0.001},
        {"noise_sigma": 0.3, "stalls": {"mean_every_s": 20.0, "duration_s": 3.0}},
    ],
)
def test_a_stride_ends_where_single_iterations_end_to_the_last_bit(changes: dict[str, Any]) -> None:
    def driven(strides: bool) -> tuple[Engine, list[Sequence], int]:
        this = engine(per_sequence_s=0.01, **changes)
        sequences = submitted(this, (10, 60), (30, 45), (10, 30))
        skipped = 0
        while True:
            if strides:
                skipped += this.skip(50.5)
            if this.begin(this.now_s) is None:
                return this, sequences, skipped
            this.finish()

    one, by_one, none = driven(strides=False)
    other, by_stride, skipped = driven(strides=True)
    assert none == 0
    assert skipped > 20
    assert times_of(by_one) == times_of(by_stride)
    assert (one.now_s, one.stats, one.kv_tokens) == (other.now_s, other.stats, other.kv_tokens)


def test_a_stride_stops_before_the_given_time() -> None:
    this = engine()
    submitted(this, (10, 100))
    iterate(this, 1)
    assert this.skip(20.0) == 18  # iterations that end at 2 .. 19
    assert this.now_s == 19.0
    assert this.skip(21.5) == 2
    assert this.skip(1000.0) == 78  # all but the last token
    assert this.skip(1000.0) == 0
