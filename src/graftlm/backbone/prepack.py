"""Packed weights: a second copy of bfloat16 matrices, in the order in which a CPU multiplies them.

Without it oneDNN reorders a matrix at every product.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch import Tensor, nn

_OPS: Any = torch.ops.mkldnn


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by the packed copy in inference, while its weight is the one that was packed.

    A weight that was exchanged, cast or changed counts; only what is written into `weight.data` is not noticed.
    """

    packed: tuple[Tensor, tuple[int, int], Tensor] | None = None
    """The weight, its version and address when it was packed, and the copy; a copied or unpickled layer has none."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "packed"}

    def forward(self, x: Tensor) -> Tensor:
        packed, weight = self.packed, self.weight
        if packed is None or packed[0] is not weight or packed[1] != _state(weight):
            return nn.Linear.forward(self, x)
        if x.dtype != torch.bfloat16 or torch.is_grad_enabled():
            return nn.Linear.forward(self, x)
        return _OPS._linear_pointwise(x, packed[2], self.bias, "none", [], "")


def can_pack() -> bool:
    """Whether torch packs weights, and this CPU multiplies bfloat16."""
    return hasattr(_OPS, "_linear_pointwise") and _OPS._is_mkldnn_bf16_supported()


def pack_weights(model: nn.Module) -> bool:
    """Pack a model's bfloat16 linear layers where it helps; False if a quarter of the free memory holds no copy."""
    if not can_pack():
        return True
    layers: list[Any] = [module for module in model.modules() if _is_packable(module)]
    if sum(layer.weight.nbytes for layer in layers) > psutil.virtual_memory().available / 4:
        return False
    for layer in layers:
        layer.__class__, weight = PackedLinear, layer.weight
        layer.packed = weight, _state(weight), _OPS._reorder_linear_weight(weight.detach(), None)
    return True


def unpack_weights(model: nn.Module) -> None:
    """Remove the copies."""
    for module in model.modules():
        if type(module) is PackedLinear:
            vars(module).pop("packed", None)
            module.__class__ = nn.Linear  # type: ignore[assignment]  # which has the same attributes


def _is_packable(layer: Any) -> bool:
    if type(layer) not in (nn.Linear, PackedLinear) or type(weight := layer.weight) is not nn.Parameter:
        return False
    is_plain = weight.device.type == "cpu" and not weight.is_inference() and weight.numel() > 0
    return is_plain and {weight.dtype, weight.dtype if layer.bias is None else layer.bias.dtype} == {torch.bfloat16}


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
