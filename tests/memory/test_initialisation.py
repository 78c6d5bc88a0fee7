"""The initial values: a wrong variance or time fails here, since no law depends on it."""

from __future__ import annotations

import math

import pytest
import torch

from memory.tools import live, memory_model, memory_of


def test_matrices_have_variance_1_over_inputs_and_the_output_is_zero() -> None:
    with memory_model(live(), spread=0, heads=8, head_width=64) as model:
        for block in memory_of(model).blocks:
            assert float(block.w_qkv.weight.detach().std()) == pytest.approx(1 / math.sqrt(48), rel=0.05)
            assert not block.w_o.weight.any()


def test_every_second_head_has_the_token_before_as_its_key() -> None:
    with memory_model(live(), spread=0) as model:
        mix = memory_of(model).blocks[0].mix.detach().unflatten(1, (3, 2, 8))
    expected = torch.zeros(4, 3, 2, 8)
    expected[0] = 1
    expected[0, 1, 0], expected[1, 1, 0] = 0, 1
    assert torch.equal(mix, expected)
    with memory_model(live(), spread=0, mixed=1) as model:
        assert memory_of(model).blocks[0].mix.eq(1).all()


def test_such_a_head_finds_what_followed_a_token() -> None:
    """Its keys are the queries of the token before; the other heads' keys have weights of their own."""
    with memory_model(live(), spread=0, heads=4) as model:
        weight = memory_of(model).blocks[0].w_qkv.weight.detach()
    queries, keys, _ = weight.unflatten(0, (3, 4, -1))
    assert torch.equal(queries[::2], keys[::2])
    assert not queries[1::2].eq(keys[1::2]).any()
    with memory_model(live(), spread=0, mixed=1) as model:
        queries, keys, _ = memory_of(model).blocks[0].w_qkv.weight.detach().chunk(3)
    assert not queries.eq(keys).any()


def test_heads_forget_in_1_to_128_windows_and_write_half() -> None:
    with memory_model(live(), spread=0, heads=8, window=6) as model:
        block = memory_of(model).blocks[0]
        a, b = block.rates(torch.randn(1, 48)).double()[0].chunk(2)
    times = 1 / torch.nn.functional.softplus(a)  # a state falls to 1/e in so many tokens
    torch.testing.assert_close(times, 6.0 * torch.logspace(0, math.log10(128), 8).flip(0).double(), rtol=1e-3, atol=0)
    assert b.sigmoid().tolist() == [0.5] * 8
