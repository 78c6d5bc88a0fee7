"""Slow, literal form of Krippendorff's alpha: pair by pair, from its definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Distance = Callable[[float, float, Sequence[float]], float]


def alpha(units: Sequence[Sequence[float]], distance: Distance) -> float | None:
    """Return 1 − observed / expected disagreement.

    Observed: over all values of units with at least two values, the mean distance δ² to the m_u − 1 other values of the
    unit. Expected: the mean δ² over all pairs of these values, from any units.
    """
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    count = len(values)
    observed = 0.0
    for unit in units:
        for index, value in enumerate(unit):
            for other in (*unit[:index], *unit[index + 1 :]):
                observed += distance(value, other, values) ** 2 / (len(unit) - 1) / count
    expected = 0.0
    for index, value in enumerate(values):
        for other in (*values[:index], *values[index + 1 :]):
            expected += distance(value, other, values) ** 2 / count / (count - 1)
    return 1 - observed / expected if expected else None


def nominal(value: float, other: float, values: Sequence[float]) -> float:
    """Return 1 for different values."""
    return float(value != other)


def ordinal(value: float, other: float, values: Sequence[float]) -> float:
    """Return the number of values from one to the other, with half of those equal to either."""
    low, high = sorted((value, other))
    between = sum(low <= item <= high for item in values)
    return between - (list(values).count(low) + list(values).count(high)) / 2


def interval(value: float, other: float, values: Sequence[float]) -> float:
    """Return the difference."""
    return value - other
