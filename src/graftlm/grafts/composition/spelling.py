"""Two tokenizers: the augmenting model reads the anchor's text in tokens of its own.

At each anchor token the augmenting model has read exactly the characters that the anchor has, as its own tokenizer
writes them. So what is seen at a token depends on no later one, in training as in generation, though a word's tokens
change while it grows ("ma" and then "maison"). Both readings of a growing word are kept: the tokens read so far form a
tree, in which each path from the root is one reading of a document; every anchor token has its path, an augmenting
token attends to those before it on its own path alone, and an anchor token sees the path that ends where it ends.

Words are tokenised one by one (a word is what white space begins), so a long text costs no more than its new words.

Shape suffixes: B rows, T anchor tokens of this pass, N new augmenting tokens, S all of them so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import Call, leading_bos
from graftlm.backbone.cache import StateLayer
from graftlm.errors import GraftError
from graftlm.grafts.composition.alignment import Reading, anchor_places, documents
from graftlm.grafts.composition.attention import Places, Visible
from graftlm.grafts.composition.characters import spellers

# A run of more characters without white space is cut there, so that one "word" can't take as long as a text.
_LONGEST_WORD = 48
_PADDING = -1


class Spelling:
    """Reads what an anchor's tokens say in an augmenting model's tokens.

    Args:
        anchor: the anchor's tokenizer.
        augmenting: the augmenting model's.
        prompt_only: whether only the prompt is read.
        name: of the augmenting model, for messages.

    Raises:
        GraftError: the augmenting model's tokenizer gives no character offsets.
    """

    def __init__(
        self, anchor: PreTrainedTokenizerBase, augmenting: PreTrainedTokenizerBase, *, prompt_only: bool, name: str
    ) -> None:
        if not augmenting.is_fast or not anchor.is_fast:
            which = f"of {name}" if not augmenting.is_fast else "of the backbone"
            raise GraftError(
                f"The tokenizer {which} gives no character offsets (it is a slow one), and two tokenizers are matched "
                "by characters: save a tokenizer.json beside its model."
            )
        self.prompt_only = prompt_only
        self.new_speller = spellers(anchor)
        self.special = set(anchor.all_special_ids)
        self.ends: dict[int, list[int]] = {}
        if anchor.eos_token_id is not None and augmenting.eos_token_id is not None:
            self.ends = {int(anchor.eos_token_id): [int(augmenting.eos_token_id)]}  # type: ignore[arg-type]  # one id, for a text
        self.begin = leading_bos(augmenting)
        # A copy of the rules alone: transformers' object changes while it is used, which threads would meet.
        self._tokenizer = Tokenizer.from_str(augmenting.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # a fast one has it
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.tokens_of = lru_cache(maxsize=1 << 16)(self._tokens_of)
        self._rows: WeakKeyDictionary[StateLayer, tuple[Tensor, list[Row]]] = WeakKeyDictionary()

    def _tokens_of(self, word: str, first: bool) -> tuple[int, ...]:
        """The tokens of a word, as they stand in a text; the first one of a text may differ from later ones."""
        if not first and word[0].isspace():
            # Some tokenizers mark the start of a text; behind another character there is none.
            found = self._tokenizer.encode("a" + word, add_special_tokens=False)
            if all(start >= 1 or stop <= 1 for start, stop in found.offsets):
                return tuple(t for t, (_, stop) in zip(found.ids, found.offsets, strict=True) if stop > 1)
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)

    def read(self, call: Call, past: int, state: StateLayer | None) -> Reading:
        """The reading of a pass.

        Args:
            call: the pass, with its token ids.
            past: anchor tokens in the cache.
            state: remembers, between passes, what was read.
        """
        assert call.input_ids is not None
        rows = self._remembered(state, len(call.input_ids))
        old = [len(row.tokens) for row in rows]
        read_before = max(row.columns_used for row in rows)
        seen = self._follow(call, past, rows)
        new = [len(row.tokens) - count for row, count in zip(rows, old, strict=True)]
        for row, count in zip(rows, old, strict=True):
            row.settle(count, read_before, max(new))
        if state is not None:
            self._remember(state, rows)
        masks = _Masks(read_before + max(new))
        device = call.input_ids.device
        visible = np.stack([masks.of_paths(row, path) for row, path in zip(rows, seen, strict=True)])
        inputs = _inputs(rows, old, max(new), masks, device) if max(new) else None
        places = Places(anchor_places(call, past), _births(rows, old, max(new), device))
        return Reading(inputs, Visible.of(torch.from_numpy(visible).to(device)), places)

    def _remember(self, state: StateLayer, rows: list[Row]) -> None:
        """Keep the tokens read and the columns used: from these, rows are built again after beams were reordered."""
        ids = torch.full((len(rows), max(len(row.ids) for row in rows)), _PADDING)
        used = torch.zeros(len(rows), rows[0].columns_used, dtype=torch.bool)
        for b, row in enumerate(rows):
            ids[b, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
            used[b, row.columns] = True
        state.update(ids, used)
        self._rows[state] = (ids, rows)

    def _remembered(self, state: StateLayer | None, count: int) -> list[Row]:
        if state is None or state.keys is None:
            return [Row(self) for _ in range(count)]
        tensor, rows = self._rows.pop(state, (None, []))
        if tensor is state.keys:  # nobody exchanged it
            return rows
        assert state.values is not None
        return [Row.again(self, ids, used) for ids, used in zip(state.keys.tolist(), state.values, strict=True)]

    def _follow(self, call: Call, past: int, rows: list[Row]) -> list[list[int | None]]:
        """Add this pass's tokens to the rows; the node at which each token's path ends, None where it has none."""
        assert call.input_ids is not None
        ids = call.input_ids.tolist()
        real = call.token_mask.tolist() if call.token_mask is not None else None
        numbers = documents(call)
        document = numbers.tolist() if numbers is not None else None
        prompt = call.prompt.tolist() if self.prompt_only and call.prompt is not None else None
        seen: list[list[int | None]] = []
        for b, row in enumerate(rows):
            ends: list[int | None] = []
            for t, token in enumerate(ids[b]):
                if document is not None and t and document[b][t] != document[b][t - 1]:
                    row.begin_document()
                is_real = real is None or real[b][t]
                is_read = not (self.prompt_only and past) and (prompt is None or prompt[b][t])
                if is_real and is_read:
                    row.add(token)
                elif past == 0 or is_read:
                    row.skip()
                ends.append(row.end if is_real else None)
            seen.append(ends)
        return seen


@dataclass
class Row:
    """What one row has read: a tree of tokens, each with its parent (negative for the root of a document)."""

    spelling: Spelling
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    births: list[int] = field(default_factory=list)  # the place of the anchor token with which each was read
    columns: list[int] = field(default_factory=list)
    columns_used: int = 0
    ids: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    root: int = 0

    def __post_init__(self) -> None:
        self.begin_document()

    @classmethod
    def again(cls, spelling: Spelling, ids: list[int], used_S: Tensor) -> Row:
        """The row that had read these tokens, and whose nodes stand in the columns used."""
        row = cls(spelling)
        for token in ids:
            row.skip() if token == _PADDING else row.add(token)
        row.columns = used_S.nonzero().squeeze(-1).tolist()
        row.columns_used = len(used_S)
        return row

    def begin_document(self) -> None:
        """Go on with an empty text."""
        self.root -= 1
        self.spell = self.spelling.new_speller()
        self.base: int = self.root  # where the last whole word ends
        self.end: int | None = None  # where all that was read ends
        self.tail = ""  # the word that is still growing
        self.place = -1  # of the last anchor token
        self.first = True

    def skip(self) -> None:
        """A token that is not read."""
        self.ids.append(_PADDING)

    def add(self, token: int) -> None:
        """Read on by one anchor token."""
        self.ids.append(token)
        self.place += 1
        if self.base == self.root and self.spelling.begin is not None:
            self.base = self._extend(self.base, (self.spelling.begin,))
        if token in self.spelling.special:
            self._close(self.tail)
            self.spell, self.tail = self.spelling.new_speller(), ""
            self.base = self._extend(self.base, self.spelling.ends.get(token, ()))
        else:
            self.tail += self.spell(token)
            while (cut := _end_of_word(self.tail)) is not None:
                self._close(self.tail[:cut])
                self.tail = self.tail[cut:]
        end = self._extend(self.base, self._tokens(self.tail))
        self.end = None if end < 0 else end

    def _close(self, word: str) -> None:
        self.base = self._extend(self.base, self._tokens(word))
        self.first = self.first and not word

    def _tokens(self, word: str) -> tuple[int, ...]:
        return self.spelling.tokens_of(word, self.first) if word else ()

    def _extend(self, node: int, tokens: tuple[int, ...] | list[int]) -> int:
        for token in tokens:
            child = self.children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self.children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(0 if node < 0 else self.depths[node] + 1)
                self.births.append(self.place)
            node = child
        return node

    def settle(self, old: int, read_before: int, width: int) -> None:
        """Give the nodes from `old` on their columns; all rows of a batch use `width` new ones."""
        self.columns += range(read_before, read_before + len(self.tokens) - old)
        self.columns_used = read_before + width


class _Masks:
    """Which columns lie on a path, as rows of booleans."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def of_paths(self, row: Row, ends: list[int | None]) -> np.ndarray:
        """(T, S) of the paths that end at some nodes; None is the empty path."""
        known: dict[int, np.ndarray] = {}
        found = np.zeros((len(ends), self.columns), dtype=bool)
        for t, end in enumerate(ends):
            if end is not None:
                found[t] = self._of_path(row, end, known)
        return found

    def _of_path(self, row: Row, node: int, known: dict[int, np.ndarray]) -> np.ndarray:
        steps = []
        while node >= 0 and node not in known:
            steps.append(node)
            node = row.parents[node]
        path = known[node] if node >= 0 else np.zeros(self.columns, dtype=bool)
        for step in reversed(steps):
            path = path.copy()
            path[row.columns[step]] = True
            known[step] = path
        return path


