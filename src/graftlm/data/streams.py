"""Streams of rows: documents are packed as they are read."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.backbone import padding_id
from graftlm.data.sources import Document
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from graftlm.data.boundaries import Boundaries, row_bounds
from graftlm.data.chunks import TextChunk, group_chunks, split_documents, tokenise
from graftlm.data.marked_ids import is_prompt, is_start, pad_row

GROUP_CHARACTERS = 1 << 19  # tokenizers are fastest on batches
STREAM_GROUP_CHARACTERS = 1 << 16


class RowPacker:
    """Packs the documents that `open_documents` opens at their beginning into rows of `length` tokens.

    With `repeat` it starts over after the last document instead of ending. `DataConfig` explains `boundaries`.

    Attributes:
        tail: marked ids (n,) that are tokenised and not yet in a row.
        chunks: number of chunks that were tokenised in this epoch.
        epoch: how often the documents were read to their end.
        n_tokens: number of tokens so far.
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
        self.length, self.pad_id = length, padding_id(tokenizer)
        self.boundaries: Boundaries = boundaries
        self.tail = np.empty(0, dtype=np.int32)
        self.chunks = self.epoch = self.n_tokens = 0
        self._open_documents, self._tokenizer, self._repeat = open_documents, tokenizer, repeat
        self._groups: Iterator[list[TextChunk]] | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        while (row := self.next_row()) is not None:
            yield row

    def next_row(self) -> np.ndarray | None:
        """The next row of marked ids (length,); None after the last one.

        Raises DataError if a repeated source has no text, or a document with a prompt must stay whole and does not fit.
        """
        needed = self.length + (self.boundaries == "whole")  # the token after a row shows whether a document ends there
        while len(self.tail) < needed and (group := self._next_group()):
            self._tokenise(group)
        if not len(self.tail):
            return None
        _, stop = next(row_bounds(self.tail[:needed], self.length, self.boundaries))
        row, self.tail = self.tail[:stop], self.tail[stop:]
        return pad_row(row, self.length)

    def resume(self, tail: np.ndarray, chunks: int, epoch: int) -> None:
        """Continue from the given attributes."""
        self.tail, self.chunks, self.epoch, self._groups = tail, chunks, epoch, None

    def _tokenise(self, group: list[TextChunk]) -> None:
        streams = tokenise(group, self._tokenizer)
        if self.boundaries == "whole":
            self._check_fits(group, streams)
        self.tail = np.concatenate([self.tail, *streams])
        self.chunks += len(group)
        self.n_tokens += sum(map(len, streams))

    def _next_group(self) -> list[TextChunk] | None:
        if self._groups is None:
            chunks = islice(split_documents(self._open_documents()), self.chunks, None)
            self._groups = group_chunks(chunks, STREAM_GROUP_CHARACTERS if self._repeat else GROUP_CHARACTERS)
        if (group := next(self._groups, None)) or not self._repeat:
            return group
        if not self.chunks:
            raise DataError("The streaming source gives no text: name a source with text that can be read again.")
        self.resume(self.tail, 0, self.epoch + 1)
        return self._next_group()

    def _check_fits(self, group: list[TextChunk], streams: list[np.ndarray]) -> None:
        """Raise `DataError` if a document with a prompt is longer than a row."""
        starts = np.flatnonzero(is_start(self.tail))
        last = self.tail[starts[-1] :] if len(starts) else self.tail
        size = len(last) if is_prompt(last).any() else None  # tokens of the current document, if it has a prompt
        for chunk, stream in zip(group, streams, strict=True):
            if chunk.first:
                size = 0 if chunk.prompt or chunk.chat is not None else None
            if size is not None and (size := size + len(stream)) > self.length:
                raise DataError(
                    f"{chunk.where} takes {size} tokens or more with its prompt, but a row holds {self.length} and "
                    "documents stay whole: raise the length, leave the row out, or set boundaries to separate."
                )


class StreamingBlocks:
    """Packed rows of one domain, out of an endless stream and in random order.

    A row is drawn at random out of a buffer of `buffer_rows` rows and replaced by the next row of the packer, which
    repeats its documents. The drawn position depends only on the key of `take` and the row's number.
    """

    def __init__(self, packer: RowPacker, *, buffer_rows: int = 256) -> None:
        self.length, self.pad_id = packer.length, packer.pad_id
        self.boundaries: Boundaries = packer.boundaries
        self._packer, self._buffer_rows, self._drawn = packer, buffer_rows, 0
        self._buffer = np.empty((0, self.length), dtype=np.int32)

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """The next `count` rows as marked ids, shape (count, length).

        Raises DataError if row `first` is not the next one, the source has no text, or a document with a prompt must
        stay whole and does not fit into a row.
        """
        if first != self._drawn:
            raise DataError(
                f"The stream stands at row {self._drawn}, but row {first} is asked for: streams go forward only, "
                "so load the state that was saved at that step."
            )
        if not len(self._buffer):
            self._buffer = np.array([self._packer.next_row() for _ in range(self._buffer_rows)], dtype=np.int32)
        return np.array([self._draw(key) for _ in range(count)], dtype=np.int32).reshape(count, self.length)

    def _draw(self, key: tuple[int, int]) -> np.ndarray:
        at = np.random.Generator(np.random.Philox([*key, self._drawn])).integers(self._buffer_rows)
        row = self._buffer[at].copy()
        row_after = self._packer.next_row()
        assert row_after is not None, "a packer that repeats has no last row"
        self._buffer[at] = row_after
        self._drawn += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next rows depend on, as plain JSON values."""
        return {
            "epoch": self._packer.epoch,
            "chunks": self._packer.chunks,
            "drawn": self._drawn,
            "tail": _encode(self._packer.tail),
            "buffer": _encode(self._buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same documents and length. Raises DataError if its buffer has another size."""
        buffer = _decode(state["buffer"])
        if len(buffer) not in (0, self._buffer_rows * self.length):
            raise DataError(
                f"The stream's state holds {len(buffer)} buffered tokens, but {self._buffer_rows} rows of "
                f"{self.length} are expected: resume with the data settings of the run that saved it."
            )
        self._packer.resume(_decode(state["tail"]), int(state["chunks"]), int(state["epoch"]))
        self._drawn, self._buffer = int(state["drawn"]), buffer.reshape(-1, self.length)


def _encode(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")


def _decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)
