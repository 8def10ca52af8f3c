"""What the checks look at: one number per step or series for each thing that can be wrong.

The suites (:mod:`.checks`) hold thresholds; this module holds the arithmetic. A measure is NaN where it
cannot be known or does not apply, and then nothing is judged. The prime step is never judged, so it
has no measures at all; the baseline (30 requests, no verdict) has those that do not need a size.

A server that refuses, times out or crashes is a finding *about the server*: no measure here turns a
failure of the server into a fault of the measurement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from include.capacity.importers.document import IMPORTED_COLUMNS
from include.capacity.quality import statistics as st
from include.capacity.quality.imported import measure_imported
from include.capacity.results.schema import STEP_COLUMNS
from include.capacity.words import EVIDENCE_PHASES, UNRATED, Outcome, Phase, StopReason

SERIES = ("source", "model", "series", "service_class", "workload")
"""What identifies a curve: steps that differ only in concurrency and repeat."""

PROOF = {str(phase) for phase in EVIDENCE_PHASES}
UNSIZED = {str(Phase.BASELINE), str(Phase.PRIME)}
CUT_SHORT = {str(r) for r in (StopReason.EARLY_FAIL, StopReason.SERVER_GONE, StopReason.ERROR)}
"""Stop reasons that explain a small step: the server has failed, or is gone."""

LATENCY_NAMES = {"ttft_s": "time to first token", "e2e_s": "end-to-end latency"}
"""Latencies that are compared, by column of the request table."""

RATE = r"\s*\S+ requests/s$"
"""How importers name the rate of an open loop within a workload."""

RATED_FAILURES = [str(o) for o in Outcome if o not in UNRATED and o is not Outcome.COMPLETED]


def measure(
    steps: pd.DataFrame, requests: pd.DataFrame | None, sweep_json: Mapping[str, Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(step table with measures, series table with measures).

    ``steps`` has STEP_COLUMNS (others are kept) and its index names each step (see ``derive_steps``);
    ``requests`` has REQUEST_COLUMNS and ``step``, or is None for imported steps. ``row`` numbers the
    judged steps, in both tables' results.
    """
    steps = _typed(steps)
    judged = steps[steps["phase"] != str(Phase.PRIME)].reset_index(drop=True)
    judged["row"] = np.arange(len(judged))
    judged["is_failing"] = judged["completed"] < 0.99 * judged["attempted"]
    _sizes(judged, sweep_json)
    _in_flight(judged)
    _server_side(judged, sweep_json)
    _copies(judged, sweep_json)
    rows = _Rows(judged, requests) if requests is not None and len(requests) else None
    if rows is not None:
        judged = judged.copy()  # as above
        _from_rows(judged, rows, sweep_json)
    else:
        if not (judged["source"] == "measured").any():
            measure_imported(judged, _curve_numbers(judged))
        _falls_without_rows(judged)
        judged["repeats_differ"] = _repeats_without_rows(judged)
    return judged, _series(judged, rows)


# -- measures of the step table alone


def _sizes(steps: pd.DataFrame, sweep_json: Mapping[str, Any]) -> None:
    """Requests per slot, seconds of window, and sums that must agree."""
    explained = steps["phase"].isin(UNSIZED) | steps["stop_reason"].isin(CUT_SHORT)
    asked = steps["phase"].isin([*PROOF, str(Phase.SHARED)]) | steps["phase"].isna()
    requests = steps["attempted"].fillna(steps["completed"])
    steps["requests_per_slot"] = (requests / steps["concurrency"]).where(asked & ~explained)
    steps["level"] = steps["concurrency"].fillna(steps["request_rate"])
    least_s = float((sweep_json.get("bounds") or {}).get("min_window_s") or 30.0)
    steps["window_share"] = (steps["window_s"] / least_s).where(
        steps["phase"].isin([*PROOF, str(Phase.SHARED)]) & ~explained
    )
    steps["outcomes_sum"] = (
        steps[["completed", *RATED_FAILURES]]
        .sum(axis=1, min_count=1)
        .where(steps[RATED_FAILURES].notna().all(axis=1))
    )
    attempted = steps["attempted"].where(steps["attempted"] > 0)
    steps["empty_share"] = steps["empty"] / attempted
    steps["aborted_share"] = steps["aborted"] / (attempted + steps["aborted"])
    with_deadline = steps["e2e_p99_s"].where(steps["deadline_s"] > 0)
    steps["p99_of_deadline"] = with_deadline / steps["deadline_s"]


