"""Fine-tuning trains every weight, or every weight but those of the embeddings and the head."""

from __future__ import annotations

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.testing.laws import attach_graft, logits
from tiny import tiny_ids, tiny_model

ENDS = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embeddings", [True, False])
def test_what_trains(tied: bool, embeddings: bool) -> None:
    backbone = Backbone.wrap(tiny_model("llama", tie_word_embeddings=tied))
    names = {name for name, _ in backbone.model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in backbone.model.named_parameters()}
    with attach_graft(backbone, {"kind": "finetune", "embeddings": embeddings}) as model:
        ids = tiny_ids()
        trained = model.trainable_parameters()
        optimizer = torch.optim.SGD(trained.values(), lr=0.1)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        wanted = logits(model, ids)
        merged = model.grafts["graft"].merged(backbone)  # type: ignore[operator]  # it is Exportable
        after = {name.removeprefix("model."): tensor for name, tensor in trained.items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.model.named_parameters())
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == names - (set() if embeddings else ENDS)
    torch.testing.assert_close(logits(merged, ids), wanted)
