"""ListOps of the Long Range Arena: nested lists of digits with an operation each, and the digit that comes out.

    [MAX 4 3 [MIN 2 3 ] 1 0 ] = 4

Operations are MAX, MIN, MED (the median, rounded down) and SM (the sum modulo ten), of two to ten arguments, nested at
most ten deep. Every operation with its bracket, the closing bracket and every digit is one token; digits that answer
are tokens of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np

OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
NAMES = (*OPERATIONS, "]", *"0123456789")
CLOSE = 1 + len(OPERATIONS)
DIGIT = CLOSE + 1
ANSWER = DIGIT + 10
TOKENS = ANSWER + 10
DEEPEST, MOST_ARGUMENTS, DIGITS = 10, 10, 0.75


def expressions(random: np.random.Generator, shortest: int, longest: int) -> Iterator[tuple[list[int], int]]:
    """Ids of expressions of so many tokens, endlessly, each with its result."""
    draws = _draws(random)
    while True:
        ids: list[int] = []
        result = _write(draws, ids, 1, longest)
        if result is not None and shortest <= len(ids) <= longest:
            yield ids, result


def _draws(random: np.random.Generator) -> Iterator[float]:
    """Numbers from 0 to 1, endlessly, drawn many at a time: most of them go into expressions that are thrown away."""
    while True:
        yield from random.random(4096).tolist()


def _write(draws: Iterator[float], ids: list[int], depth: int, longest: int) -> int | None:
    """Append a list to `ids`; its result, or None once it is too long."""
    operation = int(len(OPERATIONS) * next(draws))
    ids.append(1 + operation)
    values = []
    for _ in range(2 + int((MOST_ARGUMENTS - 1) * next(draws))):
        if depth < DEEPEST and next(draws) >= DIGITS:
            value = _write(draws, ids, depth + 1, longest)
        else:
            value = int(10 * next(draws))
            ids.append(DIGIT + value)
        if value is None or len(ids) > longest:
            return None
        values.append(value)
    ids.append(CLOSE)
    return tuple(OPERATIONS.values())[operation](values)


def spelled(ids: Sequence[int]) -> str:
    """An expression, and its result where there is one, as people write them."""
    return " ".join(NAMES[one - 1] if one < ANSWER else f"= {one - ANSWER}" for one in ids if one)
