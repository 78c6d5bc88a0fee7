"""`Backbone`: a frozen pretrained model with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn

from graftlm.backbone.sites import Sites
from graftlm.errors import BackboneError, WrongBackboneError, first_line

# transformers' models take seconds to import, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from graftlm.backbone.fingerprint import Fingerprint, _checkpoint_parameters, fingerprint

BackboneKind = Literal["causal-lm", "masked-lm", "encoder"]
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass
class Backbone:
    """A frozen pretrained model and its tokenizer, if any; never modified, never saved.

    `name` is the hub name or path, and `kind` the head, by which it can be loaded again; `sites` locate its modules.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    sites: Sites
    kind: BackboneKind = "causal-lm"

    @classmethod
    def wrap(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        kind: BackboneKind | None = None,
    ) -> Backbone:
        """Make a backbone from a model in memory: plain, quantised, compiled, or with PEFT adapters attached.

        The model's class decides on `kind` where it is None.

        Raises BackboneError if `model` is not a transformers model, UnknownFamilyError if its structure is unknown.
        """
        live = _unwrap(model).eval()
        if kind is None and live.base_model is live:
            kind = "encoder"
        elif kind is None:
            kind = "masked-lm" if type(live).__name__.endswith("ForMaskedLM") else "causal-lm"
        name = name or live.config.name_or_path or "in memory"
        return cls(live, tokenizer, name, _sites(live, name), kind)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The model's fingerprint; computed once, as the weights never change."""
        return fingerprint(self.model)

    @property
    def parameter_count(self) -> int:
        """The number of the checkpoint's parameters, also where quantisation has untied the head."""
        return sum(parameter.numel() for parameter in _checkpoint_parameters(self.model))

    @cached_property
    def bare_model(self) -> PreTrainedModel:
        """The model as it is without grafts, in evaluation mode, also while some are attached; it shares all weights.

        Raises BackboneError if another library has replaced the forward methods of the model's modules.
        """
        clone = clone_without_hooks(self.model, self.name)
        for attribute in ("generate", "init_continuous_batching"):  # which attached grafts replace
            vars(clone).pop(attribute, None)
        return clone.eval()

    def check_graft(self, name: str, built_for: Fingerprint | None) -> None:
        """Raise `WrongBackboneError` if a graft was built for another backbone and no copy of this one."""
        if difference := built_for and built_for.difference(self.fingerprint):
            raise WrongBackboneError(
                f"The graft {name} was built for another backbone than {self.name} ({difference}): give the one that "
                "it was built for, or build it again."
            )

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    def move(self, device: str | torch.device | None = None) -> None:
        """Move the model to a device, by default to `default_device()`.

        Raises BackboneError if the device does not exist, or its memory is too small.
        """
        move(self.model, device or default_device())

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises BackboneError if the backbone has no tokenizer."""
        if self.tokenizer is None:
            raise BackboneError(
                f"The backbone {self.name} has no tokenizer, but text needs one: put tokenizer.json and "
                "tokenizer_config.json beside its weights, or pass a tokenizer."
            )
        return self.tokenizer


def clone_without_hooks(module: _Module, name: str) -> _Module:
    """A module tree without hooks that shares the dictionaries of parameters and buffers of the original.

    Modules that are put around or in place of the original's later, as PEFT does, do not appear in the clone.

    Raises BackboneError if another library has replaced the forward methods of modules of the model, called `name`.
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


def need_backbone(value: Any) -> Backbone:
    """`value`, or `BackboneError` where it is something else than a backbone."""
    if isinstance(value, Backbone):
        return value
    why = f"{type(value).__name__} is no Backbone: load one with load_backbone, or make one with Backbone.wrap(model)."
    raise BackboneError(why)


def move(model: nn.Module, device: str | torch.device) -> None:
    """Move a model to a device. Raises BackboneError if the device does not exist, or its memory is too small."""
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(". ")[0]
        raise BackboneError(f"The device {device} can't be used ({reason}): name another, such as cpu.") from error


def default_device() -> torch.device:
    """The current accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _sites(model: PreTrainedModel, name: str) -> Sites:
    """A model's sites; `BackboneError` for one that generates text with attention to later tokens."""
    sites = Sites(model)
    if model.can_generate() and not (sites.family.causal or getattr(model.config, "is_decoder", False)):
        raise BackboneError(
            f"{name} is a {model.config.model_type} model, whose tokens see later ones, so it can't continue text: "
            "name a causal language model, or load this one as masked-lm or encoder."
        )
    return sites


def _unwrap(model: Any) -> PreTrainedModel:
    """The live transformers model inside a compiled or PEFT wrapper."""
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    if isinstance(getattr(model, "backbone", None), Backbone):
        raise BackboneError("This model is a GraftedModel: pass the model below, `GraftedModel.detach().model`.")
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        why = f"{type(model).__name__} is not a transformers model: pass a PreTrainedModel, or a PEFT or compiled one."
        raise BackboneError(why)
    return model
