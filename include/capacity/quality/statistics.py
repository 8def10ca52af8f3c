"""The statistics behind checks that compare numbers: batch means, an effect size and a small alpha.

A check that fires on p < 0.05 flags most clean sweeps, because a sweep is dozens of comparisons of
*correlated* requests. So every comparison here

1. works on **batch means** in order of start, max(5, N) requests a batch: one residence time, because
   requests that were in flight together share a queue (smaller batches, as used for bounds where n is
   scarce, stay correlated: at 3 N requests they called one clean step in thirty adrift);
2. asks for p <= alpha = 0.0001 **and** an effect that matters (20 % by default): a tiny difference in a
   huge sample is not a finding, a huge one in a tiny sample may be chance. A sweep makes about a
   hundred comparisons, and batch means of waiting times are skewed: at 0.001 and 0.0005 more than one
   clean sweep in a hundred had a finding;
3. compares latencies **adjusted for lengths** where token counts are known: within a step the latency
   is regressed on prompt and output tokens and every request is moved to the lengths of reference
   (analysis of covariance), so that a step that drew longer answers does not look slower.

Too few batches decide nothing: the answer is NaN, "not checked".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

ALPHA = 1e-4
LEAST_COMPARED = 3
"""Fewest batches on each side of a comparison of two steps."""
LEAST_IN_STEP = 5
"""Fewest batches to look for a trend or a start-up effect within a step."""
UNLIKELY = 3.1
"""Standard errors that chance exceeds once in a thousand times."""
USUAL_REQUESTS_PER_SLOT = 10
"""Assumed only where nothing says how many requests another tool's step had, to be fair to it."""
USUAL_SPREAD = 0.5
"""Standard deviation of the logarithm of latencies; assumed likewise, where no percentiles tell it."""
FEW = 50
"""Up to this many values at a concurrency below 5 a batch is one value: batches would leave too few."""

Array = NDArray[np.float64]


class Effect(NamedTuple):
    """A relative difference and how likely chance makes one as large. NaN: not checked."""

    size: float
    p: float

    def significant(self, alpha: float = ALPHA) -> float:
        """The size where p <= alpha, 0 where it may be chance, NaN where nothing was checked."""
        if math.isnan(self.p) or math.isnan(self.size):
            return math.nan
        return self.size if self.p <= alpha else 0.0


NOTHING = Effect(math.nan, math.nan)


def batch_means(values: Array, concurrency: float) -> Array:
    """Means of consecutive batches; ``values`` in order of start, NaN left out."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n <= FEW and not concurrency >= 5:
        return values
    size = int(max(5, concurrency))
    count = n // size
    return values[: count * size].reshape(count, size).mean(axis=1)


def difference(a: Array, b: Array) -> Effect:
    """mean(a) / mean(b) - 1 of two sets of batch means, with Welch's t-test."""
    if min(len(a), len(b)) < LEAST_COMPARED or not b.mean() > 0:
        return NOTHING
    size = float(a.mean() / b.mean() - 1)
    u, v = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    if u + v <= (1e-12 * b.mean()) ** 2:
        return Effect(size, 0.0 if abs(size) > 1e-9 else 1.0)
    freedom = (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))
    return Effect(size, float(2 * stats.t.sf(abs(a.mean() - b.mean()) / math.sqrt(u + v), freedom)))


def drift(means: Array) -> Effect:
    """Change from the first batch to the last on a straight line, relative to the mean."""
    if len(means) < LEAST_IN_STEP or not means.mean() > 0:
        return NOTHING
    at = np.arange(len(means), dtype=float)
    if np.ptp(means) <= 1e-12 * means.mean():
        return Effect(0.0, 1.0)
    line = stats.linregress(at, means)
    return Effect(float(line.slope * (len(means) - 1) / means.mean()), float(line.pvalue))


