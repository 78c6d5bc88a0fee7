"""The run of a graft with heads: train it on the labelled rows of several tasks, and measure every task."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from accelerate.utils import broadcast, set_seed
from pydantic import Field
from torch import Tensor, nn

from graftlm.backbone import Backbone, max_sequence_length
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import (
    LabelledConfig,
    LabelledRow,
    Split,
    TaskRows,
    read_held_out_rows,
    read_training_rows,
    score_metric,
)
from graftlm.data.labelled_batches import LabelledMixture, Score, TaskBatch
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.samplers import SamplerConfig
from graftlm.errors import RecipeError
from graftlm.evaluation import Row
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.label_predictions import predictor
from graftlm.evaluation.label_scores import TaskScore, TaskTestSet, measure_labelled, summary_metrics
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import write_atomically
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, GraftConfig, HasHeads
from graftlm.grafts.heads import TaskSpec, uncertainty
from graftlm.processes import process_state
from graftlm.runs.graft_run import GRAFT_NAME, AnyGraft
from graftlm.runs.run import RunContext, Trainee, TrainingRun, steps_text
from graftlm.store.artifact import save_graft
from graftlm.store.manifest import read_manifest
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary

Precision = Literal["fp32", "bf16"]

SAMPLER = "sampler.json"
_START_ROWS = 64
"""Number of rows of each task that initialize its head."""
_MANIFEST_KEYS = (
    "type",
    "text",
    "label",
    "columns",
    "separator",
    "metric",
    "choices",
    "marks",
    "stride",
    "form",
)
_NAME = re.compile(r"[^\W_][\w-]*")
_TAKEN = re.compile(r"average|task_sigma|data_share|.*_(ratio|parameters|per_s|bytes|bpb)|old|new|learned|forgotten")


class TaskEvaluationConfig(Config):
    """How the tasks' test rows are measured."""

    batch_size: int = Field(64, ge=1, description="Rows of a forward pass.")
    precision: Precision = "fp32"


class _TaskSettings(Config):
    backbone: BackboneConfig
    graft: AnyGraft = Field(description="What to train; `kind` names a method whose grafts have heads.")
    tasks: dict[str, LabelledConfig] = Field(min_length=1, description="The tasks, by name.")
    sampler: SamplerConfig = Field(SamplerConfig(), description="How batches choose tasks and rows.")
    length: int = Field(128, ge=4, description="Maximum tokens of a row.")
    truncation: bool = Field(True, description="Truncate longer rows; false makes a longer training row an error.")
    training: TrainingConfig
    evaluation: TaskEvaluationConfig = TaskEvaluationConfig()


