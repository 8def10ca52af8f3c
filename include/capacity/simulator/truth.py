"""The true limits of a simulated server, by brute force in virtual time.

The same engine as behind the HTTP server is driven by the closed loop that measures: exactly N requests
in flight of each class, lengths drawn as the fleet file says, a request given up at its deadline (as
the client's disconnect does), a pause after a refusal (``Retry-After``, else 1 s +- 50 %). No network, no
clock, no statistics: at least 40,000 requests per concurrency, counted after warm-up in order of start.

The **true limit** of a class is the highest concurrency that holds floor and shares with every lower
tested one holding too. It is found by doubling, bisection, and then every concurrency around the edge.

``python -m include.capacity.simulator.truth PROFILE`` does so for the fleet's models on that profile, and
keeps the result beside it in ``NAME.truth.json``, tied to the profile by the hash of its engine and to
each class by what the limit depends on.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from include.capacity.config import Fleet, Lengths, ServiceClass, SimulatorServer, load_fleet
from include.capacity.errors import CapacityError, DataError
from include.capacity.simulator.engine import Engine, Sequence
from include.capacity.simulator.profile import PROFILES, Profile, load_profile

REQUESTS = 40_000
SCHEMA = 1
WARMUP_TURNS = 4
"""Requests of each slot, on average, before counting starts."""
WARMUP_AT_LEAST = 500
EDGE = 0.06
"""How far around the limit every concurrency is tested, as a share of it; at least 3."""


@dataclass(frozen=True)
class Point:
    """What one class saw at one concurrency."""

    concurrency: int
    attempted: int
    completed: float
    """Share completed within the deadline (y)."""
    met: float
    """Share completed with every objective met (z)."""
    rejected: float
    """Share refused with 503."""
    ttft_p95_s: float | None
    """Over attempted requests, None where more than 5 % had none."""
    request_per_s: float
    """Completed requests a second."""
    output_tok_per_s: float
    """Tokens of completed requests a second."""
    raw_output_tok_per_s: float
    """Tokens of all requests a second."""
    total_tok_per_s: float
    """Prompt and output tokens of completed requests a second."""

    def holds(self, service_class: ServiceClass) -> bool:
        """Floor and shares are all met."""
        return self.completed >= service_class.completion_floor and self.met >= share(service_class)


def share(service_class: ServiceClass) -> float:
    """The strictest share among the objectives; 0 without any."""
    objectives = (service_class.ttft, service_class.tpot, service_class.e2e)
    return max((objective.share for objective in objectives if objective), default=0.0)


def closed_loop(
    profile: Profile,
    loads: Mapping[str, tuple[ServiceClass, int]],
    requests: int = REQUESTS,
    seed: int = 0,
    pause_s: float = 1.0,
    strides: bool = True,
) -> dict[str, Point]:
    """Drive the engine with every load at once, each counting ``requests``; one point per load.

    ``loads`` maps a name to (service class, concurrency). ``strides=False`` takes every iteration
    alone: slower, the same result to the last bit.
    """
    engine = Engine(profile.engine)
    rng = np.random.default_rng(seed)
    loops = [
        _Loop(service_class, concurrency, requests, rng) for service_class, concurrency in loads.values()
    ]
    tie = itertools.count()
    timers: list[tuple[float, int, _Loop, Sequence | None]] = []
    """(when, tie, loop, the sequence to give up; None: start the next)."""

    def start(loop: _Loop, now_s: float) -> None:
        prompt, output = loop.draw()
        sequence = Sequence(prompt, output, now_s)
        index = loop.started(now_s)
        sequence.owner = (loop, index)
        if engine.submit(sequence):
            heapq.heappush(timers, (now_s + loop.deadline_s, next(tie), loop, sequence))
        else:
            loop.ended(index, now_s, rejected=True)
            pause = profile.retry_after_s or pause_s * loop.jitter()
            heapq.heappush(timers, (now_s + pause, next(tie), loop, None))

    for loop in loops:
        for _ in range(loop.concurrency):
            start(loop, 0.0)

    def fire(until_s: float) -> None:
        """Let everything happen that is due before ``until_s``."""
        while timers and timers[0][0] < until_s:
            when_s, _, loop, sequence = heapq.heappop(timers)
            if sequence is None:
                start(loop, when_s)
            elif not sequence.finished:
                index = _index(sequence)
                engine.abort(sequence)
                loop.ended(index, when_s, sequence=sequence)
                start(loop, when_s)

    while not all(loop.done for loop in loops):
        while timers and timers[0][3] is not None and timers[0][3].finished:
            heapq.heappop(timers)
        if strides and timers:
            engine.skip(timers[0][0])
        end_s = engine.begin(engine.now_s)
        if end_s is None:  # idle: on to the next retry
            engine.now_s = timers[0][0]
            fire(math.nextafter(engine.now_s, math.inf))
            continue
        fire(end_s)
        for sequence in engine.finish():
            if sequence.finished:
                loop = _loop(sequence)
                loop.ended(_index(sequence), end_s, sequence=sequence, completed=True)
                start(loop, end_s)
    return {name: loop.point() for name, loop in zip(loads, loops, strict=True)}


def _loop(sequence: Sequence) -> _Loop:
    return sequence.owner[0]  # type: ignore[index]  # set by closed_loop


def _index(sequence: Sequence) -> int:
    return sequence.owner[1]  # type: ignore[index]  # set by closed_loop


class _Loop:
    """One class's closed loop: draws its requests and keeps what became of them."""

    def __init__(
        self, service_class: ServiceClass, concurrency: int, requests: int, rng: np.random.Generator
    ) -> None:
        self.service_class = service_class
        self.concurrency = concurrency
        self.deadline_s = service_class.deadline_s
        self._warmup = max(WARMUP_AT_LEAST, WARMUP_TURNS * concurrency)
        self._requests = requests
        self._rng = np.random.default_rng(rng.integers(2**63))
        self._drawn: list[tuple[int, int]] = []
        self._next = 0
        self._open = requests
        """Counted requests that have not ended."""
        self._ttft = np.full(requests, np.inf)
        self._completed = np.zeros(requests, dtype=bool)
        self._met = np.zeros(requests, dtype=bool)
        self._rejected = 0
        self._first_s = self._last_s = 0.0
        self._window_tokens = self._window_raw = self._window_total = self._window_completed = 0

    @property
    def done(self) -> bool:
        """Every counted request has ended."""
        return self._open == 0

    def draw(self) -> tuple[int, int]:
        """Prompt and output tokens of the next request."""
        if not self._drawn:
            workload, size = self.service_class.workload, 4096
            prompts = draw_lengths(workload.prompt_tokens, size, self._rng)
            outputs = draw_lengths(workload.output_tokens, size, self._rng)
            self._drawn = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
        return self._drawn.pop()

    def jitter(self) -> float:
        """+- 50 %."""
        return float(self._rng.uniform(0.5, 1.5))

    def started(self, now_s: float) -> int:
        """Number of the request that starts now, from 0 with the first counted one."""
        index = self._next - self._warmup
        self._next += 1
        if index == 0:
            self._first_s = now_s
        if index == self._requests:
            self._last_s = now_s
        return index

    def ended(
        self,
        index: int,
        now_s: float,
        *,
        sequence: Sequence | None = None,
        completed: bool = False,
        rejected: bool = False,
    ) -> None:
        """What became of request ``index``."""
        in_window = self._next > self._warmup and self._next <= self._warmup + self._requests
        if in_window and sequence is not None:
            # Throughput counts endings inside the window, whenever they started.
            self._window_raw += sequence.generated
            if completed:
                self._window_completed += 1
                self._window_tokens += sequence.generated
                self._window_total += sequence.generated + sequence.prompt_tokens
        if not 0 <= index < self._requests:
            return
        self._open -= 1
        self._rejected += rejected
        if sequence is None or not completed:
            return
        self._completed[index] = True
        first_s, last_s = sequence.first_token_s, sequence.last_token_s
        assert first_s is not None  # completed
        assert last_s is not None
        ttft_s = first_s - sequence.arrived_s
        self._ttft[index] = ttft_s
        cls = self.service_class
        tpot_s = (last_s - first_s) / (sequence.generated - 1) if sequence.generated > 1 else 0.0
        self._met[index] = (
            (cls.ttft is None or ttft_s <= cls.ttft.at_most_s)
            and (cls.tpot is None or tpot_s <= cls.tpot.at_most_s)
            and (cls.e2e is None or now_s - sequence.arrived_s <= cls.e2e.at_most_s)
        )

    def point(self) -> Point:
        """The rates."""
        p95 = float(np.quantile(self._ttft, 0.95, method="inverted_cdf"))
        window_s = self._last_s - self._first_s
        if window_s <= 0:
            window_s = math.nan
        return Point(
            concurrency=self.concurrency,
            attempted=self._requests,
            completed=round(float(self._completed.mean()), 6),
            met=round(float(self._met.mean()), 6),
            rejected=round(self._rejected / self._requests, 6),
            ttft_p95_s=round(p95, 4) if math.isfinite(p95) else None,
            request_per_s=round(self._window_completed / window_s, 4),
            output_tok_per_s=round(self._window_tokens / window_s, 1),
            raw_output_tok_per_s=round(self._window_raw / window_s, 1),
            total_tok_per_s=round(self._window_total / window_s, 1),
        )


