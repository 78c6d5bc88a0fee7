"""Losses of a text's words by the distance to their last occurrence, as a measure of a model's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from graftlm.evaluation.inference import evaluation_mode

WORD = re.compile(r"[^\W\d_]{5,}")


class WordTokens(NamedTuple):
    """The tokens of a text, with the distance of each token's word to its last occurrence.

    Attributes:
        ids: (N,) int64 token ids.
        distance: (N,) int64 tokens from the word's first token back to that of its last occurrence; 0 for the first
            occurrence of a word, -1 outside words.
    """

    ids: np.ndarray
    distance: np.ndarray


def word_tokens(tokenizer: Any, text: str) -> WordTokens:
    """Return the tokens of a text. A word has five or more letters, and all tokens with one of them have its distance.

    Args:
        tokenizer: a fast tokenizer.
        text: the text.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, ends = np.array(encoded["offset_mapping"]).T
    distance = np.full(len(starts), -1)
    last_occurrences: dict[str, int] = {}
    for match in WORD.finditer(text):
        first = int(np.searchsorted(ends, match.start(), side="right"))
        stop = int(np.searchsorted(starts, match.end()))
        if first == stop:
            continue
        word = match.group().lower()
        before = last_occurrences.get(word)
        distance[first:stop] = 0 if before is None else first - before
        last_occurrences[word] = first
    return WordTokens(np.array(encoded["input_ids"]), distance)


def losses_by_distance(model: Any, tokens: WordTokens, length: int, limits: tuple[int, ...]) -> dict[str, float]:
    """Return nats per token of words in windows of `length` tokens, by the distance to the last occurrence.

    Args:
        model: a causal language model.
        tokens: tokens of the text.
        length: tokens of a window.
        limits: upper ends of the distances, rising; words with a larger distance are left out.

    Returns:
        Means `first`, of words that occur for the first time in their window, and `to_N` for each limit.
    """
    device = next(model.parameters()).device
    losses = []
    distances = []
    with evaluation_mode(model), torch.inference_mode():
        for start, ids in _windows(tokens.ids, length, device):
            losses.append(_nats(model, ids))
            distance_in_text = tokens.distance[start + 1 : start + len(ids)]
            # A word that last occurred in another window is new to the model.
            is_inside = distance_in_text <= np.arange(1, len(ids))
            distances.append(np.where(is_inside, distance_in_text, 0))
    loss = np.concatenate(losses)
    distance = np.concatenate(distances)
    parts = {"first": distance == 0}
    lower = 0
    for upper in limits:
        parts[f"to_{upper}"] = (distance > lower) & (distance <= upper)
        lower = upper
    return {name: float(loss[part].mean()) for name, part in parts.items() if part.any()}


def _nats(model: Any, ids: Tensor) -> np.ndarray:
    """Return the loss of every token of a window but the first, in nats."""
    logits = model(input_ids=ids[None], use_cache=False).logits
    predictions = logits[0, :-1].float()
    nats = functional.cross_entropy(predictions, ids[1:], reduction="none")
    return nats.cpu().numpy()


def _windows(ids: np.ndarray, length: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield start and ids of the windows of a text."""
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length]
        if len(window) > 1:
            yield start, torch.from_numpy(window).to(device)
