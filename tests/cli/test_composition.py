"""Two models composed from the command line: trained, measured, used, looked into, and found again after a move."""

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
    """A recipe whose augmenting models are of the backbone's tokenizer, and of another one."""
    save_tiny_backbone(home / "specialist", "qwen3", seed=3)
    save_tiny_backbone(home / "stranger", "llama", seed=4)
    tiny_tokenizer(280).save_pretrained(home / "stranger")
    graft = {
        "kind": "composition",
        "stride": 1,
        "augmenting": {"french": {"name": "specialist"}, "stranger": {"name": "stranger", "pairs": [[0, 1]]}},
    }
    (home / "composition.yaml").write_text(yaml.safe_dump(RECIPE | {"graft": graft, "out": "runs/composed"}))
    return "composition.yaml"


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

    inspected = graft("inspect", "runs/composed/graft")
    assert inspected.code == 0, inspected.err
    for shown in ("french: pairs of layers 0 to 0, 1 to 1", "french attention here, new", "french: parameters 23,424"):
        assert shown in " ".join(inspected.out.split()), shown

    inspected = graft("inspect", "runs/composed/graft", "--backbone", "llama", "--text", "new/test.txt")
    assert inspected.code == 0, inspected.err
    for shown in (
        "french: pairs of layers 0 to 0, 1 to 1",
        "stranger: pairs of layers 0 to 1",
        "french: parameters 23,424",
        "paper's n(D_A D_B + 3 D_B^2) 18,432",
        "french attention here",
        "stranger written",
    ):
        assert shown in " ".join(inspected.out.split()), shown

    shutil.move(home / "specialist", home / "moved")
    lost = graft("generate", "runs/composed/graft", "le renard")
    assert lost.code == 2
    assert lost.err.startswith("error: The augmenting model french can't be used.")
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


def test_methods_tell_what_must_be_said(graft: Graft) -> None:
    listed = json.loads(graft("methods", "--json").out)
    (composition,) = (method for method in listed if method["kind"] == "composition")
    assert composition["config"]["augmenting"] is None
    assert composition["config"]["stride"] == 4


def test_compare_leaves_out_what_needs_settings(home: Path, recipe: str, graft: Graft) -> None:
    compared = graft("compare", "recipe.yaml", "--out", "runs/every-kind", "training.steps=1", "--quiet", "--json")
    assert compared.code == 0, compared.err
    rows = [row["id"] for row in json.loads(compared.out)["results"]["rows"]]
    assert rows == ["backbone", "neutral-residues", "adapter", "lora", "finetune"]