def _in_flight(steps: pd.DataFrame) -> None:
    """How much of the nominal concurrency was in flight, deliberate pauses added back."""
    measured = steps["inflight_mean"] / steps["concurrency"]
    unreachable = steps["stop_reason"].isin([str(StopReason.SERVER_GONE), str(StopReason.ERROR)]) | (
        steps["connect_failed"] > 0.01 * steps["attempted"]
    )
    reached = measured + steps["pause_share"].fillna(0.0)
    steps["inflight_share"] = reached.where(~unreachable & (steps["phase"] != str(Phase.BASELINE)))
    steps["inflight_excess"] = measured
    tail_s = steps["ttft_p99_s"].fillna(steps["e2e_p99_s"])
    steps["lag_of_latency"] = steps[["client_lag_p99_s", "send_lag_p99_s"]].max(axis=1) / tail_s
    steps["invalid"] = (
        steps["invalid"].str.strip().str.rstrip(".") if steps["invalid"].notna().any() else None
    )
    behind = steps["invalid"].map(lambda why: str(why).startswith("simulator-bound"))
    steps["simulator_behind"] = behind.astype(float)
    steps["instrument_invalid"] = (steps["invalid"].notna() & ~behind).astype(float)
    steady = steps["warmup_steady"].map({True: 0.0, False: 1.0, "True": 0.0, "False": 1.0})
    steps["warmup_unsteady"] = steady.where(~steps["phase"].isin(UNSIZED))


def _server_side(steps: pd.DataFrame, sweep_json: Mapping[str, Any]) -> None:
    """Foreign requests on the server, and prompts that its prefix cache already knew."""
    ours = steps.groupby("step", dropna=False)["inflight_mean"].transform(lambda s: s.sum(min_count=len(s)))
    nominal = steps.groupby("step", dropna=False)["concurrency"].transform("sum")
    theirs = steps["server_running_mean"] + steps["server_waiting_mean"].fillna(0.0) - ours
    steps["foreign_mean"] = theirs
    steps["foreign_share"] = (theirs / nominal).where(~(theirs < 1.0), 0.0)
    expected = steps["service_class"].map(
        {
            name: float((item.get("workload") or {}).get("shared_prefix_tokens") or 0)
            for name, item in (sweep_json.get("classes") or {}).items()
        }
    )
    share = (expected / steps["prompt_tokens_mean"]).clip(upper=1.0).fillna(0.0)
    steps["prefix_expected"] = share
    steps["prefix_excess"] = steps["server_prefix_hit_share"] - share


def _copies(steps: pd.DataFrame, sweep_json: Mapping[str, Any]) -> None:
    """Rows of another run, older than the sweep, given twice, or with another step's very numbers."""
    run_id = sweep_json.get("run_id")
    steps["of_another_run"] = (
        (steps["run_id"] != run_id).astype(float).where(steps["run_id"].notna() & bool(run_id))
    )
    created = pd.to_datetime(
        pd.Series([sweep_json.get("created_at")] * len(steps)), utc=True, errors="coerce"
    )
    started = pd.to_datetime(steps["started_at"], utc=True, errors="coerce", format="ISO8601")
    measured = steps["source"] == "measured"
    steps["started_before_sweep_s"] = (created - started).dt.total_seconds().where(measured)
    identity = [*SERIES, "phase", "concurrency", "repeat"]
    steps["same_label"] = steps.groupby(identity, dropna=False)["row"].transform("size").astype(float) - 1
    steps["same_label"] = steps["same_label"].where(measured)
    numbers = ["e2e_mean_s", "e2e_p50_s", "ttft_mean_s", "output_tok_per_s", "completed"]
    known = (steps[numbers].notna().sum(axis=1) >= 3) & (steps["completed"].fillna(1) > 0)
    same = steps.groupby(numbers, dropna=False)["row"]
    copies = same.transform("size").astype(float) - 1
    # Which of two measured steps was copied nobody can tell; of imported rows the first may stand.
    steps["same_numbers"] = copies.where(measured, np.minimum(same.cumcount(), copies)).where(known)
    first, last = same.transform("first"), same.transform("last")
    labels = [_label(step) for step in steps.to_dict("records")]
    steps["twin"] = [labels[at] for at in last.where(last != steps["row"], first)]


