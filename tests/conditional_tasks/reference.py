"""Conditional tasks as in the equations: one row, one token and one block at a time. For tests only.

    z               = v / |v| for a task's trained vector v
    film(y, z)      = gamma(z) * y + beta(z),   gamma(z) = 1 + G z,   beta(z) = B z              (definition 1)
    attention       = softmax(M(z) + Q K^T / sqrt(d)) V,   M(z) = A'_1 (+) ... (+) A'_N,   A'_n = film(A_n, z)
    alignment       : E(x) R^, with film applied to E(x) R, R = I + D                             (equation 3.2)
    norm            : (a - mean) / deviation * gamma' + beta', then film                          (equation 3.3)
    bottleneck(x)   = film(U act(film(V x, z)), z), with film((x - mean) / deviation * gamma' + beta', z) as x
                      if it has a norm
    large           : c_j = bottleneck_j(h_j + c_{j-1}), and c_L added to h_L
    LoRA            : W x + B A x + the bias, with A and B of the row's task

Equations 3.2 and 3.3 as printed are `literal_alignment` and `literal_norm`.

Shape suffixes: T tokens of one row, without padding; D the backbone's width; Z a task embedding's; W a block's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Film = tuple[Tensor, Tensor]  # G and B, (width, Z) each


@dataclass(frozen=True)
class BottleneckWeights:
    """A bottleneck: `down` (F, D), `up` (D, F), and the FiLM of the output of each.

    `norm` has gamma' (D,), beta' (D,), the epsilon and the FiLM of the norm of its input; None without one.
    """

    down: Tensor
    up: Tensor
    inner: Film
    outer: Film
    norm: tuple[Tensor, Tensor, float, Film] | None = None


@dataclass(frozen=True)
class ConditionalWeights:
    """All conditional modules that are present; those of layers by the layer's number.

    Attributes:
        alignment: D and its FiLM.
        biases: A (N, W, W) and its FiLM.
        norms: a FiLM for each norm of a layer.
        necks: bottlenecks.
        large: whether the bottlenecks run along all layers.
        aligned: the layer whose input is aligned.
        loras: A (R, inputs) and B (outputs, R) by the layer's number and the Linear's path in it.
    """

    alignment: tuple[Tensor, Film] | None = None
    biases: Mapping[int, tuple[Tensor, Film]] = field(default_factory=dict)
    norms: Mapping[int, Sequence[Film]] = field(default_factory=dict)
    necks: Mapping[int, BottleneckWeights] = field(default_factory=dict)
    large: bool = False
    aligned: int = 0
    loras: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)


def film(y: Tensor, z: Tensor, weights: Film) -> Tensor:
    """Compute gamma(z) * y + beta(z), along y's last dimension."""
    scale, shift = weights
    gamma = 1 + scale @ z
    beta = shift @ z
    return gamma * y + beta


def direct_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return a matrix with the blocks a and b along its diagonal, and zeros elsewhere."""
    upper_right = a.new_zeros(a.shape[0], b.shape[1])
    lower_left = a.new_zeros(b.shape[0], a.shape[1])
    upper = torch.cat([a, upper_right], 1)
    lower = torch.cat([lower_left, b], 1)
    return torch.cat([upper, lower])


def bias(blocks: Tensor, weights: Film, z: Tensor, length: int) -> Tensor:
    """M(z), (T, T)."""
    matrix = blocks.new_zeros(0, 0)
    for block_WW in blocks:
        modulated = film(block_WW.reshape(-1), z, weights)
        matrix = direct_sum(matrix, modulated.reshape(block_WW.shape))
    return matrix[:length, :length]


def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Compute a head of attention, (T, d)."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return torch.softmax(m + scores, -1) @ v


def align(x_D: Tensor, matrix: Tensor, weights: Film, z: Tensor) -> Tensor:
    """Compute the alignment of a token, (D,)."""
    r = torch.eye(len(x_D), dtype=x_D.dtype) + matrix
    return film(x_D @ r, z, weights)


def literal_alignment(x_D: Tensor, r: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """x (R gamma + beta), with R modulated column by column."""
    return x_D @ (r * gamma + beta)


def normalised(a_D: Tensor, eps: float) -> Tensor:
    """Compute (a - mean) / deviation."""
    centred = a_D - a_D.mean()
    variance = centred.square().mean()
    return centred / torch.sqrt(variance + eps)


def literal_norm(a_D: Tensor, own: tuple[Tensor, Tensor], gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """n * (gamma' gamma + beta') + beta, with the norm's `own` gamma' and beta'."""
    own_gamma, own_beta = own
    return normalised(a_D, eps) * (own_gamma * gamma + own_beta) + beta


