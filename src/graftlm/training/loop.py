"""The loop that trains every graft and every baseline.

One step: draw the global batch, take this process's rows, add up the gradients of its micro-batches, clip, update.
Losses are sums divided by the counts of the whole batch, so neither micro-batches nor processes change them beyond
rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from numpy.random import SeedSequence
from torch import Tensor, nn

from graftlm.data import Batch
from graftlm.data.mixture import Batches
from graftlm.errors import TrainingError
from graftlm.training.config import TrainingConfig
from graftlm.training.history import History
from graftlm.training.processes import graft_buffers, named_trainable, placed
from graftlm.training.progress import Display
from graftlm.training.schedule import keeping, learning_rate, make_optimiser, set_learning_rate
from graftlm.training.state import Run, recurrent_state, save, start, stop

HISTORY = "history.jsonl"


@dataclass(frozen=True)
class TrainingSummary:
    """What a run did: `loss` is the last step's in nats per token; `resumed_from` is a step, None for a fresh start."""

    steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    history: Path
    resumed_from: int | None


def train(
    model: nn.Module,
    mixture: Batches,
    config: TrainingConfig,
    out: str | Path,
    *,
    identity: Mapping[str, Any] | None = None,
    progress: bool = True,
    resume: bool = True,
) -> TrainingSummary:
    """Train what `model` leaves trainable, in place.

    Args:
        model: a `GraftedModel`, or any module with its forward signature.
        mixture: gives the global batch of each step.
        config: the numbers of the run.
        out: folder of `history.jsonl` and `checkpoints/`.
        identity: what else must be the same when the run resumes (recipe, data, backbone), as plain JSON values.
        progress: show a progress bar.
        resume: go on from the newest whole checkpoint in `out`; False removes those there and starts over.

    Raises:
        TrainingError: the loss or gradient is not finite (the weights are then those before that step, and saved), the
            checkpoint belongs to another run, or the disk is full.
    """
    out = Path(out)
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    kept = keeping(model)  # before the model is sharded, which makes its parameters anew
    with placed(model, config, out) as place:
        parameters = named_trainable(model)
        run = Run(place, mixture, config, out, identity or {}, parameters, make_optimiser(parameters, config, kept))
        _start_tracker(run)
        resumed_from = start(run, resume)
        _steps(run, progress)
        run.optimiser.zero_grad()
    done = run.counts
    assert done.loss is not None, "a run has at least one step"
    return TrainingSummary(done.step, done.tokens, done.tokens_per_s, done.loss, out / HISTORY, resumed_from)


def _steps(run: Run, progress: bool) -> None:
    """Every step from where the run stands to its end."""
    config, place, counts = run.config, run.place, run.counts
    first = counts.step
    with _history(run) as history, Display(config.steps, first, show=progress and place.main) as display:
        while counts.step < config.steps:
            started = time.perf_counter()
            step = counts.step
            _seed(config.seed, step, place.accelerator.process_index)
            batch = run.mixture.batch(step)
            rate = learning_rate(config, step)
            set_learning_rate(run.optimiser, rate)
            buffers = {name: buffer.clone() for name, buffer in graft_buffers(place.bare).items()}
            before = recurrent_state(place.bare)

            losses = _accumulate(run, batch)
            norm = place.clip(config.clip)
            loss, lm_loss, auxiliary_loss, norm = torch.cat([losses, norm.reshape(1)]).tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                stop(run, buffers, before, loss, norm)
            run.optimiser.step()
            run.optimiser.zero_grad()

            tokens = int(batch.totals()[1:].sum())
            counts.step, counts.tokens, counts.loss = step + 1, counts.tokens + tokens, loss
            if step > first:
                counts.timed_tokens += tokens
                counts.seconds += time.perf_counter() - started
            if counts.step % config.log_every == 0 or counts.step == config.steps:
                line = {"step": counts.step, "loss": loss, "lm_loss": lm_loss, "auxiliary_loss": auxiliary_loss}
                _log(run, history, line | {"learning_rate": rate, "gradient_norm": norm, "tokens": counts.tokens})
            display.update(counts.step, loss, counts.tokens_per_s)
            if counts.step % config.checkpoint_every == 0 or counts.step == config.steps:
                if history is not None:
                    history.sync()
                save(run, config.keep_checkpoints)


def _accumulate(run: Run, batch: Batch) -> Tensor:
    """Add up the gradients of this process's micro-batches; (3,) losses over all processes: whole, LM, auxiliary."""
    config, place = run.config, run.place
    if len(batch) != config.batch_size:
        raise TrainingError(
            f"The mixture gives {len(batch)} rows per step, but batch_size is {config.batch_size}: make them equal."
        )
    totals = batch.totals().to(place.device)
    rows = batch.rows(place.share(len(batch)))
    size = config.micro_batch_size or len(rows)
    losses = torch.zeros(3, device=place.device)
    for offset in range(0, len(rows), size):
        micro = rows.rows(slice(offset, offset + size)).to(place.device)
        with place.synchronising(offset + size >= len(rows)):
            with place.accelerator.autocast():
                loss, parts = place.losses(micro.inputs(), totals)
            place.backward(loss)
        losses += parts
    return place.total(losses)


def _seed(seed: int, step: int, process: int) -> None:
    """Make a step's random numbers a function of seed, step and process, so that a resumed run draws the same."""
    set_seed(int(SeedSequence([seed, step, process]).generate_state(1)[0]))


def _start_tracker(run: Run) -> None:
    if run.config.tracker is not None:
        values = {key: value for key, value in run.config.model_dump().items() if isinstance(value, int | float | str)}
        run.place.accelerator.init_trackers("graftlm", config=values)


def _history(run: Run) -> AbstractContextManager[History | None]:
    """The open history of the main process, nothing in the others."""
    return closing(History(run.out / HISTORY, run.counts.step)) if run.place.main else nullcontext()


def _log(run: Run, history: History | None, line: dict[str, Any]) -> None:
    if history is not None:
        history.append(line)
    run.place.accelerator.log({key: value for key, value in line.items() if key != "step"}, step=line["step"])
