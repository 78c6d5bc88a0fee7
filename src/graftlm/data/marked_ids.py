"""Marked ids: one int32 array represents token ids, prompts, starts of documents and padding.

The array contains

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
    inverted = ~marked
    return np.where(marked < 0, inverted, marked)


def unmark(marked: np.ndarray, pad_id: int) -> np.ndarray:
    """Return the token ids of marked ids, without marks and in the same shape.

    Args:
        marked: marked ids of any shape.
        pad_id: the token id that `PADDING` becomes.
    """
    bits = PROMPT | UNSCORED
    ids = _without_start(marked) & ~bits
    return np.where(marked == PADDING, pad_id, ids)


def is_start(marked: np.ndarray) -> np.ndarray:
    """Return which marked ids are the first of a document, as a boolean array of the same shape."""
    is_negative = marked < 0
    return is_negative & (marked != PADDING)


def is_prompt(marked: np.ndarray) -> np.ndarray:
    """Return which marked ids belong to the prompt of their document, as a boolean array of the same shape."""
    return _has_any(marked, PROMPT)


def is_unscored(marked: np.ndarray) -> np.ndarray:
    """Return which marked ids are not predicted, as a boolean array of the same shape.

    These are the tokens of prompts, and of later turns of a conversation that the assistant does not write.
    """
    return _has_any(marked, PROMPT | UNSCORED)


def _has_any(marked: np.ndarray, bits: int) -> np.ndarray:
    """Return a boolean array of the same shape, True where an id has at least one of `bits`."""
    ids = _without_start(marked)
    has_bit = (ids & bits) != 0
    return has_bit & (marked != PADDING)


def pad_row(row: np.ndarray, length: int) -> np.ndarray:
    """Pad at most `length` marked ids (n,) at their end to (length,)."""
    missing = length - len(row)
    return np.pad(row, (0, missing), constant_values=PADDING)
