"""The training loop of every graft and every baseline.

One step draws the global batch, takes this process's rows, accumulates the gradients of its micro-batches, clips and
updates. Losses are sums divided by the counts of the global batch. Micro-batches and processes therefore change a loss
by rounding only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from numpy.random import SeedSequence
from rich.progress import MofNCompleteColumn
from torch import Tensor, nn
from torch.optim import AdamW

from graftlm.data import Batch
from graftlm.data.mixture import Batches
from graftlm.errors import TrainingError
from graftlm.progress import progress_bar
from graftlm.training.checkpoint import (
    HISTORY,
    History,
    TrainingState,
    recurrent_state,
    resume_from_checkpoint,
    save_checkpoint,
    stop_before_step,
)
from graftlm.training.config import TrainingConfig
from graftlm.training.distributed import distributed, graft_buffers, start_tracker, trainable_parameters


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of a training run.

    Attributes:
        steps: updates of the weights.
        tokens: input tokens without padding.
        tokens_per_s: training speed, without checkpoints.
        loss: loss of the last step, in nats per token.
        history: path of the log, one JSON line a step.
        resumed_from: step of the checkpoint that the run resumed from; None for a fresh start.
    """

    steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    history: Path
    resumed_from: int | None


def train(
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    out: str | Path,
    *,
    identity: Mapping[str, Any] | None = None,
    progress: bool = True,
    resume: bool = True,
) -> TrainingSummary:
    """Train the trainable parameters of `model` in place.

    Args:
        model: a `GraftedModel`, or any module with its forward signature.
        batches: the global batch of each step.
        out: folder of `history.jsonl` and `checkpoints/`.
        identity: plain JSON values that a resumed run must share, such as graft, data and backbone.
        resume: continue from the newest complete checkpoint in `out`. False removes the checkpoints and starts over.

    Raises TrainingError if the loss or a gradient is not finite (the weights before that step are saved), the
    checkpoint belongs to another run, or the disk is full.
    """
    out = Path(out)
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    # Before sharding, which replaces the parameters.
    without_decay, scales = parameters_without_decay(model), declared(model, "learning_rate_scales")
    with distributed(model, config, out) as context:
        parameters = trainable_parameters(model)
        optimizer = make_optimizer(parameters, config, without_decay, scales)
        state = TrainingState(context, batches, config, out, identity or {}, parameters, optimizer)
        if config.tracker is not None:
            values = {key: value for key, value in config.model_dump().items() if isinstance(value, int | float | str)}
            start_tracker(context.accelerator, config.tracker, values)
        resumed_from = resume_from_checkpoint(state, resume)
        _run_steps(state, progress)
        optimizer.zero_grad()
    counts = state.counts
    assert counts.loss is not None, "a run has at least one step"
    return TrainingSummary(counts.step, counts.tokens, counts.tokens_per_s, counts.loss, out / HISTORY, resumed_from)


def _run_steps(state: TrainingState, progress: bool) -> None:
    config, context, counts = state.config, state.context, state.counts
    first = counts.step
    # Only the main process has a history.
    opened = closing(History(state.out / HISTORY, first)) if context.accelerator.is_main_process else nullcontext()
    columns = (MofNCompleteColumn(), "loss {task.fields[loss]}", "{task.fields[rate]} tokens/s")
    show, fields = progress and context.accelerator.is_main_process, {"completed": first, "loss": "–", "rate": "–"}
    with opened as history, progress_bar("training", config.steps, *columns, show=show, **fields) as update:
        while counts.step < config.steps:
            started = time.perf_counter()
            rate = learning_rate(config, counts.step)
            tokens, log = _step(state, rate)
            counts.step, counts.tokens, counts.loss = counts.step + 1, counts.tokens + tokens, log["loss"]
            if counts.step > first + 1:  # the first step after a start includes warm-up of kernels
                counts.timed_tokens += tokens
                counts.seconds += time.perf_counter() - started
            last = counts.step == config.steps
            if counts.step % config.log_every == 0 or last:
                values = log | {"tokens": counts.tokens}
                if history is not None:
                    history.append({"step": counts.step} | values)
                context.accelerator.log(values, step=counts.step)
            shown_rate = f"{counts.tokens_per_s:,.0f}" if counts.tokens_per_s else "–"
            update(completed=counts.step, loss=f"{counts.loss:.4f}", rate=shown_rate)
            if config.keep_checkpoints and (counts.step % config.checkpoint_every == 0 or last):
                if history is not None:
                    history.sync()
                save_checkpoint(state, config.keep_checkpoints)


