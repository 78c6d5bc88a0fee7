"""Execute any number of runs: cached, resumed, in one process pool.

    OUT/measurements/ID.json    key and measurement of a finished run: the one cache of results
    OUT/ID/                     checkpoints and artifacts of the run
    OUT/ID/run.json             key of the run that made the artifacts
    OUT/.lock                   locked while a process works in OUT

Every recipe, comparison, demo and experiment is a list of runs.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from graftlm.errors import RecipeError
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import write_atomically
from graftlm.processes import process_state
from graftlm.progress import progress_bar
from graftlm.runs.run import Log, Run, RunContext

MEASUREMENTS = "measurements"
RUN_RECORD = "run.json"


def execute(
    runs: Sequence[Run],
    out: str | Path,
    *,
    jobs: int = 1,
    title: str | None = None,
    progress: bool = True,
    log: Log = print,
) -> dict[str, Measurement]:
    """Execute the runs that are not finished in `out`.

    The measurement and the folder of a finished run have the run's key, and its artifacts exist. An interrupted run
    resumes from its checkpoints.

    Args:
        runs: in the order in which they start, as far as their dependencies allow. Equal runs may appear twice.
        out: the output folder; it is created if necessary.
        jobs: number of processes with one thread each, at least 1. With 1, runs use this process and torch's threads,
            since starting a process takes longer than training a small model.
        title: shows one progress bar over all runs with this title. None shows the progress of each training.
        progress: False shows no progress.
        log: receives each line of the log of runs in this process, unless there is a title.

    Returns:
        The measurement of every run by its id.

    Raises:
        RecipeError: two different runs have one id or folder, an id can't be the name of a folder, a dependency is
            missing, runs depend on each other in a circle, another process works in `out`, or `out` can't be written.
        GraftError: a run fails; the measurements of finished runs are kept.
    """
    out = Path(out)
    with_needed = [each for run in runs for each in (*run.needs(), run)]
    by_id = _checked_by_id(with_needed)
    try:
        with locked(out):
            done = _Execution(by_id, out, title=title, progress=progress, log=log).complete(jobs)
    finally:
        # After an error too: the next call must not meet a backbone or texts of this one.
        for kind in {type(run) for run in by_id.values()}:
            kind.release()
    return {run.id: done[run.id] for run in runs}


class _Execution:
    """One call of `execute`."""

    def __init__(
        self,
        by_id: Mapping[str, Run],
        out: Path,
        *,
        title: str | None,
        progress: bool,
        log: Log,
    ) -> None:
        self._by_id = by_id
        self._out = out
        self._title = title
        self._progress = progress
        self._log = log
        self._keys: dict[str, str] = {}
        self._done: dict[str, Measurement] = {}
        self._running: dict[Future[str], Run] = {}

    def complete(self, jobs: int) -> dict[str, Measurement]:
        """Read back or execute every run after its dependencies; returns the measurements by id."""
        if jobs == 1:
            for run in self._by_id.values():
                if not _measurement_file(run, self._out).exists():
                    run.check()
        bar = progress_bar(
            self._title or "",
            len(self._by_id),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            show=self._progress and self._title is not None,
        )
        waiting = dict(self._by_id)
        with bar as update, _workers(jobs) as pool:
            while waiting or self._running:
                for run in self._ready(waiting):
                    del waiting[run.id]
                    if self._start(run, pool):
                        update(advance=1)
                for _ in range(self._collect()):
                    update(advance=1)
        return self._done

    def _ready(self, waiting: Mapping[str, Run]) -> list[Run]:
        """Return the waiting runs whose dependencies are done."""
        return [run for run in waiting.values() if all(name in self._done for name in run.dependencies())]

    def _start(self, run: Run, pool: ProcessPoolExecutor | None) -> bool:
        """Start a run in the pool, or execute it here; returns whether it is done."""
        key = run.key(self._keys)
        self._keys[run.id] = key
        finished = _read_measurement(run, key, self._out)
        folders = {name: _folder(self._by_id[name], self._out) for name in run.dependencies()}
        context = RunContext(folder=_folder(run, self._out), key=key, dependencies=folders)
        if finished is None and pool is not None:
            self._running[pool.submit(_execute_in_worker, run, self._out, context)] = run
            return False
        if finished is None:
            has_one_bar = self._title is not None
            log = _log_nothing if has_one_bar else self._log
            context = replace(context, progress=self._progress and not has_one_bar, log=log)
            finished = _execute_here(run, self._out, context)
        self._done[run.id] = finished
        return True

    def _collect(self) -> int:
        """Wait until one of the running runs is done; returns the number of runs that are."""
        if not self._running:
            return 0
        completed = wait(self._running, return_when=FIRST_COMPLETED).done
        for future in completed:
            run = self._running.pop(future)
            self._done[run.id] = Measurement.from_json(json.loads(future.result()))
        return len(completed)


def _log_nothing(line: str) -> None:
    """Discard a line."""


def _checked_by_id(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by id after a check of ids, folders and dependencies."""
    by_id: dict[str, Run] = {}
    owners: dict[Path, str] = {}
    for run in runs:
        if by_id.setdefault(run.id, run) != run:
            raise RecipeError(f"Two different runs have the id {run.id!r}: give each run its own id.")
        if run.id != Path(run.id).name or run.id in ("", "..", MEASUREMENTS, RUN_RECORD):
            raise RecipeError(
                f"A run has the id {run.id!r}, but the name of a folder inside the output folder is expected, without "
                f"slashes and other than {MEASUREMENTS} and {RUN_RECORD}: choose another id."
            )
        owner = owners.setdefault(_folder(run, Path()), run.id)
        if owner != run.id:
            raise RecipeError(
                f"The runs {owner!r} and {run.id!r} have the same folder {_folder(run, Path())}: give each run its own "
                "folder."
            )
    dependencies = {name: run.dependencies() for name, run in by_id.items()}
    for run_id, names in dependencies.items():
        for name in names:
            if name not in by_id:
                raise RecipeError(f"The run {run_id!r} depends on {name!r}, which is not among the runs: add it.")
    try:
        TopologicalSorter(dependencies).prepare()
    except CycleError as error:
        _, *circle = error.args[1]
        raise RecipeError(
            f"The runs {', '.join(circle)} depend on each other in a circle: remove one of these dependencies."
        ) from None
    return by_id


