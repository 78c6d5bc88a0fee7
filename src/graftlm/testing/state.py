"""The state of a model, to test that nothing has changed it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the live parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of names, shapes, dtypes and bytes, also of quantized tensors."""
    result = hashlib.sha256()
    for name, tensor in tensors.items():
        result.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        result.update(_bytes(tensor.detach()))
    return result.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    if type(tensor) is Tensor:
        return tensor.cpu().flatten().view(torch.uint8).numpy()
    buffer = io.BytesIO()  # A quantized tensor has several parts.
    torch.save(tensor, buffer)
    return buffer.getvalue()


def state_of(model: PreTrainedModel) -> dict[str, object]:
    """Return the state of a model that a graft must restore, by the name of each part.

    Args:
        model: a transformers model.

    Returns:
        Values to compare with those of a later call for the same model in the same process. They cover modules and
        their modes, hooks, replaced methods, bytes and identity of parameters and buffers, which parameters have a
        gradient, though not its value, and the config.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    tensors = tensors_of(model)
    return {
        "modules": {key: (module, type(module)) for key, module in modules.items()},
        "training modes": {key: module.training for key, module in modules.items()},
        "hooks": list(_hooks(modules)),
        "methods": list(_instance_methods(modules)),
        "weights": digest(dict(sorted(tensors.items()))),  # PEFT does not keep their order.
        "tensors": {name: id(tensor) for name, tensor in tensors.items()},
        "gradients": [name for name, parameter in parameters.items() if parameter.grad is not None],
        "requires_grad flags": {name for name, parameter in parameters.items() if parameter.requires_grad},
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict() if model.can_generate() else None,
    }


def _hooks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, list[object]]]:
    for key, module in modules.items():
        for name, value in vars(module).items():
            if "hooks" in name and value:
                yield key, name, list(value.items())


def _instance_methods(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, Any]]:
    """Yield the callables that replace methods in instances, such as a patched `forward`."""
    for key, module in modules.items():
        for name, value in vars(module).items():
            if callable(value):
                yield key, name, value
