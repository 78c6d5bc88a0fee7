"""Weighted sums of grafts: `danish:0.7+legal:0.3` names the grafts, whose changes of the backbone are multiplied.

A graft with the weight w adds w f(x) to each activation to which it adds f(x) alone, with the same gates, routes and
factors. f is evaluated on the activations of the model with the whole sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from graftlm.backbone import Call, Tap
from graftlm.errors import GraftError
from graftlm.grafts.base import Graft

MOST_TERMS = 16
"""Largest number of grafts of a sum."""
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", re.IGNORECASE)


def read_sum(text: str) -> dict[str, float]:
    """Return the weight of each graft of a sum, such as `danish:0.7+legal:0.3`. A weight that is left out is 1.

    Args:
        text: the names, joined by +, each with a colon and a number behind it, or without.

    Raises:
        GraftError: a name is missing or repeated, a weight is no finite number other than 0, or there are too many.
    """
    parts = text.split("+")
    if len(parts) > MOST_TERMS:
        raise GraftError(
            f"The sum {text[:80]!r} has {len(parts)} terms, but at most {MOST_TERMS} are expected: leave some out."
        )
    weights: dict[str, float] = {}
    for part in parts:
        name, colon, number = part.rpartition(":")
        if not colon:
            name, number = part, "1"
        weight = float(number) if _NUMBER.fullmatch(number) else 0.0
        if not name or not math.isfinite(weight) or weight == 0:
            raise GraftError(
                f"The term {part[:80]!r} is no graft with a weight, a finite number other than 0: write it as in "
                "danish:0.7+legal:0.3, or leave the graft out."
            )
        if name in weights:
            raise GraftError(f"The mixture {text[:200]!r} names {name[:80]} twice: name each graft once.")
        weights[name] = weight
    return weights


def check_weight(name: str, graft: Graft, weight: float) -> None:
    """Raise `GraftError` for the weight 0 or one that is not finite, and for another than 1 if the kind takes none."""
    if not math.isfinite(weight) or weight == 0:
        raise GraftError(
            f"The graft {name} has the weight {weight:g}, but a finite number other than 0 is expected: change it, or "
            "leave the graft out."
        )
    if weight != 1 and not graft.takes_weight:
        raise GraftError(
            f"The graft {name} has the weight {weight:g}, but it is of the kind {graft.config.kind}, whose effect is "
            "no sum that a weight could multiply: leave the weight out."
        )


def weighted_taps(graft: Graft, weight_of: Callable[[Call], float]) -> list[Tap]:
    """Return the taps of a graft, whose additions are multiplied by a weight.

    Args:
        graft: a graft that takes a weight; others are left as they are.
        weight_of: returns the weight in a pass.
    """
    taps = graft.taps()
    if not graft.takes_weight:
        return taps
    return [
        replace(tap, function=partial(_weighted, weight_of, tap.function)) if tap.act == "add" else tap for tap in taps
    ]


def _weighted(
    weight_of: Callable[[Call], float], function: Callable[..., Tensor | None], call: Call, *tensors: Tensor
) -> Tensor | None:
    """Return what a tap adds, multiplied by the weight of the pass."""
    result = function(call, *tensors)
    weight = weight_of(call)
    return result if result is None or weight == 1 else weight * result
