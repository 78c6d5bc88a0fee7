"""The bare model below hooks: a second tree of modules around the same weights."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import nn

from graftlm.errors import BackboneError

_Module = TypeVar("_Module", bound=nn.Module)


def clone_without_hooks(module: _Module, name: str) -> _Module:
    """A module tree without hooks that shares the dictionaries of parameters and buffers of the original.

    Modules that are put around or in place of the original's later, as PEFT does, do not appear in the clone.

    Raises:
        BackboneError: another library has replaced the forward methods of modules of the model, called `name`.
    """
    if "forward" in vars(module) and any(True for _ in module.children()):
        raise BackboneError(
            f"Another library replaced the forward of modules of {name}, as accelerate does to spread a model over "
            "devices, so the bare model can't run beside its hooks: load it on one device."
        )
    clone = object.__new__(type(module))
    for key, value in vars(module).items():
        is_hooks = key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict)
        vars(clone)[key] = {} if is_hooks else value
    vars(clone).pop("_compiled_call_impl", None)  # it would call the original module
    vars(clone)["_modules"] = {
        key: child if child is None else clone_without_hooks(child, name) for key, child in module._modules.items()
    }
    return cast("_Module", clone)
