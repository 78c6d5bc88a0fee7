"""The selectors once more, slow and literal: one document, one sentence, one step at a time. Only tests use it."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from graftlm.models.sentence_selector.heads import ClassifierHead, PointerHead


def lstm(
    module: nn.LSTM, inputs: list[Tensor], state: list[tuple[Tensor, Tensor]] | None = None
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Outputs at each place, and the last state of each layer and direction, by the equations of the cell."""
    directions = 2 if module.bidirectional else 1
    ends = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            own = layer * directions + direction
            zeros = inputs[0].new_zeros(module.hidden_size)
            h, c = state[own] if state is not None else (zeros, zeros)
            name = f"l{layer}" + "_reverse" * direction
            W, U, b, u = (
                getattr(module, f"{part}_{name}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            found = []
            for x in inputs[:: -1 if direction else 1]:
                i, f, g, o = (W @ x + b + U @ h + u).chunk(4)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                found.append(h)
            ends.append((h, c))
            outputs.append(found[:: -1 if direction else 1])
        inputs = [torch.cat(both) for both in zip(*outputs, strict=True)]
    return inputs, ends


def classify(head: ClassifierHead, d: list[Tensor]) -> list[float]:
    """σ(W_o [d_i; d] + b_o) with d = tanh(b_d + W_d (1/N) Σ d_i)."""
    whole = torch.tanh(head.whole.bias + head.whole.weight @ (sum(d[1:], d[0]) / len(d)))
    return [float(torch.sigmoid(head.out.weight @ torch.cat([one, whole]) + head.out.bias)) for one in d]


def point(head: PointerHead, s: list[Tensor], d: list[Tensor], chosen: list[int]) -> list[list[float]]:
    """log a_t for each step, given the sentences that were chosen before it; one step more than there are."""
    mean = sum(d[1:], d[0]) / len(d)
    first = torch.tanh(head.begin.weight @ mean + head.begin.bias)
    state = [(first, torch.zeros_like(first))] * head.lstm.num_layers
    attended, last, steps = torch.zeros_like(first), head.start, []
    for index in [*chosen, 0]:
        (h,), state = lstm(head.lstm, [torch.cat([last, attended])], state)
        scores = torch.stack([(head.query.weight @ h) @ one for one in d])
        a = scores.softmax(0)
        c = sum((weight * one for weight, one in zip(a[1:], d[1:], strict=True)), a[0] * d[0])
        attended = torch.tanh(head.attend.weight @ torch.cat([c, h]) + head.attend.bias)
        steps.append([math.log(float(weight)) for weight in a])
        last = s[index]
    return steps


def best_sequence(head: PointerHead, s: list[Tensor], d: list[Tensor], length: int) -> list[int]:
    """The likeliest sequence of different sentences among all that there are."""

    def total(chosen: tuple[int, ...]) -> float:
        steps = point(head, s, d, list(chosen))
        return sum(step[index] for step, index in zip(steps, chosen, strict=False))

    return list(max(itertools.permutations(range(len(d)), length), key=total))
