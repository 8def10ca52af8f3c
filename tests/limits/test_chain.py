"""Properties that hold from the request rows through evidence to the limits, whatever the rows are."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.limits.compute import compute_limits
from include.capacity.limits.evidence import evidence_of_sweep
from include.capacity.limits.planner import Problem, ladder_steps
from include.capacity.results.schema import STEP_COLUMNS, Facts
from tests.limits.test_compute import sweep_json
from tests.limits.test_evidence import facts, rows
from tests.limits.virtual import service_class

LADDER = [4, 8]
REQUESTS = 630
NO_STEPS = pd.DataFrame(columns=list(STEP_COLUMNS))


def asked(repeats: int, **changes: Any) -> Problem:
    """Steps as given; without the cap at the latency knee, which is a matter of delays and not of passes."""
    usual = {"ladder": LADDER, "cap_at_latency_knee": False, **changes}
    return Problem(model="m", classes={"interactive": service_class(**usual)}, mode="exact", repeats=repeats)


def measured(problem: Problem, missed: list[dict[int, str]]) -> tuple[dict[str, Facts], pd.DataFrame]:
    """Facts and rows of all steps. ``missed``: of each step, request -> ``failed`` or ``late``."""
    known: dict[str, Facts] = {}
    tables = []
    for spec, bad in zip(ladder_steps(problem), missed, strict=True):
        table = rows(REQUESTS, step=spec.key, worker=0)
        table.loc[[at for at, how in bad.items() if how == "late"], "ttft_s"] = 1.5
        table.loc[[at for at, how in bad.items() if how == "failed"], "outcome"] = "server_error"
        known[spec.key] = facts(spec)
        tables.append(table)
    return known, pd.concat(tables, ignore_index=True)


def limits(problem: Problem, known: dict[str, Facts], table: pd.DataFrame) -> dict[str, Any]:
    """The entry of the class, of everything from rows to limits.json."""
    found = evidence_of_sweep(known, table, problem.classes)
    (entry,) = compute_limits(sweep_json(problem), found, NO_STEPS, None)["limits"]
    return entry


def number(problem: Problem, missed: list[dict[int, str]]) -> int:
    return limits(problem, *measured(problem, missed))["limit"] or 0


@st.composite
def misses(draw: st.DrawFn, steps: int) -> list[dict[int, str]]:
    """What each step's requests missed: single ones, and bursts, around what decides a step."""
    found = []
    for _ in range(steps):
        at = draw(st.lists(st.integers(0, REQUESTS - 1), max_size=draw(st.sampled_from([0, 3, 12]))))
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, REQUESTS - 1))
            at += range(start, min(REQUESTS, start + draw(st.integers(1, 25))))
        how = draw(st.sampled_from(["failed", "late"]))
        found.append(dict.fromkeys(at, how))
    return found


@st.composite
def better_and_worse(draw: st.DrawFn, levels: int) -> tuple[int, list[dict[int, str]], list[dict[int, str]]]:
    """(repeats, what was missed, the same with some of it mended)."""
    repeats = draw(st.integers(1, 2))
    worse = draw(misses(levels * repeats))
    random = Random(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    better = []
    for bad in worse:
        # a few of them, or many; what had failed may now be late only
        mended = random.sample(sorted(bad), min(len(bad), 1 + round(share * len(bad))))
        kept = {at: how for at, how in bad.items() if at not in mended}
        better.append(kept | dict.fromkeys(mended[: random.randrange(2)], "late"))
    return repeats, worse, better


@given(better_and_worse(len(LADDER)))
@settings(max_examples=15, deadline=None)
def test_more_passes_never_lower_a_limit_and_more_failures_never_raise_one(case) -> None:
    repeats, worse, better = case
    problem = asked(repeats)
    assert number(problem, better) >= number(problem, worse)


@given(st.integers(0, 600), st.integers(3, 25), st.sets(st.integers(0, REQUESTS - 1), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_nor_do_they_the_bounds_that_a_limit_is_published_with(start: int, length: int, single) -> None:
    """Of a burst and single failures the single ones are mended: what is left looks more clustered."""
    lax = asked(1, ladder=[64], completion_floor=0.5, ttft={"at_most_s": 1.0, "share": 0.5})
    burst = dict.fromkeys(range(start, start + length), "failed")
    worse, better = ({**burst, **dict.fromkeys(single, "failed")}, burst)
    before, after = (limits(lax, *measured(lax, [missed]))["evidence"] for missed in (worse, better))
    for bound in ("completion_lower", "objective_lower"):
        assert after[bound] >= before[bound] - 1e-12


@given(misses(2 * len(LADDER)), st.integers(0, 10**6), st.sampled_from([1e-3, 1 / 60, 1000.0]))
@settings(max_examples=8, deadline=None)
def test_row_order_worker_split_and_time_unit_change_nothing(missed, seed: int, unit: float) -> None:
    random, problem = Random(seed), asked(repeats=2)
    known, table = measured(problem, missed)
    before = limits(problem, known, table)

    shuffled = table.iloc[random.sample(range(len(table)), len(table))]
    assert limits(problem, known, shuffled) == before

    split = table.assign(worker=[random.randrange(4) for _ in range(len(table))])
    merged = pd.concat([split[split["worker"] == worker] for worker in range(4)], ignore_index=True)
    assert limits(problem, known, merged) == before

    scaled = table.assign(**{name: table[name] * unit for name in TIMES})
    other = asked(repeats=2, deadline_s=60 * unit, ttft={"at_most_s": 1.0 * unit, "share": 0.95})
    after = limits(other, {key: _scaled(one, unit) for key, one in known.items()}, scaled)
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}


SAME = ["limit", "status", "bound_by", "bracket", "first_failing", "operating_range", "best_estimate"]
TIMES = ["started_s", "deadline_s", "ttft_s", "last_token_s", "e2e_s"]


def _scaled(known: Facts, unit: float) -> Facts:
    loads = [
        replace(load, window_start_s=load.window_start_s * unit, window_s=load.window_s * unit)
        for load in known.loads
    ]
    return replace(known, loads=loads)
