"""The tokens that an augmenting model with another tokenizer reads for a text of the anchor: a tree.

While a word grows, its tokens change ("ma", then "maison"), and the tree keeps both tokenizations. Each path from a
root is one tokenization of the start of a document. Words are tokenized one at a time (a word starts at white space),
so that the cost of a step is that of its word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import leading_bos
from graftlm.grafts.composition.decoding import incremental_decoders

UNREAD = -1
"""The id that is stored for an anchor token that the augmenting model does not read."""

_ANCHORS = ("a", "\n", ".")  # characters before a word, of which one does not merge with it
_MAX_WORD = 48  # characters; longer runs without white space are cut, which bounds the cost of a step


class Retokenizer:
    """Turns tokens of an anchor into text, and words of the text into tokens of an augmenting model.

    Args:
        anchor: tokenizer of the anchor; a fast one.
        augmenting: tokenizer of the augmenting model; a fast one.

    Attributes:
        new_decoder: builds an incremental decoder of the anchor's tokens.
        special: the anchor's special tokens, which end a word.
        end_of_text: augmenting tokens that correspond to a special token of the anchor.
        bos: the augmenting token with which every document starts, or None.
        tokens_of: returns the augmenting tokens of a word, given the word with the white space before it and whether
            it is the first of its text; recent results are cached.
    """

    def __init__(self, anchor: PreTrainedTokenizerBase, augmenting: PreTrainedTokenizerBase) -> None:
        self.new_decoder = incremental_decoders(anchor)
        self.special = set(anchor.all_special_ids)
        self.end_of_text: dict[int, list[int]] = {}
        if anchor.eos_token_id is not None and augmenting.eos_token_id is not None:
            self.end_of_text = {int(anchor.eos_token_id): [int(augmenting.eos_token_id)]}  # type: ignore[arg-type]  # one id, for a text
        self.bos = leading_bos(augmenting)
        # A copy, because transformers changes padding and truncation of its own tokenizer while threads use it.
        self._tokenizer = Tokenizer.from_str(augmenting.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # defined by fast tokenizers
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.tokens_of = lru_cache(maxsize=1 << 16)(self._tokens_of)

    def _tokens_of(self, word: str, first: bool) -> tuple[int, ...]:
        """Return the augmenting tokens of a word inside a text.

        Args:
            word: the word, with the white space before it.
            first: whether the word is the first of its text, which some tokenizers mark.
        """
        if not first:
            # A character before the word, whose tokens are left out again, so that the word is not the first one.
            for anchor in _ANCHORS:
                encoding = self._tokenizer.encode(anchor + word, add_special_tokens=False)
                is_separate = all(start >= 1 or stop <= 1 for start, stop in encoding.offsets)
                if is_separate:
                    pairs = zip(encoding.ids, encoding.offsets, strict=True)
                    return tuple(token for token, (_, stop) in pairs if stop > 1)
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)


class TokenTree:
    """The augmenting tokens of one row.

    Args:
        retokenizer: the tokenizers of both models.

    Attributes:
        tokens: augmenting token of each node.
        parents: parent of each node; a negative number for the root of a document.
        depths: position of each node on its path.
        births: position of the anchor token with which each node was read.
        columns: column of each node among the augmenting model's tokens.
        columns_used: number of columns, including those that other rows use.
        ids: the anchor's tokens so far, `UNREAD` for those that are not read.
        base: node where the last complete word ends.
        end: node where the text that was read ends.
    """

    def __init__(self, retokenizer: Retokenizer) -> None:
        self._retokenizer = retokenizer
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.births: list[int] = []
        self.columns: list[int] = []
        self.columns_used = 0
        self.ids: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self._root = 0
        self.begin_document()

    @classmethod
    def rebuilt(cls, retokenizer: Retokenizer, ids: list[int], used_S: Tensor) -> TokenTree:
        """Build the tree again from the state that a cache keeps.

        Args:
            retokenizer: the tokenizers of both models.
            ids: the anchor's tokens so far, `UNREAD` for those that are not read.
            used_S: (S,), True for the columns of the tree's nodes.

        Returns:
            The tree of a single document, since documents of a row are separate only without a cache.
        """
        tree = cls(retokenizer)
        for token in ids:
            if token == UNREAD:
                tree.skip()
            else:
                tree.add(token)
        tree.columns = used_S.nonzero().squeeze(-1).tolist()
        tree.columns_used = len(used_S)
        return tree

    def begin_document(self) -> None:
        """Start the next document of the row, whose tokens descend from a root of their own."""
        self._root -= 1
        self._decode = self._retokenizer.new_decoder()
        self.base = self._root
        self.end = self._root
        self._word = ""  # text of the incomplete word
        self._position = -1  # position of the last anchor token in its document
        self._is_first_word = True

    def skip(self) -> None:
        """Record an anchor token that the augmenting model does not read."""
        self.ids.append(UNREAD)

    def add(self, token: int) -> None:
        """Read one anchor token: add the nodes that its characters require, and move `base` and `end`.

        Args:
            token: id of the anchor token.
        """
        self.ids.append(token)
        self._position += 1
        bos = self._retokenizer.bos
        if self.base == self._root and bos is not None:
            self.base = self._extend(self.base, (bos,))
        if token in self._retokenizer.special:
            self._end_text(token)
        else:
            self._add_text(self._decode(token))
        self.end = self._extend(self.base, self._tokens(self._word))

    def _end_text(self, special_token: int) -> None:
        """Complete the current word, and append the tokens that correspond to a special token."""
        self._complete(self._word)
        self._decode = self._retokenizer.new_decoder()
        self._word = ""
        self.base = self._extend(self.base, self._retokenizer.end_of_text.get(special_token, ()))

    def _add_text(self, text: str) -> None:
        """Append characters to the current word, and complete all words that can't grow any more."""
        self._word += text
        cut = _end_of_word(self._word)
        while cut is not None:
            self._complete(self._word[:cut])
            self._word = self._word[cut:]
            cut = _end_of_word(self._word)

    def _complete(self, word: str) -> None:
        self.base = self._extend(self.base, self._tokens(word))
        if word:
            self._is_first_word = False

    def _tokens(self, word: str) -> tuple[int, ...]:
        if not word:
            return ()
        return self._retokenizer.tokens_of(word, self._is_first_word)

    def _extend(self, node: int, tokens: Sequence[int]) -> int:
        """Follow tokens from a node, adding the nodes that are missing, and return the last node."""
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                child = self._add_node(node, token)
            node = child
        return node

    def _add_node(self, parent: int, token: int) -> int:
        node = len(self.tokens)
        self._children[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        self.births.append(self._position)
        return node

    def path_masks(self, ends: Sequence[int], columns: int) -> np.ndarray:
        """Compute the columns on the paths that end at the given nodes.

        Args:
            ends: T nodes; a negative one means the empty path.
            columns: S, the number of columns of the result.

        Returns:
            (T, S) a mask, True for columns on the path.
        """
        masks = np.zeros((len(ends), columns), dtype=bool)
        known: dict[int, np.ndarray] = {}
        for mask, end in zip(masks, ends, strict=True):
            node = end
            while node >= 0 and node not in known:
                mask[self.columns[node]] = True
                node = self.parents[node]
            if node in known:
                mask |= known[node]
            known[end] = mask
        return masks


def _end_of_word(text: str) -> int | None:
    """Return the end of the first word of a growing text; None while the word may still grow."""
    for end in range(1, len(text)):
        is_boundary = text[end].isspace() and not text[end - 1].isspace()
        if is_boundary or end >= _MAX_WORD:
            return end
    return None
