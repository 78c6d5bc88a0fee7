"""The loss of a text's words by how far back each last stood: what a model remembers of them."""

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
    """The tokens of a text, and of each token how far back its word last stood.

    Attributes:
        ids: (N,) int64.
        distance: (N,) int64, tokens from the word's first token to the last occurrence's; 0 where it stands for the
            first time, -1 outside words.
    """

    ids: np.ndarray
    distance: np.ndarray


def word_tokens(tokenizer: Any, text: str) -> WordTokens:
    """Tokens of a text; a word has five or more letters, and all tokens with one of them have its distance."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, ends = np.array(encoded["offset_mapping"]).T
    distance, last = np.full(len(starts), -1), {}
    for match in WORD.finditer(text):
        first, stop = np.searchsorted(ends, match.start(), side="right"), np.searchsorted(starts, match.end())
        if first == stop:
            continue
        before = last.get(match.group().lower())
        distance[first:stop] = 0 if before is None else first - before
        last[match.group().lower()] = first
    return WordTokens(np.array(encoded["input_ids"]), distance)


def losses_by_distance(model: Any, tokens: WordTokens, length: int, limits: tuple[int, ...]) -> dict[str, float]:
    """Nats per token of words in windows of `length` tokens, by how far back in the window a word last stood.

    Args:
        limits: upper ends of the distances, rising; a word that stands farther back counts in no mean.

    Returns:
        `first`, and `to_N` for each limit.
    """
    losses, distances = [], []
    with evaluation_mode(model), torch.inference_mode():
        for start, ids in _windows(tokens.ids, length, next(model.parameters()).device):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            losses.append(functional.cross_entropy(logits, ids[1:], reduction="none").cpu().numpy())
            distance = tokens.distance[start + 1 : start + len(ids)]
            inside = distance <= np.arange(1, len(ids))  # a word that last stood in another window is new to the model
            distances.append(np.where(inside, distance, 0))
    loss, distance = np.concatenate(losses), np.concatenate(distances)
    parts = {"first": distance == 0}
    for lower, upper in zip((0, *limits), limits, strict=False):
        parts[f"to_{upper}"] = (distance > lower) & (distance <= upper)
    return {name: float(loss[part].mean()) for name, part in parts.items() if part.any()}


def _windows(ids: np.ndarray, length: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length]
        if len(window) > 1:
            yield start, torch.from_numpy(window).to(device)
