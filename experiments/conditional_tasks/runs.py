"""The runs of the experiment, which also measure their cost and the similarity of their tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone, Site
from graftlm.data.labelled import LabelledConfig, TaskRows, read_held_out_rows
from graftlm.data.labelled_batches import LabelledMixture, TaskBatch, batches_by_length
from graftlm.data.row_encoder import EncodedTask, RowEncoder
from graftlm.errors import EvaluationError, TrainingError
from graftlm.evaluation import Row, value_of
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.label_predictions import predictor
from graftlm.evaluation.label_scores import measure_labelled, summary_metrics
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.runs.run import RunContext, Trainee
from graftlm.runs.task_run import TaskEvaluation, TaskRun, row_encoder, task_tests, tasks_of
from graftlm.store.artifact import load_graft
from graftlm.training.loop import TrainingSummary

SIMILARITY_ROWS = 64  # training rows of each task


@dataclass(frozen=True)
class TimedEvaluation(TaskEvaluation):
    """The evaluator of the tasks, and the start of training in seconds of `time.perf_counter`."""

    started: float


_ENCODED: dict[tuple[Any, ...], EncodedTask] = {}  # the tasks that runs of this process have encoded


class SharedEncoder(RowEncoder):
    """A row encoder that encodes the rows of a task once per process, since several runs train on the same files."""

    def encode(self, task: TaskRows, *, training: bool = False) -> EncodedTask:
        key = (
            task.rows[0].where,
            task.rows[-1].where,
            len(task),
            self.length,
            training,
            str(task.spec),
        )
        if key not in _ENCODED:
            _ENCODED[key] = super().encode(task, training=training)
        return _ENCODED[key]


class ConditionalTasksRun(TaskRun):
    """Train on tasks; measure scores, seconds, the sampler's choices and the similarity of the tasks' inputs.

    Args:
        old_tasks: tasks of the graft that is extended, whose scores and changed predictions are measured.
        keep_graft: whether the trained graft is written to the run's folder.
        similarity: whether the covariance similarity of the tasks' inputs is measured.
    """

    old_tasks: dict[str, LabelledConfig] = {}
    keep_graft: bool = False
    similarity: bool = False

    def artefacts(self) -> tuple[str, ...]:
        return super().artefacts() if self.keep_graft else ()

    def measure(self, context: RunContext) -> Measurement:
        """Train and measure; a run that diverges, as with some rates of a search, gets the largest error."""
        try:
            return super().measure(context)
        except (TrainingError, EvaluationError) as error:
            row = Row(id=self.id, label=self.id, metrics={"validation_error": 100.0})
            return Measurement(row, {"diverged": str(error)})

    def encoder(self, backbone: Backbone, truncation: bool = True) -> RowEncoder:
        plain = row_encoder(backbone, self.length, truncation)
        return SharedEncoder(plain.tokenizer, self.length, segments=plain.segments, truncation=truncation)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        torch.set_float32_matmul_precision("high")  # TF32 on a GPU
        with super().build(context) as trainee:
            evaluation = TimedEvaluation(
                tests=trainee.evaluation.tests,
                starts=trainee.evaluation.starts,
                started=time.perf_counter(),
            )
            yield replace(trainee, evaluation=evaluation)

    def evaluate(self, trainee: Trainee) -> Measurement:
        seconds = time.perf_counter() - trainee.evaluation.started
        measurement = super().evaluate(trainee)
        mixture: Any = trainee.batches
        report = mixture.sampler.report()
        metrics = {
            "seconds": seconds,
            "rows_trained": report["picked"],
            "rows_scored": report["scored"],
            "validation_error": 100 - value_of(measurement.row.metrics["average_validation"]),
        }
        measurement.add_metrics(metrics)
        picked = {}
        for task in mixture.tasks:
            picked[task] = sum(step.get(task, 0) for step in report["steps"])
        measurement.details["picked"] = picked
        measurement.details["data_share_by_task"] = report["data_share_by_task"]
        if self.similarity:
            measurement.details["similarity"] = task_similarities(trainee.model, mixture)
        if self.old_tasks:
            measurement.add_metrics(self._old_metrics(trainee.model))
        return measurement

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        """Write the graft if `keep_graft` is set."""
        if self.keep_graft:
            super().save(trainee, context, summary, measurement)

    def _old_metrics(self, model: GraftedModel) -> dict[str, float]:
        """Return the average test score of the old tasks, and the number of changed predictions of validation rows."""
        specs = tasks_of(model.grafts["graft"])
        encoder = self.encoder(model.backbone)
        rows = {}
        for name, task in self.old_tasks.items():
            rows[name] = read_held_out_rows(name, task, specs[name])
        tests = task_tests(specs, self.old_tasks, rows)
        scores = measure_labelled(predictor(model), encoder, tests, batch_size=self.evaluation.batch_size)
        after = self._old_predictions(model)
        backbone = self.backbone.load(kind="encoder")
        folder: str = self.graft.extends  # type: ignore[attr-defined]  # a graft with old tasks extends another
        with GraftedModel(backbone, {"graft": load_graft(folder, backbone)}) as base:
            changed = count_changed(self._old_predictions(base), after)
        return {"old_average": summary_metrics(scores)["average"], "old_changed": changed}

    def _old_predictions(self, model: GraftedModel) -> dict[str, list[Tensor]]:
        """Return the predictions for the validation rows of each old task."""
        predict = predictor(model)
        encoder = self.encoder(model.backbone)
        predictions: dict[str, list[Tensor]] = {}
        for number, (name, spec) in enumerate(tasks_of(model.grafts["graft"]).items()):
            if name not in self.old_tasks:
                continue
            rows = read_held_out_rows(name, self.old_tasks[name], spec, "validation")
            encoded = [(row, spec, number) for row in encoder.encode(rows).rows]
            predictions[name] = []
            for _, batch in batches_by_length(encoded, self.training.batch_size, 0):
                predictions[name] += [prediction.cpu() for prediction in predict(batch)]
        return predictions


def count_changed(before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]]) -> int:
    """Return the number of predicted values that differ."""
    changed = 0
    for name in before:
        for old, new in zip(before[name], after[name], strict=True):
            changed += int((old != new).sum())
    return changed


def task_similarities(model: GraftedModel, mixture: LabelledMixture) -> dict[str, Any]:
    """Compute CovSim_i of each task i.

    Returns:
        `by_task`, the mean covariance similarity of the task's first-layer inputs to those of every other task;
        `same_task`, the mean similarity between two halves of a task's rows, as an upper reference; `isotropic`, the
        similarity of random vectors of the same shape, as a lower reference.
    """
    batches = {name: mixture.sample(name, 2 * SIMILARITY_ROWS) for name in mixture.tasks}
    # The halves are every other row, because the rows of a batch are sorted by length.
    even_rows = slice(0, None, 2)
    odd_rows = slice(1, None, 2)
    halves = {}
    for name, batch in batches.items():
        first = first_layer_inputs(model, batch.rows(even_rows))
        second = first_layer_inputs(model, batch.rows(odd_rows))
        halves[name] = (first, second)
    factors = {}
    for name, (first, second) in halves.items():
        factors[name] = (covariance_factor(first), covariance_factor(second))
    shape = next(iter(halves.values()))[0].shape
    similarities = {}
    for a, b in combinations(factors, 2):
        similarities[a, b] = similarity_of(factors[a][0], factors[b][0])
    others = len(factors) - 1
    by_task = {}
    for name in factors:
        by_task[name] = sum(value for pair, value in similarities.items() if name in pair) / others
    return {
        "by_task": by_task,
        "same_task": mean(similarity_of(first, second) for first, second in factors.values()),
        "isotropic": _isotropic_similarity(shape),
    }


def _isotropic_similarity(shape: torch.Size) -> float:
    """Return the covariance similarity of two sets of random vectors."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator, dtype=torch.double)
    second = torch.randn(shape, generator=generator, dtype=torch.double)
    return similarity_of(covariance_factor(first), covariance_factor(second))


