"""The runs of the experiment: runs of tasks that measure their cost and the similarity of their tasks as well."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from graftlm.backbone import Backbone, Site
from graftlm.data.labelled import LabelledConfig, TaskRows, read_held_out_rows
from graftlm.data.labelled_batches import EncodedTask, LabelledMixture, RowEncoder, TaskBatch, batches_by_length
from graftlm.errors import EvaluationError, TrainingError
from graftlm.evaluation import Row, value_of
from graftlm.evaluation.label_metrics import measure_labelled, predictor, summary_metrics
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafted.model import GraftedModel
from graftlm.runs.run import RunContext, Trainee
from graftlm.runs.task_run import TaskRun, row_encoder, task_tests, tasks_of
from graftlm.store.artifact import load_graft
from graftlm.training.loop import TrainingSummary

SIMILARITY_ROWS = 64  # training rows of each task
_ENCODED: dict[tuple[Any, ...], EncodedTask] = {}  # what the runs of this process have read


class SharedEncoder(RowEncoder):
    """A row encoder that reads the rows of a task once in a process: its runs train on the same files."""

    def encode(self, task: TaskRows, *, training: bool = False) -> EncodedTask:
        key = task.rows[0].where, task.rows[-1].where, len(task), self.length, training, str(task.spec)
        if key not in _ENCODED:
            _ENCODED[key] = super().encode(task, training=training)
        return _ENCODED[key]


class ConditionalTasksRun(TaskRun):
    """Train on tasks; measure scores, seconds, the sampler's choices and the similarity of the tasks' inputs.

    Args:
        old_tasks: tasks of the graft that `graft.extends` names: their score, and the predictions that changed.
        keep_graft: write the trained graft to the run's folder.
        similarity: measure the covariance similarity of the tasks' inputs.
    """

    old_tasks: dict[str, LabelledConfig] = {}
    keep_graft: bool = False
    similarity: bool = False

    def artefacts(self) -> tuple[str, ...]:
        return super().artefacts() if self.keep_graft else ()

    def measure(self, context: RunContext) -> Measurement:
        """As of a run of tasks; one that diverges, as some rates of a search do, has the largest error."""
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
            yield replace(trainee, tests=(*trainee.tests, time.perf_counter()))

    def evaluate(self, trainee: Trainee) -> Measurement:
        *tests, started = trainee.tests
        seconds = time.perf_counter() - started
        measurement = super().evaluate(replace(trainee, tests=tests))
        mixture: Any = trainee.batches
        report = mixture.sampler.report()
        measurement.add_metrics({"seconds": seconds, "rows_trained": report["picked"], "rows_scored": report["scored"]})
        measurement.add_metrics({"validation_error": 100 - value_of(measurement.row.metrics["average_validation"])})
        picked = {task: sum(step.get(task, 0) for step in report["steps"]) for task in mixture.tasks}
        measurement.details |= {"picked": picked, "data_share_by_task": report["data_share_by_task"]}
        if self.similarity:
            measurement.details["similarity"] = task_similarities(trainee.model, mixture)
        if self.old_tasks:
            measurement.add_metrics(self._old_metrics(trainee.model))
        return measurement

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        """Write the graft if it is kept."""
        if self.keep_graft:
            super().save(trainee, context, summary, measurement)

    def _old_metrics(self, model: GraftedModel) -> dict[str, float]:
        """The average of the old tasks' test scores, and how many predictions of validation rows have changed."""
        specs, encoder = tasks_of(model.grafts["graft"]), self.encoder(model.backbone)
        rows = {name: read_held_out_rows(name, task, specs[name]) for name, task in self.old_tasks.items()}
        tests, size = task_tests(specs, self.old_tasks, rows), self.evaluation.batch_size
        scores = measure_labelled(predictor(model), encoder, tests, batch_size=size)
        after = self._old_predictions(model)
        backbone = self.backbone.load(kind="encoder")
        folder: str = self.graft.extends  # type: ignore[attr-defined]  # a graft with old tasks extends another
        with GraftedModel(backbone, {"graft": load_graft(folder, backbone)}) as base:
            changed = count_changed(self._old_predictions(base), after)
        return {"old_average": summary_metrics(scores)["average"], "old_changed": changed}

    def _old_predictions(self, model: GraftedModel) -> dict[str, list[Tensor]]:
        """Predictions for the validation rows of each old task."""
        predict, encoder = predictor(model), self.encoder(model.backbone)
        predictions: dict[str, list[Tensor]] = {}
        for number, (name, spec) in enumerate(tasks_of(model.grafts["graft"]).items()):
            if name in self.old_tasks:
                rows = encoder.encode(read_held_out_rows(name, self.old_tasks[name], spec, "validation")).rows
                batches = batches_by_length([(row, spec, number) for row in rows], self.training.batch_size, 0)
                predictions[name] = [prediction.cpu() for _, batch in batches for prediction in predict(batch)]
        return predictions


