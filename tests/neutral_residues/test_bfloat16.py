"""In bfloat16, as a server has it, a graft is as far from the truth as the backbone's own rounding already is."""

from __future__ import annotations

import copy

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.testing import randomise
from tiny import tiny_ids, tiny_model


@pytest.mark.parametrize("gate", ["relu", "sigmoid", "none"])
def test_a_graft_in_bfloat16_rounds_no_more_than_its_backbone(gate: str) -> None:
    model = tiny_model("llama")
    backbones = {
        dtype: Backbone.wrap(copy.deepcopy(model).to(dtype), None, "llama") for dtype in (torch.float64, torch.bfloat16)
    }
    config = graft_config({"kind": "neutral-residues", "width": 16, "gate": gate})
    ids = tiny_ids(4, 24)

    def logits(backbone: torch.dtype, graft: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        torch.manual_seed(0)
        grafted = GraftedModel(backbones[backbone], {"g": build_graft(config, backbones[backbone])})
        randomise(grafted, 0.2, 1)
        own = grafted.grafts["g"]
        assert isinstance(own, Graft)
        with torch.no_grad():
            for block in own.blocks:  # type: ignore[union-attr]
                block.w_o.weight.mul_(scale)
            own.to(graft)
            result = grafted.eval()(ids).logits.double()
        grafted.detach()
        return result

    truth, bare = logits(torch.float64, torch.float64), logits(torch.float64, torch.float64, 0.0)
    error, rounded = (
        (logits(torch.bfloat16, dtype) - truth).pow(2).mean() for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded < 2 * error, "about as far"
    assert 100 * error < (truth - bare).pow(2).mean(), "and what the graft adds is far more"
