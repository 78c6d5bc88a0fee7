"""The state of a backbone's model that attaching grafts and training change."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


class BackboneState:
    """A copy of each parameter's `requires_grad`, each module's mode, and the attributes of the model's configs.

    Args:
        model: the backbone's model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._modes: dict[nn.Module, bool] = {module: module.training for module in model.modules()}
        configs = [model.config, getattr(model, "generation_config", None)]
        self._configs = [(config, dict(vars(config))) for config in configs if config is not None]

    def restore(self) -> None:
        """Set flags, modes and configs to the values they had when this object was made."""
        for name, parameter in self._model.named_parameters():
            was_trainable = self._trainable.get(name, parameter.requires_grad)
            parameter.requires_grad_(was_trainable)
        for module, mode in self._modes.items():
            module.training = mode
        for config, values in self._configs:
            vars(config).clear()
            vars(config).update(values)
