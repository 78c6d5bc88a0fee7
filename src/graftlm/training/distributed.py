"""Devices, precision and processes of a training run, through Accelerate.

Every process draws the same global batch and takes its contiguous share of rows. Losses are sums over rows divided by
global counts, so they add up over processes. DDP and FSDP average gradients; `DistributedContext.backward` undoes that.
FSDP2 shards the model, which becomes plain again at the end of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from graftlm.errors import MissingExtraError, TrainingError, did_you_mean, first_line
from graftlm.training.config import TrainingConfig

SHORT = 128  # tokens, up to which a CPU's fused attention is the slower one in half precision


class LossModule(nn.Module):
    """A model whose forward pass gives the losses of a batch.

    DDP, FSDP and autocast wrap this module; the caller's model stays as it is. With `tie`, processes exchange all
    gradients even if they use different parameters.
    """

    def __init__(self, model: nn.Module, *, tie: bool) -> None:
        super().__init__()
        self.model = model
        self.tie = tie

    def forward(self, inputs: dict[str, Any], totals: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to differentiate, and (3,) detached: total, language modelling, auxiliary."""
        output = self.model(**inputs, totals=totals)
        loss = output.loss
        components = [loss.new_zeros(()) if p is None else p for p in (loss, output.lm_loss, output.auxiliary_loss)]
        if self.tie or not loss.requires_grad:  # add zero, as a function of every trainable parameter that is whole
            local = [p for p in self.model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
            loss = loss + torch.stack([p.reshape(-1)[:0].sum() for p in local]).sum()
        return loss, torch.stack([component.detach().float() for component in components])


@dataclass
class DistributedContext:
    """The processes and devices of a training run; `losses` wraps the caller's `model`, and gives losses."""

    accelerator: Accelerator
    losses: nn.Module
    model: nn.Module

    def share(self, rows: int) -> slice:
        """This process's rows of a global batch of `rows`."""
        size, index = rows // self.accelerator.num_processes, self.accelerator.process_index
        return slice(size * index, size * (index + 1))

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over processes."""
        return self.accelerator.reduce(values, "sum") if self.accelerator.num_processes > 1 else values  # type: ignore[return-value]

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a process's part of the loss."""
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def synchronize_gradients(self, now: bool) -> AbstractContextManager[Any]:
        """Exchange gradients in the backward passes of the block only if `now`."""
        if isinstance(self.losses, FSDPModule):
            self.losses.set_requires_gradient_sync(now)
            return nullcontext()
        return nullcontext() if now else self.accelerator.no_sync(self.losses)

    def attention(self, length: int) -> AbstractContextManager[Any]:
        """Plain attention in a block of short texts in half precision on a CPU: its backward pass is the faster one."""
        small = length <= SHORT and self.accelerator.device.type == "cpu"
        sizes = (p.element_size() for p in self.model.parameters() if p.is_floating_point())
        slow = small and (self.accelerator.mixed_precision != "no" or min(sizes) < 4)
        return sdpa_kernel(SDPBackend.MATH) if slow else nullcontext()

    def clip(self, limit: float | None) -> Tensor:
        """Scale gradients down to a global norm of `limit`; their norm before, a scalar.

        A parameter that took no part has a gradient of zero, as it has where only another process used it.
        """
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self.accelerator.clip_grad_norm_(trainable, float("inf") if limit is None else limit)
        return full_tensor(torch.as_tensor(norm, device=self.accelerator.device))

    def raise_together(self, problem: str | None) -> None:
        """Wait for all processes; if the main one has a `problem`, all raise `TrainingError`, the main one with it."""
        if self.sum(torch.tensor(float(problem is not None), device=self.accelerator.device)).item():
            raise TrainingError(problem or "The main process stopped the run: read its message.")


def check_tracker(name: str | None) -> None:
    """Raise a sentence where Accelerate does not know a tracker, or its package is absent."""
    known = {str(tracker) for tracker in LOGGER_TYPE_TO_CLASS}  # each is called as its package is
    if name is None:
        return
    if name not in known:
        raise TrainingError(f"Accelerate has no tracker {name!r}{did_you_mean(name, known)}.")
    try:
        import_module(name)
    except ImportError:
        if name == "tensorboard":
            raise MissingExtraError(name, "trackers", "Logging to a tracker") from None
        package = name.replace("_", "-")
        why = f"The tracker {name} needs the package {package}, which is not installed: run `pip install {package}`."
        raise TrainingError(why) from None


def start_tracker(accelerator: Accelerator, name: str, values: dict[str, Any]) -> None:
    """Begin a run of the tracker with the settings `values`; TrainingError if it refuses, as without a login."""
    try:
        accelerator.init_trackers("graftlm", config=values)
    except Exception as error:  # every tracker has its own
        way = "log in or configure it, or leave training.tracker out"
        raise TrainingError(f"The tracker {name} can't begin ({first_line(error)}): {way}.") from error


@contextmanager
def distributed(model: nn.Module, config: TrainingConfig, out: Path) -> Iterator[DistributedContext]:
    """Move `model` to its device, and wrap it for several processes; at the end every process has all of it again.

    Raises TrainingError if the processes can't share a batch, or Accelerate is already set up in another way, and
    TrainingError if Accelerate does not know the tracker, and MissingExtraError if the tracker's package is absent.
    """
    check_tracker(config.tracker)
    was_training = model.training
    with _accelerator(model, config, out) as accelerator:
        if config.batch_size % (processes := accelerator.num_processes):
            raise TrainingError(
                f"A batch_size of {config.batch_size} can't be shared evenly by {processes} processes: "
                f"use a multiple of {processes}."
            )
        model.to(accelerator.device).train()
        launched_for_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        sharded = processes > 1 and (config.sharded or launched_for_fsdp)
        losses = LossModule(model, tie=sharded)
        undo = shard(losses) if sharded else None
        try:
            yield DistributedContext(accelerator, losses if sharded else accelerator.prepare_model(losses), model)
            if undo:
                undo()
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()
            model.train(was_training)


@contextmanager
def _accelerator(model: nn.Module, config: TrainingConfig, out: Path) -> Iterator[Accelerator]:
    """An Accelerator that keeps a single process on the model's device, and leaves no global state."""
    ours, alone = not AcceleratorState._shared_state, int(os.environ.get("WORLD_SIZE", "1")) == 1
    if ours and alone:
        PartialState._reset_state()  # it may say another device
    on_cpu = next(model.parameters()).device.type == "cpu"
    try:
        accelerator = Accelerator(
            cpu=on_cpu and alone,
            mixed_precision="bf16" if config.precision == "bf16" else "no",
            log_with=config.tracker,
            project_dir=out,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)],
        )
    except ValueError as error:
        raise TrainingError(f"Accelerate is already set up in another way in this process ({error}).") from None
    try:
        yield accelerator
    finally:
        if not on_cpu:
            accelerator.free_memory()  # collects garbage for half a second; reference counts free it on a CPU
        if ours:
            AcceleratorState._reset_state(reset_partial_state=alone)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name. Raises TrainingError if there is none, or one is not in float32."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise TrainingError(
            "The model has no trainable parameters: attach a graft that trains, or set training.steps to 0 for one "
            "that learns without gradients."
        )
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise TrainingError(
                f"The parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but training needs float32: "
                "convert it, and set precision: bf16 for speed."
            )
    return parameters


