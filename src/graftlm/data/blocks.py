"""Rows of tokens in memory, packed from documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graftlm.data.boundaries import Boundaries, check_rows
from graftlm.data.marked_ids import PADDING, is_unscored, unmark
from graftlm.data.rows import is_predicted
from graftlm.data.sources import Document
from graftlm.data.streams import RowPacker, TextRead

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Digest(Protocol):
    """A hash that bytes can be added to."""

    def update(self, data: bytes, /) -> object:
        """Add bytes."""


@dataclass(frozen=True)
class RowsWithoutTarget:
    """Numbers of rows that have no predicted token.

    Attributes:
        unscored: rows with tokens of prompts, or of turns of conversations that are not learned.
        single: other rows. They have a single token of each of their documents, such as a last row of one token: the
            first token of a row is not predicted and, unless documents are joined, neither is that of a document.
    """

    unscored: int
    single: int


_COUNTED_ROWS = 4096  # rows that are looked through together, which bounds the memory


@dataclass(eq=False)
class TokenBlocks:
    """Packed rows of one domain, in memory.

    Attributes:
        marked: marked ids, int32, (N, length); see `graftlm.data.marked_ids`.
        boundaries: how documents share rows; see `DataConfig`.
        pad_id: the token id of padding.
        ignored_keys: see `RowPacker`.
        tokens_by_source: number of tokens of each source.
    """

    marked: np.ndarray
    boundaries: Boundaries = "separate"
    pad_id: int = 0
    ignored_keys: Mapping[str, int] = field(default_factory=dict)
    tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    _order: tuple[tuple[int, ...], np.ndarray] = field(default=((), np.empty(0)), init=False, repr=False)

    def __len__(self) -> int:
        return len(self.marked)

    @property
    def length(self) -> int:
        """Number of tokens of a row."""
        return self.marked.shape[1]

    @property
    def input_ids(self) -> np.ndarray:
        """Plain token ids, int32, (N, length)."""
        return unmark(self.marked, self.pad_id)

    def without_target(self) -> RowsWithoutTarget:
        """Return the numbers of rows that have no predicted token."""
        unscored = 0
        single = 0
        for start in range(0, len(self), _COUNTED_ROWS):
            rows = self.marked[start : start + _COUNTED_ROWS]
            without = ~is_predicted(rows, self.boundaries).any(axis=1)
            has_unscored = is_unscored(rows).any(axis=1)
            unscored += int((without & has_unscored).sum())
            single += int((without & ~has_unscored).sum())
        return RowsWithoutTarget(unscored, single)

    def n_tokens(self) -> int:
        """Return the number of tokens of all rows, without padding."""
        parts = range(0, len(self), _COUNTED_ROWS)
        return sum(int(np.count_nonzero(self.marked[start : start + _COUNTED_ROWS] != PADDING)) for start in parts)

    def text_read(self, rows: int) -> list[TextRead]:
        """Return how much of each source was read in the first `rows` rows of `take`."""
        passes = rows / len(self)
        return [
            TextRead(source, tokens, passes, drawn=tokens * passes) for source, tokens in self.tokens_by_source.items()
        ]

    def add_to_digest(self, digest: Digest) -> None:
        """Add everything that determines the rows of `take`, besides its key, to a digest."""
        digest.update(self.marked.tobytes())

    def take(self, first: int, count: int, key: tuple[int, ...]) -> np.ndarray:
        """Return rows of an endless sequence in which each epoch is a new order of all rows.

        There must be at least one row.

        Args:
            first: position of the first returned row in the sequence, from 0.
            count: number of rows to return.
            key: the seed, the domain and, of several sources, the number of the source. The order depends only on
                these and on the epoch.

        Returns:
            Marked ids, int32, (count, length).
        """
        return self.marked[self.order(first, count, key)]

    def draw(self, first: int, count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of `take`, and the number of the source of each, int64, (count,), which is 0 here."""
        return self.take(first, count, key), np.zeros(count, dtype=np.int64)

    def order(self, first: int, count: int, key: tuple[int, ...]) -> np.ndarray:
        """Return which rows `take` returns, int64, (count,)."""
        parts = [np.empty(0, dtype=np.int64)]
        position = first
        while position < first + count:
            epoch, place = divmod(position, len(self))
            stop = min(len(self), place + first + count - position)
            parts.append(self._epoch_order((*key, epoch))[place:stop])
            position += stop - place
        return np.concatenate(parts)

    def _epoch_order(self, key: tuple[int, ...]) -> np.ndarray:
        """Return the order of the rows in an epoch; the key is that of `take`, and the epoch. The last one is kept."""
        kept, order = self._order
        if kept != key:
            order = np.random.Generator(np.random.Philox(key)).permutation(len(self))
            self._order = (key, order)
        return order


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    boundaries: Boundaries = "separate",
    name: str = "The documents",
) -> TokenBlocks:
    """Tokenize documents and pack them into rows.

    A last row with too few tokens is padded.

    Args:
        documents: the documents, read once.
        tokenizer: the backbone's tokenizer.
        length: number of tokens of a row.
        boundaries: how documents share rows; see `DataConfig`.
        name: the name of the documents in error messages.

    Raises:
        DataError: the documents have too few tokens for a row, a conversation does not fit the tokenizer's chat
            template, or `boundaries` is `whole` and a conversation or a document with a prompt is longer than a row.
    """
    packer = RowPacker(lambda: documents, tokenizer, length, boundaries)
    rows = list(packer)
    check_rows(packer.tokens_by_source.total(), length, boundaries, name)
    return TokenBlocks(
        np.stack(rows),
        boundaries=boundaries,
        pad_id=packer.pad_id,
        ignored_keys=packer.ignored_keys,
        tokens_by_source=packer.tokens_by_source,
    )
