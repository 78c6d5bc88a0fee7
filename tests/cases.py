"""Which cases of a parametrized test are in the default run. The others are slow, so that `-m slow` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def thinned(values: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Return the cases of a test with one argument.

    Args:
        values: all values of the argument.
        default: the values of the default run.
    """
    values = list(values)
    assert all(value in values for value in default), "a value of the default run is no case"
    return [value if value in default else pytest.param(value, marks=pytest.mark.slow) for value in values]


def rotated(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values; the default run has each value at least once.

    Args:
        axes: the values of each argument.
    """
    lists = [list(axis) for axis in axes]
    default = {tuple(turn % len(axis) for axis in lists) for turn in range(max(map(len, lists)))}
    return _params(lists, default)


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values; the default run has each pair of values of two arguments at least once.

    Args:
        axes: the values of each argument, at least three.
    """
    lists = [list(axis) for axis in axes]
    combinations = list(itertools.product(*(range(len(axis)) for axis in lists)))
    missing = set().union(*map(_pairs, combinations))
    default = set()
    while missing:
        best = max(combinations, key=lambda numbers: len(_pairs(numbers) & missing))
        default.add(best)
        missing -= _pairs(best)
    return _params(lists, default)


def _pairs(numbers: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(numbers), 2))


def _params(lists: Sequence[Sequence[Any]], default: Collection[tuple[int, ...]]) -> list[Any]:
    params = []
    for numbers in itertools.product(*(range(len(axis)) for axis in lists)):
        values = [axis[number] for axis, number in zip(lists, numbers, strict=True)]
        params.append(pytest.param(*values, marks=[] if numbers in default else pytest.mark.slow))
    return params
