"""The step table, derived from request rows and each step's Facts.

One row per step, service class and repeat, the baseline and the prime included. Only *counted*
requests enter (started in the window, before the cut). With W the length of the window in seconds:

- ``attempted`` = counted requests without ``aborted`` and ``client_error`` (they are in no rate);
  one column per outcome counts all counted requests, those two included.
- Throughput is of **completed** requests: ``output_tok_per_s`` = their output tokens / W,
  ``total_tok_per_s`` = prompt + output tokens / W, ``request_per_s`` = completed / W.
  ``raw_output_tok_per_s`` counts the tokens of *all* counted requests: where it stands above
  ``output_tok_per_s``, the server works for answers that fail in the end.
- Latency statistics are over completed requests, with their n beside them (``ttft_n``, ...).
  Percentiles interpolate linearly between order statistics; p95 needs n >= 20 and p99 n >= 100
  (below that the percentile is just the maximum) and is blank otherwise.
- TPOT of a request = (last token - TTFT) / (output tokens - tokens of the first chunk), undefined
  below 2 tokens. ``tpot_p*`` are percentiles over requests; ``tpot_mean_s`` is **total decode time
  over total tokens**, so that a 2-token answer with one long gap weighs as one gap, not as a request.

Unknown is blank, never 0: no window, no rate; unknown prompt tokens of a completed request, no total.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from include.capacity.errors import DataError
from include.capacity.results.schema import (
    CLIENT_COLUMNS,
    LATENCIES,
    SERVER_COLUMNS,
    STEP_COLUMNS,
    Facts,
)
from include.capacity.results.sweepdir import SweepDir
from include.capacity.words import UNRATED, Outcome

MIN_N = {"p50": 1, "p95": 20, "p99": 100, "mean": 1}
"""Fewest requests for each statistic: 1 / (1 - p), so that one request lies beyond the percentile."""

COUNTS = [
    "attempted",
    *(outcome.value for outcome in Outcome),
    "objective_met",
    *(f"{latency}_n" for latency in LATENCIES),
]
"""Columns that are 0, not unknown, where a step has no counted request."""

NEEDED = (
    "service_class",
    "ttft_s",
    "last_token_s",
    "e2e_s",
    "deadline_s",
    "prompt_tokens",
    "output_tokens",
    "first_chunk_tokens",
    "outcome",
    "counted",
)
"""Request columns that the step table is derived from."""

States = Mapping[tuple[str, str], tuple[str | None, float | None]]
"""(step key, service class) -> (state, effective requests)."""


def derive_steps(sweep: SweepDir, states: States | None = None) -> pd.DataFrame:
    """The step table of a measured sweep: columns exactly STEP_COLUMNS, in the order of start.

    The index holds each row's step key (twice for a step that ran two classes at once).
    ``states`` fills ``state`` and ``n_effective``; DataError if ``sweep.json`` lacks what is needed.
    """
    requests = sweep.requests(columns=NEEDED)
    return steps_table(sweep.read_json("sweep.json"), sweep.all_facts(), requests, states)


def steps_table(
    sweep_json: Mapping[str, Any],
    facts: Mapping[str, Facts],
    requests: pd.DataFrame,
    states: States | None = None,
) -> pd.DataFrame:
    """As :func:`derive_steps`, from tables: ``requests`` has the columns NEEDED and ``step``."""
    if "model" not in sweep_json:
        raise DataError("sweep.json: key 'model' is missing")
    rows = [
        _known(sweep_json, key, step, at, (states or {}).get((key, step.loads[at].service_class)))
        for key, step in facts.items()
        for at in range(len(step.loads))
    ]
    known = pd.DataFrame(rows, columns=["key", *STEP_COLUMNS]).set_index(["key", "service_class"], drop=False)
    known.index.names = ["step_key", "class_key"]
    deadline_s = pd.to_numeric(known["deadline_s"])
    counted = requests[requests["counted"].fillna(False).astype(bool)]
    measured = _measured(counted, sweep_json.get("classes") or {}).reindex(known.index)
    for column in measured.columns:
        known[column] = measured[column]
    known["deadline_s"] = known["deadline_s"].fillna(deadline_s)
    known[COUNTS] = known[COUNTS].fillna(0).astype("int64")
    window_s = pd.to_numeric(known["window_s"]).where(lambda seconds: seconds > 0)
    known["request_per_s"] = known["completed"] / window_s
    for rate in ("output", "total"):
        tokens = known[f"{rate}_tokens"].mask(known["completed"] == 0, 0.0)
        known[f"{rate}_tok_per_s"] = tokens / window_s
    known["raw_output_tok_per_s"] = known["raw_tokens"].fillna(0.0) / window_s
    table = known.set_index("key")[list(STEP_COLUMNS)]
    return table.apply(lambda column: column.infer_objects())


def request_tpot_s(requests: pd.DataFrame) -> pd.Series:
    """TPOT of each request in seconds per token; NaN where undefined (fewer than 2 tokens, no stream)."""
    decode_s, tokens = _decode(requests)
    return decode_s / tokens


def objectives_met(requests: pd.DataFrame, service_class: Mapping[str, Any]) -> pd.Series:
    """Whether each request completed with every objective of its class in time.

    ``service_class`` is a ServiceClass as JSON. A completed request whose first token is unknown
    meets no TTFT objective; one with fewer than 2 tokens has no TPOT that could be too long.
    """
    met = requests["outcome"] == Outcome.COMPLETED.value
    for name in LATENCIES:
        objective = service_class.get(name)
        if not objective:
            continue
        if name == "tpot":
            tpot = request_tpot_s(requests)
            met &= ~(tpot > objective["at_most_s"])
        else:
            met &= requests[f"{name}_s"] <= objective["at_most_s"]
    return met


def _decode(requests: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Decode time in seconds and tokens decoded in it, both NaN where TPOT is undefined."""
    output = pd.to_numeric(requests["output_tokens"]).astype(float)
    first = pd.to_numeric(requests["first_chunk_tokens"]).astype(float).fillna(1.0)
    tokens = output - first
    seconds = pd.to_numeric(requests["last_token_s"]) - pd.to_numeric(requests["ttft_s"])
    defined = (output >= 2) & (tokens >= 1) & seconds.notna()
    return seconds.where(defined), tokens.where(defined)


