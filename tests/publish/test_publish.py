"""What a published run consists of, what moves in latest/, and what a failure half way leaves behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from include.capacity.errors import PublishError
from include.capacity.publish.publish import (
    check,
    publish_run,
    read_history,
    read_latest,
    schema,
    verify_manifest,
)
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from tests.publish.made import CLASSES, Entry, limit_entry, small_sweep

NIGHT = datetime(2026, 11, 30, 5, 0, tzinfo=UTC)


@pytest.fixture
def source(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "target")


@pytest.fixture
def fleet_page(source: FolderStore) -> SweepDir:
    page = SweepDir(source, "fleet")
    page.write("report.html", '<a href="./steady/report.html">steady</a> run r1')
    page.write("report.md", "![f](./figures/f.png) [steady](./steady/report.html) run r1")
    page.write("figures/fleet-batch.svg", "<svg/>")
    page.write("figures/fleet-batch.png", b"\x89PNG")
    page.write("figures/other.txt", "is no figure")
    return page


def test_layout_and_manifest(source: FolderStore, target: FolderStore, fleet_page: SweepDir) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])

    done = publish_run(target, "r1", {"steady": sweep}, fleet_page, promote=True, now=NIGHT)

    assert target.keys() == [
        "history/r1.json",
        "latest/limits.json",
        "latest/report.html",
        "latest/report.md",
        "runs/r1/1/figures/fleet-batch.png",
        "runs/r1/1/figures/fleet-batch.svg",
        "runs/r1/1/manifest.json",
        "runs/r1/1/report.html",
        "runs/r1/1/report.md",
        "runs/r1/1/steady/figures/interactive-latency.png",
        "runs/r1/1/steady/figures/interactive-latency.svg",
        "runs/r1/1/steady/limits.json",
        "runs/r1/1/steady/policy/alone/interactive/envoy-gateway.yaml",
        "runs/r1/1/steady/policy/alone/interactive/envoy.yaml",
        "runs/r1/1/steady/policy/alone/interactive/litellm.yaml",
        "runs/r1/1/steady/policy/alone/interactive/nginx.conf",
        "runs/r1/1/steady/policy/alone/interactive/vllm.yaml",
        "runs/r1/1/steady/policy/index.json",
        "runs/r1/1/steady/quality.json",
        "runs/r1/1/steady/report.html",
        "runs/r1/1/steady/report.md",
        "runs/r1/1/steady/requests.parquet",
        "runs/r1/1/steady/server_metrics.parquet",
        "runs/r1/1/steady/steps.csv",
        "runs/r1/1/steady/steps/prove-interactive-c00024-r1.json",
        "runs/r1/1/steady/steps/scout-interactive-c00004-r1.json",
        "runs/r1/1/steady/sweep.json",
    ]
    manifest = verify_manifest(target, "runs/r1/1")
    assert [file["name"] for file in manifest["files"]] == [
        key.removeprefix("runs/r1/1/") for key in target.keys("runs/") if not key.endswith("manifest.json")
    ]
    assert done["prefix"] == "runs/r1/1"
    assert done["files"] == 22
    assert done["report"] == "runs/r1/1/report.html"
    assert done["moved"] == [
        {"model": "steady", "class": "interactive", "measured": "alone", "limit": 24, "was": None}
    ]
    rows = pq.read_table(io.BytesIO(target.read("runs/r1/1/steady/requests.parquet"))).to_pandas()
    assert rows["step"].value_counts().to_dict() == {
        "scout-interactive-c00004-r1": 3,
        "prove-interactive-c00024-r1": 3,
    }


def test_published_sweep_reads_as_a_sweep_directory(source: FolderStore, target: FolderStore) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    publish_run(target, "r1", {"steady": sweep}, now=NIGHT)

    again = SweepDir(target, "runs/r1/1/steady")

    assert again.step_keys() == sweep.step_keys()
    assert set(again.requests()["step"]) == set(sweep.step_keys())


def test_latest_names_run_age_and_validity(source: FolderStore, target: FolderStore) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])

    publish_run(target, "r1", {"steady": sweep}, promote=True, valid_for_s=86400, now=NIGHT)

    latest = read_latest(target)
    assert latest is not None
    (entry,) = latest["limits"]
    assert (entry["model"], entry["class"], entry["limit"], entry["status"]) == (
        "steady",
        "interactive",
        24,
        "proven",
    )
    assert (entry["run_id"], entry["attempt"]) == ("r1", 1)
    assert entry["valid_until"] == "2026-12-01T05:00:00+00:00"
    assert entry["age_s"] == 4 * 3600
    assert entry["report"] == "runs/r1/1/steady/report.html"
    assert (
        json.loads(target.read("runs/r1/1/steady/limits.json"))["valid_until"] == "2026-12-01T05:00:00+00:00"
    )


def test_failed_model_keeps_its_last_good_entry(source: FolderStore, target: FolderStore) -> None:
    good = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    publish_run(target, "r1", {"steady": good}, promote=True, now=NIGHT)
    bad = small_sweep(source, "steady", [limit_entry("steady", "interactive", None, "rejected")])

    done = publish_run(target, "r2", {"steady": bad}, promote=True, now=NIGHT + timedelta(days=1))

    (entry,) = (read_latest(target) or {})["limits"]
    assert (entry["limit"], entry["run_id"]) == (24, "r1")
    assert entry["age_s"] == 28 * 3600
    assert entry["last_attempt"] == {
        "run_id": "r2",
        "at": "2026-12-01T05:00:00+00:00",
        "status": "rejected",
        "reason": "the proof was rejected: it drifted",
        "change": None,
    }
    assert done["moved"] == []
    assert done["kept"][0]["reason"] == "the proof was rejected: it drifted"


@pytest.mark.parametrize(
    ("status", "more", "disproved"),
    [
        ("no_passing_step", {"first_failing": 24}, True),
        ("insufficient_evidence", {"first_failing": 16}, True),
        ("insufficient_evidence", {"first_failing": 25}, False),
        ("insufficient_evidence", {"first_failing": None}, False),
        ("rejected", {"first_failing": 16}, False),
        ("no_passing_step", {"first_failing": 24, "deadline_s": 30.0}, False),  # another promise
        ("no_passing_step", {"first_failing": 24, "comparison_id": "other"}, False),
    ],
)
def test_an_entry_that_a_later_run_disproves_is_valid_no_longer(
    source: FolderStore, target: FolderStore, status: str, more: dict[str, Any], disproved: bool
) -> None:
    good = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    publish_run(target, "r1", {"steady": good}, promote=True, now=NIGHT)
    ((before,), when) = (read_latest(target) or {})["limits"], "2026-12-01T01:00:00+00:00"
    entry = limit_entry("steady", "interactive", None, status, **more)
    bad = small_sweep(source, "steady", [entry], created_at=when)
    publish_run(target, "r2", {"steady": bad}, promote=True, now=NIGHT + timedelta(days=1))
    (after,) = (read_latest(target) or {})["limits"]
    assert (after["limit"], after["run_id"], after["last_attempt"]["run_id"]) == (24, "r1", "r2")
    assert after["valid_until"] == (when if disproved else before["valid_until"])


def test_model_that_could_not_be_served_keeps_its_entry(source: FolderStore, target: FolderStore) -> None:
    steady = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    sprinter = small_sweep(source, "sprinter", [limit_entry("sprinter", "interactive", 11)])
    publish_run(target, "r1", {"steady": steady, "sprinter": sprinter}, promote=True, now=NIGHT)

    publish_run(
        target, "r2", {"steady": steady}, promote=True, failed={"sprinter": "out of memory"}, now=NIGHT
    )

    limits = {entry["model"]: entry for entry in (read_latest(target) or {})["limits"]}
    assert (limits["steady"]["run_id"], limits["sprinter"]["run_id"]) == ("r2", "r1")
    assert limits["sprinter"]["last_attempt"]["reason"] == "out of memory"
    assert limits["steady"]["last_attempt"] is None


def test_two_runs_that_publish_at_once_keep_both_entries(
    source: FolderStore, target: FolderStore, tmp_path: Path
) -> None:
    steady = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    sprinter = small_sweep(source, "sprinter", [limit_entry("sprinter", "interactive", 11)])

    class Slow(FolderStore):
        """Another run publishes between our reading and our writing of latest/limits.json, twice."""

        others = 2

        def write_if(self, key: str, data: bytes, version: str | None) -> None:
            if key == "latest/limits.json" and self.others:
                self.others -= 1
                publish_run(target, f"other{self.others}", {"sprinter": sprinter}, promote=True, now=NIGHT)
            super().write_if(key, data, version)

    done = publish_run(Slow(tmp_path / "target"), "r1", {"steady": steady}, promote=True, now=NIGHT)

    assert done["conditional"] is True
    assert [move["limit"] for move in done["moved"]] == [24]
    assert [(entry["model"], entry["run_id"]) for entry in (read_latest(target) or {})["limits"]] == [
        ("sprinter", "other0"),
        ("steady", "r1"),
    ]


def test_a_run_published_again_later_does_not_turn_a_limit_back(
    source: FolderStore, target: FolderStore
) -> None:
    def night(limit: int, day: int) -> SweepDir:
        when = f"2026-11-{day:02d}T01:00:00+00:00"
        entry = limit_entry("steady", "interactive", limit)
        return small_sweep(source, "steady", [entry], created_at=when)

    old, new = night(24, 20), night(20, 30)
    publish_run(target, "old", {"steady": old}, promote=True, now=NIGHT)
    publish_run(target, "new", {"steady": new}, promote=True, now=NIGHT)
    done = publish_run(target, "old", {"steady": old}, promote=True, now=NIGHT + timedelta(hours=1))
    assert done["kept"][0]["reason"] == "run new measured it later, at 2026-11-30T01:00:00+00:00"
    (entry,) = (read_latest(target) or {})["limits"]
    assert (entry["limit"], entry["run_id"], entry["last_attempt"]) == (20, "new", None)


def test_without_promote_latest_stays(source: FolderStore, target: FolderStore, fleet_page: SweepDir) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])

    done = publish_run(target, "manual", {"steady": sweep}, fleet_page, promote=False, now=NIGHT)

    assert target.keys("latest/") == []
    assert done["limits"] is None
    assert [entry["promoted"] for entry in read_history(target)] == [False]


def test_lower_bound_moves_and_other_status_does_not(source: FolderStore, target: FolderStore) -> None:
    entries = [
        limit_entry("steady", "interactive", 24, "lower_bound"),
        limit_entry("steady", "batch", None, "no_passing_step", reason="the lowest step failed"),
    ]
    done = publish_run(
        target, "r1", {"steady": small_sweep(source, "steady", entries)}, promote=True, now=NIGHT
    )
    assert [(m["class"], m["limit"]) for m in done["moved"]] == [("interactive", 24)]
    assert [(k["class"], k["reason"]) for k in done["kept"]] == [("batch", "the lowest step failed")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"deadline_s": 30.0}, "measured with another deadline_s than the fleet's class"),
        (
            {"completion_floor": 0.9, "ttft": None},
            "measured with another completion_floor, ttft than the fleet's class",
        ),
    ],
)
def test_only_the_fleets_own_classes_move(
    source: FolderStore, target: FolderStore, change: dict[str, Any], reason: str
) -> None:
    other = {**CLASSES, "interactive": {**CLASSES["interactive"], **change}}
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)], classes=other)

    done = publish_run(
        target, "r1", {"steady": sweep}, promote=True, own_classes={"steady": CLASSES}, now=NIGHT
    )

    assert done["moved"] == []
    assert [kept["reason"] for kept in done["kept"]] == [reason]
    assert (read_latest(target) or {})["limits"] == []


def test_another_ladder_is_the_same_class(source: FolderStore, target: FolderStore) -> None:
    other = {**CLASSES, "interactive": {**CLASSES["interactive"], "ladder": [2, 3]}}
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)], classes=other)
    done = publish_run(
        target, "r1", {"steady": sweep}, promote=True, own_classes={"steady": CLASSES}, now=NIGHT
    )
    assert len(done["moved"]) == 1


def test_imported_limits_do_not_move(source: FolderStore, target: FolderStore) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24, source="bench.json")])
    done = publish_run(target, "r1", {"steady": sweep}, promote=True, now=NIGHT)
    assert [kept["reason"] for kept in done["kept"]] == ["imported, not measured by us"]


def test_runs_are_never_overwritten(source: FolderStore, target: FolderStore) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    first = publish_run(target, "r1", {"steady": sweep}, now=NIGHT)
    before = {key: target.read(key) for key in target.keys("runs/r1/1/")}

    second = publish_run(target, "r1", {"steady": sweep}, now=NIGHT + timedelta(hours=1))

    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert {key: target.read(key) for key in target.keys("runs/r1/1/")} == before
    verify_manifest(target, "runs/r1/2")


def test_latest_report_links_into_the_run(
    source: FolderStore, target: FolderStore, fleet_page: SweepDir
) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    publish_run(target, "r1", {"steady": sweep}, fleet_page, promote=True, now=NIGHT)
    assert target.read("latest/report.html") == b'<a href="../runs/r1/1/steady/report.html">steady</a> run r1'
    assert target.read("latest/report.md") == (
        b"![f](../runs/r1/1/figures/f.png) [steady](../runs/r1/1/steady/report.html) run r1"
    )


HOSTILE = [
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "a/b",
    "..",
    ".",
    "",
    "\u00c4\n\x00",
    "X" * 250,
    ".hidden",
    "C:\\x",
    "A",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_inside_their_folder(
    source: FolderStore, target: FolderStore, tmp_path: Path, name: str
) -> None:
    sweep = small_sweep(source, "m", [limit_entry(name, "interactive", 24)])
    done = publish_run(target, name, {name: sweep}, promote=True, now=NIGHT)
    verify_manifest(target, done["prefix"])
    keys = target.keys()
    assert {key.split("/")[0] for key in keys} == {"runs", "history", "latest"}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
    for key in keys:
        assert not set("<>\\\n\x00 ") & set(key)
        assert ".." not in key.split("/")
    (entry,) = (read_latest(target) or {})["limits"]
    assert entry["model"] == name


def test_distinct_names_do_not_collide(source: FolderStore, target: FolderStore) -> None:
    names = ["A", "a", "a/b", "a~2f~b", "..", ""]
    for name in names:
        publish_run(target, name, {"m": small_sweep(source, "m", [])}, now=NIGHT)
    assert len({key.split("/")[1] for key in target.keys("runs/")}) == len(names)
    assert [entry["attempt"] for entry in read_history(target)] == [1] * len(names)


class FailsAt(FolderStore):
    """A store whose k-th write (from 0) fails; ``half`` leaves nothing behind, as a PUT that dies does."""

    def __init__(self, root: Path, k: int) -> None:
        super().__init__(root)
        self.left = k

    def write(self, key: str, data: bytes) -> None:
        if self.left == 0:
            raise PublishError(f"s3://bucket/{key}: the object store cannot be reached")
        self.left -= 1
        super().write(key, data)


def test_an_upload_that_dies_half_way_changes_nothing_a_reader_sees(
    source: FolderStore, tmp_path: Path, fleet_page: SweepDir
) -> None:
    old = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    new = small_sweep(source, "steady", [limit_entry("steady", "interactive", 20)])
    writes_of_run = 22 + 1  # files and manifest
    total = writes_of_run + 1 + 3  # history, then latest/limits.json, report.html, report.md
    died = 0
    for k in range(total + 1):
        root = tmp_path / f"target-{k}"
        plain = FolderStore(root)
        publish_run(plain, "r1", {"steady": old}, fleet_page, promote=True, now=NIGHT)
        before = {key: plain.read(key) for key in plain.keys("latest/")}
        try:
            publish_run(FailsAt(root, k), "r2", {"steady": new}, fleet_page, promote=True, now=NIGHT)
        except PublishError:
            died += 1
        after = {key: plain.read(key) for key in plain.keys("latest/")}
        assert set(after) == set(before)
        if k <= writes_of_run + 1:
            assert after == before, f"write {k} failed and latest/ changed"
        (entry,) = (read_latest(plain) or {})["limits"]
        assert entry["limit"] == {"r1": 24, "r2": 20}[entry["run_id"]]
        verify_manifest(plain, f"runs/{entry['run_id']}/1")
        for name in ("latest/report.html", "latest/report.md"):
            run = "r2" if b"/r2/" in after[name] else "r1"
            assert f"../runs/{run}/1/".encode() in after[name]
            verify_manifest(plain, f"runs/{run}/1")
        if k < writes_of_run:
            with pytest.raises(PublishError, match="not published completely"):
                verify_manifest(plain, "runs/r2/1")
        retry = publish_run(plain, "r2", {"steady": new}, fleet_page, promote=True, now=NIGHT)
        assert retry["attempt"] == (1 if k == 0 else 2)
        verify_manifest(plain, retry["prefix"])
        assert (read_latest(plain) or {})["limits"][0]["limit"] == 20
    assert died == total


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda store: store.write("runs/r1/1/steady/steps.csv", b"x"),
            r"steady/steps\.csv differs \(1 bytes",
        ),
        (lambda store: store.path("runs/r1/1/report.html").unlink(), r"report\.html is missing"),
        (lambda store: store.write("runs/r1/1/new.txt", b""), r"new\.txt is not in the manifest"),
        (lambda store: store.path("runs/r1/1/manifest.json").unlink(), "not published completely"),
        (lambda store: store.write("runs/r1/1/manifest.json", b"{"), "not JSON"),
        (lambda store: store.write("runs/r1/1/manifest.json", b"{}"), "does not match manifest"),
    ],
)
def test_verify_finds_what_is_wrong(
    source: FolderStore,
    target: FolderStore,
    fleet_page: SweepDir,
    spoil: Callable[[FolderStore], None],
    message: str,
) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    publish_run(target, "r1", {"steady": sweep}, fleet_page, now=NIGHT)
    verify_manifest(target, "runs/r1/1")
    spoil(target)
    with pytest.raises(PublishError, match=message):
        verify_manifest(target, "runs/r1/1")


def test_a_broken_latest_is_named_and_left_alone(source: FolderStore, target: FolderStore) -> None:
    target.write("latest/limits.json", b"not json")
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    with pytest.raises(PublishError, match=r"latest/limits\.json: not JSON .* move it away"):
        publish_run(target, "r1", {"steady": sweep}, promote=True, now=NIGHT)
    assert target.read("latest/limits.json") == b"not json"


def test_missing_limits_are_named(source: FolderStore, target: FolderStore) -> None:
    sweep = SweepDir(source, "empty")
    sweep.write_json("sweep.json", {"model": "m"})
    with pytest.raises(
        PublishError, match=r"empty/limits\.json: missing; compute the limits before publishing"
    ):
        publish_run(target, "r1", {"m": sweep}, now=NIGHT)
    assert target.keys() == []


def test_documents_match_their_schemas(source: FolderStore, target: FolderStore) -> None:
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    publish_run(target, "r1", {"steady": sweep}, promote=True, now=NIGHT)
    for key, name in (
        ("latest/limits.json", "latest-limits"),
        ("runs/r1/1/manifest.json", "manifest"),
        ("runs/r1/1/steady/limits.json", "limits"),
        ("runs/r1/1/steady/quality.json", "quality"),
        ("history/r1.json", "history"),
    ):
        check(json.loads(target.read(key)), name, key)


WHEN = "2026-11-30T05:00:00+00:00"


def limits_with(entry: Entry) -> Entry:
    return {"schema": 1, "saturation": [], "valid_until": None, "limits": [entry]}


@pytest.mark.parametrize(
    ("name", "data", "place"),
    [
        ("latest-limits", {"schema": 1, "updated_at": WHEN, "updated_by_run": "r"}, "top"),
        ("limits", {"schema": 1, "saturation": [], "valid_until": "soon", "limits": []}, "valid_until"),
        ("limits", limits_with(limit_entry("m", "c", 5, "rejected")), "limits/0/limit"),
        ("limits", limits_with(limit_entry("m", "c", None, "proven")), "limits/0/evidence"),
        (
            "manifest",
            {
                "schema": 1,
                "run_id": "r",
                "attempt": 1,
                "published_at": WHEN,
                "models": [],
                "files": [{"name": "../x", "bytes": 1, "sha256": "0" * 64}],
            },
            "files/0/name",
        ),
    ],
)
def test_schemas_refuse(name: str, data: Entry, place: str) -> None:
    assert schema(name)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    with pytest.raises(PublishError, match=rf"does not match {name}\.schema\.json at {place}"):
        check(data, name, "here")
