"""What an augmenting model reads in a pass, and which of it each anchor token sees.

`PositionAlignment`: one tokenizer. Both models read the same tokens, and token t sees tokens up to t.

`CharacterAlignment`: two tokenizers. At every anchor token the augmenting model has read the anchor's characters,
tokenised by its own tokenizer. So what a token sees depends on no later token, in training as in generation. While a
word grows, its tokens change ("ma", then "maison"), and both tokenisations are kept. The tokens form a tree in which
each path from a root is one tokenisation of a document. An augmenting token attends to its ancestors, and an anchor
token sees the path that ends where it ends. Words are tokenised one at a time (a word starts at white space), so the
cost of a step is that of its word.

Shape suffixes: B rows, T anchor tokens of this pass, N new augmenting tokens, S all augmenting tokens so far.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from graftlm.backbone import Call, leading_bos, may_read
from graftlm.backbone.cache import StateLayer
from graftlm.errors import GraftError
from graftlm.grafts.composition.attention import AttentionPositions, Visibility

_MAX_WORD = 48  # characters; longer runs without white space are cut, which bounds the cost of a step
_UNREAD = -1

IncrementalDecoder = Callable[[int], str]  # takes the next token of a text and returns the characters that it completes


@dataclass(frozen=True)
class AlignedInputs:
    """Keyword arguments of an augmenting model's forward pass, or None if there is nothing new to read.

    `visibility` is that of all augmenting tokens so far, `positions` of the anchor's and of the new augmenting tokens.
    """

    inputs: dict[str, Any] | None
    visibility: Visibility
    positions: AttentionPositions


@dataclass(frozen=True)
class PositionAlignment:
    """One tokenizer: both models read the same tokens.

    If `causal`, a token sees no later ones. With `prompt_only`, the augmenting model reads only the prompt.
    """

    causal: bool
    prompt_only: bool

    def align(self, call: Call, past: int, state: StateLayer | None, cached: int = 0) -> AlignedInputs:
        """The aligned inputs of a pass, after `past` anchor tokens and `cached` augmenting tokens in the cache."""
        assert call.input_ids is not None
        positions_BT = anchor_positions(call, past)
        positions = AttentionPositions(positions_BT, positions_BT)
        if self.prompt_only and past:  # every token after the prompt sees the whole prompt
            real_BS = token_columns(call, cached)
            if real_BS is None:
                real_BS = torch.ones(1, cached, dtype=torch.bool, device=call.input_ids.device)
            visible_BTS = real_BS[:, None].expand(-1, call.input_ids.shape[1], -1)
            return AlignedInputs(None, Visibility.of(visible_BTS), positions)
        inputs = {
            "input_ids": call.input_ids,
            "attention_mask": call.attention_mask,
            "position_ids": call.positions_in_documents(),
        }
        return AlignedInputs(inputs, self._visibility(call, past), positions)

    def _visibility(self, call: Call, past: int) -> Visibility:
        assert call.input_ids is not None
        length, device = call.input_ids.shape[1], call.input_ids.device
        masks = []  # each (B or 1, 1 or T, S)
        if (real_BS := token_columns(call, past + length)) is not None:
            masks.append(real_BS[:, None])
        if (document_BT := call.document_numbers()) is not None:
            masks.append(document_BT[:, :, None] == document_BT[:, None])
        if self.prompt_only and call.prompt is not None:
            masks.append(call.prompt[:, None])
        if self.causal:
            if not masks and (past == 0 or length == 1):
                return Visibility()
            order = torch.arange(past + length, device=device)
            masks.append((order <= order[past:, None])[None])
        mask_BTS = torch.ones(1, length, past + length, dtype=torch.bool, device=device)
        for mask in masks:
            mask_BTS = mask_BTS & mask
        return Visibility.of(mask_BTS)


def anchor_positions(call: Call, past: int) -> Tensor:
    """(B or 1, T) each token's position in its document, from 0."""
    assert call.input_ids is not None
    positions = call.positions_in_documents()
    if positions is not None:
        return positions
    return torch.arange(past, past + call.input_ids.shape[1], device=call.input_ids.device)[None]


