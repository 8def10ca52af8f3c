"""What one step says: counts, bounds, state, first-token delay, request rate.

For one load of one step, over its counted requests in order of start, of which those that we
aborted and those the server called wrong (client errors) are in no rate:

    y = completed within the deadline
    z = y and every objective met: TTFT, TPOT, E2E for an interactive class, E2E for a batch class

    pass          L_y >= floor and L_z >= q
    fail          U_y <  floor or  U_z <  q
    inconclusive  otherwise

q is the strictest of the objectives' shares. A step cut short by its cap may fail on what it has, and pass
only if that is at least half of what was planned and 10 N: ten residence times, or correlation cannot be
seen. A server that crashed
failed; a step that the instrument itself calls invalid, that was cancelled or ended with an error
says nothing (``state`` None).

TPOT = (last token - first token) / (output tokens - tokens in the first chunk); with fewer than two
tokens, or all in the first chunk, there is nothing to be late, and it counts as met. A latency that
should be there and is not counts as not met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from include.capacity.config import ServiceClass
from include.capacity.errors import ConfigError, DataError
from include.capacity.limits.bounds import Rate, Tally, batch_size, clustering, mean_half_width, rate, tally
from include.capacity.results.schema import Facts, LoadFacts
from include.capacity.results.spec import StepSpec
from include.capacity.words import UNRATED, Outcome, Phase, State, StopReason

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

WITHOUT_VERDICT = frozenset({Phase.BASELINE, Phase.PRIME})
RESIDENCE_TIMES = 10
QUANTILE_BATCHES = 10
"""Batches for the interval of a quantile; 1.8 is Student's t of 90 % with 9 degrees of freedom."""
QUANTILE_T = 1.8