def draw_lengths(lengths: Lengths, size: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal token counts, rounded and clipped as the fleet file's ``Lengths`` say."""
    drawn = lengths.median * np.exp(lengths.sigma * rng.standard_normal(size))
    return np.clip(np.rint(drawn), lengths.at_least, lengths.at_most).astype(int)


def depends_on(service_class: ServiceClass) -> dict[str, Any]:
    """What, besides the engine, a class's true limit depends on."""
    data = service_class.model_dump(mode="json")
    return {
        "prompt_tokens": data["workload"]["prompt_tokens"],
        "output_tokens": data["workload"]["output_tokens"],
        **{key: data[key] for key in ("deadline_s", "completion_floor", "ttft", "tpot", "e2e")},
    }


def true_limit(
    profile: Profile,
    service_class: ServiceClass,
    requests: int = REQUESTS,
    seed: int = 0,
    pause_s: float = 1.0,
    most: int = 4096,
    progress: bool = False,
) -> tuple[int | None, list[Point]]:
    """(highest concurrency that holds with all lower tested ones; None if not even 1 does, points)."""
    points: dict[int, Point] = {}

    def holds(concurrency: int) -> bool:
        if concurrency not in points:
            begun = time.perf_counter()
            point = closed_loop(
                profile, {"": (service_class, concurrency)}, requests, seed + concurrency, pause_s
            )[""]
            points[concurrency] = point
            if progress:
                sys.stdout.write(
                    f"  N={concurrency:<5} y={point.completed:.4f} z={point.met:.4f} "
                    f"ttft_p95={point.ttft_p95_s} X={point.request_per_s:.2f}/s "
                    f"tok/s={point.output_tok_per_s:.0f} ({time.perf_counter() - begun:.1f} s)\n"
                )
                sys.stdout.flush()
        return points[concurrency].holds(service_class)

    step = 1
    while step <= most and holds(step):
        step *= 2
    low, high = step // 2, step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    reach = max(3, math.ceil(EDGE * low))
    for concurrency in range(max(1, low - reach), low + reach + 1):
        holds(concurrency)
    ordered = [points[n] for n in sorted(points)]
    limit = None
    for point in ordered:
        if not point.holds(service_class):
            break
        limit = point.concurrency
    return limit, ordered


def truth_file(profile: Profile, folder: Path = PROFILES) -> Path:
    """Where the truth of a profile is kept."""
    return folder / f"{profile.name}.truth.json"


def read_truth(profile: Profile, folder: Path = PROFILES) -> dict[str, Any]:
    """The kept truth of this very profile; DataError if there is none or it belongs to another."""
    file = truth_file(profile, folder)
    try:
        truth: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot read the profile's truth: {error}") from error
    if truth.get("engine_hash") != profile.engine_hash:
        raise DataError(
            f"{file}: engine_hash {truth.get('engine_hash')!r} is not the profile's {profile.engine_hash!r}; "
            f"expected a truth computed by python -m include.capacity.simulator.truth {profile.name}"
        )
    return truth


def compute_truth(
    profile: Profile,
    classes: Mapping[str, ServiceClass],
    requests: int = REQUESTS,
    seed: int = 1,
    pause_s: float = 1.0,
    progress: bool = False,
) -> dict[str, Any]:
    """The content of ``NAME.truth.json``."""
    found = {}
    for name, service_class in classes.items():
        if progress:
            sys.stdout.write(f"{profile.name} {name}\n")
        limit, points = true_limit(profile, service_class, requests, seed, pause_s, progress=progress)
        found[name] = {
            "class": depends_on(service_class),
            "limit": limit,
            "peak_output_tok_per_s": max(point.output_tok_per_s for point in points),
            "points": [asdict(point) for point in points],
        }
    return {
        "schema": SCHEMA,
        "profile": profile.name,
        "engine_hash": profile.engine_hash,
        "retry_after_s": profile.retry_after_s,
        "pause_after_refusal_s": pause_s,
        "seed": seed,
        "requests_per_concurrency": requests,
        "classes": found,
    }


def classes_on(profile: Profile, fleet: Fleet) -> dict[str, ServiceClass]:
    """The service classes of the fleet's model that is served by this profile; DataError if none is."""
    for model in fleet.models.values():
        if isinstance(model.server, SimulatorServer) and Path(model.server.profile).stem == profile.name:
            return dict(model.classes)
    raise DataError(f"profile {profile.name!r}: no model of fleet {fleet.fleet!r} is served by it")


def main(argv: list[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="include.capacity.simulator.truth", description=__doc__)
    parser.add_argument("profile", help="name in include/config/profiles, or a file")
    parser.add_argument("--fleet", default=None, help="fleet file with the classes (default: the usual one)")
    parser.add_argument("--class", dest="only", action="append", help="only this class, kept nowhere")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    try:
        profile = load_profile(arguments.profile)
        fleet = load_fleet(arguments.fleet)
        classes = classes_on(profile, fleet)
        if arguments.only:
            classes = {name: classes[name] for name in arguments.only}
        truth = compute_truth(
            profile, classes, arguments.requests, arguments.seed, fleet.steps.pause_after_refusal_s, True
        )
    except CapacityError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    limits = {name: found["limit"] for name, found in truth["classes"].items()}
    sys.stdout.write(f"{profile.name}: true limits {limits}\n")
    if arguments.only:
        return 0
    if arguments.requests < REQUESTS:
        sys.stdout.write(f"not kept: fewer than {REQUESTS} requests per concurrency\n")
        return 0
    file = truth_file(profile)
    file.write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"kept in {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
