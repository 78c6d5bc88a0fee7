"""Inspect the modules of a transformers model: Linears, activations, mixtures of experts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from graftlm.backbone.families import Sublayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RUNTIME_FIELDS = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "dtype",
    "experts_implementation",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Config fields that describe how a model is run rather than what it is."""

_ACTIVATION_NAME = re.compile(r"(^|[._])act[^.]*$|gelu")
"""Names of activation modules. Not every "act": adapters inside an FFN have factors."""


def architecture(config: PreTrainedConfig) -> str:
    """Return the fields of a config that describe the model, without `RUNTIME_FIELDS`, as JSON with sorted keys."""
    values = {key: value for key, value in config.to_dict().items() if key not in RUNTIME_FIELDS}
    return json.dumps(values, sort_keys=True, default=str)


def has_module(root: nn.Module, path: str) -> bool:
    """Return whether a module contains a module at a path; an empty path names the module itself."""
    return path in dict(root.named_modules())


def exit_path(layer: nn.Module, sublayer: Sublayer) -> str:
    """Return the path in a layer of the module where a sublayer ends: its entry where the layer lacks the exit."""
    if sublayer.exit and has_module(layer, sublayer.exit):
        return sublayer.exit
    return sublayer.entry


def has_experts(ffn: nn.Module) -> bool:
    """Return whether an FFN is a mixture of experts, which are stacked in parameters or listed in a `ModuleList`."""
    has_stacked_weights = any(parameter.dim() == 3 for parameter in ffn.parameters())
    has_list = any(isinstance(module, nn.ModuleList) for module in ffn.modules())
    return has_stacked_weights or has_list


def outer_linears(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the Linears in a module, without those inside other Linears, such as PEFT's adapters."""
    if linear_sizes(module):
        yield module
        return
    for child in module.children():
        yield from outer_linears(child)


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of input and output features of a Linear of any library or of GPT-2's transposed one.

    The result is None for other modules.
    """
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.nf)
    inputs = getattr(module, "in_features", None)
    outputs = getattr(module, "out_features", None)
    if inputs is None or outputs is None:
        return None
    return int(inputs), int(outputs)


def ffn_activation(layer: nn.Module, ffn: Sublayer) -> nn.Module | None:
    """Return the module that is an FFN's activation; None if the activation is a function.

    Args:
        layer: the layer that contains the FFN.
        ffn: the FFN of the layer.
    """
    entry = layer.get_submodule(ffn.entry)
    exit_module = layer.get_submodule(exit_path(layer, ffn))
    modules = [*entry.named_modules(), *exit_module.named_modules()]
    if linear_sizes(entry):  # The FFN's Linears are modules of the layer itself.
        modules.extend(layer.named_children())
    for name, module in modules:
        if _ACTIVATION_NAME.search(name):
            return module
    return None


def is_norm(module: nn.Module) -> bool:
    """Return whether the name of a module's class contains "norm", as in LayerNorm and RMSNorm."""
    return "norm" in type(module).__name__.lower()


def same_function(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two activations compute the same function; activations with parameters are compared by class."""
    has_parameters = any(True for module in (first, second) for _ in module.parameters())
    if has_parameters:
        return type(first) is type(second)
    x = torch.linspace(-6, 6, 49, device="cpu")
    return torch.allclose(first(x), second(x), atol=1e-6)
