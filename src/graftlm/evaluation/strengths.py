"""A trained model at several strengths: its weights moved back towards their start.

At strength s each weight is start + s (trained - start); for fine-tuned weights the curve is that of WiSE-FT
(Wortsman et al., 2022, arXiv 2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from graftlm.data.text_sets import ONE_SET, TextSets
from graftlm.evaluation.results import Interval
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
