"""Benchmarks in recipes: the bare backbone is measured once for all rows and runs, and changes are paired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmark_files as files
from graftlm.errors import EvaluationError, RecipeError
from graftlm.evaluation import Interval, Results
from graftlm.runs.recipe import Recipe, compare_recipe, run_recipe
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    folder = tmp_path / "backbone"
    tiny_model("llama", max_position_embeddings=512).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def recipe_of(tmp_path: Path, backbone: Path, evaluation: dict[str, Any], **changes: Any) -> Recipe:
    (tmp_path / "new.txt").write_text("le vieux jardin dormait sous la lune blanche. " * 60, encoding="utf-8")
    values: dict[str, Any] = {
        "backbone": {"name": str(backbone), "device": "cpu"},
        "data": {"new": [{"path": str(tmp_path / "new.txt")}], "length": 16, "replay_fraction": 0},
        "training": {"steps": 4, "batch_size": 4, "learning_rate": 0.05},
        "evaluation": {"decode_prompts": 0, "own_tokens": 0} | evaluation,
        "methods": {
            "lora": {"graft": {"kind": "lora", "rank": 2}},
            "full": {"graft": {"kind": "finetune"}},
        },
        "out": str(tmp_path / "run"),
    }
    return Recipe.parse(values | changes)


def values_of(results: Results, row: str, label: str) -> np.ndarray:
    details: Any = results.details["harness"]
    return np.array(details[row][label]["values"])


def test_a_comparison_measures_the_backbone_once_and_pairs_all_rows(tmp_path: Path, backbone: Path) -> None:
    data = tmp_path / "eval"
    files.write_arc(data, 10)
    task = {"task": "arc_easy", "data": str(data)}
    recipe = recipe_of(tmp_path, backbone, {"harness": [task]})
    lines: list[str] = []
    results = compare_recipe(recipe, progress=False, log=lines.append)
    assert [row.id for row in results.rows] == ["backbone", "lora", "full"]
    assert not any(row.label == "arc_easy" for row in results.rows)
    assert len({row.label for row in results.rows}) == 3
    assert sum("arc_easy" in line for line in lines) == 1, "the bare backbone is measured once"
    bare = values_of(results, "backbone", "arc_easy")
    assert any((values_of(results, row, "arc_easy") != bare).any() for row in ("lora", "full"))
    for row in ("lora", "full"):
        after = values_of(results, row, "arc_easy")
        metrics = results.row(row).metrics
        assert isinstance(metrics["arc_easy_change"], Interval)
        assert metrics["arc_easy_change"].mean == pytest.approx((after - bare).mean())
    (difference,) = results.details["method_differences"]  # type: ignore[misc]
    expected = values_of(results, "lora", "arc_easy") - values_of(results, "full", "arc_easy")
    assert difference["metrics"]["arc_easy"]["mean"] == pytest.approx(expected.mean())  # type: ignore[index, call-overload]
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert "arc easy change" in report

    more = {**json.loads(recipe.model_dump_json()), "methods": {"small": {"graft": {"kind": "lora", "rank": 1}}}}
    lines.clear()
    again = compare_recipe(Recipe.parse(more), progress=False, log=lines.append)
    assert not any("arc_easy" in line for line in lines), "a later run reads the results back"
    assert again.row("backbone").metrics["arc_easy"] == results.row("backbone").metrics["arc_easy"]

    files.write_arc(data, 9)
    compare_recipe(Recipe.parse(more), progress=False, log=lines.append)
    assert any("arc_easy" in line for line in lines), "other data is another measurement"


def test_the_preset_is_its_tasks_and_its_data_is_part_of_the_key(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = files.write_retention(tmp_path / "first")
    second = files.write_retention(tmp_path / "second")
    recipe = recipe_of(tmp_path, backbone, {"preset": "retention", "eval_data": str(first)})
    moved = recipe_of(tmp_path, backbone, {"preset": "retention", "eval_data": str(second)})
    bare = recipe_of(tmp_path, backbone, {})

    def key(of: Recipe) -> str:
        run = of.comparison()[0]
        return run.key({each.id: "" for each in run.needs()})

    assert key(recipe) == key(moved), "equal data at another place"
    assert key(recipe) != key(bare)
    monkeypatch.setenv("GRAFTLM_EVAL_DATA", str(first))
    assert key(recipe_of(tmp_path, backbone, {"preset": "retention"})) == key(recipe)
    files.write_nq_open(tmp_path / "second", 21)
    assert key(recipe) != key(moved)
    new_keys = {"harness", "preset", "eval_data", "confirm_unsafe_code"}
    assert new_keys.isdisjoint(bare.comparison()[0].settings()["evaluation"]), "earlier runs keep their keys"


def test_the_key_has_the_file_of_the_shots(tmp_path: Path, backbone: Path) -> None:
    data = tmp_path / "eval"
    files.write_arc(data, 10)
    (file,) = data.rglob("test.json")
    train = file.with_name("train.json")
    train.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    recipe = recipe_of(tmp_path, backbone, {"harness": [{"task": "arc_easy", "data": str(file), "shots": 1}]})
    run = recipe.comparison()[0]
    (bare,) = run.needs()

    def keys() -> tuple[str, str]:
        return run.key({bare.id: ""}), bare.key()

    before = keys()
    assert keys() == before
    rows = json.loads(train.read_text(encoding="utf-8"))
    train.write_text(json.dumps(rows[1:]), encoding="utf-8")
    after = keys()
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_train_measures_the_preset(tmp_path: Path, backbone: Path) -> None:
    data = files.write_retention(tmp_path / "eval")
    graft = {"kind": "lora", "rank": 2}
    recipe = recipe_of(tmp_path, backbone, {"preset": "retention", "eval_data": str(data)}, graft=graft, methods={})
    results = run_recipe(recipe, progress=False, log=lambda _: None)
    for label in ("ifeval", "bbh", "nq_open"):
        assert label in results.row("backbone").metrics
        assert {label, f"{label}_change"} <= results.row("lora").metrics.keys()


def test_what_is_wrong_with_a_benchmark_is_known_before_anything_trains(tmp_path: Path, backbone: Path) -> None:
    files.write_nq_open(tmp_path, 4)
    task = {"task": "nq_open", "data": str(tmp_path), "shots": 9}
    lines: list[str] = []
    with pytest.raises(EvaluationError) as caught:
        compare_recipe(recipe_of(tmp_path, backbone, {"harness": [task]}), progress=False, log=lines.append)
    assert "shots" in str(caught.value)
    assert not lines
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, backbone, {"harness": [task, task]})
    assert "nq_open" in str(caught.value)
