"""Recipes from end to end on a tiny backbone: what is written, what is read back, and what makes a run fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from graftlm.backbone import load_backbone
from graftlm.data import Document, pack
from graftlm.data.near_text import LEFT_OUT
from graftlm.data.own_text import read_own_text
from graftlm.errors import DataError, ForgettingBudgetError, GraftError, RecipeError, TrainingError
from graftlm.evaluation import Results, value_of
from graftlm.evaluation.evaluator import BackboneEvaluator, load_tests
from graftlm.grafted.model import GraftedModel
from graftlm.runs.recipe import Recipe, compare_recipe, recipe_schema, run_recipe
from graftlm.store.artifact import load_graft
from graftlm.store.manifest import read_manifest

OLD, NEW = "the river ran under the old house and the garden. ", "le vieux jardin dormait sous la lune blanche. "


def values(tmp_path: Path, backbone: Path, **changes: Any) -> dict[str, Any]:
    for name, text in {"old": OLD * 60, "new": NEW * 60, "old-test": OLD * 8, "new-test": NEW * 8}.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return {
        "backbone": {"name": str(backbone), "device": "cpu"},
        "graft": {"kind": "neutral-residues", "alpha": 1.0},
        "data": {
            "new": [{"path": str(tmp_path / "new.txt")}],
            "old": [{"path": str(tmp_path / "old.txt")}],
            "replay_fraction": 0.25,
            "length": 16,
            "test": {name: [{"path": str(tmp_path / f"{name}-test.txt")}] for name in ("old", "new")},
        },
        "training": {"steps": 6, "batch_size": 4, "learning_rate": 0.01},
        "evaluation": {"decode_prompts": 1, "decode_tokens": 4, "own_tokens": 64},
        "out": str(tmp_path / "run"),
    } | changes


@pytest.fixture
def recipe(tmp_path: Path, tiny_backbone) -> Recipe:
    return Recipe.parse(values(tmp_path, tiny_backbone("llama")))


def test_a_tracker_is_looked_up_before_anything_is_loaded(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"))
    changed["backbone"]["name"] = str(tmp_path / "nowhere")
    changed["training"]["tracker"] = "wandbb"
    with pytest.raises(GraftError) as error:
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    assert "wandbb" in str(error.value)


def test_a_method_that_does_not_fit_is_an_error_before_another_trains(tmp_path: Path, tiny_backbone) -> None:
    methods = {"lora": {"graft": {"kind": "lora"}}, "deep": {"graft": {"kind": "llama-pro", "blocks": 400}}}
    changed = values(tmp_path, tiny_backbone("llama"), methods=methods)
    lines: list[str] = []
    with pytest.raises(GraftError) as error:
        compare_recipe(Recipe.parse(changed), progress=False, log=lines.append)
    assert "400" in str(error.value)
    assert not lines, "nothing was trained or sampled"


def test_a_run_leaves_graft_report_and_recipe_and_is_read_back(recipe: Recipe, tmp_path: Path) -> None:
    results = run_recipe(recipe, progress=False, log=lambda _: None)
    run = tmp_path / "run"
    assert {"recipe.yaml", "results.json", "report.md", "graft", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert Recipe.from_yaml(run / "recipe.yaml") == recipe
    row = results.row("neutral-residues")
    gained = value_of(results.row("backbone").metrics["new"]) - value_of(row.metrics["new"])
    assert value_of(row.metrics["learned"]) == pytest.approx(gained, abs=1e-6)
    assert gained > 0
    assert row.metrics["peak_memory_bytes"]
    shares = results.details["statistics"]["neutral-residues"]["open_share"]  # type: ignore[index, call-overload]
    assert set(shares) == {"old", "new"}  # type: ignore[arg-type]
    assert read_manifest(run / "graft").training["steps"] == 6

    written = (run / "graft" / "graft.safetensors").stat().st_mtime_ns
    again = run_recipe(recipe, progress=False, log=lambda _: None)
    assert (run / "graft" / "graft.safetensors").stat().st_mtime_ns == written, "a finished run is not trained again"
    assert again.row("neutral-residues") == row

    backbone = load_backbone(recipe.backbone.name)
    evaluator = BackboneEvaluator(backbone, load_tests(recipe.data.test), recipe.evaluation, recipe.data.length)
    _ = evaluator.backbone_scores
    with GraftedModel(backbone, {"graft": load_graft(run / "graft", backbone)}) as model:
        measured = evaluator.measure(model, "loaded", "loaded")
    assert value_of(measured.row.metrics["new"]) == pytest.approx(value_of(row.metrics["new"]), abs=1e-5)


@pytest.mark.slow
def test_a_comparison_on_text_that_the_backbone_sampled(tmp_path: Path, tiny_backbone) -> None:
    methods = {
        "replay": {"graft": {"kind": "neutral-residues"}},
        "distil": {"graft": {"kind": "neutral-residues"}, "data": {"old_objective": "distil"}},
        "lora": {"graft": {"kind": "lora", "rank": 2}, "data": {"replay_fraction": 0}},
    }
    changed = values(tmp_path, tiny_backbone("llama"), methods=methods)
    del changed["graft"]
    changed["data"] |= {"old": [{"self": True, "tokens": 400, "batch_size": 8}]}
    changed["evaluation"] |= {"own_tokens": 200}
    recipe = Recipe.parse(changed)
    results = compare_recipe(recipe, progress=False, log=lambda _: None)
    assert [row.id for row in results.rows] == ["backbone", *methods], "sampling has no row"
    for name in methods:
        metrics = results.row(name).metrics
        assert value_of(metrics["own_kl"]) > 0
        assert value_of(metrics["new_kl"]) > 0
    files = sorted((tmp_path / "run").glob("own-text-*/samples.jsonl"))
    assert len(files) == 2, "one to train on, one to measure on"
    written = [file.stat().st_mtime_ns for file in files]
    (tmp_path / "run" / "measurements" / "lora.json").unlink()
    again = compare_recipe(recipe, progress=False, log=lambda _: None)
    assert [file.stat().st_mtime_ns for file in files] == written
    assert value_of(again.row("lora").metrics["own_kl"]) == pytest.approx(
        value_of(results.row("lora").metrics["own_kl"]), rel=1e-3
    )
    distilled = [line[1] for line in results.details["losses"]["distil"]]  # type: ignore[index, union-attr]
    assert distilled != [line[1] for line in results.details["losses"]["replay"]]  # type: ignore[index, union-attr]


def near_recipe(tmp_path: Path, backbone: Path) -> dict[str, Any]:
    """A recipe of prompts and completions, whose old text begins like the prompts."""
    changed = values(tmp_path, backbone)
    path = tmp_path / "facts.jsonl"
    questions = [f"the {word} of the old {word} is" for word in ("river", "house", "garden", "moon")]
    lines = [json.dumps({"prompt": question, "text": " Tessaby"}) for question in questions]
    path.write_text("\n".join(lines), encoding="utf-8")
    changed["data"] |= {
        "new": [{"path": str(path), "prompt_column": "prompt"}],
        "old": [{"self": True, "near": "new", "tokens": 200, "batch_size": 8, "length": 32}],
        "old_objective": "distil",
    }
    changed["evaluation"] |= {"own_tokens": 0}
    return changed


@pytest.mark.usefixtures("undrawn_figures")
def test_own_text_near_the_new_depends_on_the_content_of_the_new_text(tmp_path: Path, tiny_backbone) -> None:
    changed = near_recipe(tmp_path, tiny_backbone("llama"))
    run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    (file,) = (tmp_path / "run").glob("own-text-*/samples.jsonl")
    measured = json.loads(next((tmp_path / "run" / "measurements").glob("own-text-*.json")).read_text())
    metrics = measured["row"]["metrics"]
    used = read_own_text(file)
    assert metrics["texts"] == len(used)
    assert metrics["tokens"] == sum(text.tokens for text in used) >= 200
    assert metrics["chat_texts"] == 0
    assert metrics["left_out"] == sum(metrics[f"left_out_{reason.replace(' ', '_')}"] for reason in LEFT_OUT)

    (run,) = Recipe.parse(changed).run().needs()
    key = run.key()
    assert json.loads((file.parent / "run.json").read_text())["key"] == key
    changed["training"] |= {"learning_rate": 0.02}
    (again,) = Recipe.parse(changed).run().needs()
    assert (again.id, again.key()) == (run.id, key), "another training on the same new text reads the same samples"
    facts = tmp_path / "facts.jsonl"
    facts.write_text(facts.read_text(encoding="utf-8").replace("the moon of", "under the moon of"), encoding="utf-8")
    assert run.key() != key, "other new text has other text near it"


def test_text_near_the_new_may_have_the_seed_of_own_kl(tmp_path: Path, tiny_backbone) -> None:
    changed = near_recipe(tmp_path, tiny_backbone("llama"))
    changed["evaluation"] |= {"own_tokens": 64, "own_seed": 0}
    Recipe.parse(changed)
    changed["data"]["old"] = [{"self": True}]
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert "own_seed" in str(error.value)


@pytest.mark.usefixtures("undrawn_figures")
def test_changed_text_is_not_mistaken_for_the_finished_run(recipe: Recipe, tmp_path: Path) -> None:
    run_recipe(recipe, progress=False, log=lambda _: None)
    (tmp_path / "new-test.txt").write_text(NEW[::-1] * 8, encoding="utf-8")
    row = run_recipe(recipe, progress=False, log=lambda _: None).row("neutral-residues")
    assert row != Results.read(tmp_path / "run").row("backbone")
    assert value_of(row.metrics["new"]) > 0


@pytest.mark.slow
def test_a_comparison_trains_each_method_on_the_same_rows(tmp_path: Path, tiny_backbone) -> None:
    methods = {
        "lora": {"graft": {"kind": "lora", "rank": 2}, "label": "LoRA, rank 2"},
        "quick": {"graft": {"kind": "adapter", "width": 4}, "training": {"steps": 2, "batch_size": 2}},
    }
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama"), methods=methods))
    results = compare_recipe(recipe, progress=False, log=lambda _: None)
    assert [(row.id, row.label) for row in results.rows] == [
        ("backbone", "backbone"),
        ("lora", "LoRA, rank 2"),
        ("quick", "vanilla adapter"),
    ]
    losses = results.details["losses"]
    assert len(losses["lora"]) == 6  # type: ignore[index, arg-type, call-overload]
    assert len(losses["quick"]) == 2  # type: ignore[index, arg-type, call-overload]


def test_rows_of_one_kind_are_named_by_their_ids() -> None:
    methods = {
        "narrow": {"graft": {"kind": "adapter", "width": 2}},
        "wide": {"graft": {"kind": "adapter", "width": 8}},
        "named": {"graft": {"kind": "adapter"}, "label": "a name"},
        "low-rank": {"graft": {"kind": "lora"}},
    }
    recipe = Recipe.parse(
        {
            "backbone": {"name": "nowhere"},
            "data": {"new": [{"path": "new.txt"}], "replay_fraction": 0},
            "training": {"steps": 1},
            "methods": methods,
        }
    )
    labels = {run.id: run.label for run in recipe.comparison()}
    assert labels == {"narrow": "narrow", "wide": "wide", "named": "a name", "low-rank": "LoRA on the FFN"}
    one_of_each = Recipe.parse(
        recipe.model_dump() | {"methods": {name: methods[name] for name in ("wide", "low-rank")}}
    )
    assert [run.label for run in one_of_each.comparison()] == ["vanilla adapter", "LoRA on the FFN"]


@pytest.mark.slow
def test_a_comparison_on_a_backbone_in_half_precision(tmp_path: Path, tiny_backbone) -> None:
    methods = {name: {"graft": {"kind": name}} for name in ("neutral-residues", "lora", "finetune")}
    backbone = {"name": str(tiny_backbone("llama")), "dtype": "bfloat16"}
    recipe = Recipe.parse(values(tmp_path, backbone["name"], methods=methods) | {"backbone": backbone})
    results = compare_recipe(recipe, progress=False, log=lambda _: None)
    assert [row.id for row in results.rows] == ["backbone", *methods]
    for name in methods:
        losses = results.details["losses"][name]  # type: ignore[index, call-overload]
        assert losses[-1][1] < losses[0][1]  # type: ignore[operator, index]


def test_without_methods_the_graft_stands_beside_every_kind(recipe: Recipe) -> None:
    runs = recipe.comparison()
    assert runs[0].id == "neutral-residues"
    assert runs[0].graft == recipe.graft
    assert {"adapter", "lora", "finetune"} <= {run.id for run in runs}


@pytest.mark.usefixtures("undrawn_figures")
def test_a_run_that_forgets_more_than_its_budget_fails_and_keeps_everything(tmp_path: Path, tiny_backbone) -> None:
    evaluation = {"forgetting_budget": -5.0, "decode_prompts": 0, "own_tokens": 0}
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama"), evaluation=evaluation))
    with pytest.raises(ForgettingBudgetError) as error:
        run_recipe(recipe, progress=False, log=lambda _: None)
    assert "budget is -5" in str(error.value)
    assert (tmp_path / "run" / "graft" / "graft.json").exists()
    assert Results.read(tmp_path / "run").aims[0].met is False


def test_a_run_that_is_under_way_keeps_its_recipe(tmp_path: Path, tiny_backbone) -> None:
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama")))
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(RecipeError) as error:
        run_recipe(recipe, progress=False, log=lambda _: None)
    assert str(tmp_path / "run") in str(error.value)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def examples(path: Path, answer: str) -> str:
    path.write_text("\n".join(json.dumps({"prompt": f"le {i} ", "answer": answer}) for i in range(6)))
    return str(path)


@pytest.mark.slow
def test_tasks_are_measured_on_backbone_and_graft(tmp_path: Path, tiny_backbone) -> None:
    file = examples(tmp_path / "words.jsonl", "vieux jardin")
    tasks = {
        "words": {"path": file, "metric": "exact-match", "max_new_tokens": 3},
        "letters": {"path": file, "metric": "chrf", "max_new_tokens": 3, "limit": 4},
        "french": {"path": file, "metric": "log-perplexity", "shots": 1},
    }
    changes = {"evaluation": {"decode_prompts": 0, "own_tokens": 0, "tasks": tasks}}
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama"), **changes))
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe
    results = run_recipe(recipe, progress=False, log=lambda _: None)
    bare, row = results.row("backbone").metrics, results.row("neutral-residues").metrics
    names = {"words_exact-match", "letters_chrf", "french_log-perplexity"}
    assert names | {"french_log-perplexity_bpb"} <= bare.keys() & row.keys()
    assert {f"{name}_gain" for name in names} <= row.keys() - bare.keys()
    gain = value_of(bare["french_log-perplexity"]) - value_of(row["french_log-perplexity"])
    assert value_of(row["french_log-perplexity_gain"]) == pytest.approx(gain)
    assert gain > 0, "the answers are of what it learned"
    described: Any = results.details["tasks"]
    assert described["backbone"]["letters"]["signature"].startswith("chrF2|")
    assert [len(each["words"]["samples"]) for each in described.values()] == [5, 5]
    assert "french log-perplexity gain" in (tmp_path / "run" / "report.md").read_text()

    written = (tmp_path / "run" / "measurements" / "neutral-residues.json").stat().st_mtime_ns
    assert run_recipe(recipe, progress=False, log=lambda _: None).details["tasks"] == results.details["tasks"]
    kept = tmp_path / "run" / "measurements" / "neutral-residues.json"
    assert kept.stat().st_mtime_ns == written, "it is read back"
    examples(tmp_path / "words.jsonl", "lune blanche")
    changed = run_recipe(recipe, progress=False, log=lambda _: None).row("neutral-residues").metrics
    assert changed["french_log-perplexity"] != row["french_log-perplexity"]


@pytest.mark.usefixtures("undrawn_figures")
def test_a_recipe_of_prompts_and_completions(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("llama"))
    source = {
        "path": examples(tmp_path / "words.jsonl", "vieux jardin"),
        "text_column": "answer",
        "prompt_column": "prompt",
    }
    changed["data"] |= {"new": [source], "boundaries": "whole", "length": 32, "test": {"new": [source]}}
    results = run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    assert value_of(results.row("neutral-residues").metrics["learned"]) > 0


@pytest.mark.usefixtures("undrawn_figures")
def test_rows_without_a_target_are_counted_in_the_report(tmp_path: Path, tiny_backbone) -> None:
    rows = [{"prompt": OLD * 3, "answer": "lune"}] * 3
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"path": str(tmp_path / "long.jsonl"), "text_column": "answer", "prompt_column": "prompt"}
    changed = values(tmp_path, tiny_backbone("llama"), graft={"kind": "lora", "rank": 2})
    changed["data"] |= {"new": [source], "replay_fraction": 0}
    changed["training"] = {"epochs": 2, "batch_size": 1, "log_every": 1}
    lines: list[str] = []
    results = run_recipe(Recipe.parse(changed), progress=False, log=lines.append)
    (trained,) = [row for row in results.rows if row.id != "backbone"]
    losses = [loss for _, loss in results.details["losses"][trained.id]]  # type: ignore[index,union-attr,misc]
    assert losses.count(0.0) == trained.metrics["rows_without_target"] == trained.metrics["steps_without_target"] > 0
    assert losses.count(0.0) < len(losses)
    (note,) = [line for line in lines if "no token to learn" in line]
    assert f"{losses.count(0.0) // 2:,}" in note, "a pass has half of them"
    assert "data.length" in note
    assert "rows without target" in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn_figures")
def test_plain_text_without_a_target_is_not_blamed_on_prompts(tmp_path: Path, tiny_backbone) -> None:
    """The last token of a text may have a row for itself."""
    changed = values(tmp_path, tiny_backbone("llama"), graft={"kind": "lora", "rank": 2})
    tokenizer = load_backbone(changed["backbone"]["name"]).need_tokenizer()
    texts = (OLD * 20 + "a" * number for number in range(99))
    text = next(text for text in texts if pack([Document(text)], tokenizer, 16).n_tokens() % 16 == 1)
    (tmp_path / "old.txt").write_text(text, encoding="utf-8")
    changed["training"]["steps"] = 1
    changed["evaluation"] |= {"decode_prompts": 0, "own_tokens": 0}
    lines: list[str] = []
    run_recipe(Recipe.parse(changed), progress=False, log=lines.append)
    (note,) = [line for line in lines if "no token to learn" in line]
    assert ", 1 has" in note
    assert "prompt" not in note


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_read_of_a_conversation_is_said_before_training(
    tmp_path: Path, tiny_chat_model: Path, streaming: bool
) -> None:
    messages = [{"role": "user", "content": "Who?", "stamp": 3}, {"role": "assistant", "content": "Oda."}]
    row = {"messages": messages, "functions": [{"name": "look"}], "weight": 0, "images": [], "id": 7}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    source = {"path": str(tmp_path / "chats.jsonl"), "messages_column": "messages", "streaming": streaming}
    changed = values(tmp_path, tiny_chat_model, graft={"kind": "lora", "rank": 2})
    changed["data"] |= {"new": [source], "replay_fraction": 0, "test": {}}
    changed["training"] = {"steps": 1, "batch_size": 1}
    changed["evaluation"] |= {"decode_prompts": 0, "own_tokens": 0}
    trained: list[bool] = []

    def log(line: str) -> None:
        if "not read" in line:
            assert all(name in line for name in ("stamp", "column functions", "column weight"))
            assert not any(name in line for name in ("images", "id (", "tools"))
            trained.append(any((tmp_path / "run").rglob("history.jsonl")))

    run_recipe(Recipe.parse(changed), progress=False, log=log)
    assert trained == [streaming], "a stream is read during the training"


def test_a_methods_own_text_is_looked_for_before_another_one_trains(tmp_path: Path, tiny_backbone) -> None:
    methods = {
        "first": {"graft": {"kind": "lora", "rank": 2}},
        "second": {"graft": {"kind": "lora", "rank": 2}, "data": {"old": [{"path": str(tmp_path / "absent.txt")}]}},
    }
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama"), methods=methods))
    with pytest.raises(DataError) as error:
        compare_recipe(recipe, progress=False, log=lambda _: None)
    assert "absent.txt" in str(error.value)
    assert not (tmp_path / "run" / "first").exists()


def test_a_task_that_can_not_be_read_is_said_before_training(tmp_path: Path, tiny_backbone) -> None:
    tasks = {"words": {"path": str(tmp_path / "nothing.jsonl"), "metric": "chrf"}}
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama"), evaluation={"tasks": tasks}))
    with pytest.raises(DataError) as error:
        run_recipe(recipe, progress=False, log=lambda _: None)
    assert "nothing.jsonl" in str(error.value)
    assert not (tmp_path / "run" / "history.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"graft": {"kind": "neutral-residues", "capasity": 0.1}}, ["capasity", "capacity?"]),
        ({"graft": {"kind": "neutral-residue"}}, ["neutral-residues?"]),
        ({"graft": {"capacity": 0.1}}, ["kind"]),
        ({"graft": None}, ["graft", "methods"]),
        ({"evaluation": {"tasks": {"a": {"path": "x", "metric": "bleu"}}}}, ["evaluation.tasks.a.metric"]),
        ({"evaluation": {"tasks": {"a": {"path": "x", "metrc": "chrf"}}}}, ["metrc", "metric?"]),
        ({"methods": {"backbone": {"graft": {"kind": "lora"}}}}, ["method id backbone"]),
        ({"methods": {"a": {"graft": {"kind": "lora"}, "training": {"step": 1}}}}, ["methods.a.training", "steps?"]),
        ({"methods": {"a": {"graft": {"kind": "lora"}, "data": {"lenght": 1}}}}, ["methods.a.data", "length?"]),
        ({"methods": {"a": {"graft": {"kind": "lora"}, "data": {"test": {}}}}}, ["methods.a.data", "key test"]),
        (
            {
                "methods": {"a": {"graft": {"kind": "lora"}, "data": {"old_objective": "distil"}}},
                "training": {"steps": 2, "sharded": True},
            },
            ["distil", "training.sharded"],
        ),
    ],
)
def test_mistakes_in_a_recipe(changes: dict[str, Any], named: list[str], tmp_path: Path, tiny_backbone) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.parse(values(tmp_path, tiny_backbone("llama"), **changes))
    assert all(value in str(error.value) for value in named), error.value


def test_the_schema_knows_every_kind_with_its_keys() -> None:
    schema = json.loads(json.dumps(recipe_schema()))
    variants = {variant["properties"]["kind"]["const"]: variant for variant in schema["$defs"]["GraftConfig"]["oneOf"]}
    assert {"neutral-residues", "adapter", "lora", "finetune"} <= set(variants)
    assert "capacity" in variants["neutral-residues"]["properties"]
    assert "kind" in variants["lora"]["required"]


@pytest.mark.usefixtures("undrawn_figures")
def test_a_run_whose_graft_acted_before_a_norm_is_not_continued_after_it(tmp_path: Path, tiny_backbone) -> None:
    changed = values(tmp_path, tiny_backbone("gemma3"))
    changed["training"] |= {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 1}
    run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    (state_file,) = (tmp_path / "run").rglob("state.json")
    state = json.loads(state_file.read_text())
    assert state["run"].pop("ffn_exit") == "post_feedforward_layernorm"
    state_file.write_text(json.dumps(state))
    changed["training"]["steps"] = 3
    with pytest.raises(TrainingError) as error:
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    assert "ffn_exit" in str(error.value)
