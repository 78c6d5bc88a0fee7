"""The batch of the next step, which is built while the device works on the present one."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from graftlm.data import Batch
from graftlm.data.mixture import Batches
from graftlm.errors import GraftError

Position = Callable[[], dict[str, object]]
"""Returns a position in the data as plain JSON values."""


class UpcomingBatches:
    """Draws the batches of a run in order, at most one ahead.

    Args:
        batches: the batches.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._ahead: tuple[int, Position, object] | None = None

    def take(self, step: int) -> tuple[Position, Batch]:
        """Return the position before the batch of a step, and the batch.

        Args:
            step: the step, counted from 0.

        Raises:
            DataError: the rows can't be read.
        """
        if self._ahead is None or self._ahead[0] != step:
            self._build(step)
        assert self._ahead is not None, "prepared"
        _, position, batch = self._ahead
        self._ahead = None
        if isinstance(batch, GraftError):
            raise batch
        return position, cast("Batch", batch)

    def prepare(self, step: int) -> None:
        """Build the batch of a step before it is taken, unless it depends on the weights after the step before.

        Errors are raised by `take`, so that the step before ends.
        """
        if not getattr(self._batches, "depends_on_model", False):
            self._build(step)

    def _build(self, step: int) -> None:
        position = self._batches.snapshot()
        try:
            batch: object = self._batches.batch(step)
        except GraftError as error:
            batch = error
        self._ahead = (step, position, batch)

    def state_dict(self) -> dict[str, object]:
        """Return the position after the batches that were taken, as plain JSON values."""
        if self._ahead is None:
            return self._batches.state_dict()
        _, position, _ = self._ahead
        return position()
