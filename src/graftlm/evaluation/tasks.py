"""Tasks of the user's own: a file of prompts and answers, and how well a model does on it.

    exact-match      share of answers that are the right one but for white space around it
    chrf             F score of character n-grams, of all answers together, from 0 to 100 (sacrebleu's chrF2)
    pass@1           share of answers that, put behind their prompt, are Python that passes the row's tests
    log-perplexity   nats per token of the right answers given their prompts, and bits per byte

Intervals say how a metric would vary over other examples of the same kind: Wilson's for shares, which stay honest where
no answer or every answer is right, else the percentile bootstrap; a gain over another model draws the same examples of
both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from graftlm.config import Config
from graftlm.data.files import read_rows
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.examples import (
    Example,
    chrf_counts,
    chrf_of,
    chrf_signature,
    exact_match,
    generate_answers,
    pass_at_1,
    score_answers,
)
from graftlm.evaluation.metrics import Precision
from graftlm.evaluation.results import Interval
from graftlm.evaluation.sandbox import protections, run_tests

TaskMetric = Literal["exact-match", "chrf", "pass@1", "log-perplexity"]

_RESAMPLES = 1000
_CONFIDENCE = 0.95
_BETWEEN_SHOTS = "\n\n"
_SAMPLES = 5


class TaskConfig(Config):
    """Prompts and answers out of a file, and what is measured on them."""

    path: str = Field(min_length=1, description="A JSON, parquet or CSV file with one example a row.")
    metric: TaskMetric = Field(description="`pass@1` runs what the model writes, in a sandbox.")
    prompt_column: str = Field("prompt", description="The column of what the model is given.")
    answer_column: str = Field("answer", description="The column of what it should answer.")
    tests_column: str = Field("tests", description="With pass@1: the column of Python that fails on wrong answers.")
    max_new_tokens: int = Field(64, ge=1, description="Tokens of an answer, at most.")
    stop: list[str] = Field(["\n"], description="Texts that end an answer, by default a line break.")
    limit: int | None = Field(None, ge=1, description="Measure at most so many examples.")
    shots: int = Field(
        0, ge=0, description="So many of the file's first examples stand before each prompt, solved, and don't count."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "" in self.stop:
            raise ValueError("a text of stop is empty, and would end every answer before it begins: leave it out")
        return self

    def columns(self) -> dict[str, str]:
        """The columns that are read, by the key that names them."""
        columns = {"prompt_column": self.prompt_column, "answer_column": self.answer_column}
        return columns | ({"tests_column": self.tests_column} if self.metric == "pass@1" else {})


@dataclass(frozen=True)
class Task:
    """A task whose file is read: its examples, and what stands solved before each prompt."""

    config: TaskConfig
    examples: tuple[Example, ...]
    shots: str = ""

    def prompts(self) -> list[str]:
        """What the model is given for each example."""
        return [self.shots + example.prompt for example in self.examples]


def read_task(config: TaskConfig) -> Task:
    """The examples of a task.

    Raises:
        DataError: the file can't be read, lacks a column or a text, or holds no more examples than there are shots.
    """
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise DataError(f"There is no file {path}: check the task's path.")
    wanted = None if config.limit is None else config.shots + config.limit
    rows = [Example(*texts) for texts, _ in islice(read_rows(path, config.columns(), "task"), wanted)]
    if not rows:
        raise DataError(f"{path} holds no examples: add some, one a row.")
    if len(rows) <= config.shots:
        raise DataError(
            f"{path} holds {len(rows)} examples, of which {config.shots} are to stand before the others as shots: "
            "add examples, or lower the shots."
        )
    shots = "".join(example.prompt + example.answer + _BETWEEN_SHOTS for example in rows[: config.shots])
    return Task(config, tuple(rows[config.shots :]), shots)


@dataclass(frozen=True)
class TaskResult:
    """How a model did on a task.

    Attributes:
        metric: what was measured.
        sums: float64, (examples, columns): what the metric sums over examples. Of shares: right, 1; of chrF: the counts
            of its n-grams; of log-perplexity: nats, tokens, bytes.
        answers: what the model wrote; empty where it only read.
    """

    metric: TaskMetric
    sums: np.ndarray
    answers: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        """The metric over all examples."""
        return _value(self.metric, self.sums.sum(axis=0))

    def metrics(self, name: str) -> dict[str, Interval]:
        """The metrics of a task of that name: `<name>_<metric>`, with log-perplexity also `…_bpb`, bits per byte."""
        key = f"{name}_{self.metric}"
        if self.metric in ("exact-match", "pass@1"):
            return {key: _wilson(self.value, len(self.sums))}
        samples = _resampled(self.sums)
        found = {key: _interval(self.value, [_value(self.metric, one) for one in samples])}
        if self.metric == "log-perplexity":
            found[f"{key}_bpb"] = _interval(_bits(self.sums.sum(axis=0)), [_bits(one) for one in samples])
        return found

    def gain(self, name: str, base: TaskResult) -> dict[str, Interval]:
        """`<name>_<metric>_gain`: by how much it is better than `base` on the same examples; above 0 is better.

        Raises:
            EvaluationError: `base` is of other examples.
        """
        if self.sums.shape != base.sums.shape or self.metric != base.metric:
            raise EvaluationError(
                f"The outcomes are {base.metric} of {len(base.sums)} examples and {self.metric} of {len(self.sums)}, "
                "but a gain needs one metric of the same examples: measure both models on one task."
            )
        sign = -1 if self.metric == "log-perplexity" else 1
        pairs = zip(_resampled(self.sums), _resampled(base.sums), strict=True)  # the same examples: one seed
        gains = [sign * (_value(self.metric, own) - _value(self.metric, other)) for own, other in pairs]
        return {f"{name}_{self.metric}_gain": _interval(sign * (self.value - base.value), gains)}

    def describe(self, task: Task) -> dict[str, Any]:
        """What a reader may want to know beside the number, as plain JSON values: a few answers among it."""
        found: dict[str, Any] = {"metric": self.metric, "examples": len(self.sums)}
        if self.metric == "chrf":
            found["signature"] = chrf_signature()
        if self.metric == "pass@1":
            found["protections"] = vars(protections())
        if self.answers:
            found["samples"] = [
                {"prompt": example.prompt, "expected": example.answer, "answer": answer}
                for example, answer in islice(zip(task.examples, self.answers, strict=True), _SAMPLES)
            ]
        return found


def measure_task(
    model: Any, tokenizer: Any, task: Task, *, batch_size: int = 16, precision: Precision = "fp32"
) -> TaskResult:
    """Let a model do a task.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's.
        task: what to do.
        batch_size: examples per pass.
        precision: of log-perplexity, see `score`; answers are written in the model's own.

    Raises:
        DataError, EvaluationError: an example can't be put to the model, or the tests of pass@1 tell nothing.
    """
    config = task.config
    if config.metric == "log-perplexity":
        asked = [Example(prompt, one.answer) for prompt, one in zip(task.prompts(), task.examples, strict=True)]
        scores = score_answers(model, tokenizer, asked, batch_size=batch_size, precision=precision)
        return TaskResult(config.metric, np.stack([scores.nats, scores.tokens, scores.bytes], axis=1))
    if config.metric == "pass@1":
        _check_tests(task)
    answers = generate_answers(
        model, tokenizer, task.prompts(), max_new_tokens=config.max_new_tokens, stop=config.stop, batch_size=batch_size
    )
    if config.metric == "chrf":
        return TaskResult(config.metric, chrf_counts(answers, task.examples).astype(np.float64), answers)
    right = (pass_at_1 if config.metric == "pass@1" else exact_match)(answers, task.examples)
    return TaskResult(config.metric, np.stack([right, np.ones_like(right)], axis=1), answers)


def _check_tests(task: Task) -> None:
    """Make sure by the first example that its tests tell right from wrong."""
    first, path = task.examples[0], task.config.path
    verdict = run_tests(first.prompt + first.answer, first.tests)
    if not verdict.passed:
        raise EvaluationError(
            f"{path}: the first example's own answer does not pass its tests ({verdict.reason}): "
            "a row's prompt, answer and tests must make one program."
        )
    if run_tests("", first.tests).passed:
        raise EvaluationError(
            f"{path}: the first example's tests pass without any answer: they must call what the answer defines."
        )


def _value(metric: TaskMetric, sums: np.ndarray) -> float:
    return chrf_of(sums) if metric == "chrf" else float(sums[0] / sums[1])


def _bits(sums: np.ndarray) -> float:
    return float(sums[0] / (sums[2] * math.log(2)))


def _resampled(sums: np.ndarray) -> np.ndarray:
    """Sums over examples drawn with replacement, (resamples, columns); the same draws for the same number of them."""
    chance, count = np.random.default_rng(0), len(sums)
    draws = (chance.integers(count, size=count) for _ in range(_RESAMPLES))
    return np.stack([np.bincount(drawn, minlength=count) @ sums for drawn in draws])


def _interval(mean: float, samples: Sequence[float]) -> Interval:
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return Interval(mean=mean, low=float(low), high=float(high))


def _wilson(share: float, count: int) -> Interval:
    """Wilson's score interval of a share of `count` examples."""
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Rounding must not put the share itself outside.
    return Interval(mean=share, low=min(share, max(0.0, middle - half)), high=max(share, min(1.0, middle + half)))
