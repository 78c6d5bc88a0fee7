"""LLaMA Pro: a plain model with copied layers, placed and typed as the backbone's; what can't be so is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baselines.reference import expand
from graftlm.backbone import Backbone
from graftlm.errors import BackboneError, GraftError, RecipeError, TapConflictError, TapError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.baselines.block_expansion import copied_layers
from graftlm.testing.laws import attach_graft, logits, randomise, state_of
from laws.examples import backbone
from tiny import tiny_ids, tiny_model, tiny_tokenizer


def wrapped(family: str, **changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model(family, **changes), tiny_tokenizer(), family)


def pro(blocks: int = 1) -> dict[str, Any]:
    return {"kind": "llama-pro", "blocks": blocks}


def test_blocks_equal_those_of_a_plain_model_with_more_layers() -> None:
    """Logits and gradients; tolerance for two orders of float32 sums."""
    host, ids = wrapped("llama", num_hidden_layers=4), tiny_ids()
    plain, added = expand(host.model, 2)  # type: ignore[arg-type]  # a Llama
    assert added == [2, 5]
    with attach_graft(host, pro(2)).eval() as model:
        assert torch.equal(logits(model, ids), logits(plain, ids))
        assert torch.equal(logits(plain, ids), logits(host.model, ids))
        randomise(model, 0.1)
        trained = {name.removeprefix("model."): p for name, p in model.trainable_parameters().items()}
        assert {name.split(".")[2] for name in trained} == {"2", "5"}
        own = dict(plain.named_parameters())
        with torch.no_grad():
            for name, parameter in trained.items():
                own[name].copy_(parameter)
        torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=1e-5, atol=1e-5)
        model(ids, labels=ids).loss.backward()
        plain(ids, labels=ids).loss.backward()
        for name, parameter in trained.items():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "blocks", "expected"),
    [
        (32, 8, [3, 7, 11, 15, 19, 23, 27, 31]),  # the paper's Llama 2, 7B
        (30, 4, [6, 14, 21, 29]),
        (2, 1, [1]),
        (3, 3, [0, 1, 2]),
    ],
)
def test_a_copy_stands_behind_each_group(layers: int, blocks: int, expected: list[int]) -> None:
    assert copied_layers(layers, blocks) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_copies_begin_as_their_layers_but_for_what_they_write(family: str) -> None:
    host = wrapped(family)
    tensors = build_graft(graft_config(pro()), host).tensors()  # type: ignore[attr-defined]
    layer = dict(host.sites.layers[-1].named_parameters())
    zero = {name for name, tensor in tensors.items() if not tensor.any()}
    outputs = ("c_proj.weight", "c_proj.bias") if family == "gpt2" else ("o_proj.weight", "down_proj.weight")
    assert zero == {f"0.{name}" for name in layer if name.endswith(outputs)}
    assert len(zero) == 2 * (1 + (family == "gpt2"))
    assert all(torch.equal(tensors[f"0.{name}"], p) for name, p in layer.items() if f"0.{name}" not in zero)


@pytest.mark.parametrize("layers", [(1, 2), (2, 2)], ids=str)
def test_each_copy_has_the_window_of_its_layer(layers: tuple[int, int]) -> None:
    """Gemma 3: by the config, by the layers and by the cache."""
    types = ["sliding_attention", "full_attention"]
    host = wrapped("gemma3", num_hidden_layers=2, layer_types=types)
    expected = [kind for kind, count in zip(types, layers, strict=True) for _ in range(count)]
    with attach_graft(host, pro(sum(layers) - 2)).eval() as model:
        assert model.config.layer_types == expected
        assert model.config.num_hidden_layers == sum(layers)
        cache = model(tiny_ids(), use_cache=True).past_key_values
        assert [layer.is_sliding for layer in cache.layers] == [kind == types[0] for kind in expected]
    assert host.config.layer_types == types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_float32_in_a_residual_stream_of_half_precision(dtype: torch.dtype) -> None:
    host = Backbone.wrap(tiny_model("llama").to(dtype), tiny_tokenizer(), "llama")
    bare = logits(host.model, tiny_ids())
    with attach_graft(host, pro()).eval() as model:
        assert {parameter.dtype for parameter in model.trainable_parameters().values()} == {torch.float32}
        assert torch.equal(logits(model, tiny_ids()), bare), "an identity in any dtype"
        entered: list[torch.dtype] = []
        norm = model.model.get_submodule("model.norm")
        with norm.register_forward_pre_hook(lambda _, args: entered.append(args[0].dtype)):
            assert logits(randomise(model, 0.1), tiny_ids()).dtype == dtype
        assert entered == [dtype]


@pytest.mark.parametrize("capacity", [0.05, 0.3, 0.7])
def test_capacity_is_a_share_of_the_backbones_weights(capacity: float) -> None:
    host = wrapped("llama", num_hidden_layers=6)
    weights = sum(parameter.numel() for parameter in host.model.parameters())
    block = sum(parameter.numel() for parameter in host.sites.layers[0].parameters())
    graft = build_graft(graft_config({"kind": "llama-pro", "capacity": capacity}), host)
    tensors = graft.tensors().values()  # type: ignore[attr-defined]
    added = sum(tensor.numel() for tensor in tensors)
    assert abs(added - capacity * weights) <= block * (0.5 if capacity > 0.1 else 1)
    assert len(graft.describe(host)["copied_layers"]) == added / block


def test_taps_of_other_grafts_act_on_the_backbones_own_layers() -> None:
    host, ids = wrapped("llama", num_hidden_layers=4), tiny_ids()
    other = build_graft(graft_config({"kind": "neutral-residues"}), host)
    with randomise(GraftedModel(host, {"other": other}).eval(), 0.2) as model:
        expected = logits(model, ids)
    new = build_graft(graft_config(pro(2)), host)
    for grafts in ({"new": new, "other": other}, {"other": other, "new": new}):
        with GraftedModel(host, grafts).eval() as model:
            assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize(
    "names",
    [
        ("llama-pro", "lora"),
        ("lora", "llama-pro"),
        ("llama-pro", "finetune"),
        ("finetune", "llama-pro"),
    ],
)
def test_other_grafts_that_change_modules_are_refused(names: tuple[str, str]) -> None:
    host = wrapped("llama")
    values = {"lora": {"kind": "lora", "rank": 2}, "finetune": {"kind": "finetune"}, "llama-pro": pro()}
    before = state_of(host.model)
    grafts = {name: build_graft(graft_config(values[name]), host) for name in names}
    with pytest.raises(TapConflictError):
        GraftedModel(host, grafts)
    assert state_of(host.model) == before


REFUSED: dict[str, tuple[type[GraftError], str]] = {
    "bert": (BackboneError, "residual stream"),
    "mixtral": (TapError, "mixture of experts"),
    "gemma3n": (TapError, "several streams"),
    "block-state": (BackboneError, "config"),
    "llama+int8": (BackboneError, "quantization"),
    "qwen3+adapted": (TapConflictError, "PEFT"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_layers_that_can_not_be_copied_are_refused(family: str) -> None:
    error, reason = REFUSED[family]
    before = state_of(backbone(family).model)
    with pytest.raises(error, match=reason):
        build_graft(graft_config(pro()), backbone(family))
    assert state_of(backbone(family).model) == before


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "neither blocks nor capacity"),
        ({"blocks": 1, "capacity": 0.1}, "both blocks and capacity"),
        ({"blocks": 0}, "blocks: "),
        ({"block": 1}, "key block "),
        ({"blocks": 3}, "new blocks is 3"),
    ],
)
def test_mistakes_in_a_config(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError) as error:
        build_graft(graft_config({"kind": "llama-pro", **values}), backbone("llama"))
    assert named in str(error.value)
