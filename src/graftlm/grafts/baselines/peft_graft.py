"""Any method of PEFT as a graft: PEFT puts its modules into the live model, and removes them again."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone, Sites
from graftlm.errors import ArtifactError, BackboneError, RecipeError, TapConflictError, first_line
from graftlm.grafts.base import Graft, GraftConfig, HasTensors, ReplacesModel, check_tensors
from graftlm.grafts.baselines.adapted_model import AdaptedModel, adapt
from graftlm.grafts.baselines.peft_config import (
    PeftGraftConfig,
    config_class,
    is_traceable,
    option_names,
    option_of_size,
)
from graftlm.grafts.exports import Exportable, ExportsLowRank, LowRankUpdate
from graftlm.grafts.sizes import HasSizes, Sizes
from graftlm.grafts.untying import tie_if_equal, untie

# Largest change of the logits that counts as rounding, as a share of the largest logit. In half precision it is 16
# roundings.
_START_TOLERANCE = 1e-4
_ALONE = "graft export GRAFT --to FOLDER"


class PeftGraft(Graft, ReplacesModel, Exportable, ExportsLowRank, HasTensors, HasSizes):
    """A method of PEFT on Linears of the live model. PEFT adds its modules, and unloads them again.

    Args:
        config: method and options.
        backbone: the backbone that is adapted.

    Attributes:
        trained_parameters: the number of trainable parameters.

    Raises:
        BackboneError: PEFT can't adapt the backbone, or the result can't be a graft.
        TapError: the method adapts the Linears of the FFNs by default and can't adapt mixtures of experts, but an FFN
            is one.
    """

    Config: ClassVar[type[GraftConfig]] = PeftGraftConfig
    label = "a method of PEFT"

    def __init__(self, config: GraftConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self._label = config.label
        self._peft = self._peft_config(backbone)
        self._expected, self.trained_parameters = self._without_values(backbone.model)
        # A plain list does not register the adapted model as a submodule.
        self._live: list[AdaptedModel] = []
        self._pending: dict[str, Tensor] | None = None  # the tensors while the graft is not attached

    def _peft_config(self, backbone: Backbone) -> PeftConfig:
        config = cast("PeftGraftConfig", self.config)
        if "target_modules" in config.options or config.label == "TRAINABLE_TOKENS":
            return config.peft_config(fan_in_fan_out=_has_conv1d(backbone))
        return config.peft_config(**default_targets(config.method, backbone))

    @classmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        own = cast("PeftGraftConfig", config)
        key, values = size_option(own, backbone)

        def with_value(value: int) -> GraftConfig:
            return own.model_copy(update={"options": own.options | {key: value}})

        @cache
        def parameters(value: int) -> int:
            return PeftGraft(with_value(value), backbone).trained_parameters

        return Sizes(key=key, values=values, parameters=parameters, config=with_value)

    def _without_values(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], int]:
        """Return tensors with the names and shapes that PEFT will create, and the number of parameters that train."""
        try:
            with torch.device("meta"):
                without_storage = type(model)(copy.deepcopy(model.config))
                return _described(AdaptedModel(without_storage, self._peft))
        except Exception:
            # Some methods read values of the weights. A mistake of the user is raised again below.
            return self._of_sharing_copy(model)

    def _of_sharing_copy(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], int]:
        """Describe what PEFT creates in a copy of the model on the same weights."""
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        try:
            with torch.random.fork_rng(devices=[]):
                return _described(self._adapt(copy.deepcopy(model, shared)))
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def _adapt(self, model: PreTrainedModel) -> AdaptedModel:
        return adapt(model, self._peft, self._label)

    @property
    def live_tuner(self) -> BaseTuner:
        """PEFT's tuner of the attached graft."""
        assert self._live, "the graft is attached"
        return self._live[0].base_model

    @property
    def decodes_in_one_graph(self) -> bool:
        return is_traceable(self._peft)

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise TapConflictError(
                "A PEFT adapter is already attached to the backbone, and the adapter of this graft would be unloaded "
                "together with it: attach only one graft that uses PEFT, and merge or unload other adapters first."
            )
        bare = _logits(model) if self._pending is None else None
        self._live = [self._adapt(model)]
        try:
            if bare is not None:
                self._check_start(model, bare)
            elif self._pending is not None:
                self._live[0].load(self._pending)
        except BaseException:
            self._live.pop().base_model.unload()
            raise
        self._pending = None
        return model

    def _check_start(self, model: PreTrainedModel, bare: Tensor) -> None:
        """Raise `BackboneError` if an untrained adapter changes the logits by more than rounding.

        Args:
            model: the adapted model.
            bare: (1, 5, V), the output of `_logits` before it was adapted.
        """
        try:
            change = (_logits(model) - bare).abs().max()
        except Exception as error:  # the code of a method may raise anything
            raise BackboneError(
                f"{self._label} can't run on this {model.config.model_type} model ({first_line(error)}): choose other "
                "options, or another method."
            ) from error
        tolerance = max(_START_TOLERANCE, 16 * torch.finfo(bare.dtype).eps)
        within_tolerance = change <= tolerance * bare.abs().max()
        if not within_tolerance:  # true for NaN as well
            raise BackboneError(
                f"{self._label} changes the logits of the backbone by {change:.2g} before training, but a graft must "
                "start without effect: set its initial weights to zero by PEFT's options (such as init_weights), or "
                "choose another method."
            )

    def detach(self, model: PreTrainedModel) -> None:
        if self._live:
            self._pending = {name: tensor.clone() for name, tensor in self.tensors().items()}
            self._live.pop().base_model.unload()

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        copied = copy.deepcopy(backbone.model)
        adapted = self._adapt(copied).eval()
        adapted.load(self.tensors())
        layers = [layer for layer in adapted.modules() if isinstance(layer, BaseTunerLayer)]
        # PEFT adds an update to the weight of its layer, also where the layer shares the weight with another one.
        is_untied = untie(copied, [layer.get_base_layer() for layer in layers])
        try:
            model: Any = adapted.base_model.merge_and_unload()
        except Exception as error:  # methods without merging raise errors of different types
            raise ArtifactError(
                f"PEFT can't merge {self._label} into the backbone's weights ({first_line(error)}): load the "
                "graft with graftlm."
            ) from error
        if is_untied:
            tie_if_equal(model)
        return model

    def low_rank_updates(self, backbone: Backbone) -> dict[str, LowRankUpdate]:
        self._check_low_rank()
        scales = self._scales(backbone.model)
        remaining = self.tensors()
        updates = {}
        for path, scale in scales.items():
            a = remaining.pop(f"model.{path}.lora_A.weight", None)
            b = remaining.pop(f"model.{path}.lora_B.weight", None)
            if a is not None and b is not None:
                updates[path] = LowRankUpdate(a, scale * b)
        if remaining:
            raise ArtifactError(
                f"{self._label} has the tensor {min(remaining)}, but an adapter of factors A and B of linear modules "
                f"is expected: export the graft alone, without sharing the backbone ({_ALONE})."
            )
        return updates

    def _check_low_rank(self) -> None:
        """Raise `ArtifactError` unless PEFT's method is plain LoRA."""
        if not isinstance(self._peft, LoraConfig) or self._peft.use_dora:
            raise ArtifactError(
                f"{self._label} computes something else than B A x, but plain LoRA is expected: export the graft "
                f"alone, without sharing the backbone ({_ALONE})."
            )
        if self._peft.target_parameters:
            # In layers without experts the names are those of Linears' weights.
            example = min(self._peft.target_parameters, key=lambda name: name.endswith(".weight"))
            raise ArtifactError(
                f"{self._label} changes parameters by their names, such as {example}, but linear modules are expected: "
                f"adapt linear modules, or export the graft alone, without sharing the backbone ({_ALONE})."
            )

    def _scales(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the factor of B A x of each module that the adapter changes, by the path of the module."""
        with torch.device("meta"):
            without_storage = type(model)(copy.deepcopy(model.config))
        adapted = self._adapt(without_storage)
        scales = {}
        for path, module in adapted.base_model.model.named_modules():
            if isinstance(module, LoraLayer):
                (scale,) = module.scaling.values()
                scales[path] = float(scale)
        return scales

    def tensors(self) -> dict[str, Tensor]:
        if self._live:
            return self._live[0].tensors()
        return dict(self._pending or {})

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_tensors(self._expected, tensors)
        if self._live:
            self._live[0].load(tensors)
        else:
            self._pending = dict(tensors)


def _described(adapted: AdaptedModel) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of PEFT's modules, and the number of parameters that train."""
    return adapted.tensors(), sum(parameter.numel() for parameter in adapted.trained())


def size_option(config: PeftGraftConfig, backbone: Backbone) -> tuple[str, Sequence[int]]:
    """Return the option that sets the size of a method, and its values in the order of rising numbers of parameters.

    Args:
        config: the method and its options.
        backbone: the backbone that is adapted.

    Raises:
        RecipeError: the method has no such option, or the options set it already.
    """
    size = option_of_size(config.method)
    if size is None:
        raise RecipeError(
            f"capacity is match, but {config.label} has no option that sets its size: leave capacity out, or choose a "
            "method with a rank."
        )
    for key in (size.key, *size.others):
        if key in config.options:
            raise RecipeError(f"capacity is match, but the options set {key}, too: leave one of them out.")
    sites = backbone.sites
    widths = [width for layer in range(sites.n_layers) for width in _ffn_widths(sites, layer)]
    values: Sequence[int]
    if size.divides:
        common = math.gcd(*widths)
        values = [number for number in range(2, common + 1) if common % number == 0]
    else:
        largest = min(widths) ** 2 if size.squared else min(widths)
        values = range(size.step, largest, size.step)
    return size.key, values if size.grows else values[::-1]


def _ffn_widths(sites: Sites, layer: int) -> list[int]:
    """Return the widths of the inputs and outputs of the Linears of an FFN."""
    return [width for module, name in sites.ffn_weights(layer) for width in getattr(module, name).shape[-2:]]


def default_targets(method: str, backbone: Backbone) -> dict[str, object]:
    """Return fields of PEFT's config that name the modules to adapt: all Linears of the FFNs, or for LN_TUNING norms.

    Args:
        method: the name of the method, as in `PeftGraftConfig`.
        backbone: the backbone that is adapted.

    Returns:
        Values by the name of the field. Modules are given by their full paths. Some of the fields may not exist in the
        config of the method.
    """
    sites = backbone.sites
    layers = range(sites.n_layers)
    if method.upper() == "LN_TUNING":
        return {"target_modules": [site.path for layer in layers for site in sites.norms(layer)]}
    paths = {module: path for path, module in backbone.model.named_modules()}
    weights = [weight for layer in layers for weight in sites.ffn_weights(layer)]
    fan_in_fan_out = _has_conv1d(backbone)
    has_mixture = any(sites.is_mixture(layer) for layer in layers)
    if has_mixture and "target_parameters" in option_names(config_class(method)[0]):
        # PEFT treats the Linears of a mixture as those of older checkpoints, so the parameters are named instead.
        return {
            "fan_in_fan_out": fan_in_fan_out,
            "target_modules": [],
            "target_parameters": [f"{paths[module]}.{name}" for module, name in weights],
        }
    # IA3 scales the inputs of these Linears, and the outputs of all others.
    outputs = [paths[sites.ffn_linears(layer)[-1]] for layer in layers]
    return {
        "fan_in_fan_out": fan_in_fan_out,
        "target_modules": [paths[module] for module, _ in weights],
        "feedforward_modules": outputs,
    }


def _has_conv1d(backbone: Backbone) -> bool:
    """Return whether the backbone has GPT-2's transposed Linears."""
    return any(isinstance(module, Conv1D) for module in backbone.model.modules())


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """Return the logits (1, 5, V) of five tokens, or the last hidden states (1, 5, D) of a model without a head."""
    size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 6, device=model.device)[None] * size // 6
    # `forward` rather than `__call__` avoids compiled code.
    return model.forward(input_ids=ids, use_cache=False)[0]
