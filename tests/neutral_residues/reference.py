"""Neutral residues as in the equations of the paper: one token, one layer and one row at a time. For tests only.

    r(x) = g(x) * A(x)                        the block's output, added to the FFN's, after a norm of the latter
    g(x) = act_g(w . x + b)                   act_g: ReLU, sigmoid, or 1 where there is no gate
    A(x) = W_o (act(W_g x) * W_i x)           or W_o act(W_i x) where the FFN is not a gated linear unit
    l_train = l_LM + alpha * l_local
    l_local = mean of |r(x)|_1 / D            over layers and tokens of the old domain (L1), or
              mean of CE(sigmoid(w . x + b), domain)     over layers and all tokens (cross-entropy)

Shape suffixes: B rows, T tokens, D the backbone's width, F the adapter's width, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OLD, NEW = 0, 1


@dataclass(frozen=True)
class Weights:
    """One block: `w_i` (F, D), `w_o` (D, F), `w_g` (F, D), `gate` (D,), `bias` (); None for an absent part."""

    w_i: Tensor
    w_o: Tensor
    w_g: Tensor | None = None
    gate: Tensor | None = None
    bias: Tensor | None = None


def adapter(x_D: Tensor, weights: Weights, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """A(x), (D,)."""
    if weights.w_g is None:
        return weights.w_o @ activation(weights.w_i @ x_D)
    return weights.w_o @ (activation(weights.w_g @ x_D) * (weights.w_i @ x_D))


def score(x_D: Tensor, weights: Weights) -> Tensor:
    """The gate's pre-activation w . x + b, a scalar."""
    assert weights.gate is not None, "an ungated block has no score"
    dot = (weights.gate * x_D).sum()
    return dot if weights.bias is None else dot + weights.bias


def gate(x_D: Tensor, weights: Weights, kind: str) -> Tensor:
    """g(x), a scalar; `kind` is relu, sigmoid or none."""
    if kind == "none":
        return torch.ones((), dtype=x_D.dtype)
    s = score(x_D, weights)
    return s.clamp(min=0) if kind == "relu" else 1 / (1 + torch.exp(-s))


def residue(x_BTD: Tensor, weights: Weights, activation: Callable[[Tensor], Tensor], kind: str) -> Tensor:
    """r(x) of every token, (B, T, D)."""
    rows = []
    for x_TD in x_BTD:
        tokens = [gate(x_D, weights, kind) * adapter(x_D, weights, activation) for x_D in x_TD]
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def l1_loss(residues: Sequence[Tensor], mask_BT: Tensor, domain_B: Tensor, tokens: float | None = None) -> Tensor:
    """The mean of |r|_1 / D over the layers and the old domain's tokens.

    Args:
        residues: (B, T, D) of each layer.
        mask_BT: 1 for real tokens.
        domain_B: 0 for the old domain, 1 for the new.
        tokens: the divisor; None counts the old domain's tokens.
    """
    total = torch.zeros((), dtype=residues[0].dtype)
    count = 0
    for row, domain in enumerate(domain_B.tolist()):
        for position in range(mask_BT.shape[1]):
            if domain == OLD and mask_BT[row, position]:
                count += 1
                for r_BTD in residues:
                    total = total + r_BTD[row, position].abs().sum() / r_BTD.shape[-1]
    divisor = count if tokens is None else tokens
    return total / (len(residues) * max(divisor, 1))


def cross_entropy_loss(
    inputs: Sequence[Tensor], blocks: Sequence[Weights], mask_BT: Tensor, domain_B: Tensor, tokens: float | None = None
) -> Tensor:
    """The mean, over layers and tokens of both domains, of the gate's cross-entropy as a classifier of the domain.

    Args:
        inputs: (B, T, D), the input of each layer's block.
        blocks: each layer's weights.
        mask_BT, domain_B, tokens: as in `l1_loss`, for both domains.
    """
    total = torch.zeros((), dtype=inputs[0].dtype)
    count = 0
    for row, domain in enumerate(domain_B.tolist()):
        for position in range(mask_BT.shape[1]):
            if mask_BT[row, position]:
                count += 1
                for x_BTD, weights in zip(inputs, blocks, strict=True):
                    p = torch.sigmoid(score(x_BTD[row, position], weights))
                    total = total - torch.log(p if domain == NEW else 1 - p)
    divisor = count if tokens is None else tokens
    return total / (len(blocks) * max(divisor, 1))


def language_modelling_loss(logits_BTV: Tensor, labels_BT: Tensor, targets: float | None = None) -> Tensor:
    """Nats per target: the mean of -log p(label at t | tokens before t); a label of -100 is no target."""
    total = torch.zeros((), dtype=logits_BTV.dtype)
    count = 0
    for logits_TV, labels_T in zip(logits_BTV, labels_BT, strict=True):
        for position in range(1, len(labels_T)):
            if labels_T[position] != -100:
                count += 1
                probabilities_V = torch.softmax(logits_TV[position - 1], 0)
                total = total - torch.log(probabilities_V[labels_T[position]])
    divisor = count if targets is None else targets
    return total / max(divisor, 1)
