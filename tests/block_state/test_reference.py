"""The fast path equals the reference: outputs and gradients of every variant, at lengths with partial windows."""

from __future__ import annotations

import pytest
import torch

from block_state import reference, tools
from cases import thinned

LENGTHS = thinned([1, 3, 4, 5, 11], {3, 11})


@pytest.mark.parametrize("variant", thinned(tools.VARIANTS, {*tools.DEFAULT_VARIANTS, "memory"}))
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_the_reference(variant: str, length: int) -> None:
    model = tools.model(variant)
    ids = tools.ids(2, length)
    actual = model(ids, use_cache=False).logits
    for row, row_ids in zip(actual, ids.tolist(), strict=True):
        torch.testing.assert_close(row, reference.logits(model, row_ids), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        pytest.param(variant, {}, marks=[] if variant in tools.DEFAULT_VARIANTS else pytest.mark.slow)
        for variant in tools.VARIANTS
    ]
    # Several chunks of the delta rule.
    + [
        pytest.param("gated-delta-reset", {"window": 48}),
        pytest.param("sh-delta-reset", {"window": 48}, marks=pytest.mark.slow),
        pytest.param("sh-delta", {"window": 48}, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_the_reference(variant: str, settings: dict[str, int]) -> None:
    length = 2 * settings["window"] + 6 if settings else 11
    model = tools.model(variant, **settings)
    ids = tools.ids(1, length)
    weights = torch.randn(length, tools.VOCABULARY, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    (model(ids, use_cache=False).logits[0] * weights).sum().backward()
    actual = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    (reference.logits(model, ids[0].tolist()) * weights).sum().backward()
    assert all(bool(gradient.abs().sum() > 0) for name, gradient in actual.items() if "final_states" not in name)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(actual[name], weight.grad, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", tools.default_cases(tools.BIDIRECTIONAL))
@pytest.mark.parametrize("length", LENGTHS)
def test_classifiers_equal_the_reference(variant: str, length: int) -> None:
    model = tools.classifier(variant)
    ids = tools.ids(1, length)
    actual = model(ids).logits[0]
    expected = reference.class_scores(model, ids[0].tolist())
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
    weights = torch.randn(5, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    actual_gradients = _gradients(actual @ weights, model)
    expected_gradients = _gradients(expected @ weights, model)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            actual_gradients[name],
            gradient,
            rtol=1e-6,
            atol=1e-7,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def _gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of all parameters; those without any, as the states of other windows in a short text, are zero."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("variant", tools.default_cases([*tools.BLOCK_STATE, *tools.RESET]))
def test_a_model_in_training_equals_the_reference_in_float32_to_five_digits(variant: str) -> None:
    model = tools.model(variant)
    ids = tools.ids(1, 11)
    expected = reference.logits(model, ids[0].tolist())
    actual = model.float().train()(ids).logits[0]
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5
