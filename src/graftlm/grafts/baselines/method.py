"""Baselines through the same loop, data and report: LoRA by PEFT, and full fine-tuning."""

from __future__ import annotations

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
from graftlm.grafts.base import Graft, GraftConfig, HasTensors, ReplacesModel, check_tensors
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


class LoRABaseline(Graft, ReplacesModel, HasTensors):
    """LoRA on every Linear of the FFNs. PEFT adds its modules to the live model, and unloads them again."""

    Config: ClassVar[type[GraftConfig]] = LoRABaselineConfig
    label = "LoRA on the FFN"

    def __init__(self, config: LoRABaselineConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        linears = set(_ffn_linears(backbone))
        self._names = [name for name, module in backbone.model.named_modules() if module in linears]
        self._rank = config.rank or rank_for(config.capacity, backbone)
        self._expected = _factors(self._names, self._rank, backbone)
        self._conv = any(isinstance(module, Conv1D) for module in linears)
        self._live: list[LoraModel] = []
        self._pending: dict[str, Tensor] | None = None

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        config: LoRABaselineConfig = self.config  # type: ignore[assignment]
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise TapConflictError(
                "A PEFT adapter is attached to the backbone already, and LoRA as a baseline would be unloaded together "
                "with it: merge or unload that adapter first."
            )
        peft = LoraConfig(
            r=self._rank,
            lora_alpha=config.scale * self._rank,  # type: ignore[arg-type]  # PEFT takes fractions as well
            target_modules=self._names,
            fan_in_fan_out=self._conv,
        )
        self._live = [LoraModel(model, peft, _ADAPTER)]
        cast_adapter_dtype(self._live[0], _ADAPTER)  # to float32, as PEFT trains on half-precision models
        if self._pending is not None:
            set_peft_model_state_dict(self._live[0], self._pending, adapter_name=_ADAPTER)
            self._pending = None
        return model

    def detach(self, model: PreTrainedModel) -> None:
        if self._live:
            self._pending = {name: tensor.clone() for name, tensor in self.tensors().items()}
            self._live.pop().unload()

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
    return max(1, round(weights / sum(sum(module.weight.shape) for module in _ffn_linears(backbone))))


def _ffn_linears(backbone: Backbone) -> list[Any]:
    return [module for layer in range(backbone.sites.n_layers) for module in backbone.sites.ffn_linears(layer)]


def _factors(names: list[str], rank: int, backbone: Backbone) -> dict[str, Tensor]:
    """The factors that PEFT will create, as tensors without storage."""
    shapes: dict[str, tuple[Any, Any]] = {}
    for name in names:
        module = backbone.model.get_submodule(name)
        rows, columns = module.weight.shape  # type: ignore[union-attr, misc]
        outputs, inputs = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
        shapes |= {f"model.{name}.lora_A.weight": (rank, inputs), f"model.{name}.lora_B.weight": (outputs, rank)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


class FineTuningConfig(GraftConfig):
    """Config of full fine-tuning; it has no options."""

    kind: Literal["finetune"] = "finetune"


class FineTuning(TrainsCopy):
    """Training of all weights of a copy of the backbone. The tensors are the full model's."""

    Config: ClassVar[type[GraftConfig]] = FineTuningConfig
    label = "fine-tuning"

    def __init__(self, config: FineTuningConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self.copy_weights(backbone.model, [name for name, _ in backbone.model.named_parameters()])
