"""Krippendorff's alpha once more, pair by pair, from its definition; only tests use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Distance = Callable[[float, float, Sequence[float]], float]


def alpha(units: Sequence[Sequence[float]], distance: Distance) -> float | None:
    """1 − observed over expected disagreement.

    Observed: the mean over pairable values of their distances δ² to the other values of their unit, (m_u − 1) of them.
    Expected: the mean of δ² over all pairs of pairable values, whatever their units.
    """
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    count = len(values)
    observed = 0.0
    for unit in units:
        for place, one in enumerate(unit):
            for other in (*unit[:place], *unit[place + 1 :]):
                observed += distance(one, other, values) ** 2 / (len(unit) - 1) / count
    expected = 0.0
    for place, one in enumerate(values):
        for other in (*values[:place], *values[place + 1 :]):
            expected += distance(one, other, values) ** 2 / (count * (count - 1))
    return 1 - observed / expected if expected else None


def nominal(one: float, other: float, values: Sequence[float]) -> float:
    """1 where they differ."""
    return float(one != other)


def ordinal(one: float, other: float, values: Sequence[float]) -> float:
    """How many values lie between them, half of those that are equal to either counted."""
    low, high = sorted((one, other))
    between = sum(low <= value <= high for value in values)
    return between - (list(values).count(low) + list(values).count(high)) / 2


def interval(one: float, other: float, values: Sequence[float]) -> float:
    """Their difference."""
    return one - other