def first_layer_inputs(model: GraftedModel, batch: TaskBatch) -> Tensor:
    """Return the first layer's inputs (n, d) at all tokens except padding, after the graft's changes."""
    layer, _ = Backbone.wrap(model.model, kind="encoder").sites.module(Site("layer", 0))
    inputs: list[Tensor] = []

    def record(_layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(arguments[0])

    # Hooks run in the order of registration, so this hook receives what the graft's hooks return.
    hook = layer.register_forward_pre_hook(record)
    try:
        with evaluation_mode(model), torch.no_grad():
            model.predict(**batch.to(model.device).prediction_inputs())
    finally:
        hook.remove()
    real = batch.attention_mask.bool()
    return inputs[0].cpu()[real].double()


def covariance_similarity(first: Tensor, second: Tensor, share: float = 0.99) -> float:
    """Compute |F_i^T F_j| / (|F_i| |F_j|) in Frobenius norms (equation 3.7), from 0 to 1.

    F = U D^(1/2) of X^T X = U D U^T, cut to the fewest directions whose D sum up to `share` of all. The similarity is
    0 for orthogonal inputs and 1 for inputs with the same single direction.

    Args:
        first: (m, d) vectors of one task.
        second: (n, d) vectors of another.
        share: the share of the sum of singular values that is kept.
    """
    return similarity_of(covariance_factor(first, share), covariance_factor(second, share))


def similarity_of(a: Tensor, b: Tensor) -> float:
    """Return the covariance similarity of two factors F."""
    product = a.T @ b
    norms = a.norm() * b.norm()
    return float(product.norm() / norms.clamp(min=1e-30))


def covariance_factor(vectors: Tensor, share: float = 0.99) -> Tensor:
    """Return the factor F (d, r) of vectors (n, d)."""
    # X^T X = R^T R for X = Q R, so R has the same covariance with fewer rows.
    _, r = torch.linalg.qr(vectors.double())
    _, root, directions = torch.linalg.svd(r, full_matrices=False)
    weights = root.square()  # the singular values of X^T X
    cumulative = weights.cumsum(0) / weights.sum().clamp(min=1e-30)
    kept = int((cumulative < share).sum()) + 1
    return directions[:kept].T * root[:kept]
