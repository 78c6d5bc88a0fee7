"""The runs of the experiment: runs of tasks that measure their cost and the similarity of their tasks as well.

Adapters of the package `adapters` need transformers 4: another process trains them on the same batches.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.conditional_tasks import adapters_script
from graftlm.artifact import load_graft
from graftlm.backbone import Backbone, Site
from graftlm.backbone.load import BackboneConfig
from graftlm.data.labelled import LabelledConfig, read_held_out_rows, read_training_rows
from graftlm.data.labelled_batches import EncodedRow, LabelledMixture, TaskBatch, batches_by_length, collate_rows
from graftlm.errors import TrainingError
from graftlm.evaluation import Row
from graftlm.evaluation.labelled import (
    TaskScore,
    TaskTestSet,
    decode_prediction,
    predictor,
    summary_metrics,
    task_metrics,
)
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafts import GraftConfig, GraftedModel, build_graft
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, RunContext, Trainee
from graftlm.runs.task_run import TaskRun, row_encoder, task_tests, tasks_of, with_tasks
from graftlm.training.loop import TrainingSummary, learning_rate

SIMILARITY_ROWS = 64  # training rows of each task


class ConditionalTasksRun(TaskRun):
    """Train on tasks; measure scores, CPU seconds, the sampler's choices and the similarity of the tasks' inputs.

    Args:
        old_tasks: tasks of the graft that `graft.extends` names; changed predictions of their rows are counted.
        keep_graft: write the trained graft to the run's folder.
    """

    old_tasks: dict[str, LabelledConfig] = {}
    keep_graft: bool = False

    def artefacts(self) -> tuple[str, ...]:
        return super().artefacts() if self.keep_graft else ()

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        with super().build(context) as trainee:
            yield replace(trainee, tests=(*trainee.tests, time.process_time()))

    def evaluate(self, trainee: Trainee) -> Measurement:
        *tests, started = trainee.tests
        seconds = time.process_time() - started
        measurement = super().evaluate(replace(trainee, tests=tests))
        mixture: Any = trainee.batches
        measurement.add_metrics({"seconds": seconds})
        measurement.details |= sampler_details(mixture)
        if len(mixture.tasks) > 1:
            measurement.details["similarity"] = task_similarities(trainee.model, mixture)
        if self.old_tasks:
            changed = count_changed(self._old_predictions(), self._predictions(trainee.model))
            measurement.add_metrics({"old_changed": changed})
        return measurement

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        """Write the graft if it is kept, and delete the checkpoints."""
        if self.keep_graft:
            super().save(trainee, context, summary, measurement)
        shutil.rmtree(context.folder / "checkpoints", ignore_errors=True)

    def _old_predictions(self) -> dict[str, list[Tensor]]:
        """The predictions of the graft that is extended."""
        backbone = self.backbone.load(kind="encoder")
        folder: str = self.graft.extends  # type: ignore[attr-defined]  # a graft with old tasks extends another
        with GraftedModel(backbone, {"graft": load_graft(folder, backbone)}) as model:
            return self._predictions(model)

    def _predictions(self, model: GraftedModel) -> dict[str, list[Tensor]]:
        """Predictions for the validation rows of each old task."""
        predict, encoder = predictor(model), row_encoder(model.backbone, self.length)
        predictions: dict[str, list[Tensor]] = {}
        for number, (name, spec) in enumerate(tasks_of(model.grafts["graft"]).items()):
            if name in self.old_tasks:
                rows = encoder.encode(read_held_out_rows(name, self.old_tasks[name], spec, "validation")).rows
                batches = batches_by_length([(row, spec, number) for row in rows], self.training.batch_size, 0)
                predictions[name] = [prediction for _, batch in batches for prediction in predict(batch)]
        return predictions


def sampler_details(mixture: LabelledMixture) -> dict[str, Any]:
    """The share of each task's rows that were trained on, and the number of its rows in all steps."""
    report = mixture.sampler.report()
    picked = {task: sum(step.get(task, 0) for step in report["steps"]) for task in mixture.tasks}
    return {"data_share_by_task": report["data_share_by_task"], "picked": picked}


def count_changed(before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]]) -> int:
    """The number of predicted values that differ."""
    return sum(int((old != new).sum()) for name in before for old, new in zip(before[name], after[name], strict=True))


