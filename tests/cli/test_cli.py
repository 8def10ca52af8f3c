"""The command line: exit statuses, messages, JSON, and a whole sweep of a simulated server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from include.capacity.cli import main
from include.capacity.config import DEFAULT_FLEET
from tests.simulated import simulated

MODEL = "sim/steady-8b"
STEP = "grid-interactive-c00004-r1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A simulated server."""
    with simulated("steady") as (url, _):
        yield url


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small sweep: of a floor that sixty requests prove."""
    fleet = tmp_path_factory.mktemp("cli") / "fleet.yaml"
    fleet.write_text(DEFAULT_FLEET.read_text().replace("completion_floor: 0.99 ", "completion_floor: 0.9 "))
    return ["--config", str(fleet), "--requests", "60", "--seconds", "5"]


@pytest.fixture(scope="module")
def swept(url: str, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real sweep, checked and with its limits; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("cli") / "out"
    status = main([*sweep_of(url, out), *small])
    assert status in (0, 3)  # whether so few requests prove anything is not the point here
    return out


@pytest.fixture
def copy(swept: Path, tmp_path: Path) -> Path:
    shutil.copytree(swept, tmp_path / "copy")
    return tmp_path / "copy"


def sweep_of(url: str, out: Path) -> list[str]:
    asked = ["--model", MODEL, "--class", "interactive", "--concurrency", "4"]
    return ["sweep", "--url", url, *asked, "--out", str(out)]


def test_stages_run_one_after_another(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list((swept / "server").glob("*"))  # nothing is left of the server's state
    capsys.readouterr()
    assert main(["check", str(swept), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert list(checked) == ["steps"]
    fields = {"source", "model", "series", "workload", "concurrency", "repeat", "verdict", "findings"}
    assert [set(step) for step in checked["steps"]] == [fields] * len(checked["steps"])
    assert {(step["model"], step["concurrency"]) for step in checked["steps"]} >= {(MODEL, 4)}

    main(["limits", str(swept), "--json"])
    limits = json.loads(capsys.readouterr().out)
    assert set(limits) == {"limits", "saturation"}
    (limit,) = limits["limits"]
    named = "model series class limit status measured bound_by bracket operating_range confidence"
    assert set(limit) >= {*named.split(), "deadline_s", "claim", "evidence", "knees"}
    assert (limit["model"], limit["class"], limit["deadline_s"]) == (MODEL, "interactive", 60)

    assert main(["report", str(swept)]) == 0
    capsys.readouterr()
    assert main(["publish", str(swept), "--to", f"file://{tmp_path}/to"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["attempt"], done["promoted"]) == (1, False)
    run = tmp_path / "to" / done["prefix"]
    assert (run / "manifest.json").is_file()
    assert not (tmp_path / "to" / "latest").exists()
    # A published sweep can be judged again: its rows are in one file.
    (published,) = (folder.parent for folder in run.rglob("sweep.json"))
    main(["limits", str(published), "--json"])
    assert json.loads(capsys.readouterr().out)["limits"][0]["evidence"] == limit["evidence"]


@pytest.mark.parametrize(
    ("command", "file", "content", "said"),
    [
        ("limits", "sweep.json", "[]", "sweep.json: not what a sweep writes"),
        ("limits", "steps.csv", "", "steps.csv: not a CSV table"),
        ("limits", "quality.json", "{}", "quality.json: expected verdict, findings and steps"),
        ("limits", f"steps/{STEP}.json", "{}", f"steps/{STEP}.json: not the facts of a step"),
        ("limits", f"requests/{STEP}.parquet", "junk", f"requests/{STEP}.parquet: not a Parquet file"),
        ("limits", f"requests/{STEP}.parquet", None, f"requests/{STEP}.parquet: missing"),
        ("report", "limits.json", "{}", "limits.json: expected lists `limits` and `saturation`"),
        ("report", "limits.json", '{"limits": 3, "saturation": []}', "limits.json: expected lists"),
        ("report", "limits.json", "junk", "limits.json: not JSON"),
        ("report", "limits.json", None, "no limits.json: run `limits` first"),
        ("report", f"metrics/{STEP}.parquet", "junk", f"metrics/{STEP}.parquet: not a Parquet file"),
    ],
)
def test_spoilt_files_are_named(
    copy: Path, command: str, file: str, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "report.html").unlink(missing_ok=True)  # of another test
    assert (copy / file).exists()
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(content)
    assert main([command, str(copy)]) == 2
    assert said in capsys.readouterr().err
    assert not (copy / "report.html").exists()


def test_a_sweep_without_steps_says_why_it_is_no_good(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("steps", "requests", "metrics", "evidence"):
        shutil.rmtree(copy / folder)
    assert main(["check", str(copy), "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out) == {"steps": []}
    assert "no step was measured, so there is nothing to judge" in said.err


def test_longer_deadline_than_measured_is_refused(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "classes.yaml"
    other.write_text(DEFAULT_FLEET.read_text().replace("deadline_s: 60 ", "deadline_s: 90 "))
    assert main(["limits", str(swept), "--classes", str(other)]) == 2
    assert "deadline_s 90 is longer than the 60 s it was measured with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--class", "nope"], "--class: 'nope' is none of ['batch', 'interactive']"),
        (["--concurrency", "1,999999999"], "ladder.1: Input should be less than or equal to 100000"),
        (["--repeats", "0"], "repeats: Input should be greater than or equal to 1, found 0"),
        (["--requests", "0"], "prove_requests: Input should be greater than or equal to 20, found 0"),
        (["--seconds", "nan"], "min_window_s: Input should be"),
        (["--model", ""], "served_name: String should have at least 1 character"),
        (["--url", "127.0.0.1:8000"], "--url: url: expected http://host:port"),
        (["--url", "http://127.0.0.1:99999"], "--url: url: expected http://host:port"),
        (["--config", "/nope.yaml"], "/nope.yaml: cannot be read"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "--api-key-env: the environment has no NOT_SET_ANYWHERE"),
    ],
)
def test_wrong_arguments_are_named(
    change: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*sweep_of("http://127.0.0.1:9", out), *change]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--profile", "steady", "--port", "99999"],
        ["sweep", "--url", "x", "--model", "m", "--class", "c", "--concurrency", "0", "--out", "o"],
        ["publish", "out"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_wrong_model_name_and_a_file_for_a_folder(
    url: str, swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "../<b>$(id)"
    assert main([*sweep_of(url, tmp_path / "out"), "--model", name]) == 3
    assert f"serves ['{MODEL}'], and no model named '{name}'" in capsys.readouterr().err
    assert main(sweep_of(url, swept / "sweep.json")) == 3
    assert "sweep.json: File exists" in capsys.readouterr().err


def test_an_interrupted_sweep_goes_on_and_another_is_refused(
    url: str, small: list[str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def began() -> str:
        return json.loads((copy / f"steps/{STEP}.json").read_text())["started_at"]

    before, about = began(), json.loads((copy / "sweep.json").read_text())
    assert main([*sweep_of(url, copy), *small]) in (0, 3)
    assert began() == before  # it is there: nothing was measured
    (copy / f"steps/{STEP}.json").unlink()  # as if it had been interrupted before the step was whole
    assert main([*sweep_of(url, copy), *small]) in (0, 3)
    assert began() > before
    after = json.loads((copy / "sweep.json").read_text())
    assert (after["run_id"], after["seed"]) == (about["run_id"], about["seed"])

    capsys.readouterr()
    assert main([*sweep_of(url, copy), *small, "--requests", "61"]) == 2
    said = capsys.readouterr().err
    assert "steps of a sweep that was asked for something else (bounds.prove_requests: 60, now 61" in said
    after["stack"]["vllm_version"], after["stack_id"] = "another", "another"
    (copy / "sweep.json").write_text(json.dumps(after))
    assert main([*sweep_of(url, copy), *small]) == 2
    assert (
        "is not the one its steps were measured on (vllm_version: 'another', now" in capsys.readouterr().err
    )


@pytest.mark.parametrize("to", ["", "file://tmp/x", "http://x/y", "s3:///x", "relative"])
def test_publish_target_must_be_a_url_of_a_store(
    swept: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(swept), "--to", to]) == 2
    assert "--to: to: String should match pattern" in capsys.readouterr().err


def test_a_published_limit_is_valid_as_long_as_the_fleet_file_says(swept: Path, tmp_path: Path) -> None:
    fleet = DEFAULT_FLEET.read_text().replace("valid_for_s: 259200", "valid_for_s: 3600")
    (tmp_path / "fleet.yaml").write_text(fleet)
    to = tmp_path / "to"
    assert main(["publish", str(swept), "--to", to.as_uri(), "--config", str(tmp_path / "fleet.yaml")]) == 0
    (manifest,), (limits,) = to.rglob("manifest.json"), to.rglob("*/limits.json")
    published = datetime.fromisoformat(json.loads(manifest.read_text())["published_at"])
    until = datetime.fromisoformat(json.loads(limits.read_text())["valid_until"])
    assert until - published == timedelta(hours=1)


def test_folder_without_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "limits", "report"):
        assert main([command, str(tmp_path)]) == 2
        assert "it holds no sweep.json" in capsys.readouterr().err
