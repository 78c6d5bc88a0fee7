"""Grafts trained one after the other: each leaves those before it alone, and the last row is all of them together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import ArtifactError, ForgettingBudgetError, RecipeError, TrainingError
from graftlm.evaluation import Interval, Results, value_of
from graftlm.evaluation.evaluator import BackboneEvaluator, load_tests
from graftlm.generation.evaluate import evaluate_graft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.recipe import GrowthRecipe, compare_recipe, grow_recipe, parse_recipe, run_recipe
from graftlm.store.artifact import load_graft, load_grafts
from graftlm.store.manifest import read_manifest
from tests.runs.test_recipe import values

DANISH = "den gamle have sov under den hvide måne. "


def growth(tmp_path: Path, backbone: Path, **changes: Any) -> dict[str, Any]:
    plain = values(tmp_path, backbone)
    texts = {name: str(tmp_path / f"{name}.txt") for name in ("new", "danish", "danish-test")}
    for name in ("danish", "danish-test"):
        (tmp_path / f"{name}.txt").write_text(DANISH * (60 if name == "danish" else 8), encoding="utf-8")
    plain["data"] |= {"new": [], "test": plain["data"]["test"] | {"danish": [{"path": texts["danish-test"]}]}}
    plain["stages"] = {name: {"data": {"new": [{"path": texts[name]}]}} for name in ("new", "danish")}
    plain["evaluation"] |= {"own_tokens": 0, "decode_prompts": 0}
    return plain | changes


def grow(values: dict[str, Any]) -> Results:
    return grow_recipe(parse_recipe(values, "recipe"), progress=False, log=lambda _: None)


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "graft.safetensors")


@pytest.mark.usefixtures("undrawn_figures")
def test_each_stage_trains_its_own_graft_beside_the_others(tmp_path: Path, tiny_backbone) -> None:
    changed = growth(tmp_path, tiny_backbone("llama"))
    changed["stages"]["danish"]["graft"] = {"kind": "lora", "rank": 2}  # in addition to one that has hooks
    results = grow(changed)
    _check_rows(results, tmp_path)
    backbone = load_backbone(changed["backbone"]["name"])
    recipe = GrowthRecipe.parse(changed)
    _check_loaded_grafts(results, recipe, backbone, tmp_path)
    _check_missing_grafts(backbone, tmp_path)


def _check_rows(results: Results, tmp_path: Path) -> None:
    assert [row.id for row in results.rows] == ["backbone", "new", "danish"]
    bare, first, both = (results.row(name).metrics for name in ("backbone", "new", "danish"))
    assert value_of(first["new"]) < value_of(bare["new"])
    assert value_of(both["danish"]) < value_of(first["danish"]), "the second stage learned its text"
    own = sum(tensor.numel() for tensor in tensors(tmp_path / "run" / "danish" / "graft").values())
    assert value_of(both["trainable_parameters"]) == own, "the first graft is frozen"
    for name, row in (("new", first), ("danish", first), ("new", both), ("danish", both)):
        learned = row["learned" if name == "new" else f"learned_{name}"]
        assert isinstance(learned, Interval)
        assert learned.mean == pytest.approx(value_of(bare[name]) - value_of(row[name]))
    lost = both["lost_new"]
    assert isinstance(lost, Interval)
    assert lost.low < lost.high
    assert lost.mean == pytest.approx(value_of(both["new"]) - value_of(first["new"]))
    assert "lost_danish" not in both
    assert not any(name.startswith("lost") for name in first)


def _check_loaded_grafts(results: Results, recipe: GrowthRecipe, backbone: Backbone, tmp_path: Path) -> None:
    both = results.row("danish").metrics
    evaluator = BackboneEvaluator(backbone, load_tests(recipe.data.test), recipe.evaluation, recipe.data.length)
    _ = evaluator.backbone_scores
    last = tmp_path / "run" / "danish" / "graft"
    grafts = load_grafts(last, backbone)
    assert list(grafts) == ["new", "graft"]
    with GraftedModel(backbone, grafts) as model:
        measured = evaluator.measure(model, "both", "both").row.metrics
    for name in ("old", "new", "danish"):
        assert value_of(measured[name]) == pytest.approx(value_of(both[name]), abs=1e-4)
    assert read_manifest(tmp_path / "run" / "danish" / "graft").training["trained_after"] == ["new"]
    assert "load_grafts" in (last / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ArtifactError) as error:
        read_manifest(last).check_alone(last, "a server's model")
    assert "new" in str(error.value)
    texts = {"danish": load_tests(recipe.data.test)["danish"]}
    evaluated = evaluate_graft(last, texts=texts, evaluation=recipe.evaluation.model_copy(update={"length": 16}))
    assert value_of(evaluated.rows[1].metrics["danish"]) == pytest.approx(value_of(both["danish"]), abs=1e-4)


def _check_missing_grafts(backbone: Backbone, tmp_path: Path) -> None:
    last = tmp_path / "run" / "danish" / "graft"
    manifest = json.loads((last / "graft.json").read_text(encoding="utf-8"))
    manifest["training"]["trained_after"] = ["../run/new"]
    (last / "graft.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ArtifactError) as error:
        load_grafts(last, backbone)
    assert "../run/new" in str(error.value)
    manifest["training"]["trained_after"] = ["new"]
    (last / "graft.json").write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(tmp_path / "run" / "new" / "graft")
    with pytest.raises(ArtifactError):
        load_grafts(last, backbone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [{"kind": "lora", "rank": 2}, {"kind": "finetune"}, {"kind": "llama-pro", "capacity": 0.2}],
    ids=lambda graft: graft["kind"],
)
def test_a_first_stage_that_changes_modules_is_frozen_too(
    first: dict[str, Any], tmp_path: Path, tiny_backbone: Any
) -> None:
    changed = growth(tmp_path, tiny_backbone("llama"))
    changed["stages"]["new"]["graft"] = first
    both = grow(changed).row("danish").metrics
    own = sum(tensor.numel() for tensor in tensors(tmp_path / "run" / "danish" / "graft").values())
    assert value_of(both["trainable_parameters"]) == own
    backbone = load_backbone(changed["backbone"]["name"])
    recipe = GrowthRecipe.parse(changed)
    evaluator = BackboneEvaluator(backbone, load_tests(recipe.data.test), recipe.evaluation, recipe.data.length)
    _ = evaluator.backbone_scores
    grafts = {name: load_graft(tmp_path / "run" / name / "graft", backbone) for name in ("new", "danish")}
    grafts["graft"] = grafts.pop("danish")
    with GraftedModel(backbone, grafts) as model:
        measured = evaluator.measure(model, "both", "both").row.metrics
    for name in ("old", "new", "danish"):
        assert value_of(measured[name]) == pytest.approx(value_of(both[name]), abs=1e-4), "what was saved is what ran"


@pytest.mark.slow
def test_a_changed_first_stage_makes_those_behind_it_another_run(tmp_path: Path, tiny_backbone) -> None:
    def written() -> list[int]:
        files = [tmp_path / "run" / name / "graft" / "graft.safetensors" for name in ("new", "danish")]
        return [file.stat().st_mtime_ns for file in files]

    changed = growth(tmp_path, tiny_backbone("llama"))
    grow(changed)
    start = written()
    grow(changed)
    assert written() == start, "finished stages are read back"
    shutil.rmtree(tmp_path / "run" / "new")
    changed["stages"]["new"]["training"] = {"learning_rate": 0.02}
    with pytest.raises(TrainingError) as error:
        grow(changed)
    assert "trained_after" in str(error.value)
    shutil.rmtree(tmp_path / "run" / "danish")
    grow(changed)
    assert all(now != before for now, before in zip(written(), start, strict=True))


def test_a_frozen_graft_teaches_the_others_nothing(tmp_path: Path, tiny_backbone) -> None:
    """A frozen graft's local loss would pull its output on old rows to zero through the layers below it."""
    backbone = load_backbone(str(tiny_backbone("llama")))

    def gradients(alpha: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        frozen = build_graft(graft_config({"kind": "neutral-residues", "alpha": alpha}), backbone)
        new = build_graft(graft_config({"kind": "neutral-residues", "alpha": 0.0}), backbone)
        for parameter in (*frozen.parameters(), *new.parameters()):
            torch.nn.init.normal_(parameter, 0.1, 0.1)
        with GraftedModel(backbone, {"frozen": frozen, "graft": new}) as model:
            frozen.requires_grad_(False)
            ids = torch.arange(1, 17).view(2, 8)
            model.train()(input_ids=ids, labels=ids, domain=torch.tensor([0, 1])).loss.backward()
        return {name: parameter.grad for name, parameter in new.named_parameters() if parameter.grad is not None}

    alone, beside = gradients(0.0), gradients(100.0)
    assert alone
    for name, gradient in alone.items():
        torch.testing.assert_close(beside[name], gradient)


@pytest.mark.slow
def test_the_forgetting_budget_holds_for_stages(tmp_path: Path, tiny_backbone) -> None:
    changed = growth(tmp_path, tiny_backbone("llama"))
    changed["evaluation"] |= {"forgetting_budget": -100.0}
    with pytest.raises(ForgettingBudgetError):
        grow(changed)
    assert (tmp_path / "run" / "report.md").exists()


def test_old_text_of_a_stage_has_what_all_stages_before_it_taught(tmp_path: Path) -> None:
    changed = growth(tmp_path, tmp_path / "backbone")
    changed["stages"]["third"] = {"data": {"new": [{"path": str(tmp_path / "third.txt")}]}}
    runs = [run for run in GrowthRecipe.parse(changed).runs() if isinstance(run, GraftRun)]
    old = {run.id: [Path(str(source.name)).name for source in run.data.old] for run in runs if run.graft is not None}
    assert old == {
        "new": ["old.txt"],
        "danish": ["old.txt", "new.txt"],
        "third": ["old.txt", "new.txt", "danish.txt"],
    }
    assert runs[-1].depends_on == ("new", "danish"), "both earlier grafts are attached"


@pytest.mark.usefixtures("undrawn_figures")
def test_one_graft_trains_on_from_where_the_stage_before_left_it(tmp_path: Path, tiny_backbone) -> None:
    changed = growth(tmp_path, tiny_backbone("llama"), one_graft=True, graft={"kind": "lora", "rank": 2})
    changed["training"] |= {"learning_rate": 1e-3}
    changed["stages"]["danish"]["training"] = {"learning_rate": 1e-9}
    grow(changed)
    first, second = (tensors(tmp_path / "run" / name / "graft") for name in ("new", "danish"))
    assert any(tensor.abs().max() > 0 for name, tensor in first.items() if "lora_B" in name)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-6, rtol=0)


