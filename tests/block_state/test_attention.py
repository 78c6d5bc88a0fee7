"""Attention in blocks equals attention to all windows at once, wherever a text is split and padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from block_state import tools
from graftlm.models.block_state import attention
from graftlm.models.block_state.grid import WindowGrid
from graftlm.models.block_state.layout import ChunkedTensor, concat_features, merge_heads
from graftlm.models.block_state.multi_head import causal_attention

W, LENGTH = 6, 21
VARIANTS = ("slide", "memory", "recurrent", "sh-s4d")


def logits_and_gradients(variant: str, mask: Tensor, split: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a text in two passes, zero for padding, and the gradients of a random projection of them."""
    model = tools.model(variant, window=W).train()
    ids = tools.ids(len(mask), LENGTH)
    cache = DynamicCache()
    model.zero_grad()
    passes = [
        model(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, use_cache=True).logits
        for part in (slice(0, split), slice(split, LENGTH))
    ]
    logits = torch.cat(passes, dim=1) * mask[..., None]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12)
@given(block=st.sampled_from([1, 2, 3, 6]), split=st.integers(1, LENGTH - 1), left=st.integers(0, LENGTH - 1))
def test_banded_attention_has_the_gradients_of_all_windows_at_once(
    variant: str, block: int, split: int, left: int
) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :left] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK", block)
        logits, gradients = logits_and_gradients(variant, mask, split)
        patch.setattr(attention, "QUERY_BLOCK", 64)
        patch.setattr(attention.WindowAttention, "_uses_banded_kernel", lambda *_: False)
        expected, expected_gradients = logits_and_gradients(variant, mask, split)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", ["slide", "memory", "sh-s4d"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_logits_do_not_depend_on_the_block_size(variant: str, bidirectional: bool) -> None:
    if bidirectional and variant == "memory":
        pytest.skip("Transformer-XL reads from left to right")
    model = tools.classifier(variant, window=W) if bidirectional else tools.model(variant, window=W).train()
    logits = []
    for block in (2, 64):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(attention, "QUERY_BLOCK", block)
            logits.append(model.eval()(tools.ids(2, LENGTH)).logits)
    model.train()
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)


def test_a_window_without_a_suitable_divisor_is_one_block() -> None:
    def block_size(window: int, slots: int) -> int:
        return attention._block_size(WindowGrid.build(torch.zeros(1, slots), None, None, window))

    assert block_size(128, 512) == 64
    assert block_size(512, 1024) == 64
    assert block_size(96, 960) == 48
    assert block_size(8, 64) == 8
    assert block_size(127, 254) == 127
    assert block_size(128, 100) == 100


@settings(max_examples=30)
@given(slots=st.integers(1, 150), windows=st.integers(1, 3))
def test_causal_attention_in_chunks_equals_its_formula(slots: int, windows: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    shape = (2, windows, 3, slots, 4)  # (B, I, H, w, K)
    q, k, v = (torch.randn(shape, dtype=torch.double, generator=generator).requires_grad_() for _ in range(3))
    position = torch.arange(slots)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(position > position[:, None], -torch.inf)
    expected = merge_heads(scores.softmax(-1) @ v).flatten(1, 2)
    actual = causal_attention(q, k, v).concatenate()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(expected.shape, dtype=torch.double, generator=generator)
    actual_gradients = torch.autograd.grad((actual * weights).sum(), (q, k, v))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-9, atol=1e-9)


@given(
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_chunks_are_copied_to_the_same_places_with_and_without_gradients(blocks: list[int], slots: list[int]) -> None:
    rows = 2
    width = 5
    total = sum(blocks) * sum(slots)
    tensors = [
        ChunkedTensor([torch.randn(rows, count, sum(slots), width) for count in blocks], dim=1),
        ChunkedTensor([torch.randn(rows, sum(blocks), count, width) for count in slots], dim=2),
    ]
    features = concat_features(*tensors)
    assert features.shape == (rows, total, 2 * width)
    assert torch.equal(features, torch.cat([tensor.concatenate() for tensor in tensors], dim=-1))  # copies only
    with torch.no_grad():
        assert torch.equal(concat_features(*tensors), features)
        assert torch.equal(concat_features(tensors[1]), tensors[1].concatenate())
