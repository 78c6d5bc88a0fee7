"""Runs: one training and measurement each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from torch import Tensor

from graftlm.config import Config
from graftlm.data.mixture import Batches
from graftlm.errors import RecipeError
from graftlm.evaluation import Row
from graftlm.evaluation.cost import MemoryWatch
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import by_content, digest
from graftlm.training.checkpoint import read_history
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary, train
from graftlm.version import __version__

Log = Callable[[str], None]


@dataclass(frozen=True)
class RunContext:
    """Where a run writes, and whom it tells.

    Attributes:
        folder: the run's own folder.
        dependencies: folders of the runs that it depends on, by id.
        progress: show the progress of training.
        log: takes lines for people.
    """

    folder: Path
    key: str = ""
    dependencies: Mapping[str, Path] = field(default_factory=dict)
    progress: bool = False
    log: Log = print


class Run(Config):
    """One training and measurement, frozen: its fields decide the result.

    A subclass adds fields and implements `measure`.

    Args:
        id: unique in a call of `execute`; a name of a folder, without slashes.
        label: name in tables.
        depends_on: ids of runs that must finish first; their keys are part of this run's key.
        folder: the run's folder in the output folder; the id where it is empty.
    """

    id: str
    label: str = ""
    depends_on: tuple[str, ...] = ()
    folder: str = ""

    def needs(self) -> Sequence[Run]:
        """Runs that must finish first, such as sampling, beside those of `depends_on`; `execute` adds them."""
        return ()

    def dependencies(self) -> tuple[str, ...]:
        """The ids of all runs that must finish first."""
        return (*self.depends_on, *(run.id for run in self.needs()))

    def key(self, dependencies: Mapping[str, str] | None = None) -> str:
        """SHA-256 over all that decides the result: the kind of run, its settings, its dependencies, GraftLM's version.

        Names and labels do not count. A local path counts by the content of its files. A model or data set of the hub
        counts by its name and revision. Versions of other packages do not count.

        `dependencies` has the keys of the runs of `dependencies()`, by id.
        """
        keys = [(dependencies or {})[name] for name in self.dependencies()]
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return digest(kind, __version__, by_content(self.settings()), keys)

    def settings(self) -> dict[str, Any]:
        """The fields that decide the result, as plain JSON values."""
        return self.model_dump(mode="json", exclude={"id", "label", "depends_on", "folder"})

    def check(self) -> None:
        """Raise what will keep the run from starting, before any run has begun."""

    def artefacts(self) -> tuple[str, ...]:
        """Files in the run's folder without which the run is not finished."""
        return ()

    @abstractmethod
    def measure(self, context: RunContext) -> Measurement:
        """Do the run, and measure its result."""

    @classmethod
    def release(cls) -> None:
        """Free what runs of this kind share in a process, such as a loaded backbone."""


@dataclass(frozen=True)
class Trainee:
    """What a training run trains.

    Attributes:
        model: a module with the forward signature of the training loop.
        batches: the global batches; None without steps.
        identity: plain JSON values that a resumed run must share.
        tokenizer: the model's tokenizer, where evaluation needs it.
        tests: what evaluation reads, by name.
        evaluator: what measures the model, where the run made it before training.
        start: the weights before training by name, where evaluation needs them.
    """

    model: Any
    batches: Batches | None
    identity: dict[str, Any]
    tokenizer: Any = None
    tests: Any = None
    evaluator: Any = None
    start: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingRun(Run):
    """A run of the training loop. Subclasses differ in how they build model and batches, evaluate and save."""

    training: TrainingConfig

    @abstractmethod
    def build(self, context: RunContext) -> AbstractContextManager[Trainee]:
        """Build model and batches; the block ends when the run is over."""

    @abstractmethod
    def evaluate(self, trainee: Trainee) -> Measurement:
        """Measure the trained model."""

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        """Write the trained model into the run's folder."""

    def record(self, summary: TrainingSummary | None, measurement: Measurement) -> dict[str, Any]:
        """What a saved model keeps of its training."""
        return {
            "steps": summary.steps if summary else 0,
            "tokens": summary.tokens if summary else 0,
            "training": self.training.model_dump(mode="json"),
            "measured": measurement.row.model_dump(mode="json")["metrics"],
        }

    def measure(self, context: RunContext) -> Measurement:
        """Train, evaluate and save; processes other than the main one give an empty row."""
        with self.build(context) as trainee:
            summary, memory = None, MemoryWatch()
            if self.training.steps:
                if trainee.batches is None:
                    raise RecipeError("A run with steps needs text: name some in data.new, or set training.steps to 0.")
                with memory:
                    options: dict[str, Any] = {"identity": trainee.identity, "progress": context.progress}
                    summary = train(trainee.model, trainee.batches, self.training, context.folder, **options)
            if not PartialState().is_main_process:
                return Measurement(Row(id=self.id, label=self.label or self.id, metrics={}))
            measurement = self.evaluate(trainee)
            if summary is not None:
                cost = {"train_tokens_per_s": summary.tokens_per_s, "peak_memory_bytes": memory.peak}
                measurement.add_metrics(cost)
                measurement.details["losses"] = [[line["step"], line["loss"]] for line in read_history(summary.history)]
            self.save(trainee, context, summary, measurement)
        return measurement
