"""Removal of intruder dimensions from a trained LoRA, by PEFT.

A trained update B A adds singular vectors to a weight that none of the weight's own resembles. They carry much of what
is forgotten (Shuttleworth et al., 2024, arXiv 2410.21228). PEFT subtracts a share of them from W + B A, and takes the
nearest update of the same rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from peft import PeftConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.intruders import reduce_intruder_dimension
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from graftlm.errors import GraftError, first_line

_REDUCED = "reduced"


class _AsPeftModel:
    """What PEFT's function reads of a `PeftModel`.

    Args:
        tuner: the tuner, whose modules are in the live model.
    """

    peft_type = "LORA"

    def __init__(self, tuner: BaseTuner) -> None:
        self._tuner = tuner
        self.peft_config: Mapping[str, PeftConfig] = tuner.peft_config

    def add_adapter(self, name: str, config: PeftConfig) -> None:
        """Put an untrained adapter next to the others."""
        self._tuner.peft_config[name] = copy.deepcopy(config)
        self._tuner.inject_adapter(self._tuner.model, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules of the live model."""
        return iter(self._tuner.model.named_modules())

    def set_adapter(self, name: str) -> None:
        """Keep the active adapter: the weights are copied to it."""


def remove_intruders(tuner: BaseTuner, name: str, share: float) -> int:
    """Subtract a share of the intruder dimensions from a trained LoRA, in place.

    Args:
        tuner: the tuner, whose modules are in the live model.
        name: the name of the adapter.
        share: the share that is subtracted, 0 to 1.

    Returns:
        The number of intruder dimensions in all modules.

    Raises:
        GraftError: PEFT can't do it on this model.
    """
    lines: list[str] = []
    flags = {parameter: parameter.requires_grad for parameter in tuner.model.parameters()}
    try:
        reduce_intruder_dimension(
            _AsPeftModel(tuner),
            name,
            _REDUCED,
            mitigation_lambda=1 - share,  # PEFT multiplies the intruder dimensions by it
            logging_sink=lines.append,
        )
        _copy_factors(tuner, name)
    except Exception as error:  # PEFT may raise anything
        raise GraftError(
            f"PEFT can't remove intruder dimensions on this {tuner.model.config.model_type} model "
            f"({first_line(error)}): leave intruders out."
        ) from error
    finally:
        if _REDUCED in tuner.peft_config:
            tuner.delete_adapter(_REDUCED)
        tuner.set_adapter(name)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    return sum(int(line.rpartition(": ")[2]) for line in lines if ": Intruders: " in line)


@torch.no_grad()
def _copy_factors(tuner: BaseTuner, name: str) -> None:
    """Copy the factors of the reduced adapter to the trained one."""
    for module in tuner.model.modules():
        if isinstance(module, LoraLayer):
            for factors in (module.lora_A, module.lora_B):
                trained, reduced = (cast("nn.Linear", factors[key]) for key in (name, _REDUCED))
                trained.weight.copy_(reduced.weight)
