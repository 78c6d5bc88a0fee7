"""Eight tasks on the real MiniLM: fine-tuning of one task and of all, adapters, and conditional tasks module by module.

Every row trains for the same number of steps and rows. Rows have the learning rate that is best on validation rows
among the same values; all rows of conditional tasks share one. Further tables add a task to a trained graft, and train
on 2, 4 and 8 tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, pstdev
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.conditional_tasks import tables
from experiments.conditional_tasks.adapters_run import MISSING
from experiments.conditional_tasks.corpora import FILES, TASKS
from experiments.conditional_tasks.study import ADAPTERS, BY_UNCERTAINTY, LABELS, ConditionalTasksStudy
from experiments.study import bars, check_files, published
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, value_of
from graftlm.evaluation.report import write_report

NAME = "conditional-tasks"
TABLES = ("1", "few", "count")
MAX_PARAMETERS, MAX_DATA_SHARE = 1.12, 0.7


def run(options: Options) -> Results:
    """Run the chosen tables, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks a file, or there is no encoder.
    """
    chosen = options.chosen(TABLES)
    check_files(options, FILES)
    study = ConditionalTasksStudy(options)
    study.choose_rates()
    rows: list[Row] = []
    plots: dict[str, Figure] = {}
    results_aims: list[Aim] = []
    if {"1", "count"} & set(chosen):
        pairs = [(row, seed) for seed in study.seeds for row in study.rows if seed in study.row_seeds(row)]
        study.execute([run for row, seed in pairs for run in study.row_runs(row, seed)], "rows")
    if "1" in chosen:
        rows = [_row(study, row) for row in study.rows]
        results_aims = aims(rows, first=study.average(study.row_runs("ca_mtl", study.seeds[0])))
        plots["scores"] = bars(rows, {"average": "average", "task_sigma": "standard deviation over tasks"}, "score")
    if "few" in chosen:
        few = tables.few_rows(study)
        rows, plots["few"] = rows + few, tables.draw_few(few)
    if "count" in chosen:
        counts, similarities = tables.count_rows(study), tables.similarity_rows(study)
        rows += [*counts, *similarities]
        plots["count"] = bars(counts, {"average_first": "average over the first tasks"}, "score")
        plots["similarity"] = tables.draw_similarity(similarities)
    details = _details(study, with_rows=bool({"1", "count"} & set(chosen)))
    paper = published(__file__, {row.id for row in rows})
    results = Results.here(NAME, rows, seeds=study.seeds, aims=results_aims, paper=paper, details=details)
    write_report(results, options.out, plots=plots)
    return results


def _row(study: ConditionalTasksStudy, row: str) -> Row:
    by_seed = [_metrics(study, row, seed) for seed in study.row_seeds(row)]
    return Row(id=row, label=LABELS[row], metrics=tables.combine_metrics(by_seed))


def _metrics(study: ConditionalTasksStudy, row: str, seed: int) -> dict[str, Metric]:
    """A row's metrics for one seed. Parameters and seconds of several models are added up."""
    runs = study.row_runs(row, seed)
    scores = study.scores(runs)
    metrics: dict[str, Metric] = {**scores, "average": mean(scores.values()), "task_sigma": pstdev(scores.values())}
    metrics["data_share"] = mean(_by_task(study, row, seed, "data_share_by_task").values())
    measured = [study.measured[run.id].row.metrics for run in runs]
    for name in ("trained_parameters_ratio", "total_parameters_ratio", "seconds"):
        metrics[name] = sum(value_of(values[name]) for values in measured)
    return metrics


def _by_task(study: ConditionalTasksStudy, row: str, seed: int, detail: str) -> dict[str, Any]:
    """A detail of all runs of a row, by task."""
    runs = study.row_runs(row, seed)
    return {task: value for run in runs for task, value in study.measured[run.id].details[detail].items()}


def aims(rows: Sequence[Row], first: float) -> list[Aim]:
    """CA-MTL above multi-task fine-tuning and adapters with few parameters; as good as uniform with less data.

    Args:
        rows: the table's.
        first: CA-MTL's average for the first seed, to compare with rows that have one seed.
    """
    by_id = {row.id: row.metrics for row in rows}
    ours = {name: value_of(metric) for name, metric in by_id["ca_mtl"].items()}
    average = ours["average"]
    comparisons = []
    for other in ("multi_task", *ADAPTERS):
        if other in by_id:
            metric = by_id[other]["average"]
            bound, measured = value_of(metric), average if isinstance(metric, Interval) else first
            text = f"all modules with MT-Uncertainty above {LABELS[other]}"
            comparisons.append(Aim(text=text, metric="average", aim=bound, measured=measured, met=measured > bound))
    uniform = value_of(by_id["ca_mtl_uniform"]["average"])
    text = "MT-Uncertainty no worse than uniform sampling"
    return [
        *comparisons,
        _at_most("parameters over the encoder's", "total_parameters_ratio", MAX_PARAMETERS, ours),
        Aim(text=text, metric="average", aim=uniform, measured=average, met=average >= uniform),
        _at_most("share of the rows that MT-Uncertainty trains on", "data_share", MAX_DATA_SHARE, ours),
    ]


def _at_most(text: str, metric: str, aim: float, metrics: dict[str, float]) -> Aim:
    return Aim(text=text, metric=metric, aim=aim, measured=metrics[metric], met=metrics[metric] <= aim)


def _details(study: ConditionalTasksStudy, with_rows: bool) -> dict[str, Any]:
    seed = study.seeds[0]
    rows = study.rows if with_rows else []
    single = {row: runs[0].id for row in rows if len(runs := study.row_runs(row, seed)) == 1}
    return {
        "size": study.size.model_dump(mode="json"),
        "learning_rates": study.rates,
        "tried": {row: {f"{rate:g}": value for rate, value in sorted(of.items())} for row, of in study.tried.items()},
        "labels": {task: source.label for task, source in TASKS.items()},
        "measured_by": {task: source.metric for task, source in TASKS.items()},
        "losses": {row: study.measured[run].details["losses"] for row, run in single.items()},
        "data_share_by_task": {row: _by_task(study, row, seed, "data_share_by_task") for row in rows},
        "picked": {row: _by_task(study, row, seed, "picked") for row in rows if row in BY_UNCERTAINTY},
        "left_out": [] if study.python else [MISSING],
    }
