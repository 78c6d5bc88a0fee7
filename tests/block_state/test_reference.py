"""The fast path is the literal one: outputs and gradients of every variant, at lengths that windows don't divide."""

from __future__ import annotations

import pytest
import torch

from block_state import tools
from graftlm.models.block_state import reference

LENGTHS = [1, 3, 4, 5, 11]


@pytest.mark.parametrize("variant", tools.VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_the_references(variant: str, length: int) -> None:
    model, ids = tools.model(variant), tools.ids(2, length)
    found = model(ids, use_cache=False).logits
    for row, one in zip(found, ids.tolist(), strict=True):
        torch.testing.assert_close(row, reference.logits(model, one), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant", tools.VARIANTS)
def test_gradients_are_the_references(variant: str) -> None:
    model, ids = tools.model(variant), tools.ids(1, 11)
    weights = torch.randn(11, tools.VOCABULARY, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    (model(ids, use_cache=False).logits[0] * weights).sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    (reference.logits(model, ids[0].tolist()) * weights).sum().backward()
    assert all(bool(gradient.abs().sum() > 0) for name, gradient in found.items() if "last" not in name)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", tools.BOTH_WAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_classifiers_are_the_references(variant: str, length: int) -> None:
    model, ids = tools.classifier(variant), tools.ids(1, length)
    found = model(ids).logits[0]
    torch.testing.assert_close(found, reference.class_scores(model, ids[0].tolist()), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant", tools.BLOCK_STATE)
def test_a_training_model_is_the_same_and_in_float32_to_five_digits(variant: str) -> None:
    model, ids = tools.model(variant), tools.ids(1, 11)
    wanted = reference.logits(model, ids[0].tolist())
    found = model.float().train()(ids).logits[0]
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