class TaskRecipe(_TaskSettings):
    """A training run of a graft with one head for each task."""

    out: str = Field("runs/tasks", description="Folder for the graft, its report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if self.backbone.add_tokens is not None:
            yield "backbone.add_tokens is for models that continue text, but the recipe has tasks: leave it out"
        if self.training.epochs is not None:
            yield "batches of tasks have no passes to count in training.epochs: set training.steps instead"
        for name in self.tasks:
            if not _NAME.fullmatch(name):
                yield (
                    f"the task name {name!r} can't be used: use letters, digits, - and _, and begin with a letter or "
                    "digit"
                )
            stride = self.tasks[name].stride
            if stride is not None and stride >= self.length:
                yield (
                    f"tasks.{name}.stride is {stride}, but rows have at most length={self.length} tokens, so that "
                    "windows can't begin so far apart: lower the stride, or raise length"
                )
            if _TAKEN.fullmatch(name):
                yield f"the task name {name} is that of a metric of the report: choose another"
        if not self.graft.needs_tasks:
            yield (
                f"a graft of the kind {self.graft.kind} has no heads, but the recipe has tasks: choose a kind with "
                "heads, or train it on text, with data instead of tasks"
            )
        own_tasks = getattr(self.graft, "tasks", None)
        if own_tasks:
            yield (
                f"the graft section names the task {next(iter(own_tasks))}, but tasks are named in the recipe's tasks "
                "section alone: leave them out of the graft section"
            )

    def run(self) -> TaskRun:
        """Return the run that trains the recipe's graft."""
        settings = {name: getattr(self, name) for name in _TaskSettings.model_fields}
        return TaskRun(id=self.graft.kind, folder=".", **settings)


def _log_shared_rows(context: RunContext, train: Mapping[str, TaskRows], test: Mapping[str, TaskRows]) -> None:
    """Log how many test rows have the inputs of a training row of their task."""
    for name, task in test.items():
        known = {_inputs_of(row) for row in train[name].rows}
        shared = sum(_inputs_of(row) in known for row in task.rows)
        if shared:
            context.log(
                f"warning: of the {len(task):,} test rows of {name}, {shared:,} have the inputs of a training row, so "
                "that the score says little about other rows."
            )


def _inputs_of(row: LabelledRow) -> Hashable:
    return row.texts, row.choices, row.marks


@dataclass(frozen=True)
class TaskEvaluation:
    """What is needed to evaluate the tasks.

    Attributes:
        tests: held-out rows by split and task.
        starts: what each task's head was initialized from, by task.
    """

    tests: Mapping[str, Mapping[str, TaskRows]]
    starts: Mapping[str, Any]


class TaskRun(_TaskSettings, TrainingRun):
    """Train a graft with heads on the labelled rows of several tasks."""

    def artefacts(self) -> tuple[str, ...]:
        return ("graft/graft.json",)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee[GraftedModel, TaskEvaluation]]:
        """Read the labelled rows, build the grafted model, and initialize the heads of its tasks.

        The graft is detached from the backbone when the block ends.

        Args:
            context: where to log.

        Raises:
            GraftError: the backbone or the rows can't be read, or the graft does not fit them.
        """
        rows = {name: read_training_rows(name, task) for name, task in self.tasks.items()}
        tests = {
            "test": self._held_out(rows, "test"),
            "validation": self._held_out(rows, "validation"),
        }
        backbone = self.backbone.load(kind="encoder")
        self._check_length(backbone)
        set_seed(self.training.seed)
        config = with_tasks(self.graft, {name: task.spec for name, task in rows.items()})
        graft = config.graft_class(config, backbone)
        with GraftedModel(backbone, {GRAFT_NAME: graft}) as model:
            batches = self.batches(model, rows)
            for held_out in tests.values():
                self._log_notes(context, held_out)
            self._log_notes(context, rows)
            _log_shared_rows(context, rows, tests["test"])
            self._log_rows(context, backbone, rows, batches)
            starts = _start_tasks(model, batches, rows)
            for name, start in starts.items():
                context.log(f"The task {name} starts from {json.dumps(start)}.")
            if self.training.steps:
                context.log(f"Training {graft.config.label} for {steps_text(self.training.steps)}.")
            yield Trainee(
                model=model,
                batches=batches,
                identity={
                    "graft": self.graft.model_dump(mode="json"),
                    "backbone": backbone.fingerprint.id,
                    "data": batches.fingerprint(),
                },
                evaluation=TaskEvaluation(tests=tests, starts=starts),
            )

    def _held_out(self, rows: Mapping[str, TaskRows], split: Split) -> dict[str, TaskRows]:
        """Return the rows of a split of the tasks that have it."""
        held_out = {}
        for name, task in self.tasks.items():
            if task.files(split):
                held_out[name] = read_held_out_rows(name, task, rows[name].spec, split)
        return held_out

    def _check_length(self, backbone: Backbone) -> None:
        limit = max_sequence_length(backbone, backbone.need_tokenizer())
        if self.length > limit:
            raise RecipeError(
                f"length is {self.length}, but {backbone.name} reads at most {limit} tokens: set length to {limit} or "
                "less."
            )

    def _log_notes(self, context: RunContext, rows: Mapping[str, TaskRows]) -> None:
        """Log the notes on the rows of tasks."""
        for task in rows.values():
            for note in task.notes:
                context.log(note)

    def _log_rows(
        self,
        context: RunContext,
        backbone: Backbone,
        rows: Mapping[str, TaskRows],
        batches: LabelledMixture,
    ) -> None:
        """Log notes about batches, and the number of rows."""
        for note in batches.notes:
            context.log(note)
        n_rows = sum(len(task) for task in rows.values())
        context.log(f"Backbone {backbone.name}; tasks: {len(rows)}; rows in all: {n_rows:,}.")

    def encoder(self, backbone: Backbone, truncation: bool = True) -> RowEncoder:
        """Return the encoder that turns the run's rows into tokens.

        Args:
            backbone: the backbone, whose tokenizer encodes.
            truncation: truncate longer rows; False makes a longer training row an error.
        """
        return row_encoder(backbone, self.length, truncation=truncation)

    def batches(self, model: GraftedModel, rows: Mapping[str, TaskRows]) -> LabelledMixture:
        """Return the batches of labelled rows.

        Args:
            model: the model in training, whose scores some sampler policies need.
            rows: the training rows by task.

        Raises:
            DataError: a row is longer than `length`, and `truncation` is false.
        """
        tasks = tasks_of(model.grafts[GRAFT_NAME])
        score = row_scorer(model, list(tasks.values()), self.training.precision)
        return LabelledMixture(
            rows,
            self.encoder(model.backbone, truncation=self.truncation),
            self.sampler,
            batch_size=self.training.batch_size,
            seed=self.training.seed,
            score=score,
            numbers={name: number for number, name in enumerate(tasks) if name in rows},
            steps=self.training.steps,
        )

    def evaluate(self, trainee: Trainee[GraftedModel, TaskEvaluation]) -> Measurement:
        model = trainee.model
        scores = {split: self._score(model, rows) for split, rows in trainee.evaluation.tests.items()}
        metrics: dict[str, Any] = dict(summary_metrics(scores["test"]))
        for name, value in summary_metrics(scores["validation"]).items():
            metrics[f"{name}_validation"] = value
        metrics["data_share"] = _labelled_mixture(trainee).sampler.report()["data_share"]
        metrics.update(_parameter_metrics(model))
        details: dict[str, object] = {"tasks": {split: _scores_as_json(by_task) for split, by_task in scores.items()}}
        if trainee.evaluation.starts:
            details["statistics"] = {"started": trainee.evaluation.starts}
        row = Row(id=self.graft.kind, label=self.label or self.graft.label, metrics=metrics)
        return Measurement(row, details)

    def _score(self, model: GraftedModel, rows: Mapping[str, TaskRows]) -> dict[str, TaskScore]:
        if not rows:
            return {}
        return measure_labelled(
            predictor(model, self.evaluation.precision),
            self.encoder(model.backbone),  # Long test rows are always truncated.
            task_tests(tasks_of(model.grafts[GRAFT_NAME]), self.tasks, rows),
            batch_size=self.evaluation.batch_size,
        )

    def save(
        self,
        trainee: Trainee[GraftedModel, TaskEvaluation],
        context: RunContext,
        summary: TrainingSummary | None,
        measurement: Measurement,
    ) -> None:
        """Write the graft into the folder `graft` of the run's folder, and the sampler's report next to it."""
        report = _labelled_mixture(trainee).sampler.report()
        write_atomically(context.folder / SAMPLER, json.dumps(report).encode())
        model = trainee.model
        graft = model.grafts[GRAFT_NAME]
        assert isinstance(graft, Graft), "a grafted model has grafts only"
        training = {
            **self.record(summary, measurement),
            "length": self.length,
            "tasks": self._recorded_tasks(),
        }
        save_graft(graft, model.backbone, context.folder / "graft", training=training)

    def _recorded_tasks(self) -> dict[str, object]:
        """Return how rows of each task are read, including the tasks of a graft that this one extends."""
        tasks: dict[str, object] = {}
        extended = getattr(self.graft, "extends", None)
        if extended:
            earlier = read_manifest(extended).training.get("tasks")
            if isinstance(earlier, dict):
                tasks.update(earlier)
        for name, task in self.tasks.items():
            tasks[name] = task.model_dump(mode="json", include=set(_MANIFEST_KEYS))
        return tasks


