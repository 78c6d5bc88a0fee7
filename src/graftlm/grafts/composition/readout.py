"""Readout: a gate mixes the next-token distributions of an anchor and of its augmenting models.

    p = (p_B + sum_m (e^r_m - 1) p_m) / Z,   Z = 1 + sum_m (e^r_m - 1),   r_m = min(max(0, a_m), 30)
    a = W x + b,   x = [h_B / rms(h_B), h_A1 / rms(h_A1), ...]

h are the last hidden states, which the models' own output layers read. W and b start at zero: then r = 0, and the
distribution is the anchor's, but the gradient of r by a is 1. Where a is out of range, the gradient is `_LEAK`.

Shape suffixes: B rows, K tokens whose logits are wanted, V the anchor's vocabulary, M augmenting models, W all widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone
from graftlm.errors import GraftError

ReadoutKind = Literal["none", "mixture"]
_LARGEST = 30.0  # of r: the anchor's share is e^-30 then
_LEAK = 0.1  # gradient of a closed gate, which could never open again without one
_FLOOR = -80.0  # of exponents, so that no sum of float32 exponentials is zero


class MixtureGate(nn.Module):
    """The gate on last hidden states of these `widths`, the anchor's first."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(sum(widths), len(widths) - 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, last: Sequence[Tensor]) -> Tensor:
        """(B, K, 1 + M) the share of each model, the anchor's first, from their last states (B, K, width)."""
        x_BKW = torch.cat([functional.rms_norm(states, states.shape[-1:], eps=1e-6) for states in last], -1)
        a_BKM = self.linear(x_BKW)
        a_BKM = a_BKM.to(torch.promote_types(a_BKM.dtype, torch.float32))
        outside_BKM = a_BKM.detach().clamp(0, _LARGEST) + _LEAK * (a_BKM - a_BKM.detach())
        opened_BKM = torch.expm1(torch.where((a_BKM >= 0) & (a_BKM <= _LARGEST), a_BKM, outside_BKM))
        shares_BKN = torch.cat([torch.ones_like(opened_BKM[..., :1]), opened_BKM], -1)
        return shares_BKN / shares_BKN.sum(-1, keepdim=True)


def mix(logits_BKV: Tensor, others: Sequence[Tensor], shares_BKN: Tensor) -> Tensor:
    """Log-probabilities of the mixture; where the augmenting models' shares are zero, the anchor's logits to the bit.

    Args:
        logits_BKV: the anchor's.
        others: the augmenting models' logits, (B, K, their vocabulary).
        shares_BKN: of the anchor and of each augmenting model.
    """
    own_BKV = _log_softmax(logits_BKV)
    logs = [own_BKV, *(_log_softmax(_fit(other, logits_BKV.shape[-1])) for other in others)]
    largest_BKV = reduce(torch.maximum, logs).detach().clamp(min=torch.finfo(own_BKV.dtype).min)
    terms = zip(shares_BKN.split(1, -1), logs, strict=True)
    total_BKV = reduce(torch.add, (share * (log - largest_BKV).clamp(min=_FLOOR).exp() for share, log in terms))
    mixed_BKV = largest_BKV + total_BKV.log()
    same_BKV = logits_BKV.detach() + (mixed_BKV - mixed_BKV.detach())  # the value of one, the gradient of the other
    closed_BK1 = (shares_BKN[..., 1:] == 0).all(-1, keepdim=True)
    return torch.where(closed_BK1, same_BKV, mixed_BKV).to(logits_BKV.dtype)


def _log_softmax(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)


def _fit(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits over `vocabulary` tokens: models with one tokenizer may have padded its tokens differently."""
    missing = vocabulary - logits.shape[-1]
    return logits[..., :vocabulary] if missing <= 0 else functional.pad(logits, (0, missing), value=float("-inf"))


@torch.no_grad()
def output_width(name: str, backbone: Backbone) -> int:
    """The width of the last hidden states that a model's output layer reads, from a pass over one token.

    Raises GraftError if the model is not causal, or its logits are not that layer's outputs of the last hidden states.
    """
    model, head = backbone.model, backbone.model.get_output_embeddings()
    if head is None or not backbone.sites.family.causal:
        raise GraftError(
            f"{name} ({backbone.sites.model_type}) predicts no next token, so readout: mixture can't use it: set "
            "readout to none."
        )
    seen: dict[str, Any] = {}
    with (
        backbone.sites.body.register_forward_hook(lambda _module, _inputs, output: seen.update(last=output[0])),
        head.register_forward_hook(lambda _module, inputs, output: seen.update(read=inputs[0], written=output)),
    ):
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=backbone.device), use_cache=False).logits
    if not (torch.equal(seen["last"], seen["read"]) and torch.equal(seen["written"].to(logits.dtype), logits)):
        raise GraftError(
            f"{name} ({backbone.sites.model_type}) changes its states before its output layer or its logits behind "
            "it, which readout: mixture can't follow: set readout to none."
        )
    return seen["read"].shape[-1]
