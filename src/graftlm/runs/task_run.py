"""The run of a graft with heads: train it on the labelled rows of several tasks, and measure every task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, set_seed
from pydantic import Field
from torch import Tensor, nn

from graftlm.backbone import Backbone, max_sequence_length
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig, TaskRows, read_held_out_rows, read_training_rows, score_metric
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
from graftlm.runs.graft_run import AnyGraft
from graftlm.runs.run import RunContext, Trainee, TrainingRun
from graftlm.store.artifact import save_graft
from graftlm.store.manifest import read_manifest
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary

SAMPLER = "sampler.json"
_START_ROWS = 64  # rows of each task that initialise its head
_MANIFEST_KEYS = ("type", "text", "label", "columns", "separator", "metric")
_NAME = re.compile(r"[^\W_][\w-]*")
_TAKEN = re.compile(r"average|task_sigma|data_share|.*_(ratio|parameters|per_s|bytes|bpb)|old|new|learned|forgotten")


class TaskEvaluationConfig(Config):
    """How the tasks' test rows are measured."""

    batch_size: int = Field(64, ge=1, description="Rows of a forward pass.")
    precision: Literal["fp32", "bf16"] = "fp32"


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
        for name in self.tasks:
            if not _NAME.fullmatch(name):
                yield f"the task's name {name!r} can't be used: take letters, digits, - and _, and begin with no mark"
            if _TAKEN.fullmatch(name):
                yield f"the task's name {name} is that of a metric of the report: choose another"
        if not self.graft.needs_tasks:
            yield (
                f"a graft of the kind {self.graft.kind} has no heads, and the recipe has tasks: choose a kind that "
                "has, or train it on text, with data in the place of tasks"
            )
        if own := getattr(self.graft, "tasks", None):
            yield (
                f"the graft section names the task {next(iter(own))}, but a recipe names tasks once, beside the graft "
                "section: leave them out of it"
            )

    def run(self) -> TaskRun:
        """The run that trains the recipe's graft."""
        settings = {name: getattr(self, name) for name in _TaskSettings.model_fields}
        return TaskRun(id=self.graft.kind, folder=".", **settings)


@dataclass(frozen=True)
class TaskEvaluation:
    """What measures the tasks.

    Attributes:
        tests: held-out rows by split and task.
        starts: what initialised each task's head, by task.
    """

    tests: Mapping[str, Mapping[str, TaskRows]]
    starts: Mapping[str, Any]


