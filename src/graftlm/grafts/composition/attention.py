"""Cross-attention from an anchor's hidden states to those of an augmenting model.

Shape suffixes: B rows, T anchor tokens, S augmenting tokens, D the anchor's width, A the augmenting model's width, H
heads, K = D / H the width of a head.

    f_proj(h_A) = h_A W_proj                               (S, A) -> (S, D)
    head_k = softmax(Q_k K_k^T / sqrt(K)) V_k,   Q = h_B W_Q,   K = f_proj(h_A) W_K,   V = f_proj(h_A) W_V
    f_cross(f_proj(h_A), h_B) = concat(head_k) W_O         (T, D)

With rotary positions Q and K are turned by their places in the text, so that a weight may depend on how long ago a
token was read; the paper's attention does not tell an old token from a new one but by what it says. Local ones add
b_Q and b_K before they are turned, and start half of the heads with their eyes on the token that was read last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import CacheLayerMixin

Norm = Literal["none", "pre"]
Init = Literal["zero", "paper"]
Positions = Literal["none", "rotary", "local"]
_BASE = 10_000.0  # of the rotary frequencies
_LOCAL = 4.0  # what the biases of a local head start with, at its highest frequencies


@dataclass(frozen=True)
class Visible:
    """Which augmenting tokens each anchor token sees.

    Args:
        mask: (B or 1, 1, T, S), True where it sees; None for plain causal order, all of it when T = 1.
        some: (B or 1, T), False for tokens that see none; None when each sees at least one.
    """

    mask: Tensor | None = None
    some: Tensor | None = None

    @classmethod
    def of(cls, mask_BTS: Tensor) -> Visible:
        """From (B or 1, T, S), True where a token sees; whoever sees none is let see all, and then writes nothing."""
        some = mask_BTS.any(-1)
        if bool(some.all()):
            return cls(mask_BTS[:, None])
        return cls((mask_BTS | ~some[..., None])[:, None], some)


@dataclass(frozen=True)
class Places:
    """Where tokens stand in their document, counted in anchor tokens.

    Args:
        anchor: (B or 1, T) of the queries.
        augmenting: (B or 1, S) of the new augmenting tokens: the anchor token with which each was read.
    """

    anchor: Tensor
    augmenting: Tensor


class CrossAttention(nn.Module):
    """One pair's projection and cross-attention; see the module's equations.

    Args:
        width: D.
        augmenting_width: A.
        heads: H; divides D.
        norm: `pre` normalises the query's input and the projected states (RMS norm with a gain).
        init: `zero` starts with W_O = 0, so that nothing is written; `paper` starts all matrices alike.
        positions: with `local`, queries and keys have biases.
    """

    def __init__(
        self,
        width: int,
        augmenting_width: int,
        heads: int,
        norm: Norm,
        init: Init,
        positions: Positions = "none",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(augmenting_width, width, bias=False)
        self.w_q = nn.Linear(width, width, bias=positions == "local")
        self.w_k = nn.Linear(width, width, bias=positions == "local")
        self.w_v = nn.Linear(width, width, bias=False)
        self.w_o = nn.Linear(width, width, bias=False)
        self.norm_q = nn.RMSNorm(width, eps=1e-6) if norm == "pre" else None
        self.norm_kv = nn.RMSNorm(width, eps=1e-6) if norm == "pre" else None
        self._initialise(init)

    @torch.no_grad()
    def _initialise(self, init: Init) -> None:
        for linear in (self.project, self.w_q, self.w_k, self.w_v, self.w_o):
            linear.weight.normal_(0, 1 / math.sqrt(linear.in_features))
            if linear.bias is not None:
                linear.bias.copy_(_local_start(linear.out_features, self.heads))
        if init == "zero":
            self.w_o.weight.zero_()

    def forward(
        self,
        anchor_BTD: Tensor,
        states_BSA: Tensor | None,
        visible: Visible,
        places: Places | None = None,
        cache: CacheLayerMixin | None = None,
        attention: list[Tensor] | None = None,
    ) -> Tensor:
        """f_cross, (B, T, D).

        Args:
            anchor_BTD: the anchor's hidden states, the queries.
            states_BSA: the augmenting model's new hidden states; None when there are none, and all are in the cache.
            visible: who sees what, of the cached tokens and the new ones together.
            places: of queries and new keys, by which they are turned; None leaves them as they are.
            cache: keeps keys and values between passes.
            attention: where given, the attention's weights (B, H, T, S) are appended to it.
        """
        q_BHTK = self._split(self.w_q(self._normed(self.norm_q, anchor_BTD)))
        if places is not None:
            q_BHTK = rotated(q_BHTK, places.anchor)
        k_BHSK, v_BHSK = self._keys_and_values(states_BSA, places, cache)
        out_BHTK = _attend(q_BHTK, k_BHSK, v_BHSK, visible)
        if attention is not None:
            attention.append(_weights(q_BHTK, k_BHSK, visible))
        out_BTD = self.w_o(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD if visible.some is None else out_BTD * visible.some[..., None].to(out_BTD.dtype)

    def _keys_and_values(
        self, states_BSA: Tensor | None, places: Places | None, cache: CacheLayerMixin | None
    ) -> tuple[Tensor, Tensor]:
        if states_BSA is None:
            assert cache is not None, "nothing new, and no cache"
            assert cache.keys is not None, "nothing was read yet"
            assert cache.values is not None
            return cache.keys, cache.values
        projected = self._normed(self.norm_kv, self.project(states_BSA))
        k, v = self._split(self.w_k(projected)), self._split(self.w_v(projected))
        if places is not None:
            k = rotated(k, places.augmenting)
        return (k, v) if cache is None else cache.update(k, v)

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    @staticmethod
    def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
        return x if norm is None else norm(x)


def _local_start(width: int, heads: int) -> Tensor:
    """(D,) a bias that, turned by two places, is most like itself where they are the same, in half of the heads.

    The product of two is 2 c^2 times the sum of cos(f (p - p')) over the highest quarter of the frequencies f.
    """
    bias_HK = torch.zeros(heads, width // heads)
    half = bias_HK.shape[1] // 2
    highest = torch.arange(half) < max(1, half // 4)
    bias_HK[: max(1, heads // 2)] = _LOCAL * torch.cat([highest, highest]).float()
    return bias_HK.flatten()


def rotated(x_BHTK: Tensor, place_BT: Tensor) -> Tensor:
    """Each pair (a, b) of a head's halves, at place p and frequency f, turned by the angle p f.

    As (a cos - b sin, b cos + a sin).
    """
    half = x_BHTK.shape[-1] // 2
    exact = torch.promote_types(x_BHTK.dtype, torch.float32)  # places are too large for half precision
    frequency = _BASE ** (-torch.arange(half, device=x_BHTK.device, dtype=exact) / half)
    angle = place_BT[:, None, :, None].to(exact) * frequency
    cos, sin = angle.cos().to(x_BHTK.dtype), angle.sin().to(x_BHTK.dtype)
    a, b = x_BHTK[..., :half], x_BHTK[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    causal = visible.mask is None and q.shape[2] > 1
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible.mask, is_causal=causal)


def _weights(q: Tensor, k: Tensor, visible: Visible) -> Tensor:
    """The attention's weights, which the fused kernel does not give; zero for who sees nothing."""
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = visible.mask
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(
            scores.shape[-1] - scores.shape[-2]
        )
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights if visible.some is None else weights * visible.some[:, None, :, None]
