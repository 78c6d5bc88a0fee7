"""The bare backbone beside the live one: the same weights, none of the hooks, and no more layers than are asked for.

Inside a pass of the live model it may run on its own: no tap acts, no graft hears of it, and what it says is what the
backbone says without any graft.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, d the backbone's width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone
from graftlm.errors import GraftError


class Silent:
    """The backbone up to the end of its n-th layer, as it is when this is built.

    Args:
        backbone: never changed; parameters and buffers are its own, wherever they are moved later.
        layers: n, at least 1. After the last layer comes the backbone's own last norm, as before its head.

    Raises:
        GraftError: another library has replaced what the backbone's modules do.
    """

    def __init__(self, backbone: Backbone, layers: int) -> None:
        family = backbone.sites.family
        self._model: Any = _bare(backbone.model.base_model, backbone.name).eval()
        self._layers = nn.ModuleList(list(self._model.get_submodule(family.layers))[:layers])
        _put(self._model, family.layers, self._layers)
        if layers < backbone.sites.n_layers and family.norm is not None:
            _put(self._model, family.norm, nn.Identity())

    @torch.no_grad()
    def states(self, ids_BT: Tensor, mask_BS: Tensor | None, places_BT: Tensor | None, cache: Cache | None) -> Tensor:
        """(B, T, d) hidden states, in the backbone's own precision.

        Args:
            ids_BT: token ids.
            mask_BS: 1 for real tokens, those in the cache among them; None when all are real.
            places_BT: positions; None to count from the cache's end.
            cache: of these layers, which grows by the pass.

        Raises:
            GraftError: the backbone's weights are split over processes.
        """
        if isinstance(next(self._layers.parameters()), DTensor):
            raise GraftError(
                "The backbone is sharded over processes, where its hidden states can't be read for routes: train with "
                "training.sharded at false, or set embedder.layers to 0."
            )
        with torch.autocast(ids_BT.device.type, enabled=False):
            output = self._model(
                input_ids=ids_BT,
                attention_mask=mask_BS,
                position_ids=places_BT,
                use_cache=cache is not None,
                **({} if cache is None else {"past_key_values": cache}),
            )
        return output.last_hidden_state


def _bare(module: nn.Module, name: str) -> nn.Module:
    """A module and those inside it without hooks, around the very same dictionaries of parameters and buffers."""
    if "forward" in vars(module) and any(True for _ in module.children()):
        raise GraftError(
            f"What modules of {name} do was replaced from outside, as accelerate does to spread a model over devices, "
            "and its hidden states can't be read beside it: load it on one device, or set embedder.layers to 0."
        )
    twin = object.__new__(type(module))
    for key, value in vars(module).items():
        twin.__dict__[key] = {} if key.endswith(_HOOKS) and isinstance(value, dict) else value
    twin.__dict__.pop("_compiled_call_impl", None)  # it would call the live module
    children = module._modules.items()
    twin.__dict__["_modules"] = {key: None if child is None else _bare(child, name) for key, child in children}
    return twin


_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
