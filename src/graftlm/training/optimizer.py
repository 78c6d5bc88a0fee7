"""The optimizer and the learning rate of a training run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import AdamW

from graftlm.training.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of a step.

    Warm-up rises linearly and reaches `learning_rate` at step `warmup_steps - 1`. Afterwards the cosine and the linear
    schedule decay, and would reach `min_ratio * learning_rate` one step after the last. The constant schedule stays.

    Args:
        config: the training section, with schedule, warm-up and number of steps.
        step: the step, counted from 0.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    decay = 1.0
    if config.schedule == "cosine":
        decay = (1 + math.cos(math.pi * progress)) / 2
    elif config.schedule == "linear":
        decay = 1 - progress
    return config.learning_rate * (config.min_ratio + (1 - config.min_ratio) * decay)


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Return the names of parameters that must not decay, such as those of a state-space model.

    These are parameters with the attribute `_no_weight_decay`, and those that a module's method
    `parameters_without_decay()` names, relative to the module.
    """
    names = set(declared(model, "parameters_without_decay"))
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_no_weight_decay", False):
            names.add(name)
    return names


def declared(model: nn.Module, method: str) -> dict[str, Any]:
    """Collect what modules declare about their parameters.

    Args:
        model: the model; all of its modules that have the method are called.
        method: name of a method without arguments, which returns names of parameters relative to the module, or a
            mapping from these names to values.

    Returns:
        The values by the parameters' names in `model`; None where a method returned names only.
    """
    values: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        function = getattr(module, method, None)
        if not callable(function):
            continue
        own: Any = function()
        if not isinstance(own, Mapping):
            own = dict.fromkeys(own)
        start = f"{prefix}." if prefix else ""
        for name, value in own.items():
            values[start + name] = value
    return values


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: TrainingConfig,
    without_decay: Collection[str] = (),
    scales: Mapping[str, float] | None = None,
) -> AdamW:
    """Make an AdamW optimizer. Only tensors of two or more dimensions decay.

    Args:
        parameters: the parameters to train, by name.
        config: the training section, with learning rate, weight decay and betas.
        without_decay: names of further parameters that do not decay.
        scales: factors on the learning rate by the parameters' names; 1 for other parameters.

    Returns:
        The optimizer, with a group of parameters for each combination of decay and factor. The learning rate of a
        group is `config.learning_rate`; its key `scale` is the factor, which the training loop applies in each step.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        is_exempt = parameter.ndim < 2 or name in without_decay
        scale = 1.0 if scales is None else scales.get(name, 1.0)
        groups.setdefault((is_exempt, scale), []).append(parameter)
    options = []
    for is_exempt, scale in sorted(groups):
        options.append(
            {
                "params": groups[is_exempt, scale],
                "weight_decay": 0.0 if is_exempt else config.weight_decay,
                "scale": scale,
            }
        )
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters.values())
    return AdamW(options, lr=config.learning_rate, betas=config.betas, fused=fused)
