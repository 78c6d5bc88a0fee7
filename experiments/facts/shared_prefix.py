"""Greedy continuations of prompts that share a long prefix, whose keys and values are kept once.

All rows are one sequence. A token attends to the prefix and to the tokens before it in its own row, so a step reads the
prefix once for all rows, where a batch with one copy for each row reads as many.

Shape suffixes: P tokens of the prefix, N new tokens of all rows, K keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


class SharedPrefix:
    """The keys and values of a prefix, which one batch of rows at a time continues.

    Args:
        model: a causal language model.
        ids: the tokens (P) of the prefix.
    """

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self.model = model
        self.length = len(ids)
        output = model(input_ids=self._tensor(ids)[None], use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        self._rows_K = self._tensor([])

    def continued(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int]) -> list[list[int]]:
        """Return the greedy continuations of prompts, each without the token that ends it.

        Args:
            prompts: the tokens of each prompt after the prefix, at least one.
            tokens: maximum number of tokens of a continuation.
            ends: tokens that end a continuation.
        """
        if len(self._rows_K) > 0:
            self._cache.crop(-len(self._rows_K))
        self._rows_K = self._tensor([])
        lengths = [len(prompt) for prompt in prompts]
        continuations: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        chosen = self._step([list(prompt) for prompt in prompts], active, [0] * len(prompts))
        for _ in range(tokens):
            going_on = []
            for row, token in zip(active, chosen, strict=True):
                if token not in ends:
                    continuations[row].append(token)
                    going_on.append(row)
            active = [row for row in going_on if len(continuations[row]) < tokens]
            if not active:
                break
            starts = [lengths[row] + len(continuations[row]) - 1 for row in active]
            chosen = self._step([continuations[row][-1:] for row in active], active, starts)
        return continuations

    def _step(self, new: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Read new tokens of some rows, and return the most probable token after each row.

        Args:
            new: the new tokens of each row.
            rows: the numbers of the rows.
            starts: the number of tokens of each row between the prefix and its new ones.
        """
        ids = [token for row in new for token in row]
        of_row = [number for number, row in zip(rows, new, strict=True) for _ in row]
        positions = []
        for start, row in zip(starts, new, strict=True):
            first = self.length + start
            positions += range(first, first + len(row))
        self._rows_K = torch.cat([self._rows_K, self._tensor(of_row)])
        ends = torch.tensor([len(row) for row in new], device=self.model.device).cumsum(0) - 1
        output = self.model(
            input_ids=self._tensor(ids)[None],
            position_ids=self._tensor(positions)[None],
            attention_mask=self._mask(len(ids)),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=ends,
        )
        return output.logits[0].argmax(-1).tolist()

    def _mask(self, count: int) -> Tensor:
        """Return the additive mask (1, 1, N, P + K) of the last N of the K tokens after the prefix."""
        keys = len(self._rows_K)
        order_K = torch.arange(keys, device=self.model.device)
        of_own_row = self._rows_K[-count:, None] == self._rows_K
        is_before = order_K[-count:, None] >= order_K
        mask = torch.zeros(count, self.length + keys, device=self.model.device, dtype=self.model.dtype)
        mask[:, self.length :].masked_fill_(~(of_own_row & is_before), torch.finfo(mask.dtype).min)
        return mask[None, None]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)
