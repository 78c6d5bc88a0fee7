"""No label leaks: on independent random tokens the training loss stays at their entropy."""

from __future__ import annotations

import math

import pytest
import torch

from composition.tools import composition
from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.composition import alignment
from graftlm.grafts.composition.attention import Visibility
from tiny import tiny_model

VOCABULARY, FIRST = 12, 4  # eight equally likely, independent tokens beside the special ones
FLOOR = math.log(VOCABULARY - FIRST)


def trained_loss(steps: int = 250) -> float:
    """The mean loss of the last 50 steps (12,800 labels), on fresh short rows."""
    anchor, augmenting = (Backbone.wrap(tiny_model("llama", seed=seed, vocab_size=VOCABULARY)) for seed in (0, 1))
    graft = composition(anchor, {"one": augmenting}, spread=0.0)
    generator = torch.Generator().manual_seed(0)
    losses = []
    with GraftedModel(anchor, {"graft": graft}) as model:
        model.train()
        optimizer = torch.optim.AdamW(graft.parameters(), lr=1e-2)
        for _ in range(steps):
            ids = torch.randint(FIRST, VOCABULARY, (64, 5), generator=generator)
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses[-50:]) / 50


@pytest.mark.slow
def test_the_loss_stays_at_the_entropy() -> None:
    assert FLOOR - 0.03 < trained_loss() < FLOOR + 0.3


@pytest.mark.slow
def test_a_mask_that_shows_the_future_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(self: alignment.PositionAlignment, call: alignment.Call, past: int) -> Visibility:
        assert call.input_ids is not None
        length = call.input_ids.shape[1]
        return Visibility.of(torch.ones(1, length, length, dtype=torch.bool))

    monkeypatch.setattr(alignment.PositionAlignment, "_visibility", everything)
    assert trained_loss() < FLOOR - 0.05
