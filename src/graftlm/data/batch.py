"""The rows of one step, as a model takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data.packing import PADDING, Boundaries, is_prompt, is_start, unmark
from graftlm.errors import RecipeError

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """B rows of L tokens; labels are aligned with the inputs, and the model shifts them.

    Attributes:
        input_ids: long, (B, L).
        labels: long, (B, L); -100 where nothing is predicted: the row's first token, padding, prompts and, unless
            documents are joined, the first token of each.
        attention_mask: long, (B, L), 0 at padding; None when there is no padding.
        position_ids: long, (B, L), from 0 at each document and at the padding; None unless a row holds several
            documents that are kept apart.
        domain: long, (B,): 0 = old, 1 = new.
        prompt: bool, (B, L), True where the token belongs to a prompt; None when there is none in the batch.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    domain: Tensor
    prompt: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, chosen: slice) -> Batch:
        """Some of the rows, such as a micro-batch."""
        return self._map(lambda tensor: tensor[chosen])

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward pass of a `GraftedModel`.

        Without an attention mask and a cache, transformers sees where positions restart and keeps the documents of a
        row apart; with either it would not. So the mask is left out when there are positions: padding is then one
        more document, which no other sees, and `token_mask` names it.
        """
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "labels": self.labels, "domain": self.domain}
        if self.prompt is not None:
            inputs["prompt"] = self.prompt
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
            if self.attention_mask is not None:
                inputs["token_mask"] = self.attention_mask.bool()
        elif self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        return {**inputs, "use_cache": False}

    def totals(self, n_domains: int = 2) -> Tensor:
        """Float, (1 + n_domains,): tokens that are predicted, then input tokens of each domain without padding."""
        targets = (self.labels[:, 1:] != IGNORED).sum()
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        counts = torch.zeros(n_domains, dtype=torch.long, device=mask.device)
        counts.index_add_(0, self.domain, mask.sum(dim=1))
        return torch.cat([targets[None], counts]).float()

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


def assemble(marked: np.ndarray, domain: np.ndarray, *, boundaries: Boundaries, pad_id: int) -> Batch:
    """The batch of some marked rows, shape (B, L), and their domains, shape (B,)."""
    padding = marked == PADDING
    starts, prompt = is_start(marked), is_prompt(marked)
    input_ids = unmark(marked, pad_id).astype(np.int64)
    apart = boundaries != "joined"
    unpredicted = padding | prompt | starts if apart else padding | prompt
    unpredicted[:, 0] = True
    several = apart and bool(starts[:, 1:].any())
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(np.where(unpredicted, IGNORED, input_ids)),
        attention_mask=torch.from_numpy((~padding).astype(np.int64)) if padding.any() else None,
        position_ids=torch.from_numpy(_positions(starts, padding)) if several else None,
        domain=torch.from_numpy(domain.astype(np.int64)),
        prompt=torch.from_numpy(prompt) if prompt.any() else None,
    )


def _positions(starts: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Positions that count from 0 at every start, and at the first padding token; shape (B, L)."""
    first_padding = padding & ~np.roll(padding, 1, axis=1)
    columns = np.arange(starts.shape[1])
    last_start = np.maximum.accumulate(np.where(starts | first_padding, columns, 0), axis=1)
    return columns - last_start


def check_apart(model: Any, boundaries: Boundaries) -> None:
    """Make sure that a model can keep the documents of a row apart, where they are to be: by its position ids.

    Raises:
        RecipeError: it takes none.
    """
    if boundaries != "joined" and "position_ids" not in inspect.signature(model.forward).parameters:
        raise RecipeError(
            f"A model of the type {model.config.model_type} takes no position ids, so it can't keep the documents of a "
            "row apart: set data.boundaries to joined."
        )
