"""What an augmenting model reads in a pass, and which of it each anchor token sees.

`ByPosition` is for one tokenizer: both models read the same tokens, and position t sees positions up to t.
`spelling.py` has the other case, two tokenizers.

Shape suffixes: B rows, T anchor tokens of this pass, S augmenting tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlm.backbone import Call
from graftlm.grafts.composition.attention import Places, Visible


@dataclass(frozen=True)
class Reading:
    """What an augmenting model reads in one pass, and who sees what.

    Args:
        inputs: keyword arguments of its forward pass; None when there is nothing new to read.
        visible: of all that it has read so far.
        places: of the anchor's tokens and the new augmenting ones.
    """

    inputs: dict[str, Any] | None
    visible: Visible
    places: Places


@dataclass(frozen=True)
class ByPosition:
    """Both models read the same tokens.

    Args:
        causal: whether a token sees none that come after it.
        prompt_only: whether only the prompt is read.
    """

    causal: bool
    prompt_only: bool

    def read(self, call: Call, past: int, read_before: int) -> Reading:
        """The reading of a pass.

        Args:
            call: the pass, with its token ids.
            past: anchor tokens in the cache.
            read_before: augmenting tokens in the cache.
        """
        assert call.input_ids is not None
        places = anchor_places(call, past)
        if self.prompt_only and past:
            return Reading(None, self._visible_prompt(call, read_before), Places(places, places))
        mask = call.attention_mask
        inputs = {"input_ids": call.input_ids, "attention_mask": mask, "position_ids": positions(call)}
        return Reading(inputs, self._visible(call, past), Places(places, places))

    def _visible(self, call: Call, past: int) -> Visible:
        assert call.input_ids is not None
        length, device = call.input_ids.shape[1], call.input_ids.device
        conditions = list(self._restrictions(call, past + length))
        if self.causal:
            if not conditions and (past == 0 or length == 1):
                return Visible()
            order = torch.arange(past + length, device=device)
            conditions.append((order <= order[past:, None])[None])
        if not conditions:
            conditions.append(torch.ones(1, length, past + length, dtype=torch.bool, device=device))
        mask_BTS = conditions[0]
        for condition in conditions[1:]:
            mask_BTS = mask_BTS & condition
        return Visible.of(mask_BTS.expand(-1, length, -1))

    def _restrictions(self, call: Call, total: int) -> list[Tensor]:
        """What hides tokens beside their order, each (B, 1 or T, S)."""
        found = []
        real_BS = real_columns(call, total)
        if real_BS is not None:
            found.append(real_BS[:, None])
        document_BT = documents(call)
        if document_BT is not None:
            found.append(document_BT[:, :, None] == document_BT[:, None])
        if self.prompt_only and call.prompt is not None:
            found.append(call.prompt[:, None])
        return found

    def _visible_prompt(self, call: Call, read_before: int) -> Visible:
        """Every later token sees the whole prompt."""
        assert call.input_ids is not None
        rows, length = call.input_ids.shape
        real_BS = real_columns(call, read_before)
        if real_BS is None:
            real_BS = torch.ones(rows, read_before, dtype=torch.bool, device=call.input_ids.device)
        return Visible.of(real_BS[:, None].expand(-1, length, -1))


def positions(call: Call) -> Tensor | None:
    """(B, T) each token's place in its document, from 0; None where columns say it.

    Not the anchor's own positions, which some families count from another number.
    """
    assert call.input_ids is not None
    if call.attention_mask is not None:
        places = call.attention_mask.long().cumsum(-1) - 1
        return places.clamp(min=0)[:, -call.input_ids.shape[1] :]
    document_BT = documents(call)
    if document_BT is None:
        return None
    columns = torch.arange(document_BT.shape[1], device=document_BT.device).expand_as(document_BT)
    begins = torch.diff(document_BT, prepend=document_BT[:, :1] - 1, dim=-1) != 0
    return columns - torch.where(begins, columns, 0).cummax(-1).values


def anchor_places(call: Call, past: int) -> Tensor:
    """(B or 1, T) each token's place in its document, from 0."""
    assert call.input_ids is not None
    found = positions(call)
    if found is not None:
        return found
    return torch.arange(past, past + call.input_ids.shape[1], device=call.input_ids.device)[None]


def real_columns(call: Call, length: int) -> Tensor | None:
    """(B, length) True for tokens that are not padding; None when all are real."""
    mask = call.attention_mask if call.attention_mask is not None else call.token_mask
    if mask is None:
        return None
    mask = mask[:, :length].bool()
    return None if bool(mask.all()) else mask


def documents(call: Call) -> Tensor | None:
    """(B, T) the number of each token's document in its row, where positions restart; None for one document a row.

    As transformers has it: only without an attention mask and a cache.
    """
    position_ids = call.position_ids
    if position_ids is None or call.attention_mask is not None or call.cache is not None:
        return None
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return starts.cumsum(-1) if bool(starts.any()) else None
