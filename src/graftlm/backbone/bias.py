"""What taps add to attention scores, put into the mask that an attention module is given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from graftlm.errors import TapError

TAKES_MASKS = ("sdpa", "eager")  # attention implementations that add a mask of numbers to their scores


def biased_mask(mask: Tensor | None, bias: Tensor, causal: bool) -> Tensor:
    """The mask (B, 1 or H, T, S) of numbers that hides what `mask` hid, and adds `bias` elsewhere.

    Args:
        mask: as transformers gives it: None where nothing is hidden but later tokens, True where a token is seen, or
            numbers that are added.
        bias: (B or 1, H or 1, T, S), of S keys the last T being the queries' own; nothing is added to those of a wider
            mask that come before.
        causal: whether a missing mask hides later tokens.
    """
    if mask is None and causal:
        queries, keys = bias.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril(keys - queries)[None, None]
    if mask is None:
        return bias
    if bias.shape[-1] < mask.shape[-1]:
        bias = functional.pad(bias, (mask.shape[-1] - bias.shape[-1], 0))
    if mask.dtype != torch.bool:
        return mask + bias.to(mask.dtype)
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def check_takes_bias(model: PreTrainedModel, name: str) -> None:
    """Make sure that a model's attention adds what it is given.

    Raises:
        TapError: it does not.
    """
    found = getattr(model.config, "_attn_implementation", None)
    if getattr(model, "_windows_of_its_own", False) or found not in TAKES_MASKS:
        raise TapError(
            f"A tap adds to the scores of {name}, but this {model.config.model_type} model's attention"
            f"{f' ({found})' if found else ''} takes no numbers in its mask: load it with attn_implementation sdpa or "
            "eager, or leave out what adds to scores."
        )
