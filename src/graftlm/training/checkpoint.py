"""Checkpoints that survive a kill at any moment.

    OUT/history.jsonl                one JSON line for each logged step, see `training.history`
    OUT/checkpoints/step-000200/
        tensors.safetensors          trainable tensors, the grafts' buffers, a streaming model's recurrent state
        optimizer.safetensors        `parameter name/state name` -> tensor
        state.json                   step, counts, config, data position, and size and hash of the two files

An incomplete checkpoint is never read, and the next start removes it. The state of random number generators is not
saved, since every step seeds them. No pickle is written or read.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.utils.generic import flatten_dict

from graftlm.data.mixture import Batches
from graftlm.errors import TrainingError
from graftlm.files.digests import file_digest
from graftlm.files.writing import staged_folder
from graftlm.training.config import FREE_ON_RESUME, TrainingConfig
from graftlm.training.distributed import DistributedContext, graft_buffers
from graftlm.training.sharding import full_tensor, shard_like
from graftlm.training.upcoming import UpcomingBatches

TENSORS = "tensors.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
RECURRENT = "recurrent_state/"
"""Prefix of the names of a streaming model's recurrent state."""
_DIGEST = re.compile(r"[0-9a-f]{12}|[0-9a-f]{64}")
"""Digests of models and of texts, which tell a reader nothing."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: folder of the checkpoint.
        state: the content of its `state.json`.
    """

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.state["step"]


@dataclass
class TrainingCounts:
    """The progress of a run, over all its resumptions.

    Attributes:
        step: number of updates done.
        tokens: number of input tokens read, without padding.
        rows_without_target: number of rows read that had no token to predict.
        steps_without_target: number of updates whose rows had none.
        loss: loss of the last step, in nats per token; None before the first step.
        timed_tokens: tokens of the steps that `seconds` covers: all but the first after each start.
        seconds: duration of those steps, without checkpoints.
        all_seconds: duration of all steps, without checkpoints.
    """

    step: int = 0
    tokens: int = 0
    rows_without_target: int = 0
    steps_without_target: int = 0
    loss: float | None = None
    timed_tokens: int = 0
    seconds: float = 0.0
    all_seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Input tokens per second of the timed steps; 0 before there is one."""
        return self.timed_tokens / self.seconds if self.seconds else 0.0


@dataclass
class TrainingState:
    """A model in training, with everything that its checkpoints contain.

    Attributes:
        context: the processes, devices and the model.
        batches: the global batches, whose position is saved.
        config: the training section.
        out: folder of the history and the checkpoints.
        identity: plain JSON values that a resumed run must share.
        parameters: the trainable parameters by name.
        optimizer: the optimizer of these parameters.
        counts: the progress of the run.
        upcoming: the batches in the order of steps.
    """

    context: DistributedContext
    batches: Batches
    config: TrainingConfig
    out: Path
    identity: Mapping[str, object]
    parameters: dict[str, nn.Parameter]
    optimizer: AdamW
    counts: TrainingCounts = field(default_factory=TrainingCounts)

    def __post_init__(self) -> None:
        self.upcoming = UpcomingBatches(self.batches)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.out / "checkpoints"

    def tensors(self) -> dict[str, Tensor]:
        """Return the trainable parameters and the grafts' buffers, by name and without copying them."""
        return {**self.parameters, **graft_buffers(self.context.model)}

    def run_identity(self) -> dict[str, object]:
        """Return the settings, as plain JSON values, that a resumed run must share with the run before."""
        return {"training": self.config.model_dump(mode="json", exclude=FREE_ON_RESUME), **self.identity}


def recurrent_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state that a streaming model keeps from step to step, by name; empty for other models."""
    method = getattr(model, "recurrent_state", None)
    return cast("dict[str, Tensor]", method()) if callable(method) else {}


def set_recurrent_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that `recurrent_state` returned; models without such a state are left unchanged."""
    method = getattr(model, "set_recurrent_state", None)
    if callable(method):
        method(tensors)


# Reading


