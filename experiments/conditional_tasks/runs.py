"""The runs of the experiment: a run of tasks that measures its cost and the similarity of its tasks as well."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from graftlm.artifact import load_graft
from graftlm.backbone import Backbone, Site
from graftlm.backbone.load import BackboneConfig
from graftlm.data.labelled import LabelledConfig, read_held_out_rows
from graftlm.data.labelled_batches import LabelledMixture, TaskBatch, batches_by_length
from graftlm.evaluation.labelled import predictor
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafts import GraftConfig, GraftedModel, build_graft
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.run import Measurement, RunContext, Trainee
from graftlm.runs.task_run import TaskRun, row_encoder, tasks_of, with_tasks
from graftlm.training.loop import TrainingSummary

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
    factors = {
        name: torch.linalg.qr(first_layer_inputs(model, mixture.sample(name, SIMILARITY_ROWS)))[1]
        for name in mixture.tasks
    }
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
