"""Composition as the paper writes it: one row, one token, one head at a time. Only tests import it.

    H_A⊕Bj = H_Bj + sum over augmenting models of f_cross(f_proj(H_Ai), H_Bj)
    f_cross(f_proj(H_Ai), H_Bj) = concat_k(head_k) W_O
    head_k = softmax(Q_k K_k^T / sqrt(D / H)) V_k,    Q_k = H_Bj W_Qk,  K_k, V_k = f_proj(H_Ai) W_Kk, f_proj(H_Ai) W_Vk

The paper leaves the mask open. Here token t of the anchor attends to the augmenting tokens in `visible[t]`, which hold
only text up to t. A token that sees none has a zero update. A readout mixes next-token distributions:

    p = (p_B + sum_m (e^r_m - 1) p_m) / (1 + sum_m (e^r_m - 1)),   r_m = min(max(0, a_m), 30)

Nothing here calls the fast path.

Shape suffixes: T anchor tokens, S augmenting tokens, D the anchor's width, A the augmenting model's, K = D / heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

MAX_WORD = 48
"""Characters after which a word without white space is cut."""


@dataclass(frozen=True)
class PairWeights:
    """One pair, as matrices that multiply from the right: `project` (A, D), the others (D, D); gains, biases (D,).

    The gains of heads are (K,).
    """

    project: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    gain_q: Tensor | None = None
    gain_kv: Tensor | None = None
    bias_q: Tensor | float = 0.0
    bias_k: Tensor | float = 0.0
    gain_head_q: Tensor | None = None
    gain_head_k: Tensor | None = None


def rms_norm(x_D: Tensor, gain_D: Tensor | None) -> Tensor:
    """x / sqrt(mean of x^2 + 1e-6) * gain; x itself without a gain."""
    return x_D if gain_D is None else x_D / torch.sqrt((x_D * x_D).mean() + 1e-6) * gain_D


def rotate(x_K: Tensor, position: int | None) -> Tensor:
    """Rotary positions: elements i and i + K/2, as a point, rotated by position * 10000^(-2i/K)."""
    if position is None:
        return x_K
    half = len(x_K) // 2
    rotated_K = x_K.clone()
    for i in range(half):
        angle = position * 10_000.0 ** (-i / half)
        rotated_K[i] = x_K[i] * math.cos(angle) - x_K[half + i] * math.sin(angle)
        rotated_K[half + i] = x_K[half + i] * math.cos(angle) + x_K[i] * math.sin(angle)
    return rotated_K


def heads_of(x_D: Tensor, gain_K: Tensor | None, bias_D: Tensor | float, width: int) -> list[Tensor]:
    """The heads of a query or key, each normalised if there is a gain; the bias comes last."""
    heads = [rms_norm(x_D[start : start + width], gain_K) for start in range(0, len(x_D), width)]
    return list((torch.cat(heads) + bias_D).split(width))


def cross(
    anchor_TD: Tensor,
    states_SA: Tensor,
    weights: PairWeights,
    heads: int,
    visible: Sequence[Sequence[int]],
    positions: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor:
    """f_cross(f_proj(h_A), h_B) of one row, (T, D); `positions` are the anchor's and the augmenting tokens'."""
    width = anchor_TD.shape[1] // heads
    projected = [rms_norm(state_A @ weights.project, weights.gain_kv) for state_A in states_SA]
    rows = []
    for t, anchor_D in enumerate(anchor_TD):
        query_D = rms_norm(anchor_D, weights.gain_q) @ weights.w_q
        queries = heads_of(query_D, weights.gain_head_q, weights.bias_q, width)
        outputs = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            if not visible[t]:
                outputs.append(torch.zeros(width, dtype=anchor_TD.dtype))
                continue
            query = rotate(queries[head], positions[0][t] if positions else None)
            keys_D = {s: projected[s] @ weights.w_k for s in visible[t]}
            keys = [
                rotate(
                    heads_of(key_D, weights.gain_head_k, weights.bias_k, width)[head],
                    positions[1][s] if positions else None,
                )
                for s, key_D in keys_D.items()
            ]
            values = [(projected[s] @ weights.w_v)[part] for s in visible[t]]
            shares = torch.softmax(torch.stack([(query * key).sum() / width**0.5 for key in keys]), 0)
            outputs.append(sum(share * value for share, value in zip(shares, values, strict=True)))
        rows.append(torch.cat(outputs) @ weights.w_o)
    return torch.stack(rows)


def mixture(logits: Sequence[Tensor], last: Sequence[Tensor], weight_MW: Tensor, bias_M: Tensor) -> Tensor:
    """Log-probabilities (V,) of one token's mixture.

    Args:
        logits: of the anchor and of each augmenting model, (V,).
        last: the states that gave them, (width,).
        weight_MW: of the gate, on all last states side by side, each divided by its root mean square.
        bias_M: of the gate.
    """
    normed = torch.cat([h / torch.sqrt((h * h).mean() + 1e-6) for h in last])
    p, total = torch.softmax(logits[0], 0), torch.ones((), dtype=logits[0].dtype)
    for m in range(len(bias_M)):
        a = (weight_MW[m] * normed).sum() + bias_M[m]
        if a < 0 or a > 30:
            a = torch.clamp(a.detach(), 0, 30) + 0.1 * (a - a.detach())  # a tenth of the gradient
        opened = torch.exp(a) - 1
        p, total = p + opened * torch.softmax(logits[m + 1], 0), total + opened
    return torch.log(p / total)


def visible_by_position(
    real: Sequence[bool],
    documents: Sequence[int] | None = None,
    prompt: Sequence[bool] | None = None,
) -> list[list[int]]:
    """Return the tokens that each token sees: up to itself, in its document, without padding, and only the prompt."""

    def sees(t: int, s: int) -> bool:
        same_document = documents is None or documents[s] == documents[t]
        in_prompt = prompt is None or prompt[s]
        return real[s] and same_document and in_prompt

    return [[s for s in range(t + 1) if sees(t, s)] for t in range(len(real))]


def tokens_of_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of an augmenting model for the text that the anchor has read, tokenised word by word.

    A word includes the white space before it; words longer than `MAX_WORD` are cut.
    """
    words: list[str] = []
    for at, character in enumerate(text):
        follows_word = character.isspace() and not text[at - 1].isspace()
        if at == 0 or follows_word or len(words[-1]) >= MAX_WORD:
            words.append(character)
        else:
            words[-1] += character
    tokens: list[int] = []
    for number, word in enumerate(words):
        tokens += _tokens_of_word(word, number == 0, tokenizer)
    return tokens


def _tokens_of_word(word: str, first: bool, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a word, after another word unless it is the first, which some tokenizers mark."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if not first:
        for anchor in ("a", "\n", "."):
            before = ids(anchor)
            both = ids(anchor + word)
            if both[: len(before)] == before:
                return both[len(before) :]
    return ids(word)
