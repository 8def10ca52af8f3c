"""The checks as Great Expectations suites: an ephemeral context, pandas frames, no network.

Each :class:`~.checks.Check` becomes one expectation with its id in ``meta`` and its severity
(``critical`` rejects, ``warning`` flags). Where no built-in expectation fits there are two of our own:
columns that must ascend within a row, and columns that must add up to another.

This module imports Great Expectations (seconds): import it where it is used, never at package level.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GX_ANALYTICS_ENABLED", "False")  # read at import: nothing is sent anywhere

import great_expectations as gx
import great_expectations.expectations as gxe
import numpy as np
import pandas as pd
from great_expectations.data_context.types.base import ProgressBarsConfig
from great_expectations.datasource.fluent.interfaces import Batch
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import MulticolumnMapExpectation
from great_expectations.expectations.metrics.map_metric_provider import (
    MulticolumnMapMetricProvider,
    multicolumn_condition_partial,
)
from great_expectations.expectations.row_conditions import Column

from include.capacity.errors import DataError
from include.capacity.quality.checks import Check
from include.capacity.words import Outcome, Severity

# This module of theirs sets its own level to INFO, to report a folder that it removes again at once.
logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)

GX_SEVERITY = {Severity.REJECT: "critical", Severity.FLAG: "warning"}
KEPT_EXAMPLES = 20
"""Most unexpected values kept of one expectation: a result must stay readable."""
TOLERANCE = 1e-6
"""Relative: sums and orders are of floating-point numbers."""


class ColumnsAscend(MulticolumnMapMetricProvider):
    """Whether each row's known values ascend in the order of the columns (equal is fine)."""

    condition_metric_name = "multicolumn_values.capacity_ascend"
    condition_domain_keys = (
        "batch_id",
        "table",
        "column_list",
        "row_condition",
        "condition_parser",
        "ignore_row_if",
    )
    condition_value_keys = ("tolerance",)

    @multicolumn_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column_list: pd.DataFrame, tolerance: float | None = None, **_: Any) -> pd.Series:
        values = column_list.apply(pd.to_numeric).astype(float).ffill(axis=1)
        later = values.to_numpy()[:, 1:]
        earlier = values.to_numpy()[:, :-1]
        falls = later < earlier - (tolerance or TOLERANCE) * np.abs(earlier)
        return pd.Series(~falls.any(axis=1), index=column_list.index)


class ColumnsAddUp(MulticolumnMapMetricProvider):
    """Whether the last column is the sum of the others, in rows that know them all."""

    condition_metric_name = "multicolumn_values.capacity_add_up"
    condition_domain_keys = ColumnsAscend.condition_domain_keys
    condition_value_keys = ()

    @multicolumn_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column_list: pd.DataFrame, **_: Any) -> pd.Series:
        values = column_list.apply(pd.to_numeric).to_numpy(float)
        gap = np.abs(values[:, :-1].sum(axis=1) - values[:, -1])
        return pd.Series(~(gap > TOLERANCE * np.abs(values[:, -1])), index=column_list.index)


class ExpectColumnsToAscend(MulticolumnMapExpectation):
    """Expect the known values of each row to ascend in the order of the columns, to a relative tolerance."""

    tolerance: float = TOLERANCE
    success_keys = (*MulticolumnMapExpectation.success_keys, "tolerance")
    map_metric = "multicolumn_values.capacity_ascend"


class ExpectColumnsToAddUp(MulticolumnMapExpectation):
    """Expect the last column to be the sum of the others."""

    map_metric = "multicolumn_values.capacity_add_up"


@dataclass(frozen=True)
class Hit:
    """A row of the step or series table, or the request rows of one step, that crossed a check's line."""

    check: Check
    at: tuple[Any, ...]
    """Values of the index columns."""
    n: int = 1
    """How many rows of the table it stands for."""


@dataclass(frozen=True)
class Validated:
    """What a suite said about a table."""

    hits: list[Hit]
    unknown: list[Check]
    """Checks none of whose columns is known anywhere."""
    result: dict[str, Any]
    """Great Expectations' own result as JSON, examples cut to a few."""


