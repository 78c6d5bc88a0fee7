"""A live model with PEFT's modules in it, without the side effects of a `PeftModel`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, cast_adapter_dtype
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftlm.errors import BackboneError, first_line

if TYPE_CHECKING:
    from peft import PeftType

ADAPTER = "graft"
"""PEFT's name of a graft's adapter."""
_PREFIX = "base_model."  # precedes every name of a `PeftModel`


class AdaptedModel(nn.Module):
    """A model into which PEFT has put its modules, with the names that they have in a `PeftModel`.

    Args:
        model: the model, which is changed in place.
        config: PEFT's config.
    """

    def __init__(self, model: PreTrainedModel, config: PeftConfig) -> None:
        super().__init__()
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[cast("PeftType", config.peft_type)]
        self.base_model: BaseTuner = tuner(model, copy.deepcopy(config), ADAPTER)
        self.peft_config = self.base_model.peft_config
        # PEFT trains in float32 on half-precision models.
        cast_adapter_dtype(model, ADAPTER)
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                _repair_after_cast(module)

    def trained(self) -> list[Tensor]:
        """Return the parameters that train."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that PEFT saves, without the prefix of a `PeftModel` in their names."""
        tensors = get_peft_model_state_dict(self, adapter_name=ADAPTER, save_embedding_layers=False)
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that PEFT saves.

        Args:
            tensors: the tensors by the names that `tensors` returns.
        """
        prefixed = {_PREFIX + name: tensor for name, tensor in tensors.items()}
        set_peft_model_state_dict(self, prefixed, adapter_name=ADAPTER)


def _repair_after_cast(layer: Any) -> None:
    """Repair hooks on old parameters, and magnitudes of rounded norms, which are stale after a cast to float32."""
    if hasattr(layer, "_attach_hooks"):
        layer._detach_hooks()
        layer._attach_hooks(ADAPTER)
    if ADAPTER in getattr(layer, "lora_magnitude_vector", ()) and ADAPTER in layer.lora_A:
        layer.lora_magnitude_vector[ADAPTER].update_layer(
            base_layer=layer.get_base_layer(),
            scaling=layer.scaling[ADAPTER],
            lora_A=layer.lora_A[ADAPTER].weight,
            lora_B=layer.lora_B[ADAPTER].weight,
        )


def adapt(model: PreTrainedModel, config: PeftConfig, label: str) -> AdaptedModel:
    """Put PEFT's modules into a model.

    Args:
        model: the model, which is changed in place.
        config: PEFT's config, which is copied.
        label: the name of the method for error messages.

    Raises:
        BackboneError: PEFT can't adapt the model, or the result can't be a graft. The model is then unchanged.
    """
    use = f"{label} on this {model.config.model_type} model"
    with _restored_on_error(model) as weights:
        try:
            adapted = AdaptedModel(model, config)
        except Exception as error:  # PEFT may raise anything
            problem = first_line(error).partition(". ")[0]
            raise BackboneError(
                f"PEFT can't put {use} ({problem}): choose other options, such as target_modules, or another method."
            ) from error
        problem = _problem(adapted, weights)
        if problem:
            raise BackboneError(f"{use} {problem}: choose other options, or another method.")
    return adapted


def _problem(adapted: AdaptedModel, weights: Sequence[tuple[nn.Parameter, Tensor]]) -> str:
    """Return why an adapted model can't be a graft, as the end of a sentence; an empty string if it can.

    Args:
        adapted: the model with PEFT's modules.
        weights: the backbone's parameters, and their storage before PEFT changed the model.
    """
    trained = {id(parameter) for parameter in adapted.trained()}
    if not trained:
        return "finds no module that it can train"
    own = {id(parameter) for parameter, _ in weights}
    if trained & own or any(_moved(parameter, data) for parameter, data in weights):
        return "changes the backbone's own weights"
    inside = {id(parameter) for parameter in adapted.base_model.model.parameters()}
    if trained - inside:
        return "keeps weights outside the model, where they would not be trained"
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in adapted.modules()):
        return "trains copies of whole modules (for example by modules_to_save), which PEFT does not remove again"
    return ""


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Restore modules and weights of a model if the block raises; yields its parameters and their storage."""
    children = {module: dict(module._modules) for module in model.modules()}
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield weights
    except BaseException:
        for module, modules in children.items():
            module._modules.clear()
            module._modules.update(modules)
        for parameter, data in weights:
            if _moved(parameter, data):
                parameter.data = data
        vars(model).pop("peft_config", None)
        raise


def _moved(parameter: nn.Parameter, data: Tensor) -> bool:
    """Return whether a plain parameter has other storage than before; quantized parameters have no plain storage."""
    return type(data) is Tensor and parameter.data_ptr() != data.data_ptr()
