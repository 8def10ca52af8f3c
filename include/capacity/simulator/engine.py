"""Continuous batching in virtual time: the scheduler behind the simulated server and its truth.

No clock and no I/O: the caller says when requests arrive and when they are given up, and asks for
one iteration after another. The rules are vLLM's (V1), in this order at every iteration:

1. Running sequences come first, in the order they were admitted. One that decodes costs one token of
   the budget (``max_num_batched_tokens``), one whose prompt is not yet computed takes what is left.
2. A sequence that finds no KV cache preempts the youngest running one, which loses what was computed
   and goes to the head of the queue, to be computed again, its own tokens included.
3. If nothing was preempted, waiting sequences are admitted first come, first served, while there are
   slots, budget and cache. A prompt's head that an earlier prompt shared is not computed again.
4. The iteration takes ``base + work`` times noise (:class:`profile.IterationTime`). At its end every
   sequence whose tokens are all computed gains one token; those that have enough leave.

A request that arrives, or is given up, during an iteration is seen at the next one. A bound on
unfinished requests (``max_num_queued_reqs``) counts at once. Between arrivals and endings a batch that
only decodes does the same over and over: :meth:`Engine.skip` takes such iterations in one stride, with
bit-equal times.

Simplified: KV cache is counted in tokens, not in blocks of 16, and shared heads are counted once for
each sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from include.capacity.simulator.profile import EngineProfile

BLOCK_TOKENS = 16
"""Tokens a block of the prefix cache covers."""

NOISE_AT_ONCE = 4096
STRIDE_FROM = 4
"""Iterations from which a stride is cheaper than taking them one by one."""


class EngineCrashed(Exception):
    """The profile's ``crash_at_running`` was reached."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. The caller fills the first four, the engine the rest (seconds of
    virtual time; None: has not happened)."""

    prompt_tokens: int
    output_tokens: int
    """Tokens it will generate."""
    arrived_s: float
    blocks: Seq[int] = ()
    """Identities of the prompt's leading blocks of 16 tokens, each covering all before it."""
    owner: object = None
    """Whatever the caller wants back."""

    computed: int = 0
    """Tokens whose KV is in the cache."""
    generated: int = 0
    cached: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    running: bool = False
    finished: bool = False
    aborted: bool = False


@dataclass(slots=True)
class Stats:
    """Counters since the start."""

    iterations: int = 0
    iterations_tokens: int = 0
    """Tokens computed, prefill and decode."""
    prompt_tokens: int = 0
    """Of prompts whose computation ended."""
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    rejected: int = 0
    aborted: int = 0


