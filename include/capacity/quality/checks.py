"""All checks, as data: what each looks at, the line it must not cross, what it does and what it says.

A check has an ``id``; it may have two lines, one that flags and one that rejects. ``kind`` is the Great
Expectations expectation that judges it (:mod:`.suites`), ``columns`` what it needs (a check none of whose
columns is known says "not checked"), ``reason`` the sentence printed, filled from the judged row. Where
a number here is a threshold, the line above it says where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from include.capacity.results.schema import LATENCIES
from include.capacity.words import Outcome, Severity

Table = Literal["requests", "steps", "series"]
Kind = Literal["between", "not_null", "in_set", "unique", "ascend", "adds_up"]

REJECT, FLAG = Severity.REJECT, Severity.FLAG


@dataclass(frozen=True)
class Check:
    """One line that the data must not cross."""

    id: str
    table: Table
    severity: Severity
    kind: Kind
    columns: tuple[str, ...]
    reason: str
    """Template over the columns of the judged row; over ``n`` and ``of`` for the request table."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the expectation."""
    only_completed: bool = False
    """Judge rows of completed requests only."""
    imported: bool = False
    """Only step tables of other tools need it: where we measured, rows tell more."""


def _between(
    id: str, severity: Severity, column: str, reason: str, low: float | None = None, high: float | None = None
) -> Check:
    limits = {"min_value": low, "max_value": high}
    return Check(id, "steps", severity, "between", (column,), reason, limits)


# -- the request table

_ROWS = "{n} of {of} request rows "


def _request_checks() -> Iterable[Check]:
    for name in ("request_id", "outcome", "started_s", "concurrency", "deadline_s"):
        yield Check("request_nulls", "requests", REJECT, "not_null", (name,), _ROWS + f"have no {name}.")
    yield Check(
        "request_outcomes", "requests", REJECT, "in_set", ("outcome",),
        _ROWS + "have an outcome outside the vocabulary.", {"value_set": [str(o) for o in Outcome]},
    )  # fmt: skip
    for name in ("e2e_s", "output_tokens"):
        yield Check(
            "request_nulls", "requests", REJECT, "not_null", (name,),
            _ROWS + f"are called completed and have no {name}.", only_completed=True,
        )  # fmt: skip
    for name in ("started_s", "send_lag_s", "ttft_s", "e2e_s", "prompt_tokens"):
        yield Check(
            "request_ranges", "requests", REJECT, "between", (name,),
            _ROWS + f"have a negative {name}.", {"min_value": 0},
        )  # fmt: skip
    yield Check(
        "request_ranges", "requests", REJECT, "between", ("output_tokens",),
        _ROWS + "are called completed with no token at all.", {"min_value": 1}, only_completed=True,
    )  # fmt: skip
    yield Check(
        "request_order", "requests", REJECT, "ascend", ("ttft_s", "last_token_s", "e2e_s"),
        _ROWS + "have their first token after their last, or their last after their end.",
    )  # fmt: skip
    yield Check(
        "duplicate_requests", "requests", REJECT, "unique", ("step", "request_id"),
        _ROWS + "repeat the id of another row of the same step: rows were written twice.",
    )  # fmt: skip


# -- the step table

PRINTED = {"tolerance": 1e-3}
"""Other tools print rounded numbers."""

_STATS = ("p50", "p95", "p99", "mean")


