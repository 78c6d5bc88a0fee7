"""Prepack bfloat16 weights for faster CPU inference.

A packed weight is a copy in the order in which oneDNN multiplies. Without it, oneDNN reorders the weight in every
product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

_OPS: Any = torch.ops.mkldnn


class _PackedWeight(NamedTuple):
    """A packed copy of a weight.

    Attributes:
        weight: the weight that was packed.
        state: the weight's version and address when it was packed.
        copy: the weight in oneDNN's blocked layout.
    """

    weight: Tensor
    state: tuple[int, int]
    copy: Tensor


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight in inference.

    The copy is not used after the weight was replaced, cast or changed in place. Only writing into `weight.data` is not
    detected.

    Attributes:
        packed: the packed weight; None in a layer that was copied or unpickled.
    """

    packed: _PackedWeight | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "packed"}

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed
        weight = self.weight
        if packed is None or packed.weight is not weight or packed.state != _state(weight):
            return nn.Linear.forward(self, x)
        if x.dtype != torch.bfloat16 or torch.is_grad_enabled():
            return nn.Linear.forward(self, x)
        return _OPS._linear_pointwise(x, packed.copy, self.bias, "none", [], "")


def can_pack() -> bool:
    """Return whether torch can pack weights, and this CPU multiplies bfloat16."""
    return hasattr(_OPS, "_linear_pointwise") and _OPS._is_mkldnn_bf16_supported()


def pack_weights(model: nn.Module) -> bool:
    """Pack a model's bfloat16 linear layers in place where this CPU supports it.

    Returns:
        False if the copies need more than a quarter of the free memory, and nothing is packed. True otherwise, also if
        this CPU does not support it.
    """
    if not can_pack():
        return True
    layers: list[Any] = [module for module in model.modules() if _is_packable(module)]
    size = sum(layer.weight.nbytes for layer in layers)
    if size > psutil.virtual_memory().available / 4:
        return False
    for layer in layers:
        weight = layer.weight
        copy = _OPS._reorder_linear_weight(weight.detach(), None)
        layer.__class__ = PackedLinear
        layer.packed = _PackedWeight(weight, _state(weight), copy)
    return True


def unpack_weights(model: nn.Module) -> None:
    """Remove the packed copies, and make the layers plain linear layers again."""
    for module in model.modules():
        if type(module) is PackedLinear:
            vars(module).pop("packed", None)
            module.__class__ = nn.Linear  # type: ignore[assignment]  # which has the same attributes


def _is_packable(layer: Any) -> bool:
    """Return whether a module is a plain linear layer in bfloat16 on the CPU."""
    if type(layer) not in (nn.Linear, PackedLinear) or type(layer.weight) is not nn.Parameter:
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or weight.is_inference() or weight.numel() == 0:
        return False
    has_plain_bias = layer.bias is None or layer.bias.dtype == torch.bfloat16
    return weight.dtype == torch.bfloat16 and has_plain_bias


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
