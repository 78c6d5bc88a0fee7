"""Read the mask of real tokens from what a model receives as `attention_mask`."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.backbone.cache import is_static_layer
from graftlm.backbone.call import Call
from graftlm.errors import TapError


def token_mask_of(mask: object, call: Call, length: int) -> Tensor | None:
    """Return the mask of real tokens of a pass.

    For a static cache, transformers' `generate` passes a mask of four dimensions, or a dict with one for each type of
    layer. In a layer without a window, the last query attends to all real tokens so far. BLOOM's mask also has columns
    for tokens to come.

    Args:
        mask: the `attention_mask` that the model received.
        call: the pass; only its cache is used.
        length: number T of tokens of the pass.

    Returns:
        (B, T_past + T), 1 for real tokens; None without a mask.

    Raises:
        TapError: the mask does not show which tokens are real.
    """
    if mask is None:
        return None
    layers = [] if call.cache is None else call.cache.layers
    if isinstance(mask, Tensor) and mask.dim() == 2:
        has_static_layers = any(is_static_layer(layer) for layer in layers)
        return mask[:, : call.past() + length] if has_static_layers else mask
    if any(is_static_layer(layer, window=False) for layer in layers):
        if isinstance(mask, dict):
            mask = mask.get("full_attention")
        if mask is None:
            return None
        if isinstance(mask, Tensor) and mask.dim() == 4:
            last_query = mask[:, 0, -1, : call.past() + length]
            is_real = last_query if last_query.dtype == torch.bool else last_query == 0
            return is_real.long()
    form = f"the shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
    raise TapError(
        f"The attention mask has {form}, but a tensor of the shape (rows, tokens) is expected, in which a graft sees "
        "which tokens are padding: pass such a mask, and use a dynamic cache where every layer has a sliding window."
    )