def resume_from_checkpoint(state: TrainingState, *, resume: bool) -> int | None:
    """Load the newest complete checkpoint, and remove incomplete ones. All processes must call this together.

    Args:
        state: the state whose tensors, optimizer, batches and counts are set.
        resume: False removes all checkpoints and loads none.

    Returns:
        The step of the checkpoint; None if there is none.

    Raises:
        TrainingError: the checkpoint belongs to a run with other settings, has more steps than the training section, or
            has other tensors than the model.
    """
    if state.context.accelerator.is_main_process:
        state.checkpoints.mkdir(parents=True, exist_ok=True)
        for draft in state.checkpoints.glob(".step-*"):
            shutil.rmtree(draft)
        for folder in _folders(state.checkpoints):
            if not resume or _read(folder) is None:
                shutil.rmtree(folder)
    state.context.accelerator.wait_for_everyone()
    checkpoint = newest_checkpoint(state.checkpoints)
    if checkpoint is None:
        return None
    _check_same_run(state, checkpoint)
    _restore(state, checkpoint.path)
    state.batches.load_state_dict(checkpoint.state["mixture"])
    state.counts = TrainingCounts(**checkpoint.state["counts"])
    return state.counts.step


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in a folder; None if there is none."""
    for path in reversed(_folders(folder)):
        checkpoint = _read(path)
        if checkpoint is not None:
            return checkpoint
    return None


def _folders(folder: Path) -> list[Path]:
    """Return the folders of complete and incomplete checkpoints, in the order of their steps."""
    paths = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(paths, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path`; None if it is incomplete."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        for name, description in state["files"].items():
            if _describe(path / name) != description:
                return None
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return Checkpoint(path, state)


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _check_same_run(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Raise `TrainingError` if a checkpoint was written with other settings or has more steps than the run."""
    saved = flatten_dict(checkpoint.state["run"])
    current = flatten_dict(state.run_identity())
    for key in sorted(saved.keys() | current.keys()):
        if saved.get(key) != current.get(key):
            raise _other_run(state.out, key, saved.get(key), current.get(key))
    if checkpoint.step > state.config.steps:
        raise TrainingError(
            f"The run in {state.out} has reached step {checkpoint.step}, but training.steps is {state.config.steps}: "
            "raise training.steps, or choose another output folder."
        )


def _other_run(out: Path, key: str, before: object, now: object) -> TrainingError:
    """Return the error for a setting that a run's checkpoint has otherwise."""
    if all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (before, now)):
        return TrainingError(
            f"The run in {out} was begun with another content of {key} than it has now: restore that content to "
            "resume, or choose another output folder."
        )
    return TrainingError(
        f"The run in {out} has {key} = {before!r}, but now it is {now!r}: set it back to resume, or choose another "
        "output folder."
    )


@torch.no_grad()
def _restore(state: TrainingState, path: Path) -> None:
    """Load a checkpoint's tensors into the model and the optimizer."""
    saved = {}
    recurrent = {}
    for name, tensor in load_file(path / TENSORS).items():
        if name.startswith(RECURRENT):
            recurrent[name.removeprefix(RECURRENT)] = tensor
        else:
            saved[name] = tensor
    tensors = state.tensors()
    _check_shapes(path, saved, tensors)
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(saved[name], tensor))
    _restore_optimizer(state, path)
    set_recurrent_state(state.context.model, recurrent)


