"""Recipes with `backbone.add_tokens`: what is trained, measured and written, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftlm import backbone_of, load_graft
from graftlm.data import Document
from graftlm.errors import GraftError, RecipeError
from graftlm.evaluation import value_of
from graftlm.generation.evaluate import evaluate_graft
from graftlm.runs.recipe import Recipe, parse_recipe, run_recipe
from graftlm.store.manifest import read_manifest
from runs.test_recipe import NEW, OLD, values

FORMS: dict[str, Any] = {"listed": [" vieux", " jardin", " dormait", " lune blanche"], "learned": {"learn": 12}}


def with_tokens(tmp_path: Path, backbone: Path, tokens: Any, **changes: Any) -> dict[str, Any]:
    changed = values(tmp_path, backbone, **changes)
    changed["backbone"]["add_tokens"] = tokens
    return changed


@pytest.mark.parametrize("form", FORMS)
def test_a_run_trains_measures_and_writes_the_rows(form: str, tmp_path: Path, tiny_backbone) -> None:
    changed = with_tokens(tmp_path, tiny_backbone("llama"), FORMS[form])
    changed["training"]["steps"] = 12
    recipe = Recipe.parse(changed)
    results = run_recipe(recipe, progress=False, log=lambda _: None)
    assert Recipe.from_yaml(tmp_path / "run" / "recipe.yaml") == recipe
    metrics = results.row("neutral-residues").metrics
    bare = results.row("backbone").metrics
    assert value_of(metrics["learned"]) == pytest.approx(value_of(bare["new"]) - value_of(metrics["new"]), abs=1e-6)
    assert value_of(metrics["learned"]) > 0.1
    assert value_of(metrics["forgotten"]) < 5
    assert value_of(metrics["own_kl"]) > 0
    graft = tmp_path / "run" / "graft"
    recorded = read_manifest(graft).added_tokens
    assert recorded is not None
    assert len(recorded.texts) == len(FORMS[form]) if form == "listed" else 12

    loaded = backbone_of(graft)
    assert loaded.extended is not None
    tokenizer = loaded.need_tokenizer()
    new, old = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (NEW, OLD))
    plain = loaded.without_tokens.need_tokenizer()
    assert max(new) >= loaded.extended.first
    assert loaded.extended.spell(old) == plain(OLD, add_special_tokens=False)["input_ids"]
    assert load_graft(graft, loaded).token_rows is not None


def test_without_training_a_listed_token_costs_what_its_start_predicts(tmp_path: Path, tiny_backbone) -> None:
    """The bare backbone reads the old tokens that spell the new ones, so its row does not depend on the tokens."""
    rows = []
    for tokens in (None, FORMS["learned"]):
        changed = values(tmp_path, tiny_backbone("llama"), out=str(tmp_path / f"run-{tokens is None}"))
        changed["backbone"]["add_tokens"] = tokens
        changed["evaluation"]["length"] = 400  # one window, whose tokens are the same
        changed["training"]["steps"] = 1
        rows.append(run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None).row("backbone").metrics)
    for name in ("new", "old", "new_bpb", "old_bpb"):
        assert value_of(rows[0][name]) == pytest.approx(value_of(rows[1][name]), rel=1e-4)


def test_eval_reads_the_tokens(tmp_path: Path, tiny_backbone) -> None:
    run_recipe(
        Recipe.parse(with_tokens(tmp_path, tiny_backbone("llama"), FORMS["learned"])),
        progress=False,
        log=lambda _: None,
    )
    results = evaluate_graft(tmp_path / "run" / "graft", texts={"new": [Document(NEW * 8)]}, device="cpu")
    assert value_of(results.row("neutral-residues").metrics["learned"]) > 0


@pytest.mark.parametrize(
    ("tokens", "changes", "key"),
    [
        ([], {}, "add_tokens"),
        ([" a b", " a b"], {}, " a b"),
        ([" "], {}, "whitespace"),
        ([" a b", float("nan")], {}, "add_tokens"),
        ({"learn": 0}, {}, "learn"),
        ({"learn": 10**9}, {}, "learn"),
        ({"learn": 5, "count": 3}, {}, "count"),
        ([" a b"], {"data.old_objective": "distil"}, "distil"),
        ([" a b"], {"training.sharded": True}, "sharded"),
        ({"learn": 5}, {"data.new": [], "training.steps": 0}, "data.new"),
    ],
)
def test_a_recipe_with_tokens_that_can_not_be_added_is_refused(
    tokens: Any, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    changed = with_tokens(tmp_path, tmp_path / "backbone", tokens)
    for path, value in changes.items():
        section, _, name = path.partition(".")
        changed[section][name] = value
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert key in str(error.value)


def test_methods_learn_tokens_from_the_same_text(tmp_path: Path) -> None:
    changed = with_tokens(tmp_path, tmp_path / "backbone", FORMS["learned"])
    old = changed["data"]["old"]
    changed["methods"] = {"one": {"graft": {"kind": "lora"}}, "two": {"graft": {"kind": "lora"}, "data": {"new": old}}}
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert "data.new" in str(error.value)
    changed["backbone"]["add_tokens"] = FORMS["listed"]
    assert len(Recipe.parse(changed).comparison()) == 2


def test_stages_and_tasks_are_refused(tmp_path: Path) -> None:
    changed = with_tokens(tmp_path, tmp_path / "backbone", [" a b"])
    stages = {"one": {"data": {"new": changed["data"].pop("new")}}}
    with pytest.raises(RecipeError) as error:
        parse_recipe({**changed, "stages": stages}, "recipe")
    assert "add_tokens" in str(error.value)
    tasks = {"tone": {"train": "rows.csv", "test": "rows.csv", "type": "classification"}}
    section = {"kind": "conditional-tasks"}
    with pytest.raises(RecipeError) as error:
        parse_recipe(
            {"backbone": changed["backbone"], "graft": section, "tasks": tasks, "training": changed["training"]},
            "recipe",
        )
    assert "add_tokens" in str(error.value)


@pytest.mark.parametrize("tokens", [[" vieux", " fyrtårnet", "<mark>"], [" vieux"], {"learn": 12}])
def test_listed_tokens_that_the_new_rows_do_not_have_are_named(tokens: Any, tmp_path: Path, tiny_backbone) -> None:
    changed = with_tokens(tmp_path, tiny_backbone("llama"), tokens)
    changed["training"]["steps"] = 1
    changed["data"]["old"] = [{"path": str(tmp_path / "marked.txt")}]
    (tmp_path / "marked.txt").write_text("a lamp<mark> in the night. " * 60, encoding="utf-8")
    lines: list[str] = []
    run_recipe(Recipe.parse(changed), progress=False, log=lines.append)
    notes = [line for line in lines if "add_tokens" in line]
    if tokens != [" vieux", " fyrtårnet", "<mark>"]:
        assert notes == []
        return
    assert len(notes) == 1
    assert repr(" fyrtårnet") in notes[0]
    assert repr("<mark>") in notes[0], "old rows do not count"
    assert "vieux" not in notes[0]


@pytest.mark.parametrize("token", [" the", "<eos>"])
def test_a_token_that_exists_stops_the_run_before_training(token: str, tmp_path: Path, tiny_backbone) -> None:
    recipe = Recipe.parse(with_tokens(tmp_path, tiny_backbone("llama"), [token]))
    lines: list[str] = []
    with pytest.raises(GraftError) as error:
        run_recipe(recipe, progress=False, log=lines.append)
    assert token in str(error.value)
    assert not lines, "nothing was trained or sampled"


def test_a_recipe_without_tokens_keeps_its_keys(tmp_path: Path, tiny_backbone) -> None:
    run = Recipe.parse(values(tmp_path, tiny_backbone("llama"))).run()
    assert "add_tokens" not in run.settings()["backbone"]


def test_the_row_of_the_backbone_depends_on_the_text_that_tokens_are_learned_from(tmp_path: Path) -> None:
    keys = []
    for new in ("new", "old"):
        changed = with_tokens(tmp_path, tmp_path / "backbone", FORMS["learned"])
        changed["data"]["new"] = [{"path": str(tmp_path / f"{new}.txt")}]
        (run,) = Recipe.parse(changed).backbone_runs()
        keys.append(run.settings())
    assert keys[0] != keys[1]


def test_the_bare_backbone_samples_its_text_once_with_or_without_tokens(tmp_path: Path) -> None:
    samples = []
    for tokens in (None, FORMS["learned"]):
        changed = values(tmp_path, tmp_path / "backbone")
        changed["backbone"]["add_tokens"] = tokens
        changed["data"]["old"] = [{"self": True, "tokens": 100}]
        samples.append([(run.id, run.settings()) for run in Recipe.parse(changed).run().needs()])
    assert len(samples[0]) == 2
    assert samples[0] == samples[1]
