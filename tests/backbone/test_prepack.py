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

from graftlm.backbone import prepack
from graftlm.backbone.prepack import PackedLinear, can_pack, pack_weights, unpack_weights

needs_bfloat16 = pytest.mark.skipif(not can_pack(), reason="oneDNN has no bfloat16 products on this CPU")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the inputs that were multiplied by packed weights."""
    shapes: list[torch.Size] = []
    ops = prepack._OPS

    def multiply(x: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(x.shape)
        return ops._linear_pointwise(x, *others)

    replaced = SimpleNamespace(
        _linear_pointwise=multiply,
        _reorder_linear_weight=ops._reorder_linear_weight,
        _is_mkldnn_bf16_supported=ops._is_mkldnn_bf16_supported,
    )
    monkeypatch.setattr(prepack, "_OPS", replaced)
    return shapes


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
def test_packed_layers_give_the_same_products(shape: tuple[int, ...], products: list[torch.Size]) -> None:
    model = two_layers()
    assert pack_weights(model)
    assert all(type(layer) is PackedLinear and layer.packed for layer in model)
    with torch.inference_mode():
        assert model(inputs(*shape)).shape == (*shape, 33)
        assert products == [(*shape, 48), (*shape, 80)]
        if 0 in shape:
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
        model[0].bias = None
        assert pack_weights(model)
        model[0].weight.data = model[0].weight.data * 3
        model[0].register_parameter("bias", nn.Parameter(torch.ones(80).bfloat16()))
        assert_products(model, inputs(4))


@needs_bfloat16
def test_other_dtypes_go_another_way(products: list[torch.Size]) -> None:
    model = two_layers()
    pack_weights(model)
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            assert model(inputs(4).float()).dtype == torch.bfloat16
        assert len(products) == 1, "the second layer's input is bfloat16"
        with pytest.raises(RuntimeError, match="dtype"):
            model(inputs(4).float())
        assert model.float()(inputs(4).float()).dtype == torch.float32
    assert len(products) == 1


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
def test_weights_that_would_fill_the_memory_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, size = two_layers(), 2 * 80 * (48 + 33)
    memory = SimpleNamespace(available=4 * size - 1)
    monkeypatch.setattr(prepack.psutil, "virtual_memory", lambda: memory)
    assert not pack_weights(model)
    assert [type(layer) for layer in model] == [nn.Linear] * 2
    memory.available = 4 * size
    assert pack_weights(model)
    assert [type(layer) for layer in model] == [PackedLinear] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_other_layers_stay_as_they_are(dtype: torch.dtype) -> None:
    class Own(nn.Linear):
        pass

    with torch.inference_mode():
        no_version = nn.Linear(4, 4, dtype=torch.bfloat16)
    mixed = nn.Linear(4, 4, dtype=torch.bfloat16)
    mixed.bias = nn.Parameter(torch.zeros(4))
    others = [Own(4, 4, dtype=torch.bfloat16), nn.Linear(4, 0, dtype=torch.bfloat16), no_version, mixed]
    model = nn.Sequential(*two_layers().to(dtype), *others, nn.Linear(4, 4, dtype=torch.bfloat16, device="meta"))
    types = [type(layer) for layer in model]
    assert pack_weights(model)
    assert [type(layer) for layer in model] == types
