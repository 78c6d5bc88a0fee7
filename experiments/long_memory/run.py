"""Recall, selective copy and ListOps: models of one size and one difference, on what is many windows away.

Every row is trained on each task with each rate of `RATES`, for the same steps on the same examples, with the first
seed; the rate with the best answers to validation examples is taken, and the other seeds are trained with it alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field

from experiments import Options
from experiments.composed import bars
from experiments.jobs import run_jobs
from experiments.long_memory import paper
from experiments.long_memory.cell import Cell, Stage, learn
from experiments.long_memory.data import Task, informed_guesses
from experiments.sequence_rows import BLOCK_STATE, LABELS, model_of
from graftlm.config import Config
from graftlm.errors import RecipeError, did_you_mean
from graftlm.evaluation import Aim, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.report import write_report

NAME = "long-memory"
RATES = (3e-3,)
SOLVED, UNSOLVED = 90.0, 2.0  # percent right; times chance


class Lesson(Config):
    """A task, and how it is learned: in stages, on texts that grow."""

    task: Task
    stages: tuple[Stage, ...] = Field(min_length=1)


class Setting(Config):
    """Sizes of everything.

    Args:
        lessons: by task.
        shape: what the configs of all rows share.
        parameters: of every row's model, but for rounding.
        rates: that are tried.
        tested: fresh examples of a test.
    """

    lessons: dict[str, Lesson]
    shape: dict[str, Any]
    parameters: int
    rates: tuple[float, ...] = RATES
    tested: int = 512


def _stages(*each: tuple[int, int, int]) -> tuple[Stage, ...]:
    """Of (length, steps, texts of a step)."""
    return tuple(Stage(length=length, steps=steps, batch_size=texts) for length, steps, texts in each)


_GROWING = _stages(
    (24, 700, 32), (32, 200, 32), (40, 200, 32), (48, 200, 32), (64, 200, 32), (96, 200, 32), (128, 300, 32)
)
_NESTED = _stages(
    (16, 400, 32), (32, 400, 32), (64, 400, 32), (128, 300, 32), (256, 300, 32), (512, 200, 16), (1024, 150, 16),
    (2000, 150, 16),
)  # fmt: skip
_SHAPE = {
    "hidden_size": 64,
    "state_width": 64,  # a fourth of the width, as elsewhere, would be 16 numbers for all that is remembered
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mixer_layers": [1],
    "filters": 16,
    "initializer_range": 0.125,  # one over the root of the width: with 0.02 attention begins too even to learn from
}
FULL = Setting(
    lessons={
        "recall": Lesson(task=Task(name="recall"), stages=_GROWING),
        "copy": Lesson(task=Task(name="copy"), stages=_GROWING),
        "listops": Lesson(task=Task(name="listops", length=2000, window=64), stages=_NESTED),
    },
    shape=_SHAPE,
    parameters=130_000,
)
QUICK = Setting(
    lessons={
        "recall": Lesson(task=Task(name="recall", length=64), stages=_stages((24, 1, 2), (64, 1, 2))),
        "copy": Lesson(task=Task(name="copy", length=64), stages=_stages((24, 1, 2), (64, 1, 2))),
        "listops": Lesson(
            task=Task(name="listops", length=64, window=8, shortest=10), stages=_stages((16, 1, 2), (64, 1, 2))
        ),
    },
    shape=_SHAPE | {"hidden_size": 16, "state_width": 4, "num_attention_heads": 2, "filters": 4},
    parameters=12_000,
    rates=RATES[:1],
    tested=4,
)


class Plan:
    """Which cells there are."""

    def __init__(self, options: Options, setting: Setting | None = None) -> None:
        self.options = options
        self.setting = setting or (QUICK if options.quick else FULL)
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.tasks = tuple(task for task in self.setting.lessons if task in (options.tables or self.setting.lessons))

    def cell(self, row: str, task: str, rate: float, seed: int) -> Cell:
        """One row on one task."""
        lesson = self.setting.lessons[task]
        own = {"window": lesson.task.window, "kernel_length": lesson.task.length, "vocab_size": lesson.task.vocabulary}
        return Cell(
            id=f"{task}-{row}-lr{rate:g}_s{seed}",
            task=lesson.task,
            model=model_of(row, self.setting.shape | own, self.setting.parameters),
            rate=rate,
            stages=lesson.stages,
            tested=self.setting.tested,
            seed=seed,
        )

    def run(self, cells: Sequence[Cell], title: str) -> dict[str, dict[str, Any]]:
        """What cells measured, by id."""
        return run_jobs(cells, learn, self.options.out / "cells", processes=self.options.jobs, title=title)


def run(options: Options) -> Results:
    """Run all tasks, or those that `tables` names, and write `results.json`, `report.md` and a plot.

    Raises:
        RecipeError: there is no such task.
    """
    for table in options.tables:
        if table not in FULL.lessons:
            raise RecipeError(f"There is no task {table!r} in this experiment{did_you_mean(table, FULL.lessons)}.")
    plan = Plan(options)
    started = time.perf_counter()
    best, tried = choose_rates(plan)
    cells = {
        (row, task, seed): plan.cell(row, task, best[row, task], seed) for row, task in best for seed in plan.seeds
    }
    measured = plan.run(list(cells.values()), NAME)
    rows = [random_row(plan), *(row_of(plan, row, cells, measured) for row in LABELS)]
    details = {
        "wall_s": round(time.perf_counter() - started, 1),
        "setting": plan.setting.model_dump(mode="json"),
        "validation": tried,
        "rates": {f"{row} {task}": rate for (row, task), rate in best.items()},
        "losses": _losses(plan, cells, measured),
        "listops_guesses": _guesses(plan),
    }
    published = paper.rows({row.id for row in rows}) if "listops" in plan.tasks else []
    results = Results.here(NAME, rows, seeds=plan.seeds, aims=aims(rows), paper=published, details=details)
    write_report(results, options.out, plots={"accuracy": _plot(plan, rows)})
    return results


def choose_rates(plan: Plan) -> tuple[dict[tuple[str, str], float], dict[str, dict[str, float]]]:
    """The rate of every row and task with the best answers to validation examples, and all of those, in percent."""
    keys = [(row, task) for task in plan.tasks for row in LABELS]
    cells = {(key, rate): plan.cell(*key, rate, plan.seeds[0]) for key in keys for rate in plan.setting.rates}
    measured = plan.run(list(cells.values()), "rates")
    found = {key: measured[cell.id]["accuracy"]["validation"] for key, cell in cells.items()}
    best = {key: max(plan.setting.rates, key=lambda rate, key=key: found[key, rate]) for key in keys}
    tried = {
        f"{row} {task}": {f"{rate:g}": round(found[(row, task), rate], 2) for rate in plan.setting.rates}
        for row, task in keys
    }
    return best, tried


def random_row(plan: Plan) -> Row:
    """What guessing gives."""
    metrics: dict[str, Metric] = {task: plan.setting.lessons[task].task.chance for task in plan.tasks}
    return Row(id="random", label="guessing", metrics=metrics)


def row_of(
    plan: Plan, row: str, cells: Mapping[tuple[str, str, int], Cell], measured: Mapping[str, Mapping[str, Any]]
) -> Row:
    """One row over seeds."""
    metrics: dict[str, Metric] = {}
    for task in plan.tasks:
        of_seeds = [measured[cells[row, task, seed].id] for seed in plan.seeds]
        metrics[task] = combine_seeds([one["accuracy"]["test"] for one in of_seeds])
        metrics["parameters"] = of_seeds[0]["parameters"]
    return Row(id=row, label=LABELS[row], metrics=metrics)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The best block-state row solves recall, and the sliding window does not."""
    values = {row.id: value_of(row.metrics["recall"]) for row in rows if "recall" in row.metrics}
    if not values:
        return []
    best, slide, bound = max(values[row] for row in BLOCK_STATE), values["slide"], UNSOLVED * values["random"]
    solved = f"the best BST recalls at least {SOLVED:g}%"
    unsolved = f"the sliding window recalls less than {UNSOLVED:g} times as much as guessing"
    return [
        Aim(text=solved, metric="recall", aim=SOLVED, measured=best, met=best >= SOLVED),
        Aim(text=unsolved, metric="recall", aim=bound, measured=slide, met=slide < bound),
    ]


def _guesses(plan: Plan) -> dict[str, float]:
    """What ListOps is worth to those who do not read it, with the first seed."""
    if "listops" not in plan.tasks:
        return {}
    task, tested = plan.setting.lessons["listops"].task, plan.setting.tested
    return informed_guesses(task, 8 * tested, tested, plan.seeds[0])


def _losses(
    plan: Plan, cells: Mapping[tuple[str, str, int], Cell], measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Of the first task and seed."""
    task, seed = plan.tasks[0], plan.seeds[0]
    return {row: measured[cells[row, task, seed].id]["losses"] for row in LABELS}


def _plot(plan: Plan, rows: Sequence[Row]) -> Figure:
    return bars(rows, {task: task for task in plan.tasks}, "right answers, %")
