"""`Run`: one training and measurement, and the base class of runs that train."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from graftlm.config import Config
from graftlm.data.interleaving import InterleavedBlocks
from graftlm.data.mixture import Batches, MemoryBlocks, Mixture, passes_text
from graftlm.data.rows import DOMAIN_NAMES, NEW
from graftlm.errors import RecipeError
from graftlm.evaluation import Row
from graftlm.evaluation.cost import MemoryWatch
from graftlm.evaluation.measurement import Measurement, TrainingDetails
from graftlm.files.digests import by_content, digest
from graftlm.processes import process_state
from graftlm.training.config import TrainingConfig
from graftlm.training.history import read_history
from graftlm.training.loop import TrainingSummary, train
from graftlm.version import __version__

_FEW_STEPS = 25  # for the dozen facts of the demo, five passes are the fewest with so many
_MANY_PASSES = 10
_UNEVEN = 0.05  # how much more or less often than the whole text a source is read if that is due to its weight
Log = Callable[[str], None]

ModelT = TypeVar("ModelT", bound=nn.Module)
EvaluationT = TypeVar("EvaluationT")


@dataclass(frozen=True)
class RunContext:
    """Where a run writes and what it shows.

    Attributes:
        folder: the run's own folder.
        key: the digest of all that determines the run's result, see `Run.key`.
        dependencies: folders of the runs that it depends on, by id.
        progress: whether to show the progress of training.
        log: receives each line of the log.
    """

    folder: Path
    key: str = ""
    dependencies: Mapping[str, Path] = field(default_factory=dict)
    progress: bool = False
    log: Log = print


class Run(Config):
    """One training and measurement. It can't be changed, because its fields determine the result.

    A subclass adds fields and implements `measure`.

    Args:
        id: unique in a call of `execute`; the name of a folder, without slashes.
        label: name in tables; by default the subclass chooses one.
        depends_on: ids of runs that must finish first; their keys are part of this run's key.
        folder: the run's folder in the output folder; by default the id.

    Attributes:
        key_name: name of this kind of run in keys; by default the class's module and name. A class that moves sets its
            former name, so that finished runs keep their keys.
    """

    key_name: ClassVar[str | None] = None
    id: str
    label: str = ""
    depends_on: tuple[str, ...] = ()
    folder: str = ""

    def needs(self) -> Sequence[Run]:
        """Return further runs that must finish first, such as sampling; `execute` adds them."""
        return ()

    def dependencies(self) -> tuple[str, ...]:
        """Return the ids of all runs that must finish first."""
        needed = [run.id for run in self.needs()]
        return (*self.depends_on, *needed)

    def key(self, dependencies: Mapping[str, str] | None = None) -> str:
        """Return the SHA-256 digest of all that determines the result.

        That is the kind of run, its settings, its dependencies and GraftLM's version, but not names, labels and
        versions of other packages. A local path is represented by the content of its files, a model or data set on the
        hub by its name and revision.

        Args:
            dependencies: the keys of the runs that `dependencies()` names, by id; all of them are needed.
        """
        known = dependencies or {}
        keys = [known[name] for name in self.dependencies()]
        own_name = vars(type(self)).get("key_name")
        kind = own_name or f"{type(self).__module__}.{type(self).__qualname__}"
        return digest(kind, __version__, by_content(self.settings()), keys)

    def settings(self) -> dict[str, Any]:
        """Return the fields that determine the result, as plain JSON values."""
        return self.model_dump(mode="json", exclude={"id", "label", "depends_on", "folder"})

    def check(self) -> None:
        """Check that the run can start. `execute` calls this before any run has begun.

        Raises:
            GraftError: the settings do not fit together, or do not fit the backbone.
        """

    def artefacts(self) -> tuple[str, ...]:
        """Return the paths in the run's folder of the files without which the run is not finished."""
        return ()

    @abstractmethod
    def measure(self, context: RunContext) -> Measurement:
        """Do the run and measure its result.

        Args:
            context: where to write, and what to show.
        """

    @classmethod
    def release(cls) -> None:
        """Free what runs of this kind share in a process, such as a loaded backbone."""


@dataclass(frozen=True)
class Trainee(Generic[ModelT, EvaluationT]):
    """What a training run trains.

    Attributes:
        model: a module with the forward signature of the training loop.
        batches: the global batches; None without steps.
        identity: plain JSON values that a resumed run must share.
        evaluation: what the run's `evaluate` and `save` need, made before training.
    """

    model: ModelT
    batches: Batches | None
    identity: dict[str, object]
    evaluation: EvaluationT


