"""Rows of a source that is read while training goes on, with a state from which the same rows follow."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import padding_id
from graftlm.data.documents import Document
from graftlm.data.packing import (
    Boundaries,
    Piece,
    check_fits,
    cut_pieces,
    filled,
    group_pieces,
    is_prompt,
    is_start,
    row_end,
    tokenise,
)
from graftlm.errors import DataError

STREAM_GROUP_CHARACTERS = 1 << 16


class StreamingBlocks:
    """Packed rows out of an endless stream; when the documents end they start anew.

    Rows are drawn at random out of a buffer of `buffer_rows`, each replaced by the stream's next row. Which one is
    drawn depends on the key of `take` and the row's number alone.
    """

    def __init__(
        self,
        open_documents: Callable[[], Iterable[Document]],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        boundaries: Boundaries = "separate",
        buffer_rows: int = 256,
    ) -> None:
        self.length = length
        self.boundaries: Boundaries = boundaries
        self.pad_id = padding_id(tokenizer)
        self._open_documents = open_documents
        self._tokenizer = tokenizer
        self._buffer_rows = buffer_rows
        self._groups: Iterator[list[Piece]] | None = None
        self._epoch = self._pieces = self._drawn = 0
        self._tail = np.empty(0, dtype=np.int32)
        self._buffer = np.empty((0, length), dtype=np.int32)

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """The next `count` rows as marked ids, shape (count, length).

        Raises:
            DataError: row `first` is not the next one, the source gives no text, or a document with a prompt is to stay
                whole and does not fit into a row.
        """
        if first != self._drawn:
            raise DataError(
                f"The stream stands at row {self._drawn}, but row {first} is asked for: streams go forward only, "
                "so load the state that was saved at that step."
            )
        if not len(self._buffer):
            self._buffer = np.stack([self._next_row() for _ in range(self._buffer_rows)])
        return np.array([self._draw(key) for _ in range(count)], dtype=np.int32).reshape(count, self.length)

    def _draw(self, key: tuple[int, int]) -> np.ndarray:
        at = np.random.Generator(np.random.Philox([*key, self._drawn])).integers(self._buffer_rows)
        row = self._buffer[at].copy()
        self._buffer[at] = self._next_row()
        self._drawn += 1
        return row

    def _next_row(self) -> np.ndarray:
        # Whether a document ends with the row shows in the token after it.
        needed = self.length + (self.boundaries == "whole")
        while len(self._tail) < needed:
            group = self._next_group()
            streams = tokenise(group, self._tokenizer)
            if self.boundaries == "whole":
                check_fits(group, streams, self.length, self._begun())
            self._tail = np.concatenate([self._tail, *streams])
            self._pieces += len(group)
        stop = row_end(self._tail, self.length, self.boundaries)
        row, self._tail = filled(self._tail[:stop], self.length), self._tail[stop:]
        return row

    def _begun(self) -> int | None:
        """How many tokens the last document in the tail has so far, if it is one with a prompt."""
        starts = np.flatnonzero(is_start(self._tail))
        last = self._tail[starts[-1] :] if len(starts) else self._tail
        return len(last) if is_prompt(last).any() else None

    def _next_group(self) -> list[Piece]:
        if self._groups is None:
            pieces = islice(cut_pieces(self._open_documents()), self._pieces, None)
            self._groups = group_pieces(pieces, STREAM_GROUP_CHARACTERS)
        group = next(self._groups, None)
        if group is not None:
            return group
        if not self._pieces:
            raise DataError("The streaming source gives no text: name a source with text that can be read again.")
        self._groups, self._pieces, self._epoch = None, 0, self._epoch + 1
        return self._next_group()

    @property
    def epoch(self) -> int:
        """How often the documents came to their end."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next rows depend on, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "pieces": self._pieces,
            "drawn": self._drawn,
            "tail": _pack_bytes(self._tail),
            "buffer": _pack_bytes(self._buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same documents, tokenizer and length.

        Raises:
            DataError: the state does not fit.
        """
        buffer = _unpack_bytes(state["buffer"])
        if len(buffer) not in (0, self._buffer_rows * self.length):
            raise DataError(
                f"The stream's state holds {len(buffer)} buffered tokens, but {self._buffer_rows} rows of "
                f"{self.length} are expected: resume with the data settings of the run that saved it."
            )
        self._epoch, self._pieces, self._drawn = int(state["epoch"]), int(state["pieces"]), int(state["drawn"])
        self._tail, self._buffer = _unpack_bytes(state["tail"]), buffer.reshape(-1, self.length)
        self._groups = None


def _pack_bytes(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")


def _unpack_bytes(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)
