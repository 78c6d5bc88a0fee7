"""Several grafts of one backbone as adapters of PEFT, which fill the blank adapters of a carrier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cli.tools import invoke
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError, WrongBackboneError
from graftlm.export import export_graft, export_many, export_model, export_peft
from graftlm.export import many as many_module
from graftlm.export.carrier import Carrier, pieces_of
from graftlm.export.many import SETTINGS
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import ExportsAdapter, Graft
from graftlm.store.artifact import save_graft
from graftlm.testing import attach_graft, logits, randomise
from tiny import BackboneFolder, tiny_ids, tiny_model, tiny_tokenizer

EXPERTS = {"one": {"rank": 3, "targets": ["ffn"]}, "two": {"rank": 3, "targets": ["ffn"], "alpha": 5}}
GRAFTS: dict[str, dict[str, Any]] = {
    "relu": {"kind": "neutral-residues", "width": 9},
    "sigmoid": {"kind": "neutral-residues", "width": 70, "gate": "sigmoid"},
    "random-gate": {"kind": "neutral-residues", "width": 5, "gate_init": "random"},
    "adapter": {"kind": "adapter", "width": 7},
    "lora": {"kind": "lora", "rank": 4, "scale": 2.0},
    "exact": {"kind": "token-routing", "experts": EXPERTS, "fixed": {"one": 0.6, "two": 0.3}},
    "linear": {
        "kind": "token-routing",
        "experts": EXPERTS,
        "fixed": {"one": 0.6, "two": 0.3},
        "combination": "linear",
    },
    "peft": {
        "kind": "peft",
        "method": "LORA",
        "options": {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 7, "use_rslora": True},
    },
}
FAMILIES = ["llama", "gpt_neox", "gpt2", "olmo2"]


def tiny(family: str = "llama", **changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model(family, **changes), tiny_tokenizer())


def trained(config: dict[str, Any], backbone: Backbone) -> Graft:
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft


def grafted_logits(grafts: dict[str, Graft], backbone: Backbone) -> torch.Tensor:
    with GraftedModel(backbone, grafts) as model:
        return logits(model.eval(), tiny_ids())


def written_logits(folder: Path, name: str | None, backbone: Backbone) -> torch.Tensor:
    """Return the logits of an export's model with one of its adapters, or without."""
    model: Any = backbone.model
    if (folder / "carrier").exists():
        model = AutoModelForCausalLM.from_pretrained(folder / "carrier", trust_remote_code=True)
    if name is None:
        return logits(model.eval(), tiny_ids())
    adapted = PeftModel.from_pretrained(model, str(folder / name)).eval()
    try:
        return logits(adapted, tiny_ids())
    finally:
        adapted.unload()


