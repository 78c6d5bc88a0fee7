"""`Backbone`: a frozen pretrained model with its tokenizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn

from graftlm.backbone.added_tokens import AddedTokens, ExtendedVocabulary, extend
from graftlm.backbone.fingerprint import Fingerprint, checkpoint_parameters, fingerprint
from graftlm.backbone.output_layer import OutputLayer
from graftlm.backbone.sites import Sites
from graftlm.backbone.token_rows import check_rows
from graftlm.errors import BackboneError, WrongBackboneError, first_line

# Importing models of transformers takes seconds, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BackboneKind = Literal["causal-lm", "masked-lm", "encoder"]

_Module = TypeVar("_Module", bound=nn.Module)

_PATCHED_METHODS = ("generate", "init_continuous_batching")
"""Methods of a model that attached grafts replace."""


@dataclass(repr=False)
class Backbone:
    """A frozen pretrained model and its tokenizer; never modified, never saved.

    Attributes:
        model: the live transformers model.
        tokenizer: its tokenizer, if there is one.
        name: name on the hub or path, by which the model can be loaded again.
        sites: the locations of its modules.
        kind: the model's head: `causal-lm`, `masked-lm`, or `encoder` for none.
        extended: the tokens that `with_tokens` added to the tokenizer; None without any. The model has no rows for
            them: those belong to the grafts that are built for this backbone.
        plain: the backbone without added tokens, of which this one shares the model; None if this is it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    sites: Sites
    kind: BackboneKind = "causal-lm"
    extended: ExtendedVocabulary | None = None
    plain: Backbone | None = None

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"Backbone({self.name!r}, {model} with {self.parameter_count:,} parameters, {self.kind})"

    @classmethod
    def wrap(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        kind: BackboneKind | None = None,
    ) -> Backbone:
        """Make a backbone from a model in memory, which is put into evaluation mode.

        Args:
            model: a transformers model: plain, quantized, compiled, or with PEFT adapters attached.
            tokenizer: its tokenizer; without one, text can't be read.
            name: name of the model; by default the one in its config.
            kind: the model's head; None derives it from the model's class.

        Raises:
            BackboneError: `model` is not a transformers model, is a `GraftedModel`, or generates text although its
                tokens attend to later ones.
            UnknownFamilyError: the structure of the model is unknown, or its family does not fit.
            TapError: its family names a module that the model does not have.
        """
        live = _unwrap(model).eval()
        name = name or live.config.name_or_path or "in memory"
        return cls(
            model=live,
            tokenizer=tokenizer,
            name=name,
            sites=find_sites(live, name),
            kind=kind or _kind_of(live),
        )

    @property
    def without_tokens(self) -> Backbone:
        """The backbone with the tokenizer that the model was trained with."""
        return self.plain or self

    def with_tokens(self, tokens: AddedTokens | Sequence[str]) -> Backbone:
        """Return this backbone with a tokenizer that has further tokens. The model, which both share, does not change.

        A graft that is built for the result has an embedding of each token, and a row of the output layer if the
        backbone's are not tied. It acts only on a backbone with the same tokens.

        Args:
            tokens: the tokens, as texts or as they were learned.

        Raises:
            BackboneError: the backbone has added tokens, no tokenizer, or a model or tokenizer to which tokens can't be
                added; or a token exists already, is changed by decoding, is empty or only whitespace, or there twice.
        """
        if self.extended is not None:
            raise BackboneError(
                f"The backbone {self.name} has {self.extended.count:,} added tokens already: add all tokens in one "
                "call of with_tokens."
            )
        added = tokens if isinstance(tokens, AddedTokens) else AddedTokens(tuple(tokens))
        extended = extend(self.need_tokenizer(), added, self.name)
        check_rows(self.model, self.sites, extended, self.name)
        return replace(self, tokenizer=extended.tokenizer, extended=extended, plain=self)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The model's fingerprint, computed once, since the weights never change. Added tokens have no part in it."""
        return fingerprint(self.model) if self.plain is None else self.plain.fingerprint

    @property
    def parameter_count(self) -> int:
        """Number of parameters in the checkpoint; tied weights count once, even if quantization has untied them."""
        return sum(parameter.numel() for parameter in checkpoint_parameters(self.model))

    @cached_property
    def bare_model(self) -> PreTrainedModel:
        """The model without grafts, in evaluation mode, even while grafts are attached.

        It shares all weights. It is made on first access, and lacks modules that are replaced later.

        Raises:
            BackboneError: another library has replaced the forward methods of the model's modules.
        """
        if self.plain is not None:
            return self.plain.bare_model
        clone = clone_without_hooks(self.model, self.name)
        for method in _PATCHED_METHODS:
            vars(clone).pop(method, None)
        return clone.eval()

    @cached_property
    def bare_output_layer(self) -> OutputLayer | None:
        """The output layer of `bare_model`; None if it has none apart from its body."""
        return OutputLayer.of(self.bare_model, Sites(self.bare_model))

    def check_graft(self, name: str, built_for: Fingerprint | None) -> None:
        """Check that a graft was built for this backbone.

        Args:
            name: the graft's name in the message.
            built_for: fingerprint of the backbone that the graft was built for; None if it is unknown, which passes.

        Raises:
            WrongBackboneError: the graft was built for another backbone.
        """
        if built_for is None:
            return
        difference = built_for.difference(self.fingerprint)
        if difference:
            raise WrongBackboneError(
                f"The graft {name} was built for another backbone than {self.name} ({difference}): pass the backbone "
                "that it was built for, or build the graft again."
            )

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    def move(self, device: str | torch.device | None = None) -> None:
        """Move the model to a device in place.

        Args:
            device: the device; None for `default_device()`.

        Raises:
            BackboneError: the device does not exist, or its memory is too small.
        """
        move(self.model, device or default_device())

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            BackboneError: the backbone has no tokenizer.
        """
        if self.tokenizer is None:
            raise BackboneError(
                f"The backbone {self.name} has no tokenizer, but text needs one: put tokenizer.json and "
                "tokenizer_config.json next to its weights, or pass a tokenizer."
            )
        return self.tokenizer


def find_sites(model: PreTrainedModel, name: str) -> Sites:
    """Find a model's sites.

    Args:
        model: the model, possibly without weights.
        name: name of the model in messages.

    Raises:
        BackboneError: the model generates text although its tokens attend to later ones.
        UnknownFamilyError: the structure of the model is unknown, or its family does not fit.
        TapError: its family names a module that the model does not have.
    """
    sites = Sites(model)
    is_causal = sites.family.causal or getattr(model.config, "is_decoder", False)
    if model.can_generate() and not is_causal:
        raise BackboneError(
            f"{name} is a {model.config.model_type} model whose tokens attend to later ones, so it can't continue "
            "text: name a causal language model, or load this one as masked-lm or encoder."
        )
    return sites


def clone_without_hooks(module: _Module, name: str) -> _Module:
    """Return a copy of a module tree without hooks, which shares the dictionaries of parameters and buffers.

    Modules that later wrap or replace modules of the original, as PEFT's do, do not appear in the copy.

    Args:
        module: the root of the module tree.
        name: name of the model in messages.

    Raises:
        BackboneError: another library has replaced the forward methods of modules of the model.
    """
    has_children = any(True for _ in module.children())
    if "forward" in vars(module) and has_children:
        raise BackboneError(
            f"Another library replaced the forward methods of modules of {name}, as accelerate does to spread a model "
            "over devices, so the bare model can't run without its hooks: load it on one device."
        )
    clone = object.__new__(type(module))
    for key, value in vars(module).items():
        vars(clone)[key] = OrderedDict() if _holds_hooks(key, value) else value
    vars(clone).pop("_compiled_call_impl", None)  # It would call the original module.
    children: dict[str, nn.Module | None] = {}
    for key, child in module._modules.items():
        children[key] = None if child is None else clone_without_hooks(child, name)
    vars(clone)["_modules"] = children
    return cast("_Module", clone)


def _holds_hooks(key: str, value: object) -> bool:
    """Return whether an attribute of a module is one of its dictionaries of hooks."""
    return isinstance(value, dict) and key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def need_backbone(value: object) -> Backbone:
    """Return `value` if it is a backbone.

    Raises:
        BackboneError: `value` is something else.
    """
    if isinstance(value, Backbone):
        return value
    raise BackboneError(
        f"The backbone is of type {type(value).__name__}, but a Backbone is expected: load one with load_backbone, or "
        "make one with Backbone.wrap(model)."
    )


def move(model: nn.Module, device: str | torch.device) -> None:
    """Move a model to a device in place.

    Args:
        model: the model, with weights.
        device: the device, such as `cuda:1`.

    Raises:
        BackboneError: the device does not exist, or its memory is too small. A part of the model may be there then.
    """
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(". ")[0]
        raise BackboneError(f"The device {device} can't be used ({reason}): name another, such as cpu.") from error


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _kind_of(model: PreTrainedModel) -> BackboneKind:
    """Derive the kind of head from a model's class."""
    if model.base_model is model:
        return "encoder"
    if type(model).__name__.endswith("ForMaskedLM"):
        return "masked-lm"
    return "causal-lm"


def _unwrap(model: Any) -> PreTrainedModel:
    """Return the live transformers model inside a compiled or PEFT wrapper."""
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    if isinstance(getattr(model, "backbone", None), Backbone):
        raise BackboneError("This model is a GraftedModel: pass the model below it, `GraftedModel.detach().model`.")
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise BackboneError(
            f"The model is of type {type(model).__name__}, but a transformers model is expected: pass a "
            "PreTrainedModel, which may be compiled or have PEFT adapters."
        )
    return model
