"""Boundaries of rows and documents: where windows of a token stream begin and end."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from graftlm.data.marked_ids import is_start, pad_row
from graftlm.errors import DataError, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Boundaries = Literal["separate", "joined", "whole"]
"""How documents share rows; see `DataConfig.boundaries`."""


def window_bounds(
    n_tokens: int,
    length: int,
    *,
    overlap: int = 0,
    starts: Sequence[int] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of windows of a sequence of tokens.

    Args:
        n_tokens: number of tokens of the sequence.
        length: maximum number of tokens of a window.
        overlap: number of tokens that a window shares with the previous one. It must be smaller than `length`, and 0
            with `starts`.
        starts: sorted positions at which documents start. A window then ends before the first document that does not
            fit into it, and only documents that are longer than a window are cut. None cuts anywhere.
    """
    start = 0
    stop = 0
    while stop < n_tokens:
        stop = min(start + length, n_tokens)
        if starts is not None and stop < n_tokens:
            last_start = _last_up_to(starts, stop)
            if start < last_start:
                stop = last_start
        yield start, stop
        start = stop - overlap


def _last_up_to(positions: Sequence[int], stop: int) -> int:
    """Return the largest of sorted positions up to `stop`; 0 if there is none."""
    number = bisect_right(positions, stop)
    return int(positions[number - 1]) if number else 0


def split_rows(marked: np.ndarray, length: int, boundaries: Boundaries) -> np.ndarray:
    """Cut marked ids (n,) with at least one token into padded rows (N, length)."""
    rows = [pad_row(marked[start:stop], length) for start, stop in row_bounds(marked, length, boundaries)]
    return np.stack(rows)


def row_bounds(marked: np.ndarray, length: int, boundaries: Boundaries) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each row of at most `length` tokens in marked ids (n,)."""
    starts = None
    if boundaries == "whole":
        starts = np.flatnonzero(is_start(marked)).tolist()
    return window_bounds(len(marked), length, starts=starts)


def check_rows(n_tokens: int, length: int, boundaries: Boundaries, name: str) -> None:
    """Raise `DataError` if there are too few tokens for one row.

    Args:
        n_tokens: number of tokens.
        length: tokens of a row.
        boundaries: how documents share rows; with `whole` a shorter row is padded.
        name: the name of the tokens in error messages.
    """
    if boundaries == "whole":
        if n_tokens == 0:
            raise DataError(f"{name}: there are no tokens, but a row needs at least one: add text.")
    elif n_tokens < length:
        raise DataError(
            f"{name}: the number of tokens is {n_tokens}, but a row needs {length}: add text, or lower the length."
        )


def check_boundaries(model: PreTrainedModel, boundaries: Boundaries, remedy: str) -> None:
    """Raise `RecipeError` if documents must stay separate and the model has no position ids to separate them.

    Args:
        model: the model.
        boundaries: how documents share rows.
        remedy: what the user can do, for the message.
    """
    if boundaries == "joined":
        return
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise RecipeError(
            f"Rows with boundaries {boundaries} keep their documents separate, but a model of the type "
            f"{model.config.model_type} has no position ids to do so: {remedy}."
        )
