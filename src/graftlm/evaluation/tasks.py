"""A user's own tasks: a file of prompts and reference answers, and a model's metric on it.

    exact-match      share of answers that equal the reference after stripping white space
    chrf             corpus chrF2 by sacrebleu, from 0 to 100
    pass@1           share of programs (prompt plus answer) that pass the tests of their row
    log-perplexity   nats per token of the reference answers given their prompts; also bits per byte

Intervals are over other examples of the same kind. Shares have Wilson's score interval, which holds at 0% and 100% too;
the other metrics have a percentile bootstrap. A gain over another model resamples the same examples of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from graftlm.config import Config
from graftlm.data.table_files import read_rows
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
from graftlm.evaluation.metrics import Precision, percentile_interval, share_interval
from graftlm.evaluation.results import Interval
from graftlm.evaluation.sandbox import protections, run_tests

TaskMetric = Literal["exact-match", "chrf", "pass@1", "log-perplexity"]

_RESAMPLES = 1000
_SHOT_SEPARATOR = "\n\n"
_SAMPLES = 5


class TaskConfig(Config):
    """A file of prompts and reference answers, and the metric to compute on it."""

    path: str = Field(min_length=1, description="A JSON, parquet or CSV file with one example per row.")
    metric: TaskMetric = Field(description="`pass@1` runs generated code in a sandbox.")
    prompt_column: str = Field("prompt", description="Column of the prompts.")
    answer_column: str = Field("answer", description="Column of the reference answers.")
    tests_column: str = Field("tests", description="With `pass@1`: column of Python that raises on wrong answers.")
    max_new_tokens: int = Field(64, ge=1, description="Maximum number of new tokens per answer.")
    stop: list[str] = Field(["\n"], description="Strings that end an answer; a line break by default.")
    limit: int | None = Field(None, ge=1, description="Maximum number of examples.")
    shots: int = Field(
        0, ge=0, description="Number of solved examples before each prompt: the file's first, which are not measured."
    )

    def _problems(self) -> Iterator[str]:
        if "" in self.stop:
            yield "a text of stop is empty, and would end every answer before it begins: leave it out"

    def columns(self) -> dict[str, str]:
        """Column names by the key that configures them."""
        columns = {"prompt_column": self.prompt_column, "answer_column": self.answer_column}
        return columns | ({"tests_column": self.tests_column} if self.metric == "pass@1" else {})


@dataclass(frozen=True)
class Task:
    """A config with its examples, and the solved examples that stand before each prompt."""

    config: TaskConfig
    examples: tuple[Example, ...]
    shots: str = ""

    def prompts(self) -> list[str]:
        """The model's input for each example."""
        return [self.shots + example.prompt for example in self.examples]


def read_task(config: TaskConfig) -> Task:
    """Read the examples of a task.

    Raises DataError if the file can't be read, lacks a column or a text, or holds no more examples than shots.
    """
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise DataError(f"There is no file {path}: check the task's path.")
    count = None if config.limit is None else config.shots + config.limit
    rows = [Example(*texts) for texts, _ in islice(read_rows(path, config.columns(), "task"), count)]
    if not rows:
        raise DataError(f"{path} holds no examples: add some, one a row.")
    if len(rows) <= config.shots:
        raise DataError(
            f"{path} holds {len(rows)} examples, of which {config.shots} are to stand before the others as shots: "
            "add examples, or lower the shots."
        )
    shots = "".join(example.prompt + example.answer + _SHOT_SEPARATOR for example in rows[: config.shots])
    return Task(config, tuple(rows[config.shots :]), shots)


