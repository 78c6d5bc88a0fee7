"""`graft export`: a plain model with the same logits, or a sentence; the laws compare every kind and family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli.tools import invoke
from graftlm.backbone import load_backbone
from graftlm.errors import ArtifactError
from graftlm.export import export_graft
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import save_graft
from graftlm.testing import attach_graft, logits, randomise
from tiny import BackboneFolder, tiny_ids

PLAIN = """
import json, sys
sys.modules["graftlm"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("The quick brown fox", return_tensors="pt")["input_ids"]
print(json.dumps(model(ids).logits[0, -1, :8].tolist()))
"""


@pytest.mark.slow
def test_an_exported_graft_needs_transformers_alone(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone("llama"))
    ids = backbone.need_tokenizer()("The quick brown fox", return_tensors="pt")["input_ids"]
    bare = logits(backbone.model, ids)
    with randomise(attach_graft(backbone, {"kind": "lora", "rank": 4}).eval(), 0.2) as model:
        graft = model.grafts["graft"]
        expected = logits(model, ids)[0, -1, :8]
        save_graft(graft, backbone, tmp_path / "graft")  # type: ignore[arg-type]
    outcome = invoke("export", str(tmp_path / "graft"), "--to", str(tmp_path / "model"), "--json")
    assert json.loads(outcome.out) == {"folder": str(tmp_path / "model")}, outcome.err
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "model")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch.testing.assert_close(torch.tensor(json.loads(printed)), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(backbone.model, ids), bare)
    assert "base_model:" in (tmp_path / "model/README.md").read_text()
    again = invoke("export", str(tmp_path / "graft"), "--to", str(tmp_path / "model"))
    assert again.code == 2
    assert str(tmp_path / "model") in again.err


def test_a_detached_graft_can_be_attached_after_its_export(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone("llama"))
    with randomise(attach_graft(backbone, {"kind": "lora", "rank": 4}).eval(), 0.2) as model:
        graft, expected = model.grafts["graft"], logits(model, tiny_ids())
    export_graft(graft, backbone, tmp_path / "model")  # type: ignore[arg-type]
    with GraftedModel(backbone, {"graft": graft}) as model:  # type: ignore[dict-item]
        assert torch.equal(logits(model.eval(), tiny_ids()), expected)


def test_a_file_in_the_way_is_left_alone(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone("llama"))
    with attach_graft(backbone, {"kind": "finetune"}) as model:
        graft = model.grafts["graft"]
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ArtifactError):
        export_graft(graft, backbone, tmp_path / "model")  # type: ignore[arg-type]
    assert (tmp_path / "model").read_text() == "mine"
