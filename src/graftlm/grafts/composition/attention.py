"""Cross-attention from an anchor's hidden states to those of an augmenting model.

Shape suffixes: B rows, T anchor tokens, S augmenting tokens, D the anchor's width, A the augmenting model's width, H
heads, K = D / H the width of a head.

    f_proj(h_A) = h_A W_proj                               (S, A) -> (S, D)
    head_k = softmax(Q_k K_k^T / sqrt(K)) V_k,   Q = h_B W_Q,   K = f_proj(h_A) W_K,   V = f_proj(h_A) W_V
    f_cross(f_proj(h_A), h_B) = concat(head_k) W_O         (T, D)

The paper's attention has no positions: it distinguishes tokens only by content. Rotary positions rotate Q and K by
the position of each token in its document. Local positions also add biases b_Q and b_K before the rotation, which
initially make half of the heads attend to the most recent token. With `qk_norm`, an RMS norm with a gain normalises
each head of h_B W_Q and f_proj(h_A) W_K before biases and rotation, so that their size can't saturate the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import CacheLayerMixin

from graftlm.backbone import may_read

Norm = Literal["none", "pre"]
Init = Literal["zero", "paper"]
Positions = Literal["none", "rotary", "local"]
_ROTARY_BASE = 10_000.0
_LOCAL_BIAS = 4.0  # initial bias of a local head at its highest frequencies


@dataclass(frozen=True)
class Visibility:
    """The attention mask from anchor tokens to augmenting tokens.

    Args:
        mask: (B or 1, 1, T, S), True where visible; None for the causal mask, or for a full mask when T = 1.
        non_empty: (B or 1, T), False for tokens whose mask is empty; None when no mask is.
    """

    mask: Tensor | None = None
    non_empty: Tensor | None = None

    @classmethod
    def of(cls, mask_BTS: Tensor) -> Visibility:
        """From a mask (B or 1, T, S). Tokens with an empty mask attend everywhere to avoid NaN; their output is 0."""
        non_empty = mask_BTS.any(-1)
        if may_read(non_empty) and bool(non_empty.all()):
            return cls(mask_BTS[:, None])
        return cls((mask_BTS | ~non_empty[..., None])[:, None], non_empty)


@dataclass(frozen=True)
class AttentionPositions:
    """Positions of tokens in their document, counted in anchor tokens.

    `anchor` (B or 1, T) are the queries', `augmenting` (B or 1, S) of the anchor tokens with which new keys were read.
    """

    anchor: Tensor
    augmenting: Tensor


class CrossAttention(nn.Module):
    """Projection and cross-attention of one pair of layers; see the module's equations.

    Args:
        width: D.
        augmenting_width: A.
        heads: H; divides D.
        norm: `pre` applies an RMS norm with a gain to the query's input and to the projected states.
        init: `zero` sets W_O = 0, so that the output is zero; `paper` draws all matrices alike.
        positions: `local` gives queries and keys biases.
        qk_norm: normalises each head of the queries and keys; the gains are shared by the heads.
    """

    def __init__(
        self,
        width: int,
        augmenting_width: int,
        heads: int,
        norm: Norm,
        init: Init,
        positions: Positions = "none",
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(augmenting_width, width, bias=False)
        self.w_q = nn.Linear(width, width, bias=positions == "local")
        self.w_k = nn.Linear(width, width, bias=positions == "local")
        self.w_v = nn.Linear(width, width, bias=False)
        self.w_o = nn.Linear(width, width, bias=False)
        self.norm_q = _Norm(width, eps=1e-6) if norm == "pre" else nn.Identity()
        self.norm_kv = _Norm(width, eps=1e-6) if norm == "pre" else nn.Identity()
        self.norm_head_q = _Norm(width // heads, eps=1e-6) if qk_norm else None
        self.norm_head_k = _Norm(width // heads, eps=1e-6) if qk_norm else None
        self._initialise(init)

    @torch.no_grad()
    def _initialise(self, init: Init) -> None:
        for linear in (self.project, self.w_q, self.w_k, self.w_v, self.w_o):
            linear.weight.normal_(0, 1 / math.sqrt(linear.in_features))
            if linear.bias is not None:
                linear.bias.copy_(_local_bias(linear.out_features, self.heads))
        if init == "zero":
            self.w_o.weight.zero_()

    def forward(
        self,
        anchor_BTD: Tensor,
        states_BSA: Tensor | None,
        visibility: Visibility,
        positions: AttentionPositions | None = None,
        cache: CacheLayerMixin | None = None,
        attention_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """f_cross, (B, T, D).

        Args:
            anchor_BTD: the anchor's hidden states, from which the queries come.
            states_BSA: the augmenting model's new hidden states; None if all are in the cache.
            visibility: over cached and new augmenting tokens.
            positions: of the queries and of the new keys; None for no rotation.
            cache: keeps keys and values between passes.
            attention_weights: if given, the weights (B, H, T, S) are appended.
        """
        q_BHTK = self._heads(self.w_q, self.norm_head_q, self.norm_q(anchor_BTD))
        if positions is not None:
            q_BHTK = rotate(q_BHTK, positions.anchor)
        k_BHSK, v_BHSK = self._keys_and_values(states_BSA, positions, cache)
        mask, non_empty = visibility.mask, visibility.non_empty
        causal = mask is None and q_BHTK.shape[2] > 1
        out_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=causal)
        if attention_weights is not None:
            attention_weights.append(_attention_weights(q_BHTK, k_BHSK, visibility))
        out_BTD = self.w_o(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD if non_empty is None else out_BTD * non_empty[..., None].to(out_BTD.dtype)

    def _keys_and_values(
        self, states_BSA: Tensor | None, positions: AttentionPositions | None, cache: CacheLayerMixin | None
    ) -> tuple[Tensor, Tensor]:
        if states_BSA is None:
            assert cache is not None, "no new states and no cache"
            assert cache.keys is not None, "the cache is empty"
            assert cache.values is not None
            return cache.keys, cache.values
        projected = self.norm_kv(self.project(states_BSA))
        k, v = self._heads(self.w_k, self.norm_head_k, projected), self._split(self.w_v(projected))
        if positions is not None:
            k = rotate(k, positions.augmenting)
        return (k, v) if cache is None else cache.update(k, v)

    def _heads(self, linear: nn.Linear, norm: nn.RMSNorm | None, x_BTD: Tensor) -> Tensor:
        """(B, H, T, K) queries or keys."""
        if norm is None:
            return self._split(linear(x_BTD))
        heads_BHTK = norm(self._split(functional.linear(x_BTD, linear.weight)))
        return heads_BHTK if linear.bias is None else heads_BHTK + linear.bias.view(self.heads, 1, -1)

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _Norm(nn.RMSNorm):
    """An RMS norm in the precision of its gain, also of half-precision inputs, for which torch has no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _local_bias(width: int, heads: int) -> Tensor:
    """(D,) the initial bias of queries and keys for `positions: local`; zero in half of the heads.

    In the other heads the product of two biases rotated to positions p and p' is 2 c^2 times the sum of cos(f (p - p'))
    over the highest quarter of the frequencies f, which is largest for p = p'.
    """
    bias_HK = torch.zeros(heads, width // heads)
    half = bias_HK.shape[1] // 2
    highest = torch.arange(half) < max(1, half // 4)
    bias_HK[: max(1, heads // 2)] = _LOCAL_BIAS * torch.cat([highest, highest]).float()
    return bias_HK.flatten()


def rotate(x_BHTK: Tensor, position_BT: Tensor) -> Tensor:
    """Rotary positions: (a, b) -> (a cos - b sin, b cos + a sin), angle = position * frequency.

    a and b are the two halves of a head.
    """
    half = x_BHTK.shape[-1] // 2
    exact = torch.promote_types(x_BHTK.dtype, torch.float32)  # half precision can't hold large positions
    frequency = _ROTARY_BASE ** (-torch.arange(half, device=x_BHTK.device, dtype=exact) / half)
    angle = position_BT[:, None, :, None].to(exact) * frequency
    cos, sin = angle.cos().to(x_BHTK.dtype), angle.sin().to(x_BHTK.dtype)
    a, b = x_BHTK[..., :half], x_BHTK[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attention_weights(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
    """(B, H, T, S) attention weights, which the fused kernel does not return; zero for tokens with an empty mask."""
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = visibility.mask
    if mask is None:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        mask = ones.tril(scores.shape[-1] - scores.shape[-2])
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    non_empty = visibility.non_empty
    return weights if non_empty is None else weights * non_empty[:, None, :, None]
