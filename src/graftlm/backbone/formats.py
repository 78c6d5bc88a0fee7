"""Quantize the weights of linear layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from graftlm.errors import BackboneError, MissingExtraError, first_line

Quantization = Literal["int8", "int4"]

_INT4_GROUP = 32
"""Number of weights that share a scale in int4."""


def quantize_weights(model: nn.Module, quantization: str, name: str) -> None:
    """Quantize the weights of a model's linear layers in place.

    Args:
        model: the model whose linear layers are changed.
        quantization: `int8`, or `int4` in groups of 32 weights.
        name: name of the model in messages.

    Raises:
        MissingExtraError: torchao is not installed.
        BackboneError: the quantization is unknown, or does not fit the shapes of the weights.
    """
    try:
        from torchao import quantization as torchao
    except ImportError:
        raise MissingExtraError("torchao", "quantized", "Quantizing a model") from None
    if quantization == "int8":
        config = torchao.Int8WeightOnlyConfig()
    elif quantization == "int4":
        config = torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]  # missing from torch's stubs
            granularity=torchao.PerGroup(_INT4_GROUP),
        )
    else:
        raise BackboneError(f"There is no quantization {quantization!r}: choose int8 or int4.")
    try:
        torchao.quantize_(model, config)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise BackboneError(
            f"{name} can't be quantized to {quantization} ({first_line(error)}): choose another quantization, or none."
        ) from error
