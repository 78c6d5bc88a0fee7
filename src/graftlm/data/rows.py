"""Rows of tokens as batches: inputs, labels, positions and domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data.boundaries import Boundaries
from graftlm.data.marked_ids import IGNORED, PADDING, PROMPT, UNSCORED, _has_bit, is_prompt, is_start, unmark

OLD, NEW = 0, 1
DOMAIN_NAMES = {OLD: "old", NEW: "new"}


# Rows to batches
@dataclass(frozen=True)
class Batch:
    """B rows of L tokens; labels are aligned with the inputs, and the model shifts them.

    Attributes:
        input_ids: long, (B, L).
        labels: long, (B, L); -100 at tokens that are not predicted: the row's first, padding, prompts and, unless
            documents are joined, the first of each document.
        attention_mask: long, (B, L), 0 at padding; None when there is no padding.
        position_ids: long, (B, L), from 0 at each document and at the padding; None unless a row holds several
            separate documents.
        domain: long, (B,): 0 = old, 1 = new.
        prompt: bool, (B, L), True at tokens of a prompt; None when the batch has none.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    domain: Tensor
    prompt: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, rows: slice) -> Batch:
        """Some of the rows, such as a micro-batch."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward pass of a `GraftedModel`.

        transformers keeps the documents of a row apart where positions restart, but only without an attention mask and
        a cache. The mask is therefore left out when there are positions. Padding is then one more document that no
        other sees, and `token_mask` marks it.
        """
        names = ("input_ids", "labels", "domain", "prompt", "position_ids", "attention_mask")
        inputs = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.position_ids is not None and self.attention_mask is not None:
            inputs["token_mask"] = inputs.pop("attention_mask").bool()
        return {**inputs, "use_cache": False}

    def totals(self, n_domains: int = 2) -> Tensor:
        """Float, (1 + n_domains,): number of predicted tokens, then of input tokens of each domain without padding."""
        targets = (self.labels[:, 1:] != IGNORED).sum()
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        counts = torch.zeros(n_domains, dtype=torch.long, device=mask.device)
        counts.index_add_(0, self.domain, mask.sum(dim=1))
        return torch.cat([targets[None], counts]).float()

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


def collate(marked: np.ndarray, domain: np.ndarray, *, boundaries: Boundaries, pad_id: int) -> Batch:
    """The batch of marked rows (B, L) with their domains (B,)."""
    padding = marked == PADDING
    starts, prompt, unscored = is_start(marked), is_prompt(marked), _has_bit(marked, PROMPT | UNSCORED)
    input_ids = unmark(marked, pad_id).astype(np.int64)
    separate = boundaries != "joined"
    ignored = padding | unscored | starts if separate else padding | unscored
    ignored[:, 0] = True
    several = separate and bool(starts[:, 1:].any())
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(np.where(ignored, IGNORED, input_ids)),
        attention_mask=torch.from_numpy((~padding).astype(np.int64)) if padding.any() else None,
        position_ids=torch.from_numpy(_positions(starts, padding)) if several else None,
        domain=torch.from_numpy(domain.astype(np.int64)),
        prompt=torch.from_numpy(prompt) if prompt.any() else None,
    )


def _positions(starts: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Positions (B, L) that count from 0 at every start, and at the first padding token."""
    first_padding = padding & ~np.roll(padding, 1, axis=1)
    columns = np.arange(starts.shape[1])
    last_start = np.maximum.accumulate(np.where(starts | first_padding, columns, 0), axis=1)
    return columns - last_start
