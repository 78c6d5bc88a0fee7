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
    mask = _mask_of_full_attention(mask, call)
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        has_static_layers = call.cache is not None and any(is_static_layer(layer) for layer in call.cache.layers)
        return mask[:, : call.past() + length] if has_static_layers else mask
    columns = column_mask_of(mask, call)
    if columns is not None:
        return columns[:, : call.past() + length].long()
    form = f"the shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
    raise TapError(
        f"The attention mask has {form}, but a tensor of the shape (rows, tokens) is expected, in which a graft sees "
        "which tokens are padding: pass such a mask, and use a dynamic cache where every layer has a sliding window."
    )


def column_mask_of(mask: object, call: Call) -> Tensor | None:
    """Return which columns of a static cache hold real tokens so far, if the mask of a pass is made for such a cache.

    Args:
        mask: the `attention_mask` that the model received.
        call: the pass; only its cache is used.

    Returns:
        Bool (B, S) for S columns; None for masks of other forms, and for other caches.
    """
    mask = _mask_of_full_attention(mask, call)
    if not _has_full_attention(call) or not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    last_query = mask[:, 0, -1]
    return last_query if last_query.dtype == torch.bool else last_query == 0


def newest_tokens_of(call: Call, length: int) -> Tensor | None:
    """Return (B, T), True for real tokens of a pass of T = `length` tokens; None when all are real."""
    columns = call.column_mask
    if columns is not None and call.count is not None and not call.past_is_known:
        return columns[:, call.count.columns(columns.device)]
    mask = call.attention_mask
    return None if mask is None else mask[:, -length:].bool()


def _has_full_attention(call: Call) -> bool:
    """Return whether the pass has a static cache with a layer without a window."""
    return call.cache is not None and any(is_static_layer(layer, window=False) for layer in call.cache.layers)


def _mask_of_full_attention(mask: object, call: Call) -> object:
    """Return the mask of layers without a window, if there is a static cache and a mask for each type of layer."""
    if isinstance(mask, dict) and _has_full_attention(call):
        return mask.get("full_attention")
    return mask