def graft_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of grafts, such as running statistics, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.startswith("grafts.")}


def shard(root: nn.Module) -> Callable[[], None]:
    """Shard `root` in place: one group for each layer of `_no_split_modules`, one for the rest.

    Accelerate shards on GPUs only, so this calls `fully_shard` itself. Weights keep their dtype: bfloat16 comes from
    autocast. Quantised weights are replicated, since their tensor classes can't be split. All processes must call the
    returned function together: it gives each of them all weights again.
    """
    before = [  # with its attributes, and the ids of hooks in those that hold hooks
        (module, type(module), {key: set(value) if "_hooks" in key else set() for key, value in vars(module).items()})
        for module in root.modules()
    ]
    for parameter in root.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)
    replicated = {p for p in root.parameters() if type(p.data) is not Tensor or not p.is_floating_point()}
    layers = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in [*(module for module in root.modules() if type(module).__name__ in layers), root]:
        fully_shard(module, ignored_params=replicated)

    def undo() -> None:
        plain: dict[int, nn.Parameter] = {}  # keeps tied parameters tied
        for module, kind, attributes in before:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(parameter.data, DTensor):
                    if id(parameter) not in plain:
                        plain[id(parameter)] = nn.Parameter(full_tensor(parameter.data), parameter.requires_grad)
                    setattr(module, name, plain[id(parameter)])
            module.__class__ = kind
            for name, value in list(vars(module).items()):
                if name not in attributes:
                    del module.__dict__[name]
                elif "_hooks" in name:
                    for hook in set(value) - attributes[name]:
                        del value[hook]
            _composable_state._module_state_mapping.pop(module, None)  # else it can't be sharded again

    return undo


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """`full` on the device of `parameter`, sharded in the same way."""
    full = full.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
