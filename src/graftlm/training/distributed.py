"""Devices, precision and processes of a training run, through Accelerate.

Every process draws the same global batch and takes its contiguous share of rows. Losses are sums over rows divided by
global counts, so they add up over processes. DDP and FSDP average gradients; `DistributedContext.backward` undoes that.
FSDP2 shards the model, which becomes plain again at the end of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from graftlm.errors import TrainingError, first_line
from graftlm.processes import is_launched, on_cpu_only
from graftlm.training.compiling import compiled
from graftlm.training.config import TrainingConfig
from graftlm.training.sharding import full_tensor, shard
from graftlm.training.tracking import check_tracker

SHORT = 128
"""Number of tokens up to which fused attention is slower than plain attention on a CPU in half precision."""


class LossModule(nn.Module):
    """A model whose forward pass returns the losses of a batch.

    DDP, FSDP and autocast wrap this module, so the caller's model is not changed.

    Args:
        model: the model to train.
        tie: make the loss depend on every trainable parameter. Processes then exchange all gradients even if they use
            different parameters.
    """

    def __init__(self, model: nn.Module, *, tie: bool) -> None:
        super().__init__()
        self.model = model
        self.tie = tie
        self._options = {"return_logits": False} if getattr(model, "can_omit_logits", False) else {}

    def forward(self, inputs: Mapping[str, object], totals: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the losses.

        Args:
            inputs: keyword arguments of the model.
            totals: (1 + domains,) counts over the whole optimizer step: target tokens, then input tokens of each
                domain.

        Returns:
            The loss to differentiate, a scalar, and the detached total, language-modeling and auxiliary loss, (3,) in
            float32. A loss that the model does not compute is 0.
        """
        output = self.model(**inputs, totals=totals, **self._options)
        loss = output.loss
        zero = loss.new_zeros(())
        components = [zero if part is None else part for part in (loss, output.lm_loss, output.auxiliary_loss)]
        if self.tie or not loss.requires_grad:
            loss = loss + self._zero_of_parameters()
        return loss, torch.stack([component.detach().float() for component in components])

    def _zero_of_parameters(self) -> Tensor:
        """Return zero as a function of every trainable parameter that is not sharded."""
        zero = torch.zeros((), device=next(self.model.parameters()).device)
        for parameter in self.model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                zero = zero + parameter.reshape(-1)[:0].sum()
        return zero


@dataclass
class DistributedContext:
    """The processes and devices of a training run.

    Attributes:
        accelerator: Accelerate's state.
        losses: a `LossModule` of the model, prepared for the processes.
        model: the caller's model.
    """

    accelerator: Accelerator
    losses: nn.Module
    model: nn.Module

    def share(self, rows: int) -> slice:
        """Return the rows of a global batch on which this process trains.

        Args:
            rows: number of rows of the global batch, a multiple of the number of processes.
        """
        size = rows // self.accelerator.num_processes
        index = self.accelerator.process_index
        return slice(size * index, size * (index + 1))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, which must call this together."""
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values, "sum")  # type: ignore[return-value]

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's part of the global loss.

        Args:
            loss: a scalar; the global loss is the sum of the parts of all processes.
        """
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def synchronize_gradients(self, now: bool) -> AbstractContextManager[None]:
        """Return a context that controls whether backward passes exchange gradients between processes.

        Args:
            now: False postpones the exchange, so that gradients are accumulated first.
        """
        if isinstance(self.losses, FSDPModule):
            self.losses.set_requires_gradient_sync(now)
            return nullcontext()
        return nullcontext() if now else self.accelerator.no_sync(self.losses)

    def attention(self, length: int) -> AbstractContextManager[object]:
        """Return a context that selects plain attention for short rows in half precision on a CPU.

        Its backward pass is faster there than that of fused attention. Elsewhere the context changes nothing.

        Args:
            length: tokens per row.
        """
        if length > SHORT or self.accelerator.device.type != "cpu":
            return nullcontext()
        sizes = [p.element_size() for p in self.model.parameters() if p.is_floating_point()]
        in_half_precision = self.accelerator.mixed_precision != "no" or min(sizes) < 4
        return sdpa_kernel(SDPBackend.MATH) if in_half_precision else nullcontext()

    def clip(self, limit: float | None) -> Tensor:
        """Scale all gradients in place by one factor where their global norm exceeds a limit.

        A missing gradient, of a parameter that the step did not use, becomes zero. It is zero as well where only
        another process used the parameter.

        Args:
            limit: the maximum norm; None scales nothing.

        Returns:
            The norm before scaling, a scalar on the process's device.
        """
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self.accelerator.clip_grad_norm_(trainable, float("inf") if limit is None else limit)
        return full_tensor(torch.as_tensor(norm, device=self.accelerator.device))

    def raise_together(self, problem: str | None) -> None:
        """Wait for all processes, and raise in all of them if the main process has a problem.

        Args:
            problem: the message of the main process; None if there is no problem.

        Raises:
            TrainingError: the main process has a problem.
        """
        has_problem = torch.tensor(float(problem is not None), device=self.accelerator.device)
        if self.sum(has_problem).item():
            raise TrainingError(problem or "The main process stopped the run: read its message.")


