"""Did a limit change from run to run, and what is it attributed to? A pure function of the history.

Compared are runs of one *comparison* (:func:`comparable`): the same ``comparison_id`` (model, workload,
class, accelerator and count), measured alone, judged by the same deadline, floor and objectives. A run that
says nothing about the server (rejected, not measured, too little evidence) is passed over; "no passing
step" says something: the limit is below the lowest step.

Two searches of one unchanged server do not end at the same number: each is found to one request or 5 %, and
chance decides a step near the edge. So a limit **differs** from the level before it only if

1. the brackets (last pass, first that did not pass) do not overlap, and the limits are more than 10 % and
   more than 2 apart, which is twice what the search resolves; and
2. it **holds twice**: two comparable runs in a row say so, in the same direction; or the evidence is
   **strong**: at a concurrency that held in the better run, the worse run provably failed, and the two
   rates (completed, or completed with every objective met) are apart by one-sided Clopper-Pearson bounds at
   the effective number of requests (:mod:`bounds`), each at alpha = 0.005, a tenth of what a single limit
   is judged by. A rate does not rise with concurrency, so a failure below the better run's limit may be
   held against what was proven at that limit.

The *level* is the run with the median limit among the first five since the last change: one lucky night is
no level, and a slow decline is still measured from where it began. A change lies between the last run at
the old level and the first at the new one; what differs between the stacks of those two is what it is
attributed to, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from include.capacity.limits.bounds import ALPHA_EARLY, clopper_pearson_lower, clopper_pearson_upper
from include.capacity.words import EXPORTABLE, TERMS, LimitStatus

LEAST_SHARE = 0.10
LEAST_NUMBER = 2
"""Two limits must differ by more than both."""
LEVEL_RUNS = 5
SHOWN_DIFFERENCES = 6
"""More differences between two stacks than anybody reads in a sentence."""

INPUTS = (*TERMS, "measured", "cap_at_latency_knee")
"""Keys of a limit that must be equal for two of them to be compared."""

Limit = Mapping[str, Any]
"""A limit of a history entry, with ``run_id``, ``measured_at``, ``stack_id`` and ``stack`` of its run."""


class Verdict(StrEnum):
    """What a run says about a limit, beside the runs before it."""

    FIRST = "first"
    """Nothing comparable before it."""
    SAME = "same"
    """No change can be claimed."""
    FELL = "fell"
    ROSE = "rose"
    MAY_HAVE_FALLEN = "may_have_fallen"
    """Lower, once, without strong evidence: the next run decides."""
    MAY_HAVE_RISEN = "may_have_risen"


CHANGED = frozenset({Verdict.FELL, Verdict.ROSE})


@dataclass
class _Level:
    """Runs since the last change, and those that seem to leave it."""

    runs: list[Limit]
    last: Limit
    leaving: list[Limit] = field(default_factory=list)

    @property
    def reference(self) -> Limit:
        """The run with the median limit of the first few; of two in the middle the lower."""
        first = sorted(self.runs[:LEVEL_RUNS], key=_number)
        return first[(len(first) - 1) // 2]


def change(earlier: Sequence[Limit], now: Limit) -> dict[str, Any] | None:
    """What ``now`` says after the ``earlier`` runs (oldest first); None if it says nothing about the server.

    ``{"verdict", "was", "was_bracket", "since_run", "since", "confirmed_by", "stack", "stack_changes",
    "sentence"}``: ``was`` is the level's limit (None: no step passed), ``since_run`` the last run at it,
    ``confirmed_by`` ``evidence``, ``repetition`` or None, ``stack`` ``same``, ``changed`` or ``unknown``.
    """
    return changes([*earlier, now])[-1]


def changes(limits: Sequence[Limit]) -> list[dict[str, Any] | None]:
    """:func:`change` of every run of one comparison, oldest first."""
    found: list[dict[str, Any] | None] = []
    level: _Level | None = None
    for now in limits:
        if not _says_something(now):
            found.append(None)
            continue
        if level is None:
            level = _Level([now], now)
            found.append(_described(Verdict.FIRST, now, None, None, now, None))
            continue
        reference = level.reference
        direction = _direction(reference, now)
        if direction == 0:
            found.append(_described(Verdict.SAME, now, reference, level.last, now, None))
            level.runs.append(now)
            level.last, level.leaving = now, []
            continue
        before = [run for run in level.leaving if _direction(reference, run) == direction]
        by = "evidence" if strong(reference, now) else "repetition" if before else None
        verdict = {
            (-1, True): Verdict.FELL,
            (1, True): Verdict.ROSE,
            (-1, False): Verdict.MAY_HAVE_FALLEN,
            (1, False): Verdict.MAY_HAVE_RISEN,
        }[direction, by is not None]
        level.leaving = [*before, now]
        found.append(_described(verdict, now, reference, level.last, level.leaving[0], by))
        if by is not None:
            level = _Level(level.leaving, now)
    return found


def comparable(history: Sequence[Mapping[str, Any]], now: Limit, model: str) -> list[Limit]:
    """The limits in the history that ``now`` (of ``model``) may be compared with, oldest first.

    ``now`` has the keys of :data:`Limit`. Only runs that were measured before it; ``history`` as
    ``publish.read_history`` returns it.
    """
    if now.get("comparison_id") is None or now.get("measured") != "alone":
        return []
    found = [
        limit
        for entry in history
        if entry["run_id"] != now["run_id"]
        for limit in limits_of(entry, model)
        if limit["class"] == now["class"]
        and all(limit.get(key) == now.get(key) for key in INPUTS)
        and str(limit["measured_at"]) < str(now["measured_at"])
    ]
    return sorted(found, key=lambda limit: (str(limit["measured_at"]), str(limit["run_id"])))


def limits_of(entry: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    """A model's limits in one history entry, each with what is known of its run."""
    about = entry["models"].get(model) or {}
    return [
        {
            **limit,
            "run_id": entry["run_id"],
            "measured_at": about.get("measured_at") or entry["published_at"],
            "stack_id": about.get("stack_id"),
            "stack": about.get("stack"),
        }
        for limit in about.get("limits") or []
    ]


