"""Draw tokens by random numbers of each text, so that a text does not depend on those that are sampled with it.

Shape suffixes: B rows, V tokens of the vocabulary, S new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from graftlm.errors import DataError


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn from a model's distribution.

    Attributes:
        temperature: divides the logits.
        top_p: total probability of the tokens to draw from, which are the most probable ones.
    """

    temperature: float
    top_p: float

    def tokens(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """Return a token for each row: the one at which the cumulative distribution exceeds the row's random number.

        Args:
            logits_BV: the logits of the next token.
            uniform_B: a number in [0, 1) for each row.

        Returns:
            (B,) token ids; -1 where the logits have no distribution because one is NaN or infinite.
        """
        p_BV = (logits_BV.float() / self.temperature).softmax(-1)
        order_BV: Tensor | None = None
        if self.top_p < 1:
            p_BV, order_BV = p_BV.sort(dim=-1, descending=True)
        cumulative_BV = p_BV.cumsum(-1, dtype=uniform_B.dtype)
        total_B1 = cumulative_BV[:, -1:]
        is_valid_B1 = total_B1.isfinite()
        if self.top_p < 1:
            kept_BV = cumulative_BV - p_BV < self.top_p
            total_B1 = torch.where(kept_BV, cumulative_BV, 0).amax(-1, keepdim=True)
        index_B1 = torch.searchsorted(cumulative_BV, uniform_B[:, None] * total_B1, right=True)
        index_B1 = index_B1.clamp(max=logits_BV.shape[-1] - 1)
        token_B1 = index_B1 if order_BV is None else order_BV.gather(-1, index_B1)
        return torch.where(is_valid_B1, token_B1, -1)[:, 0]


def uniform_numbers(keys: Sequence[Sequence[int]], count: int, device: torch.device) -> Tensor:
    """Return random numbers in [0, 1) for each text, which depend only on the text's key.

    Args:
        keys: integers for each of B texts, such as a seed and the text's index.
        count: number S of random numbers of a text.
        device: device of the result.

    Returns:
        (B, S) in float64, or in float32 on devices without float64.
    """
    numbers = np.stack([np.random.default_rng(list(key)).random(count) for key in keys])
    uniform_BS = torch.from_numpy(numbers)
    if device.type == "mps":
        # Rounding to float32 may give 1.
        uniform_BS = uniform_BS.float().clamp(max=1 - torch.finfo(torch.float32).eps)
    return uniform_BS.to(device)


class DrawnTokens(LogitsProcessor):
    """Leave to `generate` only the tokens that a `Drawing` draws.

    Args:
        drawing: draws the tokens.
        uniform_BS: the random numbers of each row.
        prompt_length: number of tokens of the padded prompts.

    Attributes:
        token_B: the latest tokens; -1 stays where one could not be drawn.
    """

    def __init__(self, drawing: Drawing, uniform_BS: Tensor, prompt_length: int) -> None:
        self._drawing = drawing
        self._uniform_BS = uniform_BS
        self._prompt_length = prompt_length
        self.token_B = torch.zeros(len(uniform_BS), dtype=torch.long, device=uniform_BS.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) that are 0 for the drawn tokens and minus infinity for all others."""
        step = input_ids.shape[1] - self._prompt_length
        token_B = self._drawing.tokens(scores, self._uniform_BS[:, step])
        # The caller checks at the end, because a look at a token waits for an accelerator.
        self.token_B = torch.where(self.token_B < 0, -1, token_B)
        return torch.full_like(scores, -torch.inf).scatter(1, self.token_B.clamp(min=0)[:, None], 0.0)


def check_drawn(token_B: Tensor) -> None:
    """Raise `DataError` if a token could not be drawn. The host waits for the tokens."""
    if bool((token_B < 0).any()):
        raise DataError(
            "The model computes NaN or infinite logits, but samples need a distribution: use another model or dtype."
        )
