"""Where a run takes place: devices, precision and processes, through Accelerate.

Every process draws the same global batch and takes its contiguous share of rows. Losses are sums over rows divided by
global counts, so they add up over processes; DDP and FSDP average gradients, which `backward` undoes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from graftlm.errors import MissingExtraError, TrainingError
from graftlm.training.config import TrainingConfig
from graftlm.training.sharding import shard, whole


class Losses(nn.Module):
    """A model as what training needs of it: a batch's losses.

    This, not the model, is what DDP, FSDP and autocast wrap, so the caller's object stays as it is.
    """

    def __init__(self, model: nn.Module, *, tie: bool) -> None:
        """With `tie`, processes that use different parameters still exchange the gradients of all."""
        super().__init__()
        self.model = model
        self.tie = tie

    def forward(self, inputs: dict[str, Any], totals: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to differentiate, and (3,) detached: whole, LM, auxiliary."""
        output = self.model(**inputs, totals=totals)
        loss = output.loss
        parts = [loss.new_zeros(()) if p is None else p for p in (loss, output.lm_loss, output.auxiliary_loss)]
        if self.tie or not loss.requires_grad:
            loss = loss + self._nothing()
        return loss, torch.stack([part.detach().float() for part in parts])

    def _nothing(self) -> Tensor:
        """Zero, as a function of every trainable parameter at hand."""
        at_hand = [p for p in self.model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        return torch.stack([p.reshape(-1)[:0].sum() for p in at_hand]).sum()


@dataclass
class Place:
    """Where a run takes place, and `losses`, the model there."""

    accelerator: Accelerator
    losses: nn.Module
    bare: nn.Module

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def share(self, rows: int) -> slice:
        """This process's rows of a global batch of `rows`."""
        each = rows // self.accelerator.num_processes
        return slice(each * self.accelerator.process_index, each * (self.accelerator.process_index + 1))

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` over processes."""
        return self.accelerator.reduce(values, "sum") if self.accelerator.num_processes > 1 else values  # type: ignore[return-value]

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a process's part of the loss."""
        self.accelerator.backward(loss * self.accelerator.num_processes)

    @contextmanager
    def synchronising(self, now: bool) -> Iterator[None]:
        """Exchange gradients in the backward passes inside only if `now`."""
        if isinstance(self.losses, FSDPModule):
            self.losses.set_requires_gradient_sync(now)
            yield
        elif now:
            yield
        else:
            with self.accelerator.no_sync(self.losses):
                yield

    def clip(self, limit: float | None) -> Tensor:
        """Scale gradients down to a global norm of `limit`; their norm before, a scalar.

        A parameter that took no part has a gradient of zero, as it has where only another process used it.
        """
        trainable = [p for p in self.bare.parameters() if p.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self.accelerator.clip_grad_norm_(trainable, float("inf") if limit is None else limit)
        return whole(torch.as_tensor(norm, device=self.device))

    def agree(self, problem: str | None) -> None:
        """Wait for all processes; if the main one met a `problem`, all raise it.

        Raises:
            TrainingError: with the main process's sentence, or a pointer to it in the others.
        """
        failed = self.total(torch.tensor(float(problem is not None), device=self.device)).item()
        if failed:
            raise TrainingError(problem or "The main process stopped the run: read its message.")


@contextmanager
def placed(model: nn.Module, config: TrainingConfig, out: Path) -> Iterator[Place]:
    """Put `model` where it trains; afterwards it is the caller's again, whole in every process.

    Raises:
        TrainingError: the processes can't share a batch, or Accelerate is already set up in another way.
        MissingExtraError: the tracker's package is absent.
    """
    _check_tracker(config)
    was_training = model.training
    with _accelerator(model, config, out) as accelerator:
        _check_shares(config, accelerator.num_processes)
        model.to(accelerator.device).train()
        sharded = accelerator.num_processes > 1 and (config.sharded or _launched_for_fsdp())
        losses = Losses(model, tie=sharded)
        undo = shard(losses) if sharded else None
        try:
            yield Place(accelerator, losses if sharded else accelerator.prepare_model(losses), model)
            if undo:
                undo()
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()
            model.train(was_training)


@contextmanager
def _accelerator(model: nn.Module, config: TrainingConfig, out: Path) -> Iterator[Accelerator]:
    """An Accelerator that keeps one process on the model's device, and leaves no global state behind."""
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
        accelerator.free_memory()
        if ours:
            AcceleratorState._reset_state(reset_partial_state=alone)


def _check_shares(config: TrainingConfig, processes: int) -> None:
    if config.batch_size % processes:
        raise TrainingError(
            f"A batch_size of {config.batch_size} can't be shared evenly by {processes} processes: "
            f"use a multiple of {processes}."
        )


def _check_tracker(config: TrainingConfig) -> None:
    if config.tracker is None:
        return
    try:
        __import__(config.tracker)
    except ImportError:
        raise MissingExtraError(config.tracker, "trackers", "Logging to a tracker") from None


def _launched_for_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name.

    Raises:
        TrainingError: there is none, or one is not in float32.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise TrainingError(
            "The model has no trainable parameters: attach a graft that trains, or set training.steps to 0 for one "
            "that learns without gradients."
        )
    for name, parameter in found.items():
        if parameter.dtype != torch.float32:
            raise TrainingError(
                f"The parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but training needs float32: "
                "convert it, and set precision: bf16 for speed."
            )
    return found


def graft_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics that grafts keep beside their parameters, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.startswith("grafts.")}
