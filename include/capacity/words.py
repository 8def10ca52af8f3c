"""The closed vocabularies: how a request ends, what a step is for, what a verdict can be."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; each request has exactly one."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """429 or 503: the server said no."""
    SERVER_ERROR = "server_error"
    """Any other 5xx."""
    CLIENT_ERROR = "client_error"
    """Any other 4xx: configuration, ends the step with an error and enters no rate."""
    CONNECT_FAILED = "connect_failed"
    CONNECTION_LOST = "connection_lost"
    """Closed or reset after the request was written, before a proper end."""
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    """The deadline passed before the first token."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The deadline passed after the first token (or, not streamed, before the answer)."""
    TRUNCATED = "truncated"
    """The body ended cleanly with neither finish_reason nor [DONE]."""
    STREAM_ERROR = "stream_error"
    """An error object inside a 200 answer."""
    MALFORMED = "malformed"
    """An answer that is not what the API promises."""
    EMPTY = "empty"
    """Ended properly with no token."""
    ABORTED = "aborted"
    """We stopped it: in no rate."""


UNRATED = frozenset({Outcome.ABORTED, Outcome.CLIENT_ERROR})
"""Outcomes that enter no completion rate."""


class Phase(StrEnum):
    """What a step is run for."""

    BASELINE = "baseline"
    PRIME = "prime"
    SCOUT = "scout"
    PROVE = "prove"
    ANCHOR = "anchor"
    SHARED = "shared"
    GRID = "grid"
    """A step given by the user: measured exactly as given, at proof size."""


EVIDENCE_PHASES = frozenset({Phase.PROVE, Phase.GRID})
"""Phases whose requests may prove a limit measured alone (scouting chose N, so it may not)."""


class StopReason(StrEnum):
    """Why a step stopped counting requests."""

    ENOUGH = "enough_requests"
    DECIDED = "decided"
    """An extendable proof passed or failed at a planned checkpoint."""
    EARLY_FAIL = "early_fail"
    """Proven failure at alpha = 0.005."""
    CAP = "wall_clock_cap"
    CANCELLED = "cancelled"
    SERVER_GONE = "server_gone"
    ERROR = "error"


class State(StrEnum):
    """What a step says about a concurrency, at one-sided 95 %."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class LimitStatus(StrEnum):
    """What kind of statement a limit is."""

    PROVEN = "proven"
    LOWER_BOUND = "lower_bound"
    """The ladder or the budget ended first: proven up to here."""
    NO_PASSING_STEP = "no_passing_step"
    INSUFFICIENT_EVIDENCE = "insufficient_evidence"
    NOT_MEASURED = "not_measured"
    REJECTED = "rejected"


EXPORTABLE = frozenset({LimitStatus.PROVEN, LimitStatus.LOWER_BOUND})
"""Statuses whose number a gateway may use."""

TERMS = ("comparison_id", "deadline_s", "completion_floor", "objectives")
"""Keys of a limit that say what it promises, and for which work."""


class Severity(StrEnum):
    """What a data-quality finding does."""

    REJECT = "reject"
    """Keeps the step (or the sweep) out of every limit."""
    FLAG = "flag"
    """Printed beside it."""
