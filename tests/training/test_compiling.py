"""Compiled training takes the same steps as eager training, in one graph, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from graftlm.errors import TrainingError
from graftlm.training import train
from graftlm.training.history import read_history
from graftlm.training.language_model import LanguageModel
from tiny import tiny_model
from training.toy import GRAFTS, toy_config, toy_mixture, toy_model, weights


def trained(
    build: Callable[[], Any], out: Path, **changes: Any
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    model = build()
    summary = train(model, toy_mixture(), toy_config(steps=3, **changes), out, progress=False)
    return read_history(summary.history), weights(model)


def check_same(build: Callable[[], Any], folder: Path, *, may_break: bool = False) -> None:
    eager, expected = trained(build, folder / "eager")
    torch.compiler.reset()
    counters.clear()
    compiled, actual = trained(build, folder / "compiled", compile=True)
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    assert may_break or not counters["graph_break"]
    for one, two in zip(eager, compiled, strict=True):
        for key in ("loss", "auxiliary_loss", "gradient_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*GRAFTS, "composition"])
def test_compiled_steps_are_those_of_eager_training(kind: str, tmp_path: Path) -> None:
    # Experts are chosen row by row, in spans whose number depends on the data.
    check_same(lambda: toy_model(kind), tmp_path, may_break=kind == "two-experts")


@pytest.mark.slow
def test_all_weights_of_a_model_can_be_trained_compiled(tmp_path: Path) -> None:
    check_same(lambda: LanguageModel(tiny_model("llama")), tmp_path)


def test_a_failure_of_the_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()

    def broken(self: nn.Module) -> None:
        def fail(*_: object, **__: object) -> None:
            raise BackendCompilerFailed(fail, RuntimeError("no compiler"), None)

        self._compiled_call_impl = fail

    monkeypatch.setattr(nn.Module, "compile", broken)
    with pytest.raises(TrainingError) as error:
        train(model, toy_mixture(), toy_config(compile=True), tmp_path, progress=False)
    assert "training.compile" in str(error.value)
    assert model.body._compiled_call_impl is None
