"""The strength that validation text chooses is what is measured and saved; test text has no part in the choice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import load_backbone
from graftlm.errors import RecipeError
from graftlm.evaluation import value_of
from graftlm.evaluation.results import Interval
from graftlm.evaluation.strengths import StrengthConfig
from graftlm.runs.recipe import Recipe, run_recipe
from graftlm.store.artifact import load_graft
from runs.test_recipe import NEW, OLD, values


def recipe_with(tmp_path: Path, backbone: Path, out: str, **strength: Any) -> Recipe:
    for name, text in {"old": OLD, "new": NEW}.items():
        (tmp_path / f"{name}-validation.txt").write_text(text * 6, encoding="utf-8")
    sources = {name: [{"path": str(tmp_path / f"{name}-validation.txt")}] for name in ("old", "new")}
    changed = values(tmp_path, backbone, graft={"kind": "lora", "rank": 2}, out=str(tmp_path / out))
    changed["data"] |= {"replay_fraction": 0}
    changed["evaluation"] = {"decode_prompts": 0, "own_tokens": 0}
    if strength:
        changed["evaluation"] |= {"strength": sources | strength}
    return Recipe.parse(changed)


def weights(folder: Path, backbone: Path) -> dict[str, torch.Tensor]:
    return copy.deepcopy(load_graft(folder / "graft", load_backbone(str(backbone))).tensors())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("undrawn_figures")
def test_the_chosen_strength_is_measured_and_saved(tmp_path: Path, tiny_backbone) -> None:
    folder = tiny_backbone("llama")
    whole = run_recipe(recipe_with(tmp_path, folder, "whole"), progress=False, log=lambda _: None)
    recipe = recipe_with(tmp_path, folder, "half", values=[0.5, 1.0], budget=0.0)
    learned = value_of(whole.row("lora").metrics["learned"])
    half = run_recipe(recipe, progress=False, log=lambda _: None)
    row = half.row("lora").metrics
    points: Any = half.details["validated_strengths"]
    by_strength = {point["strength"]: point for point in points["lora"]}
    assert by_strength[0.5]["forgotten"] < by_strength[1.0]["forgotten"]
    assert row["strength"] == 0.5
    assert 0 < value_of(row["learned"]) < learned
    full, moved = (weights(tmp_path / out, folder) for out in ("whole", "half"))
    for name, tensor in full.items():
        if name.endswith("lora_B.weight"):  # it starts at zero
            torch.testing.assert_close(moved[name], tensor / 2)


@pytest.mark.usefixtures("undrawn_figures")
def test_test_text_has_no_part_in_the_choice(tmp_path: Path, tiny_backbone) -> None:
    folder = tiny_backbone("llama")
    results = run_recipe(recipe_with(tmp_path, folder, "a", values=[0.5, 1.0]), progress=False, log=lambda _: None)
    for name in ("old", "new"):
        (tmp_path / f"{name}-test.txt").write_text("lune " * 80, encoding="utf-8")
    recipe = recipe_with(tmp_path, folder, "b", values=[0.5, 1.0])
    for name in ("old", "new"):  # `values` wrote the files again
        (tmp_path / f"{name}-test.txt").write_text("lune " * 80, encoding="utf-8")
    others = run_recipe(recipe, progress=False, log=lambda _: None)
    assert others.details["validated_strengths"] == results.details["validated_strengths"]
    assert others.row("lora").metrics["learned"] != results.row("lora").metrics["learned"]


def points(**losses: tuple[float, float]) -> dict[float, dict[str, Interval]]:
    return {
        float(name[1:]) / 100: {
            key: Interval(mean=value, low=value, high=value)
            for key, value in zip(("learned", "forgotten"), pair, strict=True)
        }
        for name, pair in losses.items()
    }


CURVE = points(s25=(0.4, 0.01), s50=(0.7, 0.1), s75=(0.9, 0.5), s100=(1.0, 0.8))


@pytest.mark.parametrize(
    ("budget", "expected"), [(None, 0.5), (0.0, 0.25), (0.05, 0.25), (0.1, 0.5), (0.6, 0.75), (2.0, 1.0)]
)
def test_most_is_learned_within_the_budget(budget: float | None, expected: float) -> None:
    source = [{"path": "text.txt"}]
    config = StrengthConfig.parse({"old": source, "new": source, "budget": budget})
    assert config.choose(CURVE) == expected


def test_what_does_not_fit_a_choice_is_refused(tmp_path: Path, tiny_backbone) -> None:
    recipe = recipe_with(tmp_path, tiny_backbone("llama"), "run", values=[0.5]).model_dump(mode="json")
    changes: list[tuple[str, dict[str, Any]]] = [
        ("evaluation", {"strengths": [0.5]}),
        ("training", {"sharded": True}),
        ("training", {"steps": 0}),
    ]
    for section, change in changes:
        with pytest.raises(RecipeError) as error:
            Recipe.parse(recipe | {section: recipe[section] | change})
        assert "strength" in str(error.value)
    with pytest.raises(RecipeError) as error:
        Recipe.parse(recipe).frontier_runs()
    assert "strength" in str(error.value)


def test_keys_of_earlier_runs_stay(tmp_path: Path, tiny_backbone) -> None:
    settings = recipe_with(tmp_path, tiny_backbone("llama"), "run").run().settings()
    assert "strength" not in settings["evaluation"]
    assert "matched" not in settings
    assert not {"new_objective", "anchor", "rewrite"} & settings["data"].keys()
