"""Many independent training runs, several at a time, each finished one kept: what tables are made of."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import mean

import torch
from pydantic import Field
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from graftlm.config import Config
from graftlm.data import DataConfig, Mixture, build_mixture
from graftlm.evaluation import Interval, Metric, Row, combine_seeds, value_of
from graftlm.runs.bench import Bench, Measurement
from graftlm.runs.experiment import load_tests
from graftlm.runs.recipe import AnyGraft, BackboneConfig, EvaluationConfig
from graftlm.training import TrainingConfig


class Cell(Config):
    """One training run of an experiment.

    Args:
        id: its folder's name, unique in the experiment.
        graft: None measures the bare backbone.
    """

    id: str
    label: str = ""
    backbone: BackboneConfig
    graft: AnyGraft | None = None
    data: DataConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)


def run_cells(cells: Sequence[Cell], out: Path, *, jobs: int, title: str) -> dict[str, Measurement]:
    """Run cells, `jobs` processes at a time with one core each; measurements by cell id.

    A cell that was finished before in `out` with the same settings is read back. One process at a time is this one,
    with the cores that torch takes: another takes longer to start than a small graft to train.
    """
    wanted = {cell.id: cell for cell in cells}
    done: dict[str, Measurement] = {}
    with progress_bar() as progress:
        task = progress.add_task(title, total=len(wanted))
        for cell_id, text in _each(wanted, out, jobs):
            done[cell_id] = Measurement.from_json(json.loads(text))
            progress.advance(task)
    return {cell_id: done[cell_id] for cell_id in wanted}


def _each(cells: Mapping[str, Cell], out: Path, jobs: int) -> Iterator[tuple[str, str]]:
    """The id and the measurement of each cell, as they are done."""
    if jobs == 1:
        for cell_id, cell in cells.items():
            yield cell_id, _run_cell(cell.model_dump_json(), str(out))
        return
    with workers(jobs) as pool:
        futures = {pool.submit(_run_alone, cell.model_dump_json(), str(out)): name for name, cell in cells.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


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


def _run_alone(text: str, out: str) -> str:
    torch.set_num_threads(1)
    return _run_cell(text, out)


def _run_cell(text: str, out: str) -> str:
    cell = Cell.model_validate_json(text)
    evaluation = cell.evaluation.model_dump_json()
    bench = _bench(cell.backbone, _without_training(cell.data.model_dump_json()), evaluation)
    if cell.graft is None:
        return json.dumps(bench.backbone_measurement().to_json())
    mixture = _mixture(cell.backbone, cell.data.model_dump_json(), evaluation, cell.training.batch_size)
    folder = Path(out) / cell.id
    measured = bench.run(cell.id, cell.graft, mixture, cell.training, folder, label=cell.label, progress=False)
    return json.dumps(measured.to_json())


@lru_cache(maxsize=2)
def _bench(backbone: BackboneConfig, data: str, evaluation: str) -> Bench:
    """One loaded backbone with its scores, kept for the next cells of this process."""
    config = DataConfig.model_validate_json(data)
    return Bench(backbone.load(), load_tests(config), EvaluationConfig.model_validate_json(evaluation), config.length)


@lru_cache(maxsize=4)
def _mixture(backbone: BackboneConfig, data: str, evaluation: str, batch_size: int) -> Mixture:
    """Packed rows, kept likewise."""
    tokenizer = _bench(backbone, _without_training(data), evaluation).tokenizer
    return build_mixture(DataConfig.model_validate_json(data), tokenizer, batch_size)


def _without_training(data: str) -> str:
    """A data config's part that the bench depends on: seeds and shares of training text change nothing there."""
    config = DataConfig.model_validate_json(data)
    return config.model_copy(update={"seed": 0, "replay_fraction": 0.0}).model_dump_json()


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
