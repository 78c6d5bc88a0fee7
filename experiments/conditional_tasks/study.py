"""Sizes and runs of the experiment: the runs of a row, a learning rate and a seed, and the search of rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.conditional_tasks.adapters import BlindConfig, TaskAdaptersConfig, parameters_per_width
from experiments.conditional_tasks.corpora import TASKS, SplitSizes, draw_splits, question_of, write_splits
from experiments.conditional_tasks.rows import (
    ALL,
    CELLS,
    CONTROLS,
    FINE_TUNING,
    LABELS,
    MODULES,
    PLAIN,
    RIVALS,
    SIMILAR,
    TABLES,
    TRAINED,
    table_of,
)
from experiments.conditional_tasks.runs import ConditionalTasksRun
from experiments.study import Study, metric, mini_lm
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SamplerConfig
from graftlm.evaluation import Interval, combine_seeds
from graftlm.grafts import GraftConfig, build_graft, graft_config
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.task_run import TaskEvaluationConfig, with_tasks
from graftlm.training import TrainingConfig

SEARCH_SEED = 0


class ConditionalTasksSize(Config):
    """Sizes of data, training and tables.

    Args:
        train: training rows of each task, as a share of its data set or as the largest number.
        by_question: whether no two splits share a question, instead of a text.
        least: minimum number of training rows of a task.
        validation: validation rows of each task.
        test: test rows of each task.
        length: maximum number of tokens of a row; longer texts are truncated.
        training: training settings; the steps are those of all tasks together, and the sum over single tasks.
        rates: learning rates of the search.
        graft: settings that the configs of all rows share.
        rival_rate: learning rate of adapters and LoRA, as a factor on that of the encoder's layers.
        sampler: settings of samplers with scores.
        held_out: the task that is added later.
        shares: shares of the added task's training rows, with the number of steps for each.
        rows: shares of all steps after which the default is compared with uniform sampling.
    """

    train: str | int = "10%"
    by_question: bool = False
    least: int = 1000
    validation: int = 250
    test: int = 500
    length: int = 64
    training: TrainingConfig = TrainingConfig(
        steps=200,
        batch_size=64,
        micro_batch_size=16,  # rows of similar length need less padding
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
    training=TrainingConfig(
        steps=len(TASKS),
        batch_size=4,
        schedule="linear",
        keep_checkpoints=0,
    ),
    rates=(1e-3,),
    graft={
        **FULL.graft,
        "bottleneck_width": 4,
        "task_width": 4,
        "block": 8,
    },
    shares={"0.1%": 1, "1%": 1},
    rows=(0.5,),
)


class ConditionalTasksStudy(Study):
    """The runs of the experiment.

    Attributes:
        labels: labels of the rows in the chosen tables.
        rates: learning rate of each row.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        chosen = options.chosen((*TABLES, TRAINED))
        self.labels = {row: label for row, label in LABELS.items() if table_of(row) in {"1", *chosen}}
        self.size = QUICK if options.quick else FULL
        name = options.backbone or mini_lm(options.data, "The encoder")
        self.backbone = BackboneConfig(name=name, device=options.device, dtype="float32")
        self.rates: dict[str, float] = {}
        self._files: dict[tuple[str, int, str], LabelledConfig] = {}
        self._inner: dict[str, int] = {}

    def task(self, task: str, seed: int, share: str = "") -> LabelledConfig:
        """Return a task with its files, which are written on the first call.

        Args:
            task: the name of the task.
            seed: the seed of the training rows.
            share: the share of training rows, such as 1%; by default that of the size.
        """
        key = (task, seed, share)
        if key not in self._files:
            self._files[key] = self._write_task(task, seed, share)
        return self._files[key]

    def _write_task(self, task: str, seed: int, share: str) -> LabelledConfig:
        source = TASKS[task]
        sizes = SplitSizes(
            train=share or self.size.train,
            validation=self.size.validation,
            test=self.size.test,
            least=0 if share else self.size.least,
        )
        key = question_of if self.size.by_question else None
        splits = draw_splits(source.read(self.options.data), sizes, seed, key)
        name = f"few_{share}_s{seed}" if share else f"s{seed}"
        files = write_splits(splits, self.options.out / "texts" / name, task)
        values: dict[str, Any] = {"type": source.type, "metric": source.metric}
        for split, file in files.items():
            values[split] = str(file)
        return LabelledConfig.parse({**values, **source.columns})

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
        """Return a run.

        Args:
            name: the beginning of the run's id.
            tasks: the names of the tasks.
            graft: the config of the graft.
            rate: the learning rate.
            seed: the seed of training and of the training rows.
            steps: number of steps; by default the share of all steps that corresponds to the number of tasks.
            share: the share of the tasks' training rows; by default that of the size.
            **fields: further fields of the run.
        """
        training = self.size.training
        steps = steps or max(1, training.steps * len(tasks) // len(TASKS))
        changes = {
            "steps": steps,
            "checkpoint_every": steps,
            "warmup_steps": max(1, steps // 10),
            "learning_rate": rate,
            "seed": seed,
        }
        return ConditionalTasksRun(
            id=f"{name}_lr{rate:g}_s{seed}",
            backbone=self.backbone,
            graft=graft,
            tasks={task: self.task(task, seed, share) for task in tasks},
            training=training.model_copy(update=changes),
            evaluation=TaskEvaluationConfig(batch_size=2 * training.batch_size, precision=training.precision),
            length=self.size.length,
            **fields,
        )

    def graft(self, values: Mapping[str, Any]) -> GraftConfig:
        """Return the config of a graft with these modules."""
        return graft_config({"kind": "conditional-tasks", **self.size.graft, **values})

    def rival(self, row: str) -> GraftConfig:
        """Return the config of adapters, by default with as many parameters as all modules without heads."""
        values = RIVALS[row]
        if row not in self._inner:
            self._inner[row] = self._inner_width(values["form"], values.get("shared", False))
        settings = {
            "kind": "task-adapters",
            **self.size.graft,
            "inner": self._inner[row],
            **values,
            "module_rate": self.size.rival_rate,
        }
        return TaskAdaptersConfig.parse({key: value for key, value in settings.items() if key not in ALL})

    def _inner_width(self, form: str, shared: bool) -> int:
        """Return the inner width at which adapters have as many parameters as all modules without heads."""
        specs = {f"task {n}": TaskSpec(type="regression") for n in range(len(TASKS))}
        backbone = self.backbone.model_copy(update={"device": "cpu"}).load(kind="encoder")
        graft = build_graft(with_tasks(self.graft(ALL), specs), backbone)
        added = 0
        for name, parameter in graft.named_parameters():
            if not name.startswith("heads"):
                added += parameter.numel()
        sites: Any = backbone.sites
        unit = parameters_per_width(
            form=form,
            layers=sites.n_layers,
            width=sites.width,
            ffn=sites.config.intermediate_size,
            tasks=1 if shared else len(TASKS),
        )
        return max(1, round(added / unit))

    def sampler(self, policy: str, share: float = 1.0) -> SamplerConfig:
        """Return the config of a sampler.

        Args:
            policy: the name of the sampler.
            share: the share of all steps; candidates are the same share of all passes.
        """
        values: dict[str, Any] = {"policy": policy}
        if policy == "uncertainty":
            values.update(self.size.sampler)
            values["passes"] *= share
        return SamplerConfig.parse(values)

    def row_runs(self, row: str, seed: int, rate: float | None = None) -> list[ConditionalTasksRun]:
        """Return the runs of a row: one, or one for each task. The learning rate is by default the chosen one."""
        rate = rate or self.rates[row]
        tasks = list(TASKS)
        if row == "single_task":
            return [self.run(f"single_{task}", [task], self.graft(FINE_TUNING), rate, seed) for task in tasks]
        if row in PLAIN:
            return [self.run(row, tasks, self.graft(PLAIN[row]), rate, seed)]
        if row in RIVALS:
            return [self.run(row, tasks, self.rival(row), rate, seed)]
        if row in CONTROLS:
            modules, by = CONTROLS[row]
            values = {"kind": "blind", "by": by, **self.size.graft, **MODULES[modules]}
            return [self.run(row, tasks, BlindConfig.parse(values), rate, seed)]
        modules, policy = CELLS.get(row, ("none", row.removeprefix("multi_task_")))
        run = self.run(
            row,
            tasks,
            self.graft(MODULES[modules]),
            rate,
            seed,
            sampler=self.sampler(policy),
            similarity=row in SIMILAR,
        )
        return [run]

    def scores(self, runs: Sequence[ConditionalTasksRun], split: str = "test") -> dict[str, float]:
        """Return the scores of all tasks of some runs."""
        suffix = "" if split == "test" else f"_{split}"
        scores = {}
        for run in runs:
            for task in run.tasks:
                scores[task] = metric(self.measured[run.id], task + suffix)
        return scores

    def row_scores(self, row: str, seed: int, split: str = "test") -> dict[str, float]:
        """Return the scores of all tasks of a row."""
        return self.scores(self.row_runs(row, seed), split)

    def average(self, row: str, seed: int, split: str = "test") -> float:
        """Return the mean of a row's scores."""
        return mean(self.row_scores(row, seed, split).values())

    def choose_rates(self) -> None:
        """Choose the learning rate of each row, all by the same search."""
        tries: dict[str, dict[float, list[ConditionalTasksRun]]] = {}
        runs: list[ConditionalTasksRun] = []
        for row in self.labels:
            tries[row] = {}
            for rate in self.size.rates:
                row_runs = self.row_runs(row, SEARCH_SEED, rate)
                tries[row][rate] = row_runs
                runs += row_runs
        self.execute(runs, "learning rates")
        for row, by_rate in tries.items():
            errors = {rate: self._validation_error(row_runs) for rate, row_runs in by_rate.items()}
            self.searched[row] = {f"{rate:g}": round(error, 4) for rate, error in errors.items()}
            self.rates[row] = min(errors, key=errors.__getitem__)

    def _validation_error(self, runs: Sequence[ConditionalTasksRun]) -> float:
        return mean(metric(self.measured[run.id], "validation_error") for run in runs)

    def best_cell(self, cells: Iterable[str]) -> str:
        """Return the row with the best validation scores over all seeds."""

        def validation_score(row: str) -> float:
            return mean(self.average(row, seed, "validation") for seed in self.seeds)

        return max(cells, key=validation_score)

    def differences(self, first: str, second: str, task: str | None = None) -> Interval:
        """Return the difference of two rows' averages, or of their scores of a task, paired by seed."""
        values = []
        for seed in self.seeds:
            scores = self.row_scores(first, seed)
            other_scores = self.row_scores(second, seed)
            if task is None:
                values.append(mean(scores.values()) - mean(other_scores.values()))
            else:
                values.append(scores[task] - other_scores[task])
        return combine_seeds(values)
