"""What a row reads in its training, and for how long."""

from __future__ import annotations

import math
from pathlib import Path

from experiments.facts.rows import DEFAULT, FactsRow
from experiments.facts.sizes import Size
from experiments.precision import Precision
from graftlm.data import DataConfig
from graftlm.training.config import TrainingConfig

ROW_TOKENS = 112
"""Tokens of a row of training, into which two conversations fit."""
ROWS_PER_STEP = 4
EPOCHS = 3.0
"""How often each taught conversation is read, in all rows of the search and the test alike."""


def training_of(row: FactsRow, rate: float, size: Size, seed: int, precision: Precision) -> TrainingConfig:
    """Return the training of a row. Some rows have the batches and passes of the default recipe.

    Args:
        row: the row.
        rate: its learning rate.
        size: how much is taught.
        seed: seed of weights and order.
        precision: precision of the training.
    """
    common = {
        "learning_rate": rate,
        "seed": seed,
        "precision": precision,
        "checkpoint_every": 40,
        "keep_checkpoints": 1,
    }
    if row.by_recipe:
        default = DEFAULT.training.model_dump() | common
        if size.max_steps is not None:
            default |= {"steps": size.max_steps, "epochs": None}
        return TrainingConfig.parse(default)
    steps = steps_of(row, size)
    return TrainingConfig.parse({"steps": steps, "batch_size": ROWS_PER_STEP, "warmup_steps": steps // 20, **common})


def steps_of(row: FactsRow, size: Size) -> int:
    """Return the number of steps after which each taught conversation was read `EPOCHS` times."""
    if size.max_steps is not None:
        return size.max_steps
    new_rows = EPOCHS * 4 * size.facts / 2
    new_share = 1 - (size.old_share if row.old else 0.0)
    return math.ceil(new_rows / (ROWS_PER_STEP * new_share))


def data_of(row: FactsRow, folder: Path, size: Size, seed: int) -> DataConfig:
    """Return what a row reads.

    Args:
        row: the row.
        folder: folder of the conversations that are taught and tested.
        size: how much is taught.
        seed: seed of the order.
    """
    old = {
        "": [],
        "own": [{"self": True, "tokens": size.own_tokens}],
        "near": [{"self": True, "near": "new", "tokens": size.near_tokens}],
    }
    return DataConfig.parse(
        {
            "new": [{"path": str(folder / "conversations.jsonl"), "messages_column": "messages"}],
            "old": old[row.old],
            "replay_fraction": size.old_share if row.old else 0.0,
            "old_objective": row.objective if row.old else "replay",
            "length": DEFAULT.data.length if row.by_recipe else ROW_TOKENS,
            "boundaries": "whole",
            "test": {"new": [{"path": str(folder / "unseen.jsonl"), "messages_column": "messages"}]},
            "seed": seed,
        }
    )
