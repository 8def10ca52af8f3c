"""Replicas by hour, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from include.capacity.cli import main
from include.capacity.errors import ConfigError, DataError, NoLimit
from include.capacity.policy.replicas import (
    Capacity,
    Demand,
    plan,
    read_capacities,
    read_demand,
    refused_share,
    replicas_table,
)
from include.capacity.results.store import FolderStore, open_store
from tests.policy.made import about, entry, limits, pair
from tests.running import ACCESS_KEY, BUCKET, SECRET_KEY, nanio

CHAT = Capacity(limit=25, request_per_s=5.0, prompt_tokens=600, output_tokens=240)
BATCH = Capacity(limit=100, request_per_s=8.0, prompt_tokens=1700, output_tokens=18)
ALONE = {("steady", "interactive", "alone"): CHAT, ("steady", "batch", "alone"): BATCH}


def asked(hour: int, rate: float, name: str = "interactive", **more: Any) -> Demand:
    lengths = {"interactive": (600, 240), "batch": (1700, 18)}[name]
    row = {"hour": hour, "model": "steady", "class": name, "requests_per_s": rate}
    return Demand.model_validate({**row, "prompt_tokens": lengths[0], "output_tokens": lengths[1], **more})


def replicas(found: dict[str, Any]) -> list[int | None]:
    (model,) = found["models"]
    return [hour["replicas"] for hour in model["hours"]]


@pytest.mark.parametrize(
    ("rate", "headroom", "expected"),
    [
        (0.0, 0.2, 0),
        (0.1, 0.2, 1),
        (5.0, 0.0, 1),
        (5.0, 0.2, 2),
        (12.5, 0.2, 3),  # 15 / 5: exactly three
        (12.6, 0.2, 4),
        (100.0, 0.5, 30),
    ],
)
def test_replicas_of_one_class(rate: float, headroom: float, expected: int) -> None:
    found = plan([asked(0, rate)], ALONE, headroom)

    assert replicas(found)[0] == expected


def test_hours_without_a_row_are_unknown_not_idle() -> None:
    found = plan([asked(hour, 5.0, price_per_hour=2.5) for hour in range(23)], ALONE, 0.0)

    (model,) = found["models"]
    assert replicas(found) == [1] * 23 + [None]
    assert model["hours"][23]["missing"] == ["interactive"]
    assert (model["most"], model["replica_hours"], model["cost"]) == (1, None, None)
    assert "23  unknown: no row for interactive" in replicas_table(found)


def test_a_whole_day_with_prices() -> None:
    rows = [asked(hour, 20.0 if 8 <= hour < 18 else 0.0, price_per_hour=2.5) for hour in range(24)]

    found = plan(rows, ALONE, 0.2)

    (model,) = found["models"]
    assert replicas(found) == [0] * 8 + [5] * 10 + [0] * 6  # 24 / 5
    assert (model["most"], model["replica_hours"], model["cost"]) == (5, 50, 125.0)
    assert [hour["cost"] for hour in model["hours"]][7:9] == [0.0, 12.5]


def test_two_classes_on_servers_of_their_own() -> None:
    found = plan([asked(0, 12.5), asked(0, 16.0, "batch")], ALONE, 0.2)

    (model,) = found["models"]
    assert model["layout"] == "alone"
    assert model["hours"][0]["replicas"] == 3 + 3  # 15 / 5 and 19.2 / 8
    assert {name: one["replicas"] for name, one in model["hours"][0]["classes"].items()} == {
        "interactive": 3,
        "batch": 3,
    }


@pytest.mark.parametrize(("chat_rate", "layout", "expected"), [(4.0, "shared", 4), (1.0, "alone", 6)])
def test_a_shared_pair_is_used_where_it_saves_servers(chat_rate: float, layout: str, expected: int) -> None:
    together = {
        ("steady", "interactive", "shared"): Capacity(
            limit=15, request_per_s=chat_rate, prompt_tokens=600, output_tokens=240
        ),
        ("steady", "batch", "shared"): Capacity(
            limit=60, request_per_s=5.0, prompt_tokens=1700, output_tokens=18
        ),
    }

    found = plan([asked(0, 12.5), asked(0, 16.0, "batch")], ALONE | together, 0.2)

    (model,) = found["models"]
    assert (model["layout"], model["hours"][0]["replicas"]) == (layout, expected)


def test_refusals_by_erlangs_formula() -> None:
    # Table values: 10 erlangs on 10, 15 and 20 trunks.
    assert refused_share(10, 10.0) == pytest.approx(0.2146, abs=5e-5)
    assert refused_share(15, 10.0) == pytest.approx(0.0365, abs=5e-5)
    assert refused_share(20, 10.0) == pytest.approx(0.0019, abs=5e-5)
    assert refused_share(20, 0.0) == 0.0
    # Beyond the sum: the same at the border, no end of waiting above it.
    assert refused_share(10_001, 10_000.0) == pytest.approx(refused_share(10_000, 10_000.0), rel=2e-2)
    assert refused_share(10**9, 1e9) == pytest.approx(2.523e-5, rel=1e-3)  # sqrt(2 / (pi n))
    assert refused_share(10**9, 0.8e9) == 0.0

    found = plan([asked(0, 4.0)], ALONE, 0.2)  # one server: 25 places, 4 x 25 / 5 = 20 erlangs
    share = found["models"][0]["hours"][0]["classes"]["interactive"]["refused_share"]
    assert share == pytest.approx(refused_share(25, 20.0))


# -- refusals to plan


def test_other_lengths_are_refused_with_the_difference() -> None:
    with pytest.raises(NoLimit, match=r"hour 0: prompt_tokens 900 against 600 measured \(\+50%\)"):
        plan([asked(0, 1.0, prompt_tokens=900)], ALONE)
    with pytest.raises(NoLimit, match=r"output_tokens 120 against 240 measured \(-50%\)"):
        plan([asked(0, 1.0, output_tokens=120)], ALONE)
    assert replicas(plan([asked(0, 1.0, prompt_tokens=650, output_tokens=220)], ALONE))[0] == 1
    # Nothing is sent, so its lengths do not matter.
    assert replicas(plan([asked(0, 0.0, prompt_tokens=900)], ALONE))[0] == 0


def test_what_cannot_be_planned() -> None:
    with pytest.raises(
        DataError, match="demand for steady batch: there is no such limit; there are steady inter"
    ):
        plan([asked(0, 1.0, "batch")], {("steady", "interactive", "alone"): CHAT})
    with pytest.raises(NoLimit, match="steady interactive: no limit to plan with: it drifted"):
        plan([asked(0, 1.0)], {("steady", "interactive", "alone"): "it drifted"})
    with pytest.raises(ConfigError, match="price_per_hour"):
        plan([asked(0, 1.0, price_per_hour=1), asked(0, 1.0, "batch", price_per_hour=2)], ALONE)


# -- files

ROWS = "hour,model,class,requests_per_s,prompt_tokens,output_tokens,price_per_hour\n"


def test_csv_and_yaml_say_the_same(tmp_path: Path) -> None:
    table, tree = tmp_path / "demand.csv", tmp_path / "demand.yaml"
    table.write_text(ROWS + "0,steady,interactive,12.5,600,240,\n1,steady,interactive,0,600,240,2.5\n")
    tree.write_text(
        "- {hour: 0, model: steady, class: interactive, requests_per_s: 12.5, prompt_tokens: 600, "
        "output_tokens: 240}\n- {hour: 1, model: steady, class: interactive, requests_per_s: 0, "
        "prompt_tokens: 600, output_tokens: 240, price_per_hour: 2.5}\n"
    )

    assert read_demand(table) == read_demand(tree)
    assert [row.price_per_hour for row in read_demand(table)] == [None, 2.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROWS, "expected a list of rows"),
        (
            ROWS + "24,steady,interactive,1,600,240,\n",
            "row 1: hour: Input should be less than or equal to 23",
        ),
        (ROWS + "0,steady,interactive,-1,600,240,\n", "row 1: requests_per_s"),
        (ROWS + "0,steady,interactive,nan,600,240,\n", "row 1: requests_per_s"),
        (ROWS + "0,steady,interactive,1,,240,\n", "row 1: prompt_tokens"),
        (ROWS + 2 * "0,steady,interactive,1,600,240,\n", "hour 0 of steady interactive is given twice"),
        ("hour,model\n0,steady\n", "row 1: class: Field required"),
        (ROWS + "0,steady,interactive,1e300,600,240,\n", "row 1: requests_per_s"),
        (ROWS + "0,steady,interactive,1,600,240,1e300\n", "row 1: price_per_hour"),
        (ROWS + f"0,{'x' * 200_000},interactive,1,600,240,\n", "demand.csv: not CSV: field larger"),
    ],
)
def test_a_wrong_demand_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "demand.csv"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_demand(file)


def sweep(folder: Path, *entries: dict[str, Any]) -> Path:
    """A sweep directory with what is read of it: two runs of the proof, one scout to leave out."""
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps(about()))
    (folder / "limits.json").write_text(json.dumps(limits(*entries)))
    rows = [
        ("interactive", "prove", 25, 100, 500.0, 200.0),
        ("interactive", "prove", 25, 300, 600.0, 240.0),
        ("interactive", "scout", 25, 900, 9.0, 9.0),
        ("interactive", "shared", 25, 900, 9.0, 9.0),
        ("batch", "prove", 25, 900, 9.0, 9.0),
    ]
    columns = [
        "service_class",
        "phase",
        "concurrency",
        "completed",
        "prompt_tokens_mean",
        "tokens_per_answer_mean",
    ]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "steps.csv", index=False)
    return folder


def test_a_demand_file_as_excel_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "demand.csv"
    file.write_text(ROWS + "0,steady,interactive,1,600,240,\r\n", encoding="utf-8-sig")
    assert [row.hour for row in read_demand(file)] == [0]


def test_a_little_demand_needs_a_server_and_none_needs_none() -> None:
    hours = plan([asked(0, 1e-300), asked(1, 0.0)], ALONE, 0.0)["models"][0]["hours"]
    assert [hour["replicas"] for hour in hours[:2]] == [1, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"class": None}, "limits.0: class: "),
        ({"limit": "25"}, "limits.0: limit: "),
        ({"limit": -3}, "limits.0: limit: "),
        ({"limit": 2.5}, "limits.0: limit: "),
        ({"limit": True}, "limits.0: limit: "),
        ({"deadline_s": math.nan}, "limits.0: deadline_s: "),
        ({"deadline_s": 0}, "limits.0: deadline_s: "),
        ({"evidence": {"concurrency": 25, "request_per_s": math.nan}}, "limits.0: evidence.request_per_s: "),
        ({"evidence": {"concurrency": 25, "request_per_s": -1}}, "limits.0: evidence.request_per_s: "),
        ({"valid_until": "soon"}, "limits.0: valid_until: "),
    ],
)
def test_a_limits_file_that_was_broken_is_named_and_exported_to_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
) -> None:
    folder = sweep(tmp_path / "out", {**entry("interactive", 25), **change})
    file = tmp_path / "demand.csv"
    file.write_text(ROWS + "8,steady,interactive,12,575,230,\n")

    for command in (["policy", str(folder)], ["replicas", str(folder), "--demand", str(file)]):
        assert main(command) == 2
        assert says in capsys.readouterr().err
    assert not (folder / "policy").exists()


def test_capacities_of_a_sweep(tmp_path: Path) -> None:
    capped = entry("interactive", 20, evidence={"concurrency": 25, "request_per_s": 5.0})
    folder = sweep(tmp_path / "out", capped, entry("batch", None))

    found, simulated = read_capacities(str(folder))

    assert simulated
    assert found == {
        # Capped below what was proven: four fifths of its rate.
        ("steady", "interactive", "alone"): Capacity(
            limit=20, request_per_s=4.0, prompt_tokens=575.0, output_tokens=230.0
        ),
        ("steady", "batch", "alone"): "no step of proof size passed",
    }
    assert read_capacities(str(folder / "limits.json")) == (found, simulated)


def published(folder: Path, valid_until: str = "2999-01-01T00:00:00+00:00") -> Path:
    """``latest/limits.json`` beside the one run that it names."""
    sweep(folder / "runs" / "r1" / "1" / "steady", entry("interactive", 25))
    latest = folder / "latest" / "limits.json"
    latest.parent.mkdir()
    one = {
        **entry("interactive", 25),
        "model": "steady",
        "report": "runs/r1/1/steady/report.html",
        "valid_until": valid_until,
        "last_attempt": {"reason": "the lowest step measured, 8, provably failed"},
    }
    latest.write_text(json.dumps({"updated_by_run": "r1", "limits": [one]}))
    return latest


LATEST = {
    ("steady", "interactive", "alone"): Capacity(
        limit=25, request_per_s=5.5, prompt_tokens=575.0, output_tokens=230.0
    )
}


def test_capacities_of_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latest = published(tmp_path / "a b")

    assert read_capacities(str(latest)) == (LATEST, True)
    assert read_capacities(latest.as_uri()) == (LATEST, True)
    monkeypatch.chdir(latest.parent)
    assert read_capacities("limits.json") == (LATEST, True)
    assert read_capacities("../runs/r1/1/steady") == (LATEST, True)
    (tmp_path / "a b" / "runs" / "r1" / "1" / "steady" / "steps.csv").unlink()
    with pytest.raises(DataError, match=r"steady/steps\.csv: missing; .* limits\.json was measured with"):
        read_capacities("limits.json")


def test_no_capacity_of_a_limit_that_is_valid_no_longer(tmp_path: Path) -> None:
    latest = published(tmp_path, "2026-03-01T01:00:00+00:00")
    (found,) = read_capacities(str(latest))[0].values()
    assert found == (
        "the limit of 25 was valid until 2026-03-01T01:00:00+00:00; "
        "the lowest step measured, 8, provably failed"
    )


def test_capacities_in_object_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with nanio(tmp_path / "s3") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        here = FolderStore(published(tmp_path / "here").parents[1])
        for prefix in ("", "demo/x/"):
            there = open_store(f"s3://{BUCKET}/{prefix}")
            for key in here.keys(""):
                there.write(key, here.read(key))
            for name in ("latest/limits.json", "runs/r1/1/steady", "runs/r1/1/steady/limits.json"):
                assert read_capacities(f"s3://{BUCKET}/{prefix}{name}") == (LATEST, True), name
        file = tmp_path / "demand.csv"
        file.write_text(ROWS + "8,steady,interactive,12,575,230,\n")
        where = f"s3://{BUCKET}/demo/x/latest/limits.json"
        assert main(["replicas", where, "--demand", str(file)]) == 0
        assert "08     3 replicas" in capsys.readouterr().out
        assert main(["replicas", f"s3://{BUCKET}/nothing", "--demand", str(file)]) == 2
        assert f"s3://{BUCKET}/nothing: expected limits.json of a sweep" in capsys.readouterr().err
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        assert main(["replicas", where, "--demand", str(file)]) == 3
        assert "the object store refused the credentials" in capsys.readouterr().err


def test_unknown_rates_and_imported_limits_are_not_planned_with(tmp_path: Path) -> None:
    unknown = sweep(
        tmp_path / "a", entry("interactive", 25, evidence={"concurrency": 25, "request_per_s": None})
    )
    imported = sweep(tmp_path / "b", entry("interactive", 25, source="imported"))
    shared = sweep(tmp_path / "c", *pair(12, 50))

    key = ("steady", "interactive", "alone")
    assert read_capacities(str(unknown))[0][key] == "the rate and the lengths at the limit are not known"
    assert read_capacities(str(imported))[0][key] == "imported, not measured by us"
    assert set(read_capacities(str(shared))[0]) == {
        ("steady", name, "shared") for name in ("interactive", "batch")
    }
    with pytest.raises(DataError, match=r"nothing: expected limits\.json of a sweep"):
        read_capacities(str(tmp_path / "nothing"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path / "out", entry("interactive", 25))
    file = tmp_path / "demand.csv"
    file.write_text(ROWS + "".join(f"{hour},steady,interactive,12,575,230,2.5\n" for hour in range(24)))

    assert main(["replicas", str(folder), "--demand", str(file), "--headroom", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert found["models"][0]["replica_hours"] == 72  # 14.4 / 5.5
    assert found["models"][0]["cost"] == 180.0

    assert main(["replicas", str(folder), "--demand", str(file)]) == 0
    assert "most 3, replica hours 72, cost 180.00" in capsys.readouterr().out
    assert main(["replicas", str(folder), "--demand", str(file), "--headroom", "-1"]) == 2
