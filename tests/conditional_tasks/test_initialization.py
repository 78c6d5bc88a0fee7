"""The initialisation of conditional modules: V has variance 1/d, U is zero, and task embeddings are N(0, I)."""

from __future__ import annotations

import math

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafts.conditional_tasks.method import ConditionalTasks, ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.modules import Bottleneck, RowTasks
from tiny import tiny_model, tiny_tokenizer


def test_bottlenecks_start_with_variance_1_over_d_and_without_output() -> None:
    torch.manual_seed(0)
    block = Bottleneck(width=400, inner=32, task_width=4, activation="gelu")
    assert float(block.down.weight.detach().std()) == pytest.approx(1 / math.sqrt(400), rel=0.05)
    assert not block.up.weight.count_nonzero()


def test_a_bottleneck_s_norm_starts_as_a_plain_layer_norm() -> None:
    norm = Bottleneck(width=6, inner=3, task_width=4, activation="gelu", has_norm=True).norm
    assert norm is not None
    x_BTD = torch.randn(2, 3, 6) * 5 + 1
    tasks = RowTasks(torch.tensor([0]), torch.randn(1, 4), None)
    centred = x_BTD - x_BTD.mean(-1, keepdim=True)
    expected = centred / centred.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x_BTD, tasks), expected, rtol=1e-4, atol=1e-4)


def test_without_its_norm_a_config_is_stored_as_before() -> None:
    config = ConditionalTasksConfig(bottleneck="base")
    assert "bottleneck_norm" not in config.model_dump()
    assert ConditionalTasksConfig.parse(config.model_dump()) == config
    assert ConditionalTasksConfig(bottleneck_norm=True).model_dump()["bottleneck_norm"] is True
    assert ConditionalTasksConfig(frozen=0.5).to_yaml() == "kind: conditional-tasks\nfrozen: 0.5\n"


def test_task_embeddings_point_anywhere_at_length_1() -> None:
    """Directions of N(0, I): of the length sqrt(Z) that N(0, I) has, FiLM's steps would be as much larger."""
    torch.manual_seed(0)
    tasks = {"topics": {"type": "classification", "labels": ["sport", "politics"]}}
    config = ConditionalTasksConfig.model_validate({"tasks": tasks, "task_width": 2000})
    graft = ConditionalTasks(config, Backbone.wrap(tiny_model("bert"), tiny_tokenizer()))
    (embedding,) = graft._embeddings()
    assert float(embedding.detach().norm()) == pytest.approx(1)
    assert float(embedding.detach().std()) == pytest.approx(1 / math.sqrt(2000), rel=0.1)
    assert float(embedding.detach().mean()) == pytest.approx(0, abs=0.1 / math.sqrt(2000))
