"""A trained model at several strengths: its weights moved back towards their start.

At strength s each weight is start + s (trained - start); for fine-tuned weights the curve is that of WiSE-FT
(Wortsman et al., 2022, arXiv 2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.evaluation.results import Interval, value_of
from graftlm.evaluation.scores import Scores, learned_name


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
    changes: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> dict[str, object]:
    """Return one point of a curve over strengths, as plain JSON values.

    Args:
        strength: share of the way from the weights' start, 0 to 1.
        metrics: the model's metrics at that strength.
        changes: the nats and tokens of each window, from `changes_by_window`.

    Returns:
        `strength`, `metrics` as in a row, and `windows`: {change: {"nats": [...], "tokens": [...]}}.
    """
    return {
        "strength": strength,
        "metrics": {name: value.model_dump(mode="json") for name, value in metrics.items()},
        "windows": windows_of(changes),
    }


def windows_of(changes: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, dict[str, list[float]]]:
    """Return the nats and tokens of each window, from `changes_by_window`, as plain JSON values."""
    return {name: {"nats": nats.tolist(), "tokens": tokens.tolist()} for name, (nats, tokens) in changes.items()}


def changes_by_window(
    backbone: Mapping[str, Scores], method: Mapping[str, Scores], own: Scores | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the change of the loss, or the divergence, in each window.

    `learned`, `learned_<set>`, `forgotten` and `own_kl` are sums of these nats over sums of these tokens, so that any
    value interpolated between two strengths has an interval.

    Args:
        backbone: the backbone's scores by evaluation set.
        method: the method's scores by evaluation set, on the same windows.
        own: the method's scores on the backbone's own text; None without such text.

    Returns:
        Summed nats and numbers of tokens, (windows,) each, by the name of the metric.
    """
    changes = {}
    if own is not None and own.kl is not None:
        changes["own_kl"] = (own.kl, own.tokens)
    for name, scores in method.items():
        learned = backbone[name].nats - scores.nats
        if name == "old":
            changes["forgotten"] = (-learned, scores.tokens)
        else:
            changes[learned_name(name)] = (learned, scores.tokens)
    return changes
