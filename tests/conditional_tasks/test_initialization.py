"""The initialisation of conditional modules: V has variance 1/d, U is zero, and task embeddings are N(0, I)."""

from __future__ import annotations

import math

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafts.conditional_tasks.method import ConditionalTasks, ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.modules import Bottleneck
from tiny import tiny_model, tiny_tokenizer


def test_bottlenecks_start_with_variance_1_over_d_and_without_output() -> None:
    torch.manual_seed(0)
    block = Bottleneck(width=400, inner=32, task_width=4, activation="gelu")
    assert float(block.down.weight.detach().std()) == pytest.approx(1 / math.sqrt(400), rel=0.05)
    assert not block.up.weight.count_nonzero()


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
