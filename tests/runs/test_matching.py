"""`capacity: match`: every kind gets the trainable parameters of the recipe's graft, as nearly as it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftlm.backbone import Backbone
from graftlm.errors import GraftError, RecipeError
from graftlm.evaluation import Results, value_of
from graftlm.evaluation.remarks import remarks
from graftlm.evaluation.results import Row
from graftlm.grafts import Sizes, graft_config
from graftlm.runs.matching import MatchedGraft, trained_parameters
from graftlm.runs.recipe import Recipe, compare_recipe
from runs.test_recipe import values
from tiny import tiny_model, tiny_tokenizer

SECTIONS: dict[str, dict[str, Any]] = {
    "neutral-residues": {},
    "open gates": {"kind": "neutral-residues", "gate_init": "random", "gate": "sigmoid"},
    "adapter": {},
    "lora": {"scale": 2.0},
    "llama-pro": {},
    "dora": {"kind": "peft", "method": "DORA", "options": {"target_modules": ["q_proj", "v_proj"]}},
    "oft": {"kind": "peft", "method": "OFT"},
    "hra": {"kind": "peft", "method": "HRA"},
    "c3a": {"kind": "peft", "method": "C3A", "options": {"init_weights": True}},
    "osf": {"kind": "peft", "method": "OSF"},
    "fourierft": {"kind": "peft", "method": "FOURIERFT", "options": {"init_weights": True}},
    "token-routing": {
        "experts": {
            "a": {"rank": 4, "targets": ["ffn"], "texts": ["one"]},
            "b": {"rank": 8, "targets": ["q_proj", "embedding"], "texts": ["two"]},
        },
        "threshold": 0.1,
    },
}


def tiny() -> Backbone:
    return Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("aim", [1, 3_000])
def test_the_nearest_size_is_chosen_and_counted(name: str, aim: int) -> None:
    backbone = tiny()
    section = {"kind": name, **SECTIONS[name]}
    matched = MatchedGraft.of(section | {"capacity": "match"})
    config, found = matched.resolved(aim, backbone)
    assert trained_parameters(config, backbone) == found.parameters
    sizes: Sizes = matched.graft.graft_class.sizes(matched.graft, backbone)  # type: ignore[attr-defined]
    place = list(sizes.values).index(found.value)
    near = list(sizes.values)[max(0, place - 1) : place + 2]
    counts = [sizes.parameters(value) for value in near]
    assert counts == sorted(counts)
    assert abs(found.parameters - aim) == min(abs(count - aim) for count in counts)
    for key in section.keys() - {"kind", "experts", "options"}:
        assert getattr(config, key) == section[key], "other keys stay"


def test_the_search_finds_the_nearest_of_any_rising_sizes() -> None:
    for power in (1, 2, 3):
        sizes = Sizes("n", range(1, 40), lambda n, power=power: 5 + n**power, lambda n: graft_config({"kind": "lora"}))
        for aim in range(0, 2_000, 37):
            distance = abs(sizes.parameters(sizes.nearest(aim)) - aim)
            assert distance == min(abs(sizes.parameters(n) - aim) for n in sizes.values)


def test_a_composition_matches_by_its_stride_and_is_matched(tiny_backbone) -> None:
    backbone = tiny()
    section = {"kind": "composition", "augmenting": {"french": {"name": "random", "seed": 1}}, "readout": "mixture"}
    two_pairs = trained_parameters(graft_config({**section, "stride": 1}), backbone)
    one_pair = trained_parameters(graft_config({**section, "stride": 2}), backbone)
    assert two_pairs > one_pair
    for aim, stride in ((two_pairs, 1), (one_pair, 2), (10**9, 1)):
        config, found = MatchedGraft.of({**section, "capacity": "match"}).resolved(aim, backbone)
        assert found.value == stride
        assert trained_parameters(config, backbone) == found.parameters
    _, found = MatchedGraft.of({"kind": "lora", "capacity": "match"}).resolved(two_pairs, backbone)
    assert found.parameters == pytest.approx(two_pairs, rel=0.1)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"kind": "finetune"}, "finetune"),
        ({"kind": "lora", "rank": 4}, "rank"),
        ({"kind": "llama-pro", "blocks": 1}, "blocks"),
        ({"kind": "peft", "method": "IA3"}, "IA3"),
        ({"kind": "peft", "method": "LORA", "options": {"r": 4}}, "r,"),
        ({"kind": "token-routing", "experts": {"a": {"path": "folder", "texts": ["one"]}}}, "expert"),
        ({"kind": "composition", "augmenting": {"a": {"name": "vanilla", "stride": 1}}}, "stride"),
    ],
)
def test_what_has_no_size_to_choose_is_refused(section: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        MatchedGraft.of(section | {"capacity": "match"}).resolved(1_000, tiny())
    assert key in str(error.value)


METHODS: dict[str, Any] = {
    "plain": {"graft": {"kind": "lora", "capacity": "match", "scale": 2.0}},
    "oft": {"graft": {"kind": "peft", "method": "OFT", "capacity": "match"}},
}


def test_a_recipe_keeps_match_and_its_runs_have_sizes(tmp_path: Path, tiny_backbone) -> None:
    recipe = Recipe.parse(values(tmp_path, tiny_backbone("llama"), methods=METHODS))
    (tmp_path / "again.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert Recipe.from_yaml(tmp_path / "again.yaml") == recipe
    assert recipe.to_yaml().count("capacity: match") == 2
    assert Recipe.parse(recipe.model_dump()) == recipe
    runs = {run.id: run for run in recipe.comparison()}
    rank = runs["plain"].graft.rank  # type: ignore[union-attr]
    named = METHODS | {"plain": {"graft": {"kind": "lora", "rank": rank, "scale": 2.0}}}
    explicit = Recipe.parse(values(tmp_path, tiny_backbone("llama"), methods=named)).comparison()[0]
    assert runs["plain"].settings() == explicit.settings(), "the key has the size, and not how it was chosen"
    larger = Recipe.parse(
        values(tmp_path, tiny_backbone("llama"), methods=METHODS)
        | {"graft": {"kind": "neutral-residues", "capacity": 0.4}}
    )
    assert larger.comparison()[0].settings() != runs["plain"].settings()


def test_without_a_graft_section_the_first_method_sets_the_size(tmp_path: Path, tiny_backbone) -> None:
    sized = {"first": {"graft": {"kind": "adapter", "width": 7}}, **METHODS}
    recipe = values(tmp_path, tiny_backbone("llama"), methods=sized)
    del recipe["graft"]
    aims = {run.matched.aim for run in Recipe.parse(recipe).comparison() if run.matched}
    assert aims == {trained_parameters(graft_config({"kind": "adapter", "width": 7}), tiny())}
    recipe["methods"] = METHODS
    with pytest.raises(RecipeError) as error:
        Recipe.parse(recipe)
    assert "first method" in str(error.value)


def test_a_graft_section_can_not_match(tmp_path: Path, tiny_backbone) -> None:
    with pytest.raises(GraftError) as error:
        Recipe.parse(values(tmp_path, tiny_backbone("llama"), graft={"kind": "lora", "capacity": "match"}))
    assert "capacity" in str(error.value)


@pytest.mark.usefixtures("undrawn_figures")
def test_a_comparison_reports_sizes_and_costs(tmp_path: Path, tiny_backbone) -> None:
    methods = METHODS | {"small": {"graft": {"kind": "lora", "rank": 1}, "training": {"steps": 3}}}
    recipe = values(tmp_path, tiny_backbone("llama"), methods=methods)
    recipe["evaluation"] = {"decode_prompts": 0, "own_tokens": 0}
    results = compare_recipe(Recipe.parse(recipe), progress=False, log=lambda _: None)
    sizes: Any = results.details["matched_sizes"]
    for name in METHODS:
        assert results.row(name).metrics["trainable_parameters"] == sizes[name]["parameters"]
    tokens = {row.id: row.metrics["train_tokens"] for row in results.rows if row.id != "backbone"}
    assert tokens == {"plain": 6 * 4 * 16, "oft": 6 * 4 * 16, "small": 3 * 4 * 16}
    assert all(value_of(results.row(name).metrics["train_seconds"]) > 0 for name in methods)
    found = [line for line in remarks(results) if "small" in line]
    assert any("train tokens" in line or "tokens read" in line for line in found)
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert "tokens read" in report
    assert f"{sizes['plain']['aim']:,}" in report


def compared(**metrics: list[float]) -> Results:
    rows = []
    for number in range(len(metrics["train_tokens"])):
        own = {name: values[number] for name, values in metrics.items()}
        rows.append(Row(id=f"row-{number}", label=f"row {number}", metrics=own))
    return Results.here("compare", rows, seeds=[0])


def test_rows_within_5_percent_are_equal() -> None:
    near = compared(trainable_parameters=[1000, 1049], train_tokens=[1000, 953])
    assert not remarks(near)
    far = compared(trainable_parameters=[1000, 1051], train_tokens=[1000, 949])
    assert len(remarks(far)) == 2
    assert all("row 1" in line for line in remarks(far))
    # Each is within 5% of the first one, but two of them are not of each other.
    assert len(remarks(compared(trainable_parameters=[1000, 960, 1045], train_tokens=[1000] * 3))) == 1