@pytest.mark.parametrize(
    "family", ["llama", "olmo2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "gpt2"))]
)
def test_each_adapter_on_the_carrier_is_its_graft(family: str, tmp_path: Path) -> None:
    backbone = tiny(family)
    own = {name: config for name, config in GRAFTS.items() if family == "llama" or name != "peft"}
    grafts = {name: trained(config, backbone) for name, config in own.items()}
    folder = export_many(grafts, backbone, tmp_path / "many")
    bare = logits(backbone.model, tiny_ids())
    torch.testing.assert_close(written_logits(folder, None, backbone), bare, rtol=1e-4, atol=1e-4)
    for name, graft in grafts.items():
        expected = grafted_logits({"graft": graft}, backbone)
        assert (expected - bare).abs().max() > 0.01, name
        torch.testing.assert_close(written_logits(folder, name, backbone), expected, rtol=1e-3, atol=1e-3)


def test_a_mixture_is_the_weighted_sum_of_what_its_grafts_add(tmp_path: Path) -> None:
    backbone = tiny()
    names = ["relu", "adapter", "exact"]
    grafts = {name: trained(GRAFTS[name], backbone) for name in names}
    weights = {"relu": 0.7, "adapter": -0.5, "exact": 2.0}
    folder = export_many(grafts, backbone, tmp_path / "many", {"sum": weights})
    with torch.no_grad():
        for name, matrix in (("relu", "w_o.weight"), ("adapter", "w_o.weight"), ("exact", ".b.")):
            for parameter_name, parameter in grafts[name].named_parameters():
                if matrix in parameter_name:
                    parameter.mul_(weights[name])
    expected = grafted_logits(grafts, backbone)
    torch.testing.assert_close(written_logits(folder, "sum", backbone), expected, rtol=1e-3, atol=1e-3)


def test_without_adapters_the_backbone_is_not_copied(tmp_path: Path) -> None:
    backbone = tiny()
    grafts = {name: trained(GRAFTS[name], backbone) for name in ("lora", "exact")}
    folder = export_many(grafts, backbone, tmp_path / "many")
    settings = json.loads((folder / SETTINGS).read_text())
    assert settings["model"] == backbone.name
    assert not (folder / "carrier").exists()
    expected = grafted_logits({"graft": grafts["lora"]}, backbone)
    torch.testing.assert_close(written_logits(folder, "lora", backbone), expected, rtol=1e-3, atol=1e-3)


def test_a_backbone_of_a_gguf_file_is_written_for_lora_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backbone = tiny()
    graft = trained(GRAFTS["lora"], backbone)
    monkeypatch.setattr(many_module, "names_gguf_file", lambda name: name == backbone.name)
    folder = export_many({"lora": graft}, backbone, tmp_path / "many")
    assert json.loads((folder / SETTINGS).read_text())["model"] == "carrier"
    expected = grafted_logits({"graft": graft}, backbone)
    torch.testing.assert_close(written_logits(folder, "lora", backbone), expected, rtol=1e-3, atol=1e-3)


def test_an_adapter_wider_than_a_lora_adapter_may_be_fills_several_blanks(tmp_path: Path) -> None:
    backbone = tiny()
    graft = trained({"kind": "neutral-residues", "width": 700}, backbone)
    folder = export_many({"wide": graft}, backbone, tmp_path / "many")
    settings = json.loads((folder / SETTINGS).read_text())
    assert settings["max_lora_rank"] <= 512
    expected = grafted_logits({"graft": graft}, backbone)
    torch.testing.assert_close(written_logits(folder, "wide", backbone), expected, rtol=1e-3, atol=1e-3)


def test_vllm_gets_one_slot_more_than_adapters_and_every_module(tmp_path: Path) -> None:
    backbone = tiny()
    grafts = {name: trained(GRAFTS[name], backbone) for name in ("relu", "lora")}
    folder = export_many(grafts, backbone, tmp_path / "many", {"both": {"relu": 1.0, "lora": 1.0}})
    settings = json.loads((folder / SETTINGS).read_text())
    assert settings["adapters"] == ["relu", "lora", "both"]
    assert settings["max_loras"] == 4
    assert {"w_i", "w_g", "w_o", "adapter_gate", "up_proj"} <= set(settings["target_modules"])
    card = (folder / "README.md").read_text()
    assert "--max-loras 4" in card
    assert "--lora-modules relu=relu lora=lora both=both" in card


def test_the_carrier_is_as_small_as_its_entries_allow() -> None:
    backbone = tiny()
    pieces = {}
    for name in ("relu", "adapter", "sigmoid"):
        graft = trained(GRAFTS[name], backbone)
        assert isinstance(graft, ExportsAdapter)
        pieces[name] = pieces_of(graft.exported_adapter(backbone))
    alone = Carrier.of(list(pieces.values()))
    assert [blank.gate for blank in alone.blanks] == ["relu", "sigmoid"]
    assert alone.width == 128  # 70 units, to the next multiple of 64
    both = [*pieces["relu"], *pieces["adapter"]]
    assert not alone.fits(both)
    assert Carrier.of([both]).fits(both)
    assert not Carrier.of([pieces["relu"]]).fits(pieces["sigmoid"])


def test_a_fixed_mixture_is_an_adapter_of_peft(tmp_path: Path) -> None:
    backbone = tiny()
    graft = trained(GRAFTS["exact"], backbone)
    export_peft(graft, backbone, tmp_path / "adapter")
    expected = grafted_logits({"graft": graft}, backbone)
    torch.testing.assert_close(written_logits(tmp_path, "adapter", backbone), expected, rtol=1e-3, atol=1e-3)


def test_a_wrong_adapter_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoilt(updates: dict[str, Any], *_: object) -> dict[str, Any]:
        return {path: type(update)(update.a, 1.5 * update.b) for path, update in updates.items()}

    write = many_module.write_peft
    monkeypatch.setattr(many_module, "write_peft", lambda updates, *args: write(spoilt(updates), *args))
    backbone = tiny()
    graft = trained(GRAFTS["relu"], backbone)
    with pytest.raises(ArtifactError):
        export_many({"relu": graft}, backbone, tmp_path / "many")
    assert not (tmp_path / "many").exists()


REFUSED: dict[str, dict[str, Any]] = {
    "all weights": {"kind": "finetune"},
    "more layers": {"kind": "llama-pro", "blocks": 1},
    "weights by the text": {"kind": "token-routing", "experts": EXPERTS},
    "magnitudes": {"kind": "peft", "method": "DORA", "options": {"target_modules": ["q_proj"], "r": 2}},
    "an embedding": {"kind": "peft", "method": "LORA", "options": {"target_modules": ["embed_tokens"], "r": 2}},
    "another method": {
        "kind": "peft",
        "method": "OFT",
        "options": {"target_modules": ["q_proj"], "r": 0, "oft_block_size": 4},
    },
    "too wide a rank": {"kind": "lora", "rank": 600},
}


def test_lora_on_the_parameters_of_experts_is_refused(tmp_path: Path) -> None:
    backbone = tiny("mixtral")
    graft = trained(GRAFTS["lora"], backbone)
    for export in (lambda to: export_many({"graft": graft}, backbone, to), lambda to: export_peft(graft, backbone, to)):
        with pytest.raises(ArtifactError, match="experts"):
            export(tmp_path / "to")
        assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_lora_adapter_cannot_do_is_refused(name: str, tmp_path: Path) -> None:
    backbone = tiny()
    graft = trained(REFUSED[name], backbone)
    with pytest.raises(ArtifactError):
        export_many({"graft": graft}, backbone, tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_experts_of_a_mixture_are_no_linear_modules(tmp_path: Path) -> None:
    backbone = tiny("mixtral")
    graft = trained({"kind": "lora", "rank": 2}, backbone)
    with pytest.raises(ArtifactError):
        export_many({"graft": graft}, backbone, tmp_path / "many")


def test_bad_names_and_weights_are_refused(tmp_path: Path) -> None:
    backbone = tiny()
    graft = trained(GRAFTS["relu"], backbone)
    to = tmp_path / "many"
    for grafts, mixtures in (
        ({}, {}),
        ({"a b": graft}, {}),
        ({"carrier": graft}, {}),
        ({"one": graft}, {"one": {"one": 1.0}}),
        ({"one": graft}, {"two": {}}),
        ({"one": graft}, {"two": {"other": 1.0}}),
        ({"one": graft}, {"two": {"one": 0.0}}),
        ({"one": graft}, {"two": {"one": 101.0}}),
        ({"one": graft}, {"two": {"one": float("nan")}}),
        ({"one": graft}, {"two": {"one": 1e39}}),
    ):
        with pytest.raises(GraftError):
            export_many(grafts, backbone, to, mixtures)
    with pytest.raises(WrongBackboneError):
        export_many({"one": graft}, tiny(hidden_size=32), to)
    with pytest.raises(ArtifactError):
        export_peft(graft, backbone, to)
    assert not to.exists()


def test_the_command_writes_all_grafts(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    from graftlm.backbone import load_backbone

    name = tiny_backbone("llama")
    backbone = load_backbone(name)
    for run in ("danish", "law"):
        save_graft(trained(GRAFTS["relu"], backbone), backbone, tmp_path / run / "graft")
    runs = [str(tmp_path / "danish"), f"legal={tmp_path / 'law/graft'}"]
    to = tmp_path / "many"
    outcome = invoke("export", *runs, "--many", "--mix", "both=danish:0.7+legal", "--to", str(to), "--json")
    assert json.loads(outcome.out) == {"folder": str(to)}, outcome.err
    settings = json.loads((to / SETTINGS).read_text())
    assert settings["adapters"] == ["danish", "legal", "both"]


@pytest.mark.parametrize(
    "options",
    [
        ["a", "b", "--to", "c"],
        ["a", "--mix", "b=a", "--to", "c"],
        ["a", "--many", "--to-peft", "--to", "c"],
        ["a", "b", "--many", "--set", "fixed={}", "--to", "c"],
        ["x=a", "x=b", "--many", "--to", "c"],
        ["a", "--many", "--mix", "b=a:x", "--to", "c"],
        ["a", "--many", "--mix", "b=a:101", "--to", "c"],
        ["a", "--many", "--mix", "b", "--to", "c"],
        ["a", "--many", "--mix", "b=a+a", "--to", "c"],
        ["a", "--many", "--mix", "b=a", "--mix", "b=a", "--to", "c"],
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str]) -> None:
    outcome = invoke("export", *options)
    assert outcome.code == 2
    assert outcome.err.startswith("error:")


def test_families_that_vllm_cannot_run_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backbone = tiny("gpt2")
    graft = trained(GRAFTS["relu"], backbone)
    with pytest.raises(ArtifactError):
        export_graft(graft, backbone, tmp_path / "model", target="vllm")
    with pytest.raises(ArtifactError):
        export_many({"relu": graft}, backbone, tmp_path / "model", target="vllm")
    block_state = tiny("block-state")
    with pytest.raises(ArtifactError):
        export_model(block_state, tmp_path / "model", target="vllm")
    assert not (tmp_path / "model").exists()
    export_graft(graft, backbone, tmp_path / "model")
    assert "gpt2" in caplog.text
    export_graft(trained(GRAFTS["lora"], backbone), backbone, tmp_path / "merged", target="vllm")


def test_a_variable_that_vllm_needs_is_part_of_the_command(tmp_path: Path) -> None:
    backbone = tiny("deepseek_v3")
    graft = trained(GRAFTS["relu"], backbone)
    folder = export_many({"relu": graft}, backbone, tmp_path / "many")
    assert "VLLM_MLA_DISABLE=1 vllm serve" in (folder / "README.md").read_text()
