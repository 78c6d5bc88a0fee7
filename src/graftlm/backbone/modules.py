"""Inspect the modules of a transformers model: Linears, activations, mixtures of experts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graftlm.backbone.families import Sublayer

RUNTIME_FIELDS = {  # config fields that describe how a model is run, not what it is
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation", "name_or_path",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict", "quantization_config",
    "architectures", "experts_implementation",
}  # fmt: skip


def architecture(config: Any) -> str:
    """What a config says of a model, without how it is run, as JSON."""
    values = {key: value for key, value in config.to_dict().items() if key not in RUNTIME_FIELDS}
    return json.dumps(values, sort_keys=True, default=str)


def has_module(root: nn.Module, path: str) -> bool:
    """Whether there is a module at a path."""
    return path in dict(root.named_modules())


def has_experts(ffn: nn.Module) -> bool:
    """Whether an FFN is a mixture of experts, which are stacked in parameters or listed."""
    stacked = any(parameter.dim() == 3 for parameter in ffn.parameters())
    return stacked or any(isinstance(module, nn.ModuleList) for module in ffn.modules())


def outer_linears(module: nn.Module) -> Iterator[nn.Module]:
    """The Linears in a module, without those inside of others, as PEFT's adapters are."""
    inner = (linear for child in module.children() for linear in outer_linears(child))
    yield from [module] if linear_sizes(module) else inner


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a Linear or of GPT-2's transposed one; None for other modules."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.nf)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (int(sizes[0]), int(sizes[1])) if None not in sizes else None  # type: ignore[arg-type]  # any library's Linear


def ffn_activation(layer: nn.Module, ffn: Sublayer) -> nn.Module | None:
    """The module that is an FFN's activation; None where it is a function."""
    roots = [layer.get_submodule(path) for path in (ffn.entry, ffn.exit or ffn.entry)]
    modules = [module for root in roots for module in root.named_modules()]
    if linear_sizes(roots[0]):  # the FFN's Linears stand in the layer itself
        modules += layer.named_children()
    # Not every "act": adapters inside an FFN have factors.
    return next((module for name, module in modules if re.search(r"(^|[._])act[^.]*$|gelu", name)), None)


def same_function(first: nn.Module, second: nn.Module) -> bool:
    """Whether two activations without parameters are equal."""
    if any(True for module in (first, second) for _ in module.parameters()):
        return type(first) is type(second)
    x = torch.linspace(-6, 6, 49, device="cpu")
    return torch.allclose(first(x), second(x), atol=1e-6)
