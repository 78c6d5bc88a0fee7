"""What methods forget at equal learning: curves of learned against lost, at several learning rates and strengths.

A path is one training measured at rising strengths, from the backbone (0, 0) to the trained weights, with straight
lines between the points. At a level of learning, the loss of a path is its loss where it first reaches the level, and
the loss of a method is the lowest of its paths. Intervals are 95% percentile bootstraps over windows of test text, with
the same resamples for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graftlm.errors import EvaluationError
from graftlm.evaluation.intervals import RESAMPLES, percentile_interval
from graftlm.evaluation.results import Interval

LOSSES = ("forgotten", "own_kl")
LEVEL = 0.9
"""The level at which methods are compared, as a share of what every method can learn."""

Points = Sequence[Mapping[str, Any]]
"""The points of one training, as `strengths` in the details of a measurement."""


class Frontier:
    """The curves of several methods on the same windows.

    Args:
        paths: by method, the points of each of its trainings at rising strengths.

    Attributes:
        losses: the losses that all points have, of `forgotten` and `own_kl`.

    Raises:
        EvaluationError: there are no points, some lack `learned` or have no loss in common with the others, or the
            points of a value come from different windows.
    """

    def __init__(self, paths: Mapping[str, Sequence[Points]]) -> None:
        self.paths = paths
        windows = []
        for trainings in paths.values():
            for points in trainings:
                windows += [point["windows"] for point in points]
        self.losses = [name for name in LOSSES if windows and all(name in each for each in windows)]
        if not windows:
            raise EvaluationError(
                "There are no points to compare, but at least one is expected: pass the `strengths` in the details of "
                "a measurement."
            )
        if not all("learned" in each for each in windows):
            raise EvaluationError("Some points lack learned, but every point needs it: name new text under data.test.")
        if not self.losses:
            raise EvaluationError(
                "The points have no loss in common, but all need forgotten or all need own_kl: name old text under "
                "data.test, or set evaluation.own_tokens."
            )
        # (1 + resamples, windows); the first row is the sample itself.
        self._weights: dict[str, np.ndarray] = {}
        for seed, name in enumerate(("learned", *self.losses)):
            self._weights[name] = _resampling_weights(name, windows, seed)

    def level(self) -> float:
        """Return the level of learning at which methods are compared, in nats per token.

        It is nine tenths of the reach of the method that learned least. It is 0 or less if a method learned nothing.
        """
        return LEVEL * min(self.reach(method) for method in self.paths)

    def reach(self, method: str) -> float:
        """Return the most that a method learned on any of its paths, in nats per token."""
        largest = [self._curve("learned", points)[:, 0].max() for points in self.paths[method]]
        return float(max(largest))

    def at_level(self, level: float) -> dict[str, dict[str, Interval]]:
        """Return the losses of all methods at a level of learning, in nats per token.

        Args:
            level: the level, in nats per token. A path that ends below it counts with its last point.

        Returns:
            {method: {loss: interval}}.
        """
        found: dict[str, dict[str, Interval]] = {}
        for method in self.paths:
            found[method] = {}
            for name in self.losses:
                values = self._lowest(method, name, level)
                found[method][name] = _interval_of(values)
        return found

    def difference(self, method: str, other: str, name: str, level: float) -> Interval:
        """Return a loss of one method minus that of another at a level, over the same resamples.

        Args:
            method: name of the method from whose loss the other is subtracted.
            other: name of the method whose loss is subtracted.
            name: name of the loss, one of `losses`.
            level: the level of learning, in nats per token.

        Returns:
            The difference in nats per token, with its paired interval.
        """
        losses = self._lowest(method, name, level)
        other_losses = self._lowest(other, name, level)
        return _interval_of(losses - other_losses)

    def measured(self, method: str, name: str) -> list[list[list[float]]]:
        """Return the measured points of a method, for plots.

        Args:
            method: name of the method.
            name: name of the loss, one of `losses`.

        Returns:
            For each path, [learned, lost] at each point, in nats per token. The first point is the backbone's, [0, 0].
        """
        paths = []
        for points in self.paths[method]:
            learned = self._curve("learned", points)[:, 0]
            lost = self._curve(name, points)[:, 0]
            paths.append(np.stack([learned, lost], axis=1).tolist())
        return paths

    def _lowest(self, method: str, name: str, level: float) -> np.ndarray:
        """Return the lowest loss of a method's paths at a level, (1 + resamples,).

        The paths that reach the level count; where no path reaches it, the path that learned most counts.
        """
        path_losses = []
        path_reaches = []
        for points in self.paths[method]:
            learned = self._curve("learned", points)
            lost = self._curve(name, points)
            path_losses.append(_first_crossing(learned, lost, level))
            path_reaches.append(learned.max(axis=0))
        losses = np.array(path_losses)  # (paths, 1 + resamples)
        reaches = np.array(path_reaches)
        reached = reaches >= level
        is_furthest = reaches == reaches.max(axis=0)
        allowed = np.where(reached.any(axis=0), reached, is_furthest)
        return np.where(allowed, losses, np.inf).min(axis=0)

    def _curve(self, name: str, points: Points) -> np.ndarray:
        """Return a value along a path, in nats per token, (1 + points, 1 + resamples)."""
        weights = self._weights[name]
        windows = [point["windows"][name] for point in points]
        nats = np.array([each["nats"] for each in windows])
        tokens = np.array(windows[0]["tokens"])
        resampled_nats = nats @ weights.T
        resampled_tokens = weights @ tokens
        values = resampled_nats / resampled_tokens
        backbone = np.zeros((1, values.shape[1]))
        return np.concatenate([backbone, values])


def _interval_of(values: np.ndarray) -> Interval:
    """Return the interval of a value and its bootstrap samples, (1 + resamples,)."""
    return percentile_interval(float(values[0]), values[1:])


def _resampling_weights(
    name: str, windows: Sequence[Mapping[str, Mapping[str, Sequence[int]]]], seed: int
) -> np.ndarray:
    """Return how often each resample draws each window, (1 + resamples, windows); the first row draws all once."""
    tokens = {(tuple(each[name]["tokens"]), tuple(each[name].get("strata", ()))) for each in windows}
    if len(tokens) > 1:
        raise EvaluationError(f"The points of {name} come from different windows: measure all of them on one text.")
    ((of_each_window, strata),) = tokens
    generator = np.random.default_rng(seed)
    drawn = []
    for count in strata or (len(of_each_window),):  # the windows of each set of a mean by themselves
        probabilities = np.full(count, 1 / count)
        drawn.append(generator.multinomial(count, probabilities, RESAMPLES))
    sample_itself = np.ones((1, len(of_each_window)))
    return np.concatenate([sample_itself, np.concatenate(drawn, axis=1)])


def _first_crossing(learned: np.ndarray, loss: np.ndarray, level: float) -> np.ndarray:
    """Return the loss at which a path first learned `level`, or at which it learned most if it never does.

    Args:
        learned: what was learned along the path, (points, resamples).
        loss: what was lost, (points, resamples).
        level: the level, in the unit of `learned`.

    Returns:
        The losses, (resamples,), interpolated between the two points around the level.
    """
    above = learned >= level
    crosses = above.any(axis=0)
    first = np.where(crosses, above.argmax(axis=0), learned.argmax(axis=0))
    before = np.maximum(first - 1, 0)
    columns = np.arange(learned.shape[1])
    learned_before = learned[before, columns]
    learned_first = learned[first, columns]
    loss_before = loss[before, columns]
    loss_first = loss[first, columns]
    rise = learned_first - learned_before
    rises = rise > 0
    share = (level - learned_before) / np.where(rises, rise, 1)
    share = np.where(crosses & rises, share, 1)
    return loss_before + share * (loss_first - loss_before)