def start_up(means: Array) -> Effect:
    """How the first batches differ from the rest, at the split where they differ most clearly.

    Splits leave at least half of the batches for the rest, whose scatter is the yardstick (one batch
    alone has none); p is Bonferroni-corrected for the splits tried.
    """
    if len(means) < LEAST_IN_STEP:
        return NOTHING
    splits = len(means) // 2
    best = Effect(0.0, 1.0)
    for k in range(1, splits + 1):
        first, rest = means[:k].mean(), means[k:]
        if not rest.mean() > 0:
            continue
        size = float(first / rest.mean() - 1)
        spread = rest.std(ddof=1) * math.sqrt(1 / k + 1 / len(rest))
        if spread <= 1e-12 * rest.mean():
            p = 0.0 if abs(size) > 1e-9 else 1.0
        else:
            p = float(2 * stats.t.sf(abs(first - rest.mean()) / spread, len(rest) - 1)) * splits
        if p < best.p:
            best = Effect(size, p)
    return best


def adjusted(latency_s: Array, lengths: Array, reference: Array) -> Array:
    """Latencies moved to the lengths of ``reference``; ``lengths`` has a column per regressor.

    Least squares within the step; columns that do not vary, or rows with unknown lengths, leave the
    latencies as they are.
    """
    known = np.isfinite(latency_s) & np.isfinite(lengths).all(axis=1)
    vary = [at for at in range(lengths.shape[1]) if known.any() and np.ptp(lengths[known, at]) > 0]
    if known.sum() < 20 or known.sum() < np.isfinite(latency_s).sum() or not vary:
        return latency_s
    x = lengths[:, vary] - reference[vary]
    design = np.column_stack([np.ones(known.sum()), x[known]])
    slopes = np.linalg.lstsq(design, latency_s[known], rcond=None)[0][1:]
    return latency_s - x @ slopes


def two_modes(values: Array) -> float:
    """Ratio of the two modes' medians if there are two, else 1; NaN below 20 values.

    Logarithms are split in two where the variance between the parts is largest (Otsu 1979). There are
    two modes if each part holds at least a tenth, they lie at least 4 pooled standard deviations apart
    (Ashman's D, with 2 already "separated"; halves of a normal give 2.7, of a uniform 3.5), a factor of
    1.5 apart, and the middle third between them is nearly empty (at most 2 % of all values).
    """
    logs = np.sort(np.log(values[np.isfinite(values) & (values > 0)]))
    n = len(logs)
    if n < 20:
        return math.nan
    below = np.arange(1, n)
    sums = np.cumsum(logs)[:-1]
    between = (sums / below - (logs.sum() - sums) / (n - below)) ** 2 * below * (n - below)
    low, high = np.split(logs, [int(np.argmax(between)) + 1])
    if min(len(low), len(high)) < 0.1 * n:
        return 1.0
    apart = float(high.mean() - low.mean())
    spread = math.sqrt((low.var() + high.var()) / 2)
    middle = ((logs > low.mean() + apart / 3) & (logs < high.mean() - apart / 3)).mean()
    ratio = math.exp(float(np.median(high) - np.median(low)))
    return ratio if apart >= 4 * spread and ratio >= 1.5 and middle <= 0.02 else 1.0


def scatter(steps: pd.DataFrame, column: str) -> Array:
    """Standard error of the logarithm of each step's mean or median of log-normal latencies.

    For a step of which only summaries are known: their p50 and p99 tell the spread. 0 where not even a
    concurrency tells how many requests there were.
    """
    latency = column.partition("_")[0]
    p50, p99 = (steps[f"{latency}_{p}_s"].where(lambda s: s > 0) for p in ("p50", "p99"))
    n = steps["completed"].fillna(steps["attempted"])
    n = n.where(n > 0).fillna(USUAL_REQUESTS_PER_SLOT * steps["concurrency"])
    spread = (np.log(p99 / p50) / stats.norm.ppf(0.99)).clip(lower=0).fillna(USUAL_SPREAD)
    of_median = math.sqrt(math.pi / 2) if column.endswith("_p50_s") else 1.0
    return (of_median * spread / np.sqrt(n)).fillna(0.0).to_numpy(float)
