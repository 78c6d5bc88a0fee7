"""Run: one training and measurement. `execute` runs any number of them: cached, resumed, in one process pool.

    OUT/measurements/ID.json    key and measurement of a finished run: the one cache of results
    OUT/ID/                     checkpoints and artefact of the run
    OUT/ID/run.json             the key of the run that the artefact is of
    OUT/.lock                   locked while a process works in OUT

Every recipe, comparison, demo and experiment is a list of runs.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from torch import Tensor

from graftlm.config import Config
from graftlm.data.packing import Batches
from graftlm.errors import RecipeError
from graftlm.evaluation import Row
from graftlm.evaluation.metrics import MemoryWatch
from graftlm.io import by_content, digest, progress_bar, write_atomically
from graftlm.training.checkpoint import read_history
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary, train
from graftlm.version import __version__

_MEASUREMENTS, _RUN = "measurements", "run.json"

Log = Callable[[str], None]


@dataclass
class Measurement:
    """The measured result of one run: its metrics as a row of a report, and details as plain JSON values.

    The details are `statistics`, `losses`, `tasks` and others.
    """

    row: Row
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"row": self.row.model_dump(mode="json"), "details": self.details}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measurement:
        return cls(Row.model_validate(values["row"]), dict(values["details"]))

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row."""
        self.row = self.row.model_copy(update={"metrics": {**self.row.metrics, **metrics}})


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


def execute(
    runs: Sequence[Run],
    out: str | Path,
    *,
    jobs: int = 1,
    title: str | None = None,
    progress: bool = True,
    log: Log = print,
) -> dict[str, Measurement]:
    """Run what is not finished in `out`; gives the measurement of every run by its id.

    A finished run's measurement and folder have the same key, and its artefacts exist. A killed one resumes
    from its checkpoints.

    Args:
        runs: in the order in which they start, as far as their dependencies allow. Equal runs may appear twice.
        jobs: number of processes, with one thread each. With 1, runs use this process and torch's threads: a new
            process takes longer to start than a small model to train.
        title: shows one progress bar over all runs with this title. None shows the progress of each training.
        progress: False shows no progress.

    Raises RecipeError if two different runs have one id or folder, a dependency is missing, or another process is at
    work in `out`.
    """
    out = Path(out)
    by_id = _unique([each for run in runs for each in (*run.needs(), run)])
    try:
        with locked(out):
            done = _execute_all(by_id, out, jobs, title, progress, log)
    finally:  # after an error too: the next call must not meet a backbone or texts of this one
        for kind in {type(run) for run in by_id.values()}:
            kind.release()
    return {run.id: done[run.id] for run in runs}


def _execute_all(
    by_id: Mapping[str, Run], out: Path, jobs: int, title: str | None, progress: bool, log: Log
) -> dict[str, Measurement]:
    """Read back or do every run, each after its dependencies; by id."""
    waiting = dict(by_id)
    done: dict[str, Measurement] = {}
    keys: dict[str, str] = {}
    for run in by_id.values():
        if jobs == 1 and not _measurement_file(run, out).exists():
            run.check()
    columns, shown = (MofNCompleteColumn(), TimeElapsedColumn()), progress and title is not None
    with progress_bar(title or "", len(waiting), *columns, show=shown) as update, _workers(jobs) as pool:
        running: dict[Future[str], Run] = {}
        while waiting or running:
            for run in [run for run in waiting.values() if all(name in done for name in run.dependencies())]:
                del waiting[run.id]
                keys[run.id] = run.key(keys)
                finished = _read_measurement(run, keys[run.id], out)
                folders = {name: _folder(by_id[name], out) for name in run.dependencies()}
                context = RunContext(_folder(run, out), keys[run.id], folders)
                if finished is None and pool is not None:
                    running[pool.submit(_execute_in_worker, run, out, context)] = run
                    continue
                context = replace(context, progress=progress and title is None, log=(lambda _: None) if title else log)
                done[run.id] = finished or _execute_here(run, out, context)
                update(advance=1)
            if running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    done[running.pop(future).id] = Measurement.from_json(json.loads(future.result()))
                    update(advance=1)
    return done


