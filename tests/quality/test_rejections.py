"""The quick look after each step finds what the whole judgement will reject, and nothing else."""

from __future__ import annotations

import pytest

from include.capacity.quality.check import rejections
from include.capacity.results.steps import steps_table
from tests.quality.made import Made, sweep
from tests.quality.test_mutations import PROVE, break_down, cap_the_pool, slow_down, stall_the_client


def quick_look(made: Made, key: str) -> dict[str, str]:
    rows = made.requests[made.requests["step"] == key]
    return rejections(steps_table(made.sweep_json, {key: made.facts[key]}, rows), rows, made.sweep_json)


def test_a_clean_step_is_left_alone() -> None:
    made = sweep(1)
    assert [quick_look(made, key) for key in made.facts if "prime" not in key] == [{}] * 7


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (cap_the_pool, "On average 10.0 of 14 requests were in flight"),
        (break_down, "no steady state was measured"),
        (stall_the_client, "client"),
    ],
)
def test_what_will_be_rejected_is_told_at_once(mutate, said: str) -> None:
    made = sweep(1)
    mutate(made)
    assert said in quick_look(made, PROVE)["interactive"]


def test_what_is_only_flagged_is_not_measured_again() -> None:
    made = sweep(1)
    slow_down(made)
    assert quick_look(made, PROVE) == {}
