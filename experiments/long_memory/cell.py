"""One model that learns one task: its training, and how many fresh examples it answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from experiments.jobs import Job
from experiments.long_memory.data import FILL, Rows, Task, make_rows
from graftlm.config import Config
from graftlm.data import NEW, Mixture, TokenBlocks
from graftlm.data.packing import PADDING, PROMPT
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.models import register
from graftlm.runs.graft_run import count_parameters
from graftlm.training import TrainingConfig, train
from graftlm.training.checkpoint import HISTORY, read_history
from graftlm.training.language_model import LanguageModel


class Stage(Config):
    """A part of training: so many steps on texts of one length.

    Args:
        length: tokens of a text; of listops the most, and a fourth of it the fewest, but no more than the task's.
        steps: the rate rises and falls in each stage anew.
        batch_size: texts of a step; every one is a fresh example.
    """

    length: int = Field(ge=16)
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)


class Cell(Job):
    """One row of the table on one task, with one learning rate and seed.

    Args:
        model: its config, with `model_type`.
        stages: of training, one behind the other.
        tested: fresh examples of the test, and as many for validation.
    """

    task: Task
    model: dict[str, Any]
    rate: float = Field(gt=0)
    stages: tuple[Stage, ...] = Field(min_length=1)
    tested: int = Field(ge=1)
    seed: int = 0


def learn(cell: Cell, folder: Path) -> Mapping[str, Any]:
    """Train a model and measure it: percent of right answers, the cost, and the losses."""
    register()
    values = {key: value for key, value in cell.model.items() if key != "model_type"}
    torch.manual_seed(cell.seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[cell.model["model_type"]](**values))
    started = time.process_time()
    losses: list[list[float]] = []
    for number, stage in enumerate(cell.stages):
        losses += _teach(model, cell, stage, folder / f"stage-{number}", sum(one.steps for one in cell.stages[:number]))
    seconds = time.process_time() - started
    parts = {part: make_rows(cell.task, cell.tested, cell.seed, part) for part in ("validation", "test")}
    together = cell.stages[-1].batch_size
    return {
        "accuracy": {part: accuracy(model, rows, together) for part, rows in parts.items()},
        "parameters": count_parameters(model.parameters()),
        "training_cpu_s": round(seconds, 1),
        "losses": losses,
    }


def _teach(model: Any, cell: Cell, stage: Stage, folder: Path, before: int) -> list[list[float]]:
    """Train for one stage, `before` so many steps; its losses by step."""
    training = TrainingConfig(
        steps=stage.steps,
        batch_size=stage.batch_size,
        learning_rate=cell.rate,
        warmup_steps=max(1, stage.steps // 20),
        seed=cell.seed,
        checkpoint_every=stage.steps,
        keep_checkpoints=1,
        log_every=max(1, stage.steps // 20),
    )
    shortest = min(cell.task.shortest, stage.length // 4)
    task = cell.task.model_copy(update={"length": stage.length, "shortest": shortest})
    rows = make_rows(task, stage.steps * stage.batch_size, cell.seed, f"train-{stage.length}")
    mixture = Mixture({NEW: blocks(rows)}, {NEW: 1.0}, stage.batch_size, cell.seed)
    train(LanguageModel(model), mixture, training, folder, identity={"cell": cell.key()}, progress=False)
    return [[before + line["step"], line["loss"]] for line in read_history(folder / HISTORY)]


def blocks(rows: Rows) -> TokenBlocks:
    """Rows as the training loop takes them: only answers are predicted."""
    marked = np.where(rows.answers, rows.ids, rows.ids | PROMPT).astype(np.int32)
    marked[rows.ids == FILL] = PADDING
    return TokenBlocks(marked, boundaries="joined", pad_id=FILL)


def accuracy(model: Any, rows: Rows, batch_size: int) -> float:
    """Percent of answers that are the likeliest token where they stand."""
    ids, answers = torch.from_numpy(rows.ids), torch.from_numpy(rows.answers)
    right = 0
    with evaluation_mode(model), torch.inference_mode():
        for some, asked in zip(ids.split(batch_size), answers.split(batch_size), strict=True):
            right += int((_guesses(model, some) == some)[asked].sum())
    return 100 * right / int(answers.sum())


def _guesses(model: Any, ids: Tensor) -> Tensor:
    """(B, L): the likeliest token of each place given those before it; the first is nothing."""
    mask = (ids != FILL).long()
    said = {} if bool(mask.all()) else {"attention_mask": mask}
    likeliest = model(input_ids=ids, use_cache=False, **said).logits[:, :-1].argmax(dim=-1)
    return torch.cat([torch.full_like(ids[:, :1], -1), likeliest], dim=1)
