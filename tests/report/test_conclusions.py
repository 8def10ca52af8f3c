"""Computed sentences: said when the data carry them, and not otherwise."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from include.capacity.report.conclusions import (
    actions,
    changes,
    choice_sentences,
    first_failure_sentences,
    fleet_sentences,
    limit_and_peak_sentences,
    peak_sentences,
    server_sentences,
    waste_sentences,
)
from include.capacity.report.data import ModelData, judged_steps

RULE = {
    "rule": "interactive",
    "workload": {"name": "chat"},
    "deadline_s": 60.0,
    "completion_floor": 0.99,
    "ttft": {"at_most_s": 1.0, "share": 0.95},
}


def step(concurrency: int, output: float, **more: Any) -> dict[str, Any]:
    """A step row; ``rejected`` and other outcomes in numbers of the 600 attempted."""
    failed = sum(v for k, v in more.items() if k in ("rejected", "connection_lost", "deadline_exceeded"))
    return {
        "model": "m",
        "service_class": "interactive",
        "phase": "prove",
        "concurrency": concurrency,
        "repeat": 1,
        "attempted": 600,
        "completed": 600 - failed,
        "n_effective": 600.0,
        "output_tok_per_s": output,
        "raw_output_tok_per_s": output,
        "request_per_s": output / 200,
        "ttft_p95_s": 0.4,
        "ttft_n": 600 - failed,
        "e2e_n": 600 - failed,
        **more,
    }


def data(
    name: str, limit: int | None, first_fail: int | None, steps: list[dict[str, Any]], **more: Any
) -> ModelData:
    """A model with one interactive limit."""
    status = more.pop("status", "proven" if limit else "insufficient_evidence")
    entry = {
        "model": name,
        "series": "",
        "class": "interactive",
        "limit": limit,
        "status": status,
        "measured": more.pop("measured", "alone"),
        "bracket": [limit, first_fail],
        "deadline_s": 60.0,
    }
    about = {
        "model": name,
        "accelerator": {"kind": "H100", "count": 8},
        "classes": {"interactive": RULE},
        "comparison_ids": {"interactive": "cmp"},
        "stack_id": "st-1",
        **more,
    }
    return ModelData(name, about, judged_steps(pd.DataFrame(steps), None), [entry])


def curve(*steps: dict[str, Any]) -> pd.DataFrame:
    return data("m", 8, 16, list(steps)).curve("interactive")


# -- where throughput peaks


def test_peak_that_is_no_faster() -> None:
    assert peak_sentences(curve(step(8, 900), step(16, 1225), step(24, 1234), step(32, 1100))) == [
        "Throughput of completed requests peaks at 1,234 tok/s at 24, but is no faster than at 16 "
        "(1,225 tok/s)."
    ]


def test_peak_nearly_reached_before_is_not_called_no_faster() -> None:
    assert peak_sentences(curve(step(8, 900), step(16, 1190), step(24, 1234), step(32, 1100))) == [
        "Throughput of completed requests peaks at 1,234 tok/s at 24; 96.4 % of that is reached at 16 "
        "already."
    ]


def test_repeats_whose_intervals_overlap_are_no_faster() -> None:
    rows = [
        step(at, x, repeat=repeat)
        for at, values in {16: (1150, 1190, 1230), 24: (1190, 1234, 1278), 32: (1000, 1001, 1002)}.items()
        for repeat, x in enumerate(values, 1)
    ]
    assert peak_sentences(curve(*rows)) == [
        "Throughput of completed requests peaks at 1,234 tok/s at 24, but is no faster than at 16 "
        "(1,190 tok/s)."
    ]


def test_sharp_peak() -> None:
    assert peak_sentences(curve(step(8, 900), step(24, 1234), step(32, 1100))) == [
        "Throughput of completed requests peaks at 1,234 tok/s at 24."
    ]


def test_peak_beyond_what_was_measured() -> None:
    assert peak_sentences(curve(step(8, 500), step(16, 900), step(32, 1234))) == [
        "Throughput of completed requests still rises at 32, the highest concurrency measured: 1,234 tok/s, "
        "after at most 900 at 16. Where it peaks was not seen."
    ]


def test_nothing_completed_is_no_peak() -> None:
    assert peak_sentences(curve(step(8, 0, rejected=600), step(16, 0, rejected=600))) == [
        "No request completed at any concurrency measured."
    ]


def test_one_step_has_no_peak() -> None:
    assert peak_sentences(curve(step(8, 500))) == []


def test_peak_at_top_without_a_rise_is_a_peak() -> None:
    assert peak_sentences(curve(step(16, 1200), step(32, 1234)))[0].startswith(
        "Throughput of completed requests peaks at 1,234 tok/s at 32; 97.2 % of that"
    )


# -- the peak is no place to work at


def test_peak_above_the_limit_that_sheds() -> None:
    model = data("m", 16, 32, [step(16, 900), step(32, 1234, rejected=42)])
    assert limit_and_peak_sentences(model, "interactive") == [
        "The peak is not a safe place to work: the safe limit is 16, and it sheds 7 % at 32 (n 600)."
    ]


def test_peak_below_the_limit_is_not_warned_of() -> None:
    model = data("m", 32, 64, [step(16, 1234), step(32, 1000), step(64, 900, rejected=42)])
    assert limit_and_peak_sentences(model, "interactive") == []


def test_peak_above_the_limit_that_holds_is_not_called_unsafe() -> None:
    model = data("m", 16, None, [step(16, 900), step(32, 1234)], status="lower_bound")
    assert limit_and_peak_sentences(model, "interactive") == []


def test_no_limit_no_warning() -> None:
    model = data("m", None, 16, [step(16, 900), step(32, 1234, rejected=42)])
    assert limit_and_peak_sentences(model, "interactive") == []
    assert first_failure_sentences(model, "interactive") == []


# -- what fails first


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        ({"rejected": 42}, "Above the limit, it sheds 7 % at 32 (n 600)."),
        ({"connection_lost": 12}, "Above the limit, 2 % lose their connection at 32 (n 600)."),
        (
            {"deadline_exceeded": 120},
            "Above the limit, 20 % are not done within 60 s at 32 (n 600).",
        ),
        (
            {"rejected": 60, "connection_lost": 30},
            "Above the limit, it sheds 10 % and 5 % lose their connection at 32 (n 600).",
        ),
        (
            {"rejected": 100, "connection_lost": 5},
            "Above the limit, it sheds 16.7 % at 32 (n 600).",
        ),
        (
            {"ttft_p95_s": 3.4},
            "Above the limit, the p95 first token takes 3.4 s at 32, objective 1.0 s (n 600 completed).",
        ),
    ],
)
def test_first_failure(failing: dict[str, Any], sentence: str) -> None:
    model = data("m", 16, 32, [step(16, 900), step(32, 950, **failing), step(64, 950, rejected=500)])
    assert first_failure_sentences(model, "interactive") == [sentence]


def test_failures_within_the_floor_are_no_failure() -> None:
    model = data("m", 16, 32, [step(16, 900), step(32, 950, rejected=6)])
    assert first_failure_sentences(model, "interactive") == []


# -- wasted work


def test_waste() -> None:
    assert waste_sentences(curve(step(8, 900), step(32, 1000, raw_output_tok_per_s=1100.0, rejected=42))) == [
        "At 32 the server generates 1,100 tok/s, of which 1,000 reach a completed request: 9.1 % is work for "
        "requests that fail (n 600)."
    ]


def test_a_gap_of_one_percent_is_not_waste() -> None:
    assert waste_sentences(curve(step(8, 900), step(32, 1000, raw_output_tok_per_s=1010.0))) == []


# -- the server's own metrics


def test_server_full() -> None:
    busy = {"server_running_peak": 16.0, "server_kv_use_peak": 0.43, "server_preemptions": 0.0}
    assert server_sentences(
        curve(
            step(8, 900, server_running_peak=8.0, server_waiting_mean=0.0, server_kv_use_peak=0.2),
            step(16, 900, server_waiting_mean=0.1, **busy),
            step(32, 900, server_waiting_mean=15.9, **busy),
        )
    ) == [
        "The server never ran more than 16 requests at once; at 32 on average 15.9 more were waiting.",
        "The KV cache was not seen full: its use peaked at 43 %, at 16.",
    ]


def test_server_metrics_that_are_unknown_say_nothing() -> None:
    assert server_sentences(curve(step(8, 900), step(16, 900))) == []


def test_kv_full_and_preemptions() -> None:
    assert server_sentences(curve(step(8, 900, server_kv_use_peak=0.998, server_preemptions=14.0))) == [
        "The KV cache was full: its use peaked at 99.8 %, at 8.",
        "Requests were preempted: 14 times at 8.",
    ]


# -- across models


def steady(**more: Any) -> ModelData:
    return data("steady", 22, 24, [step(16, 1000), step(22, 1100), step(32, 1150, ttft_p95_s=2.0)], **more)


def sprinter(**more: Any) -> ModelData:
    return data("sprinter", 8, 9, [step(8, 1200), step(16, 1500), step(32, 1600, rejected=42)], **more)


def test_higher_peak_lower_limit() -> None:
    assert fleet_sentences([steady(), sprinter()]) == [
        "sprinter has more raw throughput than steady (1,600 vs 1,150 tok/s at their peaks), yet its safe "
        "interactive limit is lower (8 vs 22): it sheds 7 % at 32 (n 600)."
    ]


def test_higher_limit_that_is_a_lower_bound_says_at_least() -> None:
    (sentence,) = fleet_sentences([steady(status="lower_bound"), sprinter()])
    assert "interactive limit is lower (8 vs at least 22): it sheds 7 % at 32" in sentence


@pytest.mark.parametrize(
    "models",
    [
        [steady()],
        [steady(), sprinter(accelerator={"kind": "MI325X", "count": 8})],
        [steady(), sprinter(accelerator={"kind": "H100", "count": 4})],
        [steady(), sprinter(classes={"interactive": {**RULE, "deadline_s": 30.0}})],
        [steady(), sprinter(classes={"interactive": {**RULE, "workload": {"name": "other"}}})],
        [steady(status="rejected"), sprinter()],
        [steady(measured="shared"), sprinter()],
        # brackets that overlap
        [steady(), data("sprinter", 20, 24, [step(20, 1200), step(32, 1600, rejected=42)])],
        # a peak that is only 2 % higher
        [steady(), data("sprinter", 8, 9, [step(8, 1000), step(32, 1170, rejected=42)])],
        # the faster one also has the higher limit
        [steady(), data("sprinter", 30, 32, [step(30, 1500), step(32, 1600, rejected=42)])],
    ],
    ids=["one", "card", "count", "deadline", "workload", "status", "shared", "overlap", "close", "higher"],
)
def test_higher_peak_lower_limit_is_not_said(models: list[ModelData]) -> None:
    assert fleet_sentences(models) == []


def test_without_a_measured_cause_none_is_given() -> None:
    calm = data("sprinter", 8, 9, [step(8, 1600), step(4, 900)])
    assert fleet_sentences([steady(), calm]) == [
        "sprinter has more raw throughput than steady (1,600 vs 1,150 tok/s at their peaks), yet its safe "
        "interactive limit is lower (8 vs 22)."
    ]


def test_choice_by_completed_requests_at_the_limit() -> None:
    assert choice_sentences([steady(), sprinter()]) == [
        "interactive: sprinter completes the most at its limit, 6.00 requests/s at 8 in flight (n 600); "
        "then steady (5.50 at 22)."
    ]


def test_choice_does_not_rank_what_cannot_be_told_apart() -> None:
    (fast,) = (row for row in sprinter().steps.to_dict("records") if row["concurrency"] == 8)
    rows = [{**fast, "request_per_s_low": 5.4, "request_per_s_high": 6.6}]
    slow = [step(22, 1100, request_per_s_low=5.1, request_per_s_high=5.9)]
    assert choice_sentences([data("steady", 22, 24, slow), data("sprinter", 8, 9, rows)]) == [
        "interactive: sprinter completes the most at its limit, 6.00 requests/s at 8 in flight (n 600); "
        "then steady (5.50 at 22, which is too close to it to be told apart)."
    ]


def test_choice_names_who_is_left_out_and_why() -> None:
    """One model that may not be compared takes the order of the others from nobody."""
    slow = {**RULE, "ttft": {"at_most_s": 3.0, "share": 0.95}}
    models = [
        steady(),
        sprinter(),
        data("giant", 4, 5, [step(4, 400)], classes={"interactive": slow}),
        data("other", 4, 5, [step(4, 400)], accelerator={"kind": "MI325X", "count": 8}),
        data("open", 4, None, [step(4, 400)], status="lower_bound"),
    ]
    assert choice_sentences(models) == [
        "interactive: sprinter completes the most at its limit, 6.00 requests/s at 8 in flight (n 600); "
        "then steady (5.50 at 22). Not compared with these: giant (other objectives or workload), "
        "other (another accelerator) and open (no proven limit)."
    ]


def test_each_accelerator_has_its_own_choice() -> None:
    there = {"kind": "MI325X", "count": 8}
    models = [
        steady(),
        sprinter(),
        data("a", 4, 5, [step(4, 400)], accelerator=there),
        data("b", 8, 9, [step(8, 800)], accelerator=there),
    ]
    first, second = choice_sentences(models)
    assert first.startswith("interactive: sprinter completes the most")
    assert second == (
        "interactive: b completes the most at its limit, 4.00 requests/s at 8 in flight (n 600); then a "
        "(2.00 at 4). Not compared with these: steady (another accelerator) and sprinter (another "
        "accelerator)."
    )


@pytest.mark.parametrize(
    "models",
    [
        [steady()],
        [steady(), sprinter(status="lower_bound")],
        [steady(), sprinter(accelerator={"kind": "MI325X", "count": 8})],
    ],
)
def test_choice_needs_two_proven_limits_on_one_accelerator(models: list[ModelData]) -> None:
    assert choice_sentences(models) == []


# -- what changed


def test_changes_are_told_as_they_were_found() -> None:
    model = steady()
    assert changes(model) is None  # nobody compared
    model.compared = True
    model.limits[0]["change"] = {"verdict": "fell", "sentence": "interactive: the limit fell from 40 to 22."}
    assert changes(model) == ["interactive: the limit fell from 40 to 22."]
    model.limits[0]["change"] = None
    assert changes(model) == ["interactive: this run gives no limit that could be compared."]
    model.limits[0]["measured"] = "shared"
    assert changes(model) == []


# -- what to do


@pytest.mark.parametrize(
    ("status", "limit", "fail", "expected"),
    [
        (
            "proven",
            22,
            24,
            "m, interactive: let at most 22 requests be in flight at the gateway, with its timeout at 60 s, "
            "and refuse or queue the rest there.",
        ),
        (
            "lower_bound",
            22,
            None,
            "m, interactive: nothing failed up to 22; extend the ladder (or the budget) to find where it "
            "does.",
        ),
        (
            "lower_bound",
            22,
            30,
            "m, interactive: this is a lower bound; give the search more time to settle what lies between 22 "
            "and 30.",
        ),
        (
            "rejected",
            None,
            None,
            "m, interactive: mend what the quality findings below name, and measure again.",
        ),
    ],
)
def test_actions(status: str, limit: int | None, fail: int | None, expected: str) -> None:
    model = data("m", limit, fail, [step(22, 900)], status=status)
    assert expected in actions(model)
    assert any("let at most" in sentence for sentence in actions(model)) == (limit is not None)
