"""Record which modules of a model run, and what they read and write, in a pass on tensors without storage.

The pass runs on the meta device, from the config alone, before any weights are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graftlm.backbone.modules import has_module
from graftlm.backbone.patching import replaced_attributes
from graftlm.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_ROWS = 2
_TOKENS = 3

ROPE_OF_LONGEST_TEXT = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the longest text of a batch."""
_SEPARATE = "find_packed_sequence_indices"
"""The function by which transformers' masks separate the documents of a row."""


class MisfitError(Exception):
    """A model does not have an expected structure; the message is a clause without a full stop."""


@dataclass
class Visit:
    """The first call of a module.

    Attributes:
        number: position in the order of all modules' first calls.
        entering: the first argument, or the keyword argument `hidden_states`.
        others: the other tensors among the inputs.
        leaving: the output, or the first of several.
    """

    number: int
    entering: object
    others: tuple[Tensor, ...]
    leaving: object = None


class ModuleTrace:
    """The modules of one architecture, and the tensors that they pass on in one pass on the meta device.

    Args:
        model_class: class of the model.
        config: the config from which a model without storage is made.

    Attributes:
        model: the model without storage.
        base: its `base_model`.
        text_config: the config of the text model.
        names: the path of each module, relative to `base`.
        visits: the first call of each module that ran, in the order of these calls.
        error: why the pass failed; None if it did not.
        separates_documents: whether the pass looked for several documents in a row.
    """

    def __init__(self, model_class: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig) -> None:
        config = copy.deepcopy(config)
        # The usual products of experts have no form without storage for float32 in torch 2.13.
        config._experts_implementation = "batched_mm"
        with torch.device("meta"):
            self.model = model_class(config).eval()
        modules: list[Any] = list(self.model.modules())
        for module in modules:
            if getattr(module, "rope_type", None) in ROPE_OF_LONGEST_TEXT:
                module.rope_type = "default"  # its frequencies are chosen by positions, which the pass does not have
        self.base: nn.Module = self.model.base_model
        self.text_config: Any = self.model.config.get_text_config()
        self.names = {module: name for name, module in self.base.named_modules()}
        self.visits: dict[nn.Module, Visit] = {}
        self.error: str | None = None
        self.separates_documents = False
        try:
            self._run()
        except Exception as error:  # Code of models raises anything on tensors without storage.
            self.error = first_line(error)

    def _run(self) -> None:
        """Record a pass of the model over two rows of three tokens."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers import masking_utils

        for module in self.model.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)
        separate_documents = getattr(masking_utils, _SEPARATE)

        def recorded(*args: object, **kwargs: object) -> Any:
            self.separates_documents = True
            return separate_documents(*args, **kwargs)

        watched = replaced_attributes(masking_utils, **{_SEPARATE: recorded})
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"), watched:
            self.model(input_ids=torch.zeros(_ROWS, _TOKENS, dtype=torch.long), use_cache=False)

    def _enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if module in self.visits:
            return
        first = args[0] if args else kwargs.get("hidden_states")
        values = (*args, *kwargs.values())
        others = tuple(value for value in values if isinstance(value, Tensor) and value is not first)
        self.visits[module] = Visit(len(self.visits), first, others)

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        visit = self.visits[module]
        if visit.leaving is None:
            visit.leaving = output[0] if isinstance(output, tuple) else output

    def in_order(self, *roots: nn.Module) -> list[nn.Module]:
        """Return the modules in `roots` that ran, in their order."""
        modules = set()
        for root in roots:
            modules.update(root.modules())
        return [module for module in self.visits if module in modules]

    def children(self, layer: nn.Module, condition: Callable[[str, nn.Module], bool]) -> tuple[str, ...]:
        """Return the names of a layer's children that ran and meet a condition.

        Args:
            layer: a layer of the model.
            condition: a function of a child's name and module.
        """
        names = []
        for name, child in layer.named_children():
            if child in self.visits and condition(name, child):
                names.append(name)
        return tuple(names)

    def has_run(self, root: nn.Module, path: str) -> bool:
        """Return whether there is a module at a path that ran."""
        return has_module(root, path) and root.get_submodule(path) in self.visits

    def is_hidden(self, value: object) -> bool:
        """Return whether a value has the shape of hidden states, (B, T, d) or (B * T, d)."""
        if not isinstance(value, Tensor):
            return False
        width = self.text_config.hidden_size
        return tuple(value.shape) in ((_ROWS, _TOKENS, width), (_ROWS * _TOKENS, width))

    def maps_hidden_states(self, module: nn.Module) -> bool:
        """Return whether a module that ran reads exactly one tensor of hidden states, and writes one."""
        visit = self.visits[module]
        if any(self.is_hidden(other) for other in visit.others):
            return False
        return self.is_hidden(visit.entering) and self.is_hidden(visit.leaving)
