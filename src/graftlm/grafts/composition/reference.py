"""Composition as the paper writes it: one row, one token, one head at a time, everything recomputed. For tests only.

    H_A⊕Bj = H_Bj + sum over augmenting models of f_cross(f_proj(H_Ai), H_Bj)
    f_cross(f_proj(H_Ai), H_Bj) = concat_k(head_k) W_O
    head_k = softmax(Q_k K_k^T / sqrt(D / H)) V_k,    Q_k = H_Bj W_Qk,  K_k, V_k = f_proj(H_Ai) W_Kk, f_proj(H_Ai) W_Vk

What the paper leaves open: token t of the anchor attends to the augmenting tokens that `sees[t]` names, none of which
says anything about later text; a token that sees none gets nothing.

Shape suffixes: T anchor tokens, S augmenting tokens, D the anchor's width, A the augmenting model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """One pair, as matrices that multiply from the right: `project` (A, D), the others (D, D); gains, biases (D,)."""

    project: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    gain_q: Tensor | None = None
    gain_kv: Tensor | None = None
    bias_q: Tensor | float = 0.0
    bias_k: Tensor | float = 0.0


def rms_norm(x_D: Tensor, gain_D: Tensor | None) -> Tensor:
    """x / sqrt(mean of x^2 + 1e-6) * gain; x itself without a gain."""
    return x_D if gain_D is None else x_D / torch.sqrt((x_D * x_D).mean() + 1e-6) * gain_D


def turned(x_K: Tensor, place: int | None) -> Tensor:
    """Rotary positions: the i-th of the first half and of the second, as a point, turned by place * 10000^(-2i/K)."""
    if place is None:
        return x_K
    half = len(x_K) // 2
    turned_K = x_K.clone()
    for i in range(half):
        angle = place * 10_000.0 ** (-i / half)
        turned_K[i] = x_K[i] * math.cos(angle) - x_K[half + i] * math.sin(angle)
        turned_K[half + i] = x_K[half + i] * math.cos(angle) + x_K[i] * math.sin(angle)
    return turned_K


def cross(
    anchor_TD: Tensor,
    states_SA: Tensor,
    weights: Weights,
    heads: int,
    sees: Sequence[Sequence[int]],
    places: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor:
    """f_cross(f_proj(h_A), h_B) of one row, (T, D); with rotary positions, `places` of the anchor's and its tokens."""
    width = anchor_TD.shape[1] // heads
    projected = [rms_norm(state_A @ weights.project, weights.gain_kv) for state_A in states_SA]
    written = []
    for t, anchor_D in enumerate(anchor_TD):
        query_D = rms_norm(anchor_D, weights.gain_q) @ weights.w_q + weights.bias_q
        parts = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            if not sees[t]:
                parts.append(torch.zeros(width, dtype=anchor_TD.dtype))
                continue
            query = turned(query_D[part], places[0][t] if places else None)
            keys = [
                turned((projected[s] @ weights.w_k + weights.bias_k)[part], places[1][s] if places else None)
                for s in sees[t]
            ]
            values = [(projected[s] @ weights.w_v)[part] for s in sees[t]]
            shares = torch.softmax(torch.stack([(query * key).sum() / width**0.5 for key in keys]), 0)
            parts.append(sum(share * value for share, value in zip(shares, values, strict=True)))
        written.append(torch.cat(parts) @ weights.w_o)
    return torch.stack(written)


def sees_by_position(
    real: Sequence[bool], documents: Sequence[int] | None = None, prompt: Sequence[bool] | None = None
) -> list[list[int]]:
    """The tokens that each one sees: itself and earlier ones of its document, no padding, prompts only where given."""
    return [
        [
            s
            for s in range(t + 1)
            if real[s] and (documents is None or documents[s] == documents[t]) and (prompt is None or prompt[s])
        ]
        for t in range(len(real))
    ]


def tokens_so_far(text: str, tokenise: Callable[[str, bool], Sequence[int]], longest: int) -> list[int]:
    """An augmenting model's tokens for the text that the anchor has read.

    Word by word, each with the white space before it; a word longer than `longest` is cut.
    """
    words: list[str] = []
    for at, character in enumerate(text):
        begins = at == 0 or (character.isspace() and not text[at - 1].isspace()) or len(words[-1]) >= longest
        if begins:
            words.append(character)
        else:
            words[-1] += character
    return [token for number, word in enumerate(words) for token in tokenise(word, number == 0)]
