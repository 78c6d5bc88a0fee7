"""No two measurements of a run have one name, and none is set that measures nothing."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.errors import RecipeError
from graftlm.evaluation.measured_names import name_problems
from graftlm.runs.recipe import Recipe

SOURCE = {"path": "text.txt"}


def recipe_of(test: dict[str, Any], evaluation: dict[str, Any], new: Any = (SOURCE,), **sections: Any) -> Recipe:
    return Recipe.parse(
        {
            "backbone": {"name": "model"},
            "graft": {"kind": "lora", "rank": 2},
            "data": {"new": new if isinstance(new, dict) else list(new), "replay_fraction": 0, "test": test},
            "training": {"steps": 1},
            "evaluation": evaluation,
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("tests", "benchmarks"),
    [
        (["da", "da_bpb"], []),
        (["own_kl"], []),
        (["train_tokens"], []),
        (["da", "learned_da"], []),
        (["da"], ["da"]),
        (["da"], ["learned_da"]),
        ([], ["arc", "arc_change"]),
        ([], ["trainable_parameters"]),
    ],
)
def test_two_metrics_of_one_name_are_refused(tests: list[str], benchmarks: list[str]) -> None:
    assert list(name_problems(tests, benchmarks, with_sets=False))


def test_usual_names_are_not_refused() -> None:
    names = ["old", "new", "da", "sk", "wiki", "code"]
    assert list(name_problems(names, ["ifeval", "bbh", "nq_open"], with_sets=False)) == []


@pytest.mark.parametrize("name", ["", "a b", "../x"])
def test_a_set_has_a_plain_name(name: str) -> None:
    assert list(name_problems([name], [], with_sets=True))


def test_a_recipe_with_a_clash_is_refused() -> None:
    recipe_of({"da": [SOURCE]}, {}, new={"da": [SOURCE]})
    with pytest.raises(RecipeError) as error:
        recipe_of({"da": [SOURCE]}, {"harness": [{"task": "arc_easy", "name": "da"}]}, new={"da": [SOURCE]})
    assert "da" in str(error.value)


def test_a_budget_needs_old_text() -> None:
    recipe_of({"old": [SOURCE]}, {"forgetting_budget": 0.1})
    with pytest.raises(RecipeError) as error:
        recipe_of({"new": [SOURCE]}, {"forgetting_budget": 0.1})
    assert "forgetting_budget" in str(error.value)


def test_the_bare_backbone_reads_no_added_tokens() -> None:
    backbone = {"name": "model", "add_tokens": ["<tool>"]}
    recipe_of({}, {}, backbone=backbone)
    with pytest.raises(RecipeError) as error:
        Recipe.parse(
            {
                "backbone": backbone,
                "graft": {"kind": "lora", "rank": 2},
                "data": {"new": [SOURCE], "replay_fraction": 0, "anchor": 0.1},
                "training": {"steps": 1},
            }
        )
    assert "anchor" in str(error.value)