def token_columns(call: Call, length: int) -> Tensor | None:
    """(B, length) False at padding; None without padding."""
    mask = call.attention_mask if call.attention_mask is not None else call.token_mask
    if mask is None:
        return None
    mask = mask[:, :length].bool()
    return None if may_read(mask) and bool(mask.all()) else mask


class CharacterAlignment:
    """Aligns an anchor's tokens with another tokenizer's by characters; with `prompt_only`, of the prompt alone.

    Raises GraftError if a tokenizer gives no character offsets.
    """

    def __init__(
        self, anchor: PreTrainedTokenizerBase, augmenting: PreTrainedTokenizerBase, *, prompt_only: bool, name: str
    ) -> None:
        if not augmenting.is_fast or not anchor.is_fast:
            owner = f"of {name}" if not augmenting.is_fast else "of the backbone"
            raise GraftError(
                f"The tokenizer {owner} gives no character offsets (it is a slow one), and two tokenizers are matched "
                "by characters: save a tokenizer.json beside its model."
            )
        self.prompt_only = prompt_only
        self.new_decoder = incremental_decoders(anchor)
        self.special = set(anchor.all_special_ids)
        self.end_of_text: dict[int, list[int]] = {}
        if anchor.eos_token_id is not None and augmenting.eos_token_id is not None:
            self.end_of_text = {int(anchor.eos_token_id): [int(augmenting.eos_token_id)]}  # type: ignore[arg-type]  # one id, for a text
        self.bos = leading_bos(augmenting)
        # A copy, because transformers changes padding and truncation of its own tokenizer while threads use it.
        self._tokenizer = Tokenizer.from_str(augmenting.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # a fast one has it
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.tokens_of = lru_cache(maxsize=1 << 16)(self._tokens_of)
        self._trees: WeakKeyDictionary[StateLayer, tuple[Tensor, list[TokenTree]]] = WeakKeyDictionary()

    def _tokens_of(self, word: str, first: bool) -> tuple[int, ...]:
        """The tokens of a word inside a text; `first` is for the first word of a text, which some tokenizers mark."""
        if not first and word[0].isspace():
            encoding = self._tokenizer.encode("a" + word, add_special_tokens=False)
            if all(start >= 1 or stop <= 1 for start, stop in encoding.offsets):
                pairs = zip(encoding.ids, encoding.offsets, strict=True)
                return tuple(token for token, (_, stop) in pairs if stop > 1)
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)

    def align(self, call: Call, past: int, state: StateLayer | None, cached: int = 0) -> AlignedInputs:
        """The aligned inputs of a pass after `past` anchor tokens; `state` keeps the tokens read so far."""
        assert call.input_ids is not None
        trees = self._load(state, len(call.input_ids))
        old = [len(tree.tokens) for tree in trees]
        columns_before = max(tree.columns_used for tree in trees)
        ends = self._read(call, past, trees)
        width = max(len(tree.tokens) - count for tree, count in zip(trees, old, strict=True))
        for tree, count in zip(trees, old, strict=True):
            tree.columns += range(columns_before, columns_before + len(tree.tokens) - count)
            tree.columns_used = columns_before + width  # all rows use as many
        if state is not None:
            self._save(state, trees)
        total, device = columns_before + width, call.input_ids.device
        mask = np.stack([tree.path_masks(row_ends, total) for tree, row_ends in zip(trees, ends, strict=True)])
        visibility = Visibility.of(torch.from_numpy(mask).to(device))
        inputs, births = _new_tokens(trees, old, width, total, device)
        positions = AttentionPositions(anchor_positions(call, past), births)
        return AlignedInputs(inputs if width else None, visibility, positions)

    def _read(self, call: Call, past: int, trees: list[TokenTree]) -> list[list[int]]:
        """Add this pass's tokens to the trees; returns the node where each path ends, negative for an empty one."""
        assert call.input_ids is not None
        is_real, document, is_prompt = (
            None if values is None else values.tolist()
            for values in (call.token_mask, call.document_numbers(), call.prompt if self.prompt_only else None)
        )
        ends: list[list[int]] = []
        for b, (tree, ids) in enumerate(zip(trees, call.input_ids.tolist(), strict=True)):
            row_ends: list[int] = []
            for t, token in enumerate(ids):
                if document is not None and t and document[b][t] != document[b][t - 1]:
                    tree.begin_document()
                real = is_real is None or is_real[b][t]
                read = not (self.prompt_only and past) and (is_prompt is None or is_prompt[b][t])
                if real and read:
                    tree.add(token)
                elif past == 0 or read:
                    tree.skip()
                row_ends.append(tree.end if real else -1)
            ends.append(row_ends)
        return ends

    def _save(self, state: StateLayer, trees: list[TokenTree]) -> None:
        """Store the tokens read and the columns used, from which the trees are rebuilt after beams were reordered."""
        ids = torch.full((len(trees), max(len(tree.ids) for tree in trees)), _UNREAD)
        used = torch.zeros(len(trees), trees[0].columns_used, dtype=torch.bool)
        for b, tree in enumerate(trees):
            ids[b, : len(tree.ids)] = torch.tensor(tree.ids, dtype=torch.long)
            used[b, tree.columns] = True
        state.update(ids, used)
        self._trees[state] = (ids, trees)

    def _load(self, state: StateLayer | None, rows: int) -> list[TokenTree]:
        if state is None or state.keys is None:
            return [TokenTree(self) for _ in range(rows)]
        ids, trees = self._trees.pop(state, (None, []))
        if ids is state.keys:  # no operation has replaced the tensor
            return trees
        assert state.values is not None
        return [TokenTree.rebuilt(self, ids, used) for ids, used in zip(state.keys.tolist(), state.values, strict=True)]


