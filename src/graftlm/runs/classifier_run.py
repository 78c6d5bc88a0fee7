"""The run of one classifier of sequences: train all of its weights, and measure its accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import Field

from graftlm.backbone.backbone import move
from graftlm.config import Config
from graftlm.data.sequence_batches import SequenceBatches
from graftlm.data.sequence_config import SequenceConfig
from graftlm.data.sequences import Sequences, SequenceTask, read_task
from graftlm.evaluation import Metric, Row
from graftlm.evaluation.classification import accuracy_metrics, commonest_class, predict_classes
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.inference import Precision
from graftlm.evaluation.measurement import Measurement
from graftlm.processes import process_state
from graftlm.runs.run import RunContext, Trainee, TrainingRun, steps_text
from graftlm.training.classifier import ClassifierRecord, SequenceClassifier, new_classifier, save_classifier
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary


class ClassifierEvaluationConfig(Config):
    """How the test rows of a classifier are measured."""

    batch_size: int = Field(64, ge=1, description="Rows of a forward pass.")
    precision: Precision = "fp32"


class _ClassifierSettings(Config):
    model: dict[str, object] = Field(
        description="The config of a new model: its model_type in transformers, and any of its keys. Its vocabulary "
        "and classes follow from the data."
    )
    data: SequenceConfig = Field(description="The sequences; `task` is listops, bytes or pixels.")
    training: TrainingConfig
    evaluation: ClassifierEvaluationConfig = ClassifierEvaluationConfig()
    device: str | None = Field(None, description="Such as cuda; by default the fastest there is.")


class ClassifierRecipe(_ClassifierSettings):
    """A training run of all weights of a classifier of sequences."""

    kind: Literal["classifier"] = Field("classifier", description="Marks the recipe of a classifier.")
    out: str = Field("runs/classifier", description="Folder for the model, its report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if self.training.epochs is not None:
            yield "a classifier counts no passes in training.epochs: set training.steps instead"
        elif not self.training.steps:
            yield "a classifier needs training steps: set training.steps to 1 or more"
        if not isinstance(self.model.get("model_type"), str):
            yield "a new model needs a model_type, such as llama: name one under model"

    def run(self) -> ClassifierRun:
        """Return the run that trains the recipe's model."""
        settings = {name: getattr(self, name) for name in _ClassifierSettings.model_fields}
        return ClassifierRun(id="model", label=str(self.model["model_type"]), folder=".", **settings)


class ClassifierRun(_ClassifierSettings, TrainingRun):
    """Train all weights of a classifier of sequences, and measure its accuracy on test rows."""

    def artefacts(self) -> tuple[str, ...]:
        return ("model/config.json",)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee[SequenceClassifier, SequenceTask]]:
        """Read or make the sequences, and make the model.

        Args:
            context: where to log.

        Raises:
            GraftError: the sequences can't be read, or the model does not fit them.
        """
        task = read_task(self.data)
        model = new_classifier(self.model, task, self.training.seed)
        move(model, self.device or str(process_state().device))
        batches = SequenceBatches(task.train, self.training.batch_size, self.training.seed)
        for note in task.notes:
            context.log(note)
        parameters = count_parameters(model.parameters())
        context.log(
            f"A {model.config.model_type} model of {parameters:,} parameters; classes: {len(task.classes)}; rows for "
            f"training: {len(task.train):,}, for the test: {len(task.test):,}."
        )
        context.log(f"Training it for {steps_text(self.training.steps)} of {self.training.batch_size:,} rows.")
        yield Trainee(
            model=SequenceClassifier(model),
            batches=batches,
            identity={"model": self.model, "data": batches.fingerprint()},
            evaluation=task,
        )

    def evaluate(self, trainee: Trainee[SequenceClassifier, SequenceTask]) -> Measurement:
        model = trainee.model.model
        task = trainee.evaluation
        predicted = predict_classes(
            model,
            task.test,
            batch_size=self.evaluation.batch_size,
            precision=self.evaluation.precision,
        )
        metrics: dict[str, Metric] = {
            **accuracy_metrics(predicted, task.test.labels, commonest_class(task.train)),
            "parameters": count_parameters(model.parameters()),
        }
        row_id = model.config.model_type
        rows = {"train": _rows_by_class(task, task.train), "test": _rows_by_class(task, task.test)}
        details: dict[str, object] = {"rows_by_class": rows}
        if task.notes:
            details["notes"] = list(task.notes)
        return Measurement(Row(id=row_id, label=self.label or row_id, metrics=metrics), details)

    def save(
        self,
        trainee: Trainee[SequenceClassifier, SequenceTask],
        context: RunContext,
        summary: TrainingSummary | None,
        measurement: Measurement,
    ) -> None:
        """Write the model, and how its rows are read, into the folder `model` of the run's folder."""
        task = trainee.evaluation
        record = ClassifierRecord(
            data=self.data,
            classes=list(task.classes),
            commonest=commonest_class(task.train),
        )
        save_classifier(trainee.model.model, record, context.folder / "model")


def _rows_by_class(task: SequenceTask, sequences: Sequences) -> dict[str, int]:
    """Return the number of rows of each class, by its name."""
    counts = Counter(sequences.labels.tolist())
    return {name: counts[number] for number, name in enumerate(task.classes)}