def _inputs(rows: list[Row], old: list[int], width: int, masks: _Masks, device: torch.device) -> dict[str, Tensor]:
    """The new nodes of every row as one batch; a row with fewer is filled up with tokens that see only themselves."""
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    mask = np.zeros((len(rows), width, masks.columns), dtype=bool)
    for b, (row, start) in enumerate(zip(rows, old, strict=True)):
        count = len(row.tokens) - start
        ids[b, :count], positions[b, :count] = row.tokens[start:], row.depths[start:]
        mask[b, :count] = masks.of_paths(row, list(range(start, start + count)))
        filled = np.arange(count, width)
        mask[b, filled, masks.columns - width + filled] = True
    return {
        "input_ids": torch.from_numpy(ids).to(device),
        "position_ids": torch.from_numpy(positions).to(device),
        "attention_mask": torch.from_numpy(mask)[:, None].to(device),
    }


def _births(rows: list[Row], old: list[int], width: int, device: torch.device) -> Tensor:
    """(B, N) the places of the anchor tokens with which the new nodes were read."""
    found = np.zeros((len(rows), width), dtype=np.int64)
    for b, (row, start) in enumerate(zip(rows, old, strict=True)):
        found[b, : len(row.births) - start] = row.births[start:]
    return torch.from_numpy(found).to(device)


def _end_of_word(text: str) -> int | None:
    """Where the first word of a growing text ends; None while it may still grow."""
    for at in range(1, len(text)):
        if text[at].isspace() and not text[at - 1].isspace():
            return at
        if at >= _LONGEST_WORD:
            return at
    return None
