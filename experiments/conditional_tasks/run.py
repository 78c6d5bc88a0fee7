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
from pydantic import Field

from experiments import Options
from experiments.conditional_tasks import runs
from experiments.conditional_tasks.corpora import FILES, TASKS, SplitSizes, draw_splits, write_splits
from experiments.conditional_tasks.runs import AdaptersRun, ConditionalTasksRun
from experiments.study import Study, aim, bars, check_files, metric, mini_lm, numbers_of, published
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SamplerConfig
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE
from graftlm.grafts import GraftConfig, graft_config
from graftlm.runs.task_run import TaskEvaluationConfig
from graftlm.training import TrainingConfig

NAME = "conditional-tasks"
TABLES = ("1", "few", "count")
MAX_PARAMETERS, MAX_DATA_SHARE = 1.12, 0.7
FEW_LABELS = {
    "few_added": "added to a trained graft: its embedding and its head train",
    "few_finetune": "fine-tuning of the encoder",
}
COUNT_LABELS = {"multi_task": "multi-task fine-tuning", "ca_mtl": "all modules, MT-Uncertainty"}
OFF: dict[str, Any] = {"attention": "none", "alignment": False, "norm": False, "bottleneck": "none"}
FINE_TUNING = OFF | {"frozen": 0}
MODULES: dict[str, dict[str, Any]] = {
    "multi_task": OFF,
    "+attention": OFF | {"attention": "blocks"},
    "+bottleneck": OFF | {"attention": "blocks", "bottleneck": "base"},
    "+alignment_cln": {"attention": "blocks", "bottleneck": "base", "alignment": True, "norm": True},
}
ALL_MODULES = MODULES["+alignment_cln"]
LABELS = {
    "single_task": "single-task fine-tuning, one model each",
    "multi_task": "multi-task fine-tuning, half the layers frozen",
    "multi_task_uncertainty": "the same, MT-Uncertainty (first seed)",
    "adapters": "adapters, parallel bottleneck, frozen encoder",
    "adapters_half": "the same adapters, upper half trained as well (first seed)",
    "+attention": "multi-task + conditional attention",
    "+bottleneck": "+ conditional bottleneck",
    "+alignment_cln": "+ conditional alignment and layer norm",
    "ca_mtl_uniform": "all modules, uniform sampling",
    "ca_mtl": "all modules, MT-Uncertainty",
}
SAME_RUN = {"ca_mtl_uniform": "+alignment_cln"}
# Rows that take another row's learning rate. Conditional tasks share the rate that all modules have.
RATE_OF = SAME_RUN | {"+attention": "+alignment_cln", "+bottleneck": "+alignment_cln", "ca_mtl": "+alignment_cln"}
RATE_OF |= {"multi_task_uncertainty": "multi_task"}
ADAPTERS = ("adapters", "adapters_half")
BY_UNCERTAINTY = ("multi_task_uncertainty", "ca_mtl")
FIRST_SEED_ONLY = ("multi_task_uncertainty", "adapters_half")


class ConditionalTasksSize(Config):
    """Sizes of data, training and tables.

    Args:
        train: training rows of each task.
        validation: validation rows of each task.
        test: test rows of each task.
        length: maximum tokens of a row; longer texts are cut.
        training: its steps are those of all tasks together, and of all single tasks added up.
        rates: learning rates to choose from, ascending; the middle two are tried first.
        graft: what the configs of all rows share.
        held_out: the task that is added later.
        shares: the shares of its rows that it is learned from, with the steps of each.
        added_rates: learning rates of an addition.
        counts: numbers of tasks that are trained together, the first ones of the list.
    """

    train: int = 300
    validation: int = 100
    test: int = 200
    length: int = 64
    training: TrainingConfig = TrainingConfig(
        steps=512, batch_size=16, micro_batch_size=8, schedule="linear", precision="bf16", keep_checkpoints=1
    )
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    graft: dict[str, Any] = {"frozen": 0.5, "modulated": 0.5, "pooling": "mean", "bottleneck_width": 64}
    held_out: str = "snips"
    shares: dict[str, int] = Field({"0.1%": 16, "1%": 24, "10%": 40, "100%": 64}, min_length=1)
    added_rates: tuple[float, ...] = (3e-3, 3e-2)
    counts: tuple[int, ...] = (2, 4, 8)


FULL = ConditionalTasksSize()
QUICK = ConditionalTasksSize(
    train=16,
    validation=8,
    test=8,
    length=16,
    training=TrainingConfig(steps=len(TASKS), batch_size=4, schedule="linear", keep_checkpoints=1),
    rates=(1e-3,),
    graft={"pooling": "mean", "bottleneck_width": 4, "task_width": 4, "block": 8},
    shares={"0.1%": 1, "1%": 1},
    added_rates=(1e-2,),
    counts=(2, len(TASKS)),
)