@dataclass
class Engine:
    """See the module. ``now_s`` is the end of the last iteration."""

    profile: EngineProfile
    now_s: float = 0.0
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.unfinished = 0
        """Waiting and running, what ``max_num_queued_reqs`` bounds."""
        self.kv_tokens = 0
        self.end_s: float | None = None
        """When the iteration under way ends; None between iterations."""
        self.iteration_tokens = 0
        """Tokens computed in the iteration last begun."""
        self._any_aborted = False
        self._cache: dict[int, None] = {}
        """Cached blocks, least recently used first."""
        noise_seed, stall_seed = np.random.SeedSequence(self.profile.seed).spawn(2)
        self._noise_rng = np.random.default_rng(noise_seed)
        self._stall_rng = np.random.default_rng(stall_seed)
        self._noise = np.empty(0)
        self._noise_at = 0
        self._next_stall_s = self._draw_stall(0.0)

    # What the caller tells it

    def submit(self, sequence: Sequence) -> bool:
        """Queue a request; False: refused, the queue is full. Arrivals must come in order of time."""
        bound = self.profile.max_num_queued_reqs
        if bound is not None and self.unfinished >= bound:
            self.stats.rejected += 1
            return False
        self.unfinished += 1
        self.waiting.append(sequence)
        return True

    def abort(self, sequence: Sequence) -> None:
        """The client has gone: the request's place is free at once, its slot at the next iteration."""
        if sequence.finished or sequence.aborted:
            return
        sequence.aborted = True
        self.unfinished -= 1
        self.stats.aborted += 1
        self._any_aborted = True

    # One iteration

    def begin(self, now_s: float) -> float | None:
        """Schedule the iteration that starts at ``now_s``; its end, or None if there is nothing to do.

        Raises EngineCrashed.
        """
        profile = self.profile
        if self._any_aborted:
            self._drop_aborted()
        budget = profile.max_num_batched_tokens
        decoding = context = prefill = 0
        free = profile.kv_cache_tokens - self.kv_tokens
        running = self.running
        at = 0
        preempted = False
        while at < len(running) and budget:
            sequence = running[at]
            tokens = min(sequence.prompt_tokens + sequence.generated - sequence.computed, budget)
            while free < tokens and len(running) > at:
                preempted = True
                free += self._preempt(running.pop())
            if len(running) == at:  # it was the youngest itself
                break
            if sequence.generated and tokens == 1:
                decoding += 1
                context += sequence.computed
            else:
                prefill += tokens
            sequence.computed += tokens
            free -= tokens
            budget -= tokens
            at += 1
        if not preempted:
            waiting = self.waiting
            while waiting and budget and len(running) < profile.max_num_seqs:
                sequence = waiting[0]
                if sequence.arrived_s > now_s:
                    break
                needed = sequence.prompt_tokens + sequence.generated
                cached = self._cached_tokens(sequence)
                tokens = min(needed - cached, budget)
                if free < cached + tokens:
                    break
                waiting.popleft()
                if sequence.admitted_s is None:
                    sequence.admitted_s = now_s
                    sequence.cached = cached
                    self.stats.prefix_queries += sequence.prompt_tokens
                    self.stats.prefix_hits += cached
                sequence.running = True
                sequence.computed = cached + tokens
                running.append(sequence)
                free -= cached + tokens
                budget -= tokens
                prefill += tokens
        self.kv_tokens = profile.kv_cache_tokens - free
        if not running:
            return None
        if profile.crash_at_running is not None and len(running) >= profile.crash_at_running:
            raise EngineCrashed(f"{len(running)} sequences running")
        time = profile.iteration
        work_s = (
            time.base_s
            + time.per_sequence_s * decoding
            + time.per_prefill_token_s * prefill
            + time.per_context_token_s * context
        )
        duration_s = work_s * float(self._noises(1)[0])
        self._noise_at += 1
        if now_s >= self._next_stall_s and profile.stalls is not None:
            duration_s += profile.stalls.duration_s
            self._next_stall_s = self._draw_stall(now_s + duration_s)
        self.iteration_tokens = decoding + prefill
        self.stats.iterations += 1
        self.stats.iterations_tokens += decoding + prefill
        self.end_s = now_s + duration_s
        return self.end_s

    def finish(self) -> list[Sequence]:
        """End the iteration under way: the sequences that gained a token, ``finished`` set on the last."""
        end_s = self.end_s
        if end_s is None:
            raise RuntimeError("no iteration is under way")
        self.end_s, self.now_s = None, end_s
        emitted = []
        ended = False
        for sequence in self.running:
            total = sequence.prompt_tokens + sequence.generated
            if sequence.computed < total or sequence.aborted:
                continue
            if not sequence.generated:
                sequence.first_token_s = end_s
                self.stats.prompt_tokens += sequence.prompt_tokens
                self._remember(sequence)
            sequence.generated += 1
            sequence.last_token_s = end_s
            emitted.append(sequence)
            if sequence.generated >= sequence.output_tokens:
                sequence.finished = True
                sequence.running = False
                self.kv_tokens -= sequence.computed
                self.unfinished -= 1
                ended = True
        if ended:
            self.running = [sequence for sequence in self.running if not sequence.finished]
        self.stats.generation_tokens += len(emitted)
        return emitted

    def skip(self, until_s: float) -> int:
        """Take whole iterations in one stride while the batch only decodes, and count them.

        They all end before ``until_s``, nobody enters, leaves or finishes in them, and the same
        iterations taken one by one would end at the same times to the last bit.
        """
        running, profile = self.running, self.profile
        size = len(running)
        if not size or self._any_aborted or self.end_s is not None:
            return 0
        if self.waiting and size < profile.max_num_seqs:
            return 0
        most = (profile.kv_cache_tokens - self.kv_tokens) // size
        context = 0
        for sequence in running:
            if sequence.prompt_tokens + sequence.generated - sequence.computed != 1 or not sequence.generated:
                return 0
            most = min(most, sequence.output_tokens - sequence.generated - 1)
            context += sequence.computed
        crash_at = profile.crash_at_running
        if most < STRIDE_FROM or (crash_at is not None and size >= crash_at):
            return 0
        most = min(most, NOISE_AT_ONCE)
        time = profile.iteration
        work_s = (
            time.base_s
            + time.per_sequence_s * size
            + time.per_prefill_token_s * 0
            + time.per_context_token_s * (context + size * np.arange(most))
        )
        times = work_s * self._noises(most)
        times[0] += self.now_s
        ends = np.cumsum(times)
        count = int(np.searchsorted(ends, until_s, side="left"))
        if profile.stalls is not None:
            # Only iterations that begin before the stall is due; the first begins now.
            due = int(np.searchsorted(ends, self._next_stall_s, side="left")) + 1
            count = 0 if self.now_s >= self._next_stall_s else min(count, due)
        if not count:
            return 0
        self._noise_at += count
        self.now_s = float(ends[count - 1])
        for sequence in running:
            sequence.computed += count
            sequence.generated += count
            sequence.last_token_s = self.now_s
        self.kv_tokens += count * size
        self.iteration_tokens = size
        self.stats.iterations += count
        self.stats.iterations_tokens += count * size
        self.stats.generation_tokens += count * size
        return count

    # Inside

    def _drop_aborted(self) -> None:
        self._any_aborted = False
        for sequence in self.running:
            if sequence.aborted:
                self.kv_tokens -= sequence.computed
                sequence.running = False
        self.running = [sequence for sequence in self.running if not sequence.aborted]
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.aborted)

    def _preempt(self, sequence: Sequence) -> int:
        """Send a running sequence back to the head of the queue; the KV tokens that frees."""
        freed = sequence.computed
        sequence.computed = 0
        sequence.running = False
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1
        return freed

    def _cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens already in the prefix cache, in whole blocks; at least one token is computed."""
        if not self.profile.prefix_caching:
            return 0
        found = 0
        for block in sequence.blocks:
            if block not in self._cache:
                break
            found += 1
        return min(found, (sequence.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def _remember(self, sequence: Sequence) -> None:
        """Put a computed prompt's blocks in the prefix cache, as the most recently used."""
        if not sequence.blocks or not self.profile.prefix_caching:
            return
        cache = self._cache
        for block in sequence.blocks:
            cache.pop(block, None)
            cache[block] = None
        room = max(0, self.profile.kv_cache_tokens - self.kv_tokens) // BLOCK_TOKENS
        for block in list(cache)[: max(0, len(cache) - room)]:
            del cache[block]

    def _noises(self, count: int) -> np.ndarray:
        """The next ``count`` noise factors, without using them up."""
        have = len(self._noise) - self._noise_at
        if have < count:
            sigma = self.profile.noise_sigma
            fresh = np.exp(sigma * self._noise_rng.standard_normal(NOISE_AT_ONCE) - sigma * sigma / 2)
            self._noise = np.concatenate([self._noise[self._noise_at :], fresh])
            self._noise_at = 0
        return self._noise[self._noise_at : self._noise_at + count]

    def _draw_stall(self, after_s: float) -> float:
        stalls = self.profile.stalls
        if stalls is None:
            return float("inf")
        return after_s + float(self._stall_rng.exponential(stalls.mean_every_s))
