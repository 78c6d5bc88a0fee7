"""Equation 3, a sum of weighted outputs, beside the merged expert, whose weights are mixed first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graftlm.grafts.token_routing.experts import ExpertTarget, Factors
from graftlm.grafts.token_routing.mixture import MixedProjection, RouteWeights
from token_routing import reference

INPUTS, OUTPUTS, RANK = 5, 6, 3
Literal = Callable[[Tensor, Sequence[float], Sequence[Factors]], Tensor]


def drawn(seed: int, experts: int, rank: int = RANK) -> tuple[Tensor, Tensor, list[Factors]]:
    """Inputs (3 tokens), weights that sum to one, and experts with different scales."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    factors = [Factors(draw(rank, INPUTS), draw(rank, OUTPUTS), 0.5 + number) for number in range(experts)]
    return draw(1, 3, INPUTS), draw(1, 3, experts).softmax(-1), factors


def fast(combination: Any, x: Tensor, weights: Tensor, experts: Sequence[Factors]) -> Tensor:
    mixture = MixedProjection(dict(enumerate(experts)), ExpertTarget(INPUTS, OUTPUTS), combination, frozenset())
    update = mixture(x, RouteWeights.of(weights, sparse=False))
    assert update is not None
    return update


def slow(literal: Literal, x: Tensor, weights: Tensor, experts: Sequence[Factors]) -> Tensor:
    return torch.stack([literal(x[0, t], weights[0, t].tolist(), experts) for t in range(x.shape[1])])[None]


def both(
    combination: Any, literal: Literal, x: Tensor, weights: Tensor, experts: Sequence[Factors]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The update and the gradient of its sum with respect to the inputs, of the code and of the reference."""
    results = []
    for compute in (
        lambda own: fast(combination, own, weights, experts),
        lambda own: slow(literal, own, weights, experts),
    ):
        own = x.clone().requires_grad_()
        update = compute(own)
        update.square().sum().backward()
        assert own.grad is not None
        results.append((update.detach(), own.grad))
    return results[0], results[1]


@given(st.integers(0, 99), st.integers(1, 4))
def test_the_sum_of_outputs_is_the_output_of_the_merged_weights(seed: int, count: int) -> None:
    x, weights, experts = drawn(seed, count)
    for literal in (reference.update, reference.merged_update):
        actual, expected = both("exact", literal, x, weights, experts)
        torch.testing.assert_close(actual, expected)


@given(st.integers(0, 99), st.integers(1, 4))
def test_factors_that_are_mixed_first(seed: int, count: int) -> None:
    x, weights, experts = drawn(seed, count)
    actual, expected = both("linear", reference.linear_update, x, weights, experts)
    torch.testing.assert_close(actual, expected)


@given(st.integers(0, 99), st.integers(2, 4))
def test_the_two_differ_by_the_cross_terms(seed: int, count: int) -> None:
    x, weights, experts = drawn(seed, count)
    difference = fast("linear", x, weights, experts) - fast("exact", x, weights, experts)
    torch.testing.assert_close(difference, slow(reference.cross_terms, x, weights, experts))
    assert difference.abs().max() > 1e-3


def test_they_agree_where_one_expert_has_all_the_weight() -> None:
    x, _, experts = drawn(0, 3)
    weights = torch.zeros(1, 3, 3, dtype=torch.double)
    weights[0, torch.arange(3), torch.arange(3)] = torch.tensor([1.0, 0.4, 0.7], dtype=torch.double)
    torch.testing.assert_close(fast("linear", x, weights, experts), fast("exact", x, weights, experts))


@pytest.mark.parametrize("seed", range(3))
def test_they_agree_where_no_expert_writes_what_another_reads(seed: int) -> None:
    """The experts write to and read from different directions, so B_i A_j is zero if i is not j."""
    x, weights, experts = drawn(seed, RANK)
    apart = []
    for number, expert in enumerate(experts):
        own = torch.zeros(RANK, 1, dtype=torch.double)
        own[number] = 1
        apart.append(Factors(expert.a * own, expert.b * own, expert.scale))
    linear = fast("linear", x, weights, apart)
    torch.testing.assert_close(linear, fast("exact", x, weights, apart))
    assert linear.abs().max() > 1e-3
