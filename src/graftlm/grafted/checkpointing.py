"""Gradient checkpoints of the layers of a model with taps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from graftlm.errors import GraftError

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def checkpointed_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model whose gradient checkpoints are enabled."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


class LayerCheckpoints:
    """Gradient checkpoints of a model's layers in which a recomputation runs with the `Call` of its own pass.

    Args:
        contexts: returns the context managers of the forward pass and of the recomputation, as `context_fn` of
            `torch.utils.checkpoint.checkpoint` does.
    """

    def __init__(self, contexts: Callable[[], _Contexts]) -> None:
        self._contexts = contexts
        self._functions: list[Callable[..., Any]] = []

    def enable(self, model: PreTrainedModel) -> None:
        """Recompute each layer of a model in the backward pass instead of keeping its activations.

        Layers in evaluation mode stay in it during the recomputation, too.

        Args:
            model: the live model, with every module in the mode that it has in training.
        """
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        frozen_layers: list[Any] = [layer for layer in layers if not layer.training]
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": self._contexts}
        )
        model.disable_input_require_grads()  # transformers' hook on the embedding, for reentrant checkpoints only
        for layer in frozen_layers:
            layer._gradient_checkpointing_func = _in_evaluation_mode(layer, layer._gradient_checkpointing_func)
        self._functions = [module._gradient_checkpointing_func for module in checkpointed_modules(model)]

    def check(self, model: PreTrainedModel) -> None:
        """Raise `GraftError` if a model has gradient checkpoints that `enable` didn't set.

        The taps would have no `Call` in their recomputation.
        """
        for module in checkpointed_modules(model):
            if module._gradient_checkpointing_func not in self._functions:
                raise GraftError(
                    "The backbone has gradient checkpoints that taps can't follow: call "
                    "gradient_checkpointing_disable() of its model, and then enable_gradient_checkpointing() of the "
                    "GraftedModel."
                )

    def disable(self, model: PreTrainedModel) -> None:
        """Remove the checkpoints that `enable` has set, if any.

        Args:
            model: the live model.
        """
        if not self._functions:
            return
        model.gradient_checkpointing_disable()
        for module in model.modules():  # transformers keeps the function, which holds the grafts.
            vars(module).pop("_gradient_checkpointing_func", None)


def _in_evaluation_mode(layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's checkpoint function that runs it in evaluation mode, because layers may apply dropout."""

    def evaluated(function: Callable[..., Any], *inputs: Any) -> Any:
        mode = layer.training
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = mode

    def checkpoint_evaluated(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return checkpoint(partial(evaluated, function), *args, **options)

    return checkpoint_evaluated
