"""Eight tasks on the real MiniLM: fine-tuning of one task and of all, adapters, and conditional tasks module by module.

Every row trains for the same steps on as many rows. Each has the learning rate that is best on validation rows among
the same values; all rows of conditional tasks have one. The further tables add a task to a trained graft, and train on
2, 4 and 8 tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, pstdev
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.conditional_tasks import further, paper
from experiments.conditional_tasks.cell import Cell
from experiments.conditional_tasks.peer import WITHOUT
from experiments.conditional_tasks.plan import (
    BY_UNCERTAINTY,
    PEERS,
    Choices,
    Measured,
    Plan,
    Tried,
    scores,
)
from experiments.conditional_tasks.setting import LABELS
from experiments.conditional_tasks.texts import TASKS
from experiments.study import bars
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.report import write_report

NAME = "conditional-tasks"
TABLES = ("1", "few", "count")
MOST_PARAMETERS, MOST_DATA = 1.12, 0.7


def run(options: Options) -> Results:
    """Run the asked tables, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks a file, or there is no encoder.
    """
    tables = options.chosen(TABLES)
    plan = Plan(options)
    tried, choices = plan.choose()
    rows: list[Row] = []
    plots: dict[str, Figure] = {}
    main = plan.run(main_cells(plan, choices), "rows") if {"1", "count"} & set(tables) else {}
    if "1" in tables:
        rows += [_row(plan, main, choices, row) for row in plan.rows]
        plots["scores"] = bars(rows, {"average": "average", "task_sigma": "standard deviation over tasks"}, "score")
    if "few" in tables:
        found = further.few(plan, choices)
        rows, plots["few"] = rows + found, further.draw_few(found)
    if "count" in tables:
        found, alike = further.count(plan, choices, main), further.similarity(plan, choices, main)
        rows += [*found, *alike]
        plots |= {"count": further.draw_count(found), "similarity": further.draw_similarity(alike)}
    published = [one for one in paper.rows() if one.id in {row.id for row in rows}]
    details = _details(plan, tried, choices, main)
    first = metrics_of(main, plan.row("ca_mtl", choices["ca_mtl"], plan.seeds[0])) if "1" in tables else {}
    found_aims = aims(rows, value_of(first["average"])) if first else []
    results = Results.here(NAME, rows, seeds=plan.seeds, aims=found_aims, paper=published, details=details)
    write_report(results, options.out, plots=plots)
    return results


def main_cells(plan: Plan, choices: Choices) -> list[Cell]:
    """Every row for each of its seeds, at its learning rate."""
    asked = [(row, seed) for seed in plan.seeds for row in plan.rows if seed in plan.seeds_of(row)]
    return [cell for row, seed in asked for cell in plan.row(row, choices[row], seed)]


def _row(plan: Plan, main: Measured, choices: Choices, row: str) -> Row:
    of_seeds = [metrics_of(main, plan.row(row, choices[row], seed)) for seed in plan.seeds_of(row)]
    if len(of_seeds) == 1:
        return Row(id=row, label=LABELS[row], metrics=of_seeds[0])
    same = {"trained_parameters_ratio", "total_parameters_ratio"}
    metrics: dict[str, Metric] = {
        name: value if name in same else combine_seeds([one[name] for one in of_seeds])
        for name, value in of_seeds[0].items()
    }
    return Row(id=row, label=LABELS[row], metrics=metrics)


def metrics_of(found: Measured, cells: Sequence[Cell]) -> dict[str, Metric]:
    """A row's metrics for one seed: of several models the parameters are added up."""
    said = scores(found, cells, "test")
    each = [found[cell.id] for cell in cells]
    metrics: dict[str, Metric] = dict(said)
    metrics |= {"average": mean(said.values()), "task_sigma": pstdev(said.values())}
    metrics["data_share"] = mean(share for one in each for share in one["data_share_by_task"].values())
    for name in ("trained", "total"):
        metrics[f"{name}_parameters_ratio"] = sum(one[name] for one in each) / each[0]["backbone"]
    return metrics | {"seconds": sum(one["seconds"] for one in each)}


def aims(rows: Sequence[Row], first: float) -> list[Aim]:
    """CA-MTL above multi-task fine-tuning and adapters with few parameters; as good as uniform with less data.

    Args:
        rows: the table's.
        first: CA-MTL's average of the first seed, for what has no other.
    """
    by_id = {row.id: row for row in rows}
    ours = {name: value_of(metric) for name, metric in by_id["ca_mtl"].metrics.items()}
    found = []
    for other in ("multi_task", *PEERS):
        if other in by_id:
            metric = by_id[other].metrics["average"]
            bound, average = value_of(metric), ours["average"] if isinstance(metric, Interval) else first
            text = f"all modules with MT-Uncertainty above {LABELS[other]}"
            found.append(_aim(text, "average", bound, average, average > bound))
    ratio = ours["total_parameters_ratio"]
    found.append(
        _aim(
            "parameters over the encoder's", "total_parameters_ratio", MOST_PARAMETERS, ratio, ratio <= MOST_PARAMETERS
        )
    )
    uniform = value_of(by_id["ca_mtl_uniform"].metrics["average"])
    text = "MT-Uncertainty no worse than uniform sampling"
    found.append(_aim(text, "average", uniform, ours["average"], ours["average"] >= uniform))
    share = ours["data_share"]
    return [
        *found,
        _aim("share of the rows that MT-Uncertainty trains on", "data_share", MOST_DATA, share, share <= MOST_DATA),
    ]


def _aim(text: str, metric: str, aim: float, measured: float, met: bool) -> Aim:
    return Aim(text=text, metric=metric, aim=aim, measured=measured, met=met)


def _details(plan: Plan, tried: Tried, choices: Choices, main: Measured) -> dict[str, Any]:
    seed = plan.seeds[0]
    chosen = {row: plan.row(row, choices[row], seed) for row in plan.rows} if main else {}
    return {
        "setting": plan.setting.model_dump(mode="json"),
        "learning_rates": choices,
        "tried": {row: {f"{rate:g}": value for rate, value in sorted(of.items())} for row, of in tried.items()},
        "labels": {task: source.label for task, source in TASKS.items()},
        "measured_by": {task: source.metric for task, source in TASKS.items()},
        "losses": {row: main[cells[0].id]["losses"] for row, cells in chosen.items() if len(cells) == 1},
        "data_share_by_task": {row: _shares(main, cells) for row, cells in chosen.items()},
        "chosen": {row: _counted(main[cells[0].id]) for row, cells in chosen.items() if row in BY_UNCERTAINTY},
        "left_out": [] if plan.peer else [WITHOUT],
    }


def _shares(main: Measured, cells: Sequence[Cell]) -> dict[str, float]:
    return {task: share for cell in cells for task, share in main[cell.id]["data_share_by_task"].items()}


def _counted(one: Mapping[str, Any]) -> dict[str, int]:
    """Rows of each task that were trained on, with repetition."""
    return {task: sum(step.get(task, 0) for step in one["steps"]) for task in one["data_share_by_task"]}
