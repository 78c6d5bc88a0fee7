"""Where rows end: windows of token streams and boundaries of documents."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from graftlm.data.marked_ids import is_start, pad_row
from graftlm.errors import DataError, RecipeError

Boundaries = Literal["separate", "joined", "whole"]


# Documents to windows of tokens
def window_bounds(
    n_tokens: int, length: int, *, overlap: int = 0, starts: Sequence[int] | None = None
) -> Iterator[tuple[int, int]]:
    """(start, stop) of windows of at most `length` tokens, each with `overlap` tokens of the one before it.

    With `starts`, sorted positions at which documents start, a window ends before the first document that it can't
    hold to its end; a document longer than a window is cut anyway.
    """
    start = stop = 0
    while stop < n_tokens:
        stop = min(start + length, n_tokens)
        if starts is not None and stop < n_tokens:
            last = starts[bisect_right(starts, stop) - 1] if len(starts) else 0  # the last document start up to `stop`
            stop = int(last) if start < last <= stop else stop
        yield start, stop
        start = stop - overlap


def split_rows(stream: np.ndarray, length: int, boundaries: Boundaries) -> np.ndarray:
    """Cut marked ids (n,) into padded rows (N, length)."""
    return np.stack([pad_row(stream[start:stop], length) for start, stop in row_bounds(stream, length, boundaries)])


def row_bounds(stream: np.ndarray, length: int, boundaries: Boundaries) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each row in a stream of marked ids (n,)."""
    starts = np.flatnonzero(is_start(stream)).tolist() if boundaries == "whole" else None
    return window_bounds(len(stream), length, starts=starts)


def check_rows(n_tokens: int, length: int, boundaries: Boundaries, name: str) -> None:
    """Raise `DataError` if what errors call `name` has too few tokens for one row."""
    if n_tokens < (1 if boundaries == "whole" else length):
        raise DataError(f"{name}: {n_tokens} tokens in all, but one row takes {length}: add text, or lower the length.")


def check_boundaries(model: Any, boundaries: Boundaries) -> None:
    """Raise `RecipeError` if documents must stay separate and the model takes no position ids to separate them."""
    if boundaries != "joined" and "position_ids" not in inspect.signature(model.forward).parameters:
        raise RecipeError(
            f"A model of the type {model.config.model_type} takes no position ids, so it can't keep the documents of a "
            "row apart: set data.boundaries to joined."
        )
