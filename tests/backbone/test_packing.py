"""Packed weights: the same products, only while the weight is the one that was packed, and no trace afterwards."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from graftlm.backbone import packing
from graftlm.backbone.packing import PackedLinear, pack_weights, unpack_weights

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 arithmetic of oneDNN"
)


def two_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 33, bias=False)).bfloat16()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1)).bfloat16()


def assert_products(model: nn.Module, x: torch.Tensor, weights: dict[str, Any] | None = None) -> None:
    """The model's outputs are those of float64 up to bfloat16's rounding."""
    w = {name: value.double() for name, value in (weights or model.state_dict()).items()}
    hidden = (x.double() @ w["0.weight"].T + w["0.bias"]).bfloat16().double()
    expected = hidden @ w["1.weight"].T
    actual = functional_call(model, weights, x) if weights else model(x)
    assert (actual.double() - expected).abs().max() < 0.02 * expected.abs().max()


@needs_bfloat16
@pytest.mark.parametrize("shape", [(), (1,), (16,), (0, 3), (3, 70), (2, 3, 5)])
def test_packed_layers_give_the_same_products(shape: tuple[int, ...]) -> None:
    model = two_layers()
    pack_weights(model)
    assert all(type(layer) is PackedLinear and layer.packed for layer in model)
    with torch.inference_mode():
        if 0 in shape:
            assert model(inputs(*shape)).shape == (*shape, 33)
            return
        assert_products(model, inputs(*shape))
        if len(shape) > 1:
            assert_products(model, inputs(*shape).transpose(0, 1))
            assert_products(model, inputs(*shape)[:, ::2])


@needs_bfloat16
def test_a_weight_that_changed_or_was_exchanged_is_the_one_that_counts() -> None:
    model = two_layers()
    pack_weights(model)
    with torch.no_grad():
        assert_products(model, inputs(4), {name: 3 * value + 1 for name, value in model.state_dict().items()})
        model[0].weight.mul_(-2)
        assert_products(model, inputs(4))
        model[1].weight = nn.Parameter(model[1].weight + 1)
        assert_products(model, inputs(4))


@needs_bfloat16
def test_gradients_are_those_of_the_layer() -> None:
    model, x = two_layers(), inputs(4).requires_grad_()
    expected = torch.autograd.grad(model(x).float().sum(), [x, *model.parameters()])
    pack_weights(model)
    for mine, plain in zip(
        torch.autograd.grad(model(x).float().sum(), [x, *model.parameters()]), expected, strict=True
    ):
        assert (mine - plain).abs().max() <= 0.02 * plain.abs().max()


@needs_bfloat16
def test_copies_are_not_packed_and_unpacking_leaves_no_trace() -> None:
    model = two_layers()
    before = [set(vars(layer)) for layer in model]
    pack_weights(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other[0].weight.mul_(2)
            assert_products(other, inputs(4))
    unpack_weights(model)
    assert [type(layer) for layer in model] == [nn.Linear] * 2
    assert [set(vars(layer)) for layer in model] == before


@needs_bfloat16
def test_weights_that_would_fill_the_memory_are_not_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, size = two_layers(), 2 * 80 * (48 + 33)
    memory = SimpleNamespace(available=4 * size - 1)
    monkeypatch.setattr(packing.psutil, "virtual_memory", lambda: memory)
    with caplog.at_level("INFO"):
        pack_weights(model)
    assert [type(layer) for layer in model] == [nn.Linear] * 2
    assert "not packed" in caplog.text
    memory.available = 4 * size
    pack_weights(model)
    assert [type(layer) for layer in model] == [PackedLinear] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_other_layers_stay_as_they_are(dtype: torch.dtype) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(*two_layers().to(dtype), Own(4, 4, dtype=torch.bfloat16))
    types = [type(layer) for layer in model]
    pack_weights(model)
    assert [type(layer) for layer in model] == types
