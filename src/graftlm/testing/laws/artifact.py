"""Laws of artifacts: a saved graft and an exported one have the same logits, and mistakes raise an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, RecipeError, WrongBackboneError
from graftlm.export import export_graft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Exportable, ExportsAdapter, Graft, graft_config
from graftlm.store.artifact import graft_tensors, load_graft, save_graft
from graftlm.testing.laws.base import LawsBase
from graftlm.testing.passes import logits
from graftlm.testing.tiny import tiny_ids, tiny_model, tiny_tokenizer

_REASONS = "without quantization|has a PEFT adapter|change with the text|so the graft can't be exported"
"""Why an exportable graft may still be refused: its backbone, or its config."""


class ArtifactLaws(LawsBase):
    """Laws of saving, loading and exporting."""

    def test_saved_graft_gives_the_same_logits(self, family: str, tmp_path: Path) -> None:
        backbone = self.backbone(family)
        with self.attach(family) as model:
            expected = logits(model, tiny_ids())
            graft = _only_graft(model)
            save_graft(graft, backbone, tmp_path / "attached")
        save_graft(graft, backbone, tmp_path / "detached")
        torch.manual_seed(1)  # Values that are drawn and not saved differ.
        for name in ("attached", "detached"):
            saved = load_graft(tmp_path / name, backbone)
            with GraftedModel(backbone, {"graft": saved}) as model:
                assert torch.equal(logits(model.eval(), tiny_ids()), expected)

    def test_only_the_trained_tensors_are_saved(self, family: str) -> None:
        with self.attach(family) as model:
            saved = graft_tensors(_only_graft(model)).values()
            trained = model.trainable_parameters().values()
            assert sum(tensor.numel() for tensor in saved) == sum(tensor.numel() for tensor in trained)

    def test_mistakes_get_one_sentence(self, tmp_path: Path) -> None:
        family = self.families[0]
        with self.attach(family) as model:
            folder = save_graft(_only_graft(model), self.backbone(family), tmp_path / "graft")
        with pytest.raises(RecipeError) as unknown_key:
            graft_config({**self.config, "unheard_of": 1})
        assert "unheard_of" in str(unknown_key.value)
        other = Backbone.wrap(tiny_model("llama", seed=1, num_hidden_layers=4), tiny_tokenizer(), "other")
        with pytest.raises(WrongBackboneError) as wrong_backbone:
            load_graft(folder, other)
        assert "other" in str(wrong_backbone.value)
        tensors = folder / "graft.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-1])
        with pytest.raises(ArtifactError):
            load_graft(folder, self.backbone(family))

    def test_exported_graft_gives_the_same_logits(self, family: str, tmp_path: Path) -> None:
        backbone = self.backbone(family)
        with self.attach(family) as model:
            expected = logits(model, tiny_ids())
            graft = _only_graft(model)
        try:
            folder = export_graft(graft, backbone, tmp_path / "model")
        except ArtifactError as error:
            refusal = str(error)
        else:
            self._check_exported(family, folder, expected)
            return
        is_exportable = isinstance(graft, Exportable | ExportsAdapter)
        reasons = _REASONS if is_exportable else "adds modules that"
        assert re.search(reasons, refusal), refusal

    def _check_exported(self, family: str, folder: Path, expected: Tensor) -> None:
        """Compare the logits of an exported model with those of the grafted one."""
        has_code = any(folder.glob("*.py"))
        loader: Any = AutoModelForCausalLM if has_code else type(self.backbone(family).model)
        plain = loader.from_pretrained(folder, trust_remote_code=has_code)
        self.assert_close(family, logits(plain, tiny_ids()), expected, rtol=1e-4, atol=1e-4)


def _only_graft(model: GraftedModel) -> Graft:
    graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft
