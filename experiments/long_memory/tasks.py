"""Tasks that need a long memory: the end of a text asks for its beginning, many windows before.

A task gives rows of ids, and which of them are answers; only answers are trained and tested. Id 0 is padding.

- recall: the first window has pairs of a key and a value, noise follows, and the last window repeats every key, each
  with its value.
- copy: values at random positions of the first half, noise between them, and all of them in order in the last window.
- listops: a nested expression and its result (Long Range Arena):

    [MAX 4 3 [MIN 2 3 ] 1 0 ] = 4

Operations are MAX, MIN, MED (the median, rounded down) and SM (the sum modulo ten). They have two to ten arguments and
a depth of at most ten. An operation with its bracket, the closing bracket and a digit are one token each; digits that
answer are tokens of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from graftlm.config import Config

PADDING_ID = 0
OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
CLOSE_ID = 1 + len(OPERATIONS)
DIGIT_ID = CLOSE_ID + 1
ANSWER_ID = DIGIT_ID + 10
MAX_DEPTH, MAX_ARGUMENTS, DIGIT_PROBABILITY = 10, 10, 0.75


class TrainingStage(NamedTuple):
    """Training on new texts of one length; for listops the maximum, and a fourth of it is the minimum."""

    length: int
    steps: int
    batch_size: int


class MemoryTask(Config):
    """A task, its sizes, and the stages of its training.

    Args:
        length: tokens of a row; the maximum for listops.
        window: of the models that learn it; the questions of recall and copy are in the last window.
        pairs: pairs of recall; values of copy.
        keys, values: number of different keys and values.
        noise: number of different noise tokens.
        shortest: fewest tokens of a listops expression.
    """

    name: Literal["recall", "copy", "listops"]
    length: int = Field(128, ge=8)
    window: int = Field(8, ge=4)
    pairs: int = Field(2, ge=1)
    keys: int = Field(4, ge=1)
    values: int = Field(8, ge=2)
    noise: int = Field(1, ge=1)
    shortest: int = Field(500, ge=3)
    stages: tuple[TrainingStage, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name != "listops" and 2 * self.pairs > self.window:
            raise ValueError(f"{self.pairs} pairs take {2 * self.pairs} tokens, but a window has {self.window}")
        if self.name == "recall" and self.pairs > self.keys:
            raise ValueError(f"{self.pairs} pairs need as many different keys, but there are {self.keys}")
        return self

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return ANSWER_ID + 10 if self.name == "listops" else 2 + self.keys + self.values + self.noise

    @property
    def chance(self) -> float:
        """Accuracy of guessing among all answers, in percent."""
        return 100 / (10 if self.name == "listops" else self.values)


class TaskExamples(NamedTuple):
    """Ids (N, L) int64, and which of them are answers, (N, L) bool."""

    ids: np.ndarray
    answers: np.ndarray


def make_examples(task: MemoryTask, count: int, seed: int, split: str) -> TaskExamples:
    """Examples of a task, which depend on the seed and on the name of the split."""
    random = np.random.default_rng([seed, *split.encode()])
    return {"recall": _recall, "copy": _copy, "listops": _listops}[task.name](task, count, random)


def informed_guesses(task: MemoryTask, tested: int, seed: int) -> dict[str, float]:
    """Accuracy on `tested` listops examples, in percent, of guesses that read the outermost operation at most.

    A guess is the most frequent result among eight times as many other examples.
    """
    known, test = make_examples(task, 8 * tested, seed, "guesses"), make_examples(task, tested, seed, "test")
    results, expected = known.ids[known.answers], test.ids[test.answers]
    first_ids = known.ids[:, 0]
    guesses = {first: np.bincount(results[first_ids == first]).argmax() for first in np.unique(first_ids)}
    by_operation = np.array([guesses.get(first, PADDING_ID) for first in test.ids[:, 0]])
    return {
        "the commonest result": 100 * float((expected == np.bincount(results).argmax()).mean()),
        "that of the outermost operation": 100 * float((expected == by_operation).mean()),
    }


def _recall(task: MemoryTask, count: int, random: np.random.Generator) -> TaskExamples:
    ids = _noise(task, count, random)
    keys = _sample(random, count, task.keys, task.pairs)
    values = random.integers(task.values, size=(count, task.pairs))
    positions = 2 * np.sort(_sample(random, count, task.window // 2, task.pairs), axis=1)
    np.put_along_axis(ids, positions, 1 + keys, axis=1)
    np.put_along_axis(ids, positions + 1, 1 + task.keys + values, axis=1)
    order = _sample(random, count, task.pairs, task.pairs)
    first = task.length - 2 * task.pairs
    ids[:, first::2] = 1 + np.take_along_axis(keys, order, axis=1)
    ids[:, first + 1 :: 2] = 1 + task.keys + np.take_along_axis(values, order, axis=1)
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first + 1 :: 2] = True
    return TaskExamples(ids, answers)


def _copy(task: MemoryTask, count: int, random: np.random.Generator) -> TaskExamples:
    ids = _noise(task, count, random)
    values = 1 + task.keys + random.integers(task.values, size=(count, task.pairs))
    np.put_along_axis(ids, np.sort(_sample(random, count, task.length // 2, task.pairs), axis=1), values, axis=1)
    first = task.length - task.pairs
    ids[:, first - 1] = task.vocab_size - 1  # the token that asks for the copy
    ids[:, first:] = values
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first:] = True
    return TaskExamples(ids, answers)


def _noise(task: MemoryTask, count: int, random: np.random.Generator) -> np.ndarray:
    return 1 + task.keys + task.values + random.integers(task.noise, size=(count, task.length))


def _sample(random: np.random.Generator, rows: int, below: int, count: int) -> np.ndarray:
    """(rows, count): for each row, different numbers less than `below` in random order."""
    return np.argsort(random.random((rows, below)), axis=1)[:, :count]


def _listops(task: MemoryTask, count: int, random: np.random.Generator) -> TaskExamples:
    ids = np.full((count, task.length), PADDING_ID)
    answers = np.zeros_like(ids, dtype=bool)
    examples = expressions(random, task.shortest, task.length - 1)
    for row, (expression, result) in zip(range(count), examples, strict=False):
        ids[row, : len(expression)] = expression
        ids[row, len(expression)] = ANSWER_ID + result
        answers[row, len(expression)] = True
    return TaskExamples(ids, answers)


def expressions(random: np.random.Generator, shortest: int, longest: int) -> Iterator[tuple[list[int], int]]:
    """An endless stream of expressions within these lengths, as ids, each with its result."""
    draws = _uniform(random)
    while True:
        ids: list[int] = []
        result = _write_list(draws, ids, 1, longest)
        if result is not None and shortest <= len(ids) <= longest:
            yield ids, result


def _uniform(random: np.random.Generator) -> Iterator[float]:
    """An endless stream of numbers from 0 to 1. Drawing many at a time is faster: most expressions are rejected."""
    while True:
        yield from random.random(4096).tolist()


def _write_list(draws: Iterator[float], ids: list[int], depth: int, longest: int) -> int | None:
    """Append a random list to `ids`, and return its result; None if it is too long."""
    operation = int(len(OPERATIONS) * next(draws))
    ids.append(1 + operation)
    values = []
    for _ in range(2 + int((MAX_ARGUMENTS - 1) * next(draws))):
        if depth < MAX_DEPTH and next(draws) >= DIGIT_PROBABILITY:
            value = _write_list(draws, ids, depth + 1, longest)
        else:
            value = int(10 * next(draws))
            ids.append(DIGIT_ID + value)
        if value is None or len(ids) > longest:
            return None
        values.append(value)
    ids.append(CLOSE_ID)
    return tuple(OPERATIONS.values())[operation](values)
