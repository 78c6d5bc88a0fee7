"""A batch is built one step ahead, and neither positions nor errors show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftlm.data import Batch
from graftlm.errors import DataError
from graftlm.training import train
from graftlm.training.checkpoint import newest_checkpoint
from graftlm.training.upcoming import UpcomingBatches
from training.toy import toy_config, toy_mixture, toy_model


class Counted:
    """Batches that count how many were drawn, of which the third can't be read."""

    batch_size = 8

    def __init__(self) -> None:
        self.drawn = 0
        self._batches = toy_mixture()

    def batch(self, step: int) -> Batch:
        if step == 2:
            raise DataError("found no third batch, expected one: add text.")
        self.drawn += 1
        return self._batches.batch(step)

    def fingerprint(self) -> str:
        return "counted"

    def state_dict(self) -> dict[str, object]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, object]]:
        drawn = self.drawn
        return lambda: {"drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def test_the_position_is_that_of_the_batches_that_were_taken() -> None:
    upcoming = UpcomingBatches(Counted())
    position, first = upcoming.take(0)
    assert position() == {"drawn": 0}
    upcoming.prepare(1)
    assert upcoming.state_dict() == {"drawn": 1}
    position, second = upcoming.take(1)
    assert position() == {"drawn": 1}
    assert upcoming.state_dict() == {"drawn": 2}
    expected = toy_mixture()
    assert first.input_ids.equal(expected.batch(0).input_ids)
    assert second.input_ids.equal(expected.batch(1).input_ids)


def test_a_batch_that_depends_on_the_weights_is_not_built_ahead() -> None:
    batches = Counted()
    batches.depends_on_model = True  # type: ignore[attr-defined]
    upcoming = UpcomingBatches(batches)
    upcoming.take(0)
    upcoming.prepare(1)
    assert batches.drawn == 1


def test_an_error_of_the_next_batch_comes_after_the_present_step(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train(toy_model(), Counted(), toy_config(checkpoint_every=1), tmp_path, progress=False)
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.state["step"] == 2
    assert checkpoint.state["mixture"] == {"drawn": 2}
