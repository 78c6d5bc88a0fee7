"""Eleven tasks on the real MiniLM: modules x samplers of conditional tasks, fine-tuning, adapters, LoRA, hypernetwork.

Every row trains for the same number of steps and rows. Every row has the learning rate that is best on validation rows
among the same values, by seed 0; the tables may have other seeds. `default` is the combination of modules and sampler
with the best validation rows over all seeds. Further tables add a task to a trained graft, and train on fewer rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import mean, pstdev
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.conditional_tasks.corpora import FILES, TASKS
from experiments.conditional_tasks.probe import probe_scores
from experiments.conditional_tasks.rows import (
    CELLS,
    CONTROLS,
    FEW,
    LABELS,
    LORA,
    MODULE_LABELS,
    MODULES,
    PLAIN,
    RIVALS,
    SIMILAR,
    TABLES,
    UNIFORM,
    cell_id,
)
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.conditional_tasks.study import SEARCH_SEED, ConditionalTasksStudy
from experiments.study import aim, bars, check_files, metric, published
from graftlm.data.samplers import SCORED
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE
from graftlm.grafts import graft_config

NAME = "conditional-tasks"
MAX_PARAMETERS, MAX_ROWS, MIN_GAIN, MAX_TASK_LOSS = 1.12, 0.7, 1.0, 2.0


def run(options: Options) -> Results:
    """Run the chosen tables."""
    chosen = options.chosen(TABLES)
    check_files(options, FILES)
    study = ConditionalTasksStudy(options)
    study.choose_rates()
    runs = [run for seed in study.seeds for row in study.labels for run in study.row_runs(row, seed)]
    study.execute(runs, "rows")
    default = study.best_cell(row for row in CELLS if row in study.labels)
    rows = [main_row(study, row) for row in study.labels]
    rows.append(default_row(study, default))
    plots = {"scores": bars(rows, {"average": "average"}, "score")}
    rows += [*effect_rows(study), *(similarity_row(study, row) for row in SIMILAR)]
    plots["similarity"] = draw_similarity([row for row in rows if row.id.endswith("_similarity")])
    if "rows" in chosen:
        rows += fewer_rows(study, default)
    if "few" in chosen:
        few = few_rows(study, default)
        rows += few
        shares = {f"score_{share}": share for share in study.size.shares}
        plots["few"] = bars(few, shares, "score by share of the task's rows")
    paper = published(__file__, {row.id for row in rows})
    details = _details(study, default)
    if "probe" in chosen:
        details["probe"] = {"by_seed": {str(seed): probe_scores(study, seed) for seed in study.seeds}}
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def main_row(study: ConditionalTasksStudy, row: str) -> Row:
    """A row of the main table, with its paired difference to multi-task fine-tuning."""
    metrics = combine_metrics([_metrics(study, row, seed) for seed in study.seeds])
    metrics["learning_rate"] = study.rates[row]
    if row != "multi_task":
        metrics["over_multi_task"] = study.differences(row, "multi_task")
    return Row(id=row, label=LABELS[row], metrics=metrics)


def default_row(study: ConditionalTasksStudy, default: str) -> Row:
    """The chosen combination, and its paired differences to the other rows, and task by task to multi-task tuning."""
    row, uniform = main_row(study, default), cell_id(CELLS[default][0], "uniform")
    tasks = {task: study.differences(default, "multi_task", task) for task in TASKS}
    others = [
        name
        for name in ("multi_task", uniform, *CONTROLS, *RIVALS, *UNIFORM, *PLAIN)
        if name in study.labels and name != default
    ]
    metrics: dict[str, Metric] = {f"over_{name}": study.differences(default, name) for name in others}
    metrics |= {f"{task}_over_multi_task": value for task, value in tasks.items()}
    metrics["worst_task_over_multi_task"] = min(value.mean for value in tasks.values())
    return Row(id="default", label=f"default: {LABELS[default]}", metrics={**row.metrics, **metrics})


def effect_rows(study: ConditionalTasksStudy) -> list[Row]:
    """The effect of each module over the samplers, and of each sampler over the modules, paired by seed."""

    def effect(name: str, label: str, cells: Sequence[tuple[str, str]]) -> Row:
        pairs = [pair for pair in cells if study.labels.keys() >= {*pair}]
        values = [mean(study.average(a, seed) - study.average(b, seed) for a, b in pairs) for seed in study.seeds]
        return Row(id=f"effect_{name}", label=f"effect of {label}", metrics={"effect": combine_seeds(values)})

    rows = [
        effect(name, label, [(cell_id(name, policy), cell_id("none", policy)) for policy in study.samplers])
        for name, label in MODULE_LABELS.items()
        if name != "none" and cell_id(name, "uniform") in study.labels
    ]
    return rows + [
        effect(policy, policy, [(cell_id(name, policy), cell_id(name, "uniform")) for name in MODULES])
        for policy in study.samplers
        if policy in SCORED
    ]


def _metrics(study: ConditionalTasksStudy, row: str, seed: int) -> dict[str, Metric]:
    """A row's metrics for one seed. Parameters, rows and seconds of several models are added up."""
    measured = [study.measured[run.id] for run in study.row_runs(row, seed)]
    scores = study.scores(study.row_runs(row, seed))
    metrics: dict[str, Metric] = {**scores, "average": mean(scores.values()), "task_sigma": pstdev(scores.values())}
    metrics["average_validation"] = study.average(row, seed, "validation")
    metrics["data_share"] = mean(share for of in measured for share in of.details["data_share_by_task"].values())
    for name in ("trained_parameters_ratio", "total_parameters_ratio", "seconds", "rows_trained", "rows_scored"):
        metrics[name] = sum(metric(of, name) for of in measured)
    return metrics


