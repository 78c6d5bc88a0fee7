"""Paired differences between methods that were measured on the same windows of text, or items of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias, TypedDict, cast

import numpy as np

from graftlm.evaluation.benchmarks.result import item_difference
from graftlm.evaluation.intervals import RESAMPLES, percentile_interval, resample_ratios
from graftlm.evaluation.results import Interval, Results

WindowChanges: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]
"""{metric: {"nats": [...], "tokens": [...]}}, one value for each window; see `windows_of` in `strengths`."""

ItemValues: TypeAlias = Mapping[str, Sequence[float]]
"""{metric: [...]}, one value for each item of a benchmark."""


class DifferenceValues(TypedDict):
    """A difference between two rows, as plain JSON values: ids of the rows, and intervals by metric."""

    first: str
    second: str
    metrics: dict[str, dict[str, float]]


@dataclass(frozen=True)
class MethodDifference:
    """The metrics of one method minus those of another.

    Attributes:
        first: label of the method from whose metrics the others are subtracted.
        second: label of the other method.
        metrics: the differences by metric.
    """

    first: str
    second: str
    metrics: dict[str, Interval]


def method_differences(results: Results) -> list[MethodDifference]:
    """Return the differences in the details of results, see `differences_between`."""
    labels = {row.id: row.label for row in results.rows}
    found = []
    for values in cast("Sequence[DifferenceValues]", results.details.get("method_differences") or []):
        difference = MethodDifference(
            first=labels[values["first"]],
            second=labels[values["second"]],
            metrics={name: Interval.model_validate(value) for name, value in values["metrics"].items()},
        )
        found.append(difference)
    return found


def paired_differences(first: WindowChanges, second: WindowChanges) -> dict[str, Interval]:
    """Return the metrics of one method minus those of another, with intervals over the same resampled windows.

    Args:
        first: the windows of the method from whose metrics the others are subtracted.
        second: the windows of the other method.

    Returns:
        The differences in nats per token, of the metrics that both measured on the same windows.
    """
    differences = {}
    for name, windows in first.items():
        other = second.get(name)
        if other is None or windows["tokens"] != other["tokens"]:
            continue
        tokens = np.array(windows["tokens"])
        nats = np.array(windows["nats"])
        other_nats = np.array(other["nats"])
        strata = [int(count) for count in windows.get("strata", ())]
        samples, other_samples = resample_ratios([(nats, tokens), (other_nats, tokens)], RESAMPLES, 0, strata)
        mean = float((nats.sum() - other_nats.sum()) / tokens.sum())
        differences[name] = percentile_interval(mean, samples - other_samples)
    return differences


def _item_differences(first: ItemValues, second: ItemValues) -> dict[str, Interval]:
    """Return the means of one method minus those of another over the same items of the benchmarks of both."""
    differences = {}
    for name, values in first.items():
        other = second.get(name)
        if other is not None and len(other) == len(values):
            differences[name] = item_difference(values, other)
    return differences


def differences_between(
    windows: Mapping[str, WindowChanges], items: Mapping[str, ItemValues] | None = None
) -> Iterator[DifferenceValues]:
    """Yield the paired differences of all pairs of rows.

    Args:
        windows: the windows by row id.
        items: the values of the items of benchmarks by row id.
    """
    by_row = items or {}
    for first, second in combinations(dict.fromkeys([*windows, *by_row]), 2):
        metrics = paired_differences(windows.get(first, {}), windows.get(second, {}))
        metrics |= _item_differences(by_row.get(first, {}), by_row.get(second, {}))
        if metrics:
            values = {name: value.model_dump(mode="json") for name, value in metrics.items()}
            yield {"first": first, "second": second, "metrics": values}
