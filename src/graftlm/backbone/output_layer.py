"""The part of a model after its body, which turns hidden states into logits.

Shape suffixes: N tokens, d hidden width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from graftlm.backbone.sites import Sites

_Module = TypeVar("_Module", bound=nn.Module)


class OutputLayer:
    """Everything that a model computes after its body: the head, and what follows it, such as scaling and soft caps.

    It runs the forward pass of the model's own class with a body that returns given states, so it holds for every
    family. It shares all weights and the hooks of the head's modules with the model, which is not changed.

    Args:
        model: a model with a language-modeling head.
        body: the module of the model that its forward pass calls for hidden states.
        parameters: further parameters, which hooks of the head's modules read.

    Attributes:
        vocabulary: V
    """

    def __init__(self, model: PreTrainedModel, body: nn.Module, parameters: Sequence[nn.Parameter] = ()) -> None:
        path = next(name for name, module in model.named_modules() if module is body)
        self._body = body
        self._model = model
        self._parameters = tuple(parameters)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self._given = _GivenStates()
        self._shell = _with_module(model, path, self._given)

    @classmethod
    def of(cls, model: PreTrainedModel, sites: Sites, parameters: Sequence[nn.Parameter] = ()) -> OutputLayer | None:
        """Return the output layer of a model; None if it has no head, or no body apart from itself.

        Args:
            model: the model.
            sites: its sites.
            parameters: further parameters, which hooks of the head's modules read.
        """
        find_head = getattr(model, "get_output_embeddings", None)
        has_head = find_head is not None and find_head() is not None
        return cls(model, sites.body, parameters) if has_head and sites.body is not model else None

    def logits(self, states: Tensor, like: ModelOutput) -> Tensor:
        """Return the logits (N, V) of some tokens.

        Args:
            states: (N, d), the body's last hidden states of these tokens.
            like: an output of the body. The model gets one of its class, with these states.
        """
        self._given.output = type(like)({"last_hidden_state": states[None]})
        try:
            ids = torch.zeros((1, len(states)), dtype=torch.long, device=states.device)
            return self._shell.forward(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given.output = None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters after the body that require gradients, including those tied to parameters of the body.

        The modules are those that the model has now, so that wrapped and sharded weights are found.
        """
        inside = set(self._body.modules())
        found = {id(parameter): parameter for parameter in self._parameters if parameter.requires_grad}
        for module in self._model.modules():
            if module in inside:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    found[id(parameter)] = parameter
        return list(found.values())


class _GivenStates(nn.Module):
    """Stands in for a body: it returns the same output for every input."""

    output: object = None

    def forward(self, *_: object, **__: object) -> object:
        return self.output


def _with_module(root: _Module, path: str, module: nn.Module) -> _Module:
    """Return a copy of a module tree that shares everything, except for the module at a path."""
    copy = object.__new__(type(root))
    vars(copy).update(vars(root))
    name, _, rest = path.partition(".")
    child = root._modules[name]
    assert child is not None, "the path leads to a module"
    replacement = _with_module(child, rest, module) if rest else module
    vars(copy)["_modules"] = {**root._modules, name: replacement}
    return copy
