"""Every export is compared with the grafted model; weights that are tied are untied where one of them changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cases import rotated
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError
from graftlm.export import export_graft, export_model, verifying
from graftlm.export import folder as export_folder
from graftlm.export.code import copy_code
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import ExportedAdapter, Graft
from graftlm.grafts.baselines.peft_graft import PeftGraft
from graftlm.grafts.neutral_residues import NeutralResidues
from graftlm.testing import attach_graft, logits, randomise
from tiny import tiny_ids, tiny_model, tiny_tokenizer

TOKENS = {"kind": "peft", "method": "TRAINABLE_TOKENS", "options": {"token_indices": [5, 9, 280]}}
EXPERT = {"kind": "token-routing", "experts": {"one": {"rank": 3, "targets": ["embedding", "ffn"]}}}
TIED = {
    "head": {"kind": "peft", "method": "LORA", "options": {"target_modules": ["lm_head"]}},
    "embeddings": {"kind": "peft", "method": "LORA", "options": {"target_modules": ["embed_tokens"]}},
    "both": {"kind": "peft", "method": "LORA", "options": {"target_modules": ["lm_head", "embed_tokens", "q_proj"]}},
    "neither": {"kind": "peft", "method": "LORA", "options": {"target_modules": ["q_proj"]}},
    "rows": TOKENS,
    "an expert": EXPERT,
    "all weights": {"kind": "finetune"},
}
STAYS_TIED = {"neither", "rows", "all weights"}


def trained(config: Any, backbone: Backbone) -> Graft:
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft


def tiny(family: str = "llama", **changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model(family, **changes), tiny_tokenizer())


@pytest.mark.parametrize(("name", "family"), rotated(TIED, ["llama", "gemma3"]))
def test_a_changed_end_of_a_tied_model_is_untied(family: str, name: str, tmp_path: Path) -> None:
    backbone = tiny(family, tie_word_embeddings=True)
    before = copy.deepcopy(backbone.model.state_dict())
    graft = trained(TIED[name], backbone)
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = logits(model.eval(), tiny_ids())
    bare = logits(backbone.model, tiny_ids())
    export_graft(graft, backbone, tmp_path / "model")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (expected - bare).abs().max() > 0.05
    torch.testing.assert_close(logits(saved, tiny_ids()), expected, rtol=1e-3, atol=1e-3)
    assert saved.config.tie_word_embeddings == (name in STAYS_TIED)
    assert backbone.config.tie_word_embeddings
    torch.testing.assert_close(dict(backbone.model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_that_predicts_masks_is_compared_too(family: str, tmp_path: Path) -> None:
    backbone = Backbone.wrap(tiny_model(family), tiny_tokenizer())
    graft = trained({"kind": "lora", "rank": 4}, backbone)
    export_graft(graft, backbone, tmp_path / "model")
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = logits(model.eval(), tiny_ids())
    saved = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(saved, tiny_ids()), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_a_merge_that_loses_the_graft_is_not_written(
    scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(PeftGraft, "merged", lambda _, backbone: copy.deepcopy(backbone.model))
    backbone = Backbone.wrap(tiny_model("llama").to(dtype), tiny_tokenizer())
    with randomise(attach_graft(backbone, TIED["neither"]).eval(), scale) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    with pytest.raises(ArtifactError):
        export_graft(graft, backbone, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.2])
def test_a_merge_in_half_precision_is_written_though_rounding_is_as_large_as_its_effect(
    scale: float, tmp_path: Path
) -> None:
    backbone = Backbone.wrap(tiny_model("llama").to(torch.bfloat16), tiny_tokenizer())
    with randomise(attach_graft(backbone, TIED["neither"]).eval(), scale) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    export_graft(graft, backbone, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").exists()


def gated(opens_at: float) -> tuple[Backbone, Graft]:
    """A graft with random weights whose gates open where their scores are above a number."""
    backbone = tiny("llama")
    graft = trained({"kind": "neutral-residues", "width": 8}, backbone)
    with torch.no_grad():
        for block in graft.blocks:  # type: ignore[union-attr]
            block.gate.bias.fill_(-opens_at)
    return backbone, graft


def without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exported code compute adapters without adding them."""
    whole = NeutralResidues.exported_adapter

    def exported(graft: NeutralResidues, backbone: Backbone) -> ExportedAdapter:
        adapter = whole(graft, backbone)
        return replace(adapter, source=adapter.source.replace("return adapted", "return 0 * adapted"))

    monkeypatch.setattr(NeutralResidues, "exported_adapter", exported)


def test_a_graft_that_is_silent_on_the_first_row_is_compared_on_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_adapters(monkeypatch)
    backbone, graft = gated(opens_at=2.5)
    first, *others = verifying._rows(backbone).split(1)
    bare = [logits(backbone.model, ids) for ids in (first, *others)]
    with GraftedModel(backbone, {"graft": graft}) as model:
        silent, *changed = [logits(model.eval(), ids) for ids in (first, *others)]
    torch.testing.assert_close(silent, bare[0])
    assert max(float((a - b).abs().max()) for a, b in zip(changed, bare[1:], strict=True)) > 0.01
    with pytest.raises(ArtifactError):
        export_graft(graft, backbone, tmp_path / "model")


@pytest.mark.parametrize(("opens_at", "warnings"), [(0.0, 0), (50.0, 1)])
def test_an_export_that_could_not_be_checked_is_logged(
    opens_at: float, warnings: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    backbone, graft = gated(opens_at=opens_at)
    export_graft(graft, backbone, tmp_path / "model")
    records = [record for record in caplog.records if record.name.startswith("graftlm.export")]
    assert [record.levelname for record in records] == ["WARNING"] * warnings


@pytest.mark.parametrize("broken", ["weights", "code"])
def test_a_model_without_a_graft_is_compared_too(broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def copy_broken(model: Any, folder: Path) -> bool:
        has_code = copy_code(model, folder)
        if broken == "code":
            file = folder / f"{type(model).__module__.rpartition('.')[2]}.py"
            file.write_text(file.read_text(encoding="utf-8") + "\nraise ImportError\n", encoding="utf-8")
        else:
            tensors = load_file(folder / "model.safetensors")
            tensors = {name: 1.1 * tensor for name, tensor in tensors.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return has_code

    backbone = Backbone.wrap(tiny_model("block-state"), tiny_tokenizer())
    export_model(backbone, tmp_path / "right")
    monkeypatch.setattr(export_folder, "copy_code", copy_broken)
    with pytest.raises(ArtifactError):
        export_model(backbone, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_resized_vocabulary_is_exported_with_its_rows(tmp_path: Path) -> None:
    backbone = tiny("llama", tie_word_embeddings=True)
    backbone.model.resize_token_embeddings(330, mean_resizing=False)
    resized = Backbone.wrap(backbone.model, tiny_tokenizer())
    graft = trained(TIED["head"], resized)
    export_graft(graft, resized, tmp_path / "model")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.get_input_embeddings().weight.shape[0] == saved.config.vocab_size == 330
