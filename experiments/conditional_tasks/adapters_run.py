"""Adapters of the package `adapters`, which needs transformers 4: another process trains them on the same batches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.conditional_tasks import adapters_script
from experiments.conditional_tasks.runs import ConditionalTasksRun, sampler_details
from graftlm.data.labelled import read_training_rows
from graftlm.data.labelled_batches import EncodedRow, LabelledMixture, TaskBatch, collate_rows
from graftlm.errors import TrainingError
from graftlm.evaluation import Row
from graftlm.evaluation.labelled import TaskScore, TaskTestSet, decode_prediction, summary_metrics, task_metrics
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, RunContext
from graftlm.runs.task_run import row_encoder, task_tests
from graftlm.training.loop import learning_rate

PYTHON = "GRAFTLM_ADAPTERS_PYTHON"
MISSING = (
    "The package adapters is not installed, so its rows are left out: install it with torch in an environment of its "
    f"own, and set {PYTHON} to that environment's python."
)


def python_with_adapters() -> str | None:
    """The interpreter that has the package: the one that the environment variable names, or this one."""
    if os.environ.get(PYTHON):
        return os.environ[PYTHON]
    return sys.executable if importlib.util.find_spec("adapters") else None


def bottleneck_width(added: int, tasks: int, layers: int, width: int) -> int:
    """The inner width at which the bottlenecks of all tasks and layers have about `added` parameters together."""
    return max(1, round((added / (tasks * layers) - width) / (2 * width + 1)))


class AdaptersRun(ConditionalTasksRun):
    """Train parallel bottlenecks of the package `adapters`, one for each task, with our heads, losses and batches.

    Args:
        python: the interpreter that has the package.
        frozen_layers: number of the encoder's layers that stay frozen, from the first.
        bottleneck: inner width.
    """

    python: str
    frozen_layers: int
    bottleneck: int

    def measure(self, context: RunContext) -> Measurement:
        rows = {name: read_training_rows(name, task) for name, task in self.tasks.items()}
        specs = {name: task.spec for name, task in rows.items()}
        backbone = self.backbone.load(kind="encoder")
        training, encoder = self.training, row_encoder(backbone, self.length)
        mixture = LabelledMixture(rows, encoder, self.sampler, training.batch_size, training.seed)
        tests = [
            (split, name, test, encoder.encode(test.rows).rows)
            for split in ("test", "validation")
            for name, test in task_tests(specs, self.tasks, self._held_out(rows, split)).items()
        ]
        batches = [list(plain_rows(mixture.batch(step))) for step in range(training.steps)]
        test_rows = [row for _, _, test, encoded in tests for row in plain_test_rows(encoded, test)]
        job = self._script_input(specs) | {"batches": batches, "tests": test_rows}
        output = run_script(job, context.folder, self.python)
        predictions = iter(output["predictions"])
        scores: dict[str, dict[str, TaskScore]] = {"test": {}, "validation": {}}
        for split, name, test, encoded in tests:
            scores[split][name] = score(test, encoded, predictions)
        metrics: dict[str, Any] = {"seconds": output["seconds"]} | summary_metrics(scores["test"])
        metrics |= {f"{name}_validation": value for name, value in summary_metrics(scores["validation"]).items()}
        parameters = count_parameters(backbone.model.parameters())
        metrics |= {f"{name}_parameters_ratio": output[name] / parameters for name in ("trained", "total")}
        details = {"losses": [[step + 1, loss] for step, loss in enumerate(output["losses"])]}
        return Measurement(Row(id=self.id, label=self.id, metrics=metrics), details | sampler_details(mixture))

    def _script_input(self, specs: dict[str, TaskSpec]) -> dict[str, Any]:
        """The settings of the script; its rows are added to them."""
        training, graft = self.training, self.graft.model_dump()
        return {
            "backbone": self.backbone.name,
            "frozen_layers": self.frozen_layers,
            "bottleneck": self.bottleneck,
            "tasks": [{"name": name, "type": spec.type, "outputs": spec.outputs} for name, spec in specs.items()],
            "pooling": graft["pooling"],
            "dropout": graft["dropout"],
            "training": {
                "rates": [learning_rate(training, step) for step in range(training.steps)],
                "micro_batch_size": training.micro_batch_size or training.batch_size,
            }
            | training.model_dump(include={"betas", "clip", "precision", "seed"}),
        }


def run_script(job: dict[str, Any], folder: Path, python: str) -> dict[str, Any]:
    """Run `adapters_script.py` with another interpreter; gives its output. Input and output stay in `folder`.

    Raises:
        TrainingError: the script fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "input.json", folder / "output.json"
    files[0].write_text(json.dumps(job), encoding="utf-8")
    command = [python, str(Path(adapters_script.__file__)), *map(str, files)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        cause = (process.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise TrainingError(f"The package adapters, run by {python}, stopped: {cause}")
    return json.loads(files[1].read_text(encoding="utf-8"))


def plain_rows(batch: TaskBatch) -> Iterator[dict[str, Any]]:
    """A batch's rows as plain values, without padding."""
    targets = batch.targets
    for index, length in enumerate(batch.attention_mask.sum(1).tolist()):
        segments = None if batch.token_type_ids is None else batch.token_type_ids[index, :length].tolist()
        row = {
            "ids": batch.input_ids[index, :length].tolist(),
            "types": segments or [0] * length,
            "task": int(batch.task[index]),
        }
        if targets is not None:
            target = targets[index]
            row["target"] = target[:length].tolist() if target.ndim else target.item()
        yield row


def plain_test_rows(rows: Sequence[EncodedRow], test: TaskTestSet) -> Iterator[dict[str, Any]]:
    """A task's encoded test rows as plain values, in order."""
    for row in rows:
        yield from plain_rows(collate_rows([(row, test.rows.spec, test.number)], 0))


def score(test: TaskTestSet, rows: Sequence[EncodedRow], outputs: Iterator[Any]) -> TaskScore:
    """The score of the next outputs, one for each row of a test."""
    spec, labelled = test.rows.spec, test.rows.rows
    predictions = [
        decode_prediction(spec, row, encoded, torch.tensor(next(outputs)))
        for row, encoded in zip(labelled, rows, strict=True)
    ]
    return TaskScore(test.metric, task_metrics(spec, labelled, predictions), len(labelled))