def _known(
    sweep_json: Mapping[str, Any],
    key: str,
    step: Facts,
    at: int,
    state: tuple[str | None, float | None] | None,
) -> dict[str, Any]:
    """What one row knows without its requests."""
    load = step.loads[at]
    classes = sweep_json.get("classes") or {}
    service_class = classes.get(load.service_class) or {}
    return {
        "key": key,
        "run_id": step.run_id or sweep_json.get("run_id"),
        "attempt": step.attempt,
        "source": sweep_json.get("source", "measured"),
        "model": sweep_json["model"],
        "series": sweep_json.get("series", ""),
        "service_class": load.service_class,
        "workload": (service_class.get("workload") or {}).get("name"),
        "phase": str(step.spec["phase"]),
        "concurrency": load.concurrency,
        "repeat": step.spec.get("repeat", 1),
        "started_at": step.started_at,
        "warmup_s": load.warmup_s,
        "warmup_steady": load.warmup_steady,
        "stop_reason": load.stop_reason,
        "deadline_s": service_class.get("deadline_s"),
        "window_s": load.window_s,
        "inflight_mean": load.inflight_mean,
        "inflight_peak": load.inflight_peak,
        "state": state[0] if state else None,
        "n_effective": state[1] if state else None,
        "invalid": step.invalid,
        "error": step.error,
        **{name: step.client.get(name) for name in CLIENT_COLUMNS},
        **{name: step.server.get(name) for name in SERVER_COLUMNS},
    }


def _measured(counted: pd.DataFrame, classes: Mapping[str, Any]) -> pd.DataFrame:
    """What the counted requests say, one row per (step, service class)."""
    by = [counted["step"], counted["service_class"]]
    completed = counted["outcome"] == Outcome.COMPLETED.value
    outcomes = pd.crosstab(by, counted["outcome"]) if len(counted) else pd.DataFrame()
    table = pd.DataFrame(index=counted.groupby(by).size().index)
    for outcome in Outcome:
        table[outcome.value] = outcomes.get(outcome.value, 0)
    unknown = sorted(set(counted["outcome"].dropna().unique()) - {str(outcome) for outcome in Outcome})
    if unknown or counted["outcome"].isna().any():
        raise DataError(
            f"requests: outcome {unknown or 'blank'}: expected one of {[str(o) for o in Outcome]}"
        )
    table["attempted"] = table[[o.value for o in Outcome if o not in UNRATED]].sum(axis=1)

    met = pd.Series(False, index=counted.index)
    for name, at in counted.groupby("service_class").groups.items():
        met.loc[at] = objectives_met(counted.loc[at], classes.get(str(name)) or {})
    table["objective_met"] = met.groupby(by).sum()

    output = pd.to_numeric(counted["output_tokens"]).astype(float)
    prompt = pd.to_numeric(counted["prompt_tokens"]).astype(float)
    of_completed = [column[completed] for column in by]
    table["raw_tokens"] = output.groupby(by).sum()
    table["output_tokens"] = _whole_sum(output[completed], of_completed)
    table["total_tokens"] = _whole_sum((output + prompt)[completed], of_completed)
    table["tokens_per_answer_mean"] = output[completed].groupby(of_completed).mean()
    table["prompt_tokens_mean"] = prompt[completed].groupby(of_completed).mean()
    table["deadline_s"] = counted["deadline_s"].groupby(by).max()

    decode_s, tokens = _decode(counted)
    latencies = {"ttft": counted["ttft_s"], "tpot": decode_s / tokens, "e2e": counted["e2e_s"]}
    for name, seconds in latencies.items():
        _statistics(table, name, pd.to_numeric(seconds[completed]), of_completed)
    pooled = decode_s[completed].groupby(of_completed).sum() / tokens[completed].groupby(of_completed).sum()
    table["tpot_mean_s"] = pooled.where(table["tpot_n"] > 0)
    return table


def _whole_sum(values: pd.Series, by: list[pd.Series]) -> pd.Series:
    """Sums of groups; unknown where any value is."""
    groups = values.groupby(by)
    return groups.sum().where(groups.count() == groups.size())


def _statistics(table: pd.DataFrame, name: str, seconds: pd.Series, by: list[pd.Series]) -> None:
    """Write ``<name>_n`` and its statistics, blank where n is too small for one."""
    groups = seconds.groupby(by)
    n = groups.count().reindex(table.index).fillna(0).astype("int64")
    table[f"{name}_n"] = n
    quantiles = groups.quantile(np.array([0.5, 0.95, 0.99])).unstack() if len(seconds) else pd.DataFrame()
    for statistic, at in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        values = quantiles[at] if at in quantiles else pd.Series(np.nan, index=table.index)
        table[f"{name}_{statistic}_s"] = values.where(n >= MIN_N[statistic])
    table[f"{name}_mean_s"] = groups.mean()
