"""Compare what vLLM generates with what the grafted model generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TIE = 1e-3
"""Smallest difference between the two best logits where both must choose the same token."""
TOLERANCE = 1e-3
"""Largest difference of log-probabilities that is rounding in float32."""


class Continuation(NamedTuple):
    """A greedy continuation of a prompt.

    Attributes:
        tokens: the chosen tokens.
        logprobs: the log-probability of each.
        gaps: the difference between the two best logits at each step.
    """

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class Comparison(NamedTuple):
    """How far two continuations agree.

    Attributes:
        tokens: number of compared tokens, up to the first tie at which the continuations part.
        difference: the largest difference between log-probabilities of the tokens.
        fault: a description of what is wrong, or an empty string.
    """

    tokens: int
    difference: float
    fault: str


@torch.no_grad()
def continuation(next_logits: Callable[[Tensor], Tensor], prompt: Sequence[int], steps: int) -> Continuation:
    """Continue a prompt greedily, with a pass over the whole text for each token.

    Args:
        next_logits: returns logits (1, T, V) for token ids (1, T).
        prompt: token ids.
        steps: number of tokens to generate.
    """
    ids = list(prompt)
    result = Continuation([], [], [])
    for _ in range(steps):
        scores = next_logits(torch.tensor([ids]))[0, -1].float()
        best, second = scores.topk(2).values.tolist()
        token = int(scores.argmax())
        result.tokens.append(token)
        result.logprobs.append(float(scores.log_softmax(-1)[token]))
        result.gaps.append(best - second)
        ids.append(token)
    return result


def compare(
    expected: Sequence[Continuation], outputs: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None
) -> Comparison:
    """Compare the outputs of a job with the continuations that are expected, prompt by prompt.

    Args:
        expected: the continuation of each prompt.
        outputs: the output for each prompt, see `generate.py`.
        names: a name for each prompt, for the description of a fault; None numbers them.
    """
    tokens, largest, fault = 0, 0.0, ""
    names = names or [f"prompt {number + 1}" for number in range(len(expected))]
    for name, ours, theirs in zip(names, expected, outputs, strict=True):
        one = _compare_one(ours, theirs)
        tokens += one.tokens
        largest = max(largest, one.difference)
        if one.fault and not fault:
            fault = f"{name}, {one.fault}"
    if largest > TOLERANCE and not fault:
        fault = f"log-probabilities differ by {largest:.2g}"
    return Comparison(tokens, largest, fault)


def _compare_one(ours: Continuation, theirs: Mapping[str, Any]) -> Comparison:
    """Compare one continuation, up to the step at which a tie is decided differently."""
    largest = 0.0
    if len(theirs["tokens"]) != len(ours.tokens):
        return Comparison(0, largest, f"{len(theirs['tokens'])} tokens instead of {len(ours.tokens)}")
    steps = zip(ours.tokens, theirs["tokens"], ours.logprobs, theirs["logprobs"], ours.gaps, strict=True)
    for number, (token, found, logprob, found_logprob, gap) in enumerate(steps):
        if found != token and gap > TIE:
            fault = f"token {number + 1}: {found} instead of {token}, whose logit is {gap:.2g} above the next"
            return Comparison(number, largest, fault)
        largest = max(largest, abs(logprob - found_logprob))
        if found != token:
            return Comparison(number, largest, "")
    return Comparison(len(ours.tokens), largest, "")
