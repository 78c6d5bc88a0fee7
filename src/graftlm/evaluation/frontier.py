"""What methods forget at equal learning: their curves of learned against lost, at several rates and strengths.

A path is one training measured at rising strengths, from the backbone (0, 0) to the trained weights, with straight
lines between. At a level of learning, a path's loss is that where it first reaches the level, and a method's is the
lowest of its paths. Intervals are 95% percentile bootstraps over windows of test text, resampled alike for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graftlm.errors import EvaluationError
from graftlm.evaluation.metrics import percentile_interval
from graftlm.evaluation.results import Interval

LOSSES = ("forgotten", "own_kl")
LEVEL = 0.9
_RESAMPLES = 1000

Points = Sequence[Mapping[str, Any]]  # of one training, as `strengths` in the details of a measurement


class Frontier:
    """The curves of several methods on the same windows; `paths` has the points of each training, by method.

    Raises EvaluationError if the points lack what was learned or lost, or come from different windows.
    """

    def __init__(self, paths: Mapping[str, Sequence[Points]]) -> None:
        self.paths = paths
        everything = [point["windows"] for of_method in paths.values() for points in of_method for point in points]
        self.losses = [name for name in LOSSES if everything and all(name in windows for windows in everything)]
        if not self.losses or not all("learned" in windows for windows in everything):
            raise EvaluationError(
                "Curves need what was learned and what was lost: name test texts old and new under data.test."
            )
        self._weights: dict[str, np.ndarray] = {}  # (1 + resamples, windows); the first row is the sample itself
        for seed, name in enumerate(("learned", *self.losses)):
            tokens = {tuple(windows[name]["tokens"]) for windows in everything}
            if len(tokens) > 1:
                raise EvaluationError(f"The points of {name} come from different windows: measure all on one text.")
            count = len(next(iter(tokens)))
            drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), _RESAMPLES)
            self._weights[name] = np.concatenate([np.ones((1, count)), drawn])

    def level(self) -> float:
        """Nine tenths of what every method can learn: the level at which they are compared, in nats per token."""
        return LEVEL * min(self.reach(method) for method in self.paths)

    def reach(self, method: str) -> float:
        """The most that a method learned on any path, in nats per token."""
        return float(max(self._curve("learned", points)[:, 0].max() for points in self.paths[method]))

    def at_level(self, level: float) -> dict[str, dict[str, Interval]]:
        """By method, each loss at a level of learning, in nats per token; of a path that ends below it, the last."""
        return {
            method: {
                name: percentile_interval(float(values[0]), values[1:])
                for name in self.losses
                for values in [self._lowest(method, name, level)]
            }
            for method in self.paths
        }

    def difference(self, method: str, other: str, name: str, level: float) -> Interval:
        """A loss of one method minus that of another at a level, over the same resamples."""
        values = self._lowest(method, name, level) - self._lowest(other, name, level)
        return percentile_interval(float(values[0]), values[1:])

    def measured(self, method: str, name: str) -> list[list[list[float]]]:
        """By path, what was learned and the loss at each measured point, from the backbone's (0, 0) on."""
        return [
            [[float(x[0]), float(y[0])] for x, y in zip(*(self._curve(n, p) for n in ("learned", name)), strict=True)]
            for p in self.paths[method]
        ]

    def _lowest(self, method: str, name: str, level: float) -> np.ndarray:
        """(1 + resamples,): a method's loss at a level, of its paths that reach it; with none, of the furthest."""
        losses, reached, reach = [], [], []
        for points in self.paths[method]:
            learned = self._curve("learned", points)
            losses.append(_first_crossing(learned, self._curve(name, points), level))
            reach.append(learned.max(axis=0))
            reached.append(reach[-1] >= level)
        allowed = np.array(reached) | ((np.array(reach) == np.max(reach, axis=0)) & ~np.any(reached, axis=0))
        return np.where(allowed, np.array(losses), np.inf).min(axis=0)

    def _curve(self, name: str, points: Points) -> np.ndarray:
        """(1 + points, 1 + resamples): a value along a path, in nats per token."""
        weights = self._weights[name]
        nats = np.array([point["windows"][name]["nats"] for point in points])
        tokens = np.array(points[0]["windows"][name]["tokens"])
        values = (nats @ weights.T) / (weights @ tokens)
        return np.concatenate([np.zeros((1, values.shape[1])), values])


def _first_crossing(learned: np.ndarray, loss: np.ndarray, level: float) -> np.ndarray:
    """(resamples,): the loss where each path first learned `level`; where it learned most, if it never does.

    `learned` and `loss` are (points, resamples), and `level` is in the unit of `learned`.
    """
    above = learned >= level
    columns = np.arange(learned.shape[1])
    first = np.where(above.any(axis=0), above.argmax(axis=0), learned.argmax(axis=0))
    before = np.maximum(first - 1, 0)
    rise = learned[first, columns] - learned[before, columns]
    share = (level - learned[before, columns]) / np.where(rise > 0, rise, 1)
    share = np.where(above.any(axis=0) & (rise > 0), share, 1)
    return loss[before, columns] + share * (loss[first, columns] - loss[before, columns])
