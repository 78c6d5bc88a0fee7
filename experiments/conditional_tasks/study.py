"""Sizes and runs of the experiment: one function from a row, a rate and a seed to its runs, and the search of rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.conditional_tasks.adapters import BlindConfig, TaskAdaptersConfig, parameters_per_width
from experiments.conditional_tasks.corpora import TASKS, SplitSizes, draw_splits, write_splits
from experiments.conditional_tasks.rows import (
    ALL,
    CELLS,
    CONTROLS,
    FINE_TUNING,
    LABELS,
    MODULES,
    PLAIN,
    RIVALS,
    SAMPLERS,
    SIMILAR,
    TABLES,
    cell_id,
    table_of,
)
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.study import Study, metric, mini_lm
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SCORED, SamplerConfig
from graftlm.evaluation import Interval, combine_seeds
from graftlm.grafts import GraftConfig, build_graft, graft_config
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.task_run import TaskEvaluationConfig, with_tasks
from graftlm.training import TrainingConfig

SEARCH_SEED = 0


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
    graft=FULL.graft | {"bottleneck_width": 4, "task_width": 4, "block": 8},
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
        """The config of adapters, as large as all modules without heads, or of the width that it says."""
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
        settings = {"kind": "task-adapters", **self.size.graft, "inner": self._inner[row], **values}
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
        if row in PLAIN:
            return [self.run(row, tasks, self.graft(PLAIN[row]), rate, seed)]
        if row in RIVALS:
            return [self.run(row, tasks, self.rival(row), rate, seed)]
        if row in CONTROLS:
            modules, by = CONTROLS[row]
            graft = BlindConfig.parse({"kind": "blind", "by": by, **self.size.graft, **MODULES[modules]})
            return [self.run(row, tasks, graft, rate, seed)]
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
