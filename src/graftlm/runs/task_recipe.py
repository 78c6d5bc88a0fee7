"""The recipe of a graft with heads: tasks with labelled rows, how batches mix them, and one run on all."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from graftlm.config import Config
from graftlm.data.labelled import LabelledConfig
from graftlm.data.samplers import SamplerConfig
from graftlm.training.config import TrainingConfig
from graftlm.runs.sections import AnyGraft, BackboneConfig

KEY = "tasks"
_NAME = re.compile(r"[^\W_][\w-]*")
_TAKEN = re.compile(r"average|task_sigma|data_share|.*_(ratio|parameters|per_s|bytes|bpb)|old|new|learned|forgotten")


class TaskEvaluationConfig(Config):
    """How the tasks' test rows are measured."""

    batch_size: int = Field(64, ge=1, description="Rows of a pass.")
    precision: Literal["fp32", "bf16"] = "fp32"


class TaskRecipe(Config):
    """One training run of a graft that predicts by heads of its own, one for each task."""

    backbone: BackboneConfig
    graft: AnyGraft = Field(description="What to train; `kind` names a method whose grafts have heads.")
    tasks: dict[str, LabelledConfig] = Field(min_length=1, description="The tasks, by names of yours.")
    sampler: SamplerConfig = Field(SamplerConfig(), description="Of which tasks, and which rows, batches are made.")
    length: int = Field(128, ge=4, description="Tokens of a row, at most.")
    truncation: bool = Field(True, description="Truncate longer rows; false makes a longer training row an error.")
    training: TrainingConfig
    evaluation: TaskEvaluationConfig = TaskEvaluationConfig()
    out: str = Field("runs/tasks", description="Folder for the graft, its report and the checkpoints.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.tasks:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"the task's name {name!r} can't be used: take letters, digits, - and _, and begin with no mark"
                )
            if _TAKEN.fullmatch(name):
                raise ValueError(f"the task's name {name} is that of a metric of the report: choose another")
        if not self.graft.needs_tasks:
            raise ValueError(
                f"a graft of the kind {self.graft.kind} has no heads, and the recipe has tasks: choose a kind that "
                "has, or train it on text, with data in the place of tasks"
            )
        if own := getattr(self.graft, KEY, None):
            raise ValueError(
                f"the graft section names the task {next(iter(own))}, but a recipe names tasks once, beside the graft "
                "section: leave them out of it"
            )
        return self
