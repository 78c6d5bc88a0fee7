"""Passes over the new text instead of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftlm.errors import RecipeError
from graftlm.runs.recipe import Recipe, run_recipe
from graftlm.training.config import TrainingConfig


def recipe_of(folder: Path, backbone: Path, training: dict[str, Any], **data: Any) -> Recipe:
    """Return a recipe whose new text fills ten rows of eight tokens."""
    text = folder / "new.jsonl"
    text.write_text(
        "".join(json.dumps({"text": "a b c d e f g h i j " * 8}) + "\n" for _ in range(2)), encoding="utf-8"
    )
    values = {
        "backbone": {"name": str(backbone)},
        "graft": {"kind": "lora", "capacity": 0.1},
        "data": {"new": [{"path": str(text)}], "replay_fraction": 0, "length": 8, **data},
        "training": training,
        "evaluation": {"own_tokens": 0, "decode_prompts": 0},
    }
    return Recipe.parse(values)


def steps_of(recipe: Recipe, folder: Path) -> int:
    run_recipe(recipe, folder / "out", progress=False)
    manifest = json.loads((folder / "out" / "graft" / "graft.json").read_text(encoding="utf-8"))
    return manifest["training"]["steps"]


@pytest.mark.usefixtures("undrawn_figures")
def test_epochs_read_every_new_row_so_many_times(tmp_path: Path, tiny_backbone) -> None:
    backbone = tiny_backbone("llama")
    one = steps_of(recipe_of(tmp_path, backbone, {"epochs": 1, "batch_size": 1}), tmp_path / "one")
    assert one > 5
    three = steps_of(recipe_of(tmp_path, backbone, {"epochs": 3, "batch_size": 2}), tmp_path / "three")
    assert three == -(-3 * one // 2)


@pytest.mark.usefixtures("undrawn_figures")
def test_too_few_steps_are_told_with_the_smallest_number_of_passes_that_is_enough(
    tmp_path: Path, tiny_backbone
) -> None:
    backbone = tiny_backbone("llama")

    def log_of(epochs: float, name: str) -> list[str]:
        lines: list[str] = []
        recipe = recipe_of(tmp_path, backbone, {"epochs": epochs, "batch_size": 4})
        run_recipe(recipe, tmp_path / name, progress=False, log=lines.append)
        return [line for line in lines if "training.epochs" in line]

    (advice,) = log_of(1, "one")
    enough = int(advice.split("training.epochs to ")[1].split()[0])
    assert log_of(enough, "enough") == []
    assert log_of(enough - 1, "fewer") == [advice]


@pytest.mark.usefixtures("undrawn_figures")
def test_old_rows_are_added_to_the_steps(tmp_path: Path, tiny_backbone) -> None:
    backbone = tiny_backbone("llama")
    training = {"epochs": 1, "batch_size": 2}
    alone = steps_of(recipe_of(tmp_path, backbone, training), tmp_path / "alone")
    old = [{"path": str(tmp_path / "new.jsonl")}]
    mixed = recipe_of(tmp_path, backbone, training, old=old, replay_fraction=0.5)
    assert steps_of(mixed, tmp_path / "mixed") == pytest.approx(2 * alone, abs=1)


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("training", [{"epochs": 2, "batch_size": 16}, {"steps": 10, "batch_size": 16}])
def test_sources_that_their_weights_let_be_read_rarely_or_very_often_are_named(
    tmp_path: Path, tiny_backbone, training: dict[str, Any]
) -> None:
    sources = []
    for name, characters, weight in (("often", 10, 1), ("usual", 240, 3), ("rarely", 400, 1)):
        (tmp_path / f"{name}.txt").write_text("abcdefghij" * (characters // 10), encoding="utf-8")
        sources.append({"path": str(tmp_path / f"{name}.txt"), "weight": weight})

    def log_of(name: str, new: list[dict[str, Any]]) -> list[str]:
        lines: list[str] = []
        recipe = recipe_of(tmp_path, tiny_backbone("llama"), training, new=new)
        run_recipe(recipe, tmp_path / name, progress=False, log=lines.append)
        return [line for line in lines if "weights of sources" in line]

    (note,) = log_of("weighted", sources)
    assert note.index("rarely.txt (0.") < note.index("often.txt (")
    assert "usual.txt" not in note
    assert log_of("even", [{"path": source["path"]} for source in sources]) == []


def test_streamed_text_has_no_passes_to_count(tmp_path: Path, tiny_backbone) -> None:
    with pytest.raises(RecipeError) as error:
        recipe_of(tmp_path, tiny_backbone("llama"), {"epochs": 1}, stream=True, boundaries="joined")
    assert "training.epochs" in str(error.value)


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize(("warmup", "noted"), [(2, False), (12, True)])
def test_a_warm_up_as_long_as_the_training_is_said(tmp_path: Path, tiny_backbone, warmup: int, noted: bool) -> None:
    training = {"steps": 4, "batch_size": 1, "warmup_steps": warmup}
    lines: list[str] = []
    run_recipe(
        recipe_of(tmp_path, tiny_backbone("llama"), training), tmp_path / "out", progress=False, log=lines.append
    )
    assert any("training.warmup_steps" in line for line in lines) == noted


def test_a_run_has_either_steps_or_epochs() -> None:
    assert TrainingConfig.parse({"epochs": 2}).has_steps
    assert not TrainingConfig.parse({"steps": 0}).has_steps
    again = TrainingConfig.parse(TrainingConfig.parse({"epochs": 2}).model_dump())
    assert again.epochs == 2
    for values in ({}, {"steps": 3, "epochs": 2}, {"epochs": 0}):
        with pytest.raises(RecipeError):
            TrainingConfig.parse(values)
