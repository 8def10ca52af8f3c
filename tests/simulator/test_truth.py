"""Brute force: strides change nothing, the rates follow from the mechanism, the kept truth is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from include.capacity.config import ServiceClass, load_fleet
from include.capacity.errors import DataError
from include.capacity.simulator.profile import load_profile
from include.capacity.simulator.truth import (
    REQUESTS,
    classes_on,
    closed_loop,
    compute_truth,
    depends_on,
    read_truth,
    true_limit,
    truth_file,
)
from tests.simulator.profiles import tiny


def service_class(
    *, output: float = 10, sigma: float = 0.0, deadline_s: float = 60.0, ttft_s: float = 10.0
) -> ServiceClass:
    return ServiceClass.model_validate(
        {
            "rule": "interactive",
            "workload": {
                "name": "chat",
                "prompt_tokens": {"median": 10, "sigma": sigma},
                "output_tokens": {"median": output, "sigma": sigma},
            },
            "deadline_s": deadline_s,
            "completion_floor": 0.99,
            "ttft": {"at_most_s": ttft_s, "share": 0.95},
            "ladder": [1],
        }
    )


def test_two_slots_and_answers_of_ten_seconds() -> None:
    # Fixed lengths: an answer takes 10 iterations of a second, so 2 in flight make 0.2 requests/s.
    point = closed_loop(tiny(), {"a": (service_class(), 2)}, requests=100)["a"]
    assert (point.completed, point.met, point.rejected, point.ttft_p95_s) == (1.0, 1.0, 0.0, 1.0)
    assert (point.request_per_s, point.output_tok_per_s, point.total_tok_per_s) == pytest.approx((0.2, 2, 4))


def test_four_in_flight_on_two_slots_wait_ten_seconds() -> None:
    point = closed_loop(tiny(), {"a": (service_class(), 4)}, requests=100)["a"]
    assert (point.completed, point.met, point.ttft_p95_s) == (1.0, 0.0, 11.0)


def test_whoever_waits_beyond_the_deadline_is_given_up() -> None:
    # Lengths are fixed, so everybody waits 10 s, is served for 5 and given up: the slots work for nobody.
    point = closed_loop(tiny(), {"a": (service_class(deadline_s=15.0), 4)}, requests=200)["a"]
    assert (point.completed, point.rejected, point.ttft_p95_s) == (0.0, 0.0, None)
    assert point.output_tok_per_s == 0.0
    assert point.raw_output_tok_per_s > 1.5
    # With lengths that vary the short ones make it.
    point = closed_loop(tiny(), {"a": (service_class(sigma=0.6, deadline_s=15.0), 4)}, requests=2000)["a"]
    assert 0.2 < point.completed < 0.9
    assert 0.5 < point.output_tok_per_s < point.raw_output_tok_per_s - 0.2


def test_a_refused_slot_pauses_about_a_second() -> None:
    profile = tiny(max_num_queued_reqs=2)
    point = closed_loop(profile, {"a": (service_class(), 3)}, requests=4000)["a"]
    # One of three is refused about once a second while two complete 0.2 requests a second.
    assert point.completed == pytest.approx(0.2 / 1.2, abs=0.02)
    assert point.rejected == pytest.approx(1 - point.completed)
    told = closed_loop(
        tiny(max_num_queued_reqs=2, retry_after_s=5), {"a": (service_class(), 3)}, requests=4000
    )
    assert told["a"].completed == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("queue", [None, 5])
def test_strides_change_nothing(queue: int | None) -> None:
    profile = tiny(
        per_sequence_s=0.05,
        per_prefill_token_s=0.002,
        per_context_token_s=0.0001,
        base_s=0.05,
        noise_sigma=0.2,
        max_num_seqs=4,
        max_num_queued_reqs=queue,
        kv_cache_tokens=1000,
        stalls={"mean_every_s": 30.0, "duration_s": 2.0},
    )
    loads = {
        "a": (service_class(output=60, sigma=0.5, deadline_s=40.0), 5),
        "b": (service_class(output=8, sigma=0.5, deadline_s=20.0), 3),
    }
    fast = closed_loop(profile, loads, requests=400, seed=3)
    assert fast == closed_loop(profile, loads, requests=400, seed=3, strides=False)
    assert fast != closed_loop(profile, loads, requests=400, seed=4)


def test_the_true_limit_is_the_last_before_the_first_that_breaks() -> None:
    limit, points = true_limit(tiny(), service_class(ttft_s=5.0), requests=200)
    assert limit == 2
    assert [(point.concurrency, point.met) for point in points][:3] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_no_limit_where_not_even_one_holds() -> None:
    assert true_limit(tiny(), service_class(deadline_s=10.0, ttft_s=0.5), requests=200)[0] is None


@pytest.mark.parametrize("name", ["steady", "sprinter"])
def test_the_kept_truth_is_this_profiles_and_this_fleets(name: str) -> None:
    profile = load_profile(name)
    truth = read_truth(profile)
    classes = classes_on(profile, load_fleet())
    assert truth["requests_per_concurrency"] >= REQUESTS >= 40_000
    assert set(truth["classes"]) == set(classes) == {"interactive", "batch"}
    for key, one in classes.items():
        kept = truth["classes"][key]
        assert kept["class"] == depends_on(one)
        by_n = {point["concurrency"]: point for point in kept["points"]}
        limit = kept["limit"]
        share = one.ttft.share if one.ttft else 0.0
        holds = {n: p["completed"] >= one.completion_floor and p["met"] >= share for n, p in by_n.items()}
        assert all(point["attempted"] >= 40_000 for point in by_n.values())
        assert all(held for n, held in holds.items() if n <= limit)
        assert not holds[limit + 1]
        # One point again, with fewer requests: 4,000, so 2 % is far outside chance.
        again = closed_loop(profile, {key: (one, limit)}, requests=4_000, seed=99)[key]
        assert again.completed == pytest.approx(by_n[limit]["completed"], abs=0.03)
        assert again.met == pytest.approx(by_n[limit]["met"], abs=0.03)


def test_the_model_with_the_higher_peak_has_the_lower_limits() -> None:
    steady, sprinter = (read_truth(load_profile(name))["classes"] for name in ("steady", "sprinter"))
    for key in ("interactive", "batch"):
        assert sprinter[key]["peak_output_tok_per_s"] > 1.3 * steady[key]["peak_output_tok_per_s"]
        assert sprinter[key]["limit"] < 0.7 * steady[key]["limit"]


def test_a_truth_of_another_engine_is_refused(tmp_path: Path) -> None:
    profile = tiny()
    with pytest.raises(DataError, match="cannot read"):
        read_truth(profile, tmp_path)
    truth = compute_truth(profile, {"a": service_class(ttft_s=5.0)}, requests=50)
    truth_file(profile, tmp_path).write_text(json.dumps(truth))
    assert read_truth(profile, tmp_path)["classes"]["a"]["limit"] == 2
    with pytest.raises(DataError, match=r"engine_hash .* computed by python -m"):
        read_truth(tiny(seed=5), tmp_path)
