"""ListOps of the Long Range Arena: nested expressions over digits, whose value is one of ten classes.

    [MAX 4 3 [MIN 2 3 ] 1 0 ]    has the value 4

MAX, MIN, MED (the median, rounded down) and SM (the sum modulo ten) have any number of arguments from one on. An
operation with its bracket, a digit and the closing bracket are one token each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np

from graftlm.errors import DataError, shorten


def _median(values: Sequence[int]) -> int:
    return int(median(values))


def _sum_modulo_ten(values: Sequence[int]) -> int:
    return sum(values) % 10


OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": _median,
    "[SM": _sum_modulo_ten,
}
CLOSE = "]"
DIGITS = tuple(str(digit) for digit in range(10))
TOKENS = (*OPERATIONS, *DIGITS, CLOSE)
"""All tokens; the id of the first is 1, since 0 is padding."""
IDS = {token: number for number, token in enumerate(TOKENS, start=1)}

_GROUPING = str.maketrans("()", "  ")
"""The published files group arguments by parentheses, which carry no information."""
_NEST_PROBABILITY = 0.25
_MOST_REJECTED = 200_000
"""Number of expressions in a row that are drawn and not used, after which no more are expected."""


def read_expression(text: object, where: str) -> tuple[np.ndarray, int]:
    """Return the token ids of an expression, int32 (n,), and its value.

    Args:
        text: tokens with blanks between them. Parentheses are ignored.
        where: the row's location, for error messages.

    Raises:
        DataError: the text is not a string, has an unknown token, or is not one complete expression.
    """
    if not isinstance(text, str):
        raise DataError(f"{where} is of type {type(text).__name__}, but an expression as text is expected: correct it.")
    tokens = text.translate(_GROUPING).split()
    value = _value_of(tokens, where)
    return np.array([IDS[token] for token in tokens], dtype=np.int32), value


def _value_of(tokens: Sequence[str], where: str) -> int:
    """Return the value of an expression."""
    operations: list[str] = []
    arguments: list[list[int]] = [[]]
    for number, token in enumerate(tokens):
        if token not in IDS:
            raise DataError(
                f"{where} has the token {shorten(token)!r}, but one of {' '.join(TOKENS)} is expected: correct the row."
            )
        if number and not operations:
            raise DataError(
                f"{where} continues after the end of its expression, at {token!r}: write one expression per row."
            )
        if token in OPERATIONS:
            operations.append(token)
            arguments.append([])
        elif token in DIGITS:
            arguments[-1].append(int(token))
        elif not operations or not arguments[-1]:
            raise DataError(f"{where} closes a list that has no arguments: correct the row.")
        else:
            values = arguments.pop()
            arguments[-1].append(OPERATIONS[operations.pop()](values))
    if operations or not tokens:
        raise DataError(
            f"{where} is not a complete expression (lists without a closing bracket: {len(operations)}), as if it was "
            "cut: give the whole expression."
        )
    return arguments[0][0]


def longest_expression(depth: int, arguments: int) -> int:
    """Return the number of tokens of the longest expression of a depth with a maximum number of arguments."""
    longest = 1
    for _ in range(depth):
        longest = 2 + arguments * longest
    return longest


def generate_expressions(
    count: int,
    *,
    shortest: int,
    longest: int,
    depth: int = 10,
    arguments: int = 10,
    seed: int = 0,
) -> list[tuple[np.ndarray, int]]:
    """Draw different expressions.

    An argument is a list with a probability of a fourth, above the greatest depth, and else a digit.

    Args:
        count: number of expressions.
        shortest: fewest tokens of an expression.
        longest: most tokens.
        depth: greatest depth of lists.
        arguments: most arguments of an operation, at least 2, which is the fewest.
        seed: seed of the draws. More expressions of one seed begin with those of fewer.

    Returns:
        Token ids, int32 (n,), and value of each expression.

    Raises:
        DataError: there are too few different expressions of these lengths.
    """
    draws = _draws(np.random.default_rng(seed))
    found: dict[bytes, tuple[np.ndarray, int]] = {}
    rejected = 0
    while len(found) < count:
        tokens: list[int] = []
        value = _draw_list(draws, tokens, depth, arguments, longest)
        ids = np.array(tokens, dtype=np.int32)
        key = ids.tobytes()
        if value is not None and shortest <= len(tokens) and key not in found:
            found[key] = (ids, value)
            rejected = 0
            continue
        rejected += 1
        if rejected == _MOST_REJECTED:
            raise DataError(
                f"Only {len(found):,} different expressions of {shortest:,} to {longest:,} tokens were found, but "
                f"{count:,} are needed: lower the number of rows or shortest, or raise depth or arguments."
            )
    return list(found.values())


def _draws(generator: np.random.Generator) -> Iterator[float]:
    """Yield random numbers from 0 to below 1 without end."""
    while True:
        yield from generator.random(4096).tolist()


def _draw_list(draws: Iterator[float], tokens: list[int], depth: int, most: int, longest: int) -> int | None:
    """Append a random list to `tokens`, and return its value; None if it is too long.

    Args:
        draws: random numbers.
        tokens: ids of the expression so far.
        depth: greatest depth of the list, at least 1.
        most: most arguments of an operation.
        longest: most tokens of the expression.
    """
    operation = TOKENS[int(len(OPERATIONS) * next(draws))]
    tokens.append(IDS[operation])
    count = 2 + int((most - 1) * next(draws))
    values = []
    for _ in range(count):
        is_list = depth > 1 and next(draws) < _NEST_PROBABILITY
        value = _draw_list(draws, tokens, depth - 1, most, longest) if is_list else int(10 * next(draws))
        if value is None:
            return None
        if not is_list:
            tokens.append(IDS[DIGITS[value]])
        if len(tokens) >= longest:  # without the closing bracket
            return None
        values.append(value)
    tokens.append(IDS[CLOSE])
    return OPERATIONS[operation](values)
