"""Rows that go on where those of the step before ended: a long text, read at as many places as a batch has rows.

The rows of the text, in order, are cut into `batch_size` stretches of equal length; row b of step s is row s of stretch
b. At the end of the stretches all begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data import NEW, Batch, Mixture, TokenBlocks
from graftlm.data.batch import assemble
from graftlm.errors import DataError


@dataclass(frozen=True)
class LaneBatch(Batch):
    """A batch of rows that go on.

    Attributes:
        lane: long, (B,): which stretch each row belongs to.
        begins: bool, (B,): whether a row is the first of its stretch, and goes on from nothing.
    """

    lane: Tensor | None = None
    begins: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """As any batch's, with both marks."""
        return super().inputs() | {"lane": self.lane, "begins": self.begins}


class Lanes(Mixture):
    """Batches whose rows go on from step to step, of one text in memory.

    Args:
        blocks: the text's rows in order; documents joined.
        batch_size: how many stretches there are.

    Raises:
        DataError: there are fewer rows than stretches.
    """

    def __init__(self, blocks: TokenBlocks, batch_size: int) -> None:
        super().__init__({NEW: blocks}, {NEW: 1.0}, batch_size)
        self.rows = blocks.marked
        self.stretch = len(blocks) // batch_size
        if not self.stretch:
            raise DataError(
                f"The training text has {len(blocks)} rows of {blocks.length} tokens, but {batch_size} go on side by "
                "side: add text, or lower batch_size or data.length."
            )

    def batch(self, step: int) -> LaneBatch:
        """The rows of one step, counted from 0."""
        lane = np.arange(self.batch_size)
        at = step % self.stretch
        domain = np.full(self.batch_size, NEW)
        rows = assemble(self.rows[lane * self.stretch + at], domain, boundaries=self.boundaries, pad_id=self.pad_id)
        values = {name: getattr(rows, name) for name in rows.__dataclass_fields__}
        begins = torch.full((self.batch_size,), at == 0)
        return replace(LaneBatch(**values), lane=torch.from_numpy(lane), begins=begins)

    def fingerprint(self) -> str:
        """As any mixture's, which other batches of the same rows don't share."""
        return f"lanes {super().fingerprint()}"
