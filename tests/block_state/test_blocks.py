"""Attention block by block is attention at once: logits and gradients, wherever a text is cut and padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from block_state import tools
from graftlm.models.block_state import attention

W, LENGTH = 6, 21
MODELS = {variant: tools.model(variant, window=W).train() for variant in ("slide", "memory", "recurrent", "sh-s4d")}


def learned(variant: str, mask: Tensor, cut: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a text in two pieces, those of padding blank, and gradients of a sum of theirs."""
    model, ids, cache = MODELS[variant], tools.ids(len(mask), LENGTH), DynamicCache()
    model.zero_grad()
    pieces = [slice(0, cut), slice(cut, LENGTH)]
    logits = torch.cat(
        [
            model(ids[:, one], attention_mask=mask[:, : one.stop], past_key_values=cache, use_cache=True).logits
            for one in pieces
        ],
        dim=1,
    )
    logits = logits * mask[..., None]
    (
        logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    ).sum().backward()
    return logits.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("variant", MODELS)
@settings(max_examples=12)
@given(block=st.sampled_from([1, 2, 3, 6]), cut=st.integers(1, LENGTH - 1), left=st.integers(0, LENGTH - 1))
def test_blocks_learn_what_all_windows_at_once_learn(variant: str, block: int, cut: int, left: int) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :left] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", block)
        logits, gradients = learned(variant, mask, cut)
        patch.setattr(attention, "BLOCK", 64)
        patch.setattr(attention.WindowAttention, "_learns_bias_on_cpu", lambda *_: False)
        wanted, wanted_gradients = learned(variant, mask, cut)
    torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", ["slide", "memory", "sh-s4d"])
@pytest.mark.parametrize("both_ways", [False, True])
def test_blocks_read_what_all_windows_at_once_read(variant: str, both_ways: bool) -> None:
    if both_ways and variant == "memory":
        pytest.skip("Transformer-XL reads from left to right")
    model = tools.classifier(variant, window=W) if both_ways else MODELS[variant]
    found = []
    for block in (2, 64):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(attention, "BLOCK", block)
            found.append(model.eval()(tools.ids(2, LENGTH)).logits)
    model.train()
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_windows_without_a_fitting_part_are_read_whole() -> None:
    def block(window: int, slots: int) -> int:
        now = attention.Pass.over((1, slots), None, None, window)
        return attention._block(now)

    assert [block(128, 512), block(512, 1024), block(96, 960), block(8, 64)] == [64, 64, 48, 8]
    assert [block(127, 254), block(128, 100)] == [127, 100]


@settings(max_examples=30)
@given(slots=st.integers(1, 150), windows=st.integers(1, 3))
def test_pieces_of_a_window_attend_as_all_of_it(slots: int, windows: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    shape = (2, windows, 3, slots, 4)  # (B, I, H, w, K)
    q, k, v = (torch.randn(shape, dtype=torch.double, generator=generator).requires_grad_() for _ in range(3))
    place = torch.arange(slots)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(place > place[:, None], -torch.inf)
    wanted = attention.merge(scores.softmax(-1) @ v).flatten(1, 2)
    found = attention.attend_so_far(q, k, v).joined()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(wanted.shape, dtype=torch.double, generator=generator)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_outputs_stand_beside_each_other_alike_with_and_without_gradients(blocks: list[int], slots: list[int]) -> None:
    rows, width, total = 2, 5, sum(blocks) * sum(slots)
    each = [
        attention.Pieces([torch.randn(rows, count, sum(slots), width) for count in blocks], dim=1),
        attention.Pieces([torch.randn(rows, sum(blocks), count, width) for count in slots], dim=2),
    ]
    found = attention.beside(*each)
    assert found.shape == (rows, total, 2 * width)
    assert torch.equal(found, torch.cat([each[0].joined(), each[1].joined()], dim=-1))
    with torch.no_grad():
        assert torch.equal(attention.beside(*each), found)
        assert torch.equal(attention.beside(each[1]), each[1].joined())
