"""Eleven tasks on the real MiniLM: modules x samplers of conditional tasks, fine-tuning, adapters, LoRA, hypernetwork.

Every row trains for the same number of steps and rows. Every row has the learning rate that is best on validation rows
among the same values, by seed 0; the tables may have other seeds. `default` is the combination of modules and sampler
with the best validation rows over all seeds. Further tables add a task to a trained graft, and train the default on
fewer rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, pstdev
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field

from experiments import Options
from experiments.conditional_tasks.adapters import OneVectorConfig, TaskAdaptersConfig, parameters_per_width
from experiments.conditional_tasks.corpora import FILES, TASKS, SplitSizes, draw_splits, write_splits
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.study import Study, aim, bars, check_files, metric, mini_lm, published
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SCORED, SamplerConfig
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import MARKERS, PALETTE
from graftlm.grafts import GraftConfig, build_graft, graft_config
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.run import shared_workers
from graftlm.runs.task_run import TaskEvaluationConfig, with_tasks
from graftlm.training import TrainingConfig

NAME = "conditional-tasks"
TABLES = ("1", "rivals", "uncertainty", "learnability", "samplers", "few", "rows")
SEARCH_SEED = 0
MAX_PARAMETERS, MAX_ROWS, MIN_GAIN, MAX_TASK_LOSS = 1.12, 0.7, 1.0, 2.0
OFF: dict[str, Any] = {"attention": "none", "alignment": False, "norm": False, "bottleneck": "none"}
FINE_TUNING = OFF | {"frozen": 0}
ALL = {"attention": "blocks", "alignment": True, "norm": True, "bottleneck": "base"}
MODULES: dict[str, dict[str, Any]] = {"none": OFF} | {
    name: OFF | {key: ALL[key]}
    for name, key in (
        ("attention", "attention"),
        ("bottleneck", "bottleneck"),
        ("alignment", "alignment"),
        ("cln", "norm"),
    )
}
MODULES["all"] = ALL
EVERYWHERE = "cln_all_layers"  # samples uniformly alone
MODULES[EVERYWHERE] = MODULES["cln"] | {"modulated": 1.0}
NAMES = {"none": "multi_task", "all": "ca_mtl"}  # of rows, as of the modules' other names
SAMPLERS = ("uniform", *SCORED)
OTHER_SAMPLERS = ("size", "temperature", "entropy")  # without modules alone
CONTROLS = {"cln_one_vector": "cln", "cln_all_layers_one_vector": EVERYWHERE}  # what conditions them is missing
RIVALS: dict[str, dict[str, Any]] = {
    "adapters": {"form": "bottleneck", "frozen": 1},
    "adapters_half": {"form": "bottleneck"},
    "lora": {"form": "lora", "shared": True, "frozen": 1},
    "lora_per_task": {"form": "lora", "frozen": 1},
    "hyper": {"form": "hyper", "frozen": 1},
}
FEW: dict[str, tuple[str, dict[str, Any]]] = {
    "few_added": ("added to a trained graft: its embedding and its head train", {"adapts": "added"}),
    "few_whole": ("added to a trained graft: the whole model trains", {"adapts": "all"}),
    "few_finetune": ("fine-tuning of the encoder", FINE_TUNING),
}
SIMILAR = ("multi_task", "ca_mtl")


def cell_id(modules: str, sampler: str) -> str:
    """The row of a combination: multi_task and ca_mtl_uniform sample uniformly, ca_mtl by uncertainty as published."""
    if modules == "all":
        return {"uniform": "ca_mtl_uniform", "uncertainty": "ca_mtl"}.get(sampler, f"ca_mtl_{sampler}")
    name = NAMES.get(modules, modules)
    return name if sampler == "uniform" else f"{name}_{sampler}"


CELLS = {
    cell_id(modules, sampler): (modules, sampler)
    for modules in MODULES
    for sampler in SAMPLERS
    if modules != EVERYWHERE or sampler == "uniform"
}
MODULE_LABELS = {
    "none": "multi-task fine-tuning, half the layers frozen",
    "attention": "conditional attention",
    "bottleneck": "conditional bottleneck",
    "alignment": "conditional alignment",
    "cln": "conditional layer norm",
    "all": "all modules",
    EVERYWHERE: "conditional layer norm in the frozen layers as well",
}
LABELS = {
    "single_task": "single-task fine-tuning, one model each",
    **{row: f"{MODULE_LABELS[modules]}, {sampler}" for row, (modules, sampler) in CELLS.items()},
    **{f"multi_task_{sampler}": f"{MODULE_LABELS['none']}, {sampler}" for sampler in OTHER_SAMPLERS},
    **{row: f"{MODULE_LABELS[modules]}, one vector for all tasks, uniform" for row, modules in CONTROLS.items()},
    "adapters": "adapters, parallel bottleneck, frozen encoder",
    "adapters_half": "the same adapters, upper half trained as well",
    "lora": "one LoRA for all tasks, frozen encoder",
    "lora_per_task": "a LoRA for each task, frozen encoder",
    "hyper": "adapters that a hypernetwork makes, frozen encoder",
}


def table_of(row: str) -> str:
    """The table that a row stands in."""
    if row.removeprefix("multi_task_") in OTHER_SAMPLERS:
        return "samplers"
    if row in ("adapters", "lora_per_task", "hyper"):
        return "rivals"
    if row in (f"{name}_uncertainty" for name in ("attention", "bottleneck", "alignment")):
        return "uncertainty"
    return "learnability" if row.endswith("learnability") else "1"


class ConditionalTasksSize(Config):
    """Sizes of data, training and tables.

    Args:
        train: training rows of each task, as a share of its set.
        least: the fewest training rows of a task.
        validation: validation rows of each task.
        test: test rows of each task.
        length: maximum tokens of a row; longer texts are cut.
        training: its steps are those of all tasks together, and of all single tasks added up.
        rates: learning rates to choose from.
        graft: what the configs of all rows share.
        rival_rate: the learning rate of adapters and LoRA over that of the encoder's layers.
        sampler: the settings of samplers with scores.
        held_out: the task that is added later.
        shares: the shares of its rows that it is learned from, with the steps of each.
        rows: the shares of all steps after which the default is compared with uniform sampling.
    """

    train: str = "10%"
    least: int = 1000
    validation: int = 250
    test: int = 500
    length: int = 64
    training: TrainingConfig = TrainingConfig(
        steps=200,
        batch_size=64,
        micro_batch_size=16,  # rows of like length: less padding
        schedule="linear",
        betas=(0.9, 0.99),
        precision="bf16",
        keep_checkpoints=0,
        log_every=50,
    )
    rates: tuple[float, ...] = (3e-4, 6e-4, 1e-3)
    graft: dict[str, Any] = {
        "frozen": 0.5,
        "modulated": 0.5,
        "pooling": "mean",
        "bottleneck_width": 64,
        "aligned": "trained",
        "module_rate": 1.0,
        "head_rate": 10.0,
        "scaled_losses": True,
    }
    rival_rate: float = 3.0
    sampler: dict[str, Any] = {"passes": 5, "keep": 100, "floor": 0.5}
    held_out: str = "snips"
    shares: dict[str, int] = Field({"0.1%": 20, "1%": 30, "10%": 60, "100%": 100}, min_length=1)
    rows: tuple[float, ...] = (0.3, 0.5, 0.7)


FULL = ConditionalTasksSize()
QUICK = ConditionalTasksSize(
    train="0.1%",
    least=16,
    validation=8,
    test=8,
    length=16,
    training=TrainingConfig(steps=len(TASKS), batch_size=4, schedule="linear", keep_checkpoints=0),
    rates=(1e-3,),
    graft={"pooling": "mean", "bottleneck_width": 4, "task_width": 4, "block": 8, "aligned": "trained"},
    shares={"0.1%": 1, "1%": 1},
    rows=(0.5,),
)


class ConditionalTasksStudy(Study):
    """The runs of the experiment.

    Attributes:
        labels: of the rows of the chosen tables.
        samplers: of the combinations among them.
        rates: the learning rate of each row.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        chosen = options.chosen(TABLES)
        self.labels = {row: label for row, label in LABELS.items() if table_of(row) in {"1", *chosen}}
        self.samplers = [policy for policy in SAMPLERS if cell_id("none", policy) in self.labels]
        self.size = QUICK if options.quick else FULL
        name = options.backbone or mini_lm(options.data, "The encoder")
        self.backbone = BackboneConfig(name=name, device=options.device, dtype="float32")
        self.rates: dict[str, float] = {}
        self._files: dict[tuple[str, int, str], LabelledConfig] = {}
        self._inner: dict[str, int] = {}

    def task(self, task: str, seed: int, share: str = "") -> LabelledConfig:
        """A task and its files, with its share of training rows, or with another, such as 1%."""
        key = task, seed, share
        if key not in self._files:
            size, source = self.size, TASKS[task]
            sizes = SplitSizes(share or size.train, size.validation, size.test, 0 if share else size.least)
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
        graft: GraftConfig,
        rate: float,
        seed: int,
        *,
        steps: int | None = None,
        share: str = "",
        **fields: Any,
    ) -> ConditionalTasksRun:
        """One run, by default of the tasks' part of all steps; of a share of the task's rows where there is one."""
        training, size = self.size.training, self.size
        steps = steps or max(1, training.steps * len(tasks) // len(TASKS))
        update = {"steps": steps, "checkpoint_every": steps, "warmup_steps": max(1, steps // 10)}
        return ConditionalTasksRun(
            id=f"{name}_lr{rate:g}_s{seed}",
            backbone=self.backbone,
            graft=graft,
            tasks={task: self.task(task, seed, share) for task in tasks},
            training=training.model_copy(update=update | {"learning_rate": rate, "seed": seed}),
            evaluation=TaskEvaluationConfig(batch_size=2 * training.batch_size, precision=training.precision),
            length=size.length,
            **fields,
        )

    def graft(self, values: Mapping[str, Any]) -> GraftConfig:
        """The config of a graft with these modules."""
        return graft_config({"kind": "conditional-tasks", **self.size.graft, **values})

    def rival(self, row: str) -> GraftConfig:
        """The config of adapters, with as many parameters as all modules without heads."""
        values = RIVALS[row]
        if row not in self._inner:
            specs = {f"task {n}": TaskSpec(type="regression") for n in range(len(TASKS))}
            backbone = self.backbone.model_copy(update={"device": "cpu"}).load(kind="encoder")
            sites: Any = backbone.sites
            parameters = build_graft(with_tasks(self.graft(ALL), specs), backbone).named_parameters()
            added = sum(parameter.numel() for name, parameter in parameters if not name.startswith("heads"))
            tasks = 1 if values.get("shared") else len(TASKS)
            unit = parameters_per_width(
                values["form"], sites.n_layers, sites.width, sites.config.intermediate_size, tasks
            )
            self._inner[row] = max(1, round(added / unit))
        settings = {"kind": "task-adapters", **self.size.graft, **values, "inner": self._inner[row]}
        settings["module_rate"] = self.size.rival_rate
        return TaskAdaptersConfig.parse({key: value for key, value in settings.items() if key not in ALL})

    def sampler(self, policy: str, share: float = 1.0) -> SamplerConfig:
        """A sampler; of a part of all steps its candidates make a part of all passes."""
        scored = self.size.sampler if policy in SCORED else {}
        if scored:
            scored = scored | {"passes": scored["passes"] * share}
        return SamplerConfig.parse({"policy": policy, **scored})

    def row_runs(self, row: str, seed: int, rate: float | None = None) -> list[ConditionalTasksRun]:
        """The runs of a row: one, or one for each task. The rate is by default the chosen one."""
        rate, tasks = rate or self.rates[row], list(TASKS)
        if row == "single_task":
            return [self.run(f"single_{task}", [task], self.graft(FINE_TUNING), rate, seed) for task in tasks]
        if row in RIVALS:
            return [self.run(row, tasks, self.rival(row), rate, seed)]
        if row in CONTROLS:
            values = {"kind": "one-vector", **self.size.graft, **MODULES[CONTROLS[row]]}
            return [self.run(row, tasks, OneVectorConfig.parse(values), rate, seed)]
        modules, policy = CELLS.get(row, ("none", row.removeprefix("multi_task_")))
        fields = {"sampler": self.sampler(policy), "similarity": row in SIMILAR}
        return [self.run(row, tasks, self.graft(MODULES[modules]), rate, seed, **fields)]

    def scores(self, runs: Sequence[ConditionalTasksRun], split: str = "test") -> dict[str, float]:
        """The scores of all tasks of some runs."""
        suffix = "" if split == "test" else f"_{split}"
        return {task: metric(self.measured[run.id], task + suffix) for run in runs for task in run.tasks}

    def average(self, row: str, seed: int, split: str = "test") -> float:
        """The mean of a row's scores."""
        return mean(self.scores(self.row_runs(row, seed), split).values())

    def choose_rates(self) -> None:
        """Choose each row's learning rate, all by the same search."""
        rates = self.size.rates
        tries = {(row, rate): self.row_runs(row, SEARCH_SEED, rate) for row in self.labels for rate in rates}
        self.execute([run for row_runs in tries.values() for run in row_runs], "learning rates")

        def error(row: str, rate: float) -> float:
            return mean(metric(self.measured[run.id], "validation_error") for run in tries[row, rate])

        for row in self.labels:
            errors = {rate: error(row, rate) for rate in rates}
            self.searched[row] = {f"{rate:g}": round(value, 4) for rate, value in errors.items()}
            self.rates[row] = min(errors, key=lambda rate, of=errors: of[rate])

    def best_cell(self, cells: Iterable[str]) -> str:
        """The row with the best validation rows over all seeds."""
        return max(cells, key=lambda row: mean(self.average(row, seed, "validation") for seed in self.seeds))

    def differences(self, first: str, second: str, task: str | None = None) -> Interval:
        """A row's average, or its score of a task, less another's: paired by seed."""
        values = []
        for seed in self.seeds:
            a, b = (self.scores(self.row_runs(row, seed)) for row in (first, second))
            values.append(a[task] - b[task] if task else mean(a.values()) - mean(b.values()))
        return combine_seeds(values)


def run(options: Options) -> Results:
    """Run the chosen tables."""
    chosen = options.chosen(TABLES)
    check_files(options, FILES)
    study = ConditionalTasksStudy(options)
    with shared_workers(options.jobs):
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
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=_details(study, default), plots=plots)


def main_row(study: ConditionalTasksStudy, row: str) -> Row:
    """A row of the main table, with its paired difference to multi-task fine-tuning."""
    metrics = combine_metrics([_metrics(study, row, seed) for seed in study.seeds])
    metrics |= {"learning_rate": study.rates[row]}
    if row != "multi_task":
        metrics["over_multi_task"] = study.differences(row, "multi_task")
    return Row(id=row, label=LABELS[row], metrics=metrics)


def default_row(study: ConditionalTasksStudy, default: str) -> Row:
    """The chosen combination, and its paired differences to the other rows, and task by task to multi-task tuning."""
    row, uniform = main_row(study, default), cell_id(CELLS[default][0], "uniform")
    tasks = {task: study.differences(default, "multi_task", task) for task in TASKS}
    others = [name for name in ("multi_task", uniform, *CONTROLS, *RIVALS) if name in study.labels and name != default]
    metrics: dict[str, Metric] = {f"over_{name}": study.differences(default, name) for name in others}
    metrics |= {f"{task}_over_multi_task": value for task, value in tasks.items()}
    metrics |= {"worst_task_over_multi_task": min(value.mean for value in tasks.values())}
    return Row(id="default", label=f"default: {LABELS[default]}", metrics={**row.metrics, **metrics})


def effect_rows(study: ConditionalTasksStudy) -> list[Row]:
    """The effect of each module over the samplers, and of each sampler over the modules, paired by seed."""

    def effect(name: str, label: str, cells: Sequence[tuple[str, str]]) -> Row:
        pairs = [pair for pair in cells if study.labels.keys() >= {*pair}]
        values = [mean(study.average(a, seed) - study.average(b, seed) for a, b in pairs) for seed in study.seeds]
        return Row(id=f"effect_{name}", label=f"effect of {label}", metrics={"effect": combine_seeds(values)})

    rows = [
        effect(
            name, MODULE_LABELS[name], [(cell_id(name, policy), cell_id("none", policy)) for policy in study.samplers]
        )
        for name in MODULES
        if name != "none"
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
    shares = [share for of in measured for share in of.details["data_share_by_task"].values()]
    metrics["data_share"] = mean(shares)
    for name in ("trained_parameters_ratio", "total_parameters_ratio", "seconds", "rows_trained", "rows_scored"):
        metrics[name] = sum(metric(of, name) for of in measured)
    return metrics


def fewer_rows(study: ConditionalTasksStudy, default: str) -> list[Row]:
    """The default after a part of the rows, and the part at which it reaches uniform sampling's score.

    Where the default samples uniformly, the better sampler with scores takes its place; norms of all layers have none,
    so those of the upper half are taken.
    """
    modules, policy = CELLS[default]
    modules = "cln" if modules == EVERYWHERE else modules
    if policy == "uniform":
        _, policy = CELLS[study.best_cell(cell_id(modules, policy) for policy in study.samplers if policy in SCORED)]
    row, size, graft = cell_id(modules, policy), study.size, study.graft(MODULES[modules])

    def part(share: float, seed: int) -> ConditionalTasksRun:
        steps, sampler = max(1, round(size.training.steps * share)), study.sampler(policy, share)
        return study.run(f"part_{share:g}", list(TASKS), graft, study.rates[row], seed, steps=steps, sampler=sampler)

    study.execute([part(share, seed) for share in size.rows for seed in study.seeds], "fewer rows")
    by_share = {
        share: [mean(study.scores([part(share, seed)]).values()) for seed in study.seeds] for share in size.rows
    }
    by_share[1.0] = [study.average(row, seed) for seed in study.seeds]
    uniform = mean(study.average(cell_id(modules, "uniform"), seed) for seed in study.seeds)
    metrics: dict[str, Metric] = {f"score_{share:g}": combine_seeds(values) for share, values in by_share.items()}
    reached = [share for share, values in by_share.items() if mean(values) >= uniform]
    metrics |= {"uniform": uniform} | ({"rows_to_reach": min(reached)} if reached else {})
    return [Row(id="fewer_rows", label=f"{LABELS[row]}, after a part of the rows", metrics=metrics)]


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
        values, fields = FEW[row][1], {}
        if row != "few_finetune":
            values = values | {"extends": str(study.runs / bases[seed].id / "graft")}
            fields = {"depends_on": (bases[seed].id,), "old_tasks": bases[seed].tasks if share == shares[-1] else {}}
        steps = size.shares[share]
        return study.run(
            f"{row}_{share}", [size.held_out], study.graft(values), rate, seed, share=share, steps=steps, **fields
        )

    tries = {row: [learn(row, shares[-1], rate, SEARCH_SEED) for rate in size.rates] for row in FEW}
    chosen = study.choose(tries, ["validation_error"], "rates of an addition", list(bases.values()))
    rates = {row: run.training.learning_rate for row, run in chosen.items()}
    learned = {
        (row, share, seed): learn(row, share, rates[row], seed)
        for row in FEW
        for share in shares
        for seed in study.seeds
    }
    study.execute([*bases.values(), *learned.values()], "few rows")
    rows = []
    for row, (label, _) in FEW.items():
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
        text, name = "part of the rows at which uniform sampling's score is reached", "rows_to_reach"
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
