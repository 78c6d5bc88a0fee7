"""Where a turn of the assistant ends in a rendered conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.backbone import marker_ids, turn_end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def behind_marker(tokenizer: PreTrainedTokenizerBase, text: str, stop: int) -> int:
    """Return the end of the marker that ends answers and follows a turn, after white space at most.

    Args:
        tokenizer: the tokenizer, with a chat template.
        text: the rendered conversation.
        stop: the end of the turn, which is returned if no marker follows.
    """
    rest = text[stop:].lstrip()
    for marker in tokenizer.convert_ids_to_tokens(list(turn_end_ids(tokenizer))):
        if rest.startswith(marker):
            return len(text) - len(rest) + len(marker)
    return stop


def endings(tokenizer: PreTrainedTokenizerBase, ending: str) -> list[str]:
    """Return an ending, if it is not empty, and its beginnings up to each marker, longest first.

    Args:
        tokenizer: the tokenizer.
        ending: what a chat template puts behind the content of a last turn. It may put less behind an earlier one.
    """
    found = []
    position = 0
    for marker in tokenizer.convert_ids_to_tokens(marker_ids(tokenizer, ending)):
        position = ending.index(marker, position) + len(marker)
        found.append(ending[:position])
    if ending[position:]:
        found.append(ending)
    return found[::-1]


def with_end(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: np.ndarray, predicted: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add an end token to a conversation of n tokens whose last turn is predicted and ends with text alone.

    Args:
        tokenizer: the tokenizer, with a chat template.
        text: the rendered conversation.
        ids: (n,) token ids.
        predicted: (n,) bool, which of them are predicted, at least one.
        ends: (n,) the character at which each token ends.

    Returns:
        The three arrays. With an end token, white space behind the last turn is left out.
    """
    last = int(np.flatnonzero(predicted)[-1])
    candidates = (*turn_end_ids(tokenizer), tokenizer.eos_token_id)
    end_tokens = [token for token in candidates if isinstance(token, int)]
    is_last_turn = not text[ends[last] :].strip()
    if not is_last_turn or not end_tokens or int(ids[last]) in end_tokens:
        return ids, predicted, ends
    return (
        np.append(ids[: last + 1], end_tokens[0]),
        np.append(predicted[: last + 1], True),
        np.append(ends[: last + 1], len(text)),
    )
