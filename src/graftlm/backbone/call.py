"""`Call`: the state of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from graftlm.backbone.token_count import TokenCount
from graftlm.backbone.token_selection import TokenSelection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Deferred:
    """A field of a dataclass that may be set to a function, which the first read calls."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Tensor | None:
        if instance is None:
            return None  # the field's default
        value: Any = getattr(instance, self._key)
        if callable(value):
            value = value()
            setattr(instance, self._key, value)
        return value

    def __set__(self, instance: object, value: Tensor | Callable[[], Tensor | None] | None) -> None:
        setattr(instance, self._key, value)


@dataclass
class Call:
    """The state of one forward pass.

    Attributes:
        input_ids: (B, T) token ids; None when the caller gave embeddings.
        attention_mask: (B, T_past + T), 1 for real tokens; None when all are real.
        column_mask: bool (B, S) for the S columns of a static cache, True for real tokens so far. It is known without
            the number of tokens. None for other caches, and where the caller's mask has no such form.
        position_ids: (B, T) or None.
        cache: the key-value cache of this generation, or None.
        domain: (B,) domain of each sequence, 0 = old, 1 = new; None when the batch has no domains.
        token_mask: (B, T), True for real tokens; None when all are real.
        totals: (1 + domains,) counts over the whole optimizer step: target tokens, then input tokens of each domain.
        prompt: (B, T), True for prompt tokens; None when the batch does not mark them. In a generation, only passes
            that read the prompt have it.
        extras: other values of the batch by name, such as the task.
        scratch: values that a graft keeps between its taps in this pass, by keys of the graft.
        training: whether this pass will be differentiated for training.
        observing: whether this pass runs for `Graft.observe`, which may cost more.
        row_scopes: which owner's taps act on which rows; see `row_hooks.py`.
        weights: weights of grafts by name; 1 for others.
        count: the number of tokens in the cache before this pass, which `past` reads.
        model: the live model of this pass, which may be a copy of the backbone.
        selection: the tokens whose logits are needed; None for all, or for the last ones. See `at_head`.
    """

    input_ids: Tensor | None = None
    attention_mask: _Deferred = _Deferred()
    column_mask: _Deferred = _Deferred()
    position_ids: Tensor | None = None
    cache: Cache | None = None
    domain: Tensor | None = None
    token_mask: _Deferred = _Deferred()
    totals: Tensor | None = None
    prompt: Tensor | None = None
    extras: dict[str, object] = field(default_factory=dict)
    scratch: dict[Any, Any] = field(default_factory=dict)
    training: bool = False
    observing: bool = False
    row_scopes: tuple[object, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    count: TokenCount | None = None
    model: PreTrainedModel | None = None
    selection: TokenSelection | None = None

    @property
    def past_is_known(self) -> bool:
        """Whether `past` returns without a synchronization."""
        return self.count is not None and self.count.is_known

    def past(self) -> int:
        """Return the number of tokens in the cache before this pass."""
        count = self.count or TokenCount(self.cache, 0)
        return count.read()

    def padding(self) -> Tensor | None:
        """Return the number of columns (B) before each row's first token; None without a mask."""
        mask = self.attention_mask if self.column_mask is None else self.column_mask
        return None if mask is None else (mask.cumsum(-1) == 0).sum(-1)

    def working_dtype(self, graft: nn.Module) -> torch.dtype:
        """Return the dtype in which a graft computes: autocast's, or that of its weights.

        A graft casts its inputs to it once, whereas autocast would cast them in each Linear.
        """
        key = (graft, "dtype")
        if key not in self.scratch:
            weight = next(graft.parameters())
            device = weight.device.type
            if torch.is_autocast_enabled(device):
                self.scratch[key] = torch.get_autocast_dtype(device)
            else:
                self.scratch[key] = weight.dtype
        return self.scratch[key]

    def at_head(self, values: Tensor, count: int) -> Tensor:
        """Return the values of the tokens whose states the output layer receives.

        Taps of the output layer that declare `takes_selection` need it, as these may be some tokens of every row, in
        the shape of a single row.

        Args:
            values: (B, T, ...) values of all tokens of the pass.
            count: number of tokens in each row of the output layer's input.

        Returns:
            (B, count, ...) for the last tokens, or (1, count, ...) for selected ones.
        """
        if self.selection is not None and self.selection.is_applied:
            return self.selection.take(values)[None]
        return values[:, -count:]

    def document_numbers(self) -> Tensor | None:
        """Number the documents in each row.

        A document starts where `position_ids` restart. As in transformers, documents are separated only without an
        attention mask and without a cache.

        Returns:
            (B, T) number of each token's document in its row; None if each row is a single document.
        """
        positions = self.position_ids
        if positions is None or self.cache is not None or self.attention_mask is not None:
            return None
        starts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
        if not bool(starts.any()):
            return None
        return starts.cumsum(-1)

    def positions_in_documents(self) -> Tensor | None:
        """Return each token's position in its document, counted from 0 without padding.

        The backbone's own `position_ids` are not used, because some families start at another number.

        Returns:
            (B, T) positions; None if they are the column numbers.
        """
        if self.attention_mask is not None:
            assert self.input_ids is not None, "the number of new positions is the number of ids"
            positions = self.attention_mask.long().cumsum(-1) - 1
            return positions.clamp(min=0)[:, -self.input_ids.shape[1] :]
        document_BT = self.document_numbers()
        if document_BT is None:
            return None
        columns = torch.arange(document_BT.shape[1], device=document_BT.device).expand_as(document_BT)
        is_first = torch.diff(document_BT, prepend=document_BT[:, :1] - 1, dim=-1) != 0
        first_column = torch.where(is_first, columns, 0).cummax(-1).values
        return columns - first_column
