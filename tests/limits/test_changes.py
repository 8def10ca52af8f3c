"""When a limit has changed, how sure that is, and what it is attributed to."""

from __future__ import annotations

from typing import Any

import pytest

from include.capacity.limits.changes import change, changes, comparable, stack_changes, strong

Limit = dict[str, Any]


def limit(at: int | None, first_fail: int | None = None, **more: Any) -> Limit:
    """A limit proven by 600 requests; ``fails``: (concurrency, completed of 600) of its first failure."""
    fails = more.pop("fails", None)
    return {
        "class": "interactive",
        "measured": "alone",
        "limit": at,
        "status": "proven" if at else "no_passing_step",
        "bracket": [at, first_fail if first_fail or not at else at + 1],
        "deadline_s": 60.0,
        "completion_floor": 0.99,
        "objectives": {"ttft": {"at_most_s": 1.0, "share": 0.95}},
        "cap_at_latency_knee": True,
        "comparison_id": "cmp",
        "evidence": {
            "concurrency": at,
            "n": 600,
            "completed": 600,
            "objective_met": 600,
            "n_effective": 600.0,
        }
        if at
        else None,
        "failing": {
            "concurrency": fails[0],
            "n": 600,
            "completed": fails[1],
            "objective_met": None,
            "n_effective": 300.0,
        }
        if fails
        else None,
        "stack_id": "a",
        "stack": {"vllm_version": "0.32"},
        **more,
    }


def nights(*limits: Limit) -> list[Limit]:
    return [
        {**one, "run_id": f"r{at}", "measured_at": f"2026-11-{1 + at:02d}T01:00:00+00:00"}
        for at, one in enumerate(limits)
    ]


def verdicts(*limits: Limit) -> list[str | None]:
    return [found["verdict"] if found else None for found in changes(nights(*limits))]


def test_the_first_run_has_nothing_before_it() -> None:
    assert change([], nights(limit(24))[0]) == {
        "verdict": "first",
        "was": None,
        "was_bracket": None,
        "since_run": None,
        "since": None,
        "confirmed_by": None,
        "stack": None,
        "stack_changes": [],
        "sentence": "interactive: there is no earlier comparable run.",
    }


@pytest.mark.parametrize("now", [22, 24, 26])
def test_what_two_searches_of_one_server_may_differ_by_is_no_change(now: int) -> None:
    assert verdicts(limit(24), limit(now), limit(now), limit(now)) == ["first", "same", "same", "same"]


def test_overlapping_brackets_are_no_change() -> None:
    assert verdicts(limit(20, 26), limit(26, 28)) == ["first", "may_have_risen"]
    assert verdicts(limit(20, 27), limit(26, 28)) == ["first", "same"]
    assert verdicts(limit(20, None), limit(16, None, status="lower_bound", bracket=[16, None])) == [
        "first",
        "same",
    ]


def test_a_lower_limit_that_holds_twice_is_a_fall() -> None:
    assert verdicts(limit(24), limit(20), limit(20), limit(20)) == [
        "first",
        "may_have_fallen",
        "fell",
        "same",
    ]
    found = changes(nights(limit(24), limit(20), limit(21)))[-1]
    assert found is not None
    assert (found["was"], found["since_run"], found["confirmed_by"]) == (24, "r0", "repetition")
    assert found["sentence"] == (
        "interactive: the limit fell from 24 to 21 (−12 %) after run r0 (two runs in a row say so); "
        "the stack is the same."
    )


def test_one_low_night_is_no_fall() -> None:
    assert verdicts(limit(24), limit(20), limit(24), limit(20), limit(28)) == [
        "first",
        "may_have_fallen",
        "same",
        "may_have_fallen",
        "may_have_risen",
    ]


def test_strong_evidence_needs_no_second_night() -> None:
    found = changes(nights(limit(24), limit(16, 20, fails=(20, 480))))[-1]
    assert found is not None
    assert (found["verdict"], found["confirmed_by"]) == ("fell", "evidence")
    assert "fell from 24 to 16 (−33 %) after run r0 (the evidence is strong)" in found["sentence"]


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ((20, 480), True),  # 80 % against 100 %
        ((20, 580), True),  # 96.7 %: at most 98.75 % at 0.005; what held is at least 99.12 %
        ((20, 585), False),  # 97.5 %: at most 99.23 %
        ((24, 480), True),  # failed where the other held
        ((25, 480), False),  # failed above all that was proven: nothing to hold it against
        (None, False),
    ],
)
def test_what_strong_evidence_is(fails: tuple[int, int] | None, expected: bool) -> None:
    # Literal bounds from scipy.stats.beta.ppf: lower(600 of 600) = 0.99121;
    # upper(290 of 300) = 0.98750, upper(292.5 of 300) = 0.99228.
    assert strong(limit(24), limit(16, 20, fails=fails)) is expected