# -- measures from request rows


class _Rows:
    """Counted requests of each judged step, in order of start, as plain arrays."""

    columns = ("started_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens")

    def __init__(self, steps: pd.DataFrame, requests: pd.DataFrame) -> None:
        self.all = requests
        counted = requests[requests["counted"].fillna(False).astype(bool)]
        counted = counted.sort_values("started_s", kind="stable")
        self.counted = counted
        groups = counted.groupby(["step", "service_class"]).indices
        numbers = {name: pd.to_numeric(counted[name]).to_numpy(float) for name in self.columns}
        completed = (counted["outcome"] == Outcome.COMPLETED.value).to_numpy()
        empty = np.zeros(0, dtype=int)
        self.of: list[dict[str, st.Array]] = []
        for step, service_class in zip(steps["step"], steps["service_class"], strict=True):
            at = np.asarray(groups.get((step, service_class), empty))
            at = at[completed[at]]
            self.of.append({name: values[at] for name, values in numbers.items()})

    def batches(self, row: int, concurrency: float, latency: str, reference: st.Array | None) -> st.Array:
        """Batch means of a latency over completed requests, at the lengths of ``reference``."""
        mine = self.of[row]
        values = mine[latency]
        if reference is not None:
            values = st.adjusted(values, self._lengths(mine, latency), reference)
        return st.batch_means(values, concurrency)

    def reference(self, rows: list[int], latency: str) -> st.Array:
        """Mean lengths over steps."""
        lengths = np.concatenate([self._lengths(self.of[row], latency) for row in rows])
        lengths = lengths[np.isfinite(lengths).all(axis=1)]
        return lengths.mean(axis=0) if len(lengths) else np.zeros(lengths.shape[1])

    @staticmethod
    def _lengths(mine: dict[str, st.Array], latency: str) -> st.Array:
        names = ("prompt_tokens",) if latency == "ttft_s" else ("prompt_tokens", "output_tokens")
        return np.column_stack([mine[name] for name in names])


