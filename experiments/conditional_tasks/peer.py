"""Adapters of the package `adapters`, which needs transformers 4: run in a process of its own, on the same batches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.conditional_tasks import adapters_peer
from graftlm.data.labelled import TaskRows
from graftlm.data.labelled_batches import EncodedRow, TaskBatch, collate_rows
from graftlm.errors import TrainingError
from graftlm.evaluation.labelled import TaskTestSet, decode_prediction, task_metrics
from graftlm.training import TrainingConfig
from graftlm.training.loop import learning_rate

PYTHON = "GRAFTLM_ADAPTERS_PYTHON"
WITHOUT = (
    "The package adapters is not at hand, so its rows are left out: install it with torch in an environment of its own "
    f"and name that environment's python in {PYTHON}."
)


def python_with_adapters() -> str | None:
    """The interpreter that has the package: the one named by the environment, or this one."""
    if os.environ.get(PYTHON):
        return os.environ[PYTHON]
    return sys.executable if importlib.util.find_spec("adapters") else None


def width_of(added: int, tasks: int, layers: int, width: int) -> int:
    """The inner width at which bottlenecks of all tasks and layers have about `added` weights together."""
    return max(1, round((added / (tasks * layers) - width) / (2 * width + 1)))


def exercise(
    encoder: str, settings: Mapping[str, Any], tasks: Mapping[str, TaskRows], graft: Any, training: TrainingConfig
) -> dict[str, Any]:
    """What the peer is told besides the rows; `graft` is the config of the row of ours without any module."""
    return {
        "backbone": encoder,
        "frozen_layers": settings["frozen_layers"],
        "bottleneck": settings["bottleneck"],
        "tasks": [{"name": name, "type": t.spec.type, "outputs": t.spec.outputs} for name, t in tasks.items()],
        "pooling": graft.pooling,
        "dropout": graft.dropout,
        "training": {
            "rates": [learning_rate(training, step) for step in range(training.steps)],
            "betas": training.betas,
            "clip": training.clip,
            "precision": training.precision,
            "seed": training.seed,
            "micro_batch_size": training.micro_batch_size or training.batch_size,
        },
    }


def answers(exercise: Mapping[str, Any], folder: Path, python: str) -> dict[str, Any]:
    """What the peer answers to an exercise; both are kept in `folder`.

    Raises:
        TrainingError: it stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "exercise.json", folder / "answers.json"
    files[0].write_text(json.dumps(exercise), encoding="utf-8")
    command = [python, str(Path(adapters_peer.__file__)), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise TrainingError(f"The package adapters, run by {python}, stopped: {said}")
    return json.loads(files[1].read_text(encoding="utf-8"))


def rows_of(batch: TaskBatch) -> Iterator[dict[str, Any]]:
    """A batch's rows as plain values, without padding."""
    lengths = batch.attention_mask.sum(1).tolist()
    for row, length in enumerate(lengths):
        ids = batch.input_ids[row, :length].tolist()
        types = [0] * length if batch.token_type_ids is None else batch.token_type_ids[row, :length].tolist()
        said = {"ids": ids, "types": types, "task": int(batch.task[row])}
        if batch.targets is not None:
            target = batch.targets[row]
            said["target"] = target[:length].tolist() if target.ndim else target.item()
        yield said


def exam(rows: Sequence[EncodedRow], test: TaskTestSet) -> Iterator[dict[str, Any]]:
    """A task's encoded rows as plain values."""
    for row in rows:
        yield from rows_of(collate_rows([(row, test.rows.spec, test.number)], 0))


def score(test: TaskTestSet, rows: Sequence[EncodedRow], given: Iterator[Any]) -> float:
    """The score of the next predictions that were given, one for each row of a test, in points."""
    spec, texts = test.rows.spec, test.rows.rows
    answered = [
        decode_prediction(spec, text, row, torch.tensor(next(given))) for text, row in zip(texts, rows, strict=True)
    ]
    return task_metrics(spec, texts, answered)[test.metric]
