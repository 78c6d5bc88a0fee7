"""Composed models from the command line: trained, measured, used, inspected, and found again after a move."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from cli.tools import RECIPE, Graft
from graftlm.evaluation import Results
from tiny import BackboneFolder, save_tiny_backbone, tiny_tokenizer


@pytest.fixture(scope="module")
def recipe(home: Path, tiny_backbone: BackboneFolder) -> str:
    """A recipe with two augmenting models: one with the backbone's tokenizer, and one with another tokenizer."""
    save_tiny_backbone(home / "specialist", "qwen3", seed=3)
    save_tiny_backbone(home / "stranger", "llama", seed=4)
    tiny_tokenizer(280).save_pretrained(home / "stranger")
    graft = {
        "kind": "composition",
        "stride": 1,
        "augmenting": {
            "french": {"name": "specialist"},
            "stranger": {"name": "stranger", "pairs": [[0, 1]]},
        },
    }
    values = {**RECIPE, "graft": graft, "out": "runs/composed"}
    (home / "composition.yaml").write_text(yaml.safe_dump(values))
    return "composition.yaml"


def shown_by_inspect(graft: Graft, *options: str) -> str:
    """Return the output of `graft inspect` with single spaces."""
    outcome = graft("inspect", "runs/composed/graft", *options)
    assert outcome.code == 0, outcome.err
    return " ".join(outcome.out.split())


@pytest.mark.slow
def test_composed_from_recipe_to_text(home: Path, recipe: str, graft: Graft) -> None:
    trained = graft("train", recipe)
    assert trained.code == 0, trained.err
    assert "composition" in trained.out
    results = Results.read(home / "runs/composed")
    own = results.row("composition").metrics["trainable_parameters"]
    assert own == 3 * (48 * 48 + 4 * 48 * 48 + 4 * 48)  # matrices, gains and biases

    text = graft("generate", "runs/composed/graft", "le renard", "--max-new-tokens", "5", "--num-beams", "2")
    assert (text.code, text.err) == (0, "")
    assert text.out.startswith("le renard")

    shown = shown_by_inspect(graft)
    assert "french: pairs of layers 0 to 0, 1 to 1" in shown
    assert "french attention here, new" in shown
    assert "french: parameters 23,424" in shown

    shown = shown_by_inspect(graft, "--backbone", "llama", "--text", "new/test.txt")
    assert "french: pairs of layers 0 to 0, 1 to 1" in shown
    assert "stranger: pairs of layers 0 to 1" in shown
    assert "french: parameters 23,424" in shown
    assert "18,432" in shown  # the paper's n(D_A D_B + 3 D_B^2)
    assert "french attention here" in shown
    assert "stranger written" in shown

    shutil.move(home / "specialist", home / "moved")
    lost = graft("generate", "runs/composed/graft", "le renard")
    assert lost.code == 2
    assert "augmenting.french.name" in lost.err
    assert lost.err.count("\n") == 1
    again = graft(
        "generate",
        "runs/composed/graft",
        "le renard",
        "--set",
        "augmenting.french.name=moved",
        "--max-new-tokens",
        "5",
        "--json",
    )
    assert again.code == 0, again.err
    assert json.loads(again.out)["tokens"] == 5
    shutil.move(home / "moved", home / "specialist")


def test_methods_lists_keys_without_a_default(graft: Graft) -> None:
    listed = json.loads(graft("methods", "--json").out)
    composition = next(method for method in listed if method["kind"] == "composition")
    assert composition["config"]["augmenting"] is None
    assert composition["config"]["stride"] == 4


@pytest.mark.slow
def test_compare_leaves_out_what_needs_settings(home: Path, recipe: str, graft: Graft) -> None:
    compared = graft("compare", "recipe.yaml", "--out", "runs/every-kind", "training.steps=1", "--quiet", "--json")
    assert compared.code == 0, compared.err
    rows = [row["id"] for row in json.loads(compared.out)["results"]["rows"]]
    assert rows == ["backbone", "neutral-residues", "adapter", "lora", "finetune"]
