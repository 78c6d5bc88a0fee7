"""A trained model at several strengths: its weights moved back towards their start.

At strength s each weight is start + s (trained - start); for fine-tuned weights the curve is that of WiSE-FT
(Wortsman et al., 2022, arXiv 2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.data.text_sets import ONE_SET, TextSets
from graftlm.evaluation.results import Interval, value_of
from graftlm.evaluation.scores import Scores, difference_name, with_equal_shares


class WindowSums(NamedTuple):
    """The change of a loss in each window of text.

    Attributes:
        nats: summed changes, (windows,).
        tokens: numbers of tokens, (windows,); of a mean over sets, over the sum of their set.
        strata: number of windows of each set of a mean; empty for one set.
    """

    nats: np.ndarray
    tokens: np.ndarray
    strata: tuple[int, ...] = ()


class StrengthConfig(Config):
    """How the strength of a trained model is chosen on validation text, which is neither trained nor tested on."""

    old: list[SourceConfig] = Field(min_length=1, description="Validation text of the old domain.")
    new: list[SourceConfig] = Field(min_length=1, description="Validation text of the new domain.")
    values: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [0.25, 0.5, 0.75, 1.0],
        min_length=1,
        description="Shares of the way from the weights' start to where training took them.",
    )
    budget: float | None = Field(
        None,
        ge=0,
        description="Nats per token of the old text that may be lost: the strength that learned most within it is "
        "chosen. By default that with the largest difference of learned and forgotten.",
    )

    def choose(self, points: Mapping[float, Mapping[str, Interval]]) -> float:
        """Return the strength to take. If none is within the budget, it is the one that forgot least.

        Args:
            points: `learned` and `forgotten` at each strength, on the validation text.
        """
        learned = {strength: value_of(metrics["learned"]) for strength, metrics in points.items()}
        forgotten = {strength: value_of(metrics["forgotten"]) for strength, metrics in points.items()}
        if self.budget is None:
            return max(points, key=lambda strength: learned[strength] - forgotten[strength])
        allowed = [strength for strength in points if forgotten[strength] <= self.budget]
        if not allowed:
            return min(points, key=forgotten.__getitem__)
        return max(allowed, key=learned.__getitem__)


@torch.no_grad()
def move_back(weights: Mapping[str, nn.Parameter], start: Mapping[str, Tensor], strength: float) -> None:
    """Set weights to start + strength (weight - start), for good.

    Args:
        weights: trained weights by name, which are changed in place.
        start: the same weights before training, by name, on the same device.
        strength: share of the way from the start to the trained weights, 0 to 1.
    """
    for name, weight in weights.items():
        weight.copy_(torch.lerp(start[name], weight, strength))


@contextmanager
def weights_moved_back(
    weights: Mapping[str, nn.Parameter], start: Mapping[str, Tensor], strength: float
) -> Iterator[None]:
    """Set weights to start + strength (weight - start) in a `with` block, and restore them afterwards.

    Args:
        weights: trained weights by name, which are changed in place.
        start: the same weights before training, by name, on the same device.
        strength: share of the way from the start to the trained weights, 0 to 1.
    """
    trained = {name: weight.detach().clone() for name, weight in weights.items()}
    move_back(weights, start, strength)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(trained[name])


def strength_point(
    strength: float,
    metrics: Mapping[str, Interval],
    changes: Mapping[str, WindowSums],
) -> dict[str, object]:
    """Return one point of a curve over strengths, as plain JSON values.

    Args:
        strength: share of the way from the weights' start, 0 to 1.
        metrics: the model's metrics at that strength.
        changes: the nats and tokens of each window, from `changes_by_window`.

    Returns:
        `strength`, `metrics` as in a row, and `windows`, see `windows_of`.
    """
    return {
        "strength": strength,
        "metrics": {name: value.model_dump(mode="json") for name, value in metrics.items()},
        "windows": windows_of(changes),
    }


def windows_of(changes: Mapping[str, WindowSums]) -> dict[str, dict[str, list[float]]]:
    """Return the nats and tokens of each window, from `changes_by_window`, as plain JSON values.

    Returns:
        {change: {"nats": [...], "tokens": [...]}}; a mean over sets also has "strata", the windows of each set.
    """
    windows: dict[str, dict[str, list[float]]] = {}
    for name, sums in changes.items():
        windows[name] = {"nats": sums.nats.tolist(), "tokens": sums.tokens.tolist()}
        if sums.strata:
            windows[name]["strata"] = list(sums.strata)
    return windows


def changes_by_window(
    backbone: Mapping[str, Scores],
    method: Mapping[str, Scores],
    own: Scores | None,
    sets: TextSets = ONE_SET,
) -> dict[str, WindowSums]:
    """Return the change of the loss, or the divergence, in each window.

    `learned`, `learned_<set>`, `forgotten`, `forgotten_<set>` and `own_kl` are sums of these nats over sums of these
    tokens, so that any value interpolated between two strengths has an interval.

    Args:
        backbone: the backbone's scores by evaluation set.
        method: the method's scores by evaluation set, on the same windows.
        own: the method's scores on the backbone's own text; None without such text.
        sets: the names of the sets of new and old text.

    Returns:
        The sums by the name of the metric.
    """
    changes = {}
    if own is not None and own.kl is not None:
        changes["own_kl"] = WindowSums(own.kl, own.tokens)
    for name, scores in method.items():
        learned = backbone[name].nats - scores.nats
        if sets.is_old(name):
            learned = -learned
        changes[difference_name(name, sets)] = WindowSums(learned, scores.tokens)
    for domain, metric, names in (("new", "learned", sets.new), ("old", "forgotten", sets.old)):
        measured = sets.of_domain(domain, method)
        if names and measured:
            of_sets = [changes[difference_name(name, sets)] for name in measured]
            changes[metric] = WindowSums(*with_equal_shares([(sums.nats, sums.tokens) for sums in of_sets]))
    return changes
