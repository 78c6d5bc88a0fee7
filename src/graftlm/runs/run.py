"""Run: one training and measurement. `execute` runs any number of them: cached, resumed, in one process pool.

    OUT/measurements/ID.json    key and measurement of a finished run: the one cache of results
    OUT/ID/                     checkpoints and artefact of the run

Every recipe, comparison, demo and experiment is a list of runs.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from graftlm.config import Config
from graftlm.data.packing import Batches
from graftlm.errors import RecipeError
from graftlm.evaluation import Row
from graftlm.evaluation.metrics import MemoryWatch
from graftlm.io import digest, file_digest, write_atomically
from graftlm.training.checkpoint import read_history
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary, train

_MEASUREMENTS = "measurements"
_PATH_KEYS = ("path", "name", "folder", "tokenizer", "extends")  # keys whose values are paths without a slash, too
_SAMPLED_BYTES = 2**26  # the size from which a file's digest reads samples of it

Log = Callable[[str], None]


@dataclass
class Measurement:
    """The measured result of one run.

    Attributes:
        row: its metrics, as a row of a report.
        details: what stands beside the row, as plain JSON values: `statistics`, `losses`, `tasks` and others.
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

    def add_training(self, summary: TrainingSummary, peak_memory: int) -> None:
        """Add the cost of training to the row, and the losses to the details."""
        self.add_metrics({"train_tokens_per_s": summary.tokens_per_s, "peak_memory_bytes": peak_memory})
        self.details["losses"] = [[line["step"], line["loss"]] for line in read_history(summary.history)]


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
    dependencies: Mapping[str, Path] = field(default_factory=dict)
    progress: bool = False
    log: Log = print


class Run(Config):
    """One training and measurement, frozen: its fields decide the result.

    A subclass adds fields and implements `measure`.

    Args:
        id: unique in a call of `execute`; a valid name of a folder.
        label: name in tables.
        depends_on: ids of runs that must finish first; their keys are part of this run's key.
        folder: the run's folder in the output folder; the id where it is empty.
    """

    id: str
    label: str = ""
    depends_on: tuple[str, ...] = ()
    folder: str = ""

    def key(self, dependencies: Mapping[str, str] | None = None) -> str:
        """SHA-256 over all that decides the result.

        Names and labels do not count. A path counts by the content of its files.

        Args:
            dependencies: keys of the runs in `depends_on`, by id.
        """
        keys = [(dependencies or {})[name] for name in self.depends_on]
        return digest(type(self).__name__, _by_content(self.settings()), keys)

    def settings(self) -> dict[str, Any]:
        """The fields that decide the result, as plain JSON values."""
        return self.model_dump(mode="json", exclude={"id", "label", "depends_on", "folder"})

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
    """

    model: Any
    batches: Batches | None
    identity: dict[str, Any]
    tokenizer: Any = None
    tests: Any = None


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

    def measure(self, context: RunContext) -> Measurement:
        """Train, evaluate and save; processes other than the main one give an empty row."""
        with self.build(context) as trainee:
            summary, memory = None, MemoryWatch()
            if self.training.steps:
                if trainee.batches is None:
                    raise RecipeError(
                        "A run with steps needs text: name some under data.new, or set training.steps to 0."
                    )
                with memory:
                    summary = train(
                        trainee.model,
                        trainee.batches,
                        self.training,
                        context.folder,
                        identity=trainee.identity,
                        progress=context.progress,
                    )
            if not PartialState().is_main_process:
                return Measurement(Row(id=self.id, label=self.label or self.id, metrics={}))
            measurement = self.evaluate(trainee)
            if summary is not None:
                measurement.add_training(summary, memory.peak)
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

    A finished run is one whose measurement has the same key and whose artefacts exist. A killed run resumes from its
    checkpoints.

    Args:
        runs: in the order in which they start, as far as their dependencies allow. Equal runs may appear twice.
        out: the output folder.
        jobs: number of processes, with one thread each. With 1, runs use this process and torch's threads: a new
            process takes longer to start than a small model to train.
        title: shows one progress bar over all runs with this title. None shows the progress of each training.
        progress: False shows no progress.
        log: takes lines for people.

    Raises:
        RecipeError: two different runs have one id, or a dependency is missing.
    """
    out = Path(out)
    by_id = _unique(runs)
    try:
        done = _execute_all(by_id, out, jobs, title, progress, log)
    finally:  # after an error too: the next call must not meet a backbone or texts of this one
        for kind in {type(run) for run in runs}:
            kind.release()
    return {run.id: done[run.id] for run in runs}