def _folder(run: Run, out: Path) -> Path:
    return out / (run.folder or run.id)


def _measurement_file(run: Run, out: Path) -> Path:
    return out / MEASUREMENTS / f"{run.id}.json"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of an output folder in the main process, since two processes would replace each other's files.

    A process that holds the lock may acquire it again.

    Args:
        out: the output folder; it is created if necessary.

    Raises:
        RecipeError: another process holds the lock, or the folder can't be written.
    """
    if not process_state().is_main_process:
        yield
        return
    lock = FileLock(out / ".lock", timeout=0, is_singleton=True)  # Its holder may acquire it again.
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RecipeError(f"Another process works in {out}: wait until it ends, or choose another folder.") from None
    except OSError as error:
        raise RecipeError(f"{out} can't be written ({error.strerror}): name another folder.") from None
    try:
        yield
    finally:
        lock.release()


def _execute_here(run: Run, out: Path, context: RunContext) -> Measurement:
    """Execute a run in this process and keep its measurement. Until it has ended, no file marks it as finished."""
    measurement_file = _measurement_file(run, out)
    record_file = context.folder / RUN_RECORD
    is_main = process_state().is_main_process
    has_artefacts = bool(run.artefacts())
    if is_main:
        measurement_file.unlink(missing_ok=True)
        if has_artefacts:
            record_file.unlink(missing_ok=True)
    started = time.perf_counter()
    measurement = run.measure(context)
    measurement.details["run_seconds"] = round(time.perf_counter() - started, 1)
    if is_main:
        if has_artefacts:
            write_atomically(record_file, json.dumps({"key": context.key}).encode())
        content = json.dumps({"key": context.key} | measurement.to_json(), indent=1)
        write_atomically(measurement_file, content.encode())
    return measurement


def _execute_in_worker(run: Run, out: Path, context: RunContext) -> str:
    """Execute a run in a process of the pool; returns the measurement as JSON."""
    torch.set_num_threads(1)
    measurement = _execute_here(run, out, replace(context, log=_log_nothing))
    return json.dumps(measurement.to_json())


def _read_measurement(run: Run, key: str, out: Path) -> Measurement | None:
    """Return the kept measurement of a finished run with the run's present label; None if it is not finished."""
    folder = _folder(run, out)
    try:
        values = json.loads(_measurement_file(run, out).read_text(encoding="utf-8"))
        made_by = values["key"]
        if run.artefacts():
            record = json.loads((folder / RUN_RECORD).read_text(encoding="utf-8"))
            made_by = record["key"]
        is_complete = all((folder / name).exists() for name in run.artefacts())
        if not values["key"] == made_by == key or not is_complete:
            return None
        measurement = Measurement.from_json(values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if run.label:
        measurement.row = measurement.row.model_copy(update={"label": run.label})
    return measurement


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """Yield a process pool that stops at once when an error or an interrupt leaves the block; None for one job."""
    if jobs == 1:
        yield None
        return
    others = set(multiprocessing.active_children())
    # An interrupt from the terminal reaches every process. The workers ignore it; this process stops them.
    pool = ProcessPoolExecutor(
        max_workers=jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    with pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
