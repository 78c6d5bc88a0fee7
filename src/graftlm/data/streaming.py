"""Packed rows of a stream that is read while training, with a state from which the same rows follow."""

from __future__ import annotations

import base64
from typing import Any, Protocol

import numpy as np

from graftlm.errors import DataError


class RowSource(Protocol):
    """What a stream draws rows from; see `graftlm.data.packing.RowPacker`."""

    length: int
    boundaries: Any
    pad_id: int
    tail: np.ndarray
    chunks: int
    epoch: int

    def next_row(self) -> np.ndarray | None:
        """The next row of marked ids (length,)."""

    def resume(self, tail: np.ndarray, chunks: int, epoch: int) -> None:
        """Continue from the given attributes."""


class StreamingBlocks:
    """Packed rows of one domain, out of an endless stream and in random order.

    A row is drawn at random out of a buffer and replaced by the stream's next row. The drawn position depends only on
    the key of `take` and the row's number.

    Args:
        packer: gives the rows; it repeats the documents.
        buffer_rows: rows of the buffer.
    """

    def __init__(self, packer: RowSource, *, buffer_rows: int = 256) -> None:
        self.length, self.boundaries, self.pad_id = packer.length, packer.boundaries, packer.pad_id
        self._packer, self._buffer_rows, self._drawn = packer, buffer_rows, 0
        self._buffer = np.empty((0, self.length), dtype=np.int32)

    @property
    def epoch(self) -> int:
        """How often the documents were read to their end."""
        return self._packer.epoch

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """The next `count` rows as marked ids, shape (count, length).

        Raises:
            DataError: row `first` is not the next one, the source has no text, or a document with a prompt must stay
                whole and does not fit into a row.
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
        """Continue from a state of the same documents, tokenizer and length.

        Raises:
            DataError: the state has a buffer of another size.
        """
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
