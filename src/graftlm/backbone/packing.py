"""Packed weights: a second copy of bfloat16 matrices, in the order in which a CPU multiplies them.

Without it oneDNN reorders a matrix at every product, which takes a quarter of a step with few tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from torch import Tensor, nn

_OPS: Any = torch.ops.mkldnn
_log = logging.getLogger(__name__)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by the packed copy in inference, while its weight is the one that was packed."""

    packed: tuple[Tensor, int, Tensor] | None = None
    """The weight, its version when it was packed, and the copy; a copied or unpickled layer has none."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "packed"}

    def forward(self, x: Tensor) -> Tensor:
        weight, version, copy = self.packed or (None, 0, None)
        unchanged = weight is self.weight and weight._version == version
        if not unchanged or x.dtype != weight.dtype or torch.is_grad_enabled():
            return super().forward(x)
        return _OPS._linear_pointwise(x, copy, self.bias, "none", [], "")


def pack_weights(model: nn.Module) -> None:
    """Pack a model's bfloat16 linear layers, if this CPU multiplies bfloat16 and a quarter of its memory holds them."""
    if not (hasattr(_OPS, "_linear_pointwise") and _OPS._is_mkldnn_bf16_supported()):
        return
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear and _is_packable(module)]
    if sum(layer.weight.nbytes for layer in layers) > psutil.virtual_memory().available / 4:
        _log.info("weights are not packed: the memory is too small for a second copy, and steps take longer")
        return
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.packed = layer.weight, layer.weight._version, _OPS._reorder_linear_weight(layer.weight.detach(), None)


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_plain = type(weight) is nn.Parameter and not weight.is_inference() and weight.device.type == "cpu"
    return is_plain and weight.dtype == torch.bfloat16


def unpack_weights(model: nn.Module) -> None:
    """Remove the copies."""
    for module in model.modules():
        if type(module) is PackedLinear:
            vars(module).pop("packed", None)
            module.__class__ = nn.Linear
