"""Biases that taps add to the scores of an attention, through the mask that transformers passes to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone.cache import is_static_layer
from graftlm.backbone.call import Call
from graftlm.backbone.sites import Site
from graftlm.errors import TapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMPLEMENTATIONS = ("sdpa", "eager")
"""The attention implementations that may receive an additive mask."""


def check_bias_site(model: PreTrainedModel, site: Site, when: str) -> None:
    """Check that a tap can add a bias at a site of a model.

    Args:
        model: the live model, whose attention implementation is checked.
        site: the site of the tap.
        when: `before` or `after`, see `Tap`.

    Raises:
        TapError: the tap does not act before an attention, or the model's attention takes no additive mask.
    """
    if when != "before" or site.kind != "attention":
        raise TapError(
            f"A tap adds a bias {when} {site}, but it can do so only before an attention: set its site and when "
            "accordingly."
        )
    implementation = getattr(model.config, "_attn_implementation", None)
    if getattr(model, "_builds_own_masks", False) or implementation not in _IMPLEMENTATIONS:
        raise _no_additive_mask(model, site)


def additive_mask(model: PreTrainedModel, site: Site, arguments: dict[str, Any]) -> Tensor | None:
    """Return the mask that an attention receives, to which a tap may add a bias.

    Args:
        model: the live model, whose attention implementation is checked.
        site: the site of the attention.
        arguments: keyword arguments of the attention's forward.

    Raises:
        TapError: the attention receives no mask, or a boolean one that its implementation does not convert.
    """
    if "attention_mask" not in arguments:
        raise _no_additive_mask(model, site)
    mask = arguments["attention_mask"]
    if mask is not None and mask.dtype == torch.bool and model.config._attn_implementation == "eager":
        raise _no_additive_mask(model, site)
    return mask


def _no_additive_mask(model: PreTrainedModel, site: Site) -> TapError:
    """Return the error for an attention that takes no additive mask, with the implementations that would take one."""
    config = model.config
    implementation = str(config._attn_implementation)
    alternative = ""
    if not getattr(model, "_builds_own_masks", False):
        if implementation not in _IMPLEMENTATIONS:
            alternative = "sdpa or eager"
        elif implementation == "eager" and model._supports_sdpa:
            alternative = "sdpa"
    remedy = "omit the option that adds a bias"
    if alternative:
        remedy = f"load it with attn_implementation {alternative}, or {remedy}"
    return TapError(
        f"A tap adds a bias to the scores of {site}, but this {config.model_type} model's attention "
        f"({implementation}) takes no additive mask: {remedy}."
    )


def biased_mask(mask: Tensor | None, bias: Tensor, causal: bool, columns: int | None = None) -> Tensor:
    """Combine an attention's mask with a bias of its scores.

    The last T of the S keys are those of the queries themselves. A static cache also has columns after S, for tokens
    to come, and a mask that is wider still has further keys before S. Both kinds of columns get no bias.

    Args:
        mask: the mask that transformers passes. A boolean mask is True at visible keys, a floating-point mask is
            additive. In causal models, None hides only later tokens.
        bias: (B or 1, H or 1, T, S), added to the scores.
        causal: whether no token attends to a later one.
        columns: number of columns of a static cache; None for other caches.

    Returns:
        The additive mask, (B, 1 or H, T, columns), which keeps hidden keys hidden.
    """
    queries, keys = bias.shape[-2:]
    after = max(0, (columns or keys) - keys)
    if mask is None and causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril(keys - queries)[None, None]
        mask = functional.pad(mask, (0, after))
    bias = functional.pad(bias, (0, after))
    if mask is None:
        return bias
    before = max(0, mask.shape[-1] - bias.shape[-1])
    bias = functional.pad(bias, (before, 0))
    if mask.dtype != torch.bool:
        return mask + bias.to(mask.dtype)
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def static_columns(call: Call, site: Site, queries: int) -> int | None:
    """Return the number of columns of a site's layer in a static cache; None for other caches.

    Args:
        call: the pass, whose cache is inspected.
        site: the site of an attention.
        queries: number of tokens of the pass.
    """
    layer = site.layer
    if call.cache is None or layer is None or layer >= len(call.cache.layers):  # Lazy caches append layers later.
        return None
    if not is_static_layer(call.cache.layers[layer]):
        return None
    return call.cache.get_mask_sizes(queries, layer)[0]
