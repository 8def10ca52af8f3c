"""One-sided bounds on a rate whose requests are correlated.

Requests of a closed loop are not independent: they queue together and fail together. So the n
requests, in order of start, are cut into K = floor(n/m) batches of m = max(5, min(N, floor(n/10)))
requests. With b_k the batch means and p the overall mean,

    deff = max(1, m s_b^2 / (p (1 - p))),   n_e = n / deff,   x_e = p n_e

(batch means: Law and Kelton, *Simulation Modeling and Analysis*; design effect: Kish, *Survey
Sampling*) and the Clopper-Pearson bounds of x_e successes in n_e trials, which take real numbers
through the beta distribution:

    L = Beta^-1(alpha; x_e, n_e - x_e + 1),   U = Beta^-1(1 - alpha; x_e + 1, n_e - x_e)

deff is estimated, and one more failure may make the failures look *less* clustered and the bound
higher. That must not be: one more failure may never turn "not passed" into "passed", nor one more
pass "failed" into "not failed". So the lower bound used is the lowest that any subset of the
observed failures gives, and the upper bound the lowest that any such subset gives. Among subsets
of a given size the batch variance is largest when the fullest batches are kept whole, and smallest
when all batches are cut at one level (majorisation), so the exact minimum over all subsets is a
minimum over their size only. Both changes err on the safe side for a limit: fewer passes, more fails.
**Repeats** of a step are taken together batch by batch, so the same holds for them.

With few failures or none the data cannot show that failures come together: 600 requests without one look
like 600 independent ones, even if requests come in stretches of long ones and only the rare worst stretch
fails. What can be known without failures is whether what was *asked* came in stretches:
:func:`clustering` is the design effect of being among the longest fifth asked for. The lower bound takes a
least design effect from it (``evidence`` says how much of it); for independent lengths it is 1 and changes
nothing, and it can only make a claim stricter. On virtual servers with correlated lengths
(``tests/benchmarks``, servers apart from those reported on) the whole of it cut the share of proofs above the
true limit that pass from 18 to 4 % for interactive and from 14 to 12 % for batch classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, stdtrit

ALPHA = 0.05
"""One-sided error of every published statement."""
LONGEST = 0.2
"""Share of requests that :func:`clustering` looks at."""
ALPHA_EARLY = 0.005
"""One-sided error at which a step may be stopped as a proven failure: it is looked at often."""

Floats = NDArray[np.float64]


def clopper_pearson_lower(successes: ArrayLike, trials: ArrayLike, alpha: float = ALPHA) -> Floats:
    """Lower one-sided Clopper-Pearson bound; real-valued counts; 0 without successes (or trials)."""
    x, n = np.broadcast_arrays(np.asarray(successes, float), np.asarray(trials, float))
    some = (x > 0) & (n > 0)
    bound = np.zeros(x.shape)
    bound[some] = betaincinv(x[some], np.maximum(n[some] - x[some], 0) + 1, alpha)
    return bound


def clopper_pearson_upper(successes: ArrayLike, trials: ArrayLike, alpha: float = ALPHA) -> Floats:
    """Upper one-sided Clopper-Pearson bound; real-valued counts; 1 without failures (or trials)."""
    x, n = np.broadcast_arrays(np.asarray(successes, float), np.asarray(trials, float))
    return 1.0 - clopper_pearson_lower(n - x, n, alpha)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A success rate of one step, or of its repeats together, with its one-sided bounds.

    Unknown (no requests) is NaN.
    """

    n: int
    successes: int
    n_effective: float
    """n / deff of the data as they are."""
    lower: float
    """At alpha = 0.05; monotone: another success never lowers it."""
    upper: float
    """At alpha = 0.05; monotone: another failure never raises it."""
    upper_early: float
    """At alpha = 0.005."""

    @property
    def value(self) -> float:
        """Successes / n."""
        return self.successes / self.n if self.n else float("nan")


LEAST_REPEATS = 3
"""Fewest values an interval of their mean is given for."""


def mean_half_width(values: Floats) -> float:
    """Half width of Student's 95 % interval of a mean; NaN for fewer than ``LEAST_REPEATS`` values."""
    if values.size < LEAST_REPEATS:
        return float("nan")
    return float(stdtrit(values.size - 1, 0.975) * values.std(ddof=1) / np.sqrt(values.size))