def _unique(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by id, after a check of ids, folders and dependencies."""
    by_id: dict[str, Run] = {}
    folders: dict[Path, str] = {}
    for run in runs:
        if by_id.setdefault(run.id, run) != run:
            raise RecipeError(f"Two different runs have the id {run.id!r}: give each an id of its own.")
        if run.id != Path(run.id).name or run.id in (_MEASUREMENTS, _RUN):
            raise RecipeError(f"A run has the id {run.id!r}, which can't be the name of its folder: choose another.")
        if folders.setdefault(_folder(run, Path()), run.id) != run.id:
            why = f"The runs {folders[_folder(run, Path())]!r} and {run.id!r} have one folder: give each its own."
            raise RecipeError(why)
    before = {name: run.dependencies() for name, run in by_id.items()}
    if missing := [name for names in before.values() for name in names if name not in by_id]:
        raise RecipeError(f"A run depends on {missing[0]!r}, which is not among the runs.")
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise RecipeError(f"The runs {', '.join(error.args[1][1:])} depend on each other in a circle.") from None
    return by_id


def _folder(run: Run, out: Path) -> Path:
    return out / (run.folder or run.id)


def _measurement_file(run: Run, out: Path) -> Path:
    return out / _MEASUREMENTS / f"{run.id}.json"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of an output folder in the main process: two processes would replace each other's files.

    Raises RecipeError if another process holds it, or the folder can't be written.
    """
    if not PartialState().is_main_process:
        yield
        return
    lock = FileLock(out / ".lock", timeout=0, is_singleton=True)  # one that holds it already may take it again
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RecipeError(f"Another process is at work in {out}: wait for its end, or choose another folder.") from None
    except OSError as error:
        raise RecipeError(f"{out} can't be written ({error.strerror}): name another folder.") from None
    try:
        yield
    finally:
        lock.release()


def _execute_here(run: Run, out: Path, context: RunContext) -> Measurement:
    """Do one run in this process, and keep its measurement. Until it has ended, no file says that it is finished."""
    kept, made = _measurement_file(run, out), context.folder / _RUN
    main, has_artefact = PartialState().is_main_process, bool(run.artefacts())
    if main:
        kept.unlink(missing_ok=True)
    if main and has_artefact:
        made.unlink(missing_ok=True)
    started = time.perf_counter()
    measurement = run.measure(context)
    measurement.details["run_seconds"] = round(time.perf_counter() - started, 1)
    if main and has_artefact:
        write_atomically(made, json.dumps({"key": context.key}).encode())
    if main:
        content = json.dumps({"key": context.key} | measurement.to_json(), indent=1)
        write_atomically(kept, content.encode())
    return measurement


def _execute_in_worker(run: Run, out: Path, context: RunContext) -> str:
    torch.set_num_threads(1)
    return json.dumps(_execute_here(run, out, replace(context, log=lambda _: None)).to_json())


def _read_measurement(run: Run, key: str, out: Path) -> Measurement | None:
    """The kept measurement of a finished run, with the label that the run has now."""
    try:
        folder = _folder(run, out)
        values = json.loads(_measurement_file(run, out).read_text(encoding="utf-8"))
        made = json.loads((folder / _RUN).read_text(encoding="utf-8")) if run.artefacts() else values
        if not values["key"] == made["key"] == key or not all((folder / name).exists() for name in run.artefacts()):
            return None
        measurement = Measurement.from_json(values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if run.label:
        measurement.row = measurement.row.model_copy(update={"label": run.label})
    return measurement


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """A process pool that stops at once when an error or an interrupt leaves the block; None for one job."""
    if jobs == 1:
        yield None
        return
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    # An interrupt from the terminal reaches every process. The workers ignore it; this process stops them.
    with ProcessPoolExecutor(jobs, spawn, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
