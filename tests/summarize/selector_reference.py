"""Slow, literal form of the selectors: one document, one sentence, one step at a time. Only tests import it."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from graftlm.models.sentence_selector.heads import ClassifierHead, PointerHead


def lstm(
    module: nn.LSTM, inputs: list[Tensor], state: list[tuple[Tensor, Tensor]] | None = None
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return the outputs of all positions and the last (h, c) of each layer and direction, by the cell's equations."""
    directions = 2 if module.bidirectional else 1
    last_states = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            zeros = inputs[0].new_zeros(module.hidden_size)
            h, c = state[index] if state is not None else (zeros, zeros)
            name = f"l{layer}" + "_reverse" * direction
            W, U, b, u = (
                getattr(module, f"{part}_{name}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            hidden = []
            for x in inputs[:: -1 if direction else 1]:
                i, f, g, o = (W @ x + b + U @ h + u).chunk(4)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                hidden.append(h)
            last_states.append((h, c))
            outputs.append(hidden[:: -1 if direction else 1])
        inputs = [torch.cat(both) for both in zip(*outputs, strict=True)]
    return inputs, last_states


def classify(head: ClassifierHead, d: list[Tensor]) -> list[float]:
    """Return σ(W_o [d_i; d] + b_o) with d = tanh(b_d + W_d (1/N) Σ d_i)."""
    mean = sum(d[1:], d[0]) / len(d)
    document = torch.tanh(head.document_proj.bias + head.document_proj.weight @ mean)
    W, b = head.out_proj.weight, head.out_proj.bias
    return [float(torch.sigmoid(W @ torch.cat([d_i, document]) + b)) for d_i in d]


def pointer_log_probs(head: PointerHead, s: list[Tensor], d: list[Tensor], selected: list[int]) -> list[list[float]]:
    """Return log a_t of each step after the sentences selected before it, and of one step more."""
    mean = sum(d[1:], d[0]) / len(d)
    first = torch.tanh(head.state_proj.weight @ mean + head.state_proj.bias)
    state = [(first, torch.zeros_like(first))] * head.lstm.num_layers
    attended, last, steps = torch.zeros_like(first), head.start, []
    for index in [*selected, 0]:
        (h,), state = lstm(head.lstm, [torch.cat([last, attended])], state)
        scores = torch.stack([(head.query_proj.weight @ h) @ d_i for d_i in d])
        a = scores.softmax(0)
        c = sum((a_i * d_i for a_i, d_i in zip(a[1:], d[1:], strict=True)), a[0] * d[0])
        attended = torch.tanh(head.attention_proj.weight @ torch.cat([c, h]) + head.attention_proj.bias)
        steps.append([math.log(float(a_i)) for a_i in a])
        last = s[index]
    return steps


def best_sequence(head: PointerHead, s: list[Tensor], d: list[Tensor], length: int) -> list[int]:
    """Return the most likely sequence of distinct sentences, by enumeration."""

    def total(sequence: tuple[int, ...]) -> float:
        steps = pointer_log_probs(head, s, d, list(sequence))
        return sum(step[index] for step, index in zip(steps, sequence, strict=False))

    return list(max(itertools.permutations(range(len(d)), length), key=total))