def validate(name: str, table: pd.DataFrame, checks: Iterable[Check], index: list[str]) -> Validated:
    """Run ``checks`` over ``table``; hits name their rows by the columns ``index``.

    DataError if an expectation could not be evaluated at all.
    """
    known, unknown = [], []
    empty = {column for column in table.columns if not table[column].notna().any()}
    for check in checks:
        missing = [column for column in check.columns if column not in table or column in empty]
        needed = 2 if check.kind in ("ascend", "adds_up") else 1
        if len(check.columns) - len(missing) < needed and not _null_is_the_fault(check, table):
            unknown.append(check)
        else:
            known.append(check)
    batch = _batch(name, table)  # first: a suite needs the context that it makes
    expectations = [_expectation(check, number, table) for number, check in enumerate(known)]
    asked = {"result_format": "COMPLETE", "unexpected_index_column_names": index}
    suite = gx.ExpectationSuite(name=name, expectations=expectations)
    result = batch.validate(suite, result_format=asked).to_json_dict()
    hits: list[Hit] = []
    for outcome in result["results"]:
        check = known[outcome["expectation_config"]["meta"]["number"]]
        raised = outcome["exception_info"]
        if raised.get("raised_exception", "raised_exception" not in raised):
            raise DataError(f"{name} table: check {check.id} on {check.columns} could not run: {raised}")
        if not outcome["success"]:
            hits += _hits(check, outcome["result"].get("unexpected_index_list") or [], index)
        _shorten(outcome["result"])
    return Validated(hits, unknown, result)


def _null_is_the_fault(check: Check, table: pd.DataFrame) -> bool:
    return check.kind == "not_null" and check.columns[0] in table and len(table) > 0


def _batch(name: str, table: pd.DataFrame) -> Batch:
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_pandas("capacity").add_dataframe_asset(name)
    return asset.add_batch_definition_whole_dataframe("whole").get_batch({"dataframe": table})


def _expectation(check: Check, number: int, table: pd.DataFrame) -> gxe.Expectation:
    common: dict[str, Any] = {
        "severity": GX_SEVERITY[check.severity],
        "meta": {"check": check.id, "number": number, "reason": check.reason},
        **check.limits,
    }
    if check.kind == "between":  # limits are decimal, the values binary: 0.9 + 0.05 is no more than 0.95
        low, high = common.get("min_value"), common.get("max_value")
        strict = common.get("strict_min")
        common["min_value"] = low if low is None or strict else low - TOLERANCE * abs(low)
        common["max_value"] = None if high is None else high + TOLERANCE * abs(high)
    if check.only_completed:
        common["row_condition"] = Column("outcome") == Outcome.COMPLETED.value
    column = check.columns[0]
    columns = [name for name in check.columns if name in table]
    match check.kind:
        case "between":
            return gxe.ExpectColumnValuesToBeBetween(column=column, **common)
        case "not_null":
            return gxe.ExpectColumnValuesToNotBeNull(column=column, **common)
        case "in_set":
            return gxe.ExpectColumnValuesToBeInSet(column=column, **common)
        case "unique":
            return gxe.ExpectCompoundColumnsToBeUnique(column_list=columns, **common)
        case "ascend":
            return ExpectColumnsToAscend(column_list=columns, ignore_row_if="never", **common)
        case "adds_up":
            return ExpectColumnsToAddUp(column_list=columns, ignore_row_if="never", **common)


def _hits(check: Check, unexpected: list[Mapping[str, Any]], index: list[str]) -> list[Hit]:
    counts: dict[tuple[Any, ...], int] = {}
    for row in unexpected:
        at = tuple(row[name] for name in index)
        counts[at] = counts.get(at, 0) + 1
    return [Hit(check, at, n) for at, n in counts.items()]


def _shorten(result: dict[str, Any]) -> None:
    """Keep counts and a few examples of what was unexpected."""
    for name in ("unexpected_list", "unexpected_index_list", "unexpected_index_query"):
        result.pop(name, None)
    for name, value in result.items():
        if isinstance(value, list):
            result[name] = value[:KEPT_EXAMPLES]
