"""The limits against the truth, a small everyday share of ``tests.benchmarks.bench_limits``."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.benchmarks import bench_limits, bench_rows, truth
from tests.benchmarks.bench_limits import Found, FoundPair, summary
from tests.benchmarks.servers import FAMILIES, generate

SERVERS = generate(truth.PER_FAMILY, truth.SERVER_SEED)
BY_NAME = {server.name: server for server in SERVERS}
TRUTHS = truth.kept(SERVERS)
KEPT = json.loads(truth.KEPT.read_text())["truths"]

EVERYDAY = [server for server in SERVERS if int(server.name[-2:]) in (4, 5)][:12]
"""One interactive and one batch server of the first six families."""


def test_there_are_enough_servers_and_a_truth_for_each():
    assert len(SERVERS) >= 200
    assert {server.family for server in SERVERS} == set(FAMILIES)
    assert set(TRUTHS) == set(BY_NAME)
    for trait, least, most in (
        ("stalls", 90, 134),
        ("drift", 90, 134),
        ("correlated", 55, 100),
        ("mixed", 55, 100),
    ):
        assert least <= sum(trait in server.traits for server in SERVERS) <= most, trait
    within = [TRUTHS[server.name] for server in SERVERS if server.family != "none"]
    assert np.quantile(within, [0.1, 0.9]) == pytest.approx([8, 250], rel=0.6)


@pytest.mark.parametrize(
    "name",
    [
        "slots-interactive-04",
        "kv-interactive-04",
        "compute-batch-05",
        "deadline-interactive-04",
        "crash-batch-05",
    ],
)
def test_brute_force_gives_the_kept_truth_again(name):
    kept, server = KEPT[name], BY_NAME[name]
    above, *shares_above = kept["above"]
    assert truth.shares(server, kept["limit"]) == pytest.approx(kept["at"], abs=1e-4)
    assert truth.shares(server, above) == pytest.approx(shares_above, abs=1e-4)
    service = server.service_class
    share = service.ttft.share if service.ttft else 0.0
    assert kept["at"][0] >= service.completion_floor
    assert kept["at"][1] >= share
    assert shares_above[0] < service.completion_floor or shares_above[1] < share


def test_truths_of_other_servers_are_refused():
    with pytest.raises(ValueError, match="compute their truths again"):
        truth.kept(generate(truth.PER_FAMILY, truth.TUNE_SEED))


@pytest.fixture(scope="module")
def everyday() -> list[Found]:
    return [bench_limits.ours(server, TRUTHS[server.name], bench_limits.SWEEP_SEED) for server in EVERYDAY]


def test_no_limit_is_above_the_truth_by_more_than_one_bracket(everyday):
    assert len(everyday) == 12
    assert [f"{one.server} {one.limit} > {one.truth}: {one.steps}" for one in everyday if one.far_above] == []


def test_limits_are_found_and_near_the_truth(everyday):
    # Two of the twelve are so slow that the default cap of a proof ends it: they say so and give no limit.
    without = [one.status for one in everyday if one.limit is None]
    assert len(without) <= 2
    assert set(without) <= {"insufficient_evidence"}
    assert np.median([one.shortfall for one in everyday]) <= 0.12


def found(limit: int | None, true: int) -> Found:
    return Found(
        server="s",
        family="slots",
        class_name="batch",
        traits=(),
        truth=true,
        limit=limit,
        status="proven",
        requests=100,
        hours=0.5,
    )


def test_the_tables_arithmetic():
    rows = [found(100, 100), found(105, 100), found(106, 100), found(80, 100), found(None, 100)]
    assert [one.above for one in rows] == [False, True, True, False, False]
    assert [one.far_above for one in rows] == [False, False, True, False, False]
    assert [one.shortfall for one in rows] == pytest.approx([0, 0, 0, 0.2, 1.0])
    assert [found(9, 8).far_above, found(10, 8).far_above] == [False, True]
    assert math.isnan(found(1, 0).shortfall)
    assert found(1, 0).above
    line = summary(rows)
    assert (line.n, line.limits) == (5, 4)
    assert (line.above, line.far_above) == (0.5, 0.25)
    assert line.median == 0.0
    assert line.p90 == pytest.approx(0.68)


def test_a_missed_target_is_told_and_a_met_one_passes(capsys):
    dear = replace(found(100, 100), requests=200)
    good = {"ours": [found(100, 100)], "fixed evidence": [dear], "fixed 600": [dear]}
    bad = {"ours": [found(110, 100)], "fixed evidence": [dear], "fixed 600": [found(100, 100)]}
    right = FoundPair("p", {"a": 9, "b": 4}, {"a": 10, "b": 5}, False, False, 100, 0.5)
    wrong = replace(right, above=True)
    assert (right.limit, right.truth, round(right.shortfall, 3)) == (13, 15, 0.133)
    pairs, bad_pairs = {"proven together": [right]}, {"proven together": [right, wrong]}
    assert all(value <= most for _, value, most in bench_limits.targets(good, pairs))
    assert bench_limits.verdict(good, pairs) is True
    assert bench_limits.verdict(good, bad_pairs) is False
    assert "MISS proven pairs above the truth: 0.500 (at most 0.050)" in capsys.readouterr().out
    missed = [what for what, value, most in bench_limits.targets(bad, pairs) if value > most]
    assert missed == [
        "limits above the truth",
        "above by more than one bracket",
        "requests / those of fixed 600",
    ]


def test_made_up_rows_give_limits(tmp_path):
    bench_rows.write_sweep(tmp_path, 40_000)
    assert bench_rows.judge(tmp_path)["limits"] == 2
