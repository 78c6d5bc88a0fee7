"""Cross-attention from an anchor's hidden states to those of an augmenting model.

Shape suffixes: B rows, T anchor tokens, S augmenting tokens, D the anchor's width, A the augmenting model's width, H
heads, K = D / H the width of a head.

    f_proj(h_A) = h_A W_proj                               (S, A) -> (S, D)
    head_k = softmax(Q_k K_k^T / sqrt(K)) V_k,   Q = h_B W_Q,   K = f_proj(h_A) W_K,   V = f_proj(h_A) W_V
    f_cross(f_proj(h_A), h_B) = concat(head_k) W_O         (T, D)

The attention of the paper has no positions: it distinguishes tokens only by their content. Rotary positions rotate Q
and K by the position of each token in its document. Local positions also add biases b_Q and b_K before the rotation;
initially, the biases make half of the heads attend to the most recent token. With `qk_norm`, an RMS norm with a gain
normalizes each head of h_B W_Q and f_proj(h_A) W_K before the biases and the rotation, so that large queries and keys
can't saturate the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
        mask: (B or 1, 1, T, S), True where a token is visible. None means the causal mask, or a full mask if T = 1.
        non_empty: (B or 1, T), False for tokens that see nothing. None means that every token sees something.
    """

    mask: Tensor | None = None
    non_empty: Tensor | None = None

    @classmethod
    def of(cls, mask_BTS: Tensor) -> Visibility:
        """Build the visibility from a mask.

        A token that sees nothing attends to everything, because a softmax over nothing is NaN; its output is set to 0.

        Args:
            mask_BTS: (B or 1, T, S), True where a token is visible.
        """
        non_empty = mask_BTS.any(-1)
        if may_read(non_empty) and bool(non_empty.all()):
            return cls(mask=mask_BTS[:, None])
        filled_BTS = mask_BTS | ~non_empty[..., None]
        return cls(mask=filled_BTS[:, None], non_empty=non_empty)


class Rotation(NamedTuple):
    """The rotation of queries or keys by their positions, (B or 1, 1, T, K) each; the halves of a head form pairs.

    Args:
        cos: the cosines of the angles, in both halves.
        sin: the sines of the angles, negated in the first half.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, position_BT: Tensor, like_BHTK: Tensor) -> Rotation:
        """Compute the rotation for tensors of the width, dtype and device of `like_BHTK`."""
        half = like_BHTK.shape[-1] // 2
        dtype = torch.promote_types(like_BHTK.dtype, torch.float32)  # half precision can't represent large positions
        index = torch.arange(half, device=like_BHTK.device, dtype=dtype)
        frequency = _ROTARY_BASE ** (-index / half)
        angle = position_BT[:, None, :, None].to(dtype) * frequency
        cos = angle.cos().to(like_BHTK.dtype)
        sin = angle.sin().to(like_BHTK.dtype)
        return cls(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


@dataclass(frozen=True)
class AttentionPositions:
    """Positions of tokens in their documents, counted in anchor tokens.

    Args:
        anchor: (B or 1, T) positions of the queries.
        augmenting: (B or 1, S) positions of the new keys: each is the position of the anchor token with which the
            augmenting token was read.
    """

    anchor: Tensor
    augmenting: Tensor
    _rotations: dict[tuple[object, ...], Rotation] = field(default_factory=dict, repr=False)

    def rotate_queries(self, q_BHTK: Tensor) -> Tensor:
        """Rotate queries by the positions of the anchor's tokens; see `rotate`."""
        return rotate(q_BHTK, self._rotation(self.anchor, q_BHTK, of_queries=True))

    def rotate_keys(self, k_BHSK: Tensor) -> Tensor:
        """Rotate keys by the positions of the augmenting tokens; see `rotate`."""
        is_shared = self.augmenting is self.anchor
        return rotate(k_BHSK, self._rotation(self.augmenting, k_BHSK, of_queries=is_shared))

    def _rotation(self, position_BT: Tensor, like_BHTK: Tensor, *, of_queries: bool) -> Rotation:
        """Return the rotation of a pass, which all pairs of layers share."""
        key = (of_queries, like_BHTK.shape[-1], like_BHTK.dtype, like_BHTK.device)
        if key not in self._rotations:
            self._rotations[key] = Rotation.of(position_BT, like_BHTK)
        return self._rotations[key]


