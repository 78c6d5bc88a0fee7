"""The training loop of every graft and every baseline.

One step draws the global batch, takes this process's rows, accumulates the gradients of its micro-batches, clips and
updates. Losses are sums divided by the counts of the global batch. Micro-batches and processes therefore change a loss
by rounding only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import set_seed
from numpy.random import SeedSequence
from rich.progress import MofNCompleteColumn
from torch import Tensor, nn

from graftlm.data import Batch
from graftlm.data.mixture import Batches
from graftlm.errors import TrainingError
from graftlm.progress import progress_bar
from graftlm.training.checkpoint import (
    TrainingCounts,
    TrainingState,
    recurrent_state,
    resume_from_checkpoint,
    save_checkpoint,
    stop_before_step,
)
from graftlm.training.config import TrainingConfig
from graftlm.training.distributed import distributed, graft_buffers, trainable_parameters
from graftlm.training.history import HISTORY, History
from graftlm.training.optimizer import declared, learning_rate, make_optimizer, parameters_without_decay
from graftlm.training.tracking import start_tracker


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of a training run.

    Attributes:
        steps: number of updates of the weights, over all resumptions of the run.
        tokens: number of input tokens without padding, over all resumptions.
        tokens_per_s: input tokens per second, without checkpoints and the first step after each start; 0 if no other
            step was done.
        seconds: duration of all steps without checkpoints, over all resumptions.
        loss: loss of the last step with its auxiliary part, in nats per token.
        rows_without_target: number of rows that had no token to predict, over all resumptions.
        steps_without_target: number of updates whose rows had none, so that they taught nothing.
        history: path of the log, one JSON line for each logged step.
        resumed_from: step of the checkpoint that the run resumed from; None for a fresh start.
    """

    steps: int
    tokens: int
    tokens_per_s: float
    seconds: float
    loss: float
    rows_without_target: int
    steps_without_target: int
    history: Path
    resumed_from: int | None


def train(
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    out: str | Path,
    *,
    identity: Mapping[str, object] | None = None,
    progress: bool = True,
    resume: bool = True,
) -> TrainingSummary:
    """Train the trainable parameters of a model in place.

    All processes of a distributed run must call this together. The model is moved to the device of its process, and
    its training mode is restored at the end.

    Args:
        model: a `GraftedModel`, or any module with its forward signature. If `config.gradient_checkpointing` is true,
            the module needs the method `enable_gradient_checkpointing()`.
        batches: the global batch of each step, with `config.batch_size` rows.
        config: the training section with its number of steps; `epochs` is not read here.
        out: folder of `history.jsonl` and `checkpoints/`; it is created if necessary.
        identity: plain JSON values that a resumed run must share, such as graft, data and backbone.
        progress: whether to show a progress bar.
        resume: continue from the newest complete checkpoint in `out`. False removes the checkpoints and starts over.

    Raises:
        TrainingError: `config.steps` is 0; the model has no trainable parameter, or one that is not in float32; a batch
            has another number of rows than `batch_size`, or can't be shared by the processes; Accelerate rejects the
            precision or the tracker; the loss or a gradient is not finite (the weights before that step are saved); the
            checkpoint belongs to another run; or a checkpoint can't be written, as on a full disk.
        DataError: the next rows can't be read, or the position in a checkpoint does not fit the data.
        MissingExtraError: the tracker is TensorBoard, which is not installed.
    """
    if config.steps == 0:
        raise TrainingError(
            "training.steps is 0, but train() needs at least 1 step and does not read epochs: set steps, and leave "
            "epochs out."
        )
    out = Path(out)
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    # Read before sharding, which replaces the parameters.
    without_decay = parameters_without_decay(model)
    scales = declared(model, "learning_rate_scales")
    with distributed(model, config, out) as context:
        parameters = trainable_parameters(model)
        state = TrainingState(
            context=context,
            batches=batches,
            config=config,
            out=out,
            identity=identity or {},
            parameters=parameters,
            optimizer=make_optimizer(parameters, config, without_decay, scales),
        )
        if config.tracker is not None:
            start_tracker(context.accelerator, config.tracker, config.model_dump())
        resumed_from = resume_from_checkpoint(state, resume=resume)
        _run_steps(state, progress=progress)
        state.optimizer.zero_grad()
    assert state.counts.loss is not None, "a run has at least one step"
    return TrainingSummary(
        steps=state.counts.step,
        tokens=state.counts.tokens,
        tokens_per_s=state.counts.tokens_per_s,
        seconds=state.counts.all_seconds,
        loss=state.counts.loss,
        rows_without_target=state.counts.rows_without_target,
        steps_without_target=state.counts.steps_without_target,
        history=out / HISTORY,
        resumed_from=resumed_from,
    )


