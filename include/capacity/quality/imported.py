"""Measures for step tables without request rows: what other people's numbers say about their own test.

**Little's law**, N = X E2E, is exact for a closed loop that is kept up: requests in flight over nominal
concurrency must be 1. Without kept-up load the drain at the end lowers it by at most E2E_p99 / duration,
which is allowed for. E2E is the mean; where it is missing, mean TTFT + mean TPOT (or gap) x (tokens - 1),
which is exact for equal lengths and one token a chunk and serves *only* here, the less accusing of the two;
else an upper bound from percentiles. Requests that failed held their slot too, at most until the deadline.

**Where only a throughput and a percentile are known**, the number in flight is known up to a factor (tokens
per request). At a step it is at most the nominal N of a lower step times the ratio of X L; so flat latency
over flat throughput means that the number in flight never changed, and no step of that plateau is shown to
have been reached, the lowest included. The drain at a run's end is allowed for as in Little's law, with ten
requests a slot where their number is unknown. L is a mean or a median: waiting brings a median nearer to the
mean and so errs on the mild side. A p99 does not grow as the mean does (where answers differ in length it is
several times the mean while nobody waits, and near it once all wait), so with nothing else known only a
product that did not grow at all from N to 2 N and beyond accuses, and no p99 of fewer than 100 requests.

**Counts that cannot be the servers'**: unlike servers that complete, or were sent, the very same odd number
of requests were paced by their common client.

**Open loops** have a rate as their level: a rate that changes nothing while the server is not busy was not
applied (a replayed trace); requests in flight that stay the same while the rate grows beyond what is served
show a cap of the client.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from include.capacity.quality.statistics import UNLIKELY, USUAL_REQUESTS_PER_SLOT, scatter

EFFECT = 0.2
"""Relative difference that matters, as for all checks."""
SPAN = 1.5
"""Least ratio of two levels to compare."""
SAME = 0.15
"""Relative difference within which two numbers in flight are the same (percentiles stand in for means)."""
LEAST_FOR_P99 = 100
USUAL_TIMEOUTS_S = (10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 600, 900, 1200, 1800, 3600)


def measure_imported(steps: pd.DataFrame, curve: pd.Series) -> None:
    """Add the measures; ``curve`` numbers the rows that differ only in their level."""
    _deadlines(steps)
    latency_s = steps["e2e_mean_s"].fillna(steps["e2e_estimate_s"]).fillna(_mean_at_most(steps, "e2e"))
    rate = steps["request_per_s"].fillna(steps["output_tok_per_s"] / steps["tokens_per_answer_mean"])
    steps["in_flight_estimate"] = rate * latency_s
    _little(steps, latency_s, rate)
    _implied(steps, curve)
    _open_loop(steps, curve, latency_s, rate)
    _answers(steps, curve)
    steps["no_completion"] = (steps["completed"] == 0).astype(float).where(steps["completed"].notna())
    steps["runs_dropped"] = steps["runs_made"] - steps["runs_kept"]
    _same_client(steps)


def _deadlines(steps: pd.DataFrame) -> None:
    """A p99 within 2 % below a usual time-out, where requests failed, tells the deadline."""
    failing = steps["completed"] < steps["attempted"]
    for timeout_s in USUAL_TIMEOUTS_S:
        pinned = (
            failing & steps["deadline_s"].isna() & steps["e2e_p99_s"].between(0.98 * timeout_s, timeout_s)
        )
        steps.loc[pinned, "deadline_s"] = timeout_s
    steps["p99_of_deadline"] = steps["e2e_p99_s"] / steps["deadline_s"]


def _mean_at_most(steps: pd.DataFrame, latency: str) -> pd.Series:
    """A mean can be no more than each quantile's share times the quantile above it (tail: twice p99)."""
    p50, p95, p99 = (steps[f"{latency}_{p}_s"] for p in ("p50", "p95", "p99"))
    above = p95.fillna(p99)
    bound = 0.5 * p50 + 0.45 * above + 0.04 * p99.fillna(above) + 0.01 * 2 * p99.fillna(above)
    return bound.where(p50.notna() & above.notna())


def _little(steps: pd.DataFrame, latency_s: pd.Series, rate: pd.Series) -> None:
    """``little``: in flight over nominal; ``little_margin``: how far it is above what is allowed."""
    failed = (steps["attempted"] - steps["completed"]).clip(lower=0).fillna(0.0)
    longest_s = _longest_s(steps, latency_s)
    held = failed * steps["deadline_s"].fillna(longest_s) / steps["window_s"]
    in_flight = rate * latency_s + held.where(failed > 0, 0.0)
    closed = steps["concurrency"].where(steps["concurrency"] >= 1)
    steps["little"] = in_flight / closed
    least_s = steps["e2e_mean_s"].fillna(steps["e2e_estimate_low_s"])
    steps["little_least"] = rate * least_s / closed
    requests = steps["completed"].fillna(steps["attempted"]).fillna(USUAL_REQUESTS_PER_SLOT * closed)
    window_s = steps["window_s"].fillna(requests / rate)
    steps["little_allowed"] = (0.95 - longest_s / window_s).clip(lower=0.0)
    steps["little_margin"] = steps["little"] - steps["little_allowed"]