def test_objectives_count_like_completion() -> None:
    late = limit(16, 20, fails=(20, 600))
    assert strong(limit(24), late) is False
    late["failing"]["objective_met"] = 500
    assert strong(limit(24), late) is True


def test_a_rise() -> None:
    found = changes(nights(limit(20, fails=(24, 400)), limit(26)))[-1]
    assert found is not None
    assert found["sentence"].startswith("interactive: the limit rose from 20 to 26 (+30 %) after run r0")


def test_a_server_that_holds_nothing_any_more() -> None:
    found = changes(nights(limit(24), limit(None, 4, fails=(4, 100))))[-1]
    assert found is not None
    assert found["verdict"] == "fell"
    assert "fell from 24 to no passing step (−100 %)" in found["sentence"]


def test_runs_that_say_nothing_are_passed_over() -> None:
    nothing = [limit(24, status=status, bracket=[None, None]) for status in ("rejected", "not_measured")]
    assert verdicts(limit(24), *nothing, limit(20), nothing[0], limit(20)) == [
        "first",
        None,
        None,
        "may_have_fallen",
        None,
        "fell",
    ]


def test_a_slow_decline_is_measured_from_where_it_began() -> None:
    slow = [limit(at) for at in (40, 39, 38, 37, 36, 35, 34, 33, 32)]
    assert verdicts(*slow)[-3:] == ["may_have_fallen", "fell", "same"]


def test_one_lucky_night_is_no_level() -> None:
    assert verdicts(limit(24), limit(24), limit(30), limit(24), limit(24)) == [
        "first",
        "same",
        "may_have_risen",
        "same",
        "same",
    ]


def test_the_cause_is_sought_between_the_last_run_at_the_old_level_and_the_first_at_the_new() -> None:
    new = {"stack_id": "b", "stack": {"vllm_version": "0.33"}}
    newer = {"stack_id": "c", "stack": {"vllm_version": "0.34"}}
    before = changes(nights(limit(24), limit(20), limit(20, **new)))[-1]
    assert before is not None
    assert (before["stack"], before["stack_changes"]) == ("same", [])  # it fell before the stack changed
    found = changes(nights(limit(24), limit(24), limit(20, **new), limit(20, **newer)))[-1]
    assert found is not None
    assert found["sentence"] == (
        "interactive: the limit fell from 24 to 20 (−17 %) after run r1 (two runs in a row say so); "
        "the stack has changed: vllm version 0.32 -> 0.33."
    )
    unknown = changes(nights(limit(24, stack_id=None), limit(16, 20, fails=(20, 300))))[-1]
    assert unknown is not None
    assert unknown["stack"] == "unknown"
    assert unknown["sentence"].endswith("; what the stack was then or is now is not known.")


def test_what_differs_between_two_stacks() -> None:
    old = {
        "vllm_version": "0.32",
        "args": ["vllm", "serve", "--max-model-len", "8192", "--enforce-eager"],
        "env": {"A": "1"},
        "accelerators": [{"name": "H100", "driver": "550"}],
        "observed": {"kv_cache_tokens": 100},
    }
    new = {
        "vllm_version": "0.33",
        "args": ["vllm", "serve", "--max-model-len", "4096", "-tp", "2"],
        "env": {"A": "1", "B": "2"},
        "accelerators": [{"name": "H100", "driver": "560"}],
        "observed": {"kv_cache_tokens": 101},
    }
    assert stack_changes(old, new) == [
        "vllm version 0.32 -> 0.33",
        "args: without --max-model-len 8192, --enforce-eager and with --max-model-len 4096, -tp 2",
        "accelerators 1 driver 550 -> 560",
        "env B (none) -> 2",
    ]
    assert stack_changes(old, {**old, "observed": {}}) == []
    assert stack_changes(None, new) is None


def test_only_like_is_compared_with_like() -> None:
    def entry(run: str, day: int, *limits: Limit) -> dict[str, Any]:
        at = f"2026-11-{day:02d}T01:00:00+00:00"
        about = {"measured_at": at, "stack_id": "a", "stack": {}, "limits": list(limits)}
        return {"run_id": run, "published_at": at, "models": {"steady": about}}

    history = [
        entry("mine", 5, limit(24)),
        entry("later", 7, limit(24)),
        entry("second", 3, limit(22)),
        entry("first", 2, limit(23)),
        entry("deadline", 2, limit(23, deadline_s=30.0)),
        entry("workload", 2, limit(23, comparison_id="other")),
        entry("objective", 2, limit(23, objectives={"ttft": {"at_most_s": 2.0, "share": 0.95}})),
        entry("class", 2, limit(23, **{"class": "batch"})),
        entry("shared", 2, limit(23, measured="shared")),
    ]
    now = {**limit(24), "run_id": "mine", "measured_at": "2026-11-05T01:00:00+00:00"}
    assert [found["run_id"] for found in comparable(history, now, "steady")] == ["first", "second"]
    assert comparable(history, now, "sprinter") == []
    assert comparable(history, {**now, "comparison_id": None}, "steady") == []
