"""Checkpoints that survive a kill at any moment, and the log of a run.

    OUT/history.jsonl                one JSON line a logged step
    OUT/checkpoints/step-000200/
        tensors.safetensors          trainable tensors, the grafts' buffers, a streaming model's recurrent state
        optimizer.safetensors        `parameter name/state name` -> tensor
        state.json                   step, counts, config, data position, and size and hash of the two files

An incomplete checkpoint is never read; the next start removes it. Random number generators need no state: every step
seeds its own. No pickle is written or read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
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
from graftlm.files.writing import staged_folder, write_errors
from graftlm.training.config import FREE_ON_RESUME, TrainingConfig
from graftlm.training.distributed import DistributedContext, full_tensor, graft_buffers, shard_like

HISTORY, TENSORS, OPTIMIZER, STATE = "history.jsonl", "tensors.safetensors", "optimizer.safetensors", "state.json"
RECURRENT = "recurrent_state/"
_REMEDY = "free space, then run the same command to resume"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, and the content of its `state.json`."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state["step"]


@dataclass
class TrainingCounts:
    """What a run has done so far, over all its resumptions.

    Attributes:
        step: updates done.
        tokens: input tokens read, without padding.
        loss: loss of the last step.
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
class TrainingState:
    """A model in training, with everything that its checkpoints hold."""

    context: DistributedContext
    batches: Batches
    config: TrainingConfig
    out: Path
    identity: Mapping[str, Any]
    parameters: dict[str, nn.Parameter]
    optimizer: AdamW
    counts: TrainingCounts = field(default_factory=TrainingCounts)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **graft_buffers(self.context.model)}

    def run_identity(self) -> dict[str, Any]:
        """What a resumed run must share with the run that wrote a checkpoint."""
        return {"training": self.config.model_dump(mode="json", exclude=FREE_ON_RESUME), **self.identity}


def recurrent_state(model: nn.Module) -> dict[str, Tensor]:
    """The state that a streaming model keeps from step to step, by name; empty for other models."""
    method = getattr(model, "recurrent_state", None)
    return cast("dict[str, Tensor]", method()) if callable(method) else {}


