"""What to measure next: a pure function of the problem and the evidence so far.

For every class the **ladder**: baseline (N = 1), prime (once at the top), scouts upward until two
steps provably fail or the server crashes. Then for every class the **refinement** by bisection (in the
logarithm) of two brackets, to max(1, 5 %): the latency knee, if it caps the class, and the edge where the
point estimates stop holding; only where they can still change the limit. Then for every class the
**proof** on fresh requests, from the candidate

    min(highest scout that holds below every provable fail, upper edge of the latency knee)

down, by 5 % three times, by 15 % three times, by half three times, until one passes (ten tries and still
not proven: the evidence is insufficient, and more of it would not help). Candidate and tries go lower at
once, at most by half, where all scouts and proofs so far say that a proof is likely only there
(:meth:`Search.likely`): a scout holds by luck too, and every proof above the limit is one more chance to
pass wrongly. It may choose N freely, because the proof's own requests are fresh. Then the
**shared** pair: the largest s for which (s n_1, s n_2, ...) hold together is scouted by bisection and
proven likewise. Last the **anchor**: each class's lowest scout again.

A step that came back invalid, cancelled or with an error is measured once more under another repeat
number, then counts as not measured, never as failed. A crash at N is a failure at N. No phase is
returned to once a later one has begun, so an interrupted run converges. When a time budget is set, a step
is planned only if it fits, and before proof only if the proof of what is known so far still fits
after it.

A server may be too slow for a proof within ``prove_cap_s``. What was measured of it says so beforehand,
and then the proof gets a longer cap (:func:`with_cap`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from include.capacity.config import ServiceClass, StepBounds
from include.capacity.limits.evidence import Evidence, proof_sized, share
from include.capacity.limits.knees import Counts, LatencyKnee, isotonic_crossing, latency_knee
from include.capacity.results.spec import Load, StepSpec, step_seed
from include.capacity.words import Phase, State

BASELINE_REQUESTS = 30
PRIME_CAP_S = 30.0
PROOF_WINDOWS = 4
"""A proof lasts at least so many times ``min_window_s``: a server whose speed swings by a few percent
over minutes passes above its limit in a short good spell."""
ENOUGH_FAILS = 2
"""Provable fails after which the ladder ends."""
TRIES = 2
"""Times that a step is measured at most, if it comes back unusable."""
DESCENT = ((3, 0.95), (3, 0.85), (3, 0.5))
"""(how often, factor): the slowest way down from a candidate that was not proven."""
STEEPEST = 0.5
"""Lowest factor of one step of the way down."""
LIKELY_Z = 1.645
"""Standard errors above the floor at which a proof is likely: half of those at that rate pass."""
SHARED_PARTS = 32
"""s is found to 1/32, in log2(32) = 5 bisections."""
SHARED_PROOF_REPEAT = 3
"""First repeat number of the proof of a pair; 1 and 2 scout it."""
SLOW_SLACK = 2.0
"""A slow server's proof may take so many times what it is expected to."""
BLIND_LATENCY_S = 5.0
"""Time of a request assumed before any was measured."""

