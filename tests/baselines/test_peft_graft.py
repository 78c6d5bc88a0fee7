"""Methods of PEFT as grafts: their formulas on one Linear, and what can't be a graft is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, BackboneError, GraftError, RecipeError, TapError
from graftlm.export import export_graft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.store.artifact import load_graft, save_graft
from graftlm.testing.laws import attach_graft, gradients, logits, randomise, state_of
from laws.examples import backbone
from tiny import tiny_ids, tiny_model, tiny_tokenizer

LINEAR = "model.layers.1.mlp.up_proj"


def of_peft(method: str, **options: Any) -> dict[str, Any]:
    return {"kind": "peft", "method": method, "options": options}


def outputs(method: str, **options: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """x (3, d), the bare weight, what one Linear with random adapter weights gives for x, and those weights."""
    host = backbone("llama")
    weight = host.model.get_submodule(LINEAR).weight.detach().clone()
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with randomise(attach_graft(host, of_peft(method, **options)).eval(), 0.2) as model, torch.no_grad():
        y = model.model.get_submodule(LINEAR)(x)
        tensors = {name: tensor.clone() for name, tensor in model.grafts["graft"].tensors().items()}  # type: ignore[operator]
    own = {name.partition(f"{LINEAR}.")[2]: t for name, t in tensors.items() if LINEAR in name}
    return x, weight, y, own


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # other orders of float32 products


def test_oft_rotates_blocks_of_the_input() -> None:
    """y = W R' x, R = (I - Q)(I + Q)^-1 on blocks of 4, Q skew-symmetric from its upper triangle."""
    x, weight, y, own = outputs("oft", oft_block_size=4, use_cayley_neumann=False)
    upper = own["oft_R.weight"]
    rotated = torch.zeros_like(x)
    for block, values in enumerate(upper):
        q = torch.zeros(4, 4)
        q[tuple(torch.triu_indices(4, 4, 1))] = values
        q, eye = q - q.T, torch.eye(4)
        rotation = (eye - q) @ torch.linalg.inv(eye + q)
        rotated[:, 4 * block : 4 * block + 4] = x[:, 4 * block : 4 * block + 4] @ rotation
    close(y, rotated @ weight.T)


def test_dora_scales_rows_of_the_sum_to_its_magnitude() -> None:
    """y = m (W + s B A) / ||W + s B A|| x, by rows; s = alpha / r = 8 / 4."""
    x, weight, y, own = outputs("DoRA", r=4, lora_alpha=8)
    total = weight + 2 * own["lora_B.weight"] @ own["lora_A.weight"]
    close(y, x @ (own["lora_magnitude_vector"][:, None] * total / total.norm(dim=1, keepdim=True)).T)


def test_ia3_scales_what_the_ffn_writes_between() -> None:
    x, weight, y, own = outputs("ia3")
    close(y, x @ weight.T * own["ia3_l"].flatten())
    scales = [tensor for name, tensor in _tensors("ia3").items() if "down_proj" in name]
    assert {tuple(scale.shape) for scale in scales} == {(1, 80)}, "the input of the last Linear is scaled"


def _tensors(method: str, **options: Any) -> dict[str, Tensor]:
    with attach_graft(backbone("llama"), of_peft(method, **options)) as model:
        return dict(model.grafts["graft"].tensors())  # type: ignore[operator]


