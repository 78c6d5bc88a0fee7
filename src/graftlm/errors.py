"""Every error that GraftLM raises on purpose.

    GraftError                    the user can mend it; the message says what was found, expected, and what to do
    ├── RecipeError               a recipe, a config or an override does not fit
    ├── BackboneError             a model or its tokenizer can't be loaded or used
    │   └── UnknownFamilyError    no row says where this architecture keeps its layers
    ├── TapError                  a graft asks for a place that the backbone does not have
    │   └── TapConflictError      two grafts claim the same place
    ├── ArtifactError             a folder is not a whole, readable graft
    │   └── WrongBackboneError    the graft was trained on another backbone
    ├── DataError                 text, rows or files can't be read as asked
    ├── EvaluationError           a measurement, or a file of measurements, can't be used
    ├── TrainingError             a run can't go on
    │   └── ForgettingBudgetError the run forgot more than the recipe allows
    ├── EndpointError             a server that models are asked through can't be used
    └── MissingExtraError         an optional package is not installed

The command line prints the message alone and exits with 2; anything else is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraftError(Exception):
    """A mistake that the user can mend."""


class RecipeError(GraftError):
    """A recipe, a config or an override does not fit its schema."""


class BackboneError(GraftError):
    """A model or its tokenizer can't be loaded or used."""


class UnknownFamilyError(BackboneError):
    """No row of `backbone.sites` describes this architecture."""


class TapError(GraftError):
    """A graft asks for a place that the backbone does not have."""


class TapConflictError(TapError):
    """Two grafts claim the same place."""


class ArtifactError(GraftError):
    """A folder is not a whole, readable graft."""


class WrongBackboneError(ArtifactError):
    """The graft was trained on another backbone."""


class DataError(GraftError):
    """Text, rows or files can't be read as asked."""


class EvaluationError(GraftError):
    """A measurement, or a file of measurements, can't be used."""


class TrainingError(GraftError):
    """A run can't go on."""


class ForgettingBudgetError(TrainingError):
    """The run forgot more than the recipe allows."""


class EndpointError(GraftError):
    """A server that models are asked through can't be used."""


class MissingExtraError(GraftError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: run `pip install 'graftlm[{extra}]'`."
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest known word, or the known words when none is near."""
    names = sorted(known)
    if not names:
        return ""
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else f" (known: {', '.join(names)})"
