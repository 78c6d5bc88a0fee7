"""Eight tasks on the real MiniLM: fine-tuning of one task and of all, adapters, and conditional tasks module by module.

Every row trains for the same number of steps and rows. Rows have the learning rate that is best on validation rows
among the same values; all rows of conditional tasks share one. Further tables add a task to a trained graft, and train
on 2, 4 and 8 tasks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from statistics import mean, pstdev
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.conditional_tasks.corpora import FILES, TASKS
from experiments.conditional_tasks.runs import MISSING, ConditionalTasksRun
from experiments.conditional_tasks.study import (
    ADAPTERS,
    ALL_MODULES,
    BY_UNCERTAINTY,
    FINE_TUNING,
    LABELS,
    ConditionalTasksStudy,
)
from experiments.study import aim, bars, check_files, metric, numbers_of, published
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE

NAME = "conditional-tasks"
TABLES = ("1", "few", "count")
MAX_PARAMETERS, MAX_DATA_SHARE = 1.12, 0.7
FEW_LABELS = {
    "few_added": "added to a trained graft: its embedding and its head train",
    "few_finetune": "fine-tuning of the encoder",
}
COUNT_LABELS = {"multi_task": "multi-task fine-tuning", "ca_mtl": "all modules, MT-Uncertainty"}


def run(options: Options) -> Results:
    """Run the chosen tables."""
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
        by_seed = {row: [_metrics(study, row, seed) for seed in study.row_seeds(row)] for row in study.rows}
        rows = [Row(id=row, label=LABELS[row], metrics=combine_metrics(values)) for row, values in by_seed.items()]
        results_aims = aims(rows, first=study.average(study.row_runs("ca_mtl", study.seeds[0])))
        plots["scores"] = bars(rows, {"average": "average", "task_sigma": "standard deviation over tasks"}, "score")
    if "few" in chosen:
        few = few_rows(study)
        rows += few
        shares = {f"score_{share}": share for share in study.size.shares}
        plots["few"] = bars(few, shares, "score by share of the task's rows")
    if "count" in chosen:
        counts, similarities = count_rows(study), similarity_rows(study)
        rows += [*counts, *similarities]
        plots["count"] = bars(counts, {"average_first": "average over the first tasks"}, "score")
        plots["similarity"] = draw_similarity(similarities)
    details = _details(study, with_rows=bool({"1", "count"} & set(chosen)))
    paper = published(__file__, {row.id for row in rows})
    return study.write(NAME, rows, aims=results_aims, paper=paper, details=details, plots=plots)


def _metrics(study: ConditionalTasksStudy, row: str, seed: int) -> dict[str, Metric]:
    """A row's metrics for one seed. Parameters and seconds of several models are added up."""
    runs = study.row_runs(row, seed)
    scores = study.scores(runs)
    metrics: dict[str, Metric] = {**scores, "average": mean(scores.values()), "task_sigma": pstdev(scores.values())}
    metrics["data_share"] = mean(_by_task(study, row, seed, "data_share_by_task").values())
    for name in ("trained_parameters_ratio", "total_parameters_ratio", "seconds"):
        metrics[name] = sum(metric(study.measured[run.id], name) for run in runs)
    return metrics


def _by_task(study: ConditionalTasksStudy, row: str, seed: int, detail: str) -> dict[str, Any]:
    """A detail of all runs of a row, by task."""
    runs = study.row_runs(row, seed)
    return {task: value for run in runs for task, value in study.measured[run.id].details[detail].items()}


def few_rows(study: ConditionalTasksStudy) -> list[Row]:
    """A held-out task from a growing share of its rows, first seed: added to a graft of the others, or alone.

    Both take as many steps. Validation rows of the largest share choose the learning rate of an addition.
    """
    size, seed, shares = study.size, study.seeds[0], study.size.shares
    tasks = [task for task in TASKS if task != size.held_out]
    base = study.run("few_base", tasks, ALL_MODULES, study.rates["+alignment_cln"], seed, keep_graft=True)
    added = {"depends_on": (base.id,), "old_tasks": base.tasks}
    extended = {"extends": str(study.runs / base.id / "graft")}

    def add(share: str, rate: float) -> ConditionalTasksRun:
        return study.run(f"few_added_{share}", [size.held_out], extended, rate, seed, share=share, **added)

    largest = list(shares)[-1]
    tries = {rate: add(largest, rate) for rate in size.added_rates}
    study.execute([base, *tries.values()], "rates of an addition")
    rate = max(tries, key=lambda rate: study.average([tries[rate]], "validation"))
    alone = study.rates["single_task"]
    runs = {
        "few_added": {share: add(share, rate) for share in shares},
        "few_finetune": {
            share: study.run(f"few_finetune_{share}", [size.held_out], FINE_TUNING, alone, seed, share=share)
            for share in shares
        },
    }
    study.execute([base, *(run for by_share in runs.values() for run in by_share.values())], "few rows")
    metrics: dict[str, dict[str, Metric]] = {
        name: {f"score_{share}": study.average([run]) for share, run in by_share.items()}
        for name, by_share in runs.items()
    }
    changed = sum(metric(study.measured[run.id], "old_changed") for run in runs["few_added"].values())
    metrics["few_added"] |= {"old_changed": changed, "learning_rate": rate}
    return [Row(id=name, label=label, metrics=metrics[name]) for name, label in FEW_LABELS.items()]


