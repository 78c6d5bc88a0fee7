"""What a graft for many tasks can be told."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from graftlm.grafts.base import GraftConfig
from graftlm.grafts.heads import Pooling, TaskSpec


class ConditionalTasksConfig(GraftConfig):
    """Config of conditional tasks.

    With every module off it is multi-task fine-tuning, and with one task and `frozen: 0` fine-tuning.

    Args:
        tasks: the tasks by name, in order; a run fills them in from its rows.
        frozen: share of the layers, from the first, that stay as the backbone's; 0 trains embedding and all layers,
            1 nothing of the backbone.
        modulated: share of the layers, from the last, that have conditional modules.
        attention: adds a learned matrix to the scores, in blocks along the diagonal or as one full block.
        block: width of a block in tokens.
        alignment: a matrix between embedding and first layer.
        norm: modulates what each norm gives.
        bottleneck: `base` stands beside each modulated layer's FFN, `large` along all layers.
        bottleneck_width: its inner width.
        task_width: of the vector that stands for a task.
        pooling: what a row's prediction reads: its first token, its last, or the mean.
        max_length: most tokens of a row, where attention is conditional.
        dropout: of what the heads read, in training.
        extends: folder of a trained graft: its settings and tensors are taken over, and only what belongs to new tasks
            trains.
        like: the old task that new ones start from; by default the run's rows choose it.
    """

    needs_tasks: ClassVar[bool] = True

    kind: Literal["conditional-tasks"] = "conditional-tasks"
    tasks: dict[str, TaskSpec] = {}
    frozen: float = Field(0.5, ge=0, le=1)
    modulated: float = Field(0.5, ge=0, le=1)
    attention: Literal["none", "blocks", "full"] = "blocks"
    block: int = Field(32, ge=1)
    alignment: bool = True
    norm: bool = True
    bottleneck: Literal["none", "base", "large"] = "base"
    bottleneck_width: int = Field(64, ge=1)
    task_width: int = Field(64, ge=1)
    pooling: Pooling = "first"
    max_length: int = Field(512, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    extends: str | None = None
    like: str | None = None

    @field_validator("tasks")
    @classmethod
    def _names_can_be_written(cls, value: dict[str, TaskSpec]) -> dict[str, TaskSpec]:
        for name in value:
            if not name or "." in name:
                raise ValueError(f"the task's name {name!r} can't be used: take one without dots, such as intents")
        return value

    def block_width(self) -> int:
        """Tokens of one block of conditional attention."""
        return self.max_length if self.attention == "full" else min(self.block, self.max_length)