def _from_rows(steps: pd.DataFrame, rows: _Rows, sweep_json: Mapping[str, Any]) -> None:
    counted, by = rows.counted, ["step", "service_class"]
    at = pd.MultiIndex.from_frame(steps[by])

    def per_step(values: pd.Series) -> np.ndarray:
        return values.reindex(at).to_numpy(float)

    completed = counted[counted["outcome"] == Outcome.COMPLETED.value]
    keys = [completed["step"], completed["service_class"]]
    eos_ignored = steps["service_class"].map(
        {
            name: bool((item.get("workload") or {}).get("ignore_eos", True))
            for name, item in (sweep_json.get("classes") or {}).items()
        }
    )
    for measure_name, got, asked in (
        ("output_of_asked", "output_tokens", "asked_max_tokens"),
        ("prompt_of_asked", "prompt_tokens", "asked_prompt_tokens"),
    ):
        known = completed[got].notna() & completed[asked].notna()
        sums = completed[known].groupby(by)[[got, asked]].sum()
        steps[measure_name] = per_step(sums[got] / sums[asked].where(sums[asked] > 0))
    steps["output_of_asked"] = steps["output_of_asked"].where(eos_ignored.fillna(True).astype(bool))
    steps["prompt_off"] = (steps["prompt_of_asked"] - 1).abs()
    for measure_name, column, counts in (
        ("estimated_share", "usage_estimated", True),
        ("unstreamed_share", "streamed", False),
    ):
        values = completed[column].astype("boolean")
        share = (values == counts).groupby(keys).mean().where(values.groupby(keys).count() > 0)
        steps[measure_name] = per_step(share.astype(float))
    streams = steps["service_class"].map(
        {
            n: bool((i.get("workload") or {}).get("stream", True))
            for n, i in (sweep_json.get("classes") or {}).items()
        }
    )
    steps["unstreamed_share"] = steps["unstreamed_share"].where(streams.fillna(False).astype(bool))

    labels = (
        rows.all[["step", "service_class", "concurrency", "phase"]]
        .drop_duplicates()
        .merge(
            steps[["step", "service_class", "concurrency", "phase", "row"]],
            on=["step", "service_class"],
            suffixes=("", "_step"),
        )
    )
    differs = (labels["concurrency"].notna() & (labels["concurrency"] != labels["concurrency_step"])) | (
        labels["phase"].notna() & (labels["phase"] != labels["phase_step"])
    )
    wrong = labels[differs]
    steps["label_differs"] = np.where(steps["row"].isin(wrong["row"]), 1.0, 0.0)
    steps["label_of_rows"] = steps["row"].map(wrong.groupby("row")["concurrency"].first())

    lost = (counted["refill_s"] - counted["paused_s"].fillna(0.0)).clip(lower=0.0) + counted[
        "send_lag_s"
    ].fillna(0.0)
    client_s = lost.groupby([counted[b] for b in by]).sum(min_count=1)
    busy_s = counted.groupby(by)["e2e_s"].sum(min_count=1) + counted.groupby(by)["paused_s"].sum() + client_s
    steps["client_time_share"] = per_step(client_s / busy_s)
    steps["unaccounted_share"] = per_step(_unaccounted(rows.all, steps))

    concurrency = _array(steps, "concurrency")
    drift, start_up, modes = _Largest(len(steps)), _Largest(len(steps)), _Largest(len(steps))
    for row in range(len(steps)):
        for latency, called in LATENCY_NAMES.items():
            means = rows.batches(row, concurrency[row], latency, rows.reference([row], latency))
            drift.keep(row, st.drift(means).significant(), called)
            start_up.keep(row, st.start_up(means).significant(), called)
            modes.keep(row, st.two_modes(rows.of[row][latency]), called)
    drift.write(steps, "drift")
    start_up.write(steps, "start_up")
    modes.write(steps, "modes")
    steps["drift_size"], steps["start_up_size"] = steps["drift"].abs(), steps["start_up"].abs()
    _compared(steps, rows)