class ConditionalTasksStudy(Study):
    """The runs of the experiment.

    Attributes:
        rows: ids of the main table's rows; without the package `adapters` its rows are left out.
        tried: validation average by row and learning rate.
        rates: the learning rate of each row.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.size = QUICK if options.quick else FULL
        name = options.backbone or mini_lm(options.data, "The encoder")
        self.backbone = BackboneConfig(name=name, device=options.device)
        self.python = runs.python_with_adapters()
        self.rows = [row for row in LABELS if self.python or row not in ADAPTERS]
        self.tried: dict[str, dict[float, float]] = {row: {} for row in self.rows if row not in RATE_OF}
        self.rates: dict[str, float] = {}
        self._files: dict[tuple[str, int, str], LabelledConfig] = {}

    def task(self, task: str, seed: int, share: str = "") -> LabelledConfig:
        """A task and its files, with as many training rows as the others, or with a share of all, such as 1%."""
        key = task, seed, share
        if key not in self._files:
            size, source = self.size, TASKS[task]
            sizes = SplitSizes(share or size.train, size.validation, size.test)
            splits = draw_splits(source.read(self.options.data), sizes, seed)
            folder = self.options.out / "texts" / (f"few_{share}_s{seed}" if share else f"s{seed}")
            files = {split: str(file) for split, file in write_splits(splits, folder, task).items()}
            values = {"type": source.type, "metric": source.metric, **files, **source.columns}
            self._files[key] = LabelledConfig.parse(values)
        return self._files[key]

    def run(
        self,
        name: str,
        tasks: Sequence[str],
        graft: Mapping[str, Any],
        rate: float,
        seed: int,
        *,
        kind: type[ConditionalTasksRun] = ConditionalTasksRun,
        share: str = "",
        **fields: Any,
    ) -> ConditionalTasksRun:
        """One run, of the tasks' part of all steps, or of the steps of a share of the held-out task's rows."""
        training, size = self.size.training, self.size
        steps = size.shares[share] if share else max(1, training.steps * len(tasks) // len(TASKS))
        update = {"steps": steps, "checkpoint_every": steps, "warmup_steps": max(1, steps // 10)}
        return kind(
            id=f"{name}_lr{rate:g}_s{seed}",
            backbone=self.backbone,
            graft=self.graft(graft),
            tasks={task: self.task(task, seed, share) for task in tasks},
            training=training.model_copy(update=update | {"learning_rate": rate, "seed": seed}),
            evaluation=TaskEvaluationConfig(batch_size=training.batch_size, precision=training.precision),
            length=size.length,
            **fields,
        )

    def graft(self, values: Mapping[str, Any]) -> GraftConfig:
        """The config of a graft with these modules."""
        return graft_config({"kind": "conditional-tasks", **self.size.graft, **values})

    def row_runs(
        self, row: str, seed: int, rate: float | None = None, tasks: Sequence[str] = tuple(TASKS)
    ) -> list[ConditionalTasksRun]:
        """The runs of a row: one, or one for each task. The rate is by default the chosen one."""
        rate, row = rate or self.rates[row], SAME_RUN.get(row, row)
        if row == "single_task":
            return [self.run(f"single_{task}", [task], FINE_TUNING, rate, seed) for task in tasks]
        prefix = "" if len(tasks) == len(TASKS) else f"count{len(tasks)}_"
        graft = ALL_MODULES if row == "ca_mtl" else MODULES.get(row, OFF)
        fields: dict[str, Any] = self._adapters(tasks, half=row == "adapters_half") if row in ADAPTERS else {}
        if row in BY_UNCERTAINTY:
            fields["sampler"] = SamplerConfig(policy="uncertainty")
        return [self.run(prefix + row.replace("+", "plus_"), tasks, graft, rate, seed, **fields)]

    def _adapters(self, tasks: Sequence[str], half: bool) -> dict[str, Any]:
        """Adapters with as many parameters as all modules without heads."""
        added, layers, width = runs.module_parameters(self.backbone, self.graft(ALL_MODULES), len(tasks))
        return {
            "kind": AdaptersRun,
            "python": str(self.python),
            "frozen_layers": round(layers * self.size.graft.get("frozen", 0.5)) if half else layers,
            "bottleneck": runs.bottleneck_width(added, len(tasks), layers, width),
        }

    def row_seeds(self, row: str) -> tuple[int, ...]:
        """The seeds of a row of the main table."""
        return self.seeds[:1] if row in FIRST_SEED_ONLY else self.seeds

    def scores(self, runs: Sequence[ConditionalTasksRun], split: str = "test") -> dict[str, float]:
        """The scores of all tasks of some runs."""
        suffix = "" if split == "test" else f"_{split}"
        return {task: metric(self.measured[run.id], task + suffix) for run in runs for task in run.tasks}

    def average(self, runs: Sequence[ConditionalTasksRun], split: str = "test") -> float:
        """The mean of their scores."""
        return mean(self.scores(runs, split).values())

    def choose_rates(self) -> None:
        """Choose each row's learning rate: the one with the best mean over the tasks' validation rows, first seed.

        The middle two rates are tried first, then neighbours of the best one, until it has no untried neighbour.
        """
        while pending := [
            (row, rate) for row, tried in self.tried.items() for rate in next_rates(self.size.rates, tried)
        ]:
            tries = {(row, rate): self.row_runs(row, self.seeds[0], rate) for row, rate in pending}
            self.execute([run for row_runs in tries.values() for run in row_runs], "learning rates")
            for (row, rate), row_runs in tries.items():
                self.tried[row][rate] = self.average(row_runs, "validation")
        best = {row: max(averages, key=lambda rate, of=averages: of[rate]) for row, averages in self.tried.items()}
        self.rates = {row: best[RATE_OF.get(row, row)] for row in self.rows}


def next_rates(rates: Sequence[float], tried: Mapping[float, float]) -> list[float]:
    """The rates to try next: the middle two, then neighbours of the best one; none when it has no untried neighbour.

    >>> next_rates([1, 2, 3, 4], {})
    [2, 3]
    >>> next_rates([1, 2, 3, 4], {2: 0.1, 3: 0.5})
    [4]
    >>> next_rates([1, 2, 3, 4], {1: 0, 2: 5, 3: 4})
    []
    """
    if not tried:
        middle = len(rates) // 2
        return list(rates[max(0, middle - 1) : middle + 1])
    best = rates.index(max(tried, key=lambda rate: tried[rate]))
    return [rate for rate in rates[max(0, best - 1) : best + 2] if rate not in tried]


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
    row_runs = study.row_runs(row, seed)
    scores = study.scores(row_runs)
    metrics: dict[str, Metric] = {**scores, "average": mean(scores.values()), "task_sigma": pstdev(scores.values())}
    metrics["data_share"] = mean(_by_task(study, row, seed, "data_share_by_task").values())
    for name in ("trained_parameters_ratio", "total_parameters_ratio", "seconds"):
        metrics[name] = sum(metric(study.measured[run.id], name) for run in row_runs)
    return metrics


def _by_task(study: ConditionalTasksStudy, row: str, seed: int, detail: str) -> dict[str, Any]:
    """A detail of all runs of a row, by task."""
    details = (study.measured[run.id].details[detail] for run in study.row_runs(row, seed))
    return {task: value for of_run in details for task, value in of_run.items()}


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
    added_runs = [add(share, rate) for share in shares]
    tuned_runs = [
        study.run(f"few_finetune_{share}", [size.held_out], FINE_TUNING, alone, seed, share=share) for share in shares
    ]
    study.execute([base, *added_runs, *tuned_runs], "few rows")
    few_added, few_finetune = (
        {f"score_{share}": study.average([run]) for share, run in zip(shares, row_runs, strict=True)}
        for row_runs in (added_runs, tuned_runs)
    )
    changed = sum(metric(study.measured[run.id], "old_changed") for run in added_runs)
    few_added |= {"old_changed": changed, "learning_rate": rate}
    rows = zip(FEW_LABELS.items(), (few_added, few_finetune), strict=True)
    return [Row(id=name, label=label, metrics={**metrics}) for (name, label), metrics in rows]


def count_rows(study: ConditionalTasksStudy) -> list[Row]:
    """The first tasks of the list, a growing number, first seed: the average over all, and over the smallest set."""
    rows, tasks = [], list(TASKS)
    for row, label in COUNT_LABELS.items():
        for count in study.size.counts:
            row_runs = study.row_runs(row, study.seeds[0], tasks=tasks[:count])
            study.execute(row_runs, f"{count} tasks")
            scores = study.scores(row_runs)
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
    single = {row: of_row[0].id for row in rows if len(of_row := study.row_runs(row, seed)) == 1}
    return {
        "size": study.size.model_dump(mode="json"),
        "learning_rates": study.rates,
        "tried": {row: {f"{rate:g}": value for rate, value in sorted(of.items())} for row, of in study.tried.items()},
        "labels": {task: source.label for task, source in TASKS.items()},
        "measured_by": {task: source.metric for task, source in TASKS.items()},
        "losses": {row: study.measured[run].details["losses"] for row, run in single.items()},
        "data_share_by_task": {row: _by_task(study, row, seed, "data_share_by_task") for row in rows},
        "picked": {row: _by_task(study, row, seed, "picked") for row in rows if row in BY_UNCERTAINTY},
        "left_out": [] if study.python else [runs.MISSING],
    }
