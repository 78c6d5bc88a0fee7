"""Recipes of tasks, end to end on a tiny encoder: what is written, read back, resumed and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graftlm.errors import RecipeError
from graftlm.evaluation import value_of
from graftlm.generation.predict import evaluate_rows, load_task_graft
from graftlm.runs.recipe import Recipe, compare_recipe, load_recipe, recipe_schema, run_recipe
from graftlm.runs.task_run import TaskRecipe
from graftlm.store.manifest import read_manifest
from tiny import BackboneFolder
from training.tasks import task_recipe, tasks_of, write_rows

TESTS = Path(__file__).parents[1]


def run(values: dict[str, Any], said: list[str] | None = None) -> Any:
    return run_recipe(TaskRecipe.parse(values), progress=False, log=(said if said is not None else []).append)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> tuple[Path, Any, list[str]]:
    folder, said = tmp_path_factory.mktemp("tasks"), []
    results = run(task_recipe(folder, tiny_backbone("bert")), said)
    return folder, results, said


def test_a_run_leaves_graft_reports_and_recipe(trained: tuple[Path, Any, list[str]]) -> None:
    folder, results, said = trained
    left = {path.name for path in (folder / "run").iterdir()}
    assert {"recipe.yaml", "results.json", "report.md", "sampler.json", "graft", "checkpoints"} <= left
    assert load_recipe(folder / "run/recipe.yaml") == TaskRecipe.from_yaml(folder / "run/recipe.yaml")
    (row,) = results.rows
    scores = [value_of(row.metrics[name]) for name in tasks_of(folder / "rows")]
    assert row.metrics["average"] == pytest.approx(sum(scores) / 6)
    mean = sum(scores) / 6
    assert row.metrics["task_sigma"] == pytest.approx((sum((s - mean) ** 2 for s in scores) / 6) ** 0.5)
    report = json.loads((folder / "run/sampler.json").read_text())
    assert [sum(step.values()) for step in report["steps"]] == [6] * 4
    assert row.metrics["data_share"] == report["data_share"] < 1
    assert 0 < row.metrics["trained_parameters_ratio"] < row.metrics["total_parameters_ratio"]
    assert any("are cut at their end" in one for one in said)
    shared = [one for one in said if "inputs of a training row" in one]
    assert len(shared) == len(tasks_of(folder / "rows")), "the tasks are measured on what they learn from"
    assert read_manifest(folder / "run/graft").backbone.kind == "encoder"


def test_a_finished_run_is_read_back(trained: tuple[Path, Any, list[str]], tiny_backbone: BackboneFolder) -> None:
    folder, results, _ = trained
    written = (folder / "run/graft/graft.safetensors").stat().st_mtime_ns
    again = run(task_recipe(folder, tiny_backbone("bert")))
    assert again.rows == results.rows
    assert (folder / "run/graft/graft.safetensors").stat().st_mtime_ns == written


def test_the_graft_measures_the_same_when_it_is_loaded(trained: tuple[Path, Any, list[str]]) -> None:
    folder, results, _ = trained
    files = {name: task["test"] for name, task in tasks_of(folder / "rows").items()}
    loaded = evaluate_rows(load_task_graft(folder / "run/graft", device="cpu"), files)
    for name in (*files, "average", "task_sigma"):
        assert value_of(loaded.rows[0].metrics[name]) == pytest.approx(
            value_of(results.rows[0].metrics[name]), abs=1e-3
        )


@pytest.mark.slow
def test_a_new_task_leaves_the_old_ones_to_the_bit(
    trained: tuple[Path, Any, list[str]], tiny_backbone: BackboneFolder, tmp_path: Path
) -> None:
    folder, _, _ = trained
    write_rows(tmp_path / "rows", 12)
    task = {"newer": tasks_of(tmp_path / "rows")["topic"]}
    graft = {"kind": "conditional-tasks", "extends": str(folder / "run/graft")}
    values = task_recipe(tmp_path, tiny_backbone("bert"), tasks=task, graft=graft, sampler={})
    said: list[str] = []
    results = run(values, said)
    assert set(results.rows[0].metrics) >= {"newer", "average"}
    assert any(one.startswith("The task newer starts from") for one in said)
    old, new = (load_file(path / "run/graft/graft.safetensors") for path in (folder, tmp_path))
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())
    assert {name for name in new if name not in old}
    files = {name: one["test"] for name, one in tasks_of(folder / "rows").items()}
    before, after = (evaluate_rows(load_task_graft(f / "run/graft", device="cpu"), files) for f in (folder, tmp_path))
    assert before.rows == after.rows


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    trained: tuple[Path, Any, list[str]], tiny_backbone: BackboneFolder, tmp_path: Path
) -> None:
    values = task_recipe(tmp_path, tiny_backbone("bert"))
    training = values["training"] | {"steps": 8, "checkpoint_every": 1, "schedule": "constant"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values | {"training": training}))
    code = f"from graftlm import *; run_recipe(load_recipe({str(tmp_path / 'recipe.yaml')!r}), progress=False)"
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent / "src")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    history = tmp_path / "run/history.jsonl"
    while process.poll() is None and (not history.exists() or history.read_bytes().count(b"\n") < 2):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    run(values | {"training": training})
    whole = task_recipe(tmp_path, tiny_backbone("bert"), out=str(tmp_path / "whole"), training=training)
    run(whole)
    ours, theirs = (load_file(tmp_path / name / "graft/graft.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for name in ("sampler.json", "history.jsonl"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"graft": {"kind": "adapter"}}, ["kind adapter", "heads"]),
        ({"tasks": {}}, ["tasks"]),
        ({"tasks": {"a.b": {"type": "regression", "train": "a.csv"}}}, ["task name 'a.b'"]),
        ({"tasks": {"average": {"type": "regression", "train": "a.csv"}}}, ["task name average"]),
        (
            {"graft": {"kind": "conditional-tasks", "tasks": {"old": {"type": "regression"}}}},
            ["graft section", "task old"],
        ),
    ],
)
def test_recipes_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        TaskRecipe.parse(task_recipe(tmp_path, "bert", **changes))
    assert all(value in str(error.value) for value in named), error.value


def test_two_tasks_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("tasks:\n  one: {type: regression, train: a.csv}\n  one: {type: regression, train: b.csv}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert "line 3" in str(error.value)
    assert "one" in str(error.value)


def test_windows_begin_less_than_a_row_apart(tmp_path: Path) -> None:
    values = task_recipe(tmp_path, "nowhere")
    values["tasks"]["where"]["stride"] = values["length"]
    with pytest.raises(RecipeError, match=r"tasks\.where\.stride"):
        TaskRecipe.parse(values)


def test_heads_need_tasks_and_rows_that_fit_the_model(tmp_path: Path, tiny_backbone: BackboneFolder) -> None:
    values = task_recipe(tmp_path, tiny_backbone("bert"))
    with pytest.raises(RecipeError) as error:
        run(values | {"length": 600})
    assert "length is 600" in str(error.value)
    assert "512" in str(error.value)
    with pytest.raises(RecipeError) as error:
        compare_recipe(TaskRecipe.parse(values), progress=False)
    assert "graft compare" in str(error.value)
    text = {"backbone": values["backbone"], "graft": values["graft"], "training": {"steps": 0}}
    with pytest.raises(RecipeError) as error:
        Recipe.parse(text)
    assert "tasks" in str(error.value)


def test_the_schema_knows_recipes_of_tasks() -> None:
    assert any("tasks" in one["properties"] and "sampler" in one["properties"] for one in recipe_schema()["oneOf"])
