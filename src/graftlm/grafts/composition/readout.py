"""Readout: a gate mixes the next-token distributions of an anchor and of its augmenting models.

    p = (p_B + sum_m (e^r_m - 1) p_m) / Z,   Z = 1 + sum_m (e^r_m - 1),   r_m = min(max(0, a_m), 30)
    a = W x + b,   x = [h_B / rms(h_B), h_A1 / rms(h_A1), ...]

h are the last hidden states, which the output layers of the models read. W and b are initially zero: then r = 0, and
the distribution is that of the anchor, but the derivative of r with respect to a is 1. Outside of the range of r, the
derivative is `_LEAK`.

Shape suffixes: B rows, K tokens whose logits are wanted, V the vocabulary of the anchor, M augmenting models,
N = 1 + M models, W the sum of the models' widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone
from graftlm.errors import GraftError

ReadoutKind = Literal["none", "mixture"]
_LARGEST = 30.0  # upper bound of r, where the share of the anchor is e^-30
_LEAK = 0.1  # derivative of a closed gate, which could never open again without one
_FLOOR = -80.0  # lower bound of exponents, so that no sum of float32 exponentials is zero


class MixtureGate(nn.Module):
    """The share of each model in the mixture, computed from the models' last hidden states.

    Args:
        widths: width of the last hidden states of each model, the anchor first.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        augmenting_models = len(widths) - 1
        self.linear = nn.Linear(sum(widths), augmenting_models)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, last: Sequence[Tensor]) -> Tensor:
        """Compute the shares.

        Args:
            last: last hidden states (B, K, width) of each model, the anchor first.

        Returns:
            (B, K, 1 + M) the share of each model, the anchor first. The shares add up to 1.
        """
        normalized = [functional.rms_norm(states, states.shape[-1:], eps=1e-6) for states in last]
        x_BKW = torch.cat(normalized, -1)
        a_BKM = _at_least_float32(self.linear(x_BKW))
        opened_BKM = torch.expm1(_bounded(a_BKM))
        anchor_BK1 = torch.ones_like(opened_BKM[..., :1])
        shares_BKN = torch.cat([anchor_BK1, opened_BKM], -1)
        return shares_BKN / shares_BKN.sum(-1, keepdim=True)


def _bounded(a_BKM: Tensor) -> Tensor:
    """Return r, with the derivative `_LEAK` where a is outside of the range of r."""
    leak_BKM = _LEAK * (a_BKM - a_BKM.detach())  # the value is zero; only its gradient is needed
    outside_BKM = a_BKM.detach().clamp(0, _LARGEST) + leak_BKM
    is_inside = (a_BKM >= 0) & (a_BKM <= _LARGEST)
    return torch.where(is_inside, a_BKM, outside_BKM)


def mix(
    logits_BKV: Tensor,
    others: Sequence[Tensor],
    shares_BKN: Tensor,
) -> Tensor:
    """Compute the log-probabilities of the mixture.

    Where the shares of all augmenting models are zero, the result is the anchor's logits, bit for bit.

    Args:
        logits_BKV: logits of the anchor.
        others: logits (B, K, own vocabulary) of each augmenting model, whose token ids are those of the anchor.
        shares_BKN: share of each model, the anchor first.

    Returns:
        (B, K, V), in the dtype of the anchor's logits.
    """
    vocabulary = logits_BKV.shape[-1]
    fitted = [_fit(other, vocabulary) for other in others]
    logs = [_log_softmax(logits) for logits in (logits_BKV, *fitted)]
    lowest = torch.finfo(logs[0].dtype).min
    largest_BKV = reduce(torch.maximum, logs).detach().clamp(min=lowest)
    terms = []
    for share_BK1, log_BKV in zip(shares_BKN.split(1, -1), logs, strict=True):
        exponent_BKV = (log_BKV - largest_BKV).clamp(min=_FLOOR)
        terms.append(share_BK1 * exponent_BKV.exp())
    total_BKV = reduce(torch.add, terms)
    mixed_BKV = largest_BKV + total_BKV.log()
    # The value of the anchor's logits with the gradient of the mixture.
    same_BKV = logits_BKV.detach() + (mixed_BKV - mixed_BKV.detach())
    is_closed_BKM = shares_BKN[..., 1:] == 0
    closed_BK1 = is_closed_BKM.all(-1, keepdim=True)
    return torch.where(closed_BK1, same_BKV, mixed_BKV).to(logits_BKV.dtype)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _log_softmax(logits: Tensor) -> Tensor:
    return functional.log_softmax(_at_least_float32(logits), -1)


def _fit(logits: Tensor, vocabulary: int) -> Tensor:
    """Cut or pad logits to `vocabulary` tokens, as models with the same tokenizer may pad their embeddings differently.

    The padded tokens are impossible.
    """
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return functional.pad(logits, (0, missing), value=float("-inf"))


@torch.no_grad()
def output_width(name: str, backbone: Backbone) -> int:
    """Return the width of the last hidden states that a model's output layer reads, measured in a pass over one token.

    Args:
        name: name of the model in error messages.
        backbone: the model.

    Raises:
        GraftError: the model is not causal or has no output layer, or its logits are not the output of its output
            layer for the last hidden states.
    """
    model = backbone.model
    head = model.get_output_embeddings()
    if head is None or not backbone.sites.family.causal:
        raise GraftError(
            f"{name} ({backbone.sites.model_type}) does not predict the next token, but readout mixture mixes such "
            "predictions: set readout to none."
        )
    seen: dict[str, Tensor] = {}

    def record_last(_module: nn.Module, _inputs: object, output: Sequence[Tensor]) -> None:
        seen["last"] = output[0]

    def record_head(_module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
        seen["read"] = inputs[0]
        seen["written"] = output

    token = torch.zeros(1, 1, dtype=torch.long, device=backbone.device)
    with (
        backbone.sites.body.register_forward_hook(record_last),
        head.register_forward_hook(record_head),
    ):
        logits = model(input_ids=token, use_cache=False).logits
    reads_last = torch.equal(seen["last"], seen["read"])
    writes_logits = torch.equal(seen["written"].to(logits.dtype), logits)
    if not (reads_last and writes_logits):
        raise GraftError(
            f"{name} ({backbone.sites.model_type}) changes its hidden states before its output layer, or its logits "
            "after it, which is not supported with readout mixture: set readout to none."
        )
    return seen["read"].shape[-1]
