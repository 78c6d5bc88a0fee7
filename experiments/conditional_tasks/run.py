"""Eleven tasks on the real MiniLM: modules x samplers of conditional tasks, fine-tuning, adapters, LoRA, hypernetwork.

All rows train for the same number of steps and examples. The learning rate of each row is the best of the same values
on the validation rows, with seed 0; the tables may have other seeds. `default` is the combination of modules and
sampler with the best validation scores over all seeds. Further tables add a task to a trained graft, and train on fewer
examples.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.conditional_tasks.corpora import FILES, TASKS
from experiments.conditional_tasks.probe import TextEmbedder, probe_scores
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
    SAMPLERS,
    SIMILAR,
    TABLES,
    TRAINED,
    UNIFORM,
    cell_id,
)
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.conditional_tasks.study import SEARCH_SEED, ConditionalTasksStudy
from experiments.conditional_tasks.trained import run_trained
from experiments.study import aim, bars, check_files, metric, published
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE
from graftlm.grafts import graft_config

NAME = "conditional-tasks"
MAX_PARAMETERS = 1.12
MAX_ROWS = 0.7
MIN_GAIN = 1.0
MAX_TASK_LOSS = 2.0
SUMMED = (
    "trained_parameters_ratio",
    "total_parameters_ratio",
    "seconds",
    "rows_trained",
    "rows_scored",
)


def run(options: Options) -> Results:
    """Run the chosen tables."""
    chosen = options.chosen((*TABLES, TRAINED), TABLES)
    check_files(options, FILES)
    if TRAINED in chosen:
        results = run_trained(options)
        if chosen == (TRAINED,):
            return results
    study = ConditionalTasksStudy(options)
    study.choose_rates()
    runs = [run for seed in study.seeds for row in study.labels for run in study.row_runs(row, seed)]
    study.execute(runs, "rows")
    default = study.best_cell(row for row in CELLS if row in study.labels)
    rows = [main_row(study, row) for row in study.labels]
    rows.append(default_row(study, default))
    plots = {"scores": bars(rows, {"average": "average"}, "score")}
    similarities = [similarity_row(study, row) for row in SIMILAR]
    plots["similarity"] = draw_similarity(similarities)
    rows += effect_rows(study)
    rows += similarities
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
        embed = TextEmbedder(study)
        details["probe"] = {"by_seed": {str(seed): probe_scores(study, seed, embed) for seed in study.seeds}}
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


# The main table


def main_row(study: ConditionalTasksStudy, row: str) -> Row:
    """Return a row of the main table, with its paired difference to multi-task fine-tuning."""
    metrics = combine_metrics([_metrics(study, row, seed) for seed in study.seeds])
    metrics["learning_rate"] = study.rates[row]
    if row != "multi_task":
        metrics["over_multi_task"] = study.differences(row, "multi_task")
    return Row(id=row, label=LABELS[row], metrics=metrics)


def default_row(study: ConditionalTasksStudy, default: str) -> Row:
    """Return the row of the chosen combination, with paired differences to other rows.

    The difference to multi-task fine-tuning is also given for each task.
    """
    modules, _ = CELLS[default]
    others = ["multi_task", cell_id(modules, "uniform"), *CONTROLS, *RIVALS, *UNIFORM, *PLAIN]
    metrics = dict(main_row(study, default).metrics)
    for name in others:
        if name in study.labels and name != default:
            metrics[f"over_{name}"] = study.differences(default, name)
    by_task = {task: study.differences(default, "multi_task", task) for task in TASKS}
    for task, difference in by_task.items():
        metrics[f"{task}_over_multi_task"] = difference
    metrics["worst_task_over_multi_task"] = min(difference.mean for difference in by_task.values())
    return Row(id="default", label=f"default: {LABELS[default]}", metrics=metrics)


def effect_rows(study: ConditionalTasksStudy) -> list[Row]:
    """Return the effect of each module over the samplers, and of uncertainty over the modules, paired by seed."""
    rows = []
    for name, label in MODULE_LABELS.items():
        if name != "none" and cell_id(name, "uniform") in study.labels:
            cells = [(cell_id(name, policy), cell_id("none", policy)) for policy in SAMPLERS]
            rows.append(_effect(study, name, label, cells))
    cells = [(cell_id(name, "uncertainty"), cell_id(name, "uniform")) for name in MODULES]
    rows.append(_effect(study, "uncertainty", "uncertainty", cells))
    return rows


def _effect(study: ConditionalTasksStudy, name: str, label: str, cells: Sequence[tuple[str, str]]) -> Row:
    """Return the mean difference over pairs of rows, of those that were run."""
    values = []
    for seed in study.seeds:
        differences = []
        for with_it, without in cells:
            if with_it in study.labels and without in study.labels:
                differences.append(study.average(with_it, seed) - study.average(without, seed))
        values.append(mean(differences))
    return Row(id=f"effect_{name}", label=f"effect of {label}", metrics={"effect": combine_seeds(values)})


def _metrics(study: ConditionalTasksStudy, row: str, seed: int) -> dict[str, Metric]:
    """Return the metrics of a row for a seed; parameters, rows and seconds of several models are summed."""
    runs = study.row_runs(row, seed)
    measured = [study.measured[run.id] for run in runs]
    scores = study.scores(runs)
    shares = [share for of_run in measured for share in of_run.details["data_share_by_task"].values()]
    metrics: dict[str, Metric] = {
        **scores,
        "average": mean(scores.values()),
        "task_sigma": pstdev(scores.values()),
        "average_validation": study.average(row, seed, "validation"),
        "data_share": mean(shares),
    }
    for name in SUMMED:
        metrics[name] = sum(metric(of_run, name) for of_run in measured)
    return metrics


# Training on a part of the examples


def fewer_rows(study: ConditionalTasksStudy, default: str) -> list[Row]:
    """Compare sampling by uncertainty and uniform sampling after a part of the steps.

    Each row also has the part at which it reaches the final score of uniform sampling. LoRA and norms of all
    layers are only run with uniform sampling, so norms of the upper half are used instead.
    """
    cell = "cln" if default in UNIFORM else default
    modules, _ = CELLS[cell]
    scored_cell = cell_id(modules, "uncertainty")
    uniform_cell = cell_id(modules, "uniform")
    runs = []
    for cell in (scored_cell, uniform_cell):
        for share in study.size.rows:
            runs += [_part_of_training(study, cell, share, seed) for seed in study.seeds]
    study.execute(runs, "fewer rows")
    scores = _scores_of_parts(study, scored_cell)
    uniform_scores = _scores_of_parts(study, uniform_cell)
    over_uniform: dict[str, Metric] = {}
    for share, values in scores.items():
        differences = [a - b for a, b in zip(values, uniform_scores[share], strict=True)]
        over_uniform[f"over_uniform_{share:g}"] = combine_seeds(differences)
    final = mean(uniform_scores[1.0])
    return [
        _fewer_row("fewer_rows", scored_cell, scores, over_uniform, final),
        _fewer_row("fewer_rows_uniform", uniform_cell, uniform_scores, {}, final),
    ]


def _part_of_training(study: ConditionalTasksStudy, cell: str, share: float, seed: int) -> ConditionalTasksRun:
    """Return the run of a combination over a share of all steps."""
    modules, policy = CELLS[cell]
    return study.run(
        f"{cell}_{share:g}",
        list(TASKS),
        study.graft(MODULES[modules]),
        study.rates[cell],
        seed,
        steps=max(1, round(study.size.training.steps * share)),
        sampler=study.sampler(policy, share),
    )


def _scores_of_parts(study: ConditionalTasksStudy, cell: str) -> dict[float, list[float]]:
    """Return the average score of each seed by the share of all steps."""
    scores: dict[float, list[float]] = {}
    for share in study.size.rows:
        scores[share] = []
        for seed in study.seeds:
            run = _part_of_training(study, cell, share, seed)
            scores[share].append(mean(study.scores([run]).values()))
    scores[1.0] = [study.average(cell, seed) for seed in study.seeds]
    return scores


def _fewer_row(
    row: str,
    cell: str,
    scores: Mapping[float, Sequence[float]],
    over_uniform: Mapping[str, Metric],
    final_uniform_score: float,
) -> Row:
    metrics: dict[str, Metric] = {f"score_{share:g}": combine_seeds(values) for share, values in scores.items()}
    metrics.update(over_uniform)
    metrics["uniform"] = final_uniform_score
    reached = [share for share, values in scores.items() if mean(values) >= final_uniform_score]
    if reached:
        metrics["rows_to_reach"] = min(reached)
    return Row(id=row, label=f"{LABELS[cell]}, after a part of the rows", metrics=metrics)


# A task that is added later


@dataclass
class AddedTask:
    """The runs that learn a held-out task from a growing share of its rows, with equal steps.

    Attributes:
        study: the study.
        bases: by seed, the run that trains the graft of the other tasks.
        rates: the learning rate of each row, chosen by `choose_rates`.
    """

    study: ConditionalTasksStudy
    bases: dict[int, ConditionalTasksRun]
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def shares(self) -> list[str]:
        """The shares of the task's training rows, in ascending order."""
        return list(self.study.size.shares)

    def run(self, row: str, share: str, rate: float, seed: int) -> ConditionalTasksRun:
        """Return the run of a row: an addition to the graft of the other tasks, or fine-tuning."""
        _, changes = FEW[row]
        fields: dict[str, Any] = {}
        if row == "few_finetune":
            graft = self.study.graft(changes)
        else:
            base = self.bases[seed]
            folder = self.study.runs / base.id / "graft"
            graft = graft_config({"kind": "conditional-tasks", "extends": str(folder), **changes})
            fields["depends_on"] = (base.id,)
            fields["old_tasks"] = base.tasks if share == self.shares[-1] else {}
        return self.study.run(
            f"{row}_{share}",
            [self.study.size.held_out],
            graft,
            rate,
            seed,
            share=share,
            steps=self.study.size.shares[share],
            **fields,
        )

    def choose_rates(self, rows: Sequence[str]) -> None:
        """Choose each row's learning rate on the validation rows with the largest share, with the seed of searches."""
        tries = {}
        for row in rows:
            tries[row] = [self.run(row, self.shares[-1], rate, SEARCH_SEED) for rate in self.study.size.rates]
        bases = list(self.bases.values())
        chosen = self.study.choose(tries, ["validation_error"], "rates of an addition", bases)
        self.rates = {row: run.training.learning_rate for row, run in chosen.items()}

    def chosen_run(self, row: str, share: str, seed: int) -> ConditionalTasksRun:
        """Return the run of a row at its chosen learning rate."""
        return self.run(row, share, self.rates[row], seed)

    def metrics(self, row: str) -> dict[str, Metric]:
        """Return the metrics of a row."""
        study = self.study
        metrics: dict[str, Metric] = {"learning_rate": self.rates[row]}
        for share in self.shares:
            runs = [self.chosen_run(row, share, seed) for seed in study.seeds]
            scores = [metric(study.measured[run.id], "average") for run in runs]
            metrics[f"score_{share}"] = combine_seeds(scores)
        if row != "few_finetune":
            metrics.update(self._metrics_of_old_tasks(row))
        return metrics

    def _metrics_of_old_tasks(self, row: str) -> dict[str, Metric]:
        measured = self.study.measured
        changed = []
        lost = []
        for seed in self.study.seeds:
            before = measured[self.bases[seed].id]
            after = measured[self.chosen_run(row, self.shares[-1], seed).id]
            changed.append(metric(after, "old_changed"))
            lost.append(metric(after, "old_average") - metric(before, "average"))
        return {"old_changed": sum(changed), "old_average_change": combine_seeds(lost)}