@dataclass(frozen=True)
class TaskResult:
    """A model's result on a task.

    Attributes:
        sums: float64, (examples, columns), the terms that the metric sums over examples. Shares: correct, 1. chrF:
            n-gram counts. Log-perplexity: nats, tokens, bytes.
        answers: the generated answers; empty for log-perplexity.
    """

    metric: TaskMetric
    sums: np.ndarray
    answers: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        """The metric over all examples."""
        return _value(self.metric, self.sums.sum(axis=0))

    def metrics(self, name: str) -> dict[str, Interval]:
        """Metrics of the task `name`: `<name>_<metric>`, and for log-perplexity `<name>_log-perplexity_bpb`."""
        key = f"{name}_{self.metric}"
        if self.metric in ("exact-match", "pass@1"):
            return {key: share_interval(round(self.sums[:, 0].sum()), len(self.sums))}
        samples = _resample(self.sums)
        metrics = {key: percentile_interval(self.value, [_value(self.metric, sums) for sums in samples])}
        if self.metric == "log-perplexity":
            bits = _bits_per_byte(self.sums.sum(axis=0))
            metrics[f"{key}_bpb"] = percentile_interval(bits, [_bits_per_byte(sums) for sums in samples])
        return metrics

    def gain(self, name: str, base: TaskResult) -> dict[str, Interval]:
        """`<name>_<metric>_gain`: the improvement over `base` on the same examples; positive is better.

        Raises EvaluationError if `base` is of other examples.
        """
        if self.sums.shape != base.sums.shape or self.metric != base.metric:
            raise EvaluationError(
                f"The results are {base.metric} of {len(base.sums)} examples and {self.metric} of {len(self.sums)}, "
                "but a gain needs one metric of the same examples: measure both models on one task."
            )
        sign = -1 if self.metric == "log-perplexity" else 1
        pairs = zip(_resample(self.sums), _resample(base.sums), strict=True)  # one seed draws the same examples
        gains = [sign * (_value(self.metric, own) - _value(self.metric, other)) for own, other in pairs]
        return {f"{name}_{self.metric}_gain": percentile_interval(sign * (self.value - base.value), gains)}

    def describe(self, task: Task) -> dict[str, Any]:
        """Details as plain JSON values: number of examples, sacrebleu's signature, sandbox, a few answers."""
        details: dict[str, Any] = {"metric": self.metric, "examples": len(self.sums)}
        if self.metric == "chrf":
            details["signature"] = chrf_signature()
        if self.metric == "pass@1":
            details["protections"] = vars(protections())
        if self.answers:
            details["samples"] = [
                {"prompt": example.prompt, "expected": example.answer, "answer": answer}
                for example, answer in islice(zip(task.examples, self.answers, strict=True), _SAMPLES)
            ]
        return details


def measure_task(
    model: Any, tokenizer: Any, task: Task, *, batch_size: int = 16, precision: Precision = "fp32"
) -> TaskResult:
    """Measure a model on a task.

    Args:
        model: a `GraftedModel` or any transformers model.
        precision: precision of log-perplexity, see `score`; answers are generated in the model's own dtype.

    Raises DataError if an example has no token, and EvaluationError if an example exceeds the model's positions, or the
    tests of pass@1 accept or reject everything.
    """
    config = task.config
    if config.metric == "log-perplexity":
        examples = [Example(task.shots + example.prompt, example.answer) for example in task.examples]
        scores = score_answers(model, tokenizer, examples, batch_size=batch_size, precision=precision)
        return TaskResult(config.metric, np.stack([scores.nats, scores.tokens, scores.bytes], axis=1))
    if config.metric == "pass@1":
        _check_tests(task)
    answers = generate_answers(
        model, tokenizer, task.prompts(), max_new_tokens=config.max_new_tokens, stop=config.stop, batch_size=batch_size
    )
    if config.metric == "chrf":
        return TaskResult(config.metric, chrf_counts(answers, task.examples).astype(np.float64), answers)
    correct = (pass_at_1 if config.metric == "pass@1" else exact_match)(answers, task.examples)
    return TaskResult(config.metric, np.stack([correct, np.ones_like(correct)], axis=1), answers)


def _check_tests(task: Task) -> None:
    """Check on the first example that its tests accept the reference answer and reject an empty one."""
    first, path = task.examples[0], task.config.path
    result = run_tests(first.prompt + first.answer, first.tests)
    if not result.passed:
        raise EvaluationError(
            f"{path}: the first example's own answer does not pass its tests ({result.reason}): "
            "a row's prompt, answer and tests must make one program."
        )
    if run_tests("", first.tests).passed:
        raise EvaluationError(
            f"{path}: the first example's tests pass without any answer: they must call what the answer defines."
        )


def _value(metric: TaskMetric, sums: np.ndarray) -> float:
    return chrf_of(sums) if metric == "chrf" else float(sums[0] / sums[1])


def _bits_per_byte(sums: np.ndarray) -> float:
    return float(sums[0] / (sums[2] * math.log(2)))


def _resample(sums: np.ndarray) -> np.ndarray:
    """Bootstrap sums over examples, (resamples, columns); equal numbers of examples give equal draws."""
    rng, count = np.random.default_rng(0), len(sums)
    draws = (rng.integers(count, size=count) for _ in range(_RESAMPLES))
    return np.stack([np.bincount(draw, minlength=count) @ sums for draw in draws])
