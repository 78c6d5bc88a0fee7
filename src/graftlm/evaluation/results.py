"""The format of all results: `results.json`.

A metric is an `Interval` or a number. Row ids and metric names are stable, so that different runs can be compared.
`details` is free-form JSON beside the table: statistics of grafts, loss curves, learning-rate paths.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import Field, JsonValue

from graftlm.config import Config
from graftlm.errors import EvaluationError, did_you_mean
from graftlm.files.writing import write_atomically

FILE_NAME = "results.json"


class Interval(Config):
    """A value with the ends of its interval, in the metric's unit."""

    mean: float
    low: float
    high: float

    def _problems(self) -> Iterator[str]:
        if self.low > self.high:
            yield "the low end of an interval lies above its high end"


Metric = float | int | Interval


def value_of(metric: Metric) -> float:
    """A metric as a number: the mean of an interval."""
    return metric.mean if isinstance(metric, Interval) else float(metric)


class Row(Config):
    """The metrics of one method."""

    id: str
    label: str
    metrics: dict[str, Metric]


class Aim(Config):
    """An aim of the measurement and whether it was met; `measured` and `met` are null when it was not measured."""

    text: str
    metric: str
    aim: float
    measured: float | None = None
    met: bool | None = None


class PaperRow(Config):
    """Published figures of a row, and where the paper has them."""

    id: str
    metrics: dict[str, float]
    where: str


class Machine(Config):
    """The machine of a measurement."""

    cpu: str
    cores: int
    gpu: str | None
    torch: str

    @classmethod
    def here(cls) -> Self:
        """This machine; `cores` counts the cores that the process may use."""
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cpu=_cpu_name(), cores=cores, gpu=gpu, torch=torch.__version__)


class Results(Config):
    """One `results.json`."""

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
        if len(set(ids)) < len(ids):
            yield f"row ids repeat: {', '.join(ids)}"

    @classmethod
    def here(cls, name: str, rows: Sequence[Row], *, seeds: Sequence[int] = (0,), **more: Any) -> Self:
        """Results of this process, with its machine, commit and command unless `more` has them."""
        origin = {"command": command_line(), "commit": source_commit(), "machine": Machine.here()}
        return cls(name=name, rows=list(rows), seeds=list(seeds), **(origin | more))

    def row(self, row_id: str) -> Row:
        """The row with an id. Raises EvaluationError if there is no such row."""
        by_id = {row.id: row for row in self.rows}
        if row_id not in by_id:
            hint = did_you_mean(row_id, by_id)
            raise EvaluationError(f"The results {self.name} have no row {row_id}{hint}: name one of theirs.")
        return by_id[row_id]

    def write(self, folder: str | Path) -> Path:
        """Write `results.json` atomically; returns its path; EvaluationError if the folder can't be written to."""
        values = self.model_dump(mode="json", exclude=None if self.details else {"details"})
        text = json.dumps(values, indent=2, ensure_ascii=False)
        return write_atomically(Path(folder) / FILE_NAME, text.encode() + b"\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a `results.json`, or the one in a folder.

        Raises EvaluationError if the file can't be read, or is not JSON, and RecipeError if the JSON has another form.
        """
        path = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise EvaluationError(f"There is no file {path}: name a report's folder or its {FILE_NAME}.") from None
        except OSError as error:
            raise EvaluationError(f"{path} can't be read ({error.strerror}): name a readable {FILE_NAME}.") from None
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise EvaluationError(f"{path} is no JSON, but a {FILE_NAME} is expected: run the report again.") from None
        return cls.parse(values, where=str(path))


def combine_seeds(values: Sequence[Metric]) -> Interval:
    """The mean of one metric over n seeds, with Student's 95% interval of the mean.

        mean ± t(0.975, n - 1) · s / √n, where s is the sample's standard deviation

    The interval is over seeds, not over text. Only the means of intervals count. A single value is returned as it is.

    Raises EvaluationError if there are no values.
    """
    if not values:
        raise EvaluationError("There are no values to combine over seeds: run at least one seed.")
    if len(values) == 1:
        value = values[0]
        return value if isinstance(value, Interval) else Interval(mean=value, low=value, high=value)
    count = len(values)
    mean = math.fsum(map(value_of, values)) / count
    deviation = math.sqrt(math.fsum((value_of(value) - mean) ** 2 for value in values) / (count - 1))
    half = _t95(count - 1) * deviation / math.sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half)


def command_line() -> str:
    """The command of this process, with DIR for every absolute path."""
    program = Path(sys.argv[0])
    # With `python -m package`, argv[0] is the path of the package's __main__.py or of the module.
    if program.name == "__main__.py" and program.parent.name == "experiments":
        command = ["python", "-m", "experiments"]
    else:
        command = ["graft" if program.name in {"", "-c", "-m", "__main__.py"} else program.name]
    return shlex.join([*command, *("DIR" if Path(word).is_absolute() else word for word in sys.argv[1:])])


def source_commit() -> str | None:
    """The git commit of GraftLM's source, or None when it does not run from its repository."""
    package = Path(__file__).resolve().parents[1]
    root = _git(package, "rev-parse", "--show-toplevel")
    # An installed copy may lie inside another project's repository.
    if root is None or Path(root).resolve() / "src" / "graftlm" != package:
        return None
    return _git(package, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["git", "-C", str(folder), *arguments], stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return None


def _t95(degrees: int) -> float:
    """The two-sided 95% quantile of Student's t, to four digits as in printed tables."""
    from scipy.special import stdtrit

    return round(float(stdtrit(degrees, 0.975)), 4)


def _cpu_name() -> str:
    with suppress(OSError):
        if name := re.search(r"^model name.*?:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE):
            return name[1].strip()
    return platform.processor() or platform.machine()