def fewer_rows(study: ConditionalTasksStudy, default: str) -> list[Row]:
    """A sampler with scores after a part of the rows, uniform sampling after as many, and where each reaches the end's.

    Where the default samples uniformly, the better sampler with scores takes its place; LoRA and norms of all layers
    have none, so those of the upper half are taken.
    """
    modules, policy = CELLS["cln" if default in UNIFORM else default]
    if policy == "uniform":
        _, policy = CELLS[study.best_cell(cell_id(modules, policy) for policy in study.samplers if policy in SCORED)]
    cells = {"fewer_rows": cell_id(modules, policy), "fewer_rows_uniform": cell_id(modules, "uniform")}
    size, graft, seeds = study.size, study.graft(MODULES[modules]), study.seeds

    def part(cell: str, share: float, seed: int) -> ConditionalTasksRun:
        steps, sampler = max(1, round(size.training.steps * share)), study.sampler(CELLS[cell][1], share)
        return study.run(f"{cell}_{share:g}", list(TASKS), graft, study.rates[cell], seed, steps=steps, sampler=sampler)

    def average(cell: str, share: float, seed: int) -> float:
        return study.average(cell, seed) if share == 1 else mean(study.scores([part(cell, share, seed)]).values())

    study.execute([part(*of) for of in product(cells.values(), size.rows, seeds)], "fewer rows")
    scores = {
        cell: {share: [average(cell, share, seed) for seed in seeds] for share in (*size.rows, 1.0)}
        for cell in cells.values()
    }
    uniform, rows = scores[cells["fewer_rows_uniform"]], []
    for row, cell in cells.items():
        metrics: dict[str, Metric] = {f"score_{share:g}": combine_seeds(of) for share, of in scores[cell].items()}
        for share, of in scores[cell].items() if row == "fewer_rows" else ():
            metrics[f"over_uniform_{share:g}"] = combine_seeds([a - b for a, b in zip(of, uniform[share], strict=True)])
        reached = [share for share, of in scores[cell].items() if mean(of) >= mean(uniform[1.0])]
        metrics |= {"uniform": mean(uniform[1.0])} | ({"rows_to_reach": min(reached)} if reached else {})
        rows.append(Row(id=row, label=f"{LABELS[cell]}, after a part of the rows", metrics=metrics))
    return rows


def few_rows(study: ConditionalTasksStudy, default: str) -> list[Row]:
    """A held-out task from a growing share of its rows: added to a graft of the others, or alone; equal steps.

    Validation rows of the largest share choose each row's learning rate, by seed 0.
    """
    size, shares, rate = study.size, list(study.size.shares), study.rates[default]
    modules, policy = CELLS[default]
    others = [task for task in TASKS if task != size.held_out]
    graft = study.graft(MODULES[modules])
    bases = {
        seed: study.run("few_base", others, graft, rate, seed, keep_graft=True, sampler=study.sampler(policy))
        for seed in dict.fromkeys([SEARCH_SEED, *study.seeds])
    }

    def learn(row: str, share: str, rate: float, seed: int) -> ConditionalTasksRun:
        config, fields = study.graft(FEW[row][1]), {}
        if row != "few_finetune":
            extends = {"kind": "conditional-tasks", "extends": str(study.runs / bases[seed].id / "graft")}
            config = graft_config(extends | FEW[row][1])
            fields = {"depends_on": (bases[seed].id,), "old_tasks": bases[seed].tasks if share == shares[-1] else {}}
        steps = size.shares[share]
        return study.run(f"{row}_{share}", [size.held_out], config, rate, seed, share=share, steps=steps, **fields)

    few = {row: label for row, (label, _) in FEW.items() if row != "few_whole" or modules != LORA}  # it shares nothing

    tries = {row: [learn(row, shares[-1], rate, SEARCH_SEED) for rate in size.rates] for row in few}
    chosen = study.choose(tries, ["validation_error"], "rates of an addition", list(bases.values()))
    rates = {row: run.training.learning_rate for row, run in chosen.items()}
    learned = {
        (row, share, seed): learn(row, share, rates[row], seed)
        for row in few
        for share in shares
        for seed in study.seeds
    }
    study.execute([*bases.values(), *learned.values()], "few rows")
    rows = []
    for row, label in few.items():
        metrics: dict[str, Metric] = {"learning_rate": rates[row]}
        for share in shares:
            runs = [learned[row, share, seed] for seed in study.seeds]
            metrics[f"score_{share}"] = combine_seeds([metric(study.measured[run.id], "average") for run in runs])
        if row != "few_finetune":
            pairs = [
                (study.measured[learned[row, shares[-1], seed].id], study.measured[bases[seed].id])
                for seed in study.seeds
            ]
            metrics["old_changed"] = sum(metric(after, "old_changed") for after, _ in pairs)
            lost = [metric(after, "old_average") - metric(before, "average") for after, before in pairs]
            metrics["old_average_change"] = combine_seeds(lost)
        rows.append(Row(id=row, label=label, metrics=metrics))
    return rows