@dataclass(kw_only=True)
class Evidence:
    """One load of one step, judged. JSON-able; None is unknown."""

    key: str
    """The step's key; both loads of a shared step carry the same."""
    service_class: str
    phase: str
    concurrency: int
    repeat: int = 1
    beside: dict[str, int] = field(default_factory=dict)
    """Other classes' concurrency in a shared step."""
    planned: int = 0
    """Requests the step was to count before it might stop."""
    proof: bool = False
    """Of proof size (see :func:`proof_sized`)."""

    attempted: int = 0
    completed: int = 0
    """Within the deadline (y)."""
    met: int = 0
    """Completed with every objective met (z); equal to ``completed`` without objectives."""
    completed_most: int | None = None
    """Where percentiles only bound the counts (imported data), ``completed`` is the fewest that must have and
    this the most that can have; None: they are the same."""
    met_most: int | None = None
    clusters_y: list[int] = field(default_factory=list)
    """Requests not completed in each batch that had any (:class:`.bounds.Tally`)."""
    clusters_z: list[int] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=dict)
    """Completed requests that missed an objective, by objective (ttft, tpot, e2e)."""
    floor: float | None = None
    share: float | None = None
    """q; None for a class without objectives."""
    least_deff: float = 1.0
    """Design effect by the lengths asked for."""
    n_effective_y: float | None = None
    n_effective_z: float | None = None
    lower_y: float | None = None
    upper_y: float | None = None
    upper_early_y: float | None = None
    lower_z: float | None = None
    upper_z: float | None = None
    upper_early_z: float | None = None
    holds: bool | None = None
    """By point estimate: completed/attempted >= floor and met/attempted >= share."""
    state: str | None = None

    request_per_s: float | None = None
    """Completed requests per second of the window."""
    request_per_s_low: float | None = None
    request_per_s_high: float | None = None
    """95 % interval by batch means of one run."""
    ttft_p95_s: float | None = None
    """Over attempted requests; one that did not complete is later than any, shown as its deadline."""
    ttft_p95_low_s: float | None = None
    ttft_p95_high_s: float | None = None
    """90 % interval."""
    window_s: float | None = None
    warmup_s: float | None = None
    deadline_s: float | None = None
    first_error_s: float | None = None
    """When the first unrecoverable error began, in seconds of the window."""
    stop_reason: str | None = None
    started_at: str = ""

    valid: bool = True
    why: str | None = None
    """Why it is not valid."""
    error: str | None = None
    crashed: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)
    server: dict[str, float | None] = field(default_factory=dict)
    """The server's own columns over the step."""

    @property
    def usable(self) -> bool:
        """Whether the step was measured: it says something, be it only that the server crashed."""
        return self.crashed or (self.valid and self.error is None and self.attempted > 0)

    @property
    def failed(self) -> bool:
        """Provably failed; a crash is a failure whatever the step was for."""
        return self.crashed or self.state == State.FAIL

    @property
    def n_effective(self) -> float | None:
        """The smaller of the effective numbers of requests for y and z."""
        known = [n for n in (self.n_effective_y, self.n_effective_z) if n is not None]
        return min(known, default=None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evidence:
        """The inverse of :meth:`to_json`."""
        return cls(**data)


def proof_sized(phase: Phase | str, requests: int, concurrency: int) -> bool:
    """Whether a step's requests may prove: a proof or grid step, or a shared one planned as large."""
    return phase in (Phase.PROVE, Phase.GRID) or (
        phase == Phase.SHARED and requests >= max(600, 10 * concurrency)
    )


def evidence_of(facts: Facts, rows: pd.DataFrame, classes: Mapping[str, ServiceClass]) -> list[Evidence]:
    """Judge one step: one :class:`Evidence` a load. ``rows``: the step's request rows.

    ConfigError if a class asks for a longer deadline than the rows were measured with; DataError if
    the step's class is unknown.
    """
    spec = StepSpec.from_json(facts.spec)
    result = []
    for load in spec.loads:
        service = classes.get(load.service_class)
        if service is None:
            raise DataError(f"step {spec.key}: class {load.service_class!r} is none of {sorted(classes)}")
        known = next(
            (one for one in facts.loads if one.service_class == load.service_class),
            LoadFacts(service_class=load.service_class, concurrency=load.concurrency),
        )
        evidence = Evidence(
            key=spec.key,
            service_class=load.service_class,
            phase=spec.phase.value,
            concurrency=load.concurrency,
            repeat=spec.repeat,
            beside={
                other.service_class: other.concurrency
                for other in spec.loads
                if other.service_class != load.service_class
            },
            planned=load.requests,
            proof=proof_sized(spec.phase, load.requests, load.concurrency),
            floor=service.completion_floor,
            share=share(service),
            deadline_s=service.deadline_s,
            window_s=known.window_s,
            warmup_s=known.warmup_s,
            stop_reason=known.stop_reason,
            started_at=facts.started_at,
            valid=facts.invalid is None,
            why=facts.invalid,
            error=facts.error,
            crashed=facts.server_crashed,
            server=dict(facts.server),
        )
        mine = rows[rows["service_class"] == load.service_class] if len(spec.loads) > 1 else rows
        _judge(evidence, mine, service, known.window_start_s or 0.0)
        result.append(evidence)
    return result


def evidence_of_sweep(
    facts: Mapping[str, Facts], rows: pd.DataFrame, classes: Mapping[str, ServiceClass]
) -> list[Evidence]:
    """Judge all steps, in the order of ``facts``; ``rows``: request rows with a column ``step``."""
    parts = dict(tuple(rows.groupby("step", sort=False))) if len(rows) else {}
    nothing = rows.iloc[:0]
    return [one for key, step in facts.items() for one in evidence_of(step, parts.get(key, nothing), classes)]


def share(service: ServiceClass) -> float | None:
    """q: the strictest share among the objectives that bind the class; None without any."""
    shares = [objective.share for _, objective in objectives(service)]
    return max(shares, default=None)


def objectives(service: ServiceClass) -> list[tuple[str, Any]]:
    """(latency, objective) pairs that bind the class."""
    names = ("ttft", "tpot", "e2e") if service.rule == "interactive" else ("e2e",)
    return [(name, getattr(service, name)) for name in names if getattr(service, name) is not None]


def _judge(evidence: Evidence, rows: pd.DataFrame, service: ServiceClass, window_start_s: float) -> None:
    """Fill in what the rows say."""
    rows = rows[_true(rows["counted"])]
    outcome = rows["outcome"]
    evidence.outcomes = {str(name): int(count) for name, count in outcome.value_counts().items()}
    rows = rows[~outcome.isin([unrated.value for unrated in UNRATED]).to_numpy(bool)]
    rows = rows.iloc[np.argsort(_numbers(rows["started_s"]), kind="stable")]
    columns = {name: rows[name].to_numpy() for name in NEEDED if name in rows}
    measured = _numbers(columns["deadline_s"])
    if measured.size and np.nanmin(measured, initial=math.inf) < service.deadline_s * (1 - 1e-9):
        raise ConfigError(
            f"class {evidence.service_class}: deadline_s {service.deadline_s:g} is longer than the "
            f"{np.nanmin(measured):g} s it was measured with in step {evidence.key}: what had not "
            "completed by then was cut off and cannot be judged; measure again"
        )
    y, met = _met(columns, service)
    z = np.logical_and.reduce([y, *met.values()])
    evidence.missed = {name: int((y & ~ok).sum()) for name, ok in met.items()}
    started = _numbers(columns["started_s"]) - window_start_s
    evidence.attempted = int(y.size)
    evidence.completed, evidence.met = int(y.sum()), int(z.sum())
    failed = started[~y]
    evidence.first_error_s = float(failed.min()) if failed.size else None
    if not y.size:
        if evidence.usable and evidence.phase not in WITHOUT_VERDICT:
            evidence.state = State.FAIL.value  # it crashed before a single request had ended
            evidence.holds = False
        return

    tally_y, tally_z = tally(y, evidence.concurrency), tally(z, evidence.concurrency)
    evidence.clusters_y, evidence.clusters_z = list(tally_y.clusters), list(tally_z.clusters)
    evidence.least_deff = _least_deff(columns, evidence.concurrency)
    completion, objective = (rate(one, least_deff=evidence.least_deff) for one in (tally_y, tally_z))
    evidence.n_effective_y, evidence.n_effective_z = completion.n_effective, objective.n_effective
    evidence.lower_y, evidence.upper_y = completion.lower, completion.upper
    evidence.lower_z, evidence.upper_z = objective.lower, objective.upper
    evidence.upper_early_y = completion.upper_early
    evidence.upper_early_z = objective.upper_early
    evidence.holds = not evidence.crashed and point_holds(service, completion, objective)
    if evidence.usable and evidence.phase not in WITHOUT_VERDICT:
        evidence.state = _verdict(evidence, service, completion, objective).value
    _request_rate(evidence, y, started)
    if service.workload.stream:
        _first_token(evidence, y, _numbers(columns["ttft_s"]), service.deadline_s)


NEEDED = (
    "started_s",
    "outcome",
    "deadline_s",
    "ttft_s",
    "last_token_s",
    "e2e_s",
    "output_tokens",
    "first_chunk_tokens",
    "asked_prompt_tokens",
    "asked_max_tokens",
)
ROWS_NEEDED = (*NEEDED, "service_class", "counted")
"""Request columns that :func:`evidence_of` reads."""


def _met(columns: Mapping[str, NDArray[Any]], service: ServiceClass) -> tuple[Bools, dict[str, Bools]]:
    """y of each request, and whether it met each objective of the class."""
    late = _numbers(columns["e2e_s"]) > service.deadline_s  # unknown E2E: the outcome has said it
    y = (np.asarray(columns["outcome"]) == Outcome.COMPLETED.value) & ~late
    met: dict[str, Bools] = {}
    for name, objective in objectives(service):
        if name == "tpot":
            first, last = _numbers(columns["ttft_s"]), _numbers(columns["last_token_s"])
            chunk = _numbers(columns["first_chunk_tokens"])
            tokens = _numbers(columns["output_tokens"])
            after = tokens - np.where(np.isnan(chunk), 1.0, chunk)
            defined = ~((tokens < 2) | (after <= 0))  # unknown token counts stay unknown, not met
            met[name] = ~defined | (last - first <= objective.at_most_s * after)
        else:
            met[name] = _numbers(columns[f"{name}_s"]) <= objective.at_most_s
    return y, met


def _least_deff(columns: Mapping[str, NDArray[Any]], concurrency: int) -> float:
    """The design effect that failures have at least, by the lengths asked for.

    Failures follow the asked lengths in part only, so they are taken to come together by the root of
    the lengths' design effect. The whole of it put no fewer limits above the truth (1.4 % of 70 virtual
    servers either way), took 3 % more requests and left a 90th percentile of
    shortfall of 19.7 instead of 17.6 %.
    """
    asked = [
        _numbers(columns[name]) for name in ("asked_prompt_tokens", "asked_max_tokens") if name in columns
    ]
    return math.sqrt(clustering(*asked, concurrency=concurrency))


def together(steps: Sequence[Evidence]) -> tuple[Rate, Rate]:
    """(y, z) over all repeats of a step."""
    least = max(e.least_deff for e in steps)

    def of(clusters: str, fewest: str, most: str) -> Rate:
        low = rate(*(_tally(e, getattr(e, clusters), getattr(e, fewest)) for e in steps), least_deff=least)
        if all(getattr(e, most) is None for e in steps):
            return low
        known = ((e, getattr(e, fewest), getattr(e, most)) for e in steps)
        high = rate(*(_tally(e, [], a if b is None else b) for e, a, b in known))
        return replace(low, upper=high.upper, upper_early=high.upper_early)

    return of("clusters_y", "completed", "completed_most"), of("clusters_z", "met", "met_most")


def _tally(e: Evidence, clusters: Sequence[int], successes: int) -> Tally:
    """Imported requests, whose order is unknown, have no batches: they are taken for independent."""
    return Tally(
        n=e.attempted,
        size=batch_size(e.attempted, e.concurrency),
        clusters=tuple(clusters),
        rest=e.attempted - successes - sum(clusters),
    )


def point_holds(service: ServiceClass, completion: Rate, objective: Rate) -> bool:
    """Whether the class's floor and objectives are met by point estimate."""
    q = share(service)
    return completion.value >= service.completion_floor and (q is None or objective.value >= q)


def verdict(service: ServiceClass, completion: Rate, objective: Rate) -> State:
    """The three states, at one-sided 95 %."""
    q = share(service)
    if completion.upper < service.completion_floor or (q is not None and objective.upper < q):
        return State.FAIL
    if completion.lower >= service.completion_floor and (q is None or objective.lower >= q):
        return State.PASS
    return State.INCONCLUSIVE


def _verdict(evidence: Evidence, service: ServiceClass, completion: Rate, objective: Rate) -> State:
    if evidence.crashed:
        return State.FAIL
    state = verdict(service, completion, objective)
    needed = min(evidence.planned, max(evidence.planned / 2, RESIDENCE_TIMES * evidence.concurrency))
    short = evidence.stop_reason == StopReason.CAP and evidence.attempted < needed
    return State.INCONCLUSIVE if state is State.PASS and short else state


def _request_rate(evidence: Evidence, y: Bools, started: Floats) -> None:
    """Completed requests per second of the window, with an interval by batch means in time."""
    if not evidence.window_s or evidence.window_s <= 0:
        return
    evidence.request_per_s = evidence.completed / evidence.window_s
    size = batch_size(y.size, evidence.concurrency)
    batches = y.size // size
    if batches < 3 or np.isnan(started).any():
        return
    edges = np.append(started[: batches * size : size], started[batches * size] if
                      batches * size < y.size else evidence.window_s)  # fmt: skip
    length = np.diff(edges)
    if (length <= 0).any():
        return
    rates = y[: batches * size].reshape(batches, size).sum(axis=1) / length
    half = mean_half_width(rates)
    evidence.request_per_s_low = max(0.0, evidence.request_per_s - half)
    evidence.request_per_s_high = evidence.request_per_s + half


def _first_token(evidence: Evidence, y: Bools, ttft: Floats, deadline_s: float) -> None:
    """p95 of the first-token delay over attempted requests, with t +- 1.8 s_b / sqrt(K).

    A request that did not complete is later than any; to keep numbers finite it stands at the
    deadline, which no completed request exceeds.
    """
    delay = np.where(y & ~np.isnan(ttft), np.minimum(ttft, deadline_s), deadline_s)
    p95 = float(np.quantile(delay, 0.95))
    evidence.ttft_p95_s = p95
    size = delay.size // QUANTILE_BATCHES
    if size < 2:
        return
    batches = delay[: size * QUANTILE_BATCHES].reshape(QUANTILE_BATCHES, size)
    scatter = np.quantile(batches, 0.95, axis=1).std(ddof=1)
    half = float(QUANTILE_T * scatter / math.sqrt(QUANTILE_BATCHES))
    evidence.ttft_p95_low_s = max(0.0, p95 - half)
    evidence.ttft_p95_high_s = p95 + half


def decider(classes: Mapping[str, ServiceClass]) -> Callable[[str, list[dict[str, Any]], bool], State]:
    """A judge of running steps for the load side.

    ``decide(service_class, rows, planned)``: ``rows`` are those counted so far, in order of start,
    every one ended. At a planned checkpoint any state may come back. At an early look only a
    failure proven at alpha = 0.005 counts; everything else is inconclusive.
    """

    def decide(service_class: str, rows: list[dict[str, Any]], planned: bool) -> State:
        service = classes[service_class]
        unrated = {outcome.value for outcome in UNRATED}
        used = [row for row in rows if row["outcome"] not in unrated]
        if not used:
            return State.INCONCLUSIVE
        columns = {name: np.array([row.get(name) for row in used], dtype=object) for name in NEEDED}
        y, met = _met(columns, service)
        z = np.logical_and.reduce([y, *met.values()])
        concurrency = int(used[0]["concurrency"])
        least = _least_deff(columns, concurrency)
        completion, objective = (rate(tally(one, concurrency), least_deff=least) for one in (y, z))
        if planned:
            return verdict(service, completion, objective)
        q = share(service)
        failed = completion.upper_early < service.completion_floor or (
            q is not None and objective.upper_early < q
        )
        return State.FAIL if failed else State.INCONCLUSIVE

    return decide


def _numbers(values: Any) -> Floats:
    """As floats, unknown as NaN."""
    if isinstance(values, pd.Series):
        return values.to_numpy(dtype=float, na_value=np.nan)
    if values.dtype == object:
        return np.array([np.nan if value is None else value for value in values], dtype=float)
    return values.astype(float)


def _true(values: pd.Series) -> Bools:
    """Where it says true; unknown is not."""
    if values.dtype == bool:
        return values.to_numpy()
    return values.eq(True).fillna(False).to_numpy(dtype=bool)
