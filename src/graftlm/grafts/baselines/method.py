"""Baselines through the same loop, data and report: LoRA by PEFT, and full fine-tuning."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from peft import LoraConfig, LoraModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from pydantic import Field
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone
from graftlm.errors import TapConflictError
from graftlm.grafts.base import Exportable, Graft, GraftConfig, HasTensors, ReplacesModel, check_tensors
from graftlm.grafts.trained_copy import TrainsCopy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "graft"


class LoRABaselineConfig(GraftConfig):
    """Config of LoRA on the FFN's Linears.

    Args:
        capacity: extra weights as a share of the backbone's weights.
        rank: the rank of the factors; it replaces `capacity`.
        scale: the factor on B A x, which is alpha / rank.
    """

    kind: Literal["lora"] = "lora"
    capacity: float = Field(0.2, gt=0, le=4)
    rank: int | None = Field(None, ge=1)
    scale: float = Field(1.0, gt=0)


class LoRABaseline(Graft, ReplacesModel, Exportable, HasTensors):
    """LoRA on every Linear of the FFNs. PEFT adds its modules to the live model, and unloads them again."""

    Config: ClassVar[type[GraftConfig]] = LoRABaselineConfig
    label = "LoRA on the FFN"

    def __init__(self, config: LoRABaselineConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self._rank = config.rank or rank_for(config.capacity, backbone)
        weights, sites = _ffn_weights(backbone), backbone.sites
        paths = {module: path for path, module in backbone.model.named_modules()}
        modules, parameters = [paths[module] for module, _ in weights], []
        if any(sites.is_mixture(layer) for layer in range(sites.n_layers)):
            # PEFT takes the Linears of a mixture for those of older checkpoints, so parameters are named instead.
            modules, parameters = [], [f"{paths[module]}.{name}" for module, name in weights]
        self._peft = LoraConfig(
            r=self._rank,
            lora_alpha=config.scale * self._rank,  # type: ignore[arg-type]  # PEFT takes fractions as well
            target_modules=modules,
            target_parameters=parameters or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module, _ in weights),
        )
        self._expected = _factors(self._peft, backbone.model)
        self._live: list[LoraModel] = []
        self._pending: dict[str, Tensor] | None = None

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise TapConflictError(
                "A PEFT adapter is attached to the backbone already, and LoRA as a baseline would be unloaded together "
                "with it: merge or unload that adapter first."
            )
        self._live = [LoraModel(model, copy.deepcopy(self._peft), _ADAPTER)]
        cast_adapter_dtype(self._live[0], _ADAPTER)  # to float32, as PEFT trains on half-precision models
        if self._pending is not None:
            set_peft_model_state_dict(self._live[0], self._pending, adapter_name=_ADAPTER)
            self._pending = None
        return model

    def detach(self, model: PreTrainedModel) -> None:
        if self._live:
            self._pending = {name: tensor.clone() for name, tensor in self.tensors().items()}
            self._live.pop().unload()

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        adapted = LoraModel(copy.deepcopy(backbone.model), copy.deepcopy(self._peft), _ADAPTER)
        cast_adapter_dtype(adapted, _ADAPTER)
        set_peft_model_state_dict(adapted, self.tensors(), adapter_name=_ADAPTER)
        model: Any = adapted.eval().merge_and_unload()
        return model

    def tensors(self) -> dict[str, Tensor]:
        if not self._live:
            return dict(self._pending or {})
        return get_peft_model_state_dict(self._live[0], adapter_name=_ADAPTER)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_tensors(self._expected, tensors)
        if self._live:
            set_peft_model_state_dict(self._live[0], dict(tensors), adapter_name=_ADAPTER)
        else:
            self._pending = dict(tensors)

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        return {"rank": self._rank}


def rank_for(capacity: float, backbone: Backbone) -> int:
    """The rank at which the factors of all FFN Linears hold `capacity` times the backbone's weights."""
    weights = capacity * sum(parameter.numel() for parameter in backbone.model.parameters())
    shapes = [getattr(module, name).shape for module, name in _ffn_weights(backbone)]
    return max(1, round(weights / sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)))


def _ffn_weights(backbone: Backbone) -> list[tuple[Any, str]]:
    return [weight for layer in range(backbone.sites.n_layers) for weight in backbone.sites.ffn_weights(layer)]


def _factors(peft: LoraConfig, model: PreTrainedModel) -> dict[str, Tensor]:
    """The factors that PEFT will create, as tensors without storage."""
    with torch.device("meta"):
        adapted = LoraModel(type(model)(copy.deepcopy(model.config)), copy.deepcopy(peft), _ADAPTER)
    return get_peft_model_state_dict(adapted, adapter_name=_ADAPTER)


class FineTuningConfig(GraftConfig):
    """Config of full fine-tuning; it has no options."""

    kind: Literal["finetune"] = "finetune"


class FineTuning(TrainsCopy, Exportable):
    """Training of all weights of a copy of the backbone. The tensors are the full model's."""

    Config: ClassVar[type[GraftConfig]] = FineTuningConfig
    label = "fine-tuning"

    def __init__(self, config: FineTuningConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self.copy_weights(backbone.model, [name for name, _ in backbone.model.named_parameters()])

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        trained = self.tensors()
        dtype = next(iter(trained.values())).dtype  # a backbone in half precision is trained in float32
        model: Any = copy.deepcopy(backbone.model).to(dtype)  # type: ignore[arg-type]  # its decorator hides it
        model.load_state_dict(trained, strict=False)
        return model.eval()
