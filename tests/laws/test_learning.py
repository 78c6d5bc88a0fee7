"""Law 4, and what training relies on: losses of parts add up, and recomputation changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from graftlm.backbone import Site, Sites
from laws.examples import Example, backbone
from laws.tools import gradients, hooks_of, padded
from tiny import ENCODERS, tiny_ids

DOMAIN = torch.tensor([0, 1])


@pytest.mark.encoders
def test_loss_falls_on_one_batch(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name, untrained=True).train()
    optimiser = torch.optim.AdamW(model.trainable_parameters().values(), lr=example.learning_rate)
    ids = tiny_ids()
    losses = []
    for _ in range(8):
        output = model(ids, labels=ids, domain=DOMAIN)
        # An encoder sees the token that it is to name, so it learns to repeat it.
        loss = functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten()) if name in ENCODERS else output.loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05, losses


def test_losses_of_micro_batches_add_up(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name)
    rows = [tiny_ids(1, length, seed=length)[0] for length in (24, 17)]
    ids, mask = padded(rows, "right")
    labels = ids.masked_fill(mask == 0, -100)
    totals = torch.tensor([23.0 + 16, 24, 17])
    whole = gradients(model, input_ids=ids, attention_mask=mask, labels=labels, domain=DOMAIN)
    parts = [
        gradients(model, input_ids=row[None], labels=row[None], domain=DOMAIN[i : i + 1], totals=totals)
        for i, row in enumerate(rows)
    ]
    assert whole
    for key, gradient in whole.items():
        summed = sum(part.get(key, torch.zeros_like(gradient)) for part in parts)
        torch.testing.assert_close(summed, gradient, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_recomputing_activations_changes_nothing(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name).train()
    batch = {"input_ids": tiny_ids(), "labels": tiny_ids(), "domain": DOMAIN}
    plain, plain_parts = _seeded_gradients(model, batch)
    model.enable_gradient_checkpointing()
    ffn = Sites(model.model).module(Site("ffn", -1))[0]  # before the first layer that a graft reaches, none has to
    runs: list[bool] = []
    handle = ffn.register_forward_pre_hook(lambda *_: runs.append(True))
    recomputed, recomputed_parts = _seeded_gradients(model, batch)
    handle.remove()
    assert len(runs) == 2, "the last layer did not run again in the backward pass"
    assert recomputed_parts == plain_parts
    assert recomputed.keys() == plain.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(
            recomputed[key], gradient, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
        )


def _seeded_gradients(model: Any, batch: dict[str, Any]) -> tuple[dict[str, torch.Tensor], tuple[float, float | None]]:
    """Gradients and both parts of the loss; the seed is for those who train with dropout."""
    parts: list[Any] = []
    model.register_forward_hook(lambda _module, _inputs, output: parts.append(output))
    torch.manual_seed(0)
    found = gradients(model, **batch)
    auxiliary = parts[0].auxiliary_loss
    return found, (parts[0].lm_loss.item(), None if auxiliary is None else auxiliary.item())


def test_checkpointing_ends_with_the_graft(example: Example, name: str, attach: Any) -> None:
    live = backbone(name).model
    before = [(key, module.training, len(hooks_of(module))) for key, module in live.named_modules()]
    model = attach(example, name, untrained=True).train()
    model.enable_gradient_checkpointing()
    model.detach()
    assert [(key, module.training, len(hooks_of(module))) for key, module in live.named_modules()] == before
    assert not live.is_gradient_checkpointing
