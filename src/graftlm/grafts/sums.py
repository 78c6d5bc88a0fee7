"""Weighted sums of grafts: `danish:0.7+legal:0.3` names the grafts, whose changes of the backbone are multiplied.

A graft with the weight w adds w f(x) to each activation to which it adds f(x) alone, with the same gates, routes and
factors. f is evaluated on the activations of the model with the whole sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from graftlm.backbone import Call, Tap
from graftlm.errors import GraftError
from graftlm.grafts.base import Graft
from graftlm.grafts.stack import Stack

MOST_TERMS = 16
"""Largest number of grafts of a sum."""
LARGEST_WEIGHT = 100.0
"""Largest size of a weight; far larger ones overflow the activations."""
WEIGHT_RANGE = f"a number from {-LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g} other than 0"
"""What a weight is, for messages."""
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", re.IGNORECASE)


def read_sum(text: str) -> dict[str, float]:
    """Return the weight of each graft of a sum, such as `danish:0.7+legal:0.3`. A weight that is left out is 1.

    Args:
        text: the names, joined by +, each with a colon and a number behind it, or without. Spaces around names and
            numbers do not count.

    Raises:
        GraftError: a name is missing or repeated, a weight is 0, no number or larger than 100 in size, or there are
            too many.
    """
    parts = text.split("+")
    if len(parts) > MOST_TERMS:
        raise GraftError(
            f"The sum {text[:80]!r} has {len(parts)} terms, but at most {MOST_TERMS} are expected: leave some out."
        )
    weights: dict[str, float] = {}
    for part in parts:
        name, weight = read_term(part)
        if name in weights:
            raise GraftError(f"The mixture {text[:200]!r} names {name[:80]} twice: name each graft once.")
        weights[name] = weight
    return weights


def read_term(text: str) -> tuple[str, float]:
    """Return the name and the weight of a term of a sum, such as `danish:0.7`.

    Raises:
        GraftError: the name is missing, or the weight is 0, no number or larger than 100 in size.
    """
    name, number = split_term(text)
    weight = float(number) if _NUMBER.fullmatch(number) else 0.0
    if not name or not is_weight(weight):
        raise GraftError(
            f"The term {text[:80]!r} is no graft with a weight, which is {WEIGHT_RANGE}: write it as in "
            "danish:0.7+legal:0.3, or leave the graft out."
        )
    return name, weight


def split_term(text: str) -> tuple[str, str]:
    """Return the name of a term of a sum and the text of its weight, 1 if it is left out, without spaces around."""
    name, colon, number = text.rpartition(":")
    if not colon:
        name, number = text, "1"
    return name.strip(), number.strip()


def check_weight(name: str, graft: Graft, weight: float) -> None:
    """Raise `GraftError` for a weight of 0 or over 100 in size, and for another than 1 if the kind takes none."""
    if not is_weight(weight):
        raise GraftError(
            f"The graft {name} has the weight {weight:g}, but {WEIGHT_RANGE} is expected: change it, or leave the "
            "graft out."
        )
    if weight == 1:
        return
    for member in graft.grafts().values() if isinstance(graft, Stack) else [graft]:
        if not member.takes_weight:
            raise GraftError(
                f"The graft {name} has the weight {weight:g}, but the effect of the kind {member.config.kind} is no "
                "sum that a weight could multiply: leave the weight out."
            )


def is_weight(weight: float) -> bool:
    """Return whether a number is a weight. Comparisons with NaN are false."""
    return 0 < abs(weight) <= LARGEST_WEIGHT


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