def batch_size(n: int, concurrency: int) -> int:
    """Requests a batch: ``max(5, min(N, floor(n/10)))``."""
    return max(5, min(concurrency, n // 10))


def clustering(*asked: ArrayLike, concurrency: int) -> float:
    """Design effect of being among the longest fifth, at least 1.

    ``asked``: sizes of the attempted requests in order of start (prompt tokens, tokens to generate), added by
    rank; one with an unknown value says nothing. The longest fifth and not the lengths themselves: failures
    follow lengths in part only, and the bulk is alike in stretches that harm nobody.
    """
    known = [sizes for sizes in (np.asarray(one, float) for one in asked) if not np.isnan(sizes).any()]
    if not known or not known[0].size:
        return 1.0
    total = np.sum([_ranks(sizes) for sizes in known], axis=0)
    long = total > np.quantile(total, 1 - LONGEST)
    size = batch_size(long.size, concurrency)
    batches = long.size // size
    if batches < 2 or not long.any():
        return 1.0
    means = long[: batches * size].reshape(batches, size).mean(axis=1)
    return max(1.0, float(size * means.var(ddof=1) / long.var()))


def _ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The requests of one run of a step, and how many of them failed where."""

    n: int
    size: int
    """Requests a batch."""
    clusters: tuple[int, ...]
    """Failures of each whole batch that had any."""
    rest: int
    """Failures after the last whole batch: they count in the rate and not in the batch variance."""


def tally(success: ArrayLike, concurrency: int) -> Tally:
    """``success``: booleans of the attempted requests in order of start."""
    ok = np.asarray(success, dtype=bool)
    size = batch_size(ok.size, concurrency)
    whole = ok.size // size * size
    failures = (~ok[:whole]).reshape(-1, size).sum(axis=1)
    return Tally(
        n=int(ok.size),
        size=size,
        clusters=tuple(failures[failures > 0].tolist()),
        rest=int((~ok[whole:]).sum()),
    )


def rate(*runs: Tally, least_deff: float = 1.0) -> Rate:
    """Bounds of a success rate, over one run or over all repeats of a step.

    ``least_deff``: design effect known from elsewhere (:func:`clustering`), for the lower bound.
    """
    n = sum(run.n for run in runs)
    if n == 0:
        nan = float("nan")
        return Rate(n=0, successes=0, n_effective=0.0, lower=nan, upper=nan, upper_early=nan)
    size = min(run.size for run in runs)
    batches = sum(run.n // run.size for run in runs)
    rest = sum(run.rest for run in runs)
    failures = sorted((count for run in runs for count in run.clusters), reverse=True)
    total = sum(failures) + rest

    units = np.concatenate([np.arange(1.0, count + 1) for count in failures] or [np.empty(0)])
    clustered = np.maximum(least_deff, _deff(units, rest, n, size, batches, np.maximum))
    spread = _deff(np.sort(units), rest, n, size, batches, np.minimum)
    # `clustered[t]`, `spread[t]`: the largest and the smallest deff of any t of the failures
    count = np.arange(total + 1)
    lower = clopper_pearson_lower((n - count) / clustered, n / clustered).min()
    upper = clopper_pearson_upper((n - count) / spread, n / spread).min()
    early = clopper_pearson_upper((n - count) / spread, n / spread, ALPHA_EARLY).min()
    return Rate(
        n=n,
        successes=n - total,
        n_effective=n / float(clustered[-1]),  # all failures: only one subset, so the data's own
        lower=float(lower),
        upper=float(upper),
        upper_early=float(early),
    )


def _deff(units: Floats, rest: int, n: int, size: int, batches: int, pick: np.ufunc) -> Floats:
    """The extreme design effect over subsets of t failures, for t = 0 .. all.

    ``units`` are the failures in batches in the order in which they are kept, each with its rank
    within its batch (so that rank sums give squares: 1 + 3 + ... + (2 f - 1) = f^2). ``rest``
    failures lie after the last whole batch: they count in the rate and not in the batch variance.
    """
    kept = np.arange(units.size + 1)
    squares = np.concatenate([[0.0], np.cumsum(2 * units - 1)])
    scatter = squares - kept**2 / max(1, batches)  # sum over batches of (failures - their mean)^2
    extreme = np.full(units.size + rest + 1, -np.inf if pick is np.maximum else np.inf)
    for outside in range(rest + 1):
        window = extreme[outside : outside + scatter.size]
        pick(window, scatter, out=window)
    p = np.arange(extreme.size) / n
    deff = np.ones(extreme.size)
    varies = (p > 0) & (p < 1)
    if batches > 1:
        variance = extreme[varies] / ((batches - 1) * size**2)
        deff[varies] = np.maximum(1.0, size * variance / (p[varies] * (1 - p[varies])))
    return deff
