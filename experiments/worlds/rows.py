"""The rows of the experiment, their searches and the declared comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from experiments.protocol import Comparison

EXPERT = {"rank": 16, "alpha": 32, "targets": ["ffn"]}
"""An expert of one world."""
ONE = {"rank": 64, "alpha": 128, "targets": ["ffn"]}
"""One LoRA of all worlds, with the parameters of four experts."""
RATES = (5e-4, 1e-3, 2e-3)
OWN = "own"
ALL = "all"
BACKBONE = "backbone"
LOOKUP = "lookup"
LOOKUP_ROUTED = "lookup-routed"

_NAMES = {"embedder": {"name": "words", "centroids": "all"}, "threshold": 0.5}
_STATES: dict[str, Any] = {"embedder": {"name": "backbone"}}
_FIXED = {"fixed": {ALL: 1.0}}

Trained = Literal["own", "all"]


class MixtureRow(NamedTuple):
    """A row that mixes trained experts.

    Attributes:
        label: label of the row.
        trained: the training whose experts it mixes.
        settings: settings of the graft or of the merge, of which a search chooses one.
        is_merge: whether the settings are those of PEFT's merge.
    """

    label: str
    trained: Trained
    settings: tuple[Mapping[str, Any], ...]
    is_merge: bool = False


def _with_windows(routing: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return routes every two tokens, by different numbers of last tokens."""
    return tuple({**routing, "every": 2, "window": window} for window in (16, 24, 32, None))


def _by_prompt(routing: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return routes by the prompt alone, with one expert or all, each with the default temperature and a higher one."""
    by_prompt = {**routing, "reads": "prompt"}
    return (
        {**by_prompt, "top": None, "temperature": 0.03},
        {**by_prompt, "top": None, "temperature": 0.3},
        {**by_prompt, "top": 1, "temperature": 0.03},
        {**by_prompt, "top": 1, "temperature": 0.3},
    )


def _merges(**merge: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({**merge, "weight": weight} for weight in (0.25, 0.5, 0.75, 1.0))


ROWS = {
    "routed": MixtureRow("routed every two tokens by taught words", OWN, _with_windows(_NAMES)),
    "routed-prompt": MixtureRow("routed by taught words of the prompt", OWN, _by_prompt(_NAMES)),
    "states": MixtureRow("routed every two tokens by hidden states", OWN, _with_windows(_STATES)),
    "states-prompt": MixtureRow("routed by hidden states of the prompt", OWN, _by_prompt(_STATES)),
    "sum": MixtureRow("sum of all experts (PEFT, cat)", OWN, _merges(combination_type="cat"), is_merge=True),
    "ties": MixtureRow("TIES (PEFT)", OWN, _merges(combination_type="ties", density=0.5), is_merge=True),
    "one": MixtureRow("one LoRA of all worlds", ALL, (_FIXED,)),
    "one-routed": MixtureRow(
        "one LoRA of all worlds, where the prompt has a taught word", ALL, ({**_NAMES, "reads": "prompt"},)
    ),
}

BOTH: dict[str, tuple[str, float | None]] = {
    "both-half": ("both experts of the question's worlds, told, at half strength", 0.5),
    "both": ("both experts of the question's worlds, told, at full strength", 1.0),
    "switched": ("each expert of the question's worlds, told, for its own sentence", None),
}
"""Rows that were added when results were known, to find why mixtures fail, with the weight of each of both experts."""

SEARCH_SEED = 101
"""The seed of the facts of the searches."""
SEEDS = (6, 7, 8)
"""The seeds of the declared comparisons. No other experiment has facts of these seeds."""

DECLARED = (
    Comparison("routed", "routed-prompt", "across"),
    Comparison("routed", "one", "across"),
    Comparison("routed", "sum", "across"),
    Comparison("routed", OWN, "recall", margin=0.05),
    Comparison("routed", "one", "locality_near"),
)
"""The primary comparisons, which the README lists."""
COMPARED_MIXTURES = ("routed", "routed-prompt", "sum")
"""The mixtures of these comparisons, whose experts have a rate that was searched without them."""
