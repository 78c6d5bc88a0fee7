"""A report of a composition names the models that it runs, counts them, and measures each alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.tools import invoke
from graftlm.backbone import load_backbone
from graftlm.data import SourceConfig
from graftlm.evaluation import Results, print_table, score
from graftlm.evaluation.report_tables import render_markdown
from graftlm.runs.recipe import Recipe, run_recipe
from tests.runs.test_recipe import values
from tiny import save_tiny_backbone, tiny_model, tiny_tokenizer

LIMIT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("composition")


@pytest.fixture(scope="module")
def results(folder: Path, tiny_backbone: Any) -> Results:
    """A composition with a model of the backbone's tokenizer, one of another, and one that reads too few tokens."""
    save_tiny_backbone(folder / "specialist", "qwen3", seed=3)
    save_tiny_backbone(folder / "stranger", "llama", seed=4)
    tiny_tokenizer(280).save_pretrained(folder / "stranger")
    graft = {
        "kind": "composition",
        "stride": 1,
        "augmenting": {name: {"name": str(folder / name)} for name in ("specialist", "stranger")},
    }
    changed = values(folder, tiny_backbone("llama"), graft=graft)
    changed["training"]["steps"] = 1
    changed["evaluation"] = {"decode_prompts": 0, "own_tokens": 0, "limit_tokens": LIMIT}
    return run_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_all_models_that_run_are_named_and_counted(results: Results, folder: Path) -> None:
    metrics = results.row("composition").metrics
    others = parameters(tiny_model("qwen3")) + parameters(tiny_model("llama"))
    backbone = results.row("backbone").metrics["total_parameters"]
    trained = metrics["trainable_parameters"]
    assert metrics["total_parameters"] == backbone + trained + others  # type: ignore[operator]
    out = io.StringIO()
    print_table(results, Console(file=out, width=200))
    for text in (render_markdown(results), out.getvalue()):
        assert str(folder / "specialist") in text
        assert str(folder / "stranger") in text


def test_a_model_with_the_same_tokens_has_a_row_like_the_others(results: Results, folder: Path) -> None:
    alone = results.row("composition/specialist")
    assert {"old", "new", "learned", "forgotten"} <= alone.metrics.keys()
    specialist = load_backbone(str(folder / "specialist"))
    source = SourceConfig(path=str(folder / "new-test.txt"))
    text = Path(source.name).read_text(encoding="utf-8")
    expected = score(specialist.model, specialist.tokenizer, [text], length=16, limit_tokens=LIMIT)  # type: ignore[arg-type]
    assert alone.metrics["new"].mean == pytest.approx(expected.value("nats_per_token"), rel=1e-5)  # type: ignore[union-attr]


def test_a_model_with_other_tokens_is_compared_in_bits_per_byte_of_the_same_text(results: Results) -> None:
    alone = results.row("composition/stranger")
    assert alone.metrics.keys() == {"old_bpb", "new_bpb", "total_parameters"}


def test_pairs_are_numbered_as_pairs(results: Results, folder: Path) -> None:
    shown = invoke("inspect", str(folder / "run" / "graft")).out
    heads = {line.split()[0] for line in shown.splitlines() if line.strip()}
    assert "pair" in heads
    assert "layer" not in heads
