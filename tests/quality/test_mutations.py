"""Clean made sweeps pass; with one thing made wrong, the check meant for it says so.

Every mutation starts from the same clean sweep, whose own verdict is asserted beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from include.capacity.quality import check_sweep
from include.capacity.quality.check import judge
from include.capacity.quality.measures import measure
from include.capacity.results.schema import REQUEST_SCHEMA, Facts
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from tests.quality.made import Made, Server, sweep

PROVE = "prove-interactive-c00014-r1"
SCOUT = "scout-interactive-c00004-r1"
OTHER = "scout-interactive-c00016-r1"


def rows_of(made: Made, key: str) -> pd.Series:
    return made.requests["step"] == key


# -- mutations: each changes ``made`` in place


def drop_requests(made: Made) -> None:
    """Every fifth row of a step is lost."""
    at = made.requests.index[rows_of(made, PROVE)]
    made.requests = made.requests.drop(at[::5]).reset_index(drop=True)


def write_rows_twice(made: Made) -> None:
    made.requests = pd.concat([made.requests, made.requests[rows_of(made, PROVE)]], ignore_index=True)


def cap_the_pool(made: Made) -> None:
    """The connection pool held 10 where 14 were asked for."""
    made.facts[PROVE].loads[0].inflight_mean = 10.0


def stall_the_client(made: Made) -> None:
    """The client needs as long to refill a slot as the server for a tenth of an answer."""
    at = rows_of(made, PROVE)
    made.requests.loc[at, "refill_s"] += 0.15 * made.requests.loc[at, "e2e_s"].mean()


def reuse_prompts(made: Made) -> None:
    """The server has seen the prompts: it takes six tenths of them from its cache."""
    made.facts[OTHER].server["server_prefix_hit_share"] = 0.6
    made.requests.loc[rows_of(made, OTHER), "ttft_s"] *= 0.6


def cut_the_warm_up(made: Made) -> None:
    """The first requests of the window meet a cold server: first tokens take five times as long."""
    at = made.requests.index[rows_of(made, PROVE) & made.requests["counted"]][:60]
    late = 4 * made.requests.loc[at, "ttft_s"]
    for name in ("ttft_s", "last_token_s", "e2e_s"):
        made.requests.loc[at, name] += late


def slow_down(made: Made, by: float = 0.35) -> None:
    """The server gets steadily slower."""
    at = made.requests.index[rows_of(made, PROVE) & made.requests["counted"]]
    factor = 1 + by * np.linspace(0, 1, len(at))
    for name in ("ttft_s", "last_token_s", "e2e_s"):
        made.requests.loc[at, name] *= factor


def break_down(made: Made) -> None:
    slow_down(made, by=1.0)


def truncate_streams(made: Made) -> None:
    """Answers end at a third of what was asked for."""
    at = rows_of(made, PROVE)
    made.requests.loc[at, "output_tokens"] = (made.requests.loc[at, "asked_max_tokens"] // 3).clip(lower=1)


def end_early(made: Made) -> None:
    """Answers end at 100 of 128 tokens."""
    at = rows_of(made, PROVE)
    made.requests.loc[at, "output_tokens"] = (made.requests.loc[at, "asked_max_tokens"] * 100 // 128).clip(
        lower=1
    )


def duplicate_a_step(made: Made) -> None:
    """One step's files copied under another's name."""
    rows = made.requests[rows_of(made, SCOUT)].assign(step=OTHER, concurrency=16)
    made.requests = pd.concat([made.requests[~rows_of(made, OTHER)], rows], ignore_index=True)
    made.facts[OTHER].loads[0] = copy.deepcopy(made.facts[SCOUT].loads[0])
    made.facts[OTHER].loads[0].concurrency = 16


def swap_labels(made: Made) -> None:
    """Two steps' files change places."""
    made.facts[SCOUT], made.facts[OTHER] = made.facts[OTHER], made.facts[SCOUT]


def relabel(made: Made) -> None:
    """What was measured at 16 is called 4, in rows and facts alike."""
    made.facts[OTHER].loads[0].concurrency = 4
    made.requests.loc[rows_of(made, OTHER), "concurrency"] = 4


def stale_file(made: Made) -> None:
    made.facts[PROVE].run_id = "run-of-last-week"


def foreign_traffic(made: Made) -> None:
    server = made.facts[PROVE].server
    server["server_running_mean"] = (server["server_running_mean"] or 0.0) + 4.0


