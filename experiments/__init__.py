"""Reproductions of published tables: every folder has an experiment, its committed results and the paper's figures."""

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


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


class Options(Config):
    """The options that all experiments share.

    Args:
        data: folder of the data sets.
        out: folder for runs, results, report and plots. Finished runs in it are read back.
        seeds: seeds; every row is trained once for each. If they are not given, `reproduce` takes those that the
            experiment declares as `SEEDS`, if it does.
        tables: names of the tables to run. Empty selects the experiment's default tables.
        quick: run a smaller version of the same form.
        jobs: number of processes, each with one thread.
        device: device of the models; None selects the fastest one.
        backbone: name or path of a backbone that replaces the experiment's own.
        endpoint: URL of the server, for experiments that query models over the network.
        models: names of models on that server.
        user: name of the model that answers questions, for experiments with a simulated user; by default each model.
        user_endpoint: URL of the server of `user`; by default `endpoint`.
        limit: maximum number of examples of a set, for experiments that query models; None for that of the experiment.
        concurrency: number of conversations that a process holds at a time with a server.
        prices: prices of a million tokens read and written, as `0.15,0.60`, for experiments that state a cost.
        user_prices: the same of `user`; by default `prices`.
        scorers: additional metrics as NAME=COMMAND, for experiments that score texts.
    """

    data: Annotated[Path, AfterValidator(_absolute)]
    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    tables: tuple[str, ...] = ()
    quick: bool = False
    jobs: int = Field(2, ge=1)
    device: str | None = None
    backbone: str | None = None
    endpoint: str | None = None
    models: tuple[str, ...] = ()
    user: str | None = None
    user_endpoint: str | None = None
    limit: int | None = Field(None, ge=1)
    concurrency: int = Field(4, ge=1)
    prices: str | None = None
    user_prices: str | None = None
    scorers: tuple[str, ...] = ()

    def chosen(self, known: Sequence[str], default: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the chosen tables.

        Args:
            known: names of all tables of the experiment.
            default: tables to return if none was chosen; an empty sequence selects all known tables.

        Raises:
            RecipeError: a chosen table is not known.
        """
        for table in self.tables:
            if table not in known:
                raise RecipeError(f"There is no table {table!r} in this experiment{did_you_mean(table, known)}.")
        if self.tables:
            return self.tables
        return tuple(default or known)


def reproduce(name: str, options: Options) -> Results:
    """Run one experiment and write `results.json`, `report.md` and plots to `options.out`.

    Args:
        name: name of the experiment, such as `neutral-residues`.
        options: options of the run.

    Returns:
        The results of the experiment.

    Raises:
        RecipeError: there is no such experiment, or it does not have a chosen table.
        DataError: a file is missing from the data folder.
    """
    if name not in EXPERIMENTS:
        raise RecipeError(f"There is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)}.")
    module = import_module(f"{EXPERIMENTS[name]}.run")
    if "seeds" not in options.model_fields_set:
        options = options.model_copy(update={"seeds": getattr(module, "SEEDS", options.seeds)})
    return module.run(options)
