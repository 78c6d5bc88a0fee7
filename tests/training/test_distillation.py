"""The loss of old rows that follows the bare backbone: equal to its definition, for grafts of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.grafted.losses import language_modelling_loss
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from tiny import tiny_ids, tiny_model, tiny_tokenizer

ROWS = torch.tensor([0, 1, 0, 1])


def inputs() -> dict[str, torch.Tensor]:
    ids = tiny_ids(4, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    labels[2, 9:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "domain": ROWS}


def grafted(kind: str, **options: Any) -> GraftedModel:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    config = {"kind": kind} | ({"alpha": 0} if kind == "neutral-residues" else {})
    return GraftedModel(backbone, {"graft": build_graft(graft_config(config), backbone)}, **options).train()


def disturb(model: GraftedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("kind", ["neutral-residues", "lora", "finetune"])
def test_old_rows_follow_the_backbone_and_new_rows_their_tokens(kind: str) -> None:
    batch = inputs()
    with torch.no_grad():
        taught = tiny_model("llama")(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    with grafted(kind, old_objective="distil") as model:
        disturb(model)
        output = model(**batch)
        (loss,) = (output.lm_loss,)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        count, total = 0, 0.0
        for row, old in enumerate((ROWS == 0).tolist()):
            for token in range(11):
                label = batch["labels"][row, token + 1]
                if label == -100:
                    continue
                log_q = functional.log_softmax(logits[row, token].double(), -1)
                if old:
                    log_p = functional.log_softmax(taught[row, token].double(), -1)
                    total += (log_p.exp() * (log_p - log_q)).sum().item()
                else:
                    total -= log_q[label].item()
                count += 1
        assert loss is not None
        assert loss.item() == pytest.approx(total / count, rel=1e-4)
        assert total / count > 0.1
        gradients = torch.autograd.grad(output.loss, list(model.trainable_parameters().values()), allow_unused=True)
        assert any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
        assert all(p.grad is None for p in model.backbone.model.parameters())
        halves = [
            model(**{name: value[part] for name, value in batch.items()}, totals=torch.tensor([count])).lm_loss
            for part in (slice(0, 2), slice(2, 4))
        ]
        assert sum(halves).item() == pytest.approx(loss.item(), rel=1e-5)  # type: ignore[union-attr]


def test_an_untrained_graft_has_nothing_to_follow() -> None:
    with grafted("neutral-residues", old_objective="distil") as model:
        batch = inputs()
        new = {name: value[1::2] for name, value in batch.items()}
        old = {name: value[0::2] for name, value in batch.items()}
        assert abs(model(**old).lm_loss.item()) < 1e-5
        plain = model(input_ids=new["input_ids"]).logits
        expected = language_modelling_loss(plain, new["labels"])
        assert model(**new).lm_loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_backbone_reads_the_documents_of_a_row_apart() -> None:
    with grafted("neutral-residues", old_objective="distil") as model:
        positions = torch.tensor([[*range(5), *range(7)]]).expand(2, -1)
        batch = {name: value[0::2] for name, value in inputs().items() if name != "attention_mask"}
        assert abs(model(**batch, position_ids=positions).lm_loss.item()) < 1e-5


def test_evaluation_has_the_plain_loss_and_training_needs_a_domain() -> None:
    batch = inputs()
    with grafted("neutral-residues", old_objective="distil") as model, grafted("neutral-residues") as plain:
        expected = plain(**batch).lm_loss.item()
        assert model.eval()(**batch).lm_loss.item() == pytest.approx(expected, rel=1e-5)
        del batch["domain"]
        assert model(**batch).lm_loss.item() == pytest.approx(expected, rel=1e-5)
        with pytest.raises(GraftError, match="The model distils old rows, but the batches have no `domain`: give"):
            model.train()(**batch)
        with pytest.raises(GraftError, match="The model distils old rows, but this trainer has a loss of its own"):
            model(input_ids=batch["input_ids"], domain=ROWS, num_items_in_batch=40)


def test_another_objective_is_named() -> None:
    with pytest.raises(GraftError, match="There is no objective 'distill' of old rows: give replay or distil"):
        grafted("neutral-residues", old_objective="distill")