def two_modes(made: Made) -> None:
    """Two fifths of the requests go to a replica that is six times slower."""
    at = made.requests.index[rows_of(made, PROVE)]
    slow = at[np.random.default_rng(0).random(len(at)) < 0.4]
    made.requests.loc[at, ["ttft_s", "e2e_s", "last_token_s"]] = [0.05, 0.055, 0.052]
    made.requests.loc[slow, ["ttft_s", "e2e_s", "last_token_s"]] = [0.97, 0.98, 0.975]


def no_usage(made: Made) -> None:
    made.requests.loc[rows_of(made, PROVE), "usage_estimated"] = True


def no_stream(made: Made) -> None:
    at = rows_of(made, PROVE)
    made.requests.loc[at, "streamed"] = False
    made.requests.loc[at, "ttft_s"] = np.nan


def wrong_prompts(made: Made) -> None:
    """1,127 tokens where 1,024 were meant."""
    at = rows_of(made, PROVE)
    made.requests.loc[at, "prompt_tokens"] = made.requests.loc[at, "asked_prompt_tokens"] * 1127 // 1024


def first_token_after_the_end(made: Made) -> None:
    at = made.requests.index[rows_of(made, PROVE)][:3]
    made.requests.loc[at, "ttft_s"] = made.requests.loc[at, "e2e_s"] + 1


def completed_without_a_token(made: Made) -> None:
    made.requests.loc[made.requests.index[rows_of(made, PROVE)][-3:], "output_tokens"] = 0


def backlog(made: Made) -> None:
    """The step's requests stood behind those of the step before."""
    for name in ("ttft_s", "last_token_s", "e2e_s"):
        made.requests.loc[rows_of(made, SCOUT), name] += 6.0


def slow_anchor(made: Made) -> None:
    """At the end of the sweep the server is a third slower than at its beginning."""
    for name in ("ttft_s", "last_token_s", "e2e_s"):
        made.requests.loc[rows_of(made, "anchor-interactive-c00004-r1"), name] *= 1.3


def delete_failed_repeats(made: Made) -> None:
    gone = "grid-interactive-c00008-r2"
    del made.facts[gone]
    made.requests = made.requests[~rows_of(made, gone)]


MUTATIONS: list[tuple[Callable[[Made], None], str, str, str]] = [
    (drop_requests, PROVE, "rows_accounted", "reject"),
    (write_rows_twice, PROVE, "duplicate_requests", "reject"),
    (cap_the_pool, PROVE, "concurrency_reached", "reject"),
    (stall_the_client, PROVE, "client_bound", "reject"),
    (reuse_prompts, OTHER, "prefix_cache", "flag"),
    (cut_the_warm_up, PROVE, "warm_up", "flag"),
    (slow_down, PROVE, "steady_state", "flag"),
    (break_down, PROVE, "steady_state", "reject"),
    (truncate_streams, PROVE, "output_length", "reject"),
    (end_early, PROVE, "output_length", "flag"),
    (duplicate_a_step, OTHER, "duplicate_step", "reject"),
    (swap_labels, SCOUT, "labels_agree", "reject"),
    (relabel, OTHER, "concurrency_exceeded", "reject"),
    (stale_file, PROVE, "stale_result", "reject"),
    (foreign_traffic, PROVE, "foreign_traffic", "reject"),
    (two_modes, PROVE, "bimodal_latency", "flag"),
    (no_usage, PROVE, "tokens_estimated", "flag"),
    (no_stream, PROVE, "not_streamed", "flag"),
    (wrong_prompts, PROVE, "prompt_length", "flag"),
    (first_token_after_the_end, PROVE, "request_order", "reject"),
    (completed_without_a_token, PROVE, "request_ranges", "reject"),
    (backlog, SCOUT, "latency_falls", "flag"),
]


