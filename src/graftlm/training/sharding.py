"""Sharding of a model over processes with FSDP2, in place, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(root: nn.Module) -> Callable[[], None]:
    """Shard a module in place: one group for each layer of `_no_split_modules`, and one for the rest.

    All processes must call this together, before an optimizer is made, because the parameters are replaced. Accelerate
    shards on GPUs only, so this function calls `fully_shard` itself. Weights keep their dtype: bfloat16 comes from
    autocast. Quantized weights are replicated, since their tensor classes can't be split.

    Args:
        root: the module, with equal frozen weights in all processes. Trainable weights are taken from the main process.

    Returns:
        A function that gives every process all weights again. All processes must call it together.
    """
    before = [_ModuleBefore.of(module) for module in root.modules()]
    for parameter in root.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)
    replicated = {parameter for parameter in root.parameters() if not _can_be_split(parameter)}
    for module in (*_layers(root), root):
        fully_shard(module, ignored_params=replicated)

    def undo() -> None:
        whole: dict[int, nn.Parameter] = {}
        for module_before in before:
            _gather_parameters(module_before.module, whole)
            module_before.restore()

    return undo


def _can_be_split(parameter: nn.Parameter) -> bool:
    return type(parameter.data) is Tensor and parameter.is_floating_point()


def _layers(root: nn.Module) -> Iterable[nn.Module]:
    names: set[str] = set()
    for module in root.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return [module for module in root.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class _ModuleBefore:
    """A module as it was before sharding.

    Attributes:
        module: the live module.
        kind: its class, which `fully_shard` replaces.
        attributes: names of its attributes.
        hooks: the ids of the hooks in each of its dictionaries of hooks.
    """

    module: nn.Module
    kind: type[nn.Module]
    attributes: set[str]
    hooks: dict[str, set[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleBefore:
        attributes = vars(module)
        hooks = {name: set(value) for name, value in attributes.items() if "_hooks" in name and isinstance(value, dict)}
        return cls(module, type(module), set(attributes), hooks)

    def restore(self) -> None:
        """Remove everything that `fully_shard` has added, but leave the parameters."""
        self.module.__class__ = self.kind
        attributes = vars(self.module)
        for name, value in list(attributes.items()):
            if name not in self.attributes:
                del attributes[name]
            elif name in self.hooks:
                added = set(value) - self.hooks[name]
                for hook in added:
                    del value[hook]
        # Without this, the module can't be sharded again.
        _composable_state._module_state_mapping.pop(self.module, None)


def _gather_parameters(module: nn.Module, whole: dict[int, nn.Parameter]) -> None:
    """Replace a module's own sharded parameters by whole ones.

    Args:
        module: the module, without its children.
        whole: the whole parameters of all modules by the id of the sharded one, so that tied parameters stay tied.
    """
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if not isinstance(parameter.data, DTensor):
            continue
        key = id(parameter)
        if key not in whole:
            gathered = full_tensor(parameter.data)
            whole[key] = nn.Parameter(gathered, parameter.requires_grad)
        setattr(module, name, whole[key])


def full_tensor(tensor: Tensor) -> Tensor:
    """Return an unsharded tensor; one that is not sharded is returned itself. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor on the device of `parameter`, sharded in the same way.

    Args:
        full: the whole tensor, equal in all processes.
        parameter: a tensor of the same shape, sharded or not.
    """
    full = full.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
