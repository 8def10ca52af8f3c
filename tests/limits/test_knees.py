import pytest

from include.capacity.limits.evidence import Evidence
from include.capacity.limits.knees import (
    Counts,
    LatencyKnee,
    Throughput,
    completion_knee,
    isotonic_crossing,
    kneedle,
    latency_knee,
    server_bound,
    throughput_knee,
)

NAN = float("nan")


def step(n: int, p95: float, half: float = 0.0, **more: object) -> Evidence:
    return Evidence(
        key=f"{n}",
        service_class="interactive",
        phase="scout",
        concurrency=n,
        ttft_p95_s=p95,
        ttft_p95_low_s=p95 - half,
        ttft_p95_high_s=p95 + half,
        **more,
    )


class TestLatencyKnee:
    LADDER = (step(1, 0.1), step(4, 0.11), step(16, 0.15), step(32, 0.2), step(64, 2.0), step(128, 20.0))

    def test_is_the_first_pair_that_climbs_faster_than_volume(self):
        assert latency_knee(self.LADDER) == LatencyKnee(low=32, high=64)

    def test_row_order_does_not_matter(self):
        assert latency_knee(self.LADDER[::-1]) == LatencyKnee(low=32, high=64)

    def test_growth_in_proportion_is_no_knee(self):
        assert latency_knee([step(n, 0.1 * n) for n in (1, 4, 16, 64)]) is None

    def test_a_climb_from_next_to_nothing_is_no_knee(self):
        # slope above 1, and yet less than three times the delay with one in flight
        assert latency_knee([step(1, 0.1), step(8, 0.1), step(10, 0.29)]) is None
        assert latency_knee([step(1, 0.1), step(8, 0.1), step(10, 0.31)]) == LatencyKnee(low=8, high=10)

    def test_steps_closer_than_a_quarter_are_no_pair(self):
        assert latency_knee([step(8, 0.1), step(9, 5.0)]) is None
        # the pair is (1, 10); of the steps between, 8 is not past the knee and 9 is
        steps = [step(1, 0.1), step(8, 0.1), step(9, 5.0), step(10, 30.0)]
        assert latency_knee(steps) == LatencyKnee(low=8, high=9)

    def test_an_uncertain_climb_is_no_knee(self):
        sure = [step(1, 0.1), step(32, 0.2, 0.05), step(64, 2.0, 0.3)]
        unsure = [step(1, 0.1), step(32, 0.2, 0.05), step(64, 2.0, 1.6)]
        assert latency_knee(sure) == LatencyKnee(low=32, high=64)
        assert latency_knee(unsure) is None

    def test_bisecting_narrows_from_the_fixed_lower_edge(self):
        # slope from 32: at 45 ln(0.25/0.2)/ln(45/32) = 0.65; at 54 ln(0.5/0.2)/ln(54/32) = 1.75
        between = [step(45, 0.25), step(54, 0.5)]
        assert latency_knee(self.LADDER, between) == LatencyKnee(low=45, high=54)
        # steep, but less than one and a half times the edge's delay
        assert latency_knee(self.LADDER, [step(34, 0.28)]) == LatencyKnee(low=34, high=64)

    def test_steps_outside_the_pair_do_not_count(self):
        assert latency_knee(self.LADDER, [step(24, 9.0), step(90, 0.1)]) == LatencyKnee(low=32, high=64)

    def test_without_delays(self):
        assert latency_knee([]) is None
        assert latency_knee([step(1, 0.0), step(8, 0.0), step(16, 1.0)]) == LatencyKnee(low=8, high=16)

    def test_a_crashed_step_starts_no_knee(self):
        assert latency_knee([step(1, 0.1), step(32, 0.1), step(64, 60.0, crashed=True)]) is None

    def test_an_interval_that_is_unknown_starts_no_knee(self):
        unknown = step(64, 2.0)
        unknown.ttft_p95_low_s = None
        assert latency_knee([step(1, 0.1), step(32, 0.2), unknown]) is None


