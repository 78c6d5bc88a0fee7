"""Baselines that use the same training loop, data and report: LoRA by PEFT, and full fine-tuning."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, cast

import torch
from peft import PeftConfig
from pydantic import Field, model_serializer
from torch import nn
from transformers import PreTrainedModel

from graftlm.backbone import Backbone
from graftlm.errors import RecipeError
from graftlm.grafts.base import ChangesAtEnd, GraftConfig
from graftlm.grafts.baselines.adapted_model import ADAPTER
from graftlm.grafts.baselines.intruders import remove_intruders
from graftlm.grafts.baselines.peft_config import PeftGraftConfig
from graftlm.grafts.baselines.peft_graft import PeftGraft, default_targets
from graftlm.grafts.exports import Exportable
from graftlm.grafts.sizes import Sizes
from graftlm.grafts.trained_copy import TrainsCopy

_LARGEST = 4
"""The largest capacity."""


class LoRABaselineConfig(GraftConfig):
    """Config of LoRA on the FFN's Linears.

    Args:
        capacity: extra weights as a share of the backbone's weights.
        rank: the rank of the factors; it replaces `capacity`.
        scale: the factor on B A x, which is alpha / rank.
        intruders: share of the intruder dimensions that is removed after training, by PEFT's
            `reduce_intruder_dimension`. Default: none is.
    """

    kind: Literal["lora"] = "lora"
    capacity: float = Field(0.2, gt=0, le=4)
    rank: int | None = Field(None, ge=1)
    scale: float = Field(1.0, gt=0)
    intruders: float | None = Field(None, gt=0, le=1)

    @property
    def changes_at_end(self) -> bool:
        return self.intruders is not None

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out `intruders` at its default, so that earlier runs keep their keys."""
        values = {"kind": self.kind} | serialize(self)
        if self.intruders is None:
            values.pop("intruders", None)
        return values


class LoRABaseline(PeftGraft, ChangesAtEnd):
    """LoRA on every Linear of the FFNs. PEFT adds its modules to the live model, and unloads them again.

    Args:
        config: rank and scale.
        backbone: the backbone whose FFNs are adapted.

    Raises:
        BackboneError: PEFT can't adapt the backbone.
    """

    Config: ClassVar[type[GraftConfig]] = LoRABaselineConfig
    label = "LoRA on the FFN"
    size_keys: ClassVar[Mapping[str, int]] = {"rank": 1}

    @classmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        per_rank = _weights_per_rank(backbone)
        return Sizes(
            key="rank",
            values=range(1, 2 + _LARGEST * backbone.parameter_count // per_rank),
            parameters=lambda rank: per_rank * rank,
            config=lambda rank: config.model_copy(update={"rank": rank}),
        )

    def _peft_config(self, backbone: Backbone) -> PeftConfig:
        config = cast("LoRABaselineConfig", self.config)
        self._rank = config.rank or rank_for(config.capacity, backbone)
        options = {
            "r": self._rank,
            "lora_alpha": config.scale * self._rank,  # PEFT accepts fractions
        }
        peft_config = PeftGraftConfig(method="LORA", options=options)
        targets = default_targets("LORA", backbone)
        if config.intruders is not None and (targets["fan_in_fan_out"] or "target_parameters" in targets):
            raise RecipeError(
                f"intruders is set, but the FFNs of {backbone.name} are no plain Linears, on which alone PEFT removes "
                "intruder dimensions: leave intruders out."
            )
        return peft_config.peft_config(**targets)

    def finish(self) -> dict[str, float]:
        share = cast("LoRABaselineConfig", self.config).intruders
        if share is None:
            return {}
        return {"intruders": remove_intruders(self.live_tuner, ADAPTER, share)}

    def describe(self, backbone: Backbone) -> dict[str, object]:
        return {"rank": self._rank}


def rank_for(capacity: float, backbone: Backbone) -> int:
    """Return the rank at which the factors of all FFN Linears have `capacity` times the backbone's weights.

    Args:
        capacity: extra weights as a share of the backbone's weights.
        backbone: the backbone whose FFNs get the factors.

    Returns:
        The nearest rank that is at least 1.
    """
    weights = capacity * backbone.parameter_count
    return max(1, round(weights / _weights_per_rank(backbone)))


def _weights_per_rank(backbone: Backbone) -> int:
    """Return the number of weights of the factors of all FFN Linears for each unit of their rank."""
    per_rank = 0
    for layer in range(backbone.sites.n_layers):
        for module, name in backbone.sites.ffn_weights(layer):
            shape = getattr(module, name).shape  # (outputs, inputs), or (experts, outputs, inputs)
            experts = math.prod(shape[:-2])
            per_rank += experts * sum(shape[-2:])
    return per_rank


class FineTuningConfig(GraftConfig):
    """Config of full fine-tuning.

    Args:
        embeddings: whether token embeddings and output head train.
    """

    kind: Literal["finetune"] = "finetune"
    embeddings: bool = True


class FineTuning(TrainsCopy, Exportable):
    """Training of all weights in a copy of the backbone. An artifact contains all weights that train.

    Args:
        config: whether the embeddings train.
        backbone: the backbone that is copied.
    """

    Config: ClassVar[type[GraftConfig]] = FineTuningConfig
    label = "fine-tuning"

    def __init__(self, config: FineTuningConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        model = backbone.model
        frozen = set() if config.embeddings else _embedding_weights(model)
        self.copy_weights(model, [name for name, weight in model.named_parameters() if id(weight) not in frozen])

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        trained = self.tensors()
        # The copy of a backbone in half precision was trained in float32.
        dtype = next(iter(trained.values())).dtype
        model = _cast(copy.deepcopy(backbone.model), dtype)
        model.load_state_dict(trained, strict=False)
        return model.eval()


def _embedding_weights(model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights of token embeddings and output head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {id(weight) for end in ends if isinstance(end, nn.Module) for weight in end.parameters()}


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    return model.to(dtype)  # type: ignore[arg-type, return-value]  # the decorator of `to` hides its signature