def _step(state: TrainingState, rate: float) -> tuple[int, dict[str, float]]:
    """Do one update; gives its number of tokens and its log line."""
    context, step = state.context, state.counts.step
    _seed(state.config.seed, step, context.accelerator.process_index)
    batch = state.batches.batch(step)
    for group in state.optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
    buffers = {name: buffer.clone() for name, buffer in graft_buffers(context.model).items()}
    recurrent = recurrent_state(context.model)
    losses = _accumulate(state, batch)
    norm = context.clip(state.config.clip)
    loss, lm_loss, auxiliary_loss, norm = torch.cat([losses, norm.reshape(1)]).tolist()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        stop_before_step(state, buffers, recurrent, loss, norm)
    state.optimizer.step()
    state.optimizer.zero_grad()
    log = {"loss": loss, "lm_loss": lm_loss, "auxiliary_loss": auxiliary_loss}
    return int(batch.totals()[1:].sum()), log | {"learning_rate": rate, "gradient_norm": norm}


def _accumulate(state: TrainingState, batch: Batch) -> Tensor:
    """Accumulate the gradients of this process's micro-batches; gives its losses (3,) summed over all processes."""
    config, context = state.config, state.context
    if len(batch) != config.batch_size:
        why = f"The data gives {len(batch)} rows per step, but batch_size is {config.batch_size}: make them equal."
        raise TrainingError(why)
    totals = batch.totals().to(context.accelerator.device)
    rows = batch.rows(context.share(len(batch)))
    size = config.micro_batch_size or len(rows)
    losses = torch.zeros(3, device=context.accelerator.device)
    for offset in range(0, len(rows), size):
        micro_batch = rows.rows(slice(offset, offset + size)).to(context.accelerator.device)
        plain = context.attention(micro_batch.input_ids.shape[1])  # in the backward pass too, which may compute anew
        with context.synchronize_gradients(offset + size >= len(rows)), plain:
            with context.accelerator.autocast():
                loss, components = context.losses(micro_batch.inputs(), totals)
            context.backward(loss)
        losses += components
    return context.sum(losses)


def _seed(seed: int, step: int, process: int) -> None:
    """Seed a step's random numbers by seed, step and process: a resumed run draws the same numbers."""
    set_seed(int(SeedSequence([seed, step, process]).generate_state(1)[0]))


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The learning rate of `step`, counted from 0.

    Warm-up reaches `learning_rate` at step `warmup_steps - 1`. The decay reaches `min_ratio * learning_rate` one step
    after the last.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shapes = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
    return config.learning_rate * (config.min_ratio + (1 - config.min_ratio) * shapes[config.schedule])


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that must not decay, such as those of a state space.

    A parameter is exempt if it has the attribute `_no_weight_decay`, or if the method `parameters_without_decay()` of a
    module above it gives its name.
    """
    names = {name for name, parameter in model.named_parameters() if getattr(parameter, "_no_weight_decay", False)}
    return names | declared(model, "parameters_without_decay").keys()


def declared(model: nn.Module, method: str) -> dict[str, Any]:
    """What the modules' methods of this name give for their parameters, by the parameters' names in `model`."""
    values: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        if callable(function := getattr(module, method, None)):
            declared: Any = function()
            own = declared if isinstance(declared, Mapping) else dict.fromkeys(declared)
            values |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items()}
    return values


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: TrainingConfig,
    without_decay: Collection[str] = (),
    scales: Mapping[str, float] | None = None,
) -> AdamW:
    """AdamW over `parameters`. Only tensors of two or more dimensions decay, and none named in `without_decay`.

    `scales` has the learning rates of parameters over the config's, by name; of others it is the same.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        exempt = parameter.ndim < 2 or name in without_decay
        groups.setdefault((exempt, (scales or {}).get(name, 1.0)), []).append(parameter)
    options = [
        {"params": own, "weight_decay": 0.0 if exempt else config.weight_decay, "scale": scale}
        for (exempt, scale), own in sorted(groups.items(), key=lambda group: group[0])
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters.values())
    return AdamW(options, lr=config.learning_rate, betas=config.betas, fused=fused)
