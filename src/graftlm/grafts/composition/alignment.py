"""Alignment of the tokens that an augmenting model reads with the tokens of the anchor.

`PositionAlignment`: one tokenizer. Both models read the same tokens, and token t sees the tokens up to t.

`CharacterAlignment`: two tokenizers. At every anchor token, the augmenting model has read the characters of the anchor
up to that token, in its own tokenization. Hence the context of a token depends on no later token, both in training and
in generation. The augmenting tokens form a tree (`token_tree.py`): an augmenting token attends to its ancestors, and an
anchor token sees the path that ends where it ends.

Shape suffixes: B rows, T anchor tokens of this pass, N new augmenting tokens, S all augmenting tokens so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import Call, may_read
from graftlm.backbone.cache import StateLayer
from graftlm.errors import GraftError
from graftlm.grafts.composition.attention import AttentionPositions, Visibility
from graftlm.grafts.composition.token_tree import UNREAD, Retokenizer, TokenTree


@dataclass(frozen=True)
class AlignedInputs:
    """The inputs of an augmenting model in a pass, and their visibility to the anchor.

    Args:
        inputs: keyword arguments of the augmenting model's forward pass: `input_ids` (B, N), `attention_mask` and
            `position_ids`; None if there is nothing new to read.
        visibility: which augmenting tokens each anchor token of the pass sees, among all so far.
        positions: positions of the anchor tokens and of the new augmenting tokens.
    """

    inputs: Mapping[str, Tensor | None] | None
    visibility: Visibility
    positions: AttentionPositions


@dataclass(frozen=True)
class PositionAlignment:
    """Alignment of two models with the same tokenizer, which read the same tokens.

    Args:
        causal: whether a token sees no later tokens.
        prompt_only: whether the augmenting model reads only the prompt.
    """

    causal: bool
    prompt_only: bool

    def align(self, call: Call, past: int, state: StateLayer | None, cached: int = 0) -> AlignedInputs:
        """Return the aligned inputs of a pass.

        Args:
            call: the pass of the anchor, which has token ids.
            past: number of anchor tokens in the cache.
            state: not used; `CharacterAlignment.align` needs it.
            cached: number of augmenting tokens in the cache.
        """
        assert call.input_ids is not None
        positions_BT = anchor_positions(call, past)
        positions = AttentionPositions(anchor=positions_BT, augmenting=positions_BT)
        if self.prompt_only and past:
            return AlignedInputs(inputs=None, visibility=_whole_prompt(call, cached), positions=positions)
        inputs = {
            "input_ids": call.input_ids,
            "attention_mask": call.attention_mask,
            "position_ids": call.positions_in_documents(),
        }
        return AlignedInputs(inputs=inputs, visibility=self._visibility(call, past), positions=positions)

    def _visibility(self, call: Call, past: int) -> Visibility:
        """Return which tokens each token of a pass sees."""
        assert call.input_ids is not None
        length = call.input_ids.shape[1]
        device = call.input_ids.device
        masks = self._masks(call, past + length)
        if self.causal:
            if not masks and (past == 0 or length == 1):
                return Visibility()
            order = torch.arange(past + length, device=device)
            causal_TS = order <= order[past:, None]
            masks.append(causal_TS[None])
        mask_BTS = torch.ones(1, length, past + length, dtype=torch.bool, device=device)
        for mask in masks:
            mask_BTS = mask_BTS & mask
        return Visibility.of(mask_BTS)

    def _masks(self, call: Call, total: int) -> list[Tensor]:
        """Return the masks of padding, documents and the prompt, (B or 1, 1 or T, S) each."""
        masks = []
        real_BS = token_columns(call, total)
        if real_BS is not None:
            masks.append(real_BS[:, None])
        document_BT = call.document_numbers()
        if document_BT is not None:
            masks.append(document_BT[:, :, None] == document_BT[:, None])
        if self.prompt_only and call.prompt is not None:
            masks.append(call.prompt[:, None])
        return masks


def _whole_prompt(call: Call, cached: int) -> Visibility:
    """Return the visibility of tokens after the prompt, which see the whole prompt."""
    assert call.input_ids is not None
    real_BS = token_columns(call, cached)
    if real_BS is None:
        real_BS = torch.ones(1, cached, dtype=torch.bool, device=call.input_ids.device)
    length = call.input_ids.shape[1]
    visible_BTS = real_BS[:, None].expand(-1, length, -1)
    return Visibility.of(visible_BTS)


def anchor_positions(call: Call, past: int) -> Tensor:
    """Return the position of each token of a pass in its document, counted from 0.

    Args:
        call: the pass, which has token ids.
        past: number of tokens in the cache.

    Returns:
        (B or 1, T) positions.
    """
    assert call.input_ids is not None
    positions = call.positions_in_documents()
    if positions is not None:
        return positions
    length = call.input_ids.shape[1]
    columns = torch.arange(past, past + length, device=call.input_ids.device)
    return columns[None]


def token_columns(call: Call, length: int) -> Tensor | None:
    """Return which of the first `length` columns contain tokens.

    Args:
        call: the pass.
        length: number of columns, at most those of the pass's mask.

    Returns:
        (B, length) a bool mask, False at padding; None without padding.
    """
    mask = call.attention_mask
    if mask is None:
        mask = call.token_mask
    if mask is None:
        return None
    mask = mask[:, :length].bool()
    if may_read(mask) and bool(mask.all()):
        return None
    return mask


class CharacterAlignment:
    """Alignment of an anchor's tokens with those of another tokenizer, by characters.

    Args:
        anchor: tokenizer of the anchor.
        augmenting: tokenizer of the augmenting model.
        prompt_only: whether the augmenting model reads only the prompt.
        name: name of the augmenting model in error messages.

    Raises:
        GraftError: a tokenizer has no character offsets.
    """

    def __init__(
        self,
        anchor: PreTrainedTokenizerBase,
        augmenting: PreTrainedTokenizerBase,
        *,
        prompt_only: bool,
        name: str,
    ) -> None:
        _require_offsets(augmenting, f"of {name}")
        _require_offsets(anchor, "of the backbone")
        self.prompt_only = prompt_only
        self._retokenizer = Retokenizer(anchor, augmenting)
        self._trees: WeakKeyDictionary[StateLayer, tuple[Tensor, list[TokenTree]]] = WeakKeyDictionary()

    def align(self, call: Call, past: int, state: StateLayer | None, cached: int = 0) -> AlignedInputs:
        """Return the aligned inputs of a pass.

        Args:
            call: the pass of the anchor, which has token ids.
            past: number of anchor tokens in the cache.
            state: cache layer that keeps the tokens read so far, which is updated; None without a cache.
            cached: not used; `PositionAlignment.align` needs it.
        """
        assert call.input_ids is not None
        device = call.input_ids.device
        trees = self._load(state, len(call.input_ids))
        old_counts = [len(tree.tokens) for tree in trees]
        columns_before = max(tree.columns_used for tree in trees)
        ends = self._read(call, past, trees)
        width = _assign_columns(trees, old_counts, columns_before)
        if state is not None:
            self._save(state, trees)
        total = columns_before + width
        row_masks = []
        for tree, row_ends in zip(trees, ends, strict=True):
            row_masks.append(tree.path_masks(row_ends, total))
        visible_BTS = torch.from_numpy(np.stack(row_masks)).to(device)
        inputs, births_BN = _new_tokens(trees, old_counts, width, total, device)
        return AlignedInputs(
            inputs=inputs if width else None,
            visibility=Visibility.of(visible_BTS),
            positions=AttentionPositions(anchor=anchor_positions(call, past), augmenting=births_BN),
        )

    def _read(self, call: Call, past: int, trees: list[TokenTree]) -> list[list[int]]:
        """Add the tokens of a pass to the trees.

        Returns:
            For each row, the node where the path of each token ends; a negative number for the empty path.
        """
        assert call.input_ids is not None
        ids = call.input_ids.tolist()
        is_real = _flags(call.token_mask, call.input_ids)
        is_wanted = _flags(call.prompt if self.prompt_only else None, call.input_ids)
        starts = _document_starts(call)
        past_prompt = self.prompt_only and past > 0
        ends: list[list[int]] = []
        for b, tree in enumerate(trees):
            row_ends: list[int] = []
            for t, token in enumerate(ids[b]):
                if starts[b][t]:
                    tree.begin_document()
                real = is_real[b][t]
                wanted = is_wanted[b][t] and not past_prompt
                if real and wanted:
                    tree.add(token)
                elif past == 0 or wanted:
                    tree.skip()
                row_ends.append(tree.end if real else -1)
            ends.append(row_ends)
        return ends

    def _save(self, state: StateLayer, trees: list[TokenTree]) -> None:
        """Store the tokens and the columns, from which the trees are rebuilt after the rows were reordered."""
        length = max(len(tree.ids) for tree in trees)
        ids = torch.full((len(trees), length), UNREAD)
        used = torch.zeros(len(trees), trees[0].columns_used, dtype=torch.bool)
        for b, tree in enumerate(trees):
            ids[b, : len(tree.ids)] = torch.tensor(tree.ids, dtype=torch.long)
            used[b, tree.columns] = True
        state.update(ids, used)
        self._trees[state] = (ids, trees)

    def _load(self, state: StateLayer | None, rows: int) -> list[TokenTree]:
        """Return the trees of all rows, which are rebuilt if the rows of the cache have changed since `_save`."""
        if state is None or state.keys is None:
            return [TokenTree(self._retokenizer) for _ in range(rows)]
        ids, trees = self._trees.pop(state, (None, []))
        if ids is state.keys:  # no operation has replaced the tensor
            return trees
        assert state.values is not None
        rebuilt = []
        for row_ids, used in zip(state.keys.tolist(), state.values, strict=True):
            rebuilt.append(TokenTree.rebuilt(self._retokenizer, row_ids, used))
        return rebuilt


def _require_offsets(tokenizer: PreTrainedTokenizerBase, owner: str) -> None:
    if not tokenizer.is_fast:
        raise GraftError(
            f"The tokenizer {owner} has no character offsets (it is a slow one), but two tokenizers are matched by "
            "characters: save a tokenizer.json next to its model."
        )


def _flags(mask_BT: Tensor | None, input_ids: Tensor) -> list[list[bool]]:
    """Return a mask as lists, True everywhere if there is none."""
    if mask_BT is None:
        rows, length = input_ids.shape
        return [[True] * length for _ in range(rows)]
    return mask_BT.tolist()


def _document_starts(call: Call) -> list[list[bool]]:
    """Return which tokens of a pass start another document than the first of their row."""
    input_ids = cast("Tensor", call.input_ids)
    document_BT = call.document_numbers()
    if document_BT is None:
        return torch.zeros(input_ids.shape, dtype=torch.bool).tolist()
    starts_BT = torch.zeros_like(document_BT, dtype=torch.bool)
    previous_BT = document_BT[:, :-1]
    starts_BT[:, 1:] = document_BT[:, 1:] != previous_BT
    return starts_BT.tolist()


def _assign_columns(trees: list[TokenTree], old_counts: list[int], columns_before: int) -> int:
    """Give the new nodes of all rows columns after the existing ones; every row uses the same number of columns.

    Returns:
        N, the number of new columns.
    """
    new_counts = []
    for tree, old_count in zip(trees, old_counts, strict=True):
        new_counts.append(len(tree.tokens) - old_count)
    width = max(new_counts)
    for tree, new_count in zip(trees, new_counts, strict=True):
        tree.columns += range(columns_before, columns_before + new_count)
        tree.columns_used = columns_before + width
    return width


def _new_tokens(
    trees: list[TokenTree],
    old_counts: list[int],
    width: int,
    total: int,
    device: torch.device,
) -> tuple[dict[str, Tensor | None], Tensor]:
    """Return the new nodes of all rows as one batch, and their births (B, N).

    Rows with fewer new nodes are filled with tokens that attend only to themselves.
    """
    ids = np.zeros((len(trees), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    births = np.zeros_like(ids)
    mask = np.zeros((len(trees), width, total), dtype=bool)
    for b, (tree, start) in enumerate(zip(trees, old_counts, strict=True)):
        count = len(tree.tokens) - start
        ids[b, :count] = tree.tokens[start:]
        positions[b, :count] = tree.depths[start:]
        births[b, :count] = tree.births[start:]
        nodes = range(start, start + count)
        mask[b, :count] = tree.path_masks(nodes, total)
        filler = np.arange(count, width)
        mask[b, filler, total - width + filler] = True
    inputs: dict[str, Tensor | None] = {
        "input_ids": torch.from_numpy(ids).to(device),
        "position_ids": torch.from_numpy(positions).to(device),
        "attention_mask": torch.from_numpy(mask[:, None]).to(device),
    }
    return inputs, torch.from_numpy(births).to(device)
