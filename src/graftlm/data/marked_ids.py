"""Marked ids: one int32 array carries token ids, prompts, starts of documents and padding.

The stream of a source holds `id` inside a document, `~id` (negative) for its first token, `PADDING` after the last
document, the bit `PROMPT` in the ids of a prompt, and the bit `UNSCORED` in those of later turns of a conversation that
are not predicted.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100
PADDING = np.iinfo(np.int32).min
PROMPT = 1 << 30  # above every vocabulary, and ~(id | PROMPT | UNSCORED) is never PADDING
UNSCORED = 1 << 29


def unmark(marked: np.ndarray, pad_id: int) -> np.ndarray:
    """Plain ids of marked ids of any shape."""
    return np.where(marked == PADDING, pad_id, np.where(marked < 0, ~marked, marked) & ~(PROMPT | UNSCORED))


def is_start(marked: np.ndarray) -> np.ndarray:
    """Which marked ids are the first of a document."""
    return (marked < 0) & (marked != PADDING)


def is_prompt(marked: np.ndarray) -> np.ndarray:
    """Which marked ids belong to a prompt: what stands before the first predicted token of its document."""
    return _has_bit(marked, PROMPT)


def _has_bit(marked: np.ndarray, bits: int) -> np.ndarray:
    return (np.where(marked < 0, ~marked, marked) & bits).astype(bool) & (marked != PADDING)


def pad_row(row: np.ndarray, length: int) -> np.ndarray:
    """Pad marked ids (n,) at their end to (length,)."""
    return np.pad(row, (0, length - len(row)), constant_values=PADDING)