@dataclass
class TokenTree:
    """The augmenting tokens of one row: a tree, each node with its parent (a negative number for a document's root)."""

    alignment: CharacterAlignment
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    births: list[int] = field(default_factory=list)  # position of the anchor token with which each node was read
    columns: list[int] = field(default_factory=list)
    columns_used: int = 0
    ids: list[int] = field(default_factory=list)  # the anchor's tokens
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    root: int = 0

    def __post_init__(self) -> None:
        self.begin_document()

    @classmethod
    def rebuilt(cls, alignment: CharacterAlignment, ids: list[int], used_S: Tensor) -> TokenTree:
        """The tree after these anchor tokens, whose nodes occupy the used columns."""
        tree = cls(alignment)
        for token in ids:
            tree.skip() if token == _UNREAD else tree.add(token)
        tree.columns = used_S.nonzero().squeeze(-1).tolist()
        tree.columns_used = len(used_S)
        return tree

    def begin_document(self) -> None:
        """Continue with an empty text."""
        self.root -= 1
        self.decode = self.alignment.new_decoder()
        self.base: int = self.root  # end of the last complete word
        self.end: int = self.root  # end of all that was read
        self.word = ""  # the incomplete word
        self.position = -1  # of the last anchor token
        self.is_first_word = True

    def skip(self) -> None:
        """Record an anchor token that is not read."""
        self.ids.append(_UNREAD)

    def add(self, token: int) -> None:
        """Read one anchor token."""
        self.ids.append(token)
        self.position += 1
        if self.base == self.root and self.alignment.bos is not None:
            self.base = self._extend(self.base, (self.alignment.bos,))
        if token in self.alignment.special:
            self._complete(self.word)
            self.decode, self.word = self.alignment.new_decoder(), ""
            self.base = self._extend(self.base, self.alignment.end_of_text.get(token, ()))
        else:
            self.word += self.decode(token)
            while (cut := _end_of_word(self.word)) is not None:
                self._complete(self.word[:cut])
                self.word = self.word[cut:]
        self.end = self._extend(self.base, self._tokens(self.word))

    def _complete(self, word: str) -> None:
        self.base = self._extend(self.base, self._tokens(word))
        self.is_first_word = self.is_first_word and not word

    def _tokens(self, word: str) -> tuple[int, ...]:
        return self.alignment.tokens_of(word, self.is_first_word) if word else ()

    def _extend(self, node: int, tokens: Sequence[int]) -> int:
        """Follow tokens from a node, with new nodes where there are none; returns the last node."""
        for token in tokens:
            child = self.children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self.children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(0 if node < 0 else self.depths[node] + 1)
                self.births.append(self.position)
            node = child
        return node

    def path_masks(self, ends: Sequence[int], columns: int) -> np.ndarray:
        """(T, S) the columns on the paths that end at the given nodes; a negative node ends the empty path."""
        masks = np.zeros((len(ends), columns), dtype=bool)
        known: dict[int, np.ndarray] = {}
        for mask, end in zip(masks, ends, strict=True):
            node = end
            while node >= 0 and node not in known:
                mask[self.columns[node]] = True
                node = self.parents[node]
            mask |= known.get(node, False)
            known[end] = mask
        return masks


