"""The further tables: a task that is added later, a growing number of tasks, and the similarity of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from matplotlib.figure import Figure

from experiments.conditional_tasks.corpora import TASKS
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.conditional_tasks.study import ALL_MODULES, FINE_TUNING, ConditionalTasksStudy
from experiments.study import bars
from graftlm.evaluation import Metric, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE

FEW_LABELS = {
    "few_added": "added to a trained graft: its embedding and its head train",
    "few_finetune": "fine-tuning of the encoder",
}
COUNT_LABELS = {"multi_task": "multi-task fine-tuning", "ca_mtl": "all modules, MT-Uncertainty"}


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
    changed = [study.measured[run.id].row.metrics["old_changed"] for run in runs["few_added"].values()]
    metrics["few_added"] |= {"old_changed": sum(map(value_of, changed)), "learning_rate": rate}
    return [Row(id=name, label=label, metrics=metrics[name]) for name, label in FEW_LABELS.items()]


def count_rows(study: ConditionalTasksStudy) -> list[Row]:
    """The first tasks of the list, a growing number, first seed: the average over all, and over the smallest set."""
    rows, smallest = [], list(TASKS)[: study.size.counts[0]]
    for row, label in COUNT_LABELS.items():
        for count in study.size.counts:
            runs = study.row_runs(row, study.seeds[0], tasks=list(TASKS)[:count])
            study.execute(runs, f"{count} tasks")
            scores = study.scores(runs)
            first = mean(scores[task] for task in smallest)
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


def draw_few(rows: Sequence[Row]) -> Figure:
    """Score by share of the rows."""
    names = [name for name in rows[0].metrics if name.startswith("score_")]
    return bars(rows, {name: name.removeprefix("score_") for name in names}, "score by share of the task's rows")


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
