"""Multi-head attention with any number of leading dimensions.

Shape suffixes: B rows, I windows, w slots of a window, H heads, K width of a head, d = H K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.models.block_state.layout import ChunkedTensor, merge_heads, split_heads

MASKED = -1e30
"""The bias of masked scores: finite, so that a row without any visible key produces no NaN."""

CAUSAL_CHUNK = 32
"""Minimum number of queries in a chunk of causal attention on a CPU."""


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(K) + bias) v.

    Fused kernels compute no gradients for a bias. If it needs gradients, the product is computed explicitly.

    Args:
        q: queries (..., H, queries, K).
        k: keys (..., H, keys, K).
        v: values (..., H, keys, K).
        bias: addend of the scores, which broadcasts to (..., H, queries, keys), with all leading dimensions or none.

    Returns:
        Outputs (..., H, queries, K).
    """
    if bias is not None and bias.requires_grad:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + bias.to(q.dtype)
        return scores.softmax(-1) @ v
    # Fused kernels support a single batch dimension.
    leading = q.shape[:-3]
    if bias is not None:
        bias = _flat_bias(bias, leading).to(q.dtype)
    out = functional.scaled_dot_product_attention(
        q.flatten(0, -4),
        k.flatten(0, -4),
        v.flatten(0, -4),
        attn_mask=bias,
    )
    return out.unflatten(0, leading)


def _flat_bias(bias: Tensor, leading: torch.Size) -> Tensor:
    """Reshape a bias to four dimensions, with the leading dimensions flattened."""
    if bias.dim() > 3:
        return bias.expand(*leading, *bias.shape[-3:]).flatten(0, -4)
    missing = 4 - bias.dim()
    return bias[(None,) * missing]


def multi_head_attention(
    q: Tensor,
    kv: Tensor,
    num_heads: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend from queries to keys and values whose heads are concatenated.

    Args:
        q: queries (..., queries, d).
        kv: keys and values (..., keys, 2d), concatenated along the last dimension.
        num_heads: number of heads H.
        bias: addend of the scores, as in `scaled_attention`.

    Returns:
        Outputs (..., queries, d).
    """
    k, v = kv.chunk(2, dim=-1)
    out = scaled_attention(
        split_heads(q, num_heads),
        split_heads(k, num_heads),
        split_heads(v, num_heads),
        bias,
    )
    return merge_heads(out)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> ChunkedTensor:
    """Compute causal attention within each window.

    On a CPU the queries are split into at most four chunks. A chunk reads no keys after its last query: with four
    chunks, 5/8 of the scores are computed.

    Args:
        q: queries (B, I, H, w, K).
        k: keys (B, I, H, w, K).
        v: values (B, I, H, w, K).

    Returns:
        Outputs (B, I, w, d), as a `ChunkedTensor` with one chunk of tokens per chunk of queries.
    """
    count = q.shape[-2]
    size = count
    if q.device.type == "cpu":
        quarter = -(-count // 4)
        size = max(CAUSAL_CHUNK, quarter)
    position = torch.arange(count, device=q.device)
    bias = torch.where(position <= position[:, None], 0.0, MASKED)
    chunks = []
    for start in range(0, count, size):
        end = min(count, start + size)
        out = scaled_attention(
            q[..., start:end, :],
            k[..., :end, :],
            v[..., :end, :],
            bias[start:end, :end],
        )
        chunks.append(merge_heads(out))
    return ChunkedTensor(chunks, dim=2)
