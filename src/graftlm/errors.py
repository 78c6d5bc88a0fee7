"""Every error that GraftLM raises on purpose.

    GraftError                    a user's mistake; the message says what was found, what was expected, what to do
    ├── RecipeError               a recipe, config or override does not fit its schema
    ├── BackboneError             a model or its tokenizer can't be loaded or used
    │   └── UnknownFamilyError    the architecture is not supported
    ├── TapError                  a graft declares a tap that the backbone does not have
    │   └── TapConflictError      two grafts declare the same tap
    ├── ArtifactError             a folder is not a complete, readable graft
    │   └── WrongBackboneError    the graft was trained on another backbone, or with other frozen models
    ├── DataError                 texts, rows or files can't be read or used
    ├── EvaluationError           a measurement, or a file of measurements, can't be used
    ├── TrainingError             a training run can't start or continue
    │   └── ForgettingBudgetError the run forgot more than the recipe allows
    ├── EndpointError             a model server can't be used
    └── MissingExtraError         an optional package is not installed

The command line prints the message alone and exits with 2. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class GraftError(Exception):
    """A mistake that the user can correct."""


class RecipeError(GraftError):
    """A recipe, config or override does not fit its schema."""


class BackboneError(GraftError):
    """A model or its tokenizer can't be loaded or used."""


class UnknownFamilyError(BackboneError):
    """The architecture of a model is not supported."""


class TapError(GraftError):
    """A graft declares a tap that the backbone does not have."""


class TapConflictError(TapError):
    """Two grafts declare the same tap."""


class ArtifactError(GraftError):
    """A folder is not a complete, readable graft."""


class WrongBackboneError(ArtifactError):
    """The graft was built for another backbone, or trained with other frozen models than those found."""


class DataError(GraftError):
    """Texts, rows or files can't be read or used."""


class EvaluationError(GraftError):
    """A measurement, or a file of measurements, can't be used."""


class TrainingError(GraftError):
    """A training run can't start or continue."""


class ForgettingBudgetError(TrainingError):
    """The run forgot more than the recipe allows."""


class EndpointError(GraftError):
    """A model server can't be used."""


class MissingExtraError(GraftError):
    """An optional package is not installed.

    Args:
        package: name of the package, as in messages of pip.
        extra: the extra of graftlm that installs it.
        purpose: what needs the package, as the subject of a sentence.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: run `pip install 'graftlm[{extra}]'`."
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message without its full stop, cut to 200 characters.

    If the line ends with a colon, as in validation errors, the next line is returned, which has the cause. For an error
    without a message, the name of its type is returned.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[0]
    if line.endswith(":") and len(lines) > 1:
        line = lines[1]
    return line.rstrip(".: ")[:200]


def shorten(text: str, most: int = 80) -> str:
    """Replace the middle of a text with an ellipsis if the text has more than `most` characters.

    Args:
        text: any text.
        most: maximum length of the result, at least 4.
    """
    if len(text) <= most:
        return text
    half = most // 2 - 1
    return f"{text[:half]}…{text[-half:]}"


def first_of(items: Sequence[str], most: int) -> str:
    """Return the first items with commas between them, and the number of others, as in `a, b and 3 more`.

    Args:
        items: texts for a sentence.
        most: number of items to show.
    """
    shown = ", ".join(items[:most])
    others = len(items) - most
    return f"{shown} and {others:,} more" if others > 0 else shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown word, as the end of a clause.

    Args:
        word: the unknown word.
        known: all known words.

    Returns:
        ` (did you mean X?)` with the most similar known word; ` (known: X, Y)` with all of them if none is similar; an
        empty string if there are none.
    """
    names = sorted(known)
    if not names:
        return ""
    similar = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if similar:
        # Of similar names, one that the word continues or begins is the likelier one: asks is ask rather than tasks.
        begun = [name for name in similar if word.startswith(name) or name.startswith(word)]
        return f" (did you mean {(begun or similar)[0]}?)"
    return f" (known: {', '.join(names)})"