def _unaccounted(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """Share of slot time inside the window that no request, refill or send accounts for.

    In a closed loop a slot's next request starts when the one before it has ended and the refill and
    the send lag have passed. Time beyond that means request rows are missing.
    """
    by = ["step", "service_class", "worker", "slot"]
    rows = requests[requests["slot"].notna()].sort_values([*by, "started_s"], kind="stable")
    if rows.empty or rows["refill_s"].isna().all():
        return pd.Series(dtype=float)
    same = (rows[by].fillna(-1) == rows[by].fillna(-1).shift()).all(axis=1)
    ended = (rows["started_s"] + rows["e2e_s"]).shift()
    gap = rows["started_s"] - ended - rows["refill_s"].fillna(0.0) - rows["send_lag_s"].fillna(0.0)
    counted = rows["counted"].fillna(False).astype(bool)
    gap = gap.where(same & counted & ended.notna()).clip(lower=0.0)
    keys = [rows["step"], rows["service_class"]]
    slot_s = (
        steps.set_index(["step", "service_class"])["window_s"]
        * (steps.set_index(["step", "service_class"])["concurrency"])
    )
    return gap.groupby(keys).sum(min_count=1) / slot_s


def _compared(steps: pd.DataFrame, rows: _Rows) -> None:
    """Latency that falls as concurrency rises, and repeats that disagree."""
    concurrency, repeat = _array(steps, "concurrency"), _array(steps, "repeat")
    phase = steps["phase"].tolist()
    falls, apart = _Largest(len(steps)), _Largest(len(steps))
    for _, curve in _curves(steps):
        usable = ~curve["is_failing"] & curve["invalid"].isna() & (curve["phase"] != str(Phase.SHARED))
        alone = curve.loc[usable, "row"].tolist()
        for latency, called in LATENCY_NAMES.items() if alone else ():
            reference = rows.reference(alone, latency)
            means = {row: rows.batches(row, concurrency[row], latency, reference) for row in alone}
            for low, high in itertools.permutations(alone, 2):
                if concurrency[high] >= 1.5 * concurrency[low]:
                    fall = -st.difference(means[high], means[low]).significant()
                    falls.keep(low, max(fall, 0.0), called, concurrency[high])
                elif concurrency[high] == concurrency[low] and phase[high] == phase[low]:
                    gap = st.difference(means[high], means[low]).significant()
                    apart.keep(low, abs(gap), called, repeat[high])
    falls.write(steps, "falls")
    apart.write(steps, "repeats_differ")


class _Largest:
    """Per row the value of largest size seen, what it was seen in and against which other."""

    def __init__(self, rows: int) -> None:
        self.value, self.other = np.full(rows, math.nan), np.full(rows, math.nan)
        self.of: list[str | None] = [None] * rows

    def keep(self, row: int, value: float, of: str, other: float = math.nan) -> None:
        if not math.isnan(value) and not abs(value) <= abs(self.value[row]):
            self.value[row], self.of[row], self.other[row] = value, of, other

    def write(self, steps: pd.DataFrame, name: str) -> None:
        steps[name], steps[f"{name}_of"], steps[f"{name}_other"] = self.value, self.of, self.other


# -- the same comparisons where there are only summaries


def _falls_without_rows(steps: pd.DataFrame) -> None:
    """Largest fall of a latency statistic towards a step of at least 1.5 times the concurrency.

    Where the number of requests and a p99 are known, a fall within their scatter (one in a thousand) is none.
    """
    concurrency, failing = _array(steps, "concurrency"), steps["is_failing"].to_numpy(bool)
    whole_s = steps["e2e_mean_s"].fillna(steps["e2e_estimate_s"]).fillna(steps["e2e_p50_s"]).to_numpy(float)
    falls = _Largest(len(steps))
    for _, curve in _curves(steps):
        for column in ("ttft_mean_s", "ttft_p50_s", "e2e_mean_s", "e2e_p50_s", "e2e_estimate_s"):
            values, scatter = _array(steps, column), st.scatter(steps, column)
            if column == "e2e_estimate_s":  # of the mean, so it tells nothing beside one
                values = np.where(np.isnan(_array(steps, "e2e_mean_s")), values, np.nan)
            known = [row for row in curve["row"].tolist() if values[row] > 0 and not failing[row]]
            for low, high in itertools.permutations(known, 2):
                if concurrency[high] >= 1.5 * concurrency[low]:
                    fall_s = values[low] - values[high]
                    if column.startswith("ttft") and fall_s < 0.1 * whole_s[low]:
                        continue  # a first token is a small part of the answer, and its scatter is unknown
                    if np.log(values[low] / values[high]) < st.UNLIKELY * np.hypot(
                        scatter[low], scatter[high]
                    ):
                        continue
                    called = column.removesuffix("_s").replace("_", " ").upper()
                    falls.keep(low, max(1 - values[high] / values[low], 0.0), called, concurrency[high])
    falls.write(steps, "falls")


def _repeats_without_rows(steps: pd.DataFrame) -> pd.Series:
    """Range of throughput over repeats of a step, relative to their median."""
    rate = steps["request_per_s"].fillna(steps["output_tok_per_s"]).fillna(steps["total_tok_per_s"])
    by = [steps[name].fillna("") for name in (*SERIES, "phase")] + [steps["concurrency"]]
    groups = rate.groupby(by)
    spread = (groups.transform("max") - groups.transform("min")) / groups.transform("median")
    steps["repeats_differ_of"], steps["repeats_differ_other"] = "throughput", math.nan
    return spread.where(groups.transform("count") >= 2)


# -- measures of a series


def _series(judged: pd.DataFrame, rows: _Rows | None) -> pd.DataFrame:
    """One row per curve: does the anchor agree, are repeats missing."""
    found = []
    for at, mine in _curves(judged):
        known: dict[str, Any] = dict(zip(SERIES, at, strict=True))
        known["steps"] = len(mine)
        known.update(_anchor(mine, rows))
        counts = mine[mine["phase"] == str(Phase.GRID)].groupby("concurrency")["repeat"].agg(["count", "max"])
        known["repeats_missing"] = (
            float((counts["max"].max() - counts["count"]).max()) if len(counts) else math.nan
        )
        found.append(known)
    columns = [*SERIES, "steps", "anchor_differs", "anchor_of", "anchor_concurrency", "repeats_missing"]
    series = pd.DataFrame(found, columns=columns)
    series["row"] = np.arange(len(series))
    return series


def _anchor(curve: pd.DataFrame, rows: _Rows | None) -> dict[str, Any]:
    """The anchor step against the same concurrency measured earlier, at equal lengths."""
    nothing = {"anchor_differs": math.nan, "anchor_of": math.nan, "anchor_concurrency": math.nan}
    curve = curve[curve["invalid"].isna()]
    is_anchor = curve["phase"] == str(Phase.ANCHOR)
    if not is_anchor.any():
        return nothing
    anchor = curve[is_anchor].to_dict("records")[-1]
    before = curve[(curve["concurrency"] == anchor["concurrency"]) & (curve["phase"] != str(Phase.SHARED))]
    if before[before["phase"] != str(Phase.ANCHOR)].empty:
        return nothing
    first = before[before["phase"] != str(Phase.ANCHOR)].to_dict("records")[0]
    effect = anchor["e2e_mean_s"] / first["e2e_mean_s"] - 1
    if rows is not None:
        pair = [anchor["row"], first["row"]]
        reference = rows.reference(pair, "e2e_s")
        effect = st.difference(
            *(rows.batches(row, anchor["concurrency"], "e2e_s", reference) for row in pair)
        ).significant()
    return {"anchor_differs": abs(effect), "anchor_of": effect, "anchor_concurrency": anchor["concurrency"]}


# -- helpers


def _curves(steps: pd.DataFrame) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    for at, mine in steps.groupby(list(SERIES), dropna=False, sort=False):
        yield tuple(at), mine


def _curve_numbers(steps: pd.DataFrame) -> pd.Series:
    """A number for each curve; of an open loop the rate, which its workload names, is the level."""
    workload = steps["workload"].fillna("")
    workload = workload.where(steps["concurrency"].notna(), workload.str.replace(RATE, "", regex=True))
    names = [steps[name].fillna("") for name in SERIES if name != "workload"]
    return pd.Series(pd.concat([*names, workload], axis=1).agg("\0".join, axis=1).factorize()[0], steps.index)


def _array(steps: pd.DataFrame, name: str) -> st.Array:
    return pd.to_numeric(steps[name]).to_numpy(float)


def _typed(steps: pd.DataFrame) -> pd.DataFrame:
    """All columns present, numbers as float, text as object with None for blank; ``step`` is the key."""
    text = {"run_id", "source", "model", "series", "service_class", "workload", "phase", "started_at"}
    text |= {"stop_reason", "state", "invalid", "error", "warmup_steady"}
    text |= {"hardware", "engine", "note"}
    columns = [*STEP_COLUMNS, *IMPORTED_COLUMNS]
    known = steps.reindex(columns=columns)
    for name in columns:
        if name in text:
            known[name] = known[name].astype(object).where(known[name].notna(), None)
        else:
            known[name] = pd.to_numeric(known[name], errors="coerce").astype(float)
    known["step"] = [str(key) for key in steps.index]
    return known.copy()  # one block per type: columns are added by the dozen


def _label(step: Mapping[Hashable, Any]) -> str:
    """A step's name for people."""
    parts = [
        step["series"] or "",
        step["phase"] or "",
        step["service_class"] or "",
        f"c={step['concurrency']:g}",
    ]
    return " ".join(part for part in parts if part) + (f" #{step['repeat']:g}" if step["repeat"] > 1 else "")
