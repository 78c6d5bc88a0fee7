"""Metrics of the user, such as COMET and BLEURT, as commands: their packages conflict with this project's.

A command reads translations from its standard input, one JSON object per line with `src`, `mt` and `ref`. It writes a
number for each, in order, one per line.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence

import numpy as np

from experiments.clarify.metrics import split_list
from graftlm.errors import EvaluationError, RecipeError
from graftlm.evaluation import Interval, Metric
from graftlm.pipelines.clarify.datasets import AmbiguousExample

RESAMPLES = 1000
_NAME = re.compile(r"[a-z][a-z_]*")
_BUILT_IN = {"bleu", "chrf", "accuracy", "coverage", "share", "hit", "calls", "questions", "examples"}


Translation = tuple[str, str, str]  # a text, a model's translation, the reference


class Scorer:
    """A command that gives each translation a number, larger for better ones.

    Args:
        argument: `NAME=COMMAND`; no shell reads the command.

    Raises:
        RecipeError: the argument has another form, or the name is taken.
    """

    def __init__(self, argument: str) -> None:
        self.name, sign, command = argument.partition("=")
        if not sign or not command.strip() or not _NAME.fullmatch(self.name):
            raise RecipeError(f"A scorer is written NAME=COMMAND, such as comet='python comet.py', not {argument!r}.")
        if self.name in _BUILT_IN:
            raise RecipeError(f"The name {self.name} is taken by a metric that is always there: give it another one.")
        self._command = shlex.split(command)

    def __call__(self, translations: Sequence[Translation]) -> list[float]:
        """A number for each translation.

        Raises:
            EvaluationError: the command can't be run, fails, or writes something else.
        """
        lines = "".join(
            json.dumps(dict(zip(("src", "mt", "ref"), translation, strict=True))) + "\n" for translation in translations
        )
        try:
            process = subprocess.run(self._command, input=lines, capture_output=True, encoding="utf-8", check=False)
        except OSError as error:
            raise EvaluationError(
                f"The scorer {self.name} can't be run ({error.strerror}: {self._command[0]}): check its command."
            ) from None
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1][:100]
            raise EvaluationError(f"The scorer {self.name} ended with {process.returncode} ({last}): try it by itself.")
        try:
            numbers = [float(line) for line in process.stdout.split()]
        except ValueError:
            output = process.stdout.strip()[:40]
            raise EvaluationError(
                f"The scorer {self.name} wrote {output!r}, where a number a line is expected."
            ) from None
        if len(numbers) != len(translations) or not np.isfinite(numbers).all():
            counts = f"{len(numbers)} numbers for {len(translations)} translations"
            raise EvaluationError(f"The scorer {self.name} wrote {counts}, not a finite one each.")
        return numbers


def score_rows(
    scorer: Scorer, kind: str, examples: Sequence[AmbiguousExample], outputs: Sequence[str]
) -> dict[str, Metric]:
    """A scorer's mean with a 95% bootstrap interval over translations (seed 0).

    For polysemy: the best number of the first 3 and 10 words or phrases of each output, on average, as in BLEURT@n. An
    output without a word counts as the scorer rates the empty text.
    """
    pairs = list(zip(examples, outputs, strict=True))
    if kind == "polysemy":
        lists = [split_list(output)[:10] or [""] for output in outputs]
        rows = zip(examples, lists, strict=True)
        words = [(ex.source, word, ex.reference) for ex, row in rows for word in row]
        numbers = iter(scorer(words))
        scores = [[next(numbers) for _ in row] for row in lists]
        return {f"{scorer.name}{n}": float(np.mean([max(row[:n]) for row in scores])) for n in (3, 10)}
    scores = np.array(scorer([(ex.source, output, ex.reference) for ex, output in pairs]))
    draws = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, len(scores)))
    low, high = np.quantile(scores[draws].mean(axis=1), (0.025, 0.975))
    return {scorer.name: Interval(mean=float(scores.mean()), low=float(low), high=float(high))}