class TestCompletionKnee:
    def test_is_the_last_step_before_a_provable_drop(self):
        steps = [Counts(1, 100, 100), Counts(8, 100, 100), Counts(16, 300, 299), Counts(32, 300, 280)]
        assert completion_knee(steps) == (16, 32)

    def test_a_drop_of_less_than_half_a_point_is_none(self):
        assert completion_knee([Counts(1, 100_000, 100_000), Counts(2, 100_000, 99_600)]) is None
        assert completion_knee([Counts(1, 100_000, 100_000), Counts(2, 100_000, 99_400)]) == (1, 2)

    def test_chance_is_none(self):
        assert completion_knee([Counts(1, 100, 100), Counts(8, 100, 98)]) is None

    def test_nothing_to_compare(self):
        assert completion_knee([]) is None
        assert completion_knee([Counts(8, 100, 0)]) is None
        assert completion_knee([Counts(4, 0, 0), Counts(8, 100, 0)]) is None


class TestThroughputKnee:
    def test_is_the_smallest_within_five_percent_of_the_peak(self):
        steps = [Throughput(n, x, NAN, NAN) for n, x in ((1, 10), (8, 70), (16, 95), (32, 100), (64, 90))]
        assert throughput_knee(steps) == {"concurrency": 16, "low": 16, "high": 32}

    def test_with_the_interval_that_the_rates_allow(self):
        steps = [
            Throughput(8, 80, 70, 90),  # 90 reaches 0.95 x 94 = 89.3
            Throughput(16, 95, 93, 97),
            Throughput(32, 98, 96, 100),  # 96 reaches 0.95 x 100
            Throughput(64, 100, 94, 106),
        ]
        assert throughput_knee(steps) == {"concurrency": 16, "low": 8, "high": 32}

    def test_without_throughput_there_is_none(self):
        assert throughput_knee([]) is None
        assert throughput_knee([Throughput(1, 0, NAN, NAN)]) is None


def test_kneedle_is_an_annotation_that_may_find_nothing():
    saturating = [Throughput(n, min(n, 32) * 10.0, NAN, NAN) for n in (1, 8, 16, 24, 32, 48, 64, 96)]
    assert kneedle(saturating) == 32
    assert kneedle(saturating[:3]) is None


class TestIsotonicCrossing:
    def test_lies_between_in_the_logarithm(self):
        # 1.0 at 16 and 0.9 at 64: 0.95 is half way, in the logarithm 32
        assert isotonic_crossing([Counts(16, 100, 100), Counts(64, 100, 90)], 0.95) == pytest.approx(32.0)

    def test_disorder_is_pooled(self):
        # 0.9 and 1.0 of 100 each pool to 0.95; then down to 0.85: 0.9 is half way from 32 to 128
        steps = [Counts(16, 100, 90), Counts(32, 100, 100), Counts(128, 100, 85)]
        assert isotonic_crossing(steps, 0.9) == pytest.approx(64.0)

    def test_no_crossing(self):
        assert isotonic_crossing([Counts(16, 100, 100), Counts(64, 100, 99)], 0.95) is None
        assert isotonic_crossing([Counts(16, 100, 50), Counts(64, 100, 10)], 0.95) is None
        assert isotonic_crossing([Counts(16, 100, 100)], 0.95) is None


@pytest.mark.parametrize(
    ("server", "outcomes", "bound"),
    [
        ({"server_kv_use_peak": 0.4, "server_waiting_mean": 3.0}, {"completed": 100}, "slots"),
        ({"server_kv_use_peak": 0.4, "server_waiting_mean": 0.1}, {"completed": 100}, "compute"),
        ({"server_kv_use_peak": 0.97, "server_waiting_mean": 3.0}, {"completed": 100}, "kv"),
        ({"server_kv_use_peak": 0.4, "server_preemptions": 2.0}, {"completed": 100}, "kv"),
        (
            {"server_kv_use_peak": 0.4, "server_waiting_mean": 3.0},
            {"completed": 99, "rejected": 1},
            "admission",
        ),
        ({"server_kv_use_peak": None, "server_waiting_mean": 3.0}, {"completed": 100}, "unknown"),
        ({"server_kv_use_peak": 0.4, "server_waiting_mean": NAN}, {"completed": 100}, "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_what_bound_the_server(server, outcomes, bound):
    assert server_bound(server, outcomes) == bound