def count_rows(study: ConditionalTasksStudy) -> list[Row]:
    """The first tasks of the list, a growing number, first seed: the average over all, and over the smallest set."""
    rows, tasks = [], list(TASKS)
    for row, label in COUNT_LABELS.items():
        for count in study.size.counts:
            runs = study.row_runs(row, study.seeds[0], tasks=tasks[:count])
            study.execute(runs, f"{count} tasks")
            scores = study.scores(runs)
            first = mean(scores[task] for task in tasks[: study.size.counts[0]])
            metrics: dict[str, Metric] = {"average": mean(scores.values()), "average_first": first}
            rows.append(Row(id=f"{row}_{count}", label=f"{label}, {count} tasks", metrics=metrics))
    return rows


def similarity_rows(study: ConditionalTasksStudy) -> list[Row]:
    """Covariance similarity of each task's inputs to the other tasks', and its gain over single-task fine-tuning."""
    rows = []
    for row, label in COUNT_LABELS.items():
        by_seed: list[dict[str, Metric]] = []
        for seed in study.seeds:
            (run,) = study.row_runs(row, seed)
            alone, scores = study.scores(study.row_runs("single_task", seed)), study.scores([run])
            similarity = study.measured[run.id].details["similarity"]
            metrics = {f"similarity_{task}": similarity[task] for task in TASKS}
            metrics |= {f"gain_{task}": scores[task] - alone[task] for task in TASKS}
            by_seed.append(metrics | {"similarity": mean(similarity.values())})
        rows.append(Row(id=f"{row}_similarity", label=f"{label}: inputs", metrics=combine_metrics(by_seed)))
    return rows


def combine_metrics(by_seed: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics over seeds: intervals, but plain numbers for one seed and for ratios, which no seed changes."""
    if len(by_seed) == 1:
        return dict(by_seed[0])
    return {
        name: value if name.endswith("_ratio") else combine_seeds([value_of(metrics[name]) for metrics in by_seed])
        for name, value in by_seed[0].items()
    }


def draw_similarity(rows: Sequence[Row]) -> Figure:
    """Each task's gain over single-task fine-tuning by its covariance similarity."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="#8A8A8A", linewidth=0.9)
    for number, row in enumerate(rows):
        x, y = ([value_of(row.metrics[f"{name}_{task}"]) for task in TASKS] for name in ("similarity", "gain"))
        axes.plot(x, y, MARKERS[number], color=PALETTE[number], label=row.label)
        for task, at_x, at_y in zip(TASKS, x, y, strict=True):
            axes.annotate(task, (at_x, at_y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("covariance similarity to the other tasks")
    axes.set_ylabel("score over single-task fine-tuning's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def aims(rows: Sequence[Row], first: float) -> list[Aim]:
    """CA-MTL above multi-task fine-tuning and adapters with few parameters; as good as uniform with less data.

    Args:
        rows: the table's.
        first: CA-MTL's average for the first seed, to compare with rows that have one seed.
    """
    values = numbers_of(rows)
    several = {row.id for row in rows if isinstance(row.metrics.get("average"), Interval)}
    ours, uniform = values["ca_mtl"], values["ca_mtl_uniform"]["average"]
    limits = (
        ("parameters over the encoder's", "total_parameters_ratio", MAX_PARAMETERS, operator.le),
        ("MT-Uncertainty no worse than uniform sampling", "average", uniform, operator.ge),
        ("share of the rows that MT-Uncertainty trains on", "data_share", MAX_DATA_SHARE, operator.le),
    )
    comparisons = [
        aim(
            f"all modules with MT-Uncertainty above {LABELS[other]}",
            "average",
            values[other]["average"],
            ours["average"] if other in several else first,
            operator.gt,
        )
        for other in ("multi_task", *ADAPTERS)
        if other in values
    ]
    return comparisons + [aim(text, name, bound, ours[name], relation) for text, name, bound, relation in limits]


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
