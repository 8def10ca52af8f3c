"""A sweep directory: the files one model's sweep is kept in, locally or in a store.

::

    sweep.json                    what was measured: stack, classes, workloads, ladder, versions
    requests/<step>.parquet       request rows of one step
    metrics/<step>.parquet        the server's series during it, one row per second and series
    steps/<step>.json             the step's Facts; written last, so a step without it never was
    steps.csv                     derived: one row per step, class and repeat
    quality.json limits.json report.html report.md figures/

A step's key is fixed by what it measures, so a retry overwrites its own half-written try and
nothing else.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from include.capacity.errors import DataError
from include.capacity.results.plain import finite
from include.capacity.results.schema import METRIC_SCHEMA, REQUEST_SCHEMA, Facts
from include.capacity.results.store import Store


class SweepDir:
    """Reads and writes one sweep's files below ``prefix`` of a store."""

    def __init__(self, store: Store, prefix: str = "") -> None:
        self.store = store
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    @property
    def url(self) -> str:
        """Where the sweep lives, for people and for links."""
        return f"{self.store.url}/{self.prefix}".rstrip("/")

    # -- raw files

    def read(self, name: str) -> bytes:
        """A file's bytes; FileNotFoundError if there is none."""
        return self.store.read(self.prefix + name)

    def write(self, name: str, data: bytes | str) -> None:
        """Replace a file whole."""
        self.store.write(self.prefix + name, data.encode() if isinstance(data, str) else data)

    def names(self, below: str = "") -> list[str]:
        """Names of all files whose name starts with ``below``."""
        return [key[len(self.prefix) :] for key in self.store.keys(self.prefix + below)]

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.store.exists(self.prefix + name)

    def read_json(self, name: str) -> Any:
        """A JSON file; DataError if it is not one."""
        try:
            return json.loads(self.read(name))
        except ValueError as error:
            raise DataError(f"{self.url}/{name}: not JSON: {error}") from error

    def write_json(self, name: str, data: Any) -> None:
        """Write JSON that every parser takes: NaN and infinities become null."""
        self.write(name, json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    # -- steps

    def write_step(
        self, key: str, facts: Facts, requests: pa.Table | None, metrics: pa.Table | None = None
    ) -> None:
        """Keep one step; its Facts go last, so that a half-written step does not count."""
        if requests is not None:
            self.write(f"requests/{key}.parquet", _parquet(requests))
        if metrics is not None and metrics.num_rows:
            self.write(f"metrics/{key}.parquet", _parquet(metrics))
        self.write_json(f"steps/{key}.json", facts.to_json())

    def step_keys(self) -> list[str]:
        """Keys of all finished steps."""
        return [
            name.removeprefix("steps/").removesuffix(".json")
            for name in self.names("steps/")
            if name.endswith(".json")
        ]

    def facts(self, key: str) -> Facts:
        """A finished step's facts; DataError if the file holds something else."""
        name = f"steps/{key}.json"
        try:
            return Facts.from_json(self.read_json(name))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.url}/{name}: not the facts of a step: {error}") from error

    def all_facts(self) -> dict[str, Facts]:
        """Facts of all finished steps, in the order in which they began."""
        found = {key: self.facts(key) for key in self.step_keys()}
        return dict(sorted(found.items(), key=lambda item: (item[1].started_at, item[0])))

    def requests(
        self, keys: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Request rows of finished steps as one table, with a column ``step`` naming the key.

        ``columns``: only these of REQUEST_COLUMNS (and ``step``), which reads a large sweep several times
        faster and smaller.
        """
        wanted = None if columns is None else list(columns)
        if self.exists("requests.parquet"):  # a published or imported sweep: all steps in one file
            whole = None if wanted is None else [*wanted, "step"]
            chosen = None if keys is None else pc.field("step").isin(list(keys))
            return self._table("requests.parquet", whole, chosen).to_pandas()
        tables = []
        for key in self.step_keys() if keys is None else keys:
            if not self.exists(f"requests/{key}.parquet"):
                continue
            table = self._table(f"requests/{key}.parquet", wanted)
            tables.append(table.append_column("step", pa.array([key] * table.num_rows, pa.string())))
        if not tables:
            empty = REQUEST_SCHEMA.empty_table().select(wanted or REQUEST_SCHEMA.names)
            return empty.append_column("step", pa.array([], pa.string())).to_pandas()
        return pa.concat_tables(tables).to_pandas()

    def metrics(self, key: str) -> pd.DataFrame:
        """The server's series during a step (columns of METRIC_SCHEMA); empty if none were read."""
        if not self.exists(f"metrics/{key}.parquet"):
            return METRIC_SCHEMA.empty_table().to_pandas()
        return self._table(f"metrics/{key}.parquet").to_pandas()

    def _table(
        self, name: str, columns: list[str] | None = None, chosen: pc.Expression | None = None
    ) -> pa.Table:
        """A Parquet file, or some of its columns and rows; DataError if it is not one."""
        try:
            return pq.read_table(io.BytesIO(self.read(name)), columns=columns, filters=chosen)
        except pa.ArrowException as error:
            raise DataError(f"{self.url}/{name}: not a Parquet file with these columns: {error}") from error

    # -- the derived step table

    def write_steps(self, steps: pd.DataFrame) -> None:
        """Write ``steps.csv``."""
        self.write("steps.csv", steps.to_csv(index=False, lineterminator="\n"))

    def steps(self) -> pd.DataFrame:
        """Read ``steps.csv``; blank cells are NaN. DataError if it is not CSV."""
        try:
            return pd.read_csv(io.BytesIO(self.read("steps.csv")))
        except ValueError as error:  # pandas' own parsing errors, and bytes that are not UTF-8
            raise DataError(f"{self.url}/steps.csv: not a CSV table: {error}") from error


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
