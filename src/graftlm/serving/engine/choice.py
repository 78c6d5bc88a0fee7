"""How the next token of each row is chosen, and what is told of the choice.

A row's choice depends on its own logits and its own random numbers alone. Shape suffixes: B rows, R some of them, V
tokens of the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.serving.protocol import Ask


@dataclass(frozen=True)
class Choice:
    """A row's next token, and log p of it and of the likeliest ones where that was asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(logits_BV: Tensor, asks: Sequence[Ask], draws: Sequence[random.Random]) -> list[Choice | None]:
    """Each row's choice, as `reference.choose` has it; None where the logits are no numbers."""
    logits_BV = logits_BV.float()
    highest_B, likeliest_B = logits_BV.max(-1)
    tokens = likeliest_B.tolist()
    drawn = [row for row, ask in enumerate(asks) if ask.temperature > 0]
    if drawn:
        chosen = _draw(logits_BV[drawn], [asks[row] for row in drawn], [draws[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    told = _told(logits_BV, asks, tokens)
    finite = highest_B.isfinite().tolist()
    return [told.get(row, Choice(token)) if finite[row] else None for row, token in enumerate(tokens)]


def _draw(logits_RV: Tensor, asks: Sequence[Ask], draws: Sequence[random.Random]) -> list[int]:
    """One random token a row: the first at which the running sum of probabilities exceeds a number in [0, 1)."""
    device = logits_RV.device
    temperature_R = torch.tensor([ask.temperature for ask in asks], dtype=torch.float64, device=device)
    p_RV = (logits_RV.double() / temperature_R[:, None]).softmax(-1)
    some = [row for row, ask in enumerate(asks) if ask.top_p < 1]
    if some:
        p_RV[some] = _likeliest_part(p_RV[some], torch.tensor([asks[row].top_p for row in some], device=device))
    sums_RV = p_RV.cumsum(-1)
    u_R = torch.tensor([draw.random() for draw in draws], dtype=torch.float64, device=device)
    found_R = torch.searchsorted(sums_RV, (u_R * sums_RV[:, -1])[:, None], right=True)[:, 0]
    last_R = logits_RV.shape[-1] - 1 - (p_RV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(found_R, last_R).tolist()


def _likeliest_part(p_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """The probabilities without those of tokens outside of top_p."""
    sorted_RV, order_RV = p_RV.sort(descending=True, stable=True)
    inside_RV = sorted_RV.cumsum(-1) - sorted_RV < top_p_R.double()[:, None]
    inside_RV[:, 0] = True
    return torch.zeros_like(p_RV).scatter(-1, order_RV, sorted_RV * inside_RV)


def _told(logits_BV: Tensor, asks: Sequence[Ask], tokens: Sequence[int]) -> dict[int, Choice]:
    """The choices of the rows that asked for log-probabilities."""
    rows = [row for row, ask in enumerate(asks) if ask.logprobs is not None]
    if not rows:
        return {}
    logprobs_RV = logits_BV[rows].log_softmax(-1)
    most = min(max(asks[row].logprobs or 0 for row in rows), logprobs_RV.shape[-1])
    values_RK, ids_RK = logprobs_RV.topk(most)
    found = {}
    for place, row in enumerate(rows):
        count = asks[row].logprobs or 0
        top = zip(ids_RK[place, :count].tolist(), values_RK[place, :count].tolist(), strict=True)
        found[row] = Choice(tokens[row], float(logprobs_RV[place, tokens[row]]), tuple(top))
    return found
