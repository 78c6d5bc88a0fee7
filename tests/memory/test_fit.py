"""A memory learns to recall pairs that have left the window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlm.testing.laws import attach_graft
from memory.tools import SIZES, live

PAIRS, FILLER, ROWS = 4, 16, 32


def rows(generator: torch.Generator) -> Tensor:
    """(B, T): keys with values, 16 other tokens, a key again and its value; the window is 6 tokens wide."""
    keys = torch.stack([torch.randperm(20, generator=generator)[:PAIRS] for _ in range(ROWS)]) + 10
    values = torch.randint(50, 70, (ROWS, PAIRS), generator=generator)
    filler = torch.randint(100, 200, (ROWS, FILLER), generator=generator)
    asked_for = torch.randint(0, PAIRS, (ROWS, 1), generator=generator)
    text = torch.stack([keys, values], -1).flatten(1)
    return torch.cat([text, filler, keys.gather(1, asked_for), values.gather(1, asked_for)], 1)


@pytest.mark.slow
def test_values_are_recalled_from_beyond_the_window() -> None:
    generator = torch.Generator().manual_seed(0)
    with attach_graft(live(), {"kind": "memory", **SIZES, "head_width": 16}).train() as model:
        parameters = list(model.trainable_parameters().values())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0)
        for _ in range(300):
            ids = rows(generator)
            labels = torch.full_like(ids, -100)
            labels[:, -1] = ids[:, -1]
            model(ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ids = torch.cat([rows(generator) for _ in range(8)])
        with torch.no_grad():
            recalled = model.eval()(ids).logits[:, -2].argmax(-1) == ids[:, -1]
    assert recalled.float().mean() > 0.9  # a random choice of the four values is right in a quarter of the rows
