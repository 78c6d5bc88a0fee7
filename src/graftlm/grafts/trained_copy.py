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

    The copy of a backbone in half precision is float32 and shares nothing, since small updates would be lost.
    A subclass calls `copy_weights` in `__init__`. An artefact holds the graft's own tensors and the copied weights.

    Attributes:
        prefix: put before the names of the copied weights in an artefact.
        remedy: what the user of a quantised backbone can do instead of loading it without quantisation.
    """

    prefix: ClassVar[str] = ""
    remedy: ClassVar[str] = "train another kind of graft"

    def copy_weights(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        """Choose the weights that train, by their names in `model`; the copy is made by `attach`."""
        parameters = dict(model.named_parameters())
        self._originals = {name: parameters[name] for name in names}  # in a dict, which no Module registers
        self._copy: list[PreTrainedModel] = []
        self._pending: dict[str, Tensor] | None = None  # the weights' values while there is no copy

    def changes_all_rows(self) -> bool:
        return bool(self._originals)

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        if not self._originals:
            return model
        parameters = dict(model.named_parameters())
        if not self._originals.keys() <= parameters.keys():
            raise TapConflictError(
                "The modules to copy have adapters of PEFT around them: attach the graft that trains a copy first, "
                "before them in the dict."
            )
        check_plain({name: parameters[name] for name in self._originals}, self.remedy)
        half = any(parameters[name].dtype in (torch.bfloat16, torch.float16) for name in self._originals)
        shared = [*(p for name, p in parameters.items() if name not in self._originals), *model.buffers()]
        copied = copy.deepcopy(model, {} if half else {id(tensor): tensor for tensor in shared})
        self._copy = [copied.float() if half else copied]
        for parameter in self._trained().values():
            parameter.requires_grad_(True)
        pending, self._pending = self._pending, None
        self._load_copied(pending or {})
        return self._copy[0]

    def detach(self, model: PreTrainedModel) -> None:
        if self._copy:
            self._pending = self._copied()
            copied = self._copy.pop()
            if copied.device != model.device:  # the shared weights moved with the copy
                model.to(copied.device)  # type: ignore[arg-type]  # its decorator hides the overloads

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._copy[0].named_parameters() if name in self._originals}

    def _copied(self) -> dict[str, Tensor]:
        weights = self._trained() if self._copy else self._pending or self._originals
        return {name: weight.detach() for name, weight in weights.items()}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.state_dict()) | {self.prefix + name: tensor for name, tensor in self._copied().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self.state_dict())
        check_tensors(own | {self.prefix + name: tensor for name, tensor in self._originals.items()}, tensors)
        self.load_state_dict({name: tensors[name] for name in own})
        self._load_copied({name: tensors[self.prefix + name] for name in self._originals})

    def _load_copied(self, tensors: Mapping[str, Tensor]) -> None:
        if self._copy:
            self._copy[0].load_state_dict(tensors, strict=False)
        else:
            self._pending = dict(tensors)


def check_plain(parameters: Mapping[str, Tensor], remedy: str) -> None:
    """Raise `BackboneError`, with what else can be done, if one of the parameters by name is quantised."""
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            raise BackboneError(
                f"The weight {name} is quantised ({type(parameter).__name__}), and training it needs plain numbers: "
                f"load the backbone without quantisation, or {remedy}."
            )