class TrainingRun(Run):
    """A run of the training loop. Subclasses build model and batches, evaluate and save."""

    training: TrainingConfig

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        # A later field is left out at its default, so that earlier runs keep their keys.
        if self.training.epochs is None:
            del settings["training"]["epochs"]
        return settings

    @abstractmethod
    def build(self, context: RunContext) -> AbstractContextManager[Trainee[Any, Any]]:
        """Return a context that builds model and batches, and frees them when the run is over.

        Args:
            context: where to write, and what to show.
        """

    @abstractmethod
    def evaluate(self, trainee: Trainee[Any, Any]) -> Measurement:
        """Measure the trained model.

        Args:
            trainee: the model after training, with what `build` made for the evaluation.
        """

    def save(
        self,
        trainee: Trainee[Any, Any],
        context: RunContext,
        summary: TrainingSummary | None,
        measurement: Measurement,
    ) -> None:
        """Write the trained model into the run's folder.

        Args:
            trainee: the trained model.
            context: where to write.
            summary: summary of the training; None for a run without steps.
            measurement: the measured result.
        """

    def record(self, summary: TrainingSummary | None, measurement: Measurement) -> dict[str, object]:
        """Return what a saved model records about its training, as plain JSON values.

        Args:
            summary: summary of the training; None for a run without steps.
            measurement: the measured result.
        """
        return {
            "steps": summary.steps if summary else 0,
            "tokens": summary.tokens if summary else 0,
            "training": self.training.model_dump(mode="json"),
            "measured": measurement.row.model_dump(mode="json")["metrics"],
        }

    def measure(self, context: RunContext) -> Measurement:
        """Train, evaluate and save. Processes other than the main process only train, and return an empty row.

        Raises:
            RecipeError: the run has steps, but no batches.
            TrainingError: see `train`.
        """
        with self.build(context) as trainee:
            memory = MemoryWatch()
            summary = None
            known = _ignored_keys(trainee.batches)
            _log_ignored(known, context)
            if self.training.has_steps:
                with memory:
                    summary = self._train(trainee, context)
            if not process_state().is_main_process:
                return Measurement(Row(id=self.id, label=self.label or self.id, metrics={}))
            measurement = self.evaluate(trainee)
            if summary is not None:
                measurement.add_metrics(_training_metrics(summary, memory))
                measurement.details["trained"] = self._training_details(summary, trainee.batches)
                history = read_history(summary.history)
                measurement.details["losses"] = [[line["step"], line["loss"]] for line in history]
                ignored = _ignored_keys(trainee.batches)
                if ignored:
                    measurement.details["ignored_keys"] = ignored
                if ignored != known:  # of a stream, which is read during the training
                    _log_ignored(ignored, context)
            self.save(trainee, context, summary, measurement)
        return measurement

    def _training_details(self, summary: TrainingSummary, batches: Batches | None) -> TrainingDetails:
        return {
            "learning_rate": self.training.learning_rate,
            "steps": summary.steps,
            "rows_per_step": self.training.batch_size,
            "read": batches.text_read(summary.steps) if isinstance(batches, Mixture) else [],
        }

    def _train(self, trainee: Trainee[Any, Any], context: RunContext) -> TrainingSummary:
        if trainee.batches is None:
            raise RecipeError(
                "Training needs text, but this run has none: name some under data.new, or set training.steps to 0."
            )
        for note in _notes_on_targets(trainee.batches):
            context.log(note)
        training = self.training
        if training.epochs is not None:
            steps = _steps_of(trainee.batches, training.epochs)
            context.log(f"Passes over the new text: {training.epochs:g}, which take {steps_text(steps)}.")
            if steps < _FEW_STEPS:
                enough = next(epochs for epochs in count(1) if _steps_of(trainee.batches, epochs) >= _FEW_STEPS)
                context.log(f"So few steps teach little: raise training.epochs to {enough:,} or more.")
            training = training.model_copy(update={"steps": steps, "epochs": None})
        for note in _notes_on_passes(trainee.batches, training.steps):
            context.log(note)
        if training.warmup_steps >= training.steps:
            context.log(
                f"The warm-up of {steps_text(training.warmup_steps)} is as long as the training of "
                f"{steps_text(training.steps)}, so most of it has a low learning rate: lower training.warmup_steps."
            )
        return train(
            trainee.model,
            trainee.batches,
            training,
            context.folder,
            identity=trainee.identity,
            progress=context.progress,
        )


