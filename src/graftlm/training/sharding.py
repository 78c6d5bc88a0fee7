"""FSDP2, and the way back: a sharded model becomes plain again when its run is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(root: nn.Module) -> Callable[[], None]:
    """Shard `root` in place: one group per layer that Hugging Face says not to split, one for the rest.

    Accelerate shards on GPUs only, so `fully_shard` is called here, alike on all devices. Weights keep their dtype, as
    bf16 comes from autocast, and quantised ones stay whole in every process, since their classes can't be split.

    Returns:
        What makes it plain again, with all weights in every process; all must call it together.
    """
    before = [(module, type(module), _entries(module)) for module in root.modules()]
    for parameter in root.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)
    kept = {p for p in root.parameters() if type(p.data) is not Tensor or not p.is_floating_point()}
    for module in list(_layers(root)):
        fully_shard(module, ignored_params=kept)
    fully_shard(root, ignored_params=kept)

    def undo() -> None:
        plain: dict[int, nn.Parameter] = {}
        for module, kind, entries in before:
            _fill(module, plain)
            _forget(module, kind, entries)

    return undo


def _layers(root: nn.Module) -> Iterator[nn.Module]:
    names = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return (module for module in root.modules() if type(module).__name__ in names)


def _entries(module: nn.Module) -> dict[str, set[Any]]:
    """The attributes of a module, and the ids of the hooks in those that hold hooks."""
    return {name: set(value) if "_hooks" in name else set() for name, value in vars(module).items()}


def _fill(module: nn.Module, plain: dict[int, nn.Parameter]) -> None:
    """Replace sharded parameters by whole ones; `plain` keeps tied ones tied."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if isinstance(parameter.data, DTensor):
            if id(parameter) not in plain:
                plain[id(parameter)] = nn.Parameter(whole(parameter.data), parameter.requires_grad)
            setattr(module, name, plain[id(parameter)])


def _forget(module: nn.Module, kind: type[nn.Module], entries: dict[str, set[Any]]) -> None:
    """Take off class, attributes and hooks that sharding added."""
    module.__class__ = kind
    for name in [name for name in vars(module) if name not in entries]:
        del module.__dict__[name]
    for name, value in vars(module).items():
        if "_hooks" in name:
            for hook in set(value) - entries[name]:
                del value[hook]
    _composable_state._module_state_mapping.pop(module, None)  # else it could not be sharded again


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, which all processes must ask for together; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """`full` on the device of `parameter`, sharded as it is."""
    full = full.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return full
