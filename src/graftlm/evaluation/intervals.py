"""95% intervals: percentile bootstraps, Wilson's score interval for shares, Student's interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from graftlm.errors import EvaluationError
from graftlm.evaluation.results import Interval, Metric, value_of

RESAMPLES = 1000
_LEVEL = 0.95
# Beyond this many units the bootstrap resamples runs of neighboring units: faster, and no narrower.
_MAX_UNITS = 2048


def percentile_interval(mean: float, samples: np.ndarray | Sequence[float]) -> Interval:
    """Return the 95% percentile bootstrap interval of a value.

    Args:
        mean: the measured value.
        samples: (resamples,) bootstrap samples of the value; NaN samples are left out, but not all may be NaN.
    """
    tail = (1 - _LEVEL) / 2
    low = np.nanquantile(samples, tail)
    high = np.nanquantile(samples, 1 - tail)
    return Interval(mean=mean, low=float(low), high=float(high))


def bootstrap(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the mean of values with its 95% percentile bootstrap interval, as rouge-score's aggregator computes it.

    Args:
        values: (items,), one finite value per item.

    Raises:
        EvaluationError: there are no values.
    """
    if len(values) == 0:
        raise EvaluationError("There are no values to resample, but at least one is needed: measure some items.")
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    draws = generator.integers(len(array), size=(RESAMPLES, len(array)))
    samples = array[draws].mean(axis=1)
    interval = percentile_interval(float(array.mean()), samples)
    return _including_mean(interval.mean, interval.low, interval.high)


def share_interval(count: int, total: int) -> Interval:
    """Return the share of `count` in `total` with Wilson's 95% score interval, which is valid at 0% and 100% too.

    Args:
        count: number of items that count, from 0 to `total`.
        total: number of all items.

    Raises:
        EvaluationError: `total` is 0, so that no share is defined.
    """
    if total == 0:
        raise EvaluationError("A share of 0 items is not defined, but at least one is needed: measure some items.")
    from scipy.stats import binomtest  # takes a second to import

    test = binomtest(count, total)
    ends = test.proportion_ci(method="wilson")
    return _including_mean(count / total, ends.low, ends.high)


def equal_differences_interval(value: float, items: int) -> Interval:
    """Return the 95% interval of a mean of n equal differences of shares, of which a bootstrap has no width.

    The ends are where n items all have this difference with a probability of 2.5%, if the others would differ by as
    much as they can.

    Args:
        value: the difference, from -1 to 1.
        items: number of items, at least 1.
    """
    kept = 0.025 ** (1 / items)
    low = (1 + value) * kept - 1
    high = 1 - (1 - value) * kept
    return Interval(mean=value, low=min(low, value), high=max(high, value))


def _including_mean(mean: float, low: float, high: float) -> Interval:
    """Return an interval whose ends rounding has not moved past its mean."""
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean))


def resample_ratios(
    ratios: Sequence[tuple[np.ndarray, np.ndarray]], resamples: int, seed: int, strata: Sequence[int] = ()
) -> list[np.ndarray]:
    """Draw bootstrap samples of ratios of sums over units, such as windows of text.

    Args:
        ratios: for each ratio the numerators and the denominators, (units,); all have the same units.
        resamples: number of samples.
        seed: seed of the draws.
        strata: the number of units of each group that is resampled by itself, such as the windows of a set of texts, in
            the order of the units; without groups all units are resampled together.

    Returns:
        For each ratio its samples, (resamples,). A sample draws the same units for all ratios. It is NaN where the
        drawn denominators sum to 0.
    """
    columns = []
    for numerators, denominators in ratios:
        columns += [numerators, denominators]
    table = np.stack(columns, axis=1).astype(np.float64)
    generator = np.random.default_rng(seed)
    sums = np.zeros((resamples, len(columns)))  # (resamples, 2 x ratios)
    for group in np.split(table, np.cumsum(strata[:-1], dtype=np.int64)):
        if len(group) > _MAX_UNITS:
            group = _in_runs(group)
        units = len(group)
        probabilities = np.full(units, 1 / units)
        draws = generator.multinomial(units, probabilities, size=resamples)
        sums += draws @ group
    samples = []
    # A sample may contain only windows without bytes; the quantiles leave it out.
    with np.errstate(invalid="ignore", divide="ignore"):
        for number in range(len(ratios)):
            numerator = sums[:, 2 * number]
            denominator = sums[:, 2 * number + 1]
            ratio = numerator / denominator
            is_finite = np.isfinite(ratio)
            samples.append(np.where(is_finite, ratio, np.nan))
    return samples


def _in_runs(table: np.ndarray) -> np.ndarray:
    """Sum runs of neighboring rows, so that about `_MAX_UNITS` rows remain."""
    starts = np.linspace(0, len(table), _MAX_UNITS, endpoint=False)
    return np.add.reduceat(table, starts.astype(np.int64), axis=0)


def combine_seeds(values: Sequence[Metric]) -> Interval:
    """Return the mean of one metric over n seeds, with Student's 95% interval of the mean.

        mean ± t(0.975, n - 1) · s / √n, where s is the sample's standard deviation

    The interval is over seeds, not over text.

    Args:
        values: the metric of each seed; of intervals only the means count. The interval of a single seed is returned
            unchanged.

    Raises:
        EvaluationError: there are no values.
    """
    if not values:
        raise EvaluationError("There are no values to combine over seeds: run at least one seed.")
    if len(values) == 1:
        value = values[0]
        if isinstance(value, Interval):
            return value
        return Interval(mean=value, low=value, high=value)
    numbers = [value_of(value) for value in values]
    count = len(numbers)
    mean = math.fsum(numbers) / count
    squares = [(number - mean) ** 2 for number in numbers]
    deviation = math.sqrt(math.fsum(squares) / (count - 1))
    half = _t95(count - 1) * deviation / math.sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half)


def _t95(degrees: int) -> float:
    """Return the two-sided 95% quantile of Student's t, to four digits as in printed tables."""
    from scipy.special import stdtrit

    return round(float(stdtrit(degrees, 0.975)), 4)
