"""A limit that is lower than before, from the server that became slower to the message that tells of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from include.capacity.config import DEFAULT_FLEET
from include.capacity.simulator.profile import PROFILES
from tests.dags.runs import Airflow

pytestmark = pytest.mark.slow


def fleet_of(folder: Path, max_num_seqs: int) -> str:
    """A fleet file: one simulated model with so many slots, and a notifier that writes ``told.txt``."""
    profile = yaml.safe_load((PROFILES / "sprinter.yaml").read_text())
    profile["engine"]["max_num_seqs"] = max_num_seqs
    (folder / "profile.yaml").write_text(yaml.safe_dump(profile))
    data = yaml.safe_load(DEFAULT_FLEET.read_text())
    del data["models"]["steady"]
    data["models"]["sprinter"]["server"]["profile"] = str(folder / "profile.yaml")
    data["publish"]["to"] = (folder / "out").as_uri()
    text = "{{ capacity.event }}: {{ capacity.text }}"
    data["notify"] = [
        {
            "notifier": "tests.dags.notifiers.ToFile",
            "on": ["limit_fell", "limit_rose", "run_failed"],
            "arguments": {"path": str(folder / "told.txt"), "text": text},
        }
    ]
    (folder / "fleet.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return str(folder / "fleet.yaml")


def test_a_limit_that_fell_is_told_and_valid_no_longer(airflow: Airflow, tmp_path: Path) -> None:
    """Measured twice alike, then with two slots instead of sixteen: the step that held has none to pass."""
    conf = {"classes": ["interactive"], "mode": "exact", "concurrency": "8", "promote": True}
    told, latest = tmp_path / "told.txt", tmp_path / "out" / "latest" / "limits.json"
    entries = []
    for max_num_seqs in (16, 16, 2):
        assert not told.exists()
        (result,) = airflow.run("capacity_sweep", conf, CAPACITY_FLEET=fleet_of(tmp_path, max_num_seqs))
        assert result["state"] == "success", result["tasks"]
        entries += json.loads(latest.read_text())["limits"]
    first, second, third = entries
    assert [(e["limit"], e["status"]) for e in entries] == [(8, "lower_bound")] * 3
    assert [e["change"]["verdict"] for e in (first, second)] == ["first", "same"]
    assert third["run_id"] == second["run_id"]
    last = third["last_attempt"]
    assert (last["status"], last["change"]["verdict"]) == ("no_passing_step", "fell")
    assert third["valid_until"] < last["at"] < second["valid_until"]
    title, sentence, nothing_more = told.read_text().split("\n")
    assert title == "limit_fell: demo: a limit fell"
    assert sentence.startswith(
        "- sprinter, interactive: the limit fell from 8 to no passing step (−100 %) after run "
        f"{second['run_id']} (the evidence is strong); the stack has changed: profile digest "
    )
    assert nothing_more == ""
