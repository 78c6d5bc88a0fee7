"""Documents to rows of token ids.

Every document is tokenised with the BOS that its tokenizer puts before texts, if any, and ends with its EOS. The ids of
all documents make one stream, cut into rows of `length`; the last row is filled up with padding. Where documents stay
whole, a row ends before the first one that it has no room for, and every row is filled up; plain text that is longer
than a row is cut all the same, and a document with a prompt never.

A prompt is tokenised apart from the text that completes it, as it is when text is generated; the BOS belongs to it.

A stream is held as *marked* ids, int32: `id` inside a document, `~id` (negative) for its first token, `PADDING` after
the last, and the bit `PROMPT` in the ids of a prompt. So one array carries ids, prompts, document starts and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import leading_bos, padding_id
from graftlm.data.documents import Document
from graftlm.errors import DataError

Boundaries = Literal["separate", "joined", "whole"]
Progress = Callable[[int], None]

PADDING = np.iinfo(np.int32).min
PROMPT = 1 << 30  # far above every vocabulary, and ~(id | PROMPT) is never PADDING
PIECE_CHARACTERS = 1 << 18
GROUP_CHARACTERS = 1 << 19


@dataclass(frozen=True, slots=True)
class Piece:
    """A document's prompt or text, or a part of a very long one."""

    text: str
    first: bool
    last: bool
    prompt: bool = False
    where: str = ""


def unmark(marked: np.ndarray, pad_id: int) -> np.ndarray:
    """Plain ids of marked ids of any shape."""
    return np.where(marked == PADDING, pad_id, np.where(marked < 0, ~marked, marked) & ~PROMPT)


def is_start(marked: np.ndarray) -> np.ndarray:
    """Which marked ids are the first of a document."""
    return (marked < 0) & (marked != PADDING)


def is_prompt(marked: np.ndarray) -> np.ndarray:
    """Which marked ids belong to a prompt."""
    return (np.where(marked < 0, ~marked, marked) & PROMPT).astype(bool) & (marked != PADDING)


def cut_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """Prompts and texts of at most `PIECE_CHARACTERS` whole; longer ones cut at line ends, which bounds the memory.

    A cut lies between a line's last character and the next line's first, where tokenizers split anyway; one that
    marks the start of a text may add a single token per cut.
    """
    for document in documents:
        if not document.text:
            continue
        first = True
        for text, prompt in ((document.prompt, True), (document.text, False)):
            start = 0
            while start < len(text):
                stop = _line_end(text, start, start + PIECE_CHARACTERS)
                last = not prompt and stop == len(text)
                yield Piece(text[start:stop], first, last, prompt, document.where)
                start, first = stop, False


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
    """Pieces in lists of about so many characters, since tokenizers are fastest on batches; a prompt ends none."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= characters and not piece.prompt:
            yield group
            group, size = [], 0
    if group:
        yield group


def tokenise(group: list[Piece], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """The marked ids of each of a group's pieces, of shape (its tokens,)."""
    texts = [piece.text for piece in group]
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    all_ids: list[list[int]] = encoded["input_ids"]
    eos_id: int | None = tokenizer.eos_token_id  # type: ignore[assignment]
    bos_id = leading_bos(tokenizer)
    streams, starts = [], False
    for ids, piece in zip(all_ids, group, strict=True):
        stream = _marked(ids, piece, bos_id, eos_id)
        starts = starts or piece.first
        if starts and len(stream):  # a prompt of blanks may have no token, and the text after it begins the document
            stream[0], starts = ~stream[0], False
        streams.append(stream)
    return streams


def _marked(ids: list[int], piece: Piece, bos_id: int | None, eos_id: int | None) -> np.ndarray:
    begin = [bos_id] if piece.first and bos_id is not None else []
    end = [eos_id] if piece.last and eos_id is not None else []
    stream = np.array([*begin, *ids, *end], dtype=np.int32)
    return stream | np.int32(PROMPT) if piece.prompt else stream


def check_fits(group: list[Piece], streams: list[np.ndarray], length: int, begun: int | None) -> int | None:
    """Make sure that every document with a prompt fits into a row.

    Args:
        begun: how many tokens such a document, with which the group goes on, has before the group; None for none.

    Returns:
        What `begun` is for the next group.

    Raises:
        DataError: one does not fit.
    """
    for piece, stream in zip(group, streams, strict=True):
        if piece.first:
            begun = 0 if piece.prompt else None
        if begun is None:
            continue
        begun += len(stream)
        if begun > length:
            raise DataError(
                f"{piece.where} takes {begun} tokens or more with its prompt, but a row holds {length} and documents "
                "stay whole: raise the length, leave the row out, or set boundaries to separate."
            )
    return begun


def row_end(stream: np.ndarray, length: int, boundaries: Boundaries) -> int:
    """How many of a stream's first tokens make the next row; where documents stay whole, those of all that fit.

    The stream holds more tokens than a row, or is the last of its kind.
    """
    if boundaries != "whole" or len(stream) <= length:
        return min(length, len(stream))
    starts = np.flatnonzero(is_start(stream[1 : length + 1]))
    return 1 + int(starts[-1]) if len(starts) else length


def filled(row: np.ndarray, length: int) -> np.ndarray:
    """A row of `length` marked ids, padded at its end."""
    return np.concatenate([row, np.full(length - len(row), PADDING, dtype=np.int32)])


class TokenBlocks:
    """Packed rows of one domain, in memory.

    Attributes:
        marked: int32, shape (N, length).
        length: tokens per row.
        boundaries: "separate" (no document sees or predicts another), "whole" (nor is one cut that fits into a row) or
            "joined" (one plain stream).
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
        return is_start(self.marked)

    @property
    def prompt(self) -> np.ndarray:
        """Which tokens belong to a prompt, bool, shape (N, length)."""
        return is_prompt(self.marked)

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
        DataError: the documents hold too few tokens for one row, or one with a prompt is to stay whole and can't.
    """
    collected: list[np.ndarray] = []
    begun = None
    for group in group_pieces(cut_pieces(documents)):
        streams = tokenise(group, tokenizer)
        if boundaries == "whole":
            begun = check_fits(group, streams, length, begun)
        collected += streams
        if progress is not None:
            progress(sum(len(piece.text) for piece in group))
    stream = np.concatenate(collected) if collected else np.empty(0, dtype=np.int32)
    if len(stream) < (1 if boundaries == "whole" else length):
        raise DataError(
            f"{name}: {len(stream)} tokens in all, but one row takes {length}: add text, or lower the length."
        )
    return TokenBlocks(split_rows(stream, length, boundaries), boundaries=boundaries, pad_id=padding_id(tokenizer))


def split_rows(stream: np.ndarray, length: int, boundaries: Boundaries) -> np.ndarray:
    """All rows of a whole stream, shape (N, length)."""
    if boundaries != "whole":
        return filled(stream, len(stream) + -len(stream) % length).reshape(-1, length)
    rows, start = [], 0
    while start < len(stream):
        stop = start + row_end(stream[start : start + length + 1], length, boundaries)
        rows.append(filled(stream[start:stop], length))
        start = stop
    return np.stack(rows)