def test_what_a_stage_can_not_be_is_one_sentence(tmp_path: Path, tiny_backbone) -> None:
    backbone = tiny_backbone("llama")

    def message(change: Any) -> str:
        changed = growth(tmp_path, backbone)
        change(changed)
        with pytest.raises(RecipeError) as caught:
            parse_recipe(changed, "recipe")
        return str(caught.value)

    assert "no stages" in message(lambda v: v["stages"].clear())
    assert "stage name backbone" in message(lambda v: v["stages"].update(backbone=v["stages"]["new"]))
    assert "begin with a letter" in message(lambda v: v["stages"].update({"1st": v["stages"]["new"]}))
    for name in ("graft", "a.b", "a/b", "", "1"):
        named = message(lambda v, name=name: v["stages"].update({name: v["stages"]["new"]}))
        assert repr(name) in named
    assert "stages.danish has no new text" in message(lambda v: v["stages"]["danish"].clear())
    assert "stages.new has no steps" in message(lambda v: v["training"].update(steps=0))
    assert "stages.new has no graft" in message(lambda v: v.pop("graft"))
    assert "stages.new.data has the key test" in message(lambda v: v["stages"]["new"]["data"].update(test={}))
    assert "stages.danish has old_objective distil" in message(lambda v: v["data"].update(old_objective="distil"))
    assert "sharded to false" in message(
        lambda v: (v["training"].update(sharded=True), v["evaluation"].update(strengths=[0.5]))
    )
    own = [{"self": True, "seed": 3}]
    leak = message(lambda v: (v["data"].update(old=own), v["evaluation"].update(own_seed=3, own_tokens=10)))
    assert "evaluation.own_seed is 3" in leak
    other = {"kind": "lora", "rank": 2}
    different = message(lambda v: (v.update(one_graft=True), v["stages"]["danish"].update(graft=other)))
    assert "one_graft" in different
    assert "different" in different
    replacing = message(lambda v: v.update(graft=other))
    assert "kind lora" in replacing
    assert "methods" in message(lambda v: v.update(methods={}))

    recipe = parse_recipe(growth(tmp_path, backbone), "recipe")
    for verb in (run_recipe, compare_recipe):
        with pytest.raises(RecipeError) as error:
            verb(recipe)
        assert "graft grow" in str(error.value)
    with pytest.raises(RecipeError) as error:
        grow_recipe(parse_recipe(values(tmp_path, backbone), "recipe"))
    assert "stages" in str(error.value)