def judged_together(sweeps: dict[str, Made]) -> dict[str, Any]:
    """Many sweeps judged in one go (a suite costs a second however many rows it has): their names are
    in ``series`` and before the step keys."""
    steps, curves, rows = [], [], []
    for name, made in sweeps.items():
        judged, series = measure(made.steps, made.requests, made.sweep_json)
        steps.append(judged.assign(series=name, step=name + "/" + judged["step"]))
        curves.append(series.assign(series=name))
        rows.append(made.requests.assign(step=name + "/" + made.requests["step"]))
    all_steps, all_curves = pd.concat(steps, ignore_index=True), pd.concat(curves, ignore_index=True)
    all_steps["row"], all_curves["row"] = range(len(all_steps)), range(len(all_curves))
    return judge(all_steps, all_curves, pd.concat(rows, ignore_index=True))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The clean sweep and every mutation of it, judged."""
    clean, exact = sweep(1), sweep(3, mode="exact", ladder=(4, 8), repeats=3)
    sweeps = {"clean": clean, "exact": exact}
    for mutate, *_ in MUTATIONS:
        sweeps[mutate.__name__] = copy.deepcopy(clean)
        mutate(sweeps[mutate.__name__])
    for mutate, start in ((slow_anchor, clean), (delete_failed_repeats, exact)):
        sweeps[mutate.__name__] = copy.deepcopy(start)
        mutate(sweeps[mutate.__name__])
    return judged_together(sweeps)


def findings(results: dict[str, Any], series: str) -> list[tuple[str, str, str]]:
    """(step or blank, check, severity) of all findings in one sweep."""
    found = [("", f["check"], f["severity"]) for f in results["findings"] if f["series"] == series]
    for step in results["steps"]:
        if step["series"] == series:
            key = step["key"].removeprefix(series + "/")
            found += [(key, f["check"], f["severity"]) for f in step["findings"]]
    return found


@pytest.mark.parametrize(
    ("mutate", "key", "check", "severity"), MUTATIONS, ids=[m[0].__name__ for m in MUTATIONS]
)
def test_what_is_made_wrong_is_caught_by_the_check_meant_for_it(mutate, key, check, severity, results):
    assert findings(results, "clean") == []
    assert (key, check, severity) in findings(results, mutate.__name__)


def test_an_anchor_that_is_slower_rejects_the_sweep(results):
    assert findings(results, "clean") == []
    assert ("", "anchor_agrees", "reject") in findings(results, "slow_anchor")
    assert results["verdict"] == "reject"


def test_deleting_the_repeats_that_failed_is_seen(results):
    assert findings(results, "exact") == []
    assert findings(results, "delete_failed_repeats") == [("", "repeats_missing", "flag")]


def test_a_sweep_directory_is_judged_from_its_files_and_keeps_the_results(tmp_path):
    folder, clean = SweepDir(FolderStore(tmp_path)), sweep(1)
    folder.write_json("sweep.json", clean.sweep_json)
    for key, facts in clean.facts.items():
        rows = clean.requests[rows_of(clean, key)][list(REQUEST_SCHEMA.names)]
        folder.write_step(
            key,
            Facts.from_json(facts.to_json()),
            pa.Table.from_pandas(rows, REQUEST_SCHEMA, preserve_index=False),
        )
    result = check_sweep(folder)
    assert result == folder.read_json("quality.json")
    assert result["verdict"] == "ok"
    assert result["steps"][0]["key"] == "baseline-interactive-c00001-r1"
    assert set(result["gx"]) == {"requests", "steps", "series"}
    assert result["gx"]["steps"]["success"] is True
    assert "repeats_missing" in {entry["check"] for entry in result["not_checked"]}


def clean_sweeps(seeds: range) -> list[tuple[str, str, str]]:
    """Findings in sweeps of healthy servers of all sizes, a fifth of which refuse what they cannot take."""
    sweeps = {}
    for seed in seeds:
        rng = np.random.default_rng(10_000 + seed)
        slots = int(rng.choice([4, 8, 16, 32]))
        server = Server(
            slots=slots,
            prefill_s=float(rng.choice([5e-5, 1e-4, 4e-4])),
            pace_s=float(rng.uniform(0.005, 0.04)),
            crowding=float(rng.uniform(0, 3)),
            noise=float(rng.uniform(0.02, 0.2)),
            wander=float(rng.uniform(0, 0.05)),
            queue=slots // 2 if seed % 5 == 0 else None,
        )
        stream = seed % 2 == 0
        if seed % 3 == 2:
            ladder: tuple[int, ...] = (slots // 2, slots, 2 * slots)
            made = sweep(seed, server, ladder=ladder, mode="exact", repeats=2, stream=stream)
        else:
            ladder = tuple(sorted({4, slots // 2, slots, 2 * slots, 4 * slots}))
            made = sweep(
                seed, server, ladder=ladder, proofs=(slots, slots + max(1, slots // 5)), stream=stream
            )
        sweeps[f"sweep {seed}"] = made
    result = judged_together(sweeps)
    return [(name, *finding) for name in sweeps for finding in findings(result, name)]


def test_clean_sweeps_are_left_alone():
    assert clean_sweeps(range(12)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_most_one_clean_sweep_in_a_hundred_has_a_finding():
    noisy = {name for name, *_ in clean_sweeps(range(200))}
    assert len(noisy) <= 2, noisy
