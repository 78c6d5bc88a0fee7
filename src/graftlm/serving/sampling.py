"""Sampling of the next token of each row, and the log-probabilities that were requested.

A row's token depends on its own logits and its own random numbers only. Shape suffixes: B rows, R some of them, V
tokens of the vocabulary, K most likely tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.serving.protocol import GenerationRequest


@dataclass(frozen=True)
class SampledToken:
    """A row's next token; its log p and the most likely tokens, where they were requested."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits_BV: Tensor, requests: Sequence[GenerationRequest], generators: Sequence[random.Random]
) -> list[SampledToken | None]:
    """Each row's next token, as `reference.sample_row` defines it; None where the logits are not finite."""
    logits_BV = logits_BV.float()
    highest_B, likeliest_B = logits_BV.max(-1)
    tokens = likeliest_B.tolist()
    random_rows = [row for row, request in enumerate(requests) if request.temperature > 0]
    if random_rows:
        drawn = _draw(
            logits_BV[random_rows], [requests[row] for row in random_rows], [generators[row] for row in random_rows]
        )
        for row, token in zip(random_rows, drawn, strict=True):
            tokens[row] = token
    with_logprobs = _with_logprobs(logits_BV, requests, tokens)
    finite = highest_B.isfinite().tolist()
    return [with_logprobs.get(row, SampledToken(token)) if finite[row] else None for row, token in enumerate(tokens)]


def _draw(logits_RV: Tensor, requests: Sequence[GenerationRequest], generators: Sequence[random.Random]) -> list[int]:
    """One random token a row: the first at which the cumulative probability exceeds a number u in [0, 1)."""
    device = logits_RV.device
    temperature_R = torch.tensor([request.temperature for request in requests], dtype=torch.float64, device=device)
    p_RV = (logits_RV.double() / temperature_R[:, None]).softmax(-1)
    rows = [row for row, request in enumerate(requests) if request.top_p < 1]
    if rows:
        p_RV[rows] = _within_top_p(p_RV[rows], torch.tensor([requests[row].top_p for row in rows], device=device))
    cumulative_RV = p_RV.cumsum(-1)
    u_R = torch.tensor([generator.random() for generator in generators], dtype=torch.float64, device=device)
    token_R = torch.searchsorted(cumulative_RV, (u_R * cumulative_RV[:, -1])[:, None], right=True)[:, 0]
    last_R = logits_RV.shape[-1] - 1 - (p_RV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(token_R, last_R).tolist()


def _within_top_p(p_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """The probabilities with those of tokens outside of top_p set to 0."""
    sorted_RV, order_RV = p_RV.sort(descending=True, stable=True)
    inside_RV = sorted_RV.cumsum(-1) - sorted_RV < top_p_R.double()[:, None]
    inside_RV[:, 0] = True
    return torch.zeros_like(p_RV).scatter(-1, order_RV, sorted_RV * inside_RV)


def _with_logprobs(
    logits_BV: Tensor, requests: Sequence[GenerationRequest], tokens: Sequence[int]
) -> dict[int, SampledToken]:
    """The tokens of the rows whose requests ask for log-probabilities, by row."""
    counts = {row: request.logprobs for row, request in enumerate(requests) if request.logprobs is not None}
    if not counts:
        return {}
    logprobs_RV = logits_BV[list(counts)].log_softmax(-1)
    values_RK, ids_RK = logprobs_RV.topk(min(max(counts.values()), logprobs_RV.shape[-1]))
    sampled = {}
    for index, (row, count) in enumerate(counts.items()):
        top = zip(ids_RK[index, :count].tolist(), values_RK[index, :count].tolist(), strict=True)
        sampled[row] = SampledToken(tokens[row], float(logprobs_RV[index, tokens[row]]), tuple(top))
    return sampled