def few_rows(study: ConditionalTasksStudy, default: str) -> list[Row]:
    """Learn a held-out task from a growing share of its rows: added to a graft of the others, or alone."""
    modules, policy = CELLS[default]
    others = [task for task in TASKS if task != study.size.held_out]
    bases = {}
    for seed in dict.fromkeys([SEARCH_SEED, *study.seeds]):
        bases[seed] = study.run(
            "few_base",
            others,
            study.graft(MODULES[modules]),
            study.rates[default],
            seed,
            keep_graft=True,
            sampler=study.sampler(policy),
        )
    labels = {row: label for row, (label, _) in FEW.items()}
    if modules == LORA:
        del labels["few_whole"]  # the tasks share nothing that trains
    added = AddedTask(study, bases)
    added.choose_rates(list(labels))
    runs = list(bases.values())
    for row in labels:
        for share in added.shares:
            runs += [added.chosen_run(row, share, seed) for seed in study.seeds]
    study.execute(runs, "few rows")
    return [Row(id=row, label=label, metrics=added.metrics(row)) for row, label in labels.items()]


# Similarity of the tasks


def similarity_row(study: ConditionalTasksStudy, row: str) -> Row:
    """Return the covariance similarity of each task's inputs to those of the other tasks.

    The row also has each task's gain over single-task fine-tuning, and `same_task` and `isotropic`, the range of the
    similarity.
    """
    by_seed = []
    for seed in study.seeds:
        (run,) = study.row_runs(row, seed)
        alone = study.row_scores("single_task", seed)
        scores = study.scores([run])
        similarity = study.measured[run.id].details["similarity"]
        metrics: dict[str, Metric] = {f"similarity_{task}": value for task, value in similarity["by_task"].items()}
        for task in TASKS:
            metrics[f"gain_{task}"] = scores[task] - alone[task]
        metrics["same_task"] = similarity["same_task"]
        metrics["isotropic"] = similarity["isotropic"]
        metrics["similarity"] = mean(similarity["by_task"].values())
        by_seed.append(metrics)
    return Row(id=f"{row}_similarity", label=f"{LABELS[row]}: inputs", metrics=combine_metrics(by_seed))