@pytest.mark.parametrize("host", ["llama", "llama+bfloat16"])
def test_osf_keeps_gradients_out_of_the_large_directions(host: str) -> None:
    """The gradient of the left vectors is orthogonal to those of the larger half of the singular values."""
    weight = backbone(host).model.get_submodule(LINEAR).weight.detach().float()
    large = torch.linalg.svd(weight, full_matrices=False)[0][:, : min(weight.shape) // 2]
    with randomise(attach_graft(backbone(host), of_peft("osf")), 0.02) as model:
        grads = gradients(model, input_ids=tiny_ids(), labels=tiny_ids())
    grad = next(grad for name, grad in grads.items() if LINEAR in name and name.endswith("U_low"))
    tolerance = 1e-5 if host == "llama" else 2e-2  # PEFT rounds the directions to the backbone's dtype
    assert (large.T @ grad).norm() < tolerance * grad.norm()


def test_lora_is_the_same_by_either_kind() -> None:
    ids, results = tiny_ids(), []
    for values in ({"kind": "lora", "rank": 3, "scale": 2.0}, of_peft("lora", r=3, lora_alpha=6)):
        with randomise(attach_graft(backbone("llama"), values).eval(), 0.2) as model:
            results.append(logits(model, ids))
    assert torch.equal(*results)


def test_tables_have_the_methods_name() -> None:
    assert [graft_config(of_peft(name)).label for name in ("oft", "DoRA")] == ["OFT", "DORA"]
    assert graft_config({"kind": "lora"}).label == "LoRA on the FFN"


@pytest.mark.parametrize("method", ["BOFT", "LN_TUNING", pytest.param("SHIRA", marks=pytest.mark.slow)])
def test_methods_that_read_weights_while_they_are_built(method: str, tmp_path: Path) -> None:
    """Their tensors are known before they are attached, and building them changes nothing, flags included."""
    host = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "llama")
    for number, parameter in enumerate(host.model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    before = state_of(host.model)
    values = of_peft(method, **({"r": 4} if method == "SHIRA" else {}))
    with randomise(attach_graft(host, values).eval(), 0.2) as model:
        expected = logits(model, tiny_ids())
        save_graft(model.grafts["graft"], host, tmp_path / "graft")  # type: ignore[arg-type]
    again = load_graft(tmp_path / "graft", host)
    assert state_of(host.model) == before
    with GraftedModel(host, {"graft": again}).eval() as model:
        assert torch.equal(logits(model, tiny_ids()), expected)
    assert state_of(host.model) == before


def test_what_peft_can_not_merge_is_not_exported(tmp_path: Path) -> None:
    with attach_graft(backbone("llama"), of_peft("lily")) as model:
        graft: Any = model.grafts["graft"]
    with pytest.raises(ArtifactError) as error:
        export_graft(graft, backbone("llama"), tmp_path / "model")
    assert "LILY" in str(error.value)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "peft"}, "method"),
    (of_peft("OFTT"), "did you mean OFT?"),
    (of_peft("prefix_tuning"), "PREFIX_TUNING"),
    (of_peft("AdaLoRA"), "ADALORA"),
    (of_peft("oft", oft_blocksize=4), "did you mean oft_block_size?"),
    (of_peft("oft", r=4, oft_block_size=4), "options"),
    (of_peft("oft", task_type="CAUSAL_LM"), "task_type"),
    (of_peft("oft", module_dropout=0.1), "module_dropout is 0.1"),
    (of_peft("lora", init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    (of_peft("lora", layer_replication=[[0, 2]]), "layer_replication"),
]


@pytest.mark.parametrize(("values", "named"), MISTAKES, ids=[named for _, named in MISTAKES])
def test_mistakes_in_a_config(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError) as error:
        graft_config(values)
    assert named in str(error.value)


REFUSED: list[tuple[str, dict[str, Any], type[GraftError], str]] = [
    ("llama", of_peft("oft", target_modules=["nope"]), BackboneError, "nope"),
    ("llama", of_peft("ia3", target_modules="nope"), BackboneError, "IA3"),
    ("llama", of_peft("fourierft"), BackboneError, "logits"),
    ("llama", of_peft("lora", modules_to_save=["lm_head"]), BackboneError, "modules_to_save"),
    ("llama+bfloat16", of_peft("ln_tuning"), BackboneError, "same dtype"),
    ("gpt2", of_peft("lora", bias="all"), BackboneError, "own weights"),
    ("gpt2", of_peft("oft", oft_block_size=4), BackboneError, "Conv1D"),
    ("gpt2", of_peft("osf"), BackboneError, "OSF"),
    ("mixtral", of_peft("oft", oft_block_size=4), TapError, "mixture of experts"),
]


@pytest.mark.parametrize(("family", "values", "error", "reason"), REFUSED, ids=[refused[3] for refused in REFUSED])
def test_what_a_backbone_can_not_have(family: str, values: Any, error: type[GraftError], reason: str) -> None:
    before = state_of(backbone(family).model)
    with pytest.raises(error, match=reason):
        GraftedModel(backbone(family), {"graft": build_graft(graft_config(values), backbone(family))})
    assert state_of(backbone(family).model) == before


def trained_lora(**keys: Any) -> tuple[Any, Any]:
    """An attached LoRA whose update adds a large direction to each weight, and the model of its host."""
    host = backbone("llama")
    model = attach_graft(host, {"kind": "lora", "rank": 2, **keys}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.trainable_parameters().items():
            scale = 3.0 if "lora_B" in name else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return host, model


def test_intruders_are_subtracted_from_the_sum() -> None:
    """W + B A without a share of its singular vectors that no vector of W resembles, as an update of the same rank."""
    host, model = trained_lora(intruders=0.8)
    with model:
        layer = model.model.get_submodule(LINEAR)
        weight = layer.get_base_layer().weight.detach()
        total = weight + layer.get_delta_weight("graft").detach()
        left, values, right = torch.linalg.svd(total, full_matrices=False)
        bare_left = torch.linalg.svd(weight, full_matrices=False)[0]
        similar = (left.T @ bare_left).abs().max(dim=1).values[:10]
        intruders = [number for number in range(10) if similar[number] < 0.5]
        assert intruders, "the update has some"
        for number in intruders:
            total = total - 0.8 * values[number] * left[:, number : number + 1] @ right[number : number + 1]
        update = torch.linalg.svd(total - weight, full_matrices=False)
        expected = update[0][:, :2] @ torch.diag(update[1][:2]) @ update[2][:2]
        names = set(model.trainable_parameters())
        metrics = model.grafts["graft"].finish()
        assert metrics["intruders"] >= len(intruders)
        close(layer.get_delta_weight("graft"), expected)
        assert set(model.trainable_parameters()) == names, "the reduced adapter is gone"
        assert torch.equal(layer.get_base_layer().weight, weight)
    assert not any("lora" in name for name, _ in host.model.named_modules())


def test_nothing_is_subtracted_by_default() -> None:
    _, model = trained_lora()
    with model:
        before = {name: tensor.clone() for name, tensor in model.grafts["graft"].tensors().items()}
        assert model.grafts["graft"].finish() == {}
        assert all(torch.equal(before[name], tensor) for name, tensor in model.grafts["graft"].tensors().items())


def test_intruders_are_refused_before_training_where_peft_can_not_remove_them() -> None:
    with pytest.raises(RecipeError) as error:
        build_graft(graft_config({"kind": "lora", "intruders": 0.5}), backbone("gpt2"))
    assert "intruders" in str(error.value)
    assert "intruders" not in graft_config({"kind": "lora"}).model_dump()