def _step_checks() -> Iterable[Check]:
    yield Check(
        "step_level", "steps", REJECT, "not_null", ("level",),
        "The step names no concurrency and no rate, so it is no level of load.",
    )  # fmt: skip
    yield _between(
        "step_level", REJECT, "concurrency", "A concurrency of {concurrency:g} is no level of load.", low=1
    )
    for name in (
        "attempted",
        "completed",
        "request_per_s",
        "output_tok_per_s",
        "total_tok_per_s",
        "window_s",
    ):
        yield _between("step_ranges", REJECT, name, f"{name} is negative ({{{name}:g}}).", low=0)
    for name in ("server_kv_use_peak", "server_prefix_hit_share"):
        yield _between(
            "step_ranges", REJECT, name, f"{name} is {{{name}:g}}, not a share.", low=0, high=1.001
        )
    for latency in LATENCIES:
        for statistic in _STATS:
            name = f"{latency}_{statistic}_s"
            yield Check(
                "zero_is_no_data", "steps", REJECT, "between", (name,),
                f"{name} is {{{name}:g}} s: a statistic of nothing, not a latency.",
                {"min_value": 0, "strict_min": latency != "tpot"},
            )  # fmt: skip
        columns = tuple(f"{latency}_{p}_s" for p in ("p50", "p95", "p99"))
        shown = ", ".join(f"{{{name}:.4g}}" for name in columns)
        yield Check(
            "percentiles_ordered", "steps", REJECT, "ascend", columns,
            f"The {latency.upper()} percentiles p50, p95, p99 do not ascend ({shown} s).",
            PRINTED,
        )  # fmt: skip
    for statistic in _STATS:
        yield Check(
            "ttft_within_e2e", "steps", REJECT, "ascend", (f"ttft_{statistic}_s", f"e2e_{statistic}_s"),
            f"The {statistic} of the time to first token ({{ttft_{statistic}_s:.4g}} s) exceeds that of the "
            f"whole answer ({{e2e_{statistic}_s:.4g}} s).",
            PRINTED,
        )  # fmt: skip
    yield Check(
        "counts_add_up", "steps", REJECT, "adds_up", ("outcomes_sum", "attempted"),
        "The outcomes add up to {outcomes_sum:g} requests, attempted were {attempted:g}.",
    )  # fmt: skip
    yield Check(
        "counts_add_up", "steps", REJECT, "ascend", ("objective_met", "completed", "attempted"),
        "Counts contradict each other: objective met {objective_met:g}, completed {completed:g}, "
        "attempted {attempted:g}.",
    )  # fmt: skip
    yield Check(
        "counts_add_up", "steps", REJECT, "ascend", ("output_tok_per_s", "raw_output_tok_per_s"),
        "Tokens of completed requests ({output_tok_per_s:.4g}/s) exceed those of all requests "
        "({raw_output_tok_per_s:.4g}/s).",
    )  # fmt: skip
    yield Check(
        "counts_add_up", "steps", REJECT, "ascend", ("output_tok_per_s", "total_tok_per_s"),
        "Output tokens ({output_tok_per_s:.4g}/s) exceed all tokens ({total_tok_per_s:.4g}/s).",
    )  # fmt: skip

    # Three residence times: below that the ramp and the drain are most of the step.
    yield _between(
        "enough_requests", REJECT, "requests_per_slot",
        "{attempted:g} requests at concurrency {concurrency:g} are {requests_per_slot:.2g} per slot; fewer "
        "than 3 "
        "never show a steady state.", low=3,
    )  # fmt: skip
    yield _between(
        "window_length", FLAG, "window_share",
        "The window lasted {window_s:.1f} s, {window_share:.0%} of the shortest one allowed.", low=0.95,
    )  # fmt: skip

    # 5 % is the resolution of a limit, 10 % twice that.
    for severity, low in ((FLAG, 0.95), (REJECT, 0.90)):
        yield _between(
            "concurrency_reached", severity, "inflight_share",
            "On average {inflight_mean:.1f} of {concurrency:g} requests were in flight (pauses after "
            "refusals "
            "allowed for: {inflight_share:.0%}): the load never was what the step is called.", low=low,
        )  # fmt: skip
    yield _between(
        "concurrency_exceeded", REJECT, "inflight_excess",
        "On average {inflight_mean:.1f} requests were in flight at a nominal {concurrency:g}: the label is "
        "wrong, "
        "or another load ran.", high=1.02,
    )  # fmt: skip
    # What the instrument itself found while it measured.
    yield _between("client_bound", REJECT, "instrument_invalid", "{invalid}.", high=0)
    yield _between("simulator_kept_up", REJECT, "simulator_behind", "{invalid}.", high=0)
    for severity, high in ((FLAG, 0.05), (REJECT, 0.10)):
        yield _between(
            "client_bound", severity, "client_time_share",
            "The client spent {client_time_share:.0%} of slot time between requests, not the server on them: "
            "use "
            "more workers or a faster machine.", high=high,
        )  # fmt: skip
    yield _between(
        "client_lag", FLAG, "lag_of_latency",
        "The client's own delays (p99) reach {lag_of_latency:.0%} of the p99 latency shown; it may be the "
        "client's, not the server's.", high=0.5,
    )  # fmt: skip
    yield _between(
        "client_lag", FLAG, "client_cpu_share",
        "The busiest client process used {client_cpu_share:.0%} of a core: use more workers.", high=0.9,
    )  # fmt: skip
    yield _between(
        "rows_accounted", REJECT, "unaccounted_share",
        "{unaccounted_share:.0%} of slot time is covered by no request row: rows are missing.", high=0.05,
    )  # fmt: skip
    yield _between(
        "labels_agree", REJECT, "label_differs",
        "The request rows say concurrency {label_of_rows:g}, the step says {concurrency:g}.", high=0,
    )  # fmt: skip
    for severity, high in ((FLAG, 0.2), (REJECT, 0.5)):
        yield _between(
            "steady_state", severity, "drift_size",
            "The {drift_of} drifted by {drift:+.0%} inside the window: no steady state was "
            "measured.",
            high=high,
        )  # fmt: skip
    yield _between(
        "warm_up", FLAG, "start_up_size",
        "The {start_up_of} at the start of the window differs by {start_up:+.0%} from the rest: the "
        "warm-up is part of the measurement.", high=0.2,
    )  # fmt: skip
    yield _between(
        "warm_up", FLAG, "warmup_unsteady",
        "The warm-up reached its cap ({warmup_s:.0f} s) before the latency was steady.", high=0,
    )  # fmt: skip
    for severity, low in ((FLAG, 0.9), (REJECT, 0.5)):
        yield _between(
            "output_length", severity, "output_of_asked",
            "Answers had {output_of_asked:.0%} of the tokens asked for ({tokens_per_answer_mean:.0f} on "
            "average): "
            "they ended early, so the load was lighter than stated.", low=low,
        )  # fmt: skip
    yield _between(
        "output_length", FLAG, "output_of_asked",
        "Answers had {output_of_asked:.0%} of the tokens asked for: more than allowed.", high=1.02,
    )  # fmt: skip
    yield _between(
        "prompt_length", FLAG, "prompt_off",
        "Prompts had {prompt_of_asked:.0%} of the tokens meant; the {prompt_tokens_mean:.0f} measured count.",
        high=0.05,
    )  # fmt: skip
    yield _between(
        "empty_completions", FLAG, "empty_share",
        "{empty:g} of {attempted:g} requests ended properly with no token; they count as "
        "failures.", high=0.01,
    )  # fmt: skip
    yield _between(
        "client_errors", REJECT, "client_error",
        "{client_error:g} requests were refused as wrong (4xx): a matter of configuration, not of "
        "load.", high=0,
    )  # fmt: skip
    yield _between(
        "aborted_requests", FLAG, "aborted_share",
        "{aborted:g} counted requests were stopped by the client; what is left may favour fast answers.",
        high=0.01,
    )  # fmt: skip
    yield _between(
        "tokens_estimated", FLAG, "estimated_share",
        "{estimated_share:.0%} of the answers came without usage; their tokens are estimated from chunks.",
        high=0.01,
    )  # fmt: skip
    yield _between(
        "not_streamed", FLAG, "unstreamed_share",
        "{unstreamed_share:.0%} of the answers were not streamed though asked to be; they have no first "
        "token.",
        high=0.01,
    )  # fmt: skip
    yield _between(
        "bimodal_latency", FLAG, "modes",
        "The {modes_of} has two modes a factor {modes:.1f} apart: no single median describes it.", high=1.49,
    )  # fmt: skip
    yield _between(
        "prefix_cache", FLAG, "prefix_excess",
        "{server_prefix_hit_share:.0%} of the prompt tokens came from the prefix cache where "
        "{prefix_expected:.0%} "
        "were expected: prompts were used before, and the step flatters the server.", high=0.1,
    )  # fmt: skip
    for severity, high in ((FLAG, 0.05), (REJECT, 0.2)):
        yield _between(
            "foreign_traffic", severity, "foreign_share",
            "The server held {foreign_mean:.1f} requests more than were ours on average: somebody else used "
            "it.",
            high=high,
        )  # fmt: skip
    yield _between(
        "p99_at_deadline", FLAG, "p99_of_deadline",
        "The p99 latency ({e2e_p99_s:.1f} s) is pinned at the deadline ({deadline_s:g} s): the true tail is "
        "longer.",
        high=0.95,
    )  # fmt: skip
    yield _between(
        "repeats_agree", FLAG, "repeats_differ",
        "The {repeats_differ_of} of repeats of this step differs by {repeats_differ:.0%}.", high=0.2,
    )  # fmt: skip
    yield _between(
        "latency_falls", FLAG, "falls",
        "The {falls_of} is {falls:.0%} lower at concurrency {falls_other:g} than here: this step was "
        "measured cold, "
        "or with a backlog of the step before.", high=0.2,
    )  # fmt: skip
    yield _between(
        "stale_result",
        REJECT,
        "of_another_run",
        "The step belongs to run {run_id!r}, not to this one.",
        high=0,
    )
    yield _between(
        "stale_result", FLAG, "started_before_sweep_s",
        "The step began {started_before_sweep_s:.0f} s before the sweep was set up.", high=60,
    )  # fmt: skip
    yield _between(
        "duplicate_step", REJECT, "same_label",
        "{same_label:g} other steps have the same phase, class, concurrency and repeat.", high=0,
    )  # fmt: skip
    yield _between(
        "duplicate_step", REJECT, "same_numbers",
        "Its numbers are those of {twin} to the last digit: one is a copy of the other.", high=0,
    )  # fmt: skip


