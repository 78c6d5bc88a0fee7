"""Tasks that need a long memory: what stands at a text's beginning is asked for at its end, many windows later.

Every task gives rows of ids, and which of them are answers: those alone are learned and tested. Id 0 fills rows up.

- recall: pairs of a key and a value in the first window, noise, and every key again in the last, each with its value.
- copy: values at random places of the first half, noise between them, and in the last window all of them in order.
- listops: a nested expression of maxima, minima, medians and sums modulo ten, and its result.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from experiments.long_memory.listops import ANSWER, TOKENS, expressions
from graftlm.config import Config

TaskName = Literal["recall", "copy", "listops"]
FILL = 0


class Task(Config):
    """A task and its sizes.

    Args:
        length: tokens of a row; of listops, the longest.
        window: of the models that learn it: what is asked for stands in the last window.
        pairs: of recall; of copy, how many values are to be copied.
        keys, values: how many of them there are.
        noise: how many different tokens mean nothing.
        shortest: of listops, the fewest tokens of an expression.
    """

    name: TaskName
    length: int = Field(128, ge=8)
    window: int = Field(8, ge=4)
    pairs: int = Field(2, ge=1)
    keys: int = Field(4, ge=1)
    values: int = Field(8, ge=2)
    noise: int = Field(1, ge=1)
    shortest: int = Field(500, ge=3)

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.name != "listops" and 2 * self.pairs > self.window:
            raise ValueError(f"{self.pairs} pairs take {2 * self.pairs} tokens, but a window has {self.window}")
        if self.name == "recall" and self.pairs > self.keys:
            raise ValueError(f"{self.pairs} pairs need as many different keys, but there are {self.keys}")
        return self

    @property
    def vocabulary(self) -> int:
        """How many ids there are."""
        return TOKENS if self.name == "listops" else 2 + self.keys + self.values + self.noise

    @property
    def chance(self) -> float:
        """Percent of answers that are right by guessing among those there are."""
        return 100 / (10 if self.name == "listops" else self.values)


class Rows(NamedTuple):
    """Rows of ids (N, L), int64, and which of them are answers, (N, L) bool."""

    ids: np.ndarray
    answers: np.ndarray


def make_rows(task: Task, count: int, seed: int, part: str) -> Rows:
    """Examples of a task: the same for the same seed and part, others for another part."""
    random = np.random.default_rng([seed, *part.encode()])
    return {"recall": _recall, "copy": _copy, "listops": _listops}[task.name](task, count, random)


def informed_guesses(task: Task, examples: int, tested: int, seed: int) -> dict[str, float]:
    """Percent of a listops test that is right by one who reads no further than the outermost operation, or not at all.

    Args:
        task: listops.
        examples: in which results are counted; those that are commonest are guessed.
        tested: examples of the test.
        seed: of both.
    """
    known, test = make_rows(task, examples, seed, "guesses"), make_rows(task, tested, seed, "test")
    results, wanted = known.ids[known.answers], test.ids[test.answers]
    guess = {first: np.bincount(results[known.ids[:, 0] == first]).argmax() for first in np.unique(known.ids[:, 0])}
    by_operation = np.array([guess.get(first, FILL) for first in test.ids[:, 0]])
    return {
        "the commonest result": 100 * float((wanted == np.bincount(results).argmax()).mean()),
        "that of the outermost operation": 100 * float((wanted == by_operation).mean()),
    }


def _recall(task: Task, count: int, random: np.random.Generator) -> Rows:
    ids = _noise(task, count, random)
    keys = _chosen(random, count, task.keys, task.pairs)
    values = random.integers(task.values, size=(count, task.pairs))
    places = 2 * np.sort(_chosen(random, count, task.window // 2, task.pairs), axis=1)
    _put(ids, places, 1 + keys)
    _put(ids, places + 1, 1 + task.keys + values)
    order = _chosen(random, count, task.pairs, task.pairs)
    first = task.length - 2 * task.pairs
    ids[:, first::2] = 1 + np.take_along_axis(keys, order, axis=1)
    ids[:, first + 1 :: 2] = 1 + task.keys + np.take_along_axis(values, order, axis=1)
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first + 1 :: 2] = True
    return Rows(ids, answers)


def _copy(task: Task, count: int, random: np.random.Generator) -> Rows:
    ids = _noise(task, count, random)
    values = 1 + task.keys + random.integers(task.values, size=(count, task.pairs))
    _put(ids, np.sort(_chosen(random, count, task.length // 2, task.pairs), axis=1), values)
    first = task.length - task.pairs
    ids[:, first - 1] = task.vocabulary - 1  # from here on: copy
    ids[:, first:] = values
    answers = np.zeros_like(ids, dtype=bool)
    answers[:, first:] = True
    return Rows(ids, answers)


def _listops(task: Task, count: int, random: np.random.Generator) -> Rows:
    ids = np.full((count, task.length), FILL)
    answers = np.zeros_like(ids, dtype=bool)
    found = expressions(random, task.shortest, task.length - 1)
    for row, (expression, result) in zip(range(count), found, strict=False):
        ids[row, : len(expression)] = expression
        ids[row, len(expression)] = ANSWER + result
        answers[row, len(expression)] = True
    return Rows(ids, answers)


def _noise(task: Task, count: int, random: np.random.Generator) -> np.ndarray:
    return 1 + task.keys + task.values + random.integers(task.noise, size=(count, task.length))


def _chosen(random: np.random.Generator, rows: int, among: int, count: int) -> np.ndarray:
    """(rows, count) different numbers below `among` in random order, for each row."""
    return np.argsort(random.random((rows, among)), axis=1)[:, :count]


def _put(ids: np.ndarray, places: np.ndarray, values: np.ndarray) -> None:
    np.put_along_axis(ids, places, values, axis=1)
