"""Published tables, run again: one folder each, with its committed results beside the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from graftlm.config import Config
from graftlm.errors import RecipeError, did_you_mean
from graftlm.evaluation import Results

_FOLDERS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/run.py"))
EXPERIMENTS = {folder.replace("_", "-"): f"experiments.{folder}" for folder in _FOLDERS}


class Options(Config):
    """The options of every experiment.

    Args:
        data: folder of the data sets.
        out: folder of runs, results, report and plots; finished runs there are read back.
        seeds: every row has one run for each.
        tables: names of tables; the experiment's default ones when empty.
        quick: a smaller run of the same form.
        jobs: number of processes, one core each.
        device: device of the models; None takes the fastest.
        backbone: another backbone than the experiment's own.
        endpoint: the server of an experiment that asks models over the network.
        models: names of models of that server.
        scorers: metrics of the user, each NAME=COMMAND, for experiments that score texts.
    """

    data: Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    tables: tuple[str, ...] = ()
    quick: bool = False
    jobs: int = Field(2, ge=1)
    device: str | None = None
    backbone: str | None = None
    endpoint: str | None = None
    models: tuple[str, ...] = ()
    scorers: tuple[str, ...] = ()

    def chosen(self, known: Sequence[str], default: Sequence[str] = ()) -> tuple[str, ...]:
        """The chosen tables; without any the default ones, or all that are known.

        Raises:
            RecipeError: a table is not known.
        """
        for table in self.tables:
            if table not in known:
                raise RecipeError(f"There is no table {table!r} in this experiment{did_you_mean(table, known)}.")
        return self.tables or tuple(default or known)


def reproduce(name: str, options: Options) -> Results:
    """Run one experiment; gives its results, and writes `results.json`, `report.md` and plots to `options.out`.

    Raises:
        RecipeError: there is no such experiment, or it has no such table.
        DataError: the data folder lacks a file.
    """
    if name not in EXPERIMENTS:
        raise RecipeError(f"There is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)}.")
    return import_module(f"{EXPERIMENTS[name]}.run").run(options)
