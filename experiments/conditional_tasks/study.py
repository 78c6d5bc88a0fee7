"""The rows of the tables: their graft, sampler, learning rate and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.conditional_tasks.corpora import TASKS, SplitSizes, draw_splits, write_splits
from experiments.conditional_tasks.runs import (
    AdaptersRun,
    ConditionalTasksRun,
    bottleneck_width,
    module_parameters,
    python_with_adapters,
)
from experiments.study import Study, metric, mini_lm
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SamplerConfig
from graftlm.grafts import GraftConfig, graft_config
from graftlm.runs.task_run import TaskEvaluationConfig
from graftlm.training import TrainingConfig

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
        self.python = python_with_adapters()
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
        update = {
            "steps": steps,
            "learning_rate": rate,
            "warmup_steps": max(1, steps // 10),
            "seed": seed,
            "checkpoint_every": steps,
        }
        return kind(
            id=f"{name}_lr{rate:g}_s{seed}",
            backbone=self.backbone,
            graft=self.graft(graft),
            tasks={task: self.task(task, seed, share) for task in tasks},
            training=training.model_copy(update=update),
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
        added, layers, width = module_parameters(self.backbone, self.graft(ALL_MODULES), len(tasks))
        return {
            "kind": AdaptersRun,
            "python": str(self.python),
            "frozen_layers": round(layers * self.size.graft.get("frozen", 0.5)) if half else layers,
            "bottleneck": bottleneck_width(added, len(tasks), layers, width),
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
        while pending := {row: rates for row in self.tried if (rates := next_rates(self.size.rates, self.tried[row]))}:
            runs = {
                (row, rate): self.row_runs(row, self.seeds[0], rate) for row, rates in pending.items() for rate in rates
            }
            self.execute([run for row_runs in runs.values() for run in row_runs], "learning rates")
            for (row, rate), row_runs in runs.items():
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
