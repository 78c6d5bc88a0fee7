"""Rows that continue those of the step before, read by a grafted model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.data import TokenBlocks
from graftlm.errors import RecipeError
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.recipe import Recipe
from graftlm.testing import logits
from graftlm.training import train
from graftlm.training.stateful import StatefulBatches, StatefulModel
from tiny import TOKENS, tiny_ids, tiny_model
from training.toy import GRAFTS, LENGTH, toy_config, weights


def model_of(reach: int = 64) -> StatefulModel:
    torch.manual_seed(0)
    backbone = Backbone.wrap(tiny_model("llama"))
    return StatefulModel(backbone, {"graft": build_graft(graft_config(GRAFTS["memory"] | {"reach": reach}), backbone)})


def batches() -> StatefulBatches:
    tokens = np.random.default_rng(0).integers(4, TOKENS // 4, (20, LENGTH)).astype(np.int32)
    return StatefulBatches(TokenBlocks(tokens, boundaries="joined"), 4)


def test_rows_of_a_stream_are_read_as_one_text() -> None:
    ids = tiny_ids(2, 36)
    with model_of() as model, torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.add_(0.1)
        expected = logits(model.eval(), ids)
        rows = [
            model(part, stream=torch.arange(2), starts=torch.full((2,), number == 0)).logits
            for number, part in enumerate(ids.split(12, 1))
        ]
        torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=1e-4, atol=1e-4)
        again = model(ids[:, :12], stream=torch.arange(2), starts=torch.ones(2, dtype=torch.bool)).logits
        torch.testing.assert_close(again, expected[:, :12], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stop", [3, 4])
def test_a_killed_stream_resumes_bit_for_bit(tmp_path: Path, stop: int) -> None:
    config = toy_config(batch_size=4, micro_batch_size=2, checkpoint_every=1, steps=7, clip=1.0)
    with model_of(reach=30) as model:  # so that a stream of 60 tokens moves its sinks
        train(model, batches(), config, tmp_path / "whole", progress=False)
        expected = {name: tensor.clone() for name, tensor in weights(model).items()}

    class Killed(StatefulBatches):
        def batch(self, step: int):  # type: ignore[no-untyped-def]
            if step == stop:
                raise KeyboardInterrupt
            return super().batch(step)

    killed = Killed.__new__(Killed)
    killed.__dict__.update(vars(batches()))
    with model_of(reach=30) as model, pytest.raises(KeyboardInterrupt):
        train(model, killed, config, tmp_path / "cut", progress=False)
    with model_of(reach=30) as model:
        summary = train(model, batches(), config, tmp_path / "cut", progress=False)
        actual = weights(model)
    assert summary.resumed_from == stop - 1  # A batch is built before the step before it ends.
    assert expected
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("data", [{"boundaries": "separate"}, {"replay_fraction": 0.5}])
def test_streams_have_joined_new_text(data: dict[str, object]) -> None:
    texts = {"new": [{"path": "a.txt"}], "old": [{"path": "b.txt"}], "stream": True}
    values = {"boundaries": "joined", "replay_fraction": 0, **data}
    recipe = {
        "backbone": {"name": "m"},
        "graft": {"kind": "memory", "window": 8, "sinks": 2},
        "data": texts | values,
        "training": {"steps": 1},
    }
    with pytest.raises(RecipeError) as error:
        Recipe.parse(recipe)
    assert "data.stream" in str(error.value)
