"""What a person may ask of one run."""

from __future__ import annotations

import pytest

from include.capacity.config import load_fleet
from include.capacity.errors import ConfigError
from include.capacity.flow.params import SweepParams, apply, parse_params


def test_blank_changes_nothing() -> None:
    fleet = load_fleet()
    blank = {
        "concurrency": "",
        "publish_to": "",
        "mode": None,
        "deadline_s": None,
        "models": [],
        "classes": [],
    }
    assert apply(parse_params(SweepParams, blank), fleet) == fleet


def test_form_values_override_the_fleet() -> None:
    asked = parse_params(
        SweepParams,
        {
            "models": ["steady"],
            "classes": ["interactive"],
            "mode": "exact",
            "concurrency": "8, 4,4",
            "repeats": 3,
            "requests_per_step": 900,
            "seconds_per_step": 40,
            "deadline_s": 30,
            "ttft_objective_s": 2,
            "completion_floor": 0.9,
            "publish_to": "file:///tmp/out",
            "promote": True,
        },
    )
    fleet = apply(asked, load_fleet())
    assert list(fleet.models) == ["steady"]
    model = fleet.models["steady"]
    assert (model.mode, model.repeats, list(model.classes)) == ("exact", 3, ["interactive"])
    service_class = model.classes["interactive"]
    assert service_class.ladder == [4, 8]
    assert (service_class.deadline_s, service_class.completion_floor) == (30, 0.9)
    assert service_class.ttft is not None
    assert (service_class.ttft.at_most_s, service_class.ttft.share) == (2, 0.95)
    assert (fleet.steps.prove_requests, fleet.steps.min_window_s) == (900, 40)
    assert fleet.publish.to == "file:///tmp/out"


def test_ttft_objective_leaves_batch_alone() -> None:
    fleet = apply(parse_params(SweepParams, {"ttft_objective_s": 2}), load_fleet())
    assert fleet.models["steady"].classes["batch"].ttft is None


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"modles": ["steady"]}, r"unknown \['modles'\]"),
        ({"models": ["../etc"]}, r"models: '\.\./etc' is none of \['sprinter', 'steady'\]"),
        ({"classes": ["bulk"]}, "classes: 'bulk' is none of"),
        ({"concurrency": "4; rm -rf /"}, "expected whole numbers separated by commas"),
        ({"concurrency": "0,4"}, "greater than or equal to 1"),
        ({"concurrency": "9" * 30}, "expected at most 100000"),
        ({"deadline_s": -1}, "deadline_s: Input should be greater than 0"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"completion_floor": 1}, "completion_floor: Input should be less than 1"),
        ({"ttft_objective_s": 90}, "objective of 90.0 s is beyond the deadline of 60.0 s"),
        ({"publish_to": "http://x"}, r"publish\.to: String should match pattern"),
        ({"mode": "fast"}, "mode: Input should be 'find' or 'exact'"),
        ({"repeats": 0}, "repeats: Input should be greater than or equal to 1"),
        ({"promote": "perhaps"}, "promote: Input should be a valid boolean"),
    ],
)
def test_wrong_values_name_key_value_and_expectation(conf: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        apply(parse_params(SweepParams, conf), load_fleet())
