"""The device, mode and precision in which a model is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn

from graftlm.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Precision = Literal["fp32", "bf16"]
LanguageModel: TypeAlias = "PreTrainedModel"
"""A model of transformers, or a `GraftedModel`, which is one too. Importing the class takes seconds."""


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model expects its inputs."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    return next(model.parameters()).device


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a `with` block, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def autocast(model: nn.Module, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a model computes in a precision.

    Args:
        model: the model; its device decides about the kind of autocast.
        precision: `bf16` computes under autocast; `fp32` leaves the model in its own dtype.

    Raises:
        EvaluationError: the precision is unknown.
    """
    if precision == "fp32":
        return contextlib.nullcontext()
    if precision != "bf16":
        raise EvaluationError(f"There is no precision {precision!r}: choose fp32 or bf16.")
    return torch.autocast(device_of(model).type, dtype=torch.bfloat16)
