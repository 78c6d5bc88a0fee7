"""Documents to rows of token ids.

Every document is tokenised with the BOS that its tokenizer puts before texts, if any, and ends with its EOS. The ids of
all documents make one stream, cut into rows of `length`; the last row is filled up with padding.

A stream is held as *marked* ids, int32: `id` inside a document, `~id` (negative) for its first token, `PADDING` after
the last. So one array carries ids, document starts and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from graftlm.data.documents import Document
from graftlm.errors import DataError

Boundaries = Literal["separate", "joined"]
Progress = Callable[[int], None]

PADDING = np.iinfo(np.int32).min
PIECE_CHARACTERS = 1 << 18
GROUP_CHARACTERS = 1 << 19


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of a very long one."""

    text: str
    first: bool
    last: bool


def unmark(marked: np.ndarray, pad_id: int) -> np.ndarray:
    """Plain ids of marked ids of any shape."""
    return np.where(marked == PADDING, pad_id, np.where(marked < 0, ~marked, marked))


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills rows up: the tokenizer's padding, else EOS, else 0. It is never seen nor predicted."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(value) for value in ids if value is not None), 0)  # type: ignore[arg-type]


def cut_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """Documents of at most `PIECE_CHARACTERS` whole; longer ones cut at line ends, which bounds the memory.

    A cut lies between a line's last character and the next line's first, where tokenizers split anyway; one that
    marks the start of a text may add a single token per cut.
    """
    for document in documents:
        start, text = 0, document.text
        while start < len(text):
            stop = _line_end(text, start, start + PIECE_CHARACTERS)
            yield Piece(text[start:stop], first=start == 0, last=stop == len(text))
            start = stop


def _line_end(text: str, start: int, stop: int) -> int:
    """The best place to cut before `stop`: after a newline between two visible characters, else at `stop`."""
    if stop >= len(text):
        return len(text)
    at = text.rfind("\n", start + 1, stop)
    while at > start:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", start + 1, at)
    return stop


def group_pieces(pieces: Iterable[Piece], characters: int = GROUP_CHARACTERS) -> Iterator[list[Piece]]:
    """Pieces in lists of about so many characters, since tokenizers are fastest on batches."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def tokenise(group: list[Piece], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The marked ids of a group of pieces, shape (tokens,)."""
    texts = [piece.text for piece in group]
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    all_ids: list[list[int]] = encoded["input_ids"]
    eos_id: int | None = tokenizer.eos_token_id  # type: ignore[assignment]
    bos_id = leading_bos(tokenizer)
    return np.concatenate([_marked(ids, piece, bos_id, eos_id) for ids, piece in zip(all_ids, group, strict=True)])


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS token that the tokenizer puts before every text by itself, or None.

    Models that were trained so predict badly without it, so documents begin with it in training as in scoring.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bos if ids and ids[0] == bos else None


def _marked(ids: list[int], piece: Piece, bos_id: int | None, eos_id: int | None) -> np.ndarray:
    begin = [bos_id] if piece.first and bos_id is not None else []
    end = [eos_id] if piece.last and eos_id is not None else []
    stream = np.array([*begin, *ids, *end], dtype=np.int32)
    if piece.first and len(stream):
        stream[0] = ~stream[0]
    return stream


class TokenBlocks:
    """Packed rows of one domain, in memory.

    Attributes:
        marked: int32, shape (N, length).
        length: tokens per row.
        boundaries: "separate" (no document sees or predicts another) or "joined" (one plain stream).
        pad_id: the id that stands where `marked` is padding.
    """

    def __init__(self, marked: np.ndarray, *, boundaries: Boundaries = "separate", pad_id: int = 0) -> None:
        self.marked = marked
        self.length = marked.shape[1]
        self.boundaries: Boundaries = boundaries
        self.pad_id = pad_id

    def __len__(self) -> int:
        return len(self.marked)

    @property
    def input_ids(self) -> np.ndarray:
        """Plain ids, int32, shape (N, length)."""
        return unmark(self.marked, self.pad_id)

    @property
    def starts(self) -> np.ndarray:
        """Where a document starts, bool, shape (N, length)."""
        return (self.marked < 0) & (self.marked != PADDING)

    @property
    def n_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.marked != PADDING).sum())

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """Rows `first` to `first + count` of an endless sequence in which every epoch is a new order of all rows.

        The order depends on `key` (seed, domain) and the epoch alone. Returns marked ids, shape (count, length).
        """
        wanted = np.arange(first, first + count)
        rows = np.empty(count, dtype=np.int64)
        epochs = wanted // len(self)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = self._order(int(epoch), key)[wanted[here] % len(self)]
        return self.marked[rows]

    def _order(self, epoch: int, key: tuple[int, int]) -> np.ndarray:
        wanted = (epoch, *key)
        if getattr(self, "_held", None) != wanted:
            self._held = wanted
            self._held_order = np.random.Generator(np.random.Philox([*key, epoch])).permutation(len(self))
        return self._held_order


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    boundaries: Boundaries = "separate",
    progress: Progress | None = None,
    name: str = "The documents",
) -> TokenBlocks:
    """Tokenise `documents` and cut the stream of ids into rows of `length`.

    Args:
        progress: called after every chunk with the number of characters done since the last call.
        name: what to call the documents in an error.

    Raises:
        DataError: the documents hold too few tokens for one row.
    """
    streams: list[np.ndarray] = []
    for group in group_pieces(cut_pieces(documents)):
        streams.append(tokenise(group, tokenizer))
        if progress is not None:
            progress(sum(len(piece.text) for piece in group))
    stream = np.concatenate(streams) if streams else np.empty(0, dtype=np.int32)
    if len(stream) < length:
        raise DataError(
            f"{name}: {len(stream)} tokens in all, but one row takes {length}: add text, or lower the length."
        )
    padding = np.full(-len(stream) % length, PADDING, dtype=np.int32)
    marked = np.concatenate([stream, padding]).reshape(-1, length)
    return TokenBlocks(marked, boundaries=boundaries, pad_id=pad_id_of(tokenizer))