def bottleneck(x_D: Tensor, neck: BottleneckWeights, z: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the bottleneck of a token, (D,)."""
    if neck.norm is not None:
        gain, shift, eps, weights = neck.norm
        x_D = film(normalised(x_D, eps) * gain + shift, z, weights)
    inner = activation(film(neck.down @ x_D, z, neck.inner))
    return film(neck.up @ inner, z, neck.outer)


def _by_token(function: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    return torch.stack([function(x_D) for x_D in x_TD])


def _norm(x_TD: Tensor, layer_norm: Any, z: Tensor, weights: Film | None) -> Tensor:
    out = _by_token(lambda x: normalised(x, layer_norm.eps) * layer_norm.weight + layer_norm.bias, x_TD)
    return out if weights is None else _by_token(lambda x: film(x, z, weights), out)


def _linear(x_TD: Tensor, layer: Any, number: int, path: str, modules: ConditionalWeights) -> Tensor:
    """By its weights, since the live module may have hooks."""
    linear = layer.get_submodule(path)
    weight = linear.weight
    if (number, path) in modules.loras:
        a, b = modules.loras[number, path]
        weight = weight + b @ a
    return x_TD @ weight.T + linear.bias


def _self_attention(x_TD: Tensor, layer: Any, number: int, modules: ConditionalWeights, m: Tensor) -> Tensor:
    attention = layer.attention.self
    size = attention.attention_head_size
    q = _linear(x_TD, layer, number, "attention.self.query", modules)
    k = _linear(x_TD, layer, number, "attention.self.key", modules)
    v = _linear(x_TD, layer, number, "attention.self.value", modules)
    outputs = []
    for head in range(attention.num_attention_heads):
        part = slice(head * size, (head + 1) * size)
        outputs.append(attend(q[:, part], k[:, part], v[:, part], m))
    return torch.cat(outputs, -1)


def encode(
    x_TD: Tensor, layers: Sequence[Any], modules: ConditionalWeights, v: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """The last hidden states, (T, D), of one row in a BERT encoder.

    Args:
        x_TD: the output of the embeddings.
        layers: transformers' BERT layers, for their weights.
        modules: the conditional modules.
        v: the task's trained vector.
        activation: the FFN's.
    """
    h, z = x_TD, v / torch.sqrt((v * v).sum())
    skip = torch.zeros_like(h)
    for number, layer in enumerate(layers):
        if modules.alignment is not None and number == modules.aligned:
            matrix, weights = modules.alignment
            h = _by_token(lambda x, matrix=matrix, weights=weights: align(x, matrix, weights, z), h)
        first, second = modules.norms.get(number, (None, None))
        a = modules.biases.get(number)
        m = h.new_zeros(len(h), len(h)) if a is None else bias(a[0], a[1], z, len(h))
        attended = _self_attention(h, layer, number, modules, m)
        attended = _linear(attended, layer, number, "attention.output.dense", modules)
        h = _norm(attended + h, layer.attention.output.LayerNorm, z, first)
        inner = activation(_linear(h, layer, number, "intermediate.dense", modules))
        written = _linear(inner, layer, number, "output.dense", modules)
        neck = modules.necks.get(number)
        if neck is not None and not modules.large:
            written = written + _by_token(lambda x, neck=neck: bottleneck(x, neck, z, activation), h)
        h = _norm(written + h, layer.output.LayerNorm, z, second)
        if neck is not None and modules.large:
            skip = _by_token(lambda x, neck=neck: bottleneck(x, neck, z, activation), h + skip)
    return h + skip


def choice_logits(choices: Sequence[Tensor], weight_D: Tensor, bias: Tensor) -> list[Tensor]:
    """The logit of each choice of a row: w . v + b for the vector v of the choice's own sequence."""
    return [sum((w * v for w, v in zip(weight_D, vector_D, strict=True)), bias) for vector_D in choices]


def choice_loss(choices: Sequence[Tensor], weight_D: Tensor, bias: Tensor, right: int) -> Tensor:
    """-log of the right choice's part in the sum of all exponentials."""
    logits = choice_logits(choices, weight_D, bias)
    total = sum((torch.exp(logit) for logit in logits), torch.zeros_like(bias))
    return torch.log(total) - logits[right]


def marked_logits(
    vector_D: Tensor, h_TD: Tensor, places: Sequence[Sequence[int]], weight_C3D: Tensor, bias_C: Tensor
) -> Tensor:
    """The logits of a row with two marked places: a Linear of its vector and the mean state of each place, (C,)."""
    read = list(vector_D)
    for tokens in places:
        for unit in range(h_TD.shape[1]):
            values = [h_TD[token, unit] for token in tokens]
            read.append(sum(values, torch.zeros_like(vector_D[0])) / max(1, len(values)))
    logits = []
    for row_3D, shift in zip(weight_C3D, bias_C, strict=True):
        logits.append(sum((w * x for w, x in zip(row_3D, read, strict=True)), shift))
    return torch.stack(logits)