def similarity_row(study: ConditionalTasksStudy, row: str) -> Row:
    """Covariance similarity of each task's inputs to the other tasks', and its gain over single-task fine-tuning.

    `same_task` and `isotropic` are its range.
    """
    by_seed: list[dict[str, Metric]] = []
    for seed in study.seeds:
        (run,) = study.row_runs(row, seed)
        alone, scores = study.scores(study.row_runs("single_task", seed)), study.scores([run])
        similarity = study.measured[run.id].details["similarity"]
        metrics = {f"similarity_{task}": value for task, value in similarity["by_task"].items()}
        metrics |= {f"gain_{task}": scores[task] - alone[task] for task in TASKS}
        metrics |= {name: similarity[name] for name in ("same_task", "isotropic")}
        by_seed.append(metrics | {"similarity": mean(similarity["by_task"].values())})
    return Row(id=f"{row}_similarity", label=f"{LABELS[row]}: inputs", metrics=combine_metrics(by_seed))


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


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The default above multi-task fine-tuning, not below adapters and LoRA; no task starves; few weights and rows."""
    by_id = {row.id: row.metrics for row in rows}
    default = by_id["default"]

    def low(name: str) -> float:
        value = default[name]
        return value.low if isinstance(value, Interval) else float(value)

    values = [
        aim(
            "points of the default over multi-task fine-tuning",
            "over_multi_task",
            MIN_GAIN,
            value_of(default["over_multi_task"]),
            operator.ge,
        ),
        aim("the low end of their interval", "over_multi_task", 0, low("over_multi_task"), operator.gt),
        *(
            aim(
                f"points of the default over {LABELS[name]}",
                f"over_{name}",
                0,
                value_of(default[f"over_{name}"]),
                operator.ge,
            )
            for name in ("adapters_half", "lora")
        ),
        aim(
            "points of its worst task over multi-task fine-tuning",
            "worst_task_over_multi_task",
            -MAX_TASK_LOSS,
            value_of(default["worst_task_over_multi_task"]),
            operator.ge,
        ),
        aim(
            "parameters over the encoder's",
            "total_parameters_ratio",
            MAX_PARAMETERS,
            value_of(default["total_parameters_ratio"]),
            operator.le,
        ),
    ]
    if "fewer_rows" in by_id:
        reached = by_id["fewer_rows"].get("rows_to_reach")
        text, name = "part of the rows at which uniform sampling's score is reached, of norms", "rows_to_reach"
        reached = None if reached is None else value_of(reached)
        values.append(Aim(text=text, metric=name, aim=MAX_ROWS, measured=reached, met=(reached or 2) <= MAX_ROWS))
    return values


def _details(study: ConditionalTasksStudy, default: str) -> dict[str, Any]:
    def by_task(row: str, detail: str) -> dict[str, Any]:
        runs = study.row_runs(row, study.seeds[0])
        return {task: value for run in runs for task, value in study.measured[run.id].details[detail].items()}

    return {
        "default": default,
        "size": study.size.model_dump(mode="json"),
        "learning_rates": study.rates,
        "labels": {task: source.label for task, source in TASKS.items()},
        "measured_by": {task: source.metric for task, source in TASKS.items()},
        "picked": {row: by_task(row, "picked") for row in study.labels},
        **study.evidence(
            {row: [run for seed in study.seeds for run in study.row_runs(row, seed)] for row in study.labels}
        ),
    }
