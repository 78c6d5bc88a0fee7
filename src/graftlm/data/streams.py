"""Streams of rows: documents are packed while they are read."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.backbone import padding_id
from graftlm.backbone.chat_templates import ignored_keys
from graftlm.data.boundaries import Boundaries, row_bounds
from graftlm.data.chunks import TextChunk, group_chunks, split_documents, tokenize
from graftlm.data.marked_ids import PADDING, is_prompt, is_start, pad_row
from graftlm.data.sources import Document
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokenizers are fastest on batches of texts. Streams take smaller ones, which bounds their memory.
GROUP_CHARACTERS = 1 << 19
STREAM_GROUP_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class TextRead:
    """How much of a source was read.

    Attributes:
        source: title of the source.
        tokens: number of its tokens; of a stream that has not come to its end, those of the rows that were drawn.
        passes: number of times that they were drawn; None for a stream that has not come to its end.
        drawn: number of its tokens in the rows that were drawn, as often as they were drawn.
    """

    source: str
    tokens: int
    passes: float | None
    drawn: float


class RowPacker:
    """Pack documents into rows of tokens.

    Args:
        open_documents: called without arguments at the beginning of each epoch; returns all documents in a fixed order.
        tokenizer: the backbone's tokenizer.
        length: number of tokens of a row.
        boundaries: how documents share rows; see `DataConfig`.
        repeat: start again after the last document, so that the rows never end.

    Attributes:
        tail: int32, (n,), marked ids that are tokenized and not yet in a row.
        chunks: number of chunks that were tokenized in this epoch.
        epoch: number of times that the documents were read to their end.
        tokens_by_source: number of tokens that were tokenized of each source, over all epochs.
        epoch_tokens: number of tokens of all documents; None before they were read to their end.
        ignored_keys: number of messages with each key that the chat template does not read, and of rows with
            each column that is not read although other programs would read it.
    """

    def __init__(
        self,
        open_documents: Callable[[], Iterable[Document]],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        boundaries: Boundaries = "separate",
        *,
        repeat: bool = False,
    ) -> None:
        self.length = length
        self.boundaries: Boundaries = boundaries
        self.pad_id = padding_id(tokenizer)
        self.tail = np.empty(0, dtype=np.int32)
        self.chunks = 0
        self.epoch = 0
        self.tokens_by_source: Counter[str] = Counter()
        self.epoch_tokens: int | None = None
        self.ignored_keys: Counter[str] = Counter()
        self._open_documents = open_documents
        self._tokenizer = tokenizer
        self._repeat = repeat
        self._groups: Iterator[list[TextChunk]] | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        row = self.next_row()
        while row is not None:
            yield row
            row = self.next_row()

    def next_row(self) -> np.ndarray | None:
        """Return the next row, or None after the last one: marked ids, int32, (length,), padded at the end.

        Errors of `open_documents` and of its iterator are passed on.

        Raises:
            DataError: documents that are repeated have no text; a conversation does not fit the tokenizer's chat
                template; or `boundaries` is `whole`, and a conversation or a document with a prompt is longer than a
                row.
        """
        needed = self.length
        if self.boundaries == "whole":
            needed += 1  # The token after a row shows whether a document ends with the row.
        while len(self.tail) < needed:
            group = self._next_group()
            if group is None:
                break
            self._add(group)
        if not len(self.tail):
            return None
        _, stop = next(row_bounds(self.tail[:needed], self.length, self.boundaries))
        row = self.tail[:stop]
        self.tail = self.tail[stop:]
        return pad_row(row, self.length)

    def resume(self, tail: np.ndarray, chunks: int, epoch: int) -> None:
        """Continue where another packer of the same documents was.

        Args:
            tail: its `tail`.
            chunks: its `chunks`.
            epoch: its `epoch`.
        """
        self.tail = tail
        self.chunks = chunks
        self.epoch = epoch
        self._groups = None

    def _add(self, group: Sequence[TextChunk]) -> None:
        """Tokenize chunks and append them to the tail."""
        streams = tokenize(group, self._tokenizer)
        if self.boundaries == "whole":
            self._check_fits(group, streams)
        self.tail = np.concatenate([self.tail, *streams])
        self.chunks += len(group)
        for chunk, stream in zip(group, streams, strict=True):
            self.tokens_by_source[chunk.source] += len(stream)
            self.ignored_keys.update(f"column {name}" for name in chunk.unread)
            if chunk.chat is not None:
                self.ignored_keys.update(ignored_keys(self._tokenizer, chunk.chat.messages))

    def _next_group(self) -> list[TextChunk] | None:
        """Return the next chunks, from the first document on at the end of an epoch; None after the last ones."""
        group = next(self._open_groups(), None)
        if group is not None or not self._repeat:
            return group
        if not self.chunks:
            raise DataError("The streaming source has no text: name a source with text that can be read repeatedly.")
        if self.epoch == 0:
            self.epoch_tokens = self.tokens_by_source.total()
        self.resume(self.tail, 0, self.epoch + 1)
        return self._next_group()

    def _open_groups(self) -> Iterator[list[TextChunk]]:
        """Return the groups that follow the chunks of this epoch so far."""
        if self._groups is None:
            chunks = islice(split_documents(self._open_documents()), self.chunks, None)
            characters = STREAM_GROUP_CHARACTERS if self._repeat else GROUP_CHARACTERS
            self._groups = group_chunks(chunks, characters)
        return self._groups

    def _check_fits(self, group: Sequence[TextChunk], streams: Sequence[np.ndarray]) -> None:
        """Raise `DataError` if a document with a prompt is longer than a row."""
        size = self._last_document_size()
        for chunk, stream in zip(group, streams, strict=True):
            if chunk.first:
                has_prompt = chunk.prompt or chunk.chat is not None
                size = 0 if has_prompt else None
            if size is None:
                continue
            size += len(stream)
            if size > self.length:
                raise DataError(
                    f"{chunk.where} has at least {size} tokens with its prompt, but boundaries is whole and a row has "
                    f"only {self.length}: raise the length, leave the text out, or set boundaries to separate."
                )

    def _last_document_size(self) -> int | None:
        """Return the number of tokens of the last document in the tail if it has a prompt, else None."""
        starts = np.flatnonzero(is_start(self.tail))
        document = self.tail[starts[-1] :] if len(starts) else self.tail
        return len(document) if is_prompt(document).any() else None


class StreamingBlocks:
    """Packed rows of one domain, read from an endless stream and in random order.

    A row is drawn at random from a buffer and replaced by the next row of the packer. The position in the buffer
    depends only on the key of `take` and the number of the row.

    Args:
        packer: a packer with `repeat=True`. It is advanced by `take`.
        buffer_rows: number of rows of the buffer, at least 1. The whole buffer is filled before the first draw.
    """

    def __init__(self, packer: RowPacker, *, buffer_rows: int = 256) -> None:
        self.length = packer.length
        self.pad_id = packer.pad_id
        self.boundaries: Boundaries = packer.boundaries
        self._packer = packer
        self._buffer_rows = buffer_rows
        self._buffer = np.empty((0, self.length), dtype=np.int32)
        self._drawn = 0
        self._drawn_tokens = 0

    @property
    def ignored_keys(self) -> Mapping[str, int]:
        """How often each key of messages and column beside them was not read so far; see `RowPacker`."""
        return self._packer.ignored_keys

    def text_read(self, rows: int) -> list[TextRead]:
        """Return how much of each source was drawn; `rows`, the number of drawn rows, is known already."""
        counts = self._packer.tokens_by_source
        drawn = self._drawn_tokens
        whole = self._packer.epoch_tokens
        tokens = drawn if whole is None else whole
        passes = None if whole is None else drawn / whole
        # Rows don't tell their source. A stream of a recipe has one, and others share as in the text read ahead.
        shares = {source: count / counts.total() for source, count in counts.items()}
        return [TextRead(source, round(share * tokens), passes, share * drawn) for source, share in shares.items()]

    def take(self, first: int, count: int, key: tuple[int, ...]) -> np.ndarray:
        """Draw the next `count` rows from the buffer.

        Args:
            first: number of the first row, from 0; it must be the number of rows drawn so far.
            count: number of rows to draw.
            key: the seed, the domain and, of several sources, the number of the source, which determine the draws.

        Returns:
            Marked ids, int32, (count, length).

        Raises:
            DataError: `first` is not the next row, or the packer can't read or pack the next documents.
        """
        if first != self._drawn:
            raise DataError(
                f"The stream is at row {self._drawn}, but row {first} was requested: streams only go forward, so load "
                "the state that was saved at that step."
            )
        if not len(self._buffer):
            rows = [self._packer.next_row() for _ in range(self._buffer_rows)]
            self._buffer = np.array(rows, dtype=np.int32)
        drawn = [self._draw(key) for _ in range(count)]
        return np.array(drawn, dtype=np.int32).reshape(count, self.length)

    def draw(self, first: int, count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of `take`, and the number of the source of each, int64, (count,), which is 0 here."""
        return self.take(first, count, key), np.zeros(count, dtype=np.int64)

    def _draw(self, key: tuple[int, ...]) -> np.ndarray:
        """Return a random row of the buffer, and replace it by the next row of the packer."""
        generator = np.random.Generator(np.random.Philox([*key, self._drawn]))
        position = generator.integers(self._buffer_rows)
        row = self._buffer[position].copy()
        next_row = self._packer.next_row()
        assert next_row is not None, "a packer that repeats has no last row"
        self._buffer[position] = next_row
        self._drawn += 1
        self._drawn_tokens += int(np.count_nonzero(row != PADDING))
        return row

    def state_dict(self) -> dict[str, object]:
        """Return everything that determines the next rows, as plain JSON values."""
        return {
            "epoch": self._packer.epoch,
            "chunks": self._packer.chunks,
            "drawn": self._drawn,
            "drawn_tokens": self._drawn_tokens,
            "tokens_by_source": dict(self._packer.tokens_by_source),
            "epoch_tokens": self._packer.epoch_tokens,
            "tail": _encode_ids(self._packer.tail),
            "buffer": _encode_ids(self._buffer),
        }

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the present `state_dict()`, even after later rows have been drawn."""
        copied = copy(self)
        copied._packer = copy(self._packer)  # a packer replaces its tail, and does not change it in place
        copied._packer.tokens_by_source = self._packer.tokens_by_source.copy()
        copied._buffer = self._buffer.copy()
        return copied.state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of a stream with the same documents, tokenizer, boundaries and sizes.

        Raises:
            DataError: the state's buffer is neither empty nor as large as this stream's.
        """
        buffer = _decode_ids(state["buffer"])
        if len(buffer) not in (0, self._buffer_rows * self.length):
            raise DataError(
                f"The stream's state has {len(buffer):,} tokens in its buffer, but {self._buffer_rows} rows of "
                f"{self.length} tokens are expected: resume with the data settings of the run that saved it."
            )
        self._packer.resume(
            tail=_decode_ids(state["tail"]),
            chunks=int(state["chunks"]),
            epoch=int(state["epoch"]),
        )
        self._packer.tokens_by_source = Counter(state.get("tokens_by_source", {}))
        self._packer.epoch_tokens = state.get("epoch_tokens")
        self._drawn = int(state["drawn"])
        # Earlier versions did not count tokens; their rows are taken to be full.
        self._drawn_tokens = int(state.get("drawn_tokens", self._drawn * self.length))
        self._buffer = buffer.reshape(-1, self.length)


def _encode_ids(ids: np.ndarray) -> str:
    """Return ids as little-endian int32 in base64."""
    return base64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")


def _decode_ids(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)
