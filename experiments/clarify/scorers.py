"""Metrics of the user's own, such as COMET and BLEURT: commands, since these need packages that don't fit ours.

A command reads translations from its standard input, a JSON object a line with `src`, `mt` and `ref`, and writes a
number for each, in their order, one a line.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graftlm.errors import EvaluationError, RecipeError
from graftlm.evaluation import Interval, Metric

RESAMPLES = 1000
_NAME = re.compile(r"[a-z][a-z_]*")
_OURS = {"bleu", "chrf", "accuracy", "coverage", "share", "hit", "calls", "questions", "examples"}


class Translation(NamedTuple):
    """A text, what a model made of it, and the right translation."""

    src: str
    mt: str
    ref: str


class Scorer:
    """A command that gives each translation a number, larger for better ones.

    Args:
        written: `NAME=COMMAND`; no shell reads the command.

    Raises:
        RecipeError: it is of another form, or the name is taken.
    """

    def __init__(self, written: str) -> None:
        self.name, sign, command = written.partition("=")
        if not sign or not command.strip() or not _NAME.fullmatch(self.name):
            raise RecipeError(f"A scorer is written NAME=COMMAND, such as comet='python comet.py', not {written!r}.")
        if self.name in _OURS:
            raise RecipeError(f"The name {self.name} is taken by a metric that is always there: give it another one.")
        self._command = shlex.split(command)

    def __call__(self, translations: Sequence[Translation]) -> list[float]:
        """A number for each.

        Raises:
            EvaluationError: the command can't be run, fails, or writes something else.
        """
        given = "".join(json.dumps(one._asdict()) + "\n" for one in translations)
        try:
            found = subprocess.run(self._command, input=given, capture_output=True, encoding="utf-8", check=False)
        except OSError as error:
            raise EvaluationError(
                f"The scorer {self.name} can't be run ({error.strerror}: {self._command[0]}): check its command."
            ) from None
        if found.returncode:
            last = (found.stderr.strip().splitlines() or ["it said nothing"])[-1][:100]
            raise EvaluationError(f"The scorer {self.name} ended with {found.returncode} ({last}): try it by itself.")
        return self._numbers(found.stdout, len(translations))

    def _numbers(self, written: str, count: int) -> list[float]:
        lines = written.split()
        try:
            numbers = [float(line) for line in lines]
        except ValueError:
            raise EvaluationError(
                f"The scorer {self.name} wrote {written.strip()[:40]!r}, where a number a line is expected."
            ) from None
        if len(numbers) != count or not np.isfinite(numbers).all():
            raise EvaluationError(
                f"The scorer {self.name} wrote {len(numbers)} numbers for {count} translations, not a finite one each."
            )
        return numbers


def scored(scorer: Scorer, translations: Sequence[Translation]) -> Interval:
    """The mean of a scorer's numbers, with a 95% bootstrap interval over translations (seed 0)."""
    numbers = np.array(scorer(translations))
    draws = np.random.default_rng(0).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.quantile(numbers[draws].mean(axis=1), (0.025, 0.975))
    return Interval(mean=float(numbers.mean()), low=float(low), high=float(high))


def best_of(
    scorer: Scorer, src: Sequence[str], lists: Sequence[Sequence[str]], refs: Sequence[str]
) -> dict[str, Metric]:
    """The best number of the first 3 and 10 words or phrases of each list, on average: BLEURT@n, of any scorer.

    A list without a word counts as the scorer rates nothing at all.
    """
    words = [list(one[:10]) or [""] for one in lists]
    asked = [Translation(text, word, ref) for text, row, ref in zip(src, words, refs, strict=True) for word in row]
    numbers = iter(scorer(asked))
    rows = [[next(numbers) for _ in row] for row in words]
    return {f"{scorer.name}{n}": float(np.mean([max(row[:n]) for row in rows])) for n in (3, 10)}