class TaskRun(_TaskSettings, TrainingRun):
    """Train a graft with heads on the labelled rows of several tasks."""

    def artefacts(self) -> tuple[str, ...]:
        return ("graft/graft.json",)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        rows = {name: read_training_rows(name, task) for name, task in self.tasks.items()}
        tests = {split: self._held_out(rows, split) for split in ("test", "validation")}
        backbone = self.backbone.load(kind="encoder")
        if self.length > (limit := max_sequence_length(backbone, backbone.need_tokenizer())):
            raise RecipeError(f"length is {self.length}, but {backbone.name} reads {limit} tokens: lower it to that.")
        set_seed(self.training.seed)
        config = with_tasks(self.graft, {name: task.spec for name, task in rows.items()})
        graft = config.graft_class(config, backbone)
        with GraftedModel(backbone, {"graft": graft}) as model:
            batches = self.batches(model, rows)
            for note in [note for task in rows.values() for note in task.notes] + list(batches.notes):
                context.log(note)
            n_rows = sum(map(len, rows.values()))
            context.log(f"Backbone {backbone.name}; tasks: {len(rows)}; rows in all: {n_rows:,}.")
            samples = {name: batches.sample(name, _START_ROWS).to(backbone.device).inputs() for name in rows}
            starts = graft.start_tasks(model, samples) if isinstance(graft, HasHeads) else {}
            for name, start in starts.items():
                context.log(f"The task {name} starts from {json.dumps(start)}.")
            if self.training.steps:
                context.log(f"Training {graft.config.label} for {self.training.steps:,} steps.")
            identity = {"graft": self.graft.model_dump(mode="json"), "backbone": backbone.fingerprint.id}
            yield Trainee(
                model=model,
                batches=batches,
                identity=identity | {"data": batches.fingerprint()},
                evaluation=TaskEvaluation(tests=tests, starts=starts),
            )

    def encoder(self, backbone: Backbone, truncation: bool = True) -> RowEncoder:
        """What turns the run's rows into tokens."""
        return row_encoder(backbone, self.length, truncation)

    def batches(self, model: GraftedModel, rows: Mapping[str, TaskRows]) -> LabelledMixture:
        """The batches, whose rows the sampler chooses with the help of the model in training."""
        tasks = tasks_of(model.grafts["graft"])
        encoder = self.encoder(model.backbone, self.truncation)
        score = row_scorer(model, list(tasks.values()), self.training.precision)
        numbers = {name: number for number, name in enumerate(tasks) if name in rows}
        size, seed = self.training.batch_size, self.training.seed
        steps = self.training.steps
        return LabelledMixture(rows, encoder, self.sampler, size, seed, score, numbers=numbers, steps=steps)

    def _held_out(self, rows: Mapping[str, TaskRows], split: Any) -> dict[str, TaskRows]:
        return {
            name: read_held_out_rows(name, task, rows[name].spec, split)
            for name, task in self.tasks.items()
            if task.files(split)
        }

    def evaluate(self, trainee: Trainee) -> Measurement:
        tests = trainee.evaluation.tests
        starts = trainee.evaluation.starts
        model: GraftedModel = trainee.model
        scores = {split: self._score(model, rows) for split, rows in tests.items()}
        metrics: dict[str, Any] = dict(summary_metrics(scores["test"]))
        metrics |= {f"{name}_validation": value for name, value in summary_metrics(scores["validation"]).items()}
        total, trained = (count_parameters(p) for p in (model.parameters(), model.trainable_parameters().values()))
        backbone = count_parameters(model.backbone.model.parameters())
        metrics |= {
            "data_share": cast("LabelledMixture", trainee.batches).sampler.report()["data_share"],
            "trained_parameters_ratio": trained / backbone,
            "total_parameters_ratio": total / backbone,
            "trainable_parameters": trained,
            "total_parameters": total,
        }
        tasks = {split: {name: score.to_json() for name, score in each.items()} for split, each in scores.items()}
        details = {"tasks": tasks} | ({"statistics": {"started": starts}} if starts else {})
        row = Row(id=self.graft.kind, label=self.label or self.graft.label, metrics=metrics)
        return Measurement(row, details)

    def _score(self, model: GraftedModel, rows: Mapping[str, TaskRows]) -> dict[str, TaskScore]:
        if not rows:
            return {}
        encoder = self.encoder(model.backbone)  # long test rows are always cut
        tests = task_tests(tasks_of(model.grafts["graft"]), self.tasks, rows)
        predict = predictor(model, self.evaluation.precision)
        return measure_labelled(predict, encoder, tests, batch_size=self.evaluation.batch_size)

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        """Write the graft with what its use needs, and the sampler's report."""
        report = cast("LabelledMixture", trainee.batches).sampler.report()
        write_atomically(context.folder / SAMPLER, json.dumps(report).encode())
        folder = getattr(self.graft, "extends", None)
        extended = read_manifest(folder).training.get("tasks") if folder else None
        own = {name: task.model_dump(mode="json", include=set(_MANIFEST_KEYS)) for name, task in self.tasks.items()}
        training = self.record(summary, measurement) | {"length": self.length}
        training["tasks"] = (extended if isinstance(extended, dict) else {}) | own
        model: GraftedModel = trainee.model
        save_graft(cast("Graft", model.grafts["graft"]), model.backbone, context.folder / "graft", training=training)


def with_tasks(config: GraftConfig, specs: Mapping[str, TaskSpec]) -> GraftConfig:
    """The config of a graft with these tasks."""
    tasks = {name: spec.model_dump() for name, spec in specs.items()}
    return config.parse(config.model_dump(mode="json", exclude_unset=True) | {"tasks": tasks}, where="graft")


def row_encoder(backbone: Backbone, length: int, truncation: bool = True) -> RowEncoder:
    """The encoder that turns rows into tokens. It marks second texts where the model has segment embeddings."""
    segments = (getattr(backbone.config, "type_vocab_size", None) or 0) > 1
    return RowEncoder(backbone.need_tokenizer(), length, segments=segments, truncation=truncation)


def row_scorer(model: Any, specs: Sequence[TaskSpec], precision: Any = "fp32") -> Score:
    """Return a function that scores rows of the tasks `specs` by the model's uncertainty in evaluation mode.

    The main process decides, so that all processes choose the same rows.
    """
    predict = predictor(model, precision)

    def score_rows(batch: TaskBatch) -> Sequence[float | None]:
        predictions = predict(batch)
        row_specs = [specs[number] for number in batch.task.tolist()]
        with torch.no_grad():
            scores = uncertainty(predictions, row_specs, batch.targets)
            zero = torch.zeros((), device=predictions[0].device)
            values = torch.stack([zero if score is None else score.to(zero.device) for score in scores])
        if PartialState().num_processes > 1:
            values = cast("Tensor", broadcast(values.to(PartialState().device)))
        return [None if score is None else value for score, value in zip(scores, values.tolist(), strict=True)]

    return score_rows


def tasks_of(graft: nn.Module) -> dict[str, TaskSpec]:
    """The tasks of a graft, in the order of their numbers."""
    return graft.tasks() if isinstance(graft, HasHeads) else {}


def task_tests(
    tasks: Mapping[str, TaskSpec], configs: Mapping[str, LabelledConfig], rows: Mapping[str, TaskRows]
) -> dict[str, TaskTestSet]:
    """Test rows with each task's number and metric."""
    return {
        name: TaskTestSet(list(tasks).index(name), held_out, score_metric(configs[name], held_out.spec))
        for name, held_out in rows.items()
    }
