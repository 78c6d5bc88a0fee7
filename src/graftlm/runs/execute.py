"""Execute any number of runs: cached, resumed, in one process pool.

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from graftlm.errors import RecipeError
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import write_atomically
from graftlm.progress import progress_bar
from graftlm.runs.run import Log, Run, RunContext

MEASUREMENTS, RUN_RECORD = "measurements", "run.json"


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
        if run.id != Path(run.id).name or run.id in (MEASUREMENTS, RUN_RECORD):
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
    return out / MEASUREMENTS / f"{run.id}.json"


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
    kept, made = _measurement_file(run, out), context.folder / RUN_RECORD
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
        made = json.loads((folder / RUN_RECORD).read_text(encoding="utf-8")) if run.artefacts() else values
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
