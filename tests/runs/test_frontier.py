"""Weights moved back to their start, and the comparison at equal learning that they make possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import load_backbone
from graftlm.errors import RecipeError
from graftlm.evaluation import value_of
from graftlm.evaluation.evaluator import BackboneEvaluator, load_tests
from graftlm.evaluation.strengths import weights_moved_back
from graftlm.grafted.model import GraftedModel
from graftlm.runs.recipe import Recipe, compare_recipe, run_recipe
from graftlm.store.artifact import load_graft
from tests.runs.test_recipe import values


def silent(line: str) -> None:
    pass


def strengths_of(results: Any, row: str) -> list[dict[str, Any]]:
    return results.details["strengths"][row]


def test_strengths_go_from_the_backbone_to_the_trained_weights(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"), graft={"kind": "finetune"})
    changed["evaluation"] |= {"strengths": [0.5, 0.0], "own_tokens": 100}
    recipe = Recipe.parse(changed)
    results = run_recipe(recipe, progress=False, log=silent)
    points = strengths_of(results, "finetune")
    assert [point["strength"] for point in points] == [0.0, 0.5, 1.0]
    assert all("windows" not in point for point in points)
    assert [row.id for row in results.rows] == ["backbone", "finetune", "finetune-strength-0", "finetune-strength-0.5"]
    assert results.rows[3].metrics["learned"].model_dump() == points[1]["metrics"]["learned"]  # type: ignore[union-attr]
    for name in ("learned", "forgotten", "own_kl"):
        assert points[0]["metrics"][name]["mean"] == pytest.approx(0, abs=1e-5), "strength 0 is the backbone"
        trained = value_of(results.row("finetune").metrics[name])
        assert points[2]["metrics"][name]["mean"] == pytest.approx(trained, abs=1e-6)
    # At half the way the weights are the mean of the two models' (WiSE-FT).
    backbone = load_backbone(recipe.backbone.name)
    tuned = load_graft(tmp_path / "run" / "graft", backbone)
    originals = dict(backbone.model.named_parameters())
    with GraftedModel(backbone, {"graft": tuned}) as model, torch.no_grad():
        for name, weight in model.model.named_parameters():
            weight.copy_((weight + originals[name]) / 2)
        evaluator = BackboneEvaluator(
            load_backbone(recipe.backbone.name), load_tests(recipe.data.test), recipe.evaluation, 16
        )
        measured = evaluator.measure(model, "half", "half").row.metrics
    for name in ("learned", "forgotten"):
        assert points[1]["metrics"][name]["mean"] == pytest.approx(value_of(measured[name]), abs=1e-4)


def test_moved_weights_are_put_back_also_after_an_error() -> None:
    weight, start = torch.nn.Parameter(torch.tensor([1.0, 3.0])), torch.tensor([0.0, 1.0])
    before = weight.detach().clone()
    moved = []

    def fail_at_a_quarter() -> None:
        with weights_moved_back({"w": weight}, {"w": start}, 0.25):
            moved.append(weight.detach().clone())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_at_a_quarter()
    torch.testing.assert_close(moved[0], torch.tensor([0.25, 1.5]))
    torch.testing.assert_close(weight.detach(), before)


@pytest.mark.slow
def test_a_frontier_sweeps_every_method_alike(tmp_path: Path, tiny_backbone) -> None:
    methods = {
        "lora": {"graft": {"kind": "lora", "rank": 2}, "training": {"learning_rate": 0.02}},
        "neutral": {"graft": {"kind": "neutral-residues"}},
    }
    changed = values(tmp_path, tiny_backbone("llama"), methods=methods, frontier={"rates": [0.5], "strengths": [0.5]})
    del changed["graft"]
    changed["evaluation"] |= {"own_tokens": 100, "decode_prompts": 0}
    results = compare_recipe(Recipe.parse(changed), frontier=True, progress=False, log=silent)
    assert [row.id for row in results.rows] == ["backbone", "lora", "lora-rate-0.01", "neutral", "neutral-rate-0.005"]
    level = value_of(results.row("lora").metrics["equal_learned"])
    reach = [
        max(value_of(row.metrics["learned"]) for row in results.rows if row.id.startswith(name)) for name in methods
    ]
    assert level == pytest.approx(0.9 * min(reach), rel=0.05), "a path may turn back before its end"
    for name in methods:
        metrics = results.row(name).metrics
        assert metrics["forgotten_at_equal"].low <= metrics["forgotten_at_equal"].mean  # type: ignore[union-attr]
        assert value_of(metrics["own_kl_at_equal"]) > 0
        assert f"{name}-rate" not in metrics
    curves: Any = results.details["frontier"]
    assert {len(path) for path in curves["forgotten"]["lora"]} == {3}, "the backbone, half of the way, all of it"
    ends = [path[-1][0] for path in curves["own_kl"]["neutral"]]
    rows = [results.row(name) for name in ("neutral", "neutral-rate-0.005")]
    assert ends == pytest.approx([value_of(row.metrics["learned"]) for row in rows], abs=1e-6)
    for name in ("frontier-forgotten", "frontier-own-kl"):
        assert (tmp_path / "run" / f"{name}.png").exists()


@pytest.mark.usefixtures("undrawn_figures")
def test_a_method_that_does_not_train_has_one_point(tmp_path: Path, tiny_backbone) -> None:
    still = {"graft": {"kind": "lora", "rank": 2}, "training": {"steps": 0}}
    methods = {"lora": {"graft": {"kind": "lora", "rank": 2}}, "still": still}
    changed = values(tmp_path, tiny_backbone("llama"), methods=methods, frontier={"rates": [], "strengths": [0.5]})
    del changed["graft"]
    changed["evaluation"] |= {"own_tokens": 0, "decode_prompts": 0}
    lines: list[str] = []
    results = compare_recipe(Recipe.parse(changed), frontier=True, progress=False, log=lines.append)
    assert [point["strength"] for point in strengths_of(results, "still")] == [1.0]
    assert "equal_learned" not in results.row("lora").metrics
    assert any("learned nothing" in line for line in lines)
    assert not (tmp_path / "run" / "frontier-forgotten.png").exists()


@pytest.mark.slow
def test_without_strengths_the_trained_weights_are_the_only_point(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"), frontier={"rates": [], "strengths": []})
    changed["evaluation"] |= {"own_tokens": 0, "decode_prompts": 0}
    results = compare_recipe(Recipe.parse(changed), frontier=True, progress=False, log=silent)
    trained = [row.id for row in results.rows if row.id != "backbone"]
    assert trained
    assert all([point["strength"] for point in strengths_of(results, row)] == [1.0] for row in trained)


def test_a_frontier_that_nothing_measures_is_refused(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"))
    del changed["data"]["test"]["old"]
    with pytest.raises(RecipeError) as error:
        compare_recipe(Recipe.parse(changed), frontier=True, progress=False, log=silent)
    assert "data.test" in str(error.value)


def test_strengths_and_sharded_weights_are_refused_together(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"))
    changed["evaluation"] |= {"strengths": [0.5]}
    changed["training"] |= {"sharded": True}
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert "strengths" in str(error.value)
    assert "sharded" in str(error.value)
