"""How numbers are written: always with a unit, at most three meaningful digits, never rounded to a lie.

99.96 % is not written as 100 %, and 0.04 % not as 0 %. Unknown is written as an en dash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from include.capacity.words import LimitStatus, Outcome

UNKNOWN = "–"

OUTCOME_WORDS = {
    Outcome.COMPLETED: "completed",
    Outcome.REJECTED: "rejected (429, 503)",
    Outcome.SERVER_ERROR: "server error (5xx)",
    Outcome.CLIENT_ERROR: "client error (4xx)",
    Outcome.CONNECT_FAILED: "no connection",
    Outcome.CONNECTION_LOST: "connection lost",
    Outcome.FIRST_TOKEN_TIMEOUT: "no first token in time",
    Outcome.DEADLINE_EXCEEDED: "deadline exceeded",
    Outcome.TRUNCATED: "truncated",
    Outcome.STREAM_ERROR: "error in stream",
    Outcome.MALFORMED: "malformed",
    Outcome.EMPTY: "empty answer",
    Outcome.ABORTED: "aborted by us",
}

STATUS_WORDS = {
    LimitStatus.PROVEN: "proven",
    LimitStatus.LOWER_BOUND: "lower bound",
    LimitStatus.NO_PASSING_STEP: "no passing step",
    LimitStatus.INSUFFICIENT_EVIDENCE: "insufficient evidence",
    LimitStatus.NOT_MEASURED: "not measured",
    LimitStatus.REJECTED: "rejected",
}

STATUS_MEANING: dict[str, str] = {
    LimitStatus.PROVEN: "Held on fresh requests at this concurrency, and a higher one was seen to fail.",
    LimitStatus.LOWER_BOUND: "Proven up to here; the ladder or the budget ended before anything failed.",
    LimitStatus.NO_PASSING_STEP: "No measured concurrency held the objectives.",
    LimitStatus.INSUFFICIENT_EVIDENCE: "The data were read, but are too few or too coarse to prove a limit.",
    LimitStatus.NOT_MEASURED: "This class was not measured.",
    LimitStatus.REJECTED: "The measurement cannot be trusted, so nothing is concluded from it.",
}


BOUND_WORDS = {
    "latency_knee": "the latency knee: beyond it the first token comes later faster than the load grows",
    "server_crash": "a crash of the server at the next step",
    "completion": "the completion floor",
    "ttft": "the first-token objective",
    "tpot": "the time-per-token objective",
    "e2e": "the whole-answer objective",
    "budget": "the budget: the search ended before anything failed",
    "ladder": "the ladder: nothing failed up to its top",
    "ceiling": "the ceiling of the endpoint (server.max_concurrency): nothing above it may be measured",
    "shared": "the other class on the server: no larger pair held",
}
SERVER_BOUND_WORDS = {
    "admission": "admission (it refuses what it cannot take)",
    "kv": "KV cache (full, or requests preempted for want of it)",
    "slots": "slots (requests wait while the KV cache has room)",
    "compute": "compute (nobody waits and the cache has room; the work itself is slow)",
}
PLATEAU_WORDS = {
    **SERVER_BOUND_WORDS,
    "request_count": "the request count (too few to fill what was asked for, or for a steady state)",
    "arrival_cap": "an arrival cap (the rate at which requests were sent)",
    "client_cap": "a client cap (the load client never held what was asked for)",
    "slots_or_kv": "slots or KV cache (the number generated at once stays the same)",
    "unknown": "something that the data do not name",
}


def plateau_words(cause: Any, *, short: bool = False) -> str:
    """What set a plateau. ``short``: without the explanation."""
    words = PLATEAU_WORDS.get(text(cause), spaced(cause))
    return words.split(" (")[0] if short else words


def bound_words(entry: Mapping[str, Any], *, short: bool = False) -> str:
    """What bound a limit; blank if unknown. ``short``: without the explanation."""
    code = text(entry.get("bound_by"))
    words = BOUND_WORDS.get(code, spaced(code))
    return words.split(":")[0] if short else words


def server_bound_words(entry: Mapping[str, Any]) -> str:
    """The same in the server's own terms; blank if unknown."""
    return SERVER_BOUND_WORDS.get(text(entry.get("server_bound_by")), "")


def known(value: Any) -> float | None:
    """A finite number, or None for anything that is not one."""
    if value is None or isinstance(value, bool | str):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def text(value: Any) -> str:
    """A cell as text; blank for NaN and None."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def number(value: Any) -> str:
    """A whole number with thousands separators: ``1,234``."""
    found = known(value)
    return UNKNOWN if found is None else f"{found:,.0f}"


def rate(value: Any) -> str:
    """A rate: ``1,234`` from 100 on, ``12.3`` and ``1.23`` below."""
    found = known(value)
    if found is None:
        return UNKNOWN
    size = abs(found)
    return f"{found:,.0f}" if size >= 99.95 else f"{found:.1f}" if size >= 9.995 else f"{found:.2f}"


def seconds(value: Any) -> str:
    """Seconds with their unit: ``212 s``, ``1.0 s``, ``0.62 s``, ``23 ms``."""
    found = known(value)
    if found is None:
        return UNKNOWN
    size = abs(found)
    if size >= 99.5:
        return f"{found:,.0f} s"
    if size >= 9.95:
        return f"{found:.0f} s" if found == round(found) else f"{found:.1f} s"
    if size >= 0.995:
        return f"{found:.1f} s" if round(found, 2) == round(found, 1) else f"{found:.2f} s"
    if size >= 0.0995:
        return f"{found:.2f} s"
    return f"{found * 1000:.0f} ms" if size >= 0.00995 or size == 0 else f"{found * 1000:.1f} ms"


def percent(share: Any) -> str:
    """A share in percent: ``100 %``, ``99.3 %``, ``7.1 %``; what is not all or nothing never reads so."""
    found = known(share)
    if found is None:
        return UNKNOWN
    value = found * 100
    for digits in (1, 2, 3):
        shown = round(value, digits)
        if (shown not in (0.0, 100.0)) or value in (0.0, 100.0):
            return f"{shown:.{digits}f}".rstrip("0").rstrip(".") + " %"
    return "> 99.999 %" if value > 50 else "< 0.001 %"


def count(value: Any) -> str:
    """A sample size: ``n 1,240``."""
    return f"n {number(value)}"


def spaced(value: Any) -> str:
    """A code word for people: ``latency_knee`` as ``latency knee``."""
    return text(value).replace("_", " ")


def title_of(service_class: str, series: str = "") -> str:
    """A class, with its series where there are several."""
    return " · ".join(part for part in (service_class or "all traffic", series) if part)


def status_words(status: Any) -> str:
    """A limit's status for people; an unknown one as it is."""
    return STATUS_WORDS.get(status, spaced(status) or UNKNOWN)


def join(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
