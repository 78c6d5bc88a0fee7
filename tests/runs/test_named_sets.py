"""Named sets and weights from end to end: three languages in one run, reported by language and as means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftlm.backbone.load import BackboneConfig
from graftlm.data import SelfSourceConfig
from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.evaluation import Results, value_of
from graftlm.runs.growth_recipe import GrowthRecipe
from graftlm.runs.language_run import LanguageDataConfig
from graftlm.runs.recipe import Recipe, compare_recipe, run_recipe
from graftlm.runs.sampling_run import SamplingRun
from tests.runs.test_recipe import values

TEXTS = {
    "da": "den gamle have sov under den hvide maane. ",
    "sk": "stara zahrada spala pod bielym mesiacom. ",
    "cs": "stary dum stal u reky pod bilym mesicem. ",
}
WEIGHTS = {"da": 2, "sk": 1, "cs": 1}


def in_sets(tmp_path: Path, backbone: Path, **changes: Any) -> dict[str, Any]:
    """A recipe with three sets of new text, of different sizes and with weights."""
    changed = values(tmp_path, backbone, **changes)
    sets = {}
    for size, (name, text) in zip((30, 60, 90), TEXTS.items(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text * size, encoding="utf-8")
        (tmp_path / f"{name}-test.txt").write_text(text * 8, encoding="utf-8")
        sets[name] = [{"path": str(tmp_path / f"{name}.txt"), "weight": WEIGHTS[name]}]
        changed["data"]["test"][name] = [{"path": str(tmp_path / f"{name}-test.txt")}]
    changed["data"]["new"] = sets
    del changed["data"]["test"]["new"]
    changed["evaluation"] |= {"own_tokens": 0}
    return changed


def details(results: Results, kind: str, row: str) -> Any:
    return results.details[kind][row]  # type: ignore[index, call-overload]


def test_three_languages_in_one_run(tmp_path: Path, tiny_backbone) -> None:
    changed = in_sets(tmp_path, tiny_backbone("llama"))
    changed["training"] |= {"steps": 40, "batch_size": 8}
    recipe = Recipe.parse(changed)
    results = run_recipe(recipe, progress=False, log=lambda _: None)

    read = [source for source in details(results, "trained", "neutral-residues")["read"] if source["domain"] == "new"]
    assert [source["share"] for source in read] == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    for source in read:
        of_all_rows = source["tokens"] * source["passes"] / (40 * 8 * 0.75 * 16)
        assert of_all_rows == pytest.approx(source["share"], abs=0.03), "only last rows are padded"

    metrics = results.row("neutral-residues").metrics
    learned = {name: value_of(metrics[f"learned_{name}"]) for name in TEXTS}
    assert all(value > 0 for value in learned.values())
    assert value_of(metrics["learned"]) == pytest.approx(sum(learned.values()) / 3, abs=1e-6)
    assert value_of(metrics["new"]) == pytest.approx(sum(value_of(metrics[name]) for name in TEXTS) / 3, abs=1e-6)
    assert metrics["forgotten"]
    assert "decode_new_tokens_per_s" in metrics
    assert {f"{name}_kl" for name in TEXTS} <= metrics.keys()

    report = (tmp_path / "run" / "report.md").read_text()
    assert f"{read[0]['share']:.1%} of the new text" in report
    for name in TEXTS:
        assert f"| {name} | learned |" in report
        assert f"learned_{name}" in (tmp_path / "run" / "graft" / "README.md").read_text()
    assert (tmp_path / "run" / "by-set.png").is_file()
    assert Recipe.from_yaml(tmp_path / "run" / "recipe.yaml") == recipe
    again = run_recipe(recipe, progress=False, log=lambda _: None)
    assert again.row("neutral-residues") == results.row("neutral-residues")


def test_old_text_has_named_sets_too(tmp_path: Path, tiny_backbone) -> None:
    changed = in_sets(tmp_path, tiny_backbone("llama"))
    old = changed["data"]["old"]
    changed["data"]["old"] = {"river": old, "itself": [{"self": True, "tokens": 200, "weight": 0.5, "batch_size": 8}]}
    changed["data"]["test"]["river"] = changed["data"]["test"].pop("old")
    results = run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    metrics = results.row("neutral-residues").metrics
    assert value_of(metrics["forgotten"]) == pytest.approx(value_of(metrics["forgotten_river"]))
    assert "learned_river" not in metrics
    read = [source for source in details(results, "trained", "neutral-residues")["read"] if source["domain"] == "old"]
    assert [source["share"] for source in read] == pytest.approx([2 / 3, 1 / 3], abs=0.2)


@pytest.mark.slow
def test_a_frontier_is_of_the_means(tmp_path: Path, tiny_backbone) -> None:
    methods = {name: {"graft": {"kind": "lora", "rank": rank}} for rank, name in enumerate(("one", "two"), 1)}
    changed = in_sets(tmp_path, tiny_backbone("llama"), methods=methods, frontier={"rates": [], "strengths": [0.5]})
    del changed["graft"]
    changed["training"]["learning_rate"] = 0.02
    results = compare_recipe(Recipe.parse(changed), frontier=True, progress=False, log=lambda _: None)
    reach = [value_of(results.row(name).metrics["learned"]) for name in methods]
    level = value_of(results.row("one").metrics["equal_learned"])
    assert level == pytest.approx(0.9 * min(reach), rel=0.05)
    assert "forgotten_at_equal" in results.row("two").metrics
    (difference,) = results.details["method_differences"]  # type: ignore[misc]
    metrics = difference["metrics"]  # type: ignore[call-overload, index]
    means = [metrics[f"learned_{name}"]["mean"] for name in TEXTS]  # type: ignore[index, call-overload]
    assert metrics["learned"]["mean"] == pytest.approx(sum(means) / 3, abs=1e-6)  # type: ignore[index, call-overload]


def test_a_frontier_needs_a_test_text_of_each_domain(tmp_path: Path, tiny_backbone) -> None:
    changed = in_sets(tmp_path, tiny_backbone("llama"))
    changed["data"]["test"] = {"old": changed["data"]["test"]["old"]}
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed).frontier_runs()
    assert "data.test" in str(error.value)


def test_weights_and_sets_do_not_change_what_is_sampled() -> None:
    def of(**keys: Any) -> SamplingRun:
        source = SelfSourceConfig.parse({"self": True} | keys)
        return SamplingRun.of(BackboneConfig(name="b"), source, 16)

    assert of().id == of(weight=2, set="itself").id != of(seed=1).id


def test_weights_that_are_too_unequal_are_refused_before_anything_is_sampled(tmp_path: Path, tiny_backbone) -> None:
    changed = in_sets(tmp_path, tiny_backbone("llama"))
    changed["data"]["old"].append({"self": True, "tokens": 200})
    changed["data"]["new"]["sk"][0]["weight"] = 1e-7
    with pytest.raises(DataError) as error:
        run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    assert "sk.txt" in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("new", "key"),
    [
        ({"da": []}, "set da"),
        ({"da": [{"pth": "a"}]}, "new.da.0.pth"),
        ({"da": [{"path": "a", "weight": 0}]}, "data.new"),
        ({"da": [{"path": "a", "set": "sk"}]}, "sk"),
        ([{"path": "a", "set": "da"}, {"path": "b"}], "set"),
        ({"learned": [{"path": "a"}]}, "learned"),
        ({"dk": [{"path": "a"}]}, "test text da"),
        ("da", "data.new"),
    ],
)
def test_sets_that_mean_nothing(tmp_path: Path, new: Any, key: str) -> None:
    changed = in_sets(tmp_path, tmp_path)
    changed["data"]["new"] = new
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert key in str(error.value)


def test_a_set_that_is_named_twice(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("data:\n  new:\n    da: [{path: a}]\n    da: [{path: b}]\n", encoding="utf-8")
    with pytest.raises(GraftError) as error:
        Recipe.from_yaml(path)
    assert '"da"' in str(error.value)
    changed = in_sets(tmp_path, tmp_path)
    changed["data"]["old"] = {"da": changed["data"]["old"]}
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert "da" in str(error.value)


def test_texts_that_are_read_in_order_have_no_weights(tmp_path: Path) -> None:
    changed = in_sets(tmp_path, tmp_path)
    changed["data"] |= {"stream": True, "boundaries": "joined", "replay_fraction": 0}
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed)
    assert "weights" in str(error.value)
    sources = [{"path": "a", "weight": 1}, {"path": "b"}]
    with pytest.raises(RecipeError) as error:
        LanguageDataConfig.parse({"train": sources, "stream": True})
    assert "weights" in str(error.value)
    with pytest.raises(RecipeError) as error:
        LanguageDataConfig.parse({"train": [{"path": "a", "set": "da"}]})
    assert "set" in str(error.value)
    used = LanguageDataConfig.parse({"train": [*sources, {"path": "c", "weight": 0}]})
    assert [source.path for source in used.packed().new] == ["a", "b"]


def test_stages_have_names_and_no_sets(tmp_path: Path) -> None:
    changed = in_sets(tmp_path, tmp_path)
    new = changed["data"].pop("new")
    changed["stages"] = {"first": {"data": {"new": new}}}
    with pytest.raises(RecipeError) as error:
        GrowthRecipe.parse(changed)
    assert "stages.first" in str(error.value)
