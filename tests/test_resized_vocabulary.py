"""Adapters that were trained on a resized vocabulary: they load with their tokenizer, and printed advice runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from cli.tools import invoke
from graftlm.errors import ArtifactError
from graftlm.evaluation.audit.loading import load_pair
from graftlm.grafts import graft_class
from graftlm.testing import logits
from tiny import TOKENS, save_tiny_backbone, tiny_model, tiny_tokenizer

ROWS = 320
IDS = torch.tensor([[5, 301, 310, ROWS - 1]])
KINDS: dict[str, dict[str, Any]] = {
    "rows that PEFT saves": {},
    "whole modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
}
LOST: dict[str, Any] = {"target_modules": ["q_proj", "embed_tokens"]}
"""PEFT saves the new rows of the embeddings, but not those of the head."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("base") / "base", "llama")


def resized_adapter(base: Path, folder: Path, **options: Any) -> Tensor:
    """Write an adapter of 20 added tokens with its tokenizer; return its logits."""
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<new{number}>" for number in range(ROWS - TOKENS)])
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options})
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)
    return logits(adapted, IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_loads_the_adapter_with_its_tokenizer(kind: str, base: Path, tmp_path: Path) -> None:
    expected = resized_adapter(base, tmp_path / "adapter", **KINDS[kind])
    with load_pair(str(base), str(tmp_path / "adapter"), device="cpu") as (first, second):
        torch.testing.assert_close(logits(second.predictor, IDS), expected, rtol=1e-4, atol=1e-4)
        assert first.backbone.config.vocab_size == 304, "the base keeps its own vocabulary"
        assert len(second.tokenizer) == ROWS


def test_an_adapter_without_its_tokenizer_says_what_to_do(base: Path, tmp_path: Path) -> None:
    resized_adapter(base, tmp_path / "adapter")
    for path in (tmp_path / "adapter").glob("*token*"):
        path.unlink()
    with pytest.raises(ArtifactError, match=f"{ROWS}.*304"), load_pair(str(base), str(tmp_path / "adapter")):
        pass


def test_a_tokenizer_of_more_tokens_than_rows_is_refused(base: Path, tmp_path: Path) -> None:
    resized_adapter(base, tmp_path / "adapter")
    larger = tiny_tokenizer()
    larger.add_tokens([f"<new{number}>" for number in range(ROWS)])
    larger.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ArtifactError, match=str(ROWS)), load_pair(str(base), str(tmp_path / "adapter")):
        pass


def test_an_adapter_that_lost_rows_of_the_head_is_refused(base: Path, tmp_path: Path) -> None:
    resized_adapter(base, tmp_path / "adapter", **LOST)
    with pytest.raises(ArtifactError, match="lm_head"), load_pair(str(base), str(tmp_path / "adapter")):
        pass


def test_rows_of_a_tied_head_are_those_of_the_embeddings(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    expected = resized_adapter(tmp_path / "base", tmp_path / "adapter")
    with load_pair(str(tmp_path / "base"), str(tmp_path / "adapter"), device="cpu") as (_, second):
        torch.testing.assert_close(logits(second.predictor, IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_merge_runs(kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.cli.display._PIPE_WIDTH", 600)
    folder = tmp_path / "a"
    expected = resized_adapter(base, folder, **KINDS[kind])
    printed = " ".join(invoke("import-peft", str(folder)).out.split())
    code = re.search(r" merge ((?:model\.|PeftModel).*?merge_and_unload\(\))", printed)
    assert code is not None, printed
    *statements, expression = code[1].split("; ")
    names = {"model": AutoModelForCausalLM.from_pretrained(base), "PeftModel": PeftModel}
    for statement in statements:
        exec(statement, names)
    merged: Any = eval(expression, names)
    torch.testing.assert_close(logits(merged, IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_advice_of_a_refusal_runs(tied: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama", tie_word_embeddings=tied).save_pretrained(base)
    expected = resized_adapter(base, tmp_path / "a", **KINDS["whole modules"])
    reader: Any = graft_class("token-routing")
    with pytest.raises(ArtifactError) as error:
        reader.adapter_section("a", tmp_path / "a")
    names = {
        "model": AutoModelForCausalLM.from_pretrained(base),
        "PeftModel": PeftModel,
        "NEW": str(tmp_path / "new"),
    }
    found = re.search(r"\((model\..*?)\), and .*?(PeftModel\..*?\(NEW\))", str(error.value))
    assert found is not None, error.value
    advice = [*found[1].split("; "), found[2]]
    for statement in advice:
        exec(statement, names)
    written = json.loads((tmp_path / "new/config.json").read_text())
    assert written["tie_word_embeddings"] is False, "other runtimes tie by the config alone"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(logits(merged, IDS), expected, rtol=1e-4, atol=1e-4)