def _implied(steps: pd.DataFrame, curve: pd.Series) -> None:
    """``implied_share``: largest share of N that can have been in flight, from lower steps of the curve.

    Only where Little's law cannot be applied, or to an upper bound of the mean latency alone. All steps of a
    plateau that is shown not to have been reached get its share: nothing tells which of their labels, if any,
    is true. ``implied_margin``: how far it is above what is allowed.
    """
    steps["implied_share"] = np.nan
    steps["implied_from"] = np.nan
    steps["implied_margin"] = np.nan
    loose = steps["little"].isna() | (steps["e2e_mean_s"].isna() & steps["e2e_estimate_s"].isna())
    for _, rows in steps.groupby(curve):
        rows = rows[rows["concurrency"] >= 1].sort_values("concurrency")
        rate = _first_known(rows, ("request_per_s", "total_tok_per_s", "output_tok_per_s"))
        latency_s = _first_known(rows, ("e2e_mean_s", "e2e_p50_s", "e2e_p99_s"))
        if rate is None or latency_s is None:
            continue
        n, in_flight = rows["concurrency"].to_numpy(float), (rate * latency_s).to_numpy(float)
        unknown = loose[rows.index].to_numpy()
        tail_only = latency_s.name == "e2e_p99_s"
        if tail_only:
            in_flight = np.where(n * _per_slot(rows) < LEAST_FOR_P99, np.nan, in_flight)
        allowed = 1 - EFFECT - _drain(rows).to_numpy(float)
        noise = scatter(rows, str(latency_s.name))
        for high in range(len(rows)):
            apart = 2 * n <= n[high] if tail_only else n * SPAN <= n[high]
            lower = np.flatnonzero(apart & np.isfinite(in_flight) & unknown)
            if not unknown[high] or not len(lower) or not np.isfinite(in_flight[high]):
                continue
            chance = np.exp(UNLIKELY * np.hypot(noise[high], noise[lower]))
            growth = in_flight[high] / in_flight[lower] * chance
            shares = growth * n[lower] / n[high]
            short = 1 + EFFECT / 2 - growth if tail_only else allowed[high] - shares
            margin, share = short.max(), shares.min()
            plateau = np.zeros(len(n), dtype=bool)
            plateau[high] = True
            low = lower[int(np.argmax(short > 0))]  # the lowest that accuses
            if margin > 0:
                same = np.abs(in_flight / in_flight[high] - 1) <= SAME
                plateau |= same & (n >= n[low]) & (n <= n[high]) & unknown
            for at in rows.index[plateau]:
                if not steps.loc[at, "implied_margin"] <= -margin:
                    steps.loc[at, ["implied_share", "implied_from", "implied_margin"]] = [
                        *(share, n[low], -margin)
                    ]


def _drain(rows: pd.DataFrame) -> pd.Series:
    """Share of a run that its last answers may take while no others start: p99 / duration."""
    mean_s = rows["e2e_mean_s"].fillna(_mean_at_most(rows, "e2e")).fillna(rows["e2e_p50_s"])
    longest_s = _longest_s(rows, mean_s)
    window_s = rows["window_s"].fillna(_per_slot(rows) * mean_s.fillna(longest_s))
    return (longest_s / window_s).fillna(1 / USUAL_REQUESTS_PER_SLOT)


def _longest_s(steps: pd.DataFrame, mean_s: pd.Series) -> pd.Series:
    """How long the longest answers took: p99, else p95, else one and a half times the mean."""
    return steps["e2e_p99_s"].fillna(steps["e2e_p95_s"]).fillna(1.5 * mean_s)


def _per_slot(rows: pd.DataFrame) -> pd.Series:
    """Requests per slot; the usual number where nothing says how many there were."""
    requests = rows["attempted"].fillna(rows["completed"])
    return (requests / rows["concurrency"]).fillna(USUAL_REQUESTS_PER_SLOT)


def _first_known(rows: pd.DataFrame, names: tuple[str, ...]) -> pd.Series | None:
    """The first column known in at least two rows, and nearly all that any other is known in."""
    counts = {name: int(rows[name].gt(0).sum()) for name in names}
    best = max(counts.values())
    return next(
        (rows[name].where(rows[name] > 0) for name in names if best >= 2 and counts[name] == best), None
    )


