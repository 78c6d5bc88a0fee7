"""The config of conditional tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_serializer

from graftlm.grafts.base import GraftConfig
from graftlm.grafts.heads import Pooling, TaskSpec

CA_MTL: dict[str, object] = {
    "frozen": 0.5,  # section 3.4: the bottom half
    "modulated": 0.5,
    "lora_rank": 0,
    "attention": "blocks",
    "alignment": True,
    "aligned": "first",  # equation 3.2: between the embedding and the first layer
    "norm": True,
    "bottleneck": "base",
    "bottleneck_norm": True,
    "pooling": "first",
    "dropout": 0.1,  # appendix B.1.3
    "module_rate": 1.0,  # appendix B.1.3: one learning rate
    "head_rate": 1.0,
    "scaled_losses": False,  # equation 3.1: a sum of plain losses
}
"""CA-MTL of base size as chapter 3 of the thesis describes it."""


class ConditionalTasksConfig(GraftConfig):
    """Config of conditional tasks.

    The defaults had the best validation rows in the experiment `conditional-tasks`: a LoRA for each task on a frozen
    encoder. Without modules and with layers that train, the method is multi-task fine-tuning; with one task and
    `frozen: 0` it is fine-tuning.

    Args:
        tasks: the tasks by name, in order; a run fills them in from its rows.
        frozen: share of the layers, from the first, that stay frozen; 0 trains the embedding and all layers, 1 nothing
            of the backbone.
        modulated: share of the layers, from the last, that have LoRA and conditional modules.
        lora_rank: rank of each task's LoRA in parallel to the Linears of attention and dense FFN; 0 disables it.
        attention: whether a learned matrix is added to the attention scores, in `blocks` along the diagonal or as one
            `full` block.
        block: width of a block in tokens, at most `max_length`; only for `attention: blocks`.
        alignment: whether there is an alignment matrix before a layer.
        aligned: the layer of the alignment: the `first` one, or the first that is `trained`, below which no gradients
            are then computed.
        norm: whether the output of each norm is modulated.
        bottleneck: `base` is parallel to each modulated layer's FFN, `large` runs along all layers.
        bottleneck_width: inner width of the bottleneck.
        bottleneck_norm: whether a layer norm that the task modulates precedes the bottleneck.
        task_width: width of a task's vector.
        pooling: the vector from which a row is predicted: its first token, its last token, or the mean.
        max_length: maximum number of tokens of a row with conditional attention.
        dropout: dropout probability of the heads' inputs during training.
        module_rate: learning rate of LoRA, modules and embeddings, as a factor on that of the backbone's weights.
        head_rate: learning rate of the heads, as a factor on that of the backbone's weights.
        scaled_losses: divide each row's loss by its task's loss at chance, which gives tasks of all types the same
            weight.
        extends: folder of a trained graft, whose config and tensors are taken over; the new tasks train.
        adapts: with `extends`, what trains: `added` trains the tensors of the new tasks, `all` trains everything that
            the graft without `extends` trained, which may change the predictions of old tasks.
        like: the trained task from which new tasks start; by default the one of the same type, labels and range that
            has the lowest loss on the run's rows, if that is below the loss at chance.
    """

    needs_tasks: ClassVar[bool] = True
    # Configs without this key were saved when embeddings had any length, and would predict something else.
    saved_keys: ClassVar[frozenset[str]] = frozenset({"module_rate"})
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"ca-mtl": CA_MTL}

    kind: Literal["conditional-tasks"] = "conditional-tasks"
    tasks: dict[str, TaskSpec] = {}
    frozen: float = Field(1.0, ge=0, le=1)
    modulated: float = Field(1.0, ge=0, le=1)
    lora_rank: int = Field(3, ge=0)
    attention: Literal["none", "blocks", "full"] = "none"
    block: int = Field(32, ge=1)
    alignment: bool = False
    aligned: Literal["first", "trained"] = "first"
    norm: bool = False
    bottleneck: Literal["none", "base", "large"] = "none"
    bottleneck_width: int = Field(64, ge=1)
    bottleneck_norm: bool = False
    task_width: int = Field(64, ge=1)
    pooling: Pooling = "first"
    max_length: int = Field(512, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    module_rate: float = Field(3.0, gt=0)
    head_rate: float = Field(10.0, gt=0)
    scaled_losses: bool = True
    extends: str | None = None
    adapts: Literal["added", "all"] = "added"
    like: str | None = None

    @field_validator("tasks")
    @classmethod
    def _names_are_valid(cls, value: dict[str, TaskSpec]) -> dict[str, TaskSpec]:
        for name in value:
            if not name or "." in name:
                raise ValueError(
                    f"a task has the name {name!r}, but a name with at least one character and without dots is "
                    "expected: choose another, such as intents"
                )
        return value

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out `bottleneck_norm` at its default, so that earlier runs keep their keys."""
        values = {"kind": self.kind} | serialize(self)
        if not self.bottleneck_norm:
            values.pop("bottleneck_norm", None)
        return values

    def check_saved(self, values: Mapping[str, object]) -> Self:
        saved = super().check_saved(values)
        if "lora_rank" in values:
            return saved
        # The config was saved before the graft had LoRA.
        return saved.model_copy(update={"lora_rank": 0})

    @property
    def is_modulated(self) -> bool:
        """Whether there is a module that is modulated by the tasks' vectors."""
        return self.alignment or self.norm or self.bottleneck != "none" or self.attention != "none"

    def block_width(self) -> int:
        """Return the width of a block of conditional attention in tokens, which is at most `max_length`."""
        if self.attention == "full":
            return self.max_length
        return min(self.block, self.max_length)
