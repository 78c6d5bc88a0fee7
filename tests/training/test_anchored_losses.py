"""The losses of new rows: reweighted and anchored, equal to their definitions, outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from tiny import tiny_ids, tiny_model, tiny_tokenizer

ROWS = torch.tensor([0, 1, 0, 1])
CASES = [
    {"new_objective": "dft"},
    {"anchor": 0.5},
    {"new_objective": "dft", "anchor": 0.3},
    {"new_objective": "dft", "anchor": 2.0, "old_objective": "distil"},
]


def batch() -> dict[str, Tensor]:
    ids = tiny_ids(4, 12)
    labels = ids.clone()
    labels[1, :5] = -100
    mask = torch.ones_like(ids)
    mask[3, 9:] = 0
    labels[3, 9:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "domain": ROWS}


def grafted(kind: str, **objectives: Any) -> GraftedModel:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    config = {"kind": kind} | ({"alpha": 0} if kind == "neutral-residues" else {})
    torch.manual_seed(0)
    model = GraftedModel(backbone, {"graft": build_graft(graft_config(config), backbone)}, **objectives).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def reference(
    logits: Tensor,
    bare: Tensor,
    labels: Tensor,
    *,
    new_objective: str = "cross-entropy",
    anchor: float = 0.0,
    old_objective: str = "replay",
) -> Tensor:
    """The loss by its definition, one target after the other."""
    losses = []
    for row, token in (labels[:, 1:] != -100).nonzero().tolist():
        log_q = functional.log_softmax(logits[row, token], -1)
        log_p = functional.log_softmax(bare[row, token].detach(), -1)
        divergence = (log_p.exp() * (log_p - log_q)).sum()
        nats = -log_q[labels[row, token + 1]]
        if ROWS[row] == 0:
            losses.append(divergence if old_objective == "distil" else nats)
        else:
            weight = (-nats).exp().detach() if new_objective == "dft" else 1.0
            losses.append(weight * nats + anchor * divergence)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["neutral-residues", "lora"])
@pytest.mark.parametrize("objectives", CASES, ids=str)
@pytest.mark.parametrize("return_logits", [True, False])
def test_losses_and_gradients_equal_their_definition(
    kind: str, objectives: dict[str, Any], return_logits: bool
) -> None:
    inputs = batch()
    bare = tiny_model("llama")(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    with grafted(kind, **objectives) as model:
        parameters = list(model.trainable_parameters().values())
        loss = model(**inputs, return_logits=return_logits).loss
        assert loss is not None
        found = torch.autograd.grad(loss, parameters)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        assert logits is not None
        expected = reference(logits, bare, inputs["labels"], **objectives)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        for actual, wanted in zip(found, torch.autograd.grad(expected, parameters), strict=True):
            # Sums in another order.
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-6)
        assert all(parameter.grad is None for parameter in model.backbone.model.parameters())


def test_micro_batches_add_up() -> None:
    inputs = batch()
    with grafted("lora", **CASES[2]) as model:
        whole = model(**inputs).loss
        count = (inputs["labels"][:, 1:] != -100).sum()[None]
        parts = [
            model(**{name: value[part] for name, value in inputs.items()}, totals=count).loss
            for part in (slice(0, 1), slice(1, 4))
        ]
        assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)


def test_an_anchor_of_an_untrained_graft_is_the_plain_loss() -> None:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    inputs = batch()
    losses = []
    for anchor in (0.0, 3.0):
        graft = build_graft(graft_config({"kind": "lora"}), backbone)
        with GraftedModel(backbone, {"graft": graft}, anchor=anchor).train() as model:
            losses.append(model(**inputs).loss.item())  # type: ignore[union-attr]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_evaluation_has_the_plain_loss_and_training_needs_a_domain() -> None:
    inputs = batch()
    with grafted("lora") as plain:
        expected = plain(**inputs).loss.item()  # type: ignore[union-attr]
    with grafted("lora", **CASES[2]) as model:
        assert model.eval()(**inputs).loss.item() == pytest.approx(expected, rel=1e-5)  # type: ignore[union-attr]
        del inputs["domain"]
        with pytest.raises(GraftError) as error:
            model.train()(**inputs)
        assert "domain" in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("new_objective", "sft"), ("anchor", -0.1), ("old_objective", "none")])
def test_other_objectives_are_named(key: str, value: Any) -> None:
    with pytest.raises(GraftError) as error:
        grafted("lora", **{key: value})
    assert key in str(error.value)
