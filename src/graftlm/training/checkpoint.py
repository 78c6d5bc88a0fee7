"""Checkpoints that survive a kill at any moment.

    OUT/checkpoints/step-000200/
        tensors.safetensors      trainable tensors, the grafts' buffers, and what a model carries over to the next step
        optimiser.safetensors    `parameter name/state name` -> tensor
        state.json               step, counts, config, mixture, and size and hash of the two files

A checkpoint is written under a hidden name, forced to disk, then renamed. What a kill leaves is never read, and removed
at the next start. Random numbers need no state: every step seeds its own. No pickle is written or read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from graftlm.errors import TrainingError
from graftlm.io import file_digest, sync
from graftlm.training.sharding import like, whole

TENSORS, OPTIMISER, STATE = "tensors.safetensors", "optimiser.safetensors", "state.json"
RECURRENT_STATE = "recurrent_state/"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk and what its `state.json` says."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state["step"]


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: dict[str, Any], keep: int | None
) -> Path:
    """Write `folder/step-N` and, unless `keep` is None, remove all but the newest `keep`.

    Raises:
        TrainingError: the disk is full or can't be written; older checkpoints are as before.
    """
    target = folder / f"step-{state['step']:06d}"
    draft = folder / f".{target.name}.tmp"
    try:
        if _read(target) is None:
            _write_draft(draft, tensors, moments, state)
            draft.replace(target)
            sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise TrainingError(
            f"The checkpoint {target} can't be written ({reason}), and earlier ones are intact: "
            "free space or mend the disk, then run the same command to resume."
        ) from None
    if keep is not None:
        for old in _folders(folder)[:-keep]:
            shutil.rmtree(old)
    return target


def _write_draft(
    draft: Path, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: dict[str, Any]
) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file(dict(tensors), draft / TENSORS)
    save_file(dict(moments), draft / OPTIMISER)
    files = {name: _seal(draft / name) for name in (TENSORS, OPTIMISER)}
    (draft / STATE).write_text(json.dumps({**state, "files": files}, indent=1), encoding="utf-8")
    sync(draft / STATE)
    sync(draft)


def _seal(path: Path) -> dict[str, Any]:
    sync(path)
    return _measure(path)


def _measure(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`."""
    for path in reversed(_folders(folder)):
        if (found := _read(path)) is not None:
            return found
    return None


def remove_torn(folder: Path) -> None:
    """Remove what killed runs left half written in `folder`."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)
    for path in _folders(folder):
        if _read(path) is None:
            shutil.rmtree(path)


def remove_all(folder: Path) -> None:
    """Remove every checkpoint in `folder`."""
    for path in [*folder.glob(".step-*.tmp"), *_folders(folder)]:
        shutil.rmtree(path)


def _folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _read(path: Path) -> Checkpoint | None:
    """The checkpoint at `path` if it is whole."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        is_whole = all(_measure(path / name) == measure for name, measure in state["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return Checkpoint(path, state) if is_whole else None


def gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full copies in main memory; with sharded tensors all processes must call this together."""
    return {name: _keep(tensor) for name, tensor in tensors.items()}


def gather_moments(parameters: Mapping[str, nn.Parameter], optimiser: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, by `parameter name/state name`; collective as `gather_tensors`."""
    states = {name: optimiser.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {f"{name}/{key}": _keep(value) for name, state in states.items() for key, value in state.items()}


def _keep(tensor: Tensor) -> Tensor:
    return whole(tensor.detach()).to("cpu", copy=True).contiguous()


@torch.no_grad()
def restore(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], optimiser: Optimizer
) -> dict[str, Tensor]:
    """Put a checkpoint's values into the model's `tensors` and the optimiser; return the recurrent state.

    Raises:
        TrainingError: the checkpoint is of other tensors.
    """
    saved = load_file(checkpoint.path / TENSORS)
    recurrent = {name: saved.pop(name) for name in list(saved) if name.startswith(RECURRENT_STATE)}
    _check_shapes(checkpoint.path, saved, tensors)
    for name, tensor in tensors.items():
        tensor.copy_(like(saved[name], tensor))
    optimiser.state.clear()
    for key, value in load_file(checkpoint.path / OPTIMISER).items():
        name, _, part = key.rpartition("/")
        parameter = parameters[name]
        on_device = value.to(parameter.device) if value.ndim == 0 < parameter.ndim else like(value, parameter)
        optimiser.state[parameter][part] = on_device
    return {name.removeprefix(RECURRENT_STATE): tensor for name, tensor in recurrent.items()}


def _check_shapes(path: Path, saved: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise TrainingError(
                f"The checkpoint {path} has {_shape(found.get(name))} for {name}, but the model has "
                f"{_shape(expected.get(name))}: use another output folder, or resume=False to start over."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else f"shape {list(shape)}"