def _check_shapes(path: Path, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise `TrainingError` if a tensor is missing on either side or has another shape."""

    def form(tensors: Mapping[str, Tensor], name: str) -> str:
        return f"shape {list(tensors[name].shape)}" if name in tensors else "nothing"

    for name in sorted(saved.keys() | expected.keys()):
        there = form(saved, name)
        here = form(expected, name)
        if there != here:
            raise TrainingError(
                f"The checkpoint {path} has {there} for {name}, but the model has {here}: "
                f"choose another output folder, or remove {path.parent} to start over."
            )


def _restore_optimizer(state: TrainingState, path: Path) -> None:
    """Load the optimizer's state, sharded like its parameters."""
    state.optimizer.state.clear()
    for key, value in load_file(path / OPTIMIZER).items():
        name, _, field_name = key.rpartition("/")
        parameter = state.parameters[name]
        is_count = value.ndim == 0 and parameter.ndim > 0
        if is_count:
            value = value.to(parameter.device)
        else:
            value = shard_like(value, parameter)
        state.optimizer.state[parameter][field_name] = value


# Writing


def save_checkpoint(
    state: TrainingState,
    keep: int | None,
    position: Callable[[], dict[str, object]] | None = None,
) -> Path:
    """Write a checkpoint with the state of all processes. All processes must call this together.

    Args:
        state: the state to save.
        keep: number of newest checkpoints to keep; None and 0 remove none.
        position: returns the position in the data to save, as plain JSON values; None saves the present one.

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: the checkpoint can't be written. All processes raise it, and older checkpoints are unchanged.
    """
    # All processes copy together, since a sharded tensor is gathered from all of them.
    files = {TENSORS: _copies(_saved_tensors(state)), OPTIMIZER: _copies(_optimizer_tensors(state))}
    target = state.checkpoints / f"step-{state.counts.step:06d}"
    problem = None
    if state.context.accelerator.is_main_process:
        try:
            if _read(target) is None:
                read_position = position or state.upcoming.state_dict
                _write(state, target, files, read_position())
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = (
                f"The checkpoint {target} can't be written ({reason}), and earlier ones are intact: free space or "
                "repair the disk, then run the same command to resume."
            )
        else:
            if keep:
                for old in _folders(state.checkpoints)[:-keep]:
                    shutil.rmtree(old)
    state.context.raise_together(problem)
    return target


def _saved_tensors(state: TrainingState) -> dict[str, Tensor]:
    tensors = state.tensors()
    for name, tensor in recurrent_state(state.context.model).items():
        tensors[f"{RECURRENT}{name}"] = tensor
    return tensors


def _optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in state.parameters.items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return unsharded copies in main memory."""
    return {name: full_tensor(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _write(
    state: TrainingState,
    target: Path,
    files: Mapping[str, dict[str, Tensor]],
    position: Mapping[str, object],
) -> None:
    """Write the files of a checkpoint into a draft that replaces `target` at once.

    Args:
        state: the state to save.
        target: folder of the checkpoint.
        files: the tensors by the name of their file.
        position: the position in the data, as plain JSON values.
    """
    with staged_folder(target) as draft:
        draft.mkdir()
        for name, tensors in files.items():
            save_file(tensors, draft / name)
        values = {
            "step": state.counts.step,
            "counts": asdict(state.counts),
            "run": state.run_identity(),
            "mixture": position,
            "files": {name: _describe(draft / name) for name in files},
        }
        (draft / STATE).write_text(json.dumps(values, indent=1), encoding="utf-8")


def stop_before_step(
    state: TrainingState,
    buffers: Mapping[str, Tensor],
    recurrent: Mapping[str, Tensor],
    position: Callable[[], dict[str, object]],
    loss: float,
    norm: float,
) -> NoReturn:
    """Save the state before a step whose loss or gradient is not finite, and raise.

    Args:
        state: the state; the step has not updated the weights.
        buffers: the grafts' buffers before the step, by name.
        recurrent: the recurrent state before the step.
        position: returns the position in the data before the step, as plain JSON values.
        loss: the step's loss; the norm is named as the cause if this is finite.
        norm: the norm of the step's gradient.

    Raises:
        TrainingError: always.
    """
    set_recurrent_state(state.context.model, recurrent)
    state.optimizer.zero_grad()
    with torch.no_grad():
        for name, buffer in graft_buffers(state.context.model).items():
            buffer.copy_(buffers[name])
    path = save_checkpoint(state, keep=None, position=position)
    cause = f"gradient's norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
    raise TrainingError(
        f"In step {state.counts.step + 1} the {cause}, so training stopped, with the weights before that step saved in "
        f"{path}: start over in another output folder, with a learning_rate below {state.config.learning_rate:g} or "
        "more warmup_steps."
    )
