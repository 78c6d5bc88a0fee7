"""Layers that append in place: what anybody knows stays as it is, whatever others append."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from graftlm.backbone.cache_joining import join
from graftlm.backbone.growing_layer import GrowingLayer, use_growing_layers
from graftlm.errors import GraftError
from tiny import tiny_model

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "copy", "copy", "crop", "select", "join"]),
        st.integers(0, 3),
        st.sampled_from([1, 1, 1, 2, 90]),
    ),
    min_size=8,
    max_size=16,
)


def states(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 2, count, 3, generator=torch.Generator().manual_seed(seed))


def known(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Its keys and values."""
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def copied(layer: DynamicLayer) -> DynamicLayer:
    """A copy that shares tensors alone."""
    found = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(found, name, value if isinstance(value, torch.Tensor) else copy.copy(value))
    return found


@given(STEPS)
def test_every_clone_equals_a_dynamic_layer(steps: list[tuple[str, int, int]]) -> None:
    pairs: list[tuple[DynamicLayer, DynamicLayer]] = [(GrowingLayer(), DynamicLayer())]
    for layer in pairs[0]:
        layer.update(states(2, 5, 0), states(2, 5, 1))
    for step, which, count in steps:
        pair = pairs[which % len(pairs)]
        rows, length = known(pair[1])[0].shape[0], pair[1].get_seq_length()
        if step == "copy":
            pairs.append((copied(pair[0]), copied(pair[1])))
        elif step == "join":
            caches = [DynamicCache() for _ in pair]
            for cache, layer in zip(caches, pair, strict=True):
                cache.layers = [copy.copy(layer)]
            joined = [join([cache, copy.copy(cache)], [0, 0]).layers[0] for cache in caches]
            pairs.append((joined[0], joined[1]))  # type: ignore[arg-type]  # they are layers of these kinds
        for layer in pair:
            if step == "append":
                layer.update(states(rows, count, which), states(rows, count, which + 1))
            elif step == "crop":
                layer.crop(-min(count, length - 1))
            elif step == "select":
                layer.batch_select_indices(torch.arange(rows)[: max(1, rows - 1)])
        for own, other in pairs:
            assert all(map(torch.equal, known(own), known(other)))


def test_a_token_does_not_copy_the_states() -> None:
    layer = GrowingLayer()
    layer.update(states(2, 5, 0), states(2, 5, 1))
    keys, _ = layer.update(states(2, 1, 2), states(2, 1, 3))
    for _ in range(40):
        more, _ = layer.update(states(2, 1, 2), states(2, 1, 3))
        assert more.data_ptr() == keys.data_ptr()


def test_other_layers_stay_and_gradients_are_refused() -> None:
    cache = use_growing_layers(DynamicCache(config=tiny_model("gemma3").config))
    assert {type(layer) for layer in cache.layers} == {GrowingLayer, DynamicSlidingWindowLayer}
    assert use_growing_layers(DynamicCache()).layer_class_to_replicate is GrowingLayer
    with pytest.raises(GraftError):
        GrowingLayer().update(states(1, 1, 0).requires_grad_(), states(1, 1, 0))
