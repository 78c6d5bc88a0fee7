"""Statistics of a cross-attention in one pass."""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(
    anchor_BTD: Tensor,
    update_BTD: Tensor,
    weights_BHTS: Tensor,
    real_BT: Tensor | None,
) -> dict[str, Tensor]:
    """Compute the statistics of one pair in a pass, as means over its tokens.

    Args:
        anchor_BTD: (B, T, D), the anchor's hidden states.
        update_BTD: (B, T, D), the update that the cross-attention adds to them.
        weights_BHTS: (B, H, T, S), the attention weights to S augmenting tokens; 0 where a token is not visible.
        real_BT: (B, T), False at padding; None without padding.

    Returns:
        Scalars by name, which `Composition.observe` describes. They are NaN without any real token.
    """
    if real_BT is None:
        real_BT = torch.ones(anchor_BTD.shape[:2], dtype=torch.bool, device=anchor_BTD.device)
    weights = weights_BHTS.mean(1)[real_BT]  # (tokens, S)
    columns = torch.arange(weights.shape[-1], device=weights.device)
    visible_columns = torch.where(weights > 0, columns, -1)
    last = visible_columns.amax(-1).clamp(min=0)
    here = weights.gather(-1, last[:, None]).squeeze(-1)
    before = weights.sum(-1) - here
    per_head = weights_BHTS.transpose(1, 2)[real_BT]
    terms = per_head * per_head.clamp(min=1e-30).log2()
    bits = -terms.sum(-1)
    update_norms = update_BTD.float().norm(dim=-1)[real_BT]
    anchor_norms = anchor_BTD.float().norm(dim=-1)[real_BT]
    written = update_norms / anchor_norms.clamp(min=1e-12)
    return {
        "written": written.mean(),
        "attention_here": here.mean(),
        "attention_before": before.mean(),
        "attention_bits": bits.mean(),
    }