def _run_steps(state: TrainingState, *, progress: bool) -> None:
    """Train from the current step to the last, with log, progress bar and checkpoints."""
    counts = state.counts
    is_main = state.context.accelerator.is_main_process
    first = counts.step
    bar = progress_bar(
        "training",
        state.config.steps,
        MofNCompleteColumn(),
        "loss {task.fields[loss]}",
        "{task.fields[rate]} tokens/s",
        show=progress and is_main,
        completed=first,
        loss="–",
        rate="–",
    )
    # Only the main process has a history.
    opened: AbstractContextManager[History | None] = nullcontext()
    if is_main:
        opened = closing(History(state.out / HISTORY, first))
    with opened as history, bar as update:
        while counts.step < state.config.steps:
            started = time.perf_counter()
            tokens, log = _step(state)
            counts.step += 1
            counts.tokens += tokens
            counts.loss = log["loss"]
            seconds = time.perf_counter() - started
            counts.all_seconds += seconds
            # The first step after a start includes the warm-up of kernels.
            if counts.step > first + 1:
                counts.timed_tokens += tokens
                counts.seconds += seconds
            _log_step(state, history, log)
            _show_progress(counts, update)
            _save_if_due(state, history)


def _log_step(state: TrainingState, history: History | None, log: Mapping[str, float]) -> None:
    """Write the values of the last step to the history and the tracker, if they are due."""
    step = state.counts.step
    is_last = step == state.config.steps
    if step % state.config.log_every == 0 or is_last:
        values = {**log, "tokens": state.counts.tokens}
        if history is not None:
            history.append({"step": step, **values})
        state.context.accelerator.log(values, step=step)


def _show_progress(counts: TrainingCounts, update: Callable[..., None]) -> None:
    rate = f"{counts.tokens_per_s:,.0f}" if counts.tokens_per_s else "–"
    update(completed=counts.step, loss=f"{counts.loss:.4f}", rate=rate)


def _save_if_due(state: TrainingState, history: History | None) -> None:
    """Save a checkpoint after the last step and every `checkpoint_every` steps, unless none are kept."""
    config = state.config
    is_last = state.counts.step == config.steps
    is_due = state.counts.step % config.checkpoint_every == 0 or is_last
    if config.keep_checkpoints and is_due:
        if history is not None:
            history.sync()
        save_checkpoint(state, config.keep_checkpoints)


def _step(state: TrainingState) -> tuple[int, dict[str, float]]:
    """Do one update; returns its number of input tokens and the values for the log."""
    context = state.context
    step = state.counts.step
    _seed(state.config.seed, step, context.accelerator.process_index)
    position, batch = state.upcoming.take(step)
    _count_targets(state.counts, batch)
    rate = learning_rate(state.config, step)
    for group in state.optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
    buffers = {name: buffer.clone() for name, buffer in graft_buffers(context.model).items()}
    recurrent = recurrent_state(context.model)
    losses = _accumulate(state, batch)
    gradient_norm = context.clip(state.config.clip)
    if step + 1 < state.config.steps:
        state.upcoming.prepare(step + 1)  # while the device computes
    # One transfer from the device for all values.
    loss, lm_loss, auxiliary_loss, norm = torch.cat([losses, gradient_norm.reshape(1)]).tolist()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        stop_before_step(state, buffers, recurrent, position, loss, norm)
    state.optimizer.step()
    state.optimizer.zero_grad()
    tokens = int(batch.totals()[1:].sum())
    return tokens, {
        "loss": loss,
        "lm_loss": lm_loss,
        "auxiliary_loss": auxiliary_loss,
        "learning_rate": rate,
        "gradient_norm": norm,
    }


def _count_targets(counts: TrainingCounts, batch: Batch) -> None:
    """Count the rows of a batch of text that have no token to predict."""
    if isinstance(batch, Batch):  # batches of tasks have labels instead of tokens
        without = batch.rows_without_target()
        counts.rows_without_target += without
        counts.steps_without_target += without == len(batch)


def _accumulate(state: TrainingState, batch: Batch) -> Tensor:
    """Accumulate the gradients of this process's micro-batches.

    Args:
        state: the run; the gradients are added to those of its parameters.
        batch: the global batch, the same in all processes.

    Returns:
        (3,) total, language-modeling and auxiliary loss, summed over all processes.

    Raises:
        TrainingError: the batch does not have `batch_size` rows.
    """
    config = state.config
    context = state.context
    device = context.accelerator.device
    if len(batch) != config.batch_size:
        raise TrainingError(
            f"The batch of step {state.counts.step + 1} has {len(batch)} rows, but training.batch_size is "
            f"{config.batch_size}: set it to the number of rows that the data has per step."
        )
    totals = batch.totals().to(device)
    rows = batch.rows(context.share(len(batch)))
    size = config.micro_batch_size or len(rows)
    losses = torch.zeros(3, device=device)
    for offset in range(0, len(rows), size):
        micro_batch = rows.rows(slice(offset, offset + size)).to(device)
        is_last = offset + size >= len(rows)
        # The backward pass is inside, since it may recompute activations.
        attention = context.attention(micro_batch.input_ids.shape[1])
        with context.synchronize_gradients(now=is_last), attention:
            with context.accelerator.autocast():
                loss, components = context.losses(micro_batch.inputs(), totals)
            context.backward(loss)
        losses += components
    return context.sum(losses)


def _seed(seed: int, step: int, process: int) -> None:
    """Seed the random numbers of a step, so that a resumed run draws the same ones."""
    sequence = SeedSequence([seed, step, process])
    set_seed(int(sequence.generate_state(1)[0]))
