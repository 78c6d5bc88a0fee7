"""Every error that GraftLM raises on purpose.

    GraftError                    a user's mistake; the message says what was found, what was expected, what to do
    ├── RecipeError               a recipe, config or override does not fit its schema
    ├── BackboneError             a model or its tokenizer can't be loaded or used
    │   └── UnknownFamilyError    the architecture is not supported
    ├── TapError                  a graft declares a tap that the backbone does not have
    │   └── TapConflictError      two grafts declare the same tap
    ├── ArtifactError             a folder is not a complete, readable graft
    │   └── WrongBackboneError    the graft was trained on another backbone
    ├── DataError                 texts, rows or files can't be read
    ├── EvaluationError           a measurement, or a file of measurements, can't be used
    ├── TrainingError             a run can't continue
    │   └── ForgettingBudgetError the run forgot more than the recipe allows
    ├── EndpointError             a model server can't be used
    └── MissingExtraError         an optional package is not installed

The command line prints the message alone and exits with 2. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraftError(Exception):
    """A mistake that the user can correct."""


class RecipeError(GraftError):
    """A recipe, config or override does not fit its schema."""


class BackboneError(GraftError):
    """A model or its tokenizer can't be loaded or used."""


class UnknownFamilyError(BackboneError):
    """The architecture is not supported."""


class TapError(GraftError):
    """A graft declares a tap that the backbone does not have."""


class TapConflictError(TapError):
    """Two grafts declare the same tap."""


class ArtifactError(GraftError):
    """A folder is not a complete, readable graft."""


class WrongBackboneError(ArtifactError):
    """The graft was trained on another backbone."""


class DataError(GraftError):
    """Texts, rows or files can't be read."""


class EvaluationError(GraftError):
    """A measurement, or a file of measurements, can't be used."""


class TrainingError(GraftError):
    """A run can't continue."""


class ForgettingBudgetError(TrainingError):
    """The run forgot more than the recipe allows."""


class EndpointError(GraftError):
    """A model server can't be used."""


class MissingExtraError(GraftError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: run `pip install 'graftlm[{extra}]'`."
        )


def first_line(error: Exception) -> str:
    """The first line of an error's message without its full stop; the error's type where there is no message.

    Of a line that ends in a colon, as in validation errors, it is the next one, which has the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[lines[0].endswith(":") and len(lines) > 1].rstrip(".: ")[:200]


def shorten(text: str, most: int = 80) -> str:
    """`text`, shortened in the middle to about `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[1 - most // 2 :]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: ` (did you mean X?)`, or all known words when none is close."""
    names = sorted(known)
    if not names:
        return ""
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else f" (known: {', '.join(names)})"
