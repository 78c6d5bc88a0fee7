"""Which cells there are: rows, learning rates, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments import Options
from experiments.conditional_tasks.cell import Cell, measure, weights_of
from experiments.conditional_tasks.peer import python_with_adapters, width_of
from experiments.conditional_tasks.setting import FULL, MODULES, OFF, QUICK, Setting
from experiments.conditional_tasks.texts import TASKS, Sizes, rows_of, write_texts
from experiments.jobs import run_jobs
from experiments.study import mini_lm
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SamplerConfig
from graftlm.training import TrainingConfig

# A row that is another's run.
SAME = {"ca_mtl_uniform": "+alignment_cln"}
# Whose learning rate a row takes: conditional tasks have one, chosen with all modules and uniform sampling.
RATE_OF = SAME | {"+attention": "+alignment_cln", "+bottleneck": "+alignment_cln", "ca_mtl": "+alignment_cln"}
RATE_OF |= {"multi_task_uncertainty": "multi_task"}
PEERS = ("adapters", "adapters_half")
BY_UNCERTAINTY = ("multi_task_uncertainty", "ca_mtl")
ROWS = (
    "single_task",
    "multi_task",
    "multi_task_uncertainty",
    *PEERS,
    "+attention",
    "+bottleneck",
    "+alignment_cln",
    "ca_mtl_uniform",
    "ca_mtl",
)
# What is asked of the main rows besides; these have the first seed alone.
ASIDE = ("multi_task_uncertainty", "adapters_half")
UNCERTAINTY = SamplerConfig(policy="uncertainty")

Measured = dict[str, dict[str, Any]]
Choices = dict[str, float]
# Validation average by row and learning rate.
Tried = dict[str, dict[float, float]]


class Plan:
    """The encoder, the files, and what stands on them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.setting: Setting = QUICK if options.quick else FULL
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.encoder = options.backbone or mini_lm(options.data, "The encoder")
        self.peer = python_with_adapters()
        self.rows = [row for row in ROWS if self.peer or row not in PEERS]

    def files(self, task: str, seed: int, train: int | None = None, folder: str = "") -> LabelledConfig:
        """A task as a recipe has it; its files are written if they are not there."""
        s, source = self.setting, TASKS[task]
        sizes = Sizes(s.train if train is None else train, s.validation, s.test)
        place = self.options.out / "texts" / (folder or f"s{seed}")
        paths = {part: str(path) for part, path in write_texts(self.options.data, place, task, sizes, seed).items()}
        return LabelledConfig.parse({"type": source.type, "metric": source.metric, **paths, **source.columns})

    def pool(self, share: str, seed: int) -> LabelledConfig:
        """The held-out task with a share such as 1% of all its rows, each part of the next larger."""
        s = self.setting
        whole = s.pool or rows_of(self.options.data, s.held_out, Sizes(None, s.validation, s.test))
        count = round(whole * float(share.rstrip("%")) / 100)
        return self.files(s.held_out, seed, count, f"few_{share}_s{seed}")

    def training(self, rate: float, seed: int, steps: int) -> TrainingConfig:
        """The numbers of one run."""
        s = self.setting
        return TrainingConfig.parse(
            {
                "steps": steps,
                "batch_size": s.batch_size,
                "micro_batch_size": s.micro_batch_size,
                "learning_rate": rate,
                "schedule": "linear",
                "warmup_steps": max(1, steps // 10),
                "precision": s.precision,
                "seed": seed,
                "checkpoint_every": steps,
                "keep_checkpoints": 1,
            }
        )

    def cell(
        self, name: str, names: Sequence[str], graft: Mapping[str, Any], rate: float, seed: int, **more: Any
    ) -> Cell:
        """One run of the tasks of these names, of `steps`, or of their share of a `budget` of all tasks."""
        share = max(1, more.pop("budget", self.setting.steps) * len(names) // len(TASKS))
        steps = more.pop("steps", share)
        said: dict[str, Any] = {
            "encoder": self.encoder,
            "device": self.options.device,
            "graft": {"kind": "conditional-tasks", **self.setting.graft, **graft},
            "training": self.training(rate, seed, steps),
            "length": self.setting.length,
        }
        if "tasks" not in more:
            said["tasks"] = {task: self.files(task, seed) for task in names}
        return Cell(id=f"{name}_lr{rate:g}_s{seed}", **said | more)

    def row(self, row: str, rate: float, seed: int, tasks: Sequence[str] = tuple(TASKS), **more: Any) -> list[Cell]:
        """The cells of a row: one, or one for each task; `prefix` begins their names."""
        row = SAME.get(row, row)
        prefix = more.pop("prefix", "")
        if row == "single_task":
            alone = OFF | {"frozen": 0}
            return [self.cell(f"{prefix}single_{task}", [task], alone, rate, seed, **more) for task in tasks]
        name = prefix + row.replace("+", "plus_")
        graft = MODULES["+alignment_cln"] if row == "ca_mtl" else MODULES.get(row, OFF)
        if row in PEERS:
            more["peer"] = self._peer(tasks, half=row == "adapters_half")
        if row in BY_UNCERTAINTY:
            more["sampler"] = UNCERTAINTY
        return [self.cell(name, tasks, graft, rate, seed, **more)]

    def _peer(self, tasks: Sequence[str], half: bool) -> dict[str, Any]:
        """Adapters with as many weights as the modules of all that is ours, without heads."""
        graft = {"kind": "conditional-tasks", **self.setting.graft, **MODULES["+alignment_cln"]}
        added, layers, width = weights_of(self.encoder, graft, len(tasks))
        frozen = round(layers * self.setting.graft.get("frozen", 0.5)) if half else layers
        return {
            "python": str(self.peer),
            "frozen_layers": frozen,
            "bottleneck": width_of(added, len(tasks), layers, width),
        }

    def seeds_of(self, row: str) -> tuple[int, ...]:
        """The seeds that a row of the main table has."""
        return self.seeds[:1] if row in ASIDE else self.seeds

    def run(self, cells: Sequence[Cell], title: str) -> Measured:
        """What was measured, by cell id; each cell is run once."""
        once = list({cell.id: cell for cell in cells}.values())
        return run_jobs(once, measure, self.out, processes=self.options.jobs, title=title)

    @property
    def out(self) -> Path:
        """Where cells are kept."""
        return self.options.out / "cells"

    def tries(self, row: str, rates: Sequence[float]) -> dict[float, list[Cell]]:
        """The cells of a row with the first seed, by learning rate."""
        return {rate: self.row(row, rate, self.seeds[0]) for rate in rates}

    def choose(self) -> tuple[Tried, Choices]:
        """Each row's learning rate: the one with the best mean over the tasks' validation rows.

        The two in the middle of the setting's are tried first, then further ones beyond the better, while they better.
        """
        searched = [row for row in self.rows if row not in RATE_OF]
        tried: Tried = {row: {} for row in searched}
        while wanted := {row: rates for row in searched if (rates := next_rates(self.setting.rates, tried[row]))}:
            cells = {row: self.tries(row, rates) for row, rates in wanted.items()}
            found = self.run([one for of in cells.values() for each in of.values() for one in each], "learning rates")
            for row, of in cells.items():
                tried[row] |= {rate: average(found, each, "validation") for rate, each in of.items()}
        best = {row: max(of, key=lambda rate, of=of: of[rate]) for row, of in tried.items()}
        return tried, {row: best[RATE_OF.get(row, row)] for row in self.rows}


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


def scores(found: Measured, cells: Sequence[Cell], part: str) -> dict[str, float]:
    """The scores of a row's tasks."""
    return {task: score for cell in cells for task, score in found[cell.id][part].items()}


def average(found: Measured, cells: Sequence[Cell], part: str) -> float:
    """Their mean."""
    return mean(scores(found, cells, part).values())