def _start_tasks(model: GraftedModel, batches: LabelledMixture, rows: Mapping[str, TaskRows]) -> dict[str, Any]:
    """Initialize the heads of tasks from some of their rows; returns what each was initialized from."""
    device = model.backbone.device
    samples = {name: batches.sample(name, _START_ROWS).to(device).inputs() for name in rows}
    graft = model.grafts[GRAFT_NAME]
    return graft.start_tasks(model, samples) if isinstance(graft, HasHeads) else {}


def _labelled_mixture(trainee: Trainee[GraftedModel, TaskEvaluation]) -> LabelledMixture:
    assert isinstance(trainee.batches, LabelledMixture), "the run builds these batches"
    return trainee.batches


def _parameter_metrics(model: GraftedModel) -> dict[str, float]:
    """Count all parameters and those that train, also relative to the backbone's."""
    total = count_parameters(model.parameters())
    trained = count_parameters(model.trainable_parameters().values())
    backbone = count_parameters(model.backbone.model.parameters())
    return {
        "trained_parameters_ratio": trained / backbone,
        "total_parameters_ratio": total / backbone,
        "trainable_parameters": trained,
        "total_parameters": total,
    }


def _scores_as_json(scores: Mapping[str, TaskScore]) -> dict[str, object]:
    return {name: score.to_json() for name, score in scores.items()}


