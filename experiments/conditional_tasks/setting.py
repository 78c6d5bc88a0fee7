"""Sizes, and what every row of the tables is made of."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from experiments.conditional_tasks.texts import TASKS
from graftlm.config import Config

LADDER = ("multi_task", "+attention", "+bottleneck", "+alignment_cln")
OFF: dict[str, Any] = {"attention": "none", "alignment": False, "norm": False, "bottleneck": "none"}
MODULES: dict[str, dict[str, Any]] = {
    "multi_task": OFF,
    "+attention": OFF | {"attention": "blocks"},
    "+bottleneck": OFF | {"attention": "blocks", "bottleneck": "base"},
    "+alignment_cln": {"attention": "blocks", "bottleneck": "base", "alignment": True, "norm": True},
}
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


class Setting(Config):
    """One size of everything.

    Args:
        train, validation, test: rows of each task.
        length: tokens of a row, longer texts are cut.
        steps: of training on all tasks together, and of all single tasks' training added up.
        batch_size: rows of a step.
        micro_batch_size: rows of a pass, which are of like length.
        rates: learning rates that every row chooses from, ascending; the middle ones are tried first.
        precision: of training.
        graft: what the configs of all rows share.
        held_out: the task that is added later, `pool` rows of which are all there are.
        shares: of the pool that it is learned from, with the steps of each.
        added_rates: learning rates for what belongs to one task alone.
        counts: tasks that are trained together, the first ones of the list.
    """

    train: int = 300
    validation: int = 100
    test: int = 200
    length: int = 64
    steps: int = Field(512, ge=1)
    batch_size: int = Field(16, ge=1)
    micro_batch_size: int | None = 8
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    precision: str = "bf16"
    graft: dict[str, Any] = {"frozen": 0.5, "modulated": 0.5, "pooling": "mean", "bottleneck_width": 64}
    held_out: str = "snips"
    pool: int | None = None
    shares: dict[str, int] = {"0.1%": 16, "1%": 24, "10%": 40, "100%": 64}
    added_rates: tuple[float, ...] = (3e-3, 3e-2)
    counts: tuple[int, ...] = (2, 4, 8)


FULL = Setting()
QUICK = Setting(
    train=16,
    validation=8,
    test=8,
    length=16,
    steps=len(TASKS),
    batch_size=4,
    micro_batch_size=None,
    rates=(1e-3,),
    precision="fp32",
    graft={"pooling": "mean", "bottleneck_width": 4, "task_width": 4, "block": 8},
    pool=40,
    shares={"10%": 1, "100%": 1},
    added_rates=(1e-2,),
    counts=(2, len(TASKS)),
)