ORDER = {
    Phase.BASELINE: 0,
    Phase.PRIME: 0,
    Phase.GRID: 0,
    Phase.SCOUT: 1,
    Phase.PROVE: 2,
    Phase.SHARED: 3,
    Phase.ANCHOR: 4,
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What one model's sweep is to find out."""

    model: str
    classes: Mapping[str, ServiceClass]
    bounds: StepBounds = field(default_factory=StepBounds)
    mode: Literal["find", "exact"] = "find"
    repeats: int = 1
    shared: bool = False
    seed: int = 0
    budget_s: float | None = None
    """Seconds that may still be spent (the server's seconds); None is without bound."""
    ceiling: int | None = None
    """Most requests in flight at once; ladders end there, and a search at the ceiling itself."""

    def __post_init__(self) -> None:
        if self.ceiling is not None:
            below = {name: self._below(service) for name, service in self.classes.items()}
            object.__setattr__(self, "classes", below)

    def _below(self, service: ServiceClass) -> ServiceClass:
        ladder = [n for n in service.ladder if n <= (self.ceiling or n)]
        if self.mode == "find" and self.ceiling and len(ladder) < len(service.ladder):
            ladder = sorted({*ladder, self.ceiling})
        return service.model_copy(update={"ladder": ladder})


def problem_of(sweep: Mapping[str, Any]) -> Problem:
    """The problem that a ``sweep.json`` states; an optional ``budget_s`` is what is left now."""
    return Problem(
        model=sweep["model"],
        classes={name: ServiceClass.model_validate(data) for name, data in sweep["classes"].items()},
        bounds=StepBounds.model_validate(sweep.get("bounds") or {}),
        mode=sweep.get("mode") or "find",
        repeats=sweep.get("repeats") or 1,
        shared=bool(sweep.get("shared")),
        seed=sweep.get("seed") or 0,
        budget_s=sweep.get("budget_s"),
        ceiling=sweep.get("ceiling"),
    )


# -- the steps of each phase


def ladder_steps(problem: Problem) -> list[StepSpec]:
    """All asked-for steps in the order to run them: the ladder, or exactly the steps given."""
    if problem.mode == "exact":
        return [
            _grid(problem, name, n, repeat)
            for name, service in problem.classes.items()
            for repeat in range(1, problem.repeats + 1)
            for n in service.ladder
        ]
    steps = []
    for name, service in problem.classes.items():
        steps.append(_baseline(problem, name))
        steps.append(_prime(problem, name, service.ladder[-1]))
        steps += [_scout(problem, name, n) for n in service.ladder]
    return steps


def above_ceiling(sweep: Mapping[str, Any]) -> list[StepSpec]:
    """Asked-for steps of a ``sweep.json`` that its ceiling keeps from being measured."""
    unbound = problem_of({**sweep, "ceiling": None})
    steps = (spec for spec in ladder_steps(unbound) if spec.phase in (Phase.SCOUT, Phase.GRID))
    return [spec for spec in steps if over_ceiling(sweep.get("ceiling"), spec)]


def over_ceiling(ceiling: int | None, spec: StepSpec) -> str | None:
    """Why a step is above what the server may be loaded with; None if it is not."""
    if ceiling is None or sum(load.concurrency for load in spec.loads) <= ceiling:
        return None
    return f"not measured: above the ceiling of {ceiling} (server.max_concurrency)"


def _step(
    problem: Problem, phase: Phase, loads: Mapping[str, tuple[int, int, int]], repeat: int = 1, **more: Any
) -> StepSpec:
    """``loads``: class -> (concurrency, requests, most requests)."""
    bounds = problem.bounds
    settings: dict[str, Any] = {
        "min_window_s": bounds.min_window_s,
        "cap_s": bounds.scout_cap_s,
        "early_stop": False,
        **more,
    }
    spec = StepSpec(
        model=problem.model,
        phase=phase,
        loads=tuple(
            Load(service_class=name, concurrency=n, requests=requests, max_requests=most)
            for name, (n, requests, most) in loads.items()
        ),
        repeat=repeat,
        **settings,
    )
    return StepSpec(**{**vars(spec), "seed": step_seed(problem.seed, problem.model, spec.key)})


def _baseline(problem: Problem, name: str) -> StepSpec:
    """One request after the other. Bounded like a proof: 30 slow answers take longer than a scout may."""
    return _step(
        problem,
        Phase.BASELINE,
        {name: (1, BASELINE_REQUESTS, BASELINE_REQUESTS)},
        cap_s=problem.bounds.prove_cap_s,
    )


def _prime(problem: Problem, name: str, top: int) -> StepSpec:
    """One fill of the server at the top of the ladder, until a quarter of it has come back, and enough.

    Its requests are nobody's evidence.
    """
    requests = max(problem.bounds.prime_requests, top // 4)
    return _step(
        problem,
        Phase.PRIME,
        {name: (top, requests, requests)},
        min_window_s=0.0,
        cap_s=min(PRIME_CAP_S, problem.bounds.scout_cap_s),
    )


def _scout_size(problem: Problem, n: int) -> tuple[int, int, int]:
    requests = max(problem.bounds.scout_requests, 3 * n)
    return n, requests, requests


def _proof_size(problem: Problem, n: int) -> tuple[int, int, int]:
    bounds = problem.bounds
    return n, max(bounds.prove_requests, 10 * n), max(bounds.prove_requests_max, 10 * n)


def _scout(problem: Problem, name: str, n: int, repeat: int = 1, phase: Phase = Phase.SCOUT) -> StepSpec:
    return _step(problem, phase, {name: _scout_size(problem, n)}, repeat, early_stop=phase is Phase.SCOUT)


def _prove(problem: Problem, name: str, n: int, repeat: int = 1) -> StepSpec:
    return _step(
        problem,
        Phase.PROVE,
        {name: _proof_size(problem, n)},
        repeat,
        min_window_s=_proof_window_s(problem),
        cap_s=problem.bounds.prove_cap_s,
        early_stop=True,
    )


def _proof_window_s(problem: Problem) -> float:
    return min(PROOF_WINDOWS * problem.bounds.min_window_s, problem.bounds.prove_cap_s)


def _grid(problem: Problem, name: str, n: int, repeat: int) -> StepSpec:
    return _step(
        problem, Phase.GRID, {name: _proof_size(problem, n)}, repeat, cap_s=problem.bounds.prove_cap_s
    )


def _together(problem: Problem, pair: Mapping[str, int], repeat: int, proof: bool) -> StepSpec:
    size = _proof_size if proof else _scout_size
    return _step(
        problem,
        Phase.SHARED,
        {name: size(problem, n) for name, n in pair.items()},
        repeat,
        min_window_s=_proof_window_s(problem) if proof else problem.bounds.min_window_s,
        cap_s=problem.bounds.prove_cap_s if proof else problem.bounds.scout_cap_s,
        early_stop=True,
    )


# -- what is known of one class


@dataclass(frozen=True)
class Search:
    """What the evidence says so far about one class's limit, and what is left to ask."""

    problem: Problem
    name: str
    evidence: Sequence[Evidence]
    tries: int = TRIES

    @property
    def service(self) -> ServiceClass:
        """The class."""
        return self.problem.classes[self.name]

    def measured(self, phase: Phase) -> dict[int, Evidence]:
        """Usable steps of one phase by concurrency; the highest repeat counts."""
        found = [e for e in self.evidence if e.service_class == self.name and e.phase == phase and e.usable]
        return {e.concurrency: e for e in sorted(found, key=lambda e: (e.concurrency, e.repeat))}

    def scouts(self) -> dict[int, Evidence]:
        """Usable scouts by concurrency; a crash while priming counts as one at its concurrency."""
        crashed = {n: e for n, e in self.measured(Phase.PRIME).items() if e.crashed}
        return dict(sorted({**crashed, **self.measured(Phase.SCOUT)}.items()))

    def cliff(self) -> str | None:
        """Why the ladder is not to be climbed from somewhere on; None while it may be."""
        at = self._cliff()
        return at[1] if at else None

    def _cliff(self) -> tuple[int, str] | None:
        """(first concurrency not wanted any more, why)."""
        scouts = self.scouts()
        crash = min((n for n, e in scouts.items() if e.crashed), default=None)
        fails = [n for n, e in scouts.items() if e.failed]
        if crash is not None and (len(fails) < ENOUGH_FAILS or crash <= fails[ENOUGH_FAILS - 1]):
            return crash, f"the server crashed at {crash}: not measured from there on"
        if len(fails) >= ENOUGH_FAILS:
            a, b = fails[:ENOUGH_FAILS]
            return b, f"past the cliff: {a} and {b} provably fail"
        return None

    def unwanted(self, n: int) -> str | None:
        """Why a ladder step need not be measured; None if it is wanted."""
        at = self._cliff()
        return at[1] if at and n >= at[0] and n not in self.measured(Phase.SCOUT) else None

    def lowest_fail(self) -> int | None:
        """The lowest scout that provably failed."""
        return min((n for n, e in self.scouts().items() if e.failed), default=None)

    def edge(self) -> tuple[int, int | None]:
        """(highest scout that holds below every provable fail or 0, lowest above that does not).

        "Holds" is by point estimate; without an upper end it is None.
        """
        scouts = self.scouts()
        blocked = self.lowest_fail()
        low = max((n for n, e in scouts.items() if e.holds and (blocked is None or n < blocked)), default=0)
        high = min((n for n, e in scouts.items() if n > low and not e.holds), default=None)
        return low, high

    def knee(self) -> LatencyKnee | None:
        """The latency knee, if it caps this class."""
        if self.service.rule != "interactive" or not self.service.cap_at_latency_knee:
            return None
        scouts = self.measured(Phase.SCOUT)
        ladder = set(self.service.ladder)
        return latency_knee(
            [e for n, e in scouts.items() if n in ladder],
            [e for n, e in scouts.items() if n not in ladder],
        )

    def closed(self, low: int, high: int) -> bool:
        """Whether a bracket is as narrow as asked for."""
        return high - low <= max(1.0, self.problem.bounds.resolution * low)

    def ladder(self) -> Iterator[StepSpec]:
        """Ladder steps that are still wanted, in order."""
        if not self._began(Phase.SCOUT):
            for phase in (Phase.BASELINE, Phase.PRIME):
                if not self._began(phase):
                    yield next(s for s in ladder_steps(self.problem) if s.phase is phase and
                               s.loads[0].service_class == self.name)  # fmt: skip
        for n in self.service.ladder:
            if self.unwanted(n) is None:
                yield from self._again(Phase.SCOUT, n)

    def unfinished(self) -> bool:
        """Whether more measuring could still move the limit: then what is proven is a lower bound.

        Ladder steps above a provable failure are not asked after: they cannot.
        """
        blocked = self.lowest_fail()
        below = (
            s
            for s in self.ladder()
            if s.phase is Phase.SCOUT and (blocked is None or s.loads[0].concurrency < blocked)
        )
        return any(True for steps in (below, self.refine(), self.prove()) for _ in steps)

    def refine(self) -> Iterator[StepSpec]:
        """The next bisecting scout, if any is wanted."""
        low, high = self.edge()
        knee = self.knee()
        if knee is not None and knee.low < low and not self.closed(knee.low, knee.high):
            yield from self._again(Phase.SCOUT, _middle(knee.low, knee.high))
        if high is not None and (knee is None or low < knee.high) and not self.closed(low, high):
            yield from self._again(Phase.SCOUT, _middle(low, high))

    def candidate(self) -> int | None:
        """Where proof begins; None if even the lowest step provably failed or nothing was scouted."""
        scouts = self.scouts()
        low, _ = self.edge()
        if low == 0:
            undecided = [n for n, e in scouts.items() if not e.failed]
            blocked = self.lowest_fail()
            low = min(undecided, default=0)
            return low if low and (blocked is None or low < blocked) else None
        knee = self.knee()
        return low if knee is None else min(low, knee.high)

    def proven(self) -> int | None:
        """The highest concurrency proven with no failure below it; None without one."""
        proofs = self.measured(Phase.PROVE)
        fails = [n for n, e in proofs.items() if e.failed]
        held = [n for n, e in proofs.items() if e.state == State.PASS and n < min(fails, default=n + 1)]
        return max(held, default=None)

    def prove(self) -> Iterator[StepSpec]:
        """The next proof, if any is wanted."""
        start = self.candidate()
        if start is None or self.proven() is not None:
            return
        tried = sorted({e.concurrency for e in self._tried(Phase.PROVE)}, reverse=True)
        for n in tried:
            yield from self._again(Phase.PROVE, n)  # those that came back unusable
        usual = _next_down(start, tried)
        if usual is None:
            return
        likely = self.likely()
        lowest = math.floor(STEEPEST * (tried[-1] if tried else start))
        yield from self._again(
            Phase.PROVE, usual if likely is None else max(1, min(usual, max(likely, lowest)))
        )

    def likely(self) -> int | None:
        """The highest concurrency at which the largest proof would likely pass; None if all are.

        Where the success rates of all scouts and proofs, fitted as falling in N, cross
        floor + 1.645 sqrt(floor (1 - floor) / n), n the most requests of a proof; the lower one of
        completion and objectives.
        """
        measured = [*self.measured(Phase.SCOUT).values(), *self.measured(Phase.PROVE).values()]
        most = self.problem.bounds.prove_requests_max
        crossings = []
        for floor, successes in ((self.service.completion_floor, "completed"), (share(self.service), "met")):
            if floor is None:
                continue
            counts: dict[int, Counts] = {}
            for e in measured:
                _, attempted, good = counts.get(e.concurrency, (0, 0, 0))
                counts[e.concurrency] = Counts(
                    e.concurrency, attempted + e.attempted, good + getattr(e, successes)
                )
            needed = floor + LIKELY_Z * math.sqrt(floor * (1 - floor) / most)
            crossings.append(isotonic_crossing(list(counts.values()), min(needed, 1.0)))
        found = [crossing for crossing in crossings if crossing is not None]
        return math.floor(min(found)) if found else None

    def anchor(self) -> Iterator[StepSpec]:
        """The lowest scout once more."""
        lowest = min(self.measured(Phase.SCOUT), default=None)
        if lowest is not None:
            yield from self._again(Phase.ANCHOR, lowest)

    def _tried(self, phase: Phase, n: int | None = None) -> list[Evidence]:
        return [
            e
            for e in self.evidence
            if e.service_class == self.name and e.phase == phase and n in (None, e.concurrency)
        ]

    def _began(self, phase: Phase) -> bool:
        return bool(self._tried(phase))

    def _again(self, phase: Phase, n: int) -> Iterator[StepSpec]:
        """The step, unless it was measured or has been tried often enough."""
        tried = self._tried(phase, n)
        if any(e.usable and not e.crashed for e in tried) or len(tried) >= self.tries:
            return
        repeat = max((e.repeat for e in tried), default=0) + 1
        if phase is Phase.PROVE:
            yield _prove(self.problem, self.name, n, repeat)
        else:
            yield _scout(self.problem, self.name, n, repeat, phase)


def _middle(low: int, high: int) -> int:
    """Between two concurrencies, in the logarithm; ``low`` may be 0."""
    middle = round(math.sqrt(max(low, 1) * high))
    return min(max(middle, low + 1), high - 1)


def descent(start: int) -> list[int]:
    """The concurrencies that proof tries on its slowest way down from a candidate."""
    steps: list[int] = []
    while (n := _next_down(start, steps)) is not None:
        steps.append(n)
    return steps


def _next_down(start: int, tried: Sequence[int]) -> int | None:
    """The next lower concurrency after those tried, which descend; None when there is none."""
    if not tried:
        return start
    factors = [factor for times, factor in DESCENT for _ in range(times)]
    if len(tried) > len(factors):
        return None
    n = min(tried[-1] - 1, math.floor(factors[len(tried) - 1] * tried[-1]))
    return n if n >= 1 else None


# -- classes together


@dataclass(frozen=True)
class SharedSearch:
    """The largest s for which all classes hold together at s times their own limits."""

    problem: Problem
    evidence: Sequence[Evidence]

    def limits(self) -> dict[str, int]:
        """The proven limits of the classes, measured alone; empty with fewer than two."""
        alone = {name: Search(self.problem, name, self.evidence).proven() for name in self.problem.classes}
        found = {name: n for name, n in alone.items() if n is not None}
        return found if len(found) > 1 else {}

    def pair(self, s: float) -> dict[str, int]:
        """Concurrencies at s."""
        return {name: max(1, math.floor(s * n + 1e-9)) for name, n in self.limits().items()}

    def steps(self) -> Iterator[StepSpec]:
        """The next step of the search or of the proof, if any is wanted."""
        if not self.limits() or self.proven():
            return
        low, high = 0, self._parts()
        while high - low > 1:
            middle = (low + high) // 2
            spec, steps = self._state(self.pair(middle / SHARED_PARTS), proof=False)
            if spec is not None:
                yield spec
                return
            if steps is None:
                break  # could not be measured: prove what is known
            low, high = (middle, high) if all(e.holds for e in steps) else (low, middle)
        s = low / SHARED_PARTS
        if low == 0:
            return
        tried = []
        for factor in (1.0, *(factor for times, factor in DESCENT for _ in range(times))):
            s *= factor
            pair = self.pair(s)
            if pair in tried:
                continue
            tried.append(pair)
            spec, _ = self._state(pair, proof=True)
            if spec is not None:
                yield spec

    def _parts(self) -> int:
        """The first part of s that need not be asked: all of it, or the first above the ceiling."""
        ceiling = self.problem.ceiling
        sizes = (sum(self.pair(part / SHARED_PARTS).values()) for part in range(SHARED_PARTS))
        above = (part for part, size in enumerate(sizes) if ceiling is not None and size > ceiling)
        return next(above, SHARED_PARTS)

    def proven(self) -> list[Evidence]:
        """The loads of the largest pair that was proven; empty without one."""
        passed = [
            loads
            for loads in self._loads().values()
            if all(e.proof and e.usable and e.state == State.PASS for e in loads)
        ]
        return max(passed, key=lambda loads: sum(e.concurrency for e in loads), default=[])

    def tried(self) -> list[list[Evidence]]:
        """All proof steps of pairs that were measured, in ascending size."""
        proofs = [loads for loads in self._loads().values() if all(e.proof and e.usable for e in loads)]
        return sorted(proofs, key=lambda loads: sum(e.concurrency for e in loads))

    def _loads(self) -> dict[str, list[Evidence]]:
        """Loads of shared steps by step key, whole steps only."""
        steps: dict[str, dict[str, Evidence]] = {}
        for e in self.evidence:
            if e.phase == Phase.SHARED:
                steps.setdefault(e.key, {})[e.service_class] = e
        whole = {key: list(loads.values()) for key, loads in steps.items()}
        return {key: loads for key, loads in whole.items() if len(loads) == len(loads[0].beside) + 1}

    def _state(self, pair: Mapping[str, int], proof: bool) -> tuple[StepSpec | None, list[Evidence] | None]:
        """(what to measure at a pair or None, its measured loads or None)."""
        first = SHARED_PROOF_REPEAT if proof else 1
        for repeat in range(first, first + TRIES):
            spec = _together(self.problem, pair, repeat, proof)
            loads = self._loads().get(spec.key)
            if loads is None:
                return spec, None
            if all(e.usable for e in loads):
                return None, loads
        return None, None


# -- the one next step


def without_stray_crashes(evidence: Sequence[Evidence]) -> list[Evidence]:
    """``evidence``, in the order of measuring, without crashes that did not happen again.

    A server that died at a concurrency is started and asked once more: only what kills it twice is the
    concurrency's doing, and not a hand's or another process's.
    """
    survived: set[tuple[str, int, tuple[tuple[str, int], ...]]] = set()
    kept = []
    for e in reversed(evidence):
        load = (e.service_class, e.concurrency, tuple(sorted(e.beside.items())))
        if e.usable and not e.crashed:
            survived.add(load)
        if not (e.crashed and load in survived):
            kept.append(e)
    return kept[::-1]


def next_step(
    problem: Problem, evidence: Sequence[Evidence], at_least: Phase | None = None
) -> StepSpec | None:
    """The one next step, or None when everything is known, given up, or out of budget.

    ``at_least``: return no step of an earlier phase (a task that only proves asks from
    ``Phase.PROVE`` on); phases before the latest that evidence was gathered in are over anyway.
    """
    begun = max((ORDER[Phase(e.phase)] for e in evidence), default=0)
    floor = max(begun, ORDER[at_least] if at_least else 0)
    if problem.mode == "exact":
        if floor > ORDER[Phase.SCOUT]:
            return None
        fitting = (s for s in _exact(problem, evidence) if _fits(problem, s, evidence))
        return next((with_cap(problem, s, evidence) for s in fitting), None)
    evidence = without_stray_crashes(evidence)
    searches = [Search(problem, name, evidence) for name in problem.classes]
    if floor <= ORDER[Phase.SCOUT]:
        reserve = sum(_proof_reserve_s(problem, search) for search in searches)
        for steps in (*(one.ladder() for one in searches), *(one.refine() for one in searches)):
            wanted = (s for s in steps if at_least is None or ORDER[s.phase] >= ORDER[at_least])
            spec = next(wanted, None)
            if spec is not None and _fits(problem, spec, evidence, reserve):
                return with_cap(problem, spec, evidence)
    later = {
        Phase.PROVE: [search.prove() for search in searches],
        Phase.SHARED: [SharedSearch(problem, evidence).steps()] if problem.shared else [],
        Phase.ANCHOR: [search.anchor() for search in searches],
    }
    for phase, sources in later.items():
        if floor <= ORDER[phase]:
            for steps in sources:
                first = next(steps, None)
                if first is not None and _fits(problem, first, evidence):
                    return with_cap(problem, first, evidence)
    return None


def skip_reason(problem: Problem, spec: StepSpec, evidence: Sequence[Evidence]) -> str | None:
    """Why an asked-for ladder step is no longer wanted; None if it is to be measured."""
    if above := over_ceiling(problem.ceiling, spec):
        return above
    evidence = without_stray_crashes(evidence)
    load = spec.loads[0]
    if spec.phase is Phase.GRID:
        crash = _grid_crash(evidence, load.service_class)
        if crash is not None and load.concurrency >= crash:
            return f"the server crashed at {crash}: not measured from there on"
    search = Search(problem, load.service_class, evidence)
    if spec.phase is Phase.SCOUT:
        reason = search.unwanted(load.concurrency)
        if reason is not None:
            return reason
    reserve = 0.0 if spec.phase is Phase.GRID else _proof_reserve_s(problem, search)
    if not _fits(problem, spec, evidence, reserve):
        return (
            f"budget: about {step_s(problem, spec, evidence):.0f} s (and {reserve:.0f} s for proof) do not "
            f"fit into the {problem.budget_s:.0f} s left"
        )
    return None


def _exact(problem: Problem, evidence: Sequence[Evidence]) -> Iterator[StepSpec]:
    """Asked-for steps that were not measured yet; a retry takes a repeat number above all asked for."""
    for spec in ladder_steps(problem):
        load = spec.loads[0]
        crash = _grid_crash(without_stray_crashes(evidence), load.service_class)
        if crash is not None and load.concurrency > crash:
            continue
        if _crashed_again(evidence, load.service_class, load.concurrency):
            continue
        for repeat in (spec.repeat, spec.repeat + problem.repeats):
            again = _grid(problem, load.service_class, load.concurrency, repeat)
            found = [e for e in evidence if e.key == again.key]
            if not found:
                yield again
            if not found or any(e.usable and not e.crashed for e in found):
                break


def _grid_crash(evidence: Sequence[Evidence], name: str) -> int | None:
    """The lowest concurrency that crashed the server."""
    crashes = [
        e.concurrency for e in evidence if e.service_class == name and e.phase == Phase.GRID and e.crashed
    ]
    return min(crashes, default=None)


def _crashed_again(evidence: Sequence[Evidence], name: str, n: int) -> bool:
    """Whether a concurrency crashed the server as often as it is asked."""
    crashes = [
        e
        for e in evidence
        if (e.service_class, e.phase, e.concurrency) == (name, Phase.GRID, n) and e.crashed
    ]
    return len(crashes) >= TRIES


def instances(problem: Problem) -> dict[str, int]:
    """The most steps that each later stage can need: how many mapped task instances to lay out.

    ``refine``: to close the widest gap of each ladder, twice where a latency knee is sought too, and
    one retry; ``prove``: each class's whole descent and one retry; ``shared``: 5 bisections of s, one
    descent, one retry; ``anchor``: one a class and one retry. In exact mode only two retries (of phase
    ``grid``) remain for ``refine``.
    """
    names = list(problem.classes)
    if problem.mode == "exact":
        return {"refine": 2, "prove": 0, "shared": 0, "anchor": 0}
    refine = prove = 0
    for name in names:
        search = Search(problem, name, [])
        ladder = search.service.ladder
        brackets = 2 if search.service.rule == "interactive" and search.service.cap_at_latency_knee else 1
        refine += brackets * max(_bisections(search, a, b) for a, b in pairwise([0, *ladder]))
        prove += len(descent(ladder[-1]))
    shared = problem.shared and len(names) > 1
    tries = 1 + sum(times for times, _ in DESCENT)
    return {
        "refine": refine + 1,
        "prove": prove + 1,
        "shared": SHARED_PARTS.bit_length() - 1 + tries + 1 if shared else 0,
        "anchor": len(names) + 1,
    }


def _bisections(search: Search, low: int, high: int) -> int:
    """Most bisections that close a bracket."""
    if search.closed(low, high):
        return 0
    middle = _middle(low, high)
    return 1 + max(_bisections(search, low, middle), _bisections(search, middle, high))


# -- time


def with_cap(problem: Problem, spec: StepSpec, evidence: Sequence[Evidence]) -> StepSpec:
    """``spec`` as it is to be measured: a proof that the server is too slow for gets a longer cap.

    Where n / X, the least requests of the proof over the rate interpolated from what was measured, is
    longer than ``prove_cap_s``, the cap is ``SLOW_SLACK`` times that (X is a guess, and an undecided proof
    goes on), at most ``prove_cap_slow_s``; where there is a budget, no longer than what is left of it.
    Elsewhere, and before anything of the class was measured, ``prove_cap_s`` holds.
    """
    bounds = problem.bounds
    if not all(proof_sized(spec.phase, load.requests, load.concurrency) for load in spec.loads):
        return spec
    times = [_times_s(problem, spec, load, evidence) for load in spec.loads]
    expected_s, around_s = (max(column) for column in zip(*times, strict=True))
    blind = any(not _known_rates(load.service_class, evidence) for load in spec.loads)
    if blind or expected_s <= bounds.prove_cap_s:
        return spec
    cap_s = min(SLOW_SLACK * expected_s, bounds.prove_cap_slow_s)
    if problem.budget_s is not None:
        cap_s = min(cap_s, problem.budget_s - around_s)
    return replace(spec, cap_s=max(cap_s, bounds.prove_cap_s))


def step_s(problem: Problem, spec: StepSpec, evidence: Sequence[Evidence]) -> float:
    """Expected seconds of a step: warm-up, n / X within the window's bounds, and the last answers.

    X, completed requests per second, is interpolated from what was measured of the class (of
    requests that fail fast, more are done than this counts, so it is a cautious guess).
    """
    cap_s = with_cap(problem, spec, evidence).cap_s
    return max(
        max(spec.min_window_s, min(cap_s, expected_s)) + around_s
        for expected_s, around_s in (_times_s(problem, spec, load, evidence) for load in spec.loads)
    )


def _times_s(
    problem: Problem, spec: StepSpec, load: Load, evidence: Sequence[Evidence]
) -> tuple[float, float]:
    """(n / X, warm-up and the last answers), expected of one load of a step, in seconds."""
    rate_per_s = _rate_per_s(load.service_class, load.concurrency, evidence) / len(spec.loads)
    latency_s = load.concurrency / rate_per_s
    deadline_s = problem.classes[load.service_class].deadline_s
    around_s = min(problem.bounds.warmup_cap_s, 2 * latency_s) + min(deadline_s, 2 * latency_s)
    return load.requests / rate_per_s, around_s


def _known_rates(name: str, evidence: Sequence[Evidence]) -> list[tuple[int, float]]:
    """(concurrency, completed requests per second) of what was measured of a class, ascending."""
    return sorted(
        (e.concurrency, e.request_per_s)
        for e in evidence
        if e.service_class == name and e.request_per_s and not e.beside and e.phase != Phase.PRIME
    )


def _rate_per_s(name: str, n: int, evidence: Sequence[Evidence]) -> float:
    """Completed requests per second at a concurrency, from the nearest steps; never 0."""
    known = _known_rates(name, evidence)
    if not known:
        return n / BLIND_LATENCY_S
    below = [(c, x) for c, x in known if c <= n]
    above = [(c, x) for c, x in known if c >= n]
    if not below:
        return above[0][1] * n / above[0][0]
    if not above:
        return below[-1][1]
    (c_a, x_a), (c_b, x_b) = below[-1], above[0]
    return x_a if c_a == c_b else x_a + (x_b - x_a) * (n - c_a) / (c_b - c_a)


def _fits(problem: Problem, spec: StepSpec, evidence: Sequence[Evidence], reserve_s: float = 0.0) -> bool:
    return problem.budget_s is None or step_s(problem, spec, evidence) + reserve_s <= problem.budget_s


def _proof_reserve_s(problem: Problem, search: Search) -> float:
    """Seconds to keep for proving what is known so far."""
    candidate = search.candidate()
    if problem.budget_s is None or candidate is None:
        return 0.0
    return step_s(problem, _prove(problem, search.name, candidate), search.evidence)


def estimate_s(problem: Problem, evidence: Sequence[Evidence]) -> float:
    """Expected seconds until the sweep is done, for a progress display.

    What is planned counts as planned; of what cannot be known yet, each class is expected to need
    5 refining scouts and 2 proofs at the candidate (before there is one, at the middle of its ladder),
    and a shared search 5 scouts and 2 proofs at half the limits.
    """
    if problem.mode == "exact":
        return sum(step_s(problem, spec, evidence) for spec in _exact(problem, evidence))
    total = 0.0
    expected: dict[str, int] = {}
    for name, service in problem.classes.items():
        search = Search(problem, name, evidence)
        guess = search.proven() or search.candidate() or service.ladder[len(service.ladder) // 2]
        expected[name] = guess
        scout_s = step_s(problem, _scout(problem, name, guess), evidence)
        steps = list(search.ladder())
        total += sum(step_s(problem, spec, evidence) for spec in steps)
        off_ladder = [n for n in search.measured(Phase.SCOUT) if n not in service.ladder]
        if steps or any(True for _ in search.refine()):
            total += max(1, 5 - len(off_ladder)) * scout_s
        if search.proven() is None and (steps or any(True for _ in search.prove())):
            tried = len(search.measured(Phase.PROVE))
            total += max(1, 2 - tried) * step_s(problem, _prove(problem, name, guess), evidence)
        if not search.measured(Phase.ANCHOR):
            total += step_s(problem, _scout(problem, name, service.ladder[0]), evidence)
    together = SharedSearch(problem, evidence)
    if problem.shared and len(expected) > 1 and not together.proven():
        pair = {name: max(1, n // 2) for name, n in expected.items()}
        scouted = len({e.key for e in evidence if e.phase == Phase.SHARED and not e.proof})
        total += max(0, 5 - scouted) * step_s(problem, _together(problem, pair, 1, False), evidence)
        total += 2 * step_s(problem, _together(problem, pair, SHARED_PROOF_REPEAT, True), evidence)
    return total
