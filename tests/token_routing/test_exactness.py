"""A mixture equals the explicit sum of updates; a single expert equals PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from cases import rotated
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing.mixture import RouteWeights
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from token_routing.tools import (
    FAMILIES,
    assert_equal,
    backbone,
    peft_logits,
    routing,
    settings,
    summed_logits,
    write_adapters,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def logits_with_weights(model: object, weights: list[list[float]]) -> torch.Tensor:
    """Logits under fixed expert weights, one list per row of the batch."""
    graft = model.grafts["graft"]  # type: ignore[attr-defined]
    fixed = torch.tensor([[*row, 1 - sum(row)] for row in weights])[:, None]
    graft._token_weights = lambda *_, **__: fixed
    with torch.no_grad():
        return model(tiny_ids(len(weights)), use_cache=False).logits  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_is_the_sum_of_the_updates(family: str, tmp_path: Path) -> None:
    folders = write_adapters(family, tmp_path)
    weights = [[0.2, 0.5, 0.3], [0.6, 0.0, 0.1]]
    with routing(family, folders) as model:
        actual = logits_with_weights(model.eval(), weights)
    for row, chosen in enumerate(weights):
        expected = summed_logits(family, folders, dict(zip(folders, chosen, strict=True)), tiny_ids(2))[row]
        assert_equal(actual[row], expected)


@pytest.mark.parametrize(("family", "top"), rotated(FAMILIES, [None, 1]))
def test_a_single_expert_equals_peft(family: str, top: int | None, tmp_path: Path) -> None:
    folders = write_adapters(family, tmp_path)
    with routing(family, folders, top=top) as model:
        for number, name in enumerate(folders):
            one_hot = [float(number == other) for other in range(3)]
            actual = logits_with_weights(model.eval(), [one_hot, one_hot])
            assert_equal(actual, peft_logits(family, folders[name], tiny_ids(2)))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_single_expert_on_a_quantised_backbone_equals_peft(weights: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    configs = {
        "int8": quantization.Int8WeightOnlyConfig(),
        "int4": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }

    def quantized() -> Any:
        model = tiny_model("llama")
        quantization.quantize_(model, configs[weights])
        return model

    folder = write_adapters("llama", tmp_path)["two"]
    path = Path(folder) / "adapter_model.safetensors"  # without the copy of the head, which PEFT can't load quantized
    host = Backbone.wrap(quantized(), tiny_tokenizer(), "tiny-llama")
    values = {"kind": "token-routing", "experts": {"two": {"path": folder}}, "prompt": "causal"}
    with pytest.raises(ArtifactError, match="save_embedding_layers=False"):
        build_graft(graft_config(values), host)
    save_file({key: value for key, value in load_file(path).items() if "base_layer" not in key}, path)
    with torch.no_grad():
        bare = quantized()(tiny_ids(2), use_cache=False).logits
        expected = PeftModel.from_pretrained(quantized(), folder).eval()(tiny_ids(2), use_cache=False).logits
    with GraftedModel(host, {"graft": build_graft(graft_config(values), host)}) as model:
        actual = logits_with_weights(model.eval(), [[1.0]] * 2)
    assert_equal(actual, expected)
    assert (actual - bare).abs().max() > 0.1


def test_zero_weights_are_the_bare_backbone_bit_for_bit(tmp_path: Path) -> None:
    with torch.no_grad():
        bare = backbone("llama").model(tiny_ids(2), use_cache=False).logits
    with routing("llama", write_adapters("llama", tmp_path), threshold=1.0) as model:
        assert torch.equal(logits_with_weights(model.eval(), [[0.0] * 3] * 2), bare)


def test_linear_equals_pefts_linear_and_differs_from_the_sum(tmp_path: Path) -> None:
    chosen = {
        name: {"r": 4, "lora_alpha": 4 + n, "target_modules": ["q_proj", "up_proj"]} for n, name in enumerate("abc")
    }
    folders = write_adapters("llama", tmp_path, chosen)
    weights = [0.2, 0.5, 0.3]
    first, *others = folders.items()
    peft = PeftModel.from_pretrained(tiny_model("llama"), first[1], adapter_name=first[0]).eval()
    for name, folder in others:
        peft.load_adapter(folder, adapter_name=name)
    peft.add_weighted_adapter([*folders], weights, "mixed", combination_type="linear")
    peft.set_adapter("mixed")
    with torch.no_grad():
        published = peft(tiny_ids(2), use_cache=False).logits
    exact = summed_logits("llama", folders, dict(zip(folders, weights, strict=True)), tiny_ids(2))
    with routing("llama", folders, combination="linear") as model:
        actual = logits_with_weights(model.eval(), [weights] * 2)
    assert_equal(actual, published)
    assert (actual - exact).abs().max() > 0.1, "the cross terms are not negligible"


def test_linear_needs_one_rank(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        routing("llama", write_adapters("llama", tmp_path), combination="linear")
    assert "3, 4" in str(caught.value)


def test_each_token_has_its_own_weights(tmp_path: Path) -> None:
    folders = write_adapters("llama", tmp_path)
    ids = tiny_ids(1, 6)
    per_token = torch.softmax(torch.randn(1, 6, 3), -1)
    with routing("llama", folders) as model:
        graft = model.eval().grafts["graft"]
        mixture = next(m for _, m in graft._mixtures_by_path() if len(m.layout.experts) == 2)  # type: ignore[operator]
        x = torch.randn(1, 6, mixture.target.inputs)
        actual = mixture(x, RouteWeights.of(per_token, sparse=False))
        layout = mixture.layout
        for token in range(ids.shape[1]):
            expected = sum(
                per_token[0, token, e] * s * (x[0, token] @ mixture.factors(e).a.T) @ mixture.factors(e).b
                for e, s in zip(layout.experts, layout.scales, strict=True)
            )
            torch.testing.assert_close(actual[0, token], expected, **CLOSE)


def test_a_subset_of_experts_equals_all_with_zero_weights(tmp_path: Path) -> None:
    folders = write_adapters("llama", tmp_path)
    weights = [[0.0, 0.7, 0.3], [0.0, 1.0, 0.0]]
    with routing("llama", folders) as model:
        dense = logits_with_weights(model.eval(), weights)
    with routing("llama", folders, top=2) as model:
        assert_equal(logits_with_weights(model.eval(), weights), dense)
        assert logits_with_weights(model, [[1.0, 0.0, 0.0]] * 2).isfinite().all()
        assert_equal(logits_with_weights(model, weights), dense)


def test_settings_cover_mixed_ranks_and_scales() -> None:
    values = settings("llama").values()
    assert len({adapter["r"] for adapter in values}) == 3
    assert any(adapter.get("use_rslora") for adapter in values)