def _execute_all(
    by_id: Mapping[str, Run], out: Path, jobs: int, title: str | None, progress: bool, log: Log
) -> dict[str, Measurement]:
    """Read back or do every run, each after its dependencies; by id."""
    waiting = dict(by_id)
    done: dict[str, Measurement] = {}
    keys: dict[str, str] = {}
    with _progress_bar(title, len(waiting), show=progress and title is not None) as advance, _workers(jobs) as pool:
        running: dict[Future[str], Run] = {}
        while waiting or running:
            for run in [run for run in waiting.values() if all(name in done for name in run.depends_on)]:
                del waiting[run.id]
                keys[run.id] = run.key(keys)
                finished = _read_measurement(run, keys[run.id], out)
                folders = {name: _folder(by_id[name], out) for name in run.depends_on}
                if finished is None and pool is not None:
                    running[pool.submit(_execute_in_worker, run, keys[run.id], str(out), folders)] = run
                    continue
                context = RunContext(_folder(run, out), folders, progress and title is None, _quiet if title else log)
                done[run.id] = finished or _execute_here(run, keys[run.id], out, context)
                advance()
            if running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    done[running.pop(future).id] = Measurement.from_json(json.loads(future.result()))
                    advance()
    return done


def _unique(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by id, after a check of ids and dependencies."""
    by_id: dict[str, Run] = {}
    for run in runs:
        if by_id.setdefault(run.id, run) != run:
            raise RecipeError(f"Two different runs have the id {run.id!r}: give each an id of its own.")
    remaining = dict(by_id)
    while remaining:
        ready = [name for name, run in remaining.items() if not any(other in remaining for other in run.depends_on)]
        missing = [name for run in by_id.values() for name in run.depends_on if name not in by_id]
        if missing or not ready:
            raise RecipeError(
                f"A run depends on {missing[0]!r}, which is not among the runs."
                if missing
                else f"The runs {', '.join(remaining)} depend on each other in a circle."
            )
        for name in ready:
            del remaining[name]
    return by_id


def _folder(run: Run, out: Path) -> Path:
    return out / (run.folder or run.id)


def _execute_here(run: Run, key: str, out: Path, context: RunContext) -> Measurement:
    """Do one run in this process, and keep its measurement."""
    measurement = run.measure(context)
    if PartialState().is_main_process:
        content = json.dumps({"key": key} | measurement.to_json(), indent=1)
        write_atomically(out / _MEASUREMENTS / f"{run.id}.json", content.encode())
    return measurement


def _execute_in_worker(run: Run, key: str, out: str, dependencies: Mapping[str, Path]) -> str:
    torch.set_num_threads(1)
    context = RunContext(_folder(run, Path(out)), dependencies, progress=False, log=_quiet)
    return json.dumps(_execute_here(run, key, Path(out), context).to_json())


def _quiet(line: str) -> None:
    pass


def _read_measurement(run: Run, key: str, out: Path) -> Measurement | None:
    """The kept measurement of a finished run, with the label that the run has now."""
    try:
        values = json.loads((out / _MEASUREMENTS / f"{run.id}.json").read_text(encoding="utf-8"))
        if values["key"] != key or not all((_folder(run, out) / name).exists() for name in run.artefacts()):
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


@contextmanager
def _progress_bar(title: str | None, total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=not show) as progress:
        task = progress.add_task(title or "", total=total)
        yield lambda: progress.advance(task)


def _by_content(values: Any, key: str = "") -> Any:
    """Plain JSON values in which every path to a local file or folder is replaced by the digest of its content."""
    if isinstance(values, dict):
        return {name: _by_content(value, name) for name, value in values.items()}
    if isinstance(values, list):
        return [_by_content(value, key) for value in values]
    if not isinstance(values, str) or not values or not ("/" in values or key in _PATH_KEYS):
        return values
    try:
        path = Path(values)
        if path.is_file():
            return _file_content(path)
        files = sorted(file for file in path.glob("**/*" if key == "path" else "*") if file.is_file())
        return [[str(file.relative_to(path)), _file_content(file)] for file in files] or values
    except OSError:  # a text with a slash is no path
        return values


def _file_content(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, size: int, modified: int) -> str:
    """The digest of a file. A large file counts by size, time of change and samples, since reading it takes minutes."""
    if size < _SAMPLED_BYTES:
        return file_digest(path)
    with path.open("rb") as file:
        samples = []
        for index in range(64):
            file.seek(index * (size // 64))
            samples.append(file.read(4096).hex())
    return digest(size, modified, samples)


__all__ = ["Log", "Measurement", "Run", "RunContext", "Trainee", "TrainingRun", "execute"]
