"""Training of a backbone's own weights in a copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from graftlm.errors import BackboneError, TapConflictError
from graftlm.grafts.base import Graft, HasTensors, ReplacesModel, check_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainsCopy(Graft, ReplacesModel, HasTensors):
    """A graft that trains weights of a copy of the backbone, which shares all other weights with the backbone.

    If weights that train are in half precision, the copy is float32 and shares nothing, since half precision would lose
    small updates. A subclass calls `copy_weights` in `__init__`. An artifact contains the graft's own tensors and the
    copied weights.

    Attributes:
        prefix: prefix of the copied weights' names in an artifact.
        remedy: what the user of a quantized backbone can do instead of loading it without quantization.
    """

    prefix: ClassVar[str] = ""
    remedy: ClassVar[str] = "train another kind of graft"

    def copy_weights(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        """Choose the weights that train. The copy is made by `attach`.

        Args:
            model: the backbone's model.
            names: names of parameters of `model`; without any, `attach` makes no copy.
        """
        parameters = dict(model.named_parameters())
        # A plain dict and a plain list do not register the backbone's weights and the copy with this module.
        self._originals = {name: parameters[name] for name in names}
        self._copy: list[PreTrainedModel] = []
        self._pending: dict[str, Tensor] | None = None  # the values of the weights while there is no copy

    def changes_all_rows(self) -> bool:
        return bool(self._originals)

    @property
    def decodes_in_one_graph(self) -> bool:
        return True

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        if not self._originals:
            return model
        parameters = dict(model.named_parameters())
        if not self._originals.keys() <= parameters.keys():
            raise TapConflictError(
                "Adapters of PEFT wrap modules of the model, but a graft that trains a copy must be attached before "
                "them: place it first in the dict of GraftedModel."
            )
        to_train = {name: parameters[name] for name in self._originals}
        check_plain(to_train, self.remedy)
        if any(weight.dtype in (torch.bfloat16, torch.float16) for weight in to_train.values()):
            copied = copy.deepcopy(model).float()
        else:
            copied = _sharing_copy(model, to_train)
        self._copy = [copied]
        for weight in self._trained().values():
            weight.requires_grad_(True)
        pending = self._pending or {}
        self._pending = None
        self._load_copied(pending)
        return copied

    def detach(self, model: PreTrainedModel) -> None:
        if not self._copy:
            return
        self._pending = self._copied()
        copied = self._copy.pop()
        if copied.device != model.device:
            # The shared weights moved to another device together with the copy.
            model.to(copied.device)  # type: ignore[arg-type]  # its decorator hides the overloads

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the weights of the copy that train."""
        parameters = self._copy[0].named_parameters()
        return {name: parameter for name, parameter in parameters if name in self._originals}

    def _copied(self) -> dict[str, Tensor]:
        """Return the current values of the weights, with or without a copy."""
        weights = self._trained() if self._copy else self._pending or self._originals
        return {name: weight.detach() for name, weight in weights.items()}

    def tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.state_dict())
        for name, weight in self._copied().items():
            tensors[self.prefix + name] = weight
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        state = dict(self.state_dict())
        originals = {self.prefix + name: weight for name, weight in self._originals.items()}
        check_tensors({**state, **originals}, tensors)
        self.load_state_dict({name: tensors[name] for name in state})
        self._load_copied({name: tensors[self.prefix + name] for name in self._originals})

    def _load_copied(self, tensors: Mapping[str, Tensor]) -> None:
        if self._copy:
            self._copy[0].load_state_dict(tensors, strict=False)
        else:
            self._pending = dict(tensors)


def _sharing_copy(model: PreTrainedModel, to_train: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return a copy of a model that shares its buffers and all weights except those that train."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for name, weight in model.named_parameters():
        if name not in to_train:
            shared[id(weight)] = weight
    return copy.deepcopy(model, memo=shared)


def check_plain(parameters: Mapping[str, Tensor], remedy: str) -> None:
    """Check that parameters can be trained, which quantized ones can't.

    Args:
        parameters: the parameters by name.
        remedy: what the user can do instead of loading the backbone without quantization, in the imperative.

    Raises:
        BackboneError: a parameter is not a plain `nn.Parameter` with a floating-point dtype.
    """
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            kind = type(parameter).__name__
            raise BackboneError(
                f"The weight {name} is a {kind} of dtype {parameter.dtype}, as after quantization, but only ordinary "
                f"floating-point parameters can be trained: load the backbone without quantization, or {remedy}."
            )
