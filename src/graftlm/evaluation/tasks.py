"""A user's own tasks: a file of prompts and reference answers, and a model's metric on it.

    exact-match      share of answers that equal the reference after stripping white space
    chrf             corpus chrF2 by sacrebleu, from 0 to 100; chrf1 is chrF1, which weighs precision like recall
    log-perplexity   nats per token of the reference answers given their prompts; also bits per byte

Intervals are over other examples of the same kind. Shares have Wilson's score interval, which is valid at 0% and 100%
too; the other metrics have a percentile bootstrap. A gain over another model resamples the same examples of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

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
    score_answers,
)
from graftlm.evaluation.inference import LanguageModel, Precision
from graftlm.evaluation.intervals import RESAMPLES, percentile_interval, share_interval
from graftlm.evaluation.results import Interval

TaskMetric = Literal["exact-match", "chrf", "chrf1", "log-perplexity"]

_BETA: dict[TaskMetric, int] = {"chrf": 2, "chrf1": 1}

_SHOT_SEPARATOR = "\n\n"
_SAMPLES = 5


class TaskConfig(Config):
    """A file of prompts and reference answers, and the metric to compute on it."""

    path: str = Field(min_length=1, description="A JSON, parquet or CSV file with one example per row.")
    metric: TaskMetric = Field(description="How answers are compared with the reference answers.")
    prompt_column: str = Field("prompt", description="Column of the prompts.")
    answer_column: str = Field("answer", description="Column of the reference answers.")
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
        """Return the names of the columns by the config keys that set them: prompts first, then answers."""
        return {"prompt_column": self.prompt_column, "answer_column": self.answer_column}


@dataclass(frozen=True)
class Task:
    """The examples of a task, and the config that they were read by.

    Attributes:
        config: the config that the examples were read by.
        examples: the examples to measure, without those that serve as shots.
        shots: the text of the solved examples, which precedes every prompt.
    """

    config: TaskConfig
    examples: tuple[Example, ...]
    shots: str = ""

    def prompts(self) -> list[str]:
        """Return the model's input for each example: the shots, then the example's prompt."""
        return [self.shots + example.prompt for example in self.examples]


def read_task(config: TaskConfig) -> Task:
    """Read the examples of a task.

    Args:
        config: the file, its columns, and how many of its examples are shots and measured.

    Raises:
        DataError: there is no such file, it can't be read, lacks a column or a text, or has too few examples for the
            shots.
    """
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise DataError(f"The task's path is {path}, but there is no such file: name a JSON, parquet or CSV file.")
    count = None if config.limit is None else config.shots + config.limit
    rows = islice(read_rows(path, config.columns(), "task"), count)
    examples = [Example(*texts) for texts, _ in rows]
    if not examples:
        raise DataError(f"{path} has no examples: add some, one per row.")
    if len(examples) <= config.shots:
        raise DataError(
            f"{path} has too few examples ({len(examples)}), since {config.shots} are used as shots and at least one "
            "more must be measured: add examples, or lower shots."
        )
    shots = ""
    for example in examples[: config.shots]:
        shots += example.prompt + example.answer + _SHOT_SEPARATOR
    return Task(config, tuple(examples[config.shots :]), shots)


@dataclass(frozen=True)
class TaskResult:
    """A model's result on a task.

    Attributes:
        metric: `exact-match`, `chrf`, `chrf1` or `log-perplexity`.
        sums: the terms that the metric sums over examples; float64, (examples, columns). Exact match: correct, 1.
            chrF: n-gram counts. Log-perplexity: nats, tokens, bytes.
        answers: the generated answers; empty for log-perplexity.
    """

    metric: TaskMetric
    sums: np.ndarray
    answers: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        """The metric over all examples, in the unit of `metric`: a share, 0 to 100, or nats per token."""
        return _value(self.metric, self.sums.sum(axis=0))

    def metrics(self, name: str) -> dict[str, Interval]:
        """Return the metric with its 95% interval, and for log-perplexity bits per byte too.

        Args:
            name: the task's name; the names of its metrics begin with it.

        Returns:
            `<name>_<metric>`, and for log-perplexity `<name>_log-perplexity_bpb`.
        """
        key = f"{name}_{self.metric}"
        if self.metric == "exact-match":
            correct = round(self.sums[:, 0].sum())
            return {key: share_interval(correct, len(self.sums))}
        resampled = _resample(self.sums)
        samples = [_value(self.metric, sums) for sums in resampled]
        metrics = {key: percentile_interval(self.value, samples)}
        if self.metric == "log-perplexity":
            bits = _bits_per_byte(self.sums.sum(axis=0))
            samples = [_bits_per_byte(sums) for sums in resampled]
            metrics[f"{key}_bpb"] = percentile_interval(bits, samples)
        return metrics

    def gain(self, name: str, base: TaskResult) -> dict[str, Interval]:
        """Return the improvement over another model on the same examples, with its paired 95% interval.

        Args:
            name: the task's name; the name of the gain begins with it.
            base: the other model's result on the same task, which is not checked beyond metric and number of examples.

        Returns:
            `<name>_<metric>_gain`; positive is better.

        Raises:
            EvaluationError: `base` has another metric or another number of examples.
        """
        if self.metric != base.metric:
            raise EvaluationError(
                f"The results are {base.metric} and {self.metric}, but a gain needs one metric: measure both models on "
                "one task."
            )
        if self.sums.shape != base.sums.shape:
            raise EvaluationError(
                f"The numbers of examples are {len(base.sums)} and {len(self.sums)}, but a gain needs the same "
                "examples: measure both models on one task."
            )
        sign = -1 if self.metric == "log-perplexity" else 1
        gains = []
        # One seed draws the same examples of both.
        for sums, base_sums in zip(_resample(self.sums), _resample(base.sums), strict=True):
            gains.append(sign * (_value(self.metric, sums) - _value(self.metric, base_sums)))
        gain = sign * (self.value - base.value)
        return {f"{name}_{self.metric}_gain": percentile_interval(gain, gains)}

    def describe(self, task: Task) -> dict[str, object]:
        """Return details as plain JSON values: the number of examples, sacrebleu's signature, the first five answers.

        Args:
            task: the measured task, which has the prompts and the reference answers.
        """
        details: dict[str, object] = {"metric": self.metric, "examples": len(self.sums)}
        if self.metric in _BETA:
            details["signature"] = chrf_signature(beta=_BETA[self.metric])
        if self.answers:
            pairs = zip(task.examples, self.answers, strict=True)
            details["samples"] = [
                {"prompt": example.prompt, "expected": example.answer, "answer": answer}
                for example, answer in islice(pairs, _SAMPLES)
            ]
        return details


def measure_task(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
) -> TaskResult:
    """Measure a model on a task.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer.
        task: the task, see `read_task`.
        batch_size: examples per batch; it affects speed and memory only.
        precision: precision of log-perplexity, see `score`; answers are generated in the model's own dtype.

    Raises:
        DataError: a prompt has no tokens, or for log-perplexity an answer has no token to score.
        EvaluationError: an example exceeds the model's positions, or for log-perplexity the model predicts NaN or
            infinity or the precision is unknown.
    """
    config = task.config
    if config.metric == "log-perplexity":
        examples = [Example(task.shots + example.prompt, example.answer) for example in task.examples]
        scores = score_answers(model, tokenizer, examples, batch_size=batch_size, precision=precision)
        return TaskResult(config.metric, np.stack([scores.nats, scores.tokens, scores.bytes], axis=1))
    answers = generate_answers(
        model,
        tokenizer,
        task.prompts(),
        max_new_tokens=config.max_new_tokens,
        stop=config.stop,
        batch_size=batch_size,
    )
    if config.metric in _BETA:
        sums = chrf_counts(answers, task.examples).astype(np.float64)
    else:
        correct = exact_match(answers, task.examples)
        sums = np.stack([correct, np.ones_like(correct)], axis=1)
    return TaskResult(config.metric, sums, answers)


def _value(metric: TaskMetric, sums: np.ndarray) -> float:
    if metric in _BETA:
        return chrf_of(sums, beta=_BETA[metric])
    return float(sums[0] / sums[1])


def _bits_per_byte(sums: np.ndarray) -> float:
    return float(sums[0] / (sums[2] * math.log(2)))


def _resample(sums: np.ndarray) -> np.ndarray:
    """Draw bootstrap sums over examples.

    Args:
        sums: (examples, columns); equal numbers of examples give equal draws.

    Returns:
        (resamples, columns).
    """
    generator = np.random.default_rng(0)
    count = len(sums)
    samples = []
    for _ in range(RESAMPLES):
        draw = generator.integers(count, size=count)
        weights = np.bincount(draw, minlength=count)
        samples.append(weights @ sums)
    return np.stack(samples)
