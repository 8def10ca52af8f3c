"""The history, each run once: whatever is compacted, dies or is written meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.errors import PublishError
from include.capacity.publish.documents import check
from include.capacity.publish.history import (
    COMPACTED,
    compact,
    entry_key,
    history_entry,
    read_history,
    write_entry,
)
from include.capacity.results.store import FolderStore

NOW = datetime(2026, 12, 2, 5, 0, tzinfo=UTC)


def entry(run_id: str, published_at: str, attempt: int = 1) -> dict[str, Any]:
    at = datetime.fromisoformat(published_at)
    return history_entry(run_id, attempt, at, {}, {}, {}, promoted=True, scheduled_at=None)


RUNS = [
    entry("a", "2026-10-30T05:00:00+00:00"),
    entry("b", "2026-10-31T23:59:59+00:00"),
    entry("c", "2026-11-01T00:00:00+00:00"),
    entry("d", "2026-12-01T05:00:00+00:00"),
]


def filled(root: Path) -> FolderStore:
    store = FolderStore(root)
    for one in RUNS:
        write_entry(store, one)
    return store


def ids(store: FolderStore) -> list[str]:
    return [one["run_id"] for one in read_history(store)]


def test_months_that_are_over_become_one_object_each(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert compact(store, NOW) == ["2026-10", "2026-11"]
    assert store.keys() == [
        "history/compacted~2026-10.json",
        "history/compacted~2026-11.json",
        "history/d.json",
    ]
    assert read_history(store) == RUNS
    october = json.loads(store.read("history/compacted~2026-10.json"))
    check(october, "history-month", "here")
    assert (october["month"], len(october["entries"])) == ("2026-10", 2)
    assert compact(store, NOW) == []


def test_a_late_run_joins_its_month(tmp_path: Path) -> None:
    store = filled(tmp_path)
    compact(store, NOW)
    write_entry(store, entry("e", "2026-10-30T09:00:00+00:00"))
    assert compact(store, NOW) == ["2026-10"]
    assert ids(store) == ["a", "e", "b", "c", "d"]
    assert [key for key in store.keys("history/") if not key.startswith(COMPACTED)] == ["history/d.json"]


def test_a_run_published_again_counts_once_by_its_highest_attempt(tmp_path: Path) -> None:
    store = filled(tmp_path)
    compact(store, NOW)
    write_entry(store, entry("a", "2026-12-02T01:00:00+00:00", attempt=2))
    assert store.exists("history/a~2.json")
    assert [(one["run_id"], one["attempt"]) for one in read_history(store)] == [
        ("b", 1),
        ("c", 1),
        ("d", 1),
        ("a", 2),
    ]
    compact(store, datetime(2027, 1, 2, tzinfo=UTC))
    assert store.keys() == [
        "history/compacted~2026-10.json",
        "history/compacted~2026-11.json",
        "history/compacted~2026-12.json",
    ]
    assert ids(store) == ["b", "c", "d", "a"]


class DiesAt(FolderStore):
    """A store whose k-th change (write or removal, from 0) kills the process."""

    def __init__(self, root: Path, k: int) -> None:
        super().__init__(root)
        self.left = k

    def _change(self) -> None:
        if self.left == 0:
            raise PublishError("killed")
        self.left -= 1

    def write(self, key: str, data: bytes) -> None:
        self._change()
        super().write(key, data)

    def delete(self, key: str) -> None:
        self._change()
        super().delete(key)


def test_a_compaction_that_dies_anywhere_loses_and_doubles_nothing(tmp_path: Path) -> None:
    changes = 2 + 3  # two months written, three runs' objects removed
    for k in range(changes + 1):
        store = filled(tmp_path / str(k))
        if k < changes:
            with pytest.raises(PublishError, match="killed"):
                compact(DiesAt(store.root, k), NOW)
        else:
            compact(DiesAt(store.root, k), NOW)
        assert read_history(store) == RUNS, f"died at change {k}"
        compact(store, NOW)
        assert read_history(store) == RUNS
        assert len(store.keys()) == 3


class Meanwhile(FolderStore):
    """A store in which something happens once, just before a key is read or a month is written."""

    def __init__(self, root: Path, when: Callable[[str, str], bool], what: Callable[[], None]) -> None:
        super().__init__(root)
        self.when, self.what, self.done = when, what, False

    def _happen(self, how: str, key: str) -> None:
        if not self.done and self.when(how, key):
            self.done = True
            self.what()

    def read(self, key: str) -> bytes:
        self._happen("read", key)
        return super().read(key)

    def write_if(self, key: str, data: bytes, version: str | None) -> None:
        self._happen("write", key)
        super().write_if(key, data, version)


@pytest.mark.parametrize("key", [entry_key(run["run_id"], 1) for run in RUNS])
def test_a_reader_sees_each_run_once_while_the_history_is_compacted(tmp_path: Path, key: str) -> None:
    store = filled(tmp_path)
    reader = Meanwhile(
        tmp_path, lambda how, at: (how, at) == ("read", key), lambda: compact(store, NOW) and None
    )
    assert read_history(reader) == RUNS
    assert reader.done


def test_two_compactions_at_once_lose_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path)
    other = Meanwhile(tmp_path, lambda how, _: how == "write", lambda: compact(store, NOW) and None)
    # The other was faster with October; November is merged with what it has written.
    assert compact(other, NOW) == ["2026-11"]
    assert other.done
    assert read_history(store) == RUNS


def test_a_run_that_is_published_while_its_month_is_compacted_is_kept(tmp_path: Path) -> None:
    store = filled(tmp_path)
    late = entry("late", "2026-10-31T12:00:00+00:00")
    other = Meanwhile(tmp_path, lambda how, _: how == "write", lambda: write_entry(store, late))
    compact(other, NOW)
    assert sorted(ids(store)) == ["a", "b", "c", "d", "late"]


@pytest.mark.parametrize("key", ["history/x.json", "history/compacted~2026-09.json"])
@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"",
        b"[]",
        b"7",
        b"{}",
        b'{"schema": 1, "run_id": "x", "published_at": 3}',
        b'{"schema": 1, "month": "2026-09", "entries": [{"run_id": "x"}]}',
        b'{"schema": 1, "month": "2026-09", "entries": [{"run_id": "x", "attempt": 1, "models": {"m": {}}, '
        b'"published_at": "2026-09-01T00:00:00+00:00"}]}',
    ],
)
def test_what_is_no_object_of_the_history_is_named(tmp_path: Path, key: str, data: bytes) -> None:
    store = filled(tmp_path)
    store.write(key, data)
    with pytest.raises(PublishError, match=rf"/{key}: "):
        read_history(store)
    if key == "history/x.json":
        with pytest.raises(PublishError, match=rf"/{key}: "):
            compact(store, NOW)
    assert store.read(key) == data


@settings(max_examples=200)
@given(st.lists(st.text(max_size=200), unique=True, max_size=8), st.integers(1, 12))
def test_no_name_takes_anothers_place(names: list[str], attempt: int) -> None:
    keys = {entry_key(name, at) for name in names for at in (1, attempt)}
    assert len(keys) == len(names) * len({1, attempt})
    for key in keys:
        assert key.startswith("history/")
        assert not key.startswith(COMPACTED)
        assert key.count("/") == 1
        assert len(key.removeprefix("history/").encode()) <= 255
        assert key.isascii()