def steps_text(steps: int) -> str:
    """Return a number of steps with its unit, for log lines."""
    return "1 step" if steps == 1 else f"{steps:,} steps"


def _training_metrics(summary: TrainingSummary, memory: MemoryWatch) -> dict[str, object]:
    metrics: dict[str, object] = {
        "train_tokens": summary.tokens,
        "train_seconds": summary.seconds,
        "train_tokens_per_s": summary.tokens_per_s,
        "peak_memory_bytes": memory.peak,
    }
    if summary.rows_without_target:
        metrics["rows_without_target"] = summary.rows_without_target
        metrics["steps_without_target"] = summary.steps_without_target
    return metrics


def _ignored_keys(batches: Batches | None) -> dict[str, int]:
    """Return how often each key of messages, and each column beside them, had a value that is not read."""
    return batches.ignored_keys() if isinstance(batches, Mixture) else {}


def _log_ignored(ignored: Mapping[str, int], context: RunContext) -> None:
    if ignored:
        names = ", ".join(f"{key} ({count:,})" for key, count in sorted(ignored.items()))
        context.log(f"Keys of messages and columns that are not read: {names}.")


def _notes_on_targets(batches: Batches) -> Iterator[str]:
    """Yield what the user should know about rows in memory that have no token to predict."""
    domains = batches.domains if isinstance(batches, Mixture) else {}
    for domain, rows in domains.items():
        if not isinstance(rows, MemoryBlocks):
            continue
        without = rows.without_target()
        of_all = f"Of the {len(rows):,} {DOMAIN_NAMES[domain]} {'row' if len(rows) == 1 else 'rows'}"
        if without.unscored:
            cause = "a prompt or conversation is" if without.unscored == 1 else "prompts or conversations are"
            remedy = "raise data.length, or set data.boundaries to whole"
            yield f"{of_all}, {_have_no_token(without.unscored)}, since {cause} longer than a row: {remedy}."
        if without.single:
            cause = "it has" if without.single == 1 else "they have"
            yield (
                f"{of_all}, {_have_no_token(without.single)}, since {cause} a single token of each document, which is "
                "not predicted."
            )


def _have_no_token(rows: int) -> str:
    return f"{rows:,} {'has' if rows == 1 else 'have'} no token to learn"


def _notes_on_passes(batches: Batches, steps: int) -> Iterator[str]:
    """Yield a line that names the sources that are read less than once or more than ten times due to their weights.

    Only sources whose rows are all in memory are known before the training.
    """
    if not isinstance(batches, Mixture):
        return
    rare: list[str] = []
    often: list[str] = []
    counts = batches.counts(steps * batches.batch_size)
    for domain, blocks in batches.domains.items():
        if not isinstance(blocks, InterleavedBlocks):
            continue
        of_all = counts[domain] / len(blocks)
        for read in blocks.text_read(counts[domain]):
            assert read.passes is not None, "rows in memory are known"
            text = f"{read.source} ({passes_text(read.passes)})"
            if read.passes < min(1, of_all * (1 - _UNEVEN)):
                rare.append(text)
            elif read.passes > max(_MANY_PASSES, of_all * (1 + _UNEVEN)):
                often.append(text)
    clauses = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} read {number}"
        for names, number in ((rare, "less than once"), (often, f"more than {_MANY_PASSES} times"))
        if names
    ]
    if clauses:
        yield f"With the weights of sources, {' and '.join(clauses)}."


def _steps_of(batches: Batches, epochs: float) -> int:
    """Return the number of steps that read as many new rows as there are, `epochs` times, rounded up.

    Sources with weights have their shares of these rows, so that each is read another number of times.
    """
    rows = batches.domains.get(NEW) if isinstance(batches, Mixture) else None
    if not isinstance(batches, Mixture) or not isinstance(rows, MemoryBlocks):
        raise RecipeError(
            "training.epochs counts passes over new text in memory, but the rows of this run are streamed or drawn "
            "from tasks: set training.steps instead."
        )
    new_rows_per_step = batches.batch_size * float(batches.shares[NEW])
    return math.ceil(epochs * len(rows) / new_rows_per_step)
