"""Marked ids: one int32 array represents token ids, prompts, starts of documents and padding.

The stream of a source contains

    id                  for a token inside a document
    ~id                 (negative) for the first token of a document
    PADDING             after the last document
    id | PROMPT         for a token of a prompt
    id | UNSCORED       for a token of a later turn of a conversation that is not predicted

The first token of a document is inverted after the bits are set: `~(id | PROMPT)`.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100
PADDING = np.iinfo(np.int32).min
# The bits are above every vocabulary, and ~(id | PROMPT | UNSCORED) never equals PADDING.
PROMPT = 1 << 30
UNSCORED = 1 << 29


def _without_start(marked: np.ndarray) -> np.ndarray:
    """Return marked ids in which the first token of a document has no mark. Padding has no meaningful value."""
    return np.where(marked < 0, ~marked, marked)


def unmark(marked: np.ndarray, pad_id: int) -> np.ndarray:
    """Return the plain ids of marked ids of any shape.

    Args:
        marked: the marked ids.
        pad_id: the id of padding.
    """
    ids = _without_start(marked) & ~(PROMPT | UNSCORED)
    return np.where(marked == PADDING, pad_id, ids)


def is_start(marked: np.ndarray) -> np.ndarray:
    """Return which marked ids are the first of a document; bool, in the same shape."""
    return (marked < 0) & (marked != PADDING)


def is_prompt(marked: np.ndarray) -> np.ndarray:
    """Return which marked ids are before the first predicted token of their document; bool, in the same shape."""
    return _has_any(marked, PROMPT)


def is_unscored(marked: np.ndarray) -> np.ndarray:
    """Return which marked ids belong to a prompt or to a turn that is not predicted; bool, in the same shape."""
    return _has_any(marked, PROMPT | UNSCORED)


def _has_any(marked: np.ndarray, bits: int) -> np.ndarray:
    """Return which marked ids have at least one of `bits`."""
    has_bit = (_without_start(marked) & bits) != 0
    return has_bit & (marked != PADDING)


def pad_row(row: np.ndarray, length: int) -> np.ndarray:
    """Pad marked ids (n,) at their end to (length,)."""
    return np.pad(row, (0, length - len(row)), constant_values=PADDING)
