"""A run's state: what its checkpoints hold, how it starts from one, how it stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from graftlm.data.mixture import Batches
from graftlm.errors import TrainingError
from graftlm.training.checkpoint import (
    RECURRENT_STATE,
    Checkpoint,
    gather_moments,
    gather_tensors,
    newest_checkpoint,
    remove_all,
    remove_torn,
    restore,
    write_checkpoint,
)
from graftlm.training.config import FREE_ON_RESUME, TrainingConfig
from graftlm.training.processes import Place, graft_buffers


@dataclass
class Counts:
    """What a run has done so far, over all its resumptions.

    Attributes:
        step: updates done.
        tokens: input tokens seen, without padding.
        loss: of the last step.
        timed_tokens: tokens of the steps that `seconds` covers: all but the first after each start.
        seconds: time of those steps, without checkpoints.
    """

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    timed_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.timed_tokens / self.seconds if self.seconds else 0.0


@dataclass
class Run:
    """A model in training and what its checkpoints hold."""

    place: Place
    mixture: Batches
    config: TrainingConfig
    out: Path
    identity: Mapping[str, Any]
    parameters: dict[str, nn.Parameter]
    optimiser: AdamW
    counts: Counts = field(default_factory=Counts)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **graft_buffers(self.place.bare)}


def recurrent_state(model: nn.Module) -> dict[str, Tensor]:
    """The state that a model keeps from step to step, by name; empty for models that keep none."""
    getter = getattr(model, "recurrent_state", None)
    return cast("dict[str, Tensor]", getter()) if callable(getter) else {}


def set_recurrent_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that `recurrent_state` returned."""
    setter = getattr(model, "set_recurrent_state", None)
    if callable(setter):
        setter(tensors)


def stop(run: Run, buffers: Mapping[str, Tensor], before: Mapping[str, Tensor], loss: float, norm: float) -> NoReturn:
    """Keep the state before a step that went wrong, and say so.

    Args:
        buffers: the grafts' buffers before it.
        before: the model's recurrent state before it.

    Raises:
        TrainingError: always.
    """
    set_recurrent_state(run.place.bare, before)
    run.optimiser.zero_grad()
    with torch.no_grad():
        for name, buffer in graft_buffers(run.place.bare).items():
            buffer.copy_(buffers[name])
    path = save(run, keep=None)
    what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient's norm is {norm}"
    raise TrainingError(
        f"In step {run.counts.step + 1} the {what}, so training stopped with the weights before it, kept in {path}: "
        f"start over with a learning_rate below {run.config.learning_rate:g} or more warmup_steps."
    )


def start(run: Run, resume: bool) -> int | None:
    """Take over the newest checkpoint; its step, or None where there is none."""
    if run.place.main:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        (remove_torn if resume else remove_all)(run.checkpoints)
    run.place.accelerator.wait_for_everyone()
    found = newest_checkpoint(run.checkpoints)
    if found is None:
        return None
    _check_same_run(run, found)
    set_recurrent_state(run.place.bare, restore(found, run.tensors(), run.parameters, run.optimiser))
    run.mixture.load_state_dict(found.state["mixture"])
    run.counts = Counts(**found.state["counts"])
    return run.counts.step


def _check_same_run(run: Run, found: Checkpoint) -> None:
    """Raise `TrainingError` when a checkpoint is of a run with other settings."""
    saved, now = _flat(found.state["run"]), _flat(_identity(run))
    for key in sorted(saved.keys() | now.keys()):
        if saved.get(key) != now.get(key):
            raise TrainingError(
                f"The run in {run.out} has {key} = {saved.get(key)!r}, but now it is {now.get(key)!r}: "
                "set it back to resume, or choose another output folder."
            )
    if found.step > run.config.steps:
        raise TrainingError(
            f"The run in {run.out} has done {found.step} steps, but steps is {run.config.steps}: "
            "raise it, or choose another output folder."
        )


def _identity(run: Run) -> dict[str, Any]:
    """What must stay the same between a run and its resumption."""
    training = run.config.model_dump(mode="json", exclude=set(FREE_ON_RESUME))
    return {"training": training, **run.identity}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def save(run: Run, keep: int | None) -> Path:
    """Write a checkpoint with the state of all processes, and remove all but the newest `keep`.

    Raises:
        TrainingError: it can't be written; older ones are as before.
    """
    state_tensors = {f"{RECURRENT_STATE}{name}": tensor for name, tensor in recurrent_state(run.place.bare).items()}
    tensors, moments = gather_tensors(run.tensors() | state_tensors), gather_moments(run.parameters, run.optimiser)
    state = {
        "step": run.counts.step,
        "counts": asdict(run.counts),
        "run": _identity(run),
        "mixture": run.mixture.state_dict(),
    }
    problem = None
    if run.place.main:
        try:
            write_checkpoint(run.checkpoints, tensors, moments, state, keep)
        except TrainingError as error:
            problem = str(error)
    run.place.agree(problem)
    return run.checkpoints / f"step-{run.counts.step:06d}"
