"""Recall, selective copy and ListOps: models of equal size with one difference, on inputs many windows apart.

Every row is trained on each task with the same learning rate, steps and examples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from experiments import Options
from experiments.long_memory.tasks import (
    PADDING_ID,
    MemoryTask,
    TaskExamples,
    TrainingStage,
    informed_guesses,
    make_examples,
)
from experiments.sequence_rows import BLOCK_STATE, LABELS, model_config, new_model
from experiments.study import Study, bars, metric, published
from graftlm.config import Config
from graftlm.data import NEW, Mixture, TokenBlocks
from graftlm.data.packing import PADDING, PROMPT
from graftlm.evaluation import Aim, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import TrainingConfig, train
from graftlm.training.checkpoint import read_history
from graftlm.training.language_model import LanguageModel

NAME = "long-memory"
SOLVED, UNSOLVED = 90.0, 2.0  # accuracy in percent; factor on chance


class MemoryTaskRun(Run):
    """Train one model on one task in stages, and measure the percentage of correct answers.

    Args:
        model: its config, with `model_type`.
        tested: number of test examples, and of validation examples.
    """

    task: MemoryTask
    model: dict[str, Any]
    learning_rate: float = Field(gt=0)
    tested: int = Field(ge=1)
    seed: int = 0

    def measure(self, context: RunContext) -> Measurement:
        """Accuracy on validation and test, the number of parameters, and the losses."""
        torch.manual_seed(self.seed)
        model = new_model(self.model)
        started = time.process_time()
        losses, steps = [], 0
        for number, stage in enumerate(self.task.stages):
            history = self._train_stage(model, stage, context.folder / f"stage-{number}")
            losses += [[steps + line["step"], line["loss"]] for line in history]
            steps += stage.steps
        details = {"losses": losses, "training_cpu_s": round(time.process_time() - started, 1)}
        metrics: dict[str, Metric] = {"parameters": count_parameters(model.parameters())}
        for split in ("validation", "test"):
            examples = make_examples(self.task, self.tested, self.seed, split)
            metrics[split] = accuracy(model, examples, self.task.stages[-1].batch_size)
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics), details)

    def _train_stage(self, model: Any, stage: TrainingStage, folder: Path) -> list[dict[str, Any]]:
        """The history of a stage."""
        training = TrainingConfig(
            steps=stage.steps,
            batch_size=stage.batch_size,
            learning_rate=self.learning_rate,
            warmup_steps=max(1, stage.steps // 20),
            seed=self.seed,
            checkpoint_every=stage.steps,
            keep_checkpoints=1,
            log_every=max(1, stage.steps // 20),
        )
        shortest = min(self.task.shortest, stage.length // 4)
        task = self.task.model_copy(update={"length": stage.length, "shortest": shortest})
        examples = make_examples(task, stage.steps * stage.batch_size, self.seed, f"train-{stage.length}")
        mixture = Mixture({NEW: token_blocks(examples)}, {NEW: 1.0}, stage.batch_size, self.seed)
        identity = {"run": self.settings()}
        summary = train(LanguageModel(model), mixture, training, folder, identity=identity, progress=False)
        return read_history(summary.history)


def token_blocks(examples: TaskExamples) -> TokenBlocks:
    """Rows for the training loop, whose labels are the answers."""
    marked = np.where(examples.answers, examples.ids, examples.ids | PROMPT).astype(np.int32)
    marked[examples.ids == PADDING_ID] = PADDING
    return TokenBlocks(marked, boundaries="joined", pad_id=PADDING_ID)


def accuracy(model: Any, examples: TaskExamples, batch_size: int) -> float:
    """Percentage of answers that are the most likely token at their position."""
    ids, answers = torch.from_numpy(examples.ids), torch.from_numpy(examples.answers)
    correct = 0
    with evaluation_mode(model), torch.inference_mode():
        for batch, is_answer in zip(ids.split(batch_size), answers.split(batch_size), strict=True):
            correct += int((_predictions(model, batch) == batch)[is_answer].sum())
    return 100 * correct / int(answers.sum())


def _predictions(model: Any, ids: Tensor) -> Tensor:
    """(B, L): the most likely token at each position, given those before it; -1 at the first."""
    mask = (ids != PADDING_ID).long()
    kwargs = {} if bool(mask.all()) else {"attention_mask": mask}
    predictions = model(input_ids=ids, use_cache=False, **kwargs).logits[:, :-1].argmax(dim=-1)
    return torch.cat([torch.full_like(ids[:, :1], -1), predictions], dim=1)


class LongMemoryConfig(Config):
    """Tasks and sizes.

    Args:
        tasks: by name.
        shape: the keys of the model config that all rows share.
        parameters: of every row's model, up to rounding.
        tested: number of test examples.
    """

    tasks: dict[str, MemoryTask]
    shape: dict[str, Any]
    parameters: int
    learning_rate: float = 3e-3
    tested: int = 512


_FLAT: Any = (
    (24, 700, 32), (32, 200, 32), (40, 200, 32), (48, 200, 32), (64, 200, 32), (96, 200, 32), (128, 300, 32),
)  # fmt: skip
_NESTED: Any = (
    (16, 400, 32), (32, 400, 32), (64, 400, 32), (128, 300, 32), (256, 300, 32), (512, 200, 16), (1024, 150, 16),
    (2000, 150, 16),
)  # fmt: skip
_SHAPE = {
    "hidden_size": 64,
    "state_width": 64,  # the default, a fourth of the width, is 16 numbers for the whole text
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mixer_layers": [1],
    "filters": 16,
    "initializer_range": 0.125,  # 1 / sqrt(width): with 0.02 the attention is too uniform to learn
}
FULL = LongMemoryConfig(
    tasks={
        "recall": MemoryTask(name="recall", stages=_FLAT),
        "copy": MemoryTask(name="copy", stages=_FLAT),
        "listops": MemoryTask(name="listops", length=2000, window=64, stages=_NESTED),
    },
    shape=_SHAPE,
    parameters=130_000,
)
_SHORT = {"length": 64, "window": 8, "shortest": 10, "stages": ((24, 1, 2), (64, 1, 2))}
QUICK = LongMemoryConfig(
    tasks={name: MemoryTask.parse(task.model_dump() | _SHORT) for name, task in FULL.tasks.items()},
    shape=_SHAPE | {"hidden_size": 16, "state_width": 4, "num_attention_heads": 2, "filters": 4},
    parameters=12_000,
    tested=4,
)


def memory_run(config: LongMemoryConfig, row: str, name: str, seed: int) -> MemoryTaskRun:
    """The run of one row on the task `name`."""
    task = config.tasks[name]
    shape = config.shape | {"window": task.window, "kernel_length": task.length, "vocab_size": task.vocab_size}
    return MemoryTaskRun(
        id=f"{name}-{row}_s{seed}",
        label=LABELS[row],
        task=task,
        model=model_config(row, shape, config.parameters),
        learning_rate=config.learning_rate,
        tested=config.tested,
        seed=seed,
    )


def run(options: Options) -> Results:
    """Run all tasks, or those in `tables`, and write `results.json`, `report.md` and a plot.

    Raises:
        RecipeError: there is no such task.
    """
    config, tasks = QUICK if options.quick else FULL, options.chosen(tuple(FULL.tasks))
    study = Study(options)
    keys = [(row, task) for task in tasks for row in LABELS]
    runs = {key: [memory_run(config, *key, seed) for seed in study.seeds] for key in keys}
    measurements = study.execute([run for of_seeds in runs.values() for run in of_seeds], NAME)
    measured = {key: [measurements[run.id] for run in of_seeds] for key, of_seeds in runs.items()}
    chance = Row(id="random", label="guessing", metrics={task: config.tasks[task].chance for task in tasks})
    rows = [chance, *(table_row(row, {task: measured[row, task] for task in tasks}) for row in LABELS)]
    details = {
        "wall_s": study.seconds,
        "config": config.model_dump(mode="json"),
        "validation": {" ".join(key): metric(of_seeds[0], "validation") for key, of_seeds in measured.items()},
        "losses": {row: measured[row, tasks[0]][0].details["losses"] for row in LABELS},
    }
    paper = []
    if "listops" in tasks:
        details["listops_guesses"] = informed_guesses(config.tasks["listops"], config.tested, study.seeds[0])
        paper = published(__file__)
    plots = {"accuracy": bars(rows, {task: task for task in tasks}, "right answers, %")}
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def table_row(row: str, measured: Mapping[str, Sequence[Measurement]]) -> Row:
    """One row of the table: the test accuracy on every task over seeds."""
    metrics: dict[str, Metric] = {}
    for task, of_seeds in measured.items():
        metrics[task] = combine_seeds([metric(measurement, "test") for measurement in of_seeds])
        metrics["parameters"] = of_seeds[0].row.metrics["parameters"]
    return Row(id=row, label=LABELS[row], metrics=metrics)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The best block-state row solves recall, and the sliding window does not."""
    values = {row.id: value_of(row.metrics["recall"]) for row in rows if "recall" in row.metrics}
    if not values:
        return []
    best, slide, bound = max(values[row] for row in BLOCK_STATE), values["slide"], UNSOLVED * values["random"]
    solved = f"the best BST recalls at least {SOLVED:g}%"
    unsolved = f"the sliding window recalls less than {UNSOLVED:g} times as much as guessing"
    return [
        Aim(text=solved, metric="recall", aim=SOLVED, measured=best, met=best >= SOLVED),
        Aim(text=unsolved, metric="recall", aim=bound, measured=slide, met=slide < bound),
    ]