@contextmanager
def distributed(model: nn.Module, config: TrainingConfig, out: Path) -> Iterator[DistributedContext]:
    """Move a model to its device in training mode, and wrap it for several processes.

    At the end of the block every process has the whole model again, the mode of the model is restored, and trackers
    are finished.

    Args:
        model: the model to train.
        config: the training section.
        out: folder for the files of a tracker.

    Yields:
        The processes and devices, with the wrapped model.

    Raises:
        TrainingError: torch.compile fails, `batch_size` is not a multiple of the number of processes, the model can't
            be sharded as the config asks, Accelerate rejects the precision or was already set up differently in this
            process, or it has no such tracker or the tracker's package is not installed.
        MissingExtraError: the tracker is TensorBoard, which is not installed.
    """
    check_tracker(config.tracker)
    was_training = model.training
    with _accelerator(model, config, out) as accelerator:
        processes = accelerator.num_processes
        if config.batch_size % processes:
            raise TrainingError(
                f"A batch_size of {config.batch_size} can't be shared evenly by {processes} processes: use a multiple "
                f"of {processes}."
            )
        launched_for_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        sharded = processes > 1 and (config.sharded or launched_for_fsdp)
        if sharded:
            _check_sharding(model)
        model.to(accelerator.device).train()
        losses: nn.Module = LossModule(model, tie=sharded)
        undo = shard(losses) if sharded else None
        try:
            if not sharded:
                losses = accelerator.prepare_model(losses)
            with compiled(model, wanted=config.compile):
                yield DistributedContext(accelerator, losses, model)
            if undo is not None:
                undo()
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()
            model.train(was_training)


def _check_sharding(model: nn.Module) -> None:
    """Raise `TrainingError` for a model that would train otherwise, or not at all, if its weights were sharded."""
    if getattr(model, "reads_bare_model", False):
        raise TrainingError(
            "training.sharded is true, but the bare backbone, which each process runs because data.old_objective is "
            "distil or data.anchor is above 0, can't be sharded: change these keys, or set sharded to false."
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter._backward_hooks:
            raise TrainingError(
                f"training.sharded is true, but the method changes the whole gradient of {name}, of which each process "
                "would have a part: set training.sharded to false."
            )


@contextmanager
def _accelerator(model: nn.Module, config: TrainingConfig, out: Path) -> Iterator[Accelerator]:
    """Yield an Accelerator that keeps a single process on the model's device, and leaves no global state."""
    is_own = not AcceleratorState._shared_state
    is_single_process = not is_launched()
    if is_own and is_single_process:
        PartialState._reset_state()  # It may have been made for another device.
    on_cpu = next(model.parameters()).device.type == "cpu"
    try:
        accelerator = Accelerator(
            cpu=on_cpu_only() or (on_cpu and is_single_process),
            mixed_precision="bf16" if config.precision == "bf16" else "no",
            log_with=config.tracker,
            project_dir=out,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)],
        )
    except ValueError as error:
        raise TrainingError(
            f"Accelerate can't be set up for this run ({first_line(error)}): train in a new process if this one has "
            "already used Accelerate with other settings, else change training.precision."
        ) from None
    try:
        yield accelerator
    finally:
        if not on_cpu:
            # It collects garbage for half a second. On a CPU, reference counts free the memory.
            accelerator.free_memory()
        if is_own:
            AcceleratorState._reset_state(reset_partial_state=is_single_process)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name.

    Raises:
        TrainingError: there are none, or one is not in float32.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise TrainingError(
            "The model has no trainable parameters: attach a graft that trains, or set training.steps to 0 for a graft "
            "that learns without gradients."
        )
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise TrainingError(
                f"The parameter {name} is in {dtype}, but training needs float32: convert it to float32, and set "
                "training.precision to bf16 for speed."
            )
    return parameters


def graft_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of grafts, such as running statistics, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.startswith("grafts.")}
