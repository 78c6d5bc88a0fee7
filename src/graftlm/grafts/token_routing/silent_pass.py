"""A pass of the bare backbone inside a pass of the grafted model."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone
from graftlm.backbone.backbone import clone_without_hooks
from graftlm.errors import GraftError


class SilentPass:
    """A pass of the bare backbone up to its n-th layer, with its live weights and without any hook.

    It may run inside a pass of the grafted model: no tap acts, and no graft is notified.

    Args:
        backbone: the backbone. It is not changed; parameters and buffers are shared, also after `to`.
        layers: n, at least 1. After the last layer, the backbone's final norm is applied.

    Raises:
        BackboneError: another library has replaced the forward methods of the backbone's modules.
    """

    def __init__(self, backbone: Backbone, layers: int) -> None:
        family = backbone.sites.family
        clone = clone_without_hooks(backbone.model.base_model, backbone.name)
        self._model = cast("PreTrainedModel", clone).eval()
        all_layers = cast("nn.ModuleList", self._model.get_submodule(family.layers))
        self._layers = nn.ModuleList(list(all_layers)[:layers])
        self._model.set_submodule(family.layers, self._layers)
        if layers < backbone.sites.n_layers and family.norm is not None:
            self._model.set_submodule(family.norm, nn.Identity())

    @torch.no_grad()
    def states(
        self,
        ids_BT: Tensor,
        mask_BS: Tensor | None,
        positions_BT: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Compute the hidden states after these layers, in the precision of the backbone and without gradients.

        Args:
            ids_BT: (B, T) token ids.
            mask_BS: (B, S), 1 for tokens, 0 for padding, including cached columns; None for no padding.
            positions_BT: (B, T) positions; None to count from the end of the cache.
            cache: cache of these layers, which grows by this pass; None for no cache.

        Returns:
            (B, T, d) hidden states.

        Raises:
            GraftError: the backbone's weights are sharded over processes.
        """
        if isinstance(next(self._layers.parameters()), DTensor):
            raise GraftError(
                "The backbone is sharded over processes, but its hidden states are needed for routes: set "
                "training.sharded to false, or embedder.layers to 0."
            )
        inputs: dict[str, object] = {
            "input_ids": ids_BT,
            "attention_mask": mask_BS,
            "position_ids": positions_BT,
            "use_cache": cache is not None,
        }
        if cache is not None:
            inputs["past_key_values"] = cache
        with torch.autocast(ids_BT.device.type, enabled=False):
            return self._model(**inputs).last_hidden_state
