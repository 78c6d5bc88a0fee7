"""The variances of the initial values, which no other test depends on.

The variance of the matrices is that of the paper, which does not state that of the gates. The sample deviation of n
normal values has a relative standard error of 1 / sqrt(2 n). The tolerance of 5% is more than five times that error for
the at least 6,000 values that are measured.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.base import Graft
from graftlm.grafts.baselines import LoRABaseline, LoRABaselineConfig
from graftlm.grafts.neutral_residues import (
    NeutralResidues,
    NeutralResiduesConfig,
    VanillaAdapter,
    VanillaAdapterConfig,
)
from tiny import tiny_ids, tiny_model, tiny_tokenizer

D, LAYERS, INNER = 64, 5, 60


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.wrap(tiny_model("llama", hidden_size=D, head_dim=16, num_hidden_layers=LAYERS))


def deviation(graft: Graft, part: str) -> float:
    blocks: Any = graft.blocks
    weights = [getattr(block, part).weight.detach().flatten() for block in blocks]
    return float(torch.cat(weights).std())


@pytest.mark.parametrize(
    ("init", "variance"), [("low-variance", 1 / (D * LAYERS)), ("he", 2 / D)], ids=["low-variance", "he"]
)
def test_input_matrices_have_the_variance_of_their_init(backbone: Backbone, init: Any, variance: float) -> None:
    graft = NeutralResidues(NeutralResiduesConfig(init=init, width=INNER), backbone)
    for part in ("w_i", "w_g"):
        assert deviation(graft, part) == pytest.approx(math.sqrt(variance), rel=0.05)
    assert deviation(graft, "w_o") == 0


def test_random_gates_have_variance_1_over_d_and_no_bias(backbone: Backbone) -> None:
    config = NeutralResiduesConfig(width=1, gate_init="random")
    gates: list[Any] = []
    for _ in range(20):
        blocks: Any = NeutralResidues(config, backbone).blocks
        gates += [block.gate for block in blocks]
    weights = torch.cat([gate.weight.detach().flatten() for gate in gates])
    assert len(weights) == 20 * LAYERS * D
    assert float(weights.std()) == pytest.approx(1 / math.sqrt(D), rel=0.05)
    assert all(gate.bias is None for gate in gates)


@torch.no_grad()
def test_every_gate_of_an_open_start_is_1_for_every_token(backbone: Backbone) -> None:
    graft = NeutralResidues(NeutralResiduesConfig(width=1), backbone)
    for block in graft.blocks:
        assert block.scores(torch.randn(7, D)).tolist() == [[1.0]] * 7  # type: ignore[operator]


def test_the_vanilla_adapter_starts_with_hes_variance(backbone: Backbone) -> None:
    graft = VanillaAdapter(VanillaAdapterConfig(width=INNER), backbone)
    assert deviation(graft, "w_i") == pytest.approx(math.sqrt(2 / D), rel=0.05)


@pytest.mark.parametrize(("scale", "rank"), [(1.0, 3), (2.5, 8)])
def test_lora_multiplies_its_factors_by_alpha_over_rank(backbone: Backbone, scale: float, rank: int) -> None:
    """The output of one Linear is W x + scale B A x, at every rank."""
    graft = LoRABaseline(LoRABaselineConfig(rank=rank, scale=scale), backbone)
    x = torch.randn(3, D)
    linear = backbone.model.get_submodule("model.layers.1.mlp.up_proj")
    bare = linear(x).detach()
    with GraftedModel(backbone, {"graft": graft}) as model, torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.normal_(0, 0.2)
        tensors = {name: tensor.clone() for name, tensor in graft.tensors().items()}
        a = tensors["model.model.layers.1.mlp.up_proj.lora_A.weight"]
        b = tensors["model.model.layers.1.mlp.up_proj.lora_B.weight"]
        expected = bare + scale * x @ a.T @ b.T
        actual = model.model.get_submodule("model.layers.1.mlp.up_proj")(x)
        assert a.shape == (rank, D)
        model(tiny_ids())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # two orders of float32 products


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_capacity_is_a_share_of_the_backbones_weights(family: str) -> None:
    """All matrices of the adapters together, within the rounding of the width; GPT-2 has no gated linear unit."""
    host = Backbone.wrap(tiny_model(family), tiny_tokenizer())
    graft = NeutralResidues(NeutralResiduesConfig(capacity=0.5, gate="none"), host)
    weights = sum(parameter.numel() for parameter in host.model.parameters())
    assert sum(parameter.numel() for parameter in graft.parameters()) == pytest.approx(0.5 * weights, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loras_capacity_is_a_share_of_the_backbones_weights(family: str) -> None:
    host = Backbone.wrap(tiny_model(family), tiny_tokenizer())
    weights = sum(parameter.numel() for parameter in host.model.parameters())
    with GraftedModel(host, {"graft": LoRABaseline(LoRABaselineConfig(capacity=0.5), host)}) as model:
        factors = sum(parameter.numel() for parameter in model.trainable_parameters().values())
    assert factors == pytest.approx(0.5 * weights, rel=0.05)