def strong(one: Limit, other: Limit) -> bool:
    """Whether the evidence of two limits that differ is strong; see the module's docstring."""
    worse, better = sorted((one, other), key=_number)
    held, failed = better.get("evidence"), worse.get("failing")
    if not held or not failed or failed["concurrency"] > held["concurrency"]:
        return False
    for met in ("completed", "objective_met"):
        good, bad = _rate(held, met), _rate(failed, met)
        if good is None or bad is None:
            continue
        lower = float(clopper_pearson_lower(*good, ALPHA_EARLY))
        upper = float(clopper_pearson_upper(*bad, ALPHA_EARLY))
        if lower > upper:
            return True
    return False


def _rate(evidence: Mapping[str, Any], met: str) -> tuple[float, float] | None:
    """(effective successes, effective requests); None if one of them is unknown."""
    n, good, effective = (evidence.get(key) for key in ("n", met, "n_effective"))
    if not n or good is None or effective is None:
        return None
    return good / n * effective, effective


def _says_something(limit: Limit) -> bool:
    return limit.get("status") in EXPORTABLE or limit.get("status") == LimitStatus.NO_PASSING_STEP


def _number(limit: Limit) -> float:
    """The limit; 0 where not even the lowest step passed."""
    return float(limit["limit"] or 0)


def _direction(before: Limit, now: Limit) -> int:
    """-1: lower, 1: higher, 0: not told apart."""
    low, high = sorted((before, now), key=_number)
    first_fail = (low.get("bracket") or [None, None])[1]
    if first_fail is None or high["limit"] is None or first_fail > high["limit"]:
        return 0
    if _number(high) - _number(low) <= max(LEAST_NUMBER, LEAST_SHARE * _number(high)):
        return 0
    return -1 if low is now else 1


# -- what the stacks differ in


def stack_changes(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str] | None:
    """What differs between two stacks, in words: ``vllm version 0.32 -> 0.33``; None if one is unknown.

    ``observed``, which differs a little at every start, is left out, as it is of ``stack_id``.
    """
    if not before or not now:
        return None
    old, new = (_flat("", {k: v for k, v in one.items() if k != "observed"}) for one in (before, now))
    found = []
    for key in dict.fromkeys([*old, *new]):
        was, is_ = old.get(key), new.get(key)
        if was == is_:
            continue
        name = key.replace("_", " ").replace(".", " ")
        if isinstance(was, tuple) and isinstance(is_, tuple):
            gone, come = _listed(was, is_), _listed(is_, was)
            parts = [f"without {gone}"] * bool(gone) + [f"with {come}"] * bool(come)
            found.append(f"{name}: {' and '.join(parts) or 'in another order'}")
        else:
            found.append(f"{name} {_shown(was)} -> {_shown(is_)}")
    return found