# -- imported step tables


def _imported_checks() -> Iterable[Check]:
    # The method's rule: 0.95, less what the drain of a run without kept-up load can take away.
    yield _between(
        "concurrency_reached", REJECT, "little_margin",
        "By Little's law {little:.0%} of {concurrency:g} requests were in flight where at least "
        "{little_allowed:.0%} had to be: the load never was what the step is called.", low=0,
    )  # fmt: skip
    yield _between(
        "concurrency_reached", REJECT, "implied_margin",
        "Throughput times latency hardly grew from concurrency {implied_from:g} on: at most "
        "{implied_share:.0%} of the plateau's nominal concurrency can have been in flight, whatever it is "
        "called.", low=0,
    )  # fmt: skip
    yield _between(
        "concurrency_exceeded", FLAG, "little_least",
        "By Little's law {little_least:.0%} of {concurrency:g} requests were in flight: the numbers "
        "contradict each other.", high=1.15,
    )  # fmt: skip
    yield _between(
        "arrival_capped", FLAG, "arrival_share",
        "{request_per_s:.3g} requests/s were served where {request_rate:g} were sent: the arrival rate set "
        "the "
        "throughput, not the server.", high=0.9,
    )  # fmt: skip
    yield _between(
        "rate_without_effect", REJECT, "rate_no_effect",
        "Neither throughput nor latency depends on the rate asked for, and the server was not busy: the rate "
        "was "
        "not applied, this is no sweep.", high=0,
    )  # fmt: skip
    yield _between(
        "client_capped", FLAG, "client_cap",
        "{client_cap:.0f} requests were in flight whatever the rate beyond what is served: a cap of the "
        "client, "
        "so latency here says nothing of the server.", high=0,
    )  # fmt: skip
    yield _between(
        "saturated_at_once", FLAG, "saturated_at_once",
        "Already the lowest rate ({request_rate:g} requests/s) exceeds what is served ({request_per_s:.3g}): "
        "the "
        "knee lies below it.", high=0,
    )  # fmt: skip
    yield _between(
        "output_length", REJECT, "answer_of_usual",
        "Answers had {tokens_per_answer_mean:.0f} tokens where this curve usually has {answer_usual:.0f}: "
        "they "
        "ended early.", low=0.5,
    )  # fmt: skip
    yield _between(
        "counts_add_up", FLAG, "total_off",
        "Input and output tokens do not add up to the total: it is {total_off:.0%} off.", high=0.1,
    )  # fmt: skip
    yield _between(
        "bimodal_latency", FLAG, "latency_spread",
        "The p99 latency is {latency_spread:.0f} times the median: two kinds of answers, or most ended at "
        "once.",
        high=10,
    )  # fmt: skip
    yield _between(
        "bimodal_latency", FLAG, "median_over_mean",
        "A median latency {median_over_mean:.2f} times the mean, where tails pull the mean up, shows two "
        "modes.",
        high=1.2,
    )  # fmt: skip
    yield _between(
        "no_data", REJECT, "no_completion",
        "None of {attempted:g} requests completed: there is nothing to measure.", high=0,
    )  # fmt: skip
    yield _between(
        "survivors_only", REJECT, "runs_dropped",
        "{runs_dropped:g} of {runs_made:g} runs were left out before averaging: what failed is not in the "
        "mean.",
        high=0,
    )  # fmt: skip
    yield _between(
        "client_bound", REJECT, "same_count",
        "Unlike servers share the very same odd count ({completed:g} of {attempted:g} requests): their "
        "common "
        "client set it.", high=0,
    )  # fmt: skip
    yield _between(
        "warm_up", FLAG, "cold", "The tool's own first run, on a server that was not warm yet.", high=0
    )


# -- series and sweep


def _series_checks() -> Iterable[Check]:
    # The method's own numbers.
    for severity, high in ((FLAG, 0.1), (REJECT, 0.2)):
        yield Check(
            "anchor_agrees", "series", severity, "between", ("anchor_differs",),
            "{service_class}: concurrency {anchor_concurrency:g} measured again at the end is "
            "{anchor_of:+.0%} in "
            "latency: the server did not stay the same during the sweep.",
            {"min_value": None, "max_value": high},
        )  # fmt: skip
    yield Check(
        "repeats_missing", "series", FLAG, "between", ("repeats_missing",),
        "{service_class}: {repeats_missing:g} repeats of a step are missing: what failed may have been left "
        "out.",
        {"min_value": None, "max_value": 0},
    )  # fmt: skip


CHECKS: tuple[Check, ...] = (
    *_request_checks(),
    *_step_checks(),
    *(replace(check, imported=True) for check in _imported_checks()),
    *_series_checks(),
)