class CrossAttention(nn.Module):
    """Projection and cross-attention of one pair of layers. The module's docstring has the equations.

    Args:
        width: D, the width of the anchor.
        augmenting_width: A, the width of the augmenting model.
        heads: H, the number of heads; it must divide D.
        norm: `pre` applies an RMS norm with a gain to the input of the queries and to the projected states.
        init: `zero` sets W_O = 0, so that the output is zero; `paper` draws all matrices from the same distribution.
        positions: `local` adds biases to queries and keys.
        qk_norm: whether to normalize each head of the queries and keys; all heads share the gains.
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
        has_bias = positions == "local"
        self.project = nn.Linear(augmenting_width, width, bias=False)
        self.w_q = nn.Linear(width, width, bias=has_bias)
        self.w_k = nn.Linear(width, width, bias=has_bias)
        self.w_v = nn.Linear(width, width, bias=False)
        self.w_o = nn.Linear(width, width, bias=False)
        self.norm_q: nn.Module = nn.Identity()
        self.norm_kv: nn.Module = nn.Identity()
        if norm == "pre":
            self.norm_q = _Norm(width, eps=1e-6)
            self.norm_kv = _Norm(width, eps=1e-6)
        self.norm_head_q: _Norm | None = None
        self.norm_head_k: _Norm | None = None
        if qk_norm:
            self.norm_head_q = _Norm(width // heads, eps=1e-6)
            self.norm_head_k = _Norm(width // heads, eps=1e-6)
        self._initialize(init)

    @torch.no_grad()
    def _initialize(self, init: Init) -> None:
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
        """Compute f_cross.

        Args:
            anchor_BTD: the anchor's hidden states, from which the queries are computed.
            states_BSA: the augmenting model's new hidden states; None if all of them are in the cache.
            visibility: the mask over cached and new augmenting tokens.
            positions: positions of the queries and of the new keys; None for no rotation.
            cache: layer that keeps keys and values between passes.
            attention_weights: a list to which the weights (B, H, T, S) are appended, if given.

        Returns:
            The update of the anchor's hidden states, (B, T, D).
        """
        q_BHTK = self._heads(self.w_q, self.norm_head_q, self.norm_q(anchor_BTD))
        if positions is not None:
            q_BHTK = positions.rotate_queries(q_BHTK)
        k_BHSK, v_BHSK = self._keys_and_values(states_BSA, positions, cache)
        mask = visibility.mask
        causal = mask is None and q_BHTK.shape[2] > 1
        out_BHTK = functional.scaled_dot_product_attention(
            q_BHTK,
            k_BHSK,
            v_BHSK,
            attn_mask=mask,
            is_causal=causal,
        )
        if attention_weights is not None:
            attention_weights.append(_attention_weights(q_BHTK, k_BHSK, visibility))
        out_BTD = self.w_o(out_BHTK.transpose(1, 2).flatten(2))
        if visibility.non_empty is None:
            return out_BTD
        return out_BTD * visibility.non_empty[..., None].to(out_BTD.dtype)

    def _keys_and_values(
        self,
        states_BSA: Tensor | None,
        positions: AttentionPositions | None,
        cache: CacheLayerMixin | None,
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values so far, (B, H, S, K); the cache takes the new ones."""
        if states_BSA is None:
            assert cache is not None, "no new states and no cache"
            assert cache.keys is not None, "the cache is empty"
            assert cache.values is not None
            return cache.keys, cache.values
        projected = self.norm_kv(self.project(states_BSA))
        k = self._heads(self.w_k, self.norm_head_k, projected)
        v = self._split(self.w_v(projected))
        if positions is not None:
            k = positions.rotate_keys(k)
        if cache is None:
            return k, v
        return cache.update(k, v)

    def _heads(self, linear: nn.Linear, norm: nn.RMSNorm | None, x_BTD: Tensor) -> Tensor:
        """Return queries or keys before the rotation, (B, H, T, K)."""
        if norm is None:
            return self._split(linear(x_BTD))
        heads_BHTK = norm(self._split(functional.linear(x_BTD, linear.weight)))
        if linear.bias is None:
            return heads_BHTK
        return heads_BHTK + linear.bias.view(self.heads, 1, -1)

    def _split(self, x_BTD: Tensor) -> Tensor:
        """Split the last dimension into heads: (B, T, D) -> (B, H, T, K)."""
        x_BTHK = x_BTD.unflatten(-1, (self.heads, -1))
        return x_BTHK.transpose(1, 2)


class _Norm(nn.RMSNorm):
    """An RMS norm in the dtype of its gain, because torch has no fused kernel for mixed dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _local_bias(width: int, heads: int) -> Tensor:
    """Return the initial bias (D,) of queries and keys for `positions: local`; it is zero in half of the heads.

    In the other heads, two biases that are rotated to the positions p and p' have the product

        2 c^2 * sum over f of cos(f (p - p'))

    where c is `_LOCAL_BIAS` and f runs over the highest quarter of the frequencies. It is largest for p = p'.
    """
    bias_HK = torch.zeros(heads, width // heads)
    half = bias_HK.shape[1] // 2
    is_high = torch.arange(half) < max(1, half // 4)
    local_heads = max(1, heads // 2)
    bias_HK[:local_heads] = _LOCAL_BIAS * torch.cat([is_high, is_high]).float()
    return bias_HK.flatten()


def rotate(x_BHTK: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys by their positions.

        (a, b) -> (a cos - b sin, b cos + a sin),   angle = position * frequency

    a and b are the two halves of a head.

    Args:
        x_BHTK: queries or keys.
        rotation: the rotation of their positions.

    Returns:
        The rotated tensor, (B, H, T, K).
    """
    swapped = x_BHTK.roll(x_BHTK.shape[-1] // 2, -1)
    return torch.addcmul(x_BHTK * rotation.cos, swapped, rotation.sin)


def _attention_weights(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
    """Return the attention weights (B, H, T, S), which the fused kernel does not; they are 0 for an empty mask."""
    products = q.float() @ k.float().transpose(-1, -2)
    scores = products / math.sqrt(q.shape[-1])
    mask = visibility.mask
    if mask is None:
        queries, keys = scores.shape[-2:]
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        mask = ones.tril(keys - queries)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    if visibility.non_empty is None:
        return weights
    return weights * visibility.non_empty[:, None, :, None]