def _new_tokens(
    trees: list[TokenTree], old: list[int], width: int, total: int, device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """The new nodes of all rows as one batch, and their births (B, N). Filler tokens attend only to themselves."""
    ids = np.zeros((len(trees), width), dtype=np.int64)
    positions, births = np.zeros_like(ids), np.zeros_like(ids)
    mask = np.zeros((len(trees), width, total), dtype=bool)
    for b, (tree, start) in enumerate(zip(trees, old, strict=True)):
        count = len(tree.tokens) - start
        ids[b, :count], positions[b, :count] = tree.tokens[start:], tree.depths[start:]
        births[b, :count] = tree.births[start:]
        mask[b, :count] = tree.path_masks(range(start, start + count), total)
        filler = np.arange(count, width)
        mask[b, filler, total - width + filler] = True
    arrays = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None], "births": births}
    inputs = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return inputs, inputs.pop("births")


def _end_of_word(text: str) -> int | None:
    """The end of the first word of a growing text; None while the word may still grow."""
    ends = range(1, len(text))
    return next((at for at in ends if at >= _MAX_WORD or (text[at].isspace() and not text[at - 1].isspace())), None)


def incremental_decoders(tokenizer: PreTrainedTokenizerBase) -> Callable[[], IncrementalDecoder]:
    """A factory of decoders, one per text. A character whose bytes span several tokens counts with its last byte."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}  # type: ignore[attr-defined]  # fast
    if decoder.get("type") == "ByteLevel":
        return _byte_level_decoders(tokenizer)
    return lambda: _prefix_decoder(tokenizer)


def _byte_level_decoders(tokenizer: PreTrainedTokenizerBase) -> Callable[[], IncrementalDecoder]:
    """For byte-level tokenizers, whose tokens stand for the same bytes everywhere."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    added = {token: str(entry).encode() for token, entry in tokenizer.added_tokens_decoder.items()}
    names: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))  # type: ignore[assignment]  # None for ids without a token
    table = [
        added.get(i, bytes(byte_of[c] for c in name if c in byte_of)) if name is not None else b""
        for i, name in enumerate(names)
    ]

    def new() -> IncrementalDecoder:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(table[token]) if token < len(table) else ""

    return new


def _prefix_decoder(tokenizer: PreTrainedTokenizerBase) -> IncrementalDecoder:
    """For any tokenizer: the text that a token adds to the decoding of the tokens before it."""
    previous: list[int] = []
    pending: list[int] = []

    def decode(token: int) -> str:
        nonlocal previous
        pending.append(token)
        prefix = str(tokenizer.decode(previous, clean_up_tokenization_spaces=False))
        text = str(tokenizer.decode(previous + pending, clean_up_tokenization_spaces=False))
        if text.endswith("\ufffd") and len(pending) < 8:  # an incomplete character
            return ""
        previous = pending.copy()
        pending.clear()
        return text[len(prefix) :]

    return decode