def _open_loop(steps: pd.DataFrame, curve: pd.Series, latency_s: pd.Series, rate: pd.Series) -> None:
    """Arrival caps, rates without effect, and caps of the client."""
    asked = steps["request_rate"].replace([np.inf, -np.inf], np.nan)
    steps["arrival_share"] = (rate / asked).where(steps["concurrency"].notna())
    steps["rate_no_effect"] = np.nan
    steps["client_cap"] = np.nan
    steps["saturated_at_once"] = np.nan
    table = pd.DataFrame({"asked": steps["request_rate"], "x": rate, "s": latency_s, "n": steps["attempted"]})
    table["busy_s"] = steps["window_s"].fillna(table["n"] / table["x"])
    open_rows = table[steps["concurrency"].isna() & table[["asked", "x", "s"]].notna().all(axis=1)]
    for _, rows in open_rows.groupby(curve[open_rows.index]):
        rows = rows.sort_values("asked")
        finite = rows[np.isfinite(rows["asked"])]
        if len(finite) < 3 or finite["asked"].max() < SPAN * finite["asked"].min():
            continue
        idle = (finite["s"] < 0.1 * finite["busy_s"]).all()
        same = _spread(finite["x"]) <= EFFECT / 2 and _spread(finite["s"]) <= EFFECT
        steps.loc[finite.index, "rate_no_effect"] = float(same and idle)
        steps.loc[rows.index[0], "saturated_at_once"] = float(
            finite["x"].iloc[0] < 0.9 * finite["asked"].iloc[0]
        )
        over = finite[finite["x"] < 0.9 * finite["asked"]]
        held, excess = over["x"] * over["s"], over["asked"] - over["x"]  # the backlog grows with the excess
        capped = (
            len(over) >= 2
            and excess.max() >= SPAN * excess.min()
            and _spread(held) <= SAME
            and bool((held < 0.1 * over["n"]).all())
            and not same
        )
        steps.loc[over.index, "client_cap"] = held.median() if capped else 0.0


def _spread(values: pd.Series) -> float:
    """(largest - smallest) / median."""
    return float((values.max() - values.min()) / values.median())


def _answers(steps: pd.DataFrame, curve: pd.Series) -> None:
    """Answers much shorter than at the curve's other steps or than asked; sums; shapes of latency."""
    tokens = steps["tokens_per_answer_mean"]
    usual = tokens.groupby(curve).transform("median").where(tokens.groupby(curve).transform("count") >= 3)
    steps["answer_of_usual"], steps["answer_usual"] = tokens / usual, usual
    steps["output_of_asked"] = (tokens / steps["asked_output_tokens"]).where(steps["asked_output_tokens"] > 0)
    both = tokens + steps["prompt_tokens_mean"]
    from_tokens = steps["output_tok_per_s"] * both / tokens.where(tokens > 0)
    measured = steps["completed"].notna() & steps["request_per_s"].notna()
    steps["total_off"] = (steps["total_tok_per_s"] / from_tokens - 1).abs().where(measured)
    steps["latency_spread"] = steps["e2e_p99_s"] / steps["e2e_p50_s"].where(steps["e2e_p50_s"] > 0)
    ratios = [
        steps[f"{name}_p50_s"] / steps[f"{name}_mean_s"].where(steps[f"{name}_mean_s"] > 0)
        for name in ("ttft", "e2e")
    ]
    steps["median_over_mean"] = pd.concat(ratios, axis=1).max(axis=1)


def _same_client(steps: pd.DataFrame) -> None:
    """``same_count``: how many unlike servers share a step's odd count of requests at the same level.

    A count is odd if nobody would have asked for it: completed fewer than attempted, or attempted a number
    that is no multiple of 10 nor of the concurrency.
    """
    level = steps["concurrency"].fillna(steps["request_rate"])
    named = [steps[name].fillna("").astype(str) for name in ("engine", "hardware", "model", "series")]
    server = pd.concat(named, axis=1).agg("|".join, axis=1)
    steps["same_count"] = np.nan
    attempted, completed = steps["attempted"], steps["completed"]
    planned = (attempted % 10 == 0) | (attempted % steps["concurrency"] == 0)
    # A handful of equal small counts is chance; two servers agreeing on hundreds is not.
    incomplete = (completed < attempted) & (completed >= 50) & (attempted - completed >= 0.01 * attempted)
    unplanned = ~planned & (attempted >= 200) & (completed == attempted)
    for odd, count in ((incomplete, completed), (unplanned, attempted)):
        odd = odd & count.notna() & level.notna()
        servers = server[odd].groupby([steps.loc[odd, "source"], level[odd], count[odd]]).transform("nunique")
        steps.loc[servers.index, "same_count"] = servers - 1.0