def count_changed(before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]]) -> int:
    """The number of predicted values that differ."""
    return sum(int((old != new).sum()) for name in before for old, new in zip(before[name], after[name], strict=True))


def task_similarities(model: GraftedModel, mixture: LabelledMixture) -> dict[str, Any]:
    """CovSim_i of each task: the mean covariance similarity of its first layer's inputs to every other task's.

    Beside it stands its range: `same_task`, of a task's rows to other rows of it, and `isotropic`, of random vectors of
    as many tokens and dimensions to others.
    """
    batches = {name: mixture.sample(name, 2 * SIMILARITY_ROWS) for name in mixture.tasks}
    halves = {  # every other row, as a batch has its longest first
        name: [first_layer_inputs(model, batch.rows(slice(start, None, 2))) for start in (0, 1)]
        for name, batch in batches.items()
    }
    factors = {name: [covariance_factor(half) for half in pair] for name, pair in halves.items()}
    chance, shape = torch.Generator().manual_seed(0), next(iter(halves.values()))[0].shape
    noise = [covariance_factor(torch.randn(shape, generator=chance, dtype=torch.double)) for _ in range(2)]
    pairs = {(a, b): similarity_of(factors[a][0], factors[b][0]) for a, b in combinations(factors, 2)}
    others = len(factors) - 1
    return {
        "by_task": {name: sum(value for pair, value in pairs.items() if name in pair) / others for name in factors},
        "same_task": mean(similarity_of(*pair) for pair in factors.values()),
        "isotropic": similarity_of(*noise),
    }


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
    return inputs[0].cpu()[batch.attention_mask.bool()].double()


def covariance_similarity(first: Tensor, second: Tensor, share: float = 0.99) -> float:
    """|F_i^T F_j| / (|F_i| |F_j|) in Frobenius norms (equation 3.7), from 0 to 1.

    F = U D^(1/2) of X^T X = U D U^T, cut to the fewest directions whose D sum up to `share` of all. The similarity is
    0 for orthogonal inputs and 1 for inputs with the same single direction.

    Args:
        first: (m, d) vectors of one task.
        second: (n, d) vectors of another.
        share: of the sum of singular values that is kept.
    """
    return similarity_of(covariance_factor(first, share), covariance_factor(second, share))


def similarity_of(a: Tensor, b: Tensor) -> float:
    """The covariance similarity of two factors F."""
    return float((a.T @ b).norm() / (a.norm() * b.norm()).clamp(min=1e-30))


def covariance_factor(vectors: Tensor, share: float = 0.99) -> Tensor:
    """(d, r): F."""
    # X^T X = R^T R for X = Q R, so R has the same covariance with fewer rows.
    _, root, directions = torch.linalg.svd(torch.linalg.qr(vectors.double())[1], full_matrices=False)
    weights = root.square()  # the singular values of X^T X
    cumulative = weights.cumsum(0) / weights.sum().clamp(min=1e-30)
    kept = int((cumulative < share).sum()) + 1
    return directions[:kept].T * root[:kept]