def _flat(prefix: str, data: Any) -> dict[str, Any]:
    """Nested settings by dotted name; a list of plain values is a tuple of options with their values."""
    if isinstance(data, Mapping):
        return {
            name: value
            for key, part in data.items()
            for name, value in _flat(f"{prefix}.{key}" if prefix else str(key), part).items()
        }
    if isinstance(data, list | tuple):
        if any(isinstance(item, Mapping) for item in data):
            return {
                name: value
                for at, part in enumerate(data, 1)
                for name, value in _flat(f"{prefix} {at}", part).items()
            }
        return {prefix: _options([str(item) for item in data])}
    return {prefix: data}


def _options(args: Sequence[str]) -> tuple[str, ...]:
    """``--max-model-len 8192`` as one item."""
    found: list[str] = []
    for arg in args:
        if found and found[-1].startswith("-") and " " not in found[-1] and not arg.startswith("-"):
            found[-1] += f" {arg}"
        else:
            found.append(arg)
    return tuple(found)


def _listed(one: Sequence[str], other: Sequence[str]) -> str:
    return ", ".join(item for item in one if item not in other)


def _shown(value: Any) -> str:
    if value is None or value == () or value == "":
        return "(none)"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def attribution(before: Limit, now: Limit) -> tuple[str, list[str]]:
    """(``same``, ``changed`` or ``unknown``; what differs) between the stacks of two runs."""
    ids = before.get("stack_id"), now.get("stack_id")
    if None in ids:
        return "unknown", []
    if ids[0] == ids[1]:
        return "same", []
    return "changed", stack_changes(before.get("stack"), now.get("stack")) or []


# -- words


def _described(
    verdict: Verdict, now: Limit, reference: Limit | None, last: Limit | None, first: Limit, by: str | None
) -> dict[str, Any]:
    """One entry of :func:`changes`; ``last`` at the old level and ``first`` away from it decide the cause."""
    stack, differences = attribution(last, first) if last is not None and last is not first else (None, [])
    found = {
        "verdict": verdict.value,
        "was": reference["limit"] if reference else None,
        "was_bracket": list(reference.get("bracket") or [None, None]) if reference else None,
        "since_run": last["run_id"] if last else None,
        "since": str(last["measured_at"]) if last else None,
        "confirmed_by": by,
        "stack": stack,
        "stack_changes": differences,
    }
    return {**found, "sentence": _sentence(verdict, found, now)}


def _sentence(verdict: Verdict, found: Mapping[str, Any], now: Limit) -> str:
    name = str(now["class"])
    if verdict is Verdict.FIRST:
        return f"{name}: there is no earlier comparable run."
    was, is_ = _words(found["was"]), _words(now["limit"])
    run = f"run {found['since_run']}"
    if verdict is Verdict.SAME:
        return f"{name}: {was} before, {is_} now: too close to each other for a change to be claimed."
    cause = _cause(found["stack"], found["stack_changes"])
    if verdict not in CHANGED:
        way = "lower" if verdict is Verdict.MAY_HAVE_FALLEN else "higher"
        return (
            f"{name}: {is_} now, {way} than the {was} before (until {run}), but seen once and without strong "
            f"evidence: not called a change unless the next comparable run says so too. Since then {cause}."
        )
    old, new = float(found["was"] or 0), float(now["limit"] or 0)
    share = f" ({'+' if new > old else '−'}{abs(new - old) / old:.0%})".replace("%", " %") if old else ""
    why = "the evidence is strong" if found["confirmed_by"] == "evidence" else "two runs in a row say so"
    return f"{name}: the limit {verdict} from {was} to {is_}{share} after {run} ({why}); {cause}."


def _words(limit: Any) -> str:
    return "no passing step" if limit is None else f"{limit:,}"


def _cause(stack: str | None, differences: Sequence[str]) -> str:
    if stack == "same":
        return "the stack is the same"
    if stack != "changed":
        return "what the stack was then or is now is not known"
    if not differences:
        return "the stack has changed, and the history does not say in what"
    shown = "; ".join(differences[:SHOWN_DIFFERENCES])
    more = len(differences) - SHOWN_DIFFERENCES
    return f"the stack has changed: {shown}" + (f"; and {more} more" if more > 0 else "")
