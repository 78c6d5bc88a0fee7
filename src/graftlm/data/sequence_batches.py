"""Batches of labelled sequences, padded on the right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from graftlm.data.sequences import Sequences
from graftlm.errors import DataError

PADDING_ID = 0


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of B sequences of at most T tokens.

    Attributes:
        input_ids: long, (B, T).
        attention_mask: long, (B, T), 0 at padding.
        labels: long, (B,), numbers of classes.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, rows: slice) -> SequenceBatch:
        """Return some of the rows, such as a micro-batch, without the columns in which all of them are padded."""
        attention_mask = self.attention_mask[rows]
        width = int(attention_mask.sum(1).max()) if len(attention_mask) else 0
        return SequenceBatch(
            input_ids=self.input_ids[rows, :width],
            attention_mask=attention_mask[:, :width],
            labels=self.labels[rows],
        )

    def to(self, device: torch.device | str) -> SequenceBatch:
        """Return the same rows on `device`."""
        return SequenceBatch(
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            labels=self.labels.to(device),
        )

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of a classifier's forward pass."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}

    def totals(self) -> Tensor:
        """Return the number of rows and the number of tokens without padding: float32, (2,)."""
        tokens = self.attention_mask.sum()
        rows = torch.full_like(tokens, len(self))
        return torch.stack([rows, tokens]).float()


class SequenceBatches:
    """An endless sequence of batches, in which each epoch is a new order of all rows. Steps can be drawn in any order.

    Args:
        sequences: the rows, at least one.
        batch_size: number of rows of a step, over all processes.
        seed: seed of the orders.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, sequences: Sequences, batch_size: int, seed: int = 0) -> None:
        if not len(sequences):
            raise DataError("There are no sequences to train on, but at least one is needed: name more data.")
        self.sequences = sequences
        self.batch_size = batch_size
        self.seed = seed
        self._kept: tuple[int, np.ndarray] | None = None

    def batch(self, step: int) -> SequenceBatch:
        """Return the rows of a step, the longest first.

        Args:
            step: the step, counted from 0.
        """
        first = step * self.batch_size
        rows = [self._row(position) for position in range(first, first + self.batch_size)]
        return collate_sequences(self.sequences, rows)

    def _row(self, position: int) -> int:
        """Return the row at a position of the endless sequence."""
        epoch, place = divmod(position, len(self.sequences))
        return int(self._order(epoch)[place])

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of the rows in an epoch; the last one is kept."""
        if self._kept is None or self._kept[0] != epoch:
            generator = np.random.Generator(np.random.Philox([self.seed, epoch]))
            self._kept = (epoch, generator.permutation(len(self.sequences)))
        return self._kept[1]

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of everything that determines the batches."""
        digest = hashlib.sha256(repr((self.batch_size, self.seed)).encode())
        for ids in self.sequences.ids:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
        digest.update(self.sequences.labels.tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, object]:
        """Return an empty state: the step determines the rows."""
        return {}

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the state."""
        return self.state_dict

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Do nothing, since there is no state."""


def collate_sequences(sequences: Sequences, rows: list[int]) -> SequenceBatch:
    """Return a batch of rows, the longest first; rows of one length keep their order.

    Args:
        sequences: the sequences.
        rows: numbers of the rows, at least one.
    """
    ordered = sorted(rows, key=lambda row: -len(sequences.ids[row]))
    ids = [torch.from_numpy(sequences.ids[row]).long() for row in ordered]
    marks = [torch.ones_like(row) for row in ids]
    return SequenceBatch(
        input_ids=pad_sequence(ids, batch_first=True, padding_value=PADDING_ID),
        attention_mask=pad_sequence(marks, batch_first=True),
        labels=torch.from_numpy(sequences.labels[ordered]),
    )


def sequences_by_length(sequences: Sequences, size: int) -> Iterator[tuple[list[int], SequenceBatch]]:
    """Yield all rows in batches, sorted by length.

    Args:
        sequences: the sequences.
        size: most rows of a batch.

    Yields:
        The numbers of a batch's rows in the order of the batch, and the batch.
    """
    order = sorted(range(len(sequences)), key=lambda row: -len(sequences.ids[row]))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield rows, collate_sequences(sequences, rows)