def set_recurrent_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a streaming model its state back."""
    if callable(method := getattr(model, "set_recurrent_state", None)):
        method(tensors)


def resume_from_checkpoint(state: TrainingState, resume: bool) -> int | None:
    """Load the newest checkpoint into `state`; gives its step, or None where there is no checkpoint.

    Raises TrainingError if the checkpoint belongs to a run with other settings.
    """
    if state.context.accelerator.is_main_process:
        state.checkpoints.mkdir(parents=True, exist_ok=True)
        for path in [*state.checkpoints.glob(".step-*"), *_folders(state.checkpoints)]:
            if not resume or path.name.startswith(".") or _read(path) is None:
                shutil.rmtree(path)
    state.context.accelerator.wait_for_everyone()
    if (checkpoint := newest_checkpoint(state.checkpoints)) is None:
        return None
    _check_same_run(state, checkpoint)
    _restore(state, checkpoint.path)
    state.batches.load_state_dict(checkpoint.state["mixture"])
    state.counts = TrainingCounts(**checkpoint.state["counts"])
    return state.counts.step


def save_checkpoint(state: TrainingState, keep: int | None) -> Path:
    """Write a checkpoint with the state of all processes and, unless `keep` is None, remove all but the newest `keep`.

    Raises TrainingError if it can't be written. Older checkpoints are as before.
    """
    recurrent = {f"{RECURRENT}{name}": tensor for name, tensor in recurrent_state(state.context.model).items()}
    moments = {
        f"{name}/{key}": value
        for name, parameter in state.parameters.items()
        for key, value in state.optimizer.state.get(parameter, {}).items()
    }
    # All processes must copy together: a sharded tensor is gathered from all of them.
    files = {TENSORS: _copies(state.tensors() | recurrent), OPTIMIZER: _copies(moments)}
    target = state.checkpoints / f"step-{state.counts.step:06d}"
    problem = None
    if state.context.accelerator.is_main_process:
        try:
            if _read(target) is None:
                _write(state, target, files)
        except (OSError, SafetensorError) as error:
            problem = (
                f"The checkpoint {target} can't be written ({getattr(error, 'strerror', None) or error}), and earlier "
                "ones are intact: free space or mend the disk, then run the same command to resume."
            )
        else:
            for old in _folders(state.checkpoints)[:-keep] if keep else ():
                shutil.rmtree(old)
    state.context.raise_together(problem)
    return target


def _write(state: TrainingState, target: Path, files: Mapping[str, dict[str, Tensor]]) -> None:
    with staged_folder(target) as draft:
        draft.mkdir()
        for name, tensors in files.items():
            save_file(tensors, draft / name)
        values = {
            "step": state.counts.step,
            "counts": asdict(state.counts),
            "run": state.run_identity(),
            "mixture": state.batches.state_dict(),
            "files": {name: _describe(draft / name) for name in files},
        }
        (draft / STATE).write_text(json.dumps(values, indent=1), encoding="utf-8")


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unsharded copies in main memory."""
    return {name: full_tensor(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def stop_before_step(
    state: TrainingState, buffers: Mapping[str, Tensor], recurrent: Mapping[str, Tensor], loss: float, norm: float
) -> NoReturn:
    """Save the state before a step whose loss or gradient is not finite, and raise.

    The step has not updated the weights; `buffers` and the `recurrent` state are as they were before it.

    Raises TrainingError if always.
    """
    set_recurrent_state(state.context.model, recurrent)
    state.optimizer.zero_grad()
    with torch.no_grad():
        for name, buffer in graft_buffers(state.context.model).items():
            buffer.copy_(buffers[name])
    path = save_checkpoint(state, keep=None)
    cause = f"loss is {loss}" if not math.isfinite(loss) else f"gradient's norm is {norm}"
    raise TrainingError(
        f"In step {state.counts.step + 1} the {cause}, so training stopped with the weights before it, kept in {path}: "
        f"start over with a learning_rate below {state.config.learning_rate:g} or more warmup_steps."
    )


def _check_same_run(state: TrainingState, checkpoint: Checkpoint) -> None:
    saved, current = flatten_dict(checkpoint.state["run"]), flatten_dict(state.run_identity())
    for key in sorted(saved.keys() | current.keys()):
        if saved.get(key) != current.get(key):
            raise TrainingError(
                f"The run in {state.out} has {key} = {saved.get(key)!r}, but now it is {current.get(key)!r}: "
                "set it back to resume, or choose another output folder."
            )
    if checkpoint.step > state.config.steps:
        raise TrainingError(
            f"The run in {state.out} has done {checkpoint.step} steps, but steps is {state.config.steps}: "
            "raise it, or choose another output folder."
        )


class History:
    """`history.jsonl` of a run, cut to its first `steps` steps. Lines are written at once; `sync` flushes them to disk.

    Raises TrainingError if the disk is full or can't be written.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        lines = [line for line in read_history(path) if line["step"] <= steps]
        draft = path.with_suffix(".tmp")
        with write_errors(path, TrainingError, _REMEDY):
            draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            draft.replace(path)
            self._file = path.open("a", encoding="utf-8")

    def append(self, line: dict[str, Any]) -> None:
        with write_errors(self.path, TrainingError, _REMEDY):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # closing writes again what `append` could not write
            self._file.close()


def read_history(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a history; a kill may have cut the last one."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    values: list[dict[str, Any]] = []
    with suppress(ValueError):
        values.extend(map(json.loads, lines))
    return values


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in `folder`."""
    return next(filter(None, map(_read, reversed(_folders(folder)))), None)


def _folders(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def _read(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None if it is incomplete."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        complete = all(_describe(path / name) == measure for name, measure in state["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return Checkpoint(path, state) if complete else None


@torch.no_grad()
def _restore(state: TrainingState, path: Path) -> None:
    """Load a checkpoint's tensors into the model and the optimizer."""
    saved = load_file(path / TENSORS)
    recurrent = {name.removeprefix(RECURRENT): saved.pop(name) for name in list(saved) if name.startswith(RECURRENT)}
    tensors = state.tensors()
    actual, expected = ({name: list(tensor.shape) for name, tensor in each.items()} for each in (saved, tensors))
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            there, here = (f"shape {each[name]}" if name in each else "nothing" for each in (actual, expected))
            raise TrainingError(
                f"The checkpoint {path} has {there} for {name}, but the model has {here}: "
                "use another output folder, or resume=False to start over."
            )
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(saved[name], tensor))
    state.optimizer.state.clear()
    for key, value in load_file(path / OPTIMIZER).items():
        name, _, field_name = key.rpartition("/")
        parameter = state.parameters[name]
        on_device = value.to(parameter.device) if value.ndim == 0 < parameter.ndim else shard_like(value, parameter)
        state.optimizer.state[parameter][field_name] = on_device
    set_recurrent_state(state.context.model, recurrent)