def combine_metrics(by_seed: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Return intervals over seeds; plain numbers for a single seed, and for ratios, which do not depend on the seed."""
    if len(by_seed) == 1:
        return dict(by_seed[0])
    combined: dict[str, Metric] = {}
    for name, value in by_seed[0].items():
        if name.endswith("_ratio"):
            combined[name] = value
        else:
            combined[name] = combine_seeds([value_of(metrics[name]) for metrics in by_seed])
    return combined


def draw_similarity(rows: Sequence[Row]) -> Figure:
    """Plot each task's gain over single-task fine-tuning by its covariance similarity."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="#8A8A8A", linewidth=0.9)
    for number, row in enumerate(rows):
        x = [value_of(row.metrics[f"similarity_{task}"]) for task in TASKS]
        y = [value_of(row.metrics[f"gain_{task}"]) for task in TASKS]
        axes.plot(x, y, MARKERS[number], color=PALETTE[number], label=row.label)
        for task, at_x, at_y in zip(TASKS, x, y, strict=True):
            axes.annotate(task, (at_x, at_y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("covariance similarity to the other tasks")
    axes.set_ylabel("score over single-task fine-tuning's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


# Aims and details


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims.

    The default is above multi-task fine-tuning and not below adapters and LoRA, no task loses much, and few parameters
    and training rows suffice.
    """
    by_id = {row.id: row.metrics for row in rows}
    default = by_id["default"]
    gain = default["over_multi_task"]
    lowest_gain = gain.low if isinstance(gain, Interval) else float(gain)
    made = [
        aim(
            "points of the default over multi-task fine-tuning",
            "over_multi_task",
            MIN_GAIN,
            value_of(gain),
            operator.ge,
        ),
        aim(
            "the low end of their interval",
            "over_multi_task",
            0,
            lowest_gain,
            operator.gt,
        ),
    ]
    for name in ("adapters_half", "lora"):
        text = f"points of the default over {LABELS[name]}"
        made.append(aim(text, f"over_{name}", 0, value_of(default[f"over_{name}"]), operator.ge))
    made += [
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
        made.append(_aim_of_rows(by_id["fewer_rows"].get("rows_to_reach")))
    return made


def _aim_of_rows(reached: Metric | None) -> Aim:
    """Return the aim for the part of the rows that suffices; None if no part does."""
    measured = None if reached is None else value_of(reached)
    return Aim(
        text="part of the rows at which uniform sampling's score is reached, of norms",
        metric="rows_to_reach",
        aim=MAX_ROWS,
        measured=measured,
        met=measured is not None and measured <= MAX_ROWS,
    )


def _details(study: ConditionalTasksStudy, default: str) -> dict[str, Any]:
    runs_by_row = {}
    picked = {}
    for row in study.labels:
        runs_by_row[row] = [run for seed in study.seeds for run in study.row_runs(row, seed)]
        picked[row] = {}
        for run in study.row_runs(row, study.seeds[0]):
            picked[row].update(study.measured[run.id].details["picked"])
    return {
        "default": default,
        "size": study.size.model_dump(mode="json"),
        "learning_rates": study.rates,
        "labels": {task: source.label for task, source in TASKS.items()},
        "measured_by": {task: source.metric for task, source in TASKS.items()},
        "picked": picked,
        **study.evidence(runs_by_row),
    }
