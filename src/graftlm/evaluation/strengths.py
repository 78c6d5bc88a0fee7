"""A trained model at several strengths: its weights moved back towards their start.

At strength s each weight is start + s (trained - start); for fine-tuned weights the curve is that of WiSE-FT
(Wortsman et al., 2022, arXiv 2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from graftlm.evaluation.results import Interval
from graftlm.evaluation.scores import Scores, learned_name


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
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(torch.lerp(start[name], trained[name], strength))
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
