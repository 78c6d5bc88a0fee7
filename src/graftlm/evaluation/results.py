"""The format of all results: `results.json`.

A metric is an `Interval` or a number. Row ids and metric names are stable, so that different runs can be compared.
`details` is free-form JSON: statistics of grafts, loss curves, learning-rate paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, JsonValue

from graftlm.config import Config
from graftlm.errors import EvaluationError, did_you_mean
from graftlm.evaluation.origin import Machine, command_line, source_commit
from graftlm.files.writing import write_atomically

FILE_NAME = "results.json"


class Interval(Config):
    """A value with its 95% interval, in the metric's unit.

    Attributes:
        mean: the value.
        low: the lower end of the interval.
        high: the upper end of the interval.
    """

    mean: float
    low: float
    high: float

    def _problems(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"the low end of an interval, {self.low}, lies above its high end, {self.high}"


Metric = float | int | Interval


def value_of(metric: Metric) -> float:
    """Return a metric as a number: the mean of an interval."""
    return metric.mean if isinstance(metric, Interval) else float(metric)


class Row(Config):
    """The metrics of one method.

    Attributes:
        id: name of the row, which differs from those of other rows.
        label: the method's name in tables.
        metrics: the metrics by stable names.
    """

    id: str
    label: str
    metrics: dict[str, Metric]


class Aim(Config):
    """An aim of the measurement, and whether it was met.

    Attributes:
        text: the aim in words.
        metric: name of the metric.
        aim: the bound of the metric; `text` says in which direction.
        measured: value of the metric; None if it was not measured.
        met: whether the aim was met, as the writer of the results decided; None if the metric was not measured.
    """

    text: str
    metric: str
    aim: float
    measured: float | None = None
    met: bool | None = None


class PaperRow(Config):
    """Published metrics of a method.

    Attributes:
        id: id of the row that was measured for the same method.
        metrics: the published metrics, by the names of the measured ones.
        where: their place in the paper, such as a table.
    """

    id: str
    metrics: dict[str, float]
    where: str


class Results(Config):
    """The content of a `results.json`.

    Attributes:
        name: name of the measurement.
        command: the command that measured.
        commit: git commit of the code; None outside of a repository.
        machine: the machine of the measurement.
        seeds: the seeds of the runs.
        rows: the metrics of each method.
        aims: the aims of the measurement.
        paper: published metrics to compare with.
        details: further values by name.
    """

    name: str
    command: str
    commit: str | None
    machine: Machine
    seeds: list[int]
    rows: list[Row]
    aims: list[Aim] = Field(default_factory=list)
    paper: list[PaperRow] = Field(default_factory=list)
    details: dict[str, JsonValue] = Field(default_factory=dict)

    def _problems(self) -> Iterator[str]:
        ids = [row.id for row in self.rows]
        repeated = sorted({row_id for row_id in ids if ids.count(row_id) > 1})
        if repeated:
            yield f"several rows have the id {repeated[0]}, but ids must differ: rename all but one"

    @classmethod
    def here(cls, name: str, rows: Sequence[Row], *, seeds: Sequence[int] = (0,), **more: Any) -> Self:
        """Return results of this process, with its machine, commit and command.

        Args:
            name: name of the run or experiment.
            rows: the measured rows, with different ids.
            seeds: seeds of the runs.
            more: further fields; they may replace the machine, the commit and the command.
        """
        origin = {"command": command_line(), "commit": source_commit(), "machine": Machine.here()}
        return cls(name=name, rows=list(rows), seeds=list(seeds), **(origin | more))

    def row(self, row_id: str) -> Row:
        """Return the row with an id.

        Raises:
            EvaluationError: there is no such row.
        """
        by_id = {row.id: row for row in self.rows}
        if row_id not in by_id:
            hint = did_you_mean(row_id, by_id)
            raise EvaluationError(f"The results {self.name} have no row {row_id}{hint}: name one of their rows.")
        return by_id[row_id]

    def write(self, folder: str | Path) -> Path:
        """Write `results.json` atomically and return its path.

        Raises:
            EvaluationError: the folder can't be written to.
        """
        excluded = None if self.details else {"details"}
        values = self.model_dump(mode="json", exclude=excluded)
        text = json.dumps(values, indent=2, ensure_ascii=False)
        return write_atomically(Path(folder) / FILE_NAME, text.encode() + b"\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a `results.json`, or the one in a folder.

        Raises:
            EvaluationError: there is no such file, it can't be read, or it is not JSON.
            RecipeError: the JSON does not have the fields of `Results`.
        """
        path = Path(path)
        if path.is_dir():
            path /= FILE_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise EvaluationError(f"There is no file {path}: name a report's folder or its {FILE_NAME}.") from None
        except OSError as error:
            raise EvaluationError(f"{path} can't be read ({error.strerror}): name a readable {FILE_NAME}.") from None
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise EvaluationError(
                f"{path} is not JSON, but a {FILE_NAME} is expected: name another file, or run its command again."
            ) from None
        return cls.parse(values, where=str(path))
