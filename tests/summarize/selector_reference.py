"""Slow, literal form of the selectors: one document, one sentence, one step at a time. Only tests import it."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from graftlm.models.sentence_selector.heads import ClassifierHead, PointerHead

LstmState = tuple[Tensor, Tensor]  # h and c


def lstm(
    module: nn.LSTM,
    inputs: list[Tensor],
    state: list[LstmState] | None = None,
) -> tuple[list[Tensor], list[LstmState]]:
    """Return the outputs of all positions and the last (h, c) of each layer and direction, by the cell's equations."""
    last_states = []
    for layer in range(module.num_layers):
        outputs = []
        for is_reverse in (False, True) if module.bidirectional else (False,):
            zeros = inputs[0].new_zeros(module.hidden_size)
            first = state[len(last_states)] if state is not None else (zeros, zeros)
            suffix = f"l{layer}_reverse" if is_reverse else f"l{layer}"
            hidden, last = lstm_direction(module, suffix, inputs, first, is_reverse=is_reverse)
            outputs.append(hidden)
            last_states.append(last)
        inputs = [torch.cat(both) for both in zip(*outputs, strict=True)]
    return inputs, last_states


def lstm_direction(
    module: nn.LSTM,
    suffix: str,
    inputs: list[Tensor],
    state: LstmState,
    *,
    is_reverse: bool,
) -> tuple[list[Tensor], LstmState]:
    """Return the hidden states of one layer in one direction, by position, and the last (h, c)."""
    W = getattr(module, f"weight_ih_{suffix}")
    U = getattr(module, f"weight_hh_{suffix}")
    b = getattr(module, f"bias_ih_{suffix}")
    u = getattr(module, f"bias_hh_{suffix}")
    h, c = state
    hidden = []
    for x in reversed(inputs) if is_reverse else inputs:
        i, f, g, o = (W @ x + b + U @ h + u).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hidden.append(h)
    if is_reverse:
        hidden.reverse()
    return hidden, (h, c)


def mean_of(vectors: list[Tensor]) -> Tensor:
    return sum(vectors[1:], vectors[0]) / len(vectors)


def classify(head: ClassifierHead, d: list[Tensor]) -> list[float]:
    """Return σ(W_o [d_i; d] + b_o) with d = tanh(b_d + W_d (1/N) Σ d_i)."""
    document = torch.tanh(head.document_proj.bias + head.document_proj.weight @ mean_of(d))
    W = head.out_proj.weight
    b = head.out_proj.bias
    probabilities = []
    for d_i in d:
        logit = W @ torch.cat([d_i, document]) + b
        probabilities.append(float(torch.sigmoid(logit)))
    return probabilities


def pointer_log_probs(head: PointerHead, s: list[Tensor], d: list[Tensor], selected: list[int]) -> list[list[float]]:
    """Return log a_t of each step after the sentences selected before it, and of one step more."""
    first = torch.tanh(head.state_proj.weight @ mean_of(d) + head.state_proj.bias)
    state = [(first, torch.zeros_like(first))] * head.lstm.num_layers
    attended = torch.zeros_like(first)
    last = head.start
    steps = []
    for index in [*selected, 0]:
        (h,), state = lstm(head.lstm, [torch.cat([last, attended])], state)
        query = head.query_proj.weight @ h
        a = torch.stack([query @ d_i for d_i in d]).softmax(0)
        c = a[0] * d[0]
        for a_i, d_i in zip(a[1:], d[1:], strict=True):
            c = c + a_i * d_i
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
