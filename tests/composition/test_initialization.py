"""The initialisation of cross-attention: every matrix has variance 1 over its inputs, and W_O is zero."""

from __future__ import annotations

import math

import pytest
import torch

from composition import reference
from graftlm.grafts.composition.attention import AttentionPositions, CrossAttention, Visibility

D, A, HEADS = 96, 200, 4


@pytest.mark.parametrize("init", ["zero", "paper"])
def test_matrices_have_variance_1_over_their_inputs(init: str) -> None:
    torch.manual_seed(0)
    block = CrossAttention(D, A, HEADS, "none", init)  # type: ignore[arg-type]
    for name, inputs in (("project", A), ("w_q", D), ("w_k", D), ("w_v", D), ("w_o", D)):
        expected = 0.0 if (name, init) == ("w_o", "zero") else 1 / math.sqrt(inputs)
        assert float(block.get_parameter(f"{name}.weight").detach().std()) == pytest.approx(expected, rel=0.05)


def test_half_of_the_local_heads_begin_on_the_current_token() -> None:
    """Without content, a local head gives the token itself nearly all of its attention, and the others are uniform."""
    block = CrossAttention(D, A, HEADS, "none", "zero", "local")
    with torch.no_grad():
        for name in ("w_q", "w_k"):
            block.get_parameter(f"{name}.weight").zero_()
    weights: list[torch.Tensor] = []
    order = torch.arange(6)[None]
    block(
        torch.zeros(1, 6, D),
        torch.zeros(1, 6, A),
        Visibility(),
        positions=AttentionPositions(anchor=order, augmenting=order),
        attention_weights=weights,
    )
    here_HT = weights[0][0].diagonal(dim1=-2, dim2=-1)
    assert here_HT[: HEADS // 2].min() > 0.9
    uniform_HT = (1 / torch.arange(1.0, 7)).expand(HEADS // 2, -1)
    torch.testing.assert_close(here_HT[HEADS // 2 :], uniform_HT)


@pytest.mark.parametrize(("heads", "count"), [(4, 3), (2, 6), (16, 1)])
def test_local_biases_have_the_highest_quarter_of_the_frequencies(heads: int, count: int) -> None:
    """Rotated to p and p', they have the product 2 c^2 sum of cos(f (p - p')), c = 4, f = 10000^(-i / half), i < count.

    Of `half` frequencies a quarter is taken, and at least one.
    """
    block = CrossAttention(D, A, heads, "none", "zero", "local")
    half = D // heads // 2
    q, k = (block.get_parameter(f"{name}.bias").detach().double().view(heads, -1) for name in ("w_q", "w_k"))
    assert not q[heads // 2 :].any()
    assert not k[heads // 2 :].any()
    for head in range(heads // 2):
        for here, there in [(0, 0), (5, 3), (2, 9), (0, 40)]:
            product = float(reference.rotate(q[head], here) @ reference.rotate(k[head], there))
            cosines = [math.cos(10_000 ** (-i / half) * (here - there)) for i in range(count)]
            assert product == pytest.approx(2 * 4.0**2 * sum(cosines), abs=1e-9)
