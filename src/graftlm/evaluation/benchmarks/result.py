"""A model's results on the items of a benchmark, and their change from another model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from graftlm.errors import EvaluationError
from graftlm.evaluation.intervals import bootstrap, equal_differences_interval, share_interval
from graftlm.evaluation.results import Interval
from graftlm.files.writing import write_atomically


class Sample(TypedDict):
    """An item of a benchmark: its prompt, the model's answer, and the value of the answer."""

    prompt: str
    answer: str
    value: float


class BenchmarkValues(TypedDict):
    """A `BenchmarkResult` as plain JSON values."""

    metric: str
    values: list[float]
    further: dict[str, float]
    left_out: int
    samples: list[Sample]


@dataclass(frozen=True)
class BenchmarkResult:
    """A model's results on a benchmark.

    Attributes:
        metric: name of the metric in lm-evaluation-harness.
        values: the metric of each item, in the order of the items, which is the same for all models.
        further: means of the task's other metrics by name.
        left_out: number of items that can't be scored, such as prompts of IFEval that need a language detector.
        samples: the first items.
    """

    metric: str
    values: list[float]
    further: dict[str, float] = field(default_factory=dict)
    left_out: int = 0
    samples: list[Sample] = field(default_factory=list)

    def metrics(self, label: str) -> dict[str, Interval]:
        """Return the mean over items with its 95% interval: Wilson's for shares, else a bootstrap.

        Args:
            label: the name of the metric.
        """
        is_share = all(value in (0.0, 1.0) for value in self.values)
        if is_share:
            return {label: share_interval(round(sum(self.values)), len(self.values))}
        return {label: bootstrap(self.values)}

    def change(self, label: str, base: BenchmarkResult) -> dict[str, Interval]:
        """Return the mean minus that of another model on the same items, with its paired 95% interval.

        Args:
            label: the name of the metric; that of the change is `<label>_change`.
            base: the other model's result.

        Raises:
            EvaluationError: the other result is of another metric or of other items.
        """
        if (self.metric, len(self.values)) != (base.metric, len(base.values)):
            raise EvaluationError(
                f"The results on {label} are {len(base.values)} items of {base.metric} and {len(self.values)} of "
                f"{self.metric}, but a change needs the same items: measure both models on one task."
            )
        return {f"{label}_change": item_difference(self.values, base.values)}

    def to_json(self) -> BenchmarkValues:
        """Return the result as plain JSON values."""
        return cast("BenchmarkValues", asdict(self))

    @classmethod
    def from_json(cls, values: BenchmarkValues) -> BenchmarkResult:
        """Make a result from the values that `to_json` returned."""
        return cls(**values)


def write_results(results: Mapping[str, BenchmarkResult], path: Path) -> None:
    """Write results by label as JSON.

    Raises:
        EvaluationError: the file can't be written.
    """
    values = {label: result.to_json() for label, result in results.items()}
    write_atomically(path, json.dumps(values).encode())


def read_results(path: Path) -> dict[str, BenchmarkResult]:
    """Read results by label that `write_results` wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return {label: BenchmarkResult.from_json(result) for label, result in values.items()}


def item_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the mean of one model's values minus another's, bootstrapped over items.

    If all differences are equal, and are differences of shares, the interval follows from the number of items.

    Args:
        first: the values of the items, (items,).
        second: the other model's values of the same items, (items,).
    """
    differences = np.asarray(first) - np.asarray(second)
    if len(differences) and np.ptp(differences) == 0 and abs(differences[0]) <= 1:
        return equal_differences_interval(float(differences[0]), len(differences))
    return bootstrap(differences)
