"""What a run lacks is said before anything is sampled or trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.tools import invoke
from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.runs.recipe import Recipe, run_recipe
from tests.runs.test_recipe import values
from token_routing.test_adapters import Case


@pytest.fixture
def routed(tmp_path: Path, tiny_backbone: Any) -> dict[str, Any]:
    """A recipe of two experts that gives no examples to the second."""
    experts = {}
    for name in ("maths", "code"):
        Case({}).adapter(tmp_path / name)
        experts[name] = {"path": str(tmp_path / name)}
    experts["maths"]["texts"] = ["one and two are three"]
    graft = {"kind": "token-routing", "experts": experts}
    changed = values(tmp_path, tiny_backbone("llama"), graft=graft)
    changed["training"] = {"steps": 0}
    changed["evaluation"] = {"decode_prompts": 0, "own_tokens": 64}
    return changed


def refused(recipe: dict[str, Any], error: type[GraftError]) -> str:
    lines: list[str] = []
    with pytest.raises(error) as caught:
        run_recipe(Recipe.parse(recipe), progress=False, log=lines.append)
    assert not lines, "nothing was sampled or measured"
    return str(caught.value)


def test_missing_examples_are_named_before_own_text_is_sampled(routed: dict[str, Any]) -> None:
    assert "code" in refused(routed, RecipeError)


def test_missing_files_of_examples_are_named_before_own_text_is_sampled(routed: dict[str, Any]) -> None:
    routed["graft"]["experts"]["code"]["sources"] = [{"path": "nowhere.txt"}]
    assert "nowhere.txt" in refused(routed, DataError)


def test_missing_questions_are_named_before_own_text_is_sampled(routed: dict[str, Any]) -> None:
    routed["graft"]["experts"]["code"]["texts"] = ["def f(x):"]
    routed["evaluation"]["ask"] = "nowhere.txt"
    assert "nowhere.txt" in refused(routed, GraftError)


def test_the_section_that_import_peft_prints_runs_as_it_is(tmp_path: Path, tiny_backbone: Any) -> None:
    Case({}).adapter(tmp_path / "maths")
    outcome = invoke("import-peft", str(tmp_path / "maths"), "--json")
    document = json.loads(outcome.out)
    changed = values(tmp_path, tiny_backbone("llama"), graft=document["sections"]["token-routing"])
    changed["training"] = {"steps": 0}
    changed["evaluation"] = {"decode_prompts": 0, "own_tokens": 0}
    changed["data"] = {"test": changed["data"]["test"], "length": 16}
    results = run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    assert "forgotten" in results.row("token-routing").metrics
    assert "texts" in document["hints"]["token-routing"], "several experts need examples"