def with_tasks(config: GraftConfig, specs: Mapping[str, TaskSpec]) -> GraftConfig:
    """Return a copy of a graft's config that has tasks.

    Args:
        config: a config without tasks, of a kind of graft with heads.
        specs: the tasks by name, in order.

    Raises:
        RecipeError: the tasks do not fit the config.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    values["tasks"] = {name: spec.model_dump() for name, spec in specs.items()}
    return config.parse(values, where="graft")


def row_encoder(backbone: Backbone, length: int, truncation: bool = True) -> RowEncoder:
    """Return the encoder that turns rows into tokens. It marks second texts if the model has segment embeddings.

    Args:
        backbone: the backbone, whose tokenizer encodes.
        length: maximum number of tokens of a row.
        truncation: truncate longer rows; False makes a longer training row an error.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """
    segments = (getattr(backbone.config, "type_vocab_size", None) or 0) > 1
    return RowEncoder(backbone.need_tokenizer(), length, segments=segments, truncation=truncation)


def row_scorer(
    model: GraftedModel,
    specs: Sequence[TaskSpec],
    precision: Precision = "fp32",
) -> Score:
    """Return a function that scores rows by the model's uncertainty in evaluation mode.

    The main process decides, so that all processes choose the same rows.

    Args:
        model: the model in training.
        specs: the tasks in the order of their numbers.
        precision: precision of the passes.

    Returns:
        A function from a batch to the uncertainty of each row; None for rows of tasks without one.
    """
    predict = predictor(model, precision)

    def score_rows(batch: TaskBatch) -> Sequence[float | None]:
        predictions = predict(batch)
        row_specs = [specs[number] for number in batch.task.tolist()]
        device = predictions[0].device
        with torch.no_grad():
            scores = uncertainty(predictions, row_specs, batch.targets)
            zero = torch.zeros((), device=device)
            known = [zero if score is None else score.to(device) for score in scores]
            values = torch.stack(known)
        if process_state().num_processes > 1:
            # Scores of one batch may differ between processes by rounding, so all take those of the main process.
            values = values.to(process_state().device)
            values = cast("Tensor", broadcast(values))
        numbers = values.tolist()
        return [None if score is None else number for score, number in zip(scores, numbers, strict=True)]

    return score_rows


def tasks_of(graft: nn.Module) -> dict[str, TaskSpec]:
    """Return the tasks of a graft by name, in the order of their numbers; empty for a graft without heads."""
    return graft.tasks() if isinstance(graft, HasHeads) else {}


def task_tests(
    tasks: Mapping[str, TaskSpec],
    configs: Mapping[str, LabelledConfig],
    rows: Mapping[str, TaskRows],
) -> dict[str, TaskTestSet]:
    """Return test rows with each task's number and metric.

    Args:
        tasks: all tasks of the graft, in the order of their numbers.
        configs: the tasks' configs by name, which may name a metric.
        rows: the test rows by task; tasks without test rows are left out.
    """
    numbers = {name: number for number, name in enumerate(tasks)}
    tests = {}
    for name, held_out in rows.items():
        tests[name] = TaskTestSet(
            number=numbers[name],
            rows=held_out,
            metric=score_metric(configs[name], held_out.spec),
        )
    return tests
