"""Stateful batches: row b of a step continues row b of the step before.

The rows of a long text, in order, are cut into `batch_size` streams of equal length. Row b of step s is row s of stream
b. All streams start again when they end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data import NEW, Batch, Mixture, TokenBlocks
from graftlm.data.packing import collate
from graftlm.errors import DataError


@dataclass(frozen=True)
class StatefulBatch(Batch):
    """A batch whose rows continue those of the step before.

    Attributes:
        stream: long, (B,): index of each row's stream.
        starts: bool, (B,): whether a row is the first of its stream and continues nothing.
    """

    stream: Tensor | None = None
    starts: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """The forward arguments of any batch, with `stream` and `starts`."""
        return super().inputs() | {"stream": self.stream, "starts": self.starts}


class StatefulBatches(Mixture):
    """Batches of one text in memory whose rows continue from step to step.

    Args:
        blocks: rows of the text in order, documents joined.
        batch_size: number of streams.

    Raises:
        DataError: there are fewer rows than streams.
    """

    def __init__(self, blocks: TokenBlocks, batch_size: int) -> None:
        super().__init__({NEW: blocks}, {NEW: 1.0}, batch_size)
        self.rows = blocks.marked
        self.stream_length = len(blocks) // batch_size
        if not self.stream_length:
            raise DataError(
                f"The training text has {len(blocks)} rows of {blocks.length} tokens, but {batch_size} streams "
                "are read side by side: add text, or lower batch_size or data.length."
            )

    def batch(self, step: int) -> StatefulBatch:
        """The rows of one step, counted from 0."""
        stream = torch.arange(self.batch_size)
        position = step % self.stream_length
        rows = self.rows[stream.numpy() * self.stream_length + position]
        batch = collate(rows, np.full(self.batch_size, NEW), boundaries=self.boundaries, pad_id=self.pad_id)
        return StatefulBatch(**vars(batch), stream=stream, starts=torch.full((self.batch_size,), position == 0))

    def fingerprint(self) -> str:
        """Fingerprint of the rows; batches of another kind over the same rows have another one."""
        return f"stateful {super().fingerprint()}"
