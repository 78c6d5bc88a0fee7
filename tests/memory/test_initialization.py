"""The initial values, whose variances and times no other test depends on."""

from __future__ import annotations

import math

import pytest
import torch

from memory.tools import live, memory_model, memory_of


def test_nothing_is_added_and_keys_have_variance_1_over_inputs() -> None:
    with memory_model(live(), spread=0, heads=8, head_width=64) as model:
        for block in memory_of(model).blocks:
            assert float(block.w_qk.weight.detach().std()) == pytest.approx(1 / math.sqrt(48), rel=0.05)
            assert not block.gain.any()
            assert not block.u_qk.weight.any()


@pytest.mark.parametrize(("mixed", "offsets"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_heads_find_what_followed_one_of_the_last_tokens(mixed: int, offsets: int) -> None:
    """The key of a head is its query one token before; heads alternate between the last tokens."""
    with memory_model(live(), spread=0, heads=6, mixed=mixed) as model:
        block = memory_of(model).blocks[0]
        mix = block.mix.detach().unflatten(1, (2, 6, 8))
        queries, keys = block.w_qk.weight.detach().chunk(2)
    expected = torch.zeros(mixed, 2, 6, 8)
    for head in range(6):
        expected[head % offsets, 0, head] = 1
        expected[min(head % offsets + 1, mixed - 1), 1, head] = 1
    assert torch.equal(mix, expected)
    assert torch.equal(queries, keys)


@pytest.mark.parametrize(("heads", "mixed"), [(8, 3), (6, 4), (5, 3), (8, 4), (3, 3)])
def test_the_heads_of_a_place_give_back_the_whole_token(heads: int, mixed: int) -> None:
    with memory_model(live(), spread=0, heads=heads, mixed=mixed) as model:
        block = memory_of(model).blocks[0]
        values = block.w_v.weight.detach().unflatten(0, (heads, -1))
    assert torch.equal(block.w_o.weight.detach(), block.w_v.weight.detach().T)
    for offset in range(mixed - 1):
        basis = values[offset :: mixed - 1].flatten(0, 1)
        torch.testing.assert_close(basis.T @ basis, torch.eye(48), rtol=0, atol=1e-5)


def test_heads_forget_in_1_to_128_windows_write_half_and_read_half() -> None:
    with memory_model(live(), spread=0, heads=8, window=6) as model:
        block = memory_of(model).blocks[0]
        a, b, g = block.rates(torch.randn(1, 48)).double()[0].chunk(3)
    times = 1 / torch.nn.functional.softplus(a)  # tokens in which a state decays to 1/e
    expected = 6.0 * torch.logspace(0, math.log10(128), 8).flip(0).double()
    torch.testing.assert_close(times, expected, rtol=1e-3, atol=0)
    assert b.sigmoid().tolist() == [0.5] * 8
    assert g.sigmoid().tolist() == [0.5] * 8