def task_similarities(model: GraftedModel, mixture: LabelledMixture) -> dict[str, float]:
    """CovSim_i of each task: the mean covariance similarity of its first layer's inputs to every other task's."""
    # X^T X = R^T R for X = Q R, so R has the same covariance with fewer rows.
    inputs = {name: first_layer_inputs(model, mixture.sample(name, SIMILARITY_ROWS)) for name in mixture.tasks}
    factors = {name: torch.linalg.qr(of_task)[1] for name, of_task in inputs.items()}
    pairs = {(a, b): covariance_similarity(factors[a], factors[b]) for a, b in combinations(factors, 2)}
    return {name: sum(value for pair, value in pairs.items() if name in pair) / (len(factors) - 1) for name in factors}


def first_layer_inputs(model: GraftedModel, batch: TaskBatch) -> Tensor:
    """(n, d): the first layer's input at each token without padding, after the graft's changes."""
    layer, _ = Backbone.wrap(model.model, kind="encoder").sites.module(Site("layer", 0))
    inputs: list[Tensor] = []
    # Hooks run in the order of registration, so this one sees what the graft's hooks return.
    hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        with evaluation_mode(model), torch.no_grad():
            model.predict(**batch.to(model.device).prediction_inputs())
    finally:
        hook.remove()
    return inputs[0][batch.attention_mask.bool()].double().cpu()


def covariance_similarity(first: Tensor, second: Tensor, share: float = 0.99) -> float:
    """|F_i^T F_j| / (|F_i| |F_j|) in Frobenius norms (equation 3.7), from 0 to 1.

    F = U D^(1/2) of X^T X = U D U^T, cut to the fewest directions whose D sum up to `share` of all. The similarity is
    0 for orthogonal inputs and 1 for inputs with the same single direction.

    Args:
        first: (m, d) vectors of one task.
        second: (n, d) vectors of another.
        share: of the sum of singular values that is kept.
    """
    a, b = _covariance_factor(first, share), _covariance_factor(second, share)
    return float((a.T @ b).norm() / (a.norm() * b.norm()).clamp(min=1e-30))


def _covariance_factor(vectors: Tensor, share: float) -> Tensor:
    """(d, r): F."""
    _, root, directions = torch.linalg.svd(vectors.double(), full_matrices=False)
    weights = root.square()  # the singular values of X^T X
    cumulative = weights.cumsum(0) / weights.sum().clamp(min=1e-30)
    kept = int((cumulative < share).sum()) + 1
    return directions[:kept].T * root[:kept]


def module_parameters(config: BackboneConfig, graft: GraftConfig, tasks: int) -> tuple[int, int, int]:
    """The parameters of a graft's modules without heads, for a number of tasks; the encoder's layers and width."""
    backbone = config.load(kind="encoder")
    specs = {f"task {n}": TaskSpec(type="regression") for n in range(tasks)}
    parameters = build_graft(with_tasks(graft, specs), backbone).named_parameters()
    added = sum(parameter.numel() for name, parameter in parameters if not name.startswith("heads"))
    return added, backbone.sites.n_layers, backbone.sites.width


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
    types = torch.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
    for index, length in enumerate(batch.attention_mask.sum(1).tolist()):
        ids, segments = batch.input_ids[index, :length].tolist(), types[index, :length].tolist()
        row = {"ids": ids, "types": segments, "task": int(batch.task[index])}
        if batch.targets is not None:
            target = batch.targets[index]
            row["target"] = target[:length].tolist() if target.ndim else target.item()
        yield row


def plain_test_rows(rows: Sequence[EncodedRow], test: TaskTestSet) -> Iterator[dict[str, Any]]:
    """A task's encoded test rows as plain values, in order."""
    for row in rows:
        yield from plain_rows(collate_rows([(row, test.rows.spec, test.number)], 0))


def score(test: TaskTestSet, rows: Sequence[EncodedRow], outputs: Iterator[Any]) -> TaskScore:
    """The score of the next outputs, one for each row of a test."""
    spec, labelled = test.rows.spec, test.rows.rows
    pairs = zip(labelled, rows, strict=True)
    predictions = [decode_prediction(spec, row, encoded, torch.tensor(next(outputs))) for row, encoded in pairs]
    return TaskScore(test.metric, task_metrics(spec, labelled, predictions), len(labelled))
