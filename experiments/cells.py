"""What experiments share: rows over seeds, and, until every experiment uses `execute`, a process pool."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from statistics import mean

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from graftlm.evaluation import Interval, Metric, Row, combine_seeds, value_of
from graftlm.runs.run import Measurement


def progress_bar() -> Progress:
    """How many pieces of an experiment are done, and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that stop at once when the block is left by an error or an interrupt, whatever still waits for them."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    # An interrupt from the terminal reaches every process; this one stops the others.
    with ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def over_seeds(measured: Sequence[Measurement], row_id: str, label: str) -> Row:
    """One row of several seeds: mean and interval of every metric. A single seed keeps its bootstrap interval."""
    if len(measured) == 1:
        return Row(id=row_id, label=label, metrics=measured[0].row.metrics)
    names = [name for name in measured[0].row.metrics if all(name in one.row.metrics for one in measured)]
    return Row(id=row_id, label=label, metrics={name: _combined(name, measured) for name in names})


def _combined(name: str, measured: Sequence[Measurement]) -> Metric:
    values: list[Metric] = [one.row.metrics[name] for one in measured]
    if any(isinstance(value, Interval) for value in values):
        return combine_seeds([value_of(value) for value in values])
    return mean(value_of(value) for value in values)


def metric(measured: Measurement, name: str) -> float:
    """The plain number of a measurement's metric."""
    return value_of(measured.row.metrics[name])


def by_row(cells: Mapping[str, Measurement], prefix: str) -> list[Measurement]:
    """The measurements whose cell id starts with `prefix`."""
    return [one for cell_id, one in cells.items() if cell_id.startswith(prefix)]
