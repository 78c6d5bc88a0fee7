"""Baselines through the same loop, data and report: LoRA by PEFT, and full fine-tuning."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, Literal, cast

from peft import PeftConfig
from pydantic import Field
from transformers import PreTrainedModel

from graftlm.backbone import Backbone
from graftlm.grafts.base import Exportable, GraftConfig
from graftlm.grafts.baselines.peft_graft import PeftGraft, PeftGraftConfig, default_targets
from graftlm.grafts.trained_copy import TrainsCopy


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


class LoRABaseline(PeftGraft):
    """LoRA on every Linear of the FFNs. PEFT adds its modules to the live model, and unloads them again."""

    Config: ClassVar[type[GraftConfig]] = LoRABaselineConfig
    label = "LoRA on the FFN"

    def _peft_config(self, backbone: Backbone) -> PeftConfig:
        config = cast("LoRABaselineConfig", self.config)
        self._rank = config.rank or rank_for(config.capacity, backbone)
        options = {"r": self._rank, "lora_alpha": config.scale * self._rank}  # PEFT takes fractions as well
        return PeftGraftConfig(method="LORA", options=options).peft_config(**default_targets("LORA", backbone))

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        return {"rank": self._rank}


def rank_for(capacity: float, backbone: Backbone) -> int:
    """The rank at which the factors of all FFN Linears hold `capacity` times the backbone's weights."""
    weights = capacity * backbone.parameter_count
    layers = map(backbone.sites.ffn_weights, range(backbone.sites.n_layers))
    shapes = [getattr(module, name).shape for weights in layers for module, name in weights]
    return max(1, round(weights / sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)))


class FineTuningConfig(GraftConfig):
    """Config of full fine-tuning; without `embeddings`, token embeddings and output head stay as they are."""

    kind: Literal["finetune"] = "finetune"
    embeddings: bool = True


class FineTuning(TrainsCopy, Exportable):
    """Training of all weights of a copy of the backbone. The tensors are the full model's."""

    Config: ClassVar[type[GraftConfig]] = FineTuningConfig
    label = "fine-tuning"

    def __init__(self, config: FineTuningConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        model = backbone.model
        ends = [] if config.embeddings else [model.get_input_embeddings(), model.get_output_embeddings()]
        frozen = {id(weight) for end in ends if end is not None for weight in end.parameters()}
        self.copy_weights(model, [name for name, weight in model.named_parameters() if id(weight) not in frozen])

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        trained = self.tensors()
        dtype = next(iter(trained.values())).dtype  # a backbone in half precision is trained in float32
        model: Any = copy.deepcopy(backbone.model).to(dtype)  # type: ignore[arg-type]  # its decorator hides it
        model.load_state_dict(trained, strict=False)
        return model.eval()
