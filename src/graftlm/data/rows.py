"""Rows of tokens as batches: inputs, labels, positions and domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data.boundaries import Boundaries
from graftlm.data.marked_ids import IGNORED, PADDING, is_prompt, is_start, is_unscored, unmark

OLD = 0
NEW = 1
NO_SET = -1
"""`text_set` of a row of no named set of new text."""
DOMAIN_NAMES = {OLD: "old", NEW: "new"}


@dataclass(frozen=True)
class Batch:
    """A batch of B rows of L tokens. Labels are aligned with the inputs, and the model shifts them.

    Attributes:
        input_ids: long, (B, L).
        labels: long, (B, L), -100 at tokens that are not predicted: the first token of a row, padding, prompts, other
            turns of a conversation and, unless documents are joined, the first token of each document.
        attention_mask: long, (B, L), 0 at padding; None if there is no padding.
        position_ids: long, (B, L), counted from 0 in each document and in the padding; None unless a row has several
            separate documents.
        domain: long, (B,), 0 = old, 1 = new.
        prompt: bool, (B, L), True at tokens of a prompt; None if the batch has no prompt.
        text_set: long, (B,), number of the named set of new text that each row is from, -1 for old text; None unless
            the rows of sets are kept apart.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    domain: Tensor
    prompt: Tensor | None = None
    text_set: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, rows: slice) -> Batch:
        """Return some of the rows, such as a micro-batch."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> Batch:
        """Return the same rows on `device`. Tensors that are there already are shared."""
        return self._map(lambda tensor: tensor.to(device))

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for the forward pass of a `GraftedModel`.

        transformers separates the documents of a row where positions restart, but only without an attention mask and
        without a cache. The mask is therefore left out when there are positions. Padding is then one more document that
        no other one attends to, and `token_mask` marks the other tokens.
        """
        inputs: dict[str, object] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "domain": self.domain,
        }
        if self.prompt is not None:
            inputs["prompt"] = self.prompt
        if self.text_set is not None:
            inputs["extras"] = {"text_set": self.text_set}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
            if self.attention_mask is not None:
                inputs["token_mask"] = self.attention_mask.bool()
        elif self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        inputs["use_cache"] = False
        return inputs

    def totals(self, n_domains: int = 2) -> Tensor:
        """Return the number of predicted tokens, followed by the number of input tokens of each domain.

        Padding does not count.

        Args:
            n_domains: number of domains; every value of `domain` is smaller.

        Returns:
            float32, (1 + n_domains,).
        """
        targets = (self.labels[:, 1:] != IGNORED).sum()
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        counts = torch.zeros(n_domains, dtype=torch.long, device=mask.device)
        counts.index_add_(0, self.domain, mask.sum(dim=1))
        return torch.cat([targets[None], counts]).float()

    def rows_without_target(self) -> int:
        """Return the number of rows that have no predicted token."""
        return int((self.labels[:, 1:] == IGNORED).all(dim=1).sum())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                changed[field.name] = change(value)
        return replace(self, **changed)


def collate(
    marked: np.ndarray,
    domain: np.ndarray,
    *,
    boundaries: Boundaries,
    pad_id: int,
    text_set: np.ndarray | None = None,
) -> Batch:
    """Return the batch of some rows.

    Args:
        marked: marked ids, int32, (B, L).
        domain: the domain of each row, `OLD` or `NEW`, (B,).
        boundaries: how documents share rows; see `DataConfig`.
        pad_id: the token id of padding.
        text_set: the number of each row's named set of new text, (B,); see `Batch`.
    """
    padding = marked == PADDING
    starts = is_start(marked)
    prompt = is_prompt(marked)
    input_ids = unmark(marked, pad_id).astype(np.int64)
    position_ids = None
    if boundaries != "joined" and starts[:, 1:].any():
        position_ids = torch.from_numpy(_positions(starts, padding))
    labels = np.where(is_predicted(marked, boundaries), input_ids, IGNORED)
    attention_mask = (~padding).astype(np.int64)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        attention_mask=torch.from_numpy(attention_mask) if padding.any() else None,
        position_ids=position_ids,
        domain=torch.from_numpy(domain.astype(np.int64)),
        prompt=torch.from_numpy(prompt) if prompt.any() else None,
        text_set=None if text_set is None else torch.from_numpy(text_set.astype(np.int64)),
    )


def is_predicted(marked: np.ndarray, boundaries: Boundaries) -> np.ndarray:
    """Return which tokens of rows are predicted, bool, (B, L).

    Args:
        marked: marked ids, int32, (B, L).
        boundaries: how documents share rows; see `DataConfig`.
    """
    ignored = (marked == PADDING) | is_unscored(marked)
    ignored[:, 0] = True
    if boundaries != "joined":
        ignored |= is_start(marked)
    return ~ignored


def _positions(starts: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Return positions (B, L) that count from 0 at each start of a document and at the first padding token.

    Args:
        starts: bool, (B, L), True at the first token of a document.
        padding: bool, (B, L).
    """
    first_padding = padding & ~np.roll(padding, 1, axis=1)
    columns = np.arange(starts.shape[1])
    last_start = np.maximum.accumulate(np.where(starts | first_padding, columns, 0), axis=1)
    return columns - last_start
