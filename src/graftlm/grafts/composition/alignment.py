"""What an augmenting model reads in a pass, and which of it each anchor token sees.

`PositionAlignment` is for one tokenizer: both models read the same tokens, and token t sees tokens up to t.
`character_alignment.py` is for two tokenizers.

Shape suffixes: B rows, T anchor tokens of this pass, S augmenting tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlm.backbone import Call
from graftlm.grafts.composition.attention import TokenPositions, Visibility


@dataclass(frozen=True)
class AlignedInputs:
    """The input of an augmenting model in one pass, and its visibility to the anchor's tokens.

    Args:
        inputs: keyword arguments of its forward pass; None if there is nothing new to read.
        visibility: of all augmenting tokens so far.
        positions: of the anchor's tokens and of the new augmenting tokens.
    """

    inputs: dict[str, Any] | None
    visibility: Visibility
    positions: TokenPositions


@dataclass(frozen=True)
class PositionAlignment:
    """One tokenizer: both models read the same tokens.

    Args:
        causal: a token does not see later tokens.
        prompt_only: the augmenting model reads only the prompt.
    """

    causal: bool
    prompt_only: bool

    def align(self, call: Call, past: int, cached: int) -> AlignedInputs:
        """The aligned inputs of a pass.

        Args:
            call: the pass, with its token ids.
            past: number of anchor tokens in the cache.
            cached: number of augmenting tokens in the cache.
        """
        assert call.input_ids is not None
        positions_BT = anchor_positions(call, past)
        positions = TokenPositions(positions_BT, positions_BT)
        if self.prompt_only and past:
            return AlignedInputs(None, self._prompt_visibility(call, cached), positions)
        inputs = {
            "input_ids": call.input_ids,
            "attention_mask": call.attention_mask,
            "position_ids": positions_in_document(call),
        }
        return AlignedInputs(inputs, self._visibility(call, past), positions)

    def _visibility(self, call: Call, past: int) -> Visibility:
        assert call.input_ids is not None
        length, device = call.input_ids.shape[1], call.input_ids.device
        masks = list(self._masks(call, past + length))
        if self.causal:
            if not masks and (past == 0 or length == 1):
                return Visibility()
            order = torch.arange(past + length, device=device)
            masks.append((order <= order[past:, None])[None])
        mask_BTS = torch.ones(1, length, past + length, dtype=torch.bool, device=device)
        for mask in masks:
            mask_BTS = mask_BTS & mask
        return Visibility.of(mask_BTS)

    def _masks(self, call: Call, total: int) -> list[Tensor]:
        """Masks beside the causal one, each (B, 1 or T, S): padding, documents, prompt."""
        masks = []
        real_BS = token_columns(call, total)
        if real_BS is not None:
            masks.append(real_BS[:, None])
        document_BT = document_numbers(call)
        if document_BT is not None:
            masks.append(document_BT[:, :, None] == document_BT[:, None])
        if self.prompt_only and call.prompt is not None:
            masks.append(call.prompt[:, None])
        return masks

    def _prompt_visibility(self, call: Call, cached: int) -> Visibility:
        """Every token after the prompt sees the whole prompt."""
        assert call.input_ids is not None
        rows, length = call.input_ids.shape
        real_BS = token_columns(call, cached)
        if real_BS is None:
            real_BS = torch.ones(rows, cached, dtype=torch.bool, device=call.input_ids.device)
        return Visibility.of(real_BS[:, None].expand(-1, length, -1))


def positions_in_document(call: Call) -> Tensor | None:
    """(B, T) each token's position in its document, from 0; None where they are the columns.

    The anchor's own `position_ids` are not used, as some families count from another number.
    """
    assert call.input_ids is not None
    if call.attention_mask is not None:
        positions = call.attention_mask.long().cumsum(-1) - 1
        return positions.clamp(min=0)[:, -call.input_ids.shape[1] :]
    document_BT = document_numbers(call)
    if document_BT is None:
        return None
    columns = torch.arange(document_BT.shape[1], device=document_BT.device).expand_as(document_BT)
    is_first = torch.diff(document_BT, prepend=document_BT[:, :1] - 1, dim=-1) != 0
    return columns - torch.where(is_first, columns, 0).cummax(-1).values


def anchor_positions(call: Call, past: int) -> Tensor:
    """(B or 1, T) each token's position in its document, from 0."""
    assert call.input_ids is not None
    positions = positions_in_document(call)
    if positions is not None:
        return positions
    return torch.arange(past, past + call.input_ids.shape[1], device=call.input_ids.device)[None]


def token_columns(call: Call, length: int) -> Tensor | None:
    """(B, length) False at padding; None without padding."""
    mask = call.attention_mask if call.attention_mask is not None else call.token_mask
    if mask is None:
        return None
    mask = mask[:, :length].bool()
    return None if bool(mask.all()) else mask


def document_numbers(call: Call) -> Tensor | None:
    """(B, T) the number of each token's document in its row; None for one document per row.

    A document starts where `position_ids` restart. As in transformers, this needs no attention mask and no cache.
    """
    position_ids = call.position_ids
    if position_ids is None or call.attention_mask is not None or call.cache is not None:
        return None
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return starts.cumsum(-1) if bool(starts.any()) else None
