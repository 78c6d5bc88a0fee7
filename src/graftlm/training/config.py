"""The training section of recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from graftlm.config import Config

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Config):
    """The settings of one training run; a step is one update of the weights.

    `batch_size` counts rows per step over all processes and micro-batches, so losses do not depend on how a step is
    split. Keys in `FREE_ON_RESUME` may change when a run is resumed; all others must stay the same.
    """

    steps: int = Field(ge=0, description="Updates of the weights; 0 for a graft that learns without gradients.")
    epochs: float | None = Field(
        None, gt=0, description="Passes over the new text, instead of steps; the text must not be streamed."
    )
    batch_size: int = Field(16, ge=1, description="Rows per step, over all processes.")
    micro_batch_size: int | None = Field(
        None, ge=1, description="Rows per forward pass and process; all of a process's rows when absent."
    )
    learning_rate: float = Field(2e-4, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0.")
    min_ratio: float = Field(0.0, ge=0, le=1, description="The final learning rate as a share of the highest.")
    weight_decay: float = Field(
        0.0, ge=0, description="Of matrices; vectors, scalars and the parameters of a state-space model never decay."
    )
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip: float | None = Field(1.0, gt=0, description="Maximum global norm of the gradient; no maximum when absent.")
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(0, ge=0)
    gradient_checkpointing: bool = Field(False, description="Recompute activations: less memory, more time.")
    compile: bool = Field(False, description="Compile the model with torch.compile: slower to start, faster on a GPU.")
    sharded: bool = Field(
        False,
        description="With several processes: FSDP2 shards weights and optimizer states instead of replicating them.",
    )
    checkpoint_every: int = Field(200, ge=1, description="Steps between checkpoints; there is one at the end too.")
    keep_checkpoints: int = Field(
        2, ge=0, description="Newest checkpoints to keep; 0 writes none, so that a killed run starts anew."
    )
    log_every: int = Field(1, ge=1, description="Steps between two lines of the history, which the tracker gets too.")
    tracker: str | None = Field(
        None, description="A tracker that Accelerate supports, such as tensorboard, wandb, trackio or mlflow."
    )

    @model_validator(mode="before")
    @classmethod
    def _allow_epochs_alone(cls, values: object) -> object:
        if isinstance(values, Mapping) and values.get("epochs") is not None and "steps" not in values:
            return {**values, "steps": 0}
        return values

    def _problems(self) -> Iterator[str]:
        if self.epochs is not None and self.steps:
            yield (
                f"steps is {self.steps} and epochs is {self.epochs:g}, but only one of them can be set: set steps to 0 "
                "or epochs to null"
            )

        if self.compile and self.gradient_checkpointing:
            yield (
                "compile and gradient_checkpointing are true, but torch.compile can't trace these checkpoints, and "
                "recomputes what it chooses itself: set one of them to false"
            )

    @property
    def has_steps(self) -> bool:
        """Whether weights are trained."""
        return self.steps > 0 or self.epochs is not None


FREE_ON_RESUME = {
    # These may grow; the learning rate then follows the new schedule from the checkpoint on.
    "steps",
    "epochs",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
    "tracker",
    # These change results by rounding only.
    "micro_batch_size",
    "gradient_checkpointing",
    "compile",
    "sharded",
}
