"""The optimiser and the learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from torch import nn
from torch.optim import AdamW

from graftlm.training.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of `step`, counted from 0.

    Warm-up rises to `learning_rate` at step `warmup_steps - 1`; the decay would reach `min_ratio * learning_rate` one
    step past the last.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shapes = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
    floor = config.min_ratio
    return config.learning_rate * (floor + (1 - floor) * shapes[config.schedule])


def keeping(model: nn.Module) -> set[str]:
    """The parameters that must not decay, by name: with `_no_weight_decay`, or named by `parameters_without_decay()`.

    The attribute is on the parameter, the method on any module and gives names below it; state-space models have them.
    """
    found = {name for name, parameter in model.named_parameters() if getattr(parameter, "_no_weight_decay", False)}
    for prefix, module in model.named_modules():
        if callable(said := getattr(module, "parameters_without_decay", None)):
            found |= {f"{prefix}.{name}" if prefix else name for name in cast("Iterable[str]", said())}
    return found


def make_optimiser(parameters: Mapping[str, nn.Parameter], config: TrainingConfig, kept: Collection[str] = ()) -> AdamW:
    """AdamW over `parameters`; only matrices and higher decay, and none whose name is in `kept`."""
    decaying = [p for name, p in parameters.items() if p.ndim >= 2 and name not in kept]
    others = [p for name, p in parameters.items() if p.ndim < 2 or name in kept]
    groups = [{"params": decaying, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters.values())
    return AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=config.betas, fused=fused)


def set_learning_rate(optimiser: AdamW, rate: float) -> None:
    """Let the next update use `rate`."""
    for group in optimiser.param_groups:
        group["lr"] = rate
