"""Other people's results through the command line: import, check, limits, report, and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from include.capacity.cli import main
from tests.importers.made import GUIDELLM_OLD, VLLM

LEVELS = (4, 8, 16)
ONE_WAVE = (
    "model,concurrency,requests,completed,req_per_s,total_tok_per_s,e2e_mean_ms\n"
    "m,8,8,8,4,400,1900\n"
    "m,16,16,16,8,800,1950\n"
)


def result(concurrency: int, tokens: int = 100) -> str:
    """One clean vLLM result: E2E 2 s at any concurrency, 40 requests a slot."""
    n = 40 * concurrency
    numbers = {"max_concurrency": concurrency, "num_prompts": n, "completed": n, "duration": 80.0}
    rates = {"request_throughput": n / 80, "output_throughput": tokens * n / 80}
    totals = {"total_input_tokens": 500 * n, "total_output_tokens": tokens * n}
    both = {"total_token_throughput": (500 + tokens) * n / 80}
    return json.dumps({**VLLM, **numbers, **rates, **totals, **both})


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_files_and_folders_to_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "theirs", tmp_path / "out"
    folder.mkdir()
    for n in LEVELS:
        (folder / f"c{n}.json").write_text(result(n))
    (tmp_path / "other.json").write_text(json.dumps(GUIDELLM_OLD))
    assert run(capsys, "import", folder, tmp_path / "other.json", "--out", out)[:2] == (
        0,
        f"4 steps in {out}\n",
    )

    status, said, _ = run(capsys, "check", out, "--json")
    judged = json.loads(said)
    assert status == 0
    assert list(judged) == ["steps"]
    assert [step["concurrency"] for step in judged["steps"]] == [16, 4, 8, 8]  # in the order of the files
    for step in judged["steps"]:
        assert list(step) == [
            "source", "model", "series", "workload", "concurrency", "repeat", "verdict", "findings",
        ]  # fmt: skip
    assert [step["verdict"] for step in judged["steps"]] == ["ok", "ok", "ok", "flag"]
    assert judged["steps"][3]["findings"][0]["check"] == "aborted_requests"  # guidellm's own at the end

    status, said, _ = run(capsys, "limits", out, "--json")
    assert status == 3  # other people's numbers carry no limit of ours
    found = json.loads(said)
    assert list(found) == ["limits", "saturation"]
    assert found["limits"] == []
    curve = next(one for one in found["saturation"] if one["workload"] == "in500 out100")
    assert (curve["concurrency_at_peak"], curve["peak_total_tok_per_s"]) == (16, 4800.0)

    assert run(capsys, "report", out)[0] == 0
    report = (out / "report.md").read_text()
    assert "Great Expectations' own results" in report
    assert "| steps | 4 |" in report


def test_workloads_under_one_series_are_curves_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for n in LEVELS:
        (tmp_path / f"short{n}.json").write_text(result(n))
        (tmp_path / f"long{n}.json").write_text(result(n, tokens=1000))
    files = sorted(tmp_path.glob("*.json"))
    for command in (["import", *files, "--out", out], ["check", out], ["limits", out], ["report", out]):
        run(capsys, *command)
    report = (out / "report.md").read_text()
    assert "peaks at 800 tok/s" in report or "800 tok/s, after" in report
    assert "8,000 tok/s" in report
    assert "4,400" not in report  # the mean of both would be nobody's throughput


def test_a_rejected_sweep_is_status_3_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "waves.csv", tmp_path / "out"
    file.write_text(ONE_WAVE)
    assert run(capsys, "import", file, "--out", out)[0] == 0
    status, said, _ = run(capsys, "check", out, "--json")
    assert status == 3
    for step in json.loads(said)["steps"]:
        assert step["verdict"] == "reject"
        assert "enough_requests" in [finding["check"] for finding in step["findings"]]
        assert all(set(finding) == {"check", "severity", "reason"} for finding in step["findings"])
    status, said, _ = run(capsys, "limits", out, "--json")
    assert status == 3
    assert json.loads(said)["saturation"][0]["status"] == "rejected"
    assert run(capsys, "report", out)[0] == 0
    assert "the request count set the throughput of 2 of 2 steps" in (out / "report.md").read_text()


def test_unknown_files_and_folders_are_status_2_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.json"
    file.write_text('{"a": 1}')
    status, _, said = run(capsys, "import", file, "--out", tmp_path / "out")
    assert status == 2
    assert said.startswith("import: notes.json: not a result file that can be read. Expected one of: ")
    for command in ("check", "limits", "report"):
        status, _, said = run(capsys, command, tmp_path)
        assert status == 2
        assert "not a sweep directory" in said
